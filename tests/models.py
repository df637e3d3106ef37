"""Models for the distributed tests. Sizes are odd on purpose: no bucket, shard or vector length divides them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 11


class OddModel(nn.Module):
    """A token model with every kind of parameter that is easily forgotten; ``forward(tokens [B, T], targets [B, T])``
    gives logits.

    A 0-dim parameter, an empty one, a tied weight (embedding and head), a frozen layer, one that never gets a
    gradient, biases, LayerNorm.
    """

    def __init__(self, width: int = 5, hidden: int = 9) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.gain = nn.Parameter(torch.tensor(0.75))
        self.empty = nn.Parameter(torch.empty(0))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.gain * self.down(F.gelu(self.up(self.frozen(hidden))))
        return self.head(self.norm(hidden)) + self.empty.sum()


class Mlp(nn.Module):
    """``x [B, 7]`` -> ``[B, 3]``, floating input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.second = nn.Linear(13, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class TwoBranches(nn.Module):
    """``branch`` says which of two layers runs, so that ranks may differ in what they use."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 13)
        self.left = nn.Linear(13, 3)
        self.right = nn.Linear(13, 3)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        hidden = torch.tanh(self.stem(x))
        return {"left": self.left, "right": self.right}[branch](hidden)


class SharedCheckpointed(nn.Module):
    """One weight in two reentrantly checkpointed blocks: it is accumulated twice in one backward, the second time
    long after the first."""

    def __init__(self, reentrant: bool = True) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(7, 13)
        self.shared = nn.Linear(13, 13)
        self.middle = nn.Linear(13, 13)
        self.last = nn.Linear(13, 3)

    def forward(self, x: Tensor) -> Tensor:
        def block(hidden: Tensor) -> Tensor:
            return torch.tanh(self.shared(hidden))

        hidden = checkpoint(block, self.first(x), use_reentrant=self.reentrant)
        hidden = torch.tanh(self.middle(hidden))
        return self.last(checkpoint(block, hidden, use_reentrant=self.reentrant))


class Buffered(nn.Module):
    """An Mlp with buffers of three dtypes; ``calls`` counts forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Mlp()
        self.register_buffer("offset", torch.randn(3))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("wide", torch.rand(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x) + self.offset.to(x.dtype)


class Chain(nn.Module):
    """``depth`` bias-free square layers of ``width``, large beside anything else, for memory measurements."""

    def __init__(self, depth: int = 12, width: int = 384) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy in fp32 of ``model`` on ``(tokens, targets)``, both [B, T]."""
    logits = model(batch[0]).float()
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[1].reshape(-1))


def square_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error in fp32 of ``model`` on ``(x [B, 7], y [B, 3])``."""
    return F.mse_loss(model(batch[0]).float(), batch[1])


def token_batch(step: int, micro: int, rank: int, size: int = 2, length: int = 7) -> tuple[Tensor, Tensor]:
    """The micro-batch of one rank: any process can make any rank's."""
    generator = torch.Generator().manual_seed(1_000_003 * step + 1009 * micro + rank)
    tokens = torch.randint(0, VOCABULARY, (size, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def float_batch(step: int, micro: int, rank: int, size: int = 4) -> tuple[Tensor, Tensor]:
    """As :func:`token_batch`, with floating inputs: ``(x [size, 7], y [size, 3])``."""
    generator = torch.Generator().manual_seed(1_000_003 * step + 1009 * micro + rank)
    return torch.randn(size, 7, generator=generator), torch.randn(size, 3, generator=generator)


def build(kind: type[nn.Module], seed: int = 7, **kwargs: object) -> nn.Module:
    """A model with the same initial weights in every process."""
    torch.manual_seed(seed)
    return kind(**kwargs)
