"""KV pages move with a request: before it goes on at another engine, that engine fetches what the last one has of it.

    request left engine A ─▶ Pull(A, tokens) to engine B ─▶ request to B   (B restores the pages instead of computing)

An engine has a KV service a rank (`gyre_transport.kv.service`); rank i fetches from rank i. Nothing depends on it: what
is late, refused or lost is computed again, and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import numpy as np

from gyre_agent_proxy.metrics import Metrics
from gyre_transport.bus import Client
from gyre_transport.errors import BusError
from gyre_transport.kv import protocol as kv

log = logging.getLogger(__name__)

_MARGIN = 1.0  # seconds for the answer beyond what the fetch itself may take


class PageMoves:
    """Asks engines to fetch pages; `wait` seconds at most for a request, 0: never."""

    def __init__(self, metrics: Metrics, wait: float) -> None:
        self._metrics, self._wait = metrics, wait
        self._services: dict[str, Client] = {}

    async def bring(self, source: Sequence[str], target: Sequence[str], tokens: Sequence[int]) -> None:
        """Have the services at `target` fetch the pages of `tokens` from those at `source`; returns when they have.

        Does nothing where either engine has none.
        """
        if not (source and target and self._wait and tokens):
            return
        self._metrics.add("kv_moves")
        if len(source) != len(target):
            self._failed(target[0], f"{len(source)} ranks cannot be fetched by {len(target)}")
            return
        packed = np.asarray(tokens, "<u4").tobytes()
        answers = await asyncio.gather(*(self._pull(s, t, packed) for s, t in zip(source, target, strict=True)))
        self._metrics.add("kv_tokens", min(answers))

    async def _pull(self, source: str, target: str, tokens: bytes) -> int:
        """Tokens that were fetched."""
        service = self._services.setdefault(target, Client(target, kv.Reply))
        request = kv.Pull(source=source, tokens=tokens, deadline=self._wait)
        try:
            answer = await service.call(request, deadline=self._wait + _MARGIN)
        except BusError as e:
            self._failed(target, str(e))
            return 0
        if not isinstance(answer, kv.Pulled):
            self._failed(target, f"expected Pulled, got {answer!r:.100}")
            return 0
        if answer.failure:
            self._failed(target, answer.detail)
        return answer.fetched

    def _failed(self, target: str, detail: str) -> None:
        self._metrics.add("kv_moves_failed")
        log.warning("KV pages were not fetched by %s, so they are computed again: %s", target, detail)

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(service.close() for service in self._services.values()))
