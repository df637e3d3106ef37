"""Gradient accumulation: count of micro-batches, and the backward that completes a step.

Pure: standard library only. An *accumulation* is the micro-batches of one optimizer step. All counters change by the
same calls on every rank, so their answers may decide which collectives run.
"""

from __future__ import annotations


class GradAccumulation:
    """Counts micro-batches of one accumulation.

    A micro-batch ends with ``engine.step()`` in DeepSpeed's loop; a plain loop has only backwards to count.
    Whichever is further along predicts the boundary. The prediction only decides *when* gradients are reduced,
    never whether: what is left unreduced is reduced by the step.
    """

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self.forced_boundary: bool | None = None
        self.sync_disabled = 0  # depth of no_sync() contexts
        self._stepped = 0  # engine.step() calls of this accumulation that followed a backward
        self.backwards = 0
        self._scaled_backwards = 0  # backwards whose loss the engine divided by micro_batches
        self._divided_backwards = 0  # the user's own, whose gradients the engine divided by micro_batches
        self._backwards_since_step = 0
        self.weighted: bool | None = None  # whether its backwards carry weights; None before the first
        self.weight = 0.0  # sum of their weights

    def force_boundary(self, is_boundary: bool | None) -> None:
        """Say by hand whether the micro-batch in hand is the last one; None returns to counting."""
        self.forced_boundary = is_boundary

    @property
    def empty(self) -> bool:
        return self.backwards == 0

    def is_boundary(self) -> bool:
        """True if the micro-batch in hand is the last one of its accumulation: in DeepSpeed's loop the one that the
        next ``engine.step()`` ends, in a plain loop the one of the latest backward."""
        if self.forced_boundary is not None:
            return self.forced_boundary
        if self._plain:
            return self.backwards >= self.micro_batches
        return self._stepped + 1 >= self.micro_batches

    def next_backward_closes(self) -> bool:
        """True if the backward that begins now should reduce, stages 0 and 1."""
        if self.sync_disabled:
            return False
        if self.forced_boundary is not None:
            return self.forced_boundary
        before = self.backwards if self._plain else self._stepped
        return before + 1 >= self.micro_batches

    @property
    def _plain(self) -> bool:
        """True if, as far as this accumulation shows, the user calls neither engine.backward() nor engine.step()."""
        return self.backwards > 0 and not self._stepped and not self._scaled_backwards

    def on_backward(self, scaled: bool, weight: float | None = None, divided: bool = False) -> None:
        """Count a backward.

        Args:
            scaled: the engine has divided its loss, or will divide by the sum of weights instead.
            divided: the engine divides the gradients of a backward that the user has called.
        """
        self.backwards += 1
        self._divided_backwards += divided
        self._backwards_since_step += 1
        self._scaled_backwards += scaled
        self.weighted = weight is not None
        self.weight += weight or 0.0

    def on_engine_step(self) -> bool:
        """Count one ``engine.step()``; True if it closes the accumulation."""
        if self.forced_boundary is not None:
            closes = self.forced_boundary
        else:
            closes = self._stepped + 1 >= self.micro_batches
        if self._backwards_since_step or closes:
            self._stepped += 1
        self._backwards_since_step = 0
        return closes

    def flush_factor(self) -> float:
        """Return the factor that makes the gradient of a partial accumulation the mean over the micro-batches it
        contains."""
        if not (self._scaled_backwards or self._divided_backwards) or self.weighted:
            return 1.0
        contained = self._stepped + (1 if self._backwards_since_step else 0)
        return self.micro_batches / contained if 0 < contained < self.micro_batches else 1.0

    def reset(self) -> None:
        """The accumulation was consumed or dropped; a forced boundary and open no_sync() contexts stay."""
        self._stepped = self.backwards = self._backwards_since_step = 0
        self._scaled_backwards = self._divided_backwards = 0
        self.weighted, self.weight = None, 0.0
