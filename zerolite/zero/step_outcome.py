"""Outcome of steps: counters equal on all ranks, and messages about skips."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zerolite.comm.ranks import name_ranks
from zerolite.zero.grad_stats import GradStats
from zerolite.zero.layout import Slot


@dataclass
class StepCounters:
    """micro_steps: backwards. global_steps: updates, skipped ones included. last_norm: of the last step's gradient.
    weight_unit: see ``StepPipeline.weight_unit``."""

    micro_steps: int = 0
    global_steps: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    last_norm: float | None = None
    weight_unit: float = 1.0

    def count(self, outcome: GradStats, divisor: float, skipped: bool, scaled: bool) -> float:
        """One more step has ended; gives its norm. scaled: a loss scale may change the unit of weights."""
        self.global_steps += 1
        self.last_norm = outcome.norm / divisor
        if outcome.weight and scaled and math.isfinite(outcome.weight):
            self.weight_unit *= 2.0 ** round(math.log2(outcome.weight))
        self.skipped_steps += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        return self.last_norm

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in asdict(self):
            setattr(self, name, state[name])

    def describe_skip(self, outcome: GradStats, slots: Sequence[Slot], blame: str = "") -> str:
        """Describe the skip that was counted last. blame: what else made its gradients non-finite."""
        names = [slots[index].name for index in outcome.bad_parameters]
        where = f"in parameter '{names[0]}'" if names else "in the sum over parameters"
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        ranks = ", ".join(map(str, outcome.bad_ranks))
        if outcome.elsewhere:
            where, more = "in a part of the model that other ranks have", ""
        source = "although every rank's own gradients are finite (their sum overflows)"
        if ranks or outcome.elsewhere:
            source = f"from rank {ranks}" if ranks else "from there"
        if blame:
            source = f"because {blame}"
        return (
            f"step {self.global_steps} skipped on all ranks: non-finite gradient {where}{more}, {source}; "
            f"{self.skipped_in_a_row} in a row, {self.skipped_steps} in all"
        )

    def raise_if_hopeless(self, said: str, limit: int, minimum: float | None) -> None:
        """Give up after too many skipped steps, the last of which is described by ``said``. limit: skipped steps in a
        row, 0 for no limit. minimum: the loss scale if it cannot fall further. Raises FloatingPointError."""
        if minimum is not None:
            raise FloatingPointError(
                f"{said}. The fp16 loss scale is at its minimum, {minimum:g}, and cannot fall further. Try bf16 "
                '("bf16": {"enabled": true}), or look for the cause in that parameter and rank.'
            )
        if limit and self.skipped_in_a_row >= limit:
            raise FloatingPointError(
                f"{said}. max_consecutive_skipped_steps is {limit}: training has stopped. Look at the data and the "
                "loss of that rank, lower the learning rate, or clip the gradients."
            )


def describe_bad_losses(step: int, ranks: Sequence[int]) -> str:
    """About a step that was applied."""
    return (
        f"step {step}: a loss on {name_ranks(ranks)} is not finite although all gradients are; the step was applied. "
        "The part of the loss that is not finite has no gradient (a mask, torch.where, detach()): look for it there"
    )


class UnusedParameters:
    """Parameters that get no gradient on any rank: fine, an error because the config says so, or the sign that the
    model has lost them. gone(indices): those of them that the model no longer has."""

    def __init__(self, fine: bool, gone: Callable[[list[int]], list[int]]) -> None:
        self._gone = gone
        self._fine = fine
        self._last_used: frozenset[int] | None = None

    def check(self, used: frozenset[int], slots: Sequence[Slot], elsewhere: int = 0) -> None:
        """elsewhere: unused parameters of other parts of the model. Raises RuntimeError, on all ranks."""
        if len(used) == len(slots):
            self._last_used = used
            self._check_elsewhere(elsewhere)
            return
        if used != self._last_used:
            gone = self._gone([index for index in range(len(slots)) if index not in used])
            if gone:
                raise RuntimeError(
                    f"parameter '{slots[gone[0]].name}' is not in the model any more ({len(gone)} in all): it was "
                    "replaced after zerolite.initialize by an object that nothing trains (module.x = nn.Parameter(), "
                    "load_state_dict(assign=True), nn.utils.parametrizations); do that before zerolite.initialize, or "
                    "write the values into the parameter that is there"
                )
            self._last_used = used
        if self._fine:
            return
        unused = [slot.name for slot in slots if slot.index not in used and slot.numel]
        if unused:
            raise RuntimeError(
                f"zero_optimization.ignore_unused_parameters is false and {len(unused)} parameters got no "
                "gradient on any rank: "
                f"{', '.join(unused[:8])}{' …' if len(unused) > 8 else ''}. Use them in the loss, freeze them, or "
                "set the key to true."
            )
        self._check_elsewhere(elsewhere)

    def _check_elsewhere(self, count: int) -> None:
        if count and not self._fine:
            raise RuntimeError(
                f"zero_optimization.ignore_unused_parameters is false and {count} parameters in other parts of the "
                "model got no gradient; the ranks that have them name them"
            )


def mean_weight(outcome: GradStats) -> float:
    """Return the divisor that turns a sum over weighted gradients into the joint batch's gradient. Raises RuntimeError,
    on all ranks, if there is no such thing."""
    if outcome.mixed:
        raise RuntimeError(
            "engine.backward: some ranks gave a weight in this step and others did not; pass weight= on all ranks, or "
            "on none"
        )
    if outcome.weight is None:
        return 1.0
    if not 0 < outcome.weight < math.inf:
        raise RuntimeError(
            f"engine.backward: the weights of this step are {outcome.weight:g} per rank on average, and the mean over "
            "nothing has no gradient; leave such a step out: engine.zero_grad() on all ranks instead of engine.step()"
        )
    return outcome.weight
