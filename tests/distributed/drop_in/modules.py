"""Rows of docs/drop-in.md: modules and engines as objects."""

from __future__ import annotations

import copy
import io
import pickle
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zerolite
from tests.toolkit import models
from tests.toolkit.configs import config
from tests.toolkit.drop_in import STEPS, Run, between, case


def train_plainly(run: Run, model: nn.Module, steps: int = 2) -> None:
    """A copy, in plain PyTorch: the same on all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0625)
    for step in range(steps):
        optimizer.zero_grad()
        models.square_loss(model, models.float_batch(step, 3, 0)).backward()
        optimizer.step()
    run.see(list(model.parameters()))


@between("`copy.deepcopy(engine.module)`")
def copied_module(run: Run) -> None:
    twin = copy.deepcopy(run.module)
    train_plainly(run, twin)


@between(
    "`torch.save(engine.module)`",
    ["pickle", "torch.save"],
    words=["'first.weight'", "engine.full_state_dict()"],
    settings=["moving"],
)
def pickled_module(run: Run, how: str) -> None:
    twin = loaded_without_zerolite(run.module, pickle.dump if how == "pickle" else torch.save)
    train_plainly(run, twin)


class Unpickler(pickle.Unpickler):
    """Unpickler of a process that has no zerolite."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "zerolite":
            raise ModuleNotFoundError(f"the file needs {module}.{name}")
        return super().find_class(module, name)


def loaded_without_zerolite(module: nn.Module, save: Any = torch.save) -> Any:
    file = io.BytesIO()
    save(module, file)
    file.seek(0)
    if save is pickle.dump:
        return Unpickler(file).load()
    unpickling = SimpleNamespace(**vars(pickle) | {"Unpickler": Unpickler})
    return torch.load(file, weights_only=False, pickle_module=unpickling)


def hooks_of(model: nn.Module) -> list[Any]:
    """Everything in the model's dicts of hooks, and methods that stand in modules' own attributes."""
    found: list[Any] = []
    for module in model.modules():
        for name, value in vars(module).items():
            if "hooks" in name:
                found += list(value.items())
            elif name in ("forward", "_call_impl", "__deepcopy__"):
                found.append(value)
    return found


@case("`torch.save(copy.deepcopy(engine.module))`", ["plain", "watched"])
def pickled_copy(run: Run, how: str) -> None:
    watched = {
        "wall_clock_breakdown": True,
        "flops_profiler": {"enabled": True, "profile_step": 1},
        "activation_checkpointing": {"modules": ["Linear"]},
    }
    run.start(more=watched if how == "watched" else None)
    run.train(1)
    twin = copy.deepcopy(run.module)
    assert how == "watched" or not hooks_of(twin), hooks_of(twin)
    twin = loaded_without_zerolite(twin)
    train_plainly(run, twin)
    run.train(2, start=1)


@case("`copy.deepcopy` or", words=["full_state_dict"], error=(RuntimeError, TypeError))
def copied_engine(run: Run) -> None:
    run.start()
    run.train()
    if run.plain:
        return
    ways = {
        "deepcopy": lambda: copy.deepcopy(run.engine),
        "pickle": lambda: pickle.dumps(run.engine),
        "deepcopy of the optimizer": lambda: copy.deepcopy(run.optimizer),
        "pickle of the optimizer": lambda: pickle.dumps(run.optimizer),
    }
    run.refuses(ways, Exception, "full_state_dict")


class Coded(models.Mlp):
    width = 3

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) * self.width


@case("`engine.decode(x)`")
def attributes_of_the_module(run: Run) -> None:
    run.start(Coded)
    for step in range(STEPS):
        x, y = run.batch(step)
        run.backward(F.mse_loss((run.module if run.plain else run.engine).decode(x), y))
        run.step()


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.body(x))


