"""Collectives that deliver as late as NCCL may: nothing reads a result, overwrites an input or frees memory before the
collective has been waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, at
from tests.toolkit.lockstep import Layers, skipping_on_device
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import snapshot
from tests.toolkit.transports import check_order, late, transport


class Checkpointed(Layers):
    """The middle layers recomputed in backward."""

    def forward(self, x: Tensor, extras: tuple[bool, ...] = (True, True, True)) -> Tensor:
        x = self.first(x)
        for layer, use_extra in zip(self.layers, extras, strict=True):
            x = checkpoint(layer, x, use_extra, use_reentrant=False)
        return self.last(self.gain * x)


def train(given: dict[str, Any], way: str, on_device: bool) -> dict[str, Tensor]:
    """Three steps. way: what the loop does beside training."""
    with skipping_on_device(on_device):
        engine = zerolite.initialize(models.build(Checkpointed if way == "checkpointing" else Layers), given)
    seen: dict[str, Tensor] = {}
    last = engine.module.last.weight
    views: dict[str, Tensor] = {"last.weight": last.data[0]} if way == "views" else {}
    for step in range(3):
        for micro in range(engine.gradient_accumulation_steps):
            x, y = models.float_batch(step, micro, engine.rank)
            extras = (True, way != "unused" or engine.rank == 0, way != "unused")
            loss = (engine(x, extras).float() - y).square().mean()
            engine.backward(loss) if way != "clipping" else loss.backward()
            seen[f"loss {step} {micro}"] = loss.detach()
        if way == "clipping":
            seen[f"norm {step}"] = nn.utils.clip_grad_norm_(engine.parameters(), 0.3)
        engine.step()
        if way == "views":
            seen |= {f"{name} {step}": view.clone() for name, view in views.items()}
            views["first.weight"] = engine.module.first.weight.detach().view(-1)  # of what was in flight a moment ago
        if way == "between":
            seen[f"norm {step}"] = engine.module.layers[1].weight.detach().norm()
            seen |= {f"{name} {step}": value.clone() for name, value in engine.module.state_dict().items()}
            with torch.no_grad():
                engine.module.last.weight.mul_(0.9)
                engine.module.layers[0].extra.clamp_(-0.3, 0.3)
            with zerolite.zero.GatheredParameters(engine.module.first.weight, modifier_rank=0), torch.no_grad():
                engine.module.first.weight.add_(0.01)
            engine.eval()
            with torch.no_grad():
                seen[f"evaluated {step}"] = engine(x)
            engine.train()
    return seen | snapshot(engine)


WAYS = ["plain", "checkpointing", "unused", "clipping", "between", "views"]


@pytest.mark.fast(every=14)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("precision", "accumulation", "overlap"), [("fp32", 1, None), ("bf16", 2, None), ("fp32", 2, False)]
)
@pytest.mark.parametrize("stage", ["0", "1", "2", "3 tight", "3 defaults"])
@on_ranks(2)
def test_every_wait(
    stage: str, precision: str, accumulation: int, overlap: bool | None, way: str, on_device: bool
) -> None:
    zero = {} if stage.startswith("3") else {"overlap_comm": overlap}
    given = at(stage, precision, accumulation, 0.0, ADAMW, zero=zero)
    with transport("native"):
        expected = train(given, way, on_device)
    with late() as launched:
        assert_same_bits(train(given, way, on_device), expected, "in time and late")
    check_order(launched)


# -------------------------------------------------------------------- replicas: several communicators


def replicated(stage: str, precision: str = "bf16", key: str = "shard_size") -> dict[str, Any]:
    return at(stage, precision, 2, 0.0, ADAMW, zero={key: 2, "overlap_comm": True})


@pytest.mark.fast("3 tight-shard_size-*")
@on_ranks(4)
@pytest.mark.parametrize(
    ("stage", "key"),
    [("1", "shard_size"), ("2", "shard_size"), ("3 tight", "shard_size"), ("3 tight", "zero_hpz_partition_size")],
)
def test_every_wait_of_replicas(stage: str, key: str) -> None:
    given = replicated(stage, key=key)
    with transport("native"):
        expected = train(given, "unused", True)
    with late() as launched:
        assert_same_bits(train(given, "unused", True), expected, "in time and late")
    check_order(launched)
