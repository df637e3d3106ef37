"""Reduction of a full model to this rank's pipeline stage, including tied parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerolite.comm import (
    Communicator,
    HostGroup,
    RaiseTogether,
    Topology,
    collective,
    make_stage_groups,
    stages_communicator,
)
from zerolite.comm.initial_sync import synchronize_tensors
from zerolite.config.parallelism import PipelineConfig
from zerolite.data.micro_batch import LossFunction
from zerolite.pipe import partition
from zerolite.pipe.chunks import ONE_STAGE_ONLY, Chunk, LayerChunk
from zerolite.pipe.modules import PipelineModule, layer_name, trained_numel
from zerolite.pipe.parameter_assignment import ParameterAssignment, assign_layer_parameters, remove_other_parameters
from zerolite.pipe.schedules import V_SHAPED, schedule_class
from zerolite.pipe.split import split_by_names
from zerolite.tensor_parallel.shard_spec import set_names


@dataclass(frozen=True)
class TiedParam:
    """A parameter of this rank that several stages have.

    Attributes:
        parameter: the parameter.
        key: its name in the full model.
        ranks: ranks of the pipeline that have it, ascending.
    """

    parameter: nn.Parameter
    key: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class PreparedStage:
    """Result of :func:`prepare`.

    Attributes:
        module: the model with this rank's layers.
        loss_fn: the loss function of ``initialize`` or of the PipelineModule.
        ties: tied parameters, sorted by key.
        chunks: this rank's parts of the model.
        parts: number of parts over all ranks.
        schedule: its name in the config.
    """

    module: nn.Module
    loss_fn: LossFunction | None
    ties: list[TiedParam]
    chunks: list[Chunk]
    parts: int
    schedule: str


@collective
def prepare(
    model: nn.Module,
    settings: PipelineConfig,
    topology: Topology,
    device: torch.device,
    loss_fn: LossFunction | None = None,
) -> PreparedStage:
    """Leave in ``model`` the layers of this rank's stage, with the values of the first stage's ranks.

    Called before anything else is made from the model. Parameters keep their names; those of other stages lose their
    memory. Raises ValueError for a model that cannot be divided.

    Args:
        model: a :class:`~zerolite.pipe.modules.PipelineModule`, an ``nn.Sequential``, or any other model, divided at
            the names in ``settings.split``.
        loss_fn: the loss function of ``initialize``; a PipelineModule may have its own.
    """
    stages = topology.pipe.world_size
    if vars(model).get(_STAGED):
        raise ValueError(
            "pipeline: expected the full model, got one that an earlier zerolite.initialize has reduced to a stage; "
            "make a new one"
        )
    chunks_each = settings.chunks_per_rank if stages > 1 else 1
    if stages > 1:
        schedule_class(settings.schedule)
    ranks = partition.ranks_of_parts(stages, chunks_each, settings.schedule in V_SHAPED)
    own_parts = [part for part, rank in enumerate(ranks) if rank == topology.pipe.rank]
    host = HostGroup(topology.world, "pipeline")
    divide: _Divide
    if isinstance(model, PipelineModule):
        _apply_config(model, settings, stages, loss_fn)
        loss_fn = model.loss_fn if loss_fn is None else loss_fn
        bounds = _bounds(model, host, len(ranks))
        _broadcast_first_stage([layer for layer in model.specs if isinstance(layer, nn.Module)], topology.pipe, device)
        divide = functools.partial(_divide_layers, model, bounds, own_parts)
    else:
        _broadcast_first_stage([model], topology.pipe, device)
        function: Any = _divide_sequential if type(model) is nn.Sequential else split_by_names
        divide = functools.partial(function, model, settings, len(ranks), own_parts)
    chunks, assignments = _divide_on_all_ranks(host, divide)
    vars(model)[_STAGED] = stages > 1
    ties = _ties(assignments, ranks, topology.pipe.rank)
    _synchronize_ties(ties, host, topology, device)
    return PreparedStage(model, loss_fn, ties, chunks, len(ranks), settings.schedule)


_STAGED = "_zerolite_staged"
_Divide = Callable[[], tuple[list[Chunk], list[ParameterAssignment]]]


def _divide_on_all_ranks(host: HostGroup, divide: _Divide) -> tuple[list[Chunk], list[ParameterAssignment]]:
    """Return the result of ``divide``. If it fails on some ranks, which have other layers, all ranks raise."""

    def checked() -> tuple[list[Chunk], list[ParameterAssignment]]:
        chunks, assignments = divide()
        _check_trained(chunks)
        return chunks, assignments

    return RaiseTogether(host, "zerolite.initialize", failed="could not make its stage:").run(checked)


def _ties(assignments: Iterable[ParameterAssignment], ranks: Sequence[int], own_stage: int) -> list[TiedParam]:
    """Return the ties of the parameters that are on this stage and on others."""
    ties = []
    for assignment in assignments:
        on = tuple(sorted({ranks[part] for part in assignment.parts}))
        if own_stage in on and len(on) > 1:
            set_names(assignment.parameter, assignment.names)
            ties.append(TiedParam(assignment.parameter, assignment.names[0], on))
    return sorted(ties, key=lambda tie: tie.key)


def _synchronize_ties(ties: Sequence[TiedParam], host: HostGroup, topology: Topology, device: torch.device) -> None:
    """Make the process groups of stages with tied parameters, and give the parameters equal values."""
    # A process group is made on all ranks in the same order, so all ranks need the combinations of all stages.
    shared_by = {tie.ranks for tie in ties}
    make_stage_groups(topology, sorted(shared_by.union(*host.gather(shared_by))))
    for tie in ties:
        comm = stages_communicator(topology, tie.ranks, device)
        synchronize_tensors([tie.parameter], comm, device, "initial_sync")


def _check_trained(chunks: Iterable[Chunk]) -> None:
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError(
            "pipeline: expected a trained parameter on every stage, got a stage with none; use fewer stages, or "
            "another partition_method or split"
        )


@torch.no_grad()
def _broadcast_first_stage(models: Iterable[nn.Module], pipe: Communicator, device: torch.device) -> None:
    """Broadcast the values of the first stage's ranks. Every rank still has the full model, maybe from another seed."""
    if pipe.world_size > 1:
        tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        synchronize_tensors(tensors, pipe, device, "initial_sync")


