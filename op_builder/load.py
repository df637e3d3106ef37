"""`load` and `status`: from the name of an op to a library loaded in this process."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .build import BUILD_S, Recipe, compile_error, compile_into, make_recipe
from .cache import build_lock, library_dir
from .ops import OpUnavailable
from .tools import find_compilers, find_ninja

PREBUILT = Path(__file__).resolve().parent / "prebuilt"


@dataclass(frozen=True)
class OpStatus:
    """Facts about an op that need no build.

    Attributes:
        compatible: it is built, or can be built here as far as can be told.
        reason: why it is not compatible, otherwise empty.
        path: the library for the present sources and flags; None if it is not built.
    """

    name: str
    compatible: bool
    reason: str
    path: Path | None

    @property
    def built(self) -> bool:
        return self.path is not None


def load(name: str, *, capability: tuple[int, int] | None = None, torch_cuda: str | None = None) -> ctypes.CDLL:
    """Return a library of kernels, which is compiled first if there is none for the present sources.

    The first call decides for the whole process, also that the library cannot be had. Any number of processes may
    call it at once; one of them compiles.

    Args:
        name: a key of `OPS`.
        capability: compute capability of the GPU as (major, minor); a CUDA op needs it.
        torch_cuda: `torch.version.cuda`, whose major version the CUDA compiler must share; None does not compare.

    Raises:
        OpUnavailable: it cannot be had here; `cause` and `remedy` say why and what to do.
    """
    _check_enabled(name)
    found = _load(name, capability, torch_cuda)
    if isinstance(found, ctypes.CDLL):
        return found
    raise OpUnavailable(*found)


def status(name: str, *, capability: tuple[int, int] | None = None, torch_cuda: str | None = None) -> OpStatus:
    """Say whether an op can be used here, why not, and where it is, without building it. Arguments as of `load`."""
    try:
        _check_enabled(name)
        recipe = make_recipe(name, capability, torch_cuda)
        path = next((path for path in _library_paths(recipe) if path.is_file()), None)
        if path is None:
            find_compilers(recipe.op, torch_cuda)
            find_ninja()
    except OpUnavailable as error:
        return OpStatus(name, False, str(error), None)
    return OpStatus(name, True, "", path)


def build_into(directory: Path, name: str, *, capability: tuple[int, int] | None = None) -> Path:
    """Compile an op into a directory and return the library's path. This is how a wheel gets its library, and how a
    CUDA kernel is compiled where no GPU is."""
    recipe = make_recipe(name, capability, None)
    directory.mkdir(parents=True, exist_ok=True)
    compile_into(recipe, directory / recipe.file_name)
    return directory / recipe.file_name


def _check_enabled(name: str) -> None:
    if os.environ.get("ZEROLITE_KERNELS") == "0":
        cause = f"ZEROLITE_KERNELS=0 says that {name} is neither built nor loaded."
        raise OpUnavailable(cause, "Unset it to use zerolite's kernels.")


def _library_paths(recipe: Recipe) -> Iterator[Path]:
    """Yield where the library may be: inside the package, and in the cache."""
    yield PREBUILT / recipe.file_name
    with contextlib.suppress(OSError):  # there is no cache
        yield library_dir() / recipe.file_name


@functools.cache
def _load(
    name: str, capability: tuple[int, int] | None, torch_cuda: str | None
) -> ctypes.CDLL | tuple[str, str, Path | None]:
    """Return the library, or what an OpUnavailable is made of: one that is kept would keep the frames of its first
    caller, and with them a model."""
    try:
        recipe = make_recipe(name, capability, torch_cuda)
        return next(filter(None, map(_open, _library_paths(recipe))), None) or _build(recipe)
    except OpUnavailable as error:
        return error.cause, error.remedy, error.log


def _build(recipe: Recipe) -> ctypes.CDLL:
    """Compile into the cache. Without a cache compile for this process alone, in a temporary directory."""
    with contextlib.suppress(OSError):
        return _build_in(library_dir(), recipe)
    try:
        with tempfile.TemporaryDirectory(prefix="zerolite-", ignore_cleanup_errors=True) as directory:
            return _build_in(Path(directory), recipe)
    except OSError as error:
        raise OpUnavailable(
            f"There is no directory to build {recipe.op.name} in, neither the cache nor a temporary one: {error}.",
            "Set ZEROLITE_CACHE_DIR to a directory of yours with some MB of room.",
        ) from error


def _build_in(directory: Path, recipe: Recipe) -> ctypes.CDLL:
    target = directory / recipe.file_name
    log = target.with_suffix(".log")
    before = log.exists() and log.stat().st_mtime_ns
    with build_lock(target.with_suffix(".lock"), 2 * BUILD_S):
        library = _open(target)
        if library is not None:  # another process has built it meanwhile
            return library
        if (log.exists() and log.stat().st_mtime_ns) != before:  # another process has failed, and so would this one
            raise compile_error(recipe, "failed", log)
        compile_into(recipe, target)
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise OpUnavailable(
            f"{recipe.op.name} was compiled, and loading it failed: {error}.",
            "Set ZEROLITE_CACHE_DIR to a directory on a file system that allows programs (not mounted noexec), and CXX "
            "to a compiler whose libraries are installed here.",
        ) from error


def _open(path: Path) -> ctypes.CDLL | None:
    """Load a library if it is there, and of this system."""
    try:
        return ctypes.CDLL(str(path)) if path.is_file() else None
    except OSError:
        return None
