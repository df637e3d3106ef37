"""A stack of tiny layers, in which nearly all time is the host's, and who trains it.

All of them take AdamW (torch's fused kernel, zerolite's by its default) and nothing else: no clipping.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.competitors import Competitor, Setting

WIDTH = 32
BATCH = 8
FAKE_WORLD = 64

Step = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    """`(batch, WIDTH)` in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


def build_stack(layers: int, seed: int = 0) -> nn.Sequential:
    """The same weights for every competitor."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Layer() for _ in range(layers)))


def make_inputs(count: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, WIDTH, generator=generator) for _ in range(count)]


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


class CollectiveClock:
    """Seconds spent inside the collectives of a communicator that only pretends: none of them are the runtime's."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self._now = 0.0, now

    def wrap(self, owner: Any, method: str) -> None:
        inner, now = getattr(owner, method), self._now

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = now()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += now() - begin

        setattr(owner, method, timed)


def null_communicator(clock: CollectiveClock, ranks: int = FAKE_WORLD) -> Any:
    """One rank of so many, alone; `clock` takes the time of what it does instead of collectives."""
    from zerolite.comm import NullCommunicator

    communicator = NullCommunicator(0, ranks)
    for method in ("_gather_shards", "_reduce_scatter", "_all_reduce", "_all_gather"):
        clock.wrap(communicator, method)
    return communicator


@dataclass(frozen=True)
class Trainee:
    """A competitor, built: `step(x) -> loss`, the clock of what only pretends, stage 3's coordinator where there is
    one."""

    step: Step
    clock: CollectiveClock
    coordinator: Any = None


def _plain_loop(model: nn.Module) -> Trainee:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainee(step, CollectiveClock())


def _engine_loop(engine: Any, clock: CollectiveClock) -> Trainee:
    def step(x: Tensor) -> Tensor:
        loss = loss_of(engine(x))
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Trainee(step, clock, getattr(engine, "coordinator", None))


def build_plain(model: nn.Sequential) -> Trainee:
    return _plain_loop(model)


def build_ddp(model: nn.Sequential) -> Trainee:
    return _plain_loop(nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True))


def build_fsdp2(model: nn.Sequential) -> Trainee:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain_loop(model)


def build_deepspeed(model: nn.Sequential, stage: int) -> Trainee:
    import deepspeed  # type: ignore[import-not-found]

    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    elif stage:  # its default reserves 2 GB
        zero.update(reduce_bucket_size=4_000_000, allgather_bucket_size=4_000_000)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # its default is 1.0
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    return _engine_loop(engine, CollectiveClock())


def build_zerolite(model: nn.Sequential, stage: int, fake: bool = False, **zero: int) -> Trainee:
    """`fake`: as one rank of `FAKE_WORLD` whose collectives send nothing. `zero`: keys of `zero_optimization`."""
    import zerolite
    from zerolite.comm import use_communicator

    keys: dict[str, Any] = {"stage": stage, **zero}
    if stage == 3:
        keys["stage3_param_persistence_threshold"] = 0
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": keys,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "consistency_check_interval": 0 if fake else 100,  # ranks that send nothing do not agree
    }
    clock = CollectiveClock()

    with use_communicator(lambda rank, world: null_communicator(clock)) if fake else contextlib.nullcontext():
        return _engine_loop(zerolite.initialize(model, config), clock)


# A unit per module that owns parameters, with a gather and a reduction of its own; and gathered for every use.
MODULES = {
    "stage3_module_granularity_threshold": 0,
    "stage3_prefetch_bucket_size": 1,
    "reduce_bucket_size": 1,
}
RESHARD = {**MODULES, "stage3_max_reuse_distance": 0}


def _all_competitors() -> dict[str, Competitor]:
    found = [
        Competitor("plain", build_plain),
        Competitor("ddp", build_ddp),
        Competitor("fsdp2", build_fsdp2),
        *(Competitor(f"deepspeed-{stage}", build_deepspeed, "deepspeed", {"stage": stage}) for stage in (1, 3)),
        Competitor("zerolite-0", build_zerolite, "zerolite", {"stage": 0}),
    ]
    for stage in (1, 2):
        options = {"stage": stage, "fake": True}
        name = f"zerolite-{stage}-w{FAKE_WORLD}"
        found.append(Competitor(name, build_zerolite, "zerolite", options, communicates=False))
    for suffix, keys in (("", {}), ("-modules", MODULES), ("-modules-reshard", RESHARD)):
        for world, fake in (("", False), (f"-w{FAKE_WORLD}", True)):
            options = {"stage": 3, "fake": fake, **keys}
            name = f"zerolite-3{world}{suffix}"
            found.append(Competitor(name, build_zerolite, "zerolite", options, communicates=not fake))
    return {competitor.name: competitor for competitor in found}


COMPETITORS = _all_competitors()


@dataclass(frozen=True)
class Ready:
    """After the warm-up: the loss of each of its steps; what one more step of zerolite launched (None elsewhere)."""

    losses: list[float]
    gathers: int | None = None
    reductions: int | None = None


@dataclass(frozen=True)
class Turn:
    """Seconds of each step, CPU seconds of all of them, seconds of each that went to collectives that only pretend."""

    step_s: list[float]
    cpu_s: float
    fake_s: list[float]


def prepare(name: str, layers: int) -> Trainee:
    """Build a competitor in this process, which is the only one of its default group."""
    competitor = COMPETITORS[name]
    return competitor.build(build_stack(layers), **competitor.options)


def train(trainee: Trainee, inputs: Sequence[Tensor], steps: int) -> Turn:
    """Take `steps` steps and time each."""
    now, seconds, fake = time.perf_counter, [], []
    cpu = time.process_time()
    for number in range(steps):
        fake_before, begin = trainee.clock.seconds, now()
        trainee.step(inputs[number % len(inputs)])
        seconds.append(now() - begin)
        fake.append(trainee.clock.seconds - fake_before)
    return Turn(seconds, time.process_time() - cpu, fake)


def warm_up(trainee: Trainee, inputs: Sequence[Tensor], steps: int) -> Ready:
    """Raises RuntimeError if stage 3 does not follow its plan afterwards: then something else would be measured."""
    losses = [float(trainee.step(inputs[number % len(inputs)])) for number in range(steps)]
    if trainee.coordinator is None:
        return Ready(losses)
    if not trainee.coordinator.schedule.following:
        raise RuntimeError(
            f"expected stage 3 to follow its plan after {steps} steps, got one that works on demand; warm up for longer"
        )
    from zerolite.comm import record

    with record() as calls:
        trainee.step(inputs[0])
    return Ready(losses, calls.count("all_gather", "parameters"), calls.count("reduce_scatter", "gradients"))


def serve_stack(pipe: Connection, rank: int, setting: Setting, name: str, layers: int, warmup: int) -> None:
    """Serve the `Workers` of `host_overhead.py`: replies are a `Ready`, then `Turn`s."""
    trainee, inputs = prepare(name, layers), make_inputs()
    pipe.send(warm_up(trainee, inputs, warmup))
    while (steps := pipe.recv()) > 0:
        pipe.send(train(trainee, inputs, steps))
