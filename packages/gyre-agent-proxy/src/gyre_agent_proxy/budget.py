"""How many tokens a call may sample: what it asks for, what the context leaves, what its execution may still sample."""

from __future__ import annotations

import msgspec

from gyre_agent_proxy.conversation import Sampling
from gyre_agent_proxy.errors import BudgetSpent, TooLong


def fit(sampling: Sampling, *, prompt: int, context: int, sampled: int, budget: int) -> Sampling:
    """Return `sampling` with its token limit cut to what is left.

    prompt: tokens of the prompt. context: prompt + output tokens an engine takes. sampled: tokens the execution has
    sampled so far, of `budget`. 0 is no bound. Raises `TooLong`, `BudgetSpent`.
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
        limits.append(budget - sampled)
    return msgspec.structs.replace(sampling, max_tokens=min(limits))
