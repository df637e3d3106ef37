"""Models of the tests of pipelines, their batches, and plain PyTorch on the joint batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.toolkit import models
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


class Shift(nn.Module):
    """A buffer and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.arange(WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


def buffers() -> list[Any]:
    shift, norm = LayerSpec(Shift), LayerSpec(nn.BatchNorm1d, WIDTH, affine=False)
    return [LayerSpec(Block), shift, norm, LayerSpec(Block), LayerSpec(Block), norm, shift]


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


# By name: layers, batches, and the loss.
KINDS: dict[str, tuple[Callable[[], list[Any]], Callable[..., Any], Callable[..., Any]]] = {
    "blocks": (blocks, float_batch, F.mse_loss),
    "tied": (tied, token_batch, cross_entropy),
    "pairs": (pairs, pair_batch, F.mse_loss),
    "buffers": (buffers, float_batch, F.mse_loss),
    "inplace": (
        lambda: [Block(), nn.ReLU(inplace=True), Block(), nn.ReLU(inplace=True), Block()],
        float_batch,
        F.mse_loss,
    ),
}


class Masked(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * mask


class TiedGpt(nn.Module):
    """Token ids and targets to a loss, keywords between; the head is the embedding, a mask comes from the ids, and
    positions are a parameter of the model itself."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.positions = nn.Parameter(torch.randn(8, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Masked() for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        x += self.positions[: tokens.shape[1]]
        mask = (tokens != 3).unsqueeze(-1).to(x.dtype)
        for block in self.blocks:
            x = block(x, mask=mask)
        logits = self.head(x)
        return cross_entropy(logits, targets), logits


class Inputs(nn.Module):
    """Embeddings, and with them a mask that does not come from parameters, which every part needs."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("ignored", torch.tensor([3, 5]))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        mask = (tokens.unsqueeze(-1) != self.ignored).all(-1, keepdim=True)
        x = self.words(tokens) * self.scale
        return x, mask.to(x.dtype)


class Opened(nn.Module):
    """Model of which the modules before a part cannot be left out as a whole: their mask is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = Inputs()
        self.blocks = nn.ModuleList(Masked() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, mask = self.inputs(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return cross_entropy(self.head(x), targets)


class Normed(nn.Module):
    """Statistics in modules without parameters, in the first part and in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.before = nn.BatchNorm1d(WIDTH, affine=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.behind = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.before(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.behind(x), targets)


class Checkpointed(TiedGpt):
    """Every block is checkpointed by the model itself."""

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        mask = (tokens != 3).unsqueeze(-1).to(x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False)
        logits = self.head(x)
        return cross_entropy(logits, targets), logits


# By name: a model that computes its loss, and batches. The example's loss is computed outside.
NAMED: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "TiedGpt": (TiedGpt, token_batch),
    "Checkpointed": (Checkpointed, token_batch),
    "Normed": (Normed, float_batch),
    "Opened": (Opened, token_batch),
    "example": (lambda: models.example_gpt(4), token_batch),
}


def batches_of(
    make: Callable[..., Any], step: int, micro_batches: int = 4, data: int = 1, length: int = 3
) -> list[list[Any]]:
    """[data rank][micro-batch]."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [[make(generator, length) for _ in range(micro_batches)] for _ in range(data)]


def module_of(kind: str, **more: Any) -> PipelineModule:
    layers, _, loss = KINDS[kind]
    return PipelineModule(layers(), loss_fn=loss, base_seed=7, **more)


def plain_loss(whole: nn.Module, batches: list[list[Any]], loss_fn: Any, backward: bool = False) -> float:
    """The mean loss of a whole model; loss_fn: None where it computes that by itself."""
    flat = [micro for ranks in batches for micro in ranks]
    total = 0.0
    for micro in flat:
        if loss_fn is None:
            outputs = whole(*micro)
            loss = outputs[0] if isinstance(outputs, tuple) else outputs
        else:
            inputs, targets = micro
            loss = loss_fn(whole(*inputs) if isinstance(inputs, tuple) else whole(inputs), targets)
        loss = loss / len(flat)
        total += loss.item()
        if backward:
            loss.backward()
    return total
