"""Rows of docs/drop-in.md: models whose graphs are not a plain chain."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.prune import l1_unstructured

from tests.toolkit import models
from tests.toolkit.drop_in import Run, between, case, each_step
from tests.toolkit.traffic import MeanOfRanks

UNUSED = {"find_unused_parameters": True}


class Choice(nn.Module):
    """Each rank chooses, step by step, which of a module's own parameters it uses; all ranks call the module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 3)
        self.ways = nn.ParameterList(torch.randn(3, 3) for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.first(x) @ list(self.ways)[(self.calls + dist.get_rank()) % 2]  # the third one: no rank ever


class Experts(nn.Module):
    """Each rank calls one of two modules, another one in the next step; a third one is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(13, 3) for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.experts[(self.calls + dist.get_rank()) % 2](x)


def with_experts() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), Experts())


@case("parameters that some")
def unused_parameters(run: Run) -> None:
    run.start(Choice, ddp=UNUSED)
    run.train(4)


class Synchronized(models.Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(MeanOfRanks.apply(torch.tanh(self.first(x)), True))


@case("collectives of the model's own")
def own_collectives(run: Run) -> None:
    run.start(Synchronized)
    run.train(3)


LEAVES = "zero_optimization.leaf_modules"


@case("modules that some ranks do not call", words=["2.experts.", LEAVES], settings=["moving"])
@case("modules that some ranks do not call,", in_a_leaf=True)
def unused_modules(run: Run, in_a_leaf: bool = False) -> None:
    leaves = {"leaf_modules": ["Experts"]} if in_a_leaf and run.stage == 3 else {}
    run.start(with_experts, ddp=UNUSED, zero=leaves)
    run.train(4)


class HalfUsed(models.TwoBranches):
    def forward(self, x: Tensor, branch: str = "left") -> Tensor:
        return super().forward(x, branch)


@case("parameters that no")
def unused_by_all(run: Run) -> None:
    run.start(HalfUsed, optimizer=("SGD", {"lr": 0.0625, "weight_decay": 0.5}), ddp=UNUSED)
    run.train()


def checkpointed(reentrant: bool) -> Any:
    return lambda: models.SharedCheckpointed(reentrant)


@case("`torch.utils.checkpoint`", [True, False], reordered=True)
def checkpoints(run: Run, reentrant: bool) -> None:
    run.start(checkpointed(reentrant))
    run.train()


class _ChunkedLoss(torch.autograd.Function):
    """Mean squared error of a linear head, some rows at a time. Its forward computes all gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        total, of_hidden = hidden.new_zeros(()), torch.empty_like(hidden)
        of_weight, of_bias = torch.zeros_like(weight), torch.zeros_like(bias)
        for start in range(0, len(hidden), 2):
            rows = slice(start, start + 2)
            difference = F.linear(hidden[rows], weight, bias) - targets[rows]
            total += difference.square().sum() / targets.numel()
            gradient = difference * (2 / targets.numel())
            of_hidden[rows] = gradient @ weight
            of_weight += gradient.t() @ hidden[rows]
            of_bias += gradient.sum(0)
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return *(of * gradient for of in ctx.saved_tensors), None


class ChunkedLoss(models.Mlp):
    """Its head is never called: the loss takes the head's parameters."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        hidden = torch.tanh(self.first(x))
        loss: Tensor = _ChunkedLoss.apply(hidden, self.second.weight, self.second.bias, y)
        return loss


@case("a loss that computes its gradients in its forward")
def chunked_loss(run: Run) -> None:
    run.start(ChunkedLoss, loss=lambda model, batch: model(*batch))
    run.train()


class Tied(nn.Module):
    """A weight in two modules, and used as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.back = nn.Linear(7, 13)
        self.back.weight = self.first.weight
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) + self.back(x)
        return self.last(F.linear(hidden, self.first.weight.t()))


@case("tied weights")
def tied(run: Run) -> None:
    run.start(Tied)
    run.train()


@case("`nn.utils.parametrizations` (weight_norm", ["weight_norm", "spectral_norm", "orthogonal", "old"])
def parametrized(run: Run, kind: str) -> None:
    def build() -> nn.Module:
        model = models.Mlp()
        if kind == "old":
            nn.utils.weight_norm(model.first)
        else:
            getattr(nn.utils.parametrizations, kind)(model.first)
        return model

    run.start(build)
    run.train()


LATE = ["'first.weight'", "before zerolite.initialize"]


@between("`nn.utils.parametrizations` with", words=LATE, kind="weight_norm")
@between("`nn.utils.parametrizations` over", words=LATE, settings=["moving"], kind="spectral_norm")
def parametrized_late_with(run: Run, kind: str) -> None:
    getattr(nn.utils.parametrizations, kind)(run.module.first)


@case("`torch.nn.utils.prune` before")
def pruned(run: Run) -> None:
    def build() -> nn.Module:
        model = models.Mlp()
        l1_unstructured(model.first, "weight", 0.5)
        return model

    run.start(build)
    run.train()


@between("`torch.nn.utils.prune` after", words=["first.weight", "GatheredParameters"], settings=["moving"])
def pruned_late(run: Run) -> None:
    l1_unstructured(run.module.first, "weight", 0.5)


@each_step("`torch.func.functional_call(engine.module, …)`")
def called_functionally(run: Run, step: int) -> None:
    x, y = run.batch(step)
    F.mse_loss(functional_call(run.module, dict(run.module.named_parameters()), (x,)), y).backward()
    run.torch_step()


@each_step("fast weights: `functional_call`", words=["copy.deepcopy(engine.module)"], settings=["moving", "kept"])
def fast_weights(run: Run, step: int) -> None:
    named = dict(run.module.named_parameters())
    x, y = run.batch(step, 0)
    inner = F.mse_loss(functional_call(run.module, named, (x,)), y)
    gradients = torch.autograd.grad(inner, list(named.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(named.items(), gradients, strict=True)}
    x, y = run.batch(step, 1)
    F.mse_loss(functional_call(run.module, fast, (x,)), y).backward()
    run.torch_step()


@between("`torch.func.grad` and `vmap` over `f", words=["torch.func"])
@between("`torch.func.grad` and `vmap` over a", of_a_copy=True)
def per_sample(run: Run, of_a_copy: bool = False) -> None:
    x, y = run.batch(5)
    module = copy.deepcopy(run.module) if of_a_copy else run.module

    def loss(values: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(module, values, (x,)), y)

    with run.gathered(not of_a_copy):
        values = {name: p.detach() for name, p in module.named_parameters()}
        run.see(vmap(grad(loss), (None, 0, 0))(values, x, y))


@case("unused parameters in", settings=["moving"])
def unused_kept_in_the_graph(run: Run) -> None:
    class Keeps(models.Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.adapter = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0 * sum(p.sum() for p in self.adapter.parameters())

    run.start(Keeps)
    run.train(6)
