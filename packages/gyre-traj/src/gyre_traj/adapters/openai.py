"""Logs of OpenAI-style requests and conversations -> call logs.

    from gyre_traj.adapters import openai
    template = openai.ChatTemplate("path/to/model")                  # tokenizer and chat template, by transformers
    report = openai.import_lines("requests.jsonl", "calls", template)  # calls/<execution>.gtraj
    print(report.calls, report.trainable, report.untrainable)        # {"no log-probabilities": 12, …}

A line is one JSON object of either kind:

    {"request": {"messages": […], "tools": […]}, "response": {"choices": […], …}}   a call, as proxies log them
    {"messages": […], "tools": […]}                                      a conversation: a call an assistant turn

`execution` in a line (or another key, dotted) says whose call it is. Without it, the requests of a file are one
execution's, and each conversation is an execution.

Exact tokens. Ids and log-probabilities are taken where the engine gave them: vLLM's `prompt_token_ids` and `token_ids`
(`return_token_ids`), SGLang's `prompt_token_ids` and `response_token_ids`, `sglext`, `meta_info.output_token_logprobs`,
and tokens named `token_id:N`. A prompt without ids is rendered; it counts as what was sent only if the engine counted
as many tokens (`usage.prompt_tokens`). An answer without ids is rendered too. What was not given exactly, or has no
log-probabilities, is recorded without any, so nothing of it is a loss target; `Call.request["untrainable"]` says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre_traj.adapters.completions import at, chat_message, first_ids, first_of, flaw, sampled_ids, weight_versions
from gyre_traj.errors import BadLine
from gyre_traj.jsonl import read_lines
from gyre_traj.log import LogWriter
from gyre_traj.output import fresh_folder
from gyre_traj.records import Call, Delivered, Header, pack_ids, pack_logprobs

_OPEN = 64  # logs open at a time
_REMEMBERED = 16  # ends of an execution's calls that a prompt is compared with
_FINISH = {"length": "length", "abort": "abort", "content_filter": "error"}
_NAME = 200  # bytes of a file name


class Template(Protocol):
    """What renders messages."""

    stops: frozenset[int]  # ids that end a turn

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, generation: bool) -> list[int]:
        """Ids of a conversation; `generation`: up to where the assistant speaks next."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text."""


class ChatTemplate:
    """A Hugging Face tokenizer and its chat template, from a folder; needs transformers. Raises `BadLine`."""

    def __init__(self, path: str | Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise BadLine(f"a tokenizer needs transformers ({error}); pip install 'gyre-traj[openai]'") from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError) as error:
            raise BadLine(f"tokenizer {str(path)!r} cannot be loaded: {str(error).splitlines()[0]}") from error
        if not self._tokenizer.chat_template:
            raise BadLine(f"tokenizer {str(path)!r} has no chat template; add chat_template.jinja to its folder")
        stop = self._tokenizer.eos_token_id
        self.stops = frozenset() if stop is None else frozenset({int(stop)})

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, generation: bool) -> list[int]:
        try:
            ids = self._tokenizer.apply_chat_template(
                list(messages), tools=tools or None, add_generation_prompt=generation, tokenize=True, return_dict=False
            )
        except Exception as error:  # a template is a program: what it raises is anybody's
            raise BadLine(f"the chat template cannot render these messages: {error}") from error
        return [int(i) for i in ids]

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


@dataclass
class Report:
    """What an import made."""

    executions: int = 0
    calls: int = 0
    trainable: int = 0  # calls
    untrainable: Counter[str] = field(default_factory=Counter)  # reason -> calls
    skipped: Counter[str] = field(default_factory=Counter)  # reason -> lines


