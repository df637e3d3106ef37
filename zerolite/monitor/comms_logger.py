"""``comms_logger``: duration and bandwidth of each collective.

The bandwidth of a collective that overlaps with computation cannot be measured. So the logger waits for each one where
it is launched. Training computes the same numbers, but runs slower.
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
from zerolite.utils.text import format_size, table

_BELOW = ("zerolite.comm.", "zerolite.monitor.")  # modules between the caller in zerolite and this logger
_ABOVE = ("zerolite.", "torch.", "contextlib")  # modules between the user's code and that caller


def bus_factor(op: str, ranks: int) -> float:
    """Return bus bandwidth divided by algorithmic bandwidth, as nccl-tests defines them (its doc/PERFORMANCE.md)."""
    # An all-reduce is a reduce-scatter and an all-gather: each sends (ranks - 1) of the `ranks` parts.
    if op == "all_reduce":
        return 2.0 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in ("all_gather", "reduce_scatter") else 1.0


class Kind(NamedTuple):
    """Collectives that are counted together.

    Attributes:
        op: operation, such as "all_gather".
        tag: purpose of the collective.
        nbytes: bytes of the full tensors of one collective, not of one rank's part.
        caller: line that launched it; "" without ``debug``.
        ranks: number of ranks that take part.
    """

    op: str
    tag: str
    nbytes: int
    caller: str
    ranks: int


@dataclass
class Times:
    """Sums over collectives.

    Attributes:
        count: number of collectives.
        nbytes: bytes of their full tensors.
        seconds: their durations, from launch to end.
        on_links: ``nbytes`` times :func:`bus_factor`.
    """

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
        """Algorithmic bandwidth in 10^9 bytes per second; 0 if the duration is below the clock's resolution."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def busbw(self) -> float:
        """Bus bandwidth in 10^9 bytes per second: see :func:`bus_factor`."""
        return self.on_links / self.seconds / 1e9 if self.seconds else 0.0


class CommsLogger:
    """Watcher of communicators that times their collectives (see :class:`~zerolite.comm.Watcher`), on every rank.

    On CUDA the current stream waits for each collective, and the host does not. Times are CUDA events, read after the
    device has passed them.
    """

    def __init__(
        self, config: CommsLoggerConfig, ranks: int, device: torch.device, print_text: Callable[[str], None] | None
    ) -> None:
        """
        Args:
            config: the block ``comms_logger``.
            ranks: size of the data-parallel group.
            device: the engine's device.
            print_text: prints a line; None on ranks that print nothing.
        """
        self._config = config
        self._ranks = ranks
        self._print = print_text
        self._timers = DeviceTimers(device)
        self._all: dict[Kind, Times] = {}
        self._recent: dict[Kind, Times] = {}  # since the last report

    def watch(self, comm: Communicator) -> None:
        """Measure all collectives of ``comm`` from now on."""
        comm.watch(self if comm.world_size == self._ranks else _OfRanks(self, comm.world_size))

    def launch(self, entry: Raw, start: Callable[[], Pending], at_once: bool) -> Pending:
        return self.measure(entry, start, self._ranks)

    def measure(self, entry: Raw, start: Callable[[], Pending], ranks: int) -> Pending:
        """Launch a collective of ``ranks`` ranks by ``start()``, wait for it and record its time."""
        op, tag, what, dtype, _ = entry
        if not self._config.measures(op):
            return start()
        if isinstance(what, int):
            nbytes = what * (dtype.itemsize if dtype is not None else 1)
        else:
            nbytes = sum(shard.numel() * shard.element_size() for shard in what) * ranks
            if not nbytes:  # all shards are empty, so nothing is sent
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
        if self._config.verbose and self._print is not None:
            self._print(_line(kind, one))

    def summary(self) -> list[dict[str, Any]]:
        """Return one entry per kind of collective so far, in the order of their first launch.

        On CUDA it waits for the collectives in flight.

        Returns:
            Dictionaries with the keys of :class:`Kind` (``caller`` only with ``debug``), and count, total_bytes,
            mean_ms (launch to end), algbw and busbw (10^9 bytes per second).
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
        """Print the table of all collectives since the last report, and start a new one.

        Returns:
            Values for the monitors: count, bytes, mean_ms, algbw and busbw of each operation, named like
            "all_reduce_busbw".
        """
        self._timers.read()
        recent, self._recent = self._recent, {}
        if recent and self._print is not None:
            self._print(self._table(step, recent))
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
        columns = rows if self._config.debug else [row[:-1] for row in rows]
        heading = f"step {step}: collectives of {self._ranks} ranks since the last table, each waited for at its launch"
        return "\n".join([heading, *(f"  {line}" for line in table(columns, left=2))])


class _OfRanks:
    """Watcher of a communicator whose group is not of the logger's size, such as a tensor-parallel group."""

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
    """Return the line of zerolite that called the collective, and the user's line that led to it.

    On CUDA collectives inside backward have no user's line, because autograd runs them on a separate thread.
    """
    frame: FrameType | None = sys._getframe(1)
    inner = outer = ""
    while frame is not None and not outer:
        module = str(frame.f_globals.get("__name__", ""))
        line = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        if not inner and not module.startswith(_BELOW):
            inner = line
        if inner and not module.startswith(_ABOVE):
            outer = line
        frame = frame.f_back
    return f"{inner} for {outer}" if outer not in ("", inner) else inner
