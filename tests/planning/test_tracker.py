"""Counting storages: what is allocated, resized and released, whose it is, and which module was at work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from zerolite.planning.tracker import ORIGINAL_MODEL, MemoryTracker
from zerolite.utils import memory_tags
from zerolite.utils.memory_tags import ACTIVATIONS, DEVICE, DISK, HOST, MASTERS, OTHER, STATES, location_of, tag_memory


@pytest.fixture(params=["fake", "real"])
def tracker(request: pytest.FixtureRequest):
    with FakeTensorMode() if request.param == "fake" else torch.no_grad(), MemoryTracker() as tracker:
        with torch.enable_grad():
            yield tracker
    assert tracker not in memory_tags.listeners


def test_a_storage_counts_once_for_as_long_as_it_lives(tracker: MemoryTracker) -> None:
    """With its length after it was resized, for the item and at the location that it was tagged with last."""
    tensor = torch.empty(1000)
    views = [tensor.view(10, 100), tensor[10:], tensor.detach(), nn.Parameter(tensor)]
    assert tracker.items[DEVICE][OTHER] == tracker.nbytes[DEVICE] == 4000
    memory_tags.resize(tensor.untyped_storage(), 8000)
    tag_memory(tensor.view(10, 100), MASTERS)
    assert tracker.items[DEVICE][MASTERS] == tracker.nbytes[DEVICE] == 8000
    tag_memory(tensor, STATES, HOST)
    assert (tracker.items[HOST][STATES], tracker.nbytes[DEVICE], location_of(views[1])) == (8000, 0, HOST)
    del tensor
    assert tracker.nbytes[HOST] == 8000
    views.clear()
    assert (tracker.nbytes[HOST], tracker.peak.bytes, tracker.host_peak) == (0, 8000, 8000)


def test_results_are_where_their_operands_are(tracker: MemoryTracker) -> None:
    masters, weights, scalar = tag_memory(torch.ones(100), MASTERS, HOST), torch.ones(100), torch.ones(())
    tracker.tag_new(ORIGINAL_MODEL, HOST)
    made = torch.ones(100)
    tracker.tag_new(OTHER)
    before = dict(tracker.nbytes)

    def grown(compute: Callable[[], object]) -> tuple[int, int]:
        """Bytes more on the device and on the host, while the result lives."""
        result = compute()
        more = tracker.nbytes[DEVICE] - before[DEVICE], tracker.nbytes[HOST] - before[HOST]
        del result
        return more

    on_host = (lambda: masters * 2, lambda: masters * scalar, lambda: torch._foreach_mul([masters], 2.0))
    new = (lambda: torch.empty_like(masters, device="cpu"), lambda: torch.empty(100))
    on_device = (lambda: masters + weights, lambda: weights * 2, lambda: made * 2, *new)
    assert [grown(compute) for compute in on_host] == [(0, 400)] * 3
    assert [grown(compute) for compute in on_device] == [(400, 0)] * 5


def test_where_the_device_is_the_host_its_memory_is_the_hosts() -> None:
    with MemoryTracker(separate_memory=False) as tracker:
        weights = torch.ones(100)
        masters = tag_memory(torch.ones(100), MASTERS, HOST)
        assert (tracker.nbytes[DEVICE], tracker.nbytes[HOST], tracker.host_peak) == (400, 400, 800)
        scratch = masters * 2  # from the device's allocator
        assert tracker.nbytes[DEVICE] == 800
    del weights, scratch


def test_places_are_known_for_as_long_as_the_memory_lives() -> None:
    tensor = tag_memory(torch.ones(3), STATES, DISK)
    key = id(tensor.untyped_storage())
    part = tensor[1:]
    del tensor
    assert location_of(part) == DISK
    del part
    assert key not in memory_tags._offloaded


def test_the_course_keeps_the_fullest_moments(tracker: MemoryTracker) -> None:
    kept = torch.empty(25)
    tracker.record()
    tracker.tag_new(ACTIVATIONS, phase="forward")
    for _ in range(10):
        torch.empty(250)
    torch.empty(2500)
    course = tracker.timeline(points=4)
    assert len(course) <= 4
    assert max(point.bytes for point in course) == 10100
    assert {point.phase for point in course} == {"forward"}
    assert course[-1].items[OTHER] == kept.numel() * 4


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
def test_the_module_at_work_is_known_in_forward_and_backward(
    tracker: MemoryTracker, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = Twice(), []
    tracker.modules.name(model)
    monkeypatch.setattr(tracker, "_count", lambda tensor: seen.append((tracker.phase, tracker.modules.now())))
    with tracker.modules.followed():
        tracker.tag_new(OTHER, phase="forward")
        loss = model(torch.empty(4, 8), again)
        tracker.tag_new(OTHER, phase="backward")
        loss.backward()
    assert {module for phase, module in seen if phase == "forward"} == {"", "low", "high.0", "high.1"}
    backward = [module for phase, module in seen if phase == "backward"]
    assert {"high.1", "high.0", "low", ""} <= set(backward)
    assert backward.index("high.0") < backward.index("low")
    tracker.modules.forget()
    assert tracker.modules.now() == ""
