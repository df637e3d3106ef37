"""The exception class of this package."""

from __future__ import annotations

from pathlib import Path


class OpUnavailable(RuntimeError):
    """Kernels cannot be used here; training goes on with PyTorch's own operations.

    Attributes:
        cause: what is wrong, a sentence.
        remedy: what to do about it, a sentence.
        log: the compiler's whole output, or None if it did not come to that.
    """

    def __init__(self, cause: str, remedy: str, log: Path | None = None) -> None:
        super().__init__(f"{cause} {remedy}")
        self.cause = cause
        self.remedy = remedy
        self.log = log


class CannotStore(Exception):
    """A directory cannot hold libraries; the message says why, and the library is built elsewhere."""
