"""JSON codec for nested plain data that keeps the types: loading returns a value equal to the saved one.

Plain data: None, bool, int, float, str, bytes, list, tuple, set, frozenset, dict, OrderedDict, Counter; torch's
tensors, dtypes, devices and sizes. numpy's numbers and arrays are loaded as Python's numbers and as tensors. Any other
type is refused when it is saved, so that loading never has to execute code. A type that JSON lacks is stored as an
object with one key that begins with ``$``.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerolite.checkpoint.errors import CheckpointError

_DEEPEST = 200  # far below Python's limit of recursion, which json's functions have too
_SEQUENCES: dict[str, type] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset, "$size": torch.Size}
_MAPPINGS: dict[str, type] = {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}
_TAGS = {cls: tag for tag, cls in {**_SEQUENCES, **_MAPPINGS}.items()}
_PLAIN = (type(None), bool, int, str)


def encode(value: object, where: str, tensors: list[torch.Tensor]) -> Any:
    """Return ``value`` in JSON's types. Tensors are appended to ``tensors``, except those without dimensions.

    Args:
        value: the value.
        where: name of ``value`` in an error.
        tensors: list to which tensors are appended.

    Raises:
        TypeError: part of ``value`` is not plain data; the message says where it is.
    """
    return _encode(value, where, tensors, 0)


def _encode(value: Any, where: str, tensors: list[torch.Tensor], depth: int) -> object:
    cls = type(value)  # exactly: a subclass may have more than its content, which would be lost
    if cls in _PLAIN:
        return value
    if depth > _DEEPEST:
        raise TypeError(f"{where}: expected plain data nested at most {_DEEPEST} deep; does it contain itself?")
    if cls is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if cls is list:
        return [_encode(element, f"{where}[{i}]", tensors, depth + 1) for i, element in enumerate(value)]
    if cls in (tuple, torch.Size):
        return {_TAGS[cls]: [_encode(element, f"{where}[{i}]", tensors, depth + 1) for i, element in enumerate(value)]}
    if cls in (set, frozenset):
        items = sorted(value, key=repr)  # strings hash differently in each process: the file must not
        return {_TAGS[cls]: [_encode(element, f"an element of {where}", tensors, depth + 1) for element in items]}
    if cls in _MAPPINGS.values():
        return _encode_mapping(value, where, tensors, depth)
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, where, tensors)
    if cls is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if cls in (torch.dtype, torch.device):
        return {f"${cls.__name__}": str(value)}
    if cls.__module__ == "numpy" and hasattr(value, "__array__"):
        if value.dtype.kind in "biuf":
            return _encode(torch.tensor(value, device="cpu") if value.ndim else value.item(), where, tensors, depth)
    raise TypeError(
        f"{where}: expected plain data (None, numbers, strings, bytes, lists, tuples, sets, dicts, tensors), which "
        f"can be loaded without executing anything, got {cls.__module__}.{cls.__qualname__}; {_advice(value)}"
    )


def _encode_mapping(value: Any, where: str, tensors: list[torch.Tensor], depth: int) -> object:
    # JSON's keys are strings, and a key that begins with $ is read as a tag: other dicts become lists of pairs.
    if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(element, f"{where}[{key!r}]", tensors, depth + 1) for key, element in value.items()}
    return {
        _TAGS[type(value)]: [
            [
                _encode(key, f"a key of {where}", tensors, depth + 1),
                _encode(element, f"{where}[{key!r}]", tensors, depth + 1),
            ]
            for key, element in value.items()
        ]
    }


def _encode_tensor(value: torch.Tensor, where: str, tensors: list[torch.Tensor]) -> object:
    if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
        raise TypeError(
            f"{where}: expected a dense tensor with values, got one with layout {value.layout} on {value.device}"
        )
    if not value.dim() and not value.dtype.is_complex:
        return {"$scalar": [str(value.dtype), _encode(value.item(), where, tensors, 0)]}
    tensors.append(value.detach())
    return {"$tensor": len(tensors) - 1}


def _advice(value: object) -> str:
    if hasattr(value, "state_dict"):
        return "save its state_dict()"
    if type(value).__name__ == "Namespace":
        return "save vars(...) of it"
    if hasattr(value, "__fspath__"):
        return "save str(...) of it"
    return "save what it is made of"


def decode(value: object, tensor: Callable[[int], torch.Tensor]) -> Any:
    """Return the value that :func:`encode` has encoded.

    Args:
        value: the JSON value.
        tensor: returns the i-th tensor.

    Raises:
        ValueError: ``value`` was not made by :func:`encode`.
        CheckpointError: raised by ``tensor``.
    """
    try:
        return _decode(value, tensor)
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError) as error:
        raise ValueError(f"it was not written by zerolite ({type(error).__name__}: {error})") from error


def _decode(value: object, tensor: Callable[[int], torch.Tensor]) -> object:
    if isinstance(value, list):
        return [_decode(element, tensor) for element in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _decode(element, tensor) for key, element in value.items()}
    if len(value) != 1:
        raise ValueError(f"expected an object with '{tag}' alone, got keys {sorted(value)}")
    return _decode_tagged(tag, value[tag], tensor)


def _decode_tagged(tag: str, content: Any, tensor: Callable[[int], torch.Tensor]) -> object:
    if tag == "$float":
        return float(content)
    if tag == "$bytes":
        return base64.b64decode(content)
    if tag == "$device":
        return torch.device(content)
    if tag == "$dtype":
        return _dtype(content)
    if tag == "$scalar":
        dtype, number = content
        if not isinstance(number := _decode(number, tensor), (bool, int, float)):
            raise ValueError(f"expected a number, got {type(number).__name__}")
        return torch.tensor(number, dtype=_dtype(dtype), device="cpu")
    if tag == "$tensor":
        return tensor(content)
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](_decode(element, tensor) for element in content)
    if tag in _MAPPINGS:
        pairs: Sequence[tuple[Any, Any]] = [
            (_decode(key, tensor), _decode(element, tensor)) for key, element in content
        ]
        # A Counter of a list would count the pairs.
        return _MAPPINGS[tag](dict(pairs) if tag == "$counter" else pairs)
    raise ValueError(f"expected one of the tags that zerolite writes, got '{tag}'")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected the name of a torch dtype, got {name!r}")
    return dtype
