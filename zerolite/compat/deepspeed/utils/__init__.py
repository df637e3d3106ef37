"""``deepspeed.utils``: logger, access to single parameters, groups and loaders."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zerolite.compat.deepspeed.utils import groups
from zerolite.compat.deepspeed.utils.logging import log_dist, logger
from zerolite.compat.deepspeed.utils.tensor_fragment import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
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


def set_z3_leaf_modules(model: torch.nn.Module, leaf_module_classes: Iterable[object]) -> list[torch.nn.Module]:
    """Mark the modules of these classes, given as classes or names. Stage 3 gathers each with its submodules as a unit.

    Called before ``initialize``. Returns the modules. Raises ValueError if there is none.
    """
    return _mark(model, leaf_module_classes, True)


def unset_z3_leaf_modules(model: torch.nn.Module, leaf_module_classes: Iterable[object]) -> list[torch.nn.Module]:
    """Undo :func:`set_z3_leaf_modules`."""
    return _mark(model, leaf_module_classes, False)


def z3_leaf_module(module: torch.nn.Module) -> bool:
    """Return True if a module is marked."""
    return getattr(module, "_z3_leaf", False)


def _mark(model: torch.nn.Module, classes: Iterable[object], flag: bool) -> list[torch.nn.Module]:
    given_classes = tuple(classes)
    types = tuple(cls for cls in given_classes if isinstance(cls, type))
    names = {cls for cls in given_classes if isinstance(cls, str)}
    marked = [m for m in model.modules() if isinstance(m, types) or type(m).__name__ in names]
    if not marked:
        raise ValueError(f"expected modules of the classes {given_classes} in the model, got none; check the names")
    for module in marked:
        module._z3_leaf = flag  # type: ignore[assignment]
    return marked
