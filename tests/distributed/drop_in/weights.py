"""Rows of docs/drop-in.md: what a loop does with the parameters' values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import zerolite
from tests.toolkit import models
from tests.toolkit.drop_in import ROUNDED, ROUNDING, Run, between, case

GATHER = ("'first.weight'", "zerolite.zero.GatheredParameters")
WRITE = ("'first.weight'", "zerolite.zero.GatheredParameters", "modifier_rank=0")
TWICE = ["fp32", "bf16"]


# ---------------------------------------------------------------- averages


def ema_update(average: nn.Module, module: nn.Module) -> None:
    for mine, other in zip(average.parameters(), module.parameters(), strict=True):
        mine.mul_(0.75).add_(other.detach(), alpha=0.25)


@case("an EMA: `copy.deepcopy(engine.module)`", words=GATHER, settings=["moving"])
@case("an EMA updated inside", gathered=True)
def ema(run: Run, gathered: bool = False) -> None:
    run.start()
    average = copy.deepcopy(run.module)
    for step in range(3):
        run.train(1, start=step)
        with torch.no_grad(), run.gathered(gathered):
            ema_update(average, run.module)
    run.see(list(average.parameters()))


@case("`torch.optim.swa_utils.AveragedModel`", ["mean", "ema"], words=GATHER, settings=["moving"])
@case("`AveragedModel.update_parameters`", ["mean", "ema"], gathered=True)
def averaged_model(run: Run, kind: str, gathered: bool = False) -> None:
    run.start()
    more = {"multi_avg_fn": get_ema_multi_avg_fn(0.75)} if kind == "ema" else {}
    average = AveragedModel(run.module, **more)
    for step in range(3):
        run.train(1, start=step)
        with run.gathered(gathered):
            average.update_parameters(run.module)
    run.see([p for name, p in average.module.named_parameters()])
    update_bn([run.batch(step)[0] for step in range(2)], average)
    with torch.no_grad():
        run.see(average(run.batch(0)[0]))


WRITTEN_BACK = ("first.weight", "load_full_state_dict")


@case("averaged weights written back with `module", TWICE, words=WRITTEN_BACK, settings=["moving"])
@case("averaged weights written back with `engine", TWICE, bf16=ROUNDED, whole=True)
def written_back(run: Run, precision: str, whole: bool = False) -> None:
    run.start(precision=precision)
    average = AveragedModel(run.module)
    run.train(1)
    halved = {name: value * 0.5 for name, value in average.module.state_dict().items()}
    (run.engine.load_full_state_dict if whole and not run.plain else run.module.load_state_dict)(halved)
    run.train(2, start=1)


# ---------------------------------------------------------------- reading


@case("reading parameters between steps:", ["norm", "penalty"], words=GATHER, settings=["moving"])
@case("reading parameters between steps inside", ["norm", "penalty"], gathered=True)
def read(run: Run, what: str, gathered: bool = False) -> None:
    run.start()
    for step in range(3):
        with run.gathered(gathered):
            if what == "norm":
                run.see([p.detach().norm() for p in run.module.parameters()])
                run.train(1, start=step)
            else:
                penalty = torch.stack([p.square().sum() for p in run.module.parameters()]).sum()
        if what == "penalty":  # the backward comes when the parameters are released again
            run.backward(run.loss(step) + 0.01 * penalty)
            run.step()


@case("counting parameters", words=("'first.weight'", "ds_numel"))
def counted(run: Run) -> None:
    run.start()
    run.train(1)
    run.see(sum(p.numel() for p in run.module.parameters()))


@case("`module.state_dict()`", words=("first.weight", "engine.full_state_dict()"), settings=["moving"])
def state_dict(run: Run) -> None:
    run.start()
    run.train(1)
    run.see(dict(run.module.state_dict()), dict((run.module if run.plain else run.engine).state_dict()))


@case("`engine.full_state_dict()`", TWICE, bf16=ROUNDED)
def full_state_dict(run: Run, precision: str) -> None:
    run.start(precision=precision)
    run.train(1)
    state = copy.deepcopy(run.module.state_dict()) if run.plain else run.engine.full_state_dict()
    run.see(dict(state))
    run.train(2, start=1)
    (run.module.load_state_dict if run.plain else run.engine.load_full_state_dict)(state)
    run.train(2, start=3)


@case("`zerolite.get_full_master`", TWICE, bf16=ROUNDED)
def full_masters(run: Run, precision: str) -> None:
    run.start(precision=precision)
    run.train(1)
    weight = run.module.first.weight
    if run.plain:
        master = run._masters.get("first.weight", weight)
        run.see(master)
        with torch.no_grad():
            master.mul_(0.5)
            weight.copy_(master)
    else:
        master = zerolite.get_full_master(weight)
        run.see(master)
        zerolite.set_full_master(weight, master * 0.5)
    run.train(2, start=1)


# ---------------------------------------------------------------- writing


def _augmented(module: Any) -> None:
    module.first.weight.data += 0.125


WAYS: dict[str, Callable[[Any], Any]] = {
    "mul_": torch.no_grad()(lambda module: module.first.weight.mul_(0.5)),
    "data": lambda module: module.first.weight.data.clamp_(-0.1, 0.1),
    "data, by an operator": _augmented,
    "copy_": torch.no_grad()(lambda module: module.first.weight.copy_(torch.linspace(-1, 1, 91).reshape(13, 7))),
    "item": torch.no_grad()(lambda module: module.first.weight.__setitem__(0, 0.25)),
    "init": lambda module: nn.init.constant_(module.first.weight, 0.1),
    "foreach": torch.no_grad()(lambda module: torch._foreach_mul_(list(module.parameters()), 0.5)),
    "apply": lambda module: module.apply(_reset),
}


def _reset(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.1)
        nn.init.zeros_(module.bias)


def _assign(module: Any, values: torch.Tensor) -> None:
    module.first.weight.data = values.to(module.first.weight.dtype)


def _assign_vector(module: Any) -> None:
    nn.utils.vector_to_parameters(torch.linspace(-1, 1, 146).to(module.first.weight.dtype), module.parameters())


ASSIGN: dict[str, Callable[[Any], Any]] = {
    "p.data =": lambda module: _assign(module, torch.linspace(-1, 1, 91).reshape(13, 7)),
    "p.data = of all": lambda module: [setattr(p, "data", p.data * 0.5) for p in module.parameters()],
    "vector": _assign_vector,
    "its own values": lambda module: _assign(module, module.first.weight.data.clone()),
}


IN_TURN = [(way, TWICE[number % 2]) for number, way in enumerate([*WAYS, *ASSIGN])]


@case("a parameter changed in place:", [(way, "fp32") for way in WAYS], words=WRITE, settings=["moving"])
@case(
    "a parameter changed in place,",
    [(way, "bf16") for way in WAYS],
    words=WRITE,
    bf16=ROUNDED,
    settings=["moving"],
    name="written_in_bf16",
)
@case("a parameter changed that", IN_TURN, bf16=ROUNDED, settings=["defaults"], name="written_whole")
@case("a parameter changed in place inside", IN_TURN[: len(WAYS)], bf16=ROUNDED, gathered=True)
def written(run: Run, variant: tuple[str, str], gathered: bool = False) -> None:
    way, precision = variant
    run.start(precision=precision)
    run.train(1)
    with run.gathered(gathered, modifier_rank=0):
        {**WAYS, **ASSIGN}[way](run.module)
    run.train(2, start=1)


@between("`p.data = tensor`", list(ASSIGN), words=("'first.weight'", "p.copy_(values)"), settings=["moving"])
def assigned(run: Run, way: str) -> None:
    ASSIGN[way](run.module)


@case("`torch.nn.utils.parameters_to_vector`", words=GATHER, settings=["moving"])
def to_vector(run: Run) -> None:
    run.start()
    run.train(2)
    run.see(nn.utils.parameters_to_vector(run.module.parameters()))


CASTS: dict[str, Callable[[Any], Any]] = {
    "half": lambda module: module.half(),
    "to dtype": lambda module: module.to(torch.bfloat16),
    "double": lambda module: module.double(),
    "a part": lambda module: module.first.double(),
}


@between(
    "`module.half()`, `.to(dtype)`",
    list(CASTS),
    words=("parameter '", "zerolite.initialize"),
    settings=["moving", "defaults"],
)
def cast(run: Run, way: str) -> None:
    if run.plain:
        return
    CASTS[way](run.module)


@between("`module.to(device)`")
def nothing_moved(run: Run) -> None:
    run.module.to("cpu").float().cpu().train().requires_grad_(True)


@case("`module.to(memory_format=…)`", words=WRITE, close=ROUNDING)
def other_memory_format(run: Run) -> None:
    run.start(models.ConvNet, batch=models.image_batch)
    run.train(1)
    run.module.to(memory_format=torch.channels_last)
    run.train(2, start=1)


REPLACE: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda module: setattr(module.first, "weight", nn.Parameter(torch.linspace(-1, 1, 91).reshape(13, 7))),
    "register": lambda module: module.first.register_parameter("bias", nn.Parameter(torch.ones(13))),
}


@between("a `Parameter` object", list(REPLACE), words=("parameter 'first.", "replaced", "zerolite.initialize"))
def replaced(run: Run, way: str) -> None:
    REPLACE[way](run.module)


@between("`module.load_state_dict(state, assign=True)`", words=("first.weight", "load_"), settings=["moving"])
def assigned_state(run: Run) -> None:
    run.module.load_state_dict(models.build(models.Mlp, seed=9).state_dict(), assign=True)
