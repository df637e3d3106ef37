"""Sources of the tensors in ``p.grad``: an engine's gradients, and a copy of one that was gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from zerolite.utils.nested import Arguments, Function, Keywords, find_tensors
from zerolite.zero.shown_gradients import Place


class GradientSource(Protocol):
    """An engine's gradients, by index of the parameter. All methods are called on all ranks. Reductions that are under
    way end first, which may be a collective."""

    def read(self, index: int) -> torch.Tensor:
        """Return this rank's part as ``p.grad`` shows it, on the device: the gradient's own memory where possible."""

    def open(self, index: int) -> torch.Tensor:
        """Return this rank's part to be written to: the gradient's own memory, or a copy in fp32 or more."""

    def close(self, index: int, part: torch.Tensor) -> None:
        """Take what has been written to ``part``, which :meth:`open` has given."""

    def multiply(self, indices: Sequence[int], factor: float | torch.Tensor) -> None:
        """Multiply these gradients by a number. The update does it."""

    def norms(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Return the L2 norms, 0-dim float64: all are in the step's statistics, one small collective."""

    def check_finite(self, indices: Sequence[int], found_inf: torch.Tensor) -> None:
        """Fill ``found_inf`` with 1 if one of these gradients is not finite, without waiting for the device."""

    def combine(self, values: torch.Tensor, largest: bool) -> torch.Tensor:
        """Add ``values`` over ranks, or take the largest."""

    def wholes(self, places: Sequence[Place], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return whole tensors, each in its parameter's shape, from all ranks' ``parts``, in one collective."""

    def whole(self, index: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return a gradient's own memory in the parameter's shape, or None if no rank has it whole. gradient: the
        tensor through which the user is given it."""

    def lend(self, index: int) -> None:
        """The user is given the memory that :meth:`whole` has returned, to be used without torch."""


class GatheredGradient(torch.Tensor):
    """A view of a whole gradient that was gathered: for reading. Values that are written to it would be lost, so that
    raises."""

    @classmethod
    def __torch_function__(
        cls, function: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            views = find_tensors((args, kwargs), cls)
            before = [view._version for view in views]
            result = function(*args, **kwargs)
            if before != [view._version for view in views]:
                raise RuntimeError(
                    "a view of p.grad was written to, but it is a copy that was gathered for reading, so the gradient "
                    "has not changed; write to p.grad itself (p.grad[0] = 0, p.grad.mul_(mask)), or call "
                    "zerolite.set_full_grad(p, value) on all ranks"
                )
            return read_only(result) if type(result) is torch.Tensor and result._is_view() else result


def read_only(view: torch.Tensor) -> torch.Tensor:
    """Let writing to ``view`` raise."""
    return view if view.is_inference() else view.as_subclass(GatheredGradient)
