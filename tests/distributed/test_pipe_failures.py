"""Errors in a pipeline are raised on all ranks."""

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


def test_a_layer_that_fails_is_known_everywhere_and_the_next_step_is_right(pools: Pools) -> None:
    first, second = pools(2).run(fail, {"where": 1})
    assert first[0] == "FileNotFoundError: the layer has lost its file"
    assert second[0] == "RuntimeError: engine.train_batch: rank 0 failed: " + first[0]
    late, _ = pools(2).run(fail, {"where": 1, "at": 99})
    assert first[1:] == second[1:] and len(late) == 3
    assert first[1] != late[1]  # it missed a step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "settings", "rank", "step"),
    [
        (2, {"where": 3, "at": 6}, 1, 1),
        (2, {"where": 2, "at": 3, "schedule": "zbv"}, 1, 0),
        (2, {"where": 1, "at": 1, "schedule": "interleaved_1f1b"}, 1, 0),
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
@on_ranks(2, 4)
def test_iterators_that_end_or_raise() -> None:
    """rank: the one that has so many micro-batches only; -1: all."""
    last = dist.get_world_size() - 1

    def starve(rank: int, have: int, error: bool = False) -> None:
        engine = zerolite.initialize(module_of("blocks"), config(0, "fp32", 4) | {"pipeline": {"stages": 2}})
        batches = batches_of(float_batch, 0, 4, engine.data_parallel_world_size)[engine.data_parallel_rank]

        def some() -> Iterator[Any]:
            short = rank in (-1, dist.get_rank())
            yield from batches[: have if short else 4]
            if short and error:
                raise FileNotFoundError("no more shards")

        engine.train_batch(some())

    with raises(RuntimeError, "none any more on rank 0"):
        starve(0, 2)
    with raises(StopIteration):
        starve(-1, 2)
    kind, words = (FileNotFoundError, ()) if dist.get_rank() == last else (RuntimeError, (f"rank {last}",))
    with raises(kind, "no more shards", *words):
        starve(last, 1, error=True)


@pytest.mark.slow
@on_ranks(2, 4)
def test_stages_read_the_same_data() -> None:
    """The last rank reads other data; in two pipelines those of the other one are told, too. Or all micro-batches but
    one have the same length."""
    world = dist.get_world_size()
    where = f"on rank {world - 1} than on rank {world // 2 - 1}"
    for what, words in (
        ("values", ("other values", where)),
        ("shapes", ("other shapes", where)),
        ("length", ("(5, 6)",)),
    ):
        engine = zerolite.initialize(module_of("blocks"), config(0, "fp32", 4) | {"pipeline": {"stages": 2}})
        batches = batches_of(float_batch, 0, 4, engine.data_parallel_world_size)[engine.data_parallel_rank]
        if what == "length":
            batches[2] = batches_of(float_batch, 0, 1, length=5)[0][0]
        elif dist.get_rank() == world - 1:
            batches = batches_of(float_batch, 1, length=3 if what == "values" else 5)[0]
        with raises((RuntimeError, ValueError), *words):
            engine.train_batch(iter(batches))


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
    ("TiedGpt", {"split": ["blocks.7"]}, ["'blocks.7'", "did you mean blocks.3"]),
    ("TiedGpt", {"split": ["blocks.1.up"]}, ["blocks.0.down.bias", "blocks.1.up"]),
    ("TiedGpt", {"split": ["blocks"]}, ["'blocks'", "called by itself"]),
    ("module", {"split": ["layers.2"]}, ["pipeline.split", "PipelineModule"]),
    ("three stages", {}, ["num_stages = 2", "got 3"]),
    ("broken", {}, ["could not be divided", "in_features"]),
    ("frozen", {"partition_method": "uniform"}, ["trained parameter"]),
    ("module", {"micro_batches": 1}, ["got 1 (", "'1f1b'"]),
    ("module", {"schedule": "interleaved_1f1b", "chunks": 4}, ["= 8", "got 6"]),
]


@pytest.mark.slow
@on_ranks(2)
def test_what_cannot_be_a_pipeline() -> None:
    for kind, pipeline, words in REFUSED:
        keys = dict(pipeline)
        micro_batches = keys.pop("micro_batches", 4)
        settings = config(0, "fp32", micro_batches) | {"pipeline": {"stages": 2, **keys}}
        make = token_batch if kind == "TiedGpt" else float_batch
        with raises((RuntimeError, ValueError, TypeError), *words):
            engine = zerolite.initialize(MODELS[kind](), settings, loss_fn=F.mse_loss if kind == "Skips" else None)
            engine.train_batch(iter(batches_of(make, 0, micro_batches)[0]))
