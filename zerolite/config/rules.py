"""Types of configuration values: accepted inputs, conversions and error messages.

A rule is called with the raw JSON value and returns the value the model keeps, or raises ValueError with a sentence
(expected, got, remedy). ``expected`` is also what the generated reference shows as the key's type.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NoReturn

from zerolite.utils.dtype_names import CONFIG as DTYPE_NAMES

MAX_INT = 2**63 - 1
MAX_BATCH = 2**31 - 1

# JSON's numbers. float() alone would also take "nan", "inf", "1_000" and digits of other scripts. No part of the
# pattern can match what the next one matches, so that a long text is refused in linear time.
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?")

_LONGEST_NUMBER = 400
"""Characters: the largest float has 309 digits."""


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
    if isinstance(value, bool) or value is None:
        return text
    if isinstance(value, str):
        return f"the string {text}"
    if isinstance(value, Mapping):
        return f"the object {text}"
    if isinstance(value, (list, tuple)):
        return f"the array {text}"
    return text


def shorten(text: str, limit: int = 100) -> str:
    """Cut a long text, and escape what cannot be printed as UTF-8."""
    if len(text) > limit:
        text = text[: limit - 3] + "..."
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _fail(expected: str, value: object, remedy: str) -> NoReturn:
    raise ValueError(f"expected {expected}, got {show(value)}; {remedy}")


def _as_number(value: object) -> object:
    """Numeric strings ("1e9", as YAML tools write it) and foreign number types as int or float; the rest unchanged."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and len(value) <= _LONGEST_NUMBER and _NUMBER.fullmatch(value.strip()):
        as_float = float(value)
        if math.isinf(as_float) or abs(as_float) > MAX_INT:
            return as_float
        exact = Decimal(value.strip())
        return int(exact) if exact == exact.to_integral_value() else as_float
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return value


@dataclass(frozen=True)
class Boolean:
    """true or false; numbers and strings are errors. `always`: the reason why false is impossible."""

    nullable: bool = False
    always: str = ""

    @property
    def expected(self) -> str:
        if self.always:
            return "true"
        return "true, false or null" if self.nullable else "true or false"

    def __call__(self, value: object) -> bool | None:
        if value is None and self.nullable:
            return None
        if not isinstance(value, bool):
            _fail(self.expected, value, "write true or false, without quotes")
        if self.always and not value:
            _fail(self.expected, value, f"{self.always}, so leave the key out or write true")
        return value


@dataclass(frozen=True)
class Integer:
    """A whole number from minimum to maximum, both included; 1e9 is one, 1.5 and true are not. null, where allowed,
    becomes `null_value`. It must be a multiple of `multiple`."""

    minimum: int = 0
    maximum: int = MAX_INT
    nullable: bool = False
    null_means: str = ""
    null_value: int | None = None
    multiple: int = 1

    @property
    def expected(self) -> str:
        if self.maximum == MAX_INT:
            text = f"an integer of at least {self.minimum}"
        else:
            text = f"an integer from {self.minimum} to {self.maximum}"
        if self.multiple > 1:
            text += f", a multiple of {self.multiple}"
        return text + (" or null" if self.nullable else "")

    def __call__(self, value: object) -> int | None:
        if value is None and self.nullable:
            return self.null_value
        number = _as_number(value)
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            _fail(self.expected, value, self._null_hint("write a number such as 1000 or 1e3"))
        if isinstance(number, float) and not math.isfinite(number):
            _fail(self.expected, value, self._null_hint("write a finite number"))
        if number != int(number):
            _fail(self.expected, value, f"write {math.floor(number)} or {math.ceil(number)}")
        if not self.minimum <= number <= self.maximum:
            nearest = self.minimum if number < self.minimum else self.maximum
            _fail(self.expected, value, self._null_hint(f"the nearest allowed value is {nearest}"))
        if number % self.multiple:
            below = int(number) // self.multiple * self.multiple
            _fail(self.expected, value, f"write {below} or {below + self.multiple}")
        return int(number)

    def _null_hint(self, remedy: str) -> str:
        return f"{remedy}, or null ({self.null_means})" if self.null_means else remedy


@dataclass(frozen=True)
class Interval(Integer):
    """Steps between two lines. Infinity, which accelerate writes for "never", is null."""

    def __call__(self, value: object) -> int | None:
        never = (isinstance(value, float) and value == math.inf) or value == "Infinity"  # as hjson reads it
        return super().__call__(None if never else value)


@dataclass(frozen=True)
class IntegerOrAuto(Integer):
    """An integer, or the word "auto", which is kept."""

    @property
    def expected(self) -> str:
        return f'{super().expected} or "auto"'

    def __call__(self, value: object) -> Any:
        return value if isinstance(value, str) and value == "auto" else super().__call__(value)


@dataclass(frozen=True)
class Integers:
    """A list of integers, at least one and at most `most`, as Integer reads them; or null."""

    minimum: int = 0
    maximum: int = MAX_INT
    most: int = 100

    @property
    def expected(self) -> str:
        return "an array of integers or null"

    def __call__(self, value: object) -> tuple[int, ...] | None:
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or not value:
            _fail(self.expected, value, "write sizes such as [2, 4]")
        if len(value) > self.most:
            raise ValueError(f"expected at most {self.most} integers, got {len(value)}; leave some out")
        read = Integer(self.minimum, self.maximum)
        return tuple(number for number in map(read, value) if number is not None)


