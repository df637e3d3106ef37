"""Construction of the observers of steps: checks, comparisons of ranks, their agreement on stage 3's schedule."""

from __future__ import annotations

import functools

import torch

from zerolite.diagnostics.consistency import ConsistencyCheck, LatestNumbers, shared_weights
from zerolite.diagnostics.updated_weights import UpdatedWeights
from zerolite.engine.options import SKIPS_ON_DEVICE
from zerolite.engine.special_engines import EvaluationPipeline
from zerolite.utils.accelerator import host_value
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.engine_parts import EngineParts
from zerolite.zero.step_observers import ScheduleAgreement, UnusedParameters


def observe_steps(parts: EngineParts, device_kind: str) -> None:
    """Add the observers that have a slice of the statistics, or raise what these show. Called on all ranks.

    Args:
        device_kind: type of device whose rules of memory apply.
    """
    model, config, topology, observers = parts.model, parts.config, parts.topology, parts.observers
    data, coordinator = topology.data, parts.coordinator
    compared = None
    if coordinator is not None:
        schedule, parts_of_model = coordinator.schedule, topology.model
        agreement = ScheduleAgreement(schedule, parts_of_model.rank, parts_of_model.world_size, data.main)
        observers.add(agreement)
        if isinstance(parts.pipeline, EvaluationPipeline):
            parts.pipeline.use_agreement(agreement, data, parts.device)
        if topology.trivial:  # a tensor shard may be small enough to stay whole on one rank and not on another
            compared = schedule
    inner, interval = parts.optimizer.inner, config.consistency_check_interval
    latest = LatestNumbers(inner, compared)
    compares = bool(interval) and topology.world.world_size > 1
    checks_finite = parts.pipeline.state.options.check_finite
    if compares or checks_finite:
        observers.add(latest)
    if checks_finite:
        most = _most_groups(parts, len(inner.param_groups))
        observers.add(UpdatedWeights(inner, most, latest))
    if compares:
        weights = functools.partial(shared_weights, model, parts.buffer, main=data.main)
        late = device_kind in SKIPS_ON_DEVICE
        observers.add(ConsistencyCheck(topology, parts.device, latest, weights, interval, late))
    find_removed = functools.partial(_find_removed, model, parts.buffer)
    observers.add(UnusedParameters(parts.buffer, config.zero_optimization.ignore_unused_parameters, find_removed))


def _most_groups(parts: EngineParts, groups: int) -> int:
    """Return the largest number of param groups of the ranks of one copy of the model."""
    topology = parts.topology
    if topology.trivial:
        return groups
    counts = torch.tensor([groups], device=parts.device)
    topology.model.all_reduce_max(counts, tag="initial_sync")
    return max(groups, int(host_value(counts)))  # a dry run reads nothing


def _find_removed(model: torch.nn.Module, buffer: ParameterBuffer, indices: list[int]) -> list[int]:
    """Return the trained parameters among ``indices`` that ``model`` no longer has."""
    there = {id(parameter) for parameter in model.parameters()}
    return [index for index in indices if id(buffer.parameters[index]) not in there]
