"""Collectives of a step of stage 3, counted by the plan; FSDP2's number is counted by benchmarks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerolite.planning import plan


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.o(self.q(y) * self.k(y) + self.v(y))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """The shapes of Llama-2-7B by default; ``words [B, T]`` -> loss."""

    def __init__(self, layers: int = 32, width: int = 4096, hidden: int = 11008, words: int = 32000) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), words.flatten())


CONFIG = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 3},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "world"), [(6, 96), (32, 8)])
def test_a_step_launches_at_most_as_many_collectives_as_fsdp2(layers: int, world: int) -> None:
    sizes = (layers,) if layers == 32 else (layers, 512, 1376, 4000)
    made = plan(lambda: Llama(*sizes), CONFIG, world, batch=lambda: torch.zeros(1, 16, dtype=torch.long))
    # FSDP2's, with `fully_shard` on each block and the root, and clipping: gathers of all in forward and of the blocks
    # in backward, reduce-scatters of all, an all-reduce of the norm.
    assert sum(made.collectives.values()) <= (layers + 1) + layers + (layers + 1) + 1
    assert made.collectives["reduce_scatter"] <= layers + 2 and made.collectives["all_reduce"] == 1
    assert sum(entry.unaligned for entry in made.traffic) == made.host_waits == 0
    if layers == 32:
        assert made.collectives == {"all_gather": 64, "reduce_scatter": 34, "all_reduce": 1}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (2, "fp32"), (3, "fp16")])
def test_the_host_waits_only_where_an_update_runs_on_it(stage: int, precision: str) -> None:
    """It must know there whether the step is skipped."""
    config = {**CONFIG, "bf16": {"enabled": precision == "bf16"}, "fp16": {"enabled": precision == "fp16"}}
    for device, waits in ((None, 0), ("cpu", 1)):
        offload = {} if device is None else {"offload_optimizer": {"device": device}}
        setting = {**config, "zero_optimization": {"stage": stage, **offload}}
        made = plan(lambda: Llama(2, 32, 64, 96), setting, 8, batch=lambda: torch.zeros(1, 16, dtype=torch.long))
        assert made.host_waits == waits, (stage, precision, device)


@pytest.mark.parametrize(("fused", "waits"), [(True, 0), (False, 1)])
def test_the_host_waits_for_kernels_that_cannot_skip(fused: bool, waits: int) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "fused": fused}}
    setting = {**CONFIG, "optimizer": optimizer, "zero_optimization": {"stage": 1}}
    made = plan(lambda: Llama(1, 32, 64, 96), setting, 8, batch=lambda: torch.zeros(1, 16, dtype=torch.long))
    assert made.host_waits == waits
