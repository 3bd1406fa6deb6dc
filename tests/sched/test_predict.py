"""Durations, what is left of them, and the pace of training."""

import random

import pytest

from gyre_sched.order import longest_first
from gyre_sched.pace import Pace
from gyre_sched.predict import Durations, Running, TaskLengths


def learned(*bursts):
    durations = Durations()
    for n, burst in enumerate(bursts):
        for i, seconds in enumerate(burst):
            durations.add(f"{n}-{i}", seconds)
        durations.turn()
    return durations


@pytest.mark.parametrize(
    ("share", "age", "total"),
    [(0.0, 0, 1), (0.5, 0, 3), (0.9, 0, 4), (0.5, 1, 3), (0.5, 2.5, 4), (0.9, 3, 4), (0.5, 4, None), (0.5, 9, None)],
)
def test_the_quantile_is_taken_over_the_durations_that_exceed_the_age(share, age, total):
    assert learned([3, 1, 4, 2]).quantile(share, age) == total


def test_durations_of_a_burst_count_when_it_is_over():
    durations = learned([10.0])
    durations.add("short", 1.0)
    assert durations.quantile(0.0) == 10.0
    durations.turn()
    assert durations.quantile(0.0) == 1.0


def test_the_sample_of_a_burst_is_bounded_unbiased_by_order_and_the_same_every_time():
    numbers = list(range(20_000))
    up, down = Durations(), Durations()
    for i in numbers:
        up.add(f"e{i}", float(i))
    for i in reversed(numbers):
        down.add(f"e{i}", float(i))
    up.turn()
    down.turn()
    assert len(up) == len(down) == 256
    assert up.quantile(0.5) == down.quantile(0.5) == pytest.approx(10_000, rel=0.2)
    for _ in range(10):
        up.add("x", 1.0)
        up.turn()
    assert len(up) == 4, "old bursts are forgotten"


def test_a_seed_is_thinned_evenly_and_gives_way_to_what_is_learned():
    durations = Durations(float(i) for i in range(1, 100_001))
    assert len(durations) == 256
    assert durations.quantile(0.5) == pytest.approx(50_000, rel=0.01)
    for burst in range(4):
        durations.add(f"{burst}", 7.0)
        durations.turn()
    assert durations.quantile(0.99) == 7.0


def test_longest_remaining_is_what_a_look_at_every_execution_gives():
    rng = random.Random(3)
    for _ in range(200):
        durations = learned([rng.choice([rng.expovariate(0.01), 50.0]) for _ in range(rng.randint(1, 40))])
        running, starts = Running(), {}
        for i in range(rng.randint(0, 60)):
            starts[f"r{i}"] = rng.choice([rng.uniform(0, 400), 100.0])
            running.start(f"r{i}", "", starts[f"r{i}"])
        for name in list(starts)[::3]:
            assert running.end(name).at == starts.pop(name)
        share = rng.choice([0.0, 0.5, 0.9])
        totals = [(s, durations.quantile(share, 400 - s)) for s in starts.values()]
        expected = max((s + total - 400 for s, total in totals if total is not None), default=0.0)
        assert durations.longest_remaining(running, 400.0, share) == pytest.approx(expected)


def test_an_execution_ends_once_and_only_if_it_was_started():
    running = Running()
    running.start("a", "task", 5.0)
    running.start("a", "task", 9.0)
    assert running.end("b") is None
    assert running.end("a") == ("task", 5.0)
    assert running.end("a") is None
    assert len(running) == 0


def test_the_pace_counts_seconds_of_cells_that_had_work():
    pace = Pace()
    assert pace.rate is None
    pace.trainers(2, 0.0)
    pace.work(0.0, 0.0, 10.0)  # two idle cells
    assert pace.rate is None
    pace.work(100.0, 0.0, 10.0)
    pace.trainers(4, 20.0)  # 2 cells for 10 s
    pace.work(0.0, 100.0, 25.0)  # 4 for 5 s
    assert pace.rate == pytest.approx(100 / 40)
    pace.work(0.0, 100.0, 1000.0)
    assert pace.rate == pytest.approx(100 / 40)


def test_old_pace_fades_and_a_step_back_counts_nothing():
    pace = Pace()
    pace.trainers(1, 0.0)
    pace.work(10.0, 0.0, 0.0)
    pace.work(10.0, 10.0, 10.0)  # 1 a second
    for _ in range(20):
        pace.fade()
    pace.work(10.0, 0.0, 10.0)  # restored from a checkpoint
    pace.work(10.0, 30.0, 20.0)
    assert pace.rate == pytest.approx(3.0, rel=1e-3)


def test_groups_start_longest_first_and_unknown_tasks_count_as_median_ones():
    lengths, durations = TaskLengths(), Durations([1.0, 5.0, 9.0])
    assert longest_first(["a", "b"], lengths, durations) == (), "nothing is known"
    for task, seconds in (("a", 2.0), ("b", 8.0), ("b", 10.0), ("c", 5.0)):
        lengths.add(task, seconds)
    assert longest_first(["a", "new", "b", "c"], lengths, durations) == (2, 1, 3, 0)
    assert longest_first(["a", "b"], lengths, Durations()) == ()


def test_lengths_follow_a_task_that_changes_and_forget_the_oldest_task():
    lengths = TaskLengths()
    lengths.add("slow", 100.0)
    for _ in range(40):
        lengths.add("slow", 10.0)
    assert lengths["slow"] == pytest.approx(10.0, rel=0.05)
    for i in range(10_000):
        lengths.add(f"t{i}", 1.0)
    assert lengths["slow"] is None
    assert lengths["t0"] == 1.0
