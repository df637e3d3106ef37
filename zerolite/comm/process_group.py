"""Start and end of torch.distributed in any supported environment."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import os
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from zerolite.comm.environment import Rendezvous, find_local_rank, read_environment
from zerolite.comm.flight_recorder import blocked, collective
from zerolite.comm.rendezvous import first_barrier, open_store
from zerolite.utils.accelerator import current_platform, default_device, make_current
from zerolite.utils.network import GLOO_VARIABLE, interface_towards, is_loopback, loopback_interface
from zerolite.utils.torch_private import backends_of, launched_collectives, process_groups
from zerolite.utils.torch_private import timeout_of as backend_timeout

logger = logging.getLogger("zerolite")

DEFAULT_TIMEOUT = timedelta(minutes=30)

_started_here = False
_gloo_kept_here = False  # this module has chosen gloo's interface, not the user


class _Closable(Protocol):
    def close(self) -> None: ...


_users: weakref.WeakSet[_Closable] = weakref.WeakSet()


def keep_track(user: _Closable) -> None:
    """Call ``user.close()`` before the process group is destroyed. It is not kept alive."""
    _users.add(user)


_before_end: list[Callable[[], object]] = []


def before_groups_end(notify: Callable[[], object]) -> None:
    """Call ``notify()`` before all process groups end, by :func:`destroy` or by torch's ``destroy_process_group``."""
    if not _before_end:
        destroy_groups = dist.destroy_process_group

        @functools.wraps(destroy_groups)
        def destroy_process_group(group: Any = None) -> None:
            if group in (None, dist.group.WORLD):  # engines communicate on none that a program has made
                _notify_of_end()
            destroy_groups(group)

        modules: list[Any] = [dist, distributed_c10d]
        for module in modules:
            module.destroy_process_group = destroy_process_group
    _before_end.append(notify)


def _notify_of_end() -> None:
    for notify in _before_end:
        notify()


SECOND_GROUP = "zerolite second group"  # description of the groups that second_group makes
GATHERS = "gathers"  # default purpose of a second group
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, Any]] = weakref.WeakKeyDictionary()
_last_number = 0  # of groups, in the name of one that this process has made
Made = TypeVar("Made")


def made_once(parent: dist.ProcessGroup, key: Hashable, make: Callable[[], Made]) -> Made:
    """Return what ``make()`` has returned for this ``key``: groups of ranks of ``parent``.

    They live as long as ``parent``, not as their engines. The end of a group may wait for other ranks, but Python may
    collect an engine at different times on different ranks.
    """
    known = _made.setdefault(parent, {})
    if key not in known:
        known[key] = make()
    made: Made = known[key]
    return made


@collective
def engine_group() -> dist.ProcessGroup | None:
    """Return the group of all processes on which engines communicate; None without torch.distributed.

    A program may launch collectives of its own in a backward (SyncBatchNorm, an all-to-all) on torch's default group,
    while reductions are launched when this rank's gradients have come. In one group the ranks would mix the two in
    different orders.
    """
    world = dist.group.WORLD
    if world is None or dist.get_world_size() == 1:
        return world
    _let_gloo_wait(str(dist.get_backend_config(world)))  # the user may have started torch.distributed
    return second_group(world, None, "engines")


def program_collectives() -> int:
    """Return the number of collectives that this rank has launched on groups that are not zerolite's, if their backends
    count. Messages between two ranks are not counted."""
    return sum(launched_collectives(group) for group in process_groups() if group.group_desc != SECOND_GROUP)


@collective
def second_group(parent: dist.ProcessGroup, backend: str | None, purpose: str = GATHERS) -> dist.ProcessGroup:
    """Return a process group of ``parent``'s ranks, with its timeout and one ``backend`` (a name such as "gloo"); None:
    its backends.

    Every call with the same ``purpose`` returns the same group.
    """

    def make() -> dist.ProcessGroup:
        ranks = dist.get_process_group_ranks(parent)
        options = group_options(backend, purpose, timeout_of(parent))
        return _new_group_within(parent, ranks, purpose, backend, options)

    return made_once(parent, (backend, purpose), make)


def group_options(backend: str | None, purpose: str, timeout: timedelta) -> Any:
    """Return the options of the process group that :func:`second_group` makes; None for torch's own.

    NCCL's gathers run on a stream of high priority. The next layer waits for them, while they compete with the kernels
    of the current layer, which fill the device. Nothing waits for reductions that soon.
    """
    if backend != "nccl" or purpose != GATHERS:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # new_group compares it with its own and warns
    return options


