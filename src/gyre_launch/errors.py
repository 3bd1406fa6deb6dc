"""Every error gyre-launch raises itself derives from `LaunchError`."""


class LaunchError(Exception):
    """Base of the launcher's errors; the message names what was expected, what came and the remedy."""


class RunFailed(LaunchError):
    """A process of the run ended before the run did."""
