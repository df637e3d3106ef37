"""`ShardedGradient`: the tensor in ``p.grad`` between backward and step, the mean gradient of the joint batch.

It has the parameter's shape and no memory: it refers to this rank's part of the reduced gradient. At stage 0 that is
the full gradient. An operation runs

- on that part, without a collective, if it is elementwise;
- on that part, with one small collective, if it is a norm or another reduction to one number;
- on the full gradient otherwise. It is gathered first, and written back if the operation has changed it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch._ops import OpOverload
from torch.optim.optimizer import _foreach_supported_types as _torch_optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as _torch_clip_types

from zerolite.access.gathered_gradient import read_only
from zerolite.access.pending_gradients import PendingGradients
from zerolite.comm import wait_for_result
from zerolite.utils.nested import Arguments, Function, Keywords, find_tensors, map_tensors, written_arguments
from zerolite.zero.shown_gradients import GradientPlaceholder, GradientSpec

aten = torch.ops.aten

Tensors = Sequence[torch.Tensor]
Dims = int | Sequence[int] | None
Rule = Callable[..., object]
"""Replacement of one of torch's functions. It is called with that function and the function's arguments."""


class ShardedGradient(GradientPlaceholder):
    """Tensor without memory that stands for a gradient, or for the result of an elementwise operation on one.

    Attributes:
        part: None for the gradient itself. For a result, this rank's part of it, so that ``p.grad.isfinite().all()``
            gathers nothing.
        origin: for ``p.grad.detach()``, the tensor in ``p.grad``. This reference shows that the user still holds it.
        added: gradient that autograd has added, if a backward has found this tensor in ``p.grad``. That happens if
            the engine did not learn of the backward before.
    """

    origin: ShardedGradient | None = None

    @staticmethod
    def of(
        spec: GradientSpec, like: torch.Tensor, part: torch.Tensor | None = None, origin: ShardedGradient | None = None
    ) -> ShardedGradient:
        """Make a tensor of ``spec`` with the dtype and device of ``like``."""
        gradient: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            ShardedGradient, spec.shape, spec.strides, dtype=like.dtype, device=like.device
        )
        gradient.spec, gradient.part, gradient.added, gradient.origin = spec, part, None, origin
        return gradient

    @property
    def source(self) -> PendingGradients:
        """The engine's pending gradients. Raises RuntimeError for the gradient of an earlier step."""
        if self.part is None and self.spec.used:
            raise RuntimeError(
                f"the gradient of parameter '{self.spec.name}' cannot be used here: a step has used it, or it was "
                "dropped; take p.grad after the next backward, and clone what is to outlive the step"
            )
        source: PendingGradients | None = self.spec.source()
        if source is None:
            raise RuntimeError(f"the gradient of parameter '{self.spec.name}' has gone with its engine")
        return source

    def read(self) -> torch.Tensor:
        """Return this rank's part."""
        return self.source.read(self.spec.index) if self.part is None else self.part

    def open(self) -> torch.Tensor:
        """Return this rank's part, to be written to until :meth:`close`."""
        return self.source.open(self.spec.index) if self.part is None else self.part

    def close(self, part: torch.Tensor) -> None:
        """Store ``part``, as :meth:`open` returned it, after it has been written to."""
        if self.part is None:
            self.source.close(self.spec.index, part)

    def store(self, whole: torch.Tensor) -> None:
        """Store this rank's part of ``whole``, which has the parameter's shape."""
        values, own = self.spec.shard_of(whole), self.open()
        if own.device != values.device or own.data_ptr() != values.data_ptr():
            own.copy_(values)
        self.close(own)

    def full_tensor(self) -> torch.Tensor:
        """Return the full gradient: at stage 0 its own memory, otherwise a gathered copy."""
        return _full_tensors([self])[0][0]

    def __repr__(self, **ignored: Any) -> str:  # type: ignore[override]
        # Debuggers and tracebacks print on one rank alone, so printing is no collective.
        shape, dtype = tuple(self.shape), str(self.dtype).removeprefix("torch.")
        return f"ShardedGradient('{self.spec.name}', shape={shape}, dtype={dtype}; values: zerolite.get_full_grad(p))"

    def __format__(self, spec: str) -> str:
        return repr(self)

    @classmethod
    def __torch_function__(
        cls, function: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        if function in _OUTSIDE_DISPATCH and isinstance(args[0], cls):
            return _OUTSIDE_DISPATCH[function](function, *args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: OpOverload, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        # Inference tensors cannot be views of p.grad, and cannot be changed once inference mode has ended.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return cls.__torch_dispatch__(function, types, args, kwargs)
        if function in _ACCUMULATION and torch._C._current_graph_task_id() != -1:
            return _accumulate(function, *args)
        rule = _RULES.get(function)
        result = NotImplemented if rule is None else rule(function, *args, **kwargs)
        if result is NotImplemented and _is_foreach(function):
            result = _on_lists(function, args, kwargs)
        elif result is NotImplemented and (torch.Tag.pointwise in function.tags or function in _ELEMENTWISE):
            result = _on_shards(function, args, kwargs)
        return _on_full_tensors(function, args, kwargs) if result is NotImplemented else result


# -------------------------------------------------------------------- on shards


def _on_shards(function: OpOverload, args: Arguments, kwargs: Keywords) -> object:
    """Run an elementwise operation on this rank's part. Return NotImplemented if it needs other elements."""
    gradients = find_tensors((args, kwargs), ShardedGradient)
    spec, written = gradients[0].spec, written_arguments(function, args, kwargs)
    others = find_tensors((args, kwargs))
    if any(g.spec is not spec for g in gradients) or not all(spec.fits(other) for other in others):
        return NotImplemented
    if not written:
        result = function(*map_tensors(_shard_of(spec), args), **map_tensors(_shard_of(spec), kwargs))
        if not isinstance(result, torch.Tensor):
            return NotImplemented
        made = ShardedGradient.of(spec, result, result)
        earlier = (operation for gradient in gradients for operation in gradient.operations)
        made.operations = (*earlier, (_name(function), _numbers(args, kwargs)))
        return made
    target = written[0]
    if len(written) > 1 or target is not args[0] or not isinstance(target, ShardedGradient):
        return NotImplemented
    if target.part is None:
        target.source.note_change(_name(function), _numbers(args[1:], kwargs))
    part = target.open()
    function(part, *map_tensors(_shard_of(spec), args[1:]), **map_tensors(_shard_of(spec), kwargs))
    target.close(part)
    return target


def _on_lists(function: OpOverload, args: Arguments, kwargs: Keywords) -> object:
    """Run one of torch's ``_foreach`` functions on this rank's shards of several gradients, in one call."""
    targets = args[0]
    if not all(isinstance(target, ShardedGradient) for target in targets):
        return NotImplemented
    specs = [target.spec for target in targets]
    rest = []
    for argument in args[1:]:
        if isinstance(argument, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in argument):
            if not all(_belongs(item, spec) for item, spec in zip(argument, specs, strict=True)):
                return NotImplemented
            argument = [_shard_of(spec)(item) for item, spec in zip(argument, specs, strict=True)]
        rest.append(argument)
    if not written_arguments(function, args, kwargs):
        results = function([target.read() for target in targets], *rest, **kwargs)
        return [ShardedGradient.of(spec, r, r) for spec, r in zip(specs, results, strict=True)]
    if _are_pending(targets):
        targets[0].source.note_change(_name(function), _numbers(args[1:], kwargs), len(targets))
    shards = [target.open() for target in targets]
    function(shards, *rest, **kwargs)
    for target, part in zip(targets, shards, strict=True):
        target.close(part)
    return None


def _name(function: OpOverload) -> str:
    return function._schema.name.removeprefix("aten::")


def _numbers(args: Arguments, kwargs: Keywords) -> list[Any]:
    """Return the arguments that must be equal on all ranks: numbers and 0-dim tensors. Of others ranks may have
    parts."""
    return [
        value
        for value in (*args, *kwargs.values())
        if not isinstance(value, (torch.Tensor, list, tuple))
        or (isinstance(value, torch.Tensor) and not isinstance(value, ShardedGradient) and not value.dim())
    ]


def _belongs(item: object, spec: GradientSpec) -> bool:
    if isinstance(item, ShardedGradient):
        return item.spec is spec
    return isinstance(item, torch.Tensor) and spec.fits(item)


def _shard_of(spec: GradientSpec) -> Callable[[object], object]:
    def shard(item: object) -> object:
        if isinstance(item, ShardedGradient):
            return item.read()
        return spec.shard_of(item) if isinstance(item, torch.Tensor) else item

    return shard


# -------------------------------------------------------------------- on full tensors


def _on_full_tensors(function: OpOverload, args: Arguments, kwargs: Keywords) -> object:
    """Run any operation, on full gradients."""
    gradients = list({id(g): g for g in find_tensors((args, kwargs), ShardedGradient)}.values())
    values, copies = _full_tensors(gradients)
    full = dict(zip(map(id, gradients), values, strict=True))
    result = function(*map_tensors(_replaced(full), args), **map_tensors(_replaced(full), kwargs))
    if function.namespace == "c10d":  # a collective that the user has launched writes until it has ended
        wait_for_result(result)
    for gradient in written_arguments(function, args, kwargs):
        if isinstance(gradient, ShardedGradient):
            gradient.store(full[id(gradient)])
    back = {id(whole): g for whole, g in zip(full.values(), gradients, strict=True)}
    memory = {copy.untyped_storage()._cdata for copy in copies}

    def shown(item: object) -> object:
        if id(item) in back:
            return back[id(item)]
        if isinstance(item, torch.Tensor) and item.untyped_storage()._cdata in memory:
            return read_only(item)
        return item

    return map_tensors(shown, result)


def _full_tensors(gradients: Sequence[ShardedGradient]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the full gradients, and a list of those among them that are gathered copies."""
    found: dict[int, torch.Tensor] = {}
    copies: list[torch.Tensor] = []
    for source, ours in _group_by_engine(gradients):
        rest = []
        for gradient in ours:
            kept = source.full_grad_memory(gradient.spec.index, gradient) if gradient.part is None else None
            whole = gradient.part if kept is None and not gradient.spec.sharded else kept
            if whole is None:
                rest.append(gradient)
            else:
                found[id(gradient)] = whole
        if rest:
            made = source.gather_full([g.spec for g in rest], [g.read() for g in rest])
            found.update(zip(map(id, rest), made, strict=True))
            copies += made
    return [found[id(gradient)] for gradient in gradients], copies


def _replaced(full: dict[int, torch.Tensor]) -> Callable[[object], object]:
    return lambda item: full.get(id(item), item)


# -------------------------------------------------------------------- single operations


def _accumulate(function: OpOverload, held: object, gradient: torch.Tensor, **ignored: object) -> object:
    """Run autograd's addition of a fresh gradient to the tensor in ``p.grad``."""
    if not isinstance(held, ShardedGradient) or held.part is not None:
        return NotImplemented
    added = held.pop_added()
    total = gradient if added is None else added + gradient
    if function is aten.add.Tensor:
        return total  # takes the place of ``held`` in ``p.grad``
    held.set_added(total)
    return held


def _alias(function: OpOverload, gradient: ShardedGradient, *ignored: object) -> ShardedGradient:
    origin = gradient if gradient.origin is None else gradient.origin
    return ShardedGradient.of(gradient.spec, gradient, gradient.part, origin)


def _like(function: OpOverload, gradient: ShardedGradient, *args: Any, **kwargs: Any) -> object:
    """Make a tensor in the shape of the gradient, such as ``zeros_like``. This needs no values."""
    template = torch.empty_strided(gradient.shape, gradient.stride(), dtype=gradient.dtype, device="meta")
    return function(template, *args, **{**kwargs, "device": kwargs.get("device") or gradient.device})


def _convert(function: OpOverload, gradient: ShardedGradient, **kwargs: Any) -> object:
    if kwargs.get("device") not in (None, gradient.device) or kwargs.get("memory_format") == torch.channels_last:
        return NotImplemented
    part = function(gradient.read(), **{**kwargs, "memory_format": None})
    return ShardedGradient.of(gradient.spec, part, part)


def _is_number(value: object) -> bool:
    return not isinstance(value, ShardedGradient) and (not isinstance(value, torch.Tensor) or not value.dim())


def _multiply(function: OpOverload, gradient: object, factor: Any) -> object:
    if not isinstance(gradient, ShardedGradient) or gradient.part is not None or not _is_number(factor):
        return NotImplemented
    gradient.source.multiply([gradient.spec.index], factor)
    return gradient


def _divide(function: OpOverload, gradient: object, divisor: Any) -> object:
    if isinstance(divisor, torch.Tensor) or not divisor or abs(math.frexp(divisor)[0]) != 0.5:
        return NotImplemented  # only for powers of two is the product with the inverse equal in every bit
    return _multiply(function, gradient, 1.0 / divisor)


def _multiply_all(function: OpOverload, gradients: Tensors, factor: Any) -> object:
    if not _are_pending(gradients) or isinstance(factor, (list, tuple)) or not _is_number(factor):
        return NotImplemented
    gradients[0].source.multiply([g.spec.index for g in gradients], factor)
    return None


def _are_pending(gradients: Tensors) -> TypeGuard[Sequence[ShardedGradient]]:
    """Return True if all are pending gradients of one engine, and not results of operations."""
    ours = [g for g in gradients if isinstance(g, ShardedGradient) and g.part is None]
    return len(ours) == len(gradients) and len({id(g.source) for g in ours}) == 1


def _group_by_engine(gradients: Sequence[ShardedGradient]) -> list[tuple[PendingGradients, list[ShardedGradient]]]:
    """Group gradients by their engine."""
    found: dict[PendingGradients, list[ShardedGradient]] = {}
    for gradient in gradients:
        found.setdefault(gradient.source, []).append(gradient)
    return list(found.items())


def _unscale(function: OpOverload, gradients: Tensors, found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Run the kernel of GradScaler's ``unscale_``."""
    ours = [g for g in gradients if isinstance(g, ShardedGradient)]
    made = [g for g in ours if g.part is not None]  # p.grad = p.grad * mask
    others = [g.part if isinstance(g, ShardedGradient) else g for g in gradients]
    others = [tensor for tensor in others if tensor is not None]
    # First, because check_finite collects the statistics, which take over tensors that the user has put into p.grad.
    if others:
        function(others, found_inf, inverse_scale)
    # Ranks have different shards of these results, so they must agree.
    for source in dict.fromkeys(g.source for g in made):
        found_inf.copy_(source.combine(found_inf.reshape(1), largest=True).reshape(found_inf.shape))
    for source, pending in _group_by_engine([g for g in ours if g.part is None]):
        indices = [g.spec.index for g in pending]
        source.check_finite(indices, found_inf)
        source.multiply(indices, inverse_scale)


def _norm(
    function: OpOverload,
    gradient: ShardedGradient,
    order: float | None = 2,
    dim: Dims = None,
    *args: object,
    **kwargs: Any,
) -> object:
    if not _reduces_all_dims(gradient, dim) or args[:1] == (True,) or kwargs.get("keepdim"):
        return NotImplemented
    norm = _norms([gradient], 2 if order is None else order)[0]
    return norm if kwargs.get("dtype") is None else norm.to(kwargs["dtype"])


def _norm_all(function: OpOverload, tensors: Tensors, order: float = 2, dtype: torch.dtype | None = None) -> object:
    ours = [t for t in tensors if isinstance(t, ShardedGradient)]
    others = [t for t in tensors if not isinstance(t, ShardedGradient)]
    found = dict(zip(map(id, ours), _norms(ours, order), strict=True))
    if others:
        found.update(zip(map(id, others), function(others, order, dtype), strict=True))
    return [found[id(tensor)] for tensor in tensors]


def _norms(gradients: list[ShardedGradient], order: float) -> list[torch.Tensor]:
    """Return norms over all ranks, 0-dim float64, with at most one collective for each engine.

    They are float64 so that ``clip_grad_norm_`` gives the bits of the config's ``gradient_clipping``. A total of norms
    that were rounded to fp32 would give another factor.
    """
    found: dict[int, torch.Tensor] = {}
    for source, ours in _group_by_engine(gradients):
        found.update(zip(map(id, ours), _norms_of_one(source, ours, order), strict=True))
    return [found[id(gradient)] for gradient in gradients]


def _norms_of_one(source: PendingGradients, gradients: list[ShardedGradient], order: float) -> list[torch.Tensor]:
    if order == 2 and all(g.part is None for g in gradients):
        return source.norms([g.spec.index for g in gradients])
    return source.norms_of_shards([g.read() for g in gradients], order)


def _reduces_all_dims(gradient: ShardedGradient, dim: Dims) -> bool:
    if dim is None or dim == []:
        return True
    dims = [dim] if isinstance(dim, int) else dim
    return len({d % max(1, gradient.dim()) for d in dims}) == max(1, gradient.dim())


def _reduction(neutral: float, largest: bool, sign: float = 1.0) -> Rule:
    """Make the rule for an operation that reduces all elements to one number.

    Args:
        neutral: the result for no elements.
        largest: combine ranks by the maximum, otherwise by the sum.
        sign: -1.0 turns the maximum into a minimum.
    """

    def rule(function: OpOverload, gradient: ShardedGradient, **kwargs: Any) -> object:
        part = gradient.read()
        own = function(part, **kwargs) if part.numel() else None
        dtype = function(part.new_ones(1), **kwargs).dtype if own is None else own.dtype
        value = torch.full((), neutral, device=part.device) if own is None else own
        over_ranks = gradient.source.combine((value.double() * sign).reshape(1), largest)
        return (over_ranks * sign).reshape(()).to(dtype)

    return rule


def _set_item(function: Function, gradient: ShardedGradient, index: Any, value: Any) -> None:
    whole = gradient.full_tensor()
    whole[index] = value.full_tensor() if isinstance(value, ShardedGradient) else value
    gradient.store(whole)


def _set_data(function: Function, gradient: ShardedGradient, value: torch.Tensor) -> None:
    if not (isinstance(value, ShardedGradient) and value.spec is gradient.spec and value.part is gradient.part):
        gradient.copy_(value)


def _from_full_tensor(function: Function, gradient: ShardedGradient, *args: Any, **kwargs: Any) -> object:
    return function(gradient.full_tensor(), *args, **kwargs)


def _memory(gradient: ShardedGradient) -> torch.Tensor | None:
    """Return the memory of a full gradient as ``p.grad`` shows it, for use outside of torch; None if there is none."""
    if gradient.spec.sharded:
        return None
    if gradient.part is not None:
        return gradient.part
    kept = gradient.source.full_grad_memory(gradient.spec.index, gradient)
    if kept is not None:
        gradient.source.lend(gradient.spec.index)
    return kept


def _from_memory(function: Function, gradient: ShardedGradient, *args: Any, **kwargs: Any) -> object:
    memory = _memory(gradient)
    if memory is None:
        raise RuntimeError(
            f"p.grad of parameter '{gradient.spec.name}' has no memory: each rank owns a part of it, or it is kept in "
            "another dtype or times a loss scale; use zerolite.get_full_grad(p), a copy of all of it, on all ranks"
        )
    return function(memory, *args, **kwargs)


def _to_numpy(function: Function, gradient: ShardedGradient, *args: Any, **kwargs: Any) -> object:
    memory = _memory(gradient)
    if memory is not None:
        return function(memory, *args, **kwargs)
    array = function(gradient.full_tensor(), *args, **kwargs)
    array.flags.writeable = False  # it is a copy, and values written to it would be lost
    return array


def _is_foreach(function: OpOverload) -> bool:
    name = function._schema.name
    return name.startswith("aten::_foreach_") and not name.endswith(("_norm", "_max", "_powsum"))


_ACCUMULATION = (aten.add_.Tensor, aten.add.Tensor)
# Elementwise operations that torch does not tag as pointwise.
_ELEMENTWISE = frozenset(
    [
        *(aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default, aten.copysign_.Tensor),
        *(aten.masked_fill_.Scalar, aten.masked_fill_.Tensor, aten.masked_fill.Scalar, aten.masked_fill.Tensor),
    ]
)
_LIKE = "empty zeros ones full rand randn randint"
_NEW = "empty zeros ones full"
_RULES: dict[object, Rule] = {
    **{getattr(aten, f"{name}_like").default: _like for name in _LIKE.split()},
    **{getattr(aten, f"new_{name}").default: _like for name in _NEW.split()},
    aten.randint_like.low_dtype: _like,
    aten.new_empty_strided.default: _like,
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten._to_copy.default: _convert,
    aten.mul_.Tensor: _multiply,
    aten.mul_.Scalar: _multiply,
    aten.div_.Tensor: _divide,
    aten.div_.Scalar: _divide,
    aten._foreach_mul_.Scalar: _multiply_all,
    aten._foreach_mul_.Tensor: _multiply_all,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten._foreach_norm.Scalar: _norm_all,
    aten.sum.default: _reduction(0.0, largest=False),
    aten.max.default: _reduction(-math.inf, largest=True),
    aten.min.default: _reduction(math.inf, largest=True, sign=-1.0),
    aten.any.default: _reduction(0.0, largest=True),
    aten.all.default: _reduction(1.0, largest=True, sign=-1.0),
}
_Tensor = torch.Tensor
# Methods of torch.Tensor that torch does not dispatch as one operation.
_OUTSIDE_DISPATCH: dict[object, Rule] = {
    _Tensor.__repr__: lambda function, gradient, **ignored: ShardedGradient.__repr__(gradient),
    _Tensor.__setitem__: _set_item,
    getattr(_Tensor, "data").__set__: _set_data,  # noqa: B009
    **dict.fromkeys((_Tensor.tolist, _Tensor.__deepcopy__, _Tensor.__reduce_ex__), _from_full_tensor),
    **dict.fromkeys((_Tensor.numpy, _Tensor.__array__), _to_numpy),
    **dict.fromkeys((_Tensor.data_ptr, _Tensor.untyped_storage, _Tensor.storage, _Tensor.__dlpack__), _from_memory),
}

# torch calls its _foreach functions only for the types in these lists. With them clip_grad_norm_ and torch's optimizers
# make one call for all gradients instead of one for each. DTensor adds itself in the same way.
_torch_clip_types.append(ShardedGradient)
_torch_optimizer_types.append(ShardedGradient)
