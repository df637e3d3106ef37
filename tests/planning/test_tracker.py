"""Counting storages: what is allocated, resized and released, whose it is, and which module was at work."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from zerolite import memory_items
from zerolite.memory_items import ACTIVATIONS, BUCKETS, GATHERED, OTHER, own
from zerolite.planning.tracker import HOST, MemoryTracker


@pytest.fixture(params=["fake", "real"])
def tracker(request: pytest.FixtureRequest):
    with FakeTensorMode() if request.param == "fake" else torch.no_grad(), MemoryTracker() as tracker:
        with torch.enable_grad():
            yield tracker
    assert tracker not in memory_items.listeners


def test_storages_count_once_and_until_they_die(tracker: MemoryTracker) -> None:
    first = torch.empty(1000)
    views = [first.view(10, 100), first[10:], first.detach(), nn.Parameter(first)]
    assert tracker.nbytes == 4000
    second = first.double()
    assert tracker.items[OTHER] == tracker.nbytes == 12000
    del first, second
    assert tracker.nbytes == 4000
    views.clear()
    assert tracker.nbytes == 0
    assert tracker.fullest.nbytes == 12000


def test_a_storage_that_is_resized_counts_with_its_new_length(tracker: MemoryTracker) -> None:
    tensor = torch.empty(100)
    storage = tensor.untyped_storage()
    memory_items.resize(storage, 0)
    assert tracker.nbytes == 0
    memory_items.resize(storage, 4000)
    assert tracker.nbytes == 4000
    tensor.resize_(2000)  # by torch itself
    assert tracker.nbytes == 8000
    del tensor, storage
    assert tracker.nbytes == 0


def test_memory_changes_hands(tracker: MemoryTracker) -> None:
    tracker.item = HOST
    tensor = torch.empty(100)
    assert (tracker.nbytes, tracker.items[HOST]) == (0, 400)
    assert own(tensor, BUCKETS) is tensor
    assert (tracker.nbytes, tracker.items[HOST], tracker.items[BUCKETS]) == (400, 0, 400)
    own(tensor.view(10, 10), GATHERED)
    assert (tracker.nbytes, tracker.items[BUCKETS], tracker.items[GATHERED]) == (400, 0, 400)
    assert tracker.largest[BUCKETS] == 400
    del tensor
    assert tracker.items[GATHERED] == 0


def test_without_a_listener_nothing_is_noted() -> None:
    tensor = torch.empty(3)
    assert memory_items.listeners == []
    assert own(tensor, BUCKETS) is tensor


def test_the_course_keeps_the_fullest_moments(tracker: MemoryTracker) -> None:
    kept = torch.empty(25)
    tracker.record()
    tracker.phase, tracker.item = "forward", ACTIVATIONS
    for _ in range(10):
        torch.empty(250)
    torch.empty(2500)
    course = tracker.course(points=4)
    assert len(course) <= 4
    assert [max(sum(items.values()) for items, _, _ in course)] == [10100]
    assert {phase for _, phase, _ in course} == {"forward"}
    assert course[-1][0][OTHER] == kept.numel() * 4


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(8, 8, bias=False)
        self.high = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())

    def forward(self, x: torch.Tensor, again: bool = False) -> torch.Tensor:
        hidden = self.low(x).exp()
        if again:
            return checkpoint(self.high, hidden, use_reentrant=False).sum()  # type: ignore[no-any-return]
        return self.high(hidden).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpointed"])
def test_the_module_at_work_is_known_in_forward_and_backward(tracker: MemoryTracker, again: bool) -> None:
    model = Twice()
    tracker.modules.name(model)
    tracker.record()
    with tracker.modules.followed():
        tracker.phase = "forward"
        loss = model(torch.empty(4, 8), again)
        tracker.phase = "backward"
        loss.backward()
    seen = [(phase, module) for _, _, phase, module in tracker._events or []]
    assert {module for phase, module in seen if phase == "forward"} == {"", "low", "high", "high.0", "high.1"}
    backward = [module for phase, module in seen if phase == "backward"]
    assert {"high.1", "high.0", "low", ""} <= set(backward)
    assert backward.index("high.0") < backward.index("low")
    tracker.course(1)
    tracker.modules.forget()
    assert tracker.modules.now() == ""
