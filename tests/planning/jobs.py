"""Jobs that are planned, and run and measured: models, their batches and losses, and settings of the buckets."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerolite
from tests.planning.measure import Measurement, measure
from tests.toolkit import models
from zerolite.planning.make import plan
from zerolite.planning.result import Plan

BATCH, WIDTH = 4, 48


class OddMlp(nn.Module):
    """``x [B, 37]`` -> ``[B, 5]``: odd sizes, a frozen layer, one weight in two layers, a 0-dim parameter, one that is
    never used, buffers. ``more``: layers in the middle."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(37, 211)
        self.middle = nn.Linear(211, 211)
        self.frozen = nn.Linear(211, 211).requires_grad_(False)
        self.again = nn.Linear(211, 211)
        self.again.weight = self.middle.weight
        self.gain = nn.Parameter(torch.tensor(0.75))
        self.unused = nn.Parameter(torch.ones(3))
        self.more = nn.Sequential(*(nn.Linear(211, 211) for _ in range(more)))
        self.norm = nn.LayerNorm(211)
        self.last = nn.Linear(211, 5)
        self.register_buffer("offset", torch.zeros(5))
        self.register_buffer("wide", torch.ones(211, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = F.gelu(self.first(x))
        hidden = hidden + self.gain * torch.tanh(self.more(self.frozen(self.middle(hidden))))
        hidden = self.norm(self.again(hidden)) * self.wide.to(hidden.dtype)
        output = self.last(hidden) + self.offset.to(hidden.dtype)
        return {"output": output, "loss": F.mse_loss(output.float(), y.float())}


class Experts(nn.Module):
    """A block of a mixture of experts with a capacity: each of ``experts`` takes the ``capacity`` samples that score
    highest for it, whatever they are, so that no shape depends on values."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        capacity = -(-x.shape[0] // len(self.experts))
        best, rows = scores.topk(capacity, dim=0)
        result = x
        for number, expert in enumerate(self.experts):
            chosen = rows[:, number]
            result = result.index_add(0, chosen, expert(x[chosen]) * best[:, number, None])
        return result


def experts() -> nn.Module:
    """``x [B, WIDTH]`` -> ``[B, 3]``."""
    blocks = [Experts(WIDTH, 4) for _ in range(2)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *blocks, nn.Linear(WIDTH, 3))


class EqualLoads(nn.Module):
    """A layer of four experts, of which rows choose all pairs in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        mlps = (nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4))
        self.experts = zerolite.moe.ExpertParallel(mlps)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.tensor(list(itertools.combinations(range(4), 2)))
        index = pairs[torch.arange(len(x)) % len(pairs)]
        return x + self.experts(x, index, self.router(x).softmax(-1).gather(1, index))


def spread() -> nn.Module:
    """``x [24, WIDTH]`` -> ``[24, 3]``."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), EqualLoads(), EqualLoads(), nn.Linear(WIDTH, 3))


def gpt(layers: int = 3, heads: int = 3) -> nn.Module:
    return models.example_gpt(layers=layers, width=WIDTH, heads=heads)


def partitioned_gpt() -> nn.Module:
    with zerolite.zero.Init():
        return gpt(10)


class WrittenRMSNorm(nn.Module):
    """As in Hugging Face's Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class LongBlock(nn.Module):
    """A block of a Llama without rotations: causal attention with few heads of keys, and an MLP of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = WrittenRMSNorm(), WrittenRMSNorm()
        self.qkv, self.out = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = LongMlp()

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.before(x)).split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
        query, key, value = (part.unflatten(-1, (-1, 12)).transpose(1, 2) for part in split)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.after(x))


class LongMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LongDecoder(nn.Module):
    """``tokens`` and ``targets`` [1, length] -> the loss."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(512, WIDTH), nn.Linear(WIDTH, 512, bias=False)
        self.blocks = nn.Sequential(*(LongBlock() for _ in range(layers)))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.embed(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def long_batch(length: int = 2048) -> dict[str, Tensor]:
    return dict.fromkeys(("tokens", "targets"), torch.arange(length)[None] % 512)


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(8)))


def tokens() -> tuple[Tensor, Tensor]:
    """Inputs and targets ``[BATCH, 8]``."""
    return models.token_batch(0, 0, 0, BATCH, 8)


def rows_and_values() -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, 37), "y": torch.randn(BATCH, 5)}


