"""All ranks launch the same collectives in the same order, whatever gradients, losses and weights each of them has:
NCCL compares nothing, and would exchange what ranks that have parted happen to send."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits, assert_same_on_ranks, from_all_ranks
from tests.toolkit.configs import ADAMW, at, dynamic_fp16
from tests.toolkit.lockstep import loss_of, make_engine
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import counters, snapshot
from zerolite.comm import record


def setting(stage: str, precision: str, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    more = {"consistency_check_interval": 2, **({"fp16": dynamic_fp16()} if precision == "fp16" else {}), **more}
    return at(stage, precision, accumulation, 0.4, ADAMW, **more)


@contextlib.contextmanager
def in_step(what: str) -> Iterator[list[tuple[Any, ...]]]:
    """All ranks launch the same inside. Exchanges on the host are left out: which rank has finished shows in them."""
    launched: list[tuple[Any, ...]] = []
    with record() as recorder:
        yield launched
    launched += [(c.op, c.nbytes, c.tag, c.key, c.tensors) for c in recorder.calls]
    rows = from_all_ranks(launched)
    for rank, row in enumerate(rows):
        parted = [pair for pair in zip(rows[0], row, strict=False) if pair[0] != pair[1]]
        assert not parted, f"{what}: rank 0 launches {parted[0][0]}, rank {rank} {parted[0][1]}"
        assert len(row) == len(rows[0]), f"{what}: rank {rank}"


def outcome(engine: Any) -> dict[str, Any]:
    """Parameters and counters, which are the same on all ranks."""
    found = {**snapshot(engine), **counters(engine)}
    assert_same_on_ranks(found)
    return found


def assert_same_outcome(one: dict[str, Any], other: dict[str, Any], what: str) -> None:
    tensors = [name for name, value in one.items() if isinstance(value, Tensor)]
    assert_same_bits({name: one[name] for name in tensors}, {name: other[name] for name in tensors}, what)
    assert all(one[name] == other[name] for name in one if name not in tensors), what


# -------------------------------------------------------------------- one scenario at a time


def overflow(config: dict[str, Any], scenario: str, on_device: bool) -> dict[str, Any]:
    """Four steps. In the second, rank 0 overflows and rank 1 lacks a gradient: it uses fewer parameters, or its batch
    has weight 0. The count of optimizer states is that of the steps that were applied."""
    engine = make_engine(config, on_device)
    with in_step(scenario):
        for step in range(4):
            second = step == 1
            extras = (True, not (second and engine.rank == 1 and scenario == "unused"), True)
            weight = None if scenario != "weight" else 0 if second and engine.rank == 1 else 4
            engine.backward(loss_of(engine, step, 0, extras, bad=second and engine.rank == 0), weight=weight)
            engine.step()
            if second:
                states = engine.optimizer.state_dict()["state"].values()
                assert {int(state["step"]) for state in states} == {1}
            if step == 2:
                engine.backward(loss_of(engine, step, 1, bad=True), weight=weight)
                engine.step()
                assert zerolite.get_full_optimizer_state(engine.module.gain, "step") == 2
    return outcome(engine)


SKIPPED = [("1", "fp16", "unused"), ("1", "bf16", "weight"), ("2", "bf16", "unused"), ("2", "fp16", "weight")]
SKIPPED += [("3 defaults", "bf16", "weight"), ("3 defaults", "fp16", "unused"), ("3 defaults", "fp16", "weight")]


@pytest.mark.fast("2-1-fp16-unused", "2-2-bf16-unused", "2-3 defaults-bf16-weight")
@pytest.mark.parametrize(("stage", "precision", "scenario"), SKIPPED)
@on_ranks(2)
def test_a_step_that_the_device_skips(stage: str, precision: str, scenario: str) -> None:
    """The rank that lacks a gradient launches what the others launch, and the numbers are those of a skip that the
    host decides."""
    found = overflow(setting(stage, precision), scenario, True)
    assert found["skipped_steps"] == 2
    assert_same_outcome(found, overflow(setting(stage, precision), scenario, False), "skipped on device and by host")


class AnyOrder(nn.Module):
    """Layers that are used in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(6))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


def in_any_order(config: dict[str, Any]) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    """Three windows in which each rank uses the layers in an order of its own; rank 0 the one of a UNet."""
    engine = zerolite.initialize(models.build(AnyOrder), config)
    order = [[5, 4, 3, 0, 1, 2], [0, 1, 2, 3, 4, 5], [3, 5, 1, 0, 4, 2]][engine.rank]
    with in_step("any order") as launched:
        for step in range(3):
            for micro in range(engine.gradient_accumulation_steps):
                x, _ = models.float_batch(step, micro, engine.rank)
                engine.backward(engine(x, order).square().mean())
                engine.step()
    return launched, outcome(engine)


