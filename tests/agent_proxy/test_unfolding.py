"""A turn as it unfolds: what is given out is never taken back, adds up to the turn, and costs what is new of it."""

from __future__ import annotations

import itertools
import json
import os
import re

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gyre_agent_proxy import unfolding
from gyre_agent_proxy.parse import parse
from gyre_agent_proxy.text import GrowingText
from gyre_agent_proxy.unfolding import Said, Unfolding

MANY = 20_000 if os.environ.get("GYRE_TEST_MANY") else 1_500

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


def read(text, stops, tools, thinking):
    """(reasoning, text, calls) of a whole turn: the grammar once more, as expressions over all of it."""
    ends = [at for s in stops if (at := text.find(s)) >= 0]
    text = text[: min(ends)] if ends else text
    reasoning, calls = None, []
    opened = "" if thinking else r"\s*<think>"
    if thought := re.match(rf"{opened}(.*?)(?:</think>\n*(.*))?\Z", text, re.DOTALL):
        reasoning, text = thought[1].strip("\n"), thought[2] or ""

    def take(match):
        try:
            call = json.loads(match[1])
            calls.append((call["name"] + "", json.dumps(call.get("arguments", {}), ensure_ascii=False)))
        except (ValueError, TypeError, KeyError, AttributeError):
            return match[0]
        return ""

    left = re.sub(r"<tool_call>\s*(.*?)\s*</tool_call>", take, text, flags=re.DOTALL) if tools else text
    return reasoning, left.rstrip() if calls else left, tuple(calls)


def unfold(pieces, **how):
    """(reasoning, text, calls) of the pieces; checks that each adds to what the whole turn says."""
    turn, told = Unfolding(**how), [Said()]
    for piece in pieces:
        told.append(turn.feed(piece))
    told.append(turn.end())
    reasoning, text = ("".join(parts) for parts in zip(*told, strict=True))
    assert not any(a.text and b.reasoning for i, a in enumerate(told) for b in told[i + 1 :]), "reasoning comes first"
    return reasoning if turn.thought else None, text, tuple(turn.calls)


# Pieces of markup, of calls, of stop strings and of characters, in any order.
PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<", "</", "<th", "think>", "<tool", "_call>", "</tool_",
    CALL, CALL[:30], CALL[30:], '{"name": "f"}', '{"name": 3}', '{"name": "f", "arguments": ["ü"]}', "[1]", "{", "}",
    "\n", "\n\n", " ", "\t", "\u3000", "word", "two words", "END", "EN", "E", "ND", "``", "`", "```",
    "ü", "漢字", "🎉", "👩‍💻", "\N{COMBINING ACUTE ACCENT}",
]  # fmt: skip
STOPS = [(), ("END",), ("```",), ("``", "`x"), ("ENDword", "ND"), ("</think>",), ("\n\n", "END"), ("aab", "ab")]
TURNS = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)
WELL_FORMED = st.tuples(
    st.sampled_from(["", "\n", " "]),
    TURNS.map(lambda t: f"<think>\n{t}\n</think>\n\n"),
    TURNS,
    st.lists(st.tuples(st.just(CALL), st.sampled_from(["", "\n", " and\n"])).map("".join), max_size=3).map("".join),
).map("".join)

