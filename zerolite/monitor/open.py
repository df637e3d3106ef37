"""Opening of the configured monitors on rank 0."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from zerolite.comm import Communicator, collective, raise_together
from zerolite.config import ZeroliteConfig
from zerolite.config.monitors import CsvMonitorConfig, JsonlMonitorConfig, TensorboardConfig

from .monitor import Monitor
from .writers import CsvWriter, JsonlWriter, TensorboardWriter, WandbWriter, Writer


@collective
def open_monitor(
    config: ZeroliteConfig,
    comm: Communicator,
    device: torch.device,
    before_close: Callable[[], None] | None = None,
) -> Monitor:
    """Open the monitor: on rank 0 with the writers that ``config`` enables, on other ranks with none.

    It costs one small all-reduce.

    Args:
        config: the configuration.
        comm: communicator of all ranks.
        device: the engine's device.
        before_close: writes the values that are still pending when the monitor is closed.

    Raises:
        RuntimeError: on all ranks, if rank 0 cannot open a writer (a missing package, a folder that cannot be made).
    """
    writers: list[Writer] = []
    failure: Exception | None = None
    if comm.rank == 0:
        try:
            for make in _enabled(config):
                writers.append(make())
        except Exception as error:
            failure = RuntimeError(f"zerolite.initialize: a monitor could not be opened. {error}")
            failure.__cause__ = error
            Monitor(writers).close()
    raise_together(comm, device, "monitor", failure, "zerolite.initialize", failed="could not open its monitors:")
    return Monitor(writers, before_close if writers else None)


def _enabled(config: ZeroliteConfig) -> Iterator[Callable[[], Writer]]:
    files: tuple[tuple[CsvMonitorConfig | JsonlMonitorConfig | TensorboardConfig, Callable[[Path], Writer]], ...] = (
        (config.csv_monitor, CsvWriter),
        (config.jsonl_monitor, JsonlWriter),
        (config.tensorboard, TensorboardWriter),
    )
    for block, writer in files:
        if block.enabled:
            yield functools.partial(writer, Path(block.output_path, block.job_name))
    if config.wandb.enabled:
        yield lambda: WandbWriter(config.wandb.project, config.wandb.group, config.wandb.team)
