"""Gradients shown in ``p.grad`` for all parameters, and detection of the user's changes."""

from __future__ import annotations

import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerolite.zero.buffer import flattened
from zerolite.zero.layout import PartitionLayout, Range, Slot
from zerolite.zero.stage3.released_parameter import as_plain_tensors, set_grad

Factor = float | torch.Tensor
"""A number by which gradients are multiplied; as a tensor 0-dim float64."""


@dataclass(eq=False)
class GradientSpec:
    """The elements of one parameter that this rank owns: ``[start, start + numel)`` of it in the order in which memory
    holds it. ``sharded``: a part is flat; otherwise it is the whole, in the parameter's shape. ``used``: it was the
    gradient of an earlier step."""

    name: str
    index: int
    shape: torch.Size
    strides: tuple[int, ...]
    start: int
    numel: int
    sharded: bool
    source: weakref.ref[Any]
    used: bool = False

    def mark_used(self) -> None:
        """A step has used the gradient, or it was dropped."""
        self.used = True

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor that broadcasts to the parameter's shape."""
        if not self.sharded or not tensor.dim():
            return tensor
        return flattened(tensor.expand(self.shape), self.strides).narrow(0, self.start, self.numel)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return True if ``tensor`` broadcasts to the parameter's shape."""
        ends = zip(reversed(tensor.shape), reversed(self.shape), strict=False)
        return tensor.dim() <= len(self.shape) and all(own in (1, size) for own, size in ends)


class GradientPlaceholder(torch.Tensor):
    """The tensor in ``p.grad`` between backward and step, without memory of its own. The core makes, shows and hides
    it; a subclass, which is passed in, says what operations on it do.

    Attributes:
        spec: shape and range of this rank's part.
        part: None for the gradient itself; for what an elementwise operation has made of it, this rank's part of the
            result.
        arrived: what autograd has added, in a backward that has begun unannounced.
    """

    spec: GradientSpec
    part: torch.Tensor | None
    arrived: torch.Tensor | None

    def collect(self) -> torch.Tensor | None:
        """Return what autograd has added, once."""
        arrived, self.arrived = self.arrived, None
        return arrived

    def open(self) -> torch.Tensor:
        """Return this rank's part to be written to, until :meth:`close`."""
        raise NotImplementedError

    def close(self, part: torch.Tensor) -> None:
        """Take what has been written to ``part``."""
        raise NotImplementedError

    def whole(self) -> torch.Tensor:
        """Return all values. Called on all ranks."""
        raise NotImplementedError


MakeGradient = Callable[[GradientSpec, torch.Tensor], GradientPlaceholder]
"""Make the placeholder of a gradient, in the dtype and on the device of a tensor."""


_two_lists = [object()]
_OWN_REFERENCES = next(map(sys.getrefcount, list(_two_lists)))  # to what is in two lists, and nowhere else


