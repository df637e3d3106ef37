"""Interface of the checks that are exchanged with a step's statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from zerolite.zero.grad_stats import Extra
from zerolite.zero.shown_gradients import InPlaceChange
from zerolite.zero.update import SpanTensors

if TYPE_CHECKING:
    from zerolite.zero.outcomes import StepCounters


class UpdateChecks(Extra, Protocol):
    """Checks whose numbers are exchanged with the step's statistics.

    Each rank calls :meth:`on_stats_read` when it reads the statistics, which may be at another time than other ranks.
    All ranks call the other methods in the same place, where they may communicate and raise.

    Attributes:
        nonfinite_update: description of the update that has made weights non-finite; "" if none has.
    """

    nonfinite_update: str

    def on_stats_read(self, extra: tuple[Any, torch.Tensor] | None) -> None:
        """Read the outcome of one step's checks.

        Args:
            extra: the result of :meth:`write`, and the sum over all ranks of what it has written, on the host.
        """

    def raise_errors(self) -> None:
        """Raise the errors that the statistics show, on all ranks."""

    def before_update(
        self,
        counters: StepCounters,
        divisor: float,
        max_norm: float,
        gathers: int,
        changes: Sequence[InPlaceChange],
    ) -> None:
        """Run the checks of a step before its statistics are needed. Raises as :meth:`raise_errors` does.

        Args:
            counters: of the training so far.
            divisor: divisor of the summed gradient.
            max_norm: L2 norm to which gradients are clipped; 0 for none.
            gathers: hash of everything that stage 3 has gathered; 0 at other stages.
            changes: what the user has done to these gradients in place.
        """

    def before_save(self, counters: StepCounters, scale: float, max_norm: float) -> None:
        """Run all checks at once, between two steps. Raises as :meth:`raise_errors` does."""

    def on_weights_written(self, all_of_them: bool) -> None:
        """Forget the weights that the last update left, because values have been written into weights."""

    def on_layout_changed(self) -> None:
        """Rebuild what depends on the buckets."""


Update = Callable[[Sequence[SpanTensors]], None]
"""Function that updates some of the spans of a step."""


UpdateObserver = Callable[[Update], Update]
"""Function that begins the update of a step: it wraps the update, so that each call looks at the masters before and
after."""
