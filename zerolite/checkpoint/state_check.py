"""Validation of the contents of state.json, before the engine is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Kind = Any
"""What a value has to be: a type, or several; [kind] for a list of such; {"key": kind} for an object that has these
keys; :class:`Each` for one that has any."""


class Each:
    """An object whose values are all of one kind."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind


class Maybe:
    """Of this kind, or None."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind


_NUMBER = (int, float)
_GROUP = {"names": [str], "values": dict}
_STATE = {
    "parameters": Each({"shape": [int], "dtype": str, "trained": bool, "aliases": [str]}),
    "buffers": Each({"shape": [int], "dtype": str}),
    "extra": dict,
    "optimizer": {"type": str, "groups": [_GROUP], "scalars": Each(Each((*_NUMBER, bool, torch.Tensor, type(None))))},
    "lr_scheduler": Maybe({"type": Maybe(str), "state": dict}),
    "loss_scaler": Maybe(Each(_NUMBER)),
    "counters": {
        "micro_steps": int,
        "global_steps": int,
        "skipped_steps": int,
        "skipped_in_a_row": int,
        "last_norm": Maybe(_NUMBER),
        "weight_unit": _NUMBER,
    },
    "loaders": Maybe([dict]),
    "client_state": dict,
}

_STEPS = ("micro_steps", "global_steps", "skipped_steps", "skipped_in_a_row")
_MOST_STEPS = 2**53
"""Every number up to here is exact as JSON, as a float and as 64 bits, in which ranks exchange it."""


def check_state(state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError, which says where, if something is missing or of another type. shapes: of what is stored, by
    key."""
    _check(state, _STATE, "")
    for name, count in state["counters"].items():
        if isinstance(count, int) and name in _STEPS and not 0 <= count <= _MOST_STEPS:
            found = count if abs(count) < 2**63 else "one that 64 bits cannot hold"
            raise ValueError(f"counters.{name}: expected a number from 0 to {_MOST_STEPS}, found {found}")
    for kind in ("parameters", "buffers"):
        for name, entry in state[kind].items():
            stored = shapes.get(f"{kind}/{name}")
            if stored is not None and list(stored) != entry["shape"]:
                raise ValueError(f"{kind}/{name}: expected the shape {entry['shape']}, found {list(stored)} stored")
    for kind, values in state["optimizer"]["scalars"].items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim():
                raise ValueError(f"optimizer.scalars.{kind}.{name}: expected a number, found a tensor")


def _types(kind: Kind) -> type | tuple[type, ...]:
    if isinstance(kind, (type, tuple)):
        return kind
    return list if isinstance(kind, list) else dict


def _check(value: Any, kind: Kind, where: str) -> None:
    if isinstance(kind, Maybe):
        if value is None:
            return
        kind = kind.kind
    types = _types(kind)
    content: Any = value
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in _several(types)):
        raise ValueError(f"{where or 'it'}: expected {_named(types)}, found {type(value).__name__}")
    if type(kind) is list:
        for number, item in enumerate(content):
            _check(item, kind[0], f"{where}[{number}]")
    elif isinstance(kind, Each):
        for key, item in content.items():
            _check(key, str, f"a key of {where}")
            _check(item, kind.kind, f"{where}.{key}")
    elif type(kind) is dict:
        for key, inner in kind.items():
            if key not in content:
                raise ValueError(f"{where or 'it'}: expected '{key}', found nothing of that name")
            _check(content[key], inner, f"{where}.{key}" if where else key)


def _several(types: type | tuple[type, ...]) -> tuple[type, ...]:
    return types if isinstance(types, tuple) else (types,)


def _named(types: type | tuple[type, ...]) -> str:
    return " or ".join(one.__name__ for one in _several(types))


def check_hyperparameters(group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises ValueError if a value that is to be replaced by a saved one is of another type."""
    for key, value in saved.items():
        given = value is not None and group.get(key) is not None
        if given and _shape(value) != _shape(group[key]):
            raise ValueError(f"{key}: expected a value like {group[key]!r:.40}, found {value!r:.40}")


def _shape(value: Any) -> Any:
    """Numbers are like each other, and so are lists of as many."""
    if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0):
        return "number"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_shape(item) for item in value]
    return type(value).__name__
