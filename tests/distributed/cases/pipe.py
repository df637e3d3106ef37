"""Pipelines on every rank, beside plain PyTorch in the same process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerolite
from tests import models
from tests.distributed.configs import config
from zerolite.comm import record
from zerolite.pipe import LayerSpec, PipelineModule, TiedLayerSpec

WIDTH, CLASSES = 6, 11


class Block(nn.Module):
    """``[B, 6]`` to ``[B, 6]``."""

    def __init__(self, hidden: int = 9) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Pair(nn.Module):
    """A pair in, a pair out: a float that needs a gradient, and integers that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, ids = pair
        return torch.tanh(self.inner(x)) * ids.unsqueeze(-1), (ids + 1) % 3


def scaled(x: Tensor) -> Tensor:
    """A layer that is a function."""
    return x * 1.5


def head_of(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return F.linear(x, embedding.weight)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def blocks() -> list[Any]:
    return [LayerSpec(Block, 5), LayerSpec(Block), scaled, LayerSpec(Block, 7), LayerSpec(Block), nn.Tanh()]


def tied() -> list[Any]:
    embedding = ("words", nn.Embedding, CLASSES, WIDTH)
    middle = [LayerSpec(Block), LayerSpec(Block), LayerSpec(Block), LayerSpec(Block)]
    return [TiedLayerSpec(*embedding), *middle, TiedLayerSpec(*embedding, forward_fn=head_of)]


def pairs() -> list[Any]:
    return [LayerSpec(Pair), LayerSpec(Pair), LayerSpec(Pair), LayerSpec(Pair), lambda pair: pair[0]]


def float_batch(generator: torch.Generator, length: int) -> tuple[Any, Any]:
    return torch.randn(length, WIDTH, generator=generator), torch.randn(length, WIDTH, generator=generator)


def token_batch(generator: torch.Generator, length: int) -> tuple[Any, Any]:
    tokens = torch.randint(CLASSES, (2, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def pair_batch(generator: torch.Generator, length: int) -> tuple[Any, Any]:
    x, y = float_batch(generator, length)
    return (x, torch.randint(1, 3, (length,), generator=generator)), y


KINDS: dict[str, tuple[Callable[[], list[Any]], Callable[..., Any], Callable[..., Any]]] = {
    "blocks": (blocks, float_batch, F.mse_loss),
    "tied": (tied, token_batch, cross_entropy),
    "pairs": (pairs, pair_batch, F.mse_loss),
}


def batches_of(make: Callable[..., Any], step: int, micro_batches: int, data: int, lengths: Any) -> list[list[Any]]:
    """[data rank][micro-batch]."""
    generator = torch.Generator().manual_seed(1000 + step)
    length = lengths[step % len(lengths)]
    return [[make(generator, length) for _ in range(micro_batches)] for _ in range(data)]


def module_of(kind: str, **more: Any) -> PipelineModule:
    layers, _, loss = KINDS[kind]
    return PipelineModule(layers(), loss_fn=loss, base_seed=7, **more)


def train(
    kind: str = "blocks",
    stages: int = 2,
    schedule: str = "1f1b",
    micro_batches: int = 4,
    steps: int = 4,
    lengths: tuple[int, ...] = (3,),
    zero: int = 0,
    precision: str = "fp32",
    pipeline: dict[str, Any] | None = None,
    sequential: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Losses, norms and this rank's parameters of a pipeline and of plain PyTorch on the joint batch."""
    settings = config(zero, precision, micro_batches, clip=0.5)
    settings["memory_check"] = "off"
    settings["pipeline"] = {"stages": stages, "schedule": schedule, **(pipeline or {})}
    model: nn.Module = module_of(kind, **more)
    _, make, loss_fn = KINDS[kind]
    whole = copy.deepcopy(model)
    whole.build(range(len(whole.specs)))
    if sequential:
        model = nn.Sequential(*copy.deepcopy(list(whole.functions.values())))
    engine = zerolite.initialize(model, settings, loss_fn=loss_fn if sequential else None)
    data, rank = engine.data_parallel_world_size, engine.data_parallel_rank
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    result: dict[str, Any] = {"losses": [], "norms": [], "wanted_losses": [], "wanted_norms": [], "evals": []}
    for step in range(steps):
        batches = batches_of(make, step, micro_batches, data, lengths)
        result["evals"].append((engine.eval_batch(iter(batches[rank])).item(), reference_loss(whole, loss_fn, batches)))
        with record() as recorder:
            result["losses"].append(engine.train_batch(iter(batches[rank])).item())
        result["norms"].append(engine.get_global_grad_norm())
        loss, norm = reference_step(whole, optimizer, loss_fn, batches)
        result["wanted_losses"].append(loss)
        result["wanted_norms"].append(norm)
    wanted = {name: p.detach().clone() for name, p in whole.named_parameters()}
    if sequential:
        wanted = {name.removeprefix("layers."): p for name, p in wanted.items()}
    return result | {
        "parameters": {name: p.detach().clone() for name, p in engine.module.named_parameters()},
        "wanted": wanted,
        "calls": [(call.op, call.tag, call.numel) for call in recorder.calls],
        "micro_steps": engine.micro_steps,
    }


def reference_step(whole: nn.Module, optimizer: Any, loss_fn: Any, batches: list[list[Any]]) -> tuple[float, float]:
    optimizer.zero_grad()
    loss = reference_loss(whole, loss_fn, batches, backward=True)
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    optimizer.step()
    return loss, norm.item()


def reference_loss(whole: nn.Module, loss_fn: Any, batches: list[list[Any]], backward: bool = False) -> float:
    flat = [micro for ranks in batches for micro in ranks]
    total = 0.0
    for inputs, targets in flat:
        outputs = whole(*inputs) if isinstance(inputs, tuple) else whole(inputs)
        loss = loss_fn(outputs, targets) / len(flat)
        total += loss.item()
        if backward:
            loss.backward()
    return total
