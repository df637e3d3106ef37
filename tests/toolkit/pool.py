"""A persistent pool of distributed workers, so that a distributed test costs milliseconds and not process starts.

One fork server imports torch once; every worker is forked from it. The workers of one pool form the default process
group (gloo, one torch thread each). ``pool.run(function, kwargs)`` calls the function of a module on every rank and
returns the results in rank order.

What can go wrong, and what the test then sees:

- a rank raises: ``CaseFailed`` with the tracebacks of all ranks that raised;
- no worker answers in time: ``CaseTimeout`` with every worker's Python stack;
- a worker dies: ``WorkerDied`` with its rank and its signal or exit code;
- a case leaves an engine or a process group behind: ``CaseFailed``, naming what was left.

After any of these the workers are thrown away and the next ``run`` starts new ones. Workers end when the process that
made the pool ends, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import multiprocessing as mp
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GRACE_SECONDS = 3.0  # how long the other ranks may go on after the first one raised or died
START_SECONDS = 90.0


class CaseFailed(AssertionError):
    """The case raised on at least one rank."""


class CaseTimeout(CaseFailed):
    """At least one rank did not answer in time."""


class WorkerDied(CaseFailed):
    """At least one worker process ended while the case ran."""


def _server_context() -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "tests.toolkit.pool",
            "torch",
            "torch.distributed",
            "torch.nn.functional",
            "torch.optim",
            "torch.distributed.pipelining",
            "pytest",
            "zerolite.engine.initialize",
        ]
    )
    return context


class Pool:
    """``world_size`` workers that share one default process group. Started by the first ``run``."""

    def __init__(self, world_size: int, init_group: bool = True) -> None:
        self.world_size = world_size
        self.init_group = init_group
        self._workers: list[Any] = []
        self._pipes: list[connection.Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._log_starts = [0] * world_size

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers, in rank order; empty while the pool is not started."""
        return [worker.pid for worker in self._workers]

    def run(
        self, function: Callable[..., Any] | str, kwargs: dict[str, Any] | None = None, timeout: float = 60.0
    ) -> list[Any]:
        """Call ``function`` with ``kwargs`` on every rank; return the results in rank order.

        function: one that a module has by its name, or "module:name" where importing that module here would disturb.
        Arguments and results travel by pickle. Raises CaseFailed, CaseTimeout or WorkerDied; the pool is usable
        afterwards in every case.
        """
        if callable(function):
            function = f"{function.__module__}:{function.__qualname__}"
        if not self._workers:
            self._start()
        self._log_starts = [self._log_path(rank).stat().st_size for rank in range(self.world_size)]
        message = pickle.dumps((function, kwargs or {}))
        try:
            for pipe in self._pipes:
                with contextlib.suppress(OSError):  # a dead worker is named by _collect
                    pipe.send_bytes(message)
            replies, failure = self._collect(function, timeout)
        except BaseException:
            self.close()
            raise
        if failure is not None:
            self.close()
            raise failure
        return replies

    def close(self) -> None:
        """Kill the workers. Safe to call at any time, and more than once."""
        workers, self._workers = self._workers, []
        pipes, self._pipes = self._pipes, []
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join()
        for pipe in pipes:
            pipe.close()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _start(self) -> None:
        # One thread each: several workers share the cores, and sums keep one order. The fork server hands its
        # environment on.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._directory = tempfile.TemporaryDirectory(prefix="zerolite-pool-")
        context = _server_context()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            self._log_path(rank).touch()
            args = (rank, self.world_size, self._directory.name, self.init_group, theirs)
            worker = context.Process(
                target=_worker_main, args=args, daemon=True, name=f"pool-{self.world_size}-rank-{rank}"
            )
            with _hidden_main_module():
                worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)
        _, failure = self._collect("start of the pool", START_SECONDS)
        if failure is not None:
            self.close()
            raise failure

    def _log_path(self, rank: int) -> Path:
        assert self._directory is not None
        return Path(self._directory.name) / f"rank{rank}.log"

    def _log_tail(self, rank: int) -> str:
        """Return what the worker printed since the case began, the last 8000 characters of it."""
        with self._log_path(rank).open("rb") as file:
            file.seek(self._log_starts[rank])
            return file.read().decode(errors="replace")[-8000:]

    def _collect(self, function: str, timeout: float) -> tuple[list[Any], CaseFailed | None]:
        """Wait for every rank's reply. Returns the results and what went wrong, if anything did."""
        results: list[Any] = [None] * self.world_size
        errors: dict[int, str] = {}
        dead: dict[int, str] = {}
        waiting = set(range(self.world_size))
        deadline = time.monotonic() + timeout
        while waiting:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            handles: dict[Any, int] = {self._pipes[rank]: rank for rank in waiting}
            handles |= {self._workers[rank].sentinel: rank for rank in waiting}
            for rank in {handles[ready] for ready in connection.wait(list(handles), remaining)}:
                waiting.discard(rank)
                try:
                    if not self._pipes[rank].poll():  # only the sentinel is ready
                        raise EOFError
                    succeeded, value = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    self._workers[rank].join(GRACE_SECONDS)
                    dead[rank] = _exit_reason(self._workers[rank].exitcode)
                else:
                    if succeeded:
                        results[rank] = value
                        continue
                    errors[rank] = value
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if not (waiting or errors or dead):
            return results, None
        return results, self._failure(function, timeout, errors, dead, sorted(waiting))

    def _failure(
        self, function: str, timeout: float, errors: dict[int, str], dead: dict[int, str], waiting: list[int]
    ) -> CaseFailed:
        parts = [f"{function} on {self.world_size} ranks:"]
        parts += [f"--- rank {rank} died: {reason}\n{self._log_tail(rank)}" for rank, reason in sorted(dead.items())]
        parts += [f"--- rank {rank} raised:\n{text}" for rank, text in sorted(errors.items())]
        after = "the first failure above" if errors or dead else f"{timeout:g} s"
        for rank in waiting:
            parts.append(f"--- rank {rank} had not answered after {after}; its stack:\n{self._stack_of(rank)}")
        kind = WorkerDied if dead else CaseFailed if errors else CaseTimeout
        return kind("\n".join(parts))

    def _stack_of(self, rank: int) -> str:
        """Ask a stuck worker for its stack: its signal handler writes every thread's stack to the log."""
        size, pid = self._log_path(rank).stat().st_size, self._workers[rank].pid
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return "(stopped by a signal)"
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR1)
        give_up = time.monotonic() + 3.0
        # The dump ends with the main thread, whose outermost frame is the worker loop.
        while time.monotonic() < give_up and "_worker_main" not in self._log_tail(rank):
            connection.wait([self._workers[rank].sentinel], 0.02)
        return self._log_tail(rank) if self._log_path(rank).stat().st_size > size else "(no answer to SIGUSR1)"


