"""``deepspeed.runtime.utils``: helpers that scripts use."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from zerolite.comm import collective
from zerolite.compat.deepspeed.accelerator import get_accelerator
from zerolite.compat.deepspeed.utils.logging import log_dist
from zerolite.utils.nested import map_tensors
from zerolite.utils.text import format_size


def move_to_device(item: object, device: torch.device | str) -> Any:
    """Return ``item`` with its tensors on ``device``; lists, tuples and dicts may be nested."""
    return map_tensors(lambda tensor: tensor.to(device), item)


def set_random_seed(seed: int) -> None:
    """Seed the random numbers of Python, torch and, if it is imported, numpy."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def see_memory_usage(message: str, force: bool = False, ranks: Sequence[int] = (0,)) -> None:
    """Log the memory of tensors on the device, now and at its peak, if ``force`` is set. It is 0 on a CPU."""
    if force:
        device = get_accelerator()
        now, peak = device.memory_allocated(), device.max_memory_allocated()
        log_dist(f"{message}: {format_size(now)} allocated, {format_size(peak)} at the peak", ranks=ranks)


@collective
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0, mpu: object = None
) -> torch.Tensor:
    """Clip gradients as ``torch.nn.utils.clip_grad_norm_`` does, at every stage.

    Raises ValueError for an ``mpu``.
    """
    if mpu is not None:
        raise ValueError(f"clip_grad_norm_: expected no mpu, got {mpu!r}; leave it out, an engine knows its ranks")
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
