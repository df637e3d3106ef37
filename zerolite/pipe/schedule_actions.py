"""Order of computations in torch's pipeline schedules, found without processes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn

from zerolite.pipe.schedules import schedule_class

FORWARD, BACKWARD, INPUTS, WEIGHTS = "forward", "backward", "backward of inputs", "backward of weights"


class Action(NamedTuple):
    """One computation of a schedule.

    Attributes:
        kind: one of the four names above; ``BACKWARD`` is the backward of inputs and weights together.
        part: part of the model, counted over all ranks.
        micro_batch: index of the micro-batch.
    """

    kind: str
    part: int
    micro_batch: int


def rank_actions(schedule: str, ranks: int, chunks: int, micro_batches: int) -> list[list[Action]]:
    """Return the computations of each rank in one step, in order.

    Args:
        schedule: its name in the config.
        ranks: number of pipeline ranks.
        chunks: parts of the model on each rank.
        micro_batches: micro-batches of a step.

    Raises:
        ValueError: the installed torch lacks this schedule, or the schedule cannot run this number of micro-batches.
    """
    if schedule == "gpipe":
        return [_all_forward(rank, micro_batches) for rank in range(ranks)]
    if schedule == "1f1b":
        return [_one_forward_one_backward(rank, ranks, micro_batches) for rank in range(ranks)]
    shared = {"num_stages": ranks * chunks, "group_size": ranks, "group_rank": 0, "submod": nn.Module()}
    shared["stage_index_to_group_rank"] = {}  # torch 2.6's schedules read this attribute
    stages: Any = [SimpleNamespace(stage_index=index, **shared) for index in range(chunks)]
    order = schedule_class(schedule)(stages, micro_batches, loss_fn=lambda outputs, target: None).pipeline_order
    return [[action for entry in order[rank] for action in _actions_of(entry)] for rank in range(ranks)]


def _all_forward(rank: int, micro_batches: int) -> list[Action]:
    return [Action(kind, rank, index) for kind in (FORWARD, BACKWARD) for index in range(micro_batches)]


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    ahead = min(micro_batches, ranks - rank)
    forwards = [Action(FORWARD, rank, index) for index in range(micro_batches)]
    backwards = [Action(BACKWARD, rank, index) for index in range(micro_batches)]
    pairs = itertools.zip_longest(backwards, forwards[ahead:])
    return forwards[:ahead] + [action for pair in pairs for action in pair if action is not None]


_KINDS = {"F": FORWARD, "B": BACKWARD, "I": INPUTS, "W": WEIGHTS}
"""Kinds by the letters of torch's computation types in its text format."""


def _actions_of(entry: Any) -> list[Action]:
    """Return the actions of one entry of torch's schedule: None while a rank waits, or several computations at once."""
    if entry is None:
        return []
    inner = getattr(entry, "sub_actions", None)
    if inner:
        return [action for one in inner for action in _actions_of(one)]
    computation = entry.computation_type
    # In torch 2.6 the values are numbers, and only the text has the letter.
    kind = _KINDS.get(computation.value if isinstance(computation.value, str) else str(computation))
    return [] if kind is None else [Action(kind, entry.stage_index, entry.microbatch_index)]
