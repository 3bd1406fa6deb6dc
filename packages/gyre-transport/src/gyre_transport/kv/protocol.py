"""Messages of a linker's service. Others read pages by `Lookup` and `Acknowledge`; proxies and agents say the rest.

    proxy ──Pull(source, tokens)──▶ destination ──Lookup──▶ source
                                        │  ◀── Pages (a lease) ─┘
                                        └── one-sided reads, then Acknowledge ──▶ source

A lease keeps its pages where they are until it is acknowledged or its time is over, counted from when `Lookup` was
handled. The reader counts the same time from before it asked, so it stops first.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from gyre_transport.descriptor import Descriptor

HASH_BYTES = 32


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What the bytes of a page mean; pages of another layout are refused."""

    model: str
    dtype: str  # of the engine's pool, in torch's words
    page_size: int  # tokens
    page_nbytes: int
    layers: int
    rank: str  # "tp=0/2 pp=0/1"


class Lookup(msgspec.Struct, frozen=True, kw_only=True, tag="lookup"):
    """Which of these pages, from the first on, are here? Reply: `Pages`. Offloads under way are waited for."""

    layout: Layout
    version: str  # of the weights
    hashes: bytes  # HASH_BYTES a page, chained: each covers all tokens up to its page's last


class Acknowledge(msgspec.Struct, frozen=True, kw_only=True, tag="acknowledge"):
    """The pages of a lease were read, or are not wanted any more. Reply: `Done`; also for a lease that is over."""

    lease: int


class Pull(msgspec.Struct, frozen=True, kw_only=True, tag="pull"):
    """Fetch the pages of `tokens` from the service at `source`, at most `deadline` seconds. Reply: `Pulled`."""

    source: str
    tokens: bytes  # uint32 LE: prompt and output so far
    deadline: float


class Hold(msgspec.Struct, frozen=True, kw_only=True, tag="hold"):
    """The engine is about to leave rollout: keep its pages for `seconds` although its cache is flushed, then free their
    memory. Pages of other weights than the engine's go at once all the same. Reply: `Done`."""

    seconds: float


class GetCounts(msgspec.Struct, frozen=True, kw_only=True, tag="get_counts"):
    """Reply: `Counted`."""


PROTOCOL = ("kv", 1)  # raised when a message of an older version would be misread
Request = Annotated[Lookup | Acknowledge | Pull | Hold | GetCounts, PROTOCOL]


class Pages(msgspec.Struct, frozen=True, kw_only=True, tag="pages"):
    """The pages that are here, a prefix of those asked for: page i lies at `slots[i] * page_nbytes` of the region."""

    lease: int  # 0: none were found
    slots: tuple[int, ...] = ()
    descriptor: Descriptor | None = None
    seconds: float = 0.0  # that the lease lasts


class Pulled(msgspec.Struct, frozen=True, kw_only=True, tag="pulled"):
    """`tokens` of those asked for can be restored here now. `failure`: why there are not more, in one word of
    `counts.FAILURES`; empty when the source had no more."""

    tokens: int
    fetched: int = 0  # tokens that came from the source
    nbytes: int = 0
    seconds: float = 0.0
    failure: str = ""
    detail: str = ""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """It was done."""


class Counted(msgspec.Struct, frozen=True, kw_only=True, tag="counted"):
    """The linker's counters since its start; `counts.COUNTERS` says what they mean."""

    counts: dict[str, int]


Reply = Annotated[Pages | Pulled | Done | Counted, PROTOCOL]
