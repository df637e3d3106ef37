"""Norm, overflow and tied-weight sums over model-parallel ranks, for the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zerolite.comm import Topology, stages_communicator
from zerolite.diagnostics.agreement import Description, check_agreement
from zerolite.tensor_parallel.cuts import cut_of, is_partial
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.grad_reducer import GradReducer
from zerolite.zero.grad_stats import Across
from zerolite.zero.gradient_sums import GradientSums, SharedGradients


def spread_over(
    topology: Topology,
    buffer: ParameterBuffer,
    ties: Mapping[int, Any],
    reducer: GradReducer,
    device: torch.device,
) -> tuple[Across, GradientSums]:
    """For the trained parameters of this rank. ties: by the id of a parameter that several
    stages have, which (``Tie``). Called on all ranks."""

    def counts(index: int) -> bool:
        parameter = buffer.parameters[index]
        tie = ties.get(id(parameter))
        if tie is not None and tie.ranks[0] != topology.pipe.rank:
            return False
        return cut_of(parameter) is not None or topology.tensor.rank == 0

    across = Across(topology.model, counts)
    trained = buffer.parameters
    partial = tuple(i for i, p in enumerate(trained) if is_partial(p) and cut_of(p) is None)
    away = [i for i in partial if reducer.away(buffer.layout.slots[i].bucket)]
    if away:
        raise ValueError(
            f"zero_optimization.offload_optimizer: expected no parameter whose gradient tensor-parallel ranks must sum "
            f"on the device, got '{buffer.layout.slots[away[0]].name}'; leave the block out"
        )
    groups = [SharedGradients(topology.tensor, partial)]
    tied = [(index, ties[id(parameter)]) for index, parameter in enumerate(trained) if id(parameter) in ties]
    for index, tie in sorted(tied, key=lambda entry: str(entry[1].key)):
        shared = stages_communicator(topology, tuple(tie.ranks), device)
        dtype = {f"parameter '{tie.key}', which stages share,": {"dtype": str(trained[index].dtype)}}
        check_agreement(Description(dtype), shared, device, "zerolite.initialize: stages compute in different dtypes")
        groups.append(SharedGradients(shared, (index,)))
    return across, GradientSums(groups, reducer, topology.data.rank)
