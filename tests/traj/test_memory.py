"""Memory: from call records to micro-steps nothing is made a token but its id and its log-probability."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from gyre_traj import Call, Packer, Span, Tree, pack_forests, pack_ids, pack_logprobs, select, weigh

CALLS, PER_CALL, SAMPLED = 80, 2500, 750  # 200,000 unique tokens


def calls(execution: str, size: int = PER_CALL) -> list[Call]:
    """A long run of calls; one in sixteen goes back a little and branches."""
    rng = np.random.default_rng(int(execution))
    made: list[Call] = []
    for number in range(CALLS):
        above = made[-3 if number % 16 == 15 else -1] if made else None
        sampled = size * SAMPLED // PER_CALL
        made.append(
            Call(
                call=f"c{number}",
                execution=execution,
                parent=above.call if above else None,
                prefix=above.prefix + (len(above.prompt) + len(above.output)) // 4 if above else 0,
                prompt=pack_ids(rng.integers(0, 150_000, size - sampled)),
                output=pack_ids(rng.integers(0, 150_000, sampled)),
                logprobs=pack_logprobs(-rng.random(sampled)),
                versions=(Span(number // 40, 0, sampled),),
                started=float(number),
            )
        )
    return made


def grown(execution: str, size: int = PER_CALL) -> Tree:
    tree = Tree(execution)
    for call in calls(execution, size):
        tree.add(call)
    return tree


@pytest.fixture
def traced() -> Iterator[None]:
    pack_forests(weigh(select(grown("0", 100), 5, seed=0), advantage=1.0).rows, 1 << 20)  # modules are imported
    gc.collect()
    gc.freeze()  # what the suite has made so far need not be looked through again
    tracemalloc.start()
    yield
    tracemalloc.stop()
    gc.enable()
    gc.unfreeze()


@pytest.mark.usefixtures("traced")
def test_build_select_and_pack_stay_under_16_bytes_a_unique_token() -> None:
    """Records take 4 bytes a context token and 8 a sampled one, and so does the packed result."""
    before, _ = tracemalloc.get_traced_memory()
    tree = grown("0")
    selection = select(tree, 5, seed=0)
    packs = pack_forests(weigh(selection, advantage=1.0).rows, 1 << 20)
    _, peak = tracemalloc.get_traced_memory()
    assert len(selection.trajectories) == 5
    assert tree.tokens_unique == CALLS * PER_CALL
    assert sum(p.tokens for p in packs) > 0.95 * tree.tokens_unique
    assert peak - before < 13 * tree.tokens_unique  # 5.2 of them are the records, 5.1 what is packed


@pytest.mark.usefixtures("traced")
def test_of_a_stream_of_executions_only_what_waits_is_kept() -> None:
    """Four executions are two budgets; twenty pass through, and Python need not look for what is unreachable."""
    gc.disable()
    packer = Packer(30_000, window=2)
    kept = []
    for number in range(20):
        packer.add(weigh(select(grown(str(number), 200), 3, seed=0), advantage=1.0).rows)
        kept.append(tracemalloc.get_traced_memory()[0])
    assert max(kept[8:]) < 1.2 * max(kept[:8])
    assert packer.pending > 30_000
