"""Types of configuration values, and the sentence for a wrong one: expected, got, what to do.

A type's `title` says what it takes, and its `description` what to do. Without them, both follow from pydantic's JSON
schema and from the kind of the error.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal, NoReturn, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUseDefault

from zerolite.utils.text import DTYPE_NAMES

MAX_BATCH = 2**31 - 1
_MAX_INT = 2**63 - 1

# JSON's numbers. float() alone would also take "nan", "inf", "1_000" and digits of other scripts. No two neighbouring
# parts of the pattern match the same text, so that a long text is refused in linear time.
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?")

_LONGEST_NUMBER = 400
"""Characters of the longest text that is taken for a number: the largest float has 309 digits."""


class Block(BaseModel):
    """Block of keys. The string below a field says what the key does and in which unit."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _use_default(cls, value: object, info: ValidationInfo) -> object:
        """Use the default for "auto" where that is no value of its own, and for null and false in place of a block."""
        field = cls.model_fields[info.field_name or ""]
        auto = isinstance(value, str) and value == "auto" and not _lists_auto(field)
        absent = (value is None or value is False) and block_model(field) is not None
        if (auto or absent) and not field.is_required():
            raise PydanticUseDefault
        return value


def _lists_auto(info: FieldInfo) -> bool:
    return any("auto" in get_args(candidate) for candidate in (info.annotation, *get_args(info.annotation)))


