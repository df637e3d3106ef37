"""Loading into other bucket sizes, groups, names, precisions and parts; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_resume import assert_goes_on, run
from tests.toolkit.pool import Pools

CASES = "tests.checkpoint.cases"
SLOW = pytest.mark.slow
BUCKETS: list[tuple[int, int, dict[str, Any]]] = [  # stage saved, stage loaded, settings there
    (1, 2, {"reduce_bucket_size": 37}),
    (2, 0, {"reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}),
    (3, 3, {"stage3_param_persistence_threshold": 1_000_000}),
    (0, 3, {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 50}),
]


def case(pools: Pools, name: str, directory: Path, world: int = 2, **kwargs: Any) -> None:
    """name: "module:function"."""
    pools(world).run(f"{CASES}.{name}", {"directory": str(directory), **kwargs})


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded", "zero"), BUCKETS)
def test_other_buckets_and_thresholds(
    pools: Pools, tmp_path: Path, saved: int, loaded: int, zero: dict[str, Any]
) -> None:
    common = {"directory": str(tmp_path), "name": "mixture"}
    first, second = run(
        pools,
        2,
        [{"how": "save", "stage": saved, **common}, {"how": "load", "stage": loaded, "zero": zero, **common}],
    )
    assert_goes_on(first, second, "mixture", True, f"{saved} to {loaded} with {zero}")


def stages(*fast: int) -> Any:
    return pytest.mark.parametrize(
        "stage", [pytest.param(stage, marks=() if stage in fast else SLOW) for stage in (0, 1, 2, 3)]
    )


@pytest.mark.fast("LambdaLR-3")
@stages(3)
@pytest.mark.parametrize(
    "schedule",
    ["LambdaLR", "SequentialLR", *(pytest.param(name, marks=SLOW) for name in ("WarmupDecayLR", "OneCycleLR"))],
)
def test_param_groups_in_another_order(pools: Pools, tmp_path: Path, stage: int, schedule: str) -> None:
    case(pools, "matching:other_order_of_groups", tmp_path, stage=stage, schedule=schedule)


@stages(1)
def test_param_groups_of_other_parameters(pools: Pools, tmp_path: Path, stage: int) -> None:
    case(pools, "matching:other_groups", tmp_path, stage=stage)


@pytest.mark.slow
@stages(3)
@pytest.mark.parametrize("how", ["added", "dropped", "wraps_everything"])
def test_adapters(pools: Pools, tmp_path: Path, stage: int, how: str) -> None:
    case(pools, f"matching:adapter_{how}", tmp_path, stage=stage)


@pytest.mark.parametrize(("stage", "other"), [(3, 3), (1, 3), pytest.param(3, 0, marks=SLOW)])
def test_frozen_parameters_are_left_out(pools: Pools, tmp_path: Path, stage: int, other: int) -> None:
    case(pools, "matching:without_frozen", tmp_path, stage=stage, other=other)


@pytest.mark.slow
@stages(3)
def test_compiled_modules_have_the_names_inside(pools: Pools, tmp_path: Path, stage: int) -> None:
    case(pools, "matching:compiled", tmp_path, stage=stage)


@stages(3)
def test_weights_that_are_tied_elsewhere(pools: Pools, tmp_path: Path, stage: int) -> None:
    case(pools, "matching:tied_elsewhere", tmp_path, stage=stage)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("bf16", "fp32"),
        ("fp32", "bf16"),
        ("fp16", "bf16"),
        ("bf16", "fp16"),
        ("fp32", "fp32 modules"),
        ("fp32 modules", "bf16"),
    ],
)
@stages(2)
def test_other_precisions(pools: Pools, tmp_path: Path, stage: int, source: str, target: str) -> None:
    case(pools, "parts:other_precision", tmp_path, stage=stage, source=source, target=target)


@pytest.mark.fast("parts:untrained-3")
@stages(3)
@pytest.mark.parametrize(
    "name", ["parts:another_implementation", "parts:some", "parts:refused", "parts:loose", "parts:untrained"]
)
def test_parts_and_refusals(pools: Pools, tmp_path: Path, stage: int, name: str) -> None:
    case(pools, name, tmp_path, stage=stage)


@stages(1)
def test_amsgrad_needs_a_state_of_its_own(pools: Pools, tmp_path: Path, stage: int) -> None:
    case(pools, "parts:another_kind_of_the_same", tmp_path, stage=stage)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(
    "name",
    ["parts:some", "parts:refused", "parts:loose", "parts:untrained", "matching:compiled", "matching:tied_elsewhere"],
)
def test_on_other_numbers_of_ranks(pools: Pools, tmp_path: Path, world: int, name: str) -> None:
    case(pools, name, tmp_path, world, stage=2)
    case(pools, name, tmp_path / "3", world, stage=3)
