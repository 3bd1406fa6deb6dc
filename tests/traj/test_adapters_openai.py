"""Logs of OpenAI-style requests become call records: exact where the engine said what it did, context elsewhere."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gyre_traj import Log, Tree, read_log, select, unpack_ids, unpack_logprobs
from gyre_traj.adapters import openai
from gyre_traj.check import check_log
from gyre_traj.cli import main
from gyre_traj.errors import BadLine, OutputError

TEMPLATE = """{%- if tools %}<|im_start|>tools
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
END = 2
USER = {"role": "user", "content": "say hi"}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer and a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def template(model: Path) -> openai.ChatTemplate:
    return openai.ChatTemplate(model)


Bring = Callable[..., tuple[dict[str, Log], openai.Report]]


@pytest.fixture
def bring(template: openai.ChatTemplate, tmp_path: Path) -> Bring:
    """bring(lines) -> (logs by execution, report)."""

    def bring(lines: list[Any], **keys: str) -> tuple[dict[str, Log], openai.Report]:
        file, out = tmp_path / "requests.jsonl", tmp_path / "calls"
        file.write_text("\n".join(json.dumps(line) for line in lines))
        report = openai.import_lines(file, out, template, **keys)
        logs = [read_log(path) for path in sorted(out.iterdir())]
        assert all(finding.level == "note" for log in logs for finding in check_log(log))
        return {log.header.execution: log for log in logs if log.header}, report

    return bring


