"""Models for the distributed tests. Sizes are odd on purpose: no bucket, shard or vector length divides them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zerolite.zero.stage3.absent_parameter import AbsentParameter

ROOT = Path(__file__).resolve().parents[2]
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


class Scale(nn.Module):
    """One 0-dim parameter; any shape in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Nothing(nn.Module):
    """Two parameters without elements; any shape in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.empty(0))
        self.wide = nn.Parameter(torch.empty(0, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.flat.sum() + self.wide.sum()


class PrimeMlp(nn.Module):
    """``x [B, 7]`` -> ``[B, 3]`` through prime widths; a 0-dim and two empty parameters have modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.scale = Scale()
        self.hidden = nn.Linear(13, 29)
        self.nothing = Nothing()
        self.last = nn.Linear(29, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.scale(torch.tanh(self.first(x)))
        return self.last(self.nothing(torch.tanh(self.hidden(hidden))))


class ConvNet(nn.Module):
    """Images ``[B, 3, 8, 8]`` -> ``[B, 3]``; BatchNorm after each convolution. ``channels_last``: of the parameters."""

    def __init__(self, channels_last: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3, padding=1)
        self.first_norm = nn.BatchNorm2d(5)
        self.second = nn.Conv2d(5, 7, 3, stride=2, bias=False)
        self.second_norm = nn.BatchNorm2d(7)
        self.head = nn.Linear(7, 3)
        if channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first_norm(self.first(x)))
        x = F.relu(self.second_norm(self.second(x)))
        return self.head(x.mean((2, 3)))


class EncoderDecoder(nn.Module):
    """``forward(source [B, S], target [B, T])`` gives logits ``[B, T, vocabulary]``.

    One weight embeds both sides and is the head too, called as a function by the root. torch's attention uses the
    weights of its output projection without calling that module.
    """

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.TransformerEncoderLayer(width, 2, 11, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(width, 2, 13, dropout=0.0, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.embed(source))
        mask = torch.full((target.shape[1],) * 2, float("-inf"), dtype=memory.dtype, device=memory.device).triu(1)
        hidden = self.decoder(self.embed(target), memory, tgt_mask=mask)
        return F.linear(self.norm(hidden), self.embed.weight)


class MoeBlock(nn.Module):
    """``forward(x [B, W], allowed [B, E])``: each sample goes through the allowed expert with the highest score. An
    expert without samples is not called."""

    def __init__(self, width: int, experts: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 11), nn.GELU(), nn.Linear(11, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        scores = self.gate(x).masked_fill(~allowed, float("-inf")).softmax(-1)
        best, chosen = scores.max(-1)
        result = x
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == number)[:, 0]
            if len(rows):
                result = result.index_add(0, rows, expert(x[rows]) * best[rows, None])
        return result


class MixtureOfExperts(nn.Module):
    """``forward(x [B, 7], allowed [B, 3])`` -> ``[B, 3]`` through two :class:`MoeBlock`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(MoeBlock(7) for _ in range(2))
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(x)


class Mixed(nn.Module):
    """``x [B, 7]`` -> ``[B, 3]``: two trained layers, the middle one twice in the graph and once in the list of
    parameters, a frozen one, and buffers of 36 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)  # 91 + 13
        self.middle = nn.Linear(13, 13, bias=False)  # 169
        self.again = nn.Linear(13, 13, bias=False)
        self.again.weight = self.middle.weight
        self.frozen = nn.Linear(13, 13).requires_grad_(False)  # 169 + 13
        self.last = nn.Linear(13, 3)  # 39 + 3
        self.register_buffer("offset", torch.zeros(3))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("wide", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(self.again(self.middle(torch.tanh(self.first(x)))))
        return self.last(hidden) + self.offset.to(x.dtype)


class Frozen(nn.Module):
    """``x [B, 7]`` -> ``[B, 3]``; ``sleepers`` are trained later: a whole layer, a bias beside a trained weight, a tied
    weight, a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.second = nn.Linear(9, 7)
        self.third = nn.Linear(7, 7)
        self.fourth = nn.Linear(7, 7)
        self.fourth.weight = self.third.weight
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.last = nn.Linear(7, 3)
        for parameter in self.sleepers():
            parameter.requires_grad_(False)

    def sleepers(self) -> list[nn.Parameter]:
        return [self.first.weight, self.first.bias, self.second.bias, self.third.weight, self.scale]

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x)))) * self.scale
        return self.last(torch.tanh(self.fourth(torch.tanh(self.third(hidden)))))


class Late(nn.Module):
    """``x [B, 7]``, ``branches`` -> ``[B, 3]``: the sum of the layers that it names. ``never`` is in none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.never = (nn.Linear(7, 3) for _ in range(4))

    def forward(self, x: Tensor, branches: str) -> Tensor:
        return torch.stack([torch.tanh(getattr(self, name)(x)) for name in branches]).sum(0)


class TwoDtypes(nn.Module):
    """``x [B, 7]`` -> ``[B, 3]``; one layer is in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 13), nn.Linear(13, 3).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)).bfloat16()).float()


def example_gpt(
    layers: int = 2, width: int = 10, heads: int = 2, context: int = 8, vocabulary: int = VOCABULARY
) -> nn.Module:
    """The GPT of examples/gpt, tiny."""
    path = ROOT / "examples" / "gpt" / "model.py"
    spec = importlib.util.spec_from_file_location("example_gpt_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = {"context": context, "layers": layers, "heads": heads, "width": width, "vocabulary": vocabulary}
    model: nn.Module = module.GPT(module.GPTConfig(**sizes))
    return model


def hugging_face_gpt2() -> nn.Module:
    """transformers' GPT-2, tiny; its head is tied to its embedding. Needs the package, not the network."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=8, n_embd=10, n_layer=2, n_head=2, **dropout)
    return GPT2LMHeadModel(config)


def hugging_face_llama() -> nn.Module:
    """transformers' Llama, tiny, with grouped queries. Needs the package, not the network."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 12, "intermediate_size": 19, "num_hidden_layers": 2, "max_position_embeddings": 8}
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=2, num_key_value_heads=1, **sizes)
    return LlamaForCausalLM(config)


# -------------------------------------------------------------------- losses and batches


def token_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Mean cross entropy in fp32 of ``model`` on ``(inputs ..., targets [B, T])``; the model's output is the logits or
    has an attribute of this name."""
    output = model(*batch[:-1])
    logits = getattr(output, "logits", output).float()
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[-1].reshape(-1))


