"""Types of configuration values, and the sentence that says what is wrong with one: expected, got, what to do."""

from __future__ import annotations

import json
import math
import numbers
import os
import re
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr
from pydantic.fields import FieldInfo

from zerolite.utils.dtype_names import CONFIG as DTYPE_NAMES

MAX_BATCH = 2**31 - 1
_MAX_INT = 2**63 - 1

# JSON's numbers. float() alone would also take "nan", "inf", "1_000" and digits of other scripts. No part of the
# pattern can match what the next one matches, so that a long text is refused in linear time.
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?")

_LONGEST_NUMBER = 400
"""Characters: the largest float has 309 digits."""


class Block(BaseModel):
    """A block of keys. The string below a field says what it does and in which unit."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


@dataclass(frozen=True)
class Hint:
    """Additions to a field's type in messages.

    Attributes:
        expected: instead of the words that the type gives.
        remedy: what to do, instead of the words that the kind of error gives.
        example: a value to write.
        null: what null means, for the remedy. Where the type has no null, it is the default.
    """

    expected: str = ""
    remedy: str = ""
    example: str = ""
    null: str = ""


def show(value: object, limit: int = 60) -> str:
    """The value as JSON would write it, with the name of its type where the text alone does not tell."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, int) and value.bit_length() > sys.float_info.max_exp:
        return "an integer of more than 308 digits"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = f"an object of type {type(value).__name__}"
    text = shorten(text, limit)
    kinds: dict[Any, str] = {str: "the string ", Mapping: "the object ", (list, tuple): "the array "}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "") + text


def shorten(text: str, limit: int = 100) -> str:
    """Cut a long text, and escape what cannot be printed as UTF-8."""
    if len(text) > limit:
        text = text[: limit - 3] + "..."
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


# ---------------------------------------------------------------- types


def as_number(value: Any) -> Any:
    """Numeric strings ("1e9", as YAML tools write it) and foreign number types as int or float; the rest unchanged."""
    if isinstance(value, str) and len(value) <= _LONGEST_NUMBER and _NUMBER.fullmatch(value.strip()):
        exact, value = Decimal(value.strip()), float(value)
        if abs(value) <= _MAX_INT:
            return int(exact) if exact == exact.to_integral_value() else value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    try:
        number = float(value)
    except OverflowError:
        return math.inf
    if isinstance(value, numbers.Integral):
        return int(value)
    return int(number) if number.is_integer() else number


def _dtype(value: Any) -> Any:
    """DeepSpeed's or torch's spelling of a dtype, or a torch.dtype itself, as fp32, fp16 or bf16."""
    is_torch_dtype = type(value).__module__ == "torch" and type(value).__name__ == "dtype"
    spelling = str(value) if is_torch_dtype else value
    return _DTYPES.get(spelling.lower(), value) if isinstance(spelling, str) else value


_DTYPES = {
    spelling: name
    for name, of_torch in DTYPE_NAMES.items()
    for spelling in (name, *of_torch, *(f"torch.{other}" for other in of_torch))
}


def _listed(value: Any) -> Any:
    """pydantic takes any iterable for a tuple."""
    return tuple(value) if isinstance(value, (list, tuple)) else object()


def _one_line(value: float) -> float:
    if 0 < value < 1:
        raise ValueError(f"expected a finite number of at least 1, or 0, got {value:g}; write 0 to turn it off")
    return value


class FrozenDict(dict[str, Any]):
    """A dict that refuses to change; `dict(d)` makes a copy that can."""

    def _refuse(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise TypeError("the configuration is frozen; change a copy made with dict(...) or load another configuration")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, Any]]]:
        return FrozenDict, (dict(self),)

    def __deepcopy__(self, memo: object) -> FrozenDict:
        return FrozenDict((key, frozen(value)) for key, value in self.items())


def frozen(value: Any) -> Any:
    """A copy of a JSON value whose objects are frozen."""
    if isinstance(value, Mapping):
        return FrozenDict((key, frozen(item)) for key, item in value.items())
    return [frozen(item) for item in value] if isinstance(value, list) else value


NUMBER = BeforeValidator(as_number)
Bool = StrictBool
Integer = Annotated[StrictInt, NUMBER, Field(le=_MAX_INT)]
Natural = Annotated[Integer, Field(ge=0)]
Count = Annotated[Integer, Field(ge=1)]
Finite = Annotated[float, NUMBER, Field(strict=True, allow_inf_nan=False)]
NotNegative = Annotated[Finite, Field(ge=0)]
Positive = Annotated[Finite, Field(gt=0)]
Seconds = Annotated[NotNegative, AfterValidator(_one_line), Hint("a finite number of at least 1, or 0")]
DTYPE = BeforeValidator(_dtype)
Dtype = Annotated[Literal["fp32", "fp16", "bf16"], DTYPE]
Text = Annotated[StrictStr, Field(pattern=r"\S")]
Path = Annotated[
    Text,
    BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value),
    Hint("a path", "write one in quotes"),
]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_listed)]
Sizes = Annotated[
    tuple[Annotated[Count, Field(le=MAX_BATCH)], ...],
    BeforeValidator(_listed),
    Field(min_length=1, max_length=100),
    Hint(remedy="write at most 100 sizes of at least 1, such as [2, 4]"),
]
Arguments = Annotated[dict[str, Any], AfterValidator(frozen), Hint(remedy='write it as {"name": value, ...}')]