def import_lines(
    path: str | Path, out: str | Path, template: Template, *, execution: str = "execution", role: str = "role"
) -> Report:
    """Write the calls of a JSONL file into `out`, a folder that must not exist, one log an execution.

    `execution` and `role` are the (dotted) keys of a line that name them. Raises `BadLine`, `OutputError`, `LogError`;
    then nothing is left behind.
    """
    report = Report()
    with fresh_folder(out) as folder, _Logs(folder, report) as logs:
        for number, line in read_lines(path):
            try:
                name = _text(at(line, *execution.split(".")), _default_name(Path(path), number, line))
                for made in _calls(line, template, number, _text(at(line, *role.split(".")), "main"), report):
                    logs.append(name, made)
            except BadLine as error:
                raise BadLine(f"{str(path)!r}, line {number}: {error}") from error
        report.executions = len(logs.known)
    return report


class _Made(NamedTuple):
    """A call whose prompt is still whole."""

    prompt: NDArray[np.uint32]
    output: NDArray[np.uint32]
    call: Call  # all but prompt, parent and execution
    model: str


class _Logs:
    """The logs of an import, a bounded number of them open; each call under the one its prompt goes on from."""

    def __init__(self, folder: Path, report: Report) -> None:
        self.known: set[str] = set()
        self._folder = folder
        self._report = report
        self._open: dict[str, tuple[LogWriter, dict[str, NDArray[np.uint32]]]] = {}

    def append(self, execution: str, made: _Made) -> None:
        writer, ends = self._get(execution, made)
        above = [name for name, ids in ends.items() if np.array_equal(made.prompt[: len(ids)], ids)]
        parent = max(above, key=lambda name: len(ends[name]), default=None)
        prefix = 0 if parent is None else len(ends[parent])
        call = msgspec.structs.replace(
            made.call, execution=execution, parent=parent, prefix=prefix, prompt=pack_ids(made.prompt[prefix:])
        )
        writer.append(call)
        writer.append(Delivered(call=call.call))
        whole = np.concatenate([made.prompt, made.output])
        for name in above:  # the last used come last; what a branch shares is held once
            ends[name] = whole[: len(ends.pop(name))]
        if made.output.size:
            ends[call.call] = whole
        if len(ends) > _REMEMBERED:
            del ends[next(iter(ends))]  # a call that continues it is written whole, and the tree finds its place
        self._report.calls += 1
        if call.logprobs:
            self._report.trainable += 1
        else:
            self._report.untrainable[call.request.get("untrainable", "no output")] += 1

    def _get(self, execution: str, made: _Made) -> tuple[LogWriter, dict[str, NDArray[np.uint32]]]:
        entry = self._open.pop(execution, None)
        if entry is None:
            if len(self._open) >= _OPEN:
                self._open.pop(next(iter(self._open)))[0].close()
            file = f"{quote(execution, safe='')}.gtraj"
            if len(file) > _NAME:
                raise BadLine(
                    f"execution id {execution!r:.60} is too long to name a file; name executions by another key"
                )
            entry = LogWriter(self._folder / file), {}
            if execution not in self.known:
                entry[0].append(Header(execution=execution, model=made.model, created=made.call.started))
                self.known.add(execution)
        self._open[execution] = entry  # the last used comes last
        return entry

    def __enter__(self) -> _Logs:
        return self

    def __exit__(self, *_: object) -> None:
        for writer, _ends in self._open.values():
            writer.close()


def _calls(line: dict[str, Any], template: Template, number: int, role: str, report: Report) -> Iterator[_Made]:
    if "request" in line or "response" in line:
        request = at(line, "request", "body") or line.get("request")
        response = at(line, "response", "body") or line.get("response")
        if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
            raise BadLine("expected `request` with `messages`; Chat Completions is the dialect that is read")
        if isinstance(response, list):
            report.skipped["a stream in pieces, not the response they add up to"] += 1
        elif not isinstance(response, dict) or not first_of(response.get("choices"), kinds=list):
            report.skipped["no answer: the response has no choices"] += 1
        else:
            yield from _answers(request, response, template, number, role)
    elif isinstance(line.get("messages"), list):
        yield from _turns(line, template, number, role, report)
    else:
        raise BadLine(f"expected `request` and `response`, or `messages`; got the keys {sorted(line)!r}")


