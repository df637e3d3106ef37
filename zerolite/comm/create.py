"""Choice of the communicator for a process group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from zerolite.comm.communicator import Communicator, NativeCommunicator
from zerolite.comm.gloo import GlooCommunicator
from zerolite.comm.host_memory import same_host
from zerolite.comm.shared_memory import SharedMemoryCommunicator
from zerolite.comm.transport import DryTransport, ProcessGroupTransport

_factories: list[Callable[[int, int], Communicator]] = []


def create_communicator(device: torch.device, group: dist.ProcessGroup | None = None) -> Communicator:
    """The communicator of ``group`` (default: all processes) for tensors on ``device``. Called on all its ranks."""
    group = group or dist.group.WORLD
    if _factories:
        place = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        return _factories[-1](*place)
    assert group is not None, "create_communicator is called after init_distributed"
    transport = ProcessGroupTransport(group)
    if transport.world_size == 1:
        return Communicator(transport)
    if _backend_name(group, device) == "gloo":
        if device.type == "cpu" and same_host(group):
            return SharedMemoryCommunicator(transport)
        return GlooCommunicator(transport)
    return NativeCommunicator(transport)


def dry_communicator(kind: str, rank: int, world_size: int) -> Communicator:
    """Make the communicator of rank ``rank`` of ``world_size``, over a transport that sends nothing: the same buffers,
    copies, sums and notes, and no value that means anything; tensors may be without memory (torch.FakeTensorMode).

    kind: "nccl", "gloo" (messages between hosts) or "shared_memory" (the ranks of one host).
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


def second_communicator(comm: Communicator, device: torch.device) -> Communicator:
    """A communicator of ``comm``'s ranks and kind for tensors on ``device``, over a process group of its own: its
    collectives and ``comm``'s may be launched in a different order on every rank, as long as each one's own order is
    the same and no rank waits for a collective that another launches only after one that it waits for. (Over shared
    memory a second launch waits for the first.) Where there is one process it is ``comm`` itself.

    The group is made once for each parent group and lives as long as that one. Closed with ``comm``. Called on all
    ranks of ``comm``, in the same order as their other collectives.
    """
    made = comm.second("none" if comm.group is None else _backend_name(comm.group, device))
    return made if made is comm else made.serve(comm.dimension, made.main)


@contextlib.contextmanager
def use_communicator(factory: Callable[[int, int], Communicator]) -> Iterator[None]:
    """Inside, :func:`create_communicator` gives ``factory(rank, world_size)``, called with this process's place in
    the group that was asked for (0 of 1 where torch.distributed does not run): for dry runs, measurements and tests.
    Its ``rank`` and ``world_size`` are those of the run, whatever the group's:
    ``use_communicator(lambda rank, world: dry_communicator("nccl", 0, 64))``."""
    _factories.append(factory)
    try:
        yield
    finally:
        _factories.remove(factory)


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that serves ``device``: a group may have one per device type, as in 'cpu:gloo,cuda:nccl'."""
    config = str(dist.get_backend_config(group))
    backends = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    return backends.get(device.type, config)
