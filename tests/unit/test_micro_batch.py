"""Batches of a loader as calls of the model and of the loss function."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from zerolite.data.micro_batch import MicroBatch
from zerolite.utils.nested import map_tensors

CPU = torch.device("cpu")
X, Y = torch.ones(2, 3), torch.zeros(2, 3)
Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "batch,args,kwargs",
    [(X, (X,), {}), ((X, Y), (X, Y), {}), ([X], (X,), {}), (Pair(X, Y), (X, Y), {}),
     ({"x": X, "y": Y}, (), {"x": X, "y": Y}), ((X, None, "word"), (X, None, "word"), {})],
)  # fmt: skip
def test_without_a_loss_function_a_batch_is_the_models_arguments(batch: Any, args: Any, kwargs: Any) -> None:
    made = MicroBatch.of(batch, None, CPU)
    assert made.args == args or all(a is b for a, b in zip(made.args, args, strict=True))
    assert made.kwargs.keys() == kwargs.keys() and made.target is None


def test_with_a_loss_function_a_batch_is_a_pair() -> None:
    for pair in (((X,), Y), [X, Y], (X, Y), ({"x": X}, Y)):
        made = MicroBatch.of(pair, F.mse_loss, CPU)
        assert made.target is Y and len(made.args) + len(made.kwargs) == 1
        assert float(made.loss(X, F.mse_loss)) == 1.0
    for batch in (X, (X,), (X, Y, Y), {"x": X, "y": Y}):
        with pytest.raises(ValueError, match=r"expected a micro-batch to be a pair \(inputs, targets\), got"):
            MicroBatch.of(batch, F.mse_loss, CPU)


def test_the_models_own_loss() -> None:
    micro = MicroBatch.of(X, None, CPU)
    loss = torch.tensor(2.0)
    pairs = [(loss, X), (X, loss), (loss, torch.tensor(3.0))]
    for outputs in (loss, loss.reshape(1), *pairs, {"loss": loss}, SimpleNamespace(loss=loss, logits=X)):
        assert float(micro.loss(outputs, None)) == 2.0


@pytest.mark.parametrize("outputs", [X, (X, X), {"logits": X}, None, SimpleNamespace(loss=None)])
def test_what_is_no_loss_is_refused(outputs: Any) -> None:
    with pytest.raises(ValueError, match="expected the model to give a loss with one element, got .*; give initialize"):
        MicroBatch.of(X, None, CPU).loss(outputs, None)
    with pytest.raises(ValueError, match=r"expected the loss_fn to give .* shape \(2, 3\); reduce it"):
        MicroBatch.of((X, Y), lambda o, t: X, CPU).loss(outputs, lambda o, t: X)


def test_a_tuple_with_a_constructor_of_its_own_is_rebuilt() -> None:
    class Pair(tuple):
        def __new__(cls, first, second):
            return super().__new__(cls, (first, second))

    pair = Pair(torch.ones(2), 3)
    pair.note = "kept"
    halves = map_tensors(torch.Tensor.half, pair)
    assert type(halves) is Pair and halves.note == "kept" and halves[0].dtype is torch.float16 and halves[1] == 3