@dataclass(frozen=True)
class Kind:
    """A model, what makes a micro-batch for it, and its loss (None: what the model says)."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[Any], Tensor] | None = None


KINDS = {
    "gpt": Kind(gpt, tokens),
    "odd": Kind(OddMlp, rows_and_values),
    "moe": Kind(experts, lambda: torch.randn(4 * BATCH, WIDTH), lambda output: output.float().square().sum()),
    "spread": Kind(spread, lambda: torch.randn(24, WIDTH), lambda output: output.float().square().sum()),
    "even gpt": Kind(lambda: gpt(4, 4), tokens),  # two ranks can share its heads and layers
    "long": Kind(LongDecoder, long_batch),
    # What 16-bit matrix products on the CPU take inside themselves is little beside all of these.
    "deep gpt": Kind(lambda: gpt(10), tokens),
    "deep gpt in zero.Init": Kind(partitioned_gpt, tokens),
    "deep odd": Kind(lambda: OddMlp(more=22), rows_and_values),
    # 134 million parameters, beside whose states cuBLAS' workspace of up to 32 MB is little.
    "wide": Kind(wide, lambda: torch.randn(1024, 4096), lambda output: output.float().square().mean()),
}


def bucket_sizes(size: int, live: int, **more: int) -> dict[str, int]:
    names = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
    return {**dict.fromkeys(names, size), "stage3_max_live_parameters": live, **more}


BUCKETS: dict[str, dict[str, Any]] = {
    "auto": {},
    "small": bucket_sizes(5_000, 30_000, stage3_max_reuse_distance=0),
    "large": bucket_sizes(60_000, 120_000),
    "replicas": bucket_sizes(5_000, 30_000, stage3_max_reuse_distance=0, shard_size=2),
    "hierarchical": bucket_sizes(5_000, 30_000, stage3_max_reuse_distance=0, zero_hpz_partition_size=2),
    "compressed": bucket_sizes(
        5_000,
        30_000,
        stage3_max_reuse_distance=0,
        zero_hpz_partition_size=2,
        zero_quantized_weights=True,
        zero_quantized_gradients=True,
        zeropp_loco_param={"err_beta": 0.8},
    ),
}
"""Settings of the buckets, of what stage 3 keeps gathered, and of the ranks that divide it."""

MOVING = {"stage3_param_persistence_threshold": 300, "stage3_module_granularity_threshold": 0}
"""Stage 3 would keep models of this size whole otherwise."""


HOST, DISK = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/tmp"}
OFFLOAD: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer on the host": {"offload_optimizer": HOST, "sub_group_size": 8192},
    "half of it": {"offload_optimizer": {**HOST, "ratio": 0.5}},
    "all on the host": {"offload_optimizer": HOST, "offload_param": HOST},
    "parameters on the host": {"offload_param": HOST},
    "optimizer on disk": {"offload_optimizer": DISK, "sub_group_size": 8192},
    "all on disk": {"offload_optimizer": DISK, "offload_param": {**DISK, "max_in_cpu": 0}},
}
"""What rests off the device."""


def settings(
    stage: int, buckets: str, precision: str = "fp32", accumulation: int = 1, offload: str = "none", **blocks: Any
) -> dict[str, Any]:
    """A config, with further ``blocks``."""
    zero = {"stage": stage, **BUCKETS[buckets], **(MOVING if stage == 3 else {}), **OFFLOAD[offload]}
    sizes = {"train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": accumulation}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    halves = {} if precision == "fp32" else {precision: {"enabled": True}}
    more = {"gradient_clipping": 1.0, "steps_per_print": 1_000_000, **blocks, **halves}
    return {**sizes, "optimizer": optimizer, "zero_optimization": zero, **more}


def planned(
    kind: str,
    world: int,
    rank: int | None = None,
    nodes: int | None = None,
    with_batch: bool = True,
    device: str = "cpu",
    **setting: Any,
) -> Plan:
    """The plan of a rank. ``setting``: see :func:`settings`."""
    job = KINDS[kind]
    given: dict[str, Any] = {"batch": job.batch, "loss": job.loss} if with_batch else {}
    return plan(job.make, settings(**setting), world, rank=rank, nodes=nodes, device=device, **given)


def measured(kind: str, shared_memory: bool = True, with_batch: bool = True, **setting: Any) -> Measurement:
    """The measurement of the rank that calls it."""
    os.environ["ZEROLITE_SHARED_MEMORY"] = "1" if shared_memory else "0"
    job = KINDS[kind]
    given = {"batch": job.batch, "loss": job.loss} if with_batch else {}
    return measure(job.make, settings(**setting), **given)


NUMEL = 8 * (64 * 64 + 64)  # of the stack


def stack() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
