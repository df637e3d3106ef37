"""Rows of docs/drop-in.md: what a loop does with gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerolite
from tests.toolkit.drop_in import STEPS, Run, between, case, each_step

# A clip factor is a quotient of norms, which plain PyTorch adds up in fp32 and the engine in double.
CLIPPED = 2e-7


def after_a_backward(run: Run, **start: Any) -> Any:
    """A parameter whose gradient is pending; in plain PyTorch the mean over ranks."""
    run.start(**start)
    run.train(1)
    run.backward(run.loss(1))
    run.average()
    return next(run.module.parameters())


# ---------------------------------------------------------------- clipping, scaling


@case("`gradient_clipping`", ["config", "call"], close=CLIPPED)
def clipped(run: Run, how: str) -> None:
    run.start(clip=0.3 if how == "config" else 0.0)
    for step in range(STEPS):
        run.backward(run.loss(step))
        run.average()
        norm = 0.0
        if run.plain:
            norm = float(nn.utils.clip_grad_norm_(run.module.parameters(), 0.3))
        elif how == "call":
            norm = run.engine.clip_gradients(0.3)
        run.torch_step()
        run.see(norm if run.plain or how == "call" else run.engine.get_global_grad_norm())


@case("`engine.get_global_grad_norm()`", close=CLIPPED)
def norm_on_one_rank(run: Run) -> None:
    run.start(accumulation=2)
    last = None
    for step in range(STEPS):
        for micro in range(2):
            run.backward(run.loss(step, micro))
            if run.rank == 0:
                run.see(last if run.plain else run.engine.get_global_grad_norm())
            if run.plain and micro == 1:
                run.average()
                last = float(nn.utils.get_total_norm([p.grad for p in run.module.parameters()]))
            run.step()


NORMS: dict[str, Callable[[Any, Any], Any]] = {
    "all": lambda module, own: nn.utils.clip_grad_norm_(module.parameters(), 0.3),
    "the engine's": lambda module, own: nn.utils.clip_grad_norm_(own.parameters(), 0.3, error_if_nonfinite=True),
    "largest": lambda module, own: nn.utils.clip_grad_norm_(list(module.parameters()), 0.03, norm_type=float("inf")),
    "foreach": lambda module, own: nn.utils.clip_grad_norm_(module.parameters(), 0.3, foreach=True),
    "sum": lambda module, own: nn.utils.clip_grad_norm_(module.parameters(), 0.3, norm_type=1.0) * 0,
    "one parameter": lambda module, own: nn.utils.clip_grad_norm_(next(module.parameters()), 0.3),
    "in two halves": lambda module, own: [
        nn.utils.clip_grad_norm_(half, 0.2) for half in (list(module.parameters())[:2], list(module.parameters())[2:])
    ],
    "by hand": lambda module, own: clip_by_hand([p.grad for p in module.parameters()]),
    "of each": lambda module, own: [p.grad.data.norm(2) for p in module.parameters()],
}


def clip_by_hand(gradients: list[Any]) -> Any:
    total = nn.utils.get_total_norm(gradients)
    nn.utils.clip_grads_with_norm_([nn.Parameter(torch.zeros(()))], 0.3, total)  # no gradients: nothing
    torch._foreach_mul_(gradients, (0.3 / (total + 1e-6)).clamp(max=1.0))
    return total


@each_step("`torch.nn.utils.clip_grad_norm_`", list(NORMS), close=CLIPPED)
def clipped_by_torch(run: Run, step: int, how: str) -> None:
    run.backward(run.loss(step))
    run.average()
    run.see(NORMS[how](run.module, run.module if run.plain else run.engine))
    run.torch_step()


@each_step("`torch.nn.utils.clip_grad_value_`", [None, True, False])
def clipped_by_value(run: Run, step: int, foreach: bool | None) -> None:
    run.backward(run.loss(step))
    run.average()
    nn.utils.clip_grad_value_(run.module.parameters(), 0.03, foreach=foreach)
    run.torch_step()


SCALERS = ["step", "unscale_ and clip", "not finite", "own", "own fused"]


@case("`torch.amp.GradScaler` around", SCALERS, close=CLIPPED)
def grad_scaler(run: Run, how: str) -> None:
    fused = how == "own fused"
    run.start(own=(lambda model: torch.optim.SGD(model.parameters(), lr=0.0625, fused=fused)) if "own" in how else None)
    optimizer = run.own or run.optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for step in range(STEPS):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = run.loss(step)
        if how == "not finite" and step == 1 and run.rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        run.average()
        if how == "unscale_ and clip":
            scaler.unscale_(optimizer)
            run.see(nn.utils.clip_grad_norm_(run.module.parameters(), 0.3))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.see(scaler.get_scale())


@case("`torch.amp.GradScaler` with", ["step", "own fused"], words=["FP16"], error=(RuntimeError, ValueError))
def second_grad_scaler(run: Run, how: str) -> None:
    own = (lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)) if how == "own fused" else None
    run.start(own=own, precision="fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(run.loss(0)).backward()
    scaler.step(run.own or run.optimizer)


@case("`GradScaler(enabled=False)`")
def disabled_scaler(run: Run) -> None:
    run.start()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(STEPS):
        scaler.scale(run.loss(step)).backward()
        scaler.unscale_(run.optimizer)
        run.average()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()


# ---------------------------------------------------------------- p.grad


READ: dict[str, Callable[[Any], Any]] = {
    "clone": lambda g: g.clone(),
    "data": lambda g: g.data,
    "rows": lambda g: [row.clone() for row in g],
    "slice": lambda g: g[1:, ::2].clone(),
    "numpy": lambda g: torch.from_numpy(g.numpy().copy()),
    "arithmetic": lambda g: 2.0 * g + 1.0,
    "with others": lambda g: g * torch.ones(13, 7) - torch.ones(7),
    "broadcast": lambda g: g * torch.ones(2, 13, 7),
    "matrix": lambda g: g @ g.t(),
    "largest": lambda g: [g.max(), g.min(), g.abs().max(), g.amax(0)],
    "bool": lambda g: [bool((g != 0).any()), bool(g.isfinite().all()), bool(torch.isnan(g).any())],
    "reshape": lambda g: [g.view(-1).clone(), g.flatten()[3:5].clone(), g.t().contiguous()],
    "to": lambda g: [g.to(torch.float64), g.cpu(), g.half()],
    "out": lambda g: torch.mul(g, 1.0, out=torch.empty(13, 7)),
    "deepcopy": lambda g: copy.deepcopy(g),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "where": lambda g: torch.where(g > 0, g, torch.zeros_like(g)),
    "sort": lambda g: list(torch.sort(g.flatten())),
}


@case("reading `p.grad`", list(READ))
def grad_read(run: Run, how: str) -> None:
    gradient = after_a_backward(run).grad
    run.see(READ[how](gradient))
    run.see(torch.cat([p.grad.reshape(-1) for p in run.module.parameters()]))
    run.torch_step()


@case("`p.grad` between the", ["read", "clipped", "scaled"], reordered=True, close=CLIPPED)
def grad_read_midway(run: Run, how: str) -> None:
    run.start(accumulation=2)
    for step in range(2 * STEPS):
        run.backward(run.loss(step))
        run.average()
        if how == "clipped":
            run.see(nn.utils.clip_grad_norm_(run.module.parameters(), 0.1))
        elif how == "scaled":
            run.module.first.weight.grad.mul_(0.75)
        run.see([p.grad for p in run.module.parameters()])
        run.step()


@case("the memory of `p.grad`", ["torch", "dlpack"], words=["'first.weight'", "zerolite.get_full_grad(p)"])
def grad_memory(run: Run, how: str) -> None:
    gradient = after_a_backward(run).grad
    if how == "dlpack":
        torch.utils.dlpack.from_dlpack(gradient).mul_(2.0)
    else:
        assert gradient.data_ptr() == gradient.data_ptr()
        assert gradient.untyped_storage().nbytes() >= gradient.numel() * 4
    run.torch_step()


@case("writing to a view of", words=["zerolite.set_full_grad(p, value)"])
def grad_view_written(run: Run) -> None:
    gradient = after_a_backward(run).grad
    gradient[0].mul_(2.0)
    gradient.view(-1)[40:50] = 0.0
    run.torch_step()


def _each(change: Callable[[Any], Any]) -> Callable[[Run], None]:
    def of_all(run: Run) -> None:
        for parameter in run.module.parameters():
            change(parameter.grad)

    return of_all


def _times_data(g: Any) -> None:
    g.data *= 2.0


def _average_by_hand(run: Run) -> None:
    for parameter in run.module.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= run.world


def _augmented(run: Run) -> None:
    run.module.first.weight.grad += 1.0
    run.module.first.bias.grad *= run.module.first.bias.grad


def _from_others(run: Run) -> None:
    first, second = run.module.first.bias, run.module.second.bias
    first.grad.copy_(torch.full(first.grad.shape, 0.125))
    second.grad.add_(first.grad.abs().max())


def _noise(run: Run) -> None:
    torch.manual_seed(3)  # the same on all ranks, as DDP's parameters want
    for parameter in run.module.parameters():
        parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.1)


CHANGED: dict[str, Callable[[Run], None]] = {
    "mul_": _each(lambda g: g.mul_(2.0)),
    "mul_ by a tensor": _each(lambda g: g.mul_(torch.full(g.shape, 0.7))),
    "div_": _each(lambda g: g.div_(3.0).div_(2.0)),
    "add_": _each(lambda g: g.add_(torch.linspace(0, 1, g.numel()).reshape(g.shape), alpha=0.5)),
    "clamp_": _each(lambda g: g.clamp_(-0.01, 0.01)),
    "sign_": _each(lambda g: g.sign_()),
    "mask": _each(lambda g: g.masked_fill_(g < 0, 0.0)),
    "noise": _noise,
    "decay": lambda run: [p.grad.add_(p.detach(), alpha=0.1) for p in run.module.parameters()],
    "item": _each(lambda g: g.__setitem__(0, 0.5)),
    "data": _each(_times_data),
    "sort": _each(lambda g: g.copy_(g.flatten().sort().values.view(g.shape))),
    "cumulated": _each(lambda g: g.cumsum_(0)),
    "foreach": lambda run: torch._foreach_mul_([p.grad for p in run.module.parameters()], 0.5),
    "foreach list": lambda run: torch._foreach_add_(
        [p.grad for p in run.module.parameters()], [torch.ones(p.grad.shape) for p in run.module.parameters()]
    ),
    "augmented": _augmented,
    "from others": _from_others,
    "averaged by hand": _average_by_hand,
}


@case("changing `p.grad` in", list(CHANGED), close=1e-07)
def grad_changed(run: Run, how: str) -> None:
    run.start(zero={"stage3_param_persistence_threshold": 1000} if how == "decay" and run.stage == 3 else None)
    for step in range(2):
        run.backward(run.loss(step))
        run.average()
        if step:
            CHANGED[how](run)
        run.see([p.grad for p in run.module.parameters()])
        run.torch_step()


OWN = "a tensor of your own in `p.grad`"


@case(OWN + " before", ["before a backward"], words=["'first.weight'", "after the last backward"], name="early_tensor")
@case(OWN + ", after", ["after a backward", "without a backward", "sum", "clipped", "own"], close=CLIPPED)
def grad_assigned(run: Run, when: str) -> None:
    run.start()
    run.train(1)
    parameter: Any = run.module.first.weight
    if when in ("after a backward", "sum", "own", "clipped"):
        run.backward(run.loss(1))
        run.average()
    if when == "sum":
        parameter.grad = parameter.grad + torch.ones(13, 7)
    elif when == "own":
        parameter.grad = parameter.grad.clone().clamp_(-0.01, 0.01)
        run.module.first.bias.grad = run.module.second.weight.grad[:, 0].clone().new_ones(13) * 0.5
    else:
        parameter.grad = torch.linspace(-1, 1, 91).view(13, 7)
    if when == "before a backward":
        run.backward(run.loss(1))
    run.average()
    if when == "clipped":  # by factors and norms of what is there now
        run.see(nn.utils.clip_grad_norm_(run.module.parameters(), 0.3))
    run.see(parameter.grad)
    run.torch_step()
    run.train(1, start=2)


@each_step("`zerolite.get_full_grad`")
def full_grads(run: Run, step: int) -> None:
    run.backward(run.loss(step))
    run.average()
    weight, bias = run.module.first.weight, run.module.first.bias
    if run.plain:
        run.see([p.grad for p in run.module.parameters()])
        weight.grad *= 2.0
        bias.grad = None
    else:
        gradients = zerolite.get_full_grad(run.module.parameters())
        run.see(gradients)
        zerolite.set_full_grad([weight, bias], [gradients[0] * 2.0, None])
    run.torch_step()


@each_step("`p.grad is None` as")
def grad_is_none(run: Run, step: int) -> None:
    run.see([p.grad is None for p in run.module.parameters()])
    run.backward(run.loss(step))
    run.see([p.grad is None for p in run.module.parameters()])
    assert all(str(p.grad) for p in run.module.parameters())
    run.torch_step()
    run.see([p.grad is None for p in run.module.parameters()])


DROPPED = ["module", "engine", "optimizer", "optimizer, zeros", "each", "before"]


@between("`zero_grad()` of module", DROPPED)
def all_dropped(run: Run, how: str) -> None:
    if how != "before":
        run.backward(run.loss(7) * 1e3)
    if how == "each":
        for parameter in run.module.parameters():
            parameter.grad = None
    elif how == "optimizer, zeros":
        run.optimizer.zero_grad(set_to_none=False)
    elif how == "optimizer":
        run.optimizer.zero_grad()
    else:
        (run.engine if how == "engine" and not run.plain else run.module).zero_grad()


@case("`p.grad = None` for", ["before", "after clipping", "midway"], close=CLIPPED)
def some_dropped(run: Run, when: str) -> None:
    run.start(accumulation=2 if when == "midway" else 1)
    for step in range(2):
        run.backward(run.loss(step))
        if when == "midway":
            run.module.first.bias.grad = None
            run.step()
            run.backward(run.loss(step, 1))
        run.average()
        if when == "after clipping":
            run.see(nn.utils.clip_grad_norm_(run.module.parameters(), 0.3))
        if when != "midway":
            run.module.first.bias.grad = None
        run.see([p.grad is None for p in run.module.parameters()])
        run.step()


@case("`module.zero_grad(set_to_none=False)`")
def zeroed(run: Run) -> None:
    after_a_backward(run)
    run.module.zero_grad(set_to_none=False)
    run.see([p.grad for p in run.module.parameters()])
    run.train(1, start=2)


OWN_UPDATES: dict[str, Callable[[Any], None]] = {
    "data": lambda module: [p.data.add_(p.grad, alpha=-0.0625) for p in module.parameters()],  # type: ignore[misc]
    "an optimizer": lambda module: torch.optim.SGD(module.parameters(), lr=0.0625).step(),
    "foreach": lambda module: torch._foreach_sub_(
        [p.data for p in module.parameters()], [p.grad * 0.0625 for p in module.parameters()]
    ),
}


@case("an update of your own", list(OWN_UPDATES), words=["'first.weight'", "GatheredParameters"], settings=["moving"])
@case("the same inside `GatheredParameters(…, modifier_rank=0)`", list(OWN_UPDATES), gathered=True)
def own_updates(run: Run, how: str, gathered: bool = False) -> None:
    run.start()
    for step in range(STEPS):
        run.backward(run.loss(step))
        run.average()
        with run.gathered(gathered, modifier_rank=0):
            OWN_UPDATES[how](run.module)
        run.module.zero_grad()
    run.train(1, start=STEPS)
