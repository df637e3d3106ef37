"""Check of a configuration's `params` block against the constructor that receives it."""

from __future__ import annotations

import collections.abc
import contextlib
import difflib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError

_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)

_WORDS = {
    "float_type": "a number",
    "finite_number": "a number",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list of numbers",
}
"""Name of the expected type in messages, by the type of pydantic's error."""


def nearest(word: str, known: Collection[str]) -> str:
    """Return " (nearest: 'x')" with the known word that is most similar, or "" if none is."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return f" (nearest: '{by_lower[close[0]]}')" if close else ""


def check_keyword_params(
    path: str,
    cls: Callable[..., object],
    params: Mapping[str, object],
    *,
    hidden: Collection[str] = (),
    also_known: Collection[str] = (),
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Turn `params` into keyword arguments for `cls`.

    "auto" leaves a parameter at its default. A list becomes a tuple if the default is a tuple. 20.0 becomes 20 if an
    integer is expected.

    Args:
        path: path of `params` in the configuration, such as "optimizer.params".
        cls: class whose constructor receives the arguments.
        params: keys and values of the configuration.
        hidden: parameters of the constructor that the caller fills in.
        also_known: keys that the caller has taken out of `params` already; messages list them as known.

    Returns:
        The valid keyword arguments, and (path, sentence) for each invalid one.
    """
    known = {
        name: p
        for name, p in _signature(cls).parameters.items()
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
            try:
                kwargs[key] = _converted(value, known[key])
            except ValidationError as error:
                wanted = _expected_types(error, known[key].default, known[key].annotation)
                errors.append((f"{path}.{key}", f"expected {wanted}, got {value!r}{_unquote_hint(value)}"))
    for key, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and key not in params:
            errors.append((f"{path}.{key}", f"missing; {name} has no default for it"))
    return kwargs, errors


def is_number(value: object) -> bool:
    """Return True for a finite int or float, but not for True and False."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _signature(cls: Callable[..., object]) -> inspect.Signature:
    # torch imports some names for type checkers only: most are those of collections.abc.
    for names in (None, vars(collections.abc)):
        with contextlib.suppress(NameError):
            return inspect.signature(cls, eval_str=True, locals=names)
    return inspect.signature(cls)


def _converted(value: object, parameter: inspect.Parameter) -> object:
    """Return the value in the type of the parameter. Raises ValidationError if it does not fit."""
    default, annotation = parameter.default, parameter.annotation
    # Without an annotation, the default tells the type.
    if annotation is inspect.Parameter.empty:
        annotation = float if is_number(default) else type(default) if isinstance(default, (bool, str, tuple)) else Any
    elif isinstance(annotation, str):
        annotation = Any
    elif (
        get_origin(annotation) is Iterable
    ):  # pydantic would check its values only when they are iterated, and take a text
        annotation = list[get_args(annotation)]  # type: ignore[misc]
    adapter = TypeAdapter[Any](
        annotation if default is not None or annotation is Any else annotation | None, config=_STRICT
    )
    if isinstance(default, tuple) and isinstance(value, list):
        value = tuple(value)
    try:
        return adapter.validate_python(value)
    except ValidationError:
        if isinstance(value, float) and value.is_integer():
            return adapter.validate_python(int(value))
        raise


def _expected_types(error: ValidationError, default: object, annotation: object) -> str:
    """Return the expected types in words, such as "a number or a list of numbers"."""
    if isinstance(default, tuple):
        return f"a list of {len(default)} numbers such as {list(default)}"
    if get_origin(annotation) is Iterable:
        return "a list of whole numbers" if get_args(annotation) == (int,) else "a list"
    expected = [each.get("ctx", {}).get("expected") or _WORDS.get(each["type"]) for each in error.errors()]
    return " or ".join(dict.fromkeys(word for word in expected if word)) or "another kind of value"


def _unquote_hint(value: object) -> str:
    try:
        return " (a text); remove the quotes" if isinstance(value, str) and math.isfinite(float(value)) else ""
    except ValueError:
        return ""
