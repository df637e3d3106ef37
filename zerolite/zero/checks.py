"""Interface of the checks that are exchanged with a step's statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from zerolite.zero.grad_stats import Extra
from zerolite.zero.optim_shards import SpanTensors


class UpdateChecks(Extra, Protocol):
    """Checks whose numbers are exchanged with the step's statistics.

    :meth:`note` is called by each rank when it reads the statistics; the others by all ranks in the same place, where
    they may communicate and raise.
    """

    blame: str
    """A sentence about an update that has made weights non-finite; "" if none has."""

    def note(self, extra: tuple[Any, torch.Tensor] | None) -> None:
        """extra: what ``write`` has returned, and what the ranks have written, added, on the host."""

    def raise_errors(self) -> None:
        """Raise the errors that the statistics show, on all ranks."""

    def before_update(self, step: int, divisor: float, max_norm: float, gathers: int) -> None:
        """Run the checks of a step before its statistics are needed.

        Args:
            step: updates so far.
            gathers: a hash of stage 3's schedule, 0 without one.

        Raises as :meth:`raise_errors` does.
        """

    def before_save(self, step: int, scale: float, max_norm: float) -> None:
        """Look at everything at once, between two steps. Raises as :meth:`raise_errors` does."""

    def forget(self, update: bool) -> None:
        """Forget the weights that the last update left, because values have been written. update: all of them."""

    def replan(self) -> None:
        """Rebuild what depends on the buckets, because the layout has changed."""


Update = Callable[[Sequence[SpanTensors]], None]
"""Update of some of the spans of a step."""


class UpdateObserver(Protocol):
    """Observer of the masters before and after each of the calls that make one update."""

    def __call__(self, update: Update) -> Update:
        """Begin an update. Return ``update`` wrapped so that each call also looks at the masters before and after."""
