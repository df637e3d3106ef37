"""Models and batches whose sequences several ranks divide, and the same training in one process."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerolite
from tests.toolkit import models
from tests.toolkit.configs import at
from zerolite.zero import GatheredParameters

VOCABULARY, WIDTH, HEADS = 17, 24, 12
IGNORED = -100

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


class Decoder(nn.Module):
    """A decoder with learned positions, which computes its own loss where it is given targets."""

    def __init__(self, layers: int = 2, kv_heads: int = HEADS, dropout: float = 0.0, causal: bool = True) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(_Block(kv_heads, dropout, causal) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x = self.embed(tokens) + self.places(position_ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits if targets is None else cross_entropy(logits, targets)


class _Block(nn.Module):
    def __init__(self, kv_heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.kv_heads, self.dropout, self.causal = kv_heads, dropout, causal
        wide = WIDTH + 2 * kv_heads * (WIDTH // HEADS)
        self.norm, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, wide), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        shared = self.kv_heads * (WIDTH // HEADS)
        split = self.qkv(self.norm(x)).split([WIDTH, shared, shared], -1)
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in split)
        grouped = {"enable_gqa": True} if self.kv_heads < HEADS else {}
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, **grouped)
        x = x + self.drop(self.proj(seen.transpose(1, 2).flatten(2)))
        return x + self.down(F.gelu(self.up(self.after(x))))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def llama(attention: str = "sdpa", kv_heads: int = 4, heads: int = 12, **more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=64, attn_implementation=attention, **more,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2(attention: str = "sdpa") -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=64, attn_implementation=attention,
        bos_token_id=0, eos_token_id=0, **dropouts,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def mistral(attention: str = "sdpa") -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, max_position_embeddings=64, sliding_window=5, attn_implementation=attention,
    )  # fmt: skip
    return MistralForCausalLM(config)


MAKERS: dict[str, Any] = {"Decoder": Decoder, "llama": llama, "gpt2": gpt2, "mistral": mistral}


def batch_of(model: str, place: int, length: int, how: str = "") -> dict[str, Tensor]:
    """Return batch number ``place``: two sequences, of which few labels are counted in the last part and none in the
    first tokens. how: "masked" has padding, "packed" has documents."""
    generator = torch.Generator().manual_seed(100 + place)
    tokens = torch.randint(VOCABULARY, (2, length), generator=generator)
    labels = tokens.clone()
    labels[torch.rand(2, length, generator=generator) < 0.3] = IGNORED
    labels[:, : length // 3] = IGNORED
    if model == "Decoder":
        return {"tokens": tokens, "targets": F.pad(labels[:, 1:], (0, 1), value=IGNORED)}
    batch = {"input_ids": tokens, "labels": labels}
    if how == "masked":
        mask = torch.ones(2, length, dtype=torch.int64)
        mask[0, : length // 4], mask[1, -2:] = 0, 0
        batch |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, IGNORED)}
    if how == "packed":
        ends = (length // 3, length - 4, length)
        positions = torch.cat([torch.arange(e - b) for b, e in zip((0, *ends), ends, strict=False)])
        batch["position_ids"] = positions.expand(2, -1)
    return batch


def loss_of(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs.loss


def counted(batch: dict[str, Tensor]) -> int:
    """Number of labels in a whole batch that are counted."""
    labels = batch["targets"] if "targets" in batch else batch["labels"][:, 1:]
    return int((labels != IGNORED).sum())


def build(model: str, double: bool, **options: Any) -> nn.Module:
    made = models.build(MAKERS[model], **options)
    return made.double() if double else made


def in_one_process(
    model: str,
    windows: list[list[dict[str, Tensor]]],
    double: bool,
    clip: float,
    lr: float,
    momentum: float = 0.9,
    **options: Any,
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Train on the joint batch of each window. Returns parameters, norms, and losses."""
    made = build(model, double, **options).train()
    optimizer = torch.optim.SGD(made.parameters(), lr=lr, momentum=momentum)
    norms, losses = [], []
    more = {} if model == "Decoder" else {"use_cache": False}
    for window in windows:
        total = sum(map(counted, window))
        loss = sum(loss_of(made(**batch, **more)) * (counted(batch) / total) for batch in window)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(made.parameters(), clip or float("inf"))))
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in made.named_parameters()}, norms, losses


def train(
    model: str,
    size: int,
    *,
    stage: str = "2",
    accumulation: int = 1,
    clip: float = 0.0,
    double: bool = False,
    length: int = 22,
    how: str = "",
    steps: int = 2,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], list[float], Any]:
    """Train with ``size`` ranks for each sequence. Returns parameters, norms, and what one process gives."""
    optimizer = ("SGD", {"lr": 0.5, "momentum": 0.9})
    base = at(stage, accumulation=accumulation, clip=clip, optimizer=optimizer, sequence_parallel={"size": size})
    engine = zerolite.initialize(build(model, double, **options), base | (config or {}))
    replicas = engine.data_parallel_world_size
    windows, norms = [], []
    for step in range(steps):
        window = []
        for micro in range(accumulation):
            first = (step * accumulation + micro) * replicas
            # Lengths differ between micro-batches, and not between ranks of one sequence.
            batches = [batch_of(model, first + r, length - micro, how) for r in range(replicas)]
            loss = loss_of(engine(**batches[engine.data_parallel_rank]))
            engine.backward(loss)
            engine.step()
            window += batches
        windows.append(window)
        norms.append(engine.get_global_grad_norm())
    wanted = in_one_process(model, windows, double, clip, 0.5, **options)
    with GatheredParameters(engine.module, check=False):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}, norms, wanted
