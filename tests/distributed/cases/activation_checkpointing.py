"""Runs whose model is checkpointed: by torch, by zerolite inside the model, or by the engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import zerolite
from tests import models
from tests.distributed.cases.training import snapshot
from zerolite.comm import record
from zerolite.utils.memory_items import listeners

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

    def own(self, storage: torch.UntypedStorage, item: str, place: str) -> None:
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


def cut(host: bool, unequal: bool, one_buffer: bool) -> dict[str, Any]:
    """Without an engine: gradients with inputs cut over all ranks, and what stays of them. unequal: the inputs differ
    between ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    more: dict[str, Any] = {"contiguous_checkpointing": True, "num_checkpoints": 3} if one_buffer else {}
    zerolite.checkpointing.configure(partition_activations=True, checkpoint_in_cpu=host, group=dist.group.WORLD, **more)
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
