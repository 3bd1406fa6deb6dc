"""Every error the runner raises derives from `RunnerError`."""

from gyre_agent_proxy.errors import ProxyError


class RunnerError(ProxyError):
    """Base; the message names what was expected, what came and the remedy."""


class TaskError(RunnerError):
    """A task folder cannot be used."""


class HarnessError(RunnerError):
    """The harness command cannot do its work at all; running it again would not help."""


class SandboxError(RunnerError):
    """The sandbox that the configuration asks for cannot be had."""


class LedgerError(RunnerError):
    """An execution was asked to make a step its state does not allow."""
