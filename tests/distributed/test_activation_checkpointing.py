"""Activation checkpointing with an engine: all ways give torch's bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, at
from tests.toolkit.memory import tagged
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import snapshot
from zerolite.comm import record
from zerolite.utils.memory_tags import ACTIVATIONS, HOST

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


CALLS: dict[str, Callable[..., Any]] = {
    "none": lambda block, x, mask: block(x, mask),
    "torch": functools.partial(torch_checkpoint, use_reentrant=False),
    "zerolite": zerolite.checkpointing.checkpoint,
}


class Stack(nn.Module):
    """``x [ROWS, WIDTH]`` -> ``[ROWS, 3]``. how: of CALLS, what calls the blocks."""

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
            x = CALLS[self.how](block, x, mask=mask)
        return self.head(x)


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def train(config: dict[str, Any], how: str, block: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """block: ``activation_checkpointing`` of the config."""
    config = {**config, "activation_checkpointing": block}
    engine = zerolite.initialize(models.build(Stack, how=how), config)
    torch.manual_seed(50 + engine.rank)
    losses = []
    with tagged() as places, record() as recorder:
        for step in range(steps):
            loss = engine(_batch(step, engine.rank)).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return {
        "losses": losses,
        "parameters": snapshot(engine),
        "random": torch.rand(3),
        "calls": [(c.op, c.nbytes, c.tag) for c in recorder.calls],
        "places": places.nbytes,
    }


def settings(stage: str, precision: str) -> dict[str, Any]:
    """``3 offloaded``: ``3 moving`` with all states on the host."""
    offloaded = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    zero = offloaded if stage == "3 offloaded" else {}
    made = at(stage.replace("offloaded", "moving"), precision, optimizer=ADAMW, zero=zero)
    return {**made, "train_micro_batch_size_per_gpu": ROWS}


NBYTES = ROWS * WIDTH * 4  # of an input in fp32
HOST_BLOCK = {"cpu_checkpointing": True}


@pytest.mark.fast("1-0-fp32")
@pytest.mark.parametrize(
    ("stage", "precision"),
    [("0", "fp32"), ("2", "bf16"), ("3 moving", "fp32"), ("3 tight", "bf16"), ("3 offloaded", "bf16")],
)
@on_ranks(1, 2)
def test_every_way_gives_the_same_bits(stage: str, precision: str) -> None:
    made = settings(stage, precision)
    plain, by_torch = train(made, "none", {}), train(made, "torch", {})
    others = [
        train(made, "none", {"modules": ["blocks.*"]}),
        train(made, "none", {"modules": ["Block"], **HOST_BLOCK}),
        train(made, "zerolite", {}),
        train(made, "zerolite", HOST_BLOCK),
    ]
    for number, run in enumerate([by_torch, *others]):
        assert run["losses"] == plain["losses"], number
        assert torch.equal(run["random"], plain["random"])
        assert_same_bits(run["parameters"], plain["parameters"], f"no checkpoint and way {number}")
        assert run["calls"] == by_torch["calls"], number  # stage 3 gathers what it does under torch's
    on_host = [(ACTIVATIONS, HOST) in run["places"] for run in (plain, by_torch, *others)]
    assert on_host == [False, False, False, True, False, True]
    of_input = NBYTES if precision == "fp32" else NBYTES // 2
    assert others[1]["places"][ACTIVATIONS, HOST] == 4 * of_input  # three inputs, and the mask beside the first


@pytest.mark.fast("2-2-False")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage", ["0", "2", "3 moving"])
@on_ranks(2)
def test_an_engine_that_is_checkpointed_goes_on_with_its_backward(stage: str, reentrant: bool) -> None:
    """``checkpoint(engine, x)`` recomputes the engine's forward inside its backward, which ends no backward and sends
    no buffers."""
    found = []
    for checkpointed in (False, True):
        engine = zerolite.initialize(models.build(models.Buffered), at(stage, "fp32", 2), broadcast_buffers=True)
        with record() as recorder:
            for step in range(6):
                x, y = models.float_batch(step // 2, step % 2, engine.rank)
                parts = x.requires_grad_().chunk(2)
                if checkpointed:
                    outputs = [torch_checkpoint(engine, part, use_reentrant=reentrant) for part in parts]
                else:
                    outputs = [engine(part) for part in parts]
                engine.backward(F.mse_loss(torch.cat(outputs).float(), y), weight=1.0 + engine.rank)
                engine.step()
        sent = [call.nbytes for call in recorder.select("broadcast", "buffers")]
        found.append((snapshot(engine), engine.micro_steps, engine.global_steps, sent))
    (plain, *counts), (parameters, *counts_checkpointed) = found
    assert counts_checkpointed == counts
    for name, values in plain.items():
        torch.testing.assert_close(parameters[name], values)
