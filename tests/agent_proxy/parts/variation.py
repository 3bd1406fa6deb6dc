"""Other serialisations of what a harness sends, as real ones make them between two requests; the tree stays the same.

A seed decides; call ids are renamed, where they are, in the same way in every request.
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

Json = dict[str, Any]


class Variation:
    """Chat Completions: `vary(body)`; see `Responses` for the other one."""

    def __init__(self, seed: int, *, renames: bool = False, splits: bool = False) -> None:
        """renames: calls get ids of the harness's own. splits: turns come back in parts, results in another order."""
        self.rng = random.Random(seed)
        self.renames = renames
        self.splits = splits

    def __call__(self, body: Json) -> Json:
        sent = [m for message in body["messages"] for m in self._message(message)]
        found = {**body, "messages": self._swapped(sent), "user": f"{self.rng.random()}"}
        if "tools" in body:
            found["tools"] = [self.shuffled(t | {"function": self.shuffled(t["function"])}) for t in body["tools"]]
        return self.shuffled(found)

    def maybe(self, chance: float = 0.5) -> bool:
        return self.rng.random() < chance

    def shuffled(self, value: Json) -> Json:
        keys = list(value)
        self.rng.shuffle(keys)
        return {k: value[k] for k in keys}

    def key(self, call: str) -> str:
        return f"their{hashlib.sha256(call.encode()).hexdigest()[:9]}" if self.renames else call

    def arguments(self, text: str) -> str:
        """The same JSON, as another language writes it."""
        value = json.loads(text)
        if isinstance(value, dict):
            value = self.shuffled(value)
        separators = (",", ":") if self.maybe() else (", ", ": ")
        indent = 2 if self.maybe(0.2) else None
        return json.dumps(value, ensure_ascii=self.maybe(), separators=separators, indent=indent)

    def trimmed(self, text: str) -> str:
        text = text.replace("\n", "\r\n") if self.maybe(0.3) else text
        return text.strip() if self.maybe() else f"{text}\n"

    def parts(self, content: Any, kind: str = "text") -> Any:
        """A text as one string, or in parts."""
        if isinstance(content, list):
            if any(p["type"] != kind for p in content):
                return content
            content = "".join(p["text"] for p in content)
        if not content or self.maybe():
            return content
        at = self.rng.randrange(len(content) + 1) if kind == "text" else 0
        return [{"type": kind, "text": t, "cache_control": {}} for t in (content[:at], content[at:])]

    def _message(self, message: Json) -> list[Json]:
        message = dict(message)
        calls = message.get("tool_calls") or []
        if message["role"] == "assistant":
            text = message.get("content") or ""
            text = text if isinstance(text, str) else "".join(p["text"] for p in text)
            message["content"] = self.trimmed(text) if text else None
            if not message["content"] and self.maybe():
                message["content"] = self.rng.choice(["", []])
            elif not message["content"] and calls and self.maybe():
                del message["content"]
            message |= {"refusal": None, "annotations": [], "audio": None, "function_call": None}
            if self.maybe(0.3):
                message.pop("reasoning_content", None)
        if message.get("content"):
            message["content"] = self.parts(message["content"])
        if "tool_call_id" in message:
            message["tool_call_id"] = self.key(message["tool_call_id"])
        if not calls:
            return [self.shuffled(message)]
        message["tool_calls"] = [
            {
                "index": i,
                "id": self.key(c["id"]),
                "type": "function",
                "function": c["function"] | {"arguments": self.arguments(c["function"]["arguments"])},
            }
            for i, c in enumerate(calls)
        ]
        if self.splits and message.get("content"):
            rest = {"role": "assistant", "content": None, "tool_calls": message.pop("tool_calls")}
            return [message, rest]
        return [self.shuffled(message)]

    def _swapped(self, sent: list[Json]) -> list[Json]:
        """Runs of results backwards."""
        at = 0
        while self.splits and at < len(sent):
            end = at
            while end < len(sent) and sent[end]["role"] == "tool":
                end += 1
            sent[at:end] = sent[at:end][::-1]
            at = end + 1
        return sent


class Responses(Variation):
    """OpenAI Responses."""

    def __call__(self, body: Json) -> Json:
        items = [self._item(dict(i)) for i in body["input"]]
        return self.shuffled({**body, "input": self._apart(items) if self.splits else items})

    def _item(self, item: Json) -> Json:
        for field in ("id", "status"):
            if self.maybe():
                item.pop(field, None)
        if "call_id" in item:
            item["call_id"] = self.key(item["call_id"])
        match item["type"]:
            case "function_call":
                item["arguments"] = self.arguments(item["arguments"])
            case "function_call_output":
                item["output"] = self.parts(item["output"], "input_text")
            case "reasoning" if self.maybe():
                item |= {"summary": [], "content": None, "encrypted_content": "sealed"}
            case "message" if item["role"] == "assistant":
                (part,) = item["content"]
                item["content"] = [{"type": "output_text", "text": self.trimmed(part["text"])}]
        return self.shuffled(item)

    def _apart(self, items: list[Json]) -> list[Json]:
        """Each result behind its call."""
        results = {i["call_id"]: i for i in items if i["type"].endswith("_output")}
        found: list[Json] = []
        for item in items:
            if item["type"].endswith("_output"):
                continue
            found.append(item)
            if "call_id" in item and item["call_id"] in results:
                found.append(results[item["call_id"]])
        return found
