"""Counters, written to a file that always holds a whole snapshot: on change, at most once a second, and at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

COUNTERS = (
    "executions",  # seen
    "calls",  # answered and recorded
    "calls_failed",  # answered with an error that is not the harness's own
    "calls_refused",  # answered with an error because of what the request says
    "calls_aborted",  # nobody waited for the answer any more
    "calls_moved",  # calls that more than one engine worked on
    "calls_untrainable",  # answered, but without log-probabilities
    "moves",  # requests that left a draining engine
    "attempts",  # requests sent to engines
    "kv_moves",  # requests whose KV pages another engine was asked to fetch
    "kv_moves_failed",  # of those, fetches that did not work out
    "kv_tokens",  # tokens of the pages that were fetched
    "relocated",  # requests that went to another engine than their execution's last one, and were answered
    "relocated_tokens",  # tokens computed for them before that the new engine had not computed itself
    "relocated_recomputed",  # of those, tokens it computed again; the others' pages were restored
    "restarts",  # constrained answers that an engine did not finish, begun again
    "engine_failures",  # requests lost at an engine
    "duplicates",  # requests that joined an earlier one's attempt
    "logs_cut",  # logs that ended in part of a record, which was cut off
    "undelivered",  # answers whose connection was lost
    "deliveries_unrecorded",  # the log does not say that they arrived, or did not
    "executions_set_aside",  # silent ones, to be read from their logs when they go on
    "forks",  # prompts that could not be proven to extend the call they continue
    "roots",  # prompts that continue no call
    "spliced_turns",  # turns put into a prompt as sampled elsewhere in the execution
    "foreign_turns",  # assistant turns that were not sampled here
    "restored_turns",  # turns that came back changed
    "unknown_roles",  # calls no role rule matched
    "media_omitted",  # images and files that the model cannot read, replaced by a note
    "left_out",  # hosted tools and their items, which nobody here can run
    "demands_ignored",  # what requests demand of an answer's form and is not followed
    "tools_ignored",  # calls whose tools the chat template does not mention
    "prompt_tokens",
    "completion_tokens",
)


class Metrics:
    """Named counters."""

    def __init__(self, path: Path | None = None) -> None:
        self.counts: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._path = path
        self._dirty = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        if path is not None and path.is_file():  # a restarted proxy goes on counting
            with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
                self.counts |= msgspec.json.decode(path.read_bytes(), type=dict[str, int])

    def add(self, name: str, n: int = 1) -> None:
        """Count; `name` is one of `COUNTERS`."""
        if n:
            self.counts[name] += n
            self._dirty.set()

    def start(self) -> None:
        """Write from now on."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._write()
            self._task = asyncio.create_task(self._run(), name="metrics")

    async def stop(self) -> None:
        """Write a last time."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._write()

    async def _run(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            self._write()
            await asyncio.sleep(1.0)

    def _write(self) -> None:
        assert self._path is not None  # noqa: S101  (callers checked)
        partial = self._path.with_name(f".{self._path.name}.partial")
        try:
            partial.write_bytes(msgspec.json.format(msgspec.json.encode(self.counts), indent=1) + b"\n")
            os.replace(partial, self._path)
        except OSError as e:
            log.error("cannot write %s: %s", self._path, e)
