"""One walker over nested containers: the tensors in a value, or the value with its tensors replaced.

Containers are lists, tuples, named tuples, mappings (UserDict and transformers' ModelOutput too) and dataclasses, of
any depth. Objects of other classes are leaves: a model changes its key-value cache in place, so no copy may take its
place. torch's pytree knows neither unregistered mappings nor dataclasses. On the arguments of an operation it takes two
to eight times as long, and it copies containers that it has not changed.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import gc
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch._ops import OpOverload

Found = TypeVar("Found")
Function = Callable[..., Any]
"""A function or method of torch, as ``__torch_function__`` is given it."""
Arguments = Sequence[Any]
"""Its positional arguments; some are tensors."""
Keywords = dict[str, Any]
"""Its arguments by keyword."""

_CONTAINERS_PER_OBJECT = 16
# Modules of the classes in C that have no attributes, and only refer to what is in them.
_OPAQUE_MODULES = frozenset(["builtins", "collections", "functools", "itertools"])
_WITHOUT_TENSORS = (type, types.ModuleType, types.CodeType, types.BuiltinFunctionType)

# Most values that are no tensor: asked for before abstract classes are, which takes longer.
_LEAVES = (int, float, str, type(None), torch.dtype, torch.device, bytes, torch.nn.Module, torch.Tensor)


def map_tensors(function: Callable[[Any], object], value: object) -> Any:
    """Return ``value`` with ``function(tensor)`` in place of every tensor, in containers of the same types.

    A container in which nothing is replaced is returned as it is, the same object; nothing is changed in place.

    Raises:
        TypeError: for a mapping that cannot be made anew.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        mapped = [map_tensors(function, element) for element in value]
        for index, new in enumerate(mapped):  # torch 2.6 cannot compile a strict zip
            if new is not value[index]:
                return _rebuilt_sequence(value, mapped)
        return value
    if isinstance(value, _LEAVES):
        return value
    items = _items(value)
    replaced = {key: map_tensors(function, element) for key, element in items.items()}
    changed = {key: new for key, new in replaced.items() if new is not items[key]}
    if not changed:
        return value
    return _rebuilt_mapping(value, replaced) if items is value else _rebuilt_dataclass(value, changed)


@overload
def find_tensors(value: object) -> list[torch.Tensor]: ...


@overload
def find_tensors(value: object, cls: type[Found] | tuple[type[Found], ...]) -> list[Found]: ...


def find_tensors(value: object, cls: type | tuple[type, ...] = torch.Tensor) -> Sequence[object]:
    """Return the tensors in ``value`` of class ``cls`` (or of one in a tuple of classes), in the order in which
    :func:`map_tensors` meets them."""
    tensors: list[object] = []
    _find(value, cls, tensors, -1, {})
    return tensors


def find_in_objects(value: object, depth: int = 4) -> list[torch.Tensor]:
    """Return the tensors in ``value``, including those that plain objects, sets, iterators, closures and bound methods
    refer to, through ``depth`` objects.

    A tensor to which several objects refer may be in the list several times.
    """
    tensors: list[torch.Tensor] = []
    _find(value, torch.Tensor, tensors, depth * _CONTAINERS_PER_OBJECT, {})
    return tensors


def _find(
    value: object, cls: type | tuple[type, ...], tensors: list[Any], levels: int, visited: dict[int, int]
) -> None:
    """Append tensors of class ``cls`` to ``tensors``.

    Args:
        levels: containers to descend, objects included, which count for several; below 0: all, without objects.
        visited: ``levels`` at which each object was entered, by its id. Objects that refer to each other in a circle
            would otherwise be entered again on every path between them.
    """
    if isinstance(value, cls):
        tensors.append(value)
        return
    inside: Iterable[object]
    left = levels - 1
    if isinstance(value, (list, tuple)):
        inside = value
    elif isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, _LEAVES):
        return
    elif levels < 0:
        inside = _items(value).values()
    else:
        if visited.get(id(value), -1) >= levels:
            return
        visited[id(value)] = levels
        inside, left = _attributes(value), max(0, levels - _CONTAINERS_PER_OBJECT)
    for element in inside if levels else ():
        _find(element, cls, tensors, left, visited)


