"""Renderers of the `renderers` package behind the same interface."""

from __future__ import annotations

import pytest

from gyre_agent_proxy.conversation import Conversation, Message, ToolCall
from gyre_agent_proxy.errors import ModelError
from gyre_agent_proxy.history import History, Node
from gyre_agent_proxy.render import load_renderer

TOOLS = ({"type": "function", "function": {"name": "bash", "description": "d", "parameters": {"type": "object"}}},)


def user(text):
    return Message(role="user", text=text)


@pytest.fixture(scope="module")
def qwen3(model_folder):
    return load_renderer(model_folder("thinking"), "qwen3")


def test_prompts_and_quoted_tokens(qwen3):
    text = qwen3.vocabulary.decode(qwen3.render([Message(role="system", text="S"), user("<|im_end|>")], ()))
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    special = qwen3.vocabulary.special
    ids = qwen3.render([user("<|im_end|><think>")], TOOLS)
    assert ids.count(special["<|im_end|>"]) == 2
    assert special["<think>"] not in ids


def test_a_name_it_knows_selects_it(model_folder):
    assert load_renderer(model_folder("thinking"), "auto", "Qwen/Qwen3-0.6B").hash == "renderers:qwen3"
    assert load_renderer(model_folder("thinking"), "auto", "some/other").plain
    with pytest.raises(ModelError, match="cannot be used with this model"):
        load_renderer(model_folder("thinking"), "no-such-renderer")


@pytest.mark.parametrize(
    ("said", "after"),
    [
        ("<think>\nthought\n</think>\n\nyes<|im_end|>", [user("next")]),
        ("plain<|im_end|>", [user("next")]),
        ("cut off", [user("next")]),
        ("<think>\ncut in thought", [user("next")]),
        (
            '<think>\nt\n</think>\n\n<tool_call>\n{"name": "bash", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
            [Message(role="tool", text="one", call_id="c0")],
        ),
    ],
)
def test_histories_extend_exactly(qwen3, said, after):
    history = History(qwen3)
    asked = Conversation(messages=(user("q"),), tools=TOOLS)
    plan = history.plan(asked)
    output = qwen3.vocabulary.encode(said)
    parsed = qwen3.parse(plan.prompt.tolist(), output, TOOLS, ())
    calls = tuple(ToolCall(id=f"c{i}", name=n, arguments=a) for i, (n, a) in enumerate(parsed.calls))
    answer = Message(role="assistant", text=parsed.text, reasoning=parsed.reasoning, calls=calls)
    import numpy as np

    node = Node("a", None, plan.answered(answer), plan.depth + 1, answer, plan.prompt, np.array(output, np.uint32))
    history.insert(node)
    # The harness does not send the reasoning back.
    replayed = Message(role="assistant", text=parsed.text, calls=calls)
    child = history.plan(Conversation(messages=(user("q"), replayed, *after), tools=TOOLS))
    assert child.parent is node
    assert not child.forked
    assert child.prompt[: node.length].tolist() == node.path().tolist()
    text = qwen3.vocabulary.decode(child.prompt[node.length :])
    assert text.endswith("<|im_start|>assistant\n")
    assert "next" in text or "<tool_response>\none\n</tool_response>" in text
    spans = [qwen3.vocabulary.decode(child.prompt[node.length :][slice(*s)]) for s in child.inserted]
    if not said.endswith("<|im_end|>"):
        assert spans[0].endswith("<|im_end|>")


def test_foreign_turns_and_malformed_calls(qwen3):
    ids = qwen3.turn(Message(role="assistant", text="not <|im_end|> ours"), ())
    assert ids.count(qwen3.vocabulary.special["<|im_end|>"]) == 1
    assert ids[-1] == qwen3.vocabulary.special["<|im_end|>"]
    output = qwen3.vocabulary.encode("<tool_call>\n{broken\n</tool_call><|im_end|>")
    assert qwen3.parse([], output, TOOLS, ()).calls == ()


def test_a_call_that_nobody_offered_stays_text(qwen3):
    written = '<tool_call>\n{"name": "bash", "arguments": {"a": 1}}\n</tool_call>'
    output = qwen3.vocabulary.encode(f"so:\n{written}<|im_end|>")
    assert qwen3.parse([], output, TOOLS, ()).calls == (("bash", '{"a": 1}'),)
    said = qwen3.parse([], output, (), ())
    assert said.calls == ()
    assert '{"name": "bash", "arguments": {"a": 1}}' in said.text


def test_what_the_package_cannot_read_is_text(model_folder, monkeypatch):
    renderer = load_renderer(model_folder("thinking"), "qwen3")

    def fail(*_, **__):
        raise IndexError("of theirs")

    monkeypatch.setattr(renderer._made, "parse_response", fail)
    said = renderer.parse([], renderer.vocabulary.encode("odd STOP more<|im_end|>"), TOOLS, ("STOP",))
    assert (said.text, said.calls) == ("odd ", ())
