"""Placement of an engine's states, derived from the config."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import torch

from zerolite.comm import Communicator, HostGroup, RaiseTogether, collective
from zerolite.config import ZeroliteConfig
from zerolite.config.offload import AioConfig, OffloadOptimizerConfig, OffloadParamConfig
from zerolite.offload.placement import DiskPlacement, HostPlacement, OffloadOptions, Placement, Placements
from zerolite.offload.swap_file import SwapFile
from zerolite.ops.async_io import AsyncIO
from zerolite.utils.accelerator import current_platform
from zerolite.utils.memory_tags import DEVICE

logger = logging.getLogger("zerolite")


@collective
def placements_of(config: ZeroliteConfig, device: torch.device, device_kind: str, comm: Communicator) -> Placements:
    """Return the placements that ``zero_optimization`` asks for.

    Args:
        config: the config.
        device: device of the parameters.
        device_kind: type of the device for which memory is managed.
        comm: communicator of all ranks.

    Raises:
        OSError: on all ranks, because one of them cannot make a file in ``nvme_path``.
    """
    zero = config.zero_optimization
    if "nvme" not in (zero.offload_optimizer.device, zero.offload_param.device):
        return _make(config, device, device_kind, comm.rank)
    ranks = RaiseTogether(HostGroup(comm, "offload"), "zerolite.initialize", OSError)
    return ranks.run(lambda: _make(config, device, device_kind, comm.rank))


def check_optimizer(placements: Placements, device_kind: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if ``optimizer`` cannot update parameters on the host. device_kind: type of the device."""
    if device_kind == "cpu":
        where = "on the CPU"
    elif placements.optimizer.location != DEVICE:
        where = "with zero_optimization.offload_optimizer"
    else:
        return
    for index, group in enumerate(optimizer.param_groups):
        if group.get("capturable"):
            raise ValueError(
                f"optimizer.param_groups[{index}]['capturable']: expected false {where}, where the CPU updates and no "
                "CUDA graph captures it, got true; leave it out (optimizer.params.capturable in the config)"
            )


def warn_of_few_threads(placements: Placements, environ: Mapping[str, str]) -> None:
    """Warn if the CPU updates with one thread and could use several: torchrun sets OMP_NUM_THREADS to 1."""
    ranks = int(environ.get("LOCAL_WORLD_SIZE", "1") or 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = cores // max(1, ranks)
    offloads = placements.separate_memory and placements.optimizer.location != DEVICE
    if offloads and torch.get_num_threads() == 1 and threads > 1:
        logger.warning(
            "zero_optimization.offload_optimizer: the CPU updates offloaded states with 1 thread, and %d cores would "
            "do it with %d; set OMP_NUM_THREADS=%d (torchrun sets it to 1; the zerolite command sets it well)",
            cores,
            ranks * threads,
            threads,
        )


def _make(config: ZeroliteConfig, device: torch.device, device_kind: str, rank: int) -> Placements:
    zero = config.zero_optimization
    open_file = _file_opener(config.aio, rank)
    return Placements(
        device,
        optimizer=_placement(zero.offload_optimizer, device, open_file, "offload_optimizer"),
        parameters=_placement(zero.offload_param, device, open_file, "offload_param"),
        separate_memory=device_kind != "cpu",
        options=OffloadOptions(
            zero.offload_optimizer.ratio,
            zero.sub_group_size,
            zero.offload_optimizer.buffer_count,
            zero.offload_param.max_in_cpu,
        ),
    )


def _file_opener(aio: AioConfig, rank: int) -> Callable[[str, str], SwapFile]:
    """Return a function (directory, config key) that makes a swap file of this rank. Its files share one reader and
    writer, because ``aio`` bounds the requests of a rank."""

    @functools.cache
    def async_io() -> AsyncIO:
        return AsyncIO(aio.block_size, aio.queue_depth, aio.thread_count)

    def open_file(directory: str, key: str) -> SwapFile:
        _warn_of_memory_disk(directory, key)
        return SwapFile(directory, async_io(), rank, key)

    return open_file


def _placement(
    block: OffloadOptimizerConfig | OffloadParamConfig,
    device: torch.device,
    open_file: Callable[[str, str], SwapFile],
    name: str,
) -> Placement:
    pin = block.pin_memory and device.type == "cuda"
    if not block.enabled:
        return Placement(device)
    if block.device == "cpu":
        return HostPlacement(pin)
    directory, key = os.path.expanduser(str(block.nvme_path)), f"zero_optimization.{name}.nvme_path"
    return DiskPlacement(current_platform().file(lambda: open_file(directory, key)), pin)


@functools.cache
def _warn_of_memory_disk(directory: str, key: str) -> None:
    """Warn, once per directory, if its files are in the host's memory."""
    mounted = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    path = Path(directory).resolve()
    point = next((str(parent) for parent in (path, *path.parents) if str(parent) in mounted), "")
    if mounted.get(point) in ("tmpfs", "ramfs"):
        logger.warning(
            "%s: %s is a %s, whose files are in the host's memory: nothing is gained by it; name a folder on a disk, "
            'or use "cpu" as the device',
            key,
            directory,
            mounted[point],
        )