class Pools:
    """One lazily started pool per world size: ``pools(2).run(...)``."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(self, world_size: int) -> Pool:
        return self._pools.setdefault(world_size, Pool(world_size))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@contextlib.contextmanager
def _hidden_main_module() -> Any:
    """Keep multiprocessing from importing the caller's main script (pytest itself) into every worker."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    main.__spec__ = None
    if path is not None:
        del main.__file__
    try:
        yield
    finally:
        main.__spec__ = spec
        if path is not None:
            main.__file__ = path


def _exit_reason(code: int | None) -> str:
    if code is None:
        return "its pipe closed, but it still runs"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


# ---------------------------------------------------------------------------------------------------------------- the
# worker's side


def _worker_main(rank: int, world_size: int, directory: str, init_group: bool, pipe: connection.Connection) -> None:
    _end_with_the_parent()
    log = os.open(os.path.join(directory, f"rank{rank}.log"), os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", buffering=0, closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", buffering=0, closefd=False), write_through=True)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    _reply(pipe, *_guarded(_set_up, rank, world_size, directory, init_group))
    warning_filters = list(warnings.filters)
    environment = dict(os.environ)
    while True:
        try:
            function, kwargs = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        succeeded, value = _guarded(_call, function, kwargs)
        warnings.filters[:] = warning_filters
        os.environ.clear()
        os.environ.update(environment)
        if succeeded:
            clean, complaint = _guarded(_clean, init_group)
            if not clean:
                succeeded, value = (
                    False,
                    f"{function} returned, but did not leave the worker as it found it.\n{complaint}",
                )
        _reply(pipe, succeeded, value)
        del value


def _end_with_the_parent() -> None:
    """No orphans: the kernel kills the worker with the fork server, and a thread watches the process that made the
    pool."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    parent = mp.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _set_up(rank: int, world_size: int, directory: str, init_group: bool) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in names.items()})
    if "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if init_group:
        store = dist.FileStore(os.path.join(directory, "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    random.seed(0)
    torch.manual_seed(0)
    gc.collect()
    gc.freeze()  # what torch brought is permanent: the collection after each case then looks at the case's objects only


def _clean(init_group: bool) -> None:
    """Leave nothing of the last case, or say what could not be removed."""
    import torch
    import torch.distributed as dist

    from zerolite.comm import process_group
    from zerolite.utils.torch_private import compiler_is_used

    gc.collect()
    engine_module = sys.modules.get("zerolite.engine.engine")
    if engine_module is not None:
        engines = [item for item in gc.get_objects() if type(item) is engine_module.Engine]
        assert not engines, f"{len(engines)} engines are still alive; something outside the case refers to them"
    _freeze_new_modules()
    if compiler_is_used():  # the engines of later cases would end their gathers with the step
        torch._dynamo.reset()
    if init_group:
        assert dist.is_initialized(), "the default process group is gone"
        groups = dist.distributed_c10d._world.pg_names
        kept = process_group.SECOND_GROUP  # lives as long as its parent, on purpose
        left = [
            name
            for group, name in groups.items()
            if group is not dist.group.WORLD and group.group_desc != kept and not group.group_desc.startswith("mesh_")
        ]
        assert not left, f"{len(left)} process groups besides the default one are still alive: {left}"
        # A collective that only some ranks launched would now meet the wrong partner: better here than in the next
        # case.
        check = torch.ones(3)
        dist.all_reduce(check)
        assert check.tolist() == [dist.get_world_size()] * 3, f"the default group is out of step: {check.tolist()}"
    random.seed(0)
    torch.manual_seed(0)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)


_known_modules = 0


def _freeze_new_modules() -> None:
    """Freeze the modules that a case has imported, torch's compiler for one: hundreds of thousands of objects, at which
    every collection from here on would look."""
    global _known_modules
    if len(sys.modules) != _known_modules:
        _known_modules = len(sys.modules)
        gc.freeze()


def _call(function: str, kwargs: dict[str, Any]) -> Any:
    module, _, name = function.partition(":")
    called = getattr(importlib.import_module(module), name)
    return getattr(called, "on_rank", called)(**kwargs)  # on_rank: of a test that is decorated with on_ranks


def _guarded(call: Any, *args: Any) -> tuple[bool, Any]:
    try:
        return True, call(*args)
    except BaseException:
        return False, traceback.format_exc()


def _reply(pipe: connection.Connection, succeeded: bool, value: Any) -> None:
    try:
        message = pickle.dumps((succeeded, value))
    except Exception:
        message = pickle.dumps((False, f"the result cannot be pickled:\n{traceback.format_exc()}"))
    pipe.send_bytes(message)
