"""A run goes on from a checkpoint with other batches, or is told why it cannot."""

from __future__ import annotations

from typing import Any

import pytest

from zerolite.checkpoint.loading import changed_batch


@pytest.mark.parametrize(
    ("saved", "here", "ranks"),
    [(24, 24, 2), (24, 12, 4), (None, 12, 2), ("auto", 12, 2), (24, None, 2)],
    ids=["the same steps", "the user's own choice", "unknown", "of a DeepSpeed checkpoint", "now unknown"],
)
def test_nothing_to_say_of_steps(saved: Any, here: int | None, ranks: int) -> None:
    assert changed_batch({"train_batch_size": saved}, 4, here, ranks) is None
    assert changed_batch({}, 4, here, ranks) is None


def test_steps_that_have_changed_with_the_ranks() -> None:
    sentence = changed_batch({"train_batch_size": 24}, 4, 6, 1)
    assert sentence is not None
    assert sentence.startswith("a step takes 6 samples on 1 rank, and took 24 on 4 ") and "elasticity" in sentence
