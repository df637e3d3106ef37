"""With both batch sizes given a run goes on with another number of ranks: the same steps, and no row twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import zerolite
from tests.checkpoint.runs import keep, kept
from tests.toolkit.compare import from_all_ranks
from tests.toolkit.faults import Warnings
from tests.toolkit.pool import Pools
from tests.toolkit.training import snapshot

BATCH = 24
STEPS, SAVED = 4, 2
SIZES = {1: (BATCH, 2, 12), 2: (BATCH, 2, 6), 3: (BATCH, 2, 4), 4: (BATCH, 2, 3)}
GIVEN = {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": 2}


def numbered_rows() -> TensorDataset:
    generator, count = torch.Generator().manual_seed(1), BATCH * (STEPS + 1)
    x, y = torch.randn(count, 5, generator=generator), torch.randn(count, 1, generator=generator)
    return TensorDataset(torch.arange(count), x, y)


def make_engine(stage: int, seed: int, sizes: dict[str, int]) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    config = {
        **sizes, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    return zerolite.initialize(model, config, training_data=numbered_rows())


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
        parts = from_all_ranks((rows, sum(losses) / len(losses)))
        result.append((sorted(sum((rows for rows, _ in parts), [])), sum(loss for _, loss in parts) / len(parts)))
    return result


def lr_and_sizes(engine: Any) -> tuple[float, tuple[int, int, int]]:
    sizes = engine.train_batch_size, engine.train_micro_batch_size_per_gpu, engine.gradient_accumulation_steps
    return engine.optimizer.param_groups[0]["lr"], sizes


def save(directory: Path, stage: int) -> None:
    """All steps, saved in between."""
    engine = make_engine(stage, 0, GIVEN)
    batches = iter(engine.dataloader)
    take_steps(engine, batches, SAVED)
    engine.save_checkpoint(directory)
    steps = take_steps(engine, batches, STEPS - SAVED)
    lr, sizes = lr_and_sizes(engine)
    assert sizes == SIZES[engine.world_size]
    keep(directory, steps=steps, parameters=snapshot(engine), lr=lr)


def load(directory: Path, stage: int) -> None:
    """The steps after, by an engine that loads: the rows that no step had before."""
    engine, wanted = make_engine(stage, 9, GIVEN), kept(directory)
    engine.load_checkpoint(directory)
    assert engine.global_steps == SAVED
    steps = take_steps(engine, iter(engine.dataloader), STEPS - SAVED)
    assert lr_and_sizes(engine) == (wanted["lr"], SIZES[engine.world_size])
    assert all(len(set(rows)) == BATCH for rows, _ in steps)
    assert [rows for rows, _ in steps] == [rows for rows, _ in wanted["steps"]]
    assert [loss for _, loss in steps] == pytest.approx([loss for _, loss in wanted["steps"]], rel=1e-5)
    torch.testing.assert_close(snapshot(engine), wanted["parameters"], rtol=1e-4, atol=1e-6)


def load_with_smaller_steps(directory: Path) -> None:
    engine = make_engine(2, 0, {"train_micro_batch_size_per_gpu": 3})
    with Warnings() as warnings:
        engine.load_checkpoint(directory)
    told = [text for text in warnings.messages if "set train_batch_size" in text]
    assert len(told) == (engine.rank == 0)
    for text in told:
        assert "a step takes 6 samples on 2 ranks, and took 24 on 4 when the checkpoint was saved" in text


def test_a_run_goes_on_with_half_of_its_ranks(pools: Pools, tmp_path: Path) -> None:
    arguments = {"directory": tmp_path, "stage": 2}
    pools(4).run(save, arguments)
    pools(2).run(load, arguments)
    pools(2).run(load_with_smaller_steps, {"directory": tmp_path})


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "saves"), [(0, 3), (1, 2), (3, 1)])
def test_a_run_goes_on_with_any_number_of_ranks(pools: Pools, tmp_path: Path, stage: int, saves: int) -> None:
    arguments = {"directory": tmp_path, "stage": stage}
    pools(saves).run(save, arguments)
    for world in SIZES:
        pools(world).run(load, arguments)
