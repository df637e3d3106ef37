"""Messages about batch settings that differ between a checkpoint and the run that resumes from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def window_obstacle(saved: int, here: int, saved_ranks: int, elastic: bool) -> str | None:
    """Why a step that was under way cannot be finished, or None. `saved`, `here`: its micro-batches, then and now.
    `elastic`: whether their number follows from the number of ranks."""
    if saved == here:
        return None
    ranks = f"{saved_ranks} rank{'s' if saved_ranks != 1 else ''}"
    remedy = f"go on with {ranks}, as then" if elastic else "set it as it was"
    return (
        f"the checkpoint was saved within a step, whose gradient_accumulation_steps was {saved} and here is {here}. "
        f"Nothing was loaded; {remedy}, or load one that was saved after engine.step()"
    )


def changed_batch(saved: Mapping[str, Any], saved_ranks: int, here: int | None, ranks: int) -> str | None:
    """What to know where steps have become larger or smaller because there are more or fewer ranks, or None.

    Args:
        saved: the configuration that the checkpoint was saved with.
        saved_ranks, ranks: their numbers, then and now.
        here: the train batch size now, in samples; None where the user's own loader decides.
    """
    before = saved.get("train_batch_size")
    if saved_ranks == ranks or here is None or not isinstance(before, int) or before == here:
        return None
    return (
        f"a step takes {here} samples on {ranks} rank{'s' if ranks != 1 else ''}, and took {before} on {saved_ranks} "
        "when the checkpoint was saved; set train_batch_size, or the elasticity block, to have one size for any number "
        "of ranks"
    )
