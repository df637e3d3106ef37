"""``deepspeed.utils.nvtx``: ranges of functions in a profile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def instrument_w_nvtx(func: Function) -> Function:
    """Return ``func`` with a range of its name in profiles: of NVTX with CUDA, and of torch.profiler everywhere."""

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(func.__qualname__):
            if not torch.cuda.is_available():
                return func(*args, **kwargs)
            with torch.cuda.nvtx.range(func.__qualname__):
                return func(*args, **kwargs)

    return call  # type: ignore[return-value]