class ShownGradients:
    """One :class:`GradientPlaceholder` for each parameter that has a gradient in the engine.

    ``factors``: by index of the parameter, what the user has multiplied a gradient by, which is not in its values yet:
    clipping is then no pass over memory, and the update multiplies once, as with ``gradient_clipping``.
    """

    def __init__(self, sharded: bool, rank: int, make: MakeGradient) -> None:
        """sharded: whether reduced gradients are kept in parts, of which ``rank`` owns one."""
        self._make = make
        self.factors: dict[int, Factor] = {}
        self._sharded, self._rank = sharded, rank
        self._placeholders: list[GradientPlaceholder | None] = []  # by index of the parameter, to be used again
        self._shown: list[torch.Tensor | None] = []  # what each ``p.grad`` is, as far as the engine knows
        self._references: list[int] = []  # to each of those that were made, as far as they are the engine's
        self._source: weakref.ref[Any] = weakref.ref(self)
        self._last_factor: tuple[Factor, int] = (1.0, 0)  # the last factor, and its version
        self._products: dict[int, tuple[Factor | None, Factor]] = {}  # with it, by id of the factor before

    def connect(self, source: object) -> None:
        """Let the gradients ask ``source`` for their values. It is known weakly: a model may outlive its engine."""
        self._source = weakref.ref(source)

    def set_layout(self, layout: PartitionLayout, strides: Sequence[tuple[int, ...]]) -> None:
        """Take a layout that begins with the parameters there are."""
        self._layout, self._strides = layout, strides
        self._partitioned = any(bucket.rows for bucket in layout.buckets)  # parameters may be released
        more: list[None] = [None] * (len(layout.slots) - len(self._placeholders))
        self._placeholders += more
        self._shown += more
        self._references += [sys.maxsize] * len(more)

    def show_one(self, slot: Slot, parameter: torch.Tensor) -> None:
        """Show the gradient of a parameter."""
        held = self._placeholders[slot.index]
        if held is None:
            held = self._placeholders[slot.index] = self._make(self._spec(slot, parameter), parameter)
            self._references[slot.index] = _OWN_REFERENCES
        self._shown[slot.index] = held
        if self._partitioned:
            set_grad(parameter, held)
        else:
            parameter.grad = held

    def placeholders_of(self, indices: Iterable[int]) -> Mapping[int, torch.Tensor] | None:
        """Return what :meth:`show_one` shows of each of these parameters, which stays the same until :meth:`retire`
        returns True; None before it has."""
        known = {index: held for index in indices if (held := self._placeholders[index]) is not None}
        if len(known) < len(set(indices)):
            return None
        for index in known:
            self._references[index] = _OWN_REFERENCES + 1
        return known

    def mark_shown(self, indices: Iterable[int]) -> None:
        """The gradients of these parameters are shown, as :meth:`show_one` does it."""
        for index in indices:
            self._shown[index] = self._placeholders[index]

    def _spec(self, slot: Slot, parameter: torch.Tensor) -> GradientSpec:
        owned = self._layout.param_range(slot, self._rank) if self._sharded else Range(0, slot.numel)
        shape = getattr(parameter, "ds_shape", parameter.shape)
        strides = self._strides[slot.index]
        return GradientSpec(
            slot.name, slot.index, shape, strides, owned.start, owned.numel, self._sharded, self._source
        )

    def restore(self, slot: Slot, parameter: torch.Tensor) -> None:
        """Let ``p.grad`` be again what the engine has put there."""
        set_grad(parameter, self._shown[slot.index])

    def show(self, parameters: Sequence[torch.nn.Parameter], indices: Iterable[int]) -> None:
        """Show several gradients, of which some may be shown already. A tensor that the user has put in the place of
        one stays, to be found."""
        with as_plain_tensors():
            for index in indices:
                if self._shown[index] is None and parameters[index].grad is None:
                    self.show_one(self._layout.slots[index], parameters[index])

    def hide(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Set every ``p.grad`` to None, for the next backward, if any is shown."""
        if any(map(operator.is_not, self._shown, itertools.repeat(None))):
            self._hide(parameters)

    def _hide(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        with as_plain_tensors():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = None
        self._shown = [None] * len(parameters)

    def retire(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Hide all gradients, which a step has used. One that the user still has shows those of no later step: others
        are made in its place. Return True if there are such, so that what :meth:`placeholders_of` has returned is asked
        for anew."""
        shown: list[Any] = self._shown
        self._hide(parameters)
        self.factors.clear()
        # Two C loops and no Python for each parameter: a gradient is the user's, too, if it has more references than
        # those of the engine.
        if not any(map(operator.gt, map(sys.getrefcount, shown), self._references)):
            return False
        kept = False
        for index, references in enumerate(map(sys.getrefcount, shown)):
            held = self._placeholders[index]
            if held is not None and held is shown[index] and references > self._references[index]:
                held.spec.mark_used()
                self._placeholders[index] = None
                kept = True
        if kept:
            self._references = [_OWN_REFERENCES if known < sys.maxsize else known for known in self._references]
        return kept

    def is_shown(self, index: int) -> bool:
        return self._shown[index] is not None

    # ---------------------------------------------------------------- what the user has done

    def all_none(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Return True if some are shown and ``p.grad`` of each of them is None."""
        with as_plain_tensors():
            gradients = [p.grad for p, held in zip(parameters, self._shown, strict=True) if held is not None]
        return bool(gradients) and all(gradient is None for gradient in gradients)

    def changed(self, parameters: Sequence[torch.nn.Parameter]) -> Mapping[int, torch.Tensor | None]:
        """Return, by index, each ``p.grad`` that is not what the engine has put there."""
        with as_plain_tensors():
            gradients = [parameter.grad for parameter in parameters]
        if not any(map(operator.is_not, gradients, self._shown)):
            return {}
        found = enumerate(zip(gradients, self._shown, strict=True))
        return {index: gradient for index, (gradient, held) in found if gradient is not held}

    def absorb(self, index: int, parameter: torch.Tensor, gradient: torch.Tensor | None) -> bool:
        """Return True if ``gradient`` is what was shown, or what an operation on it has given, which is then taken."""
        held = self._shown[index]
        if (
            not isinstance(held, GradientPlaceholder)
            or not isinstance(gradient, GradientPlaceholder)
            or gradient.spec is not held.spec
        ):
            return False
        set_grad(parameter, held)
        if gradient.part is not None:
            own = held.open()
            own.copy_(gradient.part)
            held.close(own)
        return True

    def replace(self, index: int, gradient: torch.Tensor | None) -> None:
        """The user has put ``gradient`` in the place of what was shown."""
        self._shown[index] = gradient
        self.factors.pop(index, None)

    # ---------------------------------------------------------------- factors

    def multiply(self, indices: Iterable[int], factor: Factor) -> None:
        """Multiply gradients by ``factor``, a tensor as it is now. Those with one history get one object:
        :meth:`common_factor` compares no values, for which the host would wait for the device."""
        given = (factor, factor._version) if isinstance(factor, torch.Tensor) else (float(factor), 0)
        if not _same_factor(given, self._last_factor):
            self._last_factor, self._products = given, {}
        for index in indices:
            old = self.factors.get(index)
            if id(old) not in self._products:
                own = factor.detach().to(torch.float64, copy=True) if isinstance(factor, torch.Tensor) else given[0]
                self._products[id(old)] = old, own if old is None else old * own
            self.factors[index] = self._products[id(old)][1]

    def take_factors(self) -> dict[int, Factor]:
        """Return the factors, which count no more."""
        factors, self.factors = self.factors, {}
        return factors

    def common_factor(self) -> Factor | None:
        """Return the factor of all gradients that are shown, None if they have several, or some have none."""
        shown = [index for index, held in enumerate(self._shown) if held is not None]
        if len(set(map(id, self.factors.values()))) != 1 or not all(index in self.factors for index in shown):
            return None
        return next(iter(self.factors.values()))


def _same_factor(one: tuple[Factor, int], other: tuple[Factor, int]) -> bool:
    """Compare numbers by value, tensors by identity and version."""
    if isinstance(one[0], torch.Tensor) or isinstance(other[0], torch.Tensor):
        return one[0] is other[0] and one[1] == other[1]
    return one == other
