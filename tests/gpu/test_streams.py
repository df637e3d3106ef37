"""Copies on streams of their own: late ones change no bit, whatever stage, placement and checkpointing they belong to.

Each layer makes the device sleep, in forward and backward, so that the host runs far ahead; copies sleep before they
begin. A wait that is missing, or memory that is handed out while a copy still uses it, then shows in the bits.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import zerolite
from tests.gpu import NEEDS_GPU
from tests.toolkit import models
from tests.toolkit.configs import ADAMW, config
from tests.toolkit.pool import Pool
from tests.toolkit.training import snapshot
from zerolite.activation_checkpointing.saved_inputs import Copies
from zerolite.offload import transfers

pytestmark = NEEDS_GPU

WIDTH, DEPTH, ROWS, STEPS = 512, 5, 16, 5
WEIGHT = WIDTH * WIDTH
SLEEP = 3_000_000  # cycles at most: about two milliseconds
HOST: dict[str, Any] = {"device": "cpu", "pin_memory": True}
MOVING = {"stage3_param_persistence_threshold": 0, "stage3_module_granularity_threshold": 0}
TIGHT = {
    **MOVING,
    "stage3_prefetch_bucket_size": WEIGHT,
    "stage3_max_live_parameters": 3 * WEIGHT,
    "stage3_max_reuse_distance": 2 * WEIGHT,
}
RELEASED = {**MOVING, "stage3_max_reuse_distance": 0}
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "0": (0, {}),
    "1": (1, {}),
    "1, gathers end with the step": (1, {"overlap_comm": False}),
    "2": (2, {}),
    "3": (3, {}),
    "3 kept": (3, MOVING),
    "3 tight": (3, TIGHT),
    "3 released": (3, RELEASED),
    "0 host": (0, {"offload_optimizer": HOST}),
    "1 host": (1, {"offload_optimizer": HOST}),
    "2 host": (2, {"offload_optimizer": HOST}),
    "2 pageable": (2, {"offload_optimizer": {"device": "cpu", "pin_memory": False}}),
    "3 host": (3, {**TIGHT, "offload_optimizer": HOST}),
    "3 host, all": (3, {**TIGHT, "offload_optimizer": HOST, "offload_param": HOST}),
    "3 host, all, released": (3, {**RELEASED, "offload_optimizer": HOST, "offload_param": HOST}),
    "3 disk, all": (3, {**TIGHT, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}),
}


class Sleepy(torch.autograd.Function):
    """The identity, during which the device sleeps, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch.cuda._sleep(random.randrange(SLEEP))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        torch.cuda._sleep(random.randrange(SLEEP))
        return gradient


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(F.gelu(self.linear(Sleepy.apply(self.norm(x)))), 0.1)


class Stack(nn.Module):
    """``x [ROWS, WIDTH]`` -> ``[ROWS, WIDTH]``. how: "none", "torch" or "zerolite": what calls the layers."""

    def __init__(self, how: str = "none") -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.how == "torch":
                x = torch_checkpoint(layer, x, use_reentrant=False)
            elif self.how == "zerolite":
                x = zerolite.checkpointing.checkpoint(layer, x)
            else:
                x = layer(x)
        return x


