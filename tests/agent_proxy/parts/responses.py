"""Asks a proxy for a response and reads it, whole or as a stream whose every event is checked."""

from __future__ import annotations

import json
from typing import Annotated, Any, get_args

import aiohttp
from openai.types.responses import ResponseStreamEvent
from pydantic import Field, TypeAdapter

Json = dict[str, Any]

EVENT: Any = TypeAdapter(Annotated[get_args(ResponseStreamEvent)[0], Field(discriminator="type")])


class Talk:
    """Requests of one execution; what `body` leaves open is a question without tools."""

    def __init__(self, http: aiohttp.ClientSession, proxy: Any) -> None:
        self._http = http
        self._proxy = proxy

    async def ask(self, *, stream: bool, headers: dict[str, str] | None = None, **body: Any) -> Json:
        """The response object: the whole answer, or what the last event of its stream carries."""
        if stream:
            response: Json = (await self.events(headers, **body))[-1]["response"]
            return response
        return json.loads(await self._send(headers, body))  # type: ignore[no-any-return]

    async def events(self, headers: dict[str, str] | None = None, **body: Any) -> list[Json]:
        """The events of a stream, each valid by the client library's types, in an order that adds up."""
        raw = await self._send(headers, {"stream": True, **body})
        events = []
        for block in raw.strip().split("\n\n"):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
            if events[-1]["type"] != "keepalive":
                EVENT.validate_python(self.known(events[-1]))
        self.check(events)
        return events

    async def _send(self, headers: dict[str, str] | None, body: Json) -> str:
        body = {"model": "m", "input": [{"role": "user", "content": "hi"}], **body}
        headers = {"Authorization": "Bearer k", **(headers or {})}
        async with self._http.post(f"{self._proxy.url}/v1/responses", json=body, headers=headers) as response:
            text = await response.text()
            assert response.status == 200, text
            return text

    @staticmethod
    def known(value: Json) -> Json:
        """A response or event without what is newer than the client library: namespaces among the tools."""
        if "response" in value:
            return value | {"response": Talk.known(value["response"])}
        tools = [t for t in value.get("tools", []) if t["type"] != "namespace"]
        return value | ({"tools": tools} if "tools" in value else {})

    @staticmethod
    def check(events: list[Json]) -> None:
        """An item has one identity, its deltas make up what is done, and numbers rise by one."""
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        first, second, *between, last = (e for e in events if e["type"] != "keepalive")
        final = last["response"]
        assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
        assert last["type"] == f"response.{final['status']}"
        for e in (first, second):
            response = e["response"]
            assert (response["id"], response["status"], response["output"]) == (final["id"], "in_progress", [])
        done: list[Json] = []
        item: Json | None = None  # that is open
        deltas: dict[str, str] = {}
        for e in between:
            what, _, end = e["type"].removeprefix("response.").rpartition(".")
            assert e["output_index"] == len(done)
            if (what, end) == ("output_item", "added"):
                assert item is None
                item, deltas = e["item"], {}
                assert item["status"] == "in_progress"
                continue
            assert item is not None
            if (what, end) == ("output_item", "done"):
                assert (e["item"]["id"], e["item"]["type"]) == (item["id"], item["type"])
                done.append(e["item"])
                item = None
                continue
            assert e["item_id"] == item["id"]
            if end == "delta":
                deltas[what] = deltas.get(what, "") + e["delta"]
            elif end == "done" and what in deltas:
                assert deltas[what] == next(e[f] for f in ("text", "arguments", "input") if f in e)
        if final["status"] != "failed":
            assert item is None
            assert done == final["output"]
