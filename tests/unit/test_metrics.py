"""Reductions and gathers: one process against plain arithmetic, and what is refused. Several processes:
tests/distributed/test_evaluation.py."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, namedtuple
from fractions import Fraction
from typing import Any

import pytest
import torch

from benchmarks.null_communicator import NullCommunicator
from tests.toolkit.loaders import loaders_of
from zerolite.comm import Communicator, record
from zerolite.data import metrics

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["left", "right"])
ALL_DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn),
]


def reduce(value: Any, op: str = "mean", world: int = 1) -> Any:
    """Reduce on one process, or on one that takes the others for copies of itself."""
    return metrics.reduce(value, op, Communicator() if world == 1 else NullCommunicator(1, world), CPU)


def gather(value: Any, world: int = 1, **more: Any) -> Any:
    return metrics.gather(value, Communicator() if world == 1 else NullCommunicator(1, world), CPU, **more)


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


@pytest.mark.parametrize(
    ("value", "mean", "total", "largest"),
    [(3, 3.0, 12, 3), (True, 1.0, 4, True), (0.1, 0.1, 0.4, 0.1), (2**62, float(2**62), 2**64, 2**62),
     (-(2**63), -float(2**63), -(2**65), -(2**63)), (2**70, float(2**70), 2**72, 2**70),
     (Fraction(1, 2), 0.5, 2.0, 0.5),
     (math.inf, math.inf, math.inf, math.inf)],
)  # fmt: skip
def test_numbers_are_reduced_as_numbers(value: Any, mean: float, total: Any, largest: Any) -> None:
    assert same(reduce(value, "mean", 4), mean)
    assert same(reduce(value, "sum", 4), total)
    assert same(reduce(value, "max", 4), largest) and same(reduce(value, "min", 4), largest)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_dtypes_of_reduced_tensors(dtype: torch.dtype) -> None:
    value = torch.tensor([[1, 0], [1, 1]]).to(dtype)
    back = dtype if dtype.itemsize > 2 else torch.float32
    inexact = dtype.is_floating_point or dtype.is_complex
    for op, exact in (("mean", torch.float64), ("sum", torch.int64), ("max", dtype), ("min", dtype)):
        if dtype.is_complex and op in ("max", "min"):
            continue
        wanted = back if inexact else exact
        result = reduce(value, op, 3)
        assert result.dtype == wanted, op
        assert torch.equal(result, (value.to(wanted) * (3 if op == "sum" else 1)).to(wanted))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_gathered_tensors_keep_dtype_and_bits(dtype: torch.dtype) -> None:
    for shape, world in itertools.product([(), (3,), (3, 0), (5, 2, 3)], (1, 3)):
        value = torch.randint(0, 2, shape).to(dtype)
        wanted = torch.cat([value.reshape(1) if value.dim() == 0 else value] * world)
        result = gather(value, world)
        assert (result.dtype, result.shape) == (dtype, wanted.shape)
        comparable = torch.float32 if dtype.itemsize == 1 else dtype
        assert torch.equal(result.to(comparable), wanted.to(comparable))


def test_nested_structures_keep_their_types() -> None:
    value = {"pair": Pair(torch.tensor([1, 2]), None), 3: OrderedDict(b=True, a=(7,)), "nothing": []}
    total, gathered = reduce(value, "sum", 2), gather(value, 2)
    assert total["pair"].left.tolist() == [2, 4] and total["pair"].right is None
    assert total[3] == OrderedDict(b=2, a=(14,)) and total["nothing"] == gathered["nothing"] == []
    assert type(total["pair"]) is Pair and type(total[3]) is OrderedDict and type(total[3]["a"]) is tuple
    assert gathered["pair"].left.tolist() == [1, 2, 1, 2] and gathered["pair"].right is None
    assert gathered[3]["b"].tolist() == [True, True] and gathered[3]["a"][0].tolist() == [7, 7]
    assert gather([0.5], 2)[0].dtype == torch.float64 and reduce(None, "sum", 2) is None
    for op in metrics.OPS:
        assert math.isnan(reduce(math.nan, op, 3))
        assert reduce(torch.tensor([math.nan, 1.0]), op, 3).isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("value", "op", "words"),
    [
        (1, "average", r"expected op to be one of mean, sum, max, min, got 'average'"),
        ("text", "sum", "engine.reduce: rank 0: expected numbers and tensors, got str at the value"),
        ({"a": [1, object()]}, "sum", r"got object at \['a'\]\[1\]"),
        (1j, "sum", "got complex"),
        (Fraction(10**400), "sum", "rank 0: OverflowError: integer division result too large"),
        (torch.tensor(1j), "max", "expected real numbers for max, got torch.complex64"),
        (torch.eye(2).to_sparse(), "sum", "expected a dense tensor.*torch.sparse_coo"),
        (torch.empty(2, device="meta"), "sum", "expected a dense tensor.*meta"),
        (torch.tensor(1, dtype=torch.uint64), "sum", "torch.uint64.*cast it to torch.int64"),
    ],
)
def test_what_cannot_be_reduced(value: Any, op: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
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
    with pytest.raises(ValueError, match="each of the 6 samples.*4 rows"):
        gather(torch.ones(4), loaders=loaders, loader=loader)
    with pytest.raises(ValueError, match="engine.gather_for_metrics: rank 0: expected loader to come from.*got list"):
        gather(torch.ones(4), loaders=loaders, loader=[])


def test_two_collectives_whatever_the_structure() -> None:
    value = {str(i): torch.ones(i, dtype=dtype) for i, dtype in enumerate(ALL_DTYPES)}
    with record() as calls:
        gather(value, 2)
        reduce({"a": 1.0, "b": [True, torch.ones(5)]}, "sum", 2)
    assert calls.summary() == {("all_gather", "metrics"): 4}
