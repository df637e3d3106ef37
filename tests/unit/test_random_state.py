"""Random number generators that go on where they were."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import numpy
import pytest
import torch

from zerolite.checkpoint.random_state import load_random_state, save_random_state

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def undisturbed() -> Any:
    """Keep the random numbers of other tests independent of these."""
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])


def draw() -> list[Any]:
    normal = [random.gauss(0, 1), float(numpy.random.normal())]  # each keeps a second value for the next call
    return [*torch.randn(5).tolist(), torch.rand(()).item(), random.random(), random.randrange(99), *normal]


def test_everything_goes_on() -> None:
    torch.manual_seed(1)
    random.seed(2)
    numpy.random.seed(3)
    draw()  # odd numbers of normal values have been drawn
    saved = save_random_state(CPU)
    expected = [draw() for _ in range(3)]
    torch.manual_seed(4)
    random.seed(5)
    numpy.random.seed(6)
    load_random_state(saved, CPU)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize(
    "entries",
    [{"torch": {"$bytes": "AAAA"}}, {"torch": 3}, {"torch": {"$tensor": 0}}, {"python": 3},
     {"python": {"$tuple": [3, {"$tuple": [1, 2]}, None]}}, {"python": {"$tuple": [99, {"$tuple": []}, None]}},
     {"numpy": ["MT19937", [1, 2], 3, 0, 0.0]}, {"numpy": ["other", [], 3, 0, 0.0]}, {"numpy": 3}],
    ids=str,
)  # fmt: skip
def test_what_was_not_saved_by_us_is_refused(entries: dict[str, Any]) -> None:
    saved = save_random_state(CPU)
    changed = json.dumps({**json.loads(bytes(saved.tolist())), **entries})
    with pytest.raises(ValueError):
        load_random_state(torch.tensor(list(changed.encode()), dtype=torch.uint8), CPU)


@pytest.mark.slow
def test_numpy_is_saved_only_where_it_is_used() -> None:
    program = """
import json, sys, torch
sys.modules.pop("numpy", None)
from zerolite.checkpoint.random_state import save_random_state, load_random_state
saved = save_random_state(torch.device("cpu"))
assert "numpy" not in json.loads(bytes(saved.tolist()))
load_random_state(saved, torch.device("cpu"))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
