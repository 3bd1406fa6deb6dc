"""The page of an execution: what it holds, that it is one inert file, and that a browser draws it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
import pytest

from gyre_traj import Attempt, Call, Header, Log, Span, Tree, pack_ids, pack_logprobs, unpack_ids
from gyre_traj.errors import LogError
from gyre_traj.page import write_page
from gyre_traj.page_data import LONGEST, TOKENS, longest_passage
from gyre_traj.report import describe, origins

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in BROWSERS if (found := shutil.which(name))), None)


class Writer:
    """Writes an execution call by call, as a proxy would; `ids` makes tokens."""

    def __init__(self, execution: str, ids: Callable[[int], list[int]], seed: int = 0) -> None:
        self.log = Log(header=Header(execution=execution, model="policy", created=1.8e9))
        self.ids, self.random, self.now = ids, np.random.default_rng(seed), 1.8e9
        self.whole: dict[str, list[int]] = {}

    def call(self, parent: str | None, prompt: int | list[int], output: int, **fields: Any) -> str:
        name = hashlib.sha256(f"{len(self.log.calls)}".encode()).hexdigest()[:24]
        above = self.whole[parent] if parent else []
        delta = prompt if isinstance(prompt, list) else self.ids(prompt)
        sampled = self.ids(output)
        self.whole[name] = above + delta + sampled
        logprobs = -self.random.exponential(0.4, output) * self.random.choice([0.05, 1, 8], output, p=[0.6, 0.35, 0.05])
        took = float(self.random.uniform(0.5, 1.5) + output / 60)
        fields.setdefault("logprobs", pack_logprobs(logprobs))
        fields.setdefault("attempts", (Attempt(engine="cell-0", rid="r", tokens=output, end="stop"),))
        fields.setdefault("versions", (Span(0, 0, output),))
        delivered = fields.pop("delivered", True)
        advance = fields.pop("advance", 1.0)
        self.log.calls.append(
            Call(
                call=name,
                execution=self.log.header.execution if self.log.header else "",
                parent=parent,
                prefix=len(above),
                prompt=pack_ids(delta),
                output=pack_ids(sampled),
                sampling={"temperature": 1.0, "top_p": 0.95},
                request={"model": "policy", "user": {"id": 7}},
                inserted=((0, min(2, len(delta))),) if parent else (),
                started=self.now,
                ended=self.now + took,
                **fields,
            )
        )
        self.now += took * advance
        if delivered:
            self.log.delivered[name] = True
        return name


def rich(calls: int = 400, scale: int = 1, ids: Callable[[int], list[int]] | None = None) -> Log:
    """Sub-agents, compactions, siblings, a fork inside an output, lost answers, two versions, moves."""
    random = np.random.default_rng(1)
    writer = Writer("rich", ids or (lambda n: [int(i) for i in random.integers(5, 40_000, n)]))
    last = writer.call(None, 60 * scale, 24 * scale)
    first = last
    while len(writer.log.calls) < calls:
        at = len(writer.log.calls)
        size = 8 + int(random.integers(0, 40)) * scale
        version = 0 if at < calls // 2 else 1
        half = size // 2
        spans = (Span(0, 0, half), Span(1, half, size)) if abs(at - calls // 2) < 3 else (Span(version, 0, size),)
        fields: dict[str, Any] = {"versions": spans}
        if at % 9 == 4:
            fields["attempts"] = (
                Attempt(engine="cell-0", rid="r1", tokens=half, end="drain"),
                Attempt(engine="cell-1", rid="r2", tokens=size - half, end="stop"),
            )
        elif at % 3 == 0:
            fields["attempts"] = (Attempt(engine="cell-1", rid="r", tokens=size, end="stop"),)
        prompt = 20 + int(random.integers(0, 80)) * scale
        if at % 29 == 7:  # the answer was lost, and the harness asked again
            writer.call(last, prompt, size, delivered=False, **fields)
            last = writer.call(last, unpack_ids(writer.log.calls[-1].prompt).tolist(), size, **fields)
        elif at % 37 == 11:
            agent: str | None = None
            for _ in range(4):
                agent = writer.call(agent, 30 * scale, size, role="sub-agent", advance=0.3, **fields)
        elif at % 97 == 60:  # compaction
            writer.call(last, 12, size, role="main-summary", **fields)
            last = writer.call(None, 90 * scale, size, **fields)
        elif at % 53 == 20:
            writer.call(last, 5, 0, attempts=(), versions=(), finish="abort", delivered=False)
        elif at % 71 == 30:
            writer.call(last, prompt, size, finish="abort", **fields)
        elif at == 5:  # a history that was rewritten inside the first output
            kept = writer.whole[first][: 60 * scale + 9]
            writer.call(None, [*kept, *writer.ids(10)], size, **fields)
        else:
            last = writer.call(last, prompt, size, **fields)
    return writer.log


class Reader(HTMLParser):
    """The tags of a page, and the text of its scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[str, str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and data.strip():
            self.inside.append((self.tags[-1][0], data))

    @property
    def data(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(next(text for tag, text in self.inside if tag == "script"))
        return loaded


def read(path: Path) -> Reader:
    return Reader(path.read_text(encoding="utf-8"))


def log_of(story) -> Log:
    log = Log(header=Header(execution="e", model="policy"), calls=list(story.calls))
    log.delivered = {call.call: True for call in story.calls}
    return log


HOSTILE = "</script><script>document.documentElement.dataset.pwned=1</script><!--<script><img src=x onerror=alert(1)>"


def hostile() -> Log:
    """Everything a log may say in words, said with bad intent."""
    text = HOSTILE + "\u202e\u2028\0{{script}}"
    log = Log(header=Header(execution=text, model=text))
    for i, parent in enumerate((None, f"0{text}", f"0{text}")):
        log.calls.append(
            Call(
                call=f"{i}{text}",
                execution=text,
                role=text if i else "constructor",
                dialect=text,
                parent=parent,
                prefix=5 if parent else 0,
                prompt=pack_ids([1, 2, 3]),
                output=pack_ids([4, 5]),
                logprobs=pack_logprobs([float("nan"), -1e30] if i else [-0.1, 3.0]),
                versions=(Span(-(2**62), 0, 1), Span(2**53, 1, 2)),
                inserted=((-5, 2**40),),
                finish=text,
                matched_stop=text,
                attempts=(Attempt(engine=text, rid=text, tokens=-3, end=f"error: {text}"),),
                sampling={text: text, "__proto__": {"x": text}},
                tools_hash=text,
                template_hash=text,
                request={"html": [text]},
                started=float(i) or float("nan"),
                ended=float("inf") if i else -1.0,
            )
        )
    return log


def test_the_page_holds_the_numbers_of_the_tree(tmp_path: Path) -> None:
    log = rich(120)
    page = write_page(log, tmp_path / "e.html")
    data, report = read(tmp_path / "e.html").data, describe(Tree.from_log(log))
    assert data["report"] == json.loads(msgspec.json.encode(report))
    assert len(data["calls"]) == page.calls == 120
    assert page.size == (tmp_path / "e.html").stat().st_size
    assert data["apart"] == sum(call.prefix + (len(call.prompt) + len(call.output)) // 4 for call in log.calls)
    assert data["engines"] == ["cell-0", "cell-1"]
    assert sum(targets for _, targets in data["selected"]) + sum(data["left_out"].values()) == report.trainable


def test_the_bars_are_the_tree(tmp_path: Path) -> None:
    log = rich(200)
    page = write_page(log, tmp_path / "e.html")
    tree = Tree.from_log(log)
    data = read(tmp_path / "e.html").data
    names = ("parent", "row", "start", "size", "call", "sampled", "offset", "first", "last")
    bars = [dict(zip(names, bar, strict=True)) for bar in data["bars"]]
    assert len(bars) == page.bars
    on_paths = [bar for bar in bars if bar["last"] > bar["first"]]
    assert len(on_paths) == len(tree.view().nodes) < len(bars)
    assert sum(bar["size"] for bar in on_paths) == tree.tokens_unique
    assert sum(bar["size"] for bar in bars if bar["sampled"]) == sum(len(call.output) // 4 for call in log.calls)
    rows: dict[int, int] = {}
    for i, bar in enumerate(bars):
        above = bars[bar["parent"]] if bar["parent"] >= 0 else None
        assert bar["parent"] < i
        assert bar["start"] == (above["start"] + above["size"] if above else 0)
        assert bar["row"] >= (above["row"] if above else 0)
        assert bar["call"] >= 0
    for bar in sorted(bars, key=lambda bar: bar["start"]):  # none covers another
        assert bar["start"] >= rows.get(bar["row"], 0)
        rows[bar["row"]] = bar["start"] + bar["size"]
    for leaf, report in enumerate(data["report"]["leaves"]):
        on = [bar for bar in bars if bar["first"] <= leaf < bar["last"]]
        assert sum(bar["size"] for bar in on) == report["tokens"]
    ends = {call["call"]: bars[call["bar"]] for call in data["calls"]}
    for name, bar in ends.items():
        assert bar["start"] + bar["size"] == tree.end(name).start + len(tree.end(name).ids)


def test_the_way_on_with_the_most_tokens_keeps_its_row(story, tmp_path: Path) -> None:
    story.call("a", "sys task", "one")
    story.call("b", "again", "short", parent="a")
    story.call("c", "more", "much longer than that", parent="a")
    write_page(log_of(story), tmp_path / "e.html")
    data = read(tmp_path / "e.html").data
    rows = {data["calls"][bar[4]]["call"]: bar[1] for bar in data["bars"] if bar[5]}
    assert rows == {"a": 0, "b": 1, "c": 0}


def test_an_empty_call_is_drawn_where_it_ended(story, tmp_path: Path) -> None:
    story.call("a", "sys task", "one")
    story.call("n", "nothing comes", "", parent="a")
    write_page(log_of(story), tmp_path / "e.html")
    data = read(tmp_path / "e.html").data
    end = data["bars"][data["calls"][1]["bar"]]
    assert end[:6] == [1, 0, 3, 2, 1, False]
    assert data["calls"][1]["origin"].startswith("generated nothing")


def test_origins_say_how_each_call_came_to_hang_there(story) -> None:
    story.call("a", "sys task", "one two three")
    story.call("b", "result", "done", parent="a")
    story.call("c", "failure", "else", parent="a")
    story.call("s", "sys task", "other")
    story.call("d", "next", "x", parent="c")
    story.call("f", "sys task one drift", "y")
    story.call("r", "compacted", "z")
    story.call("n", "nothing", "", parent="d")
    assert origins(story.tree()) == {
        "a": "the first of its context",
        "b": "continues a",
        "c": "continues a otherwise than b",
        "s": "sampled again from the prompt of a",
        "d": "continues c",
        "f": "output of a, 1 of 3 tokens in: prompt departs inside it",
        "r": "a context of its own: its prompt repeats nothing",
    }


def test_ids_stand_for_text_and_long_passages_are_cut_in_the_middle(tmp_path: Path) -> None:
    writer = Writer("long", lambda n: list(range(1, n + 1)))
    writer.call(None, LONGEST + 101, 3)
    page = write_page(writer.log, tmp_path / "e.html")
    assert (page.limit, page.cut) == (LONGEST, 1)
    data = read(tmp_path / "e.html").data
    before, after = data["calls"][0]["before"], data["calls"][0]["after"]
    ids = [data["tokens"][token][0] for token in before["head"] + before["tail"]]
    half = LONGEST // 2
    assert before["cut"] == 101
    assert ids == [*range(1, half + 1), *range(LONGEST + 102 - half, LONGEST + 102)]
    assert all(text is None for _, text, _ in data["tokens"])
    assert "cut" not in after
    given = np.frombuffer(writer.log.calls[0].logprobs, "<f4")
    assert after["head_logprobs"] == [round(100 * float(value)) for value in given]


def test_curves_come_in_bins_and_name_the_surprises(tmp_path: Path) -> None:
    writer = Writer("curve", lambda n: list(range(n)))
    logprobs = np.full(1000, -0.5, np.float32)
    logprobs[[7, 999]] = -9, -7.5
    writer.call(None, 5, 1000, logprobs=pack_logprobs(logprobs))
    write_page(writer.log, tmp_path / "e.html")
    curve = read(tmp_path / "e.html").data["calls"][0]["curve"]
    assert (curve["width"], len(curve["means"]), len(curve["lows"])) == (5, 200, 200)
    assert curve["means"][0] == -50
    assert curve["lows"][1] == -900
    assert curve["lows"][199] == -750
    assert [(place, value) for place, value, _ in curve["surprises"]] == [(7, -900), (999, -750)]
    assert curve["mean"] == -52  # -515.5 / 1000, rounded


@pytest.mark.parametrize(
    ("sizes", "room", "limit"),
    [
        ([], 10, 99),
        ([3, 3], 10, 99),
        ([2, 100, 100], 10, 4),  # 2 + 4 + 4
        ([5, 5, 5], 15, 99),
        ([5, 5, 6], 15, 5),
        ([200], 1000, 99),
        ([1] * 8, 4, 0),
    ],
)
def test_the_longest_passage_that_fits(sizes: list[int], room: int, limit: int) -> None:
    assert longest_passage(sizes, room, 99) == limit


@pytest.mark.timeout(120)
def test_a_million_tokens_make_a_page_of_bounded_size(tmp_path: Path) -> None:
    log = rich(400, 48)
    assert Tree.from_log(log).tokens_unique > 1_000_000
    page = write_page(log, tmp_path / "e.html")
    data = read(tmp_path / "e.html").data
    parts = [call[which] for call in data["calls"] for which in ("before", "after")]
    assert sum(len(part["head"]) + len(part.get("tail", ())) for part in parts) <= TOKENS
    assert page.cut == sum("cut" in part for part in parts) > 0
    assert page.size < 6_000_000


def test_nothing_is_fetched_and_only_its_own_script_may_run(tmp_path: Path) -> None:
    write_page(rich(30), tmp_path / "e.html")
    html = (tmp_path / "e.html").read_text()
    page = Reader(html)
    source = html.replace(next(text for tag, text in page.inside if tag == "script"), "")
    assert not re.search(r"https?:|//[a-z]+\.|\bsrc\s*=|\bhref\s*=|url\(|@import|import\(|fetch\(|XMLHttp", source)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", source)
    (policy,) = [attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for kind, (tag, text) in zip(("style", "script"), [page.inside[0], page.inside[2]], strict=True):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert tag == kind
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    log = hostile()
    write_page(log, tmp_path / "e.html")
    write_page(rich(3), tmp_path / "tame.html")
    page = read(tmp_path / "e.html")
    assert page.tags == read(tmp_path / "tame.html").tags
    assert page.data["report"]["execution"] == log.header.execution  # type: ignore[union-attr]
    assert page.data["calls"][1]["role"] == log.calls[1].role
    assert (tmp_path / "e.html").read_bytes().count(b"<script") == 2


def test_a_page_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"cannot be written.*name a file in a folder you can write to"):
        write_page(rich(3), tmp_path / "missing" / "e.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(LogError, match="cannot be written"):
        write_page(rich(3), tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(LogError, match="no header"):
        write_page(Log(), tmp_path / "e.html")
    assert not (tmp_path / "e.html").exists()


def browse(page: Path, anchor: str = "") -> tuple[dict[str, str | None], list[tuple[str, dict[str, str | None]]], str]:
    """Open a page in Chromium: (attributes of its root, its tags, its text)."""
    assert CHROMIUM is not None
    options = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update", "--window-size=1600,1000"),
        *(f"--user-data-dir={page.parent / 'profile'}", "--virtual-time-budget=3000", "--dump-dom"),
    )
    run = subprocess.run(
        [CHROMIUM, *options, page.as_uri() + anchor], capture_output=True, text=True, check=True, timeout=100
    )
    seen = Reader(run.stdout)
    body = re.sub(r"<script.*?</script>|<style.*?</style>", "", run.stdout, flags=re.DOTALL)
    return next(attrs for tag, attrs in seen.tags if tag == "html"), seen.tags, re.sub(r"<[^>]*>", "", body)


browser = pytest.mark.skipif(CHROMIUM is None, reason=f"no browser: none of {', '.join(BROWSERS)} is installed")


@browser
@pytest.mark.timeout(120)
def test_a_browser_draws_every_bar(tmp_path: Path) -> None:
    log = rich(60)
    page = write_page(log, tmp_path / "e.html")
    call = log.calls[7]
    root, tags, text = browse(tmp_path / "e.html", f"#call={call.call}")
    assert (root.get("data-ready"), root.get("data-error")) == ("true", None)
    canvas = {attrs["id"]: attrs for tag, attrs in tags if tag == "canvas"}
    assert int(canvas["tree"]["data-bars"] or 0) + int(canvas["tree"]["data-merged"] or 0) == page.bars
    assert int(canvas["time"]["data-parts"] or 0) == sum(max(1, len(call.attempts)) for call in log.calls)
    assert call.call in text
    assert f"{len(call.output) // 4} sampled" in text


@browser
@pytest.mark.timeout(120)
def test_a_browser_is_not_taken_in_by_hostile_text(tmp_path: Path) -> None:
    log = hostile()
    write_page(log, tmp_path / "e.html")
    chosen = f"#tab=calls&call={quote(log.calls[1].call)}"
    for anchor in ("#leaf=nonsense&colour=x", "#tab=text&colour=likelihood", chosen):
        root, tags, text = browse(tmp_path / "e.html", anchor)
        assert (root.get("data-ready"), root.get("data-error"), root.get("data-pwned")) == ("true", None, None)
        assert not [tag for tag, _ in tags if tag == "img"]
        assert "onerror=alert(1)" in text
        assert not set(text) & {"\u202e", "\u2028", "\0"}  # what would hide is shown by name


@browser
@pytest.mark.timeout(120)
@pytest.mark.parametrize("why", ["first", "prompt departs inside it", "sampled again"])
def test_a_trajectory_reads_as_the_ids_of_its_path(tmp_path: Path, why: str) -> None:
    log = rich(28)
    write_page(log, tmp_path / "e.html")
    tree = Tree.from_log(log)
    leaves = zip(describe(tree).leaves, tree.paths(), strict=True)
    leaf, path = next((leaf, path) for leaf, path in leaves if why in leaf.why)
    _, tags, _ = browse(tmp_path / "e.html", f"#tab=text&leaf={leaf.call}")
    titles = [attrs.get("title") or "" for tag, attrs in tags if tag == "i"]
    found = [re.match(r"token ([\d,]+) · id (\d+)", title) for title in titles]
    assert [int(match[1].replace(",", "")) for match in found if match] == list(range(leaf.tokens))
    assert [int(match[2]) for match in found if match] == np.concatenate([node.ids for node in path]).tolist()
    likely = [int("log-probability" in title) for title in titles]
    assert sum(likely) == sum(len(node.ids) for node in path if node.call)
