"""Warning at the user's line that an expression runs a collective, once per line."""

from __future__ import annotations

import sys
import warnings
from typing import Any

_warned: set[tuple[str, int]] = set()


def warn_of_collective(message: str) -> None:
    """Warn at the innermost line that is neither torch's nor zerolite's."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "zerolite"):
        frame = frame.f_back
    site = (frame.f_code.co_filename, frame.f_lineno)
    if site not in _warned:
        _warned.add(site)
        warnings.warn_explicit(message, UserWarning, *site)
