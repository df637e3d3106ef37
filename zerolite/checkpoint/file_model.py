"""Base of the models of a checkpoint's JSON files, which validate what is read, and the text for what is wrong."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Result = TypeVar("Result")
STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)
Natural = Annotated[int, Field(ge=0)]


class FileModel(BaseModel):
    """A JSON object. Types must match exactly; keys that this version does not know are ignored."""

    model_config = STRICT


def validated(validate: Callable[[], Result]) -> Result:
    """Return the result of ``validate``, which calls pydantic.

    Raises ValueError with the path of the first wrong value, what was expected, and what was found.
    """
    try:
        return validate()
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    # Raised outside of the except clause: as the context of the new exception, the ValidationError would live on. The
    # garbage collector cannot look into it, so cycles through its frames, and the engine in them, would never be freed.
    where = ".".join(map(str, first["loc"])) or "it"
    if first["type"] == "missing":
        raise ValueError(f"{where}: expected this entry, found none")
    expected = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1)
    raise ValueError(f"{where}: {expected}, found {_describe_value(first['input'])}")


def _describe_value(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # Python refuses to print a number of thousands of digits
        return f"a {type(value).__name__}"
