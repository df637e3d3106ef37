"""The batch triangle, exhaustively for small numbers."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from zerolite.config import ConfigError, load_config
from zerolite.config.batch import ACCUMULATION, MICRO, TRAIN, BatchSizeError, solve

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


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_small_numbers_exhaustively(world_size: int) -> None:
    outcomes = {"solved": 0, "raised": 0, "left to the loader": 0}
    for given in itertools.product(TRAINS, SMALL, SMALL):
        possible = solutions(given, world_size)
        if given[0] is not None and given[1] is None and given[2] is None:
            possible = [triple for triple in possible if triple[2] == 1]  # the accumulation defaults to 1
        try:
            sizes = solve(*given, world_size)
        except BatchSizeError as error:
            outcomes["raised"] += 1
            assert not possible, given
            check_offers(error, given, world_size)
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


def check_offers(error: BatchSizeError, given: tuple[int | None, ...], world_size: int) -> None:
    """Each offer alone makes the triangle fit, changes a value, and is written in the sentence."""
    assert error.offers
    for key, value in error.offers:
        changed = dict(zip(KEYS, given, strict=True))
        assert changed[key] != value
        changed[key] = value
        sizes = solve(changed[TRAIN], changed[MICRO], changed[ACCUMULATION], world_size)
        assert sizes.train is not None
        assert key in error.sentence and str(value) in error.sentence
    train = given[0]
    assert train is not None
    if not (given[1] and given[2]):
        # The nearest train batch sizes: nothing between the offers and the given value fits.
        unit = (given[1] or given[2] or 1) * world_size
        offered = [value for key, value in error.offers if key == TRAIN]
        assert all(abs(value - train) < unit and value % unit == 0 for value in offered)
        assert max(offered) > train
        # The nearest values of the other given size: none closer on either side fits.
        other = MICRO if given[1] else ACCUMULATION
        current = given[1] or given[2] or 1
        for value in (value for key, value in error.offers if key == other):
            between = range(min(value, current) + 1, max(value, current))
            assert all(train % (closer * world_size) for closer in between)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({TRAIN: 10, MICRO: 4}, [f"{ACCUMULATION} derived would be 1.25", f"{TRAIN} 8 or 16", f"{MICRO} 1 or 5"]),
        ({TRAIN: 12, ACCUMULATION: 4}, [f"{MICRO} derived would be 1.5", f"{TRAIN} 8 or 16", f"{ACCUMULATION} 3 or 6"]),
        ({TRAIN: 12, MICRO: 2, ACCUMULATION: 2}, ["2 x 2 x 2 = 8", "got 12", f"{TRAIN} 8", f"{MICRO} 3"]),
        ({TRAIN: 1}, [f"{TRAIN} 2"]),
    ],
)
def test_the_error_marks_values_and_offers_others(given: dict[str, int], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(given).resolve(2)
    ((path, sentence),) = caught.value.errors
    assert path == TRAIN and f"{TRAIN} 0" not in sentence
    for text in ("world size 2", *(f"{key} {value} given" for key, value in given.items()), *said):
        assert text in sentence


def test_resolve_fills_in_a_copy() -> None:
    config = load_config({MICRO: 3, ACCUMULATION: 2, "zero_optimization": {"stage": 1}})
    resolved = config.resolve(4)
    assert (resolved.train_batch_size, resolved.train_micro_batch_size_per_gpu) == (24, 3)
    assert resolved.gradient_accumulation_steps == 2 and resolved.zero_optimization.stage == 1
    assert config.train_batch_size is None
    assert resolved.resolve(4) == resolved
    with pytest.raises(ConfigError):
        resolved.resolve(3)


def test_the_loader_decides() -> None:
    for given, steps in (({}, 1), ({ACCUMULATION: 3}, 3), ({ACCUMULATION: "auto"}, 1)):
        resolved = load_config(given).resolve(2)
        assert resolved.train_batch_size is None and resolved.train_micro_batch_size_per_gpu is None
        assert resolved.gradient_accumulation_steps == steps


@pytest.mark.parametrize(
    ("given", "underivable"),
    [
        ({TRAIN: "auto"}, [TRAIN]),
        ({MICRO: "auto"}, [MICRO]),
        ({TRAIN: "auto", MICRO: "auto", ACCUMULATION: "auto"}, [TRAIN, MICRO]),
        ({TRAIN: "auto", ACCUMULATION: 2}, [TRAIN]),
    ],
)
def test_auto_that_cannot_be_derived(given: dict[str, Any], underivable: list[str]) -> None:
    config = load_config(given)
    with pytest.raises(ConfigError) as caught:
        config.resolve(2)
    assert [path for path, _ in caught.value.errors] == underivable
    assert all('"auto"' in sentence for _, sentence in caught.value.errors)


def test_auto_that_can_be_derived() -> None:
    resolved = load_config({TRAIN: "auto", MICRO: 3, ACCUMULATION: "auto"}).resolve(2)
    assert (resolved.train_batch_size, resolved.gradient_accumulation_steps) == (6, 1)
    resolved = load_config({TRAIN: 6, MICRO: "auto"}).resolve(2)
    assert resolved.train_micro_batch_size_per_gpu == 3
    assert resolved.resolve(2) == resolved == load_config({TRAIN: 6, MICRO: 3, ACCUMULATION: 1}).resolve(2)


def test_several_errors_at_resolve() -> None:
    config = load_config({TRAIN: 3, "optimizer": {"type": "auto"}})
    with pytest.raises(ConfigError) as caught:
        config.resolve(2)
    assert [path for path, _ in caught.value.errors] == ["optimizer.type", TRAIN]


@pytest.mark.parametrize("world_size", [0, -1, 1.0, True, None, "2"])
def test_wrong_world_size(world_size: Any) -> None:
    with pytest.raises(ValueError, match="world_size"):
        load_config({}).resolve(world_size)


def test_the_largest_sizes_take_no_time() -> None:
    started = time.perf_counter()
    with pytest.raises(BatchSizeError) as caught:
        solve(2**31 - 1, 2**30, None, 1)
    assert time.perf_counter() - started < 1.0
    assert (MICRO, 1) in caught.value.offers  # 2^31 - 1 is a prime
