"""``ShardedGradient``: the tensor in ``p.grad`` between backward and step, which stands for the mean over ranks.

It has the parameter's shape and no memory. Its values are this rank's part of the reduced gradient, which is all of it
at stage 0.

- An elementwise change in place runs on that part, without a collective.
- A norm is one small collective. L2 norms are those of the step's statistics, which the step then does not collect
  again.
- Everything else runs on a gathered copy, and gives an ordinary tensor. If it changes the copy, that is written back.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from zerolite.comm import wait_for_result
from zerolite.utils.nested import Arguments, Function, Keywords, find_tensors, map_tensors, written_arguments
from zerolite.utils.torch_private import as_plain_tensors, current_backward, foreach_types
from zerolite.zero.layout import Slot

if TYPE_CHECKING:
    from zerolite.zero.grads import Gradients

aten = torch.ops.aten

Rule = Callable[..., object]
"""Replacement of an operation, called with it and its arguments. NotImplemented: it does not apply to them."""


class Window:
    """The gradients that ``p.grad`` shows in one accumulation.

    Attributes:
        source: weak reference to the engine's gradients, because the model may outlive the engine.
        gradients: by index of the parameter.
        touched: the user has operated on one of them, and may keep it.
    """

    def __init__(self, source: weakref.ref[Gradients] | None) -> None:
        self.source, self.gradients, self.touched = source, list[ShardedGradient](), False


class ShardedGradient(torch.Tensor):
    """Gradient of a parameter, of which this rank has a part in a bucket.

    Attributes:
        window: the accumulation that it belongs to.
        slot: slot of the parameter, with its index and name.
        added: what autograd has added to it, in a backward that the engine did not know of.
    """

    window: Window
    slot: Slot
    added: torch.Tensor | None = None

    @staticmethod
    def of(
        window: Window, slot: Slot, shape: Sequence[int], strides: Sequence[int], like: torch.Tensor
    ) -> ShardedGradient:
        """Make the gradient of a parameter, with the dtype and device of ``like``."""
        gradient: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            ShardedGradient, shape, strides, dtype=like.dtype, device=like.device
        )
        gradient.window, gradient.slot = window, slot
        return gradient

    @property
    def source(self) -> Gradients:
        """The engine's gradients. Raises RuntimeError for a gradient that is not there any more."""
        self.window.touched = True
        source = None if self.window.source is None else self.window.source()
        if source is None:
            raise RuntimeError(f"the gradient of parameter '{self.slot.name}' has gone with its engine")
        source.check(self)
        return source

    def is_of(self, other: ShardedGradient) -> bool:
        """Return True if both are of the same parameter and accumulation."""
        return self.slot is other.slot and self.window is other.window

    def full_tensor(self) -> torch.Tensor:
        """Return a copy of the full gradient."""
        return self.source.full(self)

    def store(self, full: torch.Tensor) -> None:
        """Store this rank's part of ``full``, which has the parameter's shape."""
        source, index = self.source, self.slot.index
        source.close(index, source.open(index).copy_(source.shard_of(self, full)))

    @classmethod
    def __torch_function__(
        cls, function: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        with as_plain_tensors():  # torch's own would make every result a ShardedGradient
            return function(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: OpOverload, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        # Inference tensors cannot be views of p.grad, and cannot be changed once inference mode has ended.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return cls.__torch_dispatch__(function, types, args, kwargs)
        result: object = NotImplemented
        for rule in (_RULES.get(function), _general_rule(function), _on_full_tensors):
            if rule is not None and result is NotImplemented:
                result = rule(function, *args, **kwargs or {})
        return result

    # ---------------------------------------------------------------- what torch does not dispatch as one operation

    def __repr__(self, **ignored: Any) -> str:  # type: ignore[override]
        # Debuggers and tracebacks print on one rank alone, so printing is no collective.
        shape, dtype = tuple(self.shape), str(self.dtype).removeprefix("torch.")
        return f"ShardedGradient('{self.slot.name}', shape={shape}, dtype={dtype}; values: zerolite.get_full_grad(p))"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __setitem__(self, index: Any, value: Any) -> None:
        full = self.full_tensor()
        full[index] = value.full_tensor() if isinstance(value, ShardedGradient) else value
        self.store(full)

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not (isinstance(value, ShardedGradient) and value.is_of(self)):
            self.copy_(value)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        array = self.full_tensor().numpy(*args, **kwargs)
        array.flags.writeable = False  # it is a copy, and values written to it would be lost
        return array


def _call_with(values: Callable[[ShardedGradient], torch.Tensor], name: str) -> Callable[..., Any]:
    """Return the method ``name`` of a tensor, which runs on ``values`` of the gradient."""

    def method(gradient: ShardedGradient, *args: Any, **kwargs: Any) -> Any:
        return getattr(values(gradient), name)(*args, **kwargs)

    return method


def _refuse_memory(gradient: ShardedGradient) -> torch.Tensor:
    raise RuntimeError(
        f"p.grad of parameter '{gradient.slot.name}' has no memory, because it stands for the mean gradient of all "
        "ranks; use zerolite.get_full_grad(p), a copy of it, on all ranks"
    )


for _method in ("tolist", "__deepcopy__", "__reduce_ex__"):
    setattr(ShardedGradient, _method, _call_with(ShardedGradient.full_tensor, _method))
for _method in ("data_ptr", "untyped_storage", "__dlpack__"):
    setattr(ShardedGradient, _method, _call_with(_refuse_memory, _method))
ShardedGradient.__array__ = _call_with(ShardedGradient.numpy, "__array__")  # type: ignore[method-assign]
foreach_types.append(ShardedGradient)


# -------------------------------------------------------------------- general rules


def _general_rule(function: OpOverload) -> Rule | None:
    if _name(function).startswith("_foreach_"):
        return _change_lists
    return _change if torch.Tag.pointwise in function.tags or function in _ELEMENTWISE else None


def _name(function: OpOverload) -> str:
    return function._schema.name.removeprefix("aten::")


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return not isinstance(value, ShardedGradient) and not value.dim()
    return not isinstance(value, (list, tuple))


def _numbers(args: Arguments, kwargs: Keywords) -> list[Any]:
    """Return the arguments that must be equal on all ranks. Of other tensors ranks may have parts."""
    return [value for value in (*args, *kwargs.values()) if _is_number(value)]


def _fits(value: object, gradient: ShardedGradient) -> bool:
    """Return True if this rank's part of ``value`` suffices for this rank's part of an elementwise result."""
    if isinstance(value, ShardedGradient):
        return value.is_of(gradient)
    if not isinstance(value, torch.Tensor):
        return True
    ends = zip(reversed(value.shape), reversed(gradient.shape), strict=False)
    return value.dim() <= gradient.dim() and all(length in (1, size) for length, size in ends)


def _part(gradient: ShardedGradient, value: Any, dtype: torch.dtype | None = None) -> Any:
    """Return this rank's part of an argument of an operation on ``gradient``.

    Args:
        dtype: of the part that is changed, which a loss scale keeps wider than ``p.grad``. Tensors of the dtype of
            ``p.grad`` get it, because some operations (``lerp_``) do not promote.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, ShardedGradient):
        part = value.source.read(value.slot.index)
    else:
        part = gradient.source.shard_of(gradient, value)
    return part.to(dtype) if dtype is not None and part.dtype == gradient.dtype else part


def _change(function: OpOverload, target: Any, *args: Any, **kwargs: Any) -> object:
    """Run an elementwise operation in place on this rank's part."""
    written, others = written_arguments(function, (target, *args), kwargs), find_tensors((args, kwargs))
    if not (isinstance(target, ShardedGradient) and written and all(tensor is target for tensor in written)):
        return NotImplemented
    if not all(_fits(tensor, target) for tensor in others) or any(value is target for value in kwargs.values()):
        return NotImplemented  # with ``out=p.grad`` the result would go into a copy of the part
    source, index = target.source, target.slot.index
    source.note_change(_name(function), _numbers(args, kwargs))
    values = source.open(index)
    part = functools.partial(_part, target, dtype=values.dtype)
    function(values, *map_tensors(part, args), **map_tensors(part, kwargs))
    source.close(index, values)
    return target


def _change_lists(function: OpOverload, targets: Sequence[Any], *args: Any, **kwargs: Any) -> object:
    """Run one of torch's ``_foreach`` functions in place on this rank's parts of several gradients, in one call."""
    if not (_are_of_one(targets) and written_arguments(function, (targets, *args), kwargs)):
        return NotImplemented
    lists = [argument for argument in args if isinstance(argument, (list, tuple))]
    if not all(all(map(_fits, argument, targets)) for argument in lists):
        return NotImplemented
    source = targets[0].source
    source.note_change(_name(function), _numbers(args, kwargs), len(targets))
    parts = [target.source.open(target.slot.index) for target in targets]
    dtypes = [part.dtype for part in parts]
    rest = [list(map(_part, targets, each, dtypes)) if isinstance(each, (list, tuple)) else each for each in args]
    function(parts, *rest, **kwargs)
    for target, part in zip(targets, parts, strict=True):
        source.close(target.slot.index, part)
    return None


def _on_full_tensors(function: OpOverload, *args: Any, **kwargs: Any) -> object:
    """Run any operation, on full gradients."""
    gradients = {id(g): g for g in find_tensors((args, kwargs), ShardedGradient)}
    full = {key: gradient.full_tensor() for key, gradient in gradients.items()}
    mapped = map_tensors(lambda tensor: full.get(id(tensor), tensor), [args, kwargs])
    result = function(*mapped[0], **mapped[1])
    if function.namespace == "c10d":  # a collective that the user has launched writes until it has ended
        wait_for_result(result)
    for gradient in written_arguments(function, args, kwargs):
        if isinstance(gradient, ShardedGradient):
            gradient.store(full[id(gradient)])
    for gradient in gradients.values() if function.is_view else ():
        gradient.source.note_view(gradient)
    shown = {id(full[key]): gradient for key, gradient in gradients.items()}
    return map_tensors(lambda tensor: shown.get(id(tensor), tensor), result)


# -------------------------------------------------------------------- single operations


def _are_of_one(gradients: Sequence[Any]) -> bool:
    """Return True if all are gradients of one engine."""
    windows = {id(g.window) if isinstance(g, ShardedGradient) else None for g in gradients}
    return len(windows) == 1 and None not in windows


def _by_engine(gradients: Iterable[ShardedGradient]) -> Iterable[tuple[Gradients, list[ShardedGradient]]]:
    groups: dict[Gradients, list[ShardedGradient]] = {}
    for gradient in gradients:
        groups.setdefault(gradient.source, []).append(gradient)
    return groups.items()


def _add(function: OpOverload, target: Any, value: Any, *args: Any, **kwargs: Any) -> object:
    """Keep apart what autograd adds to ``p.grad``, in a backward that the engine did not know of: a hook takes it."""
    if current_backward() == -1 or not isinstance(target, ShardedGradient):
        return NotImplemented
    total = value if target.added is None else target.added + value
    if function is aten.add.Tensor:
        target.added = None
        return total  # takes the place of ``target`` in ``p.grad``
    target.added = total
    return target


def _multiply(function: OpOverload, target: Any, factor: Any) -> object:
    targets: Sequence[Any] = [target] if isinstance(target, torch.Tensor) else target
    if not _are_of_one(targets) or not _is_number(factor):
        return NotImplemented
    targets[0].source.multiply([gradient.slot.index for gradient in targets], factor)
    return target if isinstance(target, torch.Tensor) else None


def _unscale(function: OpOverload, tensors: Sequence[Any], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """Run the kernel of GradScaler's ``unscale_``."""
    # First, because check_finite collects the statistics, which take over tensors that the user has put into p.grad.
    if others := [t for t in tensors if not isinstance(t, ShardedGradient)]:
        function(others, found_inf, inverse)
    for source, gradients in _by_engine(t for t in tensors if isinstance(t, ShardedGradient)):
        source.check_finite(gradients, found_inf)
        source.multiply([g.slot.index for g in gradients], inverse)


def _norm(function: OpOverload, gradient: Any, order: Any = 2, dim: Any = None, *args: Any, **kwargs: Any) -> object:
    dims = {d % max(1, gradient.dim()) for d in ([dim] if isinstance(dim, int) else dim or range(gradient.dim()))}
    if len(dims) < gradient.dim() or args[:1] == (True,) or kwargs.get("keepdim") or order == 0:
        return NotImplemented
    (norm,) = gradient.source.norms([gradient], 2 if order is None else order)
    return norm if kwargs.get("dtype") is None else norm.to(kwargs["dtype"])


def _norm_all(function: OpOverload, tensors: Sequence[Any], order: float = 2, dtype: Any = None) -> object:
    if order == 0:
        return NotImplemented
    norms: dict[int, torch.Tensor] = {}
    for source, gradients in _by_engine(t for t in tensors if isinstance(t, ShardedGradient)):
        norms.update(zip(map(id, gradients), source.norms(gradients, order), strict=True))
    others = [tensor for tensor in tensors if id(tensor) not in norms]
    if others:
        norms.update(zip(map(id, others), function(others, order, dtype), strict=True))
    return [norms[id(tensor)] for tensor in tensors]


def _alias(function: OpOverload, gradient: ShardedGradient, *ignored: object) -> object:
    return ShardedGradient.of(gradient.window, gradient.slot, gradient.shape, gradient.stride(), gradient)


# Elementwise operations that torch does not tag as pointwise.
_ELEMENTWISE = frozenset(
    [
        *(aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default, aten.copysign_.Tensor),
        *(aten.masked_fill_.Scalar, aten.masked_fill_.Tensor),
    ]
)
_RULES: dict[object, Rule] = {
    **dict.fromkeys([aten.detach.default, aten.alias.default], _alias),
    **dict.fromkeys([aten.add_.Tensor, aten.add.Tensor], _add),
    **dict.fromkeys([aten.mul_.Tensor, aten.mul_.Scalar], _multiply),
    **dict.fromkeys([aten._foreach_mul_.Scalar, aten._foreach_mul_.Tensor], _multiply),
    **dict.fromkeys([aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim], _norm),
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten._foreach_norm.Scalar: _norm_all,
}
