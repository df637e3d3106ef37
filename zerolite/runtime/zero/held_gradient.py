"""What stands in ``p.grad`` for a gradient that the engine holds."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch

from zerolite.runtime.zero.layout import PartitionLayout, Slot
from zerolite.runtime.zero.released_parameter import find_arguments, opened

_ACCUMULATION = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)


class HeldGradient(torch.Tensor):
    """Not None, as a gradient is not, without storage, and of no other use: whatever reads or writes its values raises
    a sentence. So nobody clips, unscales or inspects nothing (``torch.nn.utils.clip_grad_norm_`` passes over parameters
    whose ``grad`` is None, without a word), and who sets it to None has dropped the gradient.

    Only autograd may add to it, which it does if a backward begins that nobody has told the engine of: ``arrived`` is
    then what it added.
    """

    parameter_name: str
    arrived: torch.Tensor | None

    @staticmethod
    def of(parameter: torch.Tensor, name: str) -> HeldGradient:
        held: HeldGradient = torch.Tensor._make_wrapper_subclass(
            HeldGradient, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        held.parameter_name, held.arrived = name, None
        return held

    def collect(self) -> torch.Tensor | None:
        """What autograd has added, once."""
        arrived, self.arrived = self.arrived, None
        return arrived

    def __repr__(self, **ignored: Any) -> str:  # type: ignore[override]
        return f"HeldGradient('{self.parameter_name}')"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        _refuse((args, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _ACCUMULATION and isinstance(args[0], HeldGradient):
            held = args[0]
            arrived = held.collect()
            total = args[1] if arrived is None else arrived + args[1]
            if function is _ACCUMULATION[1]:
                return total  # takes the place of ``held`` in ``p.grad``
            held.arrived = total
            return held
        _refuse((args, kwargs))


# What torch asks of any tensor before it knows what it wants of it; shapes and dtypes are those of the parameter.
_HARMLESS = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "requires_grad")),
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
    ]
)


def _refuse(arguments: Any) -> NoReturn:
    held = next(find_arguments(arguments, HeldGradient), None)
    name = held.parameter_name if held is not None else "?"
    raise RuntimeError(
        f"the gradient of parameter '{name}' is in the engine's buckets and not in p.grad. To clip, set "
        "gradient_clipping in the config, or call engine.clip_gradients(max_norm) before the step, which returns the "
        "norm; to read or change it, use zerolite.get_full_grad(p) and zerolite.set_full_grad(p, value) on all "
        "ranks, or p.register_hook; to drop all gradients, engine.zero_grad(). For fp16, the engine scales the loss "
        "itself: leave torch's GradScaler out."
    )


class ShownGradients:
    """The placeholders that are in ``p.grad`` now, and what the user has made of them."""

    def __init__(self) -> None:
        self._made: list[HeldGradient | None] = []  # by index of the parameter, to be used again
        self._shown: list[HeldGradient | None] = []  # what the engine has put into each ``p.grad``

    def use(self, count: int) -> None:
        """There are ``count`` parameters, which begin with those there were."""
        more: list[None] = [None] * (count - len(self._made))
        self._made += more
        self._shown += more

    def put(self, slot: Slot, parameter: torch.Tensor) -> None:
        """This parameter has a gradient in the engine."""
        index = slot.index
        held = self._made[index]
        try:
            parameter.grad = held
        except (RuntimeError, TypeError):  # at stage 3 it has no elements between uses
            held = None
        if held is None:
            held = self._made[index] = HeldGradient.of(parameter, slot.name)
            parameter.grad = held
        self._shown[index] = held

    def put_back(self, slot: Slot, parameter: torch.Tensor) -> None:
        """``p.grad`` is again what the engine has put there."""
        parameter.grad = self._shown[slot.index]

    def show(self, layout: PartitionLayout, parameters: Sequence[torch.nn.Parameter], indices: Iterable[int]) -> None:
        """The same for several, of which some may be shown already."""
        with opened():
            for index in indices:
                if self._shown[index] is None:
                    self.put(layout.slots[index], parameters[index])

    def hide(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Set every ``p.grad`` to None that the engine has put there."""
        with opened():
            for parameter, held in zip(parameters, self._shown, strict=True):
                if held is not None and parameter.grad is held:
                    parameter.grad = None
        self._shown = [None] * len(parameters)

    def all_none(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Return True if some are shown and ``p.grad`` of each of them is None."""
        with opened():
            gradients = [p.grad for p, held in zip(parameters, self._shown, strict=True) if held is not None]
        return bool(gradients) and all(gradient is None for gradient in gradients)

    def all_dropped(self, layout: PartitionLayout, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether the user has set ``p.grad`` of all of them to None, as ``module.zero_grad()`` does. Raises
        RuntimeError if it is some of them, or if there is a gradient that the engine has not seen."""
        with opened():
            gradients = [parameter.grad for parameter in parameters]
        if not any(map(operator.is_not, gradients, self._shown)):
            return False
        found = list(enumerate(zip(gradients, self._shown, strict=True)))
        for index, (gradient, held) in found:
            if gradient is not None and gradient is not held:
                raise RuntimeError(
                    f"parameter '{layout.slots[index].name}' has a gradient in p.grad that did not come from a "
                    "backward, and the engine would not use it; call zerolite.set_full_grad(p, value) on all ranks"
                )
        dropped = [index for index, (gradient, held) in found if gradient is not held]
        shown = sum(held is not None for held in self._shown)
        if len(dropped) < shown:
            raise RuntimeError(
                f"p.grad of parameter '{layout.slots[dropped[0]].name}' was set to None ({len(dropped)} of "
                f"{shown}), while the engine holds its gradient; to leave it out of a step, call "
                "zerolite.set_full_grad(p, None) on all ranks, or requires_grad_(False) before the forward"
            )
        return True