@dataclass(frozen=True)
class OneOf:
    """One of a few numbers."""

    values: tuple[float, ...]

    @property
    def expected(self) -> str:
        return " or ".join(f"{value:g}" for value in self.values)

    def __call__(self, value: object) -> float:
        number = _as_number(value)
        if isinstance(number, bool) or number not in self.values:
            _fail(self.expected, value, "write one of these or leave the key out")
        return next(allowed for allowed in self.values if allowed == number)


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def expected(self) -> str:
        return " or ".join(f'"{word}"' for word in self.words)

    def __call__(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.words:
            _fail(self.expected, value, "write one of these in quotes or leave the key out")
        return value


@dataclass(frozen=True)
class ChoiceOrNull(Choice):
    """One of a few words, or null, which becomes one of them."""

    null_word: str = ""

    @property
    def expected(self) -> str:
        return f"{super().expected} or null"

    def __call__(self, value: object) -> str:
        return self.null_word if value is None else super().__call__(value)


@dataclass(frozen=True)
class Number:
    """A finite number of at least (or, if exclusive, above) the minimum and of at most the maximum. Integers become
    floats."""

    minimum: float = 0.0
    exclusive: bool = False
    nullable: bool = False
    maximum: float = math.inf

    @property
    def expected(self) -> str:
        if math.isfinite(self.maximum):
            text = f"a finite number from {self.minimum:g} to {self.maximum:g}"
        else:
            text = f"a finite number {'above' if self.exclusive else 'of at least'} {self.minimum:g}"
        return text + (" or null" if self.nullable else "")

    def __call__(self, value: object) -> float | None:
        if value is None and self.nullable:
            return None
        number = _as_number(value)
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            _fail(self.expected, value, "write a number such as 1.0")
        try:
            result = float(number)
        except OverflowError:
            result = math.inf
        if not math.isfinite(result):
            _fail(self.expected, value, "write a finite number")
        if result < self.minimum or (self.exclusive and result == self.minimum):
            _fail(self.expected, value, "write a larger number")
        if result > self.maximum:
            _fail(self.expected, value, "write a smaller number")
        return result


@dataclass(frozen=True)
class OffOrNumber(Number):
    """A finite number of at least the minimum, or 0 for off."""

    @property
    def expected(self) -> str:
        return f"{super().expected}, or 0"

    def __call__(self, value: object) -> float | None:
        number = _as_number(value)
        if number == 0 and not isinstance(number, bool):
            return 0.0
        return super().__call__(value)


_DTYPES = {
    spelling: name
    for name, of_torch in DTYPE_NAMES.items()
    for spelling in (name, *of_torch, *(f"torch.{other}" for other in of_torch))
}


@dataclass(frozen=True)
class Dtype:
    """A floating dtype in DeepSpeed's or torch's spelling (or a torch.dtype itself), kept as fp32, fp16 or bf16."""

    allowed: tuple[str, ...] = ("fp32", "fp16", "bf16")
    nullable: bool = True

    @property
    def expected(self) -> str:
        names = " or ".join(f'"{name}"' for name in self.allowed)
        return f"{names} or null" if self.nullable else names

    def __call__(self, value: object) -> str | None:
        if value is None and self.nullable:
            return None
        is_torch_dtype = type(value).__module__ == "torch" and type(value).__name__ == "dtype"
        spelling = str(value) if is_torch_dtype else value
        name = _DTYPES.get(spelling.lower()) if isinstance(spelling, str) else None
        if name not in self.allowed:
            longer = ", ".join(f'"{DTYPE_NAMES[a][0]}"' for a in self.allowed)
            _fail(self.expected, spelling, f"longer spellings such as {longer} are fine too")
        return name


@dataclass(frozen=True)
class Text:
    """A non-empty string."""

    @property
    def expected(self) -> str:
        return "a string"

    def __call__(self, value: object) -> str:
        if not isinstance(value, str) or not value.strip():
            _fail("a non-empty string", value, "write a name in quotes")
        return value


@dataclass(frozen=True)
class PathOrNull:
    """A path, as a string or as an object of Python's that stands for one, or null."""

    @property
    def expected(self) -> str:
        return "a path or null"

    def __call__(self, value: object) -> str | None:
        if value is None:
            return None
        path = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(path, str) or not path.strip():
            _fail(self.expected, value, "write one in quotes")
        return path


@dataclass(frozen=True)
class Texts:
    """A list of non-empty strings, or null. `example`: what the remedy tells to write."""

    example: str = '["torch.nn.Linear"]'
    nullable: bool = True

    @property
    def expected(self) -> str:
        return "an array of strings" + (" or null" if self.nullable else "")

    def __call__(self, value: object) -> tuple[str, ...] | None:
        if value is None and self.nullable:
            return None
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) and v.strip() for v in value):
            _fail(self.expected, value, f"write names such as {self.example}")
        return tuple(value)


class FrozenDict(dict[str, Any]):
    """A dict that refuses to change; `dict(d)` makes a copy that can."""

    def _refuse(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise TypeError("the configuration is frozen; change a copy made with dict(...) or load another configuration")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, Any]]]:
        return FrozenDict, (dict(self),)

    def __deepcopy__(self, memo: object) -> FrozenDict:
        return FrozenDict((key, _frozen(value)) for key, value in self.items())


def _frozen(value: Any) -> Any:
    """A copy of a JSON value whose objects are frozen."""
    if isinstance(value, Mapping):
        return FrozenDict((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, list):
        return [_frozen(item) for item in value]
    return value


@dataclass(frozen=True)
class FreeObject:
    """An object with any keys: the arguments of a constructor. What they may be is checked where it is called."""

    @property
    def expected(self) -> str:
        return "an object"

    def __call__(self, value: object) -> FrozenDict:
        if not isinstance(value, Mapping):
            _fail(self.expected, value, 'write it as {"name": value, ...}')
        result: FrozenDict = _frozen(value)
        return result
