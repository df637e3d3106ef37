"""Starting and ending torch.distributed from whatever environment the process finds itself in."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

logger = logging.getLogger("zerolite")

DEFAULT_TIMEOUT = timedelta(minutes=30)

_started_here = False


class _Closable(Protocol):
    def close(self) -> None: ...


_users: weakref.WeakSet[_Closable] = weakref.WeakSet()


def keep_track(user: _Closable) -> None:
    """``user.close()`` will be called before the process group is destroyed. Not kept alive."""
    _users.add(user)


SECOND_GROUP = "zerolite second group"  # the description of the groups that second_group makes
_second_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, str], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def second_group(parent: dist.ProcessGroup, backend: str, purpose: str = "gathers") -> dist.ProcessGroup:
    """A process group of ``parent``'s ranks, with its timeout, of one ``backend`` (a name such as "gloo").

    The same one at every call with the same ``purpose``: it is kept as long as ``parent``, since ending a group may
    wait for other ranks, and nobody can say when they would collect the engine that used it. Called on all ranks of
    ``parent``, in the order of their collectives.
    """
    known = _second_groups.setdefault(parent, {})
    key = (backend, purpose)
    if key not in known:
        ranks = dist.get_process_group_ranks(parent)
        known[key] = dist.new_group(
            ranks,
            timeout=_timeout_of(parent),
            backend=backend,
            use_local_synchronization=len(ranks) < dist.get_world_size(),  # only these ranks are here
            group_desc=SECOND_GROUP,
        )
    return known[key]


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    for device in group._device_types:
        timeout = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if timeout is not None:
            return timeout
    return DEFAULT_TIMEOUT


@dataclass(frozen=True)
class Rendezvous:
    """Where this process stands in its job, as read from an environment."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int


def read_environment(env: Mapping[str, str]) -> Rendezvous | None:
    """The rendezvous that ``env`` describes in torchrun's names or SLURM's; None where there is neither.

    Raises ValueError if torchrun's names are incomplete or not numbers.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        missing = [name for name in ("RANK", "WORLD_SIZE") if name not in env]
        if missing:
            raise ValueError(
                f"init_distributed: the environment sets only part of torchrun's variables; {' and '.join(missing)} "
                "missing. Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or none of them for a single process."
            )
        rank, world_size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
        if not 0 <= rank < world_size:
            raise ValueError(
                f"init_distributed: expected 0 <= RANK < WORLD_SIZE, got RANK={rank}, WORLD_SIZE={world_size}"
            )
        return Rendezvous(
            rank,
            world_size,
            _integer(env, "LOCAL_RANK", default=rank),
            env.get("MASTER_ADDR", "127.0.0.1"),
            _integer(env, "MASTER_PORT", default=29500),
        )
    # An interactive SLURM shell also sets SLURM_NTASKS; only a step started by srun sets SLURM_STEP_ID with
    # SLURM_PROCID.
    if "SLURM_PROCID" in env and "SLURM_NTASKS" in env:
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
        job = _integer(env, "SLURM_JOB_ID", default=0)
        return Rendezvous(
            _integer(env, "SLURM_PROCID"),
            _integer(env, "SLURM_NTASKS"),
            _integer(env, "SLURM_LOCALID", default=0),
            env.get("MASTER_ADDR") or first_host(nodes),
            _integer(env, "MASTER_PORT", default=20000 + job % 20000),
        )
    return None


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: ``node[03-05,9],login`` gives ``node03``."""
    match = re.match(r"([^\[,]*)(?:\[([^\]]*)\])?([^,\[]*)", nodelist.strip())
    if not match or not match.group(0):
        raise ValueError(f"init_distributed: expected a SLURM node list such as 'node[01-04]', got {nodelist!r}")
    prefix, ranges, suffix = match.groups()
    if not ranges:
        return prefix + suffix
    return f"{prefix}{re.split('[,-]', ranges)[0]}{suffix}"


def init_distributed(
    backend: str | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: timedelta | float | None = None,
) -> None:
    """Start torch.distributed; harmless if it runs already.

    With ``init_method`` (``env://``, ``tcp://host:port``, ``file:///path``) and, for tcp and file, ``rank`` and
    ``world_size``: as ``torch.distributed.init_process_group``. With nothing given: from torchrun's environment, or
    SLURM's, or else as one process on its own, without any port. ``backend`` defaults to NCCL for CUDA tensors
    (gloo beside it for CPU tensors) where CUDA is usable, and to gloo elsewhere. ``timeout`` is a timedelta or
    seconds, 30 minutes by default.

    Raises ValueError for arguments or variables that are incomplete or contradict each other. Called on all ranks;
    ``zerolite.initialize`` calls it first.
    """
    global _started_here
    if dist.is_initialized():
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
    if init_method not in (None, "env://"):
        rank, world_size = _checked_place(init_method, rank, world_size)
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
    else:
        _start_from_environment(backend, rank, world_size, timeout)
    _started_here = True
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank() % torch.cuda.device_count())


def destroy() -> None:
    """End what :func:`init_distributed` started: process groups, their threads, their sockets. Called on all ranks,
    after the last step. A group that the caller started themselves is left alone. Waits for checkpoints that are being
    saved in the background, and raises CheckpointError if that goes wrong."""
    global _started_here
    failed: Exception | None = None
    if _started_here and dist.is_initialized():
        for user in list(_users):
            try:
                user.close()
            except Exception as error:  # of a save in the background: the group ends all the same
                failed = error
        _second_groups.clear()
        dist.destroy_process_group()
        gc.collect()  # engines are cycles; what is left of them holds the group, whose threads end with it
    _started_here = False
    if failed is not None:
        raise failed


def local_rank(env: Mapping[str, str] | None = None) -> int:
    """This process's place on its host: LOCAL_RANK, SLURM_LOCALID, or the rank where neither is set (one host)."""
    env = os.environ if env is None else env
    if "LOCAL_RANK" in env:
        return _integer(env, "LOCAL_RANK")
    if "SLURM_LOCALID" in env and "RANK" not in env:
        return _integer(env, "SLURM_LOCALID")
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
    dist.init_process_group(
        backend, init_method="env://", rank=found.rank, world_size=found.world_size, timeout=timeout
    )


def _checked_place(init_method: str | None, rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None or world_size is None:
        raise ValueError(
            f"init_distributed: init_method={init_method!r} needs rank and world_size, got rank={rank}, "
            f"world_size={world_size}"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"init_distributed: expected 0 <= rank < world_size, got rank={rank}, world_size={world_size}")
    return rank, world_size


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in env and default is not None:
        return default
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"init_distributed: expected a number in the variable {name}, got {env[name]!r}") from None
