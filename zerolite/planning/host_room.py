"""Check that offloaded states fit into the host's memory and disks."""

from __future__ import annotations

import os
import shutil
import socket
from typing import NamedTuple

import torch

from zerolite.comm import Communicator, HostGroup
from zerolite.config import ZeroliteConfig
from zerolite.planning.available import local_ranks, share_of_host
from zerolite.planning.result import Plan, counted, item_label
from zerolite.utils.memory_tags import COMPUTE
from zerolite.utils.sizes import format_size
from zerolite.zero.stage3.partitioned_parameter import handle_of

_STATES, _STAGED = 24, 24
"""Upper bounds of bytes per parameter: off the device, and staged through a buffer. They are six numbers in fp32 with
states of Adam's size: master, two moments, gradient, parameter, one copy."""

OPTIMIZER, PARAMETERS = "offload_optimizer", "offload_param"


class Room(NamedTuple):
    """Host memory and disk space that this rank may use, in bytes: an equal share of what is free.

    Attributes:
        ranks: number of the job's ranks on this host.
        memory: host memory.
        disks: space at ``nvme_path``, by the name of the config's block; None if the folder does not exist.
    """

    ranks: int
    memory: int
    disks: dict[str, int | None]


class Shortage(NamedTuple):
    """Memory or disk that is too small.

    Attributes:
        reason: clause with the needed and the free bytes.
        remedy: clause with the change to make.
    """

    reason: str
    remedy: str


def offloads(config: ZeroliteConfig) -> bool:
    zero = config.zero_optimization
    return zero.offload_optimizer.enabled or zero.offload_param.enabled


def find_room(model: torch.nn.Module, config: ZeroliteConfig, comm: Communicator) -> Room:
    """Find the host memory and disk space for the engine. Called on all ranks.

    Host memory of ``model`` counts as free, because the engine takes it over.
    """
    ranks = _ranks_here(comm)
    zero = config.zero_optimization
    blocks = ((OPTIMIZER, zero.offload_optimizer), (PARAMETERS, zero.offload_param))
    paths = {name: block.nvme_path for name, block in blocks if block.device == "nvme" and block.nvme_path}
    free = {name: _free(path) for name, path in paths.items()}
    devices = {os.stat(path).st_dev if os.path.exists(path) else None for path in paths.values()}
    shares = ranks * (2 if len(paths) == 2 and len(devices) == 1 else 1)  # both blocks on one disk share it
    disks = {name: None if nbytes is None else nbytes // shares for name, nbytes in free.items()}
    return Room(ranks, share_of_host(ranks) + bytes_of_parameters(model, "cpu"), disks)


def bytes_of_parameters(model: torch.nn.Module, kind: str) -> int:
    """Return the bytes of ``model``'s parameters on devices of type ``kind``, which the engine's buckets replace."""
    own = {}
    for parameter in model.parameters():
        handle = handle_of(parameter)
        tensor = parameter.data if handle is None else handle.shard
        if tensor.device.type == kind and not tensor.is_meta:
            own[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(own.values())


def is_ample(room: Room, config: ZeroliteConfig, numel: int) -> bool:
    """Return True if a model of ``numel`` parameters fits with any optimizer and precision."""
    zero = config.zero_optimization
    staged = zero.offload_optimizer.buffer_count * min(zero.sub_group_size, numel)
    staged += zero.offload_param.buffer_count * min(zero.offload_param.buffer_size, numel)
    disks = all(nbytes is None or nbytes >= _STATES * numel for nbytes in room.disks.values())
    return disks and room.memory >= _STATES * numel + _STAGED * staged


def find_shortage(plan: Plan, room: Room) -> Shortage | None:
    """Return the shortage of host memory or disk for ``plan``'s rank; None if there is none."""
    job, each = describe(plan, counted(plan.world_size, "rank")), f"each of {counted(room.ranks, 'rank')} of a host"
    if plan.host_peak > room.memory:
        items, rest = plan.host or {}, "device memory, or the model before the engine has it"
        named = {item_label(item): nbytes for item, nbytes in items.items()} | {
            rest: plan.host_peak - sum(items.values())
        }
        return Shortage(
            f"{job} {format_size(plan.host_peak)} of host memory on {each}, and {format_size(room.memory)} are left "
            f"for each there: {itemised(named)}",
            'Use fewer ranks on a host or more hosts, a higher zero_optimization.stage, or "nvme" as the device of '
            "offload_optimizer and offload_param",
        )
    disk = plan.disk or {}
    parameters = disk.get(COMPUTE, 0)
    for name, needed in ((OPTIMIZER, sum(disk.values()) - parameters), (PARAMETERS, parameters)):
        free = room.disks.get(name)
        if free is not None and needed > free:
            return Shortage(
                f"{job} {format_size(needed)} at zero_optimization.{name}.nvme_path for {each}, and "
                f"{format_size(free)} are free for each there",
                f"Make room on that disk, set a larger one as zero_optimization.{name}.nvme_path, or use more hosts",
            )
    return None


def describe(plan: Plan, ranks: str, here: str = "") -> str:
    """Return the beginning of a sentence about a job's needs. ``here``: words after the number of parameters."""
    return f"training {plan.model} ({plan.parameters:,} parameters{here}) at ZeRO stage {plan.stage} on {ranks} needs"


def itemised(named: dict[str, int]) -> str:
    """Format names with their bytes, the largest first."""
    largest = sorted(named.items(), key=lambda entry: -entry[1])
    return ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in largest if nbytes > 0)


def _ranks_here(comm: Communicator) -> int:
    """Return the number of the job's ranks on this host."""
    from_launcher = local_ranks(os.environ)
    if from_launcher is not None or comm.world_size == 1:
        return from_launcher or 1
    names = HostGroup(comm, "hosts").gather(socket.gethostname())
    return names.count(names[comm.rank])


def _free(path: str) -> int | None:
    """Return the free bytes of the disk at ``path``; None if the folder does not exist, for which the engine raises."""
    return shutil.disk_usage(path).free if os.path.exists(path) else None
