"""Rows of docs/drop-in.md: optimizers, param groups, learning rates."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import zerolite
from tests.toolkit import models
from tests.toolkit.configs import config
from tests.toolkit.drop_in import Run, between, case

# The arithmetic of torch's loops over tensors and of a kernel over a flat buffer: the same operations on an element,
# with a multiplication and an addition fused here and there. Learning rates are 0.02 at most.
KERNELS = 5e-7

ELEMENTWISE: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "betas": (0.8, 0.95)},
    "Adagrad": {"lr": 0.02, "lr_decay": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Adadelta": {"lr": 0.5},
    "Adamax": {"lr": 0.01, "weight_decay": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Rprop": {"lr": 0.01},
    "ASGD": {"lr": 0.02, "t0": 1},
}
FORMS = ("instance", "class", "factory", "config")
SOME_FORMS = [(name, form) for number, name in enumerate(ELEMENTWISE) for form in ("config", FORMS[number % 3])]


def train_with(run: Run, kind: Any, form: str, arguments: dict[str, Any], build: Any = models.Mlp, **more: Any) -> None:
    """form: how the engine gets the optimizer; a class is made with its defaults."""
    if form == "class":
        arguments = {"lr": 1e-2} if kind is torch.optim.SGD else {}
    make = functools.partial(kind, **arguments)
    if form == "config" and not run.plain:
        params = {k: list(v) if isinstance(v, tuple) else v for k, v in arguments.items()}
        run.start(build, optimizer=(kind.__name__, params), **more)
    elif form == "instance" or run.plain:
        run.start(build, own=lambda model: make(model.parameters()), **more)
    else:
        run.start(build, optimizer=kind if form == "class" and not arguments else make, **more)
    run.train()


@case("an elementwise optimizer", SOME_FORMS, close=KERNELS)
def elementwise(run: Run, variant: tuple[str, str]) -> None:
    name, form = variant
    train_with(run, getattr(torch.optim, name), form, ELEMENTWISE[name])


def matrices() -> nn.Module:
    """A model of matrices only, which are all that torch's Muon takes."""
    return nn.Sequential(nn.Linear(7, 13, bias=False), nn.Tanh(), nn.Linear(13, 3, bias=False))


@case("one that is not elementwise", FORMS, close=KERNELS)
def whole_parameters(run: Run, form: str) -> None:
    train_with(run, torch.optim.Adafactor, form, {"lr": 0.01}, matrices)


@case("torch's Muon over matrices", FORMS, close=KERNELS)
def muon(run: Run, form: str) -> None:
    name = "Muon" if hasattr(torch.optim, "Muon") else "AdamW"
    train_with(run, getattr(torch.optim, name), form, {"lr": 0.01}, matrices)


def muon_and_adamw(model: Any) -> Any:
    """The two optimizers of torch that `"Muon"` by name means."""
    hidden, rest = [model[1].weight], [model[0].weight, model[1].bias, model.head.weight, model.head.bias]
    muon = torch.optim.Muon(hidden, lr=0.02, momentum=0.9, weight_decay=0.01)
    adamw = torch.optim.AdamW(rest, lr=0.01, weight_decay=0.01, betas=(0.9, 0.98))
    return SimpleNamespace(
        step=lambda: (muon.step(), adamw.step()), zero_grad=lambda: (muon.zero_grad(), adamw.zero_grad())
    )


class Words(nn.Sequential):
    """``tokens [B, T]`` -> logits, with an embedding, a hidden matrix and a head."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(models.VOCABULARY, 5), nn.Linear(5, 9))
        self.head = nn.Linear(9, models.VOCABULARY)


@case(
    '`"Muon"` by name: Muon',
    ["names", "use_muon"],
    close=KERNELS,
)
def muon_by_name(run: Run, how: str) -> None:
    if not hasattr(torch.optim, "Muon"):
        return elementwise(run, ("AdamW", "config"))

    def build() -> nn.Module:
        model = Words()
        if how == "use_muon":
            for name, parameter in model.named_parameters():
                parameter.use_muon = name == "1.weight"  # type: ignore[attr-defined]
        return model

    params = {"lr": 0.02, "adam_lr": 0.01, "momentum": 0.9, "weight_decay": 0.01, "betas": [0.9, 0.98]}
    own = muon_and_adamw if run.plain else None
    run.start(build, optimizer=("Muon", params), own=own, loss=models.token_loss, batch=models.token_batch)
    run.train()


class OwnMomentum(torch.optim.Optimizer):
    """An optimizer class that zerolite does not know: signs of a momentum, with a count and a weight decay."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    momentum = state.setdefault("momentum", torch.zeros_like(p))
                    momentum.mul_(0.5).add_(p.grad)
                    p.mul_(1 - group["lr"] * group["decay"]).add_(
                        torch.sign(momentum), alpha=-group["lr"] / state["count"]
                    )


@case(
    "an optimizer class that zerolite does not know",
    ["instance", "class", "factory"],
    words=["OwnMomentum", "zerolite_elementwise = True", "zero_allow_untested_optimizer", "whole_parameters"],
    error=ValueError,
)
@case("an optimizer class that zerolite does not know,", ["instance", "class", "factory"], allowed=True)
def unknown_class(run: Run, form: str, allowed: bool = False) -> None:
    train_with(run, OwnMomentum, form, {}, more={"zero_allow_untested_optimizer": True} if allowed else {})


@case("LBFGS", FORMS, words=["LBFGS", "loss", "several times a step"], error=ValueError)
def lbfgs(run: Run, form: str) -> None:
    train_with(run, torch.optim.SGD if run.plain else torch.optim.LBFGS, form, {})


