"""Match stored parameters and param groups to those of the engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.state import GroupState, ParameterFacts

_SHOWN = 8  # names in a message


@dataclass(frozen=True)
class NameMatch:
    """Names of parameters in the model and in a checkpoint.

    Attributes:
        names: the stored name, by the name in the model.
        missing: names in the model that are not stored.
        unexpected: stored names that are not in the model.
    """

    names: dict[str, str]
    missing: list[str]
    unexpected: list[str]

    def without(self, left_out: Collection[str]) -> NameMatch:
        """Return the match if the checkpoint has no values for ``left_out``: they are missing, and not unexpected."""
        names = {name: other for name, other in self.names.items() if other not in left_out}
        missing = self.missing + [name for name in self.names if name not in names]
        return NameMatch(names, missing, [name for name in self.unexpected if name not in left_out])


def match_parameters(parameters: Mapping[str, ParameterFacts], stored: Mapping[str, ParameterFacts]) -> NameMatch:
    """Match parameters of the model with those in the checkpoint by name, or by any of the names of tied parameters.

    Raises CheckpointError for different shapes.
    """
    canonical = {alias: name for name, entry in stored.items() for alias in (*entry.aliases, name)}
    names: dict[str, str] = {}
    for name, entry in parameters.items():
        stored_name = next((canonical[spelling] for spelling in (name, *entry.aliases) if spelling in canonical), None)
        if stored_name is not None:
            names[name] = stored_name
    check_shapes("", {name: (parameters[name].shape, stored[other].shape) for name, other in names.items()})
    used = set(names.values())
    return NameMatch(names, [n for n in parameters if n not in names], [n for n in stored if n not in used])


def check_complete(what: str, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Raise CheckpointError if a strict load would leave something out."""
    problems = []
    if missing:
        problems.append(f"it has no {what} {listed(missing)}")
    if unexpected:
        problems.append(f"the model has no {what} {listed(unexpected)}")
    if problems:
        raise CheckpointError(
            f"the checkpoint is of another model: {'; '.join(problems)}. Nothing was loaded; pass "
            "load_module_strict=False to load what both have"
        )


def check_shapes(what: str, shapes: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> None:
    """Raise CheckpointError if a tensor has different shapes in model and checkpoint. ``shapes``: both, by name."""
    wrong = [
        f"{what}'{name}' is {tuple(expected)} here and {tuple(stored)} there"
        for name, (expected, stored) in shapes.items()
        if list(expected) != list(stored)
    ]
    if wrong:
        raise CheckpointError(f"the checkpoint is of another model: {listed(wrong)}. Nothing was loaded")


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# -------------------------------------------------------------------- param groups


def check_groups(groups: Sequence[Sequence[str]], stored: Sequence[GroupState], names: Mapping[str, str]) -> None:
    """Raise CheckpointError unless the param groups are the stored ones, in the same order.

    Only parameters that both models train are compared.

    Args:
        groups: names of the parameters in each group.
        stored: the stored groups.
        names: stored names of parameters that are trained on both sides, by the name in the model.
    """
    there = {name: index for index, group in enumerate(stored) for name in group.names}
    moved = [
        f"{name} (group {there.get(names[name])} there, {index} here)"
        for index, group in enumerate(groups)
        for name in group
        if name in names and there.get(names[name]) != index
    ]
    if moved or len(groups) != len(stored):
        raise CheckpointError(
            f"expected the {len(stored)} param groups of the checkpoint, in their order, got {len(groups)}"
            f"{' with others in them: ' * bool(moved)}{listed(moved)}. Nothing was loaded; pass "
            "load_optimizer_states=False and load_lr_scheduler_states=False to begin with new states"
        )