def block_model(info: FieldInfo) -> type[Block] | None:
    """Return the model of a field that is a block (`Block` or `Block | None`), else None."""
    for candidate in (info.annotation, *get_args(info.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Block):
            return candidate
    return None


def show(value: object, limit: int = 60) -> str:
    """Return a value as JSON, shortened, with the name of its type if the text alone does not show it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = f"an object of type {type(value).__name__}"
    text = shorten(text, limit)
    kinds: dict[Any, str] = {str: "the string ", Mapping: "the object ", (list, tuple): "the array "}
    return next((name for cls, name in kinds.items() if isinstance(value, cls)), "") + text


def shorten(text: str, limit: int = 100) -> str:
    """Shorten a long text, and escape characters that UTF-8 cannot hold."""
    if len(text) > limit:
        text = text[: limit - 3] + "..."
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def join_path(path: str, key: object) -> str:
    """Return the full path of a key in the block at `path`."""
    name = shorten(str(key)) or '""'
    return f"{path}.{name}" if path else name


# ---------------------------------------------------------------- types


def as_number(value: object) -> Any:
    """Return numeric strings and foreign number types as int or float, and other values unchanged.

    YAML tools write numbers as strings such as "1e9".
    """
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


def _dtype(value: object) -> object:
    """Return fp32, fp16 or bf16 for DeepSpeed's or torch's name of a dtype, or for a torch.dtype."""
    is_torch_dtype = type(value).__module__ == "torch" and type(value).__name__ == "dtype"
    spelling = str(value) if is_torch_dtype else value
    return _DTYPES.get(spelling.lower(), value) if isinstance(spelling, str) else value


_DTYPES = {
    spelling: name
    for name, of_torch in DTYPE_NAMES.items()
    for spelling in (name, *of_torch, *(f"torch.{other}" for other in of_torch))
}


def _default_for_null(value: object) -> object:
    if value is None:
        raise PydanticUseDefault
    return value


def _listed(value: object) -> object:
    """Return a list or tuple as a tuple, and an invalid value for the rest: pydantic would take any iterable."""
    return tuple(value) if isinstance(value, (list, tuple)) else object()


class FrozenDict(dict[str, Any]):
    """Dict that cannot be changed; `dict(d)` makes a copy that can."""

    def _refuse(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise TypeError("the configuration is frozen; change a copy made with dict(...) or load another configuration")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, Any]]]:
        return FrozenDict, (dict(self),)

    def __deepcopy__(self, memo: object) -> FrozenDict:
        return FrozenDict((key, frozen(value)) for key, value in self.items())


def frozen(value: object) -> Any:
    """Return a copy of a JSON value whose objects are frozen."""
    if isinstance(value, Mapping):
        return FrozenDict((key, frozen(element)) for key, element in value.items())
    return [frozen(element) for element in value] if isinstance(value, list) else value


NUMBER = BeforeValidator(as_number)
DTYPE = BeforeValidator(_dtype)
NULL_IS_DEFAULT = BeforeValidator(_default_for_null)
Bool = StrictBool
Integer = Annotated[StrictInt, NUMBER, Field(le=_MAX_INT)]
Natural = Annotated[Integer, Field(ge=0)]
Count = Annotated[Integer, Field(ge=1)]
Finite = Annotated[float, NUMBER, Field(strict=True, allow_inf_nan=False)]
NotNegative = Annotated[Finite, Field(ge=0)]
Positive = Annotated[Finite, Field(gt=0)]
Dtype = Annotated[Literal["fp32", "fp16", "bf16"], DTYPE]
Text = Annotated[StrictStr, Field(pattern=r"\S")]
Path = Annotated[
    Text,
    BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value),
    Field(title="a path", description="write one in quotes"),
]
Texts = Annotated[
    tuple[Text, ...], BeforeValidator(_listed), Field(description='write names in quotes, such as ["a", "b.*"]')
]
Arguments = Annotated[dict[str, Any], AfterValidator(frozen), Field(description='write it as {"name": value, ...}')]


# ---------------------------------------------------------------- messages


def describe_type(info: FieldInfo) -> str:
    """Describe the values that a field takes, as in the column `type` of the generated reference."""
    return _words(_schema(info))


def describe_error(info: FieldInfo, value: object, details: Mapping[str, Any]) -> str:
    """Return the sentence for a wrong value of a field.

    Args:
        info: the field.
        value: the wrong value.
        details: pydantic's details of the error.
    """
    context = details.get("ctx", {})
    if "error" in context:  # raised by a validator of this package, with a whole sentence
        return str(context["error"])
    schema = _schema(info)
    first = schema["anyOf"][0] if "anyOf" in schema else schema
    remedy = first.get("description") or _remedy(details["type"], as_number(value), context)
    return f"expected {_words(schema)}, got {show(value)}; {remedy}"


def _schema(info: FieldInfo) -> dict[str, Any]:
    parts: Any = (info.annotation, *info.metadata, Field(title=info.title, description=info.description))
    return TypeAdapter[Any](Annotated[parts]).json_schema()


def _remedy(error_type: str, number: object, context: Mapping[str, Any]) -> str:
    if error_type in ("greater_than_equal", "less_than_equal"):
        return f"the nearest allowed value is {context.get('ge', context.get('le'))}"
    if error_type == "multiple_of":
        below = number // context["multiple_of"] * context["multiple_of"]
        return f"write {below} or {below + context['multiple_of']}"
    if error_type in ("int_type", "float_type", "finite_number") and isinstance(number, float):
        finite = math.isfinite(number)
        return f"write {math.floor(number)} or {math.ceil(number)}" if finite else "write a finite number"
    if error_type == "literal_error" and "fp" in context["expected"]:
        return 'longer spellings such as "float32" are fine too'
    return _REMEDIES.get(error_type, "write one of these or leave the key out")


_REMEDIES = {
    "bool_type": "write true or false, without quotes",
    "int_type": "write a number such as 1000 or 1e3",
    "float_type": "write a number such as 1.0",
    "greater_than": "write a larger number",
    "string_type": "write a name in quotes",
    "string_pattern_mismatch": "write a name in quotes",
}


def _words(schema: dict[str, Any]) -> str:
    """Describe the values that a JSON schema takes."""
    if "title" in schema:
        return str(schema["title"])
    if "anyOf" in schema:
        return " or ".join(map(_words, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return " or ".join(map(json.dumps, schema.get("enum", [schema.get("const")])))
    if schema["type"] in ("integer", "number"):
        return _range(schema)
    if schema["type"] == "array":
        return f"an array of {schema['items']['type']}s"
    names = {"boolean": "true or false", "string": "a non-empty string", "null": "null"}
    return names.get(schema["type"], "an object")


def _range(schema: dict[str, object]) -> str:
    text = "an integer" if schema["type"] == "integer" else "a finite number"
    bounds = {_BOUNDS.get(key, key): value for key, value in schema.items()}
    if bounds.get("le", _MAX_INT) != _MAX_INT:
        text += f" from {bounds['ge']} to {bounds['le']}"
    else:
        text += f" above {bounds['gt']}" if "gt" in bounds else f" of at least {bounds['ge']}"
    return text + (f", a multiple of {bounds['multiple_of']}" if "multiple_of" in bounds else "")


_BOUNDS = {"minimum": "ge", "exclusiveMinimum": "gt", "maximum": "le", "multipleOf": "multiple_of"}
"""pydantic's names of bounds by those of JSON schema: a schema has its own if a validator precedes the bound."""
