"""Import of `op_builder`, and types of the C functions that it builds.

`op_builder` is `zerolite.op_builder` of a wheel, or `op_builder/` of a checkout. In a checkout it is the directory
beside the package. It is not imported through `sys.path`, on which the `op_builder` of another project or checkout
might come first.
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
        if NAME in sys.modules or importlib.util.find_spec(NAME) is not None:
            return importlib.import_module(NAME)
        directory = Path(__file__).resolve().parents[2] / "op_builder"
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
