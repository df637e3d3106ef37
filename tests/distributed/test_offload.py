"""Offload of the optimizer: numbers, traffic and memory are those of the same run without it, to the bit.

A CPU has one memory where a GPU's host has two. Variants with ``apart`` pretend that there are two: then everything
passes through the buffers through which it passes on a GPU, only that no copy runs beside the rest.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerolite
from tests.checkpoint.recipes import BF16, FUSED, MIXTURE, RECIPES, Recipe, float_batch, share, token_batch
from tests.checkpoint.runs import differences, facts, make_engine, own_seeds
from tests.toolkit import models
from tests.toolkit.configs import SGD, at
from tests.toolkit.memory import two_memories
from tests.toolkit.ranks import on_ranks
from tests.toolkit.traffic import plain_calls
from zerolite.zero import GatheredParameters

STEPS = 5


def wide() -> nn.Module:
    """Layers of which a rank's part is several times placements.SPAN_ALIGNMENT, and odd."""
    return models.build(models.OddModel, width=61, hidden=331)


def whole(engine: Any) -> contextlib.AbstractContextManager[Any]:
    return GatheredParameters(engine.module, modifier_rank=0, check=False)


def trained(engine: Any) -> dict[str, nn.Parameter]:
    return {n: p for n, p in engine.module.named_parameters() if p.requires_grad and p.numel()}


def clamp(engine: Any, step: int) -> None:
    """Clamp some weights in place, and others by new memory."""
    if step in (2, 3):
        with whole(engine), torch.no_grad():
            for number, parameter in enumerate(trained(engine).values()):
                if number % 3 == 0:
                    parameter.clamp_(-0.05, 0.05)
                elif number % 3 == step - 2:
                    parameter.data = parameter.data.clamp(-0.1, 0.1)


def set_whole(engine: Any, step: int) -> None:
    """Masters and states by parameter."""
    if step not in (2, 3):
        return
    parameters = list(trained(engine).values())
    masters = zerolite.get_full_master(parameters)
    zerolite.set_full_master(parameters[::2], [value * 0.75 for value in masters[::2]])
    states = zerolite.get_full_optimizer_state(parameters, "exp_avg")
    known = [(p, s) for p, s in zip(parameters, states, strict=True) if s is not None]
    zerolite.set_full_optimizer_state([p for p, _ in known[1:]], "exp_avg", [s * 0.25 for _, s in known[1:]])
    zerolite.set_full_optimizer_state(known[0][0], "step", 7)


def round_trip(engine: Any, step: int) -> None:
    """The optimizer's states go out and come back a step later, scaled."""
    if step == 2:
        state = engine.optimizer.state_dict()
        for tensors in state["state"].values():
            for name, value in tensors.items():
                if name != "step":
                    tensors[name] = value.clone() * 0.5
        state["masters"] = {index: value.clone() * 0.5 for index, value in state["masters"].items()}
        engine.optimizer.load_state_dict(state)


def other_rates(engine: Any, step: int) -> None:
    for number, group in enumerate(engine.optimizer.param_groups):
        group["lr"] = 1e-3 * (1 + (step + number) % 3)


def not_a_number(step: int, micro: int) -> tuple[Tensor, ...]:
    """Rows of one rank."""
    x, y = float_batch(step, micro)
    if (step, micro) == (2, 0):
        x = x.clone()
        x[-1, 0] = math.nan
    return x, y


WIDE: dict[str, Any] = {"model": wide, "loss": models.token_loss, "batch": token_batch}
NADAM = ("NAdam", {"lr": 1e-3})
HALF = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
RUNS: dict[str, Recipe] = {
    **RECIPES,
    "fused": Recipe(optimizer=None, engine=FUSED, stages=(1, 2), model=MIXTURE["model"]),  # bits depend on the place
    "sums in bf16": replace(RECIPES["accumulation"], config=BF16),
    "wide": Recipe(**WIDE),
    "wide in bf16": Recipe(**WIDE, config={**BF16, "gradient_clipping": 0.1}),
    "wide, bf16 masters": Recipe(**WIDE, config=HALF),
    "wide, SGD": Recipe(**WIDE, config=BF16, optimizer=SGD, states=("momentum_buffer",)),
    "wide, Lion": Recipe(**WIDE, config=BF16, optimizer=("Lion", {"lr": 1e-3}), states=("exp_avg",)),
    "wide, NAdam": Recipe(**WIDE, config=BF16, optimizer=NADAM),
    "not a number": Recipe(**MIXTURE, batch=not_a_number, config={**BF16, "gradient_clipping": 0.5}, micros=2),
    "clamped": Recipe(**MIXTURE, change=clamp, config=BF16, optimizer=NADAM),
    "set whole": Recipe(**MIXTURE, change=set_whole, config=BF16),
    "round trip": Recipe(**MIXTURE, change=round_trip, config=BF16),
    "other rates": Recipe(**MIXTURE, change=other_rates, config=BF16),
}


# -------------------------------------------------------------------- the loops


