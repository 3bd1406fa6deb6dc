"""Lets unmodified Megatron-core run where CUDA is absent.

Megatron-core 0.19 asks `torch.cuda` for devices, streams and generators, and writes `device="cuda"`, while it builds a
model, its gradient buffers and its optimizer, and while it clips and steps; its forward and backward passes do neither:

    prepare()          before the first Megatron import, once a process
    with cuda_on_cpu():  around building and stepping, in the thread that does it

Both do nothing where CUDA is available.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CUDA_TYPES = {
    f"torch.{kind}Tensor": f"torch.cuda.{kind}Tensor" for kind in ("Float", "Half", "BFloat16", "Double", "Long", "Int")
}
_prepared = False


def available() -> bool:
    """Whether this process computes on CUDA."""
    return bool(torch.cuda.is_available())


def device() -> torch.device:
    """The device a replica of this process computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if available() else torch.device("cpu")


def prepare() -> None:
    """Make Megatron importable and its CUDA queries answerable; call before the first Megatron import."""
    global _prepared
    if _prepared:
        return
    _prepared = True
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # It says at each start which optional packages it does without, and warns of every setting that will change.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.")
    if available():
        return
    # An engine's package that needs libcuda to import; Megatron takes it for usable when it finds it.
    sys.modules.setdefault("flash_mla", None)  # type: ignore[arg-type]
    _answer_for_cuda()


def _answer_for_cuda() -> None:
    """Replace the `torch.cuda` functions Megatron calls by what they mean on one CPU."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_, **__: None
    cuda.current_stream = lambda *_, **__: _Stream()
    cuda.Stream = _Stream
    cuda.Event = _Event
    cuda.stream = lambda _: contextlib.nullcontext()
    # Megatron's tracker swaps the CUDA generator's state; here the one generator there is.
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    logging.getLogger(random.__name__).setLevel(logging.CRITICAL)  # it warns that the CPU generator moved


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Answer `device="cuda"` and `.cuda()` with CPU tensors in this thread; a no-op where CUDA is available."""
    if available():
        yield
        return
    with _CudaOnCpu():
        yield


class _CudaOnCpu(TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return _CUDA_TYPES.get(result, result)  # Megatron sorts parameters by "torch.cuda.…Tensor"
        return result


def _is_cuda(where: Any) -> bool:
    return (isinstance(where, torch.device) and where.type == "cuda") or (
        isinstance(where, str) and where.startswith("cuda")
    )


class _Stream:
    """All work is done when it was asked for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Event(_Stream):
    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True
