"""``deepspeed.utils.logging``: zerolite's logger under DeepSpeed's name."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

logger = logging.getLogger("zerolite")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on these ranks, or on all ranks for None or if -1 is among them."""
    if not ranks or -1 in ranks or int(os.environ.get("RANK", "0")) in ranks:
        logger.log(level, message)


def warn_once(message: str) -> None:
    """Log a warning on rank 0, once in this process."""
    if message not in _warned:
        _warned.add(message)
        log_dist(message, ranks=[0], level=logging.WARNING)


_warned: set[str] = set()
