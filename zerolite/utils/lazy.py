"""Names of a package that are imported on first use."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
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
        with collector_off():  # imports make many objects that stay, and would only trigger useless collections
            if not homes[name]:
                return importlib.import_module(f"{package}.{name}")
            value = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    return load


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Context in which the cyclic garbage collector does not run by itself."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