def named_leaves(value: object) -> list[tuple[str, Any]]:
    """Return everything in ``value`` that is not a container with members, in the order of :func:`map_tensors`, with
    its place.

    A place is "0.1" or "1.name" for the second positional argument and a keyword, if ``value`` is (args, kwargs).
    """
    items = enumerate(value) if isinstance(value, (list, tuple)) else _items(value).items()
    leaves = [(f"{key}.{place}" if place else str(key), leaf) for key, i in items for place, leaf in named_leaves(i)]
    return leaves or [("", value)]


def written_arguments(function: OpOverload, args: Arguments, kwargs: Keywords) -> list[torch.Tensor]:
    """Return the arguments that an operation writes to."""
    arguments = function._schema.arguments
    values = [*args, *(kwargs[a.name] for a in arguments[len(args) :] if a.name in kwargs)]
    marked = list(arguments[: len(args)]) + [a for a in arguments[len(args) :] if a.name in kwargs]
    written = [v for v, a in zip(values, marked, strict=True) if a.alias_info is not None and a.alias_info.is_write]
    if not written and function.namespace == "c10d":  # whose schemas do not say
        written = values[:1]
    return find_tensors(written)


def _items(value: object) -> Mapping[Any, object]:
    """Return the members of a mapping (itself) or of a dataclass; an empty mapping for anything else."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, *_LEAVES)):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return {}


def _attributes(value: Any) -> Iterable[object]:
    """Return what an object refers to, as far as tensors may be behind it. Nothing is iterated or called."""
    if isinstance(value, (Mapping, set, frozenset)):
        return value.values() if isinstance(value, Mapping) else value
    if isinstance(value, _WITHOUT_TENSORS):  # their attributes would lead through whole libraries
        return ()
    cls = type(value)
    if cls is types.FunctionType:
        return (value.__closure__, value.__defaults__, value.__kwdefaults__)
    if cls.__module__ in _OPAQUE_MODULES:
        return gc.get_referents(value)  # iterators, generators, cells, deques, partial functions, bound methods
    inside = vars(value).values() if hasattr(value, "__dict__") else ()
    slots = _slots(cls)  # type: ignore[arg-type]
    return [*inside, *(getattr(value, slot, None) for slot in slots)] if slots else inside


@functools.lru_cache(maxsize=1024)
def _slots(cls: Any) -> tuple[str, ...]:
    """Return the names of ``__slots__`` of a class and its bases."""
    names: list[str] = []
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        names += (slots,) if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _rebuilt_mapping(value: Mapping[object, object], items: dict[object, object]) -> object:
    if type(value) is dict:
        return items
    if isinstance(value, (dict, collections.UserDict)):  # their copies have entries of their own
        result = copy.copy(value)
        for key, element in items.items():
            result[key] = element
        return result
    try:
        made: Any = type(value)(items)  # type: ignore[call-arg]
        same = set(made) == set(items) and all(made[key] is element for key, element in items.items())
    except Exception as error:
        raise TypeError(_CANNOT_REBUILD.format(type(value).__name__)) from error
    if not same:
        raise TypeError(_CANNOT_REBUILD.format(type(value).__name__))
    return made


_CANNOT_REBUILD = (
    "expected mappings of tensors that can be made anew, as type(mapping)(items), to change the dtype of what is in "
    "them, got a {0} that cannot; pass a dict, or change the dtypes yourself"
)


def _rebuilt_sequence(value: Any, mapped: list[object]) -> object:
    if type(value) is list:
        return mapped
    if isinstance(value, list):
        result = copy.copy(value)
        result[:] = mapped
        return result
    if type(value) is tuple or hasattr(value, "_make"):
        return tuple(mapped) if type(value) is tuple else value._make(mapped)
    # A subclass may have a constructor of its own; only those in C (torch.return_types) need it.
    new = type(value).__new__ if hasattr(value, "n_sequence_fields") else tuple.__new__
    made: Any = new(type(value), mapped)
    if hasattr(value, "__dict__"):
        vars(made).update(vars(value))
    return made


def _rebuilt_dataclass(value: object, changed: Mapping[str, object]) -> object:
    result = copy.copy(value)
    for name, element in changed.items():
        object.__setattr__(result, name, element)
    return result
