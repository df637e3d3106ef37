"""Observers of the step that the core itself needs: unused parameters, and the agreement on stage 3's schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from zerolite.utils.accelerator import is_fake
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.observers import StepObserver, UpdateFacts
from zerolite.zero.stats import GradStats

if TYPE_CHECKING:
    from zerolite.zero.stage3.fetch_schedule import FetchSchedule

logger = logging.getLogger("zerolite")


class UnusedParameters(StepObserver):
    """Check of parameters that get no gradient on any rank."""

    def __init__(self, buffer: ParameterBuffer, allowed: bool, find_removed: Callable[[list[int]], list[int]]) -> None:
        """
        Args:
            buffer: buckets of the trained parameters.
            allowed: the config allows unused parameters.
            find_removed: returns those of the given parameters that the model no longer has.
        """
        self._buffer, self._allowed, self._find_removed = buffer, allowed, find_removed
        self._last_used: frozenset[int] | None = None

    def on_unused(self, stats: GradStats) -> Exception | None:
        slots, used = self._buffer.layout.slots, stats.used
        if used != self._last_used:
            removed = self._find_removed([index for index in range(len(slots)) if index not in used])
            if removed:
                return RuntimeError(
                    f"parameter '{slots[removed[0]].name}' is not in the model any more ({len(removed)} in all): it "
                    "was replaced after zerolite.initialize by an object that nothing trains (module.x = "
                    "nn.Parameter(), load_state_dict(assign=True), nn.utils.parametrizations); do that before "
                    "zerolite.initialize, or write the values into the parameter that is there"
                )
        self._last_used = used
        if self._allowed:
            return None
        unused = [slot.name for slot in slots if slot.index not in used and slot.numel]
        if unused:
            return RuntimeError(
                f"zero_optimization.ignore_unused_parameters is false and {len(unused)} parameters got no "
                "gradient on any rank: "
                f"{', '.join(unused[:8])}{' …' if len(unused) > 8 else ''}. Use them in the loss, freeze them, or "
                "set the key to true."
            )
        if stats.unused_elsewhere:
            return RuntimeError(
                f"zero_optimization.ignore_unused_parameters is false and {stats.unused_elsewhere} parameters in other "
                "parts of the model got no gradient; the ranks that have them name them"
            )
        return None


class ScheduleAgreement(StepObserver):
    """Comparison of the ranks' recorded execution orders, so that all ranks adopt the same plan in the same update.

    The statistics of a step carry a hash of the order. Each rank may read statistics at another time. So the result is
    acted on in the next update, which all ranks call in the same place.
    """

    def __init__(self, schedule: FetchSchedule, place: int, places: int, logs: bool) -> None:
        """
        Args:
            place: ranks with the same number are compared; they have the same part of the model.
            places: parts of the model.
            logs: True if this rank writes the warning.
        """
        self.schedule, self._logs = schedule, logs
        self._place, self.slice_size = 3 * place, 3 * places
        self._compared = 0  # hash in the statistics that the update before has used
        self._match = True

    def write_slice(self, numbers: torch.Tensor) -> int:
        """Write 1, the hash, and its square. Return the hash."""
        candidate = self.schedule.candidate_hash
        if is_fake(numbers):  # a dry run reads no sums: its other ranks are copies of this one
            self._compared = candidate
        for place, number in enumerate((1, candidate, candidate**2), self._place):
            if number:  # fill_ passes it as an argument of a kernel; a copy from the host may wait for the device
                numbers[place].fill_(number)
        return candidate

    def read_slice(self, written: int, sums: torch.Tensor) -> None:
        self._compared = written
        count, first, second = sums[self._place : self._place + 3].tolist()
        # n equal hashes h have the sum n h and the sum of squares n h². Different ones have a larger sum of squares
        # (Cauchy and Schwarz), so one sum over ranks compares them all. In integers, which are exact.
        self._match &= int(count) * int(second) == int(first) ** 2

    def before_update(self, facts: UpdateFacts | None = None) -> None:
        """Adopt or reject the orders that the previous update has compared. Called before the update's statistics are
        collected: these compare the orders that are left."""
        match, self._match = self._match, True
        compared, self._compared = self._compared, 0
        if not match:
            self.schedule.reject()
            if self._logs:
                logger.warning("stage 3: the ranks run their modules in different orders; nothing is prefetched")
        elif compared and self.schedule.candidate_hash == compared:
            self.schedule.adopt()
