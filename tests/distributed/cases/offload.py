"""Runs that are done twice, with everything on the device and offloaded, and must not differ in a bit."""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import zerolite
from tests.checkpoint.cases.recipes import (
    BF16,
    FP16,
    MIXTURE,
    RECIPES,
    Recipe,
    float_batch,
    instance,
    share,
    token_batch,
)
from tests.checkpoint.cases.resume import differences, facts, make_engine, own_seeds
from tests.toolkit import models
from tests.toolkit.configs import SGD, dynamic_fp16
from zerolite.offload.placements import Placements
from zerolite.zero import GatheredParameters

STEPS = 5


# -------------------------------------------------------------------- models and optimizers


def wide() -> nn.Module:
    """Layers of which a rank's part is several times placements.SPAN_ALIGNMENT, and odd."""
    return models.build(models.OddModel, width=61, hidden=331)


class Replacing(torch.optim.Optimizer):
    """Momentum whose states are new tensors, of changing dtypes, after every step; one has another shape, one is a
    number, and one comes and goes."""

    zerolite_elementwise = True

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                count = state["count"] = state.get("count", 0) + 1
                kept = state.get("kept")
                state["kept"] = (
                    parameter.grad * 0.5 if kept is None else kept.to(parameter.dtype) * 0.9 + parameter.grad
                )
                if count == 3:
                    state["kept"] = state["kept"].double()
                state["signs"] = torch.sign(parameter.grad).to(torch.int8)
                state["largest"] = parameter.grad.new_tensor(float(count))
                step = state["kept"].to(parameter.dtype) + 0.01 * state["signs"] / state["largest"]
                if count % 2:
                    state["sometimes"] = parameter.grad.clone()
                else:
                    step += state.pop("sometimes") * 0.125
                parameter.add_(step, alpha=-group["lr"])


# -------------------------------------------------------------------- what users do between steps


def whole(engine: Any) -> contextlib.AbstractContextManager[Any]:
    return GatheredParameters(engine.module, modifier_rank=0, check=False)


def trained(engine: Any) -> dict[str, nn.Parameter]:
    return {n: p for n, p in engine.module.named_parameters() if p.requires_grad and p.numel()}


def clamp(engine: Any, step: int) -> None:
    """In place, some; by new memory, others."""
    if step in (2, 3):
        with whole(engine), torch.no_grad():
            for number, parameter in enumerate(trained(engine).values()):
                if number % 3 == 0:
                    parameter.clamp_(-0.05, 0.05)
                elif number % 3 == step - 2:
                    parameter.data = parameter.data.clamp(-0.1, 0.1)


def reload_module(engine: Any, step: int) -> None:
    if step == 2:
        with whole(engine):
            values = {name: value.clone() * 0.5 for name, value in engine.module.state_dict().items()}
        with whole(engine):
            engine.module.load_state_dict(values)


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


def wide_overflow(step: int, micro: int) -> tuple[Tensor, ...]:
    x, y = float_batch(step, micro)
    return (x * 1e30 if step == 2 else x), y


def not_a_number(step: int, micro: int) -> tuple[Tensor, ...]:
    """Rows of one rank."""
    x, y = float_batch(step, micro)
    if (step, micro) == (2, 0):
        x = x.clone()
        x[-1, 0] = math.nan
    return x, y


