"""A run that is saved and loaded goes on as if nothing had happened, at any stage and world size.

Each test saves a run at some stages, loads it at others into engines with other weights, and compares what was saved,
the next three losses, and everything after them. States are equal to the bit everywhere. What follows is equal to the
bit where the arithmetic is the same: at as many ranks and, with several micro-batches, at stages that sum alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import zerolite
from tests.checkpoint.cases.recipes import RECIPES
from tests.checkpoint.cases.resume import Place, check, keep, kept, message, of_all
from tests.toolkit.faults import Warnings
from tests.toolkit.pool import Pools
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import snapshot


def at(world: int, *stages: int) -> list[Place]:
    return [(world, {"stage": stage}) for stage in stages]


def rotated() -> Iterator[Any]:
    """Every recipe with the stages at which it is saved and loaded."""
    for number, name in enumerate(RECIPES):
        stages = RECIPES[name].stages
        saved, loaded = stages[number % len(stages)], stages[(number + 1 + number // 4 % 3) % len(stages)]
        yield pytest.param(name, saved, [loaded, saved] if RECIPES[name].micros > 1 else [loaded], id=name)


@pytest.mark.fast("mixture", "Lion")
@pytest.mark.parametrize(("name", "saved", "loaded"), list(rotated()))
def test_as_many_ranks(pools: Pools, tmp_path: Path, name: str, saved: int, loaded: list[int]) -> None:
    check(pools, tmp_path, name, at(2, saved), [at(2, *loaded)])


SAMPLE: list[Any] = [
    ("mixture", at(2, 3, 1), at(3, 0, 3)),
    ("mixture", at(3, 2), at(2, 3, 1)),
    ("NAdam", at(2, 0), at(2, 3)),
    ("mixture in bf16", at(2, 1), at(3, 3)),
    ("normed", at(2, 3), at(3, 1)),
    ("accumulation", at(2, 1), at(3, 2, 1)),
    ("Adafactor", at(2, 0), at(3, 0)),
    ("adapters in bf16", at(2, 3), at(3, 2)),
    ("moments in bf16", at(3, 1), at(2, 3)),
]


@pytest.mark.fast("mixture-saves1-loads1", "NAdam-saves2-loads2")
@pytest.mark.parametrize(("name", "saves", "loads"), SAMPLE)
def test_other_numbers_of_ranks(
    pools: Pools, tmp_path: Path, name: str, saves: list[Place], loads: list[Place]
) -> None:
    check(pools, tmp_path, name, saves, [loads] * len(saves))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixture", "mixture in fp16", "accumulation with weights in fp16"])
def test_every_stage_and_world_size_into_every_other(pools: Pools, tmp_path: Path, name: str) -> None:
    everywhere = [place for world in (1, 2, 3, 4) for place in at(world, 0, 1, 2, 3)]
    check(pools, tmp_path, name, everywhere, [everywhere] * len(everywhere))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded", "zero"),
    [
        (1, 2, {"reduce_bucket_size": 37}),
        (2, 0, {"reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}),
        (3, 3, {"stage3_param_persistence_threshold": 1_000_000}),
        (0, 3, {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 50}),
    ],
)
def test_other_buckets_and_thresholds(
    pools: Pools, tmp_path: Path, saved: int, loaded: int, zero: dict[str, Any]
) -> None:
    check(pools, tmp_path, "mixture", at(2, saved), [[(2, {"stage": loaded, "zero": zero})]])


# -------------------------------------------------------------------- placements

PLACEMENTS = ("none", "cpu", "nvme")


def offloaded(placement: str, directory: Path) -> dict[str, Any]:
    if placement == "none":
        return {}
    path = {"nvme_path": str(directory)} if placement == "nvme" else {}
    return {"offload_optimizer": {"device": placement, **path}, "sub_group_size": 100}


def placed(directory: Path, world: int, *placements: tuple[str, int]) -> list[Place]:
    """placements: with the stage."""
    return [(world, {"stage": n, "zero": offloaded(one, directory), "apart": True}) for one, n in placements]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixture in bf16", "NAdam", "woken", "autocast"])
def test_every_placement_goes_on_at_another(pools: Pools, tmp_path: Path, name: str) -> None:
    """Checkpoints know nothing of placements."""
    saves = placed(tmp_path, 2, ("none", 2), ("cpu", 3), ("nvme", 1))
    loads = placed(tmp_path, 2, ("nvme", 3), ("none", 1), ("cpu", 2))
    check(pools, tmp_path, name, saves, [[place] for place in loads])


MATRIX = {
    "mixture": (2, 2), "mixture in bf16": (2, 3), "mixture in fp16": (3, 2), "accumulation": (1, 2), "NAdam": (2, 3),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRIX)
def test_every_placement_and_stage_into_others(pools: Pools, tmp_path: Path, name: str) -> None:
    """Each into three others, which are other ones for another recipe; together these are all."""
    every = [*itertools.product(PLACEMENTS, (1, 2, 3)), ("none", 0)]
    world, other = MATRIX[name]
    first = 3 * list(MATRIX).index(name) + other
    loads = [[every[(number + first + step) % len(every)] for step in range(3)] for number in range(len(every))]
    saves = placed(tmp_path, world, *every)
    check(pools, tmp_path, name, saves, [placed(tmp_path, other, *goals) for goals in loads])


# -------------------------------------------------------------------- the elasticity block

BATCH = 24
STEPS, SAVED = 4, 2
SIZES = {1: (BATCH, 3, 8), 2: (BATCH, 3, 4), 3: (BATCH, 2, 4), 4: (BATCH, 3, 2)}
ELASTICITY = {"enabled": True, "max_train_batch_size": 25, "micro_batch_sizes": [1, 2, 3], "max_gpus": 6}


class Rows(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Rows that know their number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(BATCH * (STEPS + 1), 5, generator=generator)
        self.y = torch.randn(BATCH * (STEPS + 1), 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.x[index], self.y[index]


def elastic_engine(stage: int, seed: int, sizes: dict[str, Any] | None = None, **elasticity: Any) -> Any:
    """sizes: instead of the elasticity block."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    config = {
        **({"elasticity": ELASTICITY | elasticity} if sizes is None else sizes),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return zerolite.initialize(model, config, training_data=Rows())


