"""A steady step never waits for the device, whatever the loop, and gives the numbers of one that does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, PARTITIONED, config
from tests.toolkit.lockstep import Layers, loss_of, make_engine
from tests.toolkit.pool import Pools
from tests.toolkit.training import snapshot
from zerolite.utils.accelerator import HostRead

STEPS, STEADY = 7, 3


class Waits:
    """Counts reads that are begun and taken in one step: the host waits for what it has just queued."""

    def __init__(self) -> None:
        self.step = 0
        self.of_step = [0] * STEPS

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        make, get = HostRead.__init__, HostRead.get

        def note_begin(read: Any, tensor: torch.Tensor) -> None:
            make(read, tensor)
            read.begun = self.step

        def note_end(read: Any) -> torch.Tensor:
            self.of_step[self.step] += read.begun == self.step
            return get(read)

        HostRead.__init__, HostRead.get = note_begin, note_end  # type: ignore[method-assign]
        try:
            yield
        finally:
            HostRead.__init__, HostRead.get = make, get  # type: ignore[method-assign]


def run(config: dict[str, Any], loop: str, on_device: bool = True, phases: bool = False) -> dict[str, Any]:
    """In the loop "unused" no rank uses the second weight of layer 0 before the last steps, and rank 1 alone that of
    layer 1 in every second step. phases: those of a step are called one by one."""
    engine = make_engine(config, on_device)
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2, 0.5) if loop == "schedule" else None
    waits = Waits()
    with waits.counting():
        for step in range(STEPS):
            waits.step = step
            extras = (True, True, True)
            if loop == "unused":
                extras = (step > 4 and engine.rank == 1, step % 2 == 0 and engine.rank == 1, True)
            loss = loss_of(engine, step, 0, extras)
            if schedule is None:
                engine.backward(loss, weight=3 + engine.rank if loop == "weight" else None)
                if phases:
                    engine.update()
                    engine.publish()
                    engine.zero_grad()
                else:
                    engine.step()
            else:
                loss.backward()
                engine.optimizer.step()
                schedule.step()
                engine.optimizer.zero_grad()
    states = [
        {name: zerolite.get_full_optimizer_state(p, name) for name in ("step", "exp_avg", "exp_avg_sq")}
        for p in engine.module.parameters()
    ]
    return {"waits": waits.of_step[STEADY:], "parameters": snapshot(engine), "states": states}


def plain(config: dict[str, Any], world: int) -> dict[str, torch.Tensor]:
    """The loop "unused" of one process with the batches of all ranks, by torch's AdamW."""
    model = models.build(Layers)
    optimizer = torch.optim.AdamW(model.parameters(), **config["optimizer"]["params"])
    for step in range(STEPS):
        losses = []
        for rank in range(world):
            x, y = models.float_batch(step, 0, rank)
            extras = (step > 4 and rank == 1, step % 2 == 0 and rank == 1, True)
            losses.append(torch.nn.functional.mse_loss(model(x, extras), y))
        (sum(losses) / world).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# -------------------------------------------------------------------- the tests


FUSED = ("AdamW", {**ADAMW[1], "fused": True})
SLOW = pytest.mark.slow


@pytest.mark.fast("1-schedule", "2-weight", "3-engine")
@pytest.mark.parametrize("loop", ["engine", "schedule", "weight", "unused"])
@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), 1, 2, 3])
def test_a_steady_step_waits_for_nothing(pools: Pools, stage: int, loop: str) -> None:
    made = config(stage, clip=0.4, optimizer=ADAMW, zero=PARTITIONED["defaults"] if stage == 3 else None)
    for ranks in pools(2).run(run, {"config": made, "loop": loop}):
        assert ranks["waits"] == [0] * 4


@pytest.mark.parametrize(
    ("stage", "optimizer", "precision", "phases"),
    [
        (0, ADAMW, "fp32", False),
        (2, ADAMW, "bf16", True),
        (3, FUSED, "bf16", False),
        pytest.param(1, ADAMW, "fp32", True, marks=SLOW),
        pytest.param(3, ADAMW, "bf16", False, marks=SLOW),
        pytest.param(1, FUSED, "fp32", False, marks=SLOW),
        pytest.param(0, FUSED, "bf16", False, marks=SLOW),
        pytest.param(1, FUSED, "bf16", True, marks=SLOW),
    ],
)
def test_parameters_that_no_rank_uses_stay(
    pools: Pools, stage: int, optimizer: tuple, precision: str, phases: bool
) -> None:
    made = config(stage, precision, optimizer=optimizer)
    arguments = {"config": made, "loop": "unused", "phases": phases}
    ranks = pools(2).run(run, arguments)
    by_host = pools(2).run(run, {**arguments, "on_device": False})
    wanted = pools(1).run(plain, {"config": made, "world": 2})[0]
    for result, reference in zip(ranks, by_host, strict=True):
        assert result["waits"] == [0] * 4
        assert_same_bits(result["parameters"], reference["parameters"], "told by the device and by the host")
        for mine, other in zip(result["states"], reference["states"], strict=True):
            assert all(torch.equal(torch.as_tensor(mine[name]), torch.as_tensor(other[name])) for name in mine)
        if precision == "fp32":
            torch.testing.assert_close(result["parameters"], wanted, rtol=1e-5, atol=1e-6)
