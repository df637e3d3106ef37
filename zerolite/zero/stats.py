"""Gradient norm, overflow flags and used parameters of one step, in one small all-reduce.

:class:`StatsCollector` writes this rank's numbers into a vector and adds it over ranks. :class:`StatsVector` is the
result on the device, and :class:`GradStats` is what the host reads of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from zerolite.comm import Communicator, collective
from zerolite.ops.launches import SquaresLaunch
from zerolite.utils.accelerator import HostRead, is_fake, to_device
from zerolite.zero.bucket import Bucket
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.grads import Factor
from zerolite.zero.groups import RankGroups
from zerolite.zero.layout import Slot
from zerolite.zero.observers import Observers, WrittenSlice
from zerolite.zero.update import Span, full_span, group_equal, segments

if TYPE_CHECKING:
    from zerolite.zero.reducer import Reducer
    from zerolite.zero.step_state import StepState

SAME_BATCH = (
    "load data with engine.deepspeed_io or initialize(training_data=...), or give your sampler "
    "num_replicas=engine.data_parallel_world_size and rank=engine.data_parallel_rank"
)


@dataclass(frozen=True)
class GradStats:
    """Statistics over all ranks of the gradients of one step.

    Attributes:
        norm: L2 norm of the mean gradient of all parameters, before unscaling and clipping.
        bad_parameters: indices of parameters whose mean gradient is not finite, in registration order.
        bad_ranks: ranks whose own gradients or loss were not finite.
        used: indices of parameters that got a gradient on any rank.
        weight: sum of the backwards' weights, per rank on average; None if they have no weights.
        mixed: True if the backwards of some ranks have weights and those of others have not.
        elsewhere: True if a gradient is not finite on ranks that have other parts of the model.
        unused_elsewhere: number of parameters on those ranks that got no gradient.
        bad_losses: ranks with a loss that was not finite.
        refusals: ranks of the job that cannot make the update.
        skipped: a gradient is not finite, so a step with them updates nothing.
        slices: what the observers have written, and the sums of it over all ranks; None without.
    """

    norm: float
    bad_parameters: tuple[int, ...]
    bad_ranks: tuple[int, ...]
    used: frozenset[int]
    weight: float | None = None
    mixed: bool = False
    elsewhere: bool = False
    unused_elsewhere: int = 0
    bad_losses: tuple[int, ...] = ()
    refusals: int = 0
    skipped: bool = False
    slices: tuple[Sequence[WrittenSlice], torch.Tensor] | None = None


class StatsLayout(NamedTuple):
    """Positions of the numbers in a statistics vector, float64. ::

    squares    [n]       of each parameter's mean gradient
    uses       [n]       ranks in whose backward the parameter got a gradient
    bad_ranks  [world]   1 for a gradient that is not finite, 2 for a loss, 3 for both
    weights    [3]       sum of weights, ranks with weights, ranks without
    refusals   [1]       ranks that cannot make the update: all ranks of the job from here on
    slices     [any]     of the step's observers, one after the other
    ------------------------------------------------ up to here added over ranks, in one all-reduce
    unused     [1]       parameters on ranks with other parts that got no gradient          LOCAL
    total      [1]       sum of all squares                                                 TOTAL
    """

    squares: slice
    uses: slice
    bad_ranks: slice
    weights: slice
    refusals: slice
    slices: slice

    @classmethod
    def of(cls, parameters: int, ranks: int) -> StatsLayout:
        """Return the positions for so many parameters and data ranks."""
        ends = accumulate((0, parameters, parameters, ranks, _WEIGHTS, 1))
        positions = [slice(low, high) for low, high in pairwise(ends)]
        return cls._make([*positions, slice(positions[-1].stop, LOCAL.start)])


LOCAL, TOTAL = slice(-2, None), -1
_WEIGHTS = 3
_BAD_GRADIENT, _BAD_LOSS = 1.0, 2.0


class StatsVector:
    """Statistics of one step, still on the device; :class:`StatsLayout` has the positions of the numbers.

    Attributes:
        world_size: number of data ranks.
        check_finite: gradients that are not finite skip a step.
        refused: error for which this rank cannot make the update, as the statistics tell; None if it can.
    """

    def __init__(
        self,
        values: torch.Tensor,
        layout: StatsLayout,
        world_size: int,
        used: set[int],
        weight: float | None,
        check_finite: bool,
        written: Sequence[WrittenSlice] = (),
        refused: Exception | None = None,
    ) -> None:
        """
        Args:
            used, weight: this rank's own.
            written: what the observers have written.
            refused: see the attribute.
        """
        self._values, self._layout, self.world_size, self.refused = values, layout, world_size, refused
        self.check_finite = check_finite
        self._squares, self._uses, self._weights = values[layout.squares], values[layout.uses], values[layout.weights]
        self._used, self._own_weight = used, weight
        self._written = written
        self._read: HostRead | None = None

    def norm(self) -> torch.Tensor:
        """L2 norm of all gradients, 0-dim float64 on the device."""
        return self._values[TOTAL].sqrt()

    def skips(self, weighted: bool) -> torch.Tensor:
        """Return 1 if the update must be skipped, and 0 if not: 0-dim fp32 on the device.

        All ranks skip it if one of them refuses it, or if some have weights and others have not.

        Args:
            weighted: this rank's backwards have weights.
        """
        _, with_weight, without = self._weights
        skips = torch.addcmul(self._values[self._layout.refusals], with_weight, without)[0] > 0
        if self.check_finite:
            skips = skips | ~torch.isfinite(self._values[TOTAL])
        if weighted:
            skips = skips | (self.weight() == 0)
        return skips.float()

    def is_refused(self) -> torch.Tensor:
        """True if a rank refuses the update: 0-dim bool on the device."""
        return self._values[self._layout.refusals][0] > 0

    def weight(self) -> torch.Tensor:
        """Sum of the weights, per rank on average, 0-dim float64 on the device."""
        return self._weights[0] / self.world_size

    def take_refusal(self) -> Exception | None:
        """Return ``refused``, to be raised. The statistics drop it: its traceback would keep the engine alive."""
        refused, self.refused = self.refused, None
        return refused

    def norms(self) -> torch.Tensor:
        """L2 norms of the gradients by parameter, [n] float64 on the device."""
        return self._squares.sqrt()

    def rescale(self, factor: float | torch.Tensor, indices: Collection[int]) -> None:
        """Correct the squares after the gradients of ``indices`` were multiplied by ``factor``."""
        some = len(indices) < len(self._squares)
        if isinstance(factor, torch.Tensor):
            factor = factor.to(torch.float64)  # the square of 1e-4 is 0 in fp16
        for squares in [self._squares[index] for index in indices] if some else [self._squares]:
            squares.mul_(factor * factor)
        self._changed()

    def replace(self, index: int, gradient: torch.Tensor | None) -> None:
        """Correct the numbers of a parameter whose gradient has become ``gradient``, which all ranks have in full; None
        if it has no gradient any more."""
        square = 0.0 if gradient is None else gradient.double().square().sum()
        self._squares[index].fill_(square)
        self._uses[index].fill_(float(gradient is not None))
        self._changed()

    def _changed(self) -> None:
        self._values[TOTAL] = self._squares.sum()
        self._read = None

    def start_read(self) -> None:
        """Begin the copy to the host, behind the work queued so far."""
        if self._read is None:
            self._read = HostRead(self._values)

    def get(self) -> GradStats:
        """Read on the host; waits for the device if :meth:`start_read`'s copy has not arrived."""
        if self._read is None:
            self._read = HostRead(self._values)
        values, layout = self._read.get(), self._layout
        if is_fake(self._values):  # a dry run, in which the other ranks are copies of this one
            own = frozenset(self._used)
            return GradStats(norm=1.0, bad_parameters=(), bad_ranks=(), used=own, weight=self._own_weight)
        weight, weighted, unweighted = values[layout.weights].tolist()
        unused, total = values[LOCAL].tolist()
        finite = math.isfinite(total)  # then all squares are
        bad = () if finite else _nonzero(~torch.isfinite(values[layout.squares]))
        bad_ranks = values[layout.bad_ranks]
        marked = _nonzero(bad_ranks) if not finite or bad_ranks.any() else ()
        used: Collection[int] = self._used
        if len(used) < len(self._uses):  # other ranks may have used more
            used = _nonzero(values[layout.uses])
        return GradStats(
            norm=math.sqrt(total) if finite else total,
            bad_parameters=bad,
            bad_ranks=marked,
            used=frozenset(used),
            weight=weight / self.world_size if weighted else None,
            mixed=bool(weighted and unweighted),
            elsewhere=not finite and not bad,
            unused_elsewhere=int(unused),
            bad_losses=tuple(rank for rank in marked if bad_ranks[rank] >= _BAD_LOSS),
            refusals=int(values[layout.refusals]),
            skipped=self.check_finite and not finite,
            slices=(self._written, values[layout.slices]) if self._written else None,
        )


