"""One full copy of the policy with its gradient sums, and in the core cell the optimizer.

    replica = Replica(config, architecture.read(path), optimizer=True, steps=6)
    replica.load_weights(hf.read_folder(path), version=0)
    replica.zero()
    loss, metrics = replica.accumulate(packed)      # any number of times, here or in satellites
    replica.add_gradients(index, sums)              # a satellite's, buffer by buffer
    norm = replica.step(executions)                 # version + 1

A replica is a torch.distributed world of its own (data parallel 1): nothing but gradients and weights ever crosses
cells, so members come and go without a process group noticing. Everything here runs in one thread.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gyre_train import checkpoint, cpu, hf
from gyre_train.architecture import Architecture
from gyre_train.config import TrainConfig
from gyre_train.errors import CheckpointError, LayoutMismatch, NonFinite, TrainError
from gyre_train.schedule import learning_rate
from gyre_traj.errors import NotFinite
from gyre_traj.packing import Packed
from gyre_traj.torch import loss_sum

cpu.prepare()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402

from gyre_train.model import Policy  # noqa: E402

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_MAIN = "main"


class Replica:
    """See the module. `version` counts optimizer steps; -1 until weights are loaded.

    optimizer: whether this replica steps (the core); a satellite holds no optimizer state. steps: of the whole run.
    """

    def __init__(self, config: TrainConfig, arch: Architecture, *, optimizer: bool, steps: int) -> None:
        self.config = config
        self.arch = arch
        self.version = -1
        self.steps = steps
        self.dtype = _DTYPES[config.dtype]
        self.learning_rate = 0.0  # of the last step
        self._limit = config.max_length or arch.max_positions
        torch.set_num_threads(config.threads)
        join_world(config.seed)
        with cpu.cuda_on_cpu():
            policy = Policy(arch, self.dtype, recompute=config.recompute, on_cpu=not cpu.available())
            policy.to(device=cpu.device(), dtype=self.dtype)
            self._ddp: Any = DistributedDataParallel(
                policy.config,
                DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
                policy,
            )
            self._optimizer: Any = get_megatron_optimizer(_adam(config, self.dtype), [self._ddp]) if optimizer else None
        self.policy = policy

    # --- weights -----------------------------------------------------------------------------------------------------

    def load_weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Take weights by Hugging Face name, converted to the parameters' dtype.

        Raises `WeightsError`, changing nothing.
        """
        hf.load(self.arch, self.policy.named_parameters(), tensors)
        if self._optimizer is not None:
            self._optimizer.reload_model_params()
        self.version = version

    def weights(self) -> dict[str, torch.Tensor]:
        """The parameters by Hugging Face name, in their own dtype, contiguous on the CPU."""
        return {
            key: tensor.cpu()
            for name, parameter in self.policy.named_parameters()
            for key, tensor in hf.from_megatron(self.arch, name, parameter.detach())
        }

    # --- gradients ---------------------------------------------------------------------------------------------------

    def zero(self) -> None:
        """Empty the sums."""
        self._ddp.zero_grad_buffer()

    def release(self) -> None:
        """Give the device what the allocator keeps for later: the cell's engine is about to need it."""
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()

    def log_probs(self, packed: Packed) -> torch.Tensor:
        """Log-probabilities of `packed`'s targets under the current weights, float32, in the order of its targets."""
        arrays = packed.arrays()
        if packed.tokens and (deepest := int(arrays.position.max())) >= self._limit:
            raise TrainError(
                f"a micro-step holds position {deepest}, the trainer takes positions below {self._limit}; "
                "raise train.max_length, or lower the harness's context limit"
            )
        device = cpu.device()
        ids, position, source, target = (
            torch.from_numpy(a.astype(np.int64)).to(device)
            for a in (arrays.ids, arrays.position, arrays.source, arrays.target)
        )
        end = torch.from_numpy(arrays.end.astype(np.int64))
        log_probs: torch.Tensor = self.policy.log_probs(
            ids,
            position,
            end,
            source,
            target,
            temperature=torch.from_numpy(arrays.temperature.copy()).to(device),
            chunk=self.config.logit_chunk,
        )
        return log_probs

    def accumulate(self, packed: Packed) -> tuple[float, dict[str, float]]:
        """Add the gradient of Σ w·ℓ over `packed`'s targets to the sums; returns (Σ w·ℓ, metrics as of
        `gyre_traj.torch.loss_sum`).

        Raises `NonFinite`: the sums are then spoilt, zero them.
        """
        log_probs = self.log_probs(packed)
        # Nothing is updated within a batch, so the trainer's own old log-probabilities are these.
        old = log_probs.detach() if self.config.loss.old == "recompute" else None
        try:
            loss, metrics = loss_sum(self.config.loss, packed, log_probs, old, version=self.version)
        except NotFinite as e:
            raise NonFinite(f"at version {self.version}, {e}") from e
        if not math.isfinite(value := float(loss.detach())):
            raise NonFinite(
                f"the loss of a micro-step is {value!r} at version {self.version}; look at its log-probabilities"
            )
        if loss.requires_grad:  # a micro-step may hold no target
            loss.backward()
        return value, metrics

    def gradient_buffers(self) -> list[torch.Tensor]:
        """The sums: contiguous float32 buffers, the same in number and size in every replica of one layout."""
        return [b.grad_data for b in (*self._ddp.buffers, *self._ddp.expert_parallel_buffers)]

    def add_gradients(self, index: int, sums: torch.Tensor) -> None:
        """Add another replica's buffer `index`. Raises `LayoutMismatch`, changing nothing."""
        buffers = self.gradient_buffers()
        if not 0 <= index < len(buffers) or sums.shape != buffers[index].shape or sums.dtype != torch.float32:
            raise LayoutMismatch(
                f"expected float32 sums for buffers of {[b.numel() for b in buffers]} elements, got {sums.dtype} "
                f"{tuple(sums.shape)} for buffer {index}; cells must share [train] and [model]"
            )
        buffers[index].add_(sums.to(buffers[index].device))

    # --- the step ----------------------------------------------------------------------------------------------------

    def step(self, denominator: int) -> float:
        """Divide the sums by `denominator` (|E|), clip, update, and count a version; returns the gradient's norm before
        clipping (Megatron's rule: times min(1, clip / (norm + 1e-6))).

        With no execution (0) nothing is updated; the version still advances. The sums are used up: zero them.
        Raises `NonFinite` before anything is updated.
        """
        optimizer = self._stepping()
        self.learning_rate = learning_rate(self.config.optimizer, self.version, self.steps)
        if denominator == 0:
            self.version += 1
            return 0.0
        with cpu.cuda_on_cpu():
            self._scale(1.0 / denominator)
            optimizer.prepare_grads()
            try:
                norm = self._update(optimizer)
            finally:
                # In fp32 the gradients Adam saw are the buffers themselves: left in place, the next backward pass would
                # add to them first and then add the sum to itself.
                optimizer.zero_grad()
        self.version += 1
        return norm

    def _update(self, optimizer: Any) -> float:
        norm = float(optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise NonFinite(
                f"the gradient norm of step {self.version} is {norm!r}; resume from the last checkpoint with a lower "
                "learning rate, or look for log-probabilities that are not finite"
            )
        if (clip := self.config.optimizer.clip_grad) and (ratio := clip / (norm + 1e-6)) < 1.0:
            self._scale(ratio)
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate
            group["weight_decay"] = self.config.optimizer.weight_decay * group.get("wd_mult", 1.0)  # 0: norms, biases
        optimizer.step_with_ready_grads()
        return norm

    def _scale(self, factor: float) -> None:
        for buffer in self.gradient_buffers():
            buffer.mul_(factor)

    def _stepping(self) -> Any:
        if self._optimizer is None:
            raise TrainError("this replica is a satellite's and has no optimizer; only the core steps and saves")
        return self._optimizer

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[checkpoint.Meta, checkpoint.State]:
        """Everything a resumed run needs, for `checkpoint.save`; the tensors are views."""
        adam = self._stepping().chained_optimizers[0].optimizer
        state: checkpoint.State = {_MAIN: {}}
        adam_step = 0.0
        for name, main in self._main_parameters():
            state[_MAIN][name] = main
            for key, value in adam.state.get(main, {}).items():
                if key == "step":
                    adam_step = float(value)
                else:
                    state.setdefault(key, {})[name] = value
        meta = checkpoint.Meta(
            version=self.version,
            model=self.arch.model_type,
            dtype=self.config.dtype,
            adam_step=adam_step,
            parts=tuple(state),
            generator=torch.get_rng_state().numpy().tobytes(),
        )
        return meta, state

    def load_state(self, meta: checkpoint.Meta, state: checkpoint.State) -> None:
        """Continue exactly where `state` was taken. Raises `CheckpointError` before anything is changed."""
        adam = self._stepping().chained_optimizers[0].optimizer
        mains = dict(self._main_parameters())
        if meta.dtype != self.config.dtype:
            raise CheckpointError(
                f"the checkpoint was trained in {meta.dtype!r}, train.dtype is {self.config.dtype!r}; set it back"
            )
        for part, tensors in state.items():
            if {n: t.shape for n, t in tensors.items()} != {n: p.shape for n, p in mains.items()}:
                raise CheckpointError(f"the checkpoint's {part!r} does not fit the model; is it of another model?")
        with torch.no_grad():
            for name, main in mains.items():
                main.copy_(state[_MAIN][name])
                moments = {p: t[name].to(main.device).clone() for p, t in state.items() if p != _MAIN}
                if moments:
                    adam.state[main] = {"step": torch.tensor(meta.adam_step), **moments}
            for parameter in self.policy.parameters():
                if (main := getattr(parameter, "main_param", None)) is not None:
                    parameter.copy_(main)
        torch.set_rng_state(torch.frombuffer(bytearray(meta.generator), dtype=torch.uint8))
        self.version = meta.version

    def _main_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """The fp32 parameters Adam updates, by Megatron name."""
        return [
            (n, getattr(p, "main_param", None) if self.dtype != torch.float32 else p)
            for n, p in self.policy.named_parameters()
        ]


def join_world(seed: int) -> None:
    """Make this process a torch.distributed world of one rank, with Megatron's groups. Idempotent."""
    if torch.distributed.is_initialized():
        return
    torch.distributed.init_process_group(
        "nccl" if cpu.available() else "gloo",
        rank=0,
        world_size=1,
        store=torch.distributed.HashStore(),  # within the process: no port, no file
    )
    with cpu.cuda_on_cpu():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)


def leave_world() -> None:
    """Undo `join_world`."""
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        with contextlib.suppress(Exception):  # nobody else is in it
            torch.distributed.destroy_process_group()


def _adam(config: TrainConfig, dtype: torch.dtype) -> OptimizerConfig:
    o = config.optimizer
    return OptimizerConfig(
        optimizer="adam",
        lr=o.lr,
        min_lr=o.min_lr,
        adam_beta1=o.betas[0],
        adam_beta2=o.betas[1],
        adam_eps=o.eps,
        weight_decay=o.weight_decay,
        clip_grad=0.0,  # done in `step`, on the whole buffers
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=False,
    )
