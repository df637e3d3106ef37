"""Import of objects by the name given on a command line: `package.module:name`."""

from __future__ import annotations

import difflib
import importlib
import traceback
from typing import Any

from zerolite.planning.errors import PlanError


def import_object(spec: str, option: str) -> Any:
    """Import the object of ``spec``, as in "package.module:name" or "package.module:Class.method".

    option: where the user gave it, as in "--model". Raises PlanError, which says which part is missing, or what failed
    while it was imported.
    """
    module, colon, name = spec.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
        raise PlanError(f"{option} expects a function as in 'package.module:name', and got {spec!r}")
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        says = getattr(error, "msg", error)  # of a SyntaxError without its place
        told = f"{type(error).__name__}: {says}{_place(error)}"
        raise PlanError(f"{option}: importing {module!r} failed with {told}") from error
    place = f"module {module!r}"
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [known for known in dir(found) if not known.startswith("_")], n=1)
            raise PlanError(f"{option} {spec}: {place} has no {part!r}{f'; did you mean {near[0]!r}?' if near else ''}")
        found, place = getattr(found, part), repr(part)
    return found


def _place(error: BaseException) -> str:
    """File and line of what was at work, empty if that was the import system itself."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__"))
        if name != __name__ and name.partition(".")[0] != "importlib":
            place = f" ({frame.f_code.co_filename}, line {line})"
    return place
