"""All ranks launch the same collectives in the same order, whatever gradients, losses and weights each of them has:
NCCL compares nothing, and would exchange what ranks that have parted happen to send."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, PARTITIONED, config, dynamic_fp16
from tests.toolkit.lockstep import loss_of, make_engine
from tests.toolkit.pool import Pools
from tests.toolkit.training import counters, snapshot
from zerolite.comm import record


def launched(recorder: Any) -> list[tuple[Any, ...]]:
    """Return the launches that must be equal on all ranks. Exchanges on the host are left out: which rank has finished
    shows in them."""
    return [(c.op, c.nbytes, c.tag, c.key, c.tensors) for c in recorder.calls]


# -------------------------------------------------------------------- one scenario at a time


def overflow(config: dict[str, Any], scenario: str, on_device: bool) -> dict[str, Any]:
    """Four steps. In the second, rank 0 overflows and rank 1 lacks a gradient: it uses fewer parameters, its batch has
    weight 0, or it has no batch any more. The count of optimizer states is that of the steps that were applied."""
    engine = make_engine(config, on_device)
    with record() as recorder:
        if scenario == "join":
            with engine.join():
                for step in range(4 if engine.rank == 0 else 1):
                    engine.backward(loss_of(engine, step, 0, bad=step == 1))
                    engine.step()
        else:
            for step in range(4):
                second = step == 1
                extras = (True, not (second and engine.rank == 1 and scenario == "unused"), True)
                weight = None
                if scenario == "weight":
                    weight = 0 if second and engine.rank == 1 else 4
                engine.backward(loss_of(engine, step, 0, extras, bad=second and engine.rank == 0), weight=weight)
                engine.step()
                if second:
                    counts = [int(state["step"]) for state in engine.optimizer.state_dict()["state"].values()]
                    assert set(counts) == {1}, counts
                if step == 2:
                    engine.backward(loss_of(engine, step, 1, bad=True), weight=weight)
                    engine.step()
                    assert zerolite.get_full_optimizer_state(engine.module.gain, "step") == 2
    return {"launched": launched(recorder), "parameters": snapshot(engine), "counters": counters(engine)}


def asked_by_one_rank(config: dict[str, Any], on_device: bool) -> dict[str, Any]:
    """Rank 0 asks for what a skipped step has left, the others do not; the third skip in a row is one too many."""
    engine = make_engine(config, on_device)
    error, steps = "", 0
    with record() as recorder:
        try:
            for steps in range(8):
                extras = (True, engine.rank != 1, True)
                engine.backward(loss_of(engine, steps, 0, extras, bad=engine.rank == engine.world_size - 1))
                engine.step()
                if engine.rank == 0:
                    assert engine.skipped_steps == steps + 1
                    assert engine.get_lr() and engine.loss_scale
        except FloatingPointError as failure:
            error = str(failure)
    return {"launched": launched(recorder), "error": error, "steps": steps}


def rolled_back(config: dict[str, Any], on_device: bool, directory: str, module_only: bool) -> list[str]:
    """The errors of four steps. The third is spoilt by the learning rate of the second; then all load a checkpoint."""
    engine = make_engine(config, on_device)
    errors = []
    rate = engine.get_lr()[0]
    for step in range(4):
        engine.optimizer.param_groups[0]["lr"] = float("inf") if step == 1 else rate
        if step == 1:
            engine.save_checkpoint(directory)
        try:
            engine.backward(loss_of(engine, step, 0))
            engine.step()
            errors.append("")
        except FloatingPointError as error:
            errors.append(str(error))
            engine.zero_grad()
        if step == 2:
            engine.load_checkpoint(directory, load_module_only=module_only)
    return errors


def dropped_windows(config: dict[str, Any], scenarios: list[str]) -> dict[str, Any]:
    """``module.zero_grad()`` on all ranks, where the last one has no gradient: its batch has weight 0, its loss reaches
    no parameter, or its backward fails before any has come. ``wanted``: without the windows that are dropped."""
    engine, other = make_engine(config, False), make_engine(config, False)
    last = engine.rank == engine.world_size - 1

    def window(engine: Any, step: int) -> None:
        for micro in range(engine.gradient_accumulation_steps):
            engine.backward(loss_of(engine, step, micro), weight=1 + engine.rank)
            engine.step()

    with record() as recorder:
        for step, scenario in enumerate(scenarios):
            loss = loss_of(engine, step, 7)
            if last and scenario == "nothing":
                loss = torch.ones(3, requires_grad=True).sum()
            if last and scenario == "failure":
                loss.register_hook(_fail)
            with contextlib.suppress(ArithmeticError):
                engine.backward(loss, weight=0 if last and scenario == "weight" else 2)
            engine.step()
            engine.module.zero_grad()
            window(engine, step)
    for step in range(len(scenarios)):
        window(other, step)
    return {
        "launched": launched(recorder),
        "parameters": snapshot(engine),
        "counters": counters(engine),
        "wanted": snapshot(other),
    }


def _fail(gradient: Tensor) -> Tensor:
    raise ArithmeticError("planned failure in backward")


class AnyOrder(nn.Module):
    """Layers that are used in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(6))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


