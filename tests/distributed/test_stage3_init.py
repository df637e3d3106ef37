"""zero.Init, zero.GatheredParameters and external parameters on one, two and three ranks."""

from __future__ import annotations

import pytest

from tests.distributed.configs import config
from tests.pool import Pool, Pools

CASES = "tests.distributed.cases.stage3_init"
CONSTRUCTORS = "tests.distributed.cases.stage3_constructors"
GATHERED = "tests.distributed.cases.stage3_gathered"
WORLDS = pytest.mark.parametrize("world", [1, 2, 3])
SETTINGS = pytest.mark.parametrize("settings", ["moving", "kept", "whole"])


@pytest.mark.fast("rank0_values-1", "meta_model-3")
@WORLDS
@pytest.mark.parametrize(
    "case",
    [
        "rank0_values",
        "many_kinds_of_init",
        "exceptions_in_the_context",
        "dtype_and_device",
        "state_dict_of_what_no_engine_has",
        "meta_model",
        "meta_engine",
        "meta_without_reset",
        "resized_embedding",
        "changed_before_initialize",
        "plain_parameters_have_none",
    ],
)
def test_case(pools: Pools, world: int, case: str) -> None:
    pools(world).run(f"{CASES}:{case}")


@pytest.mark.fast("1")
@pytest.mark.parametrize("world", [1, 2])
def test_constructors_give_the_values_of_plain_construction(pools: Pools, world: int) -> None:
    pools(world).run(f"{CONSTRUCTORS}:same_values")


def test_questions_about_a_released_parameter_gather_nothing(pools: Pools) -> None:
    pools(2).run(f"{CONSTRUCTORS}:questions")
    pools(2).run(f"{CONSTRUCTORS}:all_questions")
    pools(2).run(f"{CONSTRUCTORS}:asked_parameters_are_not_kept", {"limit": 64})


@pytest.mark.fast("forms-1", "around_initialize-1", "fails_to_begin-1", "memory_formats-1")
@WORLDS
@pytest.mark.parametrize("case", ["forms", "around_initialize", "fails_to_begin", "memory_formats"])
def test_gathered_parameters(pools: Pools, world: int, case: str) -> None:
    pools(world).run(f"{GATHERED}:{case}")


@pytest.mark.fast("same_training-moving-1", "attributes-moving-1", "refused-moving-1", "exceptions-moving-1")
@pytest.mark.parametrize("world", [1, 2])
@SETTINGS
@pytest.mark.parametrize(
    "case",
    [f"{CASES}:{name}" for name in ("same_training", "mixed_model", "attributes")]
    + [f"{GATHERED}:{name}" for name in ("modifier", "refused", "nested", "exceptions", "inside_forward")],
    ids=lambda case: case.split(":")[1],
)
def test_case_at_settings(pools: Pools, world: int, settings: str, case: str) -> None:
    pools(world).run(case, {"settings": settings})


@pytest.mark.fast("modifier-1")
@WORLDS
@pytest.mark.parametrize("case", ["modifier", "refused"])
def test_gathered_parameters_without_an_engine(pools: Pools, world: int, case: str) -> None:
    pools(world).run(f"{GATHERED}:{case}", {"settings": None})


@pytest.mark.slow
def test_three_ranks_train_as_stage_2_does(pools: Pools) -> None:
    pools(3).run(f"{CASES}:same_training", {"settings": "moving"})
    pools(3).run(f"{CASES}:attributes", {"settings": "moving"})


@pytest.mark.fast("0")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_partitioned_model_becomes_whole_below_stage_3(pools: Pools, stage: int) -> None:
    pools(2).run(f"{CASES}:becomes_whole", {"stage": stage})


def test_init_does_nothing_where_nothing_is_to_be_partitioned(pools: Pools) -> None:
    contexts = [{"enabled": False}, *({"config_dict_or_path": config(stage)} for stage in (0, 1, 2))]
    contexts.append({"enabled": False, "config_dict_or_path": config(3)})
    pools(2).run(f"{CASES}:disabled_init", {"contexts": contexts})


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["listed", "cloned", "owner"])
def test_construction_holds_the_shards_and_one_layer(pools: Pools, world: int, kind: str) -> None:
    shards = (8 + (kind == "cloned")) / world  # with the layer that the clones are of
    for result in pools(world).run(f"{CASES}:construction_peak", {"kind": kind, "depth": 8, "width": 160}):
        assert result["held"] <= 8 / world * 1.05
        assert result["peak"] <= (shards + 1) * 1.05


@pytest.mark.parametrize("world", [2, 4])
def test_meta_models_are_materialised_shard_by_shard(pools: Pools, world: int) -> None:
    arguments = {"kind": "cloned", "depth": 8, "width": 160, "meta": True}
    for result in pools(world).run(f"{CASES}:construction_peak", arguments):
        assert result["peak"] <= (8 / world + 1) * 1.05


@pytest.mark.fast("whole")
@pytest.mark.parametrize("settings", ["moving", "whole"])
def test_bf16_masters_start_from_the_new_values(pools: Pools, settings: str) -> None:
    pools(2).run(f"{GATHERED}:masters", {"settings": settings, "source": 1})
    pools(2).run(f"{GATHERED}:modifier", {"settings": settings, "precision": "bf16"})


@pytest.mark.fast("moving-function")
@pytest.mark.parametrize("register", ["function", "later", "fwd_module"])
@pytest.mark.parametrize("settings", ["moving", "kept"])
def test_registered_external_parameters_train(pools: Pools, settings: str, register: str) -> None:
    pools(2).run(f"{GATHERED}:external", {"settings": settings, "register": register})


def test_init_starts_torch_distributed() -> None:
    with Pool(1, init_group=False) as pool:
        assert pool.run(f"{CASES}:starts_by_itself") == [(True, 1)]
