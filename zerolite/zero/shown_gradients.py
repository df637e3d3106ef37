"""Gradients shown in ``p.grad`` for all parameters, and detection of the user's changes.

Reduced gradients are in buckets. Between backward and step ``p.grad`` is a placeholder without memory, which reads and
writes its part of a bucket. The engine remembers what it has put into each ``p.grad``. Any other tensor that it finds
there was put there by the user.
"""

from __future__ import annotations

import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerolite.zero.flat import flattened
from zerolite.zero.layout import PartitionLayout, Range, Slot
from zerolite.zero.stage3.absent_parameter import as_plain_tensors

Factor = float | torch.Tensor
"""Number by which gradients are multiplied: a float, or a 0-dim float64 tensor."""


@dataclass(eq=False)
class GradientSpec:
    """Shape of one parameter's gradient, and this rank's part of it.

    Placeholders made by operations on ``p.grad`` share its spec, and specs are compared by identity.

    Attributes:
        name: qualified name of the parameter.
        index: index of the parameter.
        shape: shape of the full gradient.
        strides: strides of the full gradient.
        start: first element of this rank's part, in the memory order of the full gradient.
        numel: elements of this rank's part.
        sharded: this rank's part is flat [numel]; otherwise it is the full gradient, in the parameter's shape.
        source: object that reads and writes the values; a dead reference after its engine was deleted.
        used: a step has used the gradient, or it was dropped.
    """

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
        """Note that a step has used the gradient, or that it was dropped."""
        self.used = True

    def shard_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor that broadcasts to the parameter's shape."""
        if not self.sharded or not tensor.dim():
            return tensor
        return flattened(tensor.expand(self.shape), self.strides).narrow(0, self.start, self.numel)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return True if ``tensor`` broadcasts to the parameter's shape."""
        ends = zip(reversed(tensor.shape), reversed(self.shape), strict=False)
        return tensor.dim() <= len(self.shape) and all(own in (1, size) for own, size in ends)


class GradientPlaceholder(torch.Tensor):
    """Tensor in ``p.grad`` between backward and step, without memory of its own.

    The core makes, shows and hides it. A subclass, which is passed in, implements the operations on it.

    Attributes:
        spec: shape of the gradient, and this rank's part of it.
        part: this rank's part of the result of an elementwise operation; None for the gradient itself.
        added: gradient that autograd has added to the placeholder, in a backward of which the engine was not notified.
        operations: operations that have made a result, each with its numbers, see :meth:`ShownGradients.note_change`.
    """

    spec: GradientSpec
    part: torch.Tensor | None
    added: torch.Tensor | None
    operations: tuple[tuple[str, Sequence[Any]], ...] = ()

    def set_added(self, gradient: torch.Tensor) -> None:
        self.added = gradient

    def pop_added(self) -> torch.Tensor | None:
        """Return ``added`` and set it to None."""
        added, self.added = self.added, None
        return added

    def open(self) -> torch.Tensor:
        """Return this rank's part, which may be written to until :meth:`close`."""
        raise NotImplementedError

    def close(self, part: torch.Tensor) -> None:
        """Store ``part``, the result of :meth:`open`, after it has been written to."""
        raise NotImplementedError

    def full_tensor(self) -> torch.Tensor:
        """Return the full gradient. Called on all ranks."""
        raise NotImplementedError


MakeGradient = Callable[[GradientSpec, torch.Tensor], GradientPlaceholder]
"""Function that makes the placeholder of a gradient with the dtype and device of the given tensor."""


# The engine keeps each placeholder in two lists. This is the reference count of such an object, counted by `map`.
_two_lists = [object()]
_OWN_REFERENCES = next(map(sys.getrefcount, list(_two_lists)))


@dataclass(eq=False)
class InPlaceChange:
    """Operation by which the user has changed gradients in place. The ranks compare them.

    Attributes:
        operation: name of torch's operation.
        given: numbers that it was given, with the version of those that are 0-dim tensors.
        numbers: the same numbers, tensors copied and in fp32.
        count: gradients that it has changed.
    """

    operation: str
    given: tuple[tuple[Any, int], ...]
    numbers: tuple[Any, ...]
    count: int = 0


