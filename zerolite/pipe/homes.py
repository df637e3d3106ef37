"""Assignment of parameters to pipeline stages, and removal of those that belong to others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Home:
    """A parameter and the parts of the model that have it.

    Attributes:
        names: all of the parameter's in the whole model, in the order of registration.
        parts: that have it.
    """

    parameter: nn.Parameter
    names: tuple[str, ...]
    parts: frozenset[int]


def homes_of(layers: Sequence[nn.Module | None], names: Sequence[str], bounds: Sequence[int]) -> list[Home]:
    """Return the homes of the parameters of ``layers`` (None: not on this rank), whose names begin with ``names``,
    divided at ``bounds``."""
    known: dict[int, tuple[nn.Parameter, dict[str, None], set[int]]] = {}
    part = 0
    for place, (layer, prefix) in enumerate(zip(layers, names, strict=True)):
        while place >= bounds[part + 1]:
            part += 1
        for name, parameter in () if layer is None else layer.named_parameters(remove_duplicate=False):
            _, found, parts = known.setdefault(id(parameter), (parameter, {}, set()))
            found[f"{prefix}.{name}"] = None
            parts.add(part)
    return [Home(parameter, tuple(found), frozenset(parts)) for parameter, found, parts in known.values()]


def keep_only(
    model: nn.Module, stays: Callable[[int], bool], leaves: Callable[[str], bool]
) -> Mapping[str, dict[str, torch.Tensor]]:
    """Take all other parameters out of ``model`` and let go of their memory, also where an optimizer knows them.

    Args:
        stays: whether the parameter of that id does.
        leaves: whether the buffers of the module of that name leave too.

    Returns the buffers that have left by module, with their values.
    """
    gone: dict[str, dict[str, torch.Tensor]] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not stays(id(parameter)):
                module._parameters[name] = None
                parameter.data = parameter.data.new_empty(0)
        if leaves(path):
            kept = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
            module._buffers.update(dict.fromkeys(kept))
            if kept:
                gone[path] = kept
    return gone