def answer(text: str, **fields: Any) -> dict[str, Any]:
    return {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"} | fields


def vllm(prompt: list[int], ids: list[int], text: str = "hi", *, messages: Any = None, **line: Any) -> dict[str, Any]:
    """What vLLM answers to `return_token_ids` and `logprobs`."""
    content = [{"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in ids]
    return {
        "request": {"model": "m", "messages": messages or [USER], "temperature": 0.7},
        "response": {
            "id": "chatcmpl-1",
            "model": "m",
            "created": 100,
            "choices": [answer(text, token_ids=ids, logprobs={"content": content})],
            "prompt_token_ids": prompt,
            "usage": {"prompt_tokens": len(prompt)},
        },
    } | line


def sglang(prompt: list[int], ids: list[int]) -> dict[str, Any]:
    """What SGLang answers to `return_token_ids`, `return_meta_info` and `logprobs`."""
    meta = {
        "output_token_logprobs": [[-0.25, i, None] for i in ids],
        "weight_version": "4",
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": len(ids)}],
    }
    choice = answer("hi", prompt_token_ids=prompt, response_token_ids=ids, meta_info=meta, matched_stop=END)
    return {"request": {"messages": [USER]}, "response": {"id": "1", "choices": [choice]}}


def test_vllm_calls_are_exact_and_form_a_tree(bring: Bring) -> None:
    logs, report = bring(
        [
            vllm([5, 6, 7], [8, END]),
            vllm([5, 6, 7, 8, END, 9], [10, END]),
            vllm([5, 6, 7, 8, END, 11], [12, END]),
            vllm([5, 6, 50], [51, END]),
        ]
    )
    assert (report.executions, report.calls, report.trainable, dict(report.untrainable)) == (1, 4, 4, {})
    log = logs["requests"]
    assert [(call.parent, call.prefix) for call in log.calls] == [
        (None, 0),
        ("000001", 5),
        ("000001", 5),
        (None, 0),
    ]
    assert log.calls[0].sampling == {"model": "m", "temperature": 0.7}
    assert log.calls[0].request == {"id": "chatcmpl-1", "model": "m"}
    tree = Tree.from_log(log)
    assert tree.trainable == 8
    assert (tree.tokens_unique, len(tree.leaves)) == (14, 3)
    assert {call: tree.end(call).start for call in tree.calls} == {"000001": 3, "000002": 6, "000003": 6, "000004": 3}
    selection = select(tree, None, seed=0)
    assert selection.targets == 8
    assert selection.trajectories[0].temperature.max() == 1.0
    assert selection.trajectories[0].temperature.min() == pytest.approx(0.7)


def test_sglang_calls_know_their_versions(bring: Bring) -> None:
    logs, report = bring([sglang([5, 6], [7, 8, END])])
    (call,) = logs["requests"].calls
    assert report.trainable == 1
    assert unpack_ids(call.output).tolist() == [7, 8, END]
    assert unpack_logprobs(call.logprobs).tolist() == [-0.25] * 3
    assert [(s.version, s.start, s.end) for s in call.versions] == [(3, 0, 1), (4, 1, 3)]
    assert call.matched_stop == END


def test_a_version_that_is_no_number_is_not_known(bring: Bring) -> None:
    line = sglang([5, 6], [7])
    line["response"]["choices"][0]["meta_info"] |= {"weight_version": "default", "weight_versions": None}
    logs, _ = bring([line])
    assert logs["requests"].calls[0].versions == ()


@pytest.mark.parametrize(
    "spans", [[(0, 0, 1)], [(0, 1, 3)], [(0, 0, 1), (1, 2, 3)], [(0, 0, 2), (1, 1, 3)], [(1 << 31, 0, 3)], [], 7]
)
def test_versions_that_do_not_cover_an_answer_are_not_known(bring: Bring, spans: Any) -> None:
    line = sglang([5, 6], [7, 8, END])
    if isinstance(spans, list):
        spans = [dict(zip(("version", "start", "end"), span, strict=True)) for span in spans]
    line["response"]["choices"][0]["meta_info"] |= {"weight_version": None, "weight_versions": spans}
    logs, _ = bring([line])  # `bring` checks that spans cover outputs
    assert logs["requests"].calls[0].versions == ()


@pytest.mark.parametrize("triples", [[3, 4], [[]], ["x"], [None], [{"id": 3}], [[-0.1, 7], [-0.2]]])
def test_triples_of_another_kind_are_no_ids(bring: Bring, triples: list[Any]) -> None:
    line = sglang([5, 6], [7, 8, END])
    del line["response"]["choices"][0]["response_token_ids"]
    line["response"]["choices"][0]["meta_info"]["output_token_logprobs"] = triples
    _, report = bring([line])
    assert dict(report.untrainable) == {"token ids were not logged": 1}


def test_probabilities_above_one_are_counted_as_such(bring: Bring) -> None:
    line = vllm([5], [7])
    line["response"]["choices"][0]["logprobs"]["content"][0]["logprob"] = 0.5
    _, report = bring([line])
    assert (report.trainable, dict(report.untrainable)) == (0, {"log-probabilities above 0": 1})


def test_a_finish_that_is_no_word_ends_a_turn(bring: Bring) -> None:
    line = vllm([5], [7])
    line["response"]["choices"][0]["finish_reason"] = ["odd"]
    logs, _ = bring([line])
    assert logs["requests"].calls[0].finish == "stop"


def test_versions_of_tokens_that_were_not_logged_are_not_kept(bring: Bring) -> None:
    line = sglang([5, 6], [7, 8, END])
    line["response"]["metadata"] = line["response"]["choices"][0].pop("meta_info")
    del line["response"]["choices"][0]["response_token_ids"]
    logs, _ = bring([line])  # `bring` checks that spans cover outputs
    assert logs["requests"].calls[0].versions == ()


def test_tokens_named_by_id_with_a_rendered_prompt(bring: Bring, template: openai.ChatTemplate) -> None:
    """vLLM's `return_tokens_as_token_ids`: trainable when the engine counted as many prompt tokens as are rendered."""
    prompt = template.render([USER], None, generation=True)
    content = [{"token": f"token_id:{i}", "logprob": -0.5} for i in (70, END)]

    def line(counted: int | None) -> dict[str, Any]:
        usage = {} if counted is None else {"usage": {"prompt_tokens": counted}}
        return {
            "request": {"messages": [USER]},
            "response": {"choices": [answer("hi", logprobs={"content": content})]} | usage,
        }

    good = line(len(prompt))
    good["response"]["prompt_token_ids"] = []  # nothing was sent: not given
    logs, report = bring([good, line(len(prompt) + 1), line(None)])
    exact, *others = logs["requests"].calls
    assert unpack_ids(exact.prompt).tolist() == prompt
    assert unpack_ids(exact.output).tolist() == [70, END]
    assert report.trainable == 1
    assert all(not call.logprobs for call in others)
    assert dict(report.untrainable) == {
        "prompt ids were not logged, and the engine counted other tokens": 1,
        "prompt ids were not logged, and nobody counted its tokens": 1,
    }


def without(line: dict[str, Any], *path: str | int) -> dict[str, Any]:
    line = json.loads(json.dumps(line))
    at: Any = line
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    return line


def test_what_is_missing_is_context(bring: Bring, template: openai.ChatTemplate) -> None:
    whole = vllm([5, 6, 7], [8, END])
    few = json.loads(json.dumps(whole))
    few["response"]["choices"][0]["logprobs"]["content"].pop()
    placeholder = json.loads(json.dumps(whole))
    placeholder["response"]["choices"][0]["logprobs"]["content"][0]["logprob"] = -9999.0
    choice = ("response", "choices", 0)
    logs, report = bring([without(whole, *choice, "logprobs"), without(whole, *choice, "token_ids"), few, placeholder])
    assert report.trainable == 0
    assert dict(report.untrainable) == {
        "no log-probabilities": 1,
        "token ids were not logged": 1,
        "not as many log-probabilities as tokens": 1,
        "some log-probabilities are missing": 1,
    }
    assert [bool(call.logprobs) for call in logs["requests"].calls] == [False] * 4
    assert Tree.from_log(logs["requests"]).trainable == 0
    assert logs["requests"].calls[0].request["untrainable"] == "no log-probabilities"


def test_several_choices_are_siblings(bring: Bring) -> None:
    line = vllm([5, 6], [7, END])
    line["response"]["choices"].append(
        line["response"]["choices"][0] | {"token_ids": [8, END], "finish_reason": "length"}
    )
    logs, _ = bring([line])
    assert [(call.call, call.finish) for call in logs["requests"].calls] == [
        ("000001.0", "stop"),
        ("000001.1", "length"),
    ]
    assert len(Tree.from_log(logs["requests"]).leaves) == 2


def test_executions_and_roles_are_named_by_keys(bring: Bring) -> None:
    lines = [
        vllm([5, i], [7, END], meta={"session": f"s/{i % 2}", "kind": "sub-agent" if i == 3 else None})
        for i in range(4)
    ]
    logs, report = bring(lines, execution="meta.session", role="meta.kind")
    assert sorted(logs) == ["s/0", "s/1"]
    assert report.executions == 2
    assert [call.role for call in logs["s/1"].calls] == ["main", "sub-agent"]


def test_more_executions_than_logs_may_be_open(bring: Bring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "_OPEN", 2)
    lines = [vllm([5, 6], [7, END], execution=str(i % 5)) for i in range(20)]
    logs, report = bring(lines)
    assert {name: len(log.calls) for name, log in logs.items()} == {str(i): 4 for i in range(5)}
    assert report.calls == 20


def test_conversations_are_a_call_an_assistant_turn(bring: Bring, template: openai.ChatTemplate) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "list "}, {"type": "text", "text": "files"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "a b", "tool_call_id": "c"},
        {"role": "assistant", "content": "a and b"},
    ]
    logs, report = bring([{"messages": messages, "tools": []}, {"messages": messages[:2]}])
    assert list(logs) == ["requests-1"]
    assert dict(report.skipped) == {"a conversation without an assistant's turn": 1}
    assert dict(report.untrainable) == {"a conversation: text without token ids": 2}
    log = logs["requests-1"]
    assert [(call.call, call.parent) for call in log.calls] == [("000001.0002", None), ("000001.0004", "000001.0002")]
    text = template._tokenizer.decode(log.full_ids("000001.0004"))
    assert "list files<|im_end|>" in text
    assert 'bash {"command": "ls"}<|im_end|>' in text  # an object, not a string in a string
    assert text.endswith("a and b<|im_end|>")
    assert len(Tree.from_log(log).leaves) == 1


def test_lines_without_an_answer_are_counted(bring: Bring) -> None:
    request = {"messages": [USER]}
    logs, report = bring(
        [
            {"request": request, "response": {"error": {"message": "overloaded"}}},
            {"request": request, "response": {"choices": 3}},
            {"request": request, "response": [{"choices": []}]},
            {"request": {"body": request}, "response": {"body": vllm([5], [7])["response"]}},
        ]
    )
    assert report.calls == len(logs["requests"].calls) == 1
    assert dict(report.skipped) == {
        "no answer: the response has no choices": 2,
        "a stream in pieces, not the response they add up to": 1,
    }


BAD_LINES = {
    "neither": ({"prompt": "x"}, "expected `request` and `response`, or `messages`"),
    "another dialect": ({"request": {"input": []}, "response": {}}, "Chat Completions"),
    "ids of another kind": (vllm(["a"], [1]), "expected token ids"),
    "negative ids": (vllm([1], [-1]), "expected token ids"),
    "execution": (vllm([1], [2], execution=[]), "execution or a role"),
    "long name": (vllm([1], [2], execution="x" * 300), "too long"),
    "message": ({"messages": ["hi"]}, "expected a message"),
    "list": ([], "expected a JSON object"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_lines_are_named_and_leave_nothing(bring: Bring, tmp_path: Path, case: str) -> None:
    line, message = BAD_LINES[case]
    with pytest.raises(BadLine, match=rf"line 2: .*{message}"):
        bring([vllm([1], [2]), line])
    assert [path.name for path in tmp_path.iterdir()] == ["requests.jsonl"]


def test_the_folder_must_not_be_there(bring: Bring, tmp_path: Path) -> None:
    (tmp_path / "calls").mkdir()
    with pytest.raises(OutputError, match="exists"):
        bring([vllm([1], [2])])


def test_tokenizers_that_cannot_be_used(model: Path, tmp_path: Path) -> None:
    with pytest.raises(BadLine, match="cannot be loaded"):
        openai.ChatTemplate(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    with pytest.raises(BadLine, match="no chat template"):
        openai.ChatTemplate(tmp_path)


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(
        json.dumps(vllm([5, 6], [7, END])) + "\n" + json.dumps({"messages": [USER, answer("a")["message"]]})
    )
    command = ["import", "openai", str(file), "--tokenizer", str(model), "-o"]
    assert main([*command, str(tmp_path / "calls")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / 'calls'}: 2 executions, 2 calls, 1 of them trainable",
        "  not trainable: 1 calls: a conversation: text without token ids",
    ]
    assert main(["check", *map(str, (tmp_path / "calls").iterdir())]) == 0
    assert main([*command, str(tmp_path / "calls")]) == 2
    assert "exists" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "again"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["untrainable"] == {"a conversation: text without token ids": 1}
    assert main(["import", "openai", str(tmp_path / "none"), "--tokenizer", str(model), "-o", str(tmp_path / "x")]) == 2


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_what_a_real_engine_answers(tiny_engine: str, tiny_model: Path, tmp_path: Path) -> None:
    """Two turns at SGLang, logged as a proxy would: exact with its ids, context without them."""

    def ask(messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        request = {
            "model": "default",
            "messages": messages,
            "max_tokens": 12,
            "temperature": 0.8,
            "logprobs": True,
            **options,
        }
        body = json.dumps(request).encode()
        call = urllib.request.Request(  # noqa: S310 - loopback
            f"{tiny_engine}/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(call, timeout=120) as response:  # noqa: S310
            return {"request": request, "response": json.load(response)}

    exact = {"return_token_ids": True, "return_meta_info": True}
    first = ask([USER], **exact)
    said = first["response"]["choices"][0]["message"]["content"]
    longer = [USER, {"role": "assistant", "content": said}, {"role": "user", "content": "again"}]
    lines = [first, ask([USER], n=2, **exact), ask(longer, **exact), ask([USER])]
    (tmp_path / "engine.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    template = openai.ChatTemplate(tiny_model)
    report = openai.import_lines(tmp_path / "engine.jsonl", tmp_path / "calls", template)

    log = read_log(tmp_path / "calls" / "engine.gtraj")
    assert (report.calls, report.trainable, dict(report.untrainable)) == (5, 4, {"token ids were not logged": 1})
    assert [finding for finding in check_log(log) if finding.level == "error"] == []
    choice = first["response"]["choices"][0]
    assert log.full_prompt("000001").tolist() == choice["prompt_token_ids"]
    assert unpack_ids(log.call("000001").output).tolist() == choice["response_token_ids"]
    assert log.full_prompt("000001").tolist() == template.render([USER], None, generation=True)
    for call in log.calls[:4]:
        assert len(call.logprobs) == len(call.output)
        assert call.versions[-1].end == len(call.output) // 4
        assert (unpack_logprobs(call.logprobs) < 0).all()
    tree = Tree.from_log(log)
    assert len(tree.roots) == 1
    assert tree.trainable == sum(len(call.output) // 4 for call in log.calls[:4])
