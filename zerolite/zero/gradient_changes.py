"""Changes that the user makes to ``p.grad``, applied to reduced gradients and statistics.

| in the user's loop                   | here                                                              |
|--------------------------------------|-------------------------------------------------------------------|
| ``p.grad = None``                    | the gradient is dropped (``adopt``)                               |
| ``p.grad = tensor``, then a backward | raises (``refuse_assigned``)                                      |
| ``p.grad = tensor``, then a step     | is the mean gradient, the same on all ranks (``store_assigned``)  |
| ``p.grad.mul_(factor)``              | the update multiplies by it (``common_factor``)                   |
| writes to a view of ``p.grad``       | are found by version counters (``expose``, ``refresh_stats``)     |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.flat import flattened
from zerolite.zero.grad_stats import StatsCollector, StatsVector
from zerolite.zero.reducer import Reducer
from zerolite.zero.shown_gradients import Factor, GradientPlaceholder


class GradientChanges:
    """Changes of ``p.grad`` since the last step; see the module.

    No method launches a collective: the ``p.grad`` of one rank must not decide what that rank launches. If statistics
    have been collected, each rank corrects its own by the same rules.

    Attributes:
        assigned: by index of the parameter, tensors that the user has put into ``p.grad``, to be stored as the mean.
        exposed: tensors through which the user can write to the memory of a reduced gradient, by index of the parameter
            and id of the tensor. Each has its version counter from the last look at it.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        reducer: Reducer,
        collector: StatsCollector,
    ) -> None:
        self._buffer = buffer
        self._reducer = reducer
        self._collector = collector
        self.assigned: dict[int, torch.Tensor] = {}
        self.exposed: dict[int, dict[int, tuple[torch.Tensor, int]]] = {}
        self._untracked: set[int] = set()  # exposed parameters whose versions do not tell

    def clear(self) -> None:
        """Forget all changes, because the gradients have been used or dropped."""
        self.assigned.clear()
        self.exposed.clear()
        self._untracked.clear()

    # ---------------------------------------------------------------- None and tensors in p.grad

    def all_dropped(self, found: Mapping[int, torch.Tensor | None]) -> bool:
        """Return True if the user has set ``p.grad`` of all parameters to None. found: what ``changed`` returned."""
        return all(value is None for value in found.values()) and self._reducer.shown.all_none(self._reducer.parameters)

    def adopt(self, found: Mapping[int, torch.Tensor | None]) -> None:
        """Drop gradients that were set to None, and note assigned tensors.

        Args:
            found: by index of the parameter, contents of ``p.grad`` that the engine has not put there.
        """
        shown = self._reducer.shown
        written: list[torch.Tensor] = []
        for index, value in found.items():
            if shown.absorb(index, self._reducer.parameters[index], value):
                continue
            written += self._reducer.drop(index)
            shown.replace(index, value)
            self._collector.forget(self._bucket(index))
            self.assigned.pop(index, None)
            if value is not None:
                self.assigned[index] = value
                continue
            shown.note_change("set to None", ())
            if (stats := self._collector.latest) is not None:
                stats.replace(index, None, 1.0)
        self._buffer.placements.drop_reads(written)

    def refuse_assigned(self) -> None:
        """Raise RuntimeError for an assigned tensor, because a backward is about to add to it.

        It would count as this rank's gradient or as the mean of all ranks, and nothing tells which.
        """
        raise RuntimeError(
            f"parameter '{self._buffer.layout.slots[min(self.assigned)].name}': expected None or the gradient of "
            "earlier backwards in p.grad when a backward begins, got a tensor of your own; put it there after the last "
            "backward of the step, or call engine.zero_grad() to drop it"
        )

    @torch.no_grad()
    def store_assigned(self, stats: StatsVector, divisor: Factor) -> None:
        """Store assigned tensors as mean gradients after the last backward; they are the same on all ranks.

        Args:
            stats: statistics of the gradients, which are corrected.
            divisor: number by which stored gradients are divided to be what ``p.grad`` shows.
        """
        assigned, self.assigned = self.assigned, {}
        written: list[torch.Tensor] = []
        for index, value in assigned.items():
            gradient, part = _full_tensor(value), self._reducer.bucket_of[index].mean_part(index)
            # All ranks round the full gradient, not only their own part: if it overflows, the statistics of every
            # rank must say so and skip the step.
            wide = torch.promote_types(gradient.dtype, torch.float32)
            gradient = (gradient.to(wide) * divisor).to(self._reducer.bucket_of[index].mean().dtype)
            if part is not None:
                flat = flattened(gradient.to(part.device), self._reducer.bucket_of[index].strides[index])
                fragment = self._reducer.bucket_of[index].fragment_of(index)
                values = flat.narrow(0, fragment.param_start, fragment.numel)
                written.append(part.copy_(values.as_strided(part.shape, part.stride())))
            self._reducer.used.add(index)
            self._reducer.shown.show_one(self._buffer.layout.slots[index], self._reducer.parameters[index])
            self._collector.forget(self._bucket(index))
            stats.replace(index, gradient, 1.0)
        if assigned:
            self._buffer.placements.drop_reads(written)
        for index in self.exposed:
            self._was_written(index)  # only notes the versions: the new statistics contain what has been written

    def on_written(self, index: int) -> None:
        """Forget statistics of a gradient that the user has changed in place, on all ranks."""
        self._collector.forget(self._bucket(index))
        self._collector.discard()
        part = self._reducer.bucket_of[index].mean_part(index)
        self._buffer.placements.drop_reads([] if part is None else [part])

    def set_by_call(self, index: int, given: bool) -> None:
        """Note that ``zerolite.set_full_grad`` has written a reduced gradient.

        It replaces what the user has assigned to ``p.grad`` or multiplied it by before.

        Args:
            index: index of the parameter.
            given: True if it has set values, False if it has dropped the gradient.
        """
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
        """Multiply the stored gradients by the user's factors, which the update would do otherwise."""
        factors = self._reducer.shown.pop_factors()
        written: list[torch.Tensor] = []
        for index, factor in factors.items():
            part = self._reducer.bucket_of[index].mean_part(index)
            if part is not None:
                written.append(part.mul_(factor.to(part.device) if isinstance(factor, torch.Tensor) else factor))
            self._collector.forget(self._bucket(index))
        if factors:
            self._buffer.placements.drop_reads(written)
            if (stats := self._collector.latest) is not None:
                stats.rescale(factors, None)

    def common_factor(self, stats: StatsVector) -> Factor:
        """Return the user's factor of all gradients, and correct ``stats`` by it.

        If gradients have different factors, they are applied to the stored gradients, and this returns 1.
        """
        common = self._reducer.shown.common_factor()
        if common is None:
            self.apply_factors()
            return 1.0
        self._reducer.shown.pop_factors()
        stats.rescale({}, common)
        return common

    # ---------------------------------------------------------------- memory that the user has

    def expose(self, index: int, gradient: torch.Tensor) -> None:
        """Watch the memory of a reduced gradient that the user gets and may write to at any time.

        Args:
            index: index of the parameter.
            gradient: the placeholder of the operation that returns this memory. Autograd takes the result for a view
                of it, so its version counter counts writes to the view.
        """
        known = self.exposed.setdefault(index, {})
        for tensor in (self._reducer.bucket_of[index].lend(), gradient):
            known.setdefault(id(tensor), (tensor, tensor._version))

    def expose_untracked(self, index: int) -> None:
        """Note that the user gets this memory as a NumPy array or a pointer.

        No version counter counts writes through those, so it is taken as written at every later look.
        """
        self._untracked.add(index)

    def refresh_stats(self, indices: Sequence[int] | None = None) -> None:
        """Correct collected statistics by what the user has written to exposed memory.

        There is exposed memory only at stage 0, where each rank has full gradients and corrects all statistics alone.

        Args:
            indices: parameters whose statistics are corrected; None for all.
        """
        stats = self._collector.latest
        if stats is None or not self.exposed:
            return
        for index in self.exposed.keys() if indices is None else self.exposed.keys() & set(indices):
            if self._was_written(index) and (gradient := self._reducer.bucket_of[index].mean_part(index)) is not None:
                stats.replace_square(index, gradient)

    def _was_written(self, index: int) -> bool:
        """Return True if the user may have written to an exposed gradient since the last call."""
        known = self.exposed[index]
        written = index in self._untracked or any(tensor._version != version for tensor, version in known.values())
        self.exposed[index] = {key: (tensor, tensor._version) for key, (tensor, _) in known.items()}
        return written

    def _bucket(self, index: int) -> int:
        return self._buffer.layout.slots[index].bucket


def _full_tensor(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, GradientPlaceholder) else value.detach()
