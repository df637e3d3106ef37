"""Gradient norm, overflow flag and used-parameter flags of one step, in one small all-reduce."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

import zerolite.ops  # noqa: F401  registers torch.ops.zerolite
from zerolite.comm import Communicator
from zerolite.comm.initial_sync import content_hash
from zerolite.utils.accelerator import HostRead, is_fake, to_device
from zerolite.zero.layout import Fragment, PartitionLayout
from zerolite.zero.spans import Span, by_kind, segments, whole

SAME_BATCH = (
    "load data with engine.deepspeed_io or initialize(training_data=...), or give your sampler "
    "num_replicas=engine.data_parallel_world_size and rank=engine.data_parallel_rank"
)


@dataclass(frozen=True)
class GradStats:
    """Statistics over all ranks about the gradients of one step.

    Attributes:
        norm: L2 norm of the mean gradient of all parameters, before unscaling and clipping.
        bad_parameters: indices of those whose mean gradient is not finite, in registration order.
        bad_ranks: ranks whose own gradients or loss were not finite.
        used: indices of parameters that got a gradient on any rank.
        weight: the sum of the backwards' weights, per rank on average; None if they have none.
        mixed: some ranks' have and others' have not.
        agreed: whether all ranks that gave a number to be compared gave the same.
        elsewhere: whether a gradient is not finite on ranks with other parts of the model.
        unused_elsewhere: parameters there that got no gradient.
        inputs_agree: whether the ranks of each copy of the model were given the same inputs.
        bad_losses: ranks with a loss that was not finite.
        extra: what :class:`Extra` has returned, and the sums over all ranks of what it has written; None without.
    """

    norm: float
    bad_parameters: tuple[int, ...]
    bad_ranks: tuple[int, ...]
    used: frozenset[int]
    weight: float | None = None
    mixed: bool = False
    agreed: bool = True
    elsewhere: bool = False
    unused_elsewhere: int = 0
    inputs_agree: bool = True
    bad_losses: tuple[int, ...] = ()
    extra: tuple[Any, torch.Tensor] | None = None

    def check_inputs(self) -> None:
        """Raise RuntimeError, on all ranks, if there is no right gradient of these inputs."""
        if not self.inputs_agree:
            raise RuntimeError(
                "expected the same batches on all ranks that hold parts of one copy of the model (tensor_parallel, "
                f"pipeline), got different ones in this step; {SAME_BATCH}"
            )


@dataclass(frozen=True)
class Across:
    """The ranks that hold the rest of the model.

    model: one rank of each part, stage × tensor; all of them are given the same inputs. counts(index): whether this
    rank's squares of a parameter are in the norm: of what several of them hold, the first one's are.
    """

    model: Communicator
    counts: Callable[[int], bool]


class Extra(Protocol):
    """Numbers of others that travel with the statistics and are added over all ranks, those with other parts of the
    model included. ``size``, of how many, is the same on all ranks; ``write`` puts this rank's into zeros, and returns
    what tells later what they are about."""

    @property
    def size(self) -> int: ...

    def write(self, values: torch.Tensor) -> Any: ...


class StatsVector:
    """The float64 vector behind :class:`GradStats`, still on the device. ::

    squares [n]      of each parameter's mean gradient
    uses [n]         ranks in whose backward it got a gradient
    bad ranks [world]
    inputs [world]   hashes, where the model has parts on other ranks
    extra [size]     see Extra
    weight           sum of the backwards' weights                          _WEIGHT
    weighted         ranks whose backwards have weights                     _WEIGHTED
    unweighted       ranks whose backwards have none                        _UNWEIGHTED
    votes [3]        how many ranks vote; the sum of votes, of their squares
    ------------------------------------------ up to here added over ranks in one all-reduce
    different        copies of the model whose ranks had different inputs
    unused           parameters on ranks with other parts that got no gradient
    total            sum of all squares                                     _TOTAL
    """

    def __init__(
        self,
        values: torch.Tensor,
        count: int,
        world_size: int,
        used: set[int],
        weight: float | None,
        extra: int = 0,
        about: object = None,
    ) -> None:
        """
        Args:
            used, weight: what this rank has put in.
            extra, about: the size of that part, and what ``Extra.write`` has returned.
        """
        self._values = values
        self._own = (used, weight)
        self._count = count
        self._world_size = world_size
        self._extra, self._about = extra, about
        self._read: HostRead | None = None

    def total_square(self) -> torch.Tensor:
        """Sum of squares of all gradients, 0-dim float64 on the device."""
        return self._values[_TOTAL]

    def weight(self) -> torch.Tensor:
        """Sum of the weights, per rank on average, 0-dim float64 on the device."""
        return self._values[_WEIGHT] / self._world_size

    def mixed(self) -> torch.Tensor:
        """True if some ranks have weights and others have not; a 0-dim bool tensor on the device."""
        return self._values[_WEIGHTED] * self._values[_UNWEIGHTED] > 0

    def norms(self) -> torch.Tensor:
        """L2 norms of the gradients by parameter, float64 on the device."""
        return self._values[: self._count].sqrt()

    def rescale(self, factors: Mapping[int, float | torch.Tensor], common: float | torch.Tensor | None) -> None:
        """Gradients have been multiplied since: all by ``common``, or those in ``factors`` each by its own."""
        squares = self._values[: self._count]
        if common is not None:
            squares.mul_(common * common)
        else:
            for index, factor in factors.items():
                squares[index].mul_(factor * factor)
        self._changed()

    def replace(self, index: int, gradient: torch.Tensor | None, factor: float | torch.Tensor) -> None:
        """The gradient of a parameter is ``factor`` × ``gradient`` now, known whole to all ranks; None: it has none."""
        square = 0.0 if gradient is None else (gradient.double() * factor).square().sum()
        self._values[index].fill_(square)
        self._values[self._count + index].fill_(float(gradient is not None))
        self._changed()

    def replace_square(self, index: int, gradient: torch.Tensor) -> None:
        """Take the square of a gradient anew, into which other values may have been written."""
        self._values[index].fill_(gradient.double().square().sum())
        self._changed()

    def _changed(self) -> None:
        self._values[_TOTAL] = self._values[: self._count].sum()
        self._read = None

    def unused(self, index: int) -> torch.Tensor:
        """Return, as a 0-dim bool on the device, whether a parameter got no gradient on any rank."""
        return self._values[self._count + index] == 0

    def start_read(self) -> None:
        """Begin the copy to the host, behind the work queued so far."""
        if self._read is None:
            self._read = HostRead(self._values)

    def get(self) -> GradStats:
        """Read on the host; waits for the device if :meth:`start_read`'s copy has not arrived."""
        if self._read is None:
            self._read = HostRead(self._values)
        values = self._read.get()
        if is_fake(self._values):  # a dry run, in which the other ranks are copies of this one
            used, mean = self._own
            return GradStats(norm=1.0, bad_parameters=(), bad_ranks=(), used=frozenset(used), weight=mean)
        n = self._count
        squares = values[:n]
        bad = torch.nonzero(~torch.isfinite(squares)).flatten().tolist()
        some = torch.nonzero(values[n : 2 * n]).flatten().tolist()
        of_ranks = values[2 * n : 2 * n + self._world_size]
        ranks = torch.nonzero(of_ranks).flatten().tolist()
        weight, weighted, unweighted, *votes, different, unused, total = values[_WEIGHT:].tolist()
        number, first, second = (int(vote) for vote in votes)
        return GradStats(
            norm=math.sqrt(total) if math.isfinite(total) else total,
            bad_parameters=tuple(bad),
            bad_ranks=tuple(ranks),
            used=frozenset(some),
            weight=weight / self._world_size if weighted else None,
            mixed=bool(weighted and unweighted),
            # n equal votes v have the sum n v and the sum of squares n v². Different ones have a larger sum of squares
            # (Cauchy and Schwarz), so that one sum over ranks compares them all.
            agreed=number * second == first**2,
            elsewhere=not math.isfinite(total) and not bad,
            unused_elsewhere=int(unused),
            inputs_agree=not different,
            bad_losses=tuple(torch.nonzero(of_ranks >= _BAD_LOSS).flatten().tolist()),
            extra=(self._about, values[_WEIGHT - self._extra : _WEIGHT]) if self._extra else None,
        )


