"""Rows of docs/drop-in.md: the shape of a loop."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.toolkit import models
from tests.toolkit.drop_in import ROUNDED, ROUNDING, STEPS, Run, case, each_step


@case("`engine.backward(loss)`")
def the_engines_loop(run: Run) -> None:
    run.start()
    run.train()


@each_step("`loss.backward()`")
def torchs_loop(run: Run, step: int) -> None:
    run.loss(step).backward()
    run.torch_step()


@case("`step()` and `zero_grad()`", ["step first", "zero_grad first"])
def own_optimizers_loop(run: Run, order: str) -> None:
    run.start(own=lambda model: torch.optim.SGD(model.parameters(), lr=0.0625))
    for step in range(STEPS):
        if order == "zero_grad first":
            run.own.zero_grad()
        run.loss(step).backward()
        run.average()
        run.own.step()
        if order == "step first":
            run.own.zero_grad()


@case("forward through `engine.module`", ["fp32", "bf16"])
def module_called(run: Run, precision: str) -> None:
    run.start(precision=precision)
    for step in range(STEPS):
        x, y = run.batch(step)
        output = run.module(x.to(torch.bfloat16) if precision == "bf16" else x)
        F.mse_loss(output.float(), y).backward()
        run.torch_step()


@each_step("a part of the model")
def part_called(run: Run, step: int) -> None:
    loss = run.loss(step) + run.module.second(torch.ones(2, 13)).square().mean()
    run.backward(loss)
    run.step()


@each_step("several losses, a backward", ["engine", "loss"], reordered=True)
def several_backwards(run: Run, step: int, loop: str) -> None:
    for loss in [run.loss(step, 0), run.loss(step, 1) * 0.5]:
        if loop == "engine":
            run.backward(loss)
        else:
            loss.backward()
    run.step()


@each_step("`retain_graph=True`", ["engine", "loss"], reordered=True)
def retained(run: Run, step: int, loop: str) -> None:
    x, y = run.batch(step)
    output = run(x)
    losses = [F.mse_loss(output, y), output.abs().mean()]
    for number, loss in enumerate(losses):
        backward = run.backward if loop == "engine" else torch.Tensor.backward
        backward(loss, retain_graph=number == 0)
    run.step()


@each_step("one loss of several")
def several_forwards(run: Run, step: int) -> None:
    run.backward(run.loss(step, 0) + run.loss(step, 1))
    run.step()


@case("gradient accumulation", ["config", "by hand"], reordered=True)
def accumulated(run: Run, how: str) -> None:
    run.start(accumulation=2 if how == "config" else 1)
    for step in range(STEPS):
        for micro in range(2):
            if how == "config":
                run.backward(run.loss(step, micro))
                run.step()
            else:
                (run.loss(step, micro) / 2).backward()
        if how == "by hand":
            run.torch_step()


@each_step("`with engine.no_sync():`", reordered=True)
def not_synchronized(run: Run, step: int) -> None:
    with contextlib.nullcontext() if run.plain else run.engine.no_sync():
        (run.loss(step, 0) / 2).backward()
    (run.loss(step, 1) / 2).backward()
    run.torch_step()


@case("`optimizer.step(closure)`", ["engine's", "own"])
def closure(run: Run, whose: str) -> None:
    run.start(own=lambda model: torch.optim.SGD(model.parameters(), lr=0.0625))
    optimizer = run.own if whose == "own" else run.optimizer
    for step in range(STEPS):

        def evaluate(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = run.loss(step)
            loss.backward()
            run.average()
            return loss

        with torch.no_grad():  # torch's step enables gradients for the closure
            run.see(optimizer.step(evaluate))


DTYPES = [torch.float64, torch.bfloat16, torch.float16]


@each_step("a loss in another dtype", DTYPES)
def loss_of_another_dtype(run: Run, step: int, dtype: torch.dtype) -> None:
    run.backward(run.loss(step).to(dtype))
    run.step()
    run.loss(step, 1).to(dtype).backward()
    run.step()


class Judge(models.Mlp):
    """Returns a loss and what it is computed from."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        outputs = super().forward(x)
        return F.mse_loss(outputs, y), outputs


FURTHER = "a further loss, computed from the other outputs of a model that returns one, in "


