"""A virtual machine with soft-RoCE, for machines without an RDMA device and without the right to load modules.

QEMU emulates it (no KVM is needed) with Debian's kernel, which is downloaded with apt and never installed. The guest
sees the host's files read-only, so this checkout and its environment are simply there; a folder takes what it writes.

    rc        the job's exit code: the only sign that it ran to its end
    job.log   what the job said
    console   what the kernel said
"""

from __future__ import annotations

import gzip
import io
import os
import re
import shlex
import shutil
import socket
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_MODULES = (
    "virtio_pci", "virtio_net", "virtio_rng", "9pnet_virtio", "9p", "crc32_generic", "ib_uverbs", "rdma_rxe",
)  # fmt: skip
_KERNEL_FLAGS = (
    "console=ttyS0 quiet panic=-1 mitigations=off nokaslr no_timer_check nowatchdog rcupdate.rcu_cpu_stall_suppress=1"
)
_APPLETS = ("sh", "mount", "umount", "insmod", "mkdir", "tr", "chroot", "ip", "poweroff")
_MEMORY = 1_536  # MiB
_DOWNLOAD = 300  # seconds


class Unavailable(Exception):
    """What a virtual machine needs cannot be had here."""


class Image(NamedTuple):
    """What a machine starts from."""

    kernel: Path
    initrd: Path


def prepare(cache: Path) -> Image:
    """Download a kernel and a shell into `cache`, unless they are there. Raises `Unavailable`."""
    for program in ("qemu-system-x86_64", "apt-get", "apt-cache", "dpkg-deb", "rdma"):
        if shutil.which(program) is None:
            raise Unavailable(f"no {program}; install qemu-system-x86 and iproute2 on a Debian machine")
    if not Path("/etc/libibverbs.d/rxe.driver").exists():
        raise Unavailable("no provider for soft-RoCE; install ibverbs-providers")
    cache.mkdir(parents=True, exist_ok=True)
    depends = _run("apt-cache", "depends", "linux-image-amd64")
    package = re.search(r"Depends: (linux-image-\d\S+)", depends)
    if package is None:
        raise Unavailable("apt offers no linux-image-amd64")
    version = package[1].removeprefix("linux-image-")
    image = Image(cache / f"vmlinuz-{version}", cache / f"initrd-{version}.gz")
    if not image.kernel.exists():
        _unpack(cache, package[1], version)
    new = image.initrd.with_suffix(f".{os.getpid()}")
    new.write_bytes(gzip.compress(b"".join(_archive(cache / version, cache / "busybox")), 1))
    os.replace(new, image.initrd)
    return image


def _unpack(cache: Path, package: str, version: str) -> None:
    """The kernel and its modules, and a static shell."""
    for name in (package, "busybox-static"):
        _run("apt-get", "download", "-qq", name, cwd=cache)
    keep = re.compile(r"\./lib/modules/.*\.ko$")
    with _contents(cache, package) as files:
        for file in files:
            data = files.extractfile(file)
            if data is None:
                continue
            if file.name == f"./boot/vmlinuz-{version}":
                kernel = data.read()
            elif keep.match(file.name):
                (cache / version).mkdir(exist_ok=True)
                (cache / version / Path(file.name).name).write_bytes(data.read())
    with _contents(cache, "busybox-static") as files:
        for file in files:
            if file.name.endswith("/busybox") and (data := files.extractfile(file)):
                (cache / "busybox").write_bytes(data.read())
                break
    for file in cache.glob("*.deb"):
        file.unlink()
    (cache / f"vmlinuz-{version}").write_bytes(kernel)  # last: the sign that all is there


def _contents(cache: Path, package: str) -> tarfile.TarFile:
    (deb,) = cache.glob(f"{package}_*.deb")
    tar = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=subprocess.PIPE, check=True).stdout
    return tarfile.open(fileobj=io.BytesIO(tar))


