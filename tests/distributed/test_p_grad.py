"""``p.grad`` between backward and step: the bits of the config's clipping, what is refused, and values. Loops that use
it are in test_drop_in.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, SGD, at, config
from tests.toolkit.drop_in import Run
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import backward, loss_of, make_engine, raises, run_steps, snapshot
from zerolite.comm import record
from zerolite.zero.sharded_gradient import ShardedGradient

STEPS = 3


# ---------------------------------------------------------------- clipping


def clipped(config: dict[str, Any], how: str, foreach: bool | None = None) -> tuple[dict[str, Any], list[float], Any]:
    """OddModel, whose gradients are clipped by the config or by torch; weights, norms and collectives of each step."""
    engine = make_engine(config)
    norms, launched = [], []
    for step in range(STEPS):
        with record() as recorder:
            for micro in range(engine.gradient_accumulation_steps):
                if micro:
                    engine.step()
                backward(engine, step, micro, "OddModel")
            if how == "torch":
                norms.append(nn.utils.clip_grad_norm_(engine.parameters(), 0.05, foreach=foreach))
                assert type(norms[-1]) is torch.Tensor
            engine.step()
        if how == "config":
            norms.append(engine.get_global_grad_norm())
        launched.append([(call.op, call.tag, call.nbytes) for call in recorder.calls])
    return snapshot(engine), [float(norm) for norm in norms], launched


@pytest.mark.slow
@on_ranks(2, 3)
@pytest.mark.parametrize(
    ("stage", "precision", "offload", "micros"),
    [(0, "fp32", "", 1), (1, "bf16", "cpu", 2), (2, "fp16", "", 2), (3, "fp32", "nvme", 1), (3, "bf16", "", 2)],
)
def test_clipping_by_torch_has_the_bits_and_the_collectives_of_the_config(
    tmp_path: Path, stage: int, precision: str, offload: str, micros: int
) -> None:
    place = {"device": offload, **({"nvme_path": str(tmp_path)} if offload == "nvme" else {})}
    more = {"accumulation": micros, "zero": {"offload_optimizer": place} if offload else {}}
    more["optimizer"] = ADAMW if offload else SGD
    parameters, norms, launched = clipped(at(stage, precision, clip=0.05, **more), "config")
    for foreach in (None, True):
        found = clipped(at(stage, precision, **more), "torch", foreach)
        assert found[1] == pytest.approx(norms, rel=1e-12)
        assert_same_bits(found[0], parameters, f"foreach {foreach}")
        assert found[2] == launched


# ---------------------------------------------------------------- what is refused


@on_ranks(2)
def test_a_gradient_that_is_not_there_says_so() -> None:
    for stage in (0, 2, 3):
        engine = make_engine(at(stage), "Mlp")
        weight: Any = engine.module.first.weight
        backward(engine, 0)
        kept = weight.grad

        def ask(gradient: torch.Tensor, kept: Any = kept) -> None:
            with raises(RuntimeError, "when the backward has returned"):
                kept.norm()

        handle = weight.register_hook(ask)
        backward(engine, 0)
        handle.remove()
        assert "'first.weight'" in repr(weight.grad) and "(13, 7)" in f"{weight.grad}"
        engine.step()
        with raises(RuntimeError, "'first.weight'", "after the next backward"):
            kept.norm()
        kept_ones = [kept]
        for step in range(4):  # a reference that was used, and one that was not, show no later gradient
            backward(engine, step)
            for old in kept_ones:
                with raises(RuntimeError, "after the next backward"):
                    old.norm()
            if not step:
                kept_ones.append(weight.grad)
            engine.step()


def fail(parameter: torch.Tensor) -> None:
    raise MemoryError("no memory")


@pytest.mark.fast("1-2")
@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_failed_backward_leaves_only_what_came_before(stage: int) -> None:
    """A hook of the user's raises before the engine's has taken the gradient out, which is this rank's alone."""
    plain, engine = make_engine(at(stage, accumulation=2), "Mlp"), make_engine(at(stage, accumulation=2), "Mlp")
    for step in range(2):
        backward(engine, step)
        engine.step()
        weight: Any = engine.module.second.weight
        handle = weight.register_post_accumulate_grad_hook(fail)
        with raises(MemoryError, "no memory"):
            backward(engine, step, 1)
        handle.remove()
        assert isinstance(weight.grad, ShardedGradient)
        engine.zero_grad()
        backward(engine, step)
        handle = weight.register_post_accumulate_grad_hook(fail)
        with raises(MemoryError, "no memory"):  # of the first backward: there was nothing before
            backward(engine, step, 1)
        handle.remove()
        backward(engine, step, 1)  # is not refused for it
        engine.zero_grad()
        run_steps(engine, 1, step)
        run_steps(plain, 1, step)
    assert_same_bits(snapshot(engine), snapshot(plain), f"stage {stage}")


