"""``deepspeed.utils``: logger, values of single parameters, groups, loaders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import zerolite
from zerolite.compat.deepspeed.utils import groups
from zerolite.compat.deepspeed.utils.logging import log_dist, logger
from zerolite.data.dataloader import RepeatingLoader

__all__ = [
    "RepeatingLoader",
    "groups",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor:
    """Return the whole master weight of a parameter, a copy. Called on all ranks."""
    return zerolite.get_full_master(param)


def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the whole gradient, the mean over ranks since the last step; None without one. Called on all ranks."""
    return zerolite.get_full_grad(param)


def safe_get_full_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a whole state, such as "exp_avg", a copy. Called on all ranks."""
    return zerolite.get_full_optimizer_state(param, optim_state_key)


def safe_set_full_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole master weight, and the parameter with it. Called on all ranks with equal values."""
    zerolite.set_full_master(param, value)


def safe_set_full_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole gradient of the next step. Called on all ranks with equal values."""
    zerolite.set_full_grad(param, value)


def safe_set_full_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set a whole state. Called on all ranks with equal values."""
    zerolite.set_full_optimizer_state(param, optim_state_key, value)


def set_z3_leaf_modules(model: torch.nn.Module, leaf_module_classes: Iterable[Any]) -> list[torch.nn.Module]:
    """Mark the modules of these classes (or names of classes), which stage 3 then gathers as one unit with all that
    they hold. Before ``initialize``. Returns the modules; raises ValueError if there is none."""
    return _mark(model, leaf_module_classes, True)


def unset_z3_leaf_modules(model: torch.nn.Module, leaf_module_classes: Iterable[Any]) -> list[torch.nn.Module]:
    """Undo :func:`set_z3_leaf_modules`."""
    return _mark(model, leaf_module_classes, False)


def z3_leaf_module(module: torch.nn.Module) -> bool:
    """Return whether a module is marked."""
    return getattr(module, "_z3_leaf", False)


def _mark(model: torch.nn.Module, classes: Iterable[Any], flag: bool) -> list[torch.nn.Module]:
    kinds = tuple(classes)
    types = tuple(kind for kind in kinds if isinstance(kind, type))
    names = {kind for kind in kinds if isinstance(kind, str)}
    found = [m for m in model.modules() if isinstance(m, types) or type(m).__name__ in names]
    if not found:
        raise ValueError(f"expected modules of the classes {kinds} in the model, found none")
    for module in found:
        module._z3_leaf = flag  # type: ignore[assignment]
    return found
