"""``deepspeed.utils.tensor_fragment``: gradients, master weights and optimizer states of single parameters.

Each function is called on all ranks, with the same parameters in the same order. "Full" is the full tensor at every
stage. "Local" is this rank's shard of a parameter that stage 3 has partitioned: flat, and padded with zeros to the
length of ``param.ds_tensor``.
"""

from __future__ import annotations

import torch

import zerolite
from zerolite.zero.stage3.partitioned_parameter import PartitionedParameter, sharded_param_of


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


def safe_get_local_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return a copy of this rank's shard of the master weight; None for a frozen parameter."""
    return _shard(param, safe_get_full_fp32_param(param))


def safe_get_local_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return a copy of this rank's shard of the gradient; None if there is none."""
    return _shard(param, safe_get_full_grad(param))


def safe_get_local_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a copy of this rank's shard of a state; None for a frozen parameter."""
    return _shard(param, safe_get_full_optimizer_state(param, optim_state_key))


def safe_set_local_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's shard of the master weight and of the parameter."""
    safe_set_full_fp32_param(param, _full(param, value))


def safe_set_local_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's shard of the gradient of the next step."""
    safe_set_full_grad(param, _full(param, value))


def safe_set_local_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's shard of a state."""
    safe_set_full_optimizer_state(param, _full(param, value), optim_state_key)


def _record(param: torch.nn.Parameter) -> PartitionedParameter:
    record = sharded_param_of(param)
    if record is None:
        raise ValueError(
            f"expected a parameter that stage 3 has partitioned, got one of shape {tuple(param.shape)} that is whole; "
            "use the function with 'full' in its name"
        )
    return record


def _shard(param: torch.nn.Parameter, full: torch.Tensor | None) -> torch.Tensor | None:
    record = _record(param)
    if full is None:
        return None
    shard = full.new_zeros(record.shard.numel())
    values = full.flatten()[record.groups.shard.rank * shard.numel() :][: shard.numel()]
    shard[: values.numel()] = values
    return shard


def _full(param: torch.nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """Return the full values, gathered from the shards of all ranks."""
    record = _record(param)
    if value.numel() != record.shard.numel():
        raise ValueError(
            f"parameter '{record.name}': expected this rank's shard, {record.shard.numel()} elements, got "
            f"{value.numel()}; pass full values to the function with 'full' in its name"
        )
    full = torch.empty(value.numel() * record.groups.shard.world_size, dtype=value.dtype, device=record.context.device)
    record.groups.shard.shard(full).copy_(value.detach().flatten())
    record.groups.shard.all_gather(full, tag="access").wait()
    return full[: record.numel].view(record.shape)
