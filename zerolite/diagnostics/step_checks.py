"""Checks that use a step's statistics: equal scalars on all ranks, and finite weights after the last update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerolite.comm import Communicator
from zerolite.diagnostics.consistency import ConsistencyCheck, UpdateNumbers, numbers_of
from zerolite.diagnostics.rank_comparison import describe_value
from zerolite.diagnostics.updated_weights import UpdatedWeights
from zerolite.utils.accelerator import HostRead
from zerolite.zero.outcomes import StepCounters
from zerolite.zero.shown_gradients import InPlaceChange

_ONLY_KERNELS = ("bias_correction", "fp32_optimizer_states")  # keys of param groups that torch's defaults lack


class _CheckValues(NamedTuple):
    """Values of one check in the statistics.

    Attributes:
        size: number of values.
        numbers: the update that they are about; None before the first.
    """

    size: int
    numbers: UpdateNumbers | None


class StepChecks:
    """The two checks whose values are reduced with the step's statistics (:class:`~zerolite.zero.grad_stats.Extra`).

    Each rank calls :meth:`note` when it reads the statistics, which may be at different times. All ranks call
    :meth:`raise_errors` at the same place, where it may communicate and raise. All other methods are called on all
    ranks, too.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        world: Communicator,
        device: torch.device,
        consistency: ConsistencyCheck | None,
        updated: UpdatedWeights | None,
    ) -> None:
        """
        Args:
            optimizer: its param groups are compared; its defaults say which of their values it reads.
        """
        self._optimizer = optimizer
        self._keys = (*optimizer.defaults, *_ONLY_KERNELS)
        self._world = world
        self._device = device
        self._consistency = consistency
        self._updated = updated
        self._checks = [check for check in (consistency, updated) if check is not None]
        self.nonfinite_update = ""  # a sentence about the update that made weights non-finite

    # ---------------------------------------------------------------- statistics

    @property
    def size(self) -> int:
        return sum(check.size for check in self._checks)

    def write(self, values: torch.Tensor) -> list[_CheckValues]:
        """Write this rank's values into ``values``, which are then added over all ranks.

        The returned list belongs to these values: the next statistics may begin before these have been read.
        """
        written = []
        for check in self._checks:
            own, values = values[: check.size], values[check.size :]
            check.write(own)
            written.append(_CheckValues(len(own), check.numbers))
        return written

    def on_stats_read(self, extra: tuple[list[_CheckValues], torch.Tensor] | None) -> None:
        """Read the outcome of one step's statistics.

        Args:
            extra: the list that :meth:`write` returned, and the values added over all ranks, on the host.
        """
        if extra is None:
            return
        written, values = extra
        for check, (size, numbers) in zip(self._checks, written, strict=True):
            own, values = values[:size], values[size:]
            if numbers is None:
                continue
            if isinstance(check, ConsistencyCheck):
                check.note(own, numbers)
            elif groups := check.nonfinite_groups(own):
                self.nonfinite_update = _describe_update(groups, numbers)

    def raise_errors(self) -> None:
        """Raise on all ranks what the statistics have shown.

        Raises:
            RuntimeError: the ranks use different numbers.
            FloatingPointError: an update has made weights non-finite.
        """
        problem, self.nonfinite_update = self.nonfinite_update, ""
        if problem:
            assert self._updated is not None
            self._updated.note_raised()
            raise FloatingPointError(
                f"{problem}. These weights are lost: start again from the last checkpoint, and look at the value that "
                "did it (a learning rate or schedule that runs away, an eps of 0, a loss scale near 0)."
            )
        if self._consistency is not None:
            self._consistency.raise_errors()

    # ---------------------------------------------------------------- the step

    def before_update(
        self,
        counters: StepCounters,
        divisor: float,
        max_norm: float,
        gathers: int,
        changes: Sequence[InPlaceChange],
    ) -> None:
        """Run the checks of an update: at the same place of every step, before its statistics are needed.

        Args:
            counters: of the training so far.
            divisor: of the summed gradient.
            max_norm: for clipping; 0 for none.
            gathers, changes: see :class:`UpdateNumbers`.

        Raises:
            RuntimeError: the ranks hold different weights, or use different numbers.
            FloatingPointError: the last update has made weights non-finite.
        """
        self.raise_errors()
        groups = numbers_of(self._optimizer.param_groups, self._keys)
        steps, backwards = counters.global_steps, counters.micro_steps
        numbers = UpdateNumbers(steps, backwards, groups, divisor, max_norm, gathers, tuple(changes))
        if self._updated is not None:
            self._updated.announce(numbers)
        if self._consistency is not None:
            self._consistency.before_update(numbers)

    def before_save(self, counters: StepCounters, scale: float, max_norm: float) -> None:
        """Run all checks at once, between two steps. Raises as :meth:`before_update` does."""
        self.raise_errors()
        groups = numbers_of(self._optimizer.param_groups, self._keys)
        numbers = UpdateNumbers(counters.global_steps, counters.micro_steps, groups, scale, max_norm)
        if self._consistency is not None:
            self._consistency.use(numbers)
        values = torch.zeros(self.size, dtype=torch.float64, device=self._device)
        if self.size:
            written = self.write(values)
            self._world.all_reduce(values, tag="consistency").wait()
            self.on_stats_read((written, HostRead(values).get()))
            self.raise_errors()
        if self._consistency is not None:
            self._consistency.compare_weights()

    def on_weights_written(self, all_of_them: bool) -> None:
        """Forget earlier weights, because values have been written into parameters.

        Args:
            all_of_them: all weights are new (a checkpoint was loaded), so the outcome of the last update does not
                matter any more.
        """
        if self._updated is not None:
            self._updated.forget(all_of_them)
        if all_of_them:
            self.nonfinite_update = ""
            if self._consistency is not None:
                self._consistency.forget()

    def on_layout_changed(self) -> None:
        """Follow a layout with new buckets."""
        if self._updated is not None:
            self._updated.replan()


def _describe_update(groups: Sequence[int], numbers: UpdateNumbers) -> str:
    which = f"param group {groups[0]}" + (f" and {len(groups) - 1} more" if len(groups) > 1 else "")
    # Another pipeline stage may have more param groups than this rank knows.
    known = numbers.groups[groups[0]] if groups[0] < len(numbers.groups) else {}
    values = {key: value for key, value in known.items() if _is_number(value)}
    used = ", ".join(f"{key}={describe_value(value)}" for key, value in values.items())
    scaled = f", gradients divided by {numbers.divisor:g} (loss scale)" if numbers.divisor != 1.0 else ""
    return (
        f"the update of step {numbers.step + 1} made weights of {which} non-finite, from finite gradients and weights, "
        f"with {used}{scaled}"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (float, int, tuple, torch.Tensor)) and not isinstance(value, bool)
