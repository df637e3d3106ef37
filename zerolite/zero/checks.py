"""Interface of the checks that may ride on a step's statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from zerolite.zero.grad_stats import Extra
from zerolite.zero.spans import Span


class UpdateChecks(Extra, Protocol):
    """Numbers that travel with the step's statistics, and what follows from them.

    :meth:`note` is called by each rank when it reads the statistics; the others by all ranks in the same place, where
    they may communicate and raise.
    """

    blame: str
    """A sentence about an update that has made weights non-finite; "" if none has."""

    def note(self, extra: tuple[Any, torch.Tensor] | None) -> None:
        """extra: what ``write`` has returned, and what the ranks have written, added, on the host."""

    def act(self) -> None:
        """Raise on all ranks what the statistics have shown."""

    def before_update(self, step: int, divisor: float, max_norm: float, gathers: int) -> None:
        """Run the checks of a step before its statistics are needed. step: updates so far. gathers: a hash of stage 3's
        schedule, 0 without one. Raises as :meth:`act` does."""

    def before_save(self, step: int, scale: float, max_norm: float) -> None:
        """Look at everything at once, between two steps. Raises as :meth:`act` does."""

    def forget(self, update: bool) -> None:
        """Values have been written, so that weights are not what the last update has left. update: all of them."""

    def replan(self) -> None:
        """The layout has other buckets than before."""


class UpdateLook(Protocol):
    """Observer of the masters before and after each of the calls that make one update."""

    def begin(self) -> None: ...

    def found(self, spans: Sequence[Span], masters: Sequence[torch.Tensor]) -> None: ...

    def left(self, spans: Sequence[Span], masters: Sequence[torch.Tensor]) -> None: ...

    def end(self) -> None: ...