def backward(engine: Any, recipe: Recipe, step: int, micro: int) -> float:
    """Return the loss of this rank's share."""
    batch = share(recipe.batch(step, micro), engine.rank, engine.world_size)
    loss = recipe.loss(engine, batch)
    engine.backward(loss, **({"weight": len(batch[0])} if recipe.weighted else {}))
    return float(loss.detach())


def engine_loop(engine: Any, recipe: Recipe, step: int) -> Iterator[float]:
    for micro in range(recipe.micros):
        loss = backward(engine, recipe, step, micro)
        engine.step()
        yield loss


def p_grad_loop(engine: Any, recipe: Recipe, step: int) -> Iterator[float]:
    """Gradients are clipped, changed and replaced through ``p.grad``."""
    for micro in range(recipe.micros):
        yield backward(engine, recipe, step, micro)
        if micro < recipe.micros - 1:
            engine.step()
    shown = [p for p in engine.parameters() if p.grad is not None]
    yield float(torch.nn.utils.clip_grad_norm_(shown, 0.05))
    if step == 1:
        torch.nn.utils.clip_grad_value_(shown, 0.01)
        wide = next(p for p in shown if p.grad.dim() and p.grad.numel())
        wide.grad[0] = 0.5
        shown[1].grad = torch.ones_like(shown[1].grad)
        shown[-1].grad = None
        yield float(wide.grad.flatten().sort().values.double().sum())
    if step == 2:
        torch.nn.utils.clip_grad_norm_(shown[::2], 0.01)  # of some
    if step == 3:
        torch._foreach_mul_([p.grad for p in shown], 0.5)
        torch._foreach_add_([p.grad for p in shown], 1e-3)
        yield float(torch.nn.utils.get_total_norm([p.grad for p in shown]))
    engine.step()


LOOPS = {"engine": engine_loop, "p.grad": p_grad_loop}


# -------------------------------------------------------------------- comparisons


def offload(device: str, directory: Path, **more: Any) -> dict[str, Any]:
    path = {"nvme_path": str(directory)} if device == "nvme" else {}
    return {"offload_optimizer": {"device": device, **path, **more}}


def variants(directory: Path) -> dict[str, dict[str, Any]]:
    """Return variants of zero_optimization. Sub-groups of one element, of odd lengths, and larger than everything."""
    return {
        "cpu": offload("cpu", directory),
        "cpu, apart": {**offload("cpu", directory), "apart": True},
        "cpu, small": {**offload("cpu", directory, buffer_count=1), "sub_group_size": 1, "apart": True},
        "cpu, odd": {**offload("cpu", directory, buffer_count=2), "sub_group_size": 5003, "apart": True},
        "cpu, a third": {**offload("cpu", directory, ratio=0.3), "sub_group_size": 4097, "apart": True},
        "cpu, a third, together": offload("cpu", directory, ratio=0.3),
        "nvme": offload("nvme", directory),
        "nvme, odd": {**offload("nvme", directory, buffer_count=2), "sub_group_size": 5003},
        "nvme, apart": {**offload("nvme", directory, buffer_count=3), "sub_group_size": 9001, "apart": True},
    }


def train(recipe: Recipe, stage: int, loop: str, **more: Any) -> dict[str, Any]:
    """Everything that two runs are compared by."""
    engine = make_engine(recipe, stage, **more)
    own_seeds(engine.rank)
    losses, norms = [], []
    with zerolite.comm.record() as recorder:
        for step in range(STEPS):
            recipe.change(engine, step)
            losses += list(LOOPS[loop](engine, recipe, step))
            norms.append(engine.get_global_grad_norm())
    sent = [
        call for call in plain_calls(recorder) if call[-1] != "update"
    ]  # by which ranks tell that a disk has failed
    return {"losses": losses, "norms": norms, "sent": sent, **facts(engine, recipe.states)}


def assert_same_offloaded(
    directory: Path, name: str, stage: int, *chosen: str, loop: str = "engine", zero: Any = (), **config: Any
) -> None:
    """A run with everything on the device, and with each of the chosen variants, has the same bits and collectives."""
    recipe, zero = RUNS[name], dict(zero)
    plain = train(recipe, stage, loop, zero=zero, **config)
    assert plain["counters"]["global_steps"] == STEPS
    for variant in chosen:
        block = dict(variants(directory)[variant])
        with two_memories() if block.pop("apart", False) else contextlib.nullcontext():
            offloaded = train(recipe, stage, loop, zero={**zero, **block}, **config)
        found = differences(plain, offloaded)
        assert not found, f"{name}, stage {stage}, {loop}, {variant}: {len(found)} differ, the first: {found[0]:.600}"
        gc.collect()


@on_ranks(2, timeout=600)
def test_numbers_do_not_depend_on_the_tier(tmp_path: Path) -> None:
    assert_same_offloaded(tmp_path, "wide in bf16", 1, "nvme, odd", "cpu, a third")
    assert_same_offloaded(tmp_path, "wide in bf16", 3, "nvme, odd")
    assert_same_offloaded(tmp_path, "not a number", 3, "nvme")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2, timeout=600)