_WEIGHT, _WEIGHTED, _UNWEIGHTED, _TOTAL = -9, -8, -7, -1  # places in a StatsVector
_SCALARS, _LOCAL = 6, 3  # numbers behind ``extra`` that are added over ranks, and those that come after them
_BAD_GRADIENT, _BAD_LOSS = 1.0, 2.0  # what makes a rank a bad one; both: their sum
_COMPARED = 1 << 16  # elements of an input that are compared, about


class SquaresPlan:
    """Launches that sum the squares of tensors by owner: one for the tensors of each dtype. Squares are summed in
    double: then the order of summation does not show once the result is rounded to single, and neither does the stage,
    which decides what each rank sums."""

    def __init__(self, owned: Callable[[int], Iterable[tuple[int, int, int]]]) -> None:
        """owned: the parts of a bucket: start, elements and owner of each; gaps may hold anything."""
        self._owned = owned
        self._plans: dict[Any, list[tuple[tuple[int, ...], torch.Tensor]]] = {}

    def add(self, sums: torch.Tensor, spans: tuple[Span, ...], tensors: Sequence[torch.Tensor | None]) -> None:
        """Add the squares of ``tensors``, of these spans, to ``sums``, float64 by owner. None counts nothing."""
        dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
        plan = self._plans.get((spans, dtypes))
        if plan is None:
            plan = []
            for members in by_kind(dtypes):
                found = segments([spans[i] for i in members], self._owned)
                if found:
                    plan.append((members, torch.tensor(found, dtype=torch.int64, device="cpu")))
            self._plans[spans, dtypes] = plan
        for members, table in plan:
            torch.ops.zerolite.squares_(sums, [tensors[i] for i in members], table)

    def clear(self) -> None:
        """The layout has other buckets than before."""
        self._plans.clear()


