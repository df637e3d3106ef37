"""Predicted step times beside measured ones, of two nodes with a real slow wire between them."""

from __future__ import annotations

import itertools
import statistics

import pytest

from benchmarks.nodes import COMPUTE, ZEROLITE, measure, predict
from benchmarks.slow_wire import why_not

GBITS, DELAY, LAYERS = 0.05, 2.0, 6
"""A wire so slow that other work on the machine takes little of a step."""


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_times_on_a_slow_wire() -> None:
    names = ["zerolite-1", "zerolite-3", "zerolite-3-replicas", "zerolite-3-hierarchical"]
    assert set(names) <= set(ZEROLITE)
    found = measure([COMPUTE, *names], LAYERS, 3, 1, GBITS, DELAY)
    assert not found["absent"]
    seconds = {name: statistics.median(each) for name, each in found["seconds"].items()}
    predicted = {name: predict(name, LAYERS, seconds[COMPUTE], GBITS, DELAY)[0] for name in names}
    assert {name: seconds[name] for name in names} == pytest.approx(predicted, rel=0.15)
    for one, other in itertools.permutations(names, 2):
        if predicted[one] > 1.2 * predicted[other]:
            assert seconds[one] > seconds[other], (one, other)
