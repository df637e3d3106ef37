"""Every stage and option against plain PyTorch on the joint batch; and stages against each other, bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.toolkit import models, reference
from tests.toolkit.compare import (
    CLIP,
    EPSILON,
    FP32_RELATIVE,
    FP32_SGD,
    HALF_RELATIVE,
    assert_same_bits,
    assert_same_on_ranks,
    mean_losses,
)
from tests.toolkit.configs import ADAMW, PARTITIONED, SGD, STATIC_SCALE, at, config
from tests.toolkit.pool import Pools
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import make_engine, snapshot, train_engine, train_many

STEPS = 4
OPTIMIZERS = {"SGD": SGD, "AdamW": ADAMW}
# Odd widths, and one that fills a bucket's alignment exactly.
WIDTHS = {1: (5, 9), 2: (7, 33), 3: (13, 5), 4: (8, 32)}
SIZES = {world: {"width": width, "hidden": hidden} for world, (width, hidden) in WIDTHS.items()}

FP32_ADAM_LR = 0.02

# Share of elements that may differ at all. SGD's masters have the reference's bits as long as nothing flips; AdamW's
# arithmetic is not torch's (docs/kernels.md), so its masters differ in the last place from the first step on.
HALF_FLIPPED = {"SGD": 0.02, "AdamW": 0.04}


def batches_of(world: int, accumulation: int, steps: int) -> list[Any]:
    """Batches by step, micro-batch and rank."""
    return [
        [[models.token_batch(step, micro, rank) for rank in range(world)] for micro in range(accumulation)]
        for step in range(steps)
    ]


@functools.cache
def expected(
    world: int, precision: str, accumulation: int, clip: float, optimizer: str, steps: int = STEPS
) -> reference.Trajectory:
    """The reference is the same for all stages: computed once."""
    batches, model = batches_of(world, accumulation, steps), models.build(models.OddModel, **SIZES[world])
    scale = STATIC_SCALE if precision == "fp16" else 1.0
    return reference.train(model, models.token_loss, batches, precision, OPTIMIZERS[optimizer], clip, scale)


def assert_matches(
    results: list[dict[str, Any]], wanted: reference.Trajectory, precision: str, accumulation: int, optimizer: str
) -> None:
    for result in results[1:]:
        assert_same_bits(results[0]["parameters"], result["parameters"], "parameters of two ranks")
        assert result["norms"] == results[0]["norms"]
    relative = FP32_RELATIVE if precision == "fp32" else HALF_RELATIVE[precision]
    assert mean_losses(results, accumulation) == pytest.approx(wanted.losses, rel=relative)
    assert results[0]["norms"] == pytest.approx(wanted.norms, rel=relative)
    assert (results[0]["global_steps"], results[0]["skipped_steps"]) == (len(wanted.losses), 0)
    parameters = {name: value.float() for name, value in results[0]["parameters"].items()}
    assert list(parameters) == list(wanted.parameters)
    for name, value in wanted.parameters.items():
        difference = (parameters[name] - value).abs()
        if precision == "fp32":
            bound = FP32_SGD if optimizer == "SGD" else FP32_ADAM_LR * OPTIMIZERS[optimizer][1]["lr"]
            assert difference.numel() == 0 or difference.max() <= bound, f"{name}: {difference.max()} > {bound}"
        else:
            # A flip that enters the next forward changes gradients; where they nearly cancel, Adam moves by a share
            # of lr.
            share = 1e-6 if optimizer == "SGD" else FP32_ADAM_LR * OPTIMIZERS[optimizer][1]["lr"]
            assert torch.all(difference <= EPSILON[precision] * value.abs() + share), f"{name}: {difference.max()}"
    if precision != "fp32":
        pairs = [(parameters[name] != value) for name, value in wanted.parameters.items()]
        flipped = torch.cat([pair.flatten() for pair in pairs]).float().mean()
        assert flipped <= HALF_FLIPPED[optimizer], f"{flipped:.1%} of the weights differ"


def matrix() -> Iterator[Any]:
    """World × precision × accumulation × clipping, chosen so that every pair of options occurs."""
    for world in (1, 2, 3, 4):
        for number, precision in enumerate(("fp32", "bf16", "fp16")):
            choice = (world + number) % 4
            accumulation, clip = ((1, CLIP), (4, 0.0), (4, CLIP), (1, 0.0))[choice]
            name = f"{world}-{precision}-{accumulation}-{'clip' if clip else 'noclip'}"
            yield pytest.param(3 * world + number + choice, world, precision, accumulation, clip, id=name)


@pytest.mark.fast("3-bf16-1-clip")
@pytest.mark.parametrize(("setting", "world", "precision", "accumulation", "clip"), list(matrix()))
def test_all_stages_match_plain_pytorch(
    pools: Pools, setting: int, world: int, precision: str, accumulation: int, clip: float
) -> None:
    """Two optimizers train at every stage. setting: the number of that of stage 3."""
    names = list(PARTITIONED)
    runs = {}
    for number, (optimizer, given) in enumerate(OPTIMIZERS.items()):
        for stage in ("0", "1", "2", f"3 {names[(setting + number) % len(names)]}"):
            made = at(stage, precision, accumulation, clip, given)
            runs[f"{optimizer}, stage {stage}"] = {"config": made, "sizes": SIZES[world], "steps": STEPS}
    ranks = pools(world).run(train_many, {"runs": runs}, timeout=120)
    for name in runs:
        optimizer = name.partition(",")[0]
        wanted = expected(world, precision, accumulation, clip, optimizer)
        try:
            assert_matches([results[name] for results in ranks], wanted, precision, accumulation, optimizer)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_some_steps_are_clipped() -> None:
    assert any(norm > CLIP for norm in expected(2, "fp32", 1, CLIP, "SGD", 10).norms)


@pytest.mark.fast("2-AdamW")
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("world", [2, 3])
def test_stages_give_the_same_bits_in_fp32(pools: Pools, world: int, optimizer: str) -> None:
    stages = ("0", "1", "2", "3 moving", "3 tight")

    def results(accumulation: int) -> dict[str, dict[str, Any]]:
        configs = {stage: at(stage, "fp32", accumulation, CLIP, OPTIMIZERS[optimizer]) for stage in stages}
        runs = {stage: {"config": made, "sizes": SIZES[world], "steps": 2} for stage, made in configs.items()}
        ranks = pools(world).run(train_many, {"runs": runs})
        wanted = expected(world, "fp32", accumulation, CLIP, optimizer, 2)
        assert_matches([found["0"] for found in ranks], wanted, "fp32", accumulation, optimizer)
        return ranks[0]

    def assert_equal(runs: dict[str, dict[str, Any]], one: str, other: str) -> None:
        assert_same_bits(runs[one]["parameters"], runs[other]["parameters"], f"stages {one} and {other}")
        assert runs[one]["losses"] == runs[other]["losses"]
        # Ranks hold other elements at stage 3, so squares, which are doubles, add up in another order.
        assert runs[one]["norms"] == pytest.approx(runs[other]["norms"], rel=1e-14 if "3" in other else 0, abs=0)

    single = results(1)
    for name in stages[1:]:
        assert_equal(single, "0", name)
    several = results(4)
    # Stages 0 and 1 sum a window's gradients and then reduce; stages 2 and 3 reduce and then sum.
    assert_equal(several, "0", "1")
    for name in stages[3:]:
        assert_equal(several, "2", name)
    bound = 1e-6 if optimizer == "SGD" else FP32_ADAM_LR * ADAMW[1]["lr"]
    for name, value in several["0"]["parameters"].items():
        torch.testing.assert_close(
            several["2"]["parameters"][name], value, rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert several["2"]["norms"] == pytest.approx(several["0"]["norms"], rel=1e-6)


# -------------------------------------------------------------------- options

# By name: precision of the reference, accumulation, relative tolerance of weights and norms, config. Exact options are
# held to fp32's 1e-6. What travels or accumulates in 16 bits loses half a unit (2^-9 in bf16, 2^-12 in fp16) per
# rounding, a few roundings per step; lr × gradient is of order 0.1, so weights move by less than EPSILON × 0.5 over
# four steps.
OPTIONS: dict[str, tuple[str, int, float, dict[str, Any]]] = {
    "reduce_scatter": ("fp32", 1, 1e-6, {"zero": {"reduce_scatter": False}}),
    "contiguous_gradients": ("fp32", 3, 1e-6, {"zero": {"contiguous_gradients": False}}),
    "allgather_bucket_size": ("fp32", 1, 1e-6, {"zero": {"allgather_bucket_size": 40}}),
    "large buckets": ("fp32", 3, 1e-6, {"zero": {"allgather_bucket_size": 10**9, "reduce_bucket_size": 10**9}}),
    "prescale_gradients, accumulation": ("fp32", 3, 1e-6, {"prescale_gradients": True}),
    "gradient_predivide_factor": ("fp32", 1, 1e-6, {"gradient_predivide_factor": 1.5}),
    "communication_data_type fp32": ("bf16", 1, EPSILON["bf16"], {"communication_data_type": "fp32"}),
    "communication_data_type bf16": ("fp32", 1, EPSILON["bf16"], {"communication_data_type": "bf16"}),
    "communication_data_type fp16": ("fp32", 3, EPSILON["fp16"], {"communication_data_type": "fp16"}),
    "grad_accum_dtype fp32": ("bf16", 3, EPSILON["bf16"], {"data_types": {"grad_accum_dtype": "fp32"}}),
    "grad_accum_dtype bf16": ("bf16", 3, 2 * EPSILON["bf16"], {"data_types": {"grad_accum_dtype": "bf16"}}),
    "torch_autocast": ("autocast", 1, EPSILON["bf16"], {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
}


@pytest.mark.fast("grad_accum_dtype bf16-3")
@on_ranks(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_gives_the_right_numbers(name: str) -> None:
    precision, accumulation, tolerance, more = OPTIONS[name]
    low = "bf16" if precision == "bf16" else "fp32"
    model = models.build(models.OddModel)
    wanted = reference.train(model, models.token_loss, batches_of(3, accumulation, 4), precision, SGD)
    for stage in (0, 1, 2):
        engine = make_engine(config(stage, low, accumulation, 0.0, SGD, **more))
        norms = train_engine(engine, "OddModel", 4)["norms"]
        assert_same_on_ranks(snapshot(engine))
        assert norms == pytest.approx(wanted.norms, rel=tolerance), f"stage {stage}"
        found = {parameter: value.float() for parameter, value in snapshot(engine).items()}
        torch.testing.assert_close(found, wanted.parameters, rtol=tolerance, atol=tolerance / 2)


SUMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prescaled": {"prescale_gradients": True},
    "predivided": {"gradient_predivide_factor": 1.5},
    "in sets": {"zero": {"shard_size": 2}},
}


@pytest.mark.fast("plain-4")
@on_ranks(3, 4)
@pytest.mark.parametrize("name", SUMS)
def test_gradients_are_summed_over_ranks(name: str) -> None:
    """With accumulation, and clipped: norms are those of the sums."""
    world = dist.get_world_size()
    if name == "in sets" and world % 2:
        return
    model, clip = models.build(models.OddModel), 2.0
    wanted = reference.train(
        model, lambda m, b: world * models.token_loss(m, b), batches_of(world, 2, 4), "fp32", SGD, world * clip
    )
    assert max(wanted.norms) > world * clip > min(wanted.norms)
    for stage in ("0", "1", "2", "3 tight"):
        op = {"gradient_allreduce_op": "Sum", **SUMS[name]}
        engine = make_engine(at(stage, "fp32", 2, world * clip, SGD, **op))
        norms = train_engine(engine, "OddModel", 4)["norms"]
        assert_same_on_ranks(snapshot(engine))
        assert norms == pytest.approx(wanted.norms, rel=FP32_RELATIVE), f"stage {stage}"
        # Gradients are as many times larger, and so are their roundings.
        torch.testing.assert_close(snapshot(engine), wanted.parameters, rtol=0, atol=world * FP32_SGD)
