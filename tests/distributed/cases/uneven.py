"""Ranks whose batches differ in size, or in number."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms import Join

import zerolite
from tests import models
from tests.distributed.cases.training import KINDS, counters, make_engine, snapshot
from zerolite.comm import record
from zerolite.zero import GatheredParameters

STEPS = 4


def rows(step: int, micro: int, rank: int, world: int) -> int:
    """Return how many samples a micro-batch holds: all numbers from 0 to 6, never none on all ranks."""
    if rank == world - 1 and micro == 0:
        return 1 + (step + rank) % 6
    return (5 * rank + 3 * micro + 2 * step) % 7


def batch_of(step: int, micro: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    x, y = models.float_batch(step, micro, rank, size=8)
    count = rows(step, micro, rank, world)
    return x[:count], y[:count]


def weighted(
    config: dict[str, Any], micros: int = 1, tensors: bool = False, flush: bool = False, equal: bool = False
) -> dict[str, Any]:
    """Train with ``weight=`` the number of samples. tensors: as 0-dim tensors. flush: the window holds one micro-batch
    less than the config says. equal: all weights are 4, and so are the batches."""
    engine = zerolite.initialize(models.build(models.TwoBranches), config)
    gradients, norms = [], []
    for step in range(STEPS):
        for micro in range(micros):
            rank = engine.rank
            x, y = models.float_batch(step, micro, rank) if equal else batch_of(step, micro, rank, engine.world_size)
            loss = torch.nn.functional.mse_loss(engine(x, "left").float(), y)
            weight: Any = torch.tensor(len(x)) if tensors else len(x)
            engine.backward(loss, weight=weight)
            if micro == micros - 1:
                gradients.append(zerolite.get_full_grad(engine.module.stem.weight))
            engine.step(flush=flush and micro == micros - 1)
        norms.append(engine.get_global_grad_norm())
    unused = zerolite.get_full_master(engine.module.right.weight)
    return {
        "parameters": snapshot(engine),
        "norms": norms,
        "gradients": gradients,
        "unused": unused,
        "skipped": engine.skipped_steps,
        "steps": engine.global_steps,
    }


def unweighted(config: dict[str, Any], micros: int = 1) -> dict[str, Any]:
    """Equal batches without weights."""
    engine = zerolite.initialize(models.build(models.TwoBranches), config)
    for step in range(STEPS):
        for micro in range(micros):
            x, y = models.float_batch(step, micro, engine.rank)
            engine.backward(torch.nn.functional.mse_loss(engine(x, "left").float(), y))
            engine.step()
    return {"parameters": snapshot(engine), "norms": []}


def weighted_plain(
    optimizer: tuple[str, dict[str, Any]], world: int, micros: int = 1, clip: float = 0.0
) -> dict[str, Any]:
    """Plain PyTorch on the one joint batch of each step, in double precision."""
    model = models.build(models.TwoBranches).double()
    torch_optimizer = getattr(torch.optim, optimizer[0])(model.parameters(), **optimizer[1])
    gradients, norms = [], []
    for step in range(STEPS):
        parts = [batch_of(step, micro, rank, world) for micro in range(micros) for rank in range(world)]
        x, y = (torch.cat(tensors).double() for tensors in zip(*parts, strict=True))
        torch_optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x, "left"), y).backward()
        gradients.append(model.stem.weight.grad.clone())
        limit = clip or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        torch_optimizer.step()
    return {
        "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
        "norms": norms,
        "gradients": gradients,
    }


def refused(config: dict[str, Any]) -> dict[str, str]:
    """Return the errors about values that are no weight, or not one for all."""
    engine = zerolite.initialize(models.build(models.Mlp), config)
    x, y = models.float_batch(0, 0, engine.rank)
    messages = {}

    def attempt(name: str, **arguments: Any) -> None:
        try:
            engine.backward(torch.nn.functional.mse_loss(engine(x), y), **arguments)
            engine.step()
        except (ValueError, RuntimeError) as error:
            messages[name] = str(error)
        engine.zero_grad()

    attempt("negative", weight=-1)
    attempt("nan", weight=float("nan"))
    attempt("several", weight=torch.ones(2))
    attempt("unscaled", weight=2, scale_wrt_gas=False)
    attempt("empty", weight=0)
    if engine.world_size > 1:
        attempt("some ranks", weight=3 if engine.rank == 0 else None)
    engine.backward(torch.nn.functional.mse_loss(engine(x), y), weight=2)
    try:
        engine.backward(torch.nn.functional.mse_loss(engine(x), y))
    except RuntimeError as error:
        messages["later"] = str(error)
    engine.zero_grad()
    before = snapshot(engine)
    attempt("fine", weight=2)
    after = snapshot(engine)
    messages["moved"] = str(any(not torch.equal(before[name], after[name]) for name in before))
    return messages


def large_weights(config: dict[str, Any], weight: float, steps: int) -> dict[str, Any]:
    """The same batches with large weights; ``plain`` are the norms in fp32 without any."""
    engine = zerolite.initialize(models.build(models.Mlp), config)
    model = models.build(models.Mlp)
    norms, plain = [], []
    for _ in range(steps):
        x, y = models.float_batch(0, 0, engine.rank)
        engine.backward(torch.nn.functional.mse_loss(engine(x), y), weight=weight)
        model.load_state_dict({name: value.float() for name, value in engine.full_state_dict().items()})
        model.zero_grad()
        for rank in range(engine.world_size):
            x, y = models.float_batch(0, 0, rank)
            (torch.nn.functional.mse_loss(model(x), y) / engine.world_size).backward()
        plain.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return {"norms": norms, "plain": plain, "skipped": engine.skipped_steps, "steps": engine.global_steps}


# -------------------------------------------------------------------- numbers of batches


def joined(
    config: dict[str, Any],
    counts: list[int],
    model: str = "OddModel",
    loop: str = "engine",
    keep_divisor: bool = True,
    weights: bool = False,
    after: int = 0,
    by_hand: bool = False,
    evaluate: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """``counts[rank]`` micro-batches inside ``engine.join()``, then ``after`` on every rank. by_hand: the user sets the
    learning rate before each step. evaluate: a forward without gradients in each step."""
    engine = make_engine(config, model, **more)
    loss_of, make_batch = KINDS[model]
    micros = engine.gradient_accumulation_steps
    means, losses = [], []

    def step(micro: int, join: bool) -> None:
        if by_hand:
            engine.optimizer.param_groups[0]["lr"] = 0.05 / (1 + micro)
        size = 1 + (micro + engine.rank) % 3 if weights else 2
        batch = make_batch(micro, 0, engine.rank, size)
        if evaluate:
            with torch.no_grad():
                loss_of(engine, batch)
        if loop == "classic":
            if micro % micros == 0:
                engine.optimizer.zero_grad()
            (loss_of(engine, batch) / micros).backward()
            if (micro + 1) % micros == 0:
                engine.optimizer.step()
            return
        loss = loss_of(engine, batch)
        losses.append(float(loss.detach()))
        means.append(engine.reduce(float(loss.detach()), "sum"))
        if loop == "plain":
            (loss / micros).backward()
            if (micro + 1) % micros == 0:
                engine.optimizer.step()
                engine.optimizer.zero_grad()
        else:
            if loop == "by hand":  # windows of one, two, two ... micro-batches
                engine.set_gradient_accumulation_boundary(micro % 2 == 0)
            engine.backward(loss, weight=size if weights else None)
            engine.step()

    with record() as recorder, engine.join(divide_by_initial_world_size=keep_divisor):
        for micro in range(counts[engine.rank]):
            step(micro, True)
    if loop == "engine":
        engine.step(flush=True)
    inside = {"parameters": snapshot(engine), **counters(engine), "traffic": recorder.summary()}
    for micro in range(max(counts), max(counts) + after):
        step(micro, False)
    schedule = engine.coordinator.schedule if engine.coordinator is not None else None
    return {
        "inside": inside,
        "parameters": snapshot(engine),
        "means": means,
        "losses": losses,
        "on_demand": schedule is not None and schedule.on_demand_only,
        "following": schedule is not None and schedule.following,
        "buffers": {name: buffer.clone() for name, buffer in engine.module.named_buffers()},
    }


def joined_plain(
    optimizer: tuple[str, dict[str, Any]],
    counts: list[int],
    micros: int = 1,
    model: str = "OddModel",
    keep_divisor: bool = True,
    weights: bool = False,
    after: int = 0,
    by_hand: bool = False,
    sizes: dict[str, Any] | None = None,
) -> dict[str, Tensor]:
    """The same on one process: gradients of the ranks that have a batch, summed in rank order."""
    torch.set_num_threads(1)
    whole = models.build(getattr(models, model), **(sizes or {}))
    loss_of, make_batch = KINDS[model]
    torch_optimizer = getattr(torch.optim, optimizer[0])(
        [p for p in whole.parameters() if p.requires_grad], **optimizer[1]
    )
    world, total = len(counts), max(counts) + after

    def active(micro: int) -> list[int]:
        return [rank for rank in range(world) if micro < counts[rank] or micro >= max(counts)]

    start = 0
    while start < total:
        end = min(start + micros, max(counts) if start < max(counts) else total)
        window = range(start, end)
        start = end
        torch_optimizer.zero_grad()
        tokens = sum(1 + (micro + rank) % 3 for micro in window for rank in active(micro))
        for micro in window:
            for rank in active(micro):
                size = 1 + (micro + rank) % 3 if weights else 2
                loss = loss_of(whole, make_batch(micro, 0, rank, size))
                ranks = world if keep_divisor else len(active(micro))
                (loss * size / tokens if weights else loss / (ranks * len(window))).backward()
        if by_hand:
            torch_optimizer.param_groups[0]["lr"] = 0.05 / (1 + window[-1])
        torch_optimizer.step()
    return {name: p.detach().clone() for name, p in whole.named_parameters()}


def against_ddp(config: dict[str, Any], counts: list[int], keep_divisor: bool) -> dict[str, Any]:
    """The engine's join and torch's over DDP, in the same processes."""
    ours = joined(config, counts, "Mlp", keep_divisor=keep_divisor)["parameters"]
    rank = dist.get_rank()
    ddp = torch.nn.parallel.DistributedDataParallel(models.build(models.Mlp))
    settings = config["optimizer"]
    optimizer = getattr(torch.optim, settings["type"])(ddp.parameters(), **settings["params"])
    with Join([ddp], divide_by_initial_world_size=keep_divisor):
        for micro in range(counts[rank]):
            optimizer.zero_grad()
            models.square_loss(ddp, models.float_batch(micro, 0, rank, 2)).backward()
            optimizer.step()
    for parameter in ddp.module.parameters():  # a rank that has finished takes no step in DDP
        dist.broadcast(parameter.data, counts.index(max(counts)))
    theirs = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
    return {"ours": ours, "theirs": theirs}


def leaving(config: dict[str, Any], how: str) -> dict[str, str]:
    """Return the outcome of a rank that does something else. Rank 0 has two batches, the others four."""
    engine = make_engine(config, "Mlp")
    message = kind = ""
    try:
        with engine.join():
            for step in range(2 if engine.rank == 0 else 4):
                if how == "early" and step == 1 and engine.rank == 1:
                    raise KeyError("a bug in the data loader")
                loss = models.square_loss(engine, models.float_batch(step, 0, engine.rank))
                if how == "late" and step == 3 and engine.rank == 1:
                    raise KeyError("a bug in the data loader")
                if how == "places" and step == 1 and engine.rank == 1:
                    engine.step()
                engine.backward(loss)
                engine.step()
                if step == 3 and how == "master":
                    zerolite.get_full_master(engine.module.first.weight)
                if step == 3 and how == "gathered":
                    with GatheredParameters(engine.module, modifier_rank=1):
                        engine.module.first.weight.data.mul_(1.0)
                if step == 3 and how == "metrics":
                    for _ in engine.deepspeed_io(torch.arange(8), batch_size=2, route="eval"):
                        engine.gather_for_metrics(torch.zeros(2))
    except (RuntimeError, KeyError, ValueError) as error:
        message, kind = str(error), type(error).__name__
    dist.barrier()
    return {"message": message, "kind": kind}


def nested(config: dict[str, Any]) -> str:
    engine = make_engine(config, "Mlp")
    try:
        with engine.join(), engine.join():
            pass
    except RuntimeError as error:
        return str(error)
    return ""


def overflowing(config: dict[str, Any]) -> dict[str, Any]:
    """fp16: the rank that goes on has an infinite gradient when the other has finished."""
    engine = make_engine(config, "Mlp")
    with engine.join():
        for step in range(1 + 3 * engine.rank):
            x, y = models.float_batch(step, 0, engine.rank)
            engine.backward(models.square_loss(engine, (x, y)) * (1e6 if step == 2 else 1.0))
            engine.step()
    return {**counters(engine), "parameters": snapshot(engine)}