@contextlib.contextmanager
def late_copies() -> Iterator[None]:
    """The device sleeps on the stream of a copy before the copy begins."""
    begin, launch = transfers._StreamCopy.__init__, Copies.launch

    def begin_late(self: Any, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(random.randrange(SLEEP))
        begin(self, target, source, stream)

    def launch_late(self: Copies, pairs: Any) -> Any:
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(random.randrange(SLEEP))
        return launch(self, pairs)

    with (
        mock.patch.object(transfers._StreamCopy, "__init__", begin_late),
        mock.patch.object(Copies, "launch", launch_late),
    ):
        yield


def settings(name: str, precision: str, path: str, **more: Any) -> dict[str, Any]:
    stage, zero = SETTINGS[name]
    zero = {key: {**value, "nvme_path": path} if "nvme" in str(value) else value for key, value in zero.items()}
    buckets = {"reduce_bucket_size": WEIGHT + 1000, "allgather_bucket_size": WEIGHT + 1000}
    return config(stage, precision, 2, 0.4, ADAMW, {**buckets, **zero}, **more)


def start(settings: dict[str, Any], how: str) -> Any:
    torch.backends.cuda.matmul.allow_tf32 = False
    engine = zerolite.initialize(models.build(Stack, how=how), settings)
    torch.cuda.manual_seed(dist.get_rank())
    return engine


def window(engine: Any, step: int) -> list[Tensor]:
    losses = []
    for micro in range(2):
        generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
        x = torch.randn(ROWS, WIDTH, generator=generator).cuda()
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


def outcome(engine: Any, losses: list[Tensor]) -> dict[str, Tensor]:
    parameters = {name: value.cpu() for name, value in snapshot(engine).items()}
    return {"losses": torch.stack(losses).cpu(), **parameters}


def train(settings: dict[str, Any], how: str = "none") -> dict[str, Tensor]:
    with late_copies():
        engine = start(settings, how)
        losses = [loss for step in range(STEPS) for loss in window(engine, step)]
        return outcome(engine, losses)


def train_with_states_moved(settings: dict[str, Any]) -> dict[str, Tensor]:
    """Between steps the states go to the host, while the device sleeps, and the memory is used by others meanwhile.
    In every third step they go on a stream of their own."""
    engine, losses, other = start(settings, "none"), [], torch.cuda.Stream()
    for step in range(STEPS):
        losses += window(engine, step)
        copies = other if step % 3 == 2 else torch.cuda.current_stream()
        copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            torch.cuda._sleep(10 * SLEEP)
            engine.offload_states(non_blocking=step % 2 == 0)
        used = [torch.full((WEIGHT,), float("nan"), device="cuda") for _ in range(6 * DEPTH)]
        del used
        engine.reload_states()
    return outcome(engine, losses)


def train_and_save(settings: dict[str, Any], path: str) -> dict[str, Tensor]:
    """Each save begins while the device sleeps, and training goes on at once. In the middle another engine goes on
    from the checkpoint."""
    with late_copies():
        engine, losses = start(settings, "none"), []
        for step in range(STEPS):
            losses += window(engine, step)
            torch.cuda._sleep(10 * SLEEP)
            engine.save_checkpoint(path, tag=f"step{step}", async_save=True)
            if step == 2:
                engine.wait_for_checkpoint()
                last = engine
                engine = start(settings, "none")
                del last
                engine.load_checkpoint(path, tag="step2")
        engine.wait_for_checkpoint()
        return outcome(engine, losses)


@pytest.fixture(scope="module", params=[1, 2])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Two ranks share the device. NCCL refuses that, so their group is gloo's."""
    with Pool(request.param) as pool:
        yield pool


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def wanted(pool: Pool, precision: str) -> dict[str, list[dict[str, Tensor]]]:
    """On each rank, of stage 0 and of stage 2, which adds ranks first and micro-batches then."""
    return {name: pool.run(train, {"settings": settings(name, precision, "")}, timeout=180) for name in ("0", "2")}


def assert_same(found: list[dict[str, Tensor]], wanted: dict[str, list[dict[str, Tensor]]], name: str) -> None:
    for rank, (own, other) in enumerate(zip(found, wanted["0" if name < "2" else "2"], strict=True)):
        different = {key: float((own[key] - other[key]).abs().max()) for key in other if not own[key].equal(other[key])}
        assert different == {}, f"rank {rank}"


@pytest.mark.parametrize("name", SETTINGS)
def test_every_placement(pool: Pool, precision: str, wanted: Any, name: str, tmp_path: Path) -> None:
    assert_same(pool.run(train, {"settings": settings(name, precision, str(tmp_path))}, timeout=180), wanted, name)


@pytest.mark.parametrize("how", ["torch", "zerolite", "zerolite, on the host"])
@pytest.mark.parametrize("name", ["1", "3 tight", "3 host, all"])
def test_checkpointed_layers(pool: Pool, precision: str, wanted: Any, name: str, how: str) -> None:
    how, _, host = how.partition(",")
    more = {"activation_checkpointing": {"cpu_checkpointing": True}} if host else {}
    kwargs = {"settings": settings(name, precision, "", **more), "how": how}
    assert_same(pool.run(train, kwargs, timeout=180), wanted, name)


@pytest.mark.parametrize("name", ["0", "2", "3", "3 tight", "3 host, all"])
def test_states_that_go_to_the_host_and_back(pool: Pool, precision: str, wanted: Any, name: str) -> None:
    assert_same(
        pool.run(train_with_states_moved, {"settings": settings(name, precision, "")}, timeout=180), wanted, name
    )


@pytest.mark.parametrize("name", ["0", "2", "3 tight", "2 host", "3 host, all"])
def test_checkpoints_saved_in_the_background(
    pool: Pool, precision: str, wanted: Any, name: str, tmp_path: Path
) -> None:
    kwargs = {"settings": settings(name, precision, ""), "path": str(tmp_path)}
    assert_same(pool.run(train_and_save, kwargs, timeout=180), wanted, name)