class ShownGradients:
    """Placeholders of all parameters that have a gradient in the engine.

    Attributes:
        factors: number by which the user has multiplied a gradient, by index of the parameter. The stored values are
            not multiplied; the update multiplies by it. So clipping by the user needs no pass over memory, and gives
            the bits of ``gradient_clipping``.
        changes: what the user has done to gradients in place since the last step, in this order.
    """

    def __init__(self, sharded: bool, rank: int, make: MakeGradient) -> None:
        """
        Args:
            sharded: each rank keeps a part of a reduced gradient, not the whole.
            rank: this rank.
            make: see :data:`MakeGradient`.
        """
        self._make = make
        self.factors: dict[int, Factor] = {}
        self.changes: list[InPlaceChange] = []
        self._sharded, self._rank = sharded, rank
        self._placeholders: list[GradientPlaceholder | None] = []  # by index; reused in every step
        self._shown: list[torch.Tensor | None] = []  # content of each ``p.grad``, as far as the engine knows
        self._references: list[int] = []  # reference count of each placeholder that only the engine has
        self._source: weakref.ref[Any] = weakref.ref(self)
        self._last_factor: tuple[Factor, int] = (1.0, 0)  # of `multiply`, with its version
        # By id of an earlier factor: that factor, and its product with the last one. The factor is kept alive, so that
        # no other object gets its id.
        self._products: dict[int, tuple[Factor | None, Factor]] = {}

    def connect(self, source: object) -> None:
        """Set the ``source`` of the values. The reference is weak, because the model may outlive the engine."""
        self._source = weakref.ref(source)

    def set_layout(self, layout: PartitionLayout, strides: Sequence[tuple[int, ...]]) -> None:
        """Set a layout that begins with the present parameters. strides: strides of all whole parameters, by index."""
        self._layout, self._strides = layout, strides
        more: list[None] = [None] * (len(layout.slots) - len(self._placeholders))
        self._placeholders += more
        self._shown += more
        self._references += [sys.maxsize] * len(more)

    def show_one(self, slot: Slot, parameter: torch.Tensor) -> None:
        """Show the gradient of a parameter in its ``p.grad``."""
        placeholder = self._placeholders[slot.index]
        if placeholder is None:
            placeholder = self._placeholders[slot.index] = self._make(self._spec(slot, parameter), parameter)
            self._references[slot.index] = _OWN_REFERENCES
        self._shown[slot.index] = placeholder
        parameter.grad = placeholder

    def placeholders_of(self, indices: Iterable[int]) -> Mapping[int, torch.Tensor] | None:
        """Return the placeholders of these parameters, for a caller that puts them into ``p.grad`` itself.

        They stay the same until :meth:`retire` returns True. Return None if some have not been made yet.
        """
        known = {index: found for index in indices if (found := self._placeholders[index]) is not None}
        if len(known) < len(set(indices)):
            return None
        for index in known:  # the caller's dict is one more reference of the engine
            self._references[index] = _OWN_REFERENCES + 1
        return known

    def mark_shown(self, indices: Iterable[int]) -> None:
        """Note that the caller has put the placeholders of these parameters into ``p.grad``."""
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
        """Put into ``p.grad`` again what the engine has shown there last."""
        parameter.grad = self._shown[slot.index]

    def show(self, parameters: Sequence[torch.nn.Parameter], indices: Iterable[int]) -> None:
        """Show the gradients of these parameters that are not shown yet.

        A tensor that the user has put into ``p.grad`` stays there, so that :meth:`changed` finds it.
        """
        with as_plain_tensors():
            for index in indices:
                if self._shown[index] is None and parameters[index].grad is None:
                    self.show_one(self._layout.slots[index], parameters[index])

    def hide(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Set every ``p.grad`` to None, if some gradient is shown."""
        # One pass in C, because this runs in every backward and usually finds nothing.
        if any(map(operator.is_not, self._shown, itertools.repeat(None))):
            self._hide(parameters)

    def _hide(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        with as_plain_tensors():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = None
        self._shown = [None] * len(parameters)

    def retire(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Hide all gradients after a step has used them.

        A placeholder that the user still refers to must not show the gradients of a later step. It is marked as used,
        and a new one is made when it is needed.

        Returns:
            True if there are such placeholders, so that :meth:`placeholders_of` must be called again.
        """
        shown = self._shown
        self._hide(parameters)
        self.factors.clear()
        self.changes.clear()
        # The user refers to a placeholder if its reference count is above that of the engine alone. This usually finds
        # none, in one pass in C without Python for each parameter.
        if not any(map(operator.gt, map(sys.getrefcount, shown), self._references)):
            return False
        replaced = False
        for index, references in enumerate(map(sys.getrefcount, shown)):
            placeholder = self._placeholders[index]
            if placeholder is not None and placeholder is shown[index] and references > self._references[index]:
                placeholder.spec.mark_used()
                self._placeholders[index] = None
                replaced = True
        if replaced:  # callers of `placeholders_of` drop their dicts
            self._references = [_OWN_REFERENCES if count < sys.maxsize else count for count in self._references]
        return replaced

    def is_shown(self, index: int) -> bool:
        """Return True if ``p.grad`` shows a gradient, unless the user has changed it since."""
        return self._shown[index] is not None

    # ---------------------------------------------------------------- what the user has done

    def all_none(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Return True if some gradients are shown and the user has set ``p.grad`` of all of them to None."""
        with as_plain_tensors():
            gradients = [p.grad for p, shown in zip(parameters, self._shown, strict=True) if shown is not None]
        return bool(gradients) and all(gradient is None for gradient in gradients)

    def changed(self, parameters: Sequence[torch.nn.Parameter]) -> Mapping[int, torch.Tensor | None]:
        """Return, by index, each ``p.grad`` that is not what the engine has put there."""
        with as_plain_tensors():
            gradients = [parameter.grad for parameter in parameters]
        if not any(map(operator.is_not, gradients, self._shown)):
            return {}
        pairs = enumerate(zip(gradients, self._shown, strict=True))
        return {index: gradient for index, (gradient, shown) in pairs if gradient is not shown}

    def absorb(self, index: int, parameter: torch.Tensor, gradient: torch.Tensor | None) -> bool:
        """Store a result that the user has computed from the shown gradient, as in ``p.grad = p.grad * 2``, and show
        the placeholder again.

        Args:
            index: index of the parameter.
            parameter: the parameter.
            gradient: content of ``p.grad``.

        Returns:
            False, and nothing done, if ``gradient`` is none of this parameter's placeholders.
        """
        shown = self._shown[index]
        if (
            not isinstance(shown, GradientPlaceholder)
            or not isinstance(gradient, GradientPlaceholder)
            or gradient.spec is not shown.spec
        ):
            return False
        parameter.grad = shown
        if gradient.part is not None:
            for operation, numbers in gradient.operations:
                self.note_change(operation, numbers)
            own = shown.open()
            own.copy_(gradient.part)
            shown.close(own)
        return True

    def replace(self, index: int, gradient: torch.Tensor | None) -> None:
        """Note that the user has put ``gradient`` into ``p.grad``."""
        self._shown[index] = gradient
        self.factors.pop(index, None)

    # ---------------------------------------------------------------- factors

    def note_change(self, operation: str, numbers: Iterable[Any], count: int = 1) -> None:
        """Note that ``operation`` changes ``count`` gradients in place.

        Args:
            operation: see :class:`InPlaceChange`.
            numbers: its arguments that are numbers or 0-dim tensors.
            count: number of gradients. The same operation on further gradients adds to it.
        """
        given = tuple((n, n._version if isinstance(n, torch.Tensor) else 0) for n in numbers)
        last = self.changes[-1] if self.changes else None
        if (
            last is None
            or (last.operation, len(last.given)) != (operation, len(given))
            or not all(map(_same_factor, given, last.given))
        ):
            kept = [n.detach().to(torch.float32, copy=True) if isinstance(n, torch.Tensor) else n for n, _ in given]
            last = InPlaceChange(operation, given, tuple(kept))
            self.changes.append(last)
        last.count += count

    def multiply(self, indices: Iterable[int], factor: Factor) -> None:
        """Multiply gradients by ``factor``, or by its present value if it is a tensor.

        Gradients that were multiplied by the same factors share one product. So :meth:`common_factor` can compare
        objects: to compare values of tensors, the host would have to wait for the device.
        """
        given = (factor, factor._version) if isinstance(factor, torch.Tensor) else (float(factor), 0)
        if not _same_factor(given, self._last_factor):
            self._last_factor, self._products = given, {}
        for index in indices:
            old = self.factors.get(index)
            if id(old) not in self._products:
                own = factor.detach().to(torch.float64, copy=True) if isinstance(factor, torch.Tensor) else given[0]
                self._products[id(old)] = old, own if old is None else old * own
            self.factors[index] = self._products[id(old)][1]

    def pop_factors(self) -> dict[int, Factor]:
        """Return ``factors`` and clear them."""
        factors, self.factors = self.factors, {}
        return factors

    def common_factor(self) -> Factor | None:
        """Return the factor of all shown gradients; None if they have different ones, or if some have none."""
        shown = [index for index, gradient in enumerate(self._shown) if gradient is not None]
        if len(set(map(id, self.factors.values()))) != 1 or not all(index in self.factors for index in shown):
            return None
        return next(iter(self.factors.values()))


def _same_factor(one: tuple[Factor, int], other: tuple[Factor, int]) -> bool:
    """Compare numbers by value, tensors by identity and version."""
    if isinstance(one[0], torch.Tensor) or isinstance(other[0], torch.Tensor):
        return one[0] is other[0] and one[1] == other[1]
    return one == other
