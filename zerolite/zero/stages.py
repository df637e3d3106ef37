"""ZeRO stages as data: where each kind of state is kept between uses (Rajbhandari et al., 2020, section 5)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StagePolicy:
    """One row of the table. ``shard``: one part per rank; otherwise full, a copy on every rank."""

    stage: int
    shard_parameters: bool
    shard_gradients: bool  # also: every backward reduces, since no rank keeps the rest
    shard_optimizer: bool  # master weights and optimizer states


STAGES: dict[int, StagePolicy] = {
    policy.stage: policy
    for policy in (
        StagePolicy(0, shard_parameters=False, shard_gradients=False, shard_optimizer=False),
        StagePolicy(1, shard_parameters=False, shard_gradients=False, shard_optimizer=True),
        StagePolicy(2, shard_parameters=False, shard_gradients=True, shard_optimizer=True),
        StagePolicy(3, shard_parameters=True, shard_gradients=True, shard_optimizer=True),
    )
}
