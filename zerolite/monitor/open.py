"""Opening of the configured monitors on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from zerolite.comm import Communicator, raise_together
from zerolite.config import ZeroliteConfig

from .csv_writer import CsvWriter
from .jsonl_writer import JsonlWriter
from .monitor import Monitor
from .tensorboard_writer import TensorboardWriter
from .wandb_writer import WandbWriter
from .writer import Writer


def open_monitor(
    config: ZeroliteConfig,
    comm: Communicator,
    device: torch.device,
    before_close: Callable[[], None] | None = None,
) -> Monitor:
    """Open a monitor with the writers that ``config`` enables on rank 0, with none elsewhere. before_close: writes what
    is still to be written.

    Raises RuntimeError on all ranks if rank 0 cannot open one: a package is missing, a folder cannot be made. Called
    on all ranks; one small all-reduce.
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
    if config.csv_monitor.enabled:
        yield lambda: CsvWriter(Path(config.csv_monitor.output_path, config.csv_monitor.job_name))
    if config.jsonl_monitor.enabled:
        yield lambda: JsonlWriter(Path(config.jsonl_monitor.output_path, config.jsonl_monitor.job_name))
    if config.tensorboard.enabled:
        yield lambda: TensorboardWriter(Path(config.tensorboard.output_path, config.tensorboard.job_name))
    if config.wandb.enabled:
        yield lambda: WandbWriter(config.wandb.project, config.wandb.group, config.wandb.team)
