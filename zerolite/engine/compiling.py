"""torch.compile of a model's repeated blocks, and the warning for a model that is compiled whole.

A graph over the whole model has one backward: all gradients exist at once when it ends, and no reduction is hidden
behind it. A module that is compiled before the engine is made is one parameter group at stage 3, so a whole model is
gathered whole.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from zerolite.config.zero import AUTO_GRANULARITY
from zerolite.utils.module_hook import is_compiled
from zerolite.zero.stage3.partitioned_parameter import unpartitioned_numel

logger = logging.getLogger("zerolite")

_REMEDY = (
    "Give zerolite.initialize the model as it is and call engine.compile(), which compiles its repeated blocks, or "
    "compile these yourself: for block in model.layers: block.compile()"
)


def compile_blocks(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """Compile the repeated blocks of ``model``, or ``model`` itself if it has none. What is compiled already stays so.

    Args:
        args, kwargs: those of ``torch.nn.Module.compile``.
    """
    modules = [] if is_compiled(model) else list(_repeated_blocks(model)) or [model]
    for module in modules:
        if not is_compiled(module):
            module.compile(*args, **kwargs)


def _repeated_blocks(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the outermost modules with modules inside that have a sibling of their class in a list of modules."""
    seen: set[int] = set()

    def walk(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        is_list = isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
        counts = Counter(type(child) for child in module.children() if is_list)
        for child in module.children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            callable_itself = type(child).forward is not torch.nn.Module.forward
            if counts[type(child)] > 1 and callable_itself and next(child.children(), None) is not None:
                yield child
            else:
                yield from walk(child)

    return walk(model)


def warn_if_compiled_whole(model: torch.nn.Module, is_sharded: bool) -> None:
    """Warn of a large model that is compiled at its root. Called on one rank.

    Args:
        is_sharded: True if ranks share the parameters (stage 3).
    """
    numel = sum(unpartitioned_numel(parameter) for parameter in model.parameters())
    if not is_compiled(model) or numel <= AUTO_GRANULARITY:
        return
    if is_sharded:
        effect = f"stage 3 gathers all of its {numel} parameters at once: they take the memory of stage 2"
    else:
        effect = "its backward is one graph: all gradients exist at its end, and it hides no reduction"
    logger.warning("zerolite.initialize: the model is compiled as a whole, so %s. %s", effect, _REMEDY)
