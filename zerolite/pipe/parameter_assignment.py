"""Assignment of parameters to pipeline stages, and removal of those that belong to others."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

Buffers = Mapping[str, Mapping[str, torch.Tensor]]  # by module and name


@dataclass(frozen=True)
class ParameterAssignment:
    """A parameter and the parts of the model that have it.

    Attributes:
        parameter: the parameter.
        names: all its names in the full model, in the order of registration.
        parts: indices of the parts that have it; several for a tied parameter.
    """

    parameter: nn.Parameter
    names: tuple[str, ...]
    parts: frozenset[int]


def assign_parameters(uses: Iterable[tuple[str, nn.Parameter, int]]) -> list[ParameterAssignment]:
    """Return the assignments of parameters.

    Args:
        uses: for each use of a parameter its name in the full model, the parameter, and the part.
    """
    by_id: dict[int, tuple[nn.Parameter, dict[str, None], set[int]]] = {}
    for name, parameter, part in uses:
        _, names, parts = by_id.setdefault(id(parameter), (parameter, {}, set()))
        names[name] = None
        parts.add(part)
    return [
        ParameterAssignment(parameter, tuple(names), frozenset(parts)) for parameter, names, parts in by_id.values()
    ]


def assign_layer_parameters(
    layers: Sequence[nn.Module | None], names: Sequence[str], bounds: Sequence[int]
) -> list[ParameterAssignment]:
    """Return the assignments of the parameters of ``layers``.

    Args:
        layers: all layers; None for a layer that is not on this rank.
        names: names of the layers in the full model.
        bounds: where the parts begin, see partition.py.
    """
    return assign_parameters(
        (f"{prefix}.{name}", parameter, bisect_right(bounds, index) - 1)
        for index, (layer, prefix) in enumerate(zip(layers, names, strict=True))
        if layer is not None
        for name, parameter in layer.named_parameters(remove_duplicate=False)
    )


def remove_other_parameters(
    model: nn.Module, stays: Callable[[int], bool], without_buffers: Callable[[str], bool]
) -> Buffers:
    """Remove the parameters that belong to other ranks from ``model`` and free their memory.

    Args:
        model: the model.
        stays: returns True if the parameter of this id stays.
        without_buffers: returns True if the buffers of the module of this name are removed too.

    Returns:
        The removed buffers with their values, by module.
    """
    removed: dict[str, dict[str, torch.Tensor]] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not stays(id(parameter)):
                module._parameters[name] = None
                # The user's optimizer may still hold the Parameter object: only its memory can be freed.
                parameter.data = parameter.data.new_empty(0)
        buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        if buffers and without_buffers(path):
            module._buffers.update(dict.fromkeys(buffers))
            removed[path] = buffers
    return removed