def in_any_order(config: dict[str, Any], shared_memory: bool) -> dict[str, Any]:
    """Three windows in which each rank uses the layers in an order of its own; rank 0 the one of a UNet."""
    before = os.environ.get("ZEROLITE_SHARED_MEMORY", "1")
    os.environ["ZEROLITE_SHARED_MEMORY"] = "1" if shared_memory else "0"
    try:
        engine = zerolite.initialize(models.build(AnyOrder), config)
    finally:
        os.environ["ZEROLITE_SHARED_MEMORY"] = before
    order = [[5, 4, 3, 0, 1, 2], [0, 1, 2, 3, 4, 5], [3, 5, 1, 0, 4, 2]][engine.rank]
    with record() as recorder:
        for step in range(3):
            for micro in range(engine.gradient_accumulation_steps):
                x, _ = models.float_batch(step, micro, engine.rank)
                engine.backward(engine(x, order).square().mean())
                engine.step()
    return {"launched": launched(recorder), "parameters": snapshot(engine), "counters": counters(engine)}


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
        actions += [self.evaluation, self.dropped, self.joined]
        for _ in range(length):
            self.shared.choice(actions)()
            if self.own.random() < 0.3:  # any rank, for itself
                self.own.choice(
                    [lambda: self.engine.skipped_steps, lambda: self.engine.loss_scale, self.engine.get_lr]
                )()

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
        self.engine.update()
        self.engine.publish()
        self.engine.zero_grad()

    def through_p_grad(self) -> None:
        """Also gradients that are not finite, or that no rank has."""
        self.micro_batches()
        shown = [p for p in self.engine.parameters() if p.grad is not None]
        first, *_, last = shown

        def replaced() -> None:
            last.grad = torch.full_like(last.grad, 0.125)

        def left_out() -> None:
            first.grad = None

        ways = [
            lambda: nn.utils.clip_grad_norm_(shown, 0.5),
            lambda: nn.utils.clip_grad_norm_(shown[1::2], 0.1),
            lambda: nn.utils.clip_grad_value_(shown, 0.01),
            lambda: last.grad.mul_(0.5),
            lambda: last.grad.flatten().sort(),
            lambda: torch._foreach_add_([p.grad for p in shown], 1e-3),
            replaced,
        ]
        for way in [*self.shared.sample(ways, 3), *([left_out] if self.shared.random() < 0.5 else [])]:
            way()
        if self.shared.random() < 0.3:  # and more comes
            self.backward(0, self.engine._accumulation.weighted)
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

    def joined(self) -> None:
        if self.engine.world_size == 1:
            return
        weighted = self.weights()
        most = self.shared.randint(1, 3)
        finishes = self.shared.randrange(1, self.engine.world_size)
        with self.engine.join():
            for _ in range(0 if self.engine.rank == finishes else most):
                for micro in range(self.engine.gradient_accumulation_steps):
                    self.backward(micro, weighted)
                    self.engine.step()
        self.step += most


def random_programs(config: dict[str, Any], seeds: list[int], length: int, on_device: bool) -> list[dict[str, Any]]:
    """Each seed's program on an engine of its own."""
    results = []
    for seed in seeds:
        engine = make_engine(config, on_device)
        with record() as recorder:
            Program(engine, seed).run(length)
        results.append({"launched": launched(recorder), "parameters": snapshot(engine), "counters": counters(engine)})
    return results


# -------------------------------------------------------------------- the tests


STAGES = ["0", "1", "2", "3 defaults", "3 moving", "3 tight"]


