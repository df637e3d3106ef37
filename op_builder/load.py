"""`load` and `status`: from the name of an op to a library loaded in this process."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from .build import Recipe, build_timeout_s, compiled, failure, make_recipe
from .errors import INCOMPLETE, OpUnavailable
from .ops import OPS
from .store import build_lock, is_whole, open_store, put
from .tools import Command, check_tools, find_compilers

NO_CACHE = "the cache cannot be used, so every process builds for itself in a temporary directory"
_remarks: dict[Recipe, str] = {}  # what this process has built in a temporary directory, and why
PREBUILT = Path(__file__).resolve().parent / "prebuilt"
_one_thread = threading.Lock()


def _renew_lock() -> None:
    """Make a new lock in the child of a fork, where the thread that held the lock does not exist."""
    global _one_thread
    _one_thread = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


@dataclass(frozen=True)
class OpStatus:
    """Facts about an op that need no build.

    Attributes:
        name: that of the op.
        compatible: it is built, or can be built here as far as can be told.
        reason: why it is not compatible; where it is, what is remarkable (the cache cannot be used); otherwise empty.
        path: the library for the present sources, flags and compiler; None if it is not built.
    """

    name: str
    compatible: bool
    reason: str
    path: Path | None

    @property
    def built(self) -> bool:
        return self.path is not None


def csrc_path() -> Path:
    """Return the directory of the kernel sources, in a checkout and in an installed wheel."""
    path = Path(__file__).resolve().parent.parent / "csrc"
    if not path.is_dir():
        raise FileNotFoundError(f"expected the kernel sources in {path}: zerolite is incomplete, install it again")
    return path


def load(
    name: str, *, capability: tuple[int, int] | None = None, torch_cuda: str | None = None, csrc: Path | None = None
) -> ctypes.CDLL:
    """Return a library of kernels, which is compiled first if there is none for the present sources and compiler.

    The first call decides for the whole process, also that the library cannot be had. Any number of threads and
    processes may call it at once; one of them compiles.

    Args:
        name: a key of `OPS`.
        capability: compute capability of the GPU as (major, minor); a CUDA op needs it.
        torch_cuda: `torch.version.cuda`, whose major version the CUDA compiler must share; None does not compare.
        csrc: the directory of the sources, by default `csrc_path()`.

    Raises:
        OpUnavailable: it cannot be had here; `cause` and `remedy` say why and what to do.
    """
    _check_enabled(name)
    with _one_thread:  # record locks do not keep the threads of one process apart
        found = _load(name, capability, torch_cuda, csrc)
    if isinstance(found, ctypes.CDLL):
        return found
    raise OpUnavailable(*found)


def status(
    name: str, *, capability: tuple[int, int] | None = None, torch_cuda: str | None = None, csrc: Path | None = None
) -> OpStatus:
    """Say whether an op can be used here, why not, and where it is, without building it. Arguments as of `load`."""
    try:
        _check_enabled(name)
        recipe = _recipe(name, capability, torch_cuda, csrc)
        path, remark = _find(recipe, torch_cuda)
    except OpUnavailable as error:
        return OpStatus(name, False, str(error), None)
    return OpStatus(name, True, remark or _remarks.get(recipe, ""), path)


def build_into(
    directory: Path, name: str, *, capability: tuple[int, int] | None = None, csrc: Path | None = None
) -> Path:
    """Compile an op into a directory and return the library's path. This is how a wheel gets its library, and how a
    CUDA kernel is compiled where no GPU is. Arguments as of `load`."""
    recipe = _recipe(name, capability, None, csrc)
    compilers = find_compilers(recipe.op, None)
    check_tools(recipe.op, compilers, None)
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"{recipe.prefix}.so"
    with compiled(recipe, compilers) as library:
        put(library, target)
    return target


def _check_enabled(name: str) -> None:
    if os.environ.get("ZEROLITE_KERNELS") == "0":
        cause = f"ZEROLITE_KERNELS=0 says that {name} is neither built nor loaded."
        raise OpUnavailable(cause, "Unset it to use zerolite's kernels.")


def _recipe(name: str, capability: tuple[int, int] | None, torch_cuda: str | None, csrc: Path | None) -> Recipe:
    if name not in OPS:
        raise ValueError(f"there is no op {name!r}; there are {', '.join(sorted(OPS))}")
    try:
        return make_recipe(OPS[name], csrc_path() if csrc is None else csrc.absolute(), capability, torch_cuda)
    except OSError as error:
        raise OpUnavailable(f"A kernel source cannot be read: {error}.", INCOMPLETE) from error


def _find(recipe: Recipe, torch_cuda: str | None) -> tuple[Path | None, str]:
    """Return the library that `load` would take, None if it would compile; and what is remarkable about the cache."""
    prebuilt = PREBUILT / f"{recipe.prefix}.so"
    if is_whole(prebuilt):
        return prebuilt, ""
    stored, remark = _stored(recipe)
    try:
        compilers = find_compilers(recipe.op, torch_cuda)
        for path in stored:
            if path.name == recipe.file_name(compilers):
                return path, ""
        check_tools(recipe.op, compilers, torch_cuda)
    except OpUnavailable:
        if stored:
            return stored[0], ""
        raise
    return None, remark


def _stored(recipe: Recipe) -> tuple[list[Path], str]:
    """Return the libraries that any compiler made of these very sources, newest first, and why there is no cache."""
    try:
        paths = [path for path in open_store().glob(f"{recipe.prefix}-*.so") if is_whole(path)]
        return sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True), ""
    except OSError as error:
        return [], f"{NO_CACHE}: {error}"


@functools.cache
def _load(
    name: str, capability: tuple[int, int] | None, torch_cuda: str | None, csrc: Path | None
) -> ctypes.CDLL | tuple[str, str, Path | None]:
    """Return the library, or what an OpUnavailable is made of: one that is kept would keep the frames of its first
    caller, and with them a model."""
    try:
        recipe = _recipe(name, capability, torch_cuda, csrc)
        library = _open(_find(recipe, torch_cuda)[0])
    except OpUnavailable as error:
        return error.cause, error.remedy, error.log
    try:
        return library or _build(recipe, find_compilers(recipe.op, torch_cuda))
    except OpUnavailable as error:
        others = (_open(path) for path in _stored(recipe)[0])
        why = error.cause, error.remedy, error.log
        return next((library for library in others if library is not None), why)


def _build(recipe: Recipe, compilers: tuple[Command, ...]) -> ctypes.CDLL:
    """Compile into the cache. Without a cache compile for this process alone, in a temporary directory."""
    try:
        return _build_stored(recipe, compilers, open_store() / recipe.file_name(compilers))
    except OSError as error:
        _remarks[recipe] = f"{NO_CACHE}: {error}"
    try:
        with compiled(recipe, compilers) as library:
            return _open_built(recipe, library)
    except OSError as error:
        raise OpUnavailable(
            f"There is no directory to build {recipe.op.name} in: {_remarks[recipe]}; and there: {error}.",
            "Set ZEROLITE_CACHE_DIR to a directory of yours with some MB of room.",
        ) from error


def _build_stored(recipe: Recipe, compilers: tuple[Command, ...], target: Path) -> ctypes.CDLL:
    log = target.with_suffix(".log")
    before = log.exists() and log.stat().st_mtime_ns
    with build_lock(target.with_suffix(".lock"), 2 * build_timeout_s()):
        library = _open(target)
        if library is not None:  # another process has built it meanwhile
            return library
        if (log.exists() and log.stat().st_mtime_ns) != before:  # another process has failed, and so would this one
            raise failure(recipe.op, compilers, "failed", log)
        with compiled(recipe, compilers, log) as built:
            put(built, target)
        log.unlink(missing_ok=True)
        return _open_built(recipe, target)


def _open(path: Path | None) -> ctypes.CDLL | None:
    """Load a library if it is there, whole, and of this system."""
    try:
        return ctypes.CDLL(str(path)) if path is not None and is_whole(path) else None
    except OSError:
        return None


def _open_built(recipe: Recipe, path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise OpUnavailable(
            f"{recipe.op.name} was compiled, and loading it failed: {error}.",
            "Set ZEROLITE_CACHE_DIR to a directory on a file system that allows programs (not mounted noexec), and CXX "
            "to a compiler whose libraries are installed here.",
        ) from error
