"""ZeRO stages as data: where each kind of state is kept between uses (Rajbhandari et al., 2020, section 5)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StagePolicy:
    """One row of :data:`STAGES`. A sharded state has one shard per rank; otherwise every rank has a full copy."""

    stage: int
    shard_parameters: bool
    shard_gradients: bool  # then every backward reduces, because no rank keeps full gradients
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
