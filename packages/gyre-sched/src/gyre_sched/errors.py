"""Every error gyre-sched raises derives from `SchedError`."""


class SchedError(Exception):
    """Base of the package's errors; the message names what was expected, what came and the remedy."""


class IllegalEdge(SchedError):
    """A cell was told to take a role its present role has no edge to."""


class Refused(SchedError):
    """A request contradicts what the scheduler knows; nothing was changed."""


class JournalError(SchedError):
    """The journal cannot be opened, written or trusted."""
