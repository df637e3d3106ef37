"""Copy of a model without memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


class Skeleton:
    """Copy of ``model`` without memory: modules of the same classes and names, and parameters and buffers without
    values.

    Hooks are left out. Other attributes are shared with the model, except that dicts, lists and sets are copied.
    Scripted and traced modules, which refer to themselves, become ordinary modules without a forward.
    """

    device = "meta"

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[int, Any] = {}
        self._modules: dict[int, nn.Module] = {}
        self.model = self._copy(model)

    def _copy(self, module: nn.Module) -> nn.Module:
        known = self._modules.get(id(module))
        if known is not None:
            return known
        scripted = isinstance(module, torch.jit.ScriptModule)
        copied: nn.Module = object.__new__(nn.Module if scripted else type(module))
        self._modules[id(module)] = copied
        own = {} if scripted else {name: _own(value) for name, value in vars(module).items()}
        vars(copied).update(own | vars(nn.Module()))  # dicts of hooks and tensors, all of them empty
        vars(copied)["training"] = module.training
        for name, child in module._modules.items():
            copied._modules[name] = None if child is None else self._copy(child)
        for kind in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, kind).items():
                getattr(copied, kind)[name] = None if tensor is None else self._without_memory(tensor, name)
        return copied

    def _without_memory(self, tensor: torch.Tensor, name: str) -> object:
        if id(tensor) not in self.tensors:
            self.tensors[id(tensor)] = self.make(tensor, name)
        return self.tensors[id(tensor)]

    def make(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the stand-in for a parameter or buffer."""
        if not isinstance(tensor, nn.Parameter):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        values = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        return nn.Parameter(values, tensor.requires_grad)


def _own(value: object) -> object:
    """Return an attribute for the copy. Containers are copied, so that entries that a forward adds stay in the copy."""
    return copy.copy(value) if type(value) in (dict, list, set) else value
