"""``deepspeed.compression.helper``: submodules by their names."""

from __future__ import annotations

import operator
from typing import Any

import torch


def recursive_getattr(model: torch.nn.Module, module_name: str) -> Any:
    """Return the submodule (or another attribute) ``module_name`` of ``model``, such as "layers.0.mlp"."""
    return operator.attrgetter(module_name)(model)


def recursive_setattr(model: torch.nn.Module, module_name: str, module: object) -> None:
    """Put ``module`` in the place of the submodule ``module_name`` of ``model``."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)
