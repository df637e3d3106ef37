"""Loops that use ``p.grad`` in unusual places, over an engine and in plain PyTorch: the same bits at every stage."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerolite
from tests.toolkit import models
from tests.toolkit.drop_in import STAGES, Case, Run, _outcome
from tests.toolkit.ranks import on_ranks

CLIPPED = 2e-7  # a clip factor is a quotient of norms, which plain PyTorch adds up in fp32 and the engine in double
LOOPS: dict[str, tuple[Case, tuple[int, ...]]] = {}


def loop(
    variants: Sequence[Any] = (), stages: Sequence[int] = STAGES, **more: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a loop. more: ``close`` and ``reordered`` of :class:`Case`."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        LOOPS[function.__name__] = Case(function, variants, settings=("moving",), error=(), **more), tuple(stages)
        return function

    return register


def own_gradient(run: Run, name: str = "first.weight") -> torch.Tensor:
    shape = run.initial[name].shape
    return torch.linspace(-1, 1, shape.numel()).view(shape)


def save(run: Run, how: str) -> None:
    """A call that stands between two steps of the loop, and leaves the gradients as they are."""
    if run.plain:
        return
    if how == "offload_states":
        run.engine.offload_states()
        run.engine.reload_states()
        return
    run.engine.save_checkpoint(run.directory)  # type: ignore[attr-defined]


@loop([("without", "save"), ("after", "offload_states")])
def assigned_before_a_checkpoint(run: Run, variant: tuple[str, str]) -> None:
    when, how = variant
    run.start()
    run.train(1)
    weight, bias = run.module.first.weight, run.module.first.bias
    if when == "after":
        run.backward(run.loss(5))
        run.average()
    weight.grad = own_gradient(run)
    bias.grad = None
    save(run, how)
    run.average()
    run.see(weight.grad, bias.grad is None)
    run.step()
    run.train(1, start=7)


IN_INFERENCE_MODE: list[Callable[[Any], Any]] = [
    lambda g: [g.detach(), g.data, g.view(-1).clone(), g[0].clone(), g.t() + 1.0, torch.ops.aten.alias(g)],
    lambda g: [g.norm().double(), g.clone(), g * 2, g.to(torch.float64), g.cpu(), *g.chunk(2)],
    lambda g: [g.mul_(0.5), g.add_(1.0), g.__setitem__(0, 1.0), g.abs().max()],
    lambda g: [g.add_(torch.ones(13, 7, requires_grad=True))],
]


@loop(range(len(IN_INFERENCE_MODE)), close=CLIPPED)
def used_in_inference_mode(run: Run, number: int) -> None:
    """During an evaluation, say; the step follows outside."""
    run.start()
    for step in range(2):
        run.backward(run.loss(step))
        run.average()
        with torch.inference_mode():
            run.see(IN_INFERENCE_MODE[number](run.module.first.weight.grad))
            run.see([p.grad.isfinite().all() for p in run.module.parameters()])
        run.module.first.weight.grad.mul_(0.75)
        run.see(run.module.first.weight.grad.requires_grad)
        run.torch_step()


@loop(["both", "not finite here", "kept"], close=CLIPPED)
def unscaled_after_a_change(run: Run, how: str) -> None:
    run.start()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for step in range(3):
        scaler.scale(run.loss(step)).backward()
        run.average()
        first, second = run.module.first, run.module.second
        if how in ("both", "kept"):
            mask = (torch.arange(91) % 2).view(13, 7).float()
            first.weight.grad = first.weight.grad * mask
            second.bias.grad = second.bias.grad + 0.5  # of which the last of three ranks has nothing
        if how == "both":
            second.weight.grad = own_gradient(run, "second.weight")
        if how == "not finite here" and step == 1:  # in the last rank's part
            mask = torch.ones(13, 7)
            mask[12, 6] = float("inf")
            first.weight.grad = first.weight.grad * mask
        kept = first.weight.grad
        scaler.unscale_(run.optimizer)
        if how == "kept":
            run.see(kept)
        run.see(nn.utils.clip_grad_norm_(run.module.parameters(), 0.3))
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        run.see(scaler.get_scale())


@loop(["full", "clip"], close=CLIPPED)
def read_after_an_assignment(run: Run, how: str) -> None:
    """Statistics that have been collected before an assignment do not stand for it."""
    run.start()
    run.train(1)
    run.backward(run.loss(1))
    run.average()
    run.see(nn.utils.get_total_norm([p.grad for p in run.module.parameters()]))
    run.module.first.weight.grad = own_gradient(run)
    gradients = [p.grad for p in run.module.parameters()]
    if run.plain:
        run.see(gradients if how == "full" else float(nn.utils.clip_grad_norm_(run.module.parameters(), 0.3)))
    elif how == "full":
        run.see(zerolite.get_full_grad(list(run.module.parameters())))
    else:
        run.see(run.engine.clip_gradients(0.3))
    run.torch_step()


@loop(["clip", "clip foreach", "clip each", "value", "scaled", "after a factor", "half", "by hand"], close=CLIPPED)
def clipped_after_an_assignment(run: Run, how: str) -> None:
    """Torch's functions take a list of ``p.grad`` first, and change the tensors in it afterwards."""
    run.start()
    run.train(1)
    for step in range(2):
        run.backward(run.loss(step))
        run.average()
        parameters = list(run.module.parameters())
        if how == "after a factor":
            nn.utils.clip_grad_norm_(parameters, 0.5)
        run.module.first.weight.grad = own_gradient(run)
        if how == "value":
            nn.utils.clip_grad_value_(parameters, 0.03)
        elif how == "scaled":
            torch._foreach_mul_([p.grad for p in parameters], 0.5)
        elif how == "half":
            nn.utils.clip_grad_norm_(parameters[:2], 0.3)
            nn.utils.clip_grad_norm_(parameters[2:], 0.3)
        elif how == "by hand":
            norm = nn.utils.get_total_norm([p.grad for p in parameters])
            for parameter in parameters:
                parameter.grad.mul_(0.3 / (norm + 1.0))
        else:
            foreach = {"clip foreach": True, "clip each": False}.get(how)
            run.see(nn.utils.clip_grad_norm_(parameters, 0.3, foreach=foreach))
        run.see(float(run.module.first.weight.grad.sum()))
        run.torch_step()