# ---------------------------------------------------------------- messages


def expected(info: FieldInfo) -> str:
    """The words for what a field takes, which the generated reference shows as its type."""
    words, null = _words(info.annotation, info.metadata), hint(info).null
    return f"{words} or null" if null and not words.endswith(" or null") else words


def hint(info: FieldInfo) -> Hint:
    """The outermost hint of a field; an empty one where it has none."""
    found = [item for item in _metadata(info.annotation, info.metadata) if isinstance(item, Hint)]
    return found[-1] if found else Hint()


def sentence(info: FieldInfo, value: object, details: Mapping[str, Any]) -> str:
    """Describe the error in the value of a field. details: of pydantic's error."""
    cause = details.get("ctx", {}).get("error")
    if cause is not None:
        return str(cause)
    said, remedy = hint(info), _remedy(info, value, details)
    null = f", or null ({said.null})" if said.null and not said.remedy else ""
    return f"expected {expected(info)}, got {show(value)}; {remedy}{null}"


def _remedy(info: FieldInfo, value: object, details: Mapping[str, Any]) -> str:
    kind, number, said = details["type"], as_number(value), hint(info)
    bounds = _bounds(_metadata(info.annotation, info.metadata))
    if said.remedy:
        return said.remedy
    if said.example:
        return f"write names such as {said.example}"
    if kind in ("greater_than_equal", "less_than_equal"):
        return f"the nearest allowed value is {bounds['ge' if kind == 'greater_than_equal' else 'le']}"
    if kind == "multiple_of":
        below = number // bounds["multiple_of"] * bounds["multiple_of"]
        return f"write {below} or {below + bounds['multiple_of']}"
    if kind in ("int_type", "float_type", "finite_number") and isinstance(number, float):
        finite = math.isfinite(number)
        return f"write {math.floor(number)} or {math.ceil(number)}" if finite else "write a finite number"
    if kind == "literal_error" and "fp" in details["ctx"]["expected"]:
        return 'longer spellings such as "float32" are fine too'
    return _REMEDIES.get(kind, "write one of these or leave the key out")


_REMEDIES = {
    "bool_type": "write true or false, without quotes",
    "int_type": "write a number such as 1000 or 1e3",
    "float_type": "write a number such as 1.0",
    "greater_than": "write a larger number",
    "string_type": "write a name in quotes",
    "string_pattern_mismatch": "write a name in quotes",
}


def _metadata(annotation: Any, metadata: Iterable[Any]) -> list[Any]:
    """Return the annotations of a type and, if it is optional, of the type within; inner ones first."""
    found = [part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else [item])]
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _metadata(inner, more) + found
    if get_origin(annotation) in (Union, types.UnionType):
        return _metadata(get_args(annotation)[0], ()) + found
    return found


def _words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_words(inner) for inner in get_args(annotation))
    around = _metadata(annotation, metadata)
    given = [item.expected for item in around if isinstance(item, Hint) and item.expected]
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if given:
        return given[-1]
    if get_origin(annotation) is Literal:
        return " or ".join(json.dumps(word) for word in get_args(annotation))
    if annotation in (int, float):
        return _range(annotation, around)
    if get_origin(annotation) is tuple:
        return f"an array of {'integers' if 'int' in str(get_args(annotation)[0]) else 'strings'}"
    names = {bool: "true or false", str: "a non-empty string", type(None): "null"}
    return names.get(annotation, "an object")


def _range(number: type, around: Iterable[Any]) -> str:
    bounds = _bounds(around)
    text = "an integer" if number is int else "a finite number"
    if bounds.get("le", _MAX_INT) != _MAX_INT:
        text += f" from {bounds['ge']} to {bounds['le']}"
    else:
        text += f" above {bounds['gt']}" if "gt" in bounds else f" of at least {bounds['ge']}"
    return text + (f", a multiple of {bounds['multiple_of']}" if "multiple_of" in bounds else "")


def _bounds(around: Iterable[Any]) -> dict[str, Any]:
    """Return the outermost of several bounds of one kind."""
    bounds: dict[str, Any] = {}
    for item in around:
        found = {name: getattr(item, name, None) for name in ("ge", "gt", "le", "multiple_of")}
        bounds |= {name: bound for name, bound in found.items() if bound is not None}
    return bounds
