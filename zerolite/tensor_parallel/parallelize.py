"""`parallelize_module`: shard a model over the ranks of a tensor-parallel group."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerolite.comm import Communicator
from zerolite.comm.initial_sync import broadcast_into, synchronize_tensors
from zerolite.config.parallelism import TensorParallelConfig
from zerolite.tensor_parallel import fused, matching, parallel_blocks, sequence
from zerolite.tensor_parallel.layers import (
    TensorParallelLayer,
    VocabParallelHead,
    shard_column,
    shard_embedding,
    shard_head,
    shard_last_dim,
    shard_row,
    share_column,
)
from zerolite.tensor_parallel.logits import VocabParallelLogits
from zerolite.tensor_parallel.parallel_blocks import Layer, Number, ParallelBlock
from zerolite.tensor_parallel.plan import (
    Match,
    TensorPlanError,
    advice,
    generalize,
    matches,
    unmatched,
)
from zerolite.tensor_parallel.regions import FirstForwardErrors, LocalShapeHook, Region, ReplicatedModuleCheck
from zerolite.tensor_parallel.shard_spec import is_partial, mark_partial, shard_spec_of
from zerolite.utils.nested import map_tensors

logger = logging.getLogger("zerolite")


def parallelize_module(
    model: nn.Module, settings: TensorParallelConfig, comm: Communicator, device: torch.device, *, stage: bool = False
) -> list[str]:
    """Reduce ``model`` to this rank's shard in place: modules and Parameters stay the same objects.

    Values and random state become those of the first rank of ``comm``. ``zerolite.initialize`` calls this on all ranks
    of ``comm``, after the model has been divided into pipeline stages and before the engine is built.

    Args:
        settings: plan (patterns of module names with their styles, or "auto"), divide ("auto" or patterns of
            attributes), and sequence_parallel.
        comm: the tensor-parallel ranks.
        device: device of the collectives.
        stage: the model is a pipeline stage, so a pattern may match on other stages only.

    Returns:
        For a pipeline stage, the patterns that match nothing on this stage; "auto" too if the stage has no plan.

    Raises:
        TensorPlanError: plan and model do not fit each other. It is a ValueError, raised on all ranks before the model
            is changed.
    """
    if comm.world_size == 1:
        return []
    try:
        return _parallelize(model, settings, comm, device, stage)
    except TensorPlanError as error:
        raise error.with_advice(settings.plan) from None


@dataclass
class _Reading:
    """Layers, blocks and parameters of a model that a plan names, read before anything is changed.

    Attributes:
        modules: all modules by name.
        unused: the patterns that match nothing.
        layers: the layers to shard.
        arrangements: names of fused columns by a description of their parts.
        tp_blocks: the blocks of these layers.
        written: the blocks that the model's author has written as tensor-parallel layers.
        divided: attributes, with this rank's share as the value.
        biases: position biases of attention, as (module, key).
        runs: neighbouring blocks that get the sequence in parts.
        partial: the replicated parameters whose gradients are summed over ranks.
    """

    modules: dict[str, nn.Module]
    unused: list[str]
    layers: list[Layer]
    arrangements: dict[str, list[str]]
    tp_blocks: list[ParallelBlock]
    written: list[ParallelBlock]
    divided: list[Number]
    biases: list[tuple[nn.Module, str]]
    runs: list[list[str]]
    partial: list[nn.Parameter]


def _read(model: nn.Module, settings: TensorParallelConfig, comm: Communicator, stage: bool) -> _Reading:
    """Match the plan to the model. Raises TensorPlanError if they do not fit each other."""
    modules = dict(model.named_modules(remove_duplicate=False))
    matching.check_model(model)
    matches, unused = matching.find_matches(model, modules, settings.plan, stage)
    layers = matching.find_layers(matches, modules)
    tp_blocks = parallel_blocks.find_parallel_blocks(layers, modules)
    arrangements = _set_sizes(layers, tp_blocks, comm.world_size, settings.divide == "auto")
    divided = _attributes_to_divide(tp_blocks, modules, settings.divide, comm.world_size)
    written = _not_connected(matching.find_sharded_layers(modules, comm), settings.sequence_parallel)
    biases = [bias for tp_block in tp_blocks for bias in parallel_blocks.biases_of_heads(tp_block)]
    runs = sequence.find_runs([*tp_blocks, *written], modules) if settings.sequence_parallel else []
    if runs:
        sequence.check_losses(modules)
    partial = _partial_parameters(
        matches, tp_blocks, modules, bool(runs), {id(module._parameters[key]) for module, key in biases}
    )
    return _Reading(modules, unused, layers, arrangements, tp_blocks, written, divided, biases, runs, partial)


def _parallelize(
    model: nn.Module, settings: TensorParallelConfig, comm: Communicator, device: torch.device, stage: bool
) -> list[str]:
    reading = _read(model, settings, comm, stage)
    modules, tp_blocks = reading.modules, [*reading.tp_blocks, *reading.written]
    if comm.is_rank0:
        for how, names in reading.arrangements.items():
            logger.info("tensor_parallel: %s is sharded in %s", _shortened(names), how)
        if not (stage or reading.layers or any(isinstance(one, TensorParallelLayer) for one in modules.values())):
            logger.warning("tensor_parallel: the plan leaves all layers whole, so every rank computes the same")
    # From here on the model is changed, on all ranks alike.
    _synchronize(model, comm, device)
    for layer in reading.layers:
        _shard_layer(layer, comm)
    for module, key in reading.biases:
        shard_last_dim(module, key, comm)
    # The model's own code splits outputs into heads with these numbers.
    for where, name, share in reading.divided:
        setattr(modules[where], name, share)
    for parameter in reading.partial:
        mark_partial(parameter)
    sequence.connect(reading.runs, modules, comm, _uses_random_numbers(model))
    _connect(tp_blocks, reading.divided, modules, comm, bool(reading.runs), settings.plan)
    if any(isinstance(module, VocabParallelHead) for module in modules.values()):
        model.register_forward_hook(_gather_outputs)
    return reading.unused


def _not_connected(written: Sequence[ParallelBlock], sequence_parallel: bool) -> list[ParallelBlock]:
    """Return the blocks that no earlier engine of this model has connected.

    Raises TensorPlanError if sequence parallelism was different for the earlier engine.
    """
    new = []
    for tp_block in written:
        modules: list[Any] = [layer.module for layer in (*tp_block.columns, *tp_block.rows)]
        if all(module.region is None for module in modules):
            new.append(tp_block)
            continue
        before = any(module.sequence_dim is not None for module in modules)
        if before != sequence_parallel:
            raise TensorPlanError(
                f"tensor_parallel.sequence_parallel: expected {str(before).lower()}, as it was when the layers of "
                f"'{tp_block.name}' were sharded for an earlier engine, got {str(sequence_parallel).lower()}; make the "
                "model anew"
            )
    return new


def _set_sizes(
    layers: Sequence[Layer], tp_blocks: Sequence[ParallelBlock], size: int, share: bool
) -> dict[str, list[str]]:
    """Set the sizes of fused parts. Raises TensorPlanError for sizes that ranks cannot share equally.

    Args:
        layers: the layers to shard.
        tp_blocks: the blocks of these layers.
        size: number of ranks.
        share: several ranks may compute one head of key and value.

    Returns:
        Names of fused columns by a description of their parts.
    """
    tp_block_of = {id(layer): tp_block for tp_block in tp_blocks for layer in (*tp_block.columns, *tp_block.rows)}
    arrangements: dict[str, list[str]] = {}  # names of layers by arrangement
    for tp_block in tp_blocks:
        fused.check_family(tp_block)
    for layer in layers:
        if layer.style.sharding == "column":
            sizes, arrangement = fused.column_sizes(layer, tp_block_of.get(id(layer)))
            layer.set_sizes(sizes)
            if arrangement:
                arrangements.setdefault(f"{sizes} outputs: {arrangement}", []).append(layer.name)
    for tp_block in tp_blocks:
        if share:
            parallel_blocks.share_heads(tp_block, size)
        parallel_blocks.check_heads(tp_block, size)
    for layer in layers:
        if layer.style.sharding == "vocab" or isinstance(layer.module, nn.Embedding):
            continue
        lengths = layer.sizes if layer.style.sharding == "column" else [layer.inputs]
        for length, shared in zip(lengths, layer.shared or [False] * len(lengths), strict=True):
            if length % size and not shared:
                what = "outputs" if layer.style.sharding == "column" else "inputs"
                raise TensorPlanError(
                    f"expected {what} of '{layer.name}' that tensor_parallel.size {size} divides, got {length} (a "
                    f"layer of {layer.inputs} inputs and {layer.outputs} outputs); choose another size",
                    unsharded=layer.parent or layer.name,
                )
    return arrangements


def _shortened(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more like it"


def _attributes_to_divide(
    tp_blocks: Sequence[ParallelBlock], modules: Mapping[str, nn.Module], divide: str | Sequence[str], size: int
) -> list[Number]:
    """Return the attributes that the ranks divide among them, each once, with this rank's share as the value."""
    if isinstance(divide, str):
        divided = [number for tp_block in tp_blocks for number in parallel_blocks.numbers_to_divide(tp_block, size)]
    else:
        numbers = [(where, name, value) for where, module in modules.items() for name, value in _integers(module)]
        by_name = {f"{where}.{name}" if where else name: (where, name, value) for where, name, value in numbers}
        divided = []
        for pattern in divide:
            hits = [number for name, number in by_name.items() if matches(pattern, name)]
            if not hits:
                raise TensorPlanError(f"tensor_parallel.divide: {unmatched(pattern, by_name)}")
            divided += [(number[0], number[1], parallel_blocks.share_of(number, size)) for number in hits]
    return list({(id(modules[where]), name): (where, name, share) for where, name, share in divided}.values())


