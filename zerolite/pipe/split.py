"""Split of a model at named modules, without tracing: every stage runs the model's own forward.

A part begins with a module and ends where the first module of the next part is called. Each rank calls the model with
the micro-batch's own inputs. Before the module that begins its part, modules with parameters are skipped and return
zeros. At that module, the received tensors replace the arguments that are computed from parameters. At the first
module of the next part its arguments are sent to that part, and an exception ends the forward.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zerolite.config.parallelism import PipelineConfig
from zerolite.pipe import partition
from zerolite.pipe.chunks import Chunk
from zerolite.pipe.dependencies import Skeleton, caches_cleared, fake_parameters
from zerolite.pipe.named_chunk import ModelSplit, NamedChunk
from zerolite.pipe.parameter_assignment import ParameterAssignment, assign_parameters, remove_other_parameters
from zerolite.utils.nested import map_tensors


def split_by_names(
    model: nn.Module, settings: PipelineConfig, parts: int, own_parts: Sequence[int]
) -> tuple[list[Chunk], list[ParameterAssignment]]:
    """Divide ``model`` into ``parts`` at the modules in ``settings.split``, and keep the parts ``own_parts``.

    Raises ValueError for names that do not divide it.
    """
    if settings.activation_checkpoint_interval:
        raise ValueError(
            "pipeline.activation_checkpoint_interval: expected 0 for a model that is not a sequence of layers, got "
            f"{settings.activation_checkpoint_interval}; use the activation_checkpointing block, or the model's own"
        )
    names = _automatic(model, settings, parts) if settings.split == "auto" else list(settings.split)
    if len(names) != parts - 1:
        raise ValueError(f"pipeline.split: expected {parts - 1} names for {parts} parts, got {len(names)}")
    _check_names(model, names)
    skeleton = Skeleton(model)
    later = _modules_called_later(model, skeleton, names)
    assignments = assign_parameters(
        (f"{path}.{name}" if path else name, parameter, part)
        for path, module, part in modules_with_parts(model, names, later)
        for name, parameter in module._parameters.items()
        if parameter is not None
    )
    mine = set(own_parts)
    staying = {id(assignment.parameter) for assignment in assignments if assignment.parts & mine}
    elsewhere = _modules_elsewhere(model, staying)
    buffers = remove_other_parameters(model, staying.__contains__, elsewhere.__contains__)
    model_split = ModelSplit(model, names, assignments, skeleton, buffers)
    for path, module, part in modules_with_parts(model, names, later):
        if part not in mine and path not in elsewhere:  # it may run here, but another stage saves its buffers
            module._non_persistent_buffers_set.update(module._buffers)
    if parts > 1:
        # A direct call of the model would compute with this rank's parameters only.
        model.register_forward_pre_hook(model_split.check_running)
    chunks: list[Chunk] = []
    for part in own_parts:
        parameters = [assignment.parameter for assignment in assignments if part in assignment.parts]
        chunks.append(NamedChunk(part, model, model_split, parameters))
    return chunks, assignments


def _check_names(model: nn.Module, names: Sequence[str]) -> None:
    order = {path: index for index, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}
    for name in names:
        if name not in order or not name:
            near = difflib.get_close_matches(name, order, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise ValueError(f"pipeline.split: expected names of modules, got '{name}', which the model lacks{hint}")
    for name, after in zip(names, names[1:], strict=False):
        if order[after] <= order[name]:
            raise ValueError(
                f"pipeline.split: expected names in the order in which the model registers its modules, got '{after}' "
                f"after '{name}'; change their order"
            )


def modules_with_parts(
    model: nn.Module, names: Sequence[str], later: Mapping[str, int]
) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield all modules with their paths and parts, in the order of registration.

    Args:
        later: parts of modules that are called in a later part than they are registered in.
    """
    part = 0
    for path, module in model.named_modules(remove_duplicate=False):
        if part < len(names) and path == names[part]:
            part += 1
        yield path, module, later.get(path, part)


