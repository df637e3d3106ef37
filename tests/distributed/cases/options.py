"""Other ways to make and use an engine."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerolite
from tests import models
from tests.distributed.cases.training import counters, engine_window, make_engine, snapshot


def two_engines(first: dict[str, Any], second: dict[str, Any], together: bool) -> dict[str, Any]:
    """Two models trained in turns, one step each, or one after the other."""
    if together:
        engines = [make_engine(first), make_engine(second, "Mlp")]
        for step in range(3):
            engine_window(engines[0], "OddModel", step, 1)
            engine_window(engines[1], "Mlp", step, 1)
    else:
        engines = [make_engine(first)]
        for step in range(3):
            engine_window(engines[0], "OddModel", step, 1)
        engines.append(make_engine(second, "Mlp"))
        for step in range(3):
            engine_window(engines[1], "Mlp", step, 1)
    return {"first": snapshot(engines[0]), "second": snapshot(engines[1])}


def state_round_trip(config: dict[str, Any]) -> dict[str, Any]:
    """Three steps, save, three more; then a new engine from the saved states and the same three."""
    engine = make_engine(config)
    for step in range(3):
        engine_window(engine, "OddModel", step, 1)
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"zerolite-test-{os.getpid()}.pt"
    try:
        torch.save({"optimizer": engine.optimizer.state_dict(), "module": engine.module.state_dict()}, path)
        for step in range(3, 6):
            engine_window(engine, "OddModel", step, 1)
        wanted = snapshot(engine)
        saved = torch.load(path, weights_only=False)
    finally:
        path.unlink(missing_ok=True)
    model = models.build(models.OddModel, seed=99)
    model.load_state_dict({name: value.float() for name, value in saved["module"].items()})
    resumed = zerolite.initialize(model, config)
    resumed.optimizer.load_state_dict(saved["optimizer"])
    for step in range(3, 6):
        engine_window(resumed, "OddModel", step, 1)
    return {"wanted": wanted, "resumed": snapshot(resumed)}


class Numbers(torch.utils.data.Dataset):
    """Item i is (i, i²)."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((7,), float(index)), torch.full((3,), float(index**2))


def training_data(config: dict[str, Any], count: int) -> list[list[float]]:
    """The items that this rank sees in one epoch, batch by batch; one step on each."""
    engine = make_engine(config, "Mlp", training_data=Numbers(count))
    seen = []
    for x, y in engine.dataloader:
        engine.backward(models.square_loss(engine, (x / 100, y / 10000)))
        engine.step()
        seen.append(x[:, 0].tolist())
    return seen


def given_optimizer(config: dict[str, Any], how: str) -> dict[str, Any]:
    """An optimizer from the user: an instance with two param groups, a class, a function; and a learning rate changed
    midway."""
    model = models.build(models.Mlp)
    groups = [
        {"params": [model.first.weight, model.second.weight], "weight_decay": 0.1},
        {"params": [model.first.bias, model.second.bias], "weight_decay": 0.0},
    ]
    make = lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True)  # noqa: E731
    if how == "instance":
        engine = zerolite.initialize(model, config, optimizer=make(groups))
    else:
        engine = zerolite.initialize(model, config, optimizer=make, model_parameters=groups)
    for step in range(4):
        if step == 2:
            engine.optimizer.param_groups[1]["lr"] = 1e-3
        engine_window(engine, "Mlp", step, 1)
    return {"parameters": snapshot(engine), **counters(engine)}


def inputs_and_outputs(config: dict[str, Any]) -> dict[str, Any]:
    """Return what the module sees and what the caller gets, for nested inputs and outputs."""
    seen: dict[str, Any] = {}

    class Nested(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(7, 3)

        def forward(self, batch: dict[str, Any], *, scale: float) -> dict[str, Any]:
            seen["x"] = batch["x"].dtype
            seen["ids"] = batch["more"][0].dtype
            out = self.layer(batch["x"]) * scale
            return {"out": out, "list": [out, batch["more"][0]], "text": "kept"}

    engine = zerolite.initialize(Nested(), config)
    result = engine({"x": torch.randn(2, 7), "more": (torch.arange(3),)}, scale=2.0)
    types = {"out": result["out"].dtype, "list": [t.dtype for t in result["list"]], "text": result["text"]}
    engine.backward(result["out"].sum() + result["list"][0].sum())
    engine.step()
    return {"seen": seen, "types": types, "steps": engine.global_steps}


def threads_after_destroy(directory: str) -> dict[str, Any]:
    """For workers without a process group: zerolite starts one, trains, ends it."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    before = native_threads()
    zerolite.init_distributed("gloo", f"file://{directory}/store", rank, world_size)
    zerolite.init_distributed()
    during = native_threads()
    engine = make_engine(
        {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, "Mlp"
    )
    world = engine.world_size
    engine_window(engine, "Mlp", 0, 1)
    trained = native_threads()
    del engine
    zerolite.destroy()
    zerolite.destroy()
    after = native_threads()
    return {
        "before": before,
        "during": during,
        "trained": trained,
        "after": after,
        "initialized": dist.is_initialized(),
        "world": world,
        "python threads": [thread.name for thread in threading.enumerate()],
    }


def native_threads() -> list[str]:
    """The names of this process's threads as the kernel sees them, also those that Python does not know."""
    return sorted(Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task"))