def _answers(
    request: dict[str, Any], response: dict[str, Any], template: Template, number: int, role: str
) -> Iterator[_Made]:
    """One call a choice of a logged request."""
    messages = [chat_message(message) for message in request["messages"]]
    for i, choice in enumerate(response["choices"]):
        if not isinstance(choice, dict):
            raise BadLine(f"expected a choice to be an object, got {choice!r:.80}")
        given = first_ids(
            response.get("prompt_token_ids"), choice.get("prompt_token_ids"), at(response, "sglext", "input_ids")
        )
        sampled, logprobs = sampled_ids(response, choice, i)
        versions = weight_versions(response, choice, len(sampled or ()))
        why = flaw(sampled, logprobs)
        if not given:
            given = template.render(messages, request.get("tools"), generation=True)
            counted = at(response, "usage", "prompt_tokens")
            if counted != len(given):
                said = "nobody counted its tokens" if counted is None else "the engine counted other tokens"
                why = f"prompt ids were not logged, and {said}"
        if sampled is None:
            sampled = _rendered(
                given, messages, chat_message(choice.get("message") or {}), request.get("tools"), template
            )
        options = {key: value for key, value in request.items() if key not in ("messages", "tools")}
        kept = {key: response[key] for key in ("id", "model") if key in response}
        call = Call(
            call=f"{number:06}" if len(response["choices"]) == 1 else f"{number:06}.{i}",
            execution="",
            role=role,
            output=pack_ids(sampled),
            logprobs=b"" if why else pack_logprobs(logprobs or []),
            versions=versions,
            finish=_FINISH.get(str(choice.get("finish_reason")), "stop"),
            matched_stop=first_of(choice.get("matched_stop"), choice.get("stop_reason"), kinds=int | str),
            sampling=options,
            request=kept | ({"untrainable": why} if why else {}),
            started=float(first_of(response.get("created"), 0.0, kinds=int | float)),
        )
        yield _Made(np.array(given, np.uint32), np.array(sampled, np.uint32), call, str(response.get("model") or ""))


def _turns(line: dict[str, Any], template: Template, number: int, role: str, report: Report) -> Iterator[_Made]:
    """One call an assistant turn of a conversation: text alone, so nothing to train on."""
    messages = [chat_message(message) for message in line["messages"]]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    if not turns:
        report.skipped["a conversation without an assistant's turn"] += 1
    for i in turns:
        prompt = template.render(messages[:i], line.get("tools"), generation=True)
        output = _rendered(prompt, messages[:i], messages[i], line.get("tools"), template)
        call = Call(
            call=f"{number:06}.{i:04}",
            execution="",
            role=role,
            output=pack_ids(output),
            request={"untrainable": "a conversation: text without token ids"},
            started=float(i),
        )
        yield _Made(np.array(prompt, np.uint32), np.array(output, np.uint32), call, str(line.get("model") or ""))


def _rendered(
    prompt: list[int], messages: list[dict[str, Any]], answer: dict[str, Any], tools: Any, template: Template
) -> list[int]:
    """Ids of an answer that came as text: what the template writes after the prompt, up to the end of the turn."""
    answer = {"role": "assistant"} | answer
    whole = template.render([*messages, answer], tools, generation=False)
    if whole[: len(prompt)] != prompt:  # the template rewrites what came before
        return template.encode(str(answer.get("content") or ""))
    tail = whole[len(prompt) :]
    ends = [at for at, token in enumerate(tail) if token in template.stops]
    return tail[: ends[-1] + 1] if ends else tail


def _default_name(path: Path, number: int, line: dict[str, Any]) -> str:
    return path.stem if "request" in line or "response" in line else f"{path.stem}-{number}"


def _text(value: Any, default: str) -> str:
    if value is None:
        return default
    if not isinstance(value, str | int):
        raise BadLine(f"expected the name of an execution or a role to be text, got {value!r:.80}")
    return str(value)
