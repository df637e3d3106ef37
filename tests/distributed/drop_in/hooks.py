"""Rows of docs/drop-in.md: hooks, ``autograd.grad`` and double backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.toolkit import models
from tests.toolkit.drop_in import ROUNDED, STEPS, Run, case, each_step

# ---------------------------------------------------------------- hooks


def hook_gradients(run: Run, module: nn.Module, seen: list[Any]) -> None:
    def clamp(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return gradient.clamp(-0.05, 0.05)

    module.first.weight.register_hook(clamp)  # type: ignore[union-attr, operator]
    module.second.bias.register_hook(lambda gradient: seen.append(gradient.clone()))  # type: ignore[union-attr, operator]


@case("`p.register_hook`", ["before", "after"])
def parameter_hooks(run: Run, when: str) -> None:
    seen: list[Any] = []

    def build() -> nn.Module:
        model = models.Mlp()
        if when == "before":
            hook_gradients(run, model, seen)
        return model

    run.start(build)
    if when == "after":
        hook_gradients(run, run.module, seen)
    run.train()
    run.see(seen)


@case("forward and backward", ["before", "after"])
def module_hooks(run: Run, when: str) -> None:
    seen: list[Any] = []

    def install(model: Any) -> None:
        model.first.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        model.first.register_forward_hook(lambda module, args, output: output + 0.25)
        model.second.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 0.5,))
        model.second.register_full_backward_hook(lambda module, of_inputs, of_outputs: (of_inputs[0] * 2.0,))
        model.register_full_backward_hook(lambda module, of_inputs, of_outputs: seen.append(of_outputs[0].clone()))

    def build() -> nn.Module:
        model = models.Mlp()
        if when == "before":
            install(model)
        return model

    run.start(build)
    if when == "after":
        install(run.module)
    run.train()
    run.see(seen)


def halve(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


def clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.05, 0.05)


HOOKS = [("before", "halve"), ("before", "replace"), ("after", "clamp"), ("after", "read"), ("both", "replace")]


@case("`register_post_accumulate_grad_hook` before or after", HOOKS)
def accumulate_hook(run: Run, variant: tuple[str, str]) -> None:
    when, what = variant
    seen: list[Tensor] = []

    def read(parameter: Any) -> None:
        seen.append(parameter.grad.clone())

    def replace(parameter: Any) -> None:
        parameter.grad = parameter.grad * 0.75

    hook = {"halve": halve, "clamp": clamp, "read": read, "replace": replace}[what]

    def build() -> nn.Module:
        model = models.Mlp()
        if when != "after":
            model.first.weight.register_post_accumulate_grad_hook(hook)
            model.second.weight.register_post_accumulate_grad_hook(read).remove()
        return model

    run.start(build)
    if when != "before":
        run.module.first.weight.register_post_accumulate_grad_hook(halve)
        run.module.second.bias.register_post_accumulate_grad_hook(hook)
    for step in range(STEPS):
        run.backward(run.loss(step))
        run.step()
    run.see(seen)


# ---------------------------------------------------------------- autograd.grad, double backward


@each_step("`torch.autograd.grad`", ["inputs", "parameters"])
def autograd_grad(run: Run, step: int, of: str) -> None:
    x, y = run.batch(step)
    x.requires_grad_()
    loss = F.mse_loss(run(x), y)
    targets = [x] if of == "inputs" else list(run.module.parameters())
    run.see(torch.autograd.grad(loss, targets, retain_graph=True))
    run.see([p.grad is None for p in run.module.parameters()])
    run.backward(loss)
    run.step()


@each_step("`loss.backward(inputs=parameters)`")
def backward_of_some(run: Run, step: int) -> None:
    parameters = list(run.module.parameters())
    run.loss(step).backward(inputs=parameters[:3])
    run.torch_step()


PENALTY = "a gradient penalty (`autograd.grad(create_graph=True)` of outputs by inputs) in "
EVERY_SETTING = ["moving", "defaults", "kept", "tight"]


@case(PENALTY + "fp32", [("fp32", 1), ("fp32", 2), ("bf16", 1)], settings=EVERY_SETTING, reordered=True, bf16=ROUNDED)
@case(PENALTY + "fp16", [("fp16", 1)], words=["fp16", "create_graph=True", "bf16 or fp32"], name="penalty_in_fp16")
def penalty(run: Run, variant: tuple[str, int]) -> None:
    """WGAN-GP's: the norm of the outputs' gradient at the inputs is to be 1."""
    precision, micros = variant
    run.start(precision=precision, accumulation=micros)
    for step in range(STEPS * micros):
        x, y = run.batch(step)
        x.requires_grad_()
        output = run(x)
        (of_input,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        penalty = (of_input.flatten(1).norm(dim=1) - 1.0).square().mean()
        run.see(penalty)
        run.backward(F.mse_loss(output, y) + 0.5 * penalty)
        run.step()


@each_step("a penalty on the gradient")
def penalty_by_parameters(run: Run, step: int) -> None:
    loss = run.loss(step)
    gradients = torch.autograd.grad(loss, list(run.module.parameters()), create_graph=True)
    run.backward(loss + 0.1 * sum(g.square().sum() for g in gradients))
    run.step()


@each_step("`loss.backward(create_graph=True)`")
def graph_created(run: Run, step: int) -> None:
    run.loss(step).backward(create_graph=True)
    run.torch_step()
