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
from tests.toolkit.configs import ADAMW, PARTITIONED, Optimizer, config
from tests.toolkit.lockstep import Layers, loss_of, make_engine
from tests.toolkit.ranks import on_ranks
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


@pytest.mark.fast("2-1-schedule", "2-2-weight", "2-3-engine")
@pytest.mark.parametrize(
    ("stage", "loop"),
    [(0, "engine"), (1, "schedule"), (2, "weight"), (3, "engine"), (3, "schedule"), (3, "weight"), (2, "unused")],
)
@on_ranks(2)
def test_a_steady_step_waits_for_nothing(stage: int, loop: str) -> None:
    made = config(stage, clip=0.4, optimizer=ADAMW, zero=PARTITIONED["defaults"] if stage == 3 else None)
    assert run(made, loop)["waits"] == [0] * 4


@pytest.mark.fast("2-0-*", "2-2-*", "2-3-optimizer2-bf16-False")
@pytest.mark.parametrize(
    ("stage", "optimizer", "precision", "phases"),
    [
        (0, ADAMW, "fp32", False),
        (2, ADAMW, "bf16", True),
        (3, FUSED, "bf16", False),
        (1, FUSED, "fp32", True),
        (3, ADAMW, "bf16", False),
    ],
)
@on_ranks(2)
def test_parameters_that_no_rank_uses_stay(stage: int, optimizer: Optimizer, precision: str, phases: bool) -> None:
    made = config(stage, precision, optimizer=optimizer)
    found, by_host = run(made, "unused", phases=phases), run(made, "unused", on_device=False, phases=phases)
    assert found["waits"] == [0] * 4
    assert_same_bits(found["parameters"], by_host["parameters"], "told by the device and by the host")
    for mine, other in zip(found["states"], by_host["states"], strict=True):
        assert all(torch.equal(torch.as_tensor(mine[name]), torch.as_tensor(other[name])) for name in mine)
    if precision == "fp32":
        torch.testing.assert_close(found["parameters"], plain(made, 2), rtol=1e-5, atol=1e-6)
