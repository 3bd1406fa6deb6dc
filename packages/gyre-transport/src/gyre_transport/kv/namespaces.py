"""Cache namespaces by weights, in an engine whose weights change under running requests.

SGLang's cache, and its page hashes, keep requests of different `extra_key` apart. Here every request gets the label of
the weights it arrived under as part of its own: one that arrives after an update meets no page of older weights. Those
that were there before go on with what they have; each of their tokens knows its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

_WHERE = "_maybe_namespace_elastic_radix_cache"  # the scheduler's own hook for new requests


def namespace_requests(label: Callable[[], str]) -> None:
    """From now on new requests of this process's scheduler belong to the namespace of `label()`.

    Raises `RuntimeError` when this SGLang has no such hook.
    """
    if not hasattr(Scheduler, _WHERE):
        raise RuntimeError(
            f"this SGLang's Scheduler has no {_WHERE}; set engine.refresh_pause = 'retract', which needs no namespaces"
        )

    def named(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
        request.extra_key = label() if request.extra_key is None else f"{request.extra_key}|{label()}"
        return original(scheduler, request)

    HookRegistry.register(f"{Scheduler.__module__}.{Scheduler.__name__}.{_WHERE}", named, HookType.AROUND)
    HookRegistry.apply_hooks()
