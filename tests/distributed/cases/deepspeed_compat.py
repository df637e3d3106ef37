"""Loops written for DeepSpeed, on `zerolite.compat.deepspeed`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerolite.compat.deepspeed as deepspeed
from tests.checkpoint.deepspeed_fakes import example
from zerolite.compat.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

STEPS, MICRO_BATCHES = 3, 2


class Net(nn.Module):
    """Odd sizes, a parameter without dimensions, a frozen one and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(7, 13)
        self.second = nn.Linear(13, 13)
        self.third = nn.Linear(13, 13)
        self.third.weight = self.second.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.note = "of the module"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.third(self.second(self.first(x).tanh()).tanh()) * self.scale).pow(2).mean()


def config_of(stage: int) -> dict[str, Any]:
    return {
        "train_batch_size": 4 * MICRO_BATCHES * dist.get_world_size(),
        "gradient_accumulation_steps": MICRO_BATCHES,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": "auto"},
        "fp16": {"enabled": "auto"},
        "steps_per_print": float("inf"),
        "zero_optimization.reduce_bucket_size": 64.0,
    }


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def train(engine: Any, kind: str, steps: range) -> None:
    for step in steps:
        for micro in range(MICRO_BATCHES):
            loss = engine(batch(MICRO_BATCHES * step + micro, dist.get_rank()))
            if kind == "plain":  # divided by gradient_accumulation_steps too
                loss.backward()
            elif kind == "by hand":  # as accelerate does
                engine.set_gradient_accumulation_boundary(is_boundary=micro + 1 == MICRO_BATCHES)
                engine.backward(loss)
            else:
                engine.backward(loss)
            if kind != "by hand" or micro + 1 == MICRO_BATCHES:
                engine.step()


def expected(steps: int) -> tuple[dict[str, torch.Tensor], float]:
    """Plain PyTorch on the batches of all ranks: weights, and the norm of the last gradient before clipping."""
    model, norm = Net(), 0.0
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0, foreach=True
    )
    schedule = deepspeed.runtime.lr_schedules.WarmupLR(optimizer, warmup_max_lr=1e-2, warmup_num_steps=4)
    ranks = range(dist.get_world_size())
    for step in range(steps):
        batches = [batch(MICRO_BATCHES * step + micro, rank) for micro in range(MICRO_BATCHES) for rank in ranks]
        torch.stack([model(x) for x in batches]).mean().backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.state_dict(), norm


def make(stage: int, zero: dict[str, Any] | None = None) -> Any:
    """zero: further keys of zero_optimization."""
    model = Net()
    parameters = (p for p in model.parameters() if p.requires_grad)
    config = config_of(stage)
    config["zero_optimization"] |= zero or {}
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]


def parity(stage: int, kind: str, zero: dict[str, Any] | None = None) -> dict[str, Any]:
    engine = make(stage, zero)
    if kind == "compiled":
        engine.compile(backend="eager")
    train(engine, kind, range(STEPS))
    state, norm = expected(STEPS)
    found = engine._zero3_consolidated_16bit_state_dict()
    worst = {} if found is None else {k: float((found[k] - state[k]).abs().max()) for k in state}
    result = {
        "worst": max(worst.values(), default=0.0),
        "norms": (engine.get_global_grad_norm(), norm),
        "steps": engine.global_steps,
        "batch": engine.get_batch_info(),
        "prefixed": all(name.startswith("module.") for name, _ in engine.named_parameters()),
        "config": engine.config.get("zero_optimization", {}).get("stage"),
        "note": engine.note,
        "applied": engine.was_step_applied(),
        "lr": engine.get_lr() == engine.lr_scheduler.get_last_lr() == [g["lr"] for g in engine.optimizer.param_groups],
    }
    engine.destroy()
    engine.destroy()
    return result


def resume(stage: int, folder: str) -> dict[str, Any]:
    """Save after two steps, load into another engine, and train both on; export what was saved."""
    engine = make(stage)
    train(engine, "engine", range(2))
    engine.save_checkpoint(folder, client_state={"epoch": 4}, exclude_frozen_parameters=True)
    saved = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    other = make(stage)
    path, client_state = other.load_checkpoint(folder, load_module_strict=False)
    for each in (engine, other):
        train(each, "engine", range(2, 4))
    one, two = engine.zerolite.full_state_dict(), other.zerolite.full_state_dict()
    missing = other.load_checkpoint(str(Path(folder, "nothing")))
    exported = get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    return {
        "path": path == str(Path(folder, "global_step2")),
        "client_state": client_state,
        "same": all(torch.equal(one[name], two[name]) for name in one),
        "missing": missing,
        "overwrites": engine.zerolite.config.checkpoint.overwrite,
        "exported": saved is None
        or (exported.keys() == saved.keys() and all(torch.equal(exported[name], saved[name]) for name in saved)),
    }


