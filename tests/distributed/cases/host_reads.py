"""Loops on a device that decides on skips itself, and the reads of the host that wait for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

import zerolite
from tests import models
from tests.distributed.cases.lockstep import Layers, loss_of, make_engine
from tests.distributed.cases.training import snapshot
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