def _nonzero(values: torch.Tensor) -> tuple[int, ...]:
    return tuple(torch.nonzero(values).flatten().tolist())


class SquaresPlan:
    """Kernel launches that sum the squares of tensors by parameter: one launch for the tensors of each dtype.

    Squares are summed in float64. The stage decides which elements each rank sums, so the order of summation differs
    between stages. Rounded to fp32, the float64 sums do not show it.
    """

    def __init__(self, owned: Callable[[Bucket], Iterable[tuple[int, int, int]]]) -> None:
        """
        Args:
            owned: function from a bucket to its ranges: start, elements, and index of the parameter. Gaps
                between ranges may hold anything.
        """
        self._owned = owned
        self._plans: dict[Any, list[tuple[tuple[int, ...], SquaresLaunch]]] = {}

    def add(self, sums: torch.Tensor, spans: tuple[Span, ...], tensors: Sequence[torch.Tensor | None]) -> None:
        """Add the squares of ``tensors``, one for each of ``spans``, to ``sums``, float64 by parameter. None adds
        nothing."""
        dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
        plan = self._plans.get((spans, dtypes))
        if plan is None:
            plan = []
            for members in group_equal(dtypes):
                table = segments([spans[i] for i in members], self._owned)
                if table:
                    plan.append((members, SquaresLaunch(torch.tensor(table, dtype=torch.int64, device="cpu"))))
            self._plans[spans, dtypes] = plan
        for members, launch in plan:
            launch.run(sums, [tensors[i] for i in members])  # type: ignore[misc]  # those of None are in no launch

    def clear(self) -> None:
        """Forget the launches, because the layout has other buckets."""
        self._plans.clear()


