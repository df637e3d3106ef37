"""Activation checkpointing with an engine, and over a group: all ways give torch's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, PARTITIONED, config
from tests.toolkit.pool import Pools
from tests.toolkit.training import snapshot
from zerolite.comm import record
from zerolite.utils.memory_tags import ACTIVATIONS, DEVICE, HOST, listeners

ROWS, WIDTH = 32, 64  # inputs of 4096 bytes in 16 bits


class Block(nn.Module):
    """Dropout, a frozen layer, and one that the block calls twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = F.dropout(torch.tanh(self.down(self.frozen(torch.tanh(self.up(x))))), 0.2) * mask
        return x + torch.tanh(self.down(hidden))


class Stack(nn.Module):
    """``x [ROWS, WIDTH]`` -> ``[ROWS, 3]``. how: "none", "torch" or "zerolite": what calls the blocks."""

    def __init__(self, how: str = "none") -> None:
        super().__init__()
        self.how = how
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > -1).to(x.dtype)
        x = torch.tanh(self.stem(x))
        for block in self.blocks:
            if self.how == "torch":
                x = torch_checkpoint(block, x, use_reentrant=False, mask=mask)
            elif self.how == "zerolite":
                x = zerolite.checkpointing.checkpoint(block, x, mask=mask)
            else:
                x = block(x, mask=mask)
        return self.head(x)


class Places:
    """Bytes by item and place that the engine has named."""

    def __init__(self) -> None:
        self.nbytes: dict[tuple[str, str], int] = {}

    def tag_memory(self, storage: torch.UntypedStorage, item: str, place: str) -> None:
        self.nbytes[item, place] = self.nbytes.get((item, place), 0) + storage.nbytes()

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Ignore a resize."""


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def train(
    config: dict[str, Any], how: str, block: dict[str, Any], alike: bool = False, steps: int = 3
) -> dict[str, Any]:
    """block: ``activation_checkpointing`` of the config. alike: all ranks have the same batches and random numbers."""
    config = {**config, "activation_checkpointing": block}
    engine = zerolite.initialize(models.build(Stack, how=how), config)
    rank = 0 if alike else engine.rank
    torch.manual_seed(50 + rank)
    losses, places = [], Places()
    listeners.append(places)
    try:
        with record() as recorder:
            for step in range(steps):
                loss = engine(_batch(step, rank)).float().square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
    finally:
        listeners.remove(places)
    return {
        "losses": losses,
        "parameters": snapshot(engine),
        "random": torch.rand(3),
        "calls": [(c.op, c.nbytes, c.tag) for c in recorder.calls if c.tag != "activations"],
        "gathered": recorder.nbytes("all_gather", "activations"),
        "places": places.nbytes,
    }


def train_each(config: dict[str, Any], runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several runs in one go."""
    return [train(config, **run) for run in runs]


def train_cut(config: dict[str, Any], runs: list[dict[str, Any]], mpu: bool = False) -> list[dict[str, Any]]:
    """The same, with inputs cut over all ranks, which have the same batches."""

    class Mpu:
        def get_model_parallel_group(self) -> Any:
            return dist.group.WORLD

    if mpu:
        zerolite.checkpointing.configure(Mpu())
    else:
        zerolite.checkpointing.configure(group=dist.group.WORLD)
    try:
        return train_each(config, [{**run, "alike": True} for run in runs])
    finally:
        zerolite.checkpointing.reset()


