"""How many tokens a call may sample: what it asks for, what the context leaves, what its execution may still sample."""

from __future__ import annotations

import msgspec

from gyre_agent_proxy.conversation import Sampling
from gyre_agent_proxy.errors import BudgetSpent, TooBusy, TooLong

_LEAST = 1024  # tokens: a call is not cut to less because of others under way, which may leave some of theirs


def fit(sampling: Sampling, *, prompt: int, context: int, sampled: int, reserved: int, budget: int) -> Sampling:
    """Return `sampling` with its token limit cut to what is left.

    prompt: tokens of the prompt. context: prompt + output tokens an engine takes. sampled: tokens the execution has
    sampled so far, of `budget`; reserved: tokens that its calls under way may sample at most. 0 is no bound. Raises
    `TooLong`, `BudgetSpent`, `TooBusy` where only calls under way stand in the way.
    """
    if context and prompt >= context:
        raise TooLong(
            f"the prompt has {prompt} tokens, the engines' context takes {context}; shorten it",
            "messages",
            tokens=prompt,
            limit=context,
        )
    if budget and sampled >= budget:
        raise BudgetSpent(f"the execution has sampled {sampled} tokens of the {budget} that proxy.token_budget allows")
    limits = [sampling.max_tokens]
    if context:
        limits.append(context - prompt)
    if budget:
        left = budget - sampled - reserved
        if reserved and left < min([*limits, _LEAST]):
            raise TooBusy(
                f"the execution's calls under way may sample {reserved} of the {budget - sampled} tokens that "
                "proxy.token_budget leaves it; ask again when one has ended"
            )
        limits.append(left)
    return msgspec.structs.replace(sampling, max_tokens=min(limits))
