"""A dry communicator does what the one that it stands for does, and sends nothing."""

from __future__ import annotations

import pytest

from tests.distributed.cases.dry import KINDS
from tests.pool import Pools

CASES = "tests.distributed.cases.dry"


@pytest.mark.fast("2-native")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_a_dry_communicator_launches_and_allocates_what_a_real_one_does(pools: Pools, world: int, kind: str) -> None:
    for result in pools(world).run(f"{CASES}:accounts", {"kind": kind}):
        for which in ("dry", "fake"):
            for real, dry in zip(result["real"], result[which], strict=True):
                assert dry == real, which
        named = [entry for _, *more in result["real"][:-1] if len(more) == 3 for entry in more[1]]
        assert named and {item for _, item in named} == {"communication_buckets"}
        assert len(result["real"][-1]) > 30, "collectives are recorded"
