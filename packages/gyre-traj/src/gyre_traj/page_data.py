"""What the page of an execution draws: its bars, calls and texts, as plain data of bounded size.

All prompts and outputs together show at most `TOKENS` tokens: the longer ones are cut in their middle, to the greatest
length for which that holds, and none shows more than `LONGEST`. Curves of log-probabilities come in at most `BINS` bins
a call, fewer when there are many calls.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre_traj.log import Log
from gyre_traj.page_layout import Bar, lay_out
from gyre_traj.records import Call, unpack_ids, unpack_logprobs
from gyre_traj.report import TreeReport, describe, origins, short_names
from gyre_traj.selection import select
from gyre_traj.text import Decoder
from gyre_traj.tree import Tree

TOKENS = 1 << 18  # of text in a page
LONGEST = 4096  # of a prompt or an output that is shown whole, whatever room there is
BINS = 240  # of a curve
_ALL_BINS = 1 << 16
_SURPRISES = 8  # tokens listed a call
_SURPRISING = math.log(0.1)
_FIELDS = 40  # of a request or of its sampling parameters
_CLIP = 300  # characters of a value of a request or of how an attempt ended


class Passage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of a prompt or an output: its first, `cut` left out, its last."""

    head: list[int]  # indices into `PageData.tokens`
    tail: list[int] = []
    cut: int = 0
    head_logprobs: list[int | None] = []  # hundredths of a nat
    tail_logprobs: list[int | None] = []