def cut(host: bool, unequal: bool) -> dict[str, Any]:
    """Without an engine: gradients with inputs cut over all ranks, and what stays of them. unequal: the inputs differ
    between ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    zerolite.checkpointing.configure(partition_activations=True, checkpoint_in_cpu=host, group=dist.group.WORLD)
    places = Places()
    listeners.append(places)
    try:
        block = models.build(Block)
        x = torch.randn(ROWS + 1, WIDTH, generator=torch.Generator().manual_seed(rank if unequal else 0))
        x.requires_grad_()
        mask = torch.ones(ROWS + 1, WIDTH)
        results = []
        for call in (lambda f, *a: torch_checkpoint(f, *a, use_reentrant=False), zerolite.checkpointing.checkpoint):
            torch.manual_seed(1)
            hidden = x * 1.0
            for _ in range(3):
                hidden = call(block, hidden * 1.0, mask.clone())
            message = ""
            try:
                hidden.sum().backward()
            except RuntimeError as error:
                message = str(error)
            results.append([x.grad.clone(), block.up.weight.grad.clone()] if not message else [])
            x.grad = block.up.weight.grad = None
        return {"results": results, "message": message, "places": places.nbytes, "world": world}
    finally:
        listeners.remove(places)
        zerolite.checkpointing.reset()


# -------------------------------------------------------------------- the tests


NBYTES = 32 * 64 * 4  # of an input in fp32
HOST_BLOCK = {"cpu_checkpointing": True}
RUNS: list[dict[str, Any]] = [
    {"how": "none", "block": {}},
    {"how": "torch", "block": {}},
    {"how": "none", "block": {"modules": ["blocks.*"]}},
    {"how": "none", "block": {"modules": ["Block"], **HOST_BLOCK}},
    {"how": "zerolite", "block": {}},
    {"how": "zerolite", "block": HOST_BLOCK},
]


def settings(stage: str, precision: str) -> dict[str, Any]:
    zero = None
    if stage == "3-offloaded":
        zero = {**PARTITIONED["moving"], "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    elif stage.startswith("3-"):
        zero = PARTITIONED[stage.partition("-")[2]]
    return {**config(int(stage[0]), precision, 1, 0.0, ADAMW, zero), "train_micro_batch_size_per_gpu": 32}


FAST = {("0", 1, "fp32"), ("3-moving", 2, "fp32")}
STAGES = ("0", "1", "2", "3-moving", "3-tight", "3-one unit", "3-offloaded")
EACH = [(stage, *more) for stage in STAGES for more in ((1, "fp32"), (2, "fp32"), (2, "bf16"), (3, "bf16"))]


@pytest.mark.fast("0-1-fp32")
@pytest.mark.parametrize(
    ("stage", "world", "precision"),
    [pytest.param(*each, marks=() if each in FAST else pytest.mark.slow) for each in EACH],
)
def test_every_way_gives_the_same_bits(pools: Pools, stage: str, world: int, precision: str) -> None:
    for rank in pools(world).run(train_each, {"config": settings(stage, precision), "runs": RUNS}):
        plain, by_torch, *others = rank
        for number, run in enumerate([by_torch, *others]):
            assert run["losses"] == plain["losses"], number
            assert torch.equal(run["random"], plain["random"])
            assert_same_bits(run["parameters"], plain["parameters"], f"no checkpoint and way {number}")
            assert run["calls"] == by_torch["calls"], number  # stage 3 gathers what it does under torch's
        assert [(ACTIVATIONS, HOST) in run["places"] for run in rank] == [False, False, False, True, False, True]
        of_input = NBYTES if precision == "fp32" else NBYTES // 2
        assert others[1]["places"][ACTIVATIONS, HOST] == 4 * of_input  # three inputs, and the mask beside the first


CUT_RUNS: list[dict[str, Any]] = [
    {"how": "torch", "block": {}},
    {"how": "none", "block": {"modules": ["blocks.*"], "partition_activations": True}},
    {"how": "zerolite", "block": {"partition_activations": True, **HOST_BLOCK}},
]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", ["3-moving", pytest.param("0", marks=pytest.mark.slow)])
def test_inputs_are_cut_over_a_group(pools: Pools, stage: str, world: int) -> None:
    arguments = {"config": settings(stage, "fp32"), "runs": CUT_RUNS, "mpu": world == 3}
    for by_torch, *others in pools(world).run(train_cut, arguments):
        for run in others:
            assert run["losses"] == by_torch["losses"]
            assert_same_bits(run["parameters"], by_torch["parameters"], "torch's and inputs that are cut")
            assert run["calls"] == by_torch["calls"]
            assert run["gathered"] > 0 == by_torch["gathered"]
        assert (ACTIVATIONS, HOST) not in others[0]["places"]
        part = -(-NBYTES // world // 16) * 16
        slot = -(-(part + -(-part // 512) * 512) // 4096) * 4096
        assert others[1]["places"][ACTIVATIONS, HOST] <= 4 * (slot + 4096)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("host", [False, True])
def test_a_rank_keeps_its_part(pools: Pools, world: int, host: bool) -> None:
    ranks = pools(world).run(cut, {"host": host, "unequal": False})
    part = 33 * 64 * 4 / world
    for rank in ranks:
        assert rank["message"] == ""
        assert all(torch.equal(a, b) for a, b in zip(*rank["results"], strict=True))
        kept = rank["places"][ACTIVATIONS, HOST if host else DEVICE]
        assert 6 * part <= kept <= 6 * (part + 16 + 512) + 3 * 4096  # of x and the mask, three times
        assert (ACTIVATIONS, DEVICE if host else HOST) not in rank["places"]


@pytest.mark.parametrize("host", [False, True])
def test_unequal_inputs_are_found(pools: Pools, host: bool) -> None:
    for rank in pools(2).run(cut, {"host": host, "unequal": True}):
        assert "inputs of the checkpoint of Block to be equal on all ranks" in rank["message"]
        assert "on its rank 1 than on its rank 0" in rank["message"]
