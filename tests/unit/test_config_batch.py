"""The batch triangle, exhaustively for small numbers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from zerolite.config import ConfigError, load_config
from zerolite.config.batch import ACCUMULATION, MICRO, TRAIN, solve

KEYS = (TRAIN, MICRO, ACCUMULATION)
SMALL = (None, 1, 2, 3, 4, 5, 6, 7, 8)
TRAINS = (None, *range(1, 41))


def solutions(given: tuple[int | None, ...], world_size: int) -> list[tuple[int, int, int]]:
    """Every triple that keeps the given values and satisfies the product, found by trying."""
    train, micro, accumulation = given
    found = []
    for m in [micro] if micro else range(1, 41):
        for a in [accumulation] if accumulation else range(1, 41):
            t = m * a * world_size
            if train in (None, t):
                found.append((t, m, a))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 6])
def test_small_numbers_exhaustively(world_size: int) -> None:
    outcomes = {"solved": 0, "raised": 0, "left to the loader": 0}
    for given in itertools.product(TRAINS, SMALL, SMALL):
        possible = solutions(given, world_size)
        if given[0] is not None and given[1] is None and given[2] is None:
            possible = [triple for triple in possible if triple[2] == 1]  # the accumulation defaults to 1
        try:
            sizes = solve(*given, world_size)
        except ConfigError:
            outcomes["raised"] += 1
            assert not possible, given
            continue
        if sizes.micro is None:
            outcomes["left to the loader"] += 1
            assert given[:2] == (None, None) and sizes.train is None and sizes.accumulation == (given[2] or 1)
            continue
        outcomes["solved"] += 1
        solved = (sizes.train, sizes.micro, sizes.accumulation)
        assert solved in possible or given[0] is None
        assert sizes.train == sizes.micro * sizes.accumulation * world_size
        assert all(value in (None, kept) for value, kept in zip(given, solved, strict=True))
        if given[2] is None and (given[0] is None or given[1] is None):
            assert sizes.accumulation == 1
    assert all(outcomes.values()) or world_size == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({TRAIN: 10, MICRO: 4}, [f"{MICRO} 4 x world size 2 = 8", "got 10; write 8 or 16"]),
        ({TRAIN: 12, ACCUMULATION: 4}, [f"{ACCUMULATION} 4", "got 12; write 8 or 16"]),
        ({TRAIN: 12, MICRO: 2, ACCUMULATION: 2}, ["world size 2 = 8", "got 12; write 8"]),
        ({TRAIN: 1}, ["got 1; write 2"]),
    ],
)
def test_the_error_names_what_would_fit(given: dict[str, int], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(given).resolve(2)
    ((path, sentence),) = caught.value.errors
    assert path == TRAIN and all(text in sentence for text in said)


def test_resolve_fills_in_a_copy() -> None:
    config = load_config({MICRO: 3, ACCUMULATION: 2, "zero_optimization": {"stage": 1}})
    resolved = config.resolve(4)
    assert (resolved.train_batch_size, resolved.train_micro_batch_size_per_gpu) == (24, 3)
    assert resolved.gradient_accumulation_steps == 2 and resolved.zero_optimization.stage == 1
    assert config.train_batch_size is None
    assert resolved.resolve(4) == resolved
    with pytest.raises(ConfigError):
        resolved.resolve(3)


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({TRAIN: "auto"}, [TRAIN]),
        ({MICRO: "auto"}, [MICRO]),
        ({TRAIN: "auto", MICRO: "auto", ACCUMULATION: "auto"}, [TRAIN, MICRO]),
        ({TRAIN: "auto", ACCUMULATION: 2}, [TRAIN]),
        ({TRAIN: 3, "optimizer": {"type": "auto"}}, ["optimizer.type", TRAIN]),
    ],
)
def test_all_errors_of_sizes_are_told_at_once(given: dict[str, Any], wrong: list[str]) -> None:
    """Errors of all keys at once: "auto" that cannot be derived, and sizes that do not fit."""
    config = load_config(given)
    with pytest.raises(ConfigError) as caught:
        config.resolve(2)
    assert [path for path, _ in caught.value.errors] == wrong
    assert all('"auto"' in said for path, said in caught.value.errors if given.get(path) == "auto")


def test_auto_that_can_be_derived() -> None:
    resolved = load_config({TRAIN: "auto", MICRO: 3, ACCUMULATION: "auto"}).resolve(2)
    assert (resolved.train_batch_size, resolved.gradient_accumulation_steps) == (6, 1)
    resolved = load_config({TRAIN: 6, MICRO: "auto"}).resolve(2)
    assert resolved.train_micro_batch_size_per_gpu == 3
    assert resolved.resolve(2) == resolved == load_config({TRAIN: 6, MICRO: 3, ACCUMULATION: 1}).resolve(2)
