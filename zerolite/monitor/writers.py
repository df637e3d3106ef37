"""Writers of monitors: CSV, TensorBoard and Weights & Biases."""

from __future__ import annotations

import csv
import importlib
import io
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

Event = tuple[str, float, int]
"""(name, value, step): one point of the curve ``name``; ``step`` is its position on the x axis."""


class Writer(ABC):
    """One destination of events. It exists on rank 0 only, from the start of the engine."""

    name: str
    """The block of the config that enables it and its destination, for messages."""

    @abstractmethod
    def write(self, events: Sequence[Event]) -> None:
        """Write ``events``. When this returns, they survive the end of the process, also if it is killed."""

    def close(self) -> None:  # noqa: B027
        """Close the writer, if it keeps anything open. May be called twice."""


def group_by_step(events: Sequence[Event]) -> dict[int, dict[str, float]]:
    """Return {step: {name: value}}, with the steps in the order of their first event."""
    steps: dict[int, dict[str, float]] = {}
    for name, value, step in events:
        steps.setdefault(step, {})[name] = value
    return steps


def append_lines(path: Path, lines: str, header: str = "") -> None:
    """Append ``lines``, which end with a newline, to a file: all of them, or none if this raises.

    The operating system has them when this returns. A last line that a crash of the machine has cut off is removed.

    Args:
        path: the file, which is made if it is not there.
        lines: what to append.
        header: first line of a file that has none.

    Raises:
        OSError: the file cannot be opened or written. A later call tries again.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size, written = os.fstat(descriptor).st_size, 0
        if size:
            with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content:
                size = content.rfind(b"\n") + 1
        data = (lines if size else header + lines).encode()
        os.ftruncate(descriptor, size)
        try:
            # The system may write less than it is given, for example just before the disk is full.
            while written < len(data):
                written += os.pwrite(descriptor, data[written:], size + written)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


class CsvWriter(Writer):
    """One CSV file per name, with a row per event.

    ``Train/Samples/lr`` goes to ``<folder>/Train_Samples_lr.csv`` with the header ``step,lr``. Existing files are
    continued.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = f"csv_monitor ({folder})"
        self._folder = folder
        self._names: dict[str, str] = {}  # by file

    def write(self, events: Sequence[Event]) -> None:
        """Write ``events``. If two names have the same file, write all others and raise ValueError."""
        rows: dict[str, list[tuple[int, float]]] = {}
        clash = ""
        for name, value, step in events:
            if self._names.setdefault(_file_name(name), name) == name:
                rows.setdefault(name, []).append((step, value))
            else:
                clash = name
        for name, some in rows.items():
            header = _csv([("step", name.rpartition("/")[2])])
            append_lines(self._folder / _file_name(name), _csv(some), header)
        if clash:
            raise ValueError(
                f'expected names with a file each, got "{clash}" and "{self._names[_file_name(clash)]}", which are '
                f"both {_file_name(clash)}; rename one of them"
            )


def _csv(rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _file_name(name: str) -> str:
    return name.replace("/", "_").replace(" ", "_") + ".csv"


class TensorboardWriter(Writer):
    """Event files of TensorBoard in ``folder``, flushed at each write.

    Raises:
        ImportError: tensorboard is not installed; the message names the extra.
    """

    def __init__(self, folder: Path) -> None:
        summaries = _import("torch.utils.tensorboard", "tensorboard")
        folder.mkdir(parents=True, exist_ok=True)
        self.name = f"tensorboard ({folder})"
        self._summary = summaries.SummaryWriter(log_dir=str(folder))

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            self._summary.add_scalar(name, value, step)
        self._summary.flush()

    def close(self) -> None:
        self._summary.close()


class WandbWriter(Writer):
    """Run in Weights & Biases. If the process has a run already, that one is used, and :meth:`close` leaves it open.

    Args:
        project: name of the project.
        group: group of runs; None for none.
        team: team or user that owns the run; None for the account's default.

    Raises:
        ImportError: wandb is not installed; the message names the extra.
        Exception: the errors of ``wandb.init``.
    """

    def __init__(self, project: str, group: str | None, team: str | None) -> None:
        wandb = _import("wandb", "wandb")
        self.name = f"wandb (project {project})"
        self._finishes = wandb.run is None
        self._run = wandb.run or wandb.init(project=project, group=group, entity=team)

    def write(self, events: Sequence[Event]) -> None:
        """Pass ``events`` to the process of wandb, which sends them when it can. It drops steps that go backwards."""
        for step, values in group_by_step(events).items():
            self._run.log(values, step=step)

    def close(self) -> None:
        if self._finishes:
            self._finishes = False
            self._run.finish()


def _import(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{extra}.enabled: expected the package {extra}, got: {error}. Install it with pip install "
            f"'zerolite[{extra}]', or use csv_monitor, which needs nothing"
        ) from error
