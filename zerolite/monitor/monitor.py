"""`Monitor`: all writers of a job behind one call. A failing writer never stops training."""

from __future__ import annotations

import logging
import numbers
import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from zerolite.comm import Communicator, collective, raise_together
from zerolite.config import ZeroliteConfig
from zerolite.utils.accelerator import host_value

from .writers import CsvWriter, Event, TensorboardWriter, WandbWriter, Writer

logger = logging.getLogger("zerolite")


class Monitor:
    """``engine.monitor``: passes events to its writers on rank 0.

    Other ranks have no writers. There ``write`` only checks its argument, so that a mistake raises on every rank.
    """

    def __init__(self, writers: Sequence[Writer] = (), before_close: Callable[[], None] | None = None) -> None:
        """
        Args:
            writers: receive the events.
            before_close: called once, by :meth:`close`; writes the values that are still pending.
        """
        self._writers = list(writers)
        self._failed: set[int] = set()  # indices of writers that have failed and have been warned about
        self._before_close = before_close

    @property
    def enabled(self) -> bool:
        """True if anything is written by this process."""
        return bool(self._writers)

    def write(self, events: Sequence[tuple[str, Any, int]]) -> None:
        """Write events to all writers.

        If a writer raises (a full disk, a lost network), this logs a warning, once for each writer.

        Args:
            events: (name, value, step) each. ``value`` is a number, or a tensor with one element. ``step`` is the
                position on the x axis, an integer of at least 0. Use ``engine.global_samples`` to match the engine's
                own values, or ``engine.global_steps`` if the config has no batch size.

        Raises:
            ValueError: an event has another form.
        """
        checked = [_checked(event) for event in events]
        if not self._writers:
            return
        plain: list[Event] = [(n, host_value(v) if isinstance(v, torch.Tensor) else v, s) for n, v, s in checked]
        for index, writer in enumerate(self._writers):
            try:
                writer.write(plain)
            except Exception as error:
                self._warn(index, writer, error)

    write_events = write  # DeepSpeed's name

    def close(self) -> None:
        """Write the last step, if it is still pending, and close the writers. Later events are dropped.

        May be called twice. It is called automatically when the engine is deleted or the process ends.
        """
        before_close, self._before_close = self._before_close, None  # it refers to parts of the engine
        try:
            if before_close is not None:
                before_close()
        finally:
            writers, self._writers = self._writers, []
            for index, writer in enumerate(writers):
                try:
                    writer.close()
                except Exception as error:
                    self._warn(index, writer, error)

    def _warn(self, index: int, writer: Writer, error: Exception) -> None:
        if index not in self._failed:
            self._failed.add(index)
            logger.warning(
                "%s: values of a step could not be written: %s. Training goes on, and so do attempts to write; this "
                "warning is given only once.",
                writer.name,
                error,
            )


def _checked(event: Any) -> tuple[str, Any, int]:
    """Return the event with a plain int, float or tensor as its value. Raises ValueError if it has another form."""
    try:
        name, value, step = event
        position = operator.index(step)
        single = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
        if not single and not isinstance(value, numbers.Real):
            raise ValueError
        if not isinstance(name, str) or not name.strip() or position < 0:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(
            "monitor.write: expected events (name, value, step) of a name that is not empty, a number or a tensor with "
            f'one element, and an integer of at least 0, such as ("loss", 0.9, engine.global_samples), got {event!r}; '
            "where the config has no batch size the engine's own x axis is engine.global_steps"
        ) from None
    if isinstance(value, numbers.Integral):
        return name, int(value), position
    return name, value if single else float(value), position


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
    if (csv := config.csv_monitor).enabled:
        yield lambda: CsvWriter(Path(csv.output_path, csv.job_name))
    if (tensorboard := config.tensorboard).enabled:
        yield lambda: TensorboardWriter(Path(tensorboard.output_path, tensorboard.job_name))
    if config.wandb.enabled:
        yield lambda: WandbWriter(config.wandb.project, config.wandb.group, config.wandb.team)
