"""The exception class of this package."""

from __future__ import annotations

from pathlib import Path

WITHOUT_KERNELS = "or set ZEROLITE_KERNELS=0 to train on PyTorch's own operations without this message."
INCOMPLETE = (
    "This installation of zerolite is incomplete: install it again with "
    "`pip install --force-reinstall --no-deps zerolite`."
)


class OpUnavailable(RuntimeError):
    """Kernels cannot be used here; training goes on with PyTorch's own operations.

    Attributes:
        cause: what is wrong, a sentence.
        remedy: what to do about it, a sentence.
        log: the compiler's whole output, or None if it did not come to that.
    """

    def __init__(self, cause: str, remedy: str, log: Path | None = None) -> None:
        super().__init__(f"{cause} {remedy}")
        self.cause, self.remedy, self.log = cause, remedy, log
