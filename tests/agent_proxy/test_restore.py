"""What comes back from a harness in another form than it was sent: the turn it means is known, its ids are kept."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gyre_agent_proxy.conversation import Conversation, Message, ToolCall
from gyre_agent_proxy.history import History, Node
from gyre_agent_proxy.restore import restore
from gyre_agent_proxy.template import CHATML

TOOLS = ({"type": "function", "function": {"name": "bash", "parameters": {}}},)
ASK = Message(role="user", text="go")


def call(key, command="ls", name="bash"):
    return ToolCall(id=key, name=name, arguments=json.dumps({"command": command, "n": 1.0}))


def said(text, *calls, reasoning=None):
    return Message(role="assistant", text=text, calls=calls, reasoning=reasoning)


def result(key, text="out"):
    return Message(role="tool", text=text, call_id=key)


TURN = said("I look.", call("c1"), call("c2", "pwd"), reasoning="hm")
ONE, TWO = result("c1", "1"), result("c2", "2")


def turn_of(key):
    return TURN if key in ("c1", "c2") else None


@pytest.mark.parametrize(
    ("sent", "changed"),
    [
        ([TURN, ONE, TWO], 0),
        ([TURN, TWO, ONE], 0),
        ([said("I look."), said("", *TURN.calls), ONE, TWO], 1),
        ([said("I look."), said("", *TURN.calls, reasoning="hm"), ONE, TWO], 1),
        ([said("", *TURN.calls), said("I look.\n"), ONE, TWO], 1),
        ([said("I look.", TURN.calls[0]), ONE, said("", TURN.calls[1]), TWO], 1),
        ([said("I look."), said("", TURN.calls[0]), said("", TURN.calls[1]), TWO, ONE], 1),
        ([said("", TURN.calls[0]), ONE, said("I look.", TURN.calls[1]), TWO], 1),
        ([said("other words", call("c1", "x", "y"), call("c2")), ONE, TWO], 1),
    ],
)
def test_a_turn_is_whole_and_as_it_was_sampled_whatever_its_parts_were(sent, changed):
    found, count = restore([ASK, *sent, ASK], turn_of)
    assert [(m.role, m.text, m.calls) for m in found[1:-1]] == [
        ("assistant", "I look.", TURN.calls),
        ("tool", "1", ()),
        ("tool", "2", ()),
    ]
    assert count == changed


def test_a_turn_without_one_of_its_calls_is_another_one():
    sent = [said("I look.", call("c2", "rewritten")), TWO, said("I look."), ASK]
    found, count = restore(sent, turn_of)
    assert found == [said("I look.", TURN.calls[1]), *sent[1:]]
    assert count == 0


def test_words_beside_a_turn_that_are_not_its_own_stay():
    sent = [said("something else"), said("", *TURN.calls), ONE, TWO, said("I look.")]
    found, _ = restore(sent, turn_of)
    assert [m.text for m in found] == ["something else", "I look.", "1", "2", "I look."]


# --- attaching -----------------------------------------------------------------------------------------------------


class Teller:
    def __init__(self, renderer):
        self.renderer = renderer
        self.history = History(renderer)

    def plan(self, *messages):
        return self.history.plan(Conversation(messages=messages, tools=TOOLS))

    def ask(self, name, *messages, answer, output=None):
        plan = self.plan(*messages)
        ids = output or [*self.renderer.vocabulary.encode(answer.text), 2]
        tail, output = plan.prompt[plan.prefix :], np.array(ids, np.uint32)
        self.history.insert(Node(name, plan.parent, plan.answered(answer), plan.depth + 1, answer, tail, output))

    def parent(self, *messages):
        plan = self.plan(*messages)
        if plan.parent is None:
            return None
        path = plan.parent.path()
        assert plan.prompt[: len(path)].tolist() == path.tolist()
        return plan.parent.call


@pytest.fixture
def teller(renderers):
    return Teller(renderers(CHATML))


def test_a_harness_may_give_calls_ids_of_its_own(teller):
    teller.ask("a", ASK, answer=said("x", call("c1"), call("c2", "pwd")))
    theirs = said("x", call("t1"), call("t2", "pwd"))
    done = [theirs, result("t2", "2"), result("t1", "1")]
    assert teller.parent(ASK, *done) == "a"
    teller.ask("b", ASK, *done, answer=said("", call("c3")))
    assert teller.parent(ASK, *done, said("", call("t3")), result("t3")) == "b"
    assert teller.parent(ASK, theirs, result("t1", "2"), result("t2", "1")) == "a", "other results: b is not meant"


def test_ids_made_here_tell_turns_apart_that_say_the_same(teller):
    for name in ("a", "b"):
        teller.ask(name, ASK, answer=said("x", call(f"c{name}")))
    for name in ("a", "b"):
        assert teller.parent(ASK, said("x", call(f"c{name}")), result(f"c{name}")) == name


def test_a_compaction_with_other_ids_takes_turns_over_as_they_were_sampled(teller):
    teller.ask("a", ASK, answer=said("x", call("c1")), output=[300, 301, 2])
    plan = teller.plan(Message(role="user", text="so far"), said("x", call("t1")), result("t1"), ASK)
    assert (plan.parent, plan.spliced, plan.foreign) == (None, 1, 0)
    assert "300, 301, 2" in str(plan.prompt.tolist())


def test_reasoning_that_was_shortened_does_not_hide_a_turn_known_by_its_calls(teller):
    teller.ask("a", ASK, answer=said("x", call("c1"), reasoning="a long thought"))
    assert teller.parent(ASK, said("x", call("c1"), reasoning="a long..."), result("c1")) == "a"
    assert teller.parent(ASK, said("x", call("t1"), reasoning="a long..."), result("t1")) is None


@pytest.mark.parametrize("sent", ["one\n\ntwo", "  one\r\n\r\ntwo\n", "one\n \ntwo", "one\n\n\0two"])
def test_white_space_and_line_ends_of_a_turn_do_not_count(teller, sent):
    teller.ask("a", ASK, answer=said("one\n\ntwo"))
    assert teller.parent(ASK, said(sent), ASK) == "a"


def test_between_turns_that_differ_in_white_space_the_exact_one_is_meant(teller):
    teller.ask("a", ASK, answer=said("one two"))
    teller.ask("b", ASK, answer=said("one  two"))
    assert teller.parent(ASK, said("one two"), ASK) == "a"
    assert teller.parent(ASK, said("one  two"), ASK) == "b"
    assert teller.plan(Message(role="user", text="new"), said("one two"), ASK).spliced == 1