class ModelTotals:
    """Sums of the statistics over ranks that hold other parts of the model: tensor shards and pipeline stages."""

    def __init__(self, model: Communicator, counts: Callable[[int], bool]) -> None:
        """
        Args:
            model: the ranks of one copy of the model.
            counts: True for the index of a parameter whose square is in the norm on this rank. Of a parameter that
                several ranks of ``model`` hold, one rank's square counts.
        """
        self._model, self._counts = model, counts

    def use(self, slots: Sequence[Slot], device: torch.device) -> None:
        """Sum for these parameters."""
        masks = [[float(self._counts(slot.index)), float(slot.numel > 0)] for slot in slots]
        made = torch.tensor(masks, dtype=torch.float64, device="cpu").to(device)
        self._counted, self._not_empty = made[:, 0], made[:, 1]  # 1 for the parameters that are

    @collective
    def add(self, vector: torch.Tensor, layout: StatsLayout) -> None:
        """Add what all ranks of the job share and fill in LOCAL, after the data ranks have added the vector."""
        shared = slice(layout.refusals.start, layout.slices.stop)
        total = (vector[layout.squares] * self._counted).sum().reshape(1)
        unused = ((vector[layout.uses] == 0) * self._not_empty).sum().reshape(1)
        over = torch.cat([total, unused, vector[shared]])
        self._model.all_reduce(over, tag="stats").wait()
        vector[shared] = over[2:]
        vector[LOCAL] = torch.cat([over[1:2] - unused, over[:1]])


