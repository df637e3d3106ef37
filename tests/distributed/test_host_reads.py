"""A steady step never waits for the device, whatever the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, at
from tests.toolkit.lockstep import loss_of, make_engine
from tests.toolkit.optimizers import counted
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import snapshot
from zerolite.utils.accelerator import HostRead

STEPS, STEADY = 7, 3


@contextlib.contextmanager
def counting() -> Iterator[list[int]]:
    """Count, in the list's last element, reads that are taken before another one is appended: the host waits for what
    it has just queued."""
    waits: list[int] = []
    make, get = HostRead.__init__, HostRead.get

    def begin(read: Any, tensor: torch.Tensor) -> None:
        make(read, tensor)
        read.begun = len(waits)

    def take(read: Any) -> torch.Tensor:
        waits[-1] += read.begun == len(waits)
        return get(read)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostRead, "__init__", begin)
        patch.setattr(HostRead, "get", take)
        yield waits


@pytest.mark.fast("2-1-schedule", "2-2-weight", "2-3-engine")
@pytest.mark.parametrize(
    ("stage", "loop"),
    [(1, "schedule"), (2, "weight"), (3, "engine"), (3, "schedule")],
)
@on_ranks(2)
def test_a_steady_step_waits_for_nothing(stage: int, loop: str) -> None:
    made = at("3 defaults" if stage == 3 else stage, clip=0.4, optimizer=ADAMW)
    engine = make_engine(made, on_device=True)
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2, 0.5) if loop == "schedule" else None
    with counting() as waits:
        for step in range(STEPS):
            waits.append(0)
            loss = loss_of(engine, step, 0)
            if schedule is not None:
                loss.backward()
                engine.optimizer.step()
                schedule.step()
                engine.optimizer.zero_grad()
                continue
            engine.backward(loss, weight=3 + engine.rank if loop == "weight" else None)
            engine.step()
    assert waits[STEADY:] == [0] * 4


@pytest.mark.fast("2-2")
@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(2)
def test_parameters_that_a_rank_has_not_used_are_updated_where_another_has(stage: int) -> None:
    """Twenty of them, at stage 1 in torch's own optimizer. No rank uses the second weight of layer 0 before the last
    steps, and rank 1 alone that of layer 1 in every second step. A step is one launch, with the numbers of a host that
    decides."""
    kernels, layers = stage != 1, 20
    optimizer = ADAMW if kernels else ("AdamW", {"lr": 1e-3, "fused": True})
    outcomes = []
    for on_device in (True, False):
        engine = make_engine(at(stage, clip=0.4, optimizer=optimizer), on_device, layers)
        with counted() as calls:
            for step in range(STEPS):
                mixed = (step > 4 and engine.rank == 1, step % 2 == 0 and engine.rank == 1)
                engine.backward(loss_of(engine, step, 0, (*mixed, *[False] * (layers - 3), True)))
                engine.step()
        assert len(calls["update"]) == STEPS * kernels
        states = engine.optimizer.state_dict()["state"]
        counts = {f"step of {index}": torch.as_tensor(state["step"]) for index, state in states.items()}
        outcomes.append({**snapshot(engine), **counts})
    assert_same_bits(*outcomes, "decided on device and by the host")