@case(FURTHER + "fp32", ["fp32", "bf16"], bf16=ROUNDED)
@case(FURTHER + "fp16", words=["fp16", "loss scale", '"output_dtype": "fp32"'], precision="fp16")
def further_loss(run: Run, precision: str) -> None:
    run.start(Judge, precision=precision)
    for step in range(STEPS):
        loss, outputs = run(*run.batch(step))
        run.see(outputs.dtype is (torch.bfloat16 if run.precision == "bf16" else torch.float32))
        run.backward(loss + 0.25 * outputs.square().mean())
        run.step()


@each_step("`output.backward(gradient)`")
def vector_backward(run: Run, step: int) -> None:
    x, y = run.batch(step)
    output = run(x)
    output.backward((output - y).detach() / 4)
    run.step()


@case("`engine.backward` of a tensor", words=["engine.backward", "loss with one element", ".mean()"], error=ValueError)
def no_scalar(run: Run) -> None:
    run.start()
    run.train()
    ways = {"vector": lambda: run.backward(run(run.batch(0)[0])), "number": lambda: run.backward(1.0)}  # type: ignore[arg-type]
    if not run.plain:
        run.refuses(ways, ValueError, "engine.backward", "loss with one element")


@case("`engine.backward` of a loss", words=["needs no gradient", "no_grad"], error=ValueError)
def no_gradient(run: Run) -> None:
    run.start()
    run.train()
    with torch.no_grad():
        loss = run.loss(0)
    if not run.plain:
        run.backward(loss)


@each_step("forward, loss and backward", ["all", "forward"])
def autocast(run: Run, step: int, where: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = run.loss(step)
        if where == "all":
            run.backward(loss)
    if where == "forward":
        run.backward(loss)
    run.step()


@case("`torch.autograd.set_detect_anomaly(True)`")
def anomalies(run: Run) -> None:
    run.start()
    with torch.autograd.set_detect_anomaly(True):
        run.train()


@each_step("evaluation between", ["no_grad", "inference_mode"])
def evaluation(run: Run, step: int, mode: str) -> None:
    run.module.eval()
    with getattr(torch, mode)():
        run.see(run(run.batch(step, 5)[0]), run.module(run.batch(step, 6)[0]))
    run.module.train()
    run.backward(run.loss(step))
    with getattr(torch, mode)():
        run.see(run.loss(step, 7))
    run.step()


class Boom(Exception):
    pass


@case("a batch dropped after", ["forward", "backward", "loop"])
def dropped_batch(run: Run, where: str) -> None:
    run.start()
    run.train(1)

    def fail(gradient: torch.Tensor) -> Any:
        raise Boom

    with contextlib.suppress(Boom, RuntimeError):
        if where == "forward":
            run(torch.ones(4, 5))  # the first layer takes 7 features
        output = run(run.batch(1)[0])
        if where == "backward":
            output.register_hook(fail)
        run.backward(output.sum())
        if where == "loop":
            raise Boom
    run.optimizer.zero_grad()
    run.train(2, start=2)


@case("a dry run: forward")
def dry_run(run: Run) -> None:
    run.start()
    run.backward(run.loss(9))
    run.optimizer.zero_grad()
    run.train()


@each_step("batches with different", close=ROUNDING)
def weighted(run: Run, step: int) -> None:
    x, y = run.batch(step)
    count = 1 + (step + run.rank) % 4
    loss = F.mse_loss(run(x[:count]), y[:count])
    if run.plain:  # the gradient of the joint batch, of which the mean over ranks is taken
        total = torch.tensor(float(count))
        dist.all_reduce(total)
        run.backward(loss * (count * run.world / total))
    else:
        run.engine.backward(loss, weight=count)
    run.step()


@case("ranks with different", close=ROUNDING)
def joined(run: Run) -> None:
    run.start()
    own = STEPS + run.rank
    for step in range(STEPS + run.world - 1):
        loss = run.loss(min(step, own - 1))  # a rank that has no batch left repeats its last one
        if run.plain:
            run.backward(loss * (step < own) * run.world / sum(step < STEPS + rank for rank in range(run.world)))
        else:
            run.engine.backward(loss, weight=float(step < own))
        run.step()