class Curve(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Log-probabilities of an output in hundredths of a nat; None where not finite."""

    mean: int | None = None  # of all
    means: list[int | None] = []  # of each bin: equal runs of tokens, the last may be shorter
    lows: list[int | None] = []  # least of each bin; empty where a bin is a token
    width: int = 1  # tokens a bin
    surprises: list[tuple[int, int, int]] = []  # the least likely tokens: place in the output, value, token


class PageCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call; times are seconds since `PageData.began`."""

    call: str
    name: str  # cut to what tells it apart
    role: str
    parent: int = -1  # the call it names, by index
    bar: int = -1  # where it ends
    prefix: int = 0
    prompt: int = 0
    output: int = 0
    delivered: bool = False
    untrainable: str = ""  # why
    origin: str = ""
    dialect: str = ""
    finish: str = ""
    stop: str = ""
    started: float = 0.0
    ended: float = 0.0
    attempts: list[tuple[int, int, str]] = []  # engine, tokens, end
    versions: list[tuple[int, int, int]] = []
    inserted: list[tuple[int, int]] = []
    sampling: int = 0  # index into `PageData.settings`
    request: int = 0
    tools: str = ""
    template: str = ""
    before: Passage  # the prompt after the parent's ids
    after: Passage  # the output
    curve: Curve | None = None


class PageData(msgspec.Struct, frozen=True, kw_only=True):
    """Everything in the page."""

    report: TreeReport
    model: str
    created: float
    torn: int
    skipped: int
    began: float  # unix seconds of the first call; 0: no times
    took: float  # seconds from the first call's start to the last one's end
    apart: int  # tokens that a row a call would hold: every prompt and output whole
    engines: list[str]
    roles: list[str]
    settings: list[list[tuple[str, str]]]
    tokens: list[tuple[int, str | None, bool]]  # id, text (None: no tokenizer), special
    bars: list[Bar]
    calls: list[PageCall]
    selected: list[tuple[int, int]]  # leaf, targets: as a selection would draw them
    left_out: dict[str, int]
    j_max: int | None
    seed: int
    limit: int  # longest passage shown whole
    cut: int  # passages that are not


def page_data(log: Log, *, decoder: Decoder | None, j_max: int | None, seed: int) -> PageData:
    """Gather what the page of a log's execution shows. Raises `TrajError` as `Tree.from_log` and `select` do."""
    tree = Tree.from_log(log)
    calls = list(tree.calls.values())
    index = {call.call: i for i, call in enumerate(calls)}
    bars, ends = lay_out(tree, index)
    sizes = [len(raw) // 4 for call in calls for raw in (call.prompt, call.output)]
    limit = longest_passage(sizes, TOKENS, LONGEST)
    tokens = _Tokens(decoder)
    engines, roles, settings = _Table[str](), _Table[str](), _Table[tuple[tuple[str, str], ...]]()
    times = [call.started for call in calls if _time(call.started)]
    began = min(times, default=0.0)
    took = max((call.ended for call in calls if _time(call.ended)), default=began) - began
    selection = select(tree, j_max, seed)
    leaves = {leaf.call.call: i for i, leaf in enumerate(tree.leaves) if leaf.call}
    names, origin, untrainable = short_names(tree), origins(tree), tree.untrainable
    bins = max(16, min(BINS, _ALL_BINS // max(1, len(calls))))
    page_calls = [
        PageCall(
            call=call.call,
            name=names[call.call],
            role=call.role,
            parent=index[call.parent] if call.parent is not None else -1,
            bar=ends[call.call],
            prefix=call.prefix,
            prompt=len(call.prompt) // 4,
            output=len(call.output) // 4,
            delivered=tree.delivered[call.call],
            untrainable=untrainable.get(call.call, ""),
            origin=origin.get(call.call, "") or "generated nothing, so nothing can continue it",
            dialect=_clip(call.dialect),
            finish=_clip(call.finish),
            stop="" if call.matched_stop is None else _clip(call.matched_stop),
            started=call.started - began if _time(call.started) else 0.0,
            ended=call.ended - began if _time(call.ended) else 0.0,
            attempts=[(engines(a.engine), a.tokens, _clip(a.end)) for a in call.attempts],
            versions=_versions(call),
            inserted=list(call.inserted),
            sampling=settings(_settings(call.sampling)),
            request=settings(_settings(call.request)),
            tools=call.tools_hash,
            template=call.template_hash,
            before=_passage(unpack_ids(call.prompt), None, limit, tokens),
            after=_passage(unpack_ids(call.output), unpack_logprobs(call.logprobs), limit, tokens),
            curve=_curve(call, bins, tokens),
        )
        for call in calls
    ]
    for call in calls:
        roles(call.role)
    return PageData(
        report=describe(tree),
        model=log.header.model if log.header else "",
        created=log.header.created if log.header else 0.0,
        torn=log.torn,
        skipped=log.skipped,
        began=began,
        took=max(0.0, took),
        apart=sum(call.prefix for call in calls) + sum(sizes),
        engines=engines.values,
        roles=roles.values,
        settings=[list(table) for table in settings.values],
        tokens=tokens.table,
        bars=bars,
        calls=page_calls,
        selected=[(leaves[t.call], int(t.target.sum())) for t in selection.trajectories],
        left_out=selection.left_out,
        j_max=j_max,
        seed=seed,
        limit=limit,
        cut=sum(size > limit for size in sizes),
    )


def longest_passage(sizes: Iterable[int], room: int, longest: int) -> int:
    """Return the greatest length <= `longest` to which all sizes can be cut so that their sum is within `room`."""
    ordered = sorted(sizes)
    left = room
    for i, size in enumerate(ordered):
        if size * (len(ordered) - i) > left:
            return min(longest, left // (len(ordered) - i))
        left -= size
    return longest


class _Table[T]:
    """Values numbered as they come, equal ones once."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._index: dict[T, int] = {}

    def __call__(self, value: T) -> int:
        if value not in self._index:
            self._index[value] = len(self.values)
            self.values.append(value)
        return self._index[value]


class _Tokens:
    """The tokens shown, each (id, text) once: a token's text depends on the tokens around it."""

    def __init__(self, decoder: Decoder | None) -> None:
        self._decoder = decoder
        self._seen = _Table[tuple[int, str | None, bool]]()
        self.table = self._seen.values

    def __call__(self, ids: NDArray[np.uint32]) -> list[int]:
        numbers = [int(i) for i in ids]
        if self._decoder is None:
            return [self._seen((i, None, False)) for i in numbers]
        special = self._decoder.special
        return [
            self._seen((i, piece, i in special))
            for i, piece in zip(numbers, self._decoder.pieces(numbers), strict=True)
        ]


def _passage(
    ids: NDArray[np.uint32], logprobs: NDArray[np.float32] | None, limit: int, tokens: Callable[..., list[int]]
) -> Passage:
    values = _hundredths(logprobs) if logprobs is not None else []
    if len(ids) <= limit:
        return Passage(head=tokens(ids), head_logprobs=values)
    head, tail = (limit + 1) // 2, len(ids) - limit // 2
    return Passage(
        head=tokens(ids[:head]),
        tail=tokens(ids[tail:]),
        cut=tail - head,
        head_logprobs=values[:head],
        tail_logprobs=values[tail:],
    )


def _curve(call: Call, bins: int, tokens: Callable[..., list[int]]) -> Curve | None:
    logprobs = unpack_logprobs(call.logprobs).astype(np.float64)
    size = len(logprobs)
    if not size:
        return None
    finite = np.isfinite(logprobs)
    ids = unpack_ids(call.output)
    least = [int(i) for i in np.argsort(np.where(finite, logprobs, 0), kind="stable")[:_SURPRISES]]
    least = sorted(i for i in least if finite[i] and logprobs[i] < _SURPRISING)
    width = -(-size // bins)
    mean = _hundredths([logprobs[finite].mean()])[0] if finite.any() else None
    surprises = [
        (i, value, tokens(ids[i : i + 1])[0])
        for i, value in zip(least, _hundredths(logprobs[least]), strict=True)
        if value is not None
    ]
    if width == 1:
        return Curve(mean=mean, means=_hundredths(logprobs), surprises=surprises)
    starts = np.arange(0, size, width)
    counts = np.minimum(width, size - starts)
    return Curve(
        mean=mean,
        means=_hundredths(np.add.reduceat(logprobs, starts) / counts),
        lows=_hundredths(np.minimum.reduceat(logprobs, starts)),
        width=width,
        surprises=surprises,
    )


def _versions(call: Call) -> list[tuple[int, int, int]]:
    """Spans of one version each; a call that moved between engines may have several of the same."""
    spans: list[tuple[int, int, int]] = []
    for span in call.versions:
        if spans and spans[-1][0] == span.version and spans[-1][2] == span.start:
            spans[-1] = (span.version, spans[-1][1], span.end)
        else:
            spans.append((span.version, span.start, span.end))
    return spans


def _hundredths(values: Any) -> list[int | None]:
    scaled = np.asarray(values, dtype=np.float64) * 100
    good = np.isfinite(scaled)
    whole = np.where(good, np.clip(scaled, -1e9, 1e9), 0).round().astype(np.int64)
    return [int(value) if ok else None for value, ok in zip(whole, good, strict=True)]


def _settings(values: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    shown = [(_clip(key), _clip(value)) for key, value in islice(values.items(), _FIELDS)]
    return (*shown, *([("…", f"{len(values) - _FIELDS} more")] if len(values) > _FIELDS else []))


def _clip(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _CLIP else text[:_CLIP] + " …"


def _time(value: float) -> bool:
    return math.isfinite(value) and value > 0
