"""Import of `op_builder`, and types of the C functions that it builds.

`op_builder` is a directory in the package of a wheel, or beside the package of a checkout. It is not imported through
`sys.path`, nor through the finder of an editable install: there the `op_builder` of another project or checkout might
come first.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

NAME = "zerolite.op_builder"

if TYPE_CHECKING:
    import op_builder
else:

    def _load() -> object:
        if NAME in sys.modules:
            return sys.modules[NAME]
        package = Path(__file__).resolve().parents[1]
        places = package / "op_builder", package.parent / "op_builder"
        directory = next(place for place in places if place.is_dir())
        spec = importlib.util.spec_from_file_location(
            NAME, directory / "__init__.py", submodule_search_locations=[str(directory)]
        )
        sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    op_builder = _load()


def declare(function: ctypes._NamedFuncPointer, result: type | None, *arguments: Any) -> ctypes._NamedFuncPointer:
    """Set the types of ``function`` and return it."""
    function.restype, function.argtypes = result, list(arguments)
    return function


__all__ = ["declare", "op_builder"]
