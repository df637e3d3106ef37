"""A steady step never waits for the device, whatever the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.toolkit.configs import ADAMW, at
from tests.toolkit.lockstep import loss_of, make_engine
from tests.toolkit.ranks import on_ranks
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


def waits_of_training(config: dict[str, Any], loop: str) -> list[int]:
    """For each step behind the first ones. In the loop "unused" no rank uses the second weight of layer 0 before the
    last steps, and rank 1 alone that of layer 1 in every second step; in "phases" those of a step are called one by
    one."""
    engine = make_engine(config, on_device=True)
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2, 0.5) if loop == "schedule" else None
    waits = Waits()
    with waits.counting():
        for step in range(STEPS):
            waits.step = step
            extras = (True, True, True)
            if loop == "unused":
                extras = (step > 4 and engine.rank == 1, step % 2 == 0 and engine.rank == 1, True)
            loss = loss_of(engine, step, 0, extras)
            if schedule is not None:
                loss.backward()
                engine.optimizer.step()
                schedule.step()
                engine.optimizer.zero_grad()
                continue
            engine.backward(loss, weight=3 + engine.rank if loop == "weight" else None)
            if loop == "phases":
                engine.update()
                engine.publish()
                engine.zero_grad()
            else:
                engine.step()
    return waits.of_step[STEADY:]


@pytest.mark.fast("2-1-schedule", "2-2-weight", "2-3-engine", "2-2-unused")
@pytest.mark.parametrize(
    ("stage", "loop"),
    [(0, "unused"), (1, "schedule"), (2, "weight"), (3, "engine"), (3, "schedule"), (2, "phases"), (2, "unused")],
)
@on_ranks(2)
def test_a_steady_step_waits_for_nothing(stage: int, loop: str) -> None:
    made = at("3 defaults" if stage == 3 else stage, clip=0.4, optimizer=ADAMW)
    assert waits_of_training(made, loop) == [0] * 4