class StatsCollector:
    """Collects the statistics of a step: sums the squares of what this rank owns, and adds all numbers over ranks.

    That is one small all-reduce a step. No copy from the host is in it, because such a copy may wait for the device.

    Attributes:
        noted: buckets whose gradients have left the device, and whose squares have been summed before.
        latest: statistics of the accumulated gradients; None before they are collected, and once the gradients have
            changed.
    """

    def __init__(
        self, groups: RankGroups, device: torch.device, observers: Observers, totals: ModelTotals | None = None
    ) -> None:
        """
        Args:
            totals: sums over other parts of the model; None if every rank has the full model.
        """
        self._groups, self._device, self._observers, self._totals = groups, device, observers, totals
        self._is_counted = groups.is_first_owner  # the others have the same shards, and squares count once
        self.latest: StatsVector | None = None

    def use(self, buffer: ParameterBuffer) -> None:
        """Collect for the parameters of these buckets; called between steps."""
        layout = buffer.layout
        self._count = len(layout.slots)
        self._layout = StatsLayout.of(self._count, self._groups.mean.world_size)
        self._owned: dict[int, list[tuple[int, int, int]]] = {bucket.index: [] for bucket in layout.buckets}
        for fragment in layout.fragments(buffer.rank):
            part = fragment.shard_start, fragment.numel, fragment.slot.index
            self._owned[fragment.slot.bucket].append(part)
        self._spans = tuple(full_span(bucket, bucket.layout.numel) for bucket in buffer.buckets)
        self._plan = SquaresPlan(lambda bucket: self._owned[bucket.index])
        if self._totals is not None:
            self._totals.use(layout.slots, self._device)
        self.noted: set[int] = set()
        self._squares: torch.Tensor | None = None  # of the noted buckets, by parameter; each is in one bucket
        self._slots: dict[int, torch.Tensor] = {}
        ones = torch.ones(self._count, dtype=torch.float64, device=self._device)
        # Parameters that got a gradient here in the last step, and 1 for each of them, 0 for others.
        self._flagged = set(range(self._count)), ones

    @torch.no_grad()
    def note(self, bucket: int, gradient: torch.Tensor) -> None:
        """Sum the squares of a bucket's mean gradient now, before it leaves the device.

        They count in :meth:`collect`, and not the bucket's gradient, until another gradient is noted for the
        bucket or :meth:`forget` is called.
        """
        if self._squares is None:
            self._squares = torch.zeros(self._count, dtype=torch.float64, device=self._device)
        if bucket in self.noted:
            self._squares.index_fill_(0, self._slots_of(bucket), 0.0)
        self._plan.add(self._squares, (self._spans[bucket],), [gradient])
        self.noted.add(bucket)

    def _slots_of(self, bucket: int) -> torch.Tensor:
        """Return the indices of the bucket's parameters, int64 on the device."""
        if bucket not in self._slots:
            indices = sorted({index for *_, index in self._owned[bucket]})
            self._slots[bucket] = torch.tensor(indices, dtype=torch.int64, device="cpu").to(self._device)
        return self._slots[bucket]

    def clear(self) -> None:
        """Forget the gradients: they have been used or dropped."""
        self.noted.clear()
        self._squares = self.latest = None

    def discard(self) -> None:
        """Drop the statistics, because gradients have been added or changed. Squares of noted buckets still hold."""
        self.latest = None

    def forget(self, bucket: int) -> None:
        """Drop the squares of a noted bucket whose gradients have changed. The caller also corrects or drops the
        statistics."""
        if bucket in self.noted:
            self.noted.discard(bucket)
            assert self._squares is not None
            self._squares.index_fill_(0, self._slots_of(bucket), 0.0)

    @collective
    @torch.no_grad()
    def collect(self, reducer: Reducer, state: StepState, refused: Exception | None) -> StatsVector:
        """Collect the statistics of all ranks. Called once per step, when the gradients are reduced.

        Args:
            reducer: has the gradients.
            state: has the weights of the backwards.
            refused: error for which this rank cannot make the update.
        """
        mean, layout, observers = self._groups.mean, self._layout, self._observers.slices
        accumulation = state.accumulation
        sizes = [observer.slice_size for observer in observers]
        vector = torch.zeros(layout.slices.start + sum(sizes) - LOCAL.start, dtype=torch.float64, device=self._device)
        squares, weights = vector[layout.squares], vector[layout.weights]
        numbers = accumulation.weight, accumulation.weighted is True, accumulation.weighted is False
        for place, number in enumerate(numbers):
            if number:  # fill_ passes it as an argument of a kernel; a copy from the host may wait for the device
                weights[place].fill_(number)
        if self._is_counted:
            self._plan.add(squares, self._spans, reducer.owned_shards(self.noted))
            if self._squares is not None:
                squares += self._squares
        if (offloads := reducer.offloads) is not None and offloads.lost is not None:
            squares.fill_(math.nan)
            refused = refused or offloads.lost
        # Most steps use the same parameters as the step before. A new tensor would be a copy to the device.
        if reducer.used != self._flagged[0]:
            flags = torch.zeros(self._count, dtype=torch.float64, device="cpu")
            flags[sorted(reducer.used)] = 1.0
            self._flagged = set(reducer.used), to_device(flags, self._device)
        vector[layout.uses] = self._flagged[1]
        sums: Sequence[torch.Tensor] = reducer.bucket_sums
        if mean.world_size == 1 and not sums:
            sums = [squares.sum()]  # finite where the gradients are
        for flag, values in ((_BAD_GRADIENT, sums), (_BAD_LOSS, reducer.losses)):
            if values:
                bad = (~torch.isfinite(torch.stack(list(values)))).any()
                vector[layout.bad_ranks][mean.rank] += bad.double() * flag
        parts = vector[layout.slices].split(sizes)
        written = [WrittenSlice(o, len(part), o.write_slice(part)) for o, part in zip(observers, parts, strict=True)]
        if refused is not None:
            vector[layout.refusals].fill_(1.0)
        mean.all_reduce(vector[: LOCAL.start], tag="stats").wait()
        if self._totals is not None:
            self._totals.add(vector, layout)
        else:
            # Sum once, on the device. A second sum on the host could add in another order and give two ranks different
            # clip factors.
            vector[TOTAL] = squares.sum()
        weight = accumulation.weight if accumulation.weighted else None
        finite = state.options.check_finite
        self.latest = StatsVector(vector, layout, mean.world_size, reducer.used, weight, finite, written, refused)
        return self.latest

    @collective
    def exchange_slices(self, refused: Exception | None) -> tuple[int, list[WrittenSlice], torch.Tensor]:
        """Add the observers' slices alone over all ranks of the job: how many ranks refuse, what the observers have
        written, and the sums on the host. Called between steps.

        Args:
            refused: error for which this rank refuses.
        """
        observers = self._observers.slices
        sizes = [observer.slice_size for observer in observers]
        sums = torch.zeros(1 + sum(sizes), dtype=torch.float64, device=self._device)
        if refused is not None:
            sums[0].fill_(1.0)
        parts = sums[1:].split(sizes)
        written = [WrittenSlice(o, len(part), o.write_slice(part)) for o, part in zip(observers, parts, strict=True)]
        self._groups.agree.all_reduce(sums, tag="consistency").wait()
        read = HostRead(sums).get()
        return int(read[0]), written, read[1:]


def clip_coefficient(norm: Factor, max_norm: float) -> Factor:
    """Return the factor that brings a gradient of L2 norm ``norm`` to at most ``max_norm``, with the arithmetic of
    ``torch.nn.utils.clip_grad_norm_``. A norm that the host has not read stays on its device."""
    coefficient = max_norm / (norm + 1e-6)
    return coefficient.clamp(max=1.0) if isinstance(coefficient, torch.Tensor) else min(1.0, coefficient)
