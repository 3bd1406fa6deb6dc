"""Every error gyre-agent-proxy raises derives from `ProxyError`.

The ones that answer a request carry the HTTP status; a dialect puts them into its own shape.
"""

from __future__ import annotations


class ProxyError(Exception):
    """Base of the package's errors; the message names what was expected, what came and the remedy."""

    status = 500
    kind = "server_error"  # the word a harness's client library looks at


class BadRequest(ProxyError):
    """The request cannot be served as it is; nothing was changed."""

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RenderError(BadRequest):
    """The model's chat template refuses the conversation."""


class TooLong(BadRequest):
    """The prompt leaves no room in the engines' context."""

    code = "context_length_exceeded"

    def __init__(self, message: str, param: str | None = None, *, tokens: int = 0, limit: int = 0) -> None:
        super().__init__(message, param)
        self.tokens = tokens  # of the prompt
        self.limit = limit  # what the engines take


class EngineRefused(BadRequest):
    """The engine refused the request (for example: longer than its context)."""


class UnfitEngine(ProxyError):
    """What answers at an engine's URL cannot be used: it keeps back ids or log-probabilities."""


class BudgetSpent(ProxyError):
    """The execution has sampled as many tokens as it may."""

    status = 403
    kind = "permission_error"
    code = "token_budget_exhausted"


class Unauthorized(ProxyError):
    """No API key, or one that this run did not sign."""

    status = 401
    kind = "authentication_error"


class TooBusy(ProxyError):
    """The queue is full; ask again after `retry_after` seconds."""

    status = 429
    kind = "rate_limit_error"
    retry_after = 1


class NoEngine(ProxyError):
    """No engine could be used within the configured wait."""

    status = 503
    kind = "server_error"
    retry_after = 1


class EngineError(ProxyError):
    """Engines failed a call more often than the configured limit, or sent what cannot be understood."""

    status = 502
    kind = "server_error"


class InvariantError(ProxyError):
    """Exact tokens would be violated; the call is refused rather than recorded wrongly."""


class ModelError(ProxyError):
    """The model folder lacks what rendering needs."""


class CaptureError(ProxyError):
    """Recorded traffic cannot be read."""


class RoleTableError(ProxyError):
    """A role table cannot be read."""


class KeyFileError(ProxyError):
    """The run's secret cannot be read or made."""


class RecordError(ProxyError):
    """A call cannot be written to its log; its answer is not delivered."""


class ExecutionEnded(ProxyError):
    """The execution was closed by its runner; its log is complete."""

    status = 403
    kind = "permission_error"


class LinkFailed(ProxyError):
    """The proxy can no longer follow the scheduler."""


class ListenError(ProxyError):
    """The server's address cannot be used."""
