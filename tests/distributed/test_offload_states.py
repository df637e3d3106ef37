"""engine.offload_states() and reload_states(): memory goes, numbers stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.configs import ADAMW, config
from tests.pool import Pools

CASES = "tests.distributed.cases.offload_states"
STAGE_3 = {"stage3_param_persistence_threshold": 50}


def settings(stage: int, precision: str) -> dict[str, Any]:
    return config(stage, precision, accumulation=2, optimizer=ADAMW, zero=STAGE_3 if stage == 3 else None)


def check(pools: Pools, world: int, stages: tuple[int, ...], precision: str) -> None:
    runs: dict[str, dict[str, Any]] = {}
    for stage in stages:
        given = {"config": settings(stage, precision)}
        runs[f"{stage} plain"] = {**given, "out": None, "offloads": False}
        runs[f"{stage} all"] = {**given, "out": None, "offloads": True}
        runs[f"{stage} some"] = {**given, "out": ["optim_states", "hp_params"], "offloads": True, "non_blocking": True}
    for ranks in pools(world).run(f"{CASES}:several", {"runs": runs}):
        for stage in stages:
            plain = ranks[f"{stage} plain"]
            for kind in ("all", "some"):
                found = ranks[f"{stage} {kind}"]
                assert found["losses"] == plain["losses"]
                assert all(torch.equal(value, plain["state"][name]) for name, value in found["state"].items())
                assert torch.equal(found["moment"], plain["moment"])
                assert found["copies"] == plain["copies"], (stage, kind)
                moved = ("gradients", "communication_buckets")  # a reduction that was under way has ended meanwhile
                before, after = ({k: n for k, n in found[m].items() if k not in moved} for m in ("before", "after"))
                assert after == before, (stage, kind)
            during = ranks[f"{stage} all"]["during"]
            states = ("compute_parameters", "persistent_parameters", "gradients", "master_weights", "optimizer_states")
            assert [item for item in states if during[item]] == []
            whole = ("master_weights", "optimizer_states")
            assert {item: ranks[f"{stage} all"]["host"][item] for item in whole} == {i: before[i] for i in whole}
            said = ranks[f"{stage} all"]["refused"]
            assert all(said.values()), said
            some = ranks[f"{stage} some"]
            assert not some["during"]["optimizer_states"] and some["during"]["compute_parameters"]
            assert [name for name, words in some["refused"].items() if not words] == ["forward", "read"]


def test_states_go_and_come_back(pools: Pools) -> None:
    check(pools, 2, (2, 3), "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_stage(pools: Pools, world: int, precision: str) -> None:
    check(pools, world, (0, 1, 2, 3), precision)


def test_wrong_arguments(pools: Pools) -> None:
    said = pools(1).run(f"{CASES}:wrong_arguments", {"config": settings(0, "fp32")})[0]
    assert "expected include to be some of" in said["include"] and "'moments'" in said["include"]
    assert 'expected device to be "cpu"' in said["device"]


@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_that_goes_gives_back_what_is_the_models(pools: Pools, stage: int) -> None:
    assert pools(1).run(f"{CASES}:engine_goes", {"config": settings(stage, "fp32")}) == [True]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_host_without_memory_changes_nothing(pools: Pools, stage: int) -> None:
    given = config(stage, "bf16", optimizer=ADAMW, zero=STAGE_3 if stage == 3 else None)
    for found in pools(2).run(f"{CASES}:no_memory", {"config": given}):
        assert found == {"said": "no room", "kept": True}