def _modules_called_later(model: nn.Module, skeleton: Skeleton, names: Sequence[str]) -> dict[str, int]:
    """Return the parts of modules that are registered before the blocks but called after some, such as OPT's last norm.

    A model with ``dummy_inputs`` (as those of transformers have) is run once on tensors without values to find them. If
    the run fails, the result is empty, and the run of the first micro-batch reports the error.
    """
    ahead = itertools.takewhile(lambda item: item[0] != names[0], model.named_modules()) if names else ()
    blocks = f"{names[0].rpartition('.')[0]}." if names else ""
    suspects = [
        path
        for path, module in ahead
        if module._parameters and not isinstance(module, nn.Embedding) and not path.startswith(blocks)
    ]
    inputs = getattr(model, "dummy_inputs", None)
    if not suspects or not isinstance(inputs, Mapping):
        return {}
    seen: dict[str, set[int]] = {path: set() for path in suspects}
    part = 0

    def begin(number: int) -> None:
        nonlocal part
        part = number

    def watch(path: str, action: Callable[[], None]) -> Any:
        return skeleton.model.get_submodule(path).register_forward_pre_hook(lambda *_: action())

    handles = [watch(name, functools.partial(begin, number)) for number, name in enumerate(names, 1)]
    handles += [watch(path, functools.partial(lambda path: seen[path].add(part), path)) for path in suspects]
    with torch.no_grad(), fake_parameters(skeleton.model, torch.device("cpu"), None) as mode, caches_cleared():
        fake_inputs = inputs if mode is None else map_tensors(mode.from_tensor, dict(inputs))
        with contextlib.suppress(Exception):
            skeleton.model(**fake_inputs)
    for handle in handles:
        handle.remove()
    return {path: min(parts) for path, parts in seen.items() if len(parts) == 1 and parts != {0}}


def _modules_elsewhere(model: nn.Module, staying: set[int]) -> set[str]:
    """Return the modules without a parameter that stays here, and their submodules. Their buffers are removed too."""
    elsewhere: set[str] = set()
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in elsewhere)
        parameters = list(module.parameters())
        if inside or (parameters and not any(id(parameter) in staying for parameter in parameters)):
            elsewhere.add(path)
    return elsewhere


# -------------------------------------------------------------------- "auto"


def _automatic(model: nn.Module, settings: PipelineConfig, parts: int) -> list[str]:
    """Return the names of the blocks that begin the parts 1, 2, ..."""
    path, blocks = _blocks(model, parts)
    if len(blocks) < parts:
        got = f"{len(blocks)} in '{path}'" if blocks else "none"
        raise ValueError(
            f'pipeline.split: "auto" expected a ModuleList of at least {parts} equal blocks, one for each part '
            f"(pipeline.stages × pipeline.chunks), got {got}; name the modules that begin the parts"
        )
    names = [type(block).__name__ for block in blocks]
    bounds = partition.bounds_of(settings.partition_method, names, parts, lambda: _weights(model, path, len(blocks)))
    return [f"{path}.{start}" for start in bounds[1:-1]]


def _blocks(model: nn.Module, parts: int) -> tuple[str, list[nn.Module]]:
    """Return the long enough ModuleList of equal modules with the most parameters, otherwise the longest one."""
    best: tuple[tuple[bool, int], str, list[nn.Module]] = ((False, 0), "", [])
    for path, module in model.named_modules():
        blocks = list(module) if isinstance(module, nn.ModuleList) else []
        if len({type(block) for block in blocks}) == 1:
            numel = sum(parameter.numel() for parameter in module.parameters())
            rank = (True, numel) if len(blocks) >= parts else (False, len(blocks))
            best = max(best, (rank, path, blocks), key=lambda candidate: candidate[0])
    return best[1], best[2]


def _weights(model: nn.Module, path: str, count: int) -> list[float]:
    """Return the number of trained parameters of each block.

    Modules before the blocks count for the first block, and modules after them for the last. A tied parameter counts
    wherever it is used.
    """
    weights = [0.0] * count
    block = 0
    for name, module in model.named_modules(remove_duplicate=False):
        if name.startswith(f"{path}."):
            block = int(name[len(path) + 1 :].split(".", 1)[0])
        elif block:
            block = count - 1
        parameters = (parameter for parameter in module._parameters.values() if parameter is not None)
        weights[block] += sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return weights
