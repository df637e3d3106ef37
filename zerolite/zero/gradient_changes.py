"""Changes that the user makes to ``p.grad``, applied to reduced gradients and statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from zerolite.zero.buffer import ParameterBuffer, flattened
from zerolite.zero.grad_reducer import GradReducer
from zerolite.zero.grad_stats import StatsCollector, StatsVector
from zerolite.zero.shown_gradients import Factor, GradientPlaceholder


class GradientChanges:
    """No method launches a collective: this rank's ``p.grad`` alone must not decide what it launches. Statistics that
    are there are corrected on each rank, alike.

    Attributes:
        assigned: by index of the parameter, what the user has put into ``p.grad`` and whose meaning is still open.
        exposed: by index of the parameter and id, tensors through which the user can write to the memory of a reduced
            gradient, and their versions.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        reducer: GradReducer,
        collector: StatsCollector,
    ) -> None:
        self._buffer = buffer
        self._reducer = reducer
        self._collector = collector
        self.assigned: dict[int, torch.Tensor] = {}
        self.exposed: dict[int, dict[int, tuple[torch.Tensor, int]]] = {}
        self._untracked: set[int] = set()  # where torch does not count what is written

    def clear(self) -> None:
        """The gradients have been used, or dropped."""
        self.assigned.clear()
        self.exposed.clear()
        self._untracked.clear()

    # ---------------------------------------------------------------- None and tensors in p.grad

    def all_dropped(self, found: Mapping[int, torch.Tensor | None]) -> bool:
        """Return True if the user has set ``p.grad`` of all parameters to None."""
        return all(value is None for value in found.values()) and self._reducer.shown.all_none(self._reducer.parameters)

    def take_over(self, found: Mapping[int, torch.Tensor | None]) -> None:
        """Drop gradients that were set to None; keep tensors until it is known what they are."""
        shown = self._reducer.shown
        for index, value in found.items():
            if shown.absorb(index, self._reducer.parameters[index], value):
                continue
            self._reducer.drop(index)
            shown.replace(index, value)
            self._collector.forget(self._bucket(index))
            self.assigned.pop(index, None)
            if value is not None:
                self.assigned[index] = value
            elif (stats := self._collector.latest) is not None:
                stats.replace(index, None, 1.0)
        self._buffer.placements.written_in_place()

    def accumulate_assigned(self, scale: Callable[[], float], weighted: bool) -> None:
        """Before a backward: tensors in ``p.grad`` count like a gradient of this rank's, as autograd would add to them.
        scale: of losses. Raises RuntimeError where backwards have weights."""
        if weighted:  # they stay, so that the next backward raises too
            name = self._buffer.layout.slots[min(self.assigned)].name
            raise RuntimeError(
                f"p.grad of parameter '{name}' was assigned before a backward with a weight, but the mean weight, by "
                "which the step divides, is known only after the last backward. Assign it after that; to go on now, "
                "set it to None or call engine.zero_grad()"
            )
        assigned, self.assigned = self.assigned, {}
        for index, value in assigned.items():
            self._reducer.add(index, _whole(value) * scale())

    @torch.no_grad()
    def store_assigned(self, stats: StatsVector, divisor: Factor) -> None:
        """After the last backward: tensors in ``p.grad`` are the mean gradient, the same on all ranks. divisor: what
        reduced gradients are divided by to be what ``p.grad`` shows."""
        assigned, self.assigned = self.assigned, {}
        for index, value in assigned.items():
            gradient, part = _whole(value), self._reducer.part(index)
            # Rounded on all ranks: what overflows here must be in the statistics, which then skip the step.
            wide = torch.promote_types(gradient.dtype, torch.float32)
            gradient = (gradient.to(wide) * divisor).to(self._reducer.mean_dtype(index))
            if part is not None:
                flat = flattened(gradient.to(part.device), self._reducer.strides[index])
                fragment = self._reducer.fragment(index)
                values = flat.narrow(0, fragment.param_start, fragment.numel)
                part.copy_(values.as_strided(part.shape, part.stride()))
            self._reducer.used.add(index)
            self._reducer.shown.show_one(self._buffer.layout.slots[index], self._reducer.parameters[index])
            self._collector.forget(self._bucket(index))
            stats.replace(index, gradient, 1.0)
        if assigned:
            self._buffer.placements.written_in_place()
        for index in self.exposed:
            self._was_written(index)  # the statistics have it

    def on_written(self, index: int) -> None:
        """The user has changed a gradient in place, on all ranks."""
        self._collector.forget(self._bucket(index))
        self._collector.discard()
        self._buffer.placements.written_in_place()

    def set_by_call(self, index: int, given: bool) -> None:
        """``zerolite.set_full_grad`` has set the reduced gradient of a parameter, or dropped it: neither a tensor that
        the user has put into ``p.grad`` before nor a factor counts."""
        (self._reducer.used.add if given else self._reducer.used.discard)(index)
        self._collector.forget(self._bucket(index))
        self._collector.discard()
        self.assigned.pop(index, None)
        shown, parameter = self._reducer.shown, self._reducer.parameters[index]
        shown.replace(index, None)
        if given:
            shown.show_one(self._buffer.layout.slots[index], parameter)
        else:
            shown.restore(self._buffer.layout.slots[index], parameter)

    # ---------------------------------------------------------------- factors

    @torch.no_grad()
    def apply_factors(self) -> None:
        """Multiply gradients by what the user has multiplied them by, which the update would do otherwise."""
        factors = self._reducer.shown.take_factors()
        for index, factor in factors.items():
            part = self._reducer.part(index)
            if part is not None:
                part.mul_(factor.to(part.device) if isinstance(factor, torch.Tensor) else factor)
            self._collector.forget(self._bucket(index))
        if factors:
            self._buffer.placements.written_in_place()
            if (stats := self._collector.latest) is not None:
                stats.rescale(factors, None)

    def common_factor(self, stats: StatsVector) -> Factor:
        """Return what the user has multiplied all gradients by, which ``stats`` then take into account."""
        common = self._reducer.shown.common_factor()
        if common is None:
            self.apply_factors()
            return 1.0
        self._reducer.shown.take_factors()
        stats.rescale({}, common)
        return common

    # ---------------------------------------------------------------- memory that the user has

    def expose(self, index: int, gradient: torch.Tensor) -> None:
        """The user is given the memory of a reduced gradient, and may write to it at any time. gradient: what stands
        for it in the operation that gives it. Autograd takes its result for a view of that, and counts there what is
        written to the view."""
        known = self.exposed.setdefault(index, {})
        for tensor in (self._reducer.lend(self._bucket(index)), gradient):
            known.setdefault(id(tensor), (tensor, tensor._version))

    def expose_untracked(self, index: int) -> None:
        """The user is given that memory as a NumPy array or a pointer. torch counts no writes through it, so that every
        later look takes it for written."""
        self._untracked.add(index)

    def refresh_stats(self, indices: Sequence[int] | None = None) -> None:
        """Correct the statistics, if there are any, of these gradients (default: all) by what has been written to
        memory that the user has. Only where each rank has whole gradients is there such memory."""
        stats = self._collector.latest
        if stats is None or not self.exposed:
            return
        for index in self.exposed.keys() if indices is None else self.exposed.keys() & set(indices):
            if self._was_written(index) and (gradient := self._reducer.part(index)) is not None:
                stats.replace_square(index, gradient)

    def _was_written(self, index: int) -> bool:
        """Return True if the user may have written to a gradient since the last call."""
        known = self.exposed[index]
        written = index in self._untracked or any(tensor._version != version for tensor, version in known.values())
        self.exposed[index] = {key: (tensor, tensor._version) for key, (tensor, _) in known.items()}
        return written

    def _bucket(self, index: int) -> int:
        return self._buffer.layout.slots[index].bucket


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.whole() if isinstance(value, GradientPlaceholder) else value.detach()