quiet = settings(max_examples=MANY, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@quiet
@given(
    text=TURNS | WELL_FORMED | st.text("aben<>/thik_ol\n ", max_size=40),
    cuts=st.lists(st.integers(0, 400)),
    stops=st.sampled_from(STOPS),
    tools=st.booleans(),
    thinking=st.booleans(),
)
@example(text="aab", cuts=[2], stops=("aab", "ab"), tools=False, thinking=False)
@example(text="ENDwor", cuts=[3, 4], stops=("ENDword", "ND"), tools=False, thinking=False)
@example(text="<think></think>", cuts=[], stops=(), tools=True, thinking=False)
def test_a_turn_in_any_pieces_is_the_turn(text, cuts, stops, tools, thinking):
    how = {"stops": stops, "tools": tools, "thinking": thinking}
    whole = read(text, **how)
    at = sorted({min(c, len(text)) for c in cuts} | {0, len(text)})
    assert unfold([text[a:b] for a, b in itertools.pairwise(at)], **how) == whole
    assert unfold(text, **how) == whole, "every character alone"
    said = parse(text, **how)
    assert (said.reasoning, said.text, said.calls) == whole


@settings(parent=quiet, max_examples=MANY // 3)
@given(text=TURNS | WELL_FORMED, stops=st.sampled_from(STOPS), tools=st.booleans(), rest=st.binary(max_size=6))
def test_cut_at_any_token_what_was_told_begins_what_is_said(renderers, text, stops, tools, rest):
    """Wherever sampling ends; half characters included."""
    renderer = renderers("thinking")
    ids = renderer.vocabulary.encode(text) + [3 + b for b in rest]
    given_ids = (tools and ({"type": "function"},)) or ()
    turn, growing = Unfolding(tools=tools, stops=stops), GrowingText(renderer.vocabulary, renderer.stop_ids)
    reasoning = told = ""
    for n in range(len(ids) + 1):
        more = turn.feed(growing.feed(ids[:n]))
        reasoning, told = reasoning + more.reasoning, told + more.text
        said = renderer.parse([], ids[:n], given_ids, stops)
        assert (said.reasoning or "").startswith(reasoning)
        assert said.text.startswith(told)


@pytest.mark.parametrize(
    ("text", "tools", "expected"),
    [
        ("plain", True, ("plain", None, ())),
        ("<think>\nhm\n</think>\n\nyes", True, ("yes", "hm", ())),
        ("<think>\nnever closed", True, ("", "never closed", ())),
        ('a<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', True, ("a", None, (("f", '{"x": 1}'),))),
        ('<tool_call>{"name": "f", "arguments": "raw"}</tool_call>', True, ("", None, (("f", "raw"),))),
        ('<tool_call>{"name": "f"}</tool_call>', True, ("", None, (("f", "{}"),))),
        ("\n<tool_call>{broken</tool_call>\n", True, ("\n<tool_call>{broken</tool_call>\n", None, ())),
        ("<tool_call>[1]</tool_call>", True, ("<tool_call>[1]</tool_call>", None, ())),
        ('<tool_call>{"name": "f"}</tool_call>', False, ('<tool_call>{"name": "f"}</tool_call>', None, ())),
        ("a <think> in the middle", True, ("a <think> in the middle", None, ())),
        (f" I look. {CALL}\n{CALL} \n", True, (" I look.", None, (("bash", '{"command": "ls"}'),) * 2)),
        (f"one\n{CALL}\ntwo\n", True, ("one\n\ntwo", None, (("bash", '{"command": "ls"}'),))),
    ],
)
def test_what_turns_say(text, tools, expected):
    said = parse(text, tools=tools)
    assert (said.text, said.reasoning, said.calls) == expected


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        (["<thi", "nk>\nI ", "see", ".\n\n", "So\n", "</th", "ink>\n", "\n", "Yes", " ", "now"],
         [("", ""), ("I ", ""), ("see", ""), (".", ""), ("\n\nSo", ""), ("", ""), ("", ""), ("", ""), ("", "Yes"),
          ("", ""), ("", " now")]),
        ([" ", "\n", "Hi", "<", "b>"], [("", ""), ("", ""), ("", " \nHi"), ("", ""), ("", "<b>")]),
        (["Look.\n", CALL[:20], CALL[20:], "\nDone"], [("", "Look."), ("", ""), ("", ""), ("", "\n\nDone")]),
        (["<tool_call>", "no</tool", "_call>", "!"],
         [("", ""), ("", ""), ("", "<tool_call>no</tool_call>"), ("", "!")]),
        (["a E", "N", "T E", "N", "D", "b"], [("", "a"), ("", ""), ("", " ENT"), ("", ""), ("", ""), ("", "")]),
    ],
)  # fmt: skip
def test_nothing_is_held_back_longer_than_it_must_be(pieces, told):
    turn = Unfolding(tools=True, stops=("END",))
    assert [tuple(turn.feed(p)) for p in pieces] == told


@pytest.mark.parametrize("begin", ["", "<think>", "<tool_call>", "\n", "<think>\n</think>\n"])
@pytest.mark.parametrize("piece", ["word ", " ", "\n", "<", "</", "`E"])
def test_a_piece_costs_what_it_is_long(begin, piece, monkeypatch):
    """However long the turn is, whatever it is made of: no piece makes it look at the turn again."""
    seen = []
    seek = unfolding._seek
    monkeypatch.setattr(unfolding, "_seek", lambda text, marks: seen.append(len(text)) or seek(text, marks))
    turn = Unfolding(tools=True, stops=("END", "```"))
    turn.feed(begin)
    for _ in range(2_000):
        turn.feed(piece)
        assert max(map(len, (turn._raw, turn._rest))) < 20
    assert max(seen) < 40
