"""``deepspeed.ops.adagrad``: torch's Adagrad, which an engine updates with zerolite's kernels."""

from __future__ import annotations

from typing import Any

import torch


def DeepSpeedCPUAdagrad(
    model_params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0, amsgrad: bool = False
) -> torch.optim.Optimizer:
    """Return Adagrad."""
    return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
