"""Norm, finiteness and use of the gradients of one step, in one small all-reduce."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerolite.accelerator import HostRead
from zerolite.comm import Communicator
from zerolite.runtime.zero.layout import Fragment, PartitionLayout

_SMALL = 2048  # elements; more are squared by a call of their own
_CHUNK = 1 << 15  # elements converted to double at once on the CPU: 256 KB, which stays in the second-level cache


@dataclass(frozen=True)
class GradStats:
    """What the ranks know together about the gradients of a step.

    norm: L2 norm of the mean gradient of all parameters, before unscaling and clipping. bad_parameters: indices of
    those whose mean gradient is not finite, in registration order. bad_ranks: ranks whose own gradients or loss
    were not finite. used: indices of parameters that got a gradient on any rank. agreed: whether all ranks gave
    the same number to be compared.
    """

    norm: float
    bad_parameters: tuple[int, ...]
    bad_ranks: tuple[int, ...]
    used: frozenset[int]
    agreed: bool = True

    @property
    def finite(self) -> bool:
        return math.isfinite(self.norm)


class StatsVector:
    """The all-reduced float64 vector behind :class:`GradStats`, still on the device: squares [n], uses [n], bad
    ranks [world], sum and sum of squares of the votes, and the sum of the gradients' squares."""

    def __init__(self, values: torch.Tensor, count: int, world_size: int, vote: int) -> None:
        self._values = values
        self._count = count
        self._world_size = world_size
        self._vote = vote
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
        # Sum and sum of squares are those of equal terms only if the terms are equal (Cauchy and Schwarz).
        agreed = values[-3:-1].tolist() == [self._world_size * self._vote, self._world_size * self._vote**2]
        total = float(values[-1])
        norm = math.sqrt(total) if math.isfinite(total) else total
        return GradStats(norm, tuple(bad), tuple(ranks), frozenset(used), agreed)


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
        self._runs, self._large = _runs(self._fragments, self._count)
        self._all_used = torch.ones(self._count, dtype=torch.float64, device=device)

    @torch.no_grad()
    def collect(
        self, parts: Sequence[torch.Tensor], used: set[int], probes: Sequence[torch.Tensor], vote: int = 0
    ) -> StatsVector:
        """``parts[b]``: this rank's part of bucket ``b``'s mean gradient. ``used``: parameters that got a gradient
        here. ``probes``: 0-dim tensors that are not finite if something of this rank's was not. ``vote``: a number from
        0 to 2^20, compared with that of the others. Called once per step, on all ranks."""
        count, comm = self._count, self._comm
        values = torch.zeros(2 * count + comm.world_size + 2, dtype=torch.float64, device=self._device)
        if vote:
            values[-2:] = torch.tensor([vote, vote**2], dtype=torch.float64)
        if self._device.type == "cuda" and self._fragments:
            flats = [parts[f.slot.bucket].narrow(0, f.shard_start, f.numel) for f in self._fragments]
            norms = torch.stack(list(torch._foreach_norm(flats, 2.0, dtype=torch.float64)))
            values[self._indices] = norms * norms
        elif self._fragments:
            self._add_squares(parts, values[: count + 1])
            values[count] = 0.0
        values[count : 2 * count] = self._all_used if len(used) == count else self._flags(used)
        if probes:
            values[2 * count + comm.rank] = (~torch.isfinite(torch.stack(list(probes)))).any().double()
        comm.all_reduce(values, tag="stats").wait()
        # One sum for whoever needs it, here or on the host: two that add in another order could clip differently on
        # two ranks.
        total = values[:count].sum().reshape(1)
        return StatsVector(torch.cat([values, total]), count, comm.world_size, vote)

    def _add_squares(self, parts: Sequence[torch.Tensor], squares: torch.Tensor) -> None:
        """On the CPU: the squares of each parameter to ``squares[index]``; those of gaps, which may hold anything, to
        the last element."""
        for fragment in self._large:
            flat = parts[fragment.slot.bucket].narrow(0, fragment.shard_start, fragment.numel)
            squares[fragment.slot.index] += sum_of_squares(flat)
        for run in self._runs:
            exact = parts[run.bucket][run.start : run.end].double()
            owners = torch.repeat_interleave(run.owners, run.lengths, output_size=run.end - run.start)
            squares.index_add_(0, owners, exact.mul_(exact))

    def _flags(self, used: set[int]) -> torch.Tensor:
        flags = torch.zeros(self._count, dtype=torch.float64)
        flags[sorted(used)] = 1.0
        return flags.to(self._device)


@dataclass(frozen=True)
class _Run:
    """Small fragments that follow each other in a bucket: elements ``[start, end)`` of the part, cut in stretches of
    ``lengths`` elements, each of the parameter ``owners`` (the number of parameters, for gaps)."""

    bucket: int
    start: int
    end: int
    lengths: torch.Tensor
    owners: torch.Tensor


def _runs(fragments: Sequence[Fragment], count: int) -> tuple[list[_Run], list[Fragment]]:
    """Small fragments gathered in runs, and the others."""
    groups: list[list[Fragment]] = []
    large: list[Fragment] = []
    for fragment in fragments:
        if fragment.numel > _SMALL:
            large.append(fragment)
            continue
        last = groups[-1] if groups else None
        if last and last[0].slot.bucket == fragment.slot.bucket:
            reach = fragment.shard_start + fragment.numel
            gap = fragment.shard_start - (last[-1].shard_start + last[-1].numel)
            if 0 <= gap <= _SMALL and reach - last[0].shard_start <= _CHUNK:
                last.append(fragment)
                continue
        groups.append([fragment])
    runs = []
    for group in groups:
        start, end = group[0].shard_start, group[-1].shard_start + group[-1].numel
        lengths, owners, position = [], [], start
        for f in group:
            lengths += [f.shard_start - position, f.numel]
            owners += [count, f.slot.index]
            position = f.shard_start + f.numel
        runs.append(_Run(group[0].slot.bucket, start, end, torch.tensor(lengths), torch.tensor(owners)))
    return runs, large


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor that brings a gradient of L2 norm ``norm`` to at most ``max_norm``, as
    ``torch.nn.utils.clip_grad_norm_`` takes it."""
    return min(1.0, max_norm / (norm + 1e-6))


def clip_coefficient_on_device(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The same for a norm that the host has not read."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