def square_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Mean squared error in fp32 of ``model`` on ``(inputs ..., y [B, 3])``."""
    return F.mse_loss(model(*batch[:-1]).float(), batch[-1])


def token_batch(step: int, micro: int, rank: int, size: int = 2, length: int = 7) -> tuple[Tensor, Tensor]:
    """The micro-batch of one rank: any process can make any rank's."""
    generator = torch.Generator().manual_seed(1_000_003 * step + 1009 * micro + rank)
    tokens = torch.randint(0, VOCABULARY, (size, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def float_batch(step: int, micro: int, rank: int, size: int = 4) -> tuple[Tensor, Tensor]:
    """Like :func:`token_batch`, with floating inputs: ``(x [size, 7], y [size, 3])``."""
    generator = torch.Generator().manual_seed(1_000_003 * step + 1009 * micro + rank)
    return torch.randn(size, 7, generator=generator), torch.randn(size, 3, generator=generator)


def image_batch(step: int, micro: int, rank: int, size: int = 4) -> tuple[Tensor, Tensor]:
    """Like :func:`token_batch`: ``(images [size, 3, 8, 8], y [size, 3])``."""
    generator = torch.Generator().manual_seed(1_000_003 * step + 1009 * micro + rank)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randn(size, 3, generator=generator)


def pair_batch(step: int, micro: int, rank: int, size: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Like :func:`token_batch`: ``(source [size, 5], target [size, 7], next target [size, 7])``."""
    tokens, targets = token_batch(step, micro, rank, size)
    return tokens[:, 2:].flip(1), tokens, targets


def expert_batch(step: int, micro: int, rank: int, size: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Like :func:`float_batch`, with ``allowed [size, 3]`` second. Each rank may not use one expert, another one in the
    next micro-batch."""
    x, y = float_batch(step, micro, rank, size)
    allowed = torch.ones(size, 3, dtype=torch.bool)
    allowed[:, (step + micro + rank) % 3] = False
    return x, allowed, y


def build(kind: Callable[..., nn.Module], seed: int = 7, **kwargs: object) -> nn.Module:
    """A model with the same initial weights in every process."""
    torch.manual_seed(seed)
    return kind(**kwargs)


def has_no_values(parameter: torch.Tensor) -> bool:
    """A partitioned parameter is released: torch itself finds one element, or the shard of a single rank."""
    with torch._C.DisableTorchFunctionSubclass():
        empty = parameter.untyped_storage().nbytes() <= parameter.itemsize
        return isinstance(parameter, AbsentParameter) and (empty or dist.get_world_size() == 1)
