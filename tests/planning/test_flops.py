"""FLOPs of plans, against sums by hand: dense models, experts, recurrent layers, and what checkpointing recomputes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.planning.test_dry_run import config
from zerolite.planning.make import plan
from zerolite.planning.result import Plan

WIDTH, ROWS = 16, 12
LINEAR = 2 * ROWS * WIDTH * 4 * WIDTH  # each of a block's two


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Experts(nn.Module):
    def __init__(self, experts: int = 8, chosen: int = 2) -> None:
        super().__init__()
        self.router, self.chosen = nn.Linear(WIDTH, experts), chosen
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 4 * WIDTH))
        self.down = nn.Parameter(torch.randn(experts, 4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.router(x).softmax(-1).topk(self.chosen)
        order = experts.flatten().argsort()
        ones = torch.ones(order.shape, dtype=torch.int32)
        counts = torch.zeros(len(self.up), dtype=torch.int32).scatter_add(0, experts.flatten(), ones)
        ends = counts.cumsum(0, dtype=torch.int32)
        inner = torch._grouped_mm(x[order // self.chosen], self.up, offs=ends).relu()
        outer = torch._grouped_mm(inner, self.down, offs=ends) * weights.flatten()[order, None]
        return x.index_add(0, order // self.chosen, outer)


EXPERTS = 2 * 2 * LINEAR + 2 * ROWS * WIDTH * 8  # two experts of two layers for each row, and the router


class Stack(nn.Module):
    """Three layers, checkpointed as ``how`` says, after an embedding."""

    def __init__(self, layer: Callable[[], nn.Module] = Block, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.embedding = nn.Embedding(10, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.how == "reentrant") if self.how else layer(x)
        return x.square().mean()


def tokens() -> Tensor:
    return torch.zeros(ROWS, dtype=torch.long)


def planned(model: Callable[[], nn.Module], batch: Callable[[], Any] = tokens, **changes: Any) -> Plan:
    return plan(model, config(**changes), 2, batch=batch)


# Reentrant checkpoints run a layer again from end to end. The others stop at the last tensor that backward needs, which
# is the input of the layer's last product.
@pytest.mark.fast("-0")
@pytest.mark.parametrize(("how", "again"), [("", 0), ("plain", 1), ("reentrant", 2), ("of the config", 1)])
def test_dense(how: str, again: int) -> None:
    more: dict[str, Any] = {"gradient_accumulation_steps": 2}
    if how == "of the config":
        how, more["activation_checkpointing"] = "", {"modules": ["Block"]}
    made = planned(lambda: Stack(how=how), zero_optimization={"stage": 3}, **more)
    assert (made.flops, made.recomputed_flops) == (2 * 3 * 3 * 2 * LINEAR, 2 * 3 * again * LINEAR)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no _grouped_mm")
@pytest.mark.parametrize("bf16", [True, False])
def test_experts_count_for_the_rows_that_they_get(bf16: bool) -> None:
    made = planned(lambda: Stack(Experts, "reentrant"), bf16={"enabled": bf16})
    assert (made.flops, made.recomputed_flops) == (3 * 3 * EXPERTS, 3 * EXPERTS)


@torch.library.custom_op("zerolite_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: 2 * gradient)


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return doubled(x)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_operators_that_have_no_formula_are_named() -> None:
    (note,) = (note for note in planned(lambda: Stack(Doubles)).notes if "FLOPs" in note)
    assert note.startswith("The FLOPs leave out zerolite_tests::doubled, ") and "register_flop_formula" in note
    assert not any("FLOPs" in note for note in planned(Stack).notes)
