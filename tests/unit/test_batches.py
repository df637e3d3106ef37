"""A run goes on from a checkpoint with other batches, or is told why it cannot."""

from __future__ import annotations

from typing import Any

import pytest

from zerolite.checkpoint.loading import changed_batch


@pytest.mark.parametrize(
    ("saved", "saved_ranks", "here", "ranks"),
    [
        ({"train_batch_size": 24}, 4, 24, 2),  # the same steps
        ({"train_batch_size": 24}, 4, 12, 4),  # the user's own choice
        ({"train_batch_size": None}, 4, 12, 2),
        ({"train_batch_size": "auto"}, 4, 12, 2),  # of a DeepSpeed checkpoint
        ({}, 4, 12, 2),
        ({"train_batch_size": 24}, 4, None, 2),
    ],
)
def test_nothing_to_say_of_steps(saved: dict[str, Any], saved_ranks: int, here: int | None, ranks: int) -> None:
    assert changed_batch(saved, saved_ranks, here, ranks) is None


def test_steps_that_have_changed_with_the_ranks() -> None:
    sentence = changed_batch({"train_batch_size": 24}, 4, 6, 1)
    assert sentence is not None
    assert sentence.startswith("a step takes 6 samples on 1 rank, and took 24 on 4 ") and "elasticity" in sentence
