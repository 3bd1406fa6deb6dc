"""The policy: Megatron's GPTModel with positions and attention given by the caller.

A packed micro-step is a forest laid out depth first. Token i stands at `position[i]` of its path and attends to j iff
`j <= i < end[j]`; that one rule covers separate rows, shared prefixes and branches. So RoPE follows given positions
instead of indices, and attention follows `end`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch.utils.checkpoint import checkpoint

from gyre_train.architecture import Architecture


def frequencies(arch: Architecture) -> torch.Tensor:
    """RoPE's inverse frequencies, float32 [head_dim / 2], in radians a position.

    theta^(-2i/d). Llama 3.1's scaling divides by `factor` those that turn less than low_freq_factor times over the
    original context, keeps those that turn more than high_freq_factor times, and interpolates linearly between.
    """
    exponent = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).float() / arch.head_dim
    plain = 1.0 / (arch.theta**exponent)
    if (rope := arch.scaling) is None:
        return plain
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def trees(end: torch.Tensor) -> list[tuple[int, int, torch.Tensor | None]]:
    """The trees of a forest: (first index, index after the last, mask), the mask None where the tree is a plain row.

    end: int64 [n] on the CPU. A mask is bool [m, m], True where row i may attend to column j: `j <= i < end[j]`.
    """
    found: list[tuple[int, int, torch.Tensor | None]] = []
    start, n = 0, end.numel()
    while start < n:
        stop = int(end[start])
        inner = end[start:stop]
        mask = None
        if not bool((inner == stop).all()):
            index = torch.arange(start, stop)
            mask = (index[None, :] <= index[:, None]) & (index[:, None] < inner[None, :])
        found.append((start, stop, mask))
        start = stop
    return found


class ForestAttention(MegatronModule):  # type: ignore[misc]
    """Core attention over a forest, tree by tree: tokens of different trees never meet, so the cost is Σ m² and not n².

    query [n, 1, heads, d], key and value [n, 1, groups, d]; in a mask's place `end` [n] on the CPU -> [n, 1, heads * d]
    """

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        repeat = q.size(1) // k.size(1)
        if repeat > 1:
            k, v = (t.repeat_interleave(repeat, dim=1) for t in (k, v))
        parts = [
            F.scaled_dot_product_attention(
                q[:, :, start:stop],
                k[:, :, start:stop],
                v[:, :, start:stop],
                attn_mask=None if mask is None else mask.to(q.device),
                is_causal=mask is None,
                scale=self._scale,
            )
            for start, stop, mask in trees(attention_mask)
        ]
        return torch.cat(parts, dim=2).permute(2, 0, 1, 3).flatten(2)


class Policy(GPTModel):  # type: ignore[misc]
    """A dense decoder of `arch`; parameters in `dtype`, built on the CPU where CUDA is absent."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, *, recompute: bool = False, on_cpu: bool = True) -> None:
        spec = get_gpt_layer_local_spec(qk_layernorm=arch.qk_norm, normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = ForestAttention
        super().__init__(
            config=_config(arch, dtype, recompute, on_cpu),
            transformer_layer_spec=spec,
            vocab_size=arch.vocab,
            max_sequence_length=arch.max_positions,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="none",  # given per call, see `_preprocess`
        )
        self.arch = arch
        self._frequencies = frequencies(arch)

    def _preprocess(self, *args: Any, position_ids: torch.Tensor, **kwargs: Any) -> tuple[Any, ...]:
        """As GPTModel's, with RoPE angles [s, 1, 1, d] of the given positions [1, s]."""
        out = list(super()._preprocess(*args, position_ids=position_ids, **kwargs))
        angle = torch.outer(position_ids[0].float(), self._frequencies.to(position_ids.device))
        out[1] = torch.cat((angle, angle), dim=-1)[:, None, None, :]
        return tuple(out)

    def log_probs(
        self,
        ids: torch.Tensor,
        position: torch.Tensor,
        end: torch.Tensor,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        temperature: torch.Tensor | None = None,
        chunk: int = 512,
    ) -> torch.Tensor:
        """Log-probability of `target[k]` as the token after index `source[k]`; float32 [m].

        ids, position, end: int64 [n], `end` on the CPU. source, target: int64 [m].
        temperature: float32 [m], what the logits of each target are divided by, as its sampler did (None: 1).
        Logits exist for `chunk` targets at a time, in the backward pass too.
        """

        def gather(*, hidden_states: torch.Tensor, output_layer: Any, output_weight: Any, **_: Any) -> torch.Tensor:
            hidden = hidden_states[source]  # [m, 1, h]

            def part(rows: torch.Tensor, wanted: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
                logits, _ = output_layer(rows, weight=output_weight)
                # The quotient is a tensor of its own: the loss writes into its argument.
                return -vocab_parallel_cross_entropy(logits.float() / divisor[:, None, None], wanted[:, None])[:, 0]

            divisors = hidden.new_ones(len(target), dtype=torch.float32) if temperature is None else temperature
            parts = [
                checkpoint(part, *chunks, use_reentrant=False, preserve_rng_state=False)
                for chunks in zip(hidden.split(chunk), target.split(chunk), divisors.split(chunk), strict=True)
            ]
            return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)

        out: torch.Tensor = self(ids[None], position[None], end, output_processor=gather)
        return out


def _config(arch: Architecture, dtype: torch.dtype, recompute: bool, on_cpu: bool) -> TransformerConfig:
    return TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        num_attention_heads=arch.heads,
        num_query_groups=arch.groups,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=arch.eps,
        qk_layernorm=arch.qk_norm,
        add_qkv_bias=arch.qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,  # every parameter is loaded
        use_cpu_initialization=on_cpu,
        calculate_per_token_loss=True,  # gradients are sums; the core divides once
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        # The fused kernels need CUDA extensions, and they would make the two kinds of device differ.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
    )
