"""Values behind ``p.grad`` between backward and step, at every stage and placement.

``p.grad`` is the mean over ranks, divided by the loss scale and by the mean weight, as ``zerolite.get_full_grad``
returns it. Called on all ranks alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerolite.comm import Communicator
from zerolite.utils.user_line import warn_of_collective
from zerolite.zero.reducer import Reducer
from zerolite.zero.shown_gradients import Factor, GradientSpec
from zerolite.zero.step import StepPipeline

Gather = Callable[[list[int], dict[int, torch.Tensor], torch.dtype], list[torch.Tensor]]


class PendingGradients:
    """One engine's gradients, by index of the parameter. Called on all ranks: each method first completes the
    reductions in progress, which may need a collective."""

    def __init__(
        self,
        pipeline: StepPipeline,
        reducer: Reducer,
        shard: Communicator,
        device: torch.device,
        gather: Gather,
        refusal: str = "",
    ) -> None:
        """
        Args:
            shard: ranks that split the gradients.
            gather: makes full tensors from the ranks' shards, by index of the parameter, in one collective.
            refusal: the reason why this engine's gradients cannot be used through ``p.grad``; "" if they can.
        """
        self._pipeline = pipeline
        self._reducer = reducer
        self._shard = shard
        self._gather = gather
        self._refusal = refusal
        self._device = device
        reducer.shown.connect(self)

    # ---------------------------------------------------------------- shards

    @torch.no_grad()
    def read(self, index: int) -> torch.Tensor:
        """Return this rank's part as ``p.grad`` shows it, on the device and in the parameter's dtype. It is the
        bucket's own memory if that needs no conversion."""
        self._finish([index])
        part, dtype = self._part(index), self._reducer.parameters[index].dtype
        scale = self._scale(index)
        if scale is None:
            return part.to(dtype)
        return (part.to(torch.promote_types(dtype, torch.float32)) * scale).to(dtype)

    def _scale(self, index: int) -> Factor | None:
        """Return the factor from stored values to those that ``p.grad`` shows; None for 1."""
        factor, divisor = (
            self._reducer.shown.factors.get(index),
            self._pipeline.state.shown_divisor(self._pipeline.stats),
        )
        if isinstance(divisor, float) and divisor == 1.0:
            return factor
        return 1.0 / divisor if factor is None else factor / divisor

    @torch.no_grad()
    def open(self, index: int) -> torch.Tensor:
        """Return this rank's part, to be written to until :meth:`close`: its own memory, or a copy in fp32 or more."""
        self._finish([index])
        if index in self._reducer.shown.factors:
            self._pipeline.changes.apply_factors()
        part, scale = self._part(index), self._scale(index)
        return part if scale is None else part.to(torch.promote_types(part.dtype, torch.float32)) * scale

    @torch.no_grad()
    def close(self, index: int, part: torch.Tensor) -> None:
        """Store ``part``, as :meth:`open` returned it, after it has been written to."""
        kept, scale = self._reducer.bucket_of[index].mean_part(index), self._scale(index)
        if kept is not None and (kept.device != part.device or kept.data_ptr() != part.data_ptr()):
            kept.copy_(part if scale is None else part / scale)
        self._pipeline.changes.on_written(index)

    def note_change(self, operation: str, numbers: Sequence[Any], count: int = 1) -> None:
        """Run :meth:`ShownGradients.note_change` for an operation other than :meth:`multiply`."""
        self._reducer.shown.note_change(operation, numbers, count)

    def full_grad_memory(self, index: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the bucket's own memory of a gradient. None if ``p.grad`` shows another tensor: the memory is a shard,
        has another dtype or device, or is times a loss scale.

        Args:
            gradient: the tensor through which the user gets this memory.
        """
        if self._reducer.keeps_shards:
            return None
        self._finish([index])
        if index in self._reducer.shown.factors:
            self._pipeline.changes.apply_factors()
        part, parameter = self._reducer.bucket_of[index].mean_part(index), self._reducer.parameters[index]
        wanted = self._device, parameter.dtype
        if part is None or (part.device, part.dtype) != wanted or self._scale(index) is not None:
            return None
        self._pipeline.changes.expose(index, gradient)
        return part

    def lend(self, index: int) -> None:
        """Note that the user gets the memory of :meth:`full_grad_memory` itself, and may write to it unseen."""
        self._pipeline.changes.expose_untracked(index)

    def _part(self, index: int) -> torch.Tensor:
        """Return this rank's part on the device, as it is stored."""
        part = self._reducer.bucket_of[index].mean_part(index)
        if part is not None:
            return part.to(self._device)
        parameter = self._reducer.parameters[index]
        shape = (0,) if self._reducer.keeps_shards else parameter.shape
        return torch.empty(shape, dtype=parameter.dtype, device=self._device)

    # ---------------------------------------------------------------- numbers

    @torch.no_grad()
    def multiply(self, indices: Sequence[int], factor: Factor) -> None:
        """Multiply these gradients by a number. The factor is stored, and normally applied by the update."""
        self._finish(indices)
        self._reducer.shown.note_change("mul_", [factor], len(indices))
        if isinstance(factor, torch.Tensor) and factor.device != self._device:
            factor = float(factor)
        self._reducer.shown.multiply(indices, factor)
        if self._pipeline.changes.exposed:  # the user has the gradient's memory itself, and expects the product there
            self._pipeline.changes.apply_factors()

    @torch.no_grad()
    def norms(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Return the L2 norms, from the step's statistics."""
        self._check(indices)
        stats, factors = self._pipeline.stats(), self._reducer.shown.factors
        self._pipeline.changes.refresh_stats(indices)
        by_parameter = stats.norms() / self._pipeline.state.device_divisor(stats)
        all_norms = by_parameter.unbind() if len(indices) > 1 else ()
        found = []
        for index in indices:
            norm = all_norms[index] if all_norms else by_parameter[index]
            factor: Any = factors.get(index)
            found.append(norm if factor is None else norm * abs(factor))
        return found

    @torch.no_grad()
    def norms_of_shards(self, shards: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
        """Return norms of any order over all ranks, 0-dim float64, in one collective.

        Args:
            shards: this rank's shard of each tensor.
        """
        if math.isinf(order):
            sign = 1.0 if order > 0 else -1.0
            own = [(sign * p.abs()).max().double() if p.numel() else p.new_tensor(-math.inf).double() for p in shards]
            return list((sign * self.combine(torch.stack(own), largest=True)).unbind())
        if order == 0:
            return list(self.combine(torch.stack([(p != 0).sum().double() for p in shards]), largest=False).unbind())
        wide = [torch.promote_types(p.dtype, torch.float32) for p in shards]
        norms = [torch.linalg.vector_norm(p, order, dtype=d) for p, d in zip(shards, wide, strict=True)]
        powers = torch.stack([norm.double() ** order for norm in norms])
        return list((self.combine(powers, largest=False) ** (1.0 / order)).unbind())

    @torch.no_grad()
    def check_finite(self, indices: Sequence[int], found_inf: torch.Tensor) -> None:
        """Fill ``found_inf`` with 1 if one of these gradients is not finite on any rank."""
        self._pipeline.state.refuse_grad_scaler()
        found = torch.stack(self.norms(indices)).isfinite().all().logical_not()
        found_inf.copy_(torch.maximum(found_inf, found.to(found_inf)))

    @torch.no_grad()
    def combine(self, values: torch.Tensor, largest: bool) -> torch.Tensor:
        """Reduce ``values`` [n] over ranks, in place: their sum, or with ``largest`` their maximum."""
        if not self._reducer.keeps_shards:  # every rank has the full gradient, and with it the same values
            return values
        if largest:
            self._shard.all_reduce_max(values, tag="access")
        else:
            self._shard.all_reduce(values, tag="access").wait()
        return values

    # ---------------------------------------------------------------- full tensors

    @torch.no_grad()
    def gather_full(self, specs: Sequence[GradientSpec], shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gather full tensors from all ranks' shards. One collective is enough, unless there are several dtypes, or
        several tensors of one parameter."""
        if specs[0].sharded and self._shard.world_size > 1 and self._shard.main:
            warn_of_collective(
                f"this line needs all values of the gradient of '{specs[0].name}', of which each rank owns a part: "
                "they are gathered, a collective that all ranks must call. zerolite.get_full_grad(p) does it for "
                "several parameters at once"
            )
        # One collective each: a dtype, and positions in ``shards`` by index of the parameter.
        rounds: list[tuple[torch.dtype, dict[int, int]]] = []
        for position, (spec, part) in enumerate(zip(specs, shards, strict=True)):
            for dtype, members in rounds:
                if dtype == part.dtype and spec.index not in members:
                    members[spec.index] = position
                    break
            else:
                rounds.append((part.dtype, {spec.index: position}))
        found: dict[int, torch.Tensor] = {}
        for dtype, members in rounds:
            sent = torch.uint8 if dtype == torch.bool else dtype
            gathered = self._gather(list(members), {i: shards[p].to(sent) for i, p in members.items()}, sent)
            found.update(zip(members.values(), (full.to(dtype) for full in gathered), strict=True))
        return [found[position] for position in range(len(shards))]

    # ---------------------------------------------------------------- whether it may be used

    def _check(self, indices: Sequence[int]) -> None:
        """Raise RuntimeError if one of these gradients cannot be used now."""
        why = self._refusal or self._pipeline.unreadable_reason()
        for index in indices:
            if why or not self._reducer.shown.is_shown(index):
                name = self._reducer.buffer.layout.slots[index].name
                why = why or "a step has used it, or it was dropped; take p.grad after the next backward"
                raise RuntimeError(f"the gradient of parameter '{name}' cannot be used here: {why}")

    def _finish(self, indices: Sequence[int]) -> None:
        self._check(indices)
        if not self._reducer.finished:
            self._pipeline.finish_reductions()
