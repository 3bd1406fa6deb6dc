"""The RDMA backend where there is no device: what it decides, and what it says. `verbs/` runs the rest."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from gyre_transport.backends.verbs import build, fabric, gpu, library
from gyre_transport.backends.verbs.channel import VerbsChannel, avoided
from gyre_transport.backends.verbs.fabric import Gid, Port, choose, ports
from gyre_transport.backends.verbs.handshake import Accept, Decline, Offer, Side, decode_answer, decode_offer, encode
from gyre_transport.backends.verbs.owner import Exposures
from gyre_transport.backends.verbs.queues import timeout
from gyre_transport.control import Export
from gyre_transport.errors import Unreachable
from gyre_transport.memory import Descriptor, Region, allocate, read
from gyre_transport.run import TransportConfig

LINK_LOCAL = Gid(0, "fe80:0000:0000:0000:5054:00ff:fe09:0001", "RoCE v2")
TEN = Gid(1, "0000:0000:0000:0000:0000:ffff:0a09:0001", "RoCE v2")
TEN_V1 = Gid(2, "0000:0000:0000:0000:0000:ffff:0a09:0001", "IB/RoCE v1")
OTHER_NET = Gid(1, "0000:0000:0000:0000:0000:ffff:c0a8:0107", "RoCE v2")
ROCE = Port("mlx5_0", 1, "Ethernet", (LINK_LOCAL, TEN_V1, TEN))
ROCE_2 = Port("mlx5_1", 1, "Ethernet", (OTHER_NET,))
SUBNET = Gid(0, "fe80:0000:0000:0000:b859:9f03:00d1:a2b4", "IB/RoCE v1")
IB = Port("mlx5_2", 1, "InfiniBand", (SUBNET,))
SIDE = Side(link="Ethernet", gid=TEN.text, lid=0, mtu=5, serves=16, queue_pairs=(17, 18), psn=3)


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    for device, state, link, gids in (
        ("mlx5_0", "4: ACTIVE", "Ethernet", [LINK_LOCAL, TEN]),
        ("mlx5_1", "1: DOWN", "Ethernet", [OTHER_NET]),
        ("mlx5_2", "4: ACTIVE", "InfiniBand", [SUBNET]),
    ):
        port = tmp_path / device / "ports" / "1"
        (port / "gids").mkdir(parents=True)
        (port / "gid_attrs" / "types").mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{link}\n")
        for gid in gids:
            (port / "gids" / str(gid.index)).write_text(f"{gid.text}\n")
            (port / "gid_attrs" / "types" / str(gid.index)).write_text(f"{gid.kind}\n")
        (port / "gids" / "10").write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    return tmp_path


def test_active_ports_and_their_addresses(sysfs):
    found = ports(sysfs)
    assert [str(p) for p in found] == ["mlx5_0:1", "mlx5_2:1"]
    assert found[0].gids == (LINK_LOCAL, TEN)
    assert [g.address for g in found[0].gids] == ["fe80::5054:ff:fe09:1", "10.9.0.1"]
    assert ports(sysfs / "nothing") == []


def test_whether_a_port_is_active_is_known_without_its_addresses(sysfs, monkeypatch):
    looked_at = []
    plain = fabric._read
    monkeypatch.setattr(fabric, "_read", lambda path: looked_at.append(path.name) or plain(path))
    assert fabric.active(sysfs)
    assert set(looked_at) == {"state"}
    (sysfs / "mlx5_0" / "ports" / "1" / "state").write_text("1: DOWN\n")
    (sysfs / "mlx5_2" / "ports" / "1" / "state").write_text("2: INIT\n")
    assert not fabric.active(sysfs)
    assert not fabric.active(sysfs / "nothing")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"links": ["Ethernet"], "near": "10.9.0.1"}, (ROCE, TEN)),
        ({"links": ["Ethernet"], "near": "192.168.1.7"}, (ROCE_2, OTHER_NET)),  # the network of the tcp connection
        ({"links": ["Ethernet"], "near": "127.0.0.1"}, (ROCE, TEN)),  # routable before link-local, v2 before v1
        ({"links": ["Ethernet"], "near": "fe80::5054:ff:fe09:1"}, (ROCE, LINK_LOCAL)),
        ({"links": ["Ethernet"], "near": "192.168.1.7", "device": "mlx5_0"}, (ROCE, TEN)),
        ({"links": ["Ethernet"], "device": "mlx5_1:1"}, (ROCE_2, OTHER_NET)),
        ({"links": ["Ethernet"], "device": "mlx5_1:2"}, None),
        ({"links": ["InfiniBand"], "near": "10.9.0.1"}, (IB, SUBNET)),
        ({"links": ["InfiniBand"], "device": "mlx5_0"}, None),
        ({"links": []}, None),
    ],
)
def test_the_port_a_peer_is_reached_by(asked, expected):
    assert choose([ROCE, ROCE_2, IB], **asked) == expected


@pytest.mark.parametrize(
    ("error", "here", "says"),
    [
        (
            "version `IBVERBS_PRIVATE_59' not found (by base.so)",
            34,
            "built for rdma-core 59.* pyverbs 56.0rc5",
        ),
        ("version `IBVERBS_PRIVATE_34' not found", 59, "built for rdma-core 34 to 56.* pyverbs 59.0"),
        ("version `IBVERBS_PRIVATE_48' not found", 34, "of the private version 48.* pyverbs 56.0rc5"),
        ("version `IBVERBS_PRIVATE_34' not found", 60, "build pyverbs from the sources .*private version 60"),
        ("No module named 'pyverbs'", 34, "No module named 'pyverbs'.* pyverbs 56.0rc5: `python -m gyre_transport"),
        ("libibverbs.so.1: cannot open shared object file", None, "rdma-core is missing"),
    ],
)
def test_what_a_pyverbs_that_cannot_be_imported_means(error, here, says, monkeypatch):
    def fail() -> None:
        raise ImportError(error)

    monkeypatch.setattr(library, "_load", fail)
    monkeypatch.setattr(library, "system_abi", lambda: here)
    with pytest.raises(Unreachable, match=says):
        library.load()


def test_offers_that_make_no_sense_are_refused():
    replace = msgspec.structs.replace
    assert decode_offer(encode(Offer(side=SIDE))).side == SIDE
    for wrong in (
        replace(SIDE, queue_pairs=()),
        replace(SIDE, queue_pairs=tuple(range(17))),
        replace(SIDE, queue_pairs=(1 << 24,)),
        replace(SIDE, psn=-1),
        replace(SIDE, mtu=9),
        replace(SIDE, gid="10.9.0.1"),
        replace(SIDE, gid="::1"),
        replace(SIDE, lid=1 << 16),
        replace(SIDE, serves=256),
    ):
        with pytest.raises(ValueError, match=r"not an end|expected"):
            decode_offer(encode(Offer(side=wrong)))
    with pytest.raises(ValueError, match="not an end"):
        decode_answer(encode(Accept(side=replace(SIDE, gid="::1"), address=0, rkey=0)))
    for noise in (b"", b"\x00", msgspec.msgpack.encode({"type": "accept"})):
        with pytest.raises(msgspec.DecodeError):
            decode_offer(noise)


def test_an_owner_without_a_device_declines(monkeypatch):
    monkeypatch.setattr(fabric, "ports", list)
    exposures = Exposures(TransportConfig())
    assert exposures.links == ()
    reached, answer = exposures.connect(Export(b"", memoryview(b"")), encode(Offer(side=SIDE)), near="127.0.0.1")
    assert reached is None
    assert "no active RDMA port" in str(decode_answer(answer))
    reached, answer = exposures.connect(Export(b"", memoryview(b"")), b"noise", near="127.0.0.1")
    assert reached is None
    assert isinstance(decode_answer(answer), Decline)


@pytest.mark.parametrize(("backends", "links"), [(("shm", "verbs", "tcp"), ("Ethernet",)), (("shm", "tcp"), ())])
def test_an_owner_says_what_it_may_use(monkeypatch, backends, links):
    monkeypatch.setattr(fabric, "ports", lambda: [ROCE, IB])
    assert Exposures(TransportConfig(backends=backends, rdma_device="mlx5_0")).links == links


@pytest.fixture
def offered(monkeypatch) -> tuple[Region, Descriptor]:
    """Memory whose owner says that it has RDMA on Ethernet; nothing of that is here."""
    avoided.clear()
    with allocate(100) as region:
        endpoint = msgspec.structs.replace(region.descriptor.endpoint, rdma=("Ethernet",))
        yield msgspec.structs.replace(region.descriptor, endpoint=endpoint)
    avoided.clear()


def test_a_reader_without_a_device_takes_the_next_way(offered, monkeypatch):
    monkeypatch.setattr(fabric, "ports", list)
    monkeypatch.setattr(library, "_load", lambda: SimpleLibrary)
    with pytest.raises(Unreachable, match="has RDMA on Ethernet; no active port here has"):
        read(offered, bytearray(100), deadline=10, via="verbs")
    with pytest.raises(Unreachable, match=r"tried before; again in \d+ seconds"):
        read(offered, bytearray(100), deadline=10, via="verbs")
    from gyre_transport import endpoint

    monkeypatch.setattr(endpoint, "_config", TransportConfig(backends=("verbs", "tcp")))
    into = np.ones(100, np.uint8)
    read(offered, into, deadline=10)
    assert not into.any()


def test_an_owner_without_a_device_is_not_asked():
    with allocate(100) as region, pytest.raises(Unreachable, match="has no RDMA device"):
        VerbsChannel(
            msgspec.structs.replace(
                region.descriptor, endpoint=msgspec.structs.replace(region.descriptor.endpoint, rdma=())
            ),
            TransportConfig(),
            end=0.0,
            adopt=lambda interrupt: None,
        )


class SimpleLibrary:
    """pyverbs, as far as it is looked at before a device is."""

    class enums:  # noqa: N801
        IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_OP_ERR = 10, 9, 11
        IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_WR_FLUSH_ERR = 12, 13, 5


@pytest.mark.parametrize(
    ("machine", "way", "says"),
    [
        ({}, "staged", "no GPU"),
        ({"gpus": 8, "direct": True, "dmabuf": True, "kernel": (6, 8)}, "dmabuf", "dma-buf"),
        ({"gpus": 8, "direct": True, "dmabuf": True, "kernel": (5, 4)}, "staged", "load the kernel module"),
        ({"gpus": 8, "direct": True, "dmabuf": True, "peermem": True, "kernel": (5, 4)}, "peermem", "nvidia-peermem"),
        ({"gpus": 8, "direct": True, "kernel": (6, 8)}, "staged", "load the kernel module nvidia-peermem"),
        ({"gpus": 1, "dmabuf": True, "peermem": True, "kernel": (6, 8)}, "staged", "does not offer GPUDirect"),
    ],
)
def test_how_gpu_memory_goes_over_rdma(machine, way, says):
    assert gpu.way(gpu.Machine(**machine)) == way
    assert says in gpu.how(gpu.Machine(**machine))


def test_what_the_kernel_says_of_gpus(tmp_path):
    assert not gpu.look(tmp_path).peermem
    (tmp_path / "nvidia_peermem").mkdir()
    found = gpu.look(tmp_path)
    assert found.peermem
    assert found.kernel > (3, 0)


@pytest.mark.parametrize("patience", [0.01, 0.4, 1.0, 10.0, 3600.0])
def test_a_silent_peer_is_an_error_after_a_while(patience):
    tries, tick = 7, 4.096e-6
    assert patience <= tries * tick * 2 ** timeout(patience) < 2 * patience


def test_a_wheel_that_is_kept_is_installed_and_not_built_again(tmp_path, monkeypatch):
    calls = []

    class Tools:
        def __init__(self, folder: Path) -> None: ...

        def run(self, *arguments: str) -> None:
            calls.append(arguments)

    monkeypatch.setattr(build, "_Tools", Tools)
    monkeypatch.setattr(build, "_check", lambda: None)
    wheel = tmp_path / f"pyverbs-56.0rc5-{build._tag()}.whl"
    wheel.touch()
    assert build.main(["--wheels", str(tmp_path), "--version", "56.0rc5"]) == 0
    assert [(c[0], c[-1]) for c in calls] == [("pip", str(wheel))]


def test_a_build_that_cannot_be_says_why(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(library, "system_abi", lambda: 60)
    assert build.main(["--wheels", str(tmp_path)]) == 1
    assert "private version 60" in capsys.readouterr().err
    monkeypatch.setattr(library, "system_abi", lambda: None)
    assert build.main(["--wheels", str(tmp_path)]) == 1
    assert "rdma-core is missing" in capsys.readouterr().err
