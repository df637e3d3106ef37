"""One global batch for every world size: exhaustively for small numbers, against what trying finds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from zerolite.config import ConfigError, load_config
from zerolite.config.elasticity import ElasticityConfig, choose_batch

MICROS = [combination for size in (1, 2, 3) for combination in itertools.combinations((1, 2, 3, 4, 6, 9), size)]


def fits(train: int, micros: tuple[int, ...], world: int) -> list[tuple[int, int]]:
    """Every (micro-batch, accumulation) with this product, found by trying."""
    return [(m, a) for m in micros for a in range(1, train + 1) if m * a * world == train]


def tried_batch(max_train: int, micros: tuple[int, ...], worlds: range, larger: bool) -> int | None:
    counts = {
        train: sum(any(train % (m * world) == 0 for m in micros) for world in worlds)
        for train in range(1, max_train + 1)
    }
    best = max(counts.values())
    found = [train for train, count in counts.items() if count == best]
    return (found[-1] if larger else found[0]) if best else None


@pytest.mark.parametrize("worlds", [range(1, 5), range(1, 50), range(3, 8), range(2, 20, 2), range(8, 9), range(3, 3)])
def test_the_batch_that_the_most_world_sizes_fit(worlds: range) -> None:
    nothing = 0
    for micros, larger in itertools.product(MICROS, (True, False)):
        for max_train in (1, 2, 3, 7, 16, 30, 59, 60):
            expected = tried_batch(max_train, micros, worlds, larger)
            assert choose_batch(max_train, micros, worlds, larger) == expected, (max_train, micros, larger)
            nothing += expected is None
    assert nothing, "some are too small for any"


def test_every_world_size_that_fits_takes_the_same_steps() -> None:
    for micros, larger in itertools.product(MICROS, (True, False)):
        elasticity = ElasticityConfig(
            micro_batch_sizes=micros, max_gpus=20, prefer_larger_batch=larger, max_train_batch_size=50
        )
        train = choose_batch(50, tuple(micros), elasticity.worlds, larger)
        assert train is not None
        for world in range(1, 25):
            possible = fits(train, micros, world) if world <= 20 else []
            if not possible:
                with pytest.raises(ValueError, match="got"):
                    elasticity.solve(None, world)
                continue
            sizes = elasticity.solve(None, world)
            assert sizes.train == train and (sizes.micro, sizes.accumulation) in possible


BLOCK: dict[str, Any] = {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2, 3, 4], "max_gpus": 16}


def sizes_of(source: dict[str, Any], world: int) -> tuple[int | None, int | None, int | None]:
    config = load_config(source).resolve(world)
    return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps


def error_of(source: dict[str, Any], world: int) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source).resolve(world)
    ((path, sentence),) = caught.value.errors
    assert path == "elasticity"
    assert sentence.startswith("expected ") and ", got " in sentence and "; " in sentence
    return sentence


def test_the_example_of_the_documentation() -> None:
    found = {}
    for world in range(1, 17):
        try:
            found[world] = sizes_of({"elasticity": BLOCK}, world)
        except ConfigError:
            continue
    assert list(found) == [1, 2, 3, 4, 6, 8, 12, 16] and {sizes[0] for sizes in found.values()} == {96}
    assert found[16][1:] == (3, 2) and found[8][1:] == (4, 3) and found[6][1:] == (4, 4)
    by_nodes = sizes_of({"elasticity": {**BLOCK, "num_gpus_per_node": 3}}, 3)
    assert by_nodes[0] == tried_batch(100, (2, 3, 4), range(3, 17, 3), True)
    resolved = load_config({"elasticity": BLOCK}).resolve(4)
    assert resolved.resolve(4) == resolved and resolved.resolve(6).train_batch_size == 96


def test_a_batch_that_is_given() -> None:
    given = {"train_batch_size": 60, "elasticity": BLOCK}
    assert sizes_of(given, 5) == (60, 4, 3) and sizes_of(given, 10) == (60, 3, 2)
    alone = {"train_batch_size": 60, "elasticity": {"enabled": True, "micro_batch_sizes": [2]}}
    assert sizes_of(alone, 3) == (60, 2, 10)
    sentence = error_of(given, 8)
    assert "global batch of 60 samples (train_batch_size)" in sentence and "got 8 ranks (7.5 samples" in sentence


def test_batch_sizes_are_ignored_where_the_block_says_so() -> None:
    ignored = {"train_batch_size": 60, "train_micro_batch_size_per_gpu": 7, "gradient_accumulation_steps": 5}
    source = {**ignored, "elasticity": {**BLOCK, "ignore_non_elastic_batch_info": True}}
    assert sizes_of(source, 8) == sizes_of({"elasticity": BLOCK}, 8)
    off = {"train_batch_size": 60, "elasticity": {**BLOCK, "enabled": False}}
    assert sizes_of(off, 5) == (60, 12, 1)


@pytest.mark.parametrize(
    ("changes", "world", "expected", "reason", "nearest"),
    [
        ({}, 5, "from 1 to 16 that", "5 ranks (19.2 samples for each)", "4 or 6"),
        ({}, 17, "from 1 to 16 that", "17 ranks (more than max_gpus)", "16"),
        ({"min_gpus": 3}, 2, "from 3 to 16 that", "2 ranks (fewer than min_gpus)", "3"),
        ({"num_gpus_per_node": 4}, 6, "(in multiples of 4)", "6 ranks (not a multiple of num_gpus_per_node)", "4 or 8"),
    ],
)
def test_a_world_size_that_does_not_fit(
    changes: dict[str, Any], world: int, expected: str, reason: str, nearest: str
) -> None:
    sentence = error_of({"elasticity": {**BLOCK, **changes}}, world)
    assert expected in sentence and f"got {reason};" in sentence and sentence.endswith(f" do: {nearest}")
    assert "global batch of 96 samples (chosen" in sentence and "those up to 100" in sentence
