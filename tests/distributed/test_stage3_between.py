"""Stage 3: parameters that code between steps reads, writes, averages, penalises and saves."""

from __future__ import annotations

import pytest

from tests.distributed.configs import PARTITIONED
from tests.pool import Pools

CASES = "tests.distributed.cases.stage3_between"
PROGRAMS = ("swapping", "reading", "losses", "aliases", "writing", "states")
SLOW = [pytest.param(world, marks=pytest.mark.slow) for world in (1, 3, 4)]


@pytest.mark.fast("reading-bf16-2")
@pytest.mark.parametrize("world", [2, *SLOW])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_give_the_bits_of_stage_1(pools: Pools, name: str, precision: str, world: int) -> None:
    settings = ["moving", "kept", "one unit"] if world == 2 else list(PARTITIONED)
    pools(world).run(f"{CASES}:same_program", {"name": name, "settings": settings, "precision": precision})


def test_a_gather_for_each_parameter_and_no_memory_is_left(pools: Pools) -> None:
    for found in pools(2).run(f"{CASES}:collectives_and_memory"):
        assert found == {"gathers": 4, "questions": 0, "expired": True, "same": True, "released": [True] * 4}


@pytest.mark.fast("2-refused", "2-odd_parameters")
@pytest.mark.parametrize("case", ["refused", "one_rank_alone", "odd_parameters", "classes_of_the_user"])
@pytest.mark.parametrize("world", [2, *SLOW])
def test_case(pools: Pools, case: str, world: int) -> None:
    pools(world).run(f"{CASES}:{case}")


def test_a_line_warns_once_and_on_rank_0_alone(pools: Pools) -> None:
    main, other = pools(2).run(f"{CASES}:warnings_once")
    assert len(main) == len({line for line, _ in main}) == 2 and not other
    assert all("collective that all ranks must call" in message and "first.weight" in message for _, message in main)


def test_parameters_that_rest_on_the_host(pools: Pools) -> None:
    pools(2).run(f"{CASES}:offloaded", {"more": {"offload_param": {"device": "cpu"}}})


def test_parameters_that_rest_on_disk(pools: Pools, tmp_path: object) -> None:
    pools(2).run(f"{CASES}:offloaded", {"more": {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}})
