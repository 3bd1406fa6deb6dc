"""Every error gyre-traj raises derives from `TrajError`."""


class TrajError(Exception):
    """Base of the package's errors; the message names what was expected, what came and the remedy."""


class LogError(TrajError):
    """A call log cannot be opened, read or written."""


class NotALog(LogError):
    """The file is not a call log, or its format is newer than this package reads."""


class CorruptLog(LogError):
    """A record inside the log, not its tail, fails its checksum or does not decode."""


class BrokenCall(TrajError):
    """A call record contradicts itself or the calls before it; nothing was changed."""


class UnknownCall(TrajError):
    """A call id that is not in this log or tree; parents must come before their children."""


class BadOutcome(TrajError):
    """An outcome whose score and ending contradict each other, or whose score is outside [0, 1]."""


class BadIds(TrajError, ValueError):
    """Token ids that are no whole numbers in [0, 2^32)."""


class BadRow(TrajError):
    """A row or packed micro-step whose arrays do not fit together."""


class NotFinite(BadRow):
    """A log-probability or an entropy of a target is infinite or not a number."""


class BadChoice(TrajError, ValueError):
    """An option outside its choices: a loss, an aggregation, a correction, a counting, a role table."""


class NoTokenizer(TrajError):
    """A tokenizer cannot be read, or the library that reads it is not installed."""


class BadLine(TrajError):
    """A line of an imported file that is not JSON, or not what its kind of file holds."""


class OutputError(TrajError):
    """An output cannot be written, or is there already; nothing was left behind."""
