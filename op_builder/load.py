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
from .cache import build_lock, is_intact, library_dir
from .ops import OpUnavailable
from .tools import find_compilers, find_ninja

PREBUILT = Path(__file__).resolve().parent / "prebuilt"


@dataclass(frozen=True)
class OpStatus:
    """Status of an op, found without a build.

    Attributes:
        name: a key of `OPS`.
        compatible: the op is built, or all tools for it are here.
        reason: why it is not compatible; otherwise empty.
        path: the library for the current sources and flags; None if it is not built.
    """

    name: str
    compatible: bool
    reason: str
    path: Path | None

    @property
    def built(self) -> bool:
        return self.path is not None


def load(name: str, *, capability: tuple[int, int] | None = None, torch_cuda: str | None = None) -> ctypes.CDLL:
    """Return a library of kernels, and compile it first if there is none for the current sources.

    The result of the first call holds for the whole process, a failure too. Any number of processes may call this at
    the same time; one of them compiles.

    Args:
        name: a key of `OPS`.
        capability: compute capability of the GPU as (major, minor); a CUDA op needs it.
        torch_cuda: `torch.version.cuda`, whose major version the CUDA compiler must share; None skips the comparison.

    Raises:
        OpUnavailable: the library cannot be built or loaded; `cause` and `remedy` say why and what to do.
    """
    _check_enabled(name)
    library = _load(name, capability, torch_cuda)
    if isinstance(library, ctypes.CDLL):
        return library
    raise OpUnavailable(*library)


def status(name: str, *, capability: tuple[int, int] | None = None, torch_cuda: str | None = None) -> OpStatus:
    """Return whether an op can be used here, why not, and its library, without a build. Arguments as of `load`."""
    try:
        _check_enabled(name)
        recipe = make_recipe(name, capability, torch_cuda)
        path = next(filter(_is_usable, _library_paths(recipe)), None)
        if path is None:
            find_compilers(recipe.op, torch_cuda)
            find_ninja()
    except OpUnavailable as error:
        return OpStatus(name, False, str(error), None)
    return OpStatus(name, True, "", path)


def build_into(directory: Path, name: str, *, capability: tuple[int, int] | None = None) -> Path:
    """Compile an op into a directory and return the library's path.

    Wheels get their library this way, and CUDA kernels are compiled this way on machines without a GPU.
    """
    recipe = make_recipe(name, capability, None)
    directory.mkdir(parents=True, exist_ok=True)
    compile_into(recipe, directory / recipe.file_name)
    return directory / recipe.file_name


def _check_enabled(name: str) -> None:
    if os.environ.get("ZEROLITE_KERNELS") == "0":
        cause = f"ZEROLITE_KERNELS=0 says that {name} is neither built nor loaded."
        raise OpUnavailable(cause, "Unset it to use zerolite's kernels.")


def _library_paths(recipe: Recipe) -> Iterator[Path]:
    """Yield the paths where the library may be: in the package, and in the cache."""
    yield PREBUILT / recipe.file_name
    with contextlib.suppress(OSError):  # the cache cannot be used
        yield library_dir() / recipe.file_name


@functools.cache
def _load(
    name: str, capability: tuple[int, int] | None, torch_cuda: str | None
) -> ctypes.CDLL | tuple[str, str, Path | None]:
    """Return the library, or the arguments of an OpUnavailable.

    A cached exception would keep the frames of its first caller alive by its traceback, and with them a model.
    """
    try:
        recipe = make_recipe(name, capability, torch_cuda)
        return next(filter(None, map(_open, _library_paths(recipe))), None) or _build(recipe)
    except OpUnavailable as error:
        return error.cause, error.remedy, error.log


def _build(recipe: Recipe) -> ctypes.CDLL:
    """Compile into the cache, or, if that cannot be used, into a temporary directory for this process alone."""
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
        if library is not None:  # another process built it while this one waited for the lock
            return library
        if (log.exists() and log.stat().st_mtime_ns) != before:  # another process failed meanwhile
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
    """Load a library; return None if it is missing, damaged, or made for another system."""
    try:
        return ctypes.CDLL(str(path)) if _is_usable(path) else None
    except OSError:
        return None


def _is_usable(path: Path) -> bool:
    try:
        return path.is_file() and is_intact(path)
    except OSError:  # the disk fails
        return False