@pytest.mark.fast("1-2")
@on_ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_a_tensor_that_is_there_before_a_backward_is_refused(stage: int) -> None:
    """Also where nothing of the engine's runs before the first gradient has been added to it, in the first backward
    and in later ones. ``torch.autograd.grad`` adds nothing."""
    engine = make_engine(at(stage), "Mlp")

    def refused(loss: torch.Tensor, name: str) -> None:
        engine.module.get_parameter(name).grad = torch.ones(engine.module.get_parameter(name).shape)
        with raises(RuntimeError, f"parameter '{name}'", "when a backward begins, got a tensor of your own"):
            loss.backward()
        engine.zero_grad()

    for step in range(2):
        for name, parameter in engine.module.named_parameters():
            refused(loss_of(engine.module, step), name)
            if stage < 3:  # there a backward begins with the outputs of modules
                parameter.grad = torch.ones(parameter.shape)
                torch.autograd.grad(loss_of(engine.module, step), list(engine.module.parameters()))
                parameter.grad = None
        loss_of(engine.module, step).backward()
        engine.step()
        refused(loss_of(engine.module, step), "first.weight")
        loss_of(engine.module, step).backward()
        engine.step()
    assert engine.global_steps == 4


@on_ranks(2)
def test_p_grad_shows_the_weighted_mean() -> None:
    for stage in range(4):
        engine = make_engine(at(stage, optimizer=("SGD", {"lr": 0.5})), "Mlp")
        weight: Any = engine.module.first.weight
        own = torch.linspace(-1, 1, 91).view(13, 7)
        for assigned in (True, False):
            backward(engine, 0, weight=3 + engine.rank)
            start, shown = snapshot(engine)["first.weight"], own if assigned else weight.grad.clone()
            if assigned:
                weight.grad = own
                engine.offload_states()
                engine.reload_states()
            engine.step()
            torch.testing.assert_close(start - snapshot(engine)["first.weight"], 0.5 * shown, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@on_ranks(2)
def test_parts_of_layers_have_no_gradient_in_p_grad() -> None:
    engine = make_engine(config(1, tensor_parallel={"size": 2, "plan": "auto"}), "example_gpt")
    weight: Any = engine.module.get_parameter("blocks.0.attention.project.weight")

    def train() -> None:
        engine.backward(models.token_loss(engine, models.token_batch(0, 0, 0)))

    train()
    for use in (lambda: nn.utils.clip_grad_norm_(engine.parameters(), 1.0), lambda: next(engine.parameters()).grad + 1):
        with raises(RuntimeError, "tensor_parallel", "engine.clip_gradients(max_norm)"):
            use()
    assert engine.clip_gradients(1.0) > 0
    engine.step()
    for use in (engine.step, train, lambda: engine.clip_gradients(1.0), engine.offload_states):
        train()
        weight.grad = torch.zeros_like(weight)
        with raises(RuntimeError, "'blocks.0.attention.project.weight' was replaced", "set_full_grad(p, value)"):
            use()
        engine.zero_grad()


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp16"), (1, "fp32"), (2, "fp32"), (3, "fp16")])
def test_what_gradients_were_multiplied_by_is_in_all_that_reads_them(stage: int, precision: str) -> None:
    engine = make_engine(at(stage, precision), "Mlp")
    parameters = list(engine.module.parameters())
    backward(engine, 0)
    before = zerolite.get_full_grad(parameters)
    torch._foreach_mul_([p.grad for p in parameters], 0.5)
    after = zerolite.get_full_grad(parameters)
    dtype = torch.float32 if precision == "fp32" else torch.float16
    for parameter, one, other in zip(parameters, before, after, strict=True):
        assert torch.equal(one * 0.5, other)
        shown = parameter.grad.sort(stable=True).values.float()
        assert torch.equal(other.to(dtype).sort(stable=True).values.float(), shown)
    total = torch.stack([gradient.double().square().sum() for gradient in after]).sum().sqrt()
    assert engine.clip_gradients(1e9) == pytest.approx(float(total), rel=1e-6)
    first, wanted = parameters[0], after[0].clone()
    first.grad[0] = wanted[0] = 0.25
    first.grad.add_(torch.ones_like(first.grad))
    atol = 1e-7 if precision == "fp32" else 2e-3
    torch.testing.assert_close(first.grad.clone().float(), wanted + 1, rtol=0, atol=atol)
    shown = first.grad.clone()
    torch.mul(first.grad, 3.0, out=first.grad)
    first.grad.lerp_(torch.ones_like(first.grad), 0.5)
    torch.testing.assert_close(first.grad.clone().float(), (shown.float() * 3 + 1) / 2, rtol=0, atol=4 * atol)
    torch._foreach_lerp_([p.grad for p in parameters], [torch.ones_like(p.grad) for p in parameters], 0.5)
    torch.testing.assert_close(first.grad.clone().float(), (shown.float() * 3 + 3) / 4, rtol=0, atol=4 * atol)
    norm, factor = engine.clip_gradients(1e9), torch.tensor(1e-4, dtype=torch.float16)
    torch._foreach_mul_([p.grad for p in parameters], factor)
    assert engine.clip_gradients(1e9) == pytest.approx(norm * float(factor), rel=1e-6)


@pytest.mark.slow
@on_ranks(2, 3)
def test_norms_of_two_engines_at_once_are_those_of_each() -> None:
    """Asked for at once and one by one; then one clips all of them."""
    for stages in ((0, 2), (3, 1)):
        engines = [make_engine(at(stage), "Mlp") for stage in stages]
        for engine in engines:
            backward(engine, 0)
        gradients = [p.grad for engine in engines for p in engine.module.parameters()]
        for order in (1.0, float("inf"), 0.0, 2.0):
            each = [float(g.norm(order)) for g in gradients]
            assert [float(n) for n in torch._foreach_norm(gradients, order)] == pytest.approx(each, rel=1e-5)
        norm = float(nn.utils.clip_grad_norm_([p for e in engines for p in e.module.parameters()], 0.01))
        wanted = [0.01 * n / (norm + 1e-6) for n in each]
        assert [float(g.norm()) for g in gradients] == pytest.approx(wanted, rel=1e-5)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, torch.zeros(1), torch.tensor(0.25))
        assert [float(g.norm()) for g in gradients] == pytest.approx([0.25 * n for n in wanted], rel=1e-5)
        for engine in engines:
            engine.step()


# ---------------------------------------------------------------- values


@on_ranks(2)
def test_an_assigned_tensor_that_overflows_is_noticed_on_all_ranks() -> None:
    """fp16: what one element of an assigned tensor, in the last rank's part, becomes times the loss scale."""
    for stage in range(4):
        engine = make_engine(at(stage, "fp16"), "Mlp")
        before = snapshot(engine)
        for large in (1e4, 1.0):
            backward(engine, 0)
            own = torch.zeros(13, 7, dtype=torch.float16)
            own[12, 6] = large
            engine.module.first.weight.grad = own
            engine.step()
            assert engine.skipped_steps == 1
            if large > 1.0:
                assert_same_bits(snapshot(engine), before, "after a skipped step")
        assert engine.get_global_grad_norm() >= 1.0


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
        run.module.first.weight.grad = torch.linspace(-1, 1, 91).view(13, 7)
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
