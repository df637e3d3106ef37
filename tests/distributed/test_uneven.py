"""Uneven work: ranks whose batches differ in number or size train by the gradient of the joint batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import zerolite
from tests.toolkit import models, reference
from tests.toolkit.compare import assert_same_bits, assert_same_on_ranks
from tests.toolkit.configs import ADAMW, SGD, at, dynamic_fp16
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import backward, make_engine, raises, snapshot

STAGES = ("0", "1", "2", "3 moving", "3 tight", "3 defaults")

# -------------------------------------------------------------------- batches that differ in number

BATCH = 3
SAMPLES = {1: [8], 2: [4, 11], 3: [14, 3, 7]}  # of each rank


def samples_of(rank: int) -> tuple[Tensor, Tensor]:
    """Return all samples of a rank."""
    return models.float_batch(5, 0, rank, size=SAMPLES[dist.get_world_size()][rank])


def joint_batches() -> list[list[tuple[Tensor, Tensor]]]:
    """Return for each step the batches of the ranks that have one."""
    world = dist.get_world_size()
    parts = [list(zip(*(t.split(BATCH) for t in samples_of(rank)), strict=True)) for rank in range(world)]
    return [[part[step] for part in parts if step < len(part)] for step in range(max(map(len, parts)))]


def by_hand(engine: Any) -> Iterator[tuple[Any, int]]:
    """Yield batches and weights as docs/uneven-data.md does."""
    loader = DataLoader(TensorDataset(*samples_of(engine.rank)), BATCH)
    batches, last = iter(loader), None
    for _ in range(engine.reduce(len(loader), "max")):
        batch = next(batches, None)
        weight = 0 if batch is None else len(batch[0])
        last = batch or last
        yield last, weight


def joined(config: dict[str, Any], epochs: int = 2) -> dict[str, Any]:
    """Train passes over uneven parts."""
    engine = zerolite.initialize(models.build(models.Mlp), config)
    norms = []
    for _ in range(epochs):
        for batch, weight in by_hand(engine):
            engine.backward(models.square_loss(engine, batch), weight=weight)
            if engine.step():
                norms.append(engine.get_global_grad_norm())
        if engine.step(flush=True):
            norms.append(engine.get_global_grad_norm())
    parameters = snapshot(engine)
    assert_same_on_ranks(parameters)
    return {"parameters": parameters, "norms": norms}


def joined_plain(micros: int, epochs: int = 2) -> Any:
    """Plain PyTorch on the joint batch of each step."""
    steps = joint_batches()
    windows = [steps[start : start + micros] for start in range(0, len(steps), micros)] * epochs
    return reference.train(models.build(models.Mlp), models.square_loss, windows, "fp32", SGD)


@pytest.mark.fast("3 tight-3")
@on_ranks(2, 3, timeout=120)
@pytest.mark.parametrize("stage", STAGES)
def test_uneven_passes_are_those_of_the_joint_batches(stage: str) -> None:
    for micros in (1, 3):
        wanted = joined_plain(micros)
        found = joined(at(stage, accumulation=micros))
        assert found["norms"] == pytest.approx(wanted.norms, rel=2e-6)
        torch.testing.assert_close(found["parameters"], wanted.parameters, rtol=0, atol=2e-6)


# -------------------------------------------------------------------- batches that differ in size

STEPS = 4


def rows(step: int, micro: int, rank: int, world: int) -> int:
    """Return how many samples a micro-batch holds: all numbers from 0 to 6, never none on all ranks."""
    if rank == world - 1 and micro == 0:
        return 1 + (step + rank) % 6
    return (5 * rank + 3 * micro + 2 * step) % 7


def batch_of(step: int, micro: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    x, y = models.float_batch(step, micro, rank, size=8)
    count = rows(step, micro, rank, world)
    return x[:count], y[:count]


def mean_loss(model: Any, batch: Sequence[Tensor]) -> Tensor:
    return torch.nn.functional.mse_loss(model(batch[0], "left").to(batch[1].dtype), batch[1])


def weighted(config: dict[str, Any], micros: int = 1, flush: bool = False) -> dict[str, Any]:
    """Train with ``weight=`` the number of samples, also as a tensor. flush: the window holds one micro-batch less than
    the config says."""
    engine = zerolite.initialize(models.build(models.TwoBranches), config)
    gradients, norms = [], []
    for step in range(STEPS):
        for micro in range(micros):
            x, y = batch_of(step, micro, engine.rank, engine.world_size)
            loss = mean_loss(engine, (x, y))
            weight: Any = torch.tensor(len(x)) if micro else len(x)
            engine.backward(loss, weight=weight)
            if micro == micros - 1:
                gradients.append(zerolite.get_full_grad(engine.module.stem.weight))
            engine.step(flush=flush and micro == micros - 1)
        norms.append(engine.get_global_grad_norm())
    parameters = snapshot(engine)
    assert_same_on_ranks(parameters)
    assert engine.skipped_steps == 0
    return {"parameters": parameters, "norms": norms, "gradients": gradients}


def weighted_plain(optimizer: tuple[str, dict[str, Any]], micros: int = 1, clip: float = 0.0) -> dict[str, Any]:
    """Plain PyTorch on the one joint batch of each step, in double precision."""
    world, gradients = dist.get_world_size(), []
    model = models.build(models.TwoBranches).double()
    model.stem.weight.register_hook(lambda gradient: gradients.append(gradient.clone()))

    def window(step: int) -> list[Any]:
        parts = [[batch_of(step, micro, rank, world) for rank in range(world)] for micro in range(micros)]
        return [[(x.double(), y.double()) for x, y in ranks] for ranks in parts]

    batches = [window(step) for step in range(STEPS)]
    found = reference.train(model, mean_loss, batches, "fp32", optimizer, clip)
    return {"parameters": dict(model.named_parameters()), "norms": found.norms, "gradients": gradients}


@pytest.mark.slow
@on_ranks(1, 2, 3, timeout=120)
def test_weights_give_the_gradient_of_the_joint_batch() -> None:
    for optimizer, clip, micros in ((SGD, 0.0, 1), (ADAMW, 0.5, 3)):
        wanted, results = weighted_plain(optimizer, micros, clip), {}
        for stage in STAGES:
            found = weighted(at(stage, accumulation=micros, optimizer=optimizer, clip=clip), micros)
            assert found["norms"] == pytest.approx(wanted["norms"], rel=2e-6)
            for got, want in zip(found["gradients"], wanted["gradients"], strict=True):
                torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)
            results[stage] = found["parameters"]
            # Momentum and Adam carry each step's rounding on: a few units in the last place of values around 1.
            atol = 1e-6 if optimizer is SGD else 1e-5
            doubles = {name: value.double() for name, value in results[stage].items()}
            torch.testing.assert_close(doubles, wanted["parameters"], rtol=0, atol=atol)
        for stage in STAGES if dist.get_world_size() < 3 else ():
            first = "0" if micros == 1 or stage in "01" else "2"  # above, each micro-batch is reduced: another order
            assert_same_bits(results[first], results[stage], f"stages {first} and {stage}")


@pytest.mark.fast("2-fp16-*", "3-fp32-*")
@on_ranks(2)
@pytest.mark.parametrize(
    ("stage", "precision", "rel"),
    [("0", "bf16", 0.02), ("2", "fp16", 0.003), ("3", "fp16", 0.003), ("0", "fp32", 2e-6), ("3", "fp32", 2e-6)],
)
def test_weights_in_16_bits_and_in_a_step_that_is_flushed_early(stage: str, precision: str, rel: float) -> None:
    """Gradients are those of the joint batch, to the rounding of 16-bit values."""
    flush = precision == "fp32"
    found = weighted(at(stage, precision=precision, accumulation=5 if flush else 2), 2, flush)
    assert found["norms"] == pytest.approx(weighted_plain(SGD, 2)["norms"], rel=rel)


@on_ranks(2)
def test_fp16_finds_a_unit_for_large_weights() -> None:
    """Weights of 65,536 would overflow any fp16 gradient; after the first step they are counted in their own unit."""
    engine = zerolite.initialize(
        models.build(models.Mlp), at("2", fp16=dynamic_fp16(initial_scale_power=4, hysteresis=4))
    )
    model = models.build(models.Mlp)
    for step in range(4):
        backward(engine, 0, weight=65536.0)
        model.load_state_dict({name: value.float() for name, value in engine.full_state_dict().items()})
        model.zero_grad()
        for rank in range(2):
            (models.square_loss(model, models.float_batch(0, 0, rank)) / 2).backward()
        plain = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        engine.step()
        assert not step or engine.get_global_grad_norm() == pytest.approx(plain, rel=0.003)
    assert (engine.skipped_steps, engine.global_steps) == (1, 4)


@pytest.mark.fast("1-2", "3-2")
@on_ranks(2)
@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_what_is_no_weight(stage: str) -> None:
    engine = make_engine(at(stage), "Mlp")

    def train(**arguments: Any) -> None:
        backward(engine, 0, **arguments)
        engine.step()

    for weight in (-1, float("nan"), torch.ones(2)):
        with raises(ValueError, "expected weight to be the number of tokens or samples"):
            train(weight=weight)
        engine.zero_grad()
    for words, arguments in (
        ("scale_wrt_gas", {"weight": 2, "scale_wrt_gas": False}),
        ("the mean over nothing has no gradient", {"weight": 0}),
        ("some ranks gave a weight", {"weight": 3 if engine.rank == 0 else None}),
    ):
        with raises((ValueError, RuntimeError), words):
            train(**arguments)
        engine.zero_grad()
    with raises(RuntimeError, "all backwards of a step to have a weight, or none"):
        backward(engine, 0, weight=2)
        train()
    engine.zero_grad()
    before = snapshot(engine)
    train(weight=2)
    assert not torch.equal(before["first.weight"], snapshot(engine)["first.weight"])
