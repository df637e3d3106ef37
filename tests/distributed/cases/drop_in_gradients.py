"""Cases of docs/drop-in.md: what a loop does with gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerolite
from tests.distributed.cases.drop_in import STEPS, Run, case

# A clip factor is a quotient of norms, which plain PyTorch adds up in fp32 and the engine in double.
CLIPPED = 2e-7
IN_P_GRAD = ("'first.weight'", "engine.clip_gradients(max_norm)", "zerolite.get_full_grad(p)")


def after_a_backward(run: Run, **start: Any) -> Any:
    """A parameter whose gradient is pending; in plain PyTorch the mean over ranks."""
    run.start(**start)
    run.train(1)
    run.backward(run.loss(1))
    run.average()
    return next(run.module.parameters())


# ---------------------------------------------------------------- clipping, scaling


@case(
    "`gradient_clipping` in the config; `engine.clip_gradients(max_norm)`, which returns the norm",
    ["config", "call"],
    close=CLIPPED,
)
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


@case("`engine.get_global_grad_norm()` on one rank alone, also inside an accumulation: the last step's", close=CLIPPED)
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


@case("`torch.nn.utils.clip_grad_norm_`, `clip_grad_value_`, `get_total_norm`", words=IN_P_GRAD)
def clipped_by_torch(run: Run) -> None:
    after_a_backward(run)
    module, own = run.module, run.module if run.plain else run.engine
    ways = {
        "norm": lambda: nn.utils.clip_grad_norm_(module.parameters(), 0.3),
        "norm, the engine's parameters": lambda: nn.utils.clip_grad_norm_(own.parameters(), 0.3),
        "norm, inf": lambda: nn.utils.clip_grad_norm_(list(module.parameters()), 0.3, norm_type=float("inf")),
        "norm, foreach": lambda: nn.utils.clip_grad_norm_(module.parameters(), 0.3, foreach=True),
        "one parameter": lambda: nn.utils.clip_grad_norm_(next(module.parameters()), 0.3),
        "value": lambda: nn.utils.clip_grad_value_(module.parameters(), 0.3),
        "value, foreach": lambda: nn.utils.clip_grad_value_(own.parameters(), 0.3, foreach=True),
        "total norm": lambda: nn.utils.get_total_norm([p.grad for p in module.parameters()]),
        "scaled": lambda: nn.utils.clip_grads_with_norm_(module.parameters(), 0.3, torch.ones(())),
    }
    run.refuses(ways, RuntimeError, *IN_P_GRAD)


SCALERS = ["step", "unscale_", "own fused"]


@case("`torch.amp.GradScaler`", SCALERS, words=["'first.weight'", "leave torch's GradScaler out"])
def grad_scaler(run: Run, how: str) -> None:
    run.start(own=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=how == "own fused"))
    optimizer = run.own if how == "own fused" else run.optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(STEPS):
        scaler.scale(run.loss(step)).backward()
        run.average()
        if how == "unscale_":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


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


@case("reading `p.grad`", words=IN_P_GRAD)
def grad_read(run: Run) -> None:
    parameter = after_a_backward(run)
    gradient: Any = parameter.grad
    ways: dict[str, Callable[[], Any]] = {
        "norm": lambda: gradient.norm(),
        "clone": lambda: gradient.clone(),
        "detach": lambda: gradient.detach(),
        "data": lambda: gradient.data,
        "item": lambda: gradient[0, 0].item(),
        "tolist": lambda: gradient.tolist(),
        "numpy": lambda: gradient.numpy(),
        "arithmetic": lambda: 2.0 * gradient + 1.0,
        "comparison": lambda: gradient == 0,
        "float": lambda: float(gradient.sum()),
        "bool": lambda: bool((gradient != 0).any()),
        "isfinite": lambda: torch.isfinite(gradient),
        "cat": lambda: torch.cat([p.grad.reshape(-1) for p in run.module.parameters()]),
        "foreach": lambda: torch._foreach_norm([p.grad for p in run.module.parameters()]),
        "to": lambda: gradient.to(torch.float64),
        "cpu": lambda: gradient.cpu(),
        "out": lambda: torch.mul(gradient, 1.0, out=torch.empty(13, 7)),
        "copy_": lambda: torch.empty(13, 7).copy_(gradient),
        "storage": lambda: gradient.untyped_storage(),
        "pointer": lambda: gradient.data_ptr(),
        "deepcopy": lambda: copy.deepcopy(gradient),
        "pickle": lambda: pickle.dumps(gradient),
        "iteration": lambda: list(gradient),
        "vector": lambda: nn.utils.parameters_to_vector([p.grad for p in run.module.parameters()]),
    }
    run.refuses(ways, RuntimeError, *IN_P_GRAD)


@case("changing `p.grad` in place; averaging it over ranks by hand", words=IN_P_GRAD)
def grad_changed(run: Run) -> None:
    parameter = after_a_backward(run)
    gradient: Any = parameter.grad

    def item() -> None:
        gradient[0] = 0.0

    def data() -> None:
        gradient.data *= 2.0

    def augmented() -> None:
        parameter.grad += 1.0

    ways = {
        "mul_": lambda: gradient.mul_(2.0),
        "add_": lambda: gradient.add_(torch.ones(13, 7)),
        "add_ a number": lambda: gradient.add_(1.0),
        "zero_": lambda: gradient.zero_(),
        "clamp_": lambda: gradient.clamp_(-1, 1),
        "copy_": lambda: gradient.copy_(torch.zeros(13, 7)),
        "item": item,
        "data": data,
        "augmented": augmented,
        "no_grad": torch.no_grad()(lambda: gradient.mul_(2.0)),
        "foreach": lambda: torch._foreach_mul_([gradient], 2.0),
        "all_reduce": lambda: dist.all_reduce(gradient),
    }
    run.refuses(ways, RuntimeError, *IN_P_GRAD)


@case(
    "a tensor of your own in `p.grad`",
    ["after a backward", "before a backward", "without a backward", "sum"],
    words=["'first.weight'", "zerolite.set_full_grad"],
)
def grad_assigned(run: Run, when: str) -> None:
    if when == "without a backward":
        run.start()
        run.train(1)
    if when in ("before a backward", "without a backward"):
        if when == "before a backward":
            run.start()
            run.train(1)
        parameter: Any = next(run.module.parameters())
        parameter.grad = torch.ones(parameter.shape)
        if when == "before a backward":
            run.backward(run.loss(1))
    else:
        parameter = after_a_backward(run)
        more = torch.ones(13, 7)
        parameter.grad = parameter.grad + more if when == "sum" else torch.ones(parameter.shape)
    run.torch_step()


@case("`zerolite.get_full_grad`, `zerolite.set_full_grad`")
def full_grads(run: Run) -> None:
    run.start()
    for step in range(STEPS):
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


@case("`p.grad is None` as a question; printing `p.grad`")
def grad_is_none(run: Run) -> None:
    run.start()
    for step in range(STEPS):
        run.see([p.grad is None for p in run.module.parameters()])
        run.backward(run.loss(step))
        run.see([p.grad is None for p in run.module.parameters()])
        assert all(str(p.grad) for p in run.module.parameters())
        run.torch_step()
        run.see([p.grad is None for p in run.module.parameters()])


DROPPED = ["module", "engine", "optimizer", "optimizer, zeros", "each", "before"]


@case("`zero_grad()` of module, engine or optimizer; `p.grad = None` for all parameters", DROPPED)
def all_dropped(run: Run, how: str) -> None:
    run.start()
    run.train(1)
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
    run.train(2, start=1)


@case("`p.grad = None` for some parameters", words=["'first.bias'", "zerolite.set_full_grad(p, None)"])
def some_dropped(run: Run) -> None:
    after_a_backward(run)
    run.module.first.bias.grad = None
    run.torch_step()


@case("`module.zero_grad(set_to_none=False)` with gradients pending", words=["'first.weight'", "engine.zero_grad()"])
def zeroed(run: Run) -> None:
    after_a_backward(run)
    run.module.zero_grad(set_to_none=False)
    run.train(1, start=2)
