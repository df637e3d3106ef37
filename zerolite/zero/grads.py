"""``p.grad`` between backward and step: the values behind it, and what the user changes.

A hook takes every gradient out of ``p.grad`` into its bucket, and leaves a :class:`ShardedGradient`. The engine
remembers what it has put into each ``p.grad``; any other tensor that it finds there was put there by the user.

| in the user's loop                     | here                                                         |
|----------------------------------------|--------------------------------------------------------------|
| ``p.grad = None``                      | the gradient is dropped (``adopt``)                          |
| ``p.grad = tensor``, then a step       | is the mean gradient, the same on all ranks (``store``)      |
| ``p.grad = tensor``, then a backward   | raises (``refuse_assigned``)                                 |
| ``p.grad.mul_(number)``                | this rank's part is, and the statistics (``multiply``)       |
| other changes of ``p.grad`` in place   | change this rank's part (``open``, ``close``)                |
| a view of ``p.grad`` is written to     | raises: it is one of a copy (``note_view``)                  |
"""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from zerolite.zero.flat import flattened
from zerolite.zero.sharded_gradient import ShardedGradient

if TYPE_CHECKING:
    from zerolite.zero.reducer import Reducer
    from zerolite.zero.stats import StatsCollector, StatsVector
    from zerolite.zero.step import StepPipeline

Factor = float | torch.Tensor
"""Number by which gradients are multiplied: a float, or a 0-dim float64 tensor."""


@dataclass(eq=False)
class Change:
    """Operation by which the user has changed gradients. The ranks compare them.

    Attributes:
        operation: name of torch's operation.
        numbers: numbers that it was given; tensors are copies.
        count: gradients that it has changed.
    """

    operation: str
    numbers: tuple[Any, ...]
    count: int = 0