@collective
def group_within(
    parent: dist.ProcessGroup, ranks: Sequence[int], purpose: str = "some ranks"
) -> dist.ProcessGroup | None:
    """Return a process group of some of ``parent``'s ranks (global), with its timeout and backend; None on other ranks.

    Of all ranks of ``parent`` the first call is made, at once for one set of ranks or for several that do not overlap.
    Calls with equal arguments return one group. What is launched in other orders needs another ``purpose``.
    """
    return made_once(parent, (purpose, *ranks), lambda: _new_group_within(parent, list(ranks), purpose, None, None))


def _new_group_within(
    parent: dist.ProcessGroup, ranks: list[int], purpose: str, backend: str | None, options: object
) -> Any:
    """Make a group without ranks outside of ``parent``.

    torch names such a group by a hash of its ranks and the number of groups that this rank has. If the numbers differ,
    ranks look for different names and wait for ever. If groups of the same ranks have the same number, they have the
    same name. So all ranks first agree on the largest number that none of them has used, and fill up their own with
    placeholders.
    """
    global _last_number
    everywhere = len(dist.get_process_group_ranks(parent)) == dist.get_world_size()
    with blocked(("new_group", purpose, len(ranks), None, 0)):
        if everywhere and len(ranks) == dist.get_world_size():
            return dist.new_group(ranks, timeout_of(parent), backend, options, group_desc=SECOND_GROUP)
        names = process_groups()
        number = max(len(names), _last_number + 1)  # a program may have ended groups of its own
        most = torch.tensor([number], device="cpu" if "cpu" in dict(backends_of(parent)) else "cuda")
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=parent)
        _last_number = int(most)
        if dist.get_rank() not in ranks:
            return None
        made_up = [object() for _ in range(_last_number - len(names))]
        names.update(dict.fromkeys(made_up, ""))
        try:
            return dist.new_group(
                ranks,
                timeout=timeout_of(parent),
                backend=backend,
                pg_options=options,
                use_local_synchronization=True,  # only these ranks are here
                group_desc=SECOND_GROUP,
            )
        finally:
            for name in made_up:
                del names[name]


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the time that ranks of ``group`` wait for each other in a collective."""
    return backend_timeout(group, DEFAULT_TIMEOUT)


@collective
def init_distributed(
    backend: str | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: timedelta | float | None = None,
) -> None:
    """Start torch.distributed; harmless if it runs already. ``zerolite.initialize`` calls it first.

    Without arguments it reads the environment of torchrun, mpirun or srun; without such an environment it starts as a
    single process, without any port.

    Args:
        backend: default: NCCL for CUDA tensors (and gloo for CPU tensors) if CUDA is usable, else gloo.
        init_method: ``env://``, ``tcp://host:port`` or ``file:///path``, as in
            ``torch.distributed.init_process_group``.
        rank: for tcp and file.
        world_size: for tcp and file.
        timeout: timedelta or seconds that ranks wait for each other, here and in each collective; default 30 minutes,
            because rank 0 may have data to load first.

    Raises:
        ValueError: arguments or variables are incomplete or contradict each other.
        RuntimeError: on all ranks that have come. Other ranks do not come in time (a warning names them after 30 s and
            then every minute), rank 0 cannot be reached, two processes have the same rank, or they differ in
            ``world_size``.
    """
    global _started_here
    if dist.is_initialized() or not current_platform().joins_jobs:
        return
    if not dist.is_available():
        raise RuntimeError("init_distributed: this build of torch has no torch.distributed; install one that has it")
    # The functions of this module have the default group as a default argument, evaluated at import. torch imports it
    # with the first optimizer. Import it now, before there is a group: later it would keep the group and its threads
    # alive after destroy().
    importlib.import_module("torch.distributed.nn.functional")
    if timeout is not None and not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=float(timeout))
    timeout = timeout or DEFAULT_TIMEOUT
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    _let_gloo_wait(backend)
    if init_method is not None and init_method != "env://":
        rank, world_size = _check_rank(init_method, rank, world_size)
        _start(backend, init_method, rank, world_size, timeout)
    else:
        _start_from_environment(backend, rank, world_size, timeout)
    _started_here = True
    make_current(default_device(local_rank()))


@collective
def destroy() -> None:
    """End everything that :func:`init_distributed` started: process groups, their threads, their sockets.

    Called after the last step. A group that the caller started is left alone. It waits for checkpoints that are being
    saved in the background, and raises CheckpointError if one fails.
    """
    global _started_here, _gloo_kept_here
    failed: Exception | None = None
    if _started_here and dist.is_initialized():
        _notify_of_end()
        for user in list(_users):
            try:
                user.close()
            except Exception as error:  # a save in the background has failed: the group ends nevertheless
                failed = error
        _made.clear()
        backends = _cpu_backends()
        dist.destroy_process_group()
        # The destructor of a backend waits for its threads, and a thread that frees its last tensor waits for the GIL.
        # Here the destructor releases the GIL. If the group freed it, in torch 2.6, it would not, and wait for ever.
        del backends
        if _gloo_kept_here:  # another group may reach other machines
            os.environ.pop(GLOO_VARIABLE, None)
            _gloo_kept_here = False
        gc.collect()  # engines are reference cycles that hold the group, and its threads end only with the group
    _started_here = False
    if failed is not None:
        raise failed


def _cpu_backends() -> list[object]:
    """Return the backends for CPU tensors of all process groups."""
    return [backend for group in process_groups() for device, backend in backends_of(group) if device == "cpu"]


def local_rank(env: Mapping[str, str] | None = None) -> int:
    """Return this process's number on its host, from its launcher; its rank if no launcher says it (one host)."""
    local_rank = find_local_rank(os.environ if env is None else env)
    if local_rank is not None:
        return local_rank
    return dist.get_rank() if dist.is_initialized() else 0


