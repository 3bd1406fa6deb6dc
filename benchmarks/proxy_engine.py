"""A scripted engine for `proxy.py`: every answer is the same run of tokens, sent as fast as the socket takes it.

It speaks SGLang's `/generate` and the Chat Completions API, streaming and not, so that every gateway is asked to do its
own job in front of the same engine. One asyncio protocol without a framework: it must not be what is measured.

    python benchmarks/proxy_engine.py --tokens 32       prints its port
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator

IDS = list(range(1000, 1400))
WORD = "word "


def sse(data: object) -> bytes:
    """One server-sent event in a chunk of its own."""
    body = b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(body), body)


class Answers:
    """Canned bytes."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        usage = {"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": 100 + tokens}
        head = {"id": "chatcmpl-1", "created": 1, "model": "policy"}
        message = {"role": "assistant", "content": WORD * tokens}
        self.whole = json.dumps(
            {
                **head,
                "object": "chat.completion",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
                "usage": usage,
            }
        ).encode()
        deltas: list[dict[str, str]] = [{"role": "assistant", "content": ""}, *[{"content": WORD}] * tokens]
        events = [{"index": 0, "delta": d, "finish_reason": None} for d in deltas]
        events.append({"index": 0, "delta": {}, "finish_reason": "stop"})
        self.chat = [sse({**head, "object": "chat.completion.chunk", "choices": [e]}) for e in events] + [
            sse(b"[DONE]")
        ]

    def generate(self, rid: str, stop: int, interval: int) -> Iterator[bytes]:
        """SGLang's events of one request (incremental): the first token, then `interval` each; the last is `stop`."""
        ids = [*IDS[: self.tokens - 1], stop]
        sent = 0
        while sent < len(ids):
            end = min(sent + interval, len(ids)) if sent else 1
            fresh, last = ids[sent:end], end == len(ids)
            meta = {
                "id": rid,
                "finish_reason": {"type": "stop", "matched": stop} if last else None,
                "prompt_tokens": 100,
                "completion_tokens": end,
                "cached_tokens": 0,
                "weight_version": "0",
                "output_token_logprobs": [[-0.5, token, None] for token in fresh],
            }
            yield sse({"text": WORD * len(fresh), "output_ids": fresh, "meta_info": meta})
            sent = end
        yield sse(b"[DONE]")


class Connection(asyncio.Protocol):
    """HTTP/1.1 with keep-alive."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end]).lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + size:
                return
            body = bytes(self._buffer[end + 4 : end + 4 + size])
            del self._buffer[: end + 4 + size]
            self._answer(head.split(b" ", 2)[1].split(b"?")[0], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        if path == b"/generate":
            request = json.loads(body)
            params = request["sampling_params"]
            stop, interval = params.get("stop_token_ids", [0])[0], params.get("stream_interval") or 1
            self._events(list(self._answers.generate(request["rid"], stop, interval)))
        elif path.endswith(b"/chat/completions"):
            if b'"stream":true' in body.replace(b" ", b""):
                self._events(self._answers.chat)
            else:
                self._json(self._answers.whole)
        else:
            self._json(json.dumps(about(path.decode())).encode())

    def _json(self, body: bytes) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )

    def _events(self, events: list[bytes]) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for event in events:  # one write each, as an engine does
            self._transport.write(event)
        self._transport.write(b"0\r\n\r\n")


def about(path: str) -> dict[str, object]:
    """What gateways ask an engine about itself."""
    if path.endswith("/models"):
        return {"object": "list", "data": [{"id": "policy", "object": "model", "created": 1, "owned_by": "bench"}]}
    return {"status": "ok", "model_path": "policy", "served_model_name": "policy", "is_generation": True, "tp_size": 1}


async def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description="A scripted engine for benchmarks/proxy.py.")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer, at most 400")
    answers = Answers(parser.parse_args().tokens)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(answers), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