def setting(stage: str, precision: str, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    number, _, kind = stage.partition(" ")
    more = {"consistency_check_interval": 2, **more}
    if precision == "fp16":
        more = {"fp16": dynamic_fp16(), **more}
        precision = ""
    return config(int(number), precision, accumulation, 0.4, ADAMW, zero=PARTITIONED.get(kind), **more)


def assert_in_step(ranks: list[dict[str, Any]], what: str) -> None:
    for rank, result in enumerate(ranks):
        parted = [pair for pair in zip(ranks[0]["launched"], result["launched"], strict=False) if pair[0] != pair[1]]
        assert not parted, f"{what}: rank 0 launches {parted[0][0]}, rank {rank} {parted[0][1]}"
        assert len(result["launched"]) == len(ranks[0]["launched"]), f"{what}: rank {rank}"
        if "parameters" in result:
            assert_same_bits(result["parameters"], ranks[0]["parameters"], f"{what}: rank {rank} and rank 0")
            assert result["counters"] == ranks[0]["counters"], what


@pytest.mark.fast("1-fp16-unused", "2-bf16-join", "3 defaults-bf16-weight")
@pytest.mark.parametrize("scenario", ["unused", "weight", "join"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("stage", ["1", "2", "3 defaults"])
def test_a_step_that_the_device_skips(pools: Pools, stage: str, precision: str, scenario: str) -> None:
    """The rank that lacks a gradient launches what the others launch, and the numbers are those of a skip that the
    host decides."""
    kwargs = {"config": setting(stage, precision), "scenario": scenario}
    ranks = pools(2).run(overflow, {**kwargs, "on_device": True})
    by_host = pools(2).run(overflow, {**kwargs, "on_device": False})
    assert_in_step(ranks, scenario)
    assert ranks[0]["counters"]["skipped_steps"] == (1 if scenario == "join" else 2)
    for result, reference in zip(ranks, by_host, strict=True):
        assert_same_bits(result["parameters"], reference["parameters"], "skipped on the device and by the host")
        assert result["counters"] == reference["counters"]


@pytest.mark.fast("0-1-messages")
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared-memory", "messages"])
@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_gradients_may_come_in_another_order_on_each_rank(
    pools: Pools, stage: str, accumulation: int, shared_memory: bool
) -> None:
    """The order of launches becomes that of rank 0, and the numbers are those of reductions after backward."""
    kwargs = {"shared_memory": shared_memory}
    wanted = setting(stage, "bf16", accumulation)
    ranks = pools(3).run(in_any_order, {**kwargs, "config": wanted})
    assert_in_step(ranks, "any order")
    keys = [call[3] for call in ranks[0]["launched"] if call[2] == "gradients"]
    last, window = keys[-6:], keys[:-6]
    assert sorted(last) != last and set(last) == set(window)
    wanted["zero_optimization"]["overlap_comm"] = False
    after = pools(3).run(in_any_order, {**kwargs, "config": wanted})
    assert_same_bits(ranks[0]["parameters"], after[0]["parameters"], "during and after backward")


@pytest.mark.fast("False-1", "True-3 defaults")
@pytest.mark.parametrize("stage", ["1", "3 defaults"])
@pytest.mark.parametrize("on_device", [True, False])
def test_an_error_about_a_step_comes_in_the_same_place(pools: Pools, stage: str, on_device: bool) -> None:
    """Also where one rank has read the outcome before the others."""
    limited = setting(stage, "bf16", max_consecutive_skipped_steps=3)
    ranks = pools(3).run(asked_by_one_rank, {"config": limited, "on_device": on_device})
    assert_in_step(ranks, "asked")
    for result in ranks:
        assert result["steps"] == (3 if on_device else 2)
        assert "max_consecutive_skipped_steps is 3" in result["error"]


@pytest.mark.parametrize("stage", ["0", "2", "3 defaults"])
def test_a_window_is_dropped_by_ranks_that_have_no_gradient(pools: Pools, stage: str) -> None:
    scenarios = ["weight"] if stage.startswith("3") else ["weight", "nothing", "failure"]
    arguments = {"config": setting(stage, "fp32", 2), "scenarios": scenarios}
    ranks = pools(2).run(dropped_windows, arguments)
    assert_in_step(ranks, stage)
    assert_same_bits(ranks[0]["parameters"], ranks[0]["wanted"], "windows that were dropped")


@pytest.mark.fast("True-False", "False-False")
@pytest.mark.parametrize("module_only", [False, True])
@pytest.mark.parametrize("on_device", [True, False])
def test_a_rollback_ends_the_errors_of_the_steps_before(
    pools: Pools, tmp_path: Path, on_device: bool, module_only: bool
) -> None:
    arguments = {"on_device": on_device, "directory": str(tmp_path), "module_only": module_only}
    for errors in pools(2).run(rolled_back, {"config": setting("2", "bf16"), **arguments}):
        assert errors[0] == errors[1] == errors[3] == ""
        assert ("update of step 2 made weights" in errors[2]) or on_device


FAST = [("1", "bf16", True), ("2", "fp16", True), ("3 defaults", "fp32", True), ("3 tight", "bf16", True)]


def _random_programs(pools: Pools, stage: str, precision: str, on_device: bool, seeds: list[int], world: int) -> None:
    for accumulation in (1, 2):
        kwargs = {
            "config": setting(stage, precision, accumulation, max_consecutive_skipped_steps=0),
            "seeds": seeds,
            "length": 8,
            "on_device": on_device,
        }
        ranks = pools(world).run(random_programs, kwargs)
        for number, seed in enumerate(seeds):
            assert_in_step([result[number] for result in ranks], f"accumulation {accumulation}, seed {seed}")


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "precision", "on_device"), FAST)
def test_random_programs(pools: Pools, stage: str, precision: str, on_device: bool) -> None:
    _random_programs(pools, stage, precision, on_device, [1, 2, 3], 3)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_many_random_programs(pools: Pools, stage: str, precision: str, on_device: bool, world: int) -> None:
    _random_programs(pools, stage, precision, on_device, list(range(10, 22)), world)