class StatsCollector:
    """Sums squares over what this rank owns and adds over ranks: one small all-reduce a step, and no copy from the
    host in it.

    Attributes:
        noted: buckets whose gradients have left the device; their squares are here.
        latest: the statistics of the gradients in hand; None before they are collected, and when they hold no more.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        """comm: the data ranks."""
        self._comm = comm
        self._device = device
        self.latest: StatsVector | None = None

    def use(self, layout: PartitionLayout, fragments: Sequence[Fragment], across: Across | None = None) -> None:
        """Take a layout, of which this rank owns ``fragments``. across: the ranks that are no data ranks, where the
        model has parts. Between steps; what has been noted is forgotten."""
        device = self._device
        self._across = across
        self._inputs: torch.Tensor | None = None  # a hash of what forwards were given since the last step
        self._counted: torch.Tensor | None = None  # 1 for parameters whose squares count
        self._wanted: torch.Tensor | None = None  # 1 for parameters with elements
        if across is not None:
            masks = [[float(across.counts(slot.index)), float(slot.numel > 0)] for slot in layout.slots]
            made = torch.tensor(masks, dtype=torch.float64, device="cpu").to(device)
            self._counted, self._wanted = made[:, 0], made[:, 1]
        self._count = len(layout.slots)
        self._owned: dict[int, list[tuple[int, int, int]]] = {bucket.index: [] for bucket in layout.buckets}
        for fragment in fragments:
            part = fragment.shard_start, fragment.numel, fragment.slot.index
            self._owned[fragment.slot.bucket].append(part)
        self._spans = tuple(whole(bucket.index, bucket.numel) for bucket in layout.buckets)
        self._plan = SquaresPlan(self._owned.__getitem__)
        self.noted: set[int] = set()
        self._squares: torch.Tensor | None = None  # of those, by parameter; each is in one bucket
        self._slots: dict[int, torch.Tensor] = {}
        ones = torch.ones(self._count, dtype=torch.float64, device=device)
        self._flagged = set(range(self._count)), ones  # parameters that got a gradient here in the last step

    @torch.no_grad()
    def note(self, bucket: int, gradient: torch.Tensor) -> None:
        """Sum the squares of a bucket's mean gradient now, before it leaves the device; counts instead of its ``part``
        until another gradient is noted for the bucket, or :meth:`forget`."""
        if self._squares is None:
            self._squares = torch.zeros(self._count, dtype=torch.float64, device=self._device)
        if bucket in self.noted:
            self._squares.index_fill_(0, self._slots_of(bucket), 0.0)
        self._plan.add(self._squares, (self._spans[bucket],), [gradient])
        self.noted.add(bucket)

    def _slots_of(self, bucket: int) -> torch.Tensor:
        """The parameters of a bucket."""
        if bucket not in self._slots:
            indices = sorted({index for *_, index in self._owned[bucket]})
            self._slots[bucket] = torch.tensor(indices, dtype=torch.int64, device="cpu").to(self._device)
        return self._slots[bucket]

    def clear(self) -> None:
        """Drop everything that is known of the gradients in hand."""
        self.noted.clear()
        self._squares = self.latest = None

    def discard(self) -> None:
        """Drop the statistics: there are more gradients, or others. What was noted of buckets still holds."""
        self.latest = None

    def forget(self, bucket: int) -> None:
        """Drop what was noted of a bucket, whose gradients have changed. The caller corrects the statistics, or drops
        them, too."""
        if bucket in self.noted:
            self.noted.discard(bucket)
            assert self._squares is not None
            self._squares.index_fill_(0, self._slots_of(bucket), 0.0)

    @torch.no_grad()
    def collect(
        self,
        parts: Sequence[torch.Tensor | None],
        used: set[int],
        probes: Sequence[torch.Tensor],
        vote: int | None = 0,
        weighted: bool | None = None,
        weight: float = 0.0,
        losses: Sequence[torch.Tensor] = (),
        extra: Extra | None = None,
    ) -> StatsVector:
        """Collect the statistics of all ranks. Called once per step, on all ranks.

        Args:
            parts: this rank's part of each bucket's mean gradient; None where that was noted.
            used: parameters that got a gradient here.
            probes: 0-dim tensors that are not finite if something of this rank's gradients was not; none from one rank
                alone, whose squares tell it.
            vote: a number from 0 to 2^20, compared with that of the others; None abstains.
            weighted: this rank's backwards have weights; None if it had no backward.
            weight: the sum of these.
            losses: 0-dim tensors that are not finite if one of this rank's losses was not.
        """
        count, comm = self._count, self._comm
        numbers_of_inputs = comm.world_size if self._across is not None else 0
        more = extra.size if extra is not None else 0
        size = 2 * count + comm.world_size + numbers_of_inputs + more + _SCALARS
        vector = torch.zeros(size + _LOCAL, dtype=torch.float64, device=self._device)
        values = vector[:size]
        numbers = [weight, weighted is True, weighted is False, vote is not None, vote or 0, (vote or 0) ** 2]
        for place, number in zip(range(size - _SCALARS, size), numbers, strict=True):
            if number:  # fill_ passes it as an argument of a kernel; a copy from the host may wait for the device
                values[place].fill_(number)
        self._plan.add(values[:count], self._spans, parts)
        if self._squares is not None:
            values[:count] += self._squares
        values[count : 2 * count] = self._flags(used)
        if comm.world_size == 1 and not probes:
            probes = [values[:count].sum()]  # of squares, which are finite where the gradients are
        for kind, found in ((_BAD_GRADIENT, probes), (_BAD_LOSS, losses)):
            if found:
                values[2 * count + comm.rank] += (~torch.isfinite(torch.stack(list(found)))).any().double() * kind
        about = extra.write(values[-_SCALARS - more : -_SCALARS]) if extra is not None else None
        if self._across is not None and self._inputs is not None:
            values[2 * count + comm.world_size + comm.rank] = (self._inputs % 1_048_573).double() + 1.0
        self._inputs = None
        comm.all_reduce(values, tag="stats").wait()
        # One sum for all uses, here and on the host: two that add in another order could clip differently on
        # two ranks.
        own = values[:count] if self._counted is None else values[:count] * self._counted
        vector[_TOTAL] = own.sum()
        if self._across is not None:
            self._over_the_model(vector, size, self._across, more)
        self.latest = StatsVector(vector, count, comm.world_size, used, weight if weighted else None, more, about)
        return self.latest

    def note_inputs(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note the inputs of a forward, where the model is sharded."""
        if self._across is None:
            return
        for tensor in tensors:
            flat = tensor.detach().reshape(-1)
            own = content_hash(flat[:: max(1, flat.numel() // _COMPARED)], self._device)
            self._inputs = own if self._inputs is None else self._inputs * 31 + own

    def _over_the_model(self, vector: torch.Tensor, size: int, across: Across, more: int) -> None:
        """Let the last three numbers be those of all parts of the model. The first ``size`` are of the data ranks."""
        count, ranks = self._count, self._comm.world_size
        assert self._wanted is not None
        unused = ((vector[count : 2 * count] == 0) * self._wanted).sum().reshape(1)
        inputs = vector[2 * count + ranks : 2 * count + 2 * ranks]
        extra = vector[size - _SCALARS - more : size - _SCALARS]
        over = torch.cat([vector[_TOTAL:], unused, inputs, inputs**2, extra])
        across.model.all_reduce(over, tag="stats").wait()
        numbers, squares = over[2 : 2 + ranks], over[2 + ranks : 2 + 2 * ranks]
        extra.copy_(over[2 + 2 * ranks :])
        different = (squares * across.model.world_size != numbers**2).sum().double().reshape(1)
        vector[-_LOCAL:] = torch.cat([different, over[1:2] - unused, over[:1]])

    def _flags(self, used: set[int]) -> torch.Tensor:
        """1 for the parameters in ``used``, [n] on the device."""
        # Most steps use what the step before has used. A new tensor would be a copy to the device in every step.
        if used != self._flagged[0]:
            flags = torch.zeros(self._count, dtype=torch.float64, device="cpu")
            flags[sorted(used)] = 1.0
            self._flagged = set(used), to_device(flags, self._device)
        return self._flagged[1]


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor that brings a gradient of L2 norm ``norm`` to at most ``max_norm``, as
    ``torch.nn.utils.clip_grad_norm_`` takes it."""
    return min(1.0, max_norm / (norm + 1e-6))


def clip_coefficient_on_device(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return :func:`clip_coefficient` of a norm that the host has not read, on its device."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
