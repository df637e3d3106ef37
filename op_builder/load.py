"""`load` and `status`: from the name of an op to a library loaded in this process."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from .errors import CannotStore, OpUnavailable
from .ops import OPS, Op
from .plan import INCOMPLETE, Recipe, make_plan
from .store import identity, is_whole, open_store
from .tools import Program, check_cuda_version, find_cxx, find_ninja, find_nvcc, find_nvrtc

PREBUILT = Path(__file__).resolve().parent / "prebuilt"


@dataclass(frozen=True)
class OpStatus:
    """What is known about an op without building it.

    Attributes:
        name: that of the op.
        compatible: it is built, or can be built here as far as can be told.
        reason: why it is not compatible; where it is, what is remarkable (the cache cannot be used); otherwise empty.
        built: a library for the present sources, flags and compiler exists, or is loaded in this process.
        path: that library; None if there is none, or if it was built in a temporary directory that is gone.
    """

    name: str
    compatible: bool
    reason: str
    built: bool
    path: Path | None


@dataclass(frozen=True)
class _Loaded:
    library: ctypes.CDLL
    path: Path | None
    remark: str


_Request = tuple[str, "tuple[int, int] | None", "str | None", Path]

_loaded: dict[_Request, _Loaded | OpUnavailable] = {}
_lock = threading.Lock()


def _reset_lock() -> None:
    """In the child of a fork the thread that held the lock does not exist."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_lock)


def csrc_path() -> Path:
    """Return the directory of the kernel sources, in a checkout and in an installed wheel.

    Raises:
        FileNotFoundError: the directory is missing, so the installation is incomplete.
    """
    path = Path(__file__).resolve().parent.parent / "csrc"
    if not path.is_dir():
        raise FileNotFoundError(f"expected the kernel sources in {path}, and there is no such directory. {INCOMPLETE}")
    return path


def load(
    name: str,
    *,
    capability: tuple[int, int] | None = None,
    torch_cuda: str | None = None,
    csrc: Path | None = None,
) -> ctypes.CDLL:
    """Return a library of kernels, which is compiled first if there is none for the present sources and compiler.

    The first call decides for the whole process, also that the library cannot be had. Any number of threads and
    processes may call it at once; one of them compiles.

    Args:
        name: "async_io", "cpu_kernels", "cuda_kernels" or "cuda_kernels_nvrtc".
        capability: compute capability of the GPU as (major, minor); a CUDA op needs it.
        torch_cuda: `torch.version.cuda`, whose major version nvcc must share; None does not compare.
        csrc: the directory of the sources, by default `csrc_path()`.

    Raises:
        OpUnavailable: it cannot be had here; `cause` and `remedy` say why and what to do.
    """
    op = _find_op(name)
    _check_enabled(name)
    sources = _find_csrc(csrc)
    request = (name, capability, torch_cuda, sources)
    found = _loaded.get(request)
    if found is None:
        with _lock:
            found = _loaded.get(request)
            if found is None:
                try:
                    found = _load(op, sources, capability, torch_cuda)
                except OpUnavailable as error:
                    found = error
                _loaded[request] = found
    if isinstance(found, OpUnavailable):
        raise OpUnavailable(found.cause, found.remedy, found.log)
    return found.library


def status(
    name: str,
    *,
    capability: tuple[int, int] | None = None,
    torch_cuda: str | None = None,
    csrc: Path | None = None,
) -> OpStatus:
    """Say whether an op can be used here, why not, and where it is, without building it. Arguments as of `load`."""
    op = _find_op(name)
    try:
        _check_enabled(name)
        sources = _find_csrc(csrc)
        found = _loaded.get((name, capability, torch_cuda, sources))
        if isinstance(found, OpUnavailable):
            raise found
        if found is not None:
            return OpStatus(name, True, found.remark, True, found.path)
        plan = make_plan(op, sources, capability, torch_cuda)
        store, remark = _try_store()
        path = _find_prebuilt(plan) or _find_stored(plan, store, torch_cuda)
    except OpUnavailable as error:
        return OpStatus(name, False, str(error), False, None)
    return OpStatus(name, True, remark, path is not None, path)


def build_into(
    directory: Path, name: str, *, capability: tuple[int, int] | None = None, csrc: Path | None = None
) -> Path:
    """Compile an op into a directory, which is made if need be, and return the library's path. This is how a wheel
    gets its library, and how a CUDA kernel is compiled where no GPU is. Arguments as of `load`.

    Raises:
        OpUnavailable: it cannot be compiled here.
        CannotStore: the directory cannot be written to.
    """
    from .compile import build

    plan = make_plan(_find_op(name), _find_csrc(csrc), capability, None)
    compilers = _find_compilers(plan.op, None, None)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotStore(f"{error.strerror}: {directory}") from error
    target = directory / f"{plan.prefix}.so"
    build(plan, compilers, target)
    return target


def _find_op(name: str) -> Op:
    try:
        return OPS[name]
    except KeyError:
        raise ValueError(f"there is no op {name!r}; there are {', '.join(sorted(OPS))}") from None


def _check_enabled(name: str) -> None:
    if os.environ.get("ZEROLITE_KERNELS") == "0":
        raise OpUnavailable(
            f"ZEROLITE_KERNELS=0 says that {name} is neither built nor loaded.",
            "Unset it to use zerolite's kernels.",
        )


