"""Ranks that part while they train are told, on all ranks, by name; so is an update that makes weights non-finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.configs import ADAMW, PARTITIONED, config
from tests.pool import Pools

CASES = "tests.distributed.cases.consistency"
SLOW = pytest.mark.slow

WORDS = {
    "lr": "param group 0 has lr 0.001 on {first}, but 0.0005 on {odd}",
    "tensor": "param group 0 has lr 0.0010000000474974513 on {first}, but 0.0005000000237487257 on {odd}",
    "betas": "param group 0 has betas [0.9, 0.95] on {first}, but [0.5, 0.95] on {odd}",
    "decay": "param group 0 has weight_decay 0.1 on {first}, but 0.25 on {odd}",
    "plateau": "param group 0 has lr 0.001 on {first}, but 1e-05 on {odd}",
    "clip": "the update has a max_norm of 0.0 on {first}, but 0.25 on {odd}",
    "steps": "the step has number 3 on {first}, but 4 on {odd}",
}
UNREAD = f"{CASES}:unread"
FIRST = {2: "rank 0", 3: "ranks 0 and 1"}
COMBINATIONS = [
    (0, "fp32", 3),
    (3, "fp16", 2),
    *[
        pytest.param(stage, precision, world, marks=SLOW)
        for stage in range(4)
        for precision in ("fp32", "bf16", "fp16")
        for world in (2, 3)
        if (stage, precision, world) not in {(0, "fp32", 3), (3, "fp16", 2)}
    ],
]


def setting(stage: int, precision: str, **more: Any) -> dict[str, Any]:
    return config(stage, precision, optimizer=ADAMW, **more)


@pytest.mark.slow
@pytest.mark.parametrize("stage, precision, world", COMBINATIONS)
def test_other_numbers_on_one_rank_are_named_on_all_before_the_step(
    pools: Pools, stage: int, precision: str, world: int
) -> None:
    changes = list(WORDS) if stage else ["lr", "steps"]
    given = {"config": setting(stage, precision), "changes": changes}
    ranks = pools(world).run(f"{CASES}:other_numbers", given, timeout=120)
    for result in ranks:
        assert result == ranks[0] and list(result) == changes
        for change in changes:
            sentence = WORDS[change].format(first=FIRST[world], odd=f"rank {world - 1}")
            assert f"\n- {sentence}\n" in result[change][0], (change, result[change])
            assert not any(result[change][1:]), "training goes on when they agree again"


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, precision, world",
    [(1, "bf16", 2), pytest.param(0, "fp32", 3, marks=SLOW), pytest.param(3, "fp16", 3, marks=SLOW)],
)
def test_where_the_host_does_not_wait_it_is_told_one_step_later(
    pools: Pools, stage: int, precision: str, world: int
) -> None:
    """Also where one rank reads the statistics before the others."""
    given = {"config": setting(stage, precision, consistency_check_interval=1)}
    ranks = pools(world).run(UNREAD, {"function": "other_numbers", "changes": list(WORDS), **given}, timeout=120)
    for result in ranks:
        assert result == ranks[0]
        for change, words in WORDS.items():
            first, error, *after = result[change]
            assert first == "" and not any(after)
            assert f"\n- {words.format(first=FIRST[world], odd=f'rank {world - 1}')}\n" in error
    for errors in pools(world).run(UNREAD, {"function": "written", "name": "down.weight", **given}):
        assert errors[0] == "" and "'down.weight'" in errors[1]
    ranks = pools(world).run(UNREAD, {"function": "spoiling_update", "change": {"lr": float("inf")}, **given})
    for rank, result in enumerate(ranks):
        assert result["errors"][:2] == ["", ""]
        assert result["errors"][2].startswith("FloatingPointError: the update of step 3 made weights of param group 0")
        assert len(result["warnings"]) == (rank == 0)
        assert all("because the update of step 3 made weights" in warning for warning in result["warnings"])


@pytest.mark.slow
def test_other_gathers_of_one_rank_are_told(pools: Pools) -> None:
    partitioned = setting(3, "fp32", zero_optimization={"stage": 3, **PARTITIONED["moving"]})
    for result in pools(3).run(f"{CASES}:other_gathers", {"config": partitioned}):
        assert result[:2] == ["", ""]
        assert "what stage 3 has gathered has a hash" in result[2] and "on ranks 0 and 1, but" in result[2]
        assert "leaf_modules" in result[2]


def test_numbers_that_change_after_the_statistics_are_found_in_the_next_step(pools: Pools) -> None:
    for errors in pools(2).run(f"{CASES}:between_clipping_and_update", {"config": setting(1, "bf16")}):
        assert errors[:2] == ["", ""]
        assert "param group 0 has lr 0.001 on rank 0, but 0.0005 on rank 1" in errors[2]


def test_what_changes_alike_is_no_difference(pools: Pools) -> None:
    every = setting(2, "bf16", consistency_check_interval=1)
    assert pools(2).run(f"{CASES}:alike", {"config": every}) == [(4, [])] * 2


@pytest.mark.parametrize("stage, precision, world", COMBINATIONS)
def test_a_weight_that_one_rank_has_written_is_named_on_all(
    pools: Pools, stage: int, precision: str, world: int
) -> None:
    every = setting(stage, precision, consistency_check_interval=1)
    ranks = pools(world).run(f"{CASES}:written", {"config": every, "name": "down.weight"})
    for errors in ranks:
        assert errors == ranks[0]
        assert len(errors) == 1
        assert "parameter 'down.weight' is " in errors[0] and f"on {FIRST[world]}, but " in errors[0]
        assert errors[0].count("parameter '") == 1


def test_weights_are_compared_every_so_many_steps(pools: Pools) -> None:
    """At stage 0 a difference stays. With 0 nothing is compared."""
    for interval, expected in ((4, [True, True, False]), (0, [True] * 5)):
        setting_of = setting(0, "fp32", consistency_check_interval=interval)
        for errors in pools(2).run(f"{CASES}:written", {"config": setting_of, "name": "down.weight"}):
            assert [not error for error in errors] == expected


@pytest.mark.parametrize("stage", [0, 3])
def test_a_frozen_weight_is_compared_too(pools: Pools, stage: int) -> None:
    for error in pools(2).run(
        f"{CASES}:written_frozen", {"config": setting(stage, "bf16", consistency_check_interval=2)}
    ):
        name, _, said = error.partition(": ")
        assert f"parameter '{name}' is " in said


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3])
def test_a_save_compares_at_once(pools: Pools, stage: int, tmp_path: Path) -> None:
    given = {"config": setting(stage, "fp32"), "save_dir": str(tmp_path)}
    for errors in pools(2).run(f"{CASES}:written", {**given, "name": "down.weight"}):
        assert "parameter 'down.weight' is " in errors[0]
    for result in pools(2).run(f"{CASES}:other_numbers", {**given, "changes": ["lr"]}):
        assert WORDS["lr"].format(first="rank 0", odd="rank 1") in result["lr"][0]
    assert not list(tmp_path.iterdir())


SPOILING = [
    (0, "fp32", {"lr": float("inf")}, "lr=inf"),
    (1, "bf16", {"lr": float("nan")}, "lr=nan"),
    (3, "fp16", {"lr": 1e38}, "lr=1e+38"),
    pytest.param(2, "fp16", {"weight_decay": float("inf")}, "weight_decay=inf", marks=SLOW),
]


@pytest.mark.parametrize("stage, precision, change, words", SPOILING)
def test_an_update_that_makes_weights_non_finite_is_named(
    pools: Pools, stage: int, precision: str, change: dict[str, float], words: str
) -> None:
    ranks = pools(2).run(f"{CASES}:spoiling_update", {"config": setting(stage, precision), "change": change})
    for result in ranks:
        first, error = result["errors"]
        assert first == "" and error == ranks[0]["errors"][1]
        assert error.startswith("FloatingPointError: the update of step 3 made weights of param group 0 non-finite")
        assert words in error and "from finite gradients" in error
        assert not result["warnings"], "no gradient is blamed"


@pytest.mark.parametrize("optimizer", ["foreach", pytest.param("fused", marks=SLOW)])
def test_torchs_own_optimizers_are_looked_at_as_well(pools: Pools, optimizer: str) -> None:
    chosen = config(1, "bf16", optimizer=("AdamW", {"lr": 1e-3, optimizer: True}))
    for result in pools(2).run(f"{CASES}:spoiling_update", {"config": chosen, "change": {"lr": float("inf")}}):
        assert "the update of step 3 made weights of param group 0 non-finite" in result["errors"][1]


def test_masters_on_the_host_are_looked_at_as_well(pools: Pools) -> None:
    offloaded = setting(2, "bf16") | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    for result in pools(2).run(f"{CASES}:spoiling_update", {"config": offloaded, "change": {"lr": float("inf")}}):
        assert "the update of step 3 made weights of param group 0 non-finite" in result["errors"][1]


def test_an_eps_of_zero_is_named_and_so_is_a_loss_scale_near_zero(pools: Pools) -> None:
    for result in pools(2).run(f"{CASES}:spoiling_from_the_start", {}):
        assert (
            "the update of step 1 made weights of param group 0 non-finite" in result["eps"]
            and "eps=0" in result["eps"]
        )
        assert "gradients divided by 1e-45 (loss scale)" in result["scale"]


def test_new_values_end_it(pools: Pools) -> None:
    plain = config(1, "bf16", optimizer=("SGD", {"lr": 0.01}))
    for errors in pools(2).run(f"{CASES}:new_values_after", {"config": plain, "change": {"lr": float("inf")}}):
        assert [not error for error in errors] == [True, False, True, True], errors


def test_spoilt_weights_are_not_saved(pools: Pools, tmp_path: Path) -> None:
    given = {"config": setting(1, "fp32"), "change": {"lr": float("inf")}, "save_dir": str(tmp_path)}
    for error in pools(2).run(f"{CASES}:spoilt_save", given):
        assert error.startswith("FloatingPointError: the update of step 3 made weights")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage, precision", [(0, "fp32"), (2, "bf16")])
def test_weights_that_are_infinite_from_the_start_are_trained_around(pools: Pools, stage: int, precision: str) -> None:
    assert pools(2).run(f"{CASES}:infinite_from_the_start", {"config": config(stage, precision)}) == [[""] * 3] * 2


def test_a_loss_that_is_not_finite_while_its_gradients_are_is_said_once(pools: Pools) -> None:
    (applied, warnings), (_, elsewhere) = pools(2).run(f"{CASES}:bad_loss", {"config": config(2, "bf16")})
    assert applied == 3 and not elsewhere
    assert len(warnings) == 1 and warnings[0].startswith(
        "step 1: a loss on rank 1 is not finite although all gradients"
    )


@pytest.mark.parametrize("stage, world", [(1, 2), *[pytest.param(stage, 4, marks=SLOW) for stage in (0, 1, 3)]])
def test_ranks_with_parts_of_layers_stop_together(pools: Pools, stage: int, world: int) -> None:
    ranks = pools(world).run(f"{CASES}:parts_of_a_layer", {"stage": stage}, timeout=120)
    for result in ranks:
        assert result == ranks[0]
        assert f"but 0.0005 on rank {world - 1}" in result["lr"][0]
        assert "the update of step 2 made weights of param group 0 non-finite" in result["update"][1]
        weight = result["weight"][0]
        if world == 2:  # each rank has a part of its own
            assert not weight
        else:
            assert "parameter '0.weight' is " in weight and "on rank 1, but " in weight and "on rank 3" in weight


def test_leaf_modules_that_match_nothing_are_an_error(pools: Pools) -> None:
    wrong = config(3, zero={"leaf_modules": ["*.weights", "dwn"], "leaf_module": {"classes": ["Expert"]}})
    for error in pools(2).run(f"{CASES}:refused", {"config": wrong}):
        assert "zero_optimization.leaf_modules: expected classes or qualified names of modules in the model" in error
        assert "got '*.weights', 'dwn', which none has; the closest name is 'down'" in error
        assert "zero_optimization.leaf_module: " in error and "'Expert'" in error
    right = config(3, zero={"leaf_module": {"classes": ["Expert"], "names": ["down"]}})
    assert pools(2).run(f"{CASES}:refused", {"config": right}) == ["", ""]
