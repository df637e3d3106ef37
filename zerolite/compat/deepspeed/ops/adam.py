"""``deepspeed.ops.adam``: torch's Adam and AdamW, which an engine updates with zerolite's kernels.

They are functions, because the kernels accept only torch's own classes.
"""

from __future__ import annotations

from typing import Any

import torch


def FusedAdam(
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """Return AdamW, or Adam without ``adam_w_mode``. Raises ValueError for options that torch's classes do not have."""
    if not bias_correction:
        raise ValueError("FusedAdam: expected bias_correction=True, got False; Adam and AdamW always correct the bias")
    optimizer_class = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return optimizer_class(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


def DeepSpeedCPUAdam(
    model_params: object,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """Return the optimizer of :func:`FusedAdam`. The config's ``offload_optimizer`` decides where the update runs."""
    if not fp32_optimizer_states:
        raise ValueError(
            "DeepSpeedCPUAdam: expected fp32_optimizer_states=True, got False; set bf16_optimizer_states in the config"
        )
    return FusedAdam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
