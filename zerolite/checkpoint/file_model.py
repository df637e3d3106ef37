"""Base of the models of a checkpoint's JSON files, which check what is read, and the phrase for what is wrong."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Result = TypeVar("Result")
STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)
Natural = Annotated[int, Field(ge=0)]


class FileModel(BaseModel):
    """A JSON object. Types are exact; keys that this version does not know are left out."""

    model_config = STRICT


def validated(validate: Callable[[], Result]) -> Result:
    """Return the result of ``validate``, which calls pydantic. Raises ValueError with a phrase: the first value that is
    wrong, with its path, what was expected, and what was found."""
    try:
        return validate()
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    # Raised here and not there, because Python's collector cannot look into a ValidationError: it may hold frames for
    # ever, and with them the engine.
    where = ".".join(map(str, first["loc"])) or "it"
    if first["type"] == "missing":
        raise ValueError(f"{where}: expected this entry, found none")
    expected = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1)
    raise ValueError(f"{where}: {expected}, found {_found(first['input'])}")


def _found(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # Python refuses to print a number of thousands of digits
        return f"a {type(value).__name__}"
