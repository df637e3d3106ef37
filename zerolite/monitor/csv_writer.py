"""CSV writer: one file per name, in DeepSpeed's format."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from .append_file import AppendFile
from .writer import Event

MAX_OPEN = 64  # files; the one opened first is closed when there are more


class CsvWriter:
    """``Train/Samples/lr`` goes to ``<folder>/Train_Samples_lr.csv``: the header ``step,lr``, then a row per event.

    A file that exists is continued. Raises OSError if the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[str, AppendFile] = {}
        self._names: dict[str, str] = {}  # by file

    @property
    def name(self) -> str:
        return f"csv_monitor ({self._folder})"

    def write(self, events: Sequence[Event]) -> None:
        """Raise ValueError if two names would share a file; all others are written first."""
        rows: dict[str, list[tuple[int, float]]] = {}
        clash = ""
        for name, value, step in events:
            if self._names.setdefault(_file_name(name), name) == name:
                rows.setdefault(name, []).append((step, value))
            else:
                clash = name
        for name, some in rows.items():
            self._append(name, some)
        if clash:
            raise ValueError(
                f'expected names with a file each, got "{clash}" and "{self._names[_file_name(clash)]}", which are '
                f"both {_file_name(clash)}; rename one of them"
            )

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _append(self, name: str, rows: Sequence[tuple[int, float]]) -> None:
        file = self._file(_file_name(name))
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        if file.empty:
            table.writerow(["step", name.rpartition("/")[2]])
        table.writerows(rows)
        file.append(text.getvalue())

    def _file(self, name: str) -> AppendFile:
        file = self._files.get(name)
        if file is None:
            if len(self._files) >= MAX_OPEN:
                self._files.pop(next(iter(self._files))).close()
            file = self._files[name] = AppendFile(self._folder / name)
        return file


def _file_name(name: str) -> str:
    return name.replace("/", "_").replace(" ", "_") + ".csv"