def take_steps(engine: Any, batches: Iterator[Any], steps: int) -> list[tuple[list[int], float]]:
    """The rows that all ranks together took in each step, in ascending order, and the mean loss over them."""
    result = []
    for _ in range(steps):
        rows: list[int] = []
        losses = []
        for _ in range(engine.gradient_accumulation_steps):
            index, x, y = next(batches)
            loss = torch.nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            rows += index.tolist()
            losses.append(float(loss.detach()))
        parts = of_all((rows, sum(losses) / len(losses)))
        result.append((sorted(sum((rows for rows, _ in parts), [])), sum(loss for _, loss in parts) / len(parts)))
    return result


def lr_and_sizes(engine: Any) -> tuple[float, tuple[int, int, int]]:
    sizes = engine.train_batch_size, engine.train_micro_batch_size_per_gpu, engine.gradient_accumulation_steps
    return engine.optimizer.param_groups[0]["lr"], sizes


def save(directory: Path, stage: int) -> None:
    """All steps, saved in between."""
    engine = elastic_engine(stage, seed=0)
    batches = iter(engine.dataloader)
    take_steps(engine, batches, SAVED)
    engine.save_checkpoint(directory)
    steps = take_steps(engine, batches, STEPS - SAVED)
    lr, sizes = lr_and_sizes(engine)
    assert sizes == SIZES[engine.world_size]
    keep(directory, steps=steps, parameters=snapshot(engine), lr=lr)


def load(directory: Path, stage: int) -> None:
    """The steps after, by an engine that loads: the rows that no step had before."""
    engine, wanted = elastic_engine(stage, seed=9), kept(directory)
    engine.load_checkpoint(directory)
    assert engine.global_steps == SAVED
    steps = take_steps(engine, iter(engine.dataloader), STEPS - SAVED)
    assert lr_and_sizes(engine) == (wanted["lr"], SIZES[engine.world_size])
    assert all(len(set(rows)) == BATCH for rows, _ in steps)
    assert [rows for rows, _ in steps] == [rows for rows, _ in wanted["steps"]]
    assert [loss for _, loss in steps] == pytest.approx([loss for _, loss in wanted["steps"]], rel=1e-5)
    torch.testing.assert_close(snapshot(engine), wanted["parameters"], rtol=1e-4, atol=1e-6)


def load_with_smaller_steps(directory: Path) -> None:
    """The first rank says that steps become smaller, once."""
    engine = elastic_engine(2, 0, {"train_micro_batch_size_per_gpu": 3})
    with Warnings() as warnings:
        engine.load_checkpoint(directory)
    told = [text for text in warnings.messages if "elasticity" in text]
    assert len(told) == (engine.rank == 0)
    for text in told:
        assert "a step takes 6 samples on 2 ranks, and took 24 on 4 when the checkpoint was saved" in text


def test_a_run_goes_on_with_half_of_its_ranks(pools: Pools, tmp_path: Path) -> None:
    arguments = {"directory": tmp_path, "stage": 2}
    pools(4).run(save, arguments)
    pools(2).run(load, arguments)
    pools(2).run(load_with_smaller_steps, {"directory": tmp_path})


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "saves"), [(0, 3), (1, 2), (2, 4), (3, 1), (3, 3)])
def test_a_run_goes_on_with_any_number_of_ranks(pools: Pools, tmp_path: Path, stage: int, saves: int) -> None:
    arguments = {"directory": tmp_path, "stage": stage}
    pools(saves).run(save, arguments)
    for world in SIZES:
        pools(world).run(load, arguments)


@on_ranks(2)
def test_what_cannot_go_on_says_why() -> None:
    said = message(elastic_engine, 2, 0, min_gpus=3)
    assert said.startswith("ConfigError") and "elasticity: expected a number of ranks" in said
    assert "from 3 to 6" in said and "got 2 ranks" in said and "the nearest that do: 3" in said
