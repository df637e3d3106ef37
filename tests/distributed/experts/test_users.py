"""Users freeze experts of several ranks, generate with them and register them."""

from __future__ import annotations

import pytest

import zerolite
from tests.toolkit import experts
from tests.toolkit.ranks import on_ranks
from zerolite.moe import ExpertParallel


@on_ranks(2, timeout=60)
def test_generation_and_external_parameters_are_refused() -> None:
    engine = experts.make("Mixture", 2, "3 moving")
    message = r"expected all experts on every rank, got expert_parallel.size 2"
    with pytest.raises(RuntimeError, match=message), zerolite.gathered_for_generation(engine):
        pass
    first, second = engine.module.blocks
    with pytest.raises(ValueError, match=r"got 'blocks.1.experts.up_weight' of experts"):
        zerolite.zero.register_external_parameter(first, second.experts.up_weight)


def test_frozen_members_stay_frozen() -> None:
    members = [experts.Expert().requires_grad_(False) for _ in range(2)]
    assert not any(parameter.requires_grad for parameter in ExpertParallel(members).parameters())
    with pytest.raises(ValueError, match="frozen in all of them or in none"):
        ExpertParallel([*members, experts.Expert()])
