"""The benchmark measures what it says: every peer sees the same execution and makes the same of it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gyre_traj import Tree, pack_ids, pack_logprobs, select

CALLS, TOKENS = 80, 16_000


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("traj_peers")


@pytest.fixture
def workload(peers: ModuleType) -> ModuleType:
    return importlib.import_module("traj_workload")


def test_workload_is_of_the_size_asked_for_and_the_same_each_time(workload: ModuleType) -> None:
    turns = workload.execution(CALLS, TOKENS, seed=3)
    tree = Tree("bench")
    for turn in turns:
        tree.add(workload.record(turn))
    assert len(turns) == CALLS
    assert tree.tokens_unique == pytest.approx(TOKENS, rel=0.05)
    assert {leaf.role for leaf in tree.leaves} == {"main", "main-summary", "sub-agent"}
    again = workload.execution(CALLS, TOKENS, seed=3)
    assert [workload.record(turn) for turn in again] == [workload.record(turn) for turn in turns]
    assert workload.record(workload.execution(CALLS, TOKENS, seed=4)[0]) != workload.record(turns[0])


def test_every_form_of_the_workload_holds_the_same_ids(workload: ModuleType) -> None:
    turns = workload.execution(CALLS, TOKENS)
    whole = [(call.prompt, call.output, call.logprobs) for _, call in workload.whole_records(turns)]
    listed = [
        (pack_ids(prompt), pack_ids(output), pack_logprobs(logprobs))
        for _, prompt, output, logprobs in workload.lists(turns)
    ]
    assert whole == listed
    assert [len(prompt + output) // 4 for prompt, output, _ in whole] == [turn.end for turn in turns]


def test_every_peer_finds_the_same_leaves_and_targets(peers: ModuleType, workload: ModuleType, tmp_path: Path) -> None:
    turns = workload.execution(CALLS, TOKENS)
    whole = [(call.prompt, call.prompt + call.output) for _, call in workload.whole_records(turns)]
    leaves = sum(not any(prompt.startswith(ids) for prompt, _ in whole) for _, ids in whole)
    drawn = importlib.import_module("traj").drawn(turns)

    sizes = {}
    for name, kind in peers.PEERS.items():
        if peers.missing(name):
            continue
        peer = kind(turns, drawn, tmp_path)
        for stage in ("add", "build", "select"):
            if stage in getattr(kind, "stages", ("add", "build", "select")):
                for _ in getattr(peer, stage)() or ():
                    pass
        if hasattr(peer, "pack"):
            peer.pack(1 << 20)
        sizes[name] = tuple(peer.size())
    assert {"gyre-traj", "naive lists"} <= sizes.keys()
    assert set(sizes.values()) == {(leaves, sizes["gyre-traj"][1])}


def test_gyre_and_the_lists_pack_the_same_targets(peers: ModuleType, workload: ModuleType, tmp_path: Path) -> None:
    turns = workload.execution(CALLS, TOKENS)
    drawn = importlib.import_module("traj").drawn(turns)
    packed = []
    for name in ("gyre-traj, as rows", "naive lists"):
        peer = peers.PEERS[name](turns, drawn, tmp_path)
        for _ in peer.add():
            pass
        peer.build()
        peer.select()
        peer.pack(1 << 20)
        packed.append(peer)
    ours = np.concatenate([step.arrays().target for step in packed[0].packed])
    theirs = np.concatenate([step["target"] for step in packed[1].packed])
    assert sorted(ours.tolist()) == sorted(theirs.tolist())


def test_stream_packs_every_target_of_every_execution(peers: ModuleType, workload: ModuleType, tmp_path: Path) -> None:
    measured = importlib.import_module("traj_stream").stream(20, 40, 2000, 4096, tmp_path)
    targets = 0
    for seed in range(1, 21):
        tree = Tree("bench")
        for turn in workload.execution(40, 2000, seed):
            tree.add(workload.record(turn))
        targets += select(tree, 5, seed=0).targets
    assert measured["executions"] == 20
    assert measured["targets"] == targets
    assert measured["micro_steps"] >= measured["tokens_packed"] / 4096
