"""Loaders, evaluation and metrics on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import zerolite
from tests import models
from tests.distributed.cases.collectives import transport
from tests.distributed.cases.training import make_engine, snapshot
from tests.distributed.configs import config as make_config


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


# -------------------------------------------------------------------- evaluation


def evaluate(config: dict[str, Any], count: int, batch_size: int, how: str) -> dict[str, Any]:
    """One training step, then predictions for every item, with the metrics that people compute of them.

    how: the loader is the engine's ("own"), the user's and told to the engine ("prepared"), or the engine's and the
    predictions are gathered after the pass ("whole").
    """
    engine = make_engine(config, "Mlp")
    engine.backward(models.square_loss(engine, models.float_batch(99, 0, dist.get_rank())))
    engine.step()
    data = Points(count)
    if how == "prepared":
        sampler: Any = DistributedSampler(data, engine.world_size, engine.rank, shuffle=False)
        loader = engine.prepare_loader(DataLoader(data, batch_size=batch_size, sampler=sampler))
    else:
        loader = engine.deepspeed_io(data, batch_size, "eval")
    rows: list[Any] = []
    engine.eval()
    with torch.no_grad():
        for index, x, y in loader:
            outputs = engine(x)
            found = {"index": index, "outputs": outputs, "near": (outputs - y).abs() < 1, "half": outputs.bfloat16()}
            rows.append(found if how == "whole" else engine.gather_for_metrics(found))
    together = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    if how == "whole":
        together = engine.gather_for_metrics(together, loader)
    return {"gathered": together, "weights": snapshot(engine)}


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


def mixed(rank: int) -> dict[str, Any]:
    """Return the input of rank ``rank`` for a reduction. Numbers may be of different types, keys in a different
    order."""
    items = {
        "count": 3 * rank,
        "loss": 0 if rank == 0 else 0.1 * rank,
        "flag": rank == 0,
        "tensors": [torch.tensor([[rank, 1], [2, -rank]]), torch.tensor([0.1 * rank, -1.0]), torch.tensor(rank == 0)],
        "half": torch.full((2,), 1000.0 * (rank + 1), dtype=torch.float16),
    }
    return dict(sorted(items.items(), reverse=rank % 2 == 1))


def reduce_and_gather(config: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(config, "Mlp")
    rank = dist.get_rank()
    reduced = {op: engine.reduce(mixed(rank), op) for op in ("mean", "sum", "max", "min")}
    return {
        "reduced": reduced,
        "gathered": engine.gather(uneven(rank)),
        "metrics": engine.gather_for_metrics(uneven(rank)),
    }


def large(rank: int) -> dict[str, Any]:
    """More than fits in one message, and of different lengths."""
    return {"x": torch.arange(30000.0 * rank).view(-1, 3), "y": torch.arange(50001 + rank) % 3 == 0}


def gather_large(how: str) -> dict[str, Any]:
    """Two times :func:`large`, and a sum, with one way of sending."""
    with transport(how):
        engine = make_engine(make_config(0), "Mlp")
        total = engine.reduce(torch.full((20001,), engine.rank), "sum")
        return {"gathered": [engine.gather(large(engine.rank)) for _ in range(2)], "total": total}


def _calls(engine: Any, rank: int) -> dict[str, Callable[[], Any]]:
    """Calls that do not fit together: rank 0 makes them differently, or wrongly."""
    first = rank == 0
    one = torch.ones(2, 3)
    data = engine.deepspeed_io(Points(8), 2, "eval")

    def within_a_pass() -> Any:
        for _ in data:
            engine.gather_for_metrics(torch.ones(3 if first else 2))

    def at_different_batches() -> Any:
        batches = iter(engine.deepspeed_io(Points(2 * engine.world_size + 1), 2, "eval"))
        for _ in range(1 if first else 2):
            next(batches)
        engine.gather_for_metrics(torch.ones(2 if first else 1))

    return {
        "dtype": lambda: engine.gather({"x": one.double() if first else one}),
        "trailing shape": lambda: engine.gather({"x": one if first else one.view(3, 2)}),
        "keys": lambda: engine.gather({"x": one} if first else {"x": one, "y": one}),
        "shape": lambda: engine.reduce({"x": one if first else one[0]}),
        "op": lambda: engine.reduce(1.0, "sum" if first else "max"),
        "kind": lambda: engine.reduce({"x": 1.0 if first else one}),
        "method": lambda: engine.reduce(1.0) if first else engine.gather(1.0),
        "text": lambda: engine.gather({"x": "text" if first else one}),
        "wrong op": lambda: engine.reduce(1.0, "average" if first else "sum"),
        "rows": within_a_pass,
        "batch": at_different_batches,
    }


def disagreements(config: dict[str, Any]) -> dict[str, str]:
    """Return the error of each call, after which the next call works."""
    engine = make_engine(config, "Mlp")
    said = {}
    for name, call in _calls(engine, dist.get_rank()).items():
        try:
            call()
        except (RuntimeError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"
        del call
        assert engine.reduce(1, "sum") == engine.world_size
    return said


# -------------------------------------------------------------------- training data


def train_on_data(config: dict[str, Any], count: int, updates: int) -> dict[str, Any]:
    """Updates over several passes, an evaluation within each micro-batch; the items that this rank saw in them."""
    engine = make_engine(config, "Mlp", training_data=Points(count))
    batches = zerolite.RepeatingLoader(engine.dataloader)
    evaluation = engine.deepspeed_io(Points(3), route="eval")
    seen: list[list[list[int]]] = []
    gathered = []
    for _ in range(updates):
        seen.append([])
        for _ in range(engine.gradient_accumulation_steps):
            index, x, y = next(batches)
            engine.backward(models.square_loss(engine, (x, y)))
            with torch.no_grad():
                evaluated = [engine.gather_for_metrics(i) for i, other, _ in evaluation if engine(other).shape[1] == 3]
            assert torch.cat(evaluated).tolist() == [0, 1, 2]
            gathered.append(engine.gather_for_metrics(index).tolist())
            engine.step()
            seen[-1].append(index.tolist())
    return {"seen": seen, "gathered": gathered, "weights": snapshot(engine), "length": len(engine.dataloader)}


def loader_options(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of ``engine.dataloader`` and of other loaders, which follow from the arguments of
    ``initialize``."""
    collate = len
    engine = make_engine(config, "Mlp", training_data=Points(5), collate_fn=collate, num_local_io_workers=2)
    loader = engine.deepspeed_io(Points(5), 3, "predict", False)
    return {
        "workers": (engine.dataloader.num_workers, loader.num_workers),
        "batch sizes": (engine.dataloader.batch_size, loader.batch_size),
        "batches": list(loader),
    }