def _run(*argv: str, cwd: Path | None = None) -> str:
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=_DOWNLOAD)
    if done.returncode:
        raise Unavailable(f"`{shlex.join(argv)}` failed with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def ordered(folder: Path, names: Iterable[str]) -> list[str]:
    """Files of the modules `names` and of all they depend on, in the order they load in."""
    found: dict[str, None] = {}

    def add(name: str) -> None:
        file = next((f for f in (f"{name}.ko", f"{name.replace('_', '-')}.ko") if (folder / f).exists()), None)
        if file is None or file in found:  # built into the kernel, or there already
            return
        depends = re.search(rb"\0depends=([^\0]*)\0", (folder / file).read_bytes())
        for needed in depends[1].decode().split(",") if depends else ():
            if needed:
                add(needed)
        found[file] = None

    for name in names:
        add(name)
    return list(found)


def _archive(modules: Path, busybox: Path) -> Iterator[bytes]:
    """The first file system, in the kernel's cpio format."""
    order = ordered(modules, _MODULES)
    for folder in ("bin", "dev", "proc", "sys", "system", "modules"):
        yield _entry(folder, 0o040755)
    yield _entry("init", 0o100755, (Path(__file__).parent / "init.sh").read_bytes())
    yield _entry("bin/busybox", 0o100755, busybox.read_bytes())
    for applet in _APPLETS:
        yield _entry(f"bin/{applet}", 0o120777, b"busybox")
    yield _entry("modules/order", 0o100644, "".join(f"{m}\n" for m in order).encode())
    for module in order:
        yield _entry(f"modules/{module}", 0o100644, (modules / module).read_bytes())
    yield _entry("TRAILER!!!", 0)


def _entry(name: str, mode: int, data: bytes = b"") -> bytes:
    """A file of a cpio archive ("newc")."""
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % f for f in fields) + name.encode() + b"\0"
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)


class Machine:
    """A machine that runs one job and goes off; a context manager that ends it in any case."""

    def __init__(
        self, image: Image, out: Path, job: str, *, address: str = "10.9.0.1", link: Sequence[str] = (), cpus: int = 2
    ) -> None:
        """out: an empty folder. job: a shell script. link: QEMU's options of a network (`linked`); default: no peer."""
        self.out, self.console = out, out.parent / f"{out.name}.console"
        (out / "job").write_text(job)
        share = "local,security_model=none,multidevs=remap"
        netdev = link or ("-netdev", "user,id=net,restrict=on")
        argv = [
            "qemu-system-x86_64", "-M", "q35", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max",
            "-m", str(_MEMORY), "-smp", str(cpus), "-kernel", str(image.kernel), "-initrd", str(image.initrd),
            "-append", f"{_KERNEL_FLAGS} gyre.out={out} gyre.address={address}",
            "-fsdev", f"{share},id=files,path=/,readonly=on", "-device", "virtio-9p-pci,fsdev=files,mount_tag=files",
            "-fsdev", f"{share},id=out,path={out}", "-device", "virtio-9p-pci,fsdev=out,mount_tag=out",
            *netdev, "-device", f"virtio-net-pci,netdev=net,mac={_mac(address)},romfile=",
            "-device", "virtio-rng-pci",
            "-display", "none", "-vga", "none", "-serial", f"file:{self.console}", "-monitor", "none", "-no-reboot",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def wait(self, deadline: float) -> str:
        """What the job said, once it has ended well within `deadline` seconds; else an AssertionError says all."""
        try:
            said, _ = self.process.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            self.close()
            said = f"(ended after {deadline} seconds)".encode()
        log = self._text(self.out / "job.log")
        rc = self._text(self.out / "rc").strip()
        if rc == "0":
            return log
        console = self._text(self.console)
        raise AssertionError(
            f"the job in the virtual machine {f'ended with {rc}' if rc else 'never ended'}\n"
            f"--- job ---\n{log[-20_000:]}\n--- console ---\n{console[-5_000:]}\n"
            f"--- qemu ---\n{said.decode(errors='replace')[-2_000:]}"
        )

    @staticmethod
    def _text(path: Path) -> str:
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        """End the machine. Idempotent."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def linked() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Options of two machines' network cards that share one cable, in the order the machines are to be started in."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return ("-netdev", f"socket,id=net,listen=127.0.0.1:{port}"), ("-netdev", f"socket,id=net,connect=127.0.0.1:{port}")


def _mac(address: str) -> str:
    return "52:54:00:" + ":".join(f"{int(n):02x}" for n in address.split(".")[1:])