def _integers(module: nn.Module) -> Iterator[tuple[str, int]]:
    return ((name, value) for name, value in module.__dict__.items() if type(value) is int and not name.startswith("_"))


_HEAD_NORMS = set("q_norm k_norm q_layernorm k_layernorm q_ln k_ln query_norm key_norm norm_q norm_k qk_norm".split())


def _partial_parameters(
    by_name: Mapping[str, Match],
    tp_blocks: Sequence[ParallelBlock],
    modules: Mapping[str, nn.Module],
    sequence_sharded: bool,
    biases: Set[int],
) -> list[nn.Parameter]:
    """Return the replicated parameters inside regions, whose gradients are summed over ranks.

    Raises TensorPlanError for a parameter of which the plan does not say if it acts inside. With sequence parallelism
    all parameters of a block have partial gradients.
    """
    chosen: dict[int, nn.Parameter] = {}
    replicated: set[int] = set()
    for name, match in by_name.items():
        parent, _, key = name.rpartition(".")
        module = modules.get(name)
        if match.style.sharding not in ("partial", "whole") or (module is None and parent not in modules):
            continue
        named = list(module.parameters()) if module is not None else [modules[parent]._parameters.get(key)]
        if match.style.sharding == "partial":
            chosen.update((id(parameter), parameter) for parameter in named if parameter is not None)
        else:
            replicated.update(id(parameter) for parameter in named)
    for tp_block in tp_blocks:
        chosen.update((id(norm), norm) for norm in _norms_of_heads(tp_block) if id(norm) not in replicated)
        for where, inner in tp_block.inner_modules.items():
            for key, parameter in inner.named_parameters(recurse=False):
                in_plan = sequence_sharded or id(parameter) in (*chosen, *replicated, *biases)
                if parameter.requires_grad and not in_plan:
                    full = f"{where}.{key}" if where else key
                    raise TensorPlanError(
                        f"expected only layers between a column and its row, got the parameter '{full}', of which "
                        'it is unknown how it acts: give it the style "whole" if it acts outside of them, and '
                        '"replicated_with_grad_allreduce" if it acts between them on each head alike; else '
                        f"'{tp_block.name}' cannot be sharded",
                        unsharded=tp_block.name,
                    )
    return list(chosen.values())


