"""Names of a package that are imported on first use."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` for ``package``.

    Args:
        homes: the module of each name; "" if the name is itself a module of the package.
    """

    def load(name: str) -> object:
        module = sys.modules[package]
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(module.__all__)}")
        if not homes[name]:
            return _imported(f"{package}.{name}")
        value = getattr(_imported(homes[name]), name)
        setattr(module, name, value)
        return value

    return load


def _imported(module: str) -> object:
    """Import with the cyclic garbage collector off: imports create many long-lived objects and only trigger useless
    collections."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if enabled:
            gc.enable()
