"""Description of a model in state.json, joined from the descriptions of its pipeline stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.state import ParameterFacts, TensorFacts


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model, or a stage of it, as they stand in state.json.

    Attributes:
        parameters: by the first of its names, with full shapes.
        groups: the names in each of the optimizer's param groups.
    """

    parameters: dict[str, ParameterFacts]
    buffers: dict[str, TensorFacts]
    groups: list[list[str]]


def joined(stages: Sequence[ModelFacts]) -> ModelFacts:
    """Join the facts of the stages, the first one first, to those of the whole model. Raises CheckpointError if they do
    not make up one model."""
    parameters: dict[str, ParameterFacts] = {}
    buffers: dict[str, TensorFacts] = {}
    groups: list[list[str]] = [[] for _ in stages[0].groups]
    for number, stage in enumerate(stages):
        for name, entry in stage.parameters.items():
            known = parameters.setdefault(name, entry)
            if known.shape != entry.shape:
                raise CheckpointError(
                    f"parameter '{name}' is {tuple(known.shape)} on one stage of the pipeline and "
                    f"{tuple(entry.shape)} on stage {number}; expected one parameter of the model to have one shape"
                )
        for name, buffer in stage.buffers.items():
            buffers.setdefault(name, buffer)
        if len(stage.groups) != len(groups):
            raise CheckpointError(
                f"the optimizer has {len(groups)} param groups on the first stage of the pipeline and "
                f"{len(stage.groups)} on stage {number}; expected as many on all, with or without parameters"
            )
        groups = [list(dict.fromkeys(pair[0] + pair[1])) for pair in zip(groups, stage.groups, strict=True)]
    return ModelFacts(parameters, buffers, groups)


def of_earlier_stages(stages: Sequence[ModelFacts], stage: int) -> frozenset[str]:
    """The names of the parameters that stages before ``stage`` have."""
    return frozenset(name for earlier in stages[:stage] for name in earlier.parameters)


def first_with(names_by_rank: Iterable[Iterable[str]]) -> dict[str, int]:
    """Return for each name the first rank that has it."""
    found: dict[str, int] = {}
    for rank, names in enumerate(names_by_rank):
        for name in names:
            found.setdefault(name, rank)
    return found
