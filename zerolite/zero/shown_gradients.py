"""Tensors that the engine puts into ``p.grad`` after a backward, and takes out again."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from zerolite.utils.torch_private import as_plain_tensors
from zerolite.zero.layout import Slot
from zerolite.zero.sharded_gradient import ShardedGradient, Window

if TYPE_CHECKING:
    from zerolite.zero.grads import Gradients


class ShownGradients:
    """Tensors that the engine has put into each ``p.grad``.

    Two windows take turns, so that a reference to a gradient that outlives its step raises. A window that the user has
    operated on is not shown again at all.

    Attributes:
        parameters: by index.
        window: the present window.
        expected: what the engine has left in each ``p.grad``, by index.
    """

    def __init__(self) -> None:
        self.parameters: Sequence[torch.nn.Parameter] = ()
        self.window, self._other, self._is_used = Window(None), Window(None), False
        self.expected: list[torch.Tensor | None] = []
        self._slots: Sequence[Slot] = ()
        self._strides: Sequence[tuple[int, ...]] = ()

    def connect(self, source: Gradients) -> None:
        """Read and write values through ``source``."""
        self.window.source = self._other.source = weakref.ref(source)

    def use(
        self, slots: Sequence[Slot], parameters: Sequence[torch.nn.Parameter], strides: Sequence[tuple[int, ...]]
    ) -> None:
        """Use parameters that begin with the present ones. strides: of the full parameters, by index."""
        self._slots, self.parameters, self._strides = slots, parameters, strides
        self.expected += [None] * (len(parameters) - len(self.expected))
        self._fill(self.window)
        self._fill(self._other)

    def _fill(self, window: Window) -> None:
        for slot in self._slots[len(window.gradients) :]:
            parameter, strides = self.parameters[slot.index], self._strides[slot.index]
            shape = getattr(parameter, "ds_shape", parameter.shape)
            window.gradients.append(ShardedGradient.of(window, slot, shape, strides, parameter))

    def begin_backward(self) -> list[ShardedGradient]:
        """Empty every ``p.grad``, for autograd to write to. Return what the hooks leave there, by index."""
        self._is_used = True
        if any(map(operator.is_not, self.expected, itertools.repeat(None))):
            self.hide()
        return self.window.gradients

    def show(self, indices: Iterable[int]) -> None:
        """Show the gradients of these parameters. A tensor of the user's stays in ``p.grad``, where it is found."""
        with as_plain_tensors():
            for index in indices:
                if self.expected[index] is None and self.parameters[index].grad is None:
                    self.put(index, self.window.gradients[index])

    def restore(self) -> None:
        """Take out what a backward that has raised has left in ``p.grad`` but the engine's own gradients."""
        for gradient in self.window.gradients:
            gradient.added = None
        for index, left in self.changed().items():
            if left is not None:
                self.put(index, self.expected[index])

    def put(self, index: int, gradient: torch.Tensor | None) -> None:
        """Put ``gradient`` into ``p.grad``, whatever is there."""
        self._is_used = True
        self.expected[index] = gradient
        self.parameters[index].grad = gradient

    def hide(self) -> None:
        """Set every ``p.grad`` to None."""
        with as_plain_tensors():
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad = None
        self.expected = [None] * len(self.parameters)

    def close(self) -> None:
        """Hide the gradients, because a step has used them or they were dropped. The other window comes next."""
        self.hide()
        if self._is_used:
            self.window, self._other, self._is_used = self._other, self.window, False
            if self.window.touched:
                self.window = Window(self.window.source)
                self._fill(self.window)

    def changed(self) -> Mapping[int, torch.Tensor | None]:
        """Return, by index, each ``p.grad`` that is not what the engine has put there."""
        with as_plain_tensors():
            gradients = [parameter.grad for parameter in self.parameters]
        # One pass in C, because this runs in every step and usually finds nothing.
        if not any(map(operator.is_not, gradients, self.expected)):
            return {}
        pairs = enumerate(zip(gradients, self.expected, strict=True))
        return {index: gradient for index, (gradient, expected) in pairs if gradient is not expected}

    def is_in_place(self, index: int, gradient: torch.Tensor | None) -> bool:
        """Return True if ``gradient`` is in ``p.grad`` of this parameter."""
        with as_plain_tensors():
            return self.parameters[index].grad is gradient

    def all_dropped(self) -> bool:
        """Return True if some gradients are shown and the user has set ``p.grad`` of all parameters to None."""
        with as_plain_tensors():
            shown = any(map(operator.is_not, self.expected, itertools.repeat(None)))
            return shown and all(parameter.grad is None for parameter in self.parameters)