@pytest.mark.fast("3-0-1-messages")
@pytest.mark.parametrize(
    ("stage", "accumulation", "way"),
    [("0", 1, "messages"), ("0", 2, "shared"), ("1", 1, "shared"), ("1", 2, "messages"), ("2", 1, "messages")],
)
@on_ranks(3)
def test_gradients_may_come_in_another_order_on_each_rank(stage: str, accumulation: int, way: str) -> None:
    """The order of launches becomes that of rank 0, and the numbers are those of reductions after backward."""
    os.environ["ZEROLITE_SHARED_MEMORY"] = str(int(way == "shared"))
    made = setting(stage, "bf16", accumulation)
    launched, found = in_any_order(made)
    keys = [call[3] for call in launched if call[2] == "gradients"]
    last, window = keys[-6:], keys[:-6]
    assert sorted(last) != last and set(last) == set(window)
    made["zero_optimization"]["overlap_comm"] = False
    assert_same_outcome(found, in_any_order(made)[1], "during and after backward")


@pytest.mark.parametrize(("stage", "on_device"), [("1", False), ("3 defaults", True)])
@on_ranks(3)
def test_an_error_about_a_step_comes_in_the_same_place(stage: str, on_device: bool) -> None:
    """Rank 0 asks for what a skipped step has left, the others do not; the third skip in a row is one too many."""
    engine = make_engine(setting(stage, "bf16", max_consecutive_skipped_steps=3), on_device)
    with in_step("asked"), pytest.raises(FloatingPointError, match="max_consecutive_skipped_steps is 3"):
        for step in range(8):
            extras = (True, engine.rank != 1, True)
            engine.backward(loss_of(engine, step, 0, extras, bad=engine.rank == engine.world_size - 1))
            engine.step()
            if engine.rank == 0:
                assert engine.skipped_steps == step + 1
                assert engine.get_lr() and engine.loss_scale
    assert step == (3 if on_device else 2)


def fail(gradient: Tensor) -> Tensor:
    raise ArithmeticError("planned failure in backward")


@pytest.mark.parametrize("stage", ["0", "2", "3 defaults"])
@on_ranks(2)
def test_a_window_is_dropped_by_ranks_that_have_no_gradient(stage: str) -> None:
    """``module.zero_grad()`` on all ranks, where the last one has no gradient: its batch has weight 0, its loss reaches
    no parameter, or its backward fails before any has come."""
    scenarios = ["weight"] if stage.startswith("3") else ["weight", "nothing", "failure"]
    engine, other = (make_engine(setting(stage, "fp32", 2), False) for _ in range(2))
    last = engine.rank == 1

    def window(engine: Any, step: int) -> None:
        for micro in range(2):
            engine.backward(loss_of(engine, step, micro), weight=1 + engine.rank)
            engine.step()

    with in_step(stage):
        for step, scenario in enumerate(scenarios):
            loss = loss_of(engine, step, 7)
            if last and scenario == "nothing":
                loss = torch.ones(3, requires_grad=True).sum()
            if last and scenario == "failure":
                loss.register_hook(fail)
            with contextlib.suppress(ArithmeticError):
                engine.backward(loss, weight=0 if last and scenario == "weight" else 2)
            engine.step()
            engine.module.zero_grad()
            window(engine, step)
    for step in range(len(scenarios)):
        window(other, step)
    outcome(engine)
    assert_same_bits(snapshot(engine), snapshot(other), "windows that were dropped")


@pytest.mark.fast("2-True", "2-False")
@pytest.mark.parametrize("on_device", [True, False])
@on_ranks(2)
def test_a_rollback_ends_the_skips_of_the_steps_before(on_device: bool, tmp_path: Path) -> None:
    """The third step is spoilt by the learning rate of the second; then all load a checkpoint."""
    for module_only in (False, True):
        engine = make_engine(setting("2", "bf16"), on_device)
        directory, rate = str(tmp_path / str(module_only)), engine.get_lr()[0]

        def train(step: int, engine: Any = engine) -> None:
            engine.backward(loss_of(engine, step, 0))
            engine.step()

        for step in range(4):
            engine.optimizer.param_groups[0]["lr"] = float("inf") if step == 1 else rate
            if step == 1:
                engine.save_checkpoint(directory)
            train(step)
            if step == 2:
                engine.load_checkpoint(directory, load_module_only=module_only)
        assert engine.skipped_steps == int(module_only)


# -------------------------------------------------------------------- random programs


