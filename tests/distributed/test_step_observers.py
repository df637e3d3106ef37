"""Observers with a slice of a step's statistics: the way for new checks to ride on the step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.toolkit.compare import from_all_ranks
from tests.toolkit.configs import at
from tests.toolkit.lockstep import loss_of, make_engine
from tests.toolkit.ranks import on_ranks
from zerolite.comm import record
from zerolite.zero.observers import StepObserver, UpdateFacts


class Ranks(StepObserver):
    """Adds the numbers of the ranks, and lets all of them raise after its third reading."""

    slice_size = 2

    def __init__(self) -> None:
        self.read: list[tuple[int, list[float]]] = []
        self.updates: list[UpdateFacts] = []

    def before_update(self, facts: UpdateFacts) -> None:
        self.updates.append(facts)

    def write_slice(self, numbers: torch.Tensor) -> int:
        assert numbers.tolist() == [0.0, 0.0]
        numbers[0].fill_(1.0)
        numbers[1].fill_(dist.get_rank())
        return len(self.updates)

    def read_slice(self, written: int, sums: torch.Tensor) -> Exception | None:
        self.read.append((written, sums.tolist()))
        return ArithmeticError("three are enough") if len(self.read) == 3 else None


@pytest.mark.slow
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("stage", ["0", "2", "3 defaults"])
@on_ranks(2, 3)
def test_a_slice_is_added_over_ranks_and_its_error_raised_on_all(stage: str, on_device: bool) -> None:
    world = dist.get_world_size()
    engine = make_engine(at(stage, consistency_check_interval=0), on_device)
    ranks = Ranks()
    engine._parts.observers.add(ranks)
    errors, launched = [], []
    for step in range(5):
        with record() as recorder:
            engine.backward(loss_of(engine, step, 0))
            try:
                engine.step()
            except ArithmeticError as error:
                errors.append((step, str(error)))
                engine.zero_grad()
        launched.append(recorder.count(tag="stats"))
    engine.get_global_grad_norm()  # settles the last step
    assert all(sums == [world, world * (world - 1) / 2] for _, sums in ranks.read)
    assert [written for written, _ in ranks.read] == [facts + 1 for facts in range(len(ranks.read))]
    # The host raises before the third update, and after a device's third update before the fourth.
    assert errors == [(3 if on_device else 2, "three are enough")]
    assert [facts.backwards for facts in ranks.updates] == ([1, 2, 3, 5] if on_device else [1, 2, 3, 4, 5])
    assert launched[4] == 1, "the slice needs no collective of its own"
    assert len(set(map(str, from_all_ranks((ranks.read, errors))))) == 1
