"""Histories: attaching, splicing, forking; a prompt always begins with the ids of the call it continues."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from gyre_agent_proxy.conversation import Conversation, Message, ToolCall
from gyre_agent_proxy.errors import RenderError
from gyre_agent_proxy.history import History, Node
from gyre_agent_proxy.template import CHATML

S = Message(role="system", text="sys")
BASH = ({"type": "function", "function": {"name": "bash", "parameters": {}}},)
READ = ({"type": "function", "function": {"name": "read", "parameters": {}}},)


def user(text):
    return Message(role="user", text=text)


def tool(text, call):
    return Message(role="tool", text=text, call_id=call)


def call(name_of, name="bash", arguments='{"command": "ls"}'):
    return ToolCall(id=name_of, name=name, arguments=arguments)


def said(text, *calls, reasoning=None):
    return Message(role="assistant", text=text, calls=calls, reasoning=reasoning)


class Teller:
    """Answers requests in a history; every answer is recorded under a name."""

    def __init__(self, renderer):
        self.renderer = renderer
        self.history = History(renderer)
        self.nodes = {}

    def plan(self, *messages, tools=()):
        plan = self.history.plan(Conversation(messages=messages, tools=tools))
        if plan.parent is not None:
            path = plan.parent.path()
            assert plan.prompt[: len(path)].tolist() == path.tolist()
            assert plan.prefix == len(path)
        return plan

    def ask(self, name, *messages, answer=None, output=None, tools=()):
        """Record `answer` (default: the name) to `messages`; returns the answer."""
        plan = self.plan(*messages, tools=tools)
        answer = answer or said(name)
        ids = output if output is not None else [*self.renderer.vocabulary.encode(answer.text), 2]
        node = Node(
            name,
            plan.parent,
            plan.answered(answer),
            plan.depth + 1,
            answer,
            plan.prompt[plan.prefix :],
            np.array(ids, np.uint32),
        )
        self.history.insert(node)
        self.nodes[name] = node
        return answer

    def parent(self, *messages, tools=()):
        plan = self.plan(*messages, tools=tools)
        return None if plan.parent is None else plan.parent.call


@pytest.fixture(params=["smollm2", CHATML, "thinking"], ids=["smollm2", "chatml", "thinking"])
def teller(request, renderers):
    return Teller(renderers(request.param))


def text_of(teller, plan):
    return teller.renderer.vocabulary.decode(plan.prompt)


def test_three_siblings_and_the_second_goes_on(teller):
    for name in ("a", "b", "c"):
        teller.ask(name, S, user("q"))
    assert [n.parent for n in teller.nodes.values()] == [None] * 3
    assert teller.parent(S, user("q"), said("b"), user("more")) == "b"


def test_equal_answers_attach_to_the_newest(teller):
    teller.ask("a", S, user("q"), answer=said("same"))
    teller.ask("b", S, user("q"), answer=said("same"))
    assert teller.parent(S, user("q"), said("same"), user("more")) == "b"


def test_interleaved_conversations_stay_apart(teller):
    teller.ask("a1", S, user("A"))
    teller.ask("b1", S, user("B"))
    teller.ask("a2", S, user("A"), said("a1"), user("go"))
    teller.ask("b2", S, user("B"), said("b1"), user("go"))
    assert teller.nodes["a2"].parent is teller.nodes["a1"]
    assert teller.nodes["b2"].parent is teller.nodes["b1"]


def test_tools_and_system_belong_to_the_prefix(teller):
    teller.ask("a", S, user("q"), tools=BASH)
    assert teller.parent(S, user("q"), said("a"), user("n"), tools=BASH) == "a"
    assert teller.parent(S, user("q"), said("a"), user("n"), tools=READ) is None
    assert teller.parent(S, user("q"), said("a"), user("n")) is None
    assert teller.parent(Message(role="system", text="other"), user("q"), said("a"), user("n"), tools=BASH) is None


def test_a_dropped_turn_attaches_where_the_histories_part(teller):
    teller.ask("a", S, user("q"))
    teller.ask("b", S, user("q"), said("a"), user("r"))
    # mini-swe-agent does not echo a turn that had no tool call
    assert teller.parent(S, user("q"), said("a"), user("r"), user("format error")) == "a"


def test_a_compaction_is_a_new_root_with_its_known_turns_spliced(teller):
    teller.ask("a", S, user("q"), answer=said("x", call("c1")), output=[300, 301, 2], tools=BASH)
    teller.ask("b", S, user("q"), said("x", call("c1")), tool("out", "c1"), tools=BASH)
    plan = teller.plan(
        S, user("summary of the past"), said("x", call("c1")), tool("out", "c1"), said("b"), user("go"), tools=BASH
    )
    assert plan.parent is None
    assert (plan.spliced, plan.foreign, plan.forked) == (2, 0, False)
    ids = plan.prompt.tolist()
    at = ids.index(300)
    assert ids[at : at + 3] == [300, 301, 2], "sampled ids, not re-encoded text"


def test_sampled_ids_that_decode_alike_are_kept(teller):
    vocabulary = teller.renderer.vocabulary
    # the same text in another segmentation: one id a byte
    odd = [vocabulary.encode(c)[0] for c in "assistant"]
    assert vocabulary.decode(odd) == "assistant"
    assert odd != vocabulary.encode("assistant")
    teller.ask("a", S, user("q"), answer=said("assistant"), output=[*odd, 2])
    plan = teller.plan(S, user("q"), said("assistant"), user("more"))
    assert plan.prompt[: plan.prefix].tolist()[-len(odd) - 1 :] == [*odd, 2]


def test_sampled_reasoning_stays_on_the_path(teller):
    vocabulary = teller.renderer.vocabulary
    ids = [*vocabulary.encode("<think>\nlong thought\n</think>\n\nyes"), 2]
    teller.ask("a", S, user("q"), answer=said("yes", reasoning="long thought"), output=ids)
    for sent in (None, "long thought", "\nlong thought\n"):
        plan = teller.plan(S, user("q"), said("yes", reasoning=sent), user("more"))
        assert plan.parent is teller.nodes["a"]
        assert "long thought" in text_of(teller, plan)
    assert teller.parent(S, user("q"), said("yes", reasoning="another thought"), user("more")) is None


@pytest.mark.parametrize(
    "replayed",
    [
        said("x", call("c1", arguments='{"command":"ls"}')),
        said("", call("c1")),
        said(" x\n", call("c1", "renamed", "{broken")),
    ],
)
def test_turns_are_restored_by_call_id(teller, replayed):
    teller.ask("a", S, user("q"), answer=said("x", call("c1")), tools=BASH)
    assert teller.parent(S, user("q"), replayed, tool("out", "c1"), tools=BASH) == "a"


def test_ids_of_tool_calls_that_were_sampled_are_known(teller):
    teller.ask("a", S, user("go"), answer=said("", call("functions.bash:0")))
    assert teller.history.knows("functions.bash:0")
    assert not teller.history.knows("functions.bash:1")


def test_a_dropped_parallel_call_is_a_foreign_turn(teller):
    teller.ask("a", S, user("q"), answer=said("x", call("c1"), call("c2")), tools=BASH)
    plan = teller.plan(S, user("q"), said("x", call("c2")), tool("out", "c2"), tools=BASH)
    assert plan.parent is None
    assert plan.foreign == 1


def test_foreign_turns_are_encoded_from_text_and_their_children_attach(teller):
    plan = teller.plan(S, user("q"), said("not ours"), user("go"))
    assert (plan.foreign, plan.spliced) == (1, 0)
    assert "not ours<|im_end|>" in text_of(teller, plan)
    teller.ask("a", S, user("q"), said("not ours"), user("go"))
    assert teller.parent(S, user("q"), said("not ours"), user("go"), said("a"), user("more")) == "a"


def test_ambiguous_content_is_not_spliced(teller):
    teller.ask("a", S, user("1"), answer=said("same"))
    teller.ask("b", S, user("2"), answer=said("same"))
    assert teller.plan(S, user("3"), said("same"), user("go")).spliced == 1, "the same ids: either will do"
    teller.ask("c", S, user("2"), answer=said("same"), output=[300, 301, 2])
    assert teller.plan(S, user("3"), said("same"), user("go")).foreign == 1


def test_a_small_follow_up_keeps_everything_before_it(teller):
    ids = [int(i) for i in np.arange(28_404) % 250 + 10]
    teller.ask("long", S, user("q"), output=[*ids, 2])
    plan = teller.plan(S, user("q"), said("long"), user("short"))
    assert plan.prefix > 28_404
    assert len(plan.prompt) - plan.prefix < 61


def test_a_conversation_that_ends_with_our_turn_is_continued_from_it(teller):
    teller.ask("a", S, user("q"))
    plan = teller.plan(S, user("q"), said("a"))
    assert plan.parent is teller.nodes["a"]
    assert text_of(teller, plan).endswith("a<|im_end|>\n<|im_start|>assistant\n")


def test_inserted_spans_are_the_closing_ids(teller):
    teller.ask("a", S, user("q"), output=[300, 301])  # cut by length
    plan = teller.plan(S, user("q"), said("a"), user("more"))
    (span,) = plan.inserted
    tail = plan.prompt[plan.prefix :]
    assert teller.renderer.vocabulary.decode(tail[slice(*span)]) == "<|im_end|>\n"


def test_no_provable_extension_is_a_counted_fork(renderers):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.role == 'assistant' and not loop.last %}(old){% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    teller = Teller(renderers(template))
    teller.ask("a", user("q"))
    plan = teller.plan(user("q"), said("a"), user("more"))
    assert plan.forked
    assert plan.parent is None
    assert "a(old)" in text_of(teller, plan)


def test_a_refused_request_changes_nothing(renderers):
    template = (
        "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    teller = Teller(renderers(template))
    teller.ask("a", user("q"))
    before = teller.plan(user("q"), said("a"), user("more"))
    with pytest.raises(RenderError, match="no"):
        teller.plan(user("q"), said("a"), user("bad"))
    after = teller.plan(user("q"), said("a"), user("more"))
    assert after.parent is before.parent
    assert after.prompt.tolist() == before.prompt.tolist()


def test_work_grows_with_the_new_text_not_with_the_history(renderers):
    teller = Teller(renderers(CHATML))
    counted = []
    encode = teller.renderer.vocabulary.encode

    class Counting:
        def __getattr__(self, name):
            return getattr(teller.renderer.vocabulary, name)

    messages = [S]
    for turn in range(12):
        messages.append(user(f"question {turn} " * 20))
        characters = 0

        def counting(text):
            nonlocal characters
            characters += len(text)
            return encode(text)

        teller.renderer.vocabulary.encode = counting
        try:
            plan = teller.plan(*messages)
        finally:
            del teller.renderer.vocabulary.encode
        counted.append(characters)
        answer = said(f"answer {turn}")
        node = Node(
            str(turn),
            plan.parent,
            plan.answered(answer),
            plan.depth + 1,
            answer,
            plan.prompt[plan.prefix :],
            np.array([300, 2], np.uint32),
        )
        teller.history.insert(node)
        messages.append(answer)
    assert max(counted[1:]) < 1.2 * min(counted[1:])


def test_reasoning_is_not_part_of_identity_but_text_is(teller):
    teller.ask("a", S, user("q"))
    assert teller.parent(S, user("q"), msgspec.structs.replace(said("a"), reasoning=""), user("n")) == "a"
    assert teller.parent(S, user("q"), said("a edited"), user("n")) is None
