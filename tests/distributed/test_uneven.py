"""Uneven work: ranks whose batches differ in size, or in number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.cases import uneven
from tests.distributed.configs import ADAMW, PARTITIONED, SGD, config, dynamic_fp16
from tests.distributed.test_parity import assert_same_bits
from tests.pool import Pools

CASES = "tests.distributed.cases.uneven"
STAGES: dict[str, tuple[int, dict[str, Any] | None]] = {
    "0": (0, None),
    "1": (1, None),
    "2": (2, None),
    "3": (3, PARTITIONED["moving"]),
    "3-tight": (3, PARTITIONED["tight"]),
    "3-defaults": (3, PARTITIONED["defaults"]),
}
FAST = {"0", "2", "3-tight"}
OVER_STAGES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in STAGES]
WORLDS = [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]


def settings(stage: str, **more: Any) -> dict[str, Any]:
    number, zero = STAGES[stage]
    return config(number, zero=zero, **more)


# -------------------------------------------------------------------- weights


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("micros", [1, 3])
def test_weights_give_the_gradient_of_the_joint_batch(pools: Pools, world: int, micros: int) -> None:
    for optimizer, clip in ((SGD, 0.0), (ADAMW, 0.5)):
        wanted = uneven.weighted_plain(optimizer, world, micros, clip)
        results = {}
        for stage in STAGES:
            chosen = settings(stage, accumulation=micros, optimizer=optimizer, clip=clip)
            ranks = pools(world).run(f"{CASES}:weighted", {"config": chosen, "micros": micros, "tensors": stage == "1"})
            for rank in ranks:
                assert_same_bits(rank["parameters"], ranks[0]["parameters"], "parameters of two ranks")
                assert rank["norms"] == pytest.approx(wanted["norms"], rel=2e-6)
                for got, want in zip(rank["gradients"], wanted["gradients"], strict=True):
                    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)
            results[stage] = ranks[0]["parameters"]
            for name, value in wanted["parameters"].items():
                # Momentum and Adam carry each step's rounding on: a few units in the last place of values around 1.
                atol = 1e-6 if optimizer is SGD else 1e-5
                torch.testing.assert_close(results[stage][name].double(), value, rtol=0, atol=atol, msg=name)
        if world < 3:  # stages 2 and 3 reduce each micro-batch, and so add in another order
            for stage in STAGES:
                first = "0" if micros == 1 or stage in "01" else "2"
                assert_same_bits(results[first], results[stage], f"stages {first} and {stage}")


@pytest.mark.fast("0-bf16", "2-fp16", "3-fp16")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_weights_in_16_bits(pools: Pools, stage: str, precision: str) -> None:
    """Gradients are those of the joint batch, to the rounding of 16-bit values."""
    wanted = uneven.weighted_plain(SGD, 2, 2)
    chosen = settings(stage, precision=precision, accumulation=2)
    (first, second) = pools(2).run(f"{CASES}:weighted", {"config": chosen, "micros": 2})
    assert_same_bits(first["parameters"], second["parameters"], "parameters of two ranks")
    assert first["skipped"] == 0
    assert first["norms"] == pytest.approx(wanted["norms"], rel=0.02 if precision == "bf16" else 0.003)


def test_fp16_finds_a_unit_for_large_weights(pools: Pools) -> None:
    """Weights of 65,536 would overflow any fp16 gradient; after the first step they are counted in their own unit."""
    chosen = settings("2", fp16=dynamic_fp16(initial_scale_power=4, hysteresis=4))
    results = pools(2).run(f"{CASES}:large_weights", {"config": chosen, "weight": 65536.0, "steps": 4})
    for result in results:
        assert result["skipped"] == 1
        assert result["steps"] == 4
        assert result["norms"][1:] == pytest.approx(result["plain"][1:], rel=0.003)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_equal_weights_change_no_bit(pools: Pools, stage: str) -> None:
    with_weights = pools(2).run(f"{CASES}:weighted", {"config": settings(stage), "equal": True})
    without = pools(2).run(f"{CASES}:unweighted", {"config": settings(stage)})
    assert_same_bits(with_weights[0]["parameters"], without[0]["parameters"], "with weights and without")


@pytest.mark.parametrize("stage", ["0", "3"])
def test_a_window_that_is_flushed_early(pools: Pools, stage: str) -> None:
    wanted = uneven.weighted_plain(SGD, 2, 2)
    chosen = settings(stage, accumulation=5)
    ranks = pools(2).run(f"{CASES}:weighted", {"config": chosen, "micros": 2, "flush": True})
    assert ranks[0]["norms"] == pytest.approx(wanted["norms"], rel=2e-6)


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_what_is_no_weight(pools: Pools, stage: str) -> None:
    for messages in pools(2).run(f"{CASES}:refused", {"config": settings(stage)}):
        for name in ("negative", "nan", "several"):
            assert "expected weight to be the number of tokens or samples" in messages[name], name
        assert "scale_wrt_gas" in messages["unscaled"]
        assert "the mean over nothing has no gradient" in messages["empty"]
        assert "some ranks gave a weight" in messages["some ranks"]
        assert "all backwards of a step to have a weight, or none" in messages["later"]
        assert messages["moved"] == "True"
        assert "fine" not in messages


# -------------------------------------------------------------------- numbers of batches


def counts_of(world: int) -> list[list[int]]:
    return {1: [[3]], 2: [[2, 5], [5, 0], [3, 3]], 3: [[0, 4, 7], [5, 2, 5]]}[world]


def assert_close(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], atol: float, what: str) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=atol, msg=lambda m, n=name: f"{what}: {n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", OVER_STAGES)
def test_ranks_that_have_finished_serve_the_others(pools: Pools, stage: str, world: int) -> None:
    """Parameters and counters of all ranks are those of one process, and training goes on afterwards."""
    for counts in counts_of(world):
        chosen = settings(stage)
        results = pools(world).run(f"{CASES}:joined", {"config": chosen, "counts": counts, "after": 3})
        for result in results[1:]:
            assert_same_bits(result["parameters"], results[0]["parameters"], "parameters of two ranks")
            inside = {key: value for key, value in result["inside"].items() if key not in ("parameters", "traffic")}
            assert {key: results[0]["inside"][key] for key in inside} == inside
        assert results[0]["inside"]["global_steps"] == max(counts)
        assert not any(result["on_demand"] for result in results)
        inside = uneven.joined_plain(SGD, counts)
        assert_close(results[0]["inside"]["parameters"], inside, 1e-6, f"{counts}, inside")
        after = uneven.joined_plain(SGD, counts, after=3)
        assert_close(results[0]["parameters"], after, 2e-6, f"{counts}, afterwards")


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("stage", OVER_STAGES)
def test_join_by_another_divisor_with_weights_and_in_windows(pools: Pools, stage: str, world: int) -> None:
    counts = counts_of(world)[0]
    for more in (
        {"keep_divisor": False},
        {"keep_divisor": False, "micros": 3},
        {"weights": True, "micros": 2},
        {"weights": True, "keep_divisor": False},
        {"by_hand": True},
    ):
        asked: dict[str, Any] = dict(more)
        micros = asked.pop("micros", 1)
        chosen = settings(stage, accumulation=micros)
        results = pools(world).run(f"{CASES}:joined", {"config": chosen, "counts": counts, **asked})
        for result in results[1:]:
            assert_same_bits(result["parameters"], results[0]["parameters"], f"{more}: parameters of two ranks")
        wanted = uneven.joined_plain(SGD, counts, micros=micros, **asked)
        assert_close(results[0]["parameters"], wanted, 2e-6, str(more))


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["plain", "classic"])
@pytest.mark.parametrize("stage", OVER_STAGES)
def test_join_in_torchs_own_loop(pools: Pools, stage: str, loop: str) -> None:
    for counts, micros in (([2, 5], 1), ([6, 2], 2)):
        chosen = settings(stage, accumulation=micros, optimizer=ADAMW, clip=0.5)
        ours = pools(2).run(f"{CASES}:joined", {"config": chosen, "counts": counts, "loop": loop, "evaluate": True})
        other = pools(2).run(f"{CASES}:joined", {"config": chosen, "counts": counts})
        for result in ours:
            assert_same_bits(result["parameters"], other[0]["parameters"], f"{counts}: the two loops")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_boundaries_said_by_hand_are_those_of_the_ranks_that_go_on(pools: Pools, stage: str) -> None:
    chosen = settings(stage, accumulation=3)
    first, second = pools(2).run(f"{CASES}:joined", {"config": chosen, "counts": [2, 7], "loop": "by hand"})
    assert first["inside"]["global_steps"] == second["inside"]["global_steps"] == 4
    assert_same_bits(first["parameters"], second["parameters"], "parameters of two ranks")


@pytest.mark.fast("0-False", "1-True", "2-False", "3-False")
@pytest.mark.parametrize("keep_divisor", [True, False])
@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_join_gives_ddps_numbers(pools: Pools, stage: str, keep_divisor: bool) -> None:
    arguments = {"config": settings(stage), "counts": [2, 5], "keep_divisor": keep_divisor}
    for result in pools(2).run(f"{CASES}:against_ddp", arguments):
        if keep_divisor:
            assert_same_bits(result["ours"], result["theirs"], "DDP")
        else:
            assert_close(result["ours"], result["theirs"], 1e-6, "DDP")  # it divides by 1, we multiply 1/2 by 2


@pytest.mark.fast("2-Buffered", "3-tight-ConvNet")
@pytest.mark.parametrize("model", ["SharedCheckpointed", "EncoderDecoder", "MixtureOfExperts", "ConvNet", "Buffered"])
@pytest.mark.parametrize("stage", OVER_STAGES[2:])
def test_join_with_other_models(pools: Pools, stage: str, model: str) -> None:
    if model == "MixtureOfExperts" and stage.startswith("3"):
        zero = {**(STAGES[stage][1] or {}), "leaf_modules": ["MoeBlock"]}
        chosen = config(3, zero=zero)
    else:
        chosen = settings(stage)
    results = pools(2).run(f"{CASES}:joined", {"config": chosen, "counts": [1, 4], "model": model, "after": 2})
    assert_same_bits(results[0]["parameters"], results[1]["parameters"], "parameters of two ranks")
    if model != "ConvNet":  # its statistics are each rank's own
        wanted = uneven.joined_plain(SGD, [1, 4], model=model, after=2)
        assert_close(results[0]["parameters"], wanted, 2e-6, model)


@pytest.mark.parametrize("stage", ["0", "3"])
def test_what_goes_on_in_a_join(pools: Pools, stage: str) -> None:
    """Means are over the ranks that go on; every forward, backward and step is one exchange, and an evaluation too."""
    results = pools(2).run(f"{CASES}:joined", {"config": settings(stage), "counts": [2, 4], "model": "Mlp"})
    assert results[0]["means"] == results[1]["means"][:2]
    assert results[1]["means"][0] == results[0]["losses"][0] + results[1]["losses"][0]
    assert results[1]["means"][2:] == results[1]["losses"][2:]
    even = pools(2).run(f"{CASES}:joined", {"config": settings(stage), "counts": [4, 4], "model": "Mlp"})
    assert even[0]["inside"]["traffic"][("all_gather", "control")] == 4 * 4 + 1  # with the mean; and at the end


def test_buffers_are_those_of_a_rank_that_goes_on(pools: Pools) -> None:
    arguments = {"config": settings("2"), "counts": [1, 4], "model": "Buffered", "broadcast_buffers": True}
    first, second = pools(2).run(f"{CASES}:joined", arguments)
    assert second["buffers"]["calls"] == 4
    assert first["buffers"]["calls"] == 3  # before the last forward


@pytest.mark.parametrize("stage", ["1", "3"])
def test_a_step_that_is_skipped_is_skipped_by_all(pools: Pools, stage: str) -> None:
    first, second = pools(2).run(f"{CASES}:overflowing", {"config": settings(stage, fp16=dynamic_fp16())})
    assert first["skipped_steps"] == second["skipped_steps"] == 1
    assert first["loss_scale"] == second["loss_scale"] == 128
    assert_same_bits(first["parameters"], second["parameters"], "parameters of two ranks")


LEFT = "has left with an exception"
LEAVING = {
    "early": (LEFT, LEFT),
    "late": (LEFT, LEFT),
    "places": ("different places of their loops", "different places of their loops"),
    "master": ("has finished its batches", "has finished its batches"),
    "gathered": ("has finished its batches", "has finished its batches"),
    "metrics": (LEFT, "have finished their batches"),
}


@pytest.mark.fast("2-0-late", "2-1-early", "2-2-places", "2-3-master")
@pytest.mark.parametrize(
    ("stage", "how"),
    [("1", "early"), ("0", "late"), ("2", "places"), ("1", "metrics"), *(("3", how) for how in LEAVING)],
)
@pytest.mark.parametrize("world", WORLDS[1:])
def test_nobody_waits_for_a_rank_that_does_something_else(pools: Pools, stage: str, how: str, world: int) -> None:
    results = pools(world).run(f"{CASES}:leaving", {"config": settings(stage), "how": how}, timeout=30)
    finished, *others = results
    for rank, result in enumerate(others, 1):
        if how in ("early", "late") and rank == 1:
            assert result["kind"] == "KeyError"
        else:
            assert LEAVING[how][1] in result["message"], (rank, result)
    assert LEAVING[how][0] in finished["message"], finished


def test_join_is_not_entered_twice(pools: Pools) -> None:
    assert all(
        "cannot be entered twice" in message for message in pools(2).run(f"{CASES}:nested", {"config": settings("1")})
    )
