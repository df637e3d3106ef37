"""What a step checks beside its gradients: that the ranks agree, and that the update before left weights finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zerolite.accelerator import HostRead
from zerolite.comm import Communicator
from zerolite.runtime.agreement import plain_text
from zerolite.runtime.consistency import ConsistencyCheck, UpdateNumbers, numbers_of
from zerolite.runtime.updated_weights import UpdatedWeights

_ONLY_KERNELS = ("bias_correction", "fp32_optimizer_states")  # keys of param groups that torch's defaults lack


class StepChecks:
    """Both checks, whose numbers travel with the step's statistics (:class:`~zerolite.runtime.grad_stats.Extra`).

    :meth:`note` is called by each rank when it reads the statistics, :meth:`act` by all ranks in the same place, where
    it may communicate and raise; the other methods are called by all ranks, too.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        world: Communicator,
        device: torch.device,
        consistency: ConsistencyCheck | None,
        updated: UpdatedWeights | None,
    ) -> None:
        """optimizer: whose param groups are used, and whose defaults say which of their values it reads."""
        self._optimizer = optimizer
        self._keys = (*optimizer.defaults, *_ONLY_KERNELS)
        self._world = world
        self._device = device
        self._consistency = consistency
        self._updated = updated
        self._coming: UpdateNumbers | None = None
        self._applied: UpdateNumbers | None = None  # in the update that the last statistics tell of
        self.blame = ""  # a sentence about an update that has made weights non-finite

    # ---------------------------------------------------------------- statistics

    @property
    def size(self) -> int:
        return sum(part.size for part in self._parts())

    def _parts(self) -> list[ConsistencyCheck | UpdatedWeights]:
        return [part for part in (self._consistency, self._updated) if part is not None]

    def write(self, values: torch.Tensor) -> None:
        if self._updated is not None:
            self._applied = self._updated.numbers
        for part, of_part in zip(self._parts(), self._split(values), strict=True):
            part.write(of_part)

    def _split(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        return values.split_with_sizes([part.size for part in self._parts()])

    def note(self, values: torch.Tensor | None) -> None:
        """``values``: what the ranks have written, added, on the host."""
        if values is None:
            return
        for part, of_part in zip(self._parts(), self._split(values), strict=True):
            part.note(of_part)
        if self._updated is not None and self._updated.spoilt and self._applied is not None:
            self.blame = _blame(self._updated.spoilt, self._applied)

    def act(self) -> None:
        """Raise on all ranks what the statistics have shown: RuntimeError if the ranks use different numbers,
        FloatingPointError if an update has made weights non-finite."""
        blame, self.blame = self.blame, ""
        if blame:
            raise FloatingPointError(
                f"{blame}. These weights are lost: start again from the last checkpoint, and look at the value that "
                "did it (a learning rate or schedule that runs away, an eps of 0, a loss scale near 0)."
            )
        if self._consistency is not None:
            self._consistency.act()

    # ---------------------------------------------------------------- the step

    def before_update(self, step: int, divisor: float, max_norm: float) -> None:
        """In the same place of every step, before its statistics are needed. step: updates so far. Raises as
        :meth:`act` does, and RuntimeError if the ranks hold different weights."""
        self.act()
        self._coming = UpdateNumbers(step, numbers_of(self._optimizer.param_groups, self._keys), divisor, max_norm)
        if self._updated is not None:
            self._updated.announce(self._coming)
        if self._consistency is not None:
            self._consistency.before_update(self._coming)

    def before_save(self, step: int, scale: float, max_norm: float) -> None:
        """Look at everything at once, between two steps. Raises as :meth:`before_update` does."""
        self.act()
        numbers = UpdateNumbers(step, numbers_of(self._optimizer.param_groups, self._keys), scale, max_norm)
        if self._consistency is not None:
            self._consistency.use(numbers)
        values = torch.zeros(self.size, dtype=torch.float64, device=self._device)
        if self.size:
            self.write(values)
            self._world.all_reduce(values, tag="consistency").wait()
            self.note(HostRead(values).get())
            self.act()
        if self._consistency is not None:
            self._consistency.compare_weights()

    def forget(self) -> None:
        """Values have been loaded, so that weights are not what the last update has left."""
        if self._updated is not None:
            self._updated.forget()

    def replan(self) -> None:
        """The layout has other buckets than before."""
        if self._updated is not None:
            self._updated.replan()


def _blame(groups: Sequence[int], numbers: UpdateNumbers) -> str:
    which = f"param group {groups[0]}" + (f" and {len(groups) - 1} more" if len(groups) > 1 else "")
    values = {key: value for key, value in numbers.groups[groups[0]].items() if _is_number(value)}
    used = ", ".join(f"{key}={plain_text(value)}" for key, value in values.items())
    scaled = f", gradients divided by {numbers.divisor:g} (loss scale)" if numbers.divisor != 1.0 else ""
    return (
        f"the update of step {numbers.step + 1} made weights of {which} non-finite, from finite gradients and weights, "
        f"with {used}{scaled}"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (float, int, tuple, torch.Tensor)) and not isinstance(value, bool)
