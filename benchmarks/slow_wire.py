"""Two nodes on one machine, with a slow wire between them: network namespaces, and a process that carries packets.

    |---- node 0 ----|          pump: keeps each packet for its turn          |---- node 1 ----|
    | ranks 0, 1     | wire0 ── on the wire (bytes / rate) and for the ── wire0 | ranks 2, 3     |
    |----------------|          delay, in each direction                      |----------------|

Nothing of it has a name outside, and all of it ends with this process, however that ends.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import namespaces

_WIRE = "wire0"
TOOLS = ("ip", "unshare", "nsenter")
MTU = 60_000  # long packets: few of them, so that carrying them costs little
_WINDOW = "4096 524288 2097152"  # bytes of a connection in flight: enough for the wire, and no long queue before it
_HOLD = """\
import socket, subprocess, sys
socket.sethostname(sys.argv[1])
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
for name in ("rmem", "wmem"):
    with open(f"/proc/sys/net/ipv4/tcp_{name}", "w") as file:
        file.write(sys.argv[2])
print("ready", flush=True)
sys.stdin.read()
"""
_LATE = 1e-3  # seconds that this process may be late, in which packets of a busy wire wait for it
_TUNSETIFF, _TUN, _NO_INFO = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000


def add_options(parser: argparse.ArgumentParser, gbits: float | None, about: str) -> None:
    """Add the rate and the delay of a wire; ``about`` says what the default rate means."""
    parser.add_argument("--gbits", type=float, default=gbits, help=f"10^9 bits a second in each direction {about}")
    parser.add_argument("--delay", type=float, default=2.0, help="milliseconds from node to node")


def describe(gbits: float, delay_ms: float) -> str:
    """Return the wire in words, with the load of this machine."""
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    return f"load {load}; {gbits} Gbit/s, {delay_ms} ms"


def why_not() -> str | None:
    """Say why there can be no such nodes here, or return None."""
    trial = ("ip", "tuntap", "add", "dev", _WIRE, "mode", "tun")
    return namespaces.why_not(TOOLS, "iproute2, util-linux", ("--net", "--uts"), trial)


class Node:
    """A namespace with a host name and an address of its own, as long as its first process runs."""

    interface = _WIRE

    def __init__(self, number: int, first: int) -> None:
        self.address, self.first = f"10.78.0.{number + 1}", first

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs ``argv`` on this node."""
        return ["nsenter", "-t", str(self.first), "-u", "-n", *argv]

    def run(self, *argv: str) -> None:
        subprocess.run(self.command(argv), check=True, env=namespaces.ENVIRONMENT)

    def enter(self) -> None:
        """Move this process, which has one thread, to this node."""
        for kind, flag in (("net", _CLONE_NEWNET), ("uts", _CLONE_NEWUTS)):
            _join(self.first, kind, flag)


@contextmanager
def two_nodes(gbits: float, delay_ms: float) -> Iterator[list[Node]]:
    """Context with two nodes.

    Args:
        gbits: 10^9 bits a second in each direction.
        delay_ms: milliseconds that a packet takes from one node to the other.
    """
    with ExitStack() as stack:
        nodes = [Node(number, _hold(stack, f"node{number}")) for number in range(2)]
        command = [sys.executable, __file__, *(str(node.first) for node in nodes), str(gbits), str(delay_ms)]
        namespaces.start(stack, command)
        for node in nodes:
            node.run("ip", "addr", "add", f"{node.address}/24", "dev", node.interface)
            node.run("ip", "link", "set", node.interface, "mtu", str(MTU), "txqueuelen", "1000", "up")
        yield nodes


def _hold(stack: ExitStack, name: str) -> int:
    """Start the first process of a node and return its process id."""
    command = ["unshare", "--net", "--uts", sys.executable, "-c", _HOLD, name, _WINDOW]
    return namespaces.start(stack, command)


def _join(first: int, kind: str, flag: int) -> None:
    """Move this thread to a namespace of the process ``first``."""
    with open(f"/proc/{first}/ns/{kind}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), flag):
            raise OSError(ctypes.get_errno(), "setns")


# -------------------------------------------------------------------- the pump, in a process of its own


class _Direction:
    """Packets from one node to the other."""

    def __init__(self, source: int, target: int, rate: float, delay: float) -> None:
        self.source, self._target, self._rate, self._delay = source, target, rate, delay
        self._free = 0.0  # when the wire has sent all packets so far
        self.packets: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Put the packets that wait on the wire, each after the one before."""
        now = time.monotonic()
        for _ in range(16):
            try:
                packet = os.read(self.source, 1 << 16)
            except BlockingIOError:
                return
            self._free = max(self._free, now - _LATE) + len(packet) / self._rate
            self.packets.append((self._free + self._delay, packet))

    def deliver(self) -> None:
        """Deliver what has arrived."""
        now = time.monotonic()
        while self.packets and self.packets[0][0] <= now:
            _, packet = self.packets.popleft()
            try:
                os.write(self._target, packet)
            except OSError:  # a node without a link, or whose queue is full, loses packets
                pass


def _open_in(first: int) -> int:
    """Make the device of the wire in the network namespace of a process, and return its descriptor."""
    _join(first, "net", _CLONE_NEWNET)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", _WIRE.encode(), _TUN | _NO_INFO))
    return device


def pump(first: int, second: int, gbits: float, delay_ms: float) -> None:
    """Carry packets between the namespaces of two processes, until the input of this one ends."""
    one, other = _open_in(first), _open_in(second)
    rate, delay = gbits * 1e9 / 8, delay_ms / 1e3
    directions = [_Direction(one, other, rate, delay), _Direction(other, one, rate, delay)]
    print("ready", flush=True)
    while True:
        due = [direction.packets[0][0] for direction in directions if direction.packets]
        wait = max(0.0, min(due) - time.monotonic()) if due else 1.0
        ready, _, _ = select.select([sys.stdin, one, other], [], [], wait)
        if sys.stdin in ready:
            return
        for direction in directions:
            if direction.source in ready:
                direction.take()
            direction.deliver()


if __name__ == "__main__":
    with suppress(OSError):  # a late pump is a slower wire
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    pump(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
