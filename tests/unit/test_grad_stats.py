import math

import pytest
import torch

from zerolite.comm import Communicator
from zerolite.zero.grad_stats import StatsCollector, clip_coefficient, clip_coefficient_on_device
from zerolite.zero.layout import ParameterSpec, PartitionLayout


def stats_of(parts, used, probes=()):
    layout = PartitionLayout.build([ParameterSpec(f"p{i}", 5) for i in range(3)], 1, 64, alignment=8)
    fragments = list(layout.fragments(0))
    flat = torch.full((layout.buckets[0].numel,), math.nan)  # padding must not count
    for slot, part in zip(layout.slots, parts, strict=True):
        flat[slot.start : slot.end] = part
    collector = StatsCollector(Communicator(), torch.device("cpu"))
    collector.use(layout, fragments)
    vector = collector.collect([flat], set(used), list(probes))
    return vector, vector.get()


def test_collect_gives_norm_and_use():
    vector, stats = stats_of([torch.full((5,), v) for v in (1.0, 2.0, 0.0)], used=[0, 1])
    assert stats.norm == pytest.approx(5.0) and stats.finite and stats.used == {0, 1}
    assert stats.bad_parameters == () and stats.bad_ranks == ()
    assert vector.total_square().item() == pytest.approx(25.0)


def test_collect_names_what_is_not_finite():
    bad = torch.tensor([0.0, math.inf, 0, 0, 0])
    _, stats = stats_of([torch.ones(5), bad, bad], used=[0, 1, 2], probes=[torch.tensor(1.0), torch.tensor(math.nan)])
    assert not stats.finite and stats.bad_parameters == (1, 2) and stats.bad_ranks == (0,)


@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0, 1.0000001, 3.7, 1e10])
def test_clip_coefficient_is_torchs(norm):
    p = torch.zeros(1, requires_grad=True)
    p.grad = torch.tensor([norm])
    torch.nn.utils.clip_grad_norm_([p], 1.0)
    assert norm * clip_coefficient(norm, 1.0) == pytest.approx(p.grad.item(), rel=1e-6)
    on_device = clip_coefficient_on_device(torch.tensor(norm, dtype=torch.float64), 1.0)
    assert on_device.item() == clip_coefficient(norm, 1.0)


def test_weights_reach_the_device_without_a_copy(monkeypatch):
    layout = PartitionLayout.build([ParameterSpec("w", 4)], 1, 64)
    collector = StatsCollector(Communicator(), torch.device("cpu"))
    collector.use(layout, list(layout.fragments(0)))
    part = torch.ones(layout.buckets[0].numel)
    collector.collect([part], {0}, [], weighted=True, weight=3.0)
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("values made on the host"))
    stats = collector.collect([part], {0}, [], weighted=True, weight=5.0)
    assert stats.get().weight == 5.0
