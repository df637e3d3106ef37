"""Choice of the communicator for a process group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from zerolite.comm.communicator import Communicator, NativeCommunicator
from zerolite.comm.flight_recorder import collective
from zerolite.comm.gloo import GlooCommunicator
from zerolite.comm.host_memory import same_host
from zerolite.comm.process_group import engine_group
from zerolite.comm.shared_memory import SharedMemoryCommunicator
from zerolite.comm.transport import DryTransport, ProcessGroupTransport

_factories: list[Callable[[int, int], Communicator]] = []


@collective
def create_communicator(device: torch.device, group: dist.ProcessGroup | None = None) -> Communicator:
    """Return the communicator of ``group`` for tensors on ``device``.

    Args:
        group: default: all processes, in the group of :func:`~zerolite.comm.process_group.engine_group`.
    """
    if _factories:
        of = group or dist.group.WORLD
        return _factories[-1](*((0, 1) if of is None else (dist.get_rank(of), dist.get_world_size(of))))
    group = group or engine_group()
    assert group is not None, "create_communicator is called after init_distributed"
    transport = ProcessGroupTransport(group)
    if transport.world_size == 1:
        return Communicator(transport)
    if _backend_name(group, device) == "gloo":
        # Copies in memory are faster than messages over gloo's sockets.
        if device.type == "cpu" and same_host(group):
            return SharedMemoryCommunicator(transport)
        return GlooCommunicator(transport)
    return NativeCommunicator(transport)


def dry_communicator(kind: str, rank: int, world_size: int) -> Communicator:
    """Make the communicator of rank ``rank`` of ``world_size`` over a transport that sends nothing.

    Buffers, copies, sums and records are the same; values mean nothing, and tensors may be fake (torch.FakeTensorMode).

    Args:
        kind: "nccl", "gloo" (messages between hosts) or "shared_memory" (the ranks of one host).
        rank: its rank.
        world_size: number of ranks.
    """
    transport = DryTransport(rank, world_size)
    if world_size == 1:
        return Communicator(transport)
    return _KINDS[kind](transport)


_KINDS: dict[str, Callable[[DryTransport], Communicator]] = {
    "nccl": NativeCommunicator,
    "gloo": GlooCommunicator,
    "shared_memory": SharedMemoryCommunicator,
}


@collective
def second_communicator(comm: Communicator, device: torch.device) -> Communicator:
    """Return a communicator of ``comm``'s ranks and kind for tensors on ``device``, over a second process group.

    Each communicator's collectives have the same order on all ranks; between the two communicators ranks may order them
    differently. But ranks must not wait for each other in a circle. (Over shared memory a second launch waits for the
    first.) With one process it is ``comm`` itself.

    The group is made once for each parent group and lives as long as that. It is closed with ``comm``.
    """
    made = comm.second("none" if comm.group is None else _backend_name(comm.group, device))
    return made if made is comm else made.serve(comm.dimension, made.is_rank0)


@contextlib.contextmanager
def use_communicator(factory: Callable[[int, int], Communicator]) -> Iterator[None]:
    """Context in which :func:`create_communicator` returns ``factory(rank, world_size)``: for dry runs, measurements
    and tests.

    The factory is called with this process's rank and the size of the group (0 of 1 without torch.distributed). The
    rank and size of the run are those of the communicator that it returns, as in ``use_communicator(lambda rank, world:
    dry_communicator("nccl", 0, 64))``.
    """
    _factories.append(factory)
    try:
        yield
    finally:
        _factories.remove(factory)


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend that serves ``device``: a group may have one per device type, as in 'cpu:gloo,cuda:nccl'."""
    config = str(dist.get_backend_config(group))
    backends = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    return backends.get(device.type, config)
