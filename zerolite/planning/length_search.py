"""Search for the longest sequences that a job has room for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zerolite.config import load_config
from zerolite.planning.dry_run import older_objects_frozen
from zerolite.planning.make import ConfigLike, plan
from zerolite.planning.result import Plan, PlanError
from zerolite.utils.text import format_size

UNIT = 1024
"""Tokens of each rank by which lengths differ."""

_FIRST = 16  # units, and then four times as many: from there on most models need more memory with each token alike

_MOST = 1 << 40  # tokens


@older_objects_frozen()
def longest(
    model_fn: Callable[[], torch.nn.Module],
    config: ConfigLike,
    world_size: int,
    *,
    batch: Callable[[int], Callable[..., Any]],
    device_memory: int | str,
    **options: Any,
) -> tuple[int, Plan]:
    """Return the tokens of the longest sequences that fit, to 1 %, and their plan, which says so in its notes.

    Lengths are multiples of 1024 tokens for each of the ranks that divide a sequence. The memory of the host counts if
    ``host_memory`` is given.

    Args:
        model_fn: as for :func:`~zerolite.planning.make.plan`, like ``config`` and ``world_size``.
        batch: ``batch(length)`` returns the ``batch`` of a plan with sequences of ``length`` tokens.
        device_memory: memory of each rank's device.
        options: the other arguments of a plan.

    Raises:
        PlanError: as for a plan, and if the shortest sequences do not fit.
    """
    loaded = load_config(config)
    step = UNIT * loaded.sequence_parallel.size
    plans: dict[int, Plan] = {}
    low, guess = 0, _FIRST  # units: what fits, and what to plan next
    high: int | None = None  # what does not fit
    while high is None or high - low > _gap(low):
        if guess * step > _MOST:
            raise PlanError(f"expected memory that grows with the length, got room for {low * step:,} tokens and more")
        made = plan(model_fn, loaded, world_size, batch=batch(guess * step), device_memory=device_memory, **options)
        plans[guess] = made
        low, high = (guess, high) if made.fits else (low, guess)
        if high == 1:
            raise PlanError(
                f"expected room for sequences of {step:,} tokens, got a peak of {format_size(made.peak.bytes)}; take "
                "more ranks, a higher stage, or offload"
            )
        guess = _next(low, high, {units: _filled(one) for units, one in plans.items()})
    note = f"The longest sequences that fit have {low * step:,} tokens, to 1 %: {high * step:,} do not fit."
    return low * step, plans[low].model_copy(update={"notes": [note, *plans[low].notes]})


def _gap(low: int) -> int:
    """Return how far the shortest length that does not fit may be from the longest that does."""
    return max(1, low // 100)


def _filled(made: Plan) -> float:
    """Return the part of its memory that the device needs in a step, or the host, whichever is more."""
    assert made.device_memory is not None
    parts = [made.step_peak.bytes / made.device_memory]
    if made.host_spare is not None and made.host_memory:
        parts.append(1 - made.host_spare / made.host_memory)
    return max(parts)


def _next(low: int, high: int | None, filled: dict[int, float]) -> int:
    """Return the length to plan next, in units: where a line through the two lengths beside the limit, or the two
    longest ones, meets it."""
    if high is None and len(filled) == 1:
        return 4 * low
    if high is not None and not low:
        return high // 2
    one, other = sorted(filled)[-2:] if high is None else (low, high)
    slope = max(filled[other] - filled[one], 1e-9) / (other - one)
    most = 8 * low if high is None else high - _gap(low)
    return max(low + _gap(low), min(int(one + (1 - filled[one]) / slope), most))
