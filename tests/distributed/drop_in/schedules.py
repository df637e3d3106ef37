"""Rows of docs/drop-in.md: schedulers, an optimizer's states and hooks."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import lr_scheduler as schedulers

import zerolite
from tests.distributed.drop_in.optimizers import KERNELS, two_group_sgd
from tests.toolkit import models
from tests.toolkit.compare import from_all_ranks
from tests.toolkit.drop_in import STEPS, Run, case
from zerolite.zero.optimizer import SHARDED_OVER

# ---------------------------------------------------------------- schedulers

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1.0 / (step + 1)),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=0.25, total_steps=6),
    "ReduceLROnPlateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, T_0=2),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.ConstantLR(optimizer, 0.5, 2), schedulers.ExponentialLR(optimizer, 0.9)], [2]
    ),
}
WHERE = ("own, before", "own", "engine's")
SOMEWHERE = [("OneCycleLR", "own"), *((name, WHERE[number % 3]) for number, name in enumerate(SCHEDULERS))]


@case("torch's schedulers", SOMEWHERE, close=KERNELS)
def torch_schedulers(run: Run, variant: tuple[str, str]) -> None:
    name, where = variant
    model = models.build(models.Mlp)
    own = two_group_sgd(model)
    early = SCHEDULERS[name](own) if where == "own, before" else None
    run.start(lambda: model, own=lambda model: own)
    scheduler = early or SCHEDULERS[name](run.own if where == "own" else run.optimizer)
    for step in range(5):
        run.train(1, start=step)
        if name == "ReduceLROnPlateau":
            scheduler.step(1.0)
        else:
            scheduler.step()
        run.see([(group["lr"], group["momentum"]) for group in run.optimizer.param_groups])


@case("a scheduler given as", ["instance", "function"], close=KERNELS)
def given_scheduler(run: Run, form: str) -> None:
    make = lambda optimizer: schedulers.StepLR(optimizer, 1, 0.5)  # noqa: E731
    if run.plain:
        run.start(own=two_group_sgd)
        scheduler = make(run.own)
    elif form == "function":
        run.start(own=two_group_sgd, lr_scheduler=make)
    else:
        model = models.build(models.Mlp)
        own = two_group_sgd(model)
        run.start(lambda: model, own=lambda model: own, lr_scheduler=make(own))
    for step in range(4):
        run.train(1, start=step)
        if run.plain:
            scheduler.step()
        run.see([group["lr"] for group in run.optimizer.param_groups])


@case("`lr_scheduler=ReduceLROnPlateau(…)`", words=["lr_scheduler", "step(metric)"], error=ValueError)
def given_plateau(run: Run) -> None:
    if run.plain:
        run.start()
        run.train()
    else:
        run.start(lr_scheduler=lambda optimizer: schedulers.ReduceLROnPlateau(optimizer))


# ---------------------------------------------------------------- states


@case("`optimizer.state_dict()`", ["engine's", "own"], close=KERNELS)
def optimizer_state_dict(run: Run, whose: str) -> None:
    run.start(own=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))
    optimizer = run.own if whose == "own" else run.optimizer
    run.train(2)
    saved = copy.deepcopy(optimizer.state_dict())
    run.train(2, start=2)
    optimizer.load_state_dict(saved)
    run.train(2, start=2)


@case(
    "rank 0's `optimizer.state_dict()`, loaded on all ranks",
    ["after", "before", "before, unmarked"],
    words=["rank", "engine.save_checkpoint"],
    error=ValueError,
    close=KERNELS,
)
def state_of_rank_0(run: Run, when: str) -> None:
    """Load the state of rank 0 in a new run, as loops with DistributedDataParallel do."""
    run.start(own=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))
    run.train(2)
    optimizer = run.optimizer if when == "after" else run.own
    weights = run.module.state_dict() if run.plain else run.engine.full_state_dict()
    files = [copy.deepcopy([weights, optimizer.state_dict()])]
    dist.broadcast_object_list(files)
    weights, saved = files[0]
    if when == "before, unmarked":  # the shapes alone tell
        for group in saved["param_groups"]:
            group.pop(SHARDED_OVER, None)

    def own(model: Any) -> Any:
        model.load_state_dict(weights)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        if when != "after":
            optimizer.load_state_dict(saved)
        return optimizer

    run.start(own=own)
    if when == "after":
        run.optimizer.load_state_dict(saved)
    run.train(2, start=2)


@case("`zerolite.get_full_optimizer_state`", close=KERNELS)
def full_states(run: Run) -> None:
    run.start(own=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))
    for step in range(STEPS):
        run.train(1, start=step)
        weight = run.module.second.weight
        if run.plain:
            run.see([run.optimizer.state[p]["exp_avg"] for p in run.module.parameters()])
            run.optimizer.state[weight]["exp_avg"].mul_(0.5)
        else:
            averages = zerolite.get_full_optimizer_state(run.module.parameters(), "exp_avg")
            run.see(averages)
            zerolite.set_full_optimizer_state(weight, "exp_avg", averages[2] * 0.5)


@case("reading `optimizer.state`", ["engine's", "own"], close=KERNELS)
def states_read(run: Run, whose: str) -> None:
    run.start(own=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))
    optimizer = run.own if whose == "own" else run.optimizer
    parameters = list(run.module.parameters())
    assert len(optimizer.state) == 0 and parameters[0] not in optimizer.state
    for step in range(STEPS):
        run.train(1, start=step)
        found = {id(p): state["exp_avg"].flatten() for p, state in optimizer.state.items()}
        assert all((p in optimizer.state) == (id(p) in found) == bool(optimizer.state.get(p)) for p in parameters)
        shards = [found.get(id(p), torch.zeros(0)) for p in parameters]
        if run.stage:
            assert all(type(shard) is torch.Tensor for shard in shards)
            shards = [torch.cat(of_ranks) for of_ranks in zip(*from_all_ranks(shards), strict=True)]
        run.see(shards)
        counts = {float(copy.deepcopy(state)["step"]) for state in optimizer.state.values()}
        run.see(sorted(counts) or [step + 1.0])


def halve(optimizer: Any, parameter: Any, in_place: bool) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].mul_(0.5) if in_place else state["exp_avg"] * 0.5


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "in place": lambda optimizer, p: halve(optimizer, p, in_place=True),
    "another tensor": lambda optimizer, p: halve(optimizer, p, in_place=False),
    "without an entry": lambda optimizer, p: optimizer.state.pop(p, None),
    "emptied": lambda optimizer, p: optimizer.state.clear(),
    "another dict": lambda optimizer, p: setattr(optimizer, "state", defaultdict(dict)),
}
MOMENTA: dict[str, Callable[[Any, Any], Any]] = {  # of torch's SGD, which begins anew without one
    "no momentum": lambda optimizer, p: optimizer.state[p].pop("momentum_buffer", None),
    "None as momentum": lambda optimizer, p: optimizer.state[p].update(momentum_buffer=None),
}


@case(
    "changing `optimizer.state`",
    [(whose, way) for whose in ("engine's", "own") for way in (*CHANGES, *MOMENTA)],
    close=KERNELS,
)
def states_changed(run: Run, variant: tuple[str, str]) -> None:
    whose, way = variant
    sgd = functools.partial(torch.optim.SGD, lr=0.0625, momentum=0.5, foreach=True)
    make: Any = sgd if way in MOMENTA else functools.partial(torch.optim.AdamW, lr=0.01)
    run.start(own=lambda model: make(model.parameters()))
    run.train(2)
    (CHANGES | MOMENTA)[way](run.own if whose == "own" else run.optimizer, run.module.second.weight)
    run.train(2, start=2)
    counts = from_all_ranks({float(state.get("step", 0)) for state in run.own.state.values()})
    run.see(sorted(set().union(*counts)))


@case("`register_step_pre_hook`", [(w, loop) for w in ("own", "engine's") for loop in ("engine", "torch")])
def step_hooks(run: Run, variant: tuple[str, str]) -> None:
    whose, loop = variant
    run.start(own=lambda model: torch.optim.SGD(model.parameters(), lr=0.0625))
    optimizer = run.own if whose == "own" else run.optimizer
    calls: list[str] = []

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        calls.append("before")
        optimizer.param_groups[0]["lr"] *= 0.5

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: calls.append("after"))
    for step in range(STEPS):
        run.backward(run.loss(step))
        if loop == "engine":
            run.step()
        else:
            run.average()
            optimizer.step()
            optimizer.zero_grad()
    run.see(calls)
