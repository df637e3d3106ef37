"""Signatures of C functions."""

from __future__ import annotations

import ctypes
from typing import Any


def declare(function: ctypes._NamedFuncPointer, result: type | None, *arguments: Any) -> ctypes._NamedFuncPointer:
    """Set the types of ``function`` and return it."""
    function.restype, function.argtypes = result, list(arguments)
    return function
