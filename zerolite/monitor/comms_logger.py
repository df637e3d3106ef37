"""``comms_logger``: duration and bandwidth of each collective.

A collective that overlaps with computation has no bandwidth of its own, so each is waited for where it is launched. The
numbers of training stay the same; its speed does not.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch

from zerolite.comm.communicator import Communicator, Pending
from zerolite.comm.flight_recorder import Raw
from zerolite.config.profiling import CommsLoggerConfig
from zerolite.utils.device_timers import DeviceTimers
from zerolite.utils.sizes import format_size
from zerolite.utils.units import table

_BELOW = ("zerolite.comm.", "zerolite.monitor.")
_ABOVE = ("zerolite.", "torch.", "contextlib")


def bus_factor(op: str, ranks: int) -> float:
    """Bandwidth of the links over algorithmic bandwidth, as nccl-tests defines it (doc/PERFORMANCE.md)."""
    if op == "all_reduce":
        return 2.0 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in ("all_gather", "reduce_scatter") else 1.0


class Kind(NamedTuple):
    """Collectives that are counted together.

    Attributes:
        nbytes: of the full tensors that one concerns (of what is gathered, and not of a rank's part).
        caller: what launched it, "" without ``debug``.
        ranks: how many take part.
    """

    op: str
    tag: str
    nbytes: int
    caller: str
    ranks: int


@dataclass
class Times:
    """``count`` collectives that moved ``nbytes`` in ``seconds``, launch to end; on_links: bytes over the links."""

    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    on_links: float = 0.0

    def add(self, other: Times) -> None:
        self.count += other.count
        self.nbytes += other.nbytes
        self.seconds += other.seconds
        self.on_links += other.on_links

    @property
    def mean_ms(self) -> float:
        return self.seconds * 1e3 / self.count

    @property
    def algbw(self) -> float:
        """10^9 bytes a second; 0 where the clock has seen no time pass."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def busbw(self) -> float:
        """The same over the links: see :func:`bus_factor`."""
        return self.on_links / self.seconds / 1e9 if self.seconds else 0.0


class CommsLogger:
    """Watches communicators (see :class:`~zerolite.comm.Watcher`), on every rank.

    On CUDA the current stream waits for each collective, the host does not, and times are read when the device has
    come to them. say: prints a line, or None on ranks that print none.
    """

    def __init__(
        self, config: CommsLoggerConfig, ranks: int, device: torch.device, say: Callable[[str], None] | None
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._say = say
        self._timers = DeviceTimers(device)
        self._all: dict[Kind, Times] = {}
        self._recent: dict[Kind, Times] = {}  # since the last report

    def watch(self, comm: Communicator) -> None:
        """Measure what ``comm`` launches from now on."""
        comm.watch(self if comm.world_size == self._ranks else _OfRanks(self, comm.world_size))

    def launch(self, entry: Raw, start: Callable[[], Pending], at_once: bool) -> Pending:
        return self.measure(entry, start, self._ranks)

    def measure(self, entry: Raw, start: Callable[[], Pending], ranks: int) -> Pending:
        """One collective of so many ranks. Called by what watches their communicator."""
        op, tag, what, dtype, _ = entry
        if not self._config.measures(op):
            return start()
        if isinstance(what, int):
            nbytes = what * (dtype.itemsize if dtype is not None else 1)
        else:
            nbytes = sum(shard.numel() * shard.element_size() for shard in what) * ranks
            if not nbytes:  # nothing travels, and no record counts it
                return start()
        began = self._timers.now()
        pending = start()
        pending.wait()
        caller = _caller() if self._config.debug else ""
        kind = Kind(op, tag, nbytes, caller, ranks)
        self._timers.add(began, self._timers.now(), functools.partial(self._count, kind))
        self._timers.read()
        return pending

    def _count(self, kind: Kind, milliseconds: float) -> None:
        one = Times(1, kind.nbytes, milliseconds / 1e3, kind.nbytes * bus_factor(kind.op, kind.ranks))
        for times in (self._all, self._recent):
            times.setdefault(kind, Times()).add(one)
        if self._config.verbose and self._say is not None:
            self._say(_line(kind, one))

    def summary(self) -> list[dict[str, Any]]:
        """All collectives so far, an entry for each kind, in the order in which kinds came first:

        op, tag (what it is for), caller (with ``debug``), ranks (that take part), nbytes (of one, of its full tensors),
        count, total_bytes, mean_ms (launch to end), algbw and busbw (10^9 bytes a second). On CUDA it waits for those
        under way.
        """
        self._timers.read(wait=True)
        return [
            {
                "op": kind.op,
                "tag": kind.tag,
                **({"caller": kind.caller} if self._config.debug else {}),
                "ranks": kind.ranks,
                "nbytes": kind.nbytes,
                "count": times.count,
                "total_bytes": times.nbytes,
                "mean_ms": times.mean_ms,
                "algbw": times.algbw,
                "busbw": times.busbw,
            }
            for kind, times in self._all.items()
        ]

    def report(self, step: int) -> dict[str, float]:
        """Print the table of what was measured since the last report, and forget it; gives what monitors get: count,
        bytes, mean_ms, algbw and busbw by operation, such as "all_reduce_busbw"."""
        self._timers.read()
        recent, self._recent = self._recent, {}
        if recent and self._say is not None:
            self._say(self._table(step, recent))
        by_op: dict[str, Times] = {}
        for kind, times in recent.items():
            by_op.setdefault(kind.op, Times()).add(times)
        values: dict[str, float] = {}
        for op, times in by_op.items():
            values |= {f"{op}_count": times.count, f"{op}_bytes": times.nbytes, f"{op}_mean_ms": times.mean_ms}
            values |= {f"{op}_algbw": times.algbw, f"{op}_busbw": times.busbw}
        return values

    def _table(self, step: int, recent: Mapping[Kind, Times]) -> str:
        rows = [("operation", "of", "size", "count", "bytes", "mean ms", "alg GB/s", "bus GB/s", "launched at")]
        for kind, times in sorted(recent.items()):
            tag = kind.tag if kind.ranks == self._ranks else f"{kind.tag} ({kind.ranks} ranks)"
            sizes = format_size(kind.nbytes), str(times.count), format_size(times.nbytes)
            rows.append(
                (kind.op, tag, *sizes, f"{times.mean_ms:.3f}", f"{times.algbw:.3f}", f"{times.busbw:.3f}", kind.caller)
            )
        shown = rows if self._config.debug else [row[:-1] for row in rows]
        heading = f"step {step}: collectives of {self._ranks} ranks since the last table, each waited for at its launch"
        return "\n".join([heading, *(f"  {line}" for line in table(shown, left=2))])


class _OfRanks:
    """Watcher of a communicator of another number of ranks, for a logger."""

    def __init__(self, logger: CommsLogger, ranks: int) -> None:
        self._logger, self._ranks = logger, ranks

    def launch(self, entry: Raw, start: Callable[[], Pending], at_once: bool) -> Pending:
        return self._logger.measure(entry, start, self._ranks)


def _line(kind: Kind, times: Times) -> str:
    at = f", launched at {kind.caller}" if kind.caller else ""
    return (
        f"{kind.op} of {kind.tag}: {format_size(kind.nbytes)} in {times.mean_ms:.3f} ms, algorithmic "
        f"{times.algbw:.3f} GB/s, bus {times.busbw:.3f} GB/s{at}"
    )


def _caller() -> str:
    """The line of zerolite that asked for the collective, and the one outside of it that led there; on CUDA there is
    none for those that are launched inside backward, on autograd's own thread."""
    frame: FrameType | None = sys._getframe(1)
    inner = outer = ""
    while frame is not None and not outer:
        module = str(frame.f_globals.get("__name__", ""))
        place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        if not inner and not module.startswith(_BELOW):
            inner = place
        if inner and not module.startswith(_ABOVE):
            outer = place
        frame = frame.f_back
    return f"{inner} for {outer}" if outer not in ("", inner) else inner
