"""Start and end of torch.distributed in any supported environment."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from zerolite.comm.environment import Rendezvous, find_local_rank, read_environment
from zerolite.comm.flight_recorder import blocked
from zerolite.comm.rendezvous import first_barrier, open_store
from zerolite.utils.accelerator import default_device, machine, make_current
from zerolite.utils.listening import is_loopback, loopback_interface
from zerolite.utils.network import GLOO_VARIABLE, interface_towards

logger = logging.getLogger("zerolite")

DEFAULT_TIMEOUT = timedelta(minutes=30)

_started_here = False
_AVOID_RECORD_STREAMS = "TORCH_NCCL_AVOID_RECORD_STREAMS"
_gloo_kept_here = False  # whether this module has chosen gloo's interface, not the user


class _Closable(Protocol):
    def close(self) -> None: ...


_users: weakref.WeakSet[_Closable] = weakref.WeakSet()


def keep_track(user: _Closable) -> None:
    """``user.close()`` will be called before the process group is destroyed. Not kept alive."""
    _users.add(user)


SECOND_GROUP = "zerolite second group"  # the description of the groups that second_group makes
GATHERS = "gathers"  # what a second group is for, unless it says otherwise
_second_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, str], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def second_group(parent: dist.ProcessGroup, backend: str, purpose: str = GATHERS) -> dist.ProcessGroup:
    """A process group of ``parent``'s ranks, with its timeout, of one ``backend`` (a name such as "gloo").

    The same one at every call with the same ``purpose``: it is kept as long as ``parent``, since ending a group may
    wait for other ranks, and it is unknown when they would collect the engine that used it. Called on all ranks of
    ``parent``, in the order of their collectives.
    """
    known = _second_groups.setdefault(parent, {})
    key = (backend, purpose)
    if key not in known:
        ranks = dist.get_process_group_ranks(parent)
        with blocked(("new_group", purpose, len(ranks), None, 0)):
            options = group_options(backend, purpose, timeout_of(parent))
            known[key] = _new_group_within(parent, ranks, backend, options)
    return known[key]


def group_options(backend: str, purpose: str, timeout: timedelta) -> Any:
    """Options of the process group that :func:`second_group` makes, or None for torch's own.

    The gathers of NCCL run on a stream of high priority. The next layer waits for them, while their blocks compete with
    those of the layer under way, which fill the device. Nothing waits for reductions that soon.
    """
    if backend != "nccl" or purpose != GATHERS:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # new_group compares it with its own and warns
    return options


def new_group_within(parent: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A process group of some of ``parent``'s ranks (numbers among all processes), with its timeout and backend; None
    on
    the others. Called on all ranks of ``parent``, in the order of their collectives."""
    with blocked(("new_group", "stages", len(ranks), None, 0)):
        return _new_group_within(parent, list(ranks), None, None)


def _new_group_within(parent: dist.ProcessGroup, ranks: list[int], backend: str | None, options: object) -> Any:
    """torch calls a group that its members alone make by a hash of their ranks and of how many groups a rank has, and
    waits for ever where they have different numbers: so the largest one is agreed on, and the rest is made up."""
    everywhere = len(dist.get_process_group_ranks(parent)) == dist.get_world_size()
    if everywhere and len(ranks) == dist.get_world_size():
        return dist.new_group(ranks, timeout_of(parent), backend, options, group_desc=SECOND_GROUP)
    names: Any = dist.distributed_c10d._world.pg_names
    on_host = any(device.type == "cpu" for device in parent._device_types)
    most = torch.tensor([len(names)], device="cpu" if on_host else "cuda")
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=parent)
    if dist.get_rank() not in ranks:
        return None
    made_up = [object() for _ in range(int(most) - len(names))]
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
    for device in group._device_types:
        timeout = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if timeout is not None:
            return timeout
    return DEFAULT_TIMEOUT


def nccl_environment(torch_version: TorchVersion, env: Mapping[str, str]) -> dict[str, str]:
    """Variables that NCCL's process groups of this torch need and ``env`` does not set.

    Before 2.8, torch lets the caching allocator hold memory that a collective has used until the communication stream
    has passed an event, which makes the peak depend on timing. With the variable, as in later versions by default, the
    tensors are kept until the collective has been waited for; zerolite keeps them that long itself.
    """
    old = torch_version < "2.8" and _AVOID_RECORD_STREAMS not in env
    return {_AVOID_RECORD_STREAMS: "1"} if old else {}


