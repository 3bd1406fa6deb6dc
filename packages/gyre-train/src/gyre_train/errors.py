"""Every error gyre-train raises derives from `TrainError`."""


class TrainError(Exception):
    """Base of the package's errors; the message names what was expected, what came and the remedy."""


class UnsupportedModel(TrainError):
    """A Hugging Face folder holds an architecture or an option that the trainer cannot reproduce exactly."""


class WeightsError(TrainError):
    """Weights are missing, unexpected, or of another shape or dtype than the model's."""


class CheckpointError(TrainError):
    """A checkpoint is incomplete, belongs to another run, or cannot be written."""


class NonFinite(TrainError):
    """A loss or a gradient is not a finite number; nothing was applied."""


class LayoutMismatch(TrainError):
    """A contribution does not fit the gradient buffers it should be added to."""


class PeerLost(TrainError):
    """A service this process depends on has not answered for longer than allowed."""


class FeedError(TrainError):
    """A request does not fit what the feed holds."""