def _find_csrc(csrc: Path | None) -> Path:
    try:
        return csrc_path() if csrc is None else csrc.absolute()
    except FileNotFoundError as error:
        raise OpUnavailable(
            f"The kernel sources are missing: {error}", "Without them PyTorch's operations are used."
        ) from error


def _find_compilers(op: Op, store: Path | None, torch_cuda: str | None) -> tuple[Program, ...]:
    """The program that compiles, and for a CUDA op the C++ compiler behind it, or beside it."""
    if op.kind == "cpp":
        return (find_cxx(store),)
    if op.kind == "nvrtc":
        return (find_nvrtc(store, torch_cuda), find_cxx(store))
    nvcc = find_nvcc(store)
    if torch_cuda is not None:
        check_cuda_version(nvcc, torch_cuda)
    return (nvcc, find_cxx(store))


def _load(op: Op, csrc: Path, capability: tuple[int, int] | None, torch_cuda: str | None) -> _Loaded:
    plan = make_plan(op, csrc, capability, torch_cuda)
    path = _find_prebuilt(plan)
    library = _open(path)
    if library is not None:
        return _Loaded(library, path, "")
    store, remark = _try_store()
    try:
        compilers = _find_compilers(op, store, torch_cuda)
        if store is not None:
            try:
                return _load_stored(plan, compilers, store)
            except CannotStore as error:
                remark = _explain(error)
        return _Loaded(_load_from_nowhere(plan, compilers, remark), None, remark)
    except OpUnavailable:
        for path in _find_any_stored(plan, store):
            library = _open(path)
            if library is not None:
                return _Loaded(library, path, "")
        raise


def _load_stored(plan: Recipe, compilers: tuple[Program, ...], store: Path) -> _Loaded:
    """Load from the cache; build if it is not there or is broken."""
    stem = plan.stem(compilers)
    target = store / f"{stem}.so"
    library = _open(target)
    if library is None:
        library = _build_stored(plan, compilers, store, target)
    return _Loaded(library, target, "")


def _build_stored(plan: Recipe, compilers: tuple[Program, ...], store: Path, target: Path) -> ctypes.CDLL:
    from .compile import build, failure, remove_leftovers
    from .turn import take_turn

    log, broken = target.with_suffix(".log"), identity(target)
    log_before = identity(log)
    try:
        with take_turn(target.with_suffix(".lock"), lambda: identity(target) not in (None, broken)) as turn:
            library = _open(target)
            if library is not None:
                return library
            if turn.held:
                if identity(log) not in (None, log_before):  # whom we waited for has failed, and so should we
                    raise failure(plan, compilers, "failed", log)
                remove_leftovers(store, target.stem)
            build(plan, compilers, target, turn.beat)
            return _open_or_raise(plan, target)
    except OSError as error:
        raise CannotStore(f"{error.strerror}: {error.filename or store}") from error


def _load_from_nowhere(plan: Recipe, compilers: tuple[Program, ...], why: str) -> ctypes.CDLL:
    """Build for this process alone, in a directory that only this user can see and that is gone afterwards."""
    from .compile import build

    try:
        directory = Path(tempfile.mkdtemp(prefix="zerolite-"))
        library = None
        try:
            target = directory / f"{plan.prefix}.so"
            build(plan, compilers, target)
            library = _open_or_raise(plan, target)
        finally:
            if library is not None or not target.with_suffix(".log").exists():
                shutil.rmtree(directory, ignore_errors=True)
    except (OSError, CannotStore) as error:
        raise OpUnavailable(
            f"There is no directory to build {plan.op.name} in: {why}; and of the temporary directory: {error}.",
            "Set ZEROLITE_CACHE_DIR to a directory of yours with some MB of room.",
        ) from error
    return library


def _try_store() -> tuple[Path | None, str]:
    """The directory of the cache, or why there is none."""
    try:
        return open_store(), ""
    except CannotStore as error:
        return None, _explain(error)


def _explain(error: CannotStore) -> str:
    return f"the cache cannot be used, so every process builds for itself in a temporary directory: {error}"


def _find_prebuilt(plan: Recipe) -> Path | None:
    path = PREBUILT / f"{plan.prefix}.so"
    return path if is_whole(path) else None


def _find_stored(plan: Recipe, store: Path | None, torch_cuda: str | None) -> Path | None:
    """The library that `load` would take from the cache; None if it would compile.

    Raises:
        OpUnavailable: it would compile, and cannot.
    """
    try:
        compilers = _find_compilers(plan.op, store, torch_cuda)
        path = None if store is None else store / f"{plan.stem(compilers)}.so"
        if path is not None and is_whole(path):
            return path
        find_ninja()
    except OpUnavailable:
        for path in _find_any_stored(plan, store):
            return path
        raise
    return None


def _find_any_stored(plan: Recipe, store: Path | None) -> list[Path]:
    """Libraries that some compiler made of these very sources, newest first: where none can be made, any will do."""
    paths = [] if store is None else [path for path in store.glob(f"{plan.prefix}-*.so") if is_whole(path)]
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _open(path: Path | None) -> ctypes.CDLL | None:
    """Load a library if it is there, whole, and of this system."""
    if path is None or not is_whole(path):
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _open_or_raise(plan: Recipe, path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise OpUnavailable(
            f"{plan.op.name} was compiled, and loading it failed: {error}.",
            "Set ZEROLITE_CACHE_DIR to a directory on a file system that allows programs (not mounted noexec), and CXX "
            "to a compiler whose libraries are installed here.",
        ) from error