TOKENS: dict[str, Any] = {"loss": models.token_loss, "batch": token_batch}
WIDE: dict[str, Any] = {"model": wide, **TOKENS}
RUNS: dict[str, Recipe] = {
    **RECIPES,
    "sums in bf16": replace(RECIPES["accumulation"], config=BF16),
    "wide": Recipe(**WIDE),
    "wide in bf16": Recipe(**WIDE, config={**BF16, "gradient_clipping": 0.1}),
    "wide in fp16": Recipe(**WIDE, config={"fp16": dynamic_fp16()}, micros=3),
    "wide, bf16 masters": Recipe(
        **WIDE, config={"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    ),
    "wide, moments in bf16": Recipe(**WIDE, optimizer=("AdamW", {"lr": 1e-3, "fp32_optimizer_states": False})),
    "wide, fp32 modules": Recipe(**WIDE, config={**BF16, "fp32_modules": ["norm"]}),
    "wide, SGD": Recipe(**WIDE, config=BF16, optimizer=SGD, states=("momentum_buffer",)),
    "wide, SGD without momentum": Recipe(**WIDE, config=BF16, optimizer=("SGD", {"lr": 0.1}), states=()),
    "wide, Lion": Recipe(**WIDE, config=BF16, optimizer=("Lion", {"lr": 1e-3}), states=("exp_avg",)),
    "wide, Adagrad": Recipe(**WIDE, config=BF16, optimizer=("Adagrad", {"lr": 1e-2}), states=("sum", "step")),
    "wide, NAdam": Recipe(**WIDE, config=BF16, optimizer=("NAdam", {"lr": 1e-3})),
    "wide, autocast": Recipe(**WIDE, config={"torch_autocast": {"enabled": True}}, micros=3),
    "wide, sums in bf16": Recipe(
        **WIDE, config={**BF16, "data_types": {"grad_accum_dtype": "bf16"}, "gradient_clipping": 0.1}, micros=3
    ),
    "wide, clamped": Recipe(**WIDE, config=BF16, change=clamp),
    "not a number": Recipe(**MIXTURE, batch=not_a_number, config={**BF16, "gradient_clipping": 0.5}, micros=2),
    "overflow": Recipe(**MIXTURE, batch=wide_overflow, config=FP16, micros=2),
    "replacing": Recipe(optimizer=None, engine=instance(Replacing), states=("kept",), **{"model": MIXTURE["model"]}),
    "replacing in bf16": Recipe(
        optimizer=None, engine=instance(Replacing), states=("kept",), config=BF16, **{"model": MIXTURE["model"]}
    ),
    "clamped": Recipe(**MIXTURE, change=clamp),
    "clamped in bf16": Recipe(**MIXTURE, change=clamp, config=BF16),
    "clamped, NAdam in bf16": Recipe(**MIXTURE, change=clamp, config=BF16, optimizer=("NAdam", {"lr": 1e-3})),
    "reloaded": Recipe(**MIXTURE, change=reload_module),
    "reloaded in bf16": Recipe(**MIXTURE, change=reload_module, config=BF16),
    "set whole": Recipe(**MIXTURE, change=set_whole),
    "set whole in bf16": Recipe(**MIXTURE, change=set_whole, config=BF16),
    "set whole, NAdam in bf16": Recipe(**MIXTURE, change=set_whole, config=BF16, optimizer=("NAdam", {"lr": 1e-3})),
    "round trip": Recipe(**MIXTURE, change=round_trip),
    "round trip in bf16": Recipe(**MIXTURE, change=round_trip, config=BF16),
    "round trip, NAdam in bf16": Recipe(**MIXTURE, change=round_trip, config=BF16, optimizer=("NAdam", {"lr": 1e-3})),
    "other rates": Recipe(**MIXTURE, change=other_rates, config=BF16),
}


# -------------------------------------------------------------------- the loops


def engine_loop(engine: Any, recipe: Recipe, step: int) -> Iterator[float]:
    for micro in range(recipe.micros):
        batch = share(recipe.batch(step, micro), engine.rank, engine.world_size)
        loss = recipe.loss(engine, batch)
        engine.backward(loss, **({"weight": len(batch[0])} if recipe.weighted else {}))
        engine.step()
        yield float(loss.detach())


def phases_loop(engine: Any, recipe: Recipe, step: int) -> Iterator[float]:
    """Each phase by itself; the gradient is read and changed between."""
    for micro in range(recipe.micros):
        batch = share(recipe.batch(step, micro), engine.rank, engine.world_size)
        loss = recipe.loss(engine, batch)
        engine.backward(loss)
        yield float(loss.detach())
    parameters = list(trained(engine).values())
    gradients = zerolite.get_full_grad(parameters)
    known = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    yield float(sum(gradient.double().sum() for _, gradient in known))
    if step == 1:
        zerolite.set_full_grad(known[0][0], known[0][1] * 2)
        zerolite.set_full_grad(known[-1][0], None)
    if step == 2:
        yield engine.clip_gradients(0.05)
    engine.update()
    yield engine.get_global_grad_norm()
    if step == 3:
        yield float(sum(master.double().sum() for master in zerolite.get_full_master(parameters)))
    engine.publish()
    engine.zero_grad()


def p_grad_loop(engine: Any, recipe: Recipe, step: int) -> Iterator[float]:
    """Gradients are clipped, changed and replaced through ``p.grad``."""
    for micro in range(recipe.micros):
        batch = share(recipe.batch(step, micro), engine.rank, engine.world_size)
        loss = recipe.loss(engine, batch)
        engine.backward(loss, **({"weight": len(batch[0])} if recipe.weighted else {}))
        yield float(loss.detach())
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


def plain_loop(engine: Any, recipe: Recipe, step: int) -> Iterator[float]:
    for micro in range(recipe.micros):
        loss = recipe.loss(engine, share(recipe.batch(step, micro), engine.rank, engine.world_size))
        (loss / recipe.micros).backward()
        yield float(loss.detach())
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def joined_loop(engine: Any, recipe: Recipe, step: int) -> Iterator[float]:
    """The last rank has one step fewer. Not a generator's business: a join spans steps (:func:`train`)."""
    if engine.rank != engine.world_size - 1 or step < STEPS - 1:
        yield from engine_loop(engine, recipe, step)


def away_loop(engine: Any, recipe: Recipe, step: int) -> Iterator[float]:
    """Everything leaves the device between any two calls, now and then without its weights."""
    for micro in range(recipe.micros):
        engine.offload_states(["optim_states", "hp_params"] if micro else None)
        engine.reload_states()
        batch = share(recipe.batch(step, micro), engine.rank, engine.world_size)
        loss = recipe.loss(engine, batch)
        engine.backward(loss, **({"weight": len(batch[0])} if recipe.weighted else {}))
        engine.offload_states(non_blocking=step == 1)
        engine.reload_states(non_blocking=step == 1)
        engine.step()
        yield float(loss.detach())


LOOPS: dict[str, Callable[[Any, Recipe, int], Iterator[float]]] = {
    "engine": engine_loop,
    "phases": phases_loop,
    "plain": plain_loop,
    "p.grad": p_grad_loop,
    "join": joined_loop,
    "away": away_loop,
}


def train(recipe: Recipe, stage: int, loop: str, **more: Any) -> dict[str, Any]:
    """Everything that two runs are compared by."""
    engine = make_engine(recipe, stage, **more)
    own_seeds(engine.rank)
    losses, norms = [], []
    with engine.join() if loop == "join" else contextlib.nullcontext():
        for step in range(STEPS):
            recipe.change(engine, step)
            losses += list(LOOPS[loop](engine, recipe, step))
            if loop != "join":
                norms.append(engine.get_global_grad_norm())
    return {"losses": losses, "norms": norms, **facts(engine, recipe.states)}


# -------------------------------------------------------------------- comparisons


@contextlib.contextmanager
def two_memories() -> Iterator[None]:
    """Treat host and device as two memories, as where the device is not the CPU: offloaded tensors pass through
    buffers."""
    original = Placements.__init__

    def init(self: Placements, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "apart": True})

    with mock.patch.object(Placements, "__init__", init):
        yield


def parity(runs: list[dict[str, Any]]) -> list[str]:
    """Return the runs that differ from the same without offload. Each of ``runs``: ``name`` (of :data:`RUNS`),
    ``stage``, ``loop``, ``zero``, ``config``, and ``variants``: sections that are added to ``zero``, with ``apart``.
    What goes away between calls is compared with what stays."""
    found = []
    for run in runs:
        recipe, stage, loop = RUNS[run["name"]], run["stage"], run.get("loop", "engine")
        config, zero = run.get("config", {}), run.get("zero", {})
        plain = train(recipe, stage, "engine" if loop == "away" else loop, zero=zero, **config)
        assert plain["counters"]["global_steps"] == STEPS
        for variant in run["variants"]:
            where = f"'{run['name']}', stage {stage}, {loop}, {config} {zero} {variant}"
            offload = {key: value for key, value in variant.items() if key != "apart"}
            with two_memories() if variant.get("apart") else contextlib.nullcontext():
                try:
                    offloaded = train(recipe, stage, loop, zero={**zero, **offload}, **config)
                except Exception as error:
                    raise AssertionError(where) from error
            found += [f"{where}: {text}" for text in differences(plain, offloaded)]
            gc.collect()
    return found


def several(runs: list[dict[str, Any]], environment: dict[str, str] | None = None) -> list[str]:
    """Run :func:`parity`, with further environment variables."""
    with mock.patch.dict(os.environ, environment or {}):
        return parity(runs)


# -------------------------------------------------------------------- what moves, and what is where


def traffic(stage: int, zero: dict[str, Any], apart: bool) -> list[Any]:
    """The collectives of three steps, with everything that is recorded of them."""
    recipe = RUNS["wide in bf16"]
    with two_memories() if apart else contextlib.nullcontext():
        engine = make_engine(recipe, stage, zero=zero)
    with zerolite.comm.record() as recorder:
        for step in range(3):
            list(engine_loop(engine, recipe, step))
    return [(call.op, call.numel, str(call.dtype), call.nbytes, call.tag) for call in recorder.calls]


def residence(stage: int, precision: str, zero: dict[str, Any], apart: bool) -> dict[str, Any]:
    """Bytes by item and place in the middle of a window and after its step, and the elements of the rank's part."""
    settings = BF16 if precision == "bf16" else {}
    recipe = Recipe(lambda: models.build(models.Chain, depth=3, width=128), config=settings)
    with two_memories() if apart else contextlib.nullcontext():
        engine = make_engine(recipe, stage, zero=zero)
    pending, after = [], []
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 128)).float().square().mean())
        pending.append(engine.memory_report())
        engine.step()
        after.append(engine.memory_report())
    keys = ("items", "host", "disk")
    return {
        "pending": [{key: getattr(report, key) for key in keys} for report in pending],
        "after": [{key: getattr(report, key) for key in keys} for report in after],
        "numel": 3 * 128 * 128,
    }
