"""Gradient accumulation: count of micro-batches, and the backward that completes a step.

An *accumulation* is all micro-batches of one optimizer step. All counters change by the same calls on every rank, so
their answers may decide which collectives run.

Pure: standard library only.
"""

from __future__ import annotations

from typing import Any


class GradAccumulation:
    """Counters of one accumulation, and the prediction which backward is its last.

    In DeepSpeed's loop ``engine.step()`` ends each micro-batch, so its calls are counted. A plain loop calls it never
    or once at the end, so backwards are counted. The prediction decides *when* gradients are reduced, and never if:
    the step reduces what no backward has.

    Attributes:
        micro_batches: number of micro-batches in a full accumulation.
        forced_boundary: the user's answer to :meth:`is_boundary`; None to count.
        sync_disabled: depth of open ``no_sync()`` contexts.
        backwards: backwards so far.
        weighted: its backwards have weights; None before the first.
        weight: sum of their weights.
        of_parts: each loss is that of a part of the samples, and its backward is weighted by what the part counts.
        of_others: the backward of one rank brings gradients of other ranks' losses too.
        loss_scale: loss scale of its backwards, once it has been read.
        mean_weight: number of backwards, and the mean weight that the statistics have told of them.
        flushed: number of backwards at the flush, and the correction factor.
    """

    def __init__(self, micro_batches: int, of_parts: bool = False, of_others: bool = False) -> None:
        self.micro_batches, self.of_parts, self.of_others = micro_batches, of_parts, of_others
        self.forced_boundary: bool | None = None
        self.sync_disabled = 0
        self._stepped = 0  # engine.step() calls of this accumulation that followed a backward
        self.backwards = 0
        self._scaled_backwards = 0  # backwards whose loss the engine divided by micro_batches
        self._divided_backwards = 0  # the user's own, whose gradients the engine divided likewise
        self._backwards_since_step = 0
        self.weighted: bool | None = None
        self.weight = 0.0
        self.loss_scale: float | None = None
        self.mean_weight: tuple[int, Any] | None = None
        self.flushed = (0, 1.0)

    def force_boundary(self, is_boundary: bool | None) -> None:
        """Set by hand if the current micro-batch is the last one; None returns to counting."""
        self.forced_boundary = is_boundary

    @property
    def empty(self) -> bool:
        """True before the first backward."""
        return self.backwards == 0

    def is_boundary(self) -> bool:
        """Return True if the current micro-batch is the last one of its accumulation.

        In DeepSpeed's loop the current one ends with the next ``engine.step()``; in a plain loop it is the one of the
        latest backward.
        """
        if self.forced_boundary is not None:
            return self.forced_boundary
        if self._plain:
            return self.backwards >= self.micro_batches
        return self._stepped + 1 >= self.micro_batches

    def next_backward_closes(self) -> bool:
        """Return True if the backward that begins now is the last one, in which stages 0 and 1 reduce."""
        if self.sync_disabled:
            return False
        if self.forced_boundary is not None:
            return self.forced_boundary
        before = self.backwards if self._plain else self._stepped
        return before + 1 >= self.micro_batches

    @property
    def _plain(self) -> bool:
        """True if the user has called neither ``engine.backward()`` nor ``engine.step()`` in this accumulation."""
        return self.backwards > 0 and not self._stepped and not self._scaled_backwards

    def on_backward(self, scaled: bool, weight: float | None = None, divided: bool = False) -> None:
        """Count a backward.

        Args:
            scaled: the engine has divided its loss by ``micro_batches``, or will divide by the sum of weights instead.
            weight: weight of its loss; None if it has none.
            divided: the engine divides its gradients instead, because the user has called the backward.

        Raises:
            RuntimeError: on all ranks, for a weight where it must have none, or the other way round. Nothing has
                changed.
        """
        weighted = weight is not None
        if self.of_parts and not weighted:
            raise RuntimeError(
                "expected engine.backward(loss), which weights the loss by the labels of this rank's part of the "
                "sequences (sequence_parallel), got a backward without a weight, by loss.backward() or torch.autograd"
            )
        if self.weighted not in (None, weighted):
            raise RuntimeError(
                "engine.backward: expected all backwards of a step to have a weight, or none of them; got one "
                f"{'with' if weighted else 'without'} after one {'without' if weighted else 'with'} "
                "(torch.autograd.grad through the engine's outputs is one without)"
            )
        self.backwards += 1
        self._divided_backwards += divided
        self._backwards_since_step += 1
        self._scaled_backwards += scaled
        self.weighted = weighted
        self.weight += weight or 0.0

    def on_engine_step(self) -> bool:
        """Count one ``engine.step()``. Return True if it closes the accumulation."""
        if self.forced_boundary is not None:
            closes = self.forced_boundary
        else:
            closes = self._stepped + 1 >= self.micro_batches
        if self._backwards_since_step or closes:
            self._stepped += 1
        self._backwards_since_step = 0
        return closes

    def flush_factor(self) -> float:
        """Return the factor that turns the gradient of a partial accumulation into the mean over its micro-batches.

        The engine has divided each loss by ``micro_batches``, but fewer have come.
        """
        if not (self._scaled_backwards or self._divided_backwards) or self.weighted:
            return 1.0
        contained = self._stepped + (1 if self._backwards_since_step else 0)
        return self.micro_batches / contained if 0 < contained < self.micro_batches else 1.0

    def flush(self) -> None:
        """End the accumulation before it is full: its gradient becomes the mean over the micro-batches it contains."""
        self.flushed = self.backwards, self.flush_factor()

    def reset(self) -> None:
        """Begin the next accumulation. A forced boundary and open ``no_sync()`` contexts stay."""
        self._stepped = self.backwards = self._backwards_since_step = 0
        self._scaled_backwards = self._divided_backwards = 0
        self.weighted, self.weight = None, 0.0
        self.loss_scale = self.mean_weight = None
        self.flushed = (0, 1.0)


class UnmanagedAccumulation(GradAccumulation):
    """Counters of accumulations whose last backward is not known before: each ``engine.step()`` updates, after any
    number of backwards. No loss is divided, so a gradient is the sum over these backwards."""

    def __init__(self, of_parts: bool = False, of_others: bool = False) -> None:
        super().__init__(1, of_parts, of_others)

    def is_boundary(self) -> bool:
        """Return True, unless it was set by hand: the next ``engine.step()`` updates."""
        return self.forced_boundary is not False

    def next_backward_closes(self) -> bool:
        """Return False unless it was set by hand: stages 0 and 1 then reduce once, in the step."""
        return not self.sync_disabled and bool(self.forced_boundary)