def test_every_variant(stage: int, tmp_path: Path) -> None:
    assert_same_offloaded(tmp_path, "wide in bf16", stage, *list(variants(tmp_path))[stage - 1 :: 3])
    assert_same_offloaded(tmp_path, "sums in bf16", stage, *list(variants(tmp_path))[stage % 3 :: 3])


OF_RECIPES = ("mixture in bf16", "mixture in fp16", "adapters in bf16", "amsgrad", "bf16 masters")
OF_RECIPES += ("accumulation with weights", "accumulation that overflows")
OF_RECIPES += ("accumulation, branches", "woken", "added group", "asleep", "moments in bf16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        (name, [stage for stage in (1, 2, 3) if stage in RUNS[name].stages][number % (len(RUNS[name].stages) - 1)])
        for number, name in enumerate([*OF_RECIPES, *(name for name in RUNS if name not in RECIPES)])
    ],
)
@on_ranks(2, timeout=600)
def test_every_run(name: str, stage: int, tmp_path: Path) -> None:
    """Each optimizer, precision and user's change at one of the stages."""
    assert_same_offloaded(tmp_path, name, stage, "cpu, a third", "nvme, apart")


SOME = ("mixture in fp16", "sums in bf16", "not a number", "added group")


@pytest.mark.slow
@on_ranks(2, timeout=600)
def test_gradients_that_users_change(tmp_path: Path) -> None:
    for name in (*SOME, "accumulation with weights", "wide in bf16"):
        assert_same_offloaded(tmp_path, name, 3, "cpu, a third", "nvme, odd", loop="p.grad")


@pytest.mark.slow
@on_ranks(1, 3, timeout=600)
def test_every_world_size(tmp_path: Path) -> None:
    for name in (*SOME, "set whole", "round trip"):
        assert_same_offloaded(tmp_path, name, 3, "cpu, odd", "nvme, apart")
    assert_same_offloaded(tmp_path, "clamped", 2, "cpu, small", "nvme, odd")


@pytest.mark.slow
@on_ranks(2, timeout=600)
def test_without_kernels(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, {"ZEROLITE_KERNELS": "0"}):
        for stage, name in ((3, "sums in bf16"), (1, "not a number"), (3, "wide, Lion")):
            assert_same_offloaded(tmp_path, name, stage, "cpu, a third", "nvme, odd")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_values_that_were_written_into_unused_parameters_stay(stage: int, tmp_path: Path) -> None:
    """NAdam is torch's: it updates staged copies, and none of the layer that has no gradient."""
    zero = {**offload("nvme", tmp_path), "reduce_bucket_size": 40}  # a bucket has parameters of one layer
    config = at(stage, "bf16", 1, 0.0, NADAM, zero=zero)
    engine = zerolite.initialize(models.build(models.TwoBranches), config)
    for step, branch in enumerate(("left", "right", "left", "left")):
        if step == 2:
            with whole(engine), torch.no_grad():
                engine.module.right.weight.fill_(0.5)
        x, y = models.float_batch(step, 0, engine.rank)
        engine.backward(F.mse_loss(engine(x, branch).float(), y))
        engine.step()
    with whole(engine):
        assert bool((engine.module.right.weight == 0.5).all())


# -------------------------------------------------------------------- memory


@pytest.mark.fast("2-cpu-2", "2-nvme-2")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
@on_ranks(2)
def test_where_the_bytes_are(device: str, stage: int, tmp_path: Path) -> None:
    """16-bit training has 12 bytes an element off the device, and its gradient while it waits."""
    zero = {**offload(device, tmp_path), "sub_group_size": 5000, "stage3_param_persistence_threshold": 0}
    place = {"cpu": "host", "nvme": "disk"}[device]
    recipe = Recipe(lambda: models.build(models.Chain, depth=3, width=128), config=BF16)
    with two_memories():
        engine = make_engine(recipe, stage, zero=zero)
    after = []
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 128)).float().square().mean())
        pending = engine.memory_report()
        engine.step()
        now = engine.memory_report()
        after.append({"items": now.items, "host": now.host, "disk": now.disk})
    numel = 3 * 128 * 128
    part = numel // 2
    assert after[0] == after[1]
    assert after[1]["items"]["compute_parameters"] == 2 * (part if stage == 3 else numel)
    for item, nbytes in (("master_weights", 4 * part), ("optimizer_states", 8 * part)):
        found = {key: report[item] for key, report in after[1].items()}
        assert found == {"items": 0, "host": 0, "disk": 0, place: nbytes}
    assert getattr(pending, place)["gradients"] == 2 * part and pending.items["gradients"] == 0
    # Four sub-groups of 2 (gradient) + 4 + 8 + 2 (rounded) bytes an element, in whole blocks.
    assert 0 < after[1]["host"]["offload_buffers"] <= 4 * (16 * 5000 + 5 * 4096)
