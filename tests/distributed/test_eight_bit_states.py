"""AdamW8bit by name: its numbers at every stage, its memory, and its states outside of the update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import at
from tests.toolkit.pool import Pools
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import make_engine, raises, run_steps, train_engine
from zerolite.optim.adamw8bit import MAXIMA, AdamW8bit

PARAMS = {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1}
EIGHT_BIT = ("AdamW8bit", PARAMS)
WIDTH, DEPTH = 64, 4  # of Chain: every shard on two ranks begins at a block
NUMEL = WIDTH * WIDTH * DEPTH


def settings(stage: int | str, precision: str = "fp32", optimizer: Any = EIGHT_BIT, **more: Any) -> dict[str, Any]:
    zero = {"reduce_bucket_size": NUMEL, **more.pop("zero", {})}
    return at(stage, precision, optimizer=optimizer, zero=zero, **more)


def without_optimizer(stage: int) -> dict[str, Any]:
    return {key: value for key, value in settings(stage).items() if key != "optimizer"}


def chain(made: dict[str, Any]) -> Any:
    return zerolite.initialize(models.build(models.Chain, depth=DEPTH, width=WIDTH), made)


def steps(engine: Any, count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        for micro in range(engine.gradient_accumulation_steps):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + engine.rank)
            engine.backward(engine(torch.randn(4, WIDTH, generator=generator)).float().square().mean())
            engine.step()


def held(engine: Any) -> dict[str, Any]:
    """Weights and states, whole."""
    states = {
        f"{key} of {name}": zerolite.get_full_optimizer_state(parameter, key)
        for name, parameter in engine.module.named_parameters()
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    return {**engine.full_state_dict(dtype=torch.float32), **states}


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": "bf16", "accumulation": 2, "clip": 0.05},
    "fp16": {"precision": "fp16"},
}


@pytest.mark.fast("2-plain")
@pytest.mark.parametrize("name", RUNS)
@on_ranks(2)
def test_every_stage_has_the_bits_of_stage_0(name: str) -> None:
    """The borders of these shards are those of blocks. AdamW is near, and not the same."""
    found = {}
    for stage in (0, 1, 2, 3):
        engine = chain(settings(stage, **RUNS[name]))
        steps(engine, 3)
        found[stage] = held(engine)
        assert_same_bits(found[stage], found[0], f"stage {stage}")
    engine = chain(settings(0, optimizer=("AdamW", PARAMS), **RUNS[name]))
    steps(engine, 3)
    begun = models.build(models.Chain, depth=DEPTH, width=WIDTH).state_dict()
    for key, value in engine.full_state_dict(dtype=torch.float32).items():
        assert 0 < (value - found[0][key]).norm() < 0.05 * (value - begun[key]).norm()


@pytest.mark.fast("3-2")
@pytest.mark.parametrize("stage", [1, 2, 3, "3 defaults"])
@on_ranks(3)
def test_shards_of_odd_sizes_are_near_stage_0(stage: int | str) -> None:
    found = [train_engine(make_engine(settings(s, clip=0.5)), "OddModel", 4)["parameters"] for s in (0, stage)]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-3)  # a tenth of a step


@on_ranks(2)
def test_two_bytes_for_each_element_and_fp32_for_embeddings_and_vectors() -> None:
    engine = chain(settings(2, "bf16"))
    steps(engine, 1)
    assert engine.memory_report().items["optimizer_states"] == (2 + 8 / 256) * NUMEL / 2
    engine = make_engine(settings(0))
    run_steps(engine, 1, model="OddModel")
    of = {name: engine.optimizer.state[p] for name, p in engine.module.named_parameters() if p.requires_grad}
    in_codes = {name for name, state in of.items() if MAXIMA[0] in state}
    assert in_codes == {"up.weight", "down.weight"}
    assert all(of[name]["exp_avg"].dtype == torch.float32 for name in ("embed.weight", "norm.weight", "gain"))


PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "host": (2, {"offload_optimizer": {"device": "cpu"}}),
    "host, stage 3": (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    "disk": (1, {"offload_optimizer": {"device": "nvme"}}),
}


@pytest.mark.fast("2-host, stage 3")
@pytest.mark.parametrize("place", PLACES)
@on_ranks(2)
def test_offloaded_states_have_the_bits_of_others(place: str, tmp_path: Path) -> None:
    stage, zero = PLACES[place]
    if place == "disk":
        zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    found: list[Any] = []
    for offload in ({}, zero):
        engine = chain(settings(stage, "bf16", zero=offload))
        steps(engine, 2)
        engine.save_checkpoint(tmp_path / "saved", tag=str(len(found)))
        engine.load_checkpoint(tmp_path / "saved", tag=str(len(found)))
        steps(engine, 1, 2)
        found.append(held(engine))
    assert_same_bits(found[1], found[0], place)


@pytest.mark.slow
@on_ranks(2)
def test_a_bucket_on_disk_has_codes_and_states_in_fp32(tmp_path: Path) -> None:
    """Embedding, biases and norm are in one bucket with the matrices."""
    found: list[Any] = []
    for zero in ({}, {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}):
        engine = make_engine(settings(2, "bf16", zero=zero))
        run_steps(engine, 3, model="OddModel")
        zerolite.set_full_optimizer_state(engine.module.up.weight, "exp_avg", torch.ones(9, 5))
        run_steps(engine, 1, 3, model="OddModel")
        engine.save_checkpoint(tmp_path / "saved", tag=str(len(found)))
        run_steps(engine, 2, 4, model="OddModel")
        engine.load_checkpoint(tmp_path / "saved", tag=str(len(found)))
        run_steps(engine, 1, 4, model="OddModel")
        found.append(held_of_odd(engine))
    assert_same_bits(found[1], found[0], "on disk and in memory")


def held_of_odd(engine: Any) -> dict[str, Any]:
    """Weights, and states of the parameters that have some."""
    moments = {
        f"{key} of {name}": zerolite.get_full_optimizer_state(parameter, key)
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
        for key in ("exp_avg", "exp_avg_sq")
    }
    return {**engine.full_state_dict(), **{name: value for name, value in moments.items() if value is not None}}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_an_instance_that_has_states_goes_on_with_them(stage: int) -> None:
    model: Any = models.build(models.Chain, depth=DEPTH, width=WIDTH)
    optimizer = AdamW8bit(model.parameters(), lr=0.01)
    model(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    wanted = {name: optimizer.in_fp32(p, optimizer.state[p]) for name, p in model.named_parameters()}
    engine = zerolite.initialize(model, without_optimizer(stage), optimizer=optimizer)
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            moment = wanted[name][key]
            assert bool(moment.any()) and torch.equal(zerolite.get_full_optimizer_state(parameter, key), moment)
    steps(engine, 1)
    assert zerolite.get_full_optimizer_state(parameter, "step") == 2


@pytest.mark.parametrize("given", ["class", "function", "instance"])
@on_ranks(1)
def test_embeddings_are_in_fp32_however_the_class_is_given(given: str) -> None:
    model: Any = models.build(models.OddModel)
    ways: dict[str, Any] = {"class": AdamW8bit, "function": lambda groups: AdamW8bit(groups)}
    optimizer = ways.get(given) or AdamW8bit(p for p in model.parameters() if p.requires_grad)
    engine: Any = zerolite.initialize(model, without_optimizer(1), optimizer=optimizer)
    run_steps(engine, 1, model="OddModel")
    dtypes = {name: engine.optimizer.state[getattr(model, name).weight]["exp_avg"].dtype for name in ("embed", "up")}
    assert dtypes == {"embed": torch.float32, "up": torch.uint8}


def save(directory: str) -> dict[str, Any]:
    engine = chain(settings(2))
    steps(engine, 2)
    engine.save_checkpoint(directory, tag="two")
    before = held(engine)
    steps(engine, 1, 2)
    return {"before": before, "after": held(engine)}


def load(stage: int, directory: str, optimizer: Any = EIGHT_BIT) -> dict[str, Any]:
    engine = chain(settings(stage, optimizer=optimizer))
    engine.load_checkpoint(directory, tag="two")
    before = held(engine)
    steps(engine, 1, 2)
    return {"before": before, "after": held(engine)}


def test_checkpoints_load_at_other_stages_and_worlds_and_into_adamw(pools: Pools, tmp_path: Path) -> None:
    """They have AdamW's states, which are the same codes again."""
    (wanted, *_) = pools(2).run(save, {"directory": str(tmp_path)})
    for stage in (0, 3):
        for rank in pools(2).run(load, {"stage": stage, "directory": str(tmp_path)}):
            assert_same_bits(rank["before"], wanted["before"], f"stage {stage}")
            assert_same_bits(rank["after"], wanted["after"], f"a step of stage {stage}")
    (alone,) = pools(1).run(load, {"stage": 3, "directory": str(tmp_path)})
    assert_same_bits(alone["before"], wanted["before"], "one rank")
    for rank in pools(2).run(load, {"stage": 3, "directory": str(tmp_path), "optimizer": ("AdamW", PARAMS)}):
        assert_same_bits(rank["before"], wanted["before"], "AdamW")


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_states_are_read_and_written_by_parameter(stage: int) -> None:
    engine = make_engine(settings(stage))
    run_steps(engine, 2, model="OddModel")
    weight = engine.module.up.weight
    moment = zerolite.get_full_optimizer_state(weight, "exp_avg")
    assert moment is not None and moment.dtype == torch.float32 and moment.shape == (9, 5) and bool(moment.any())
    zerolite.set_full_optimizer_state(weight, "exp_avg", torch.ones(9, 5))
    assert torch.equal(zerolite.get_full_optimizer_state(weight, "exp_avg"), torch.ones(9, 5))
    assert zerolite.get_full_optimizer_state(weight, "step") == 2
    for name, state in states_here(engine):
        state["exp_avg"] = torch.zeros(3)
        with raises(ValueError, "optimizer.state", name):
            run_steps(engine, 1, 2, model="OddModel")
        break


def states_here(engine: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    names = {id(p): name for name, p in engine.module.named_parameters()}
    return ((names[id(p)], state) for p, state in engine.optimizer.state.items() if MAXIMA[0] in state)


@pytest.mark.slow
@on_ranks(2)
def test_a_state_dict_of_this_rank_and_parameters_that_are_unfrozen() -> None:
    """Also after a step that was skipped."""
    model: Any = models.build(models.Chain, depth=DEPTH, width=WIDTH)
    model.layers[0].requires_grad_(False)
    engine = zerolite.initialize(model, settings(2))
    steps(engine, 1)
    model.layers[0].requires_grad_(True)
    steps(engine, 1, 1)
    saved, weights = engine.optimizer.state_dict(), engine.full_state_dict()
    saved = {**saved, "masters": {index: value.clone() for index, value in saved["masters"].items()}}
    steps(engine, 1, 2)
    wanted = held(engine)
    engine.load_full_state_dict(weights)
    engine.optimizer.load_state_dict(saved)
    engine.backward(engine(torch.full((4, WIDTH), torch.inf)).square().mean())
    engine.step()
    assert engine.skipped_steps == 1
    steps(engine, 1, 2)
    assert_same_bits(held(engine), wanted, "after going back")