def _norms_of_heads(tp_block: ParallelBlock) -> Iterator[nn.Parameter]:
    width = parallel_blocks.head_width(tp_block) if tp_block.is_attention else None
    for inner in tp_block.inner_modules.values():
        for name, child in inner.named_children():
            if name in _HEAD_NORMS and all(parameter.shape == (width,) for parameter in child.parameters()):
                yield from child.parameters()


def _synchronize(model: nn.Module, comm: Communicator, device: torch.device) -> None:
    """Give all ranks the first rank's values and random state. Tensors that are already sharded keep their values."""
    tensors = [*model.parameters(), *model.buffers()]
    full = [tensor for tensor in tensors if not tensor.is_meta and shard_spec_of(tensor) is None]
    synchronize_tensors(full, comm, device, "initial_sync")
    if comm.is_dry:  # a dry run: there are no other ranks
        return
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    for generator in generators:
        state = generator.get_state()
        broadcast_into(state, comm, device, "initial_sync")
        generator.set_state(state)


def _shard_layer(layer: Layer, comm: Communicator) -> None:
    style, module = layer.style, layer.module
    if isinstance(module, nn.Embedding):
        shard_embedding(module, comm)
    elif style.sharding == "vocab":
        shard_head(module, comm)
    elif any(layer.shared):
        share_column(module, comm, layer.sizes, layer.shared, layer.head_width)
    elif style.sharding == "column":
        shard_column(module, comm, layer.sizes, style.gather_output)
    else:
        shard_row(module, comm, style.input_is_parallel)