class Gradients:
    """Values of one engine's gradients by index of the parameter, as ``p.grad`` shows them: divided by the loss scale
    and by the mean weight.

    Called on all ranks alike. What one rank has in its ``p.grad`` decides about no collective: :meth:`adopt` and
    :meth:`store` correct the statistics of this rank, by the same rules on all ranks.

    Attributes:
        is_touched: the user has done something to gradients since the last step, or has looked at them.
        changes: what the user has done to gradients in place since the last step, in this order.
        assigned: tensors that the user has put into ``p.grad``, to be stored as the mean.
    """

    def __init__(self, step: StepPipeline, reducer: Reducer, collector: StatsCollector) -> None:
        self._step: StepPipeline = weakref.proxy(step)
        self._reducer, self._collector, self._states = reducer, collector, reducer.groups.states
        self._buffer, self._shown, self._device = reducer.buffer, reducer.shown, reducer.buffer.placements.device
        self._shown.connect(self)
        self.is_touched = False
        self.changes: list[Change] = []
        self.assigned: dict[int, torch.Tensor] = {}
        self._views: list[tuple[ShardedGradient, int]] = []  # gradients with views of copies, and their versions
        self._taken: dict[int, tuple[torch.Tensor, int]] = {}  # assigned tensors that are stored, and their versions
        self._copied: tuple[Any, int, Any] = (None, 0, None)  # a number, its version, and its copy

    def clear(self) -> None:
        """Forget all changes, because the gradients have been used or dropped."""
        self.is_touched = False
        for container in (self.changes, self.assigned, self._views, self._taken):
            container.clear()

    def check(self, gradient: ShardedGradient) -> None:
        """Raise RuntimeError if a gradient cannot be used now."""
        self.is_touched = True
        slot, reason = gradient.slot, self._step.unreadable_reason()
        if not reason and self._shown.expected[slot.index] is not gradient.window.gradients[slot.index]:
            reason = (
                "a step has used it, or it was dropped, or put into p.grad of another parameter; take p.grad after the "
                "next backward, and clone it to keep it"
            )
        if reason:
            raise RuntimeError(f"the gradient of parameter '{slot.name}' cannot be used here: {reason}")

    # ---------------------------------------------------------------- values

    def _stored(self, index: int) -> torch.Tensor:
        """Return this rank's part on the device, as it is stored."""
        if not self._reducer.finished:
            self._step.finish_reductions()
        part = self._reducer.bucket_of[index].mean_part(index)
        if part is not None:
            return part.to(self._device)
        parameter = self._reducer.parameters[index]
        shape = (0,) if self._reducer.keeps_shards else parameter.shape
        return torch.empty(shape, dtype=parameter.dtype, device=self._device)

    def _scale(self) -> Factor | None:
        """Return the factor from stored values to those that ``p.grad`` shows; None for 1."""
        scale = 1.0 / self._step.state.shown_divisor(self._step.stats)
        return None if isinstance(scale, float) and scale == 1.0 else scale

    @torch.no_grad()
    def read(self, index: int) -> torch.Tensor:
        """Return this rank's part as ``p.grad`` shows it, flat [numel], at stage 0 in the parameter's shape: the
        bucket's own memory if that needs no conversion."""
        part, dtype = self._stored(index), self._reducer.parameters[index].dtype
        scale = self._scale()
        return part.to(dtype) if scale is None else (part.to(_wide(dtype)) * scale).to(dtype)

    @torch.no_grad()
    def open(self, index: int) -> torch.Tensor:
        """Return this rank's part, to be written to until :meth:`close`: its own memory, or a copy in fp32 or more."""
        self._check_views(before_change=True)
        part, scale = self._stored(index), self._scale()
        return part if scale is None else part.to(_wide(part.dtype)) * scale

    @torch.no_grad()
    def close(self, index: int, part: torch.Tensor) -> None:
        """Store ``part``, as :meth:`open` returned it, after it has been written to."""
        stored, scale = self._reducer.bucket_of[index].mean_part(index), self._scale()
        if stored is not None and (stored.device != part.device or stored.data_ptr() != part.data_ptr()):
            stored.copy_(part if scale is None else part / scale)
        self._on_written(index)
        self._collector.discard()

    def _on_written(self, index: int) -> None:
        self._collector.forget(self._reducer.bucket_of[index].index)
        self._reducer.drop_reads()

    def shard_of(self, gradient: ShardedGradient, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor that broadcasts to the parameter's shape."""
        if not self._reducer.keeps_shards or not tensor.dim():
            return tensor
        layout = self._buffer.layout
        owned = layout.param_range(layout.slots[gradient.slot.index], self._states.rank)
        return flattened(tensor.expand(gradient.shape), gradient.stride()).narrow(0, owned.start, owned.numel)

    @torch.no_grad()
    def full(self, gradient: ShardedGradient) -> torch.Tensor:
        """Return a copy of a full gradient."""
        index, name = gradient.slot.index, gradient.slot.name
        part = self.read(index)
        if not self._reducer.keeps_shards:
            return part.clone()
        if self._states.world_size > 1 and self._states.is_rank0:
            warn_of_collective(
                f"this line needs all values of the gradient of '{name}', of which each rank owns a part: they are "
                "gathered, a collective that all ranks must call. zerolite.get_full_grad(p) does it for several "
                "parameters at once"
            )
        return self._buffer.gather([index], {index: part}, part.dtype)[0]

    def note_view(self, gradient: ShardedGradient) -> None:
        """Note that the user has a view of a copy of this gradient. Autograd takes it for a view of ``gradient``, so
        that the version of ``gradient`` counts writes to it."""
        self._views.append((gradient, gradient._version))

    def _check_views(self, before_change: bool = False) -> None:
        """Raise RuntimeError if the user has written to a view of a copy, because these values are lost.

        Args:
            before_change: forget the views, because their versions will count a change of the gradient too.
        """
        for gradient, version in self._views:
            if gradient._version != version:
                raise RuntimeError(
                    f"a view of p.grad of parameter '{gradient.slot.name}' was written to, but it is a copy that was "
                    "gathered for reading, so the gradient has not changed; write to p.grad itself (p.grad[0] = 0, "
                    "p.grad.mul_(mask)), or call zerolite.set_full_grad(p, value) on all ranks"
                )
        if before_change:
            self._views.clear()

    # ---------------------------------------------------------------- numbers

    @torch.no_grad()
    def norms(self, gradients: Sequence[ShardedGradient], order: float) -> list[torch.Tensor]:
        """Return norms over all ranks, 0-dim float64, with at most one collective; L2 norms from the statistics.

        They are float64 so that ``clip_grad_norm_`` gives the bits of the config's ``gradient_clipping``. A total of
        norms that were rounded to fp32 would give another factor.
        """
        if order == 2:
            stats = self._step.stats()
            by_parameter: Any = stats.norms() / self._step.state.device_divisor(stats)
            by_parameter = by_parameter.unbind() if len(gradients) > 1 else by_parameter
            return [by_parameter[gradient.slot.index] for gradient in gradients]
        parts = [self.read(gradient.slot.index) for gradient in gradients]
        if math.isinf(order):
            sign = math.copysign(1.0, order)
            ends = [(sign * p.abs()).max().double() if p.numel() else p.new_tensor(-math.inf).double() for p in parts]
            return list((sign * self._over_ranks(torch.stack(ends), largest=True)).unbind())
        powers = [torch.linalg.vector_norm(part, order, dtype=_wide(part.dtype)).double() ** order for part in parts]
        return list((self._over_ranks(torch.stack(powers), largest=False) ** (1.0 / order)).unbind())

    @torch.no_grad()
    def check_finite(self, gradients: Sequence[ShardedGradient], found_inf: torch.Tensor) -> None:
        """Fill ``found_inf`` with 1 if one of these gradients is not finite on any rank, and no rank refuses the
        update: the step, which the scaler would leave out, raises for that."""
        self._step.state.refuse_grad_scaler()
        bad = torch.stack(self.norms(gradients, 2)).isfinite().all().logical_not()
        bad = bad & ~self._step.stats().is_refused()
        found_inf.copy_(torch.maximum(found_inf, bad.to(found_inf)))

    def _over_ranks(self, values: torch.Tensor, largest: bool) -> torch.Tensor:
        """Reduce ``values`` [n], float64, over ranks: their sum, or with ``largest`` their maximum."""
        groups = self._reducer.groups
        if not self._reducer.keeps_shards and groups.experts is not None and not largest:
            raise RuntimeError(
                "p.grad: expected a norm of order 2 or infinity with expert_parallel at stage 0, where ranks have all "
                "gradients of some parameters and a part of others, got another order; use one of these, or stage 1"
            )
        if not self._reducer.keeps_shards and groups.experts is None:  # every rank has the full gradient
            return values
        if largest:  # backends differ in what the larger of NaN and a number is
            bad = values.isnan()
            both = torch.stack([values.masked_fill(bad, -math.inf), bad.double()])
            self._states.all_reduce_max(both, tag="access")
            values = both[0].masked_fill(both[1] > 0, math.nan)
        else:
            self._states.all_reduce(values, tag="access").wait()
        return values

    # ---------------------------------------------------------------- changes in place

    def _copy(self, number: Any) -> Any:
        """Return a copy of a 0-dim tensor, the same object until the tensor is written to: the host can compare objects
        without waiting for the device."""
        if not isinstance(number, torch.Tensor):
            return number
        if self._copied[0] is not number or self._copied[1] != number._version:
            self._copied = number, number._version, number.detach().to(torch.float64, copy=True)
        return self._copied[2]

    def note_change(self, operation: str, numbers: Iterable[Any] = (), count: int = 1) -> None:
        """Note that ``operation`` changes ``count`` gradients in place.

        Args:
            operation: name of torch's operation.
            numbers: its arguments that are numbers or 0-dim tensors.
            count: number of gradients. The same operation on further gradients adds to it.
        """
        self.is_touched = True
        self._check_views(before_change=True)
        copies = tuple(map(self._copy, numbers))
        last = self.changes[-1] if self.changes else Change("", ())
        same = (last.operation, len(last.numbers)) == (operation, len(copies))
        if not same or not all(map(_is_same, last.numbers, copies)):
            last = Change(operation, copies)
            self.changes.append(last)
        last.count += count

    @torch.no_grad()
    def multiply(self, indices: Sequence[int], factor: Factor) -> None:
        """Multiply these gradients by a number. The statistics hold further, so that clipping by the user launches
        nothing beside the step."""
        self.note_change("mul_", [factor], len(indices))
        if isinstance(factor, torch.Tensor) and factor.device != self._device:
            factor = float(factor)
        if not self._reducer.finished:
            self._step.finish_reductions()
        parts: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for index in indices:
            bucket = self._reducer.bucket_of[index]
            self._collector.forget(bucket.index)
            if (stored := bucket.mean_part(index)) is not None:
                parts.setdefault((stored.device, stored.dtype), []).append(stored)
        for (device, dtype), alike in parts.items():
            # In this dtype, or a gradient of no dimension would be multiplied in float64, unlike all others.
            number: Any = factor.to(device, _wide(dtype)) if isinstance(factor, torch.Tensor) else factor
            torch._foreach_mul_(alike, number)
        self._reducer.drop_reads()
        if self._collector.latest is not None:
            self._collector.latest.rescale(factor, indices)

    # ---------------------------------------------------------------- None and tensors in p.grad

    def check_writes(self) -> None:
        """Take account of what the user may have written past operations on ``p.grad``.

        Raises:
            RuntimeError: to a view of a copy, or to an assigned tensor that has been stored.
        """
        self._check_views()
        for index, (value, version) in self._taken.items():
            if value._version != version and self._shown.is_in_place(index, self._shown.expected[index]):
                raise RuntimeError(
                    f"the tensor that was put into p.grad of parameter '{self._buffer.layout.slots[index].name}' was "
                    "changed after a norm or a sum had taken its values, so the gradient has not changed; take p.grad "
                    "again after such a call and change that (for p in parameters: p.grad.mul_(factor)), or put the "
                    "tensor into p.grad once more"
                )

    def adopt(self, changed: Mapping[int, torch.Tensor | None]) -> None:
        """Drop gradients that were set to None, and note tensors.

        Args:
            changed: the result of :meth:`ShownGradients.changed`.
        """
        self.is_touched = True
        for index, value in changed.items():
            expected = self._shown.expected[index]
            if isinstance(value, ShardedGradient) and isinstance(expected, ShardedGradient) and value.is_of(expected):
                self._shown.put(index, expected)  # p.grad = p.grad.detach()
                continue
            self._reducer.drop(index)
            self._collector.forget(self._reducer.bucket_of[index].index)
            self._shown.expected[index] = value
            self.assigned.pop(index, None)
            self._taken.pop(index, None)
            if value is not None:
                self.assigned[index] = value
                continue
            self.note_change("set to None")
            if self._collector.latest is not None:
                self._collector.latest.replace(index, None)

    def refuse_assigned(self, assigned: Mapping[int, torch.Tensor | None]) -> None:
        """Raise RuntimeError for a tensor in ``assigned``, because a backward is about to add to it.

        It would count as this rank's gradient or as the mean of all ranks, and nothing tells which.
        """
        for index in sorted(index for index, value in assigned.items() if value is not None):
            raise RuntimeError(
                f"parameter '{self._buffer.layout.slots[index].name}': expected None or the gradient of earlier "
                "backwards in p.grad when a backward begins, got a tensor of your own; put it there after the last "
                "backward of the step, or call engine.zero_grad() to drop it"
            )

    @torch.no_grad()
    def store(self, stats: StatsVector) -> None:
        """Store assigned tensors as mean gradients, and correct the statistics ``stats``."""
        assigned, self.assigned = self.assigned, {}
        divisor = self._step.state.device_divisor(stats)
        for index, value in assigned.items():
            gradient, bucket = self._shown.window.gradients[index], self._reducer.bucket_of[index]
            if bucket.layout.spread > 1:
                raise RuntimeError(
                    f"parameter '{gradient.slot.name}': expected operations in place on p.grad of experts that the "
                    "ranks have parts of (expert_parallel), got a tensor that was put there; call "
                    "zerolite.set_full_grad(p, value), which takes the gradient of all experts"
                )
            stored = bucket.mean_part(index)
            full = value.full_tensor() if isinstance(value, ShardedGradient) else value.detach()
            # All ranks round the full gradient, not only their own part: if it overflows, the statistics of every
            # rank must say so and skip the step.
            full = (full.to(_wide(full.dtype)) * divisor).to(bucket.mean().dtype)
            if stored is not None:
                stored.copy_(self.shard_of(gradient, full))
            self._reducer.used.add(index)
            self._shown.put(index, gradient)
            if not value.is_inference():
                self._taken[index] = value, value._version
            self._on_written(index)
            stats.replace(index, full)

    def set_by_call(self, index: int, is_given: bool) -> None:
        """Note that ``zerolite.set_full_grad`` has written a reduced gradient, or dropped it.

        It replaces what the user has assigned to ``p.grad`` before.
        """
        (self._reducer.used.add if is_given else self._reducer.used.discard)(index)
        self._collector.forget(self._reducer.bucket_of[index].index)
        self._collector.discard()
        self.assigned.pop(index, None)
        self._shown.put(index, self._shown.window.gradients[index] if is_given else None)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _is_same(one: object, other: object) -> bool:
    """Compare numbers by value, tensors by identity."""
    return one is other or (not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor) and one == other)


_warned: set[tuple[str, int]] = set()


def warn_of_collective(message: str) -> None:
    """Warn that an expression runs a collective, at the innermost line that is not torch's or ours, once per line."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "zerolite"):
        frame = frame.f_back
    site = (frame.f_code.co_filename, frame.f_lineno)
    if site not in _warned:
        _warned.add(site)
        warnings.warn_explicit(message, UserWarning, *site)
