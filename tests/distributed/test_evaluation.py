"""Loaders, evaluation and metrics at every stage and world size, against plain computation on one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import from_all_ranks
from tests.toolkit.configs import config
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import make_engine, raised, run_steps, snapshot
from zerolite.data.dataloader import EpochSampler


class Points(Dataset):
    """Item i: its number, seven inputs and three targets."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        x, y = models.float_batch(index, 0, 0, size=1)
        return index, x[0], y[0]


def joint(indices: list[int]) -> tuple[Tensor, Tensor]:
    """The inputs and targets of these items in one batch."""
    items = [Points(1)[index] for index in indices]
    return torch.stack([item[1] for item in items]), torch.stack([item[2] for item in items])


def assert_exact(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


# -------------------------------------------------------------------- evaluation


@pytest.mark.fast("2-prepared-1", "2-whole-3", "1-own-0")
@pytest.mark.parametrize(("how", "stage"), [("own", 0), ("prepared", 1), ("whole", 3)])
@on_ranks(1, 2, 3)
def test_every_item_is_evaluated_once_and_in_order(how: str, stage: int) -> None:
    """how: the loader is the engine's ("own"), the user's and told to the engine ("prepared"), or the engine's and the
    predictions are gathered after the pass ("whole")."""
    engine = make_engine(config(stage), "Mlp")
    run_steps(engine, 1, 99)
    model = models.build(models.Mlp)
    model.load_state_dict(snapshot(engine))
    engine.eval()
    for count in (1, 12, 13) if how == "own" else (11,):
        data = Points(count)
        if how == "prepared":
            sampler: Any = DistributedSampler(data, engine.world_size, engine.rank, shuffle=False)
            loader = engine.prepare_loader(DataLoader(data, batch_size=3, sampler=sampler))
        else:
            loader = engine.deepspeed_io(data, 3, "eval")
        rows: list[Any] = []
        with torch.no_grad():
            for index, x, y in loader:
                outputs = engine(x)
                near = (outputs - y).abs() < 1
                found = {"index": index, "outputs": outputs, "near": near, "half": outputs.bfloat16()}
                rows.append(found if how == "whole" else engine.gather_for_metrics(found))
            gathered = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
            if how == "whole":
                gathered = engine.gather_for_metrics(gathered, loader)
            x, y = joint(list(range(count)))
            torch.testing.assert_close(gathered["outputs"], model(x))
        assert gathered["index"].tolist() == list(range(count))
        assert torch.equal(gathered["half"], gathered["outputs"].bfloat16())
        assert torch.equal(gathered["near"], (gathered["outputs"] - y).abs() < 1)


# -------------------------------------------------------------------- reduce and gather


def uneven(rank: int) -> dict[str, Any]:
    """Return the input of rank ``rank`` for a gather: as many rows as its number."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(rank, 2, 3, generator=generator)
    return {
        "floats": values,
        "low": [values.bfloat16(), values.half()],
        "bools": values[:, 0, 0] > 0,
        "longs": torch.arange(rank) + 2**40,
        "scalar": (torch.tensor(float(rank)), rank),
        "strided": values.transpose(0, 2).contiguous().transpose(0, 2),
        "none": None,
    }


@on_ranks(1, 2, 3)
def test_gathers_of_uneven_nested_values() -> None:
    engine, ranks = make_engine(config(3), "Mlp"), [uneven(rank) for rank in range(dist.get_world_size())]
    wanted = {
        "floats": torch.cat([rank["floats"] for rank in ranks]),
        "low": [torch.cat([rank["low"][i] for rank in ranks]) for i in range(2)],
        "bools": torch.cat([rank["bools"] for rank in ranks]),
        "longs": torch.cat([rank["longs"] for rank in ranks]),
        "scalar": (torch.arange(float(len(ranks))), torch.arange(len(ranks)).double()),
        "strided": torch.cat([rank["floats"] for rank in ranks]),
        "none": None,
    }
    assert_exact(engine.gather(ranks[engine.rank]), wanted)
    assert_exact(engine.gather_for_metrics(ranks[engine.rank]), wanted)


@on_ranks(1, 2, 3)
def test_reductions_of_nested_values() -> None:
    engine = make_engine(config(0), "Mlp")
    world = engine.world_size
    losses = [0 if rank == 0 else 0.1 * rank for rank in range(world)]
    values = {
        "count": 3 * engine.rank,
        "loss": float(losses[engine.rank]),
        "x": torch.tensor([0.1 * engine.rank, -1.0]),
    }
    found = {op: engine.reduce(values, op) for op in ("sum", "mean", "max", "min")}
    assert [one["loss"] for one in found.values()] == [sum(losses), sum(losses) / world, max(losses), 0.0]
    total = 3 * sum(range(world))
    assert [one["count"] for one in found.values()] == [total, total / world, 3 * (world - 1), 0]
    assert type(found["sum"]["count"]) is int
    for op, function in (("sum", torch.sum), ("mean", torch.mean), ("max", torch.amax), ("min", torch.amin)):
        stacked = torch.stack([torch.tensor([0.1 * rank, -1.0]) for rank in range(world)]).double()
        assert_exact(found[op]["x"], function(stacked, 0).float())


WORDS = {
    "dtype": r"RuntimeError: engine.gather: .*rank 0 has \['x'\]: torch.float64 .*, rank 1 has .*float32",
    "method": r"RuntimeError: engine\.\w+: .*rank 0 has engine.reduce, op=mean, rank 1 has engine.gather",
    "more": r"RuntimeError: engine.reduce: .*rank 0 has nothing more, rank 1 has \[0\]: torch.float64",
    "wrong op": r"ValueError: .*expected op to be one of mean, sum, max, min, got 'average'",
    "rows": r"ValueError: .*expected a row for each of the 2 samples .*3 rows at",
}


@on_ranks(2, 3, timeout=30)
def test_ranks_that_disagree_all_raise_and_go_on() -> None:
    engine = make_engine(config(1), "Mlp")
    first, one = engine.rank == 0, torch.ones(2, 3)
    data = engine.deepspeed_io(Points(8), 2, "eval")

    def within_a_pass() -> Any:
        for _ in data:
            engine.gather_for_metrics(torch.ones(3 if first else 2))

    calls: dict[str, Callable[[], Any]] = {
        "dtype": lambda: engine.gather({"x": one.double() if first else one}),
        "method": lambda: engine.reduce(1.0) if first else engine.gather(1.0),
        "more": lambda: engine.reduce([] if first else [1.0]),
        "wrong op": lambda: engine.reduce(1.0, "average" if first else "sum"),
        "rows": within_a_pass,
    }
    for name, call in calls.items():
        said = raised(call)
        assert re.search(WORDS[name], said, re.DOTALL), (name, said)
        assert engine.reduce(1, "sum") == engine.world_size


# -------------------------------------------------------------------- training data


@pytest.mark.fast("1-True-0", "2-False-3")
@pytest.mark.parametrize(("drop_last", "stage"), [(True, 0), (False, 3)])
@on_ranks(1, 2, 3)
def test_training_on_data_equals_plain_training(drop_last: bool, stage: int) -> None:
    """Updates over several passes, an evaluation within each micro-batch."""
    count, updates, accumulation, size, world = 15, 5, 2, 2, dist.get_world_size()
    settings = config(stage, accumulation=accumulation, dataloader_drop_last=drop_last)
    engine = make_engine(settings, "Mlp", training_data=Points(count))
    batches, evaluation = zerolite.RepeatingLoader(engine.dataloader), engine.deepspeed_io(Points(3), route="eval")
    model = models.build(models.Mlp)
    optimizer = torch.optim.SGD(model.parameters(), **settings["optimizer"]["params"], foreach=True)
    gathered = []
    for _ in range(updates):
        for _ in range(accumulation):
            index, x, y = next(batches)
            engine.backward(models.square_loss(engine, (x, y)))
            with torch.no_grad():
                evaluated = [engine.gather_for_metrics(i) for i, other, _ in evaluation if engine(other).shape[1] == 3]
            assert torch.cat(evaluated).tolist() == [0, 1, 2]
            gathered.append(engine.gather_for_metrics(index).tolist())
            engine.step()
            for part in from_all_ranks(index.tolist()):
                x, y = joint(part)
                (F.mse_loss(model(x), y) / (world * accumulation)).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(snapshot(engine), dict(model.named_parameters()))
    passes, micro = [], []
    while len(micro) < updates * accumulation:
        sampler = EpochSampler(range(count), 1, 0)
        sampler.set_epoch(len(passes))
        passes.append(list(sampler))
        kept = passes[-1][: count // (size * world) * size * world] if drop_last else passes[-1]
        micro += [kept[start : start + size * world] for start in range(0, len(kept), size * world)]
    assert gathered == micro[: updates * accumulation]
    assert len(engine.dataloader) == len(micro) // len(passes)