@loop(["mask", "none", "all none", "mul"], stages=(0, 1, 2), reordered=True)
def changed_before_a_backward_that_passes_no_hook(run: Run, how: str) -> None:
    """``engine.module`` is called itself, so the first gradient begins the backward: on each rank another one."""
    run.start(models.TwoBranches)
    for step in range(3):
        for micro in range(2):
            x, y = run.batch(step, micro)
            branch = "left" if (run.rank + micro + step) % 2 else "right"
            nn.functional.mse_loss(run.module(x, branch), y).backward()
            if micro:
                break
            run.average()
            for parameter in run.module.parameters():
                if how == "mask":
                    parameter.grad = parameter.grad * 0.5
                elif how == "mul":
                    parameter.grad.mul_(0.5)
                elif how == "all none" or parameter is run.module.left.bias or parameter is run.module.right.bias:
                    parameter.grad = None
        run.average()
        run.torch_step()


# ---------------------------------------------------------------- the tests


@pytest.mark.fast("1-2")
@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_assigned_tensor_is_not_changed_behind_a_norm(stage: int) -> None:
    """A norm has taken its values, and what is in ``p.grad`` from then on is another tensor."""
    run = Run(stage, "moving")
    run.start()
    parameters = list(run.module.parameters())
    for again in (False, True):
        run.backward(run.loss(0))
        run.module.first.weight.grad = own_gradient(run)
        gradients = [p.grad for p in parameters]
        norm = nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.mul_(0.3 / norm)
        if again:
            run.module.first.weight.grad = gradients[0]
            run.torch_step()
        else:
            with pytest.raises(RuntimeError, match=r"'first.weight' was changed after a norm"):
                run.torch_step()
            run.engine.zero_grad()


def compare(name: str, directory: Path) -> None:
    case, stages = LOOPS[name]
    warnings.simplefilter("ignore")
    for variant in case.variants or (None,):
        arguments = (variant,) if case.variants else ()
        Run.directory = str(directory)  # type: ignore[attr-defined]
        wanted = Run(None)
        case.run(wanted, *arguments)
        reference = (wanted.parameters(), wanted.seen)
        for stage in stages:
            outcome = _outcome(case, arguments, stage, "moving", reference)
            assert outcome == "works", f"{name}, {variant}, stage {stage}: {outcome}"
        gc.collect()


@pytest.mark.fast("unscaled_after_a_change-2", "read_after_an_assignment-2")
@on_ranks(2, timeout=120)
@pytest.mark.parametrize("name", list(LOOPS))
def test_a_loop_is_that_of_plain_pytorch(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path)


@pytest.mark.slow
@on_ranks(3, timeout=240)
def test_other_numbers_of_ranks(tmp_path: Path) -> None:
    for name in LOOPS:
        compare(name, tmp_path)