def init_distributed(
    backend: str | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: timedelta | float | None = None,
) -> None:
    """Start torch.distributed; harmless if it runs already.

    With ``init_method`` (``env://``, ``tcp://host:port``, ``file:///path``) and, for tcp and file, ``rank`` and
    ``world_size``: as ``torch.distributed.init_process_group``. With nothing given: from the environment of torchrun,
    mpirun or srun, or else as one process on its own, without any port. ``backend`` defaults to NCCL for CUDA tensors
    (gloo beside it for CPU tensors) where CUDA is usable, and to gloo elsewhere. ``timeout`` is a timedelta or
    seconds, 30 minutes by default: how long ranks wait for each other, here (rank 0 may have data to load first) and
    in each collective.

    Raises ValueError for arguments or variables that are incomplete or contradict each other; RuntimeError, on all
    ranks that have come, if others do not come in time (they are named; a warning does so after 30 s and then every
    minute), if two processes have the same rank, if they differ in ``world_size``, or if rank 0 cannot be reached.
    Called on all ranks; ``zerolite.initialize`` calls it first.
    """
    global _started_here
    if dist.is_initialized() or not machine().joins_jobs:
        return
    if not dist.is_available():
        raise RuntimeError("init_distributed: this build of torch has no torch.distributed; install one that has it")
    # Its functions take the default group as a default argument, evaluated at import; torch imports it by the way
    # with the first optimizer. Imported before there is a group, it cannot keep that group and its threads alive
    # after destroy().
    importlib.import_module("torch.distributed.nn.functional")
    if timeout is not None and not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=float(timeout))
    timeout = timeout or DEFAULT_TIMEOUT
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    _let_gloo_wait(backend)
    os.environ.update(nccl_environment(torch.__version__, os.environ))
    if init_method is not None and init_method != "env://":
        rank, world_size = _checked_place(init_method, rank, world_size)
        _start(backend, init_method, rank, world_size, timeout)
    else:
        _start_from_environment(backend, rank, world_size, timeout)
    _started_here = True
    make_current(default_device(local_rank()))


def destroy() -> None:
    """End what :func:`init_distributed` started: process groups, their threads, their sockets. Called on all ranks,
    after the last step. A group that the caller started themselves is left alone. Waits for checkpoints that are being
    saved in the background, and raises CheckpointError if that goes wrong."""
    global _started_here, _gloo_kept_here
    failed: Exception | None = None
    if _started_here and dist.is_initialized():
        for user in list(_users):
            try:
                user.close()
            except Exception as error:  # of a save in the background: the group ends all the same
                failed = error
        _second_groups.clear()
        backends = _cpu_backends()
        dist.destroy_process_group()
        # A backend waits for its threads, and a thread that drops its last tensor waits for Python's lock. A backend
        # that ends here lets go of the lock. Within a group of torch 2.6 it does not, and would wait for ever.
        del backends
        if _gloo_kept_here:  # another group may reach other machines
            os.environ.pop(GLOO_VARIABLE, None)
            _gloo_kept_here = False
        gc.collect()  # engines are cycles; what is left of them holds the group, whose threads end with it
    _started_here = False
    if failed is not None:
        raise failed


def _cpu_backends() -> list[object]:
    """Return the backends for CPU tensors of all process groups."""
    groups: Any = dist.distributed_c10d._world.pg_names
    devices = [(group, device) for group in groups for device in group._device_types]
    return [group._get_backend(device) for group, device in devices if device.type == "cpu"]


def local_rank(env: Mapping[str, str] | None = None) -> int:
    """This process's place on its host, as its launcher says it; the rank where none does (one host)."""
    found = find_local_rank(os.environ if env is None else env)
    if found is not None:
        return found
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
    _keep_gloo_here(urlparse(init_method).hostname, world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _keep_gloo_here(host: str | None, world_size: int) -> None:
    """Have gloo listen on the interface that leads to rank 0's host, and on the loopback interface alone where all
    ranks are on one machine, unless the user has chosen one. It would listen on the address of the host's name, which
    many machines take for 127.0.1.1, where no other finds them."""
    global _gloo_kept_here
    if GLOO_VARIABLE in os.environ:
        return
    one_machine = is_loopback(host or "") or os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
    interface = loopback_interface() if one_machine else None
    if host and not one_machine:
        with contextlib.suppress(OSError):  # a sandbox that does not tell of its interfaces
            interface = interface_towards(host)
    if interface is not None:
        os.environ[GLOO_VARIABLE] = interface
        _gloo_kept_here = True


def _let_gloo_wait(backend: str) -> None:
    """Have gloo beside NCCL connect two ranks when they first speak to each other: many jobs never use it, and it would
    connect each rank to all others. Older versions of torch do not know the variable."""
    if "nccl" in backend:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def _checked_place(init_method: str, rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None or world_size is None:
        raise ValueError(
            f"init_distributed: init_method={init_method!r} needs rank and world_size, got rank={rank}, "
            f"world_size={world_size}"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"init_distributed: expected 0 <= rank < world_size, got rank={rank}, world_size={world_size}")
    return rank, world_size
