"""Import of objects by the name given on a command line: `package.module:name`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
import traceback
from typing import Any

from zerolite.planning.errors import PlanError

_IMPORT_SYSTEM = ("importlib", "importlib.util", "importlib._bootstrap", "importlib._bootstrap_external")


def import_object(spec: str, option: str) -> Any:
    """Import the object of ``spec``, as in "package.module:name" or "package.module:Class.method".

    option: where the user gave it, as in "--model". Raises PlanError, which says which part is missing, or what failed
    while it was imported.
    """
    module_name, colon, name = spec.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module_name.split("."), *name.split(".")]):
        raise PlanError(f"{option} expects a function as in 'package.module:name', and got {spec!r}")
    found = _import_module(module_name, option)
    place = f"module {module_name!r}"
    for part in name.split("."):
        if not hasattr(found, part):
            raise PlanError(f"{option} {spec}: {place} has no {part!r}{_nearest(part, _public_names(found))}")
        found = getattr(found, part)
        place = repr(part)
    return found


def _import_module(name: str, option: str) -> Any:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        known, home = ".".join(parts[:end]), ".".join(parts[: end - 1])
        try:
            spec = importlib.util.find_spec(known)  # imports its home
        except ModuleNotFoundError as error:
            spec = None
            if error.name not in (known, home):
                raise PlanError(_failure(option, home, error)) from error
        except (Exception, SystemExit) as error:
            raise PlanError(_failure(option, home, error)) from error
        if spec is None:
            raise PlanError(_missing(option, parts[: end - 1], parts[end - 1]))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise PlanError(_failure(option, name, error)) from error


def _missing(option: str, package: list[str], part: str) -> str:
    if not package:
        return f"{option}: there is no module {part!r} in the working directory nor among the installed packages"
    home = ".".join(package)
    paths = getattr(importlib.import_module(home), "__path__", None)
    if paths is None:
        return f"{option}: {home!r} is a module and no package, so there is no {home}.{part}"
    known = [module.name for module in pkgutil.iter_modules(paths)]
    return f"{option}: package {home!r} has no module {part!r}{_nearest(part, known)}"


def _failure(option: str, module: str, error: BaseException) -> str:
    """Describe the error that the user's own module raised, and where."""
    says = getattr(error, "msg", error)  # of a SyntaxError without its place
    return f"{option}: importing {module!r} failed with {type(error).__name__}: {says}{_place(error)}"


def _place(error: BaseException) -> str:
    """File and line of what was at work, empty if that was the import system itself."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__"))
        if name not in (__name__, *_IMPORT_SYSTEM):
            place = f" ({frame.f_code.co_filename}, line {line})"
    return place


def _public_names(holder: Any) -> list[str]:
    return [name for name in dir(holder) if not name.startswith("_")]


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
