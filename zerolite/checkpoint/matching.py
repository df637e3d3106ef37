"""Match stored parameters and param groups to those of the engine."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.state import GroupState, ParameterFacts

_SHOWN = 8  # names in a message
_ADAPTER_PARTS = re.compile(r"^base_model\.model\.|(?<=\.)base_layer\.")  # what adapters put into names
_BY_GROUP = frozenset(  # lists with an entry for each param group, in torch's schedulers
    ("base_lrs", "_last_lr", "min_lrs", "max_lrs", "lr_lambdas", "lmbdas", "base_momentums", "max_momentums")
)


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


def match_parameters(
    parameters: Mapping[str, ParameterFacts], stored: Mapping[str, ParameterFacts], loose: bool
) -> NameMatch:
    """Match parameters by name, or by any of the names of tied parameters.

    Raises CheckpointError for different shapes.

    Args:
        parameters: parameters of the model.
        stored: parameters in the checkpoint.
        loose: match also if an adapter was put around a module or removed (``q_proj.weight`` is
            ``base_model.model.q_proj.base_layer.weight``).
    """
    canonical = {alias: name for name, entry in stored.items() for alias in (*entry.aliases, name)}
    names: dict[str, str] = {}
    for name, entry in parameters.items():
        stored_name = next((canonical[spelling] for spelling in (name, *entry.aliases) if spelling in canonical), None)
        if stored_name is not None:
            names[name] = stored_name
    if loose:
        names |= _match_adapted(
            [n for n in parameters if n not in names], [n for n in stored if n not in names.values()]
        )
    check_shapes("", {name: (parameters[name].shape, stored[other].shape) for name, other in names.items()})
    used = set(names.values())
    return NameMatch(names, [n for n in parameters if n not in names], [n for n in stored if n not in used])


def _match_adapted(model_names: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    by_plain: dict[str, list[str]] = {}
    for name in stored:
        by_plain.setdefault(_ADAPTER_PARTS.sub("", name), []).append(name)
    candidates = {name: by_plain.get(_ADAPTER_PARTS.sub("", name), []) for name in model_names}
    return {name: names[0] for name, names in candidates.items() if len(names) == 1}


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


def match_groups(
    groups: Sequence[Sequence[str]], stored: Sequence[GroupState], names: Mapping[str, str]
) -> list[int | None]:
    """Return for each param group the index of the stored group with the same parameters, or None.

    Only parameters that both models train are compared. A group without any (an empty one, or one of frozen parameters)
    matches such a group of the same index.

    Args:
        groups: names of the parameters in each group.
        stored: the stored groups.
        names: stored names of parameters that are trained on both sides, by the name in the model.
    """
    known = set(names.values())
    by_members = {frozenset(group.names) & known: index for index, group in enumerate(stored)}
    result: list[int | None] = []
    for place, group in enumerate(groups):
        members = frozenset(names[name] for name in group if name in names)
        both_untrained = place < len(stored) and known.isdisjoint(stored[place].names)
        result.append(by_members.get(members) if members else place if both_untrained else None)
    return result


def reordered(state: Mapping[str, object], order: Sequence[int | None], stored: int) -> dict[str, Any]:
    """Return a torch scheduler's state with its lists by param group in the order of the groups here.

    Raises CheckpointError if the groups do not match.

    Args:
        state: the scheduler's state.
        order: result of :func:`match_groups`.
        stored: number of stored groups.
    """
    if list(order) == list(range(stored)) or len(order) == stored == 1:
        return dict(state)

    def of_groups(key: str, value: list[object]) -> list[object]:
        if len(value) != stored or any(index is None for index in order):
            raise CheckpointError(
                f"the schedule was saved for {stored} param groups, and those here are others ('{key}' has a value for "
                "each); pass load_lr_scheduler_states=False"
            )
        return [value[index] for index in order if index is not None]

    changed: dict[str, Any] = {}
    for key, value in state.items():
        if key in _BY_GROUP and isinstance(value, list):
            changed[key] = of_groups(key, value)
        elif key == "_schedulers" and isinstance(value, list):
            changed[key] = [reordered(one, order, stored) for one in value]
        else:
            changed[key] = value
    return changed
