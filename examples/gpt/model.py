"""A byte-level GPT: pre-norm transformer blocks, learned positions, a head of its own.

A byte says little, so each position is embedded together with the three bytes before it. That is cheap, and a small
model then need not spend its first layers and its first thousand steps on finding its neighbours.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    context: int = 128  # bytes that the model sees at once
    layers: int = 4
    heads: int = 4
    width: int = 256
    dropout: float = 0.0
    vocabulary: int = 256  # one token for each value of a byte
    bytes_embedded: int = 4  # at each position: this byte and the ones before it

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got width {self.width} and {self.heads} heads")


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, width / heads]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.project = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(F.gelu(self.expand(x)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    # Which layers several processes may share, in the words of Hugging Face's models: tensor_parallel.plan "auto".
    _tp_plan = {
        "blocks.*.attention.query_key_value": "colwise",
        "blocks.*.attention.project": "rowwise",
        "blocks.*.mlp.expand": "colwise",
        "blocks.*.mlp.project": "rowwise",
        "head": "colwise_rep",
    }

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embeddings = nn.ModuleList(
            nn.Embedding(config.vocabulary, config.width) for _ in range(config.bytes_embedded)
        )
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, (Attention, MLP)):  # two additions a layer keep the size of the residual stream
            nn.init.normal_(module.project.weight, std=0.02 / math.sqrt(2 * self.config.layers))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens, targets: int64 [batch, length], length ≤ context. Returns the mean cross-entropy in nats (a scalar)
        if there are targets, otherwise the logits, [batch, length, vocabulary]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.position_embedding(positions)
        for back, embedding in enumerate(self.token_embeddings):
            x = x + F.pad(embedding(tokens), (0, 0, back, 0))[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.final_norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, temperature: float = 0.8, seed: int = 0) -> Tensor:
        """Continues tokens, int64 [batch, length], by count sampled tokens. Returns [batch, length + count]."""
        random = torch.Generator(tokens.device).manual_seed(seed)
        for _ in range(count):
            logits = self(tokens[:, -self.config.context :])[:, -1].float()
            chances = F.softmax(logits / temperature, dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=random)], dim=1)
        return tokens
