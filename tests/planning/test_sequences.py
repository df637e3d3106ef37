"""Plans of long sequences: divided among ranks, with tiles and offloaded inputs, against real runs."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from tests.planning.jobs import LongDecoder, long_batch, planned, settings
from tests.planning.test_plan_is_right import MEASURED, assert_right
from tests.toolkit.pool import Pools
from zerolite.planning import PlanError, longest, plan
from zerolite.planning.report import render

TILES = {"tiled_loss": 64, "tiled_mlp": 64}
ON_HOST = {"activation_checkpointing": {"modules": ["LongBlock"], "cpu_checkpointing": True}}
PEAK = 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "size", "stage", "precision", "more"),
    [
        (2, 2, 3, "fp32", TILES | ON_HOST),
        pytest.param(2, 2, 2, "fp32", {}, marks=pytest.mark.slow),
        pytest.param(4, 2, 1, "fp32", TILES, marks=pytest.mark.slow),
        pytest.param(4, 4, 3, "bf16", TILES | ON_HOST, marks=pytest.mark.slow),
        pytest.param(1, 1, 3, "bf16", TILES | ON_HOST, marks=pytest.mark.slow),
    ],
)
def test_a_plan_of_long_sequences_is_right(
    pools: Pools, world: int, size: int, stage: int, precision: str, more: dict[str, Any]
) -> None:
    setting = {
        "stage": stage, "buckets": "large", "precision": precision, "sequence_parallel": {"size": size},
        "train_micro_batch_size_per_gpu": 1, **more,
    }  # fmt: skip
    made = planned("long", world, world - 1, **setting)
    measured = pools(world).run(MEASURED, {"kind": "long", **setting}, timeout=180)[world - 1]
    assert_right(made, measured, PEAK, PEAK)
    rows = {(row.op, row.tag, row.dimension): row for row in made.traffic}
    if size > 1:  # four all-to-alls a layer in forward and backward, and forward again in a checkpoint
        exchanged = rows["all_to_all", "sequence", "sequence"]
        assert exchanged.count == 3 * (12 if "activation_checkpointing" in more else 8)
        assert exchanged.ranks == size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "nodes", "expected"),
    [
        ("ulysses", 2, {("all_to_all", "sequence"): (4, Fraction(2, 3))}),
        ("auto", 2, {("all_to_all", "sequence"): (2, 0), ("permute", "ring"): (2, 1)}),
        ("ring", 2, {("permute", "sequence"): (4, None)}),
    ],
)
def test_rings_across_nodes(attention: str, nodes: int, expected: dict[tuple[str, str], tuple[int, Any]]) -> None:
    """With "auto" neighbours exchange tokens for heads in a node, and keys and values go round between nodes."""
    setting = {"sequence_parallel": {"size": 4, "attention": attention}, "train_micro_batch_size_per_gpu": 1}
    made = planned("long", 4, nodes=nodes, stage=3, buckets="large", **setting)
    rows = {(row.op, row.dimension): row for row in made.traffic if row.tag == "sequence"}
    assert {kind: row.ranks for kind, row in rows.items()} == {kind: ranks for kind, (ranks, _) in expected.items()}
    for kind, (_, share) in expected.items():
        between = rows[kind].inter_node
        assert between is not None
        if share is None:  # of a ring every other link, and all of the swapped halves
            assert rows[kind].sent // 2 < between < rows[kind].sent
        else:
            assert between == int(rows[kind].sent * share)


# -------------------------------------------------------------------- the longest that fit


class _Made(SimpleNamespace):
    def model_copy(self, update: dict[str, Any]) -> _Made:
        return _Made(**{**vars(self), **update})


@pytest.mark.parametrize(
    ("states", "per_unit", "expected"),
    [(1000, 100, 988), (0, 99_000, 1), (50_000, 10_000, 4), (1000, 10, 9_880), (10, 2.5, 39_916)],
)
def test_the_search_ends_at_the_limit(
    monkeypatch: pytest.MonkeyPatch, states: int, per_unit: float, expected: int
) -> None:
    """Within 1 %, in few plans: of a device of 100,000 bytes ``states`` are taken, and more by each unit of tokens."""
    planned: list[float] = []

    def linear(*args: Any, batch: Any, device_memory: int, **options: Any) -> _Made:
        units = batch / 2048
        planned.append(units)
        peak = SimpleNamespace(bytes=int(states + per_unit * units + 5 * min(units, 40)))
        fits = peak.bytes <= device_memory
        return _Made(peak=peak, step_peak=peak, fits=fits, device_memory=device_memory, host_spare=None, notes=["own"])

    monkeypatch.setattr("zerolite.planning.length_search.plan", linear)
    config = settings(3, "auto", sequence_parallel={"size": 2})
    length, made = longest(LongDecoder, config, 2, batch=lambda n: n, device_memory=100_000)  # type: ignore[arg-type,return-value]
    assert expected * 0.99 - 1 <= length / 2048 <= expected
    assert made.notes[1:] == ["own"] and "to 1 %" in made.notes[0]
    assert len(planned) == len(set(planned)) <= 7


def test_no_sequence_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = SimpleNamespace(bytes=2 * 10**9)
    made = _Made(peak=peak, step_peak=peak, fits=False, device_memory=10**9, host_spare=None)
    monkeypatch.setattr("zerolite.planning.length_search.plan", lambda *args, **options: made)
    config = settings(3, "auto", sequence_parallel={"size": 4})
    with pytest.raises(PlanError, match=r"room for sequences of 4,096 tokens, got a peak of 2.00 GB; take more ranks"):
        longest(LongDecoder, config, 4, batch=lambda n: lambda: long_batch(n), device_memory=1)


def test_memory_that_no_length_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = SimpleNamespace(bytes=10)
    made = _Made(peak=peak, step_peak=peak, fits=True, device_memory=10**9, host_spare=None)
    monkeypatch.setattr("zerolite.planning.length_search.plan", lambda *args, **options: made)
    with pytest.raises(PlanError, match="expected memory that grows with the length"):
        longest(LongDecoder, settings(3, "auto"), 4, batch=lambda n: long_batch, device_memory=1)


@pytest.mark.slow
def test_the_longest_sequences_of_a_real_plan() -> None:
    config = settings(3, "auto", sequence_parallel={"size": 2}, train_micro_batch_size_per_gpu=1, **TILES)
    options: dict[str, Any] = {"device": "cpu", "nodes": 1, "device_memory": "60MB"}
    length, made = longest(LongDecoder, config, 2, batch=lambda n: lambda: long_batch(n), **options)
    assert made.fits
    assert not plan(LongDecoder, config, 2, batch=lambda: long_batch(length + 2048), **options).fits
    assert f"The longest sequences that fit have {length:,} tokens" in render(made)
    same = plan(LongDecoder, config, 2, batch=lambda: long_batch(length), **options)
    assert (same.peak, same.traffic) == (made.peak, made.traffic)