def _connect(
    tp_blocks: Sequence[ParallelBlock],
    divided: Sequence[Number],
    modules: Mapping[str, nn.Module],
    comm: Communicator,
    sequence_sharded: bool,
    plan: object,
) -> None:
    """Give layers their regions, and hook the modules that need inputs of this rank's shape."""
    changed = {id(modules[where]) for where, _, _ in divided}
    for tp_block in tp_blocks:
        region = Region(comm.rank, _uses_random_numbers(tp_block.module))
        for layer in (*tp_block.columns, *tp_block.rows):
            assert isinstance(layer.module, TensorParallelLayer)
            layer.module.set_region(region)
        if _forbid_replicated_modules(tp_block, region, plan) or region.random:
            region.watch(tp_block.module)
        if not sequence_sharded:  # with sequence parallelism the blocks have a hook with a better message
            how = f"has sharded its layers{advice(plan, unsharded=tp_block.name)}"
            FirstForwardErrors(tp_block.name, how).watch(tp_block.module)
        narrower = comm.world_size if any(id(inner) in changed for inner in tp_block.inner_modules.values()) else 1
        longer = comm.world_size if sequence_sharded else 1
        if tp_block.is_attention and narrower * longer > 1:
            inner_modules = {id(tp_block.module_of(layer)): layer for layer in tp_block.columns}
            for layer in inner_modules.values():
                hook = LocalShapeHook(layer.inputs, narrower, longer, sequence.DIM)
                tp_block.module_of(layer).register_forward_pre_hook(hook.on_call, with_kwargs=True)


def _forbid_replicated_modules(tp_block: ParallelBlock, region: Region, plan: object) -> bool:
    """Hook the modules with replicated parameters: a call inside ``region`` raises. Return True if there are any."""
    any_hooked = False
    for name, module in tp_block.module.named_modules():
        if isinstance(module, TensorParallelLayer) or module is tp_block.module:
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if not is_partial(parameter):  # frozen ones too: they may be trained later
                full = f"{tp_block.name}.{name}" if tp_block.name else name
                inside = advice(plan, add=(generalize(full), "replicated_with_grad_allreduce"))
                outside = advice(plan, unsharded=tp_block.name)
                module.register_forward_pre_hook(ReplicatedModuleCheck(region, full, key, inside, outside).check)
                any_hooked = True
                break
    return any_hooked


def _uses_random_numbers(module: nn.Module) -> bool:
    """Return True if the module may draw random numbers: it has a dropout layer, or an attribute named "drop..." above
    0."""
    for child in module.modules():
        if isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0:
            return True
        for name, value in child.__dict__.items():
            if "drop" in name.lower() and isinstance(value, (int, float)) and value > 0:
                return True
    return False


def _gather_outputs(module: nn.Module, args: object, outputs: object) -> object:
    """Gather logits in a forward without gradients. With gradients they stay sharded, for a loss outside of the model.

    This is a forward hook of the model.
    """
    if torch.is_grad_enabled():
        return None
    return map_tensors(lambda x: x.gathered() if isinstance(x, VocabParallelLogits) else x, outputs)
