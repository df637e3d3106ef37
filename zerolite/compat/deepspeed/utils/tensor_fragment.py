"""``deepspeed.utils.tensor_fragment``: gradients, master weights and optimizer states of single parameters.

Each function is called on all ranks, with the same parameters in the same order. "Full" is the full tensor at every
stage.
"""

from __future__ import annotations

import torch

import zerolite


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return a copy of the full master weight; None for a frozen parameter."""
    return zerolite.get_full_master(param) if param.requires_grad else None


def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the full gradient, averaged over ranks, since the last step; None if there is none."""
    return zerolite.get_full_grad(param) if param.requires_grad else None


def safe_get_full_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a copy of a full state, such as "exp_avg"; None for a frozen parameter."""
    return zerolite.get_full_optimizer_state(param, optim_state_key) if param.requires_grad else None


def safe_set_full_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set the full master weight and the parameter. All ranks pass equal values."""
    zerolite.set_full_master(param, value)


def safe_set_full_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set the full gradient of the next step. All ranks pass equal values."""
    zerolite.set_full_grad(param, value)


def safe_set_full_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set a full state. All ranks pass equal values."""
    zerolite.set_full_optimizer_state(param, optim_state_key, value)
