"""Micro-steps count once, whoever computes them and whoever dies."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gyre_train.errors import FeedError
from gyre_train.feed.leases import Leases, Offer, State, Step
from gyre_train.protocol import Exhausted, Ok, Reopened, Taken, Wait

CORE, SAT, OTHER = 0, 1, 2


def make(n: int, *, sealed: bool = True, satellites: tuple[int, ...] = (SAT,)) -> Leases:
    leases = Leases(core=CORE, lease=10.0, now=0.0)
    for _ in range(n):
        leases.add()
    if sealed:
        leases.seal()
    for cell in satellites:
        assert leases.join(cell, 0.0) is None
    return leases


def claim(leases: Leases, cell: int, now: float = 0.0) -> tuple[int, int]:
    step = leases.claim(cell, now)
    assert isinstance(step, Step), step
    return step.id, step.attempt


def complete(leases: Leases, cell: int, pair: tuple[int, int], now: float = 0.0, loss: float = 1.0) -> bool:
    return leases.complete(cell, pair, now, loss=loss, seconds=0.0, metrics={}).kept


def test_core_alone_counts_at_once() -> None:
    leases = make(2, satellites=())
    for _ in range(2):
        assert complete(leases, CORE, claim(leases, CORE))
    assert isinstance(leases.claim(CORE, 0.0), Exhausted)
    assert leases.collect(0.0) == ()
    assert leases.collected((), (), 0.0) == Ok()
    assert leases.finished
    assert leases.loss == 2.0


def test_the_core_adds_offers_in_cell_order() -> None:
    leases = make(3, satellites=(OTHER, SAT))
    pairs = {cell: claim(leases, cell) for cell in (OTHER, SAT, CORE)}
    assert all(complete(leases, cell, pair) for cell, pair in pairs.items())
    assert isinstance(leases.offer(OTHER, (pairs[OTHER],), b"o", 0.0), Wait)
    assert isinstance(leases.collect(0.0), Wait)
    assert isinstance(leases.offer(SAT, (pairs[SAT],), b"s", 0.0), Wait)
    offers = leases.collect(0.0)
    assert offers == (Offer(SAT, frozenset({pairs[SAT]}), b"s"), Offer(OTHER, frozenset({pairs[OTHER]}), b"o"))
    assert leases.collect(0.0) == offers  # asked again: the reply was lost
    assert not leases.finished
    assert leases.collected((SAT, OTHER), (), 0.0) == Ok()
    assert leases.collected((SAT, OTHER), (), 0.0) == Ok()
    assert leases.finished
    assert leases.offer(SAT, (pairs[SAT],), b"s", 0.0) == Taken()
    assert complete(leases, SAT, pairs[SAT])  # a late repetition changes nothing
    assert leases.renew(SAT, 0.0) == Ok()


def test_exhausted_only_when_sealed() -> None:
    leases = make(1, sealed=False)
    pair = claim(leases, CORE)
    assert isinstance(leases.claim(SAT, 0.0), Wait)
    complete(leases, CORE, pair)
    assert isinstance(leases.claim(CORE, 0.0), Wait)
    assert isinstance(leases.collect(0.0), Wait)
    leases.add()
    leases.seal()
    assert claim(leases, SAT) == (1, 0)
    assert isinstance(leases.claim(CORE, 0.0), Exhausted)
    with pytest.raises(FeedError, match="sealed"):
        leases.add()


def test_a_lost_claim_reply_gives_the_same_micro_step_again() -> None:
    leases = make(2)
    first = claim(leases, SAT)
    assert claim(leases, SAT) == first
    assert complete(leases, SAT, first)
    assert claim(leases, SAT) != first


@pytest.mark.parametrize("completed", [0, 1, 2])
def test_a_lost_satellite_returns_everything(completed: int) -> None:
    leases = make(3)
    mine = []
    for _ in range(completed):
        mine.append(claim(leases, SAT))
        assert complete(leases, SAT, mine[-1])
    mine.append(claim(leases, SAT))
    leases.renew(CORE, 10.0)
    assert leases.expire(10.0) == ()
    assert leases.expire(10.1) == (SAT,)
    assert leases.queued == 3
    assert leases.returned == completed + 1
    assert leases.renew(SAT, 10.2) == Ok(kept=False)
    assert not complete(leases, SAT, mine[0], 10.2)
    assert isinstance(leases.claim(SAT, 10.2), Exhausted)
    assert leases.offer(SAT, tuple(mine), b"", 10.2) == Taken(kept=False)
    assert claim(leases, CORE, 10.3) == (0, 1)


def test_work_of_a_lost_satellite_reopens_the_batch_for_the_core() -> None:
    leases = make(2)
    sat, core = claim(leases, SAT), claim(leases, CORE)
    complete(leases, SAT, sat)
    complete(leases, CORE, core)
    assert isinstance(leases.claim(CORE, 9.0), Exhausted)
    assert isinstance(leases.collect(9.0), Wait)
    assert leases.expire(11.0) == (SAT,)
    assert isinstance(leases.collect(11.0), Reopened)
    complete(leases, CORE, claim(leases, CORE, 11.0), 11.0)
    assert leases.collect(11.0) == ()
    assert leases.finished


def test_an_offer_the_core_could_not_read_reopens() -> None:
    leases = make(2, satellites=(SAT, OTHER))
    a, b = claim(leases, SAT), claim(leases, OTHER)
    complete(leases, SAT, a)
    complete(leases, OTHER, b)
    leases.offer(SAT, (a,), b"", 0.0)
    leases.offer(OTHER, (b,), b"", 0.0)
    assert len(leases.collect(0.0)) == 2  # type: ignore[arg-type]
    assert leases.expire(100.0) == ()  # the core is reading: it says which were lost
    assert isinstance(leases.collected((OTHER,), (SAT,), 100.0), Reopened)
    assert leases.offer(OTHER, (b,), b"", 100.0) == Taken()
    assert leases.offer(SAT, (a,), b"", 100.0) == Taken(kept=False)
    assert claim(leases, CORE, 100.0) == (a[0], a[1] + 1)
    complete(leases, CORE, (a[0], a[1] + 1), 100.0)
    assert leases.collect(100.0) == ()  # what was added is not handed a second time
    assert leases.finished


def test_a_repeated_collected_still_says_that_work_came_back() -> None:
    leases = make(2)
    pair = claim(leases, SAT)
    complete(leases, SAT, pair)
    leases.offer(SAT, (pair,), b"", 0.0)
    complete(leases, CORE, claim(leases, CORE))
    assert len(leases.collect(0.0)) == 1  # type: ignore[arg-type]
    assert leases.join(OTHER, 0.0) is not None  # nothing is queued
    assert isinstance(leases.collected((), (SAT,), 0.0), Reopened)
    assert leases.join(OTHER, 0.0) is None
    claim(leases, OTHER)  # the queue is empty again when the core repeats itself
    assert isinstance(leases.collected((), (SAT,), 0.0), Reopened)


def test_a_core_whose_claim_was_not_answered_is_sent_back_to_claim() -> None:
    leases = make(1)
    pair = claim(leases, CORE)  # the reply is lost, and the core collects
    assert isinstance(leases.collect(0.0), Reopened)
    assert claim(leases, CORE) == pair


def test_the_core_answers_for_what_it_was_handed() -> None:
    leases = make(1)
    pair = claim(leases, SAT)
    complete(leases, SAT, pair)
    leases.offer(SAT, (pair,), b"", 0.0)
    leases.collect(0.0)
    with pytest.raises(FeedError, match=r"\[1\].*\[1, 2\]"):
        leases.collected((SAT, OTHER), (), 0.0)
    with pytest.raises(FeedError):
        leases.collected((), (), 0.0)
    assert leases.collected((SAT,), (), 0.0) == Ok()


def test_a_satellite_that_leaves_early_gives_back_what_it_did_not_compute() -> None:
    leases = make(3)
    done = claim(leases, SAT)
    complete(leases, SAT, done)
    half = claim(leases, SAT)
    assert isinstance(leases.offer(SAT, (done,), b"", 0.0), Wait)
    assert isinstance(leases.claim(SAT, 0.0), Exhausted)
    assert leases.queued == 2
    assert claim(leases, CORE) == (half[0], 1)
    assert not complete(leases, SAT, half)


def test_an_empty_hand_over_is_answered_at_once() -> None:
    leases = make(1)
    pair = claim(leases, SAT)
    assert leases.offer(SAT, (), b"", 0.0) == Taken()
    assert not leases.is_member(SAT)
    assert claim(leases, CORE) == (pair[0], 1)
    assert leases.offer(SAT, (), b"", 0.0) == Taken()  # repeated


def test_sums_with_a_stale_micro_step_are_refused_whole() -> None:
    leases = make(2)
    good = claim(leases, SAT)
    complete(leases, SAT, good)
    assert leases.offer(SAT, (good, (1, 0)), b"", 0.0) == Taken(kept=False)
    assert leases.queued == 2


def test_a_satellite_that_joins_again_lost_its_sums() -> None:
    leases = make(2)
    pair = claim(leases, SAT)
    complete(leases, SAT, pair)
    assert leases.join(SAT, 1.0) is None
    assert claim(leases, SAT, 1.0) == (pair[0], 1)
    assert not complete(leases, SAT, pair, 1.0)


def test_nobody_joins_when_nothing_is_left() -> None:
    leases = make(1, satellites=())
    claim(leases, CORE)
    assert isinstance(leases.join(SAT, 0.0), Wait)


def test_satellites_wait_while_the_core_is_silent() -> None:
    leases = make(2)
    leases.renew(SAT, 11.0)
    assert isinstance(leases.claim(SAT, 11.0), Wait)
    assert isinstance(leases.join(OTHER, 11.0), Wait)
    leases.renew(CORE, 11.0)
    assert claim(leases, SAT, 11.0) == (0, 0)


def test_reset_takes_back_everything() -> None:
    leases = make(3)
    core, sat = claim(leases, CORE), claim(leases, SAT)
    complete(leases, CORE, core)
    complete(leases, SAT, sat)
    leases.offer(SAT, (sat,), b"", 0.0)
    leases.reset(5.0)
    assert [s.state for s in leases.steps] == [State.QUEUED] * 3
    assert [s.attempt for s in leases.steps] == [1, 1, 0]
    assert leases.loss == 0.0
    assert not complete(leases, CORE, core, 5.0)
    assert leases.offer(SAT, (sat,), b"", 5.0) == Taken(kept=False)
    for _ in range(3):
        complete(leases, CORE, claim(leases, CORE, 5.0), 5.0)
    assert leases.collect(5.0) == ()
    assert leases.finished


@pytest.mark.parametrize("act", ["join", "offer"])
def test_the_core_is_no_satellite(act: str) -> None:
    leases = make(1)
    with pytest.raises(FeedError, match="core"):
        leases.join(CORE, 0.0) if act == "join" else leases.offer(CORE, (), b"", 0.0)


def test_an_unknown_micro_step_is_an_error() -> None:
    leases = make(1)
    with pytest.raises(FeedError, match="7"):
        complete(leases, CORE, (7, 0))


class Cells(RuleBasedStateMachine):
    """Any interleaving of cells that claim, complete, lose replies, die, leave and rejoin, and a core that may restart.

    The model keeps what no feed can see: which micro-steps each process really holds in its sums.
    """

    satellites = (1, 2, 3)

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.leases = Leases(core=CORE, lease=10.0, now=0.0)
        self.sums: dict[int, list[tuple[int, int]]] = {CORE: []}  # cell -> pairs in its own sums; alive cells only
        self.claimed: dict[int, tuple[int, int]] = {}
        self.offered: set[int] = set()
        self.groups = 4

    def drop(self, cell: int) -> None:
        self.sums.pop(cell, None)
        self.claimed.pop(cell, None)
        self.offered.discard(cell)

    @precondition(lambda self: self.groups > 0)
    @rule(n=st.integers(0, 3))
    def group_arrives(self, n: int) -> None:
        for _ in range(n):
            self.leases.add()
        self.groups -= 1
        if not self.groups:
            self.leases.seal()

    @rule(cell=st.sampled_from(satellites))
    def join(self, cell: int) -> None:
        if self.leases.join(cell, self.now) is None:
            self.drop(cell)
            self.sums[cell] = []

    @rule(cell=st.sampled_from((CORE, *satellites)), reply_lost=st.booleans())
    def work(self, cell: int, reply_lost: bool) -> None:
        if cell not in self.sums or cell in self.offered:
            return
        if cell not in self.claimed:
            step = self.leases.claim(cell, self.now)
            if not isinstance(step, Step) or reply_lost:
                return
            self.claimed[cell] = (step.id, step.attempt)
            return
        pair = self.claimed.pop(cell)
        self.sums[cell].append(pair)
        kept = complete(self.leases, cell, pair, self.now)
        if reply_lost:
            kept = complete(self.leases, cell, pair, self.now)
        if not kept:
            assert cell != CORE
            self.drop(cell)

    @rule(cell=st.sampled_from(satellites))
    def hand_over(self, cell: int) -> None:
        if cell not in self.sums:
            return
        self.claimed.pop(cell, None)
        reply = self.leases.offer(cell, tuple(self.sums[cell]), b"", self.now)
        if isinstance(reply, Taken):
            if reply.kept:
                assert all(pair in self.sums[CORE] for pair in self.sums[cell])
            self.drop(cell)
        else:
            self.offered.add(cell)

    @rule(cell=st.sampled_from(satellites))
    def die(self, cell: int) -> None:
        self.drop(cell)

    @rule(seconds=st.floats(0.1, 12.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for cell in self.sums:
            self.leases.renew(cell, self.now)
        self.leases.expire(self.now)

    @rule(readable=st.booleans(), reply_lost=st.booleans())
    def collect(self, readable: bool, reply_lost: bool) -> None:
        if CORE in self.claimed:
            return
        offers = self.leases.collect(self.now)
        if not isinstance(offers, tuple) or reply_lost:
            return
        read = [o for o in offers if o.cell in self.sums or readable]  # a dead process's memory may outlive it a while
        for offer in read:
            self.sums[CORE].extend(offer.pairs)
        cells = tuple(o.cell for o in read)
        lost = tuple(o.cell for o in offers if o.cell not in cells)
        self.leases.collected(cells, lost, self.now)

    @rule()
    def core_restarts(self) -> None:
        self.leases.reset(self.now)
        self.drop(CORE)
        self.sums[CORE] = []

    @invariant()
    def nothing_counts_twice(self) -> None:
        ids = [id_ for id_, _ in self.sums[CORE]]
        assert len(ids) == len(set(ids))

    @invariant()
    def counted_is_what_the_core_holds(self) -> None:
        counted = {(s.id, s.attempt) for s in self.leases.steps if s.state is State.COUNTED}
        assert counted == set(self.sums[CORE])

    def teardown(self) -> None:
        """While the core lives the batch closes, whatever happened before."""
        while self.groups:
            self.group_arrives(1)
        for _ in range(3 * len(self.leases.steps) + 10):
            if self.leases.finished:
                break
            for cell in self.satellites:
                self.drop(cell)
            self.time_passes(11.0)
            self.work(CORE, reply_lost=False)
            self.collect(readable=False, reply_lost=False)
        assert self.leases.finished
        assert sorted(id_ for id_, _ in self.sums[CORE]) == [s.id for s in self.leases.steps]


TestCells = Cells.TestCase
TestCells.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
