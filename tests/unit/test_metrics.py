"""Reductions and gathers on one process, and what is refused. Several: tests/distributed/test_evaluation.py."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch

from benchmarks.null_communicator import NullCommunicator
from tests.toolkit.loaders import loaders_of
from zerolite.comm import Communicator, record
from zerolite.data import metrics

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["left", "right"])
ALL_DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.complex64, torch.float8_e4m3fn]


def reduce(value: Any, op: str = "mean", world: int = 1) -> Any:
    """Reduce on one process, or on one that takes the others for copies of itself."""
    return metrics.reduce(value, op, Communicator() if world == 1 else NullCommunicator(1, world), CPU)


def gather(value: Any, world: int = 1, **more: Any) -> Any:
    return metrics.gather(value, Communicator() if world == 1 else NullCommunicator(1, world), CPU, **more)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_gathered_tensors_keep_dtype_and_bits(dtype: torch.dtype) -> None:
    for shape, world in itertools.product([(), (3,), (3, 0), (5, 2, 3)], (1, 3)):
        value = torch.randint(0, 2, shape).to(dtype)
        wanted = torch.cat([value.reshape(1) if value.dim() == 0 else value] * world)
        result = gather(value, world)
        assert (result.dtype, result.shape) == (dtype, wanted.shape)
        assert result.contiguous().view(torch.uint8).tolist() == wanted.view(torch.uint8).tolist()


def test_nested_structures_keep_their_types() -> None:
    value = {"pair": Pair(torch.tensor([1, 2]), None), 3: OrderedDict(b=True, a=(7, 0.5)), "nothing": []}
    with record() as calls:
        total, gathered = reduce(value, "sum", 2), gather(value, 2)
    assert calls.summary() == {("all_gather", "metrics"): 4}, "two collectives whatever the structure"
    assert total["pair"].left.tolist() == [2, 4] and total["pair"].right is None
    assert total[3] == OrderedDict(b=2, a=(14, 1.0)) and total["nothing"] == gathered["nothing"] == []
    assert type(total["pair"]) is Pair and type(total[3]) is OrderedDict and type(total[3]["a"][0]) is int
    assert gathered["pair"].left.tolist() == [1, 2, 1, 2] and gathered[3]["a"][1].tolist() == [0.5, 0.5]
    assert reduce(torch.tensor([1.0, 0.5]).bfloat16(), "sum", 3).dtype == torch.float32
    assert [reduce(torch.tensor([3], dtype=torch.uint8), op, 2).dtype for op in ("max", "mean")] == [
        torch.int64,
        torch.float64,
    ]
    for op in metrics.OPS:
        assert math.isnan(reduce(math.nan, op, 3))


@pytest.mark.parametrize("value", [None, {}, [], {"a": None}])
def test_nothing_is_reduced_to_nothing(value: Any) -> None:
    assert reduce(value, "sum") == value and gather(value) == value


def test_keys_are_matched_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = [{"a": 1, "b": 2.0}, {"b": 20.0, "a": 10}]
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(metrics, "_all_gather", lambda tensor, comm: sent.append(tensor) or torch.stack([tensor] * 2))
    for value in orders:
        assert reduce(value, "sum") == {key: 2 * number for key, number in value.items()}
    assert torch.equal(sent[0], sent[2]), "both send the same call"


@pytest.mark.parametrize(("values", "kind"), [((1, 1.0), float), ((1.0, 1), float), ((1, True), int)])
def test_ranks_get_a_number_of_one_type(values: Any, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[torch.Tensor]] = []

    def note(tensor: torch.Tensor, comm: object) -> torch.Tensor:
        sent[-1].append(tensor)
        return torch.stack([tensor] * 2)

    monkeypatch.setattr(metrics, "_all_gather", note)
    for value in values:
        sent.append([])
        reduce(value, "sum")
    widest = max(len(packed) for _, packed in sent)
    heads = torch.stack([head for head, _ in sent])
    packed = torch.stack([torch.nn.functional.pad(packed, (0, widest - len(packed))) for _, packed in sent])
    for value in values:
        answers = iter([heads, packed])
        monkeypatch.setattr(metrics, "_all_gather", lambda tensor, comm, answers=answers: next(answers))
        result = reduce(value, "sum")
        assert type(result) is kind and result == 2


@pytest.mark.parametrize(
    ("value", "op", "words"),
    [
        (1, "average", r"expected op to be one of mean, sum, max, min, got 'average'"),
        ({"a": [1, object()]}, "sum", r"expected numbers and tensors, got object at \['a'\]\[1\]"),
        (10**400, "sum", "int too large"),
        (torch.tensor([2**63], dtype=torch.uint64), "max", "expected numbers that fit in int64, got torch.uint64"),
        (torch.tensor(1j), "max", "expected real numbers, got torch.complex64"),
        (torch.eye(2).to_sparse(), "sum", "expected a dense tensor.*torch.sparse_coo"),
        (torch.empty(2, device="meta"), "sum", "expected a dense tensor.*meta"),
    ],
)
def test_what_cannot_be_reduced(value: Any, op: str, words: str) -> None:
    with pytest.raises((ValueError, OverflowError), match=words):
        reduce(value, op)


def test_rows_must_be_the_samples_of_the_batch() -> None:
    loaders = loaders_of(0, 1, 4)
    loader = loaders.make(list(range(6)), route="eval")
    seen = []
    for batch in loader:
        seen += gather({"x": batch, "loss": batch.float().mean()}, loaders=loaders)["x"].tolist()
        words = r"expected a row for each of the [42] samples.*7 rows at \['y'\].*engine.gather"
        with pytest.raises(ValueError, match=words):
            gather({"y": torch.ones(7)}, loaders=loaders)
        assert gather(torch.ones(7)).shape == (7,)
    assert seen == list(range(6))
    assert gather(torch.ones(7), loaders=loaders).shape == (7,), "outside of a pass rows are rows"
    assert gather(torch.arange(6), loaders=loaders, loader=loader).tolist() == seen
    with pytest.raises(ValueError, match="expected loader to come from.*got list"):
        gather(torch.ones(4), loaders=loaders, loader=[])