# -------------------------------------------------------------------- sequences of layers


def _apply_config(model: PipelineModule, settings: PipelineConfig, stages: int, loss_fn: LossFunction | None) -> None:
    """Use the config's settings where the PipelineModule has none, and raise ValueError where the two differ."""
    if model.num_stages not in (None, stages):
        raise ValueError(
            f"PipelineModule: expected num_stages = {stages}, the config's pipeline.stages, got {model.num_stages}; "
            "change one of the two, or leave num_stages out"
        )
    _check_no_split(settings, "a PipelineModule")
    if loss_fn is not None and model.loss_fn is not None and loss_fn is not model.loss_fn:
        raise ValueError(
            "zerolite.initialize: expected one loss_fn, got one as an argument and another in the PipelineModule; pass "
            "only one of them"
        )
    model.apply_config_defaults(settings.activation_checkpoint_interval, settings.partition_method)


def _check_no_split(settings: PipelineConfig, what: str) -> None:
    if settings.split != "auto":
        raise ValueError(
            f"pipeline.split: expected no names for {what}, which pipeline.partition_method divides; leave it out"
        )


def _bounds(model: PipelineModule, host: HostGroup, parts: int) -> list[int]:
    """Return the bounds of the parts of ``model``, and set the seed of its layers. The first rank computes both."""

    def on_first_rank() -> Any:
        if host.rank and host.group is not None:  # in a dry run there is no group, and each rank is alone
            return None
        seed = torch.initial_seed() if model.base_seed is None else model.base_seed
        try:
            return [seed, _bounds_of(str(model.partition_method), model.specs, model.class_names(), parts)]
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"PipelineModule: its layers could not be divided: {reason}") from error

    model.base_seed, bounds = RaiseTogether(host, "zerolite.initialize", ValueError).gather(on_first_rank)[0]
    return list(bounds)


def _bounds_of(method: str, layers: Sequence[object], names: Sequence[str], parts: int) -> list[int]:
    return partition.bounds_of(method, names, parts, lambda: [float(trained_numel(layer)) for layer in layers])


def _divide_layers(
    model: PipelineModule, bounds: Sequence[int], own_parts: Sequence[int]
) -> tuple[list[Chunk], list[ParameterAssignment]]:
    model.build([index for part in own_parts for index in range(bounds[part], bounds[part + 1])])
    layers = [
        layer if isinstance(layer, nn.Module) else model.layers._modules.get(str(first))
        for layer, first in zip(model.specs, model.first_indices, strict=True)
    ]
    names = [f"layers.{first}" for first in model.first_indices]
    make = functools.partial(LayerChunk, interval=model.interval, checkpointable=model.checkpointable_layers)
    return _make_chunks(layers, names, model.functions, bounds, own_parts, make)


def _divide_sequential(
    model: nn.Sequential, settings: PipelineConfig, parts: int, own_parts: Sequence[int]
) -> tuple[list[Chunk], list[ParameterAssignment]]:
    _check_no_split(settings, "an nn.Sequential")
    layers = list(model)
    bounds = _bounds_of(settings.partition_method, layers, [layer_name(layer) for layer in layers], parts)
    make = functools.partial(LayerChunk, interval=settings.activation_checkpoint_interval)
    chunks = _make_chunks(layers, list(model._modules), dict(enumerate(layers)), bounds, own_parts, make)
    if parts > 1:
        model.register_forward_pre_hook(_raise_on_call)
    return chunks


def _raise_on_call(model: nn.Module, args: object) -> None:
    raise RuntimeError(ONE_STAGE_ONLY)


def _make_chunks(
    layers: Sequence[nn.Module | None],
    names: Sequence[str],
    functions: Mapping[int, Callable[[Any], Any]],
    bounds: Sequence[int],
    own_parts: Sequence[int],
    make: Callable[..., Chunk],
) -> tuple[list[Chunk], list[ParameterAssignment]]:
    """Make the chunks of the parts ``own_parts``, and remove everything else from the layers.

    Parameters stay that a layer of this rank shares with one of another rank; buffers of other ranks' layers do not.

    Args:
        layers: all layers; None for a layer that is not on this rank.
        names: names of the layers in the full model.
        functions: the callables of this rank's layers, by index.
        bounds: where the parts begin, see partition.py.
        own_parts: indices of this rank's parts.
        make: called with (index, callables, modules), makes a chunk.
    """
    assignments = assign_layer_parameters(layers, names, bounds)
    staying = {id(assignment.parameter) for assignment in assignments if assignment.parts & set(own_parts)}
    indices = {part: range(bounds[part], bounds[part + 1]) for part in own_parts}
    modules = {part: [layer for i in of_part if (layer := layers[i]) is not None] for part, of_part in indices.items()}
    kept_layers = {id(layer) for some in modules.values() for layer in some}
    for layer in layers:
        if layer is not None and id(layer) not in kept_layers:
            remove_other_parameters(layer, staying.__contains__, lambda path: True)
    return [make(part, [functions[i] for i in indices[part]], modules[part]) for part in own_parts], assignments