def _start_from_environment(backend: str, rank: int | None, world_size: int | None, timeout: timedelta) -> None:
    if (rank is None) != (world_size is None):
        raise ValueError(
            f"init_distributed: expected both rank and world_size or neither, got rank={rank}, world_size={world_size}"
        )
    found = read_environment(os.environ)
    if rank is not None and world_size is not None:
        address = found or Rendezvous(rank, world_size, rank, "127.0.0.1", 29500)
        found = Rendezvous(rank, world_size, address.local_rank, address.master_addr, address.master_port)
        address_known = "MASTER_ADDR" in os.environ or world_size == 1
        if not address_known:
            raise ValueError(
                "init_distributed: rank and world_size were given without an address; set MASTER_ADDR and "
                "MASTER_PORT, or pass "
                "init_method='tcp://host:port'"
            )
    if found is None or (found.world_size == 1 and "MASTER_ADDR" not in os.environ):
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    os.environ.setdefault("MASTER_ADDR", found.master_addr)
    os.environ.setdefault("MASTER_PORT", str(found.master_port))
    name = found.master_addr.strip("[]")
    host = f"[{name}]" if ":" in name else name
    _start(backend, f"tcp://{host}:{found.master_port}", found.rank, found.world_size, timeout)


def _start(backend: str, init_method: str, rank: int, world_size: int, timeout: timedelta) -> None:
    store = open_store(init_method, rank, world_size, timeout)
    first_barrier(store, rank, world_size, timeout.total_seconds())
    # Gloo reads its interface from the environment when the group is made.
    _keep_gloo_here(urlparse(init_method).hostname, world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _keep_gloo_here(host: str | None, world_size: int) -> None:
    """Let gloo listen on the interface that leads to rank 0's host, or on the loopback interface if all ranks are on
    one host.

    By default gloo listens on the address of the host's name. Many machines map their name to 127.0.1.1, where no other
    machine can reach it. An interface that the user has chosen is kept.
    """
    global _gloo_kept_here
    if GLOO_VARIABLE in os.environ:
        return
    one_machine = is_loopback(host or "") or os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
    interface = None
    with contextlib.suppress(OSError):  # a sandbox that does not tell of its interfaces
        if one_machine:
            interface = loopback_interface()
        elif host:
            interface = interface_towards(host)
    if interface is not None:
        os.environ[GLOO_VARIABLE] = interface
        _gloo_kept_here = True


def _let_gloo_wait(backend: str) -> None:
    """Let gloo beside NCCL connect two ranks only when they first communicate.

    Many jobs never use gloo, and otherwise each rank would connect to all others. Older versions of torch ignore the
    variable.
    """
    if "nccl" in backend:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def _check_rank(init_method: str, rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None or world_size is None:
        raise ValueError(
            f"init_distributed: init_method={init_method!r} needs rank and world_size, got rank={rank}, "
            f"world_size={world_size}"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"init_distributed: expected 0 <= rank < world_size, got rank={rank}, world_size={world_size}")
    return rank, world_size
