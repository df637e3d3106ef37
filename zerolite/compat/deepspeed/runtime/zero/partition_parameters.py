"""``deepspeed.runtime.zero.partition_parameters``: the names that transformers uses around ``zero.Init``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zerolite.compat.deepspeed.accelerator import get_accelerator
from zerolite.compat.deepspeed.zero import GatheredParameters, Init, ZeroParamStatus, register_external_parameter

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "get_accelerator",
    "register_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., object], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return ``fn`` unchanged: ``zero.Init`` changes neither dtype nor device of tensors that a constructor makes.

    transformers replaces this function and restores it.
    """
    return fn