def noise(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


@case("two engines: a GAN", ["detached", "frozen"])
def gan(run: Run, how: str) -> None:
    other = Run(run.stage, run.setting)
    run.start()
    other.start(Generator)
    for step in range(STEPS):
        fake = other(noise(step, 0, run.rank))
        run.backward(run.loss(step) + run(fake.detach()).square().mean())
        run.step()
        if how == "frozen":
            run.module.requires_grad_(False)
        loss = run(other(noise(step, 1, run.rank))).square().mean()
        other.backward(loss)
        if how == "frozen":
            run.module.requires_grad_(True)
        else:
            run.optimizer.zero_grad()
        other.step()
    run.see(other.parameters())


@case("a second engine over another")
def second_engine(run: Run) -> None:
    other = Run(run.stage, run.setting)
    run.start()
    other.start(Generator, loss=lambda model, x: model(x).square().mean(), batch=noise)
    for step in range(STEPS):
        run.train(1, start=step)
        other.train(1, start=step)
    run.see(other.parameters())


@case("a model without an")
def teacher(run: Run) -> None:
    torch.manual_seed(3)
    frozen: Any = models.Mlp()
    if not run.plain:
        settings = config(run.stage or 0, zero=run.zero())
        del settings["optimizer"]
        frozen = zerolite.initialize(frozen, settings)
    run.start()
    for step in range(STEPS):
        x, _ = run.batch(step)
        with torch.no_grad():
            target = frozen(x)
        run.see(target)
        run.backward(nn.functional.mse_loss(run(x), target))
        run.step()


@case("a second engine over the", words=["'first.weight'", "another engine", "del engine"], error=ValueError)
def same_model_twice(run: Run) -> None:
    run.start()
    run.train()
    if not run.plain:
        zerolite.initialize(run.module, config(run.stage or 0, zero=run.zero()))


@case(
    "the result of `zerolite.initialize` is not kept",
    ["your optimizer", "the config's", "engine.optimizer"],
    words=["is gone", "Keep what zerolite.initialize returns"],
)
def not_kept(run: Run, whose: str) -> None:
    run.start(own=(lambda model: torch.optim.SGD(model.parameters(), lr=0.0625)) if whose == "your optimizer" else None)
    run.engine = None  # nothing else refers to it
    optimizer = torch.optim.SGD(run.module.parameters(), lr=0.0625) if whose == "the config's" else run.optimizer
    for step in range(STEPS):
        models.square_loss(run.module, run.batch(step)).backward()
        run.average()
        optimizer.step() if whose != "your optimizer" else run.own.step()
        optimizer.zero_grad()


@case("`engine.destroy()`, then a second engine")
def second_engine_after_destroy(run: Run) -> None:
    run.start(own=lambda model: torch.optim.SGD(model.parameters(), lr=0.0625))
    run.train(1)
    if not run.plain:
        first = run.engine  # something still refers to it
        first.destroy()
        first.destroy()
        settings = {**config(run.stage or 0, zero=run.zero()), "train_micro_batch_size_per_gpu": 4}
        del settings["optimizer"]
        run.engine = zerolite.initialize(run.module, settings, optimizer=run.own)
    run.train(2, start=1)


@case("a model wrapped in", words=["DistributedDataParallel", ".module"], error=(ValueError, RuntimeError))
def wrapped(run: Run) -> None:
    if run.plain or run.world == 1 and not dist.is_initialized():
        run.start()
        run.train()
    else:
        run.start(lambda: nn.parallel.DistributedDataParallel(models.Mlp()))
        run.train()


@case("a model that already", words=["'first.weight'", "zero_grad()"], error=ValueError)
def with_gradients(run: Run) -> None:
    def build() -> nn.Module:
        model = models.Mlp()
        model(torch.ones(2, 7)).sum().backward()
        return model

    run.start(models.Mlp if run.plain else build)
    run.train()


@case("buffers changed in", [False, True])
def batch_norm(run: Run, broadcast: bool) -> None:
    more: dict[str, Any] = {} if run.plain else {"broadcast_buffers": broadcast}
    run.start(models.ConvNet, batch=models.image_batch, ddp={"broadcast_buffers": broadcast}, **more)
    run.train()
    run.see(dict(run.module.named_buffers()))


@case("a model in fp64")
def double(run: Run) -> None:
    run.start(
        lambda: models.Mlp().double(), loss=lambda model, batch: F.mse_loss(model(batch[0].double()), batch[1].double())
    )
    run.train()


@case("parameters of several")
def mixed_dtypes(run: Run) -> None:
    class Mixed(models.Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.second.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)).double())

    run.start(Mixed)
    run.train()


@case("complex parameters", words=["'gain' is complex", "two real ones"], error=ValueError)
def complex_parameters(run: Run) -> None:
    class Phases(models.Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (super().forward(x) * self.gain).abs()

    run.start(Phases)
    run.train()
