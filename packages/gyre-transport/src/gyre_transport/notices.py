"""What readers say to the owner of the memory they have read: notices that ride on a transfer.

    notices = Notices()
    region = register(pages, calls=notices)                    owner
    read(region.descriptor, into, deadline=5, notify=b"page 7 is here")       reader
    notices.take(deadline=30)                                  owner: may free the page now

A notice is sent once the reader has every byte, and knows them to be the registered ones; the read returns when the
owner has the notice. A read that fails after that, because the acknowledgement was lost, does not take it back.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import msgspec

from gyre_transport.control import Caller
from gyre_transport.errors import DataError, DeadlineExceeded

MAX_PAYLOAD = 1 << 10  # bytes


class Notify(msgspec.Struct, frozen=True, kw_only=True, tag="notify"):
    """The reader is done."""

    payload: bytes


class Notices:
    """Notices on any number of regions, oldest first: pass it as their `calls`. most: waiting; others are refused."""

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._waiting: deque[bytes] = deque()
        self._came = threading.Condition()

    def __call__(self, payload: bytes, caller: Caller) -> bytes:
        """Take a notice in; in the thread that serves reads. Raises `DataError` when too many wait."""
        notice = msgspec.msgpack.decode(payload, type=Notify)
        with self._came:
            if len(self._waiting) >= self._most:
                raise DataError(f"{self._most} notices wait to be taken; take them, or allow more")
            self._waiting.append(notice.payload)
            self._came.notify()
        return b""

    def take(self, deadline: float) -> bytes:
        """The payload of the oldest notice. deadline: seconds from now. Raises `DeadlineExceeded`."""
        end = time.monotonic() + deadline
        with self._came:
            while not self._waiting:
                left = end - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(f"no notice came within {deadline:g} s")
                self._came.wait(left)
            return self._waiting.popleft()

    def __len__(self) -> int:
        return len(self._waiting)


def encode(payload: bytes) -> bytes:
    """The call that carries `payload`. Raises `DataError` when it is too long."""
    if len(payload) > MAX_PAYLOAD:
        raise DataError(f"expected a notice of at most {MAX_PAYLOAD:,} bytes, got {len(payload):,}; send a name")
    return msgspec.msgpack.encode(Notify(payload=payload))