# -------------------------------------------------------------------- synchronised batch norm


class WrittenOutSyncBatchNorm(nn.BatchNorm1d):
    """The computation of torch.nn.SyncBatchNorm, which has no CPU version: statistics of all ranks' samples [N, C], and
    gradients through them."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        if not self.training:
            return super().forward(x)
        count = x.shape[0] * dist.get_world_size()
        mean = differentiable.all_reduce(x.sum(0)) / count
        variance = differentiable.all_reduce((x - mean).square().sum(0)) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


def normalised_model(norm: Callable[[int], nn.Module]) -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(7, 6), norm(6), nn.Tanh(), nn.Linear(6, 5), norm(5), nn.Linear(5, 3))


def sync_batch_norm(config: dict[str, Any], steps: int, real: bool) -> dict[str, Any]:
    """``steps`` updates, each rank with its own samples. real: torch's own layer, on CUDA."""
    if real:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(normalised_model(nn.BatchNorm1d))
    else:
        model = normalised_model(WrittenOutSyncBatchNorm)
    engine = zerolite.initialize(model, config)
    norms = []
    for step in range(steps):
        x, y = models.float_batch(step, 0, engine.rank)
        engine.backward(F.mse_loss(engine(x.to(engine.device)), y.to(engine.device)))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return {
        "norms": norms,
        "weights": {name: value.cpu() for name, value in snapshot(engine).items()},
        "buffers": {name: buffer.cpu() for name, buffer in model.named_buffers() if "batches" not in name},
    }


def torch_sync_batch_norm_on_cpu(config: dict[str, Any]) -> dict[str, Any]:
    """torch's own layer evaluates; in training it raises on every rank."""
    engine = zerolite.initialize(nn.SyncBatchNorm.convert_sync_batchnorm(normalised_model(nn.BatchNorm1d)), config)
    engine.eval()
    x, _ = models.float_batch(0, 0, 0)
    with torch.no_grad():
        outputs = engine.gather(engine(x.chunk(engine.world_size)[engine.rank]))
    engine.train()
    try:
        engine(x)
    except ValueError as error:
        return {"outputs": outputs, "error": str(error)}
    return {"outputs": outputs, "error": ""}
