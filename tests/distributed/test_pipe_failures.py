"""Errors in pipelines of layers, and of models divided by names, are raised on all ranks. Those of a grid are in
test_grid_errors.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerolite
from tests.toolkit.configs import config
from tests.toolkit.partitioned import raises
from tests.toolkit.pipes import WIDTH, Block, TiedGpt, batches_of, float_batch, module_of, token_batch
from tests.toolkit.pool import Pools
from tests.toolkit.ranks import on_ranks
from zerolite.pipe import LayerSpec, PipelineModule


class Fails(Block):
    """Raises in the forward of some micro-batch, counted over all, and then no more."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise FileNotFoundError("the layer has lost its file")
        return super().forward(x)


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise FileNotFoundError("the gradient has lost its file")


class FailsInBackward(Block):
    def forward(self, x: Tensor) -> Tensor:
        return FailsBackward.apply(super().forward(x))  # type: ignore[no-any-return]


def fail(
    where: int = 1, at: int = 1, schedule: str = "1f1b", backward: bool = False, chunks: int | None = None
) -> list[str]:
    """Return the errors on each rank when a layer fails; then run a step that succeeds, if one can."""
    layers: list[Any] = [LayerSpec(Block) for _ in range(4)]
    layers[where] = LayerSpec(FailsInBackward) if backward else LayerSpec(Fails, at)
    settings = config(0, "fp32", 4)
    settings["pipeline"] = {"stages": 2, "schedule": schedule, "chunks": chunks}
    engine = zerolite.initialize(PipelineModule(layers, loss_fn=F.mse_loss, base_seed=7), settings)
    said = []
    for step in range(3):
        batches = batches_of(float_batch, step, 4, engine.data_parallel_world_size)
        try:
            loss = engine.train_batch(iter(batches[engine.data_parallel_rank]))
        except (RuntimeError, FileNotFoundError) as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append(f"{loss.item():.6f} {engine.get_global_grad_norm():.6f}")
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "settings", "rank", "step"),
    [
        (2, {"where": 3, "at": 6}, 1, 1),
        (2, {"where": 2, "at": 3, "schedule": "zbv"}, 1, 0),
        (2, {"where": 2, "backward": True, "schedule": "zero_bubble"}, 0, 0),
        (4, {"where": 2, "at": 2}, 2, 0),
    ],
)
def test_failures(pools: Pools, world: int, settings: dict[str, Any], rank: int, step: int) -> None:
    said = pools(world).run(fail, settings)
    assert said[rank][step].startswith("FileNotFoundError")
    told = ("FileNotFoundError", f"RuntimeError: engine.train_batch: rank {rank} failed")
    assert all(lines[step].startswith(told) for lines in said[: world // 2])
    for lines in said:
        assert lines[step + 1 :] == said[0][step + 1 :] or settings.get("backward")


@pytest.mark.slow
@on_ranks(4)
def test_two_pipelines_are_told_what_is_wrong_with_the_data_of_one() -> None:
    """Rank 3 runs out of data, cannot read it, or reads other data than rank 1, its pipeline's first stage."""
    last = dist.get_rank() == 3
    engine = zerolite.initialize(module_of("blocks"), config(0, "fp32", 4) | {"pipeline": {"stages": 2}})
    batches = batches_of(float_batch, 0, 4, 2)[engine.data_parallel_rank]

    def broken() -> Iterator[Any]:
        yield batches[0]
        raise FileNotFoundError("no more shards")

    with raises(RuntimeError, "none any more on rank 3"):
        engine.train_batch(iter(batches[: 2 if last else 4]))
    with raises(FileNotFoundError if last else RuntimeError, "no more shards", "" if last else "rank 3"):
        engine.train_batch(broken() if last else iter(batches))
    for length, words in ((3, "other values"), (5, "other shapes")):
        others = batches_of(float_batch, 1, length=length)[0]
        with raises((RuntimeError, ValueError), words, "on rank 3 than on rank 1"):
            engine.train_batch(iter(others if last else batches))


class Skips(nn.Module):
    """The first block's input comes back at the end: over every boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = stem = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x + stem.detach()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Skips": Skips,
    "TiedGpt": TiedGpt,
    "module": lambda: module_of("blocks"),
    "three stages": lambda: module_of("blocks", num_stages=3),
    "broken": lambda: PipelineModule([LayerSpec(Block), LayerSpec(Block), LayerSpec(Block), LayerSpec(nn.Linear)]),
    "frozen": lambda: nn.Sequential(Block(), Block(), nn.Tanh(), nn.Tanh()),
}
REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("Skips", {}, ["'stem.bias'", "part 0", "'blocks.2'", "skip connection"]),
    ("TiedGpt", {"split": ["blocks.1.up"]}, ["blocks.0.down.bias", "blocks.1.up"]),
    ("TiedGpt", {"split": ["blocks"]}, ["'blocks'", "called by itself"]),
    ("module", {"split": ["layers.2"]}, ["pipeline.split", "PipelineModule"]),
    ("three stages", {}, ["num_stages = 2", "got 3"]),
    ("broken", {}, ["could not be divided", "in_features"]),
    ("frozen", {"partition_method": "uniform"}, ["trained parameter"]),
]


@pytest.mark.slow
@on_ranks(2)
def test_what_cannot_be_a_pipeline() -> None:
    for kind, pipeline, words in REFUSED:
        settings = config(0, "fp32", 4) | {"pipeline": {"stages": 2, **pipeline}}
        make = token_batch if kind == "TiedGpt" else float_batch
        with raises((RuntimeError, ValueError, TypeError), *words):
            engine = zerolite.initialize(MODELS[kind](), settings, loss_fn=F.mse_loss if kind == "Skips" else None)
            engine.train_batch(iter(batches_of(make, 0)[0]))