class Theirs(nn.Module):
    """The model of :func:`tests.checkpoint.deepspeed_fakes.example`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(5, 3, bias=False), nn.Linear(5, 3, bias=False)
        self.head.weight = self.a.weight
        self.scale = nn.Parameter(torch.zeros(()))
        self.b = nn.ParameterDict({"bias": torch.zeros(7), "pair": torch.zeros(2)})
        self.c = nn.Linear(3, 2, bias=False).to(torch.bfloat16).requires_grad_(False)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(3))


def load_deepspeeds(stage: int, folder: str) -> dict[str, Any]:
    """Load a checkpoint of DeepSpeed's stage 2 into another stage, and export it."""
    fake = example(2, 2, client_state={"epoch": 3})
    if dist.get_rank() == 0:
        fake.write(Path(folder))
    dist.barrier()
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_optimization": {"stage": stage}}
    engine = deepspeed.initialize(model=Theirs(), config=config)[0]
    path, client_state = engine.load_checkpoint(folder)
    state = engine.zerolite.full_state_dict(dtype=torch.float32)
    exported = get_fp32_state_dict_from_zero_checkpoint(folder)
    values = {**fake.trained, **fake.frozen, **fake.buffers, "head.weight": fake.trained["a.weight"]}
    dist.barrier()
    return {
        "same": all(torch.equal(state[name].float(), value.float()) for name, value in values.items()),
        "exported": exported.keys() == values.keys()
        and all(torch.equal(exported[name].float(), value.float()) for name, value in values.items()),
        "tied": exported["head.weight"] is exported["a.weight"],
        "state": (Path(path or "").name, client_state, engine.get_lr(), engine.global_steps),
        "left": [each.name for each in Path(folder).iterdir() if each.name.startswith(".")],
    }


def reference_model(stage: int) -> dict[str, Any]:
    """An engine without an optimizer beside one that trains; a second engine after destroy."""
    engine = make(stage)
    config = {**config_of(stage), "train_batch_size": "auto"}
    for key in ("optimizer", "scheduler"):
        del config[key]
    reference, optimizer, _, schedule = deepspeed.initialize(model=Net().eval(), config=config)
    x = batch(0, dist.get_rank())
    with torch.no_grad():
        before = float(reference(x))
    train(engine, "engine", range(1))
    with torch.no_grad():
        same = float(reference(x)) == before == float(Net()(x))
    module = engine.module
    engine.destroy()
    del engine
    again = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config_of(stage))[0]
    train(again, "engine", range(1))
    return {"none": optimizer is None and schedule is None, "same": same, "again": again.global_steps}


def local_values() -> dict[str, bool]:
    """Parts of masters, states and gradients at stage 3, read and set beside the whole ones."""
    utils = deepspeed.utils
    engine, rank = make(3), dist.get_rank()
    train(engine, "engine", range(1))
    engine.backward(engine(batch(9, rank)))
    found: dict[str, bool] = {"frozen": utils.safe_get_local_fp32_param(engine.module.frozen) is None}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        for kind, get, put, whole in (
            (
                "master",
                utils.safe_get_local_fp32_param,
                utils.safe_set_local_fp32_param,
                utils.safe_get_full_fp32_param,
            ),
            ("grad", utils.safe_get_local_grad, utils.safe_set_local_grad, utils.safe_get_full_grad),
            (
                "state",
                lambda p: utils.safe_get_local_optimizer_state(p, "exp_avg"),
                lambda p, value: utils.safe_set_local_optimizer_state(p, value, "exp_avg"),
                lambda p: utils.safe_get_full_optimizer_state(p, "exp_avg"),
            ),
        ):
            part, before = get(parameter), whole(parameter)
            padded = torch.zeros(part.numel() * dist.get_world_size())
            padded[: before.numel()] = before.flatten()
            good = part.numel() == parameter.ds_tensor.numel()
            good &= torch.equal(part, padded.view(-1, part.numel())[rank])
            put(parameter, 2 * part)
            found[f"{kind} of {name}"] = good and torch.equal(whole(parameter), 2 * before)
    with deepspeed.zero.GatheredParameters(engine.module.first.weight):
        gathered = engine.module.first.weight.detach().clone()
    found["followed"] = torch.equal(gathered, utils.safe_get_full_fp32_param(engine.module.first.weight))
    return found
