"""Every error gyre-sched raises derives from `SchedError`."""


class SchedError(Exception):
    """Base of the package's errors; the message names what was expected, what came and the remedy."""


class IllegalEdge(SchedError):
    """A cell was told to take a role its present role has no edge to."""


class Refused(SchedError):
    """A request contradicts what the scheduler knows; nothing was changed."""


class JournalError(SchedError):
    """The journal cannot be opened, written or trusted."""


class EngineError(SchedError):
    """Base of what goes wrong with one engine; the message names the engine."""


class EngineStartError(EngineError):
    """An engine could not be started or never became healthy."""


class EngineUnreachable(EngineError):
    """An engine's HTTP server cannot be reached, or it broke the connection."""


class EngineTimeout(EngineError):
    """An engine did not answer before the deadline; it may still carry the request out."""


class EngineRefused(EngineError):
    """An engine answered with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class RefreshError(EngineError):
    """An engine cannot be given the weights it was meant to serve; it still serves the ones it had."""


class WeightsUnknown(EngineError):
    """An update of an engine's weights failed half-way: it must not serve again before it was restarted."""


class TrainerError(SchedError):
    """A trainer did not become what it was ordered to be, or ended for good."""


class TraceError(SchedError):
    """A trace of agent runs cannot be read."""


class ScenarioError(SchedError):
    """A simulation was asked for that makes no sense, or did not come to an end."""


class Superseded(SchedError):
    """Another scheduler of a later term gives the run's orders; this one must end."""