@case("SparseAdam; gradients", [*FORMS, "gradient"], words=["sparse", "dense"], error=(ValueError, RuntimeError))
def sparse(run: Run, form: str) -> None:
    if form == "gradient" and not run.plain:
        run.start(lambda: nn.Embedding(11, 3, sparse=True))
        run.backward(run(torch.tensor([[1, 2]])).sum())
    else:
        train_with(run, torch.optim.SGD if run.plain else torch.optim.SparseAdam, form, {})


# ---------------------------------------------------------------- param groups


def two_groups(model: Any) -> list[dict[str, Any]]:
    return [
        {"params": [model.first.weight, model.second.weight], "weight_decay": 0.1},
        {"params": [model.first.bias, model.second.bias], "lr": 0.125},
    ]


def two_group_sgd(model: Any) -> Any:
    return torch.optim.SGD(two_groups(model), lr=0.0625, momentum=0.5)


@case("param groups with values", ["instance", "model_parameters"], close=KERNELS)
def param_groups(run: Run, how: str) -> None:
    if how == "instance" or run.plain:
        run.start(own=two_group_sgd)
    else:
        model = models.build(models.Mlp)
        make = functools.partial(torch.optim.SGD, lr=0.0625, momentum=0.5)
        run.start(lambda: model, optimizer=make, model_parameters=two_groups(model))
    run.train()


@case("learning rates and", ["own", "engine's"], close=KERNELS)
def changed_by_hand(run: Run, whose: str) -> None:
    run.start(own=two_group_sgd)
    optimizer = run.own if whose == "own" else run.optimizer
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 0.05 / (step + 1)
        optimizer.param_groups[1]["momentum"] = 0.25 * step
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.1 * step
        run.train(1, start=step)
        run.see([group["lr"] for group in run.optimizer.param_groups])


@case("a parameter taken out of its param group", ["config", "own"], words=["second.bias", "requires_grad_(False)"])
def taken_out(run: Run, whose: str) -> None:
    run.start(**({"own": two_group_sgd} if whose == "own" else {}))
    run.train(1)
    bias = run.module.second.bias
    for group in run.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not bias]
    run.train(2, start=1)


@case("`engine.optimizer.add_param_group`", ["config", "own"], close=KERNELS)
@case("`add_param_group` on", close=KERNELS, how="to_own")
def group_added(run: Run, how: str) -> None:
    """The second layer, which is frozen before, in a group of its own."""

    def build() -> nn.Module:
        model = models.Mlp()
        model.second.requires_grad_(False)
        return model

    if how == "config":
        run.start(build, optimizer=("AdamW", {"lr": 0.01}))
    else:
        run.start(build, own=lambda model: torch.optim.AdamW(model.first.parameters(), lr=0.01))
    run.train(1)
    run.module.second.requires_grad_(True)
    optimizer = run.own if how == "to_own" else run.optimizer
    optimizer.add_param_group({"params": list(run.module.second.parameters()), "lr": 0.02})
    run.train(2, start=1)


@between("a module added after", words=["'second.1.weight'", "before zerolite.initialize"], error=ValueError)
def module_added(run: Run) -> None:
    torch.manual_seed(5 if run.plain else 5 + run.rank)  # rank 0's values are everyone's
    run.module.second = nn.Sequential(run.module.second, nn.Linear(3, 3))
    run.optimizer.add_param_group({"params": list(run.module.second[1].parameters()), "lr": 0.125})


# ---------------------------------------------------------------- freezing


@case("freezing a parameter", ["midway", "every step"], close=KERNELS)
def freezing(run: Run, when: str) -> None:
    run.start(optimizer=("AdamW", {"lr": 0.01}))
    for step in range(4):
        frozen = step % 2 == 1 if when == "every step" else step >= 2
        run.module.first.requires_grad_(not frozen)
        run.train(1, start=step)


def checkpointed_sleeper() -> nn.Module:
    """A weight that is used twice, whose gradient comes in two parts when it is unfrozen."""
    model = models.SharedCheckpointed()
    model.shared.requires_grad_(False)
    return model


@case("unfreezing a parameter,", ["config", "instance", "checkpointed"], close=KERNELS)
def unfreezing(run: Run, how: str) -> None:
    build = checkpointed_sleeper if how == "checkpointed" else models.Frozen
    if how == "instance" or run.plain:
        run.start(build, own=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))
    else:
        run.start(build, optimizer=("AdamW", {"lr": 0.01}))
    sleepers = [parameter for parameter in run.module.parameters() if not parameter.requires_grad]
    for step in range(4):
        for parameter in sleepers:
            parameter.requires_grad_(step >= 2)
            if step == 1:  # while it is frozen
                parameter.data.mul_(0.75)
        run.train(1, start=step)


@case("unfreezing a parameter that", words=["'first.weight'", "engine.optimizer.add_param_group"])
def unfreezing_the_homeless(run: Run) -> None:
    def build() -> nn.Module:
        model = models.Mlp()
        model.first.requires_grad_(False)
        return model

    run.start(build, own=lambda model: torch.optim.SGD(model.second.parameters(), lr=0.0625))
    run.train(1)
    run.module.first.requires_grad_(True)
    run.train(1, start=1)


@case("an optimizer in the", words=["optimizer", "leave one out"], error=ValueError)
def two_optimizers(run: Run) -> None:
    run.start()
    run.train()
    if not run.plain:
        settings = config(run.stage or 0, zero=run.zero())
        zerolite.initialize(models.build(models.Mlp), settings, optimizer=torch.optim.SGD)
