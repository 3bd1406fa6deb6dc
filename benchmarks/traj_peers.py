"""Others that do the same job as `traj_gyre`, or a part of it, and the table of all peers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from traj_gyre import Gyre, GyreLog, GyreRows, GyreWhole, Size
from traj_workload import Turn, lists


class Verifiers:
    """The message graph of `verifiers`: `graph.prepare_turn`, `PendingTurn.commit`, then `Trace.branches`.

    Select takes `Branch.token_ids`, `.sampled_mask` and `.logprobs`; a sampled node is a target in the first branch
    taken that holds it. Messages carry a text of `characters` a token, since the graph finds prefixes by their hash.
    The package packs nothing.
    """

    requires = "verifiers"
    characters = 4

    def __init__(self, turns: list[Turn], chosen: list[str], scratch: Path) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.configs.agent import AgentConfig

        self.turns, self.chosen = turns, chosen
        task = vf.TraceTask(type="bench", data=vf.TaskData(idx=0, prompt="bench"))
        self.trace: Any = vf.Trace(task=task, agent=vf.AgentInfo(config=AgentConfig()))
        self.nodes: dict[str, int] = {}
        self.branches: list[Any] = []
        self.samples: list[tuple[list[int], list[bool], list[float]]] = []

    def add(self) -> Iterator[float]:
        import verifiers.v1 as vf
        from verifiers.v1 import graph

        conversations: list[list[Any]] = []  # of each turn: its prompt's messages
        answers: list[Any] = []
        known: dict[int, Any] = {}
        for turn, prompt, output, logprobs in lists(self.turns):
            before = [] if turn.parent is None else [*conversations[turn.parent], answers[turn.parent]]
            for message in turn.messages:
                if message.key not in known:
                    known[message.key] = self._message(message.kind, message.key, len(message.ids))
            conversation = [*before, *(known[message.key] for message in turn.messages)]
            ends = turn.prefix + np.cumsum([len(message.ids) for message in turn.messages])
            starts = [turn.prefix, *ends.tolist()]
            answer = vf.AssistantMessage(content=self._text(turn.name, len(output)))
            response = vf.Response(
                id=turn.name,
                created=0,
                model="bench",
                message=answer,
                finish_reason="stop",
                tokens=vf.TurnTokens.model_construct(
                    prompt_ids=prompt,
                    completion_ids=output,
                    completion_logprobs=logprobs,
                    message_spans=[None] * len(before) + list(zip(starts, ends.tolist(), strict=False)),
                ),
            )
            conversations.append(conversation)
            answers.append(answer)
            start = perf_counter()
            self.nodes[turn.name] = graph.prepare_turn(self.trace, conversation).commit(response)
            yield perf_counter() - start

    def build(self) -> None:
        self.branches = self.trace.branches

    def select(self) -> None:
        by_leaf = {id(branch.nodes[-1]): branch for branch in self.branches}
        trained: set[int] = set()
        for name in self.chosen:
            branch = by_leaf[id(self.trace.nodes[self.nodes[name]])]
            mask = branch.sampled_mask
            at = 0
            for node in branch.nodes:
                if node.sampled and id(node) in trained:
                    mask[at : at + len(node.mask)] = [False] * len(node.mask)
                elif node.sampled:
                    trained.add(id(node))
                at += len(node.mask)
            self.samples.append((branch.token_ids, mask, branch.logprobs))

    def size(self) -> Size:
        return Size(len(self.branches), sum(sum(mask) for _, mask, _ in self.samples))

    def _message(self, kind: str, key: int, tokens: int) -> Any:
        import verifiers.v1 as vf

        text = self._text(f"message-{key}", tokens)
        match kind:
            case "system":
                return vf.SystemMessage(content=text)
            case "tool":
                return vf.ToolMessage(tool_call_id=f"tool-{key}", content=text)
            case "assistant":
                return vf.AssistantMessage(content=text)
            case _:
                return vf.UserMessage(content=text)

    def _text(self, name: str, tokens: int) -> str:
        return name.ljust(tokens * self.characters, ".")


class VerifiersShort(Verifiers):
    """As above with texts of a few characters: what the graph costs without the hashing of the texts."""

    characters = 0


class Naive:
    """A list of calls, each with its whole ids as a Python list; prefixes compared as lists; a row a leaf.

    A call extends the newest call whose ids begin its prompt. Only the last id is compared before the slices are.
    """

    requires = ""

    def __init__(self, turns: list[Turn], chosen: list[str], scratch: Path) -> None:
        self.turns, self.chosen = turns, chosen
        self.calls: list[dict[str, Any]] = []
        self.leaves: list[dict[str, Any]] = []
        self.rows: list[tuple[list[int], list[bool], list[float]]] = []
        self.packed: list[dict[str, Any]] = []

    def add(self) -> Iterator[float]:
        for turn, prompt, output, logprobs in lists(self.turns):
            start = perf_counter()
            parent = None
            for call in reversed(self.calls):
                n = len(call["ids"])
                if n <= len(prompt) and prompt[n - 1] == call["ids"][-1] and prompt[:n] == call["ids"]:
                    parent = call
                    break
            ids = prompt + output
            self.calls.append(
                {"name": turn.name, "ids": ids, "start": len(prompt), "logprobs": logprobs, "parent": parent}
            )
            yield perf_counter() - start

    def build(self) -> None:
        parents = {id(call["parent"]) for call in self.calls}
        self.leaves = [call for call in self.calls if id(call) not in parents]

    def select(self) -> None:
        by_name = {call["name"]: call for call in self.leaves}
        trained: set[str] = set()
        for name in self.chosen:
            call: dict[str, Any] | None = by_name[name]
            assert call is not None
            ids = call["ids"]
            mask, logprobs = [False] * len(ids), [0.0] * len(ids)
            while call is not None:
                start, end = call["start"], len(call["ids"])
                logprobs[start:end] = call["logprobs"]
                if call["name"] not in trained:
                    mask[start:end] = [True] * (end - start)
                    trained.add(call["name"])
                call = call["parent"]
            self.rows.append((ids, mask, logprobs))

    def pack(self, budget: int) -> None:
        bins: list[list[int]] = []
        for i in sorted(range(len(self.rows)), key=lambda i: -len(self.rows[i][0])):
            size = len(self.rows[i][0])
            for taken in bins:
                if sum(len(self.rows[j][0]) for j in taken) + size <= budget:
                    taken.append(i)
                    break
            else:
                bins.append([i])
        for taken in bins:
            flat: dict[str, list[Any]] = {k: [] for k in ("ids", "position", "source", "target", "logprob", "row")}
            for i in taken:
                ids, mask, logprobs = self.rows[i]
                offset = len(flat["ids"])
                places = [p for p, wanted in enumerate(mask) if wanted]
                flat["ids"] += ids
                flat["position"] += range(len(ids))
                flat["source"] += [offset + p - 1 for p in places]
                flat["target"] += [ids[p] for p in places]
                flat["logprob"] += [logprobs[p] for p in places]
                flat["row"] += [i] * len(places)
            self.packed.append({name: np.array(values) for name, values in flat.items()})

    def size(self) -> Size:
        return Size(len(self.leaves), sum(sum(mask) for _, mask, _ in self.rows))


class TrlTree(Gyre):
    """Packing only: `TreeRow.fits`, `.add` and `.pack` of `trl.experimental.async_grpo.packing`, one rank.

    Rows that fit no longer close the tree and open the next, as its `TokenBudgetBatcher` does.
    """

    requires = "trl"
    stages = ("pack",)

    def __init__(self, turns: list[Turn], chosen: list[str], scratch: Path) -> None:
        import torch

        super().__init__(turns, chosen, scratch)
        for _ in self.add():
            pass
        super().select()
        self.samples = [
            {
                "input_ids": torch.tensor(row.ids.astype(np.int64)),
                "completion_mask": torch.tensor(row.target.astype(np.int64)),
                "old_log_probs": torch.tensor(row.logprobs),
                "advantage": row.advantage,
                "group_id": 0,
            }
            for row in self.rows
        ]
        self.trees: list[Any] = []

    def pack(self, budget: int) -> None:
        from trl.experimental.async_grpo.packing import TreeRow

        rows = [TreeRow()]
        for sample in self.samples:
            if rows[-1].samples and not rows[-1].fits(sample, budget):
                rows.append(TreeRow())
            rows[-1].add(sample)
        self.trees = [row.pack() for row in rows]


class TrlRows(TrlTree):
    """Packing only: `trl.data_utils.pack_dataset(…, strategy="bfd")` of a `datasets.Dataset` that is in memory."""

    def __init__(self, turns: list[Turn], chosen: list[str], scratch: Path) -> None:
        super().__init__(turns, chosen, scratch)
        import datasets
        import pyarrow as pa

        columns = {
            "input_ids": [row.ids for row in self.rows],
            "completion_mask": [row.target.astype(np.int8) for row in self.rows],
            "old_log_probs": [row.logprobs for row in self.rows],
        }
        self.dataset = datasets.Dataset(pa.table({name: pa.array(column) for name, column in columns.items()}))

    def pack(self, budget: int) -> None:
        from trl.data_utils import pack_dataset

        self.trees = [
            pack_dataset(
                self.dataset, budget, strategy="bfd", map_kwargs={"keep_in_memory": True, "load_from_cache_file": False}
            )
        ]


PEERS: dict[str, type[Any]] = {
    "gyre-traj": Gyre,
    "gyre-traj, as rows": GyreRows,
    "gyre-traj, whole prompts": GyreWhole,
    "gyre-traj, from a log": GyreLog,
    "verifiers": Verifiers,
    "verifiers, short texts": VerifiersShort,
    "naive lists": Naive,
    "TRL TreeRow": TrlTree,
    "TRL pack_dataset": TrlRows,
}


def missing(name: str) -> str:
    """The package a peer lacks, or nothing."""
    package = PEERS[name].requires
    return "" if not package or importlib.util.find_spec(package) else package
