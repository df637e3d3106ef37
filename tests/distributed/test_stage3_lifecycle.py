"""Stage 3 against stage 2, to the bit: other shapes of a step, and what must leave training as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.cases import stage3_lifecycle as cases
from tests.toolkit.pool import Pools

CASES = "tests.distributed.cases.stage3_lifecycle"
STEPS = 8
SLOW = pytest.mark.slow
SETTINGS = ["move", "keep", "tight"]
GROUPS = {
    "reading": [name for name in cases.DISTURBANCES if "raises" not in name and "fail" not in name],
    "failed evaluation": [name for name in cases.DISTURBANCES if "fail" in name],
    "forward raises": [name for name in cases.DISTURBANCES if name.startswith("forward raises")],
    "backward raises": [name for name in cases.DISTURBANCES if name.startswith("backward raises")],
    "plain backward raises": [name for name in cases.DISTURBANCES if name.startswith("plain backward raises")],
}


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return where two nested results differ. Tensors by their bits; norms, sums in double over other parts, in 14
    digits."""
    if isinstance(one, torch.Tensor):
        return [] if one.shape == other.shape and torch.equal(one, other) else [path]
    if isinstance(one, dict):
        if list(one) != list(other):
            return [f"{path}: other keys"]
        return [line for key in one for line in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{path}: other length"]
        return [
            line for i, pair in enumerate(zip(one, other, strict=True)) for line in differences(*pair, f"{path}[{i}]")
        ]
    if isinstance(one, float):
        return [] if one == pytest.approx(other, rel=1e-14) else [f"{path}: {one!r}, {other!r}"]
    return [] if one == other else [f"{path}: {one!r}, {other!r}"]


def assert_same(one: Any, other: Any, what: str) -> None:
    found = differences(one, other)
    assert not found, f"{what}: {found[:5]} and {max(0, len(found) - 5)} more differ"


def compared(result: dict[str, Any]) -> dict[str, Any]:
    return {key: result[key] for key in ("seen", "disturbed", "norms", "state")}


def run(pools: Pools, world: int, names: list[str], kind: str, stage: int, setting: str = "move") -> Any:
    runs = {name: {kind: name, "steps": STEPS} for name in names}
    kwargs = {"runs": runs, "stage": stage, "setting": setting}
    return pools(world).run(f"{CASES}:train_many", kwargs, timeout=120)


def test_every_disturbance_is_in_one_group() -> None:
    assert sorted(cases.DISTURBANCES) == sorted(name for names in GROUPS.values() for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=SLOW)])
def test_loops(pools: Pools, world: int) -> None:
    names = list(cases.LOOPS)
    expected = run(pools, world, names, "loop", 2)
    for setting in SETTINGS:
        for rank, results in enumerate(run(pools, world, names, "loop", 3, setting)):
            for name, result in results.items():
                assert not result["left"], f"{name}, {setting}: {result['left']} stayed gathered"
                assert_same(compared(expected[rank][name]), compared(result), f"{name}, {setting}, rank {rank}")
                # Double backward is served on demand: it is unknown when its weights are needed for the last time.
                planned = {False} if name == "gradient penalty" else {True}
                assert set(result["followed"][3:]) == planned, f"{name}, {setting}: {result['followed']}"


def test_loops_match_plain_pytorch(pools: Pools) -> None:
    """One process: the numbers that both stages give are those of the model alone."""
    (results,) = run(pools, 1, list(cases.LOOPS), "loop", 3)
    for name, result in results.items():
        wanted = cases.train(cases.Plain(cases.build()), steps=STEPS, loop=name)
        assert result["norms"] == pytest.approx(wanted["norms"], rel=1e-5), name
        torch.testing.assert_close(
            result["seen"], wanted["seen"], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("setting", [name if name == "move" else pytest.param(name, marks=SLOW) for name in SETTINGS])
@pytest.mark.parametrize("group", list(GROUPS))
@pytest.mark.parametrize("world", [pytest.param(1, marks=SLOW), 2])
def test_disturbances(pools: Pools, world: int, group: str, setting: str) -> None:
    """In the first step, while the trace is recorded, and while a plan is followed. What a disturbance computes is
    what stage 2 computes, and training ends in the bits of a run without it."""
    undisturbed = run(pools, world, ["one loss"], "loop", 2)
    expected = run(pools, world, GROUPS[group], "disturbance", 2)
    for rank, results in enumerate(run(pools, world, GROUPS[group], "disturbance", 3, setting)):
        for name, result in results.items():
            assert not result["left"], f"{name}: {result['left']} stayed gathered"
            assert_same(compared(expected[rank][name]), compared(result), f"{name}, rank {rank}, stage 2")
            alone = compared(undisturbed[rank]["one loss"])
            assert_same(alone, {**compared(result), "disturbed": []}, f"{name}, rank {rank}, undisturbed")


@pytest.mark.fast("whole")
@pytest.mark.parametrize("setting", ["one", "whole"])
def test_one_unit_and_whole_parameters(pools: Pools, setting: str) -> None:
    names = ["inference_mode", "forward only", "forward raises: inside the block", "backward raises: block ends"]
    expected = run(pools, 2, ["one loss"], "loop", 2)[0]["one loss"]["state"]
    for name, result in run(pools, 2, names, "disturbance", 3, setting)[0].items():
        assert not result["left"], name
        assert_same(expected, result["state"], name)


def test_what_a_user_has_made_whole_follows_updates(pools: Pools) -> None:
    for same in pools(2).run(f"{CASES}:whole_by_hand", {}):
        assert same == [True] * 3
