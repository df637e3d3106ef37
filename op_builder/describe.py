"""Tools, libraries and build cache, as `zerolite report` prints them."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

from .errors import CannotStore, OpUnavailable
from .store import cache_root, open_store
from .tools import Program, cuda_version, find_cxx, find_ninja, find_nvcc, find_nvrtc


def describe_tools() -> dict[str, str]:
    """Name of each tool -> its version and path, or why there is none."""
    store = _store_or_none()
    finders: dict[str, Callable[[], str]] = {
        "C++ compiler": lambda: _describe(find_cxx(store)),
        "nvcc": lambda: _describe_nvcc(find_nvcc(store)),
        "NVRTC": lambda: _describe(find_nvrtc(store, None)),
        "ninja": _describe_ninja,
    }
    found = {}
    for name, describe in finders.items():
        try:
            found[name] = describe()
        except OpUnavailable as error:
            found[name] = f"none. {error.cause}"
    return found


def describe_cache() -> tuple[str, str]:
    """The cache directory, and why it cannot be used (empty if it can)."""
    try:
        root = str(cache_root())
    except CannotStore as error:
        return "none", str(error)
    try:
        open_store()
    except CannotStore as error:
        return root, str(error)
    return root, ""


def _store_or_none() -> Path | None:
    try:
        return open_store()
    except CannotStore:
        return None


def _describe(compiler: Program) -> str:
    return f"{compiler.version.splitlines()[0]}, {shlex.join(compiler.command)}"


def _describe_nvcc(nvcc: Program) -> str:
    return f"{cuda_version(nvcc)}, {nvcc.command[0]}"


def _describe_ninja() -> str:
    path = find_ninja()
    try:
        answer = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    return f"{answer.stdout.strip()}, {path}"
