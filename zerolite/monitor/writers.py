"""Writers of monitors: CSV, JSON lines, TensorBoard and Weights & Biases."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

Event = tuple[str, float, int]
"""(name, value, step): one point of the curve ``name``; ``step`` is its position on the x axis."""

_BLOCK = 1 << 16  # bytes that are read at once
MAX_OPEN = 64  # open CSV files; one more closes the oldest, so that many names do not use up all file descriptors
_STEP = "step"


class Writer(ABC):
    """One destination of events. It exists on rank 0 only, from the start of the engine."""

    name: str
    """The block of the config that enables it and its destination, for messages."""

    @abstractmethod
    def write(self, events: Sequence[Event]) -> None:
        """Write ``events``. When this returns, they survive the end of the process, also if it is killed."""

    @abstractmethod
    def close(self) -> None:
        """Close the writer. May be called twice."""


def group_by_step(events: Sequence[Event]) -> dict[int, dict[str, float]]:
    """Return {step: {name: value}}, with the steps in the order of their first event."""
    steps: dict[int, dict[str, float]] = {}
    for name, value, step in events:
        steps.setdefault(step, {})[name] = value
    return steps


class AppendFile:
    """File that keeps every complete line, even if the process is killed.

    Lines are not buffered: when :meth:`append` returns, the operating system has them. A line that was cut off is
    removed: when the file is opened again after a crash of the machine, or at once if the disk is full.

    Raises:
        OSError: the file cannot be opened or written. A later :meth:`append` tries again.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._size = _end_of_last_line(self._descriptor)
            os.ftruncate(self._descriptor, self._size)
        except BaseException:
            self.close()
            raise

    @property
    def empty(self) -> bool:
        return self._size == 0

    def append(self, lines: str) -> None:
        """Write ``lines``, which end with a newline: all of them, or none if this raises."""
        data = lines.encode()
        written = 0
        try:
            # The system may write less than it is given, for example just before the disk is full.
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self._size + written)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        """Close the file. May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _end_of_last_line(descriptor: int) -> int:
    """Return the size in bytes of a file up to and including its last newline; 0 if it has none."""
    # Read blocks from the end: the file may be long, and the last line is short.
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - _BLOCK)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


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
        self._files: dict[str, AppendFile] = {}
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
            file = self._file(_file_name(name))
            text = io.StringIO()
            table = csv.writer(text, lineterminator="\n")
            if file.empty:
                table.writerow(["step", name.rpartition("/")[2]])
            table.writerows(some)
            file.append(text.getvalue())
        if clash:
            raise ValueError(
                f'expected names with a file each, got "{clash}" and "{self._names[_file_name(clash)]}", which are '
                f"both {_file_name(clash)}; rename one of them"
            )

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, name: str) -> AppendFile:
        if name not in self._files:
            if len(self._files) >= MAX_OPEN:
                self._files.pop(next(iter(self._files))).close()
            self._files[name] = AppendFile(self._folder / name)
        return self._files[name]


def _file_name(name: str) -> str:
    return name.replace("/", "_").replace(" ", "_") + ".csv"


class JsonlWriter(Writer):
    """``<folder>/events.jsonl``, with a line for each step of a write.

    A line is ``{"step": 96, "Train/Samples/lr": 0.001, ...}``. NaN and infinities are null, because JSON has neither.
    An existing file is continued.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "events.jsonl"
        self.name = f"jsonl_monitor ({path})"
        self._file = AppendFile(path)

    def write(self, events: Sequence[Event]) -> None:
        """Write ``events``. If one is named "step", write all others and raise ValueError."""
        lines = []
        for step, values in group_by_step([event for event in events if event[0] != _STEP]).items():
            finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
            lines.append(json.dumps({_STEP: step, **finite}, allow_nan=False) + "\n")
        self._file.append("".join(lines))
        if any(name == _STEP for name, _, _ in events):
            raise ValueError(f'expected a name other than "{_STEP}", which is the x axis; rename the value')

    def close(self) -> None:
        self._file.close()


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
            f"'zerolite[{extra}]', or use csv_monitor or jsonl_monitor, which need nothing"
        ) from error
