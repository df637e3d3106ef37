"""``deepspeed.utils.init_on_device``: construction of models on another device, or without memory."""

from __future__ import annotations

import contextlib
from types import TracebackType

import torch


class OnDevice(contextlib.AbstractContextManager[None]):
    """Context in which tensors are made on ``device``, and floating ones in ``dtype``, unless their call says more.

    On the device "meta" they have no memory.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled
        self._before = torch.get_default_dtype()

    def __enter__(self) -> None:
        if self._enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            self._device.__exit__(kind, error, trace)
            torch.set_default_dtype(self._before)
