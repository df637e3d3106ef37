"""Check of a configuration's `params` block against the constructor that receives it."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

_SEQUENCES = {"list", "List", "tuple", "Tuple", "Sequence", "Iterable"}
_ANYTHING = {"Any", "Callable", "object", "dict", "Dict"}


def nearest(word: str, known: Collection[str]) -> str:
    """The words " (nearest: 'x')" with the nearest known word, or an empty text."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return f" (nearest: '{by_lower[close[0]]}')" if close else ""


def check_keyword_params(
    path: str,
    cls: Callable[..., Any],
    params: Mapping[str, Any],
    *,
    hidden: Collection[str] = (),
    also_known: Collection[str] = (),
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Turns `params` into keyword arguments for `cls`.

    Args:
        path: where `params` stands in the configuration, such as "optimizer.params".
        hidden: parameters of the constructor that the caller fills in.
        also_known: further keys to offer as the nearest one; the caller has taken them out of `params` before.

    "auto" leaves a parameter at its default; lists become tuples where the default is a tuple; 20.0 becomes 20 where a
    whole number is meant.

    Returns the keyword arguments that are fine, and (path, sentence) for each one that is not.
    """
    signature = inspect.signature(cls).parameters
    known = {
        name: p
        for name, p in signature.items()
        if name not in hidden and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    name = getattr(cls, "__name__", str(cls))
    kwargs: dict[str, Any] = {}
    errors: list[tuple[str, str]] = []
    for key, value in params.items():
        if key not in known:
            takes = sorted([*known, *also_known])
            hint = nearest(key, takes)
            errors.append((f"{path}.{key}", f"not a parameter of {name}{hint}; it takes {', '.join(takes)}"))
        elif isinstance(value, str) and value == "auto":
            if known[key].default is inspect.Parameter.empty:
                errors.append((f"{path}.{key}", f"expected a value, got 'auto'; {name} has no default for it"))
        else:
            kwargs[key], problem = _convert(value, known[key])
            if problem:
                errors.append((f"{path}.{key}", f"expected {problem}, got {value!r}{_unquote_hint(value)}"))
    for key, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and key not in params:
            errors.append((f"{path}.{key}", f"missing; {name} has no default for it"))
    return kwargs, errors


def is_number(value: object) -> bool:
    """A finite int or float; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _convert(value: Any, parameter: inspect.Parameter) -> tuple[Any, str | None]:
    """The value as the parameter wants it, and what was wanted if it does not fit."""
    default, kinds = parameter.default, _kinds(parameter)
    if kinds & _ANYTHING or not kinds or (value is None and "None" in kinds):
        return value, None
    if isinstance(value, bool):
        if "bool" in kinds:
            return value, None
    elif is_number(value):
        if "float" in kinds:
            return value, None
        if "int" in kinds and value == int(value):
            return int(value), None
    elif isinstance(value, str):
        if "str" in kinds:
            return value, None
    elif isinstance(value, (list, tuple)) and kinds & _SEQUENCES:
        return _convert_sequence(value, default)
    return value, _wanted(kinds, default)


def _convert_sequence(value: list[Any] | tuple[Any, ...], default: Any) -> tuple[Any, str | None]:
    if not isinstance(default, tuple):
        return list(value), None if all(map(is_number, value)) else "a list of numbers"
    if len(value) != len(default):
        return value, _wanted({"tuple"}, default)
    pairs = list(zip(value, default, strict=True))
    if not all(is_number(v) or (v is None and d is None) for v, d in pairs):
        return value, _wanted({"tuple"}, default)
    # Many writers of JSON put 0 for 0.0, and torch's Adam takes two floats only.
    return tuple(float(v) if isinstance(d, float) else v for v, d in pairs), None


def _kinds(parameter: inspect.Parameter) -> set[str]:
    """The words of the annotation, or the type of the default where there is no annotation: {"float", "Tensor"}."""
    annotation, default = parameter.annotation, parameter.default
    kinds: set[str] = set()
    if annotation is not inspect.Parameter.empty:
        text = annotation.__name__ if type(annotation) is type else str(annotation)
        kinds = set(re.findall(r"[A-Za-z]+", text))
    elif default is not inspect.Parameter.empty and default is not None:
        kinds = {"float"} if is_number(default) else {type(default).__name__}
    if kinds and (default is None or "Optional" in kinds):
        kinds.add("None")
    if "Literal" in kinds:
        kinds.add("str")
    if isinstance(default, tuple):
        kinds = {"tuple"}
    return kinds


def _wanted(kinds: set[str], default: Any) -> str:
    """The sentence part for what is expected: "a number or a list of numbers"."""
    if isinstance(default, tuple):
        return f"a list of {len(default)} numbers such as {list(default)}"
    words = {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "a text"}
    wanted = [word for kind, word in words.items() if kind in kinds and not (kind == "int" and "float" in kinds)]
    if kinds & _SEQUENCES:
        wanted.append("a list of numbers")
    return " or ".join(wanted) or "another kind of value"


def _unquote_hint(value: object) -> str:
    if not isinstance(value, str):
        return ""
    try:
        float(value)
    except ValueError:
        return ""
    return " (a text); remove the quotes"
