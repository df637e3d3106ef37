"""Whether a run with other batches can go on from a checkpoint, and what it is told."""

from __future__ import annotations

from typing import Any

import pytest

from zerolite.checkpoint.batches import changed_batch, window_obstacle


def test_a_step_of_as_many_micro_batches_can_be_finished() -> None:
    assert window_obstacle(3, 3, 4, elastic=False) is None


@pytest.mark.parametrize(
    ("ranks", "elastic", "remedy"),
    [(4, False, "set it as it was, or"), (4, True, "go on with 4 ranks, as then, or"), (1, True, "with 1 rank, as")],
)
def test_a_step_of_another_length_cannot(ranks: int, elastic: bool, remedy: str) -> None:
    sentence = window_obstacle(2, 4, ranks, elastic)
    assert sentence is not None
    assert "gradient_accumulation_steps was 2 and here is 4. Nothing was loaded; " in sentence and remedy in sentence


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
