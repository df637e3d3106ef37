"""``deepspeed.utils.tensor_fragment``: gradients, master weights and optimizer states of single parameters.

Each function is called on all ranks, with the same parameters in the same order. "Full" is the whole tensor at every
stage. "Local" is this rank's part of a parameter that stage 3 has partitioned: flat, and padded with zeros to the
length of ``param.ds_tensor``.
"""

from __future__ import annotations

import torch

import zerolite
from zerolite.zero.stage3.partitioned_parameter import PartitionedParameter, handle_of


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the whole master weight, a copy; None for a frozen parameter."""
    return zerolite.get_full_master(param) if param.requires_grad else None


def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the whole gradient, the mean over ranks since the last step; None without one."""
    return zerolite.get_full_grad(param) if param.requires_grad else None


def safe_get_full_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a whole state, such as "exp_avg", a copy; None for a frozen parameter."""
    return zerolite.get_full_optimizer_state(param, optim_state_key) if param.requires_grad else None


def safe_set_full_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole master weight, and the parameter with it. Ranks pass equal values."""
    zerolite.set_full_master(param, value)


def safe_set_full_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole gradient of the next step. Ranks pass equal values."""
    zerolite.set_full_grad(param, value)


def safe_set_full_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set a whole state. Ranks pass equal values."""
    zerolite.set_full_optimizer_state(param, optim_state_key, value)


def safe_get_local_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the master weight, a copy; None for a frozen parameter."""
    return _part(param, safe_get_full_fp32_param(param))


def safe_get_local_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the gradient, a copy; None without one."""
    return _part(param, safe_get_full_grad(param))


def safe_get_local_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's part of a state, a copy; None for a frozen parameter."""
    return _part(param, safe_get_full_optimizer_state(param, optim_state_key))


def safe_set_local_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the master weight; the parameter follows at once."""
    safe_set_full_fp32_param(param, _whole(param, value))


def safe_set_local_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the gradient of the next step."""
    safe_set_full_grad(param, _whole(param, value))


def safe_set_local_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's part of a state."""
    safe_set_full_optimizer_state(param, _whole(param, value), optim_state_key)


def _record(param: torch.nn.Parameter) -> PartitionedParameter:
    record = handle_of(param)
    if record is None:
        raise ValueError(
            f"expected a parameter that stage 3 has partitioned, got one of shape {tuple(param.shape)} that is whole; "
            "use the function whose name has 'full' for 'local'"
        )
    return record


def _part(param: torch.nn.Parameter, whole: torch.Tensor | None) -> torch.Tensor | None:
    record = _record(param)
    if whole is None:
        return None
    part = whole.new_zeros(record.shard.numel())
    own = whole.flatten()[record.comm.rank * part.numel() :][: part.numel()]
    part[: own.numel()] = own
    return part


def _whole(param: torch.nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """Return the full values, from the parts that all ranks pass."""
    record = _record(param)
    if value.numel() != record.shard.numel():
        raise ValueError(
            f"parameter '{record.name}': expected this rank's part, {record.shard.numel()} elements, got "
            f"{value.numel()}; use the function whose name has 'full' for 'local' to pass the whole"
        )
    whole = torch.empty(value.numel() * record.comm.world_size, dtype=value.dtype, device=record.context.device)
    record.comm.part(whole).copy_(value.detach().flatten())
    record.comm.all_gather(whole, tag="access").wait()
    return whole[: record.numel].view(record.shape)
