"""Clean-up that follows an object, and does not run when the process ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable


def finalize_before_exit(owner: object, function: Callable[..., object], *arguments: object) -> weakref.finalize:
    """Call ``function(*arguments)`` when ``owner`` is freed, but not at exit, when objects that it needs may be gone
    already."""
    finalizer = weakref.finalize(owner, function, *arguments)
    finalizer.atexit = False
    return finalizer
