"""Norm, finiteness and use of the gradients of one step, in one small all-reduce."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerolite.accelerator import HostRead
from zerolite.comm import Communicator
from zerolite.runtime.zero.layout import Fragment, PartitionLayout

_CHUNK = 1 << 15  # elements converted to double at once on the CPU: 256 KB, which stays in the second-level cache


@dataclass(frozen=True)
class GradStats:
    """What the ranks know together about the gradients of a step.

    norm: L2 norm of the mean gradient of all parameters, before unscaling and clipping. bad_parameters: indices of
    those whose mean gradient is not finite, in registration order. bad_ranks: ranks whose own gradients or loss
    were not finite. used: indices of parameters that got a gradient on any rank. votes: by rank, the number that it
    gave to be compared.
    """

    norm: float
    bad_parameters: tuple[int, ...]
    bad_ranks: tuple[int, ...]
    used: frozenset[int]
    votes: tuple[float, ...] = ()

    @property
    def finite(self) -> bool:
        return math.isfinite(self.norm)


class StatsVector:
    """The all-reduced float64 vector behind :class:`GradStats`, still on the device: squares [n], uses [n], bad
    ranks [world], votes [world], and the sum of the squares."""

    def __init__(self, values: torch.Tensor, count: int, world_size: int) -> None:
        self._values = values
        self._count = count
        self._world_size = world_size
        self._read: HostRead | None = None

    def total_square(self) -> torch.Tensor:
        """Sum of squares of all gradients, 0-dim float64 on the device."""
        return self._values[-1]

    def start_read(self) -> None:
        """Begin the copy to the host, behind the work queued so far."""
        if self._read is None:
            self._read = HostRead(self._values)

    def get(self) -> GradStats:
        """Read on the host; waits for the device if :meth:`start_read`'s copy has not arrived."""
        self.start_read()
        assert self._read is not None
        values = self._read.get()
        n = self._count
        squares = values[:n]
        bad = torch.nonzero(~torch.isfinite(squares)).flatten().tolist()
        used = torch.nonzero(values[n : 2 * n]).flatten().tolist()
        ranks = torch.nonzero(values[2 * n : 2 * n + self._world_size]).flatten().tolist()
        votes = values[2 * n + self._world_size : -1].tolist()
        total = float(values[-1])
        norm = math.sqrt(total) if math.isfinite(total) else total
        return GradStats(norm, tuple(bad), tuple(ranks), frozenset(used), tuple(votes))


def sum_of_squares(flat: torch.Tensor) -> torch.Tensor:
    """Sum of the squares of a 1-dim floating tensor, taken in double, as a 0-dim float64 tensor on its device.

    In double the order of summation does not show once the result is rounded to single, so neither does the stage,
    which decides what each rank sums.
    """
    if flat.is_cuda:
        (norm,) = torch._foreach_norm([flat], 2.0, dtype=torch.float64)
        return norm * norm
    total = torch.zeros((), dtype=torch.float64)
    for chunk in flat.split(_CHUNK):
        exact = chunk.double()
        total += torch.dot(exact, exact)
    return total


class StatsCollector:
    """Sums squares over what this rank owns and adds over ranks: one small all-reduce a step, and no copy from the
    host in it."""

    def __init__(
        self, layout: PartitionLayout, fragments: Sequence[Fragment], comm: Communicator, device: torch.device
    ) -> None:
        self._count = len(layout.slots)
        self._fragments = list(fragments)
        self._comm = comm
        self._device = device
        self._indices = torch.tensor([f.slot.index for f in fragments], dtype=torch.int64, device=device)
        self._all_used = torch.ones(self._count, dtype=torch.float64, device=device)

    @torch.no_grad()
    def collect(
        self, parts: Sequence[torch.Tensor], used: set[int], probes: Sequence[torch.Tensor], vote: int = 0
    ) -> StatsVector:
        """``parts[b]``: this rank's part of bucket ``b``'s mean gradient. ``used``: parameters that got a gradient
        here. ``probes``: 0-dim tensors that are not finite if something of this rank's was not. ``vote``: below 2^53,
        for every rank to see. Called once per step, on all ranks."""
        count, comm = self._count, self._comm
        values = torch.zeros(2 * (count + comm.world_size), dtype=torch.float64, device=self._device)
        if vote:
            values[2 * count + comm.world_size + comm.rank] = float(vote)
        if self._fragments:
            flats = [parts[f.slot.bucket].narrow(0, f.shard_start, f.numel) for f in self._fragments]
            values[self._indices] = _squares(flats)
        values[count : 2 * count] = self._all_used if len(used) == count else self._flags(used)
        if probes:
            values[2 * count + comm.rank] = (~torch.isfinite(torch.stack(list(probes)))).any().double()
        comm.all_reduce(values, tag="stats").wait()
        # One sum for whoever needs it, here or on the host: two that add in another order could clip differently on
        # two ranks.
        total = values[:count].sum().reshape(1)
        return StatsVector(torch.cat([values, total]), count, comm.world_size)

    def _flags(self, used: set[int]) -> torch.Tensor:
        flags = torch.zeros(self._count, dtype=torch.float64)
        flags[sorted(used)] = 1.0
        return flags.to(self._device)


def _squares(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    if flats[0].is_cuda:
        norms = torch.stack(list(torch._foreach_norm(list(flats), 2.0, dtype=torch.float64)))
        return norms * norms
    return torch.stack([sum_of_squares(flat) for flat in flats])


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor that brings a gradient of L2 norm ``norm`` to at most ``max_norm``, as
    ``torch.nn.utils.clip_grad_norm_`` takes it."""
    return min(1.0, max_norm / (norm + 1e-6))


def clip_coefficient_on_device(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The same for a norm that the host has not read."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
