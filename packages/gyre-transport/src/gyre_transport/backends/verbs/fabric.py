"""The RDMA ports of this machine, as sysfs tells: nothing is opened, pyverbs is not needed.

/sys/class/infiniband/<device>/ports/<n>/{state,link_layer,gids/<i>,gid_attrs/types/<i>}
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from pathlib import Path

import msgspec

_ROOT = Path("/sys/class/infiniband")
_ACTIVE = "4: ACTIVE"
_NO_GID = ":".join(["0000"] * 8)


class Gid(msgspec.Struct, frozen=True):
    """An address of a port."""

    index: int  # in the port's table
    text: str  # eight words
    kind: str  # "RoCE v2", "IB/RoCE v1"

    @property
    def address(self) -> str:
        """The IP address it stands for; an InfiniBand GID reads as an IPv6 address."""
        words = ipaddress.IPv6Address(self.text)
        return str(words.ipv4_mapped or words)


class Port(msgspec.Struct, frozen=True):
    """An active port."""

    device: str
    number: int
    link: str  # "InfiniBand" | "Ethernet"
    gids: tuple[Gid, ...]

    def __str__(self) -> str:
        return f"{self.device}:{self.number}"


def ports(root: Path = _ROOT) -> list[Port]:
    """The active ports, in the order of their names."""
    found = []
    for path in sorted(root.glob("*/ports/*")):
        if _read(path / "state") == _ACTIVE:
            link = _read(path / "link_layer")
            found.append(Port(path.parent.parent.name, int(path.name), link, tuple(_gids(path))))
    return found


def active(root: Path = _ROOT) -> bool:
    """Whether there is an active port; for every read, so its table of addresses, often of 256 or more, is not read."""
    return any(_read(path / "state") == _ACTIVE for path in root.glob("*/ports/*"))


def choose(
    candidates: Iterable[Port], *, links: Iterable[str], device: str = "", near: str = ""
) -> tuple[Port, Gid] | None:
    """The port, and its address, to reach a peer by; None when there is none.

    links: link layers the peer has. device: "name" or "name:port" to use and no other; "": any.
    near: local IP address of the tcp connection to the peer: the port that has it is on the same network.
    """
    usable = [
        (port, gid)
        for port in candidates
        if port.link in links and device in ("", port.device, str(port))
        for gid in port.gids
    ]
    return min(usable, key=lambda found: _rank(found[0], found[1], near), default=None)


def _rank(port: Port, gid: Gid, near: str) -> tuple[bool, int, bool]:
    """Smaller is better."""
    if port.link != "Ethernet":
        return False, gid.index, False
    ipv4 = "." in gid.address
    return gid.address != near, 0 if gid.kind == "RoCE v2" else 1, not ipv4


def _gids(port: Path) -> Iterable[Gid]:
    for path in sorted((port / "gids").glob("*"), key=lambda p: int(p.name)):
        text = _read(path)
        if text and text != _NO_GID:
            yield Gid(int(path.name), text, _read(port / "gid_attrs" / "types" / path.name))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # an empty entry of the table, or a port that goes
        return ""
