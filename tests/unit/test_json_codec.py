"""Plain data goes through JSON and comes back equal, types included; anything else is refused with its place."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from zerolite.checkpoint import json_codec


def through_json(value: Any) -> Any:
    tensors: list[torch.Tensor] = []
    encoded = json_codec.encode(value, "client_state", tensors)
    return json_codec.decode(json.loads(json.dumps(encoded)), tensors.__getitem__)


def equal(one: Any, other: Any) -> bool:
    """Compare values and types; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, float):
        return math.copysign(1, one) == math.copysign(1, other) and (one == other or (one != one and other != other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one.items(), other.items(), strict=True))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


VALUES: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "numbers": [0, -1, 2**70, 1.5, -0.0, 1e-320, 5e300, 0.1],
    "not finite": [math.inf, -math.inf, math.nan],
    "complex": torch.tensor(1 + 2j),
    "strings": ["", "é\n\0😀", "$float", "\ud800"],
    "bytes": [b"", bytes(range(256))],
    "tuples": ((), (1, (2.5, "x")), [(), []]),
    "sets": [set(), {1, "a", (2, 3)}, frozenset({None, 1.5}), {frozenset({1})}],
    "dict": {"a": {"b": [{"c": {}}]}},
    "keys": {1: "int", "1": "str", None: 0, (1, 2): "tuple", 1.5: 0, b"b": 0, True + 1: 2},
    "dollar keys": {"$float": "nan", "$": {"$tensor": 0}, "$dict": []},
    "true and one": [{True: "bool"}, {1: "int"}, {1.0: "float"}],
    "ordered": OrderedDict([("z", 1), ("a", 2)]),
    "counter": Counter({"a": 3, 4: -1}),
    "dtypes": [torch.float32, torch.bfloat16, torch.int64, torch.bool],
    "devices": [torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")],
    "sizes": [torch.Size([]), torch.Size([2, 3])],
    "tensors": [torch.arange(6.0).view(2, 3), torch.empty(0, 4), torch.ones(3, dtype=torch.bfloat16)],
    "scalars": [
        *(torch.tensor(value) for value in (0.1, -0.0, 3, 2**62, True, math.inf)),
        *(torch.tensor(0.1, dtype=torch.float64), torch.tensor(1.5, dtype=torch.bfloat16)),
        *(torch.tensor(value, dtype=torch.float16) for value in (65504.0, -math.inf)),
    ],
    "in a tensor's place": {"$tensor": torch.ones(2)},
}


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_as_they_went(name: str) -> None:
    value = VALUES[name]
    result = through_json(value)
    assert equal(value, result), f"{value!r} became {result!r}"


def test_parameters_and_numpy_come_back_as_pythons_and_torchs() -> None:
    result = through_json(torch.nn.Parameter(torch.ones(2)))
    assert type(result) is torch.Tensor and not result.requires_grad
    for given, back in (
        (numpy.float64(0.1), 0.1),
        (numpy.float32(1.5), 1.5),
        (numpy.int64(7), 7),
        (numpy.bool_(True), True),
        (numpy.arange(4, dtype=numpy.int32), torch.arange(4, dtype=torch.int32)),
        (numpy.array(2.5), 2.5),
    ):
        assert equal(through_json(given), back)


Pair, Thing, Text = namedtuple("Pair", "a b"), type("Thing", (), {}), type("Text", (str,), {})

REFUSED: dict[str, tuple[Any, list[str]]] = {
    "object": ({"a": [1, {"b": Thing()}]}, ["client_state['a'][1]['b']", "Thing"]),
    "lambda": ({"f": lambda: 0}, ["client_state['f']", "function"]),
    "module": ({"m": torch.nn.Linear(1, 1)}, ["client_state['m']", "Linear", "save its state_dict()"]),
    "namespace": ({"args": argparse.Namespace(a=1)}, ["client_state['args']", "save vars(...) of it"]),
    "path": ({"p": Path("x")}, ["client_state['p']", "save str(...) of it"]),
    "in a set": ({1, Pair}, ["an element of client_state"]),
    "named tuple": (Pair(1, 2), ["Pair"]),
    "default dict": (defaultdict(list), ["defaultdict"]),
    "kind of a string": (Text("a"), ["Text"]),
    "complex": (1j, ["complex"]),
    "sparse tensor": ({"t": torch.eye(2).to_sparse()}, ["client_state['t']", "sparse"]),
    "meta tensor": ({"t": torch.empty(2, device="meta")}, ["client_state['t']", "meta"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_plain_is_refused_with_its_place(name: str) -> None:
    value, words = REFUSED[name]
    with pytest.raises(TypeError) as raised:
        json_codec.encode(value, "client_state", [])
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("cls", [list, dict])
def test_what_contains_itself_is_refused(cls: type) -> None:
    value: Any = cls()
    value.append(value) if cls is list else value.update(a=value)
    with pytest.raises(TypeError, match="does it contain itself"):
        json_codec.encode(value, "client_state", [])


CRAFTED: list[Any] = [
    {"$pickle": "gASV"}, {"$tuple": [], "$set": []}, {"$tuple": [], "a": 1}, {"$tuple": 3}, {"$set": [[1]]},
    {"$dict": [[[1], 2]]}, {"$dict": [1]}, {"$counter": [[1, 2, 3]]}, {"$size": ["a"]},
    {"$float": "eval"}, {"$float": [1]}, {"$float": None}, [{"a": {"$tuple": [{"$float": "x"}]}}],
    {"$bytes": "not base64!"}, {"$bytes": 5}, {"$device": "cpu; rm"}, {"$device": 10**40}, {"$device": [1]},
    {"$dtype": "torch.nn"}, {"$dtype": "torch.load"}, {"$dtype": "torch.hub.load"}, {"$dtype": "torch.__dict__"},
    {"$dtype": 5}, {"$dtype": None}, {"$scalar": ["torch.load", 1.0]}, {"$scalar": 1}, {"$scalar": []},
    {"$scalar": ["torch.float32", [1, 2]]}, {"$scalar": ["torch.float32", "a"]}, {"$scalar": ["torch.int8", 10**30]},
    {"$scalar": ["torch.float32"]}, {"$tensor": "a"}, {"$tensor": -10}, {"$tensor": None}, {"$tensor": 10**30},
]  # fmt: skip


@pytest.mark.parametrize("value", CRAFTED, ids=str)
def test_crafted_json_is_refused(value: Any) -> None:
    def tensor(index: int) -> torch.Tensor:
        if type(index) is not int or index != 0:
            raise ValueError(f"expected the index of a tensor, got {index!r}")
        return torch.zeros(1)

    with pytest.raises((ValueError, RuntimeError)):
        json_codec.decode(value, tensor)
