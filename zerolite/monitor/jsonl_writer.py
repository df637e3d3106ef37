"""JSON lines writer: one file, one object per step."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from .append_file import AppendFile
from .writer import Event, by_step

FILE = "events.jsonl"
_STEP = "step"


class JsonlWriter:
    """``<folder>/events.jsonl``: ``{"step": 96, "Train/Samples/lr": 0.001, ...}`` for each step of each write.

    Values that are not finite, which JSON does not have, are null. A file that exists is continued. Raises OSError if
    it cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / FILE
        self._file = AppendFile(self._path)

    @property
    def name(self) -> str:
        return f"jsonl_monitor ({self._path})"

    def write(self, events: Sequence[Event]) -> None:
        """Raise ValueError, after the others are written, for a value that is named like the x axis."""
        lines = []
        for step, values in by_step([event for event in events if event[0] != _STEP]).items():
            finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
            lines.append(json.dumps({_STEP: step, **finite}, allow_nan=False) + "\n")
        self._file.append("".join(lines))
        if any(name == _STEP for name, _, _ in events):
            raise ValueError(f'expected a name other than "{_STEP}", which is the x axis; rename the value')

    def close(self) -> None:
        self._file.close()
