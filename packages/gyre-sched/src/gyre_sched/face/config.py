"""The [sched.web] table of a run's config."""

from __future__ import annotations

import ipaddress

import msgspec


class WebConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[sched.web]: the scheduler's web page."""

    on: bool = True
    host: str = "127.0.0.1"  # an address, not a name; beyond loopback put TLS in front: the token travels in clear text
    port: int = 0  # 0: any free one; the run prints it
    period: float = 1.0  # seconds between two pictures of a page that is open
    readers: int = 16  # pages open at once

    def __post_init__(self) -> None:
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            raise ValueError(f"host must be an IP address such as 127.0.0.1, got {self.host!r}") from None
        if not 0 <= self.port < 1 << 16 or self.readers < 1 or not self.period > 0:
            raise ValueError("port is 0 to 65535, readers at least 1, period a positive number of seconds")
