"""Two network namespaces with a link between them whose rate and delay are chosen.

What `tc netem` does, in user space, for kernels without it: each namespace has a TUN
device, and a packet that one sends reaches the other once the link would have
brought it. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import queue
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 60000
_NETNS, _ETC = Path("/run/netns"), Path("/etc/netns")


@dataclass(slots=True)
class Link:
    """A link between two namespaces; may be changed while it is used.

    Attributes:
        bytes_per_second: what passes in each direction; infinite for no limit.
        delay_seconds: how long each packet takes, in each direction.
        names: of the namespaces.
        addresses: of their ends.
    """

    bytes_per_second: float = float("inf")
    delay_seconds: float = 0.0
    names: tuple[str, str] = ("", "")
    addresses: tuple[str, str] = ("10.77.0.1", "10.77.0.2")
    _over: threading.Event = field(default_factory=threading.Event)

    def command(self, side: int, words: Sequence[str]) -> list[str]:
        """A command in one of the namespaces."""
        return ["ip", "netns", "exec", self.names[side], *words]

    def carry(self, source: int, target: int) -> None:
        """Takes packets from one device to another, until the link is closed."""
        waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        out = threading.Thread(target=self._deliver, args=(waiting, target))
        out.start()
        free = 0.0
        while not self._over.is_set():
            with contextlib.suppress(OSError):
                packet = os.read(source, _MTU + 64)
                now = time.monotonic()
                free = max(free, now) + len(packet) / self.bytes_per_second
                waiting.put((free + self.delay_seconds, packet))
        waiting.put((0.0, b""))
        out.join()

    def _deliver(
        self, waiting: queue.SimpleQueue[tuple[float, bytes]], target: int
    ) -> None:
        while True:
            due, packet = waiting.get()
            if not packet:
                return
            if (rest := due - time.monotonic()) > 0:
                time.sleep(rest)
            # A device that is gone, or full, loses packets, as links do.
            with contextlib.suppress(OSError):
                os.write(target, packet)

    def close(self) -> None:
        """Ends the carrying."""
        self._over.set()


@contextlib.contextmanager
def namespaces() -> Iterator[Link]:
    """Two namespaces, and the link between them; both go at the end.

    Raises:
        OSError: the kernel, or the user's rights, do not allow it.
    """
    made = os.getpid()
    link = Link(names=(f"cfp{made}a", f"cfp{made}b"))
    devices: list[int] = []
    threads: list[threading.Thread] = []
    try:
        for side, name in enumerate(link.names):
            _ip("netns", "add", name)
            folder = _ETC / name
            folder.mkdir(parents=True)
            # The host's own name leads to this end: what listens there is found.
            lines = f"127.0.0.1 localhost\n{link.addresses[side]} {_host()}\n"
            (folder / "hosts").write_text(lines)
            devices.append(_device(name))
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", f"{link.addresses[side]}/24", "dev", "t0")
            _ip("-n", name, "link", "set", "t0", "mtu", str(_MTU), "up")
        for pair in (devices, devices[::-1]):
            threads.append(threading.Thread(target=link.carry, args=pair, daemon=True))
            threads[-1].start()
        yield link
    finally:
        link.close()
        for name in link.names:
            subprocess.run(["ip", "netns", "del", name], check=False)
            (_ETC / name / "hosts").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                (_ETC / name).rmdir()
        with contextlib.suppress(OSError):
            _ETC.rmdir()
        for device in devices:
            os.close(device)


def _host() -> str:
    return socket.gethostname()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _device(name: str) -> int:
    """A TUN device in a namespace, made by a thread that goes there."""
    found: list[int] = []

    def make() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with (_NETNS / name).open("rb") as space:
            if libc.setns(space.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR)
        asked = struct.pack("16sH", b"t0", _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(device, _TUNSETIFF, asked)
        found.append(device)

    # A thread's namespace is its own, and ends with it.
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if not found:
        raise OSError(f"no TUN device in {name}")
    return found[0]
