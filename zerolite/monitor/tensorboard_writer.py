"""TensorBoard writer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .writer import Event


class TensorboardWriter:
    """Event files in ``folder``, flushed at each write. Raises ImportError, with the extra to install, where
    tensorboard is missing."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"tensorboard.enabled: expected the package tensorboard, got: {error}. Install it with "
                "pip install 'zerolite[tensorboard]', or use csv_monitor or jsonl_monitor, which need nothing"
            ) from error
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._summary = SummaryWriter(log_dir=str(folder))

    @property
    def name(self) -> str:
        return f"tensorboard ({self._folder})"

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            self._summary.add_scalar(name, value, step)
        self._summary.flush()

    def close(self) -> None:
        self._summary.close()