class Program:
    """Program of all ranks, drawn from one seed; each rank's way to run it is drawn from the seed and its rank."""

    def __init__(self, engine: Any, seed: int) -> None:
        self.engine = engine
        self.shared = random.Random(seed)
        self.own = random.Random(1009 * seed + engine.rank + 1)
        self.step = 0
        self.scaled = True

    def run(self, length: int) -> None:
        actions = [self.engine_loop, self.plain_loop, self.phases, self.through_p_grad]
        actions += [self.evaluation, self.dropped]
        for _ in range(length):
            self.shared.choice(actions)()
            if self.own.random() < 0.3:  # any rank, for itself
                asks = [lambda: self.engine.skipped_steps, lambda: self.engine.loss_scale, self.engine.get_lr]
                self.own.choice(asks)()

    def loss(self, micro: int = 0) -> Tensor:
        own = self.own
        extras = (own.random() < 0.8, own.random() < 0.8, own.random() < 0.8)
        return loss_of(self.engine, self.step, micro, extras, bad=own.random() < 0.1)

    def weights(self) -> bool:
        return self.shared.random() < 0.3

    def backward(self, micro: int, weighted: bool) -> None:
        # Never 0 on all ranks, which is an error.
        least = 1 if self.engine.rank == 0 else 0
        self.engine.backward(self.loss(micro), weight=self.own.randint(least, 5) if weighted else None)

    def micro_batches(self) -> None:
        weighted = self.weights()
        for micro in range(self.engine.gradient_accumulation_steps):
            if self.shared.random() < 0.2:
                self.evaluation()
            self.backward(micro, weighted)
            if micro + 1 < self.engine.gradient_accumulation_steps:
                self.engine.step()
        self.step += 1

    def engine_loop(self) -> None:
        self.micro_batches()
        self.engine.step()

    def plain_loop(self) -> None:
        count = self.shared.randint(1, 3)
        for micro in range(count):
            (self.loss(micro) / count).backward()
        self.engine.optimizer.step()
        self.engine.optimizer.zero_grad()
        self.step += 1

    def phases(self) -> None:
        self.micro_batches()
        if self.shared.random() < 0.5:
            self.engine.reduce_gradients()
        if self.shared.random() < 0.5:
            self.engine.clip_gradients(0.5)
        if self.shared.random() < 0.5:
            zerolite.get_full_grad(self.engine.module.last.weight)
        self.engine.step()

    def through_p_grad(self) -> None:
        """Change gradients through ``p.grad``, some not finite and some that no rank has."""
        self.micro_batches()
        shown = [p for p in self.engine.parameters() if p.grad is not None]
        first, *_, last = shown
        ways = [
            lambda: nn.utils.clip_grad_norm_(shown, 0.5),
            lambda: nn.utils.clip_grad_norm_(shown[1::2], 0.1),
            lambda: nn.utils.clip_grad_value_(shown, 0.01),
            lambda: last.grad.mul_(0.5),
            lambda: last.grad.flatten().sort(),
            lambda: torch._foreach_add_([p.grad for p in shown], 1e-3),
            lambda: setattr(last, "grad", torch.full_like(last.grad, 0.125)),
        ]
        chosen = self.shared.sample(ways, 3)
        for way in chosen:
            way()
        if self.shared.random() < 0.5:
            first.grad = None
        if self.shared.random() < 0.3 and ways[-1] not in chosen:  # and more comes
            self.backward(0, self.engine._parts.accumulation.weighted)
        self.engine.step()

    def evaluation(self) -> None:
        self.engine.eval()
        with torch.no_grad():
            for micro in range(self.shared.randint(1, 2)):
                loss_of(self.engine, self.step, 50 + micro)
        self.engine.train()

    def dropped(self) -> None:
        self.backward(0, self.weights())
        self.engine.zero_grad()


PROGRAMS = [("0", "fp16", True), ("1", "bf16", True), ("1", "fp32", False), ("2", "fp16", True), ("2", "bf16", False)]
PROGRAMS += [("3 defaults", "fp32", True), ("3 defaults", "fp16", False)]
PROGRAMS += [("3 moving", "fp16", True), ("3 tight", "bf16", True)]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "precision", "on_device"), PROGRAMS)
@on_ranks(2, 3, 4, timeout=120)
def test_random_programs(stage: str, precision: str, on_device: bool) -> None:
    world = dist.get_world_size()
    for accumulation in (1, 2):
        for seed in range(8 * world, 8 * world + {2: 6, 3: 3, 4: 2}[world]):
            engine = make_engine(setting(stage, precision, accumulation, max_consecutive_skipped_steps=0), on_device)
            with in_step(f"accumulation {accumulation}, seed {seed}"):
                Program(engine, seed).run(8)
            outcome(engine)
            del engine
