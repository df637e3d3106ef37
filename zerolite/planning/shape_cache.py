"""Cache of the shapes that operators return for tensors without memory.

A dry run calls the same operators with the same shapes in every block, every micro-batch and every setting that is
compared. Without a cache torch's shape functions would take most of its time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from zerolite.utils.nested import find_tensors
from zerolite.utils.torch_private import FakeTensor, as_meta_tensors, call_meta_kernel

if TYPE_CHECKING:
    from zerolite.planning.fake_backend import DryFakeMode

_CPU, _META = torch.device("cpu"), torch.device("meta")
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.memory_format})
_UNKNOWN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_LIMIT = 100_000  # entries; comparing settings of a large model takes a thousand


class _Returns(NamedTuple):
    """Result of an operator: the argument with this position and name, or new tensors if the name is empty."""

    position: int = 0
    name: str = ""


class _Tensor(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


_MISSING = object()
_cache: dict[tuple[Any, ...], Any] = {}
"""Results by operator and arguments: a _Tensor, a list for several results, or None if there is no new tensor."""


def _operators(names: str) -> set[Any]:
    """Return operators of aten by names such as "mul.Tensor"; ".default" may be left out."""
    found = (name.partition(".") for name in names.split())
    return {getattr(getattr(torch.ops.aten, packet), overload or "default") for packet, _, overload in found}


VIEWS = _operators(
    "view view.dtype _unsafe_view as_strided detach alias permute expand unsqueeze t transpose.int select.int"
    " slice.Tensor"
)
UNREAD = _operators("new_empty empty_like new_empty_strided")
"""Operators that read no values of their operands."""

_LIFT = torch.ops.aten.lift_fresh.default  # the last operator of torch.tensor
NUMBERS = _operators("linspace arange arange.start arange.start_step")
"""Operators whose results may have values, as the result of :data:`_LIFT` has. They are not cached."""


def cached_call(mode: DryFakeMode, func: Any, args: Any, kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
    """Return the result of an operator from the cache, otherwise from ``run()``."""
    if func is _LIFT and type(args[0]) is torch.Tensor and args[0].device == _CPU and not args[0].numel():
        return _make(mode, _Tensor(args[0].shape, args[0].stride(), args[0].dtype))  # an empty tensor has no values
    if func in VIEWS and args and type(args[0]) is FakeTensor and _is_plain(args[0], mode):
        return _view(mode, func, args, kwargs)
    returns = _returns(func)
    # The default dtype is part of the key: it decides the result's dtype for Python numbers.
    key: list[Any] = [func, torch.get_default_dtype(), *kwargs]
    if returns is None or not (_describe(mode, args, key) and _describe(mode, kwargs.values(), key)):
        return run()
    cached = _cache.get(tuple(key), _MISSING)
    if cached is _MISSING:
        return _call_and_cache(mode, returns, args, kwargs, run, tuple(key))
    if returns.name:
        return args[returns.position] if returns.position < len(args) else kwargs[returns.name]
    if isinstance(cached, list):
        return tuple(None if spec is None else _make(mode, spec) for spec in cached)
    return None if cached is None else _make(mode, cached)


def _view(mode: DryFakeMode, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call the meta kernel of a view, whose result shares the storage."""
    before = mode.in_kernel_invocation
    mode.in_kernel_invocation = True
    try:
        out = call_meta_kernel(func, args, kwargs)
    finally:
        mode.in_kernel_invocation = before
    return out if type(out) is FakeTensor else mode.wrapped(out)


@functools.cache
def _returns(func: Any) -> _Returns | None:
    """Read from the schema of ``func`` which tensors it returns; None if its results must not be cached."""
    schema = func._schema
    if (
        func in NUMBERS
        or func is _LIFT
        or _UNKNOWN.intersection(func.tags)
        or any(str(entry.type) != "Tensor" for entry in schema.returns)
    ):
        return None
    aliases = [entry.alias_info for entry in schema.returns if entry.alias_info is not None]
    if not aliases:
        return _Returns()
    for position, argument in enumerate(schema.arguments if len(schema.returns) == 1 else ()):
        alias = argument.alias_info
        if alias is not None and alias.is_write and alias.before_set == aliases[0].before_set:
            return _Returns(position, argument.name)
    return None


def _describe(mode: DryFakeMode, values: Iterable[Any], key: list[Any]) -> bool:
    """Append to ``key`` all properties of ``values`` on which shapes of results depend.

    Return False if a value has a type for which they are not known.
    """
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if not _is_plain(value, mode):
                return False
            key += (value.shape, value.stride(), value.dtype)
        elif kind in _PLAIN:
            key += (kind, value)
        elif kind is list or kind is tuple:
            key.append(len(value))
            if not _describe(mode, value, key):
                return False
        elif value is torch.strided or (kind is torch.device and value == _CPU):
            key.append(kind)
        else:
            return False
    return True


def _is_plain(tensor: Any, mode: DryFakeMode) -> bool:
    """Return True if a FakeTensor is strided, on the CPU, without readable values, and not complex."""
    has_values = tensor.constant is not None and tensor.numel()
    plain = tensor.fake_mode is mode and not has_values and tensor.fake_device == _CPU
    return plain and tensor.layout is torch.strided and not tensor.dtype.is_complex


def _call_and_cache(
    mode: DryFakeMode, returns: _Returns, args: Any, kwargs: dict[str, Any], run: Callable[[], Any], key: Any
) -> Any:
    """Return ``run()``, and cache the result if it agrees with the operator's schema."""
    given = find_tensors((args, kwargs))
    before = [(tensor.shape, tensor.stride()) for tensor in given]  # to notice resize_, which changes its operand
    out = run()
    made = () if returns.name else out if isinstance(out, tuple) else (out,)
    taken = {id(tensor.untyped_storage()) for tensor in given}
    if len(_cache) < _LIMIT and before == [(tensor.shape, tensor.stride()) for tensor in given]:
        if all(entry is None or _owns_storage(entry, mode, taken) for entry in made):
            specs = [None if entry is None else _Tensor(entry.shape, entry.stride(), entry.dtype) for entry in made]
            _cache[key] = specs if isinstance(out, tuple) else specs[0] if specs else None
    return out


def _owns_storage(tensor: Any, mode: DryFakeMode, taken: set[int]) -> bool:
    """Return True if ``tensor`` has its own storage of exactly its size.

    Args:
        tensor: a result.
        mode: the active mode.
        taken: storages of other tensors; the storage of ``tensor`` is added.
    """
    if type(tensor) is not FakeTensor or not _is_plain(tensor, mode):
        return False
    storage, ends = tensor.untyped_storage(), zip(tensor.shape, tensor.stride(), strict=True)
    numel = 1 + sum((size - 1) * stride for size, stride in ends) if tensor.numel() else 0
    own = id(storage) not in taken and tensor.storage_offset() == 0
    taken.add(id(storage))
    return own and storage.nbytes() == numel * tensor.element_size()


def _make(mode: DryFakeMode, spec: _Tensor) -> FakeTensor:
    with as_meta_tensors():
        made = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=_META)
    return mode.wrapped(made)
