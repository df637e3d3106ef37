"""Assignment of parameters to pipeline stages, and removal of those that belong to others."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

Buffers = Mapping[str, Mapping[str, torch.Tensor]]  # by module and name


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


def collect_homes(places: Iterable[tuple[str, nn.Parameter, int]]) -> list[Home]:
    """Return the homes of parameters, of which each place is a name in the whole model, the parameter, and the part."""
    known: dict[int, tuple[nn.Parameter, dict[str, None], set[int]]] = {}
    for name, parameter, part in places:
        _, names, parts = known.setdefault(id(parameter), (parameter, {}, set()))
        names[name] = None
        parts.add(part)
    return [Home(parameter, tuple(names), frozenset(parts)) for parameter, names, parts in known.values()]


def homes_of(layers: Sequence[nn.Module | None], names: Sequence[str], bounds: Sequence[int]) -> list[Home]:
    """Return the homes of the parameters of ``layers`` (None: not on this rank), whose names begin with ``names``,
    divided at ``bounds``."""
    return collect_homes(
        (f"{prefix}.{name}", parameter, bisect_right(bounds, place) - 1)
        for place, (layer, prefix) in enumerate(zip(layers, names, strict=True))
        if layer is not None
        for name, parameter in layer.named_parameters(remove_duplicate=False)
    )


def keep_only(model: nn.Module, stays: Callable[[int], bool], leaves: Callable[[str], bool]) -> Buffers:
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
