"""Sets of ranks that have all shards, against one process: two ranks divide the parameters, and two such pairs hold the
same. The states are replicated too, or divided over all four (hierarchical shards)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.distributed.test_parity import OPTIMIZERS, SIZES, assert_matches, expected
from tests.toolkit import models
from tests.toolkit.compare import CLIP, assert_same_bits, assert_same_on_ranks
from tests.toolkit.configs import ADAMW, SGD, at
from tests.toolkit.pool import Pools
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import backward, expect_words, make_engine, raised, run_steps, snapshot, train_many

PAIRS, ROWS = {"shard_size": 2}, {"zero_hpz_partition_size": 2}
SETS: dict[str, tuple[str, dict[str, int]]] = {
    "1": ("1", PAIRS),
    "2": ("2", PAIRS),
    "3": ("3 moving", PAIRS),
    "hierarchical": ("3 moving", ROWS),
}
EXACT = ("SGD", {"lr": 2.0**-4})  # a product with a power of two is exact, so the update rounds once
STEPS = 4
PLAN = {"0": "column", "2": "row"}


@pytest.mark.fast("fp32-1")
@pytest.mark.parametrize(
    ("precision", "accumulation", "clip"),
    [("fp32", 4, CLIP), ("fp32", 1, 0.0), ("bf16", 1, CLIP), ("bf16", 4, 0.0), ("fp16", 1, CLIP)],
    ids=["fp32-4-clip", "fp32-1", "bf16-1-clip", "bf16-4", "fp16-1-clip"],
)
def test_replicas_match_plain_pytorch(pools: Pools, precision: str, accumulation: int, clip: float) -> None:
    """Losses, norms and weights are those of the joint batch, and the same on all ranks. Optimizers take turns."""
    runs = {}
    for number, (name, (stage, sets)) in enumerate(SETS.items()):
        optimizer = list(OPTIMIZERS)[(number + accumulation) % 2]
        made = at(stage, precision, accumulation, clip, OPTIMIZERS[optimizer], zero=sets)
        runs[f"{optimizer}, {name}"] = {"config": made, "sizes": SIZES[4], "steps": STEPS}
    ranks = pools(4).run(train_many, {"runs": runs}, timeout=120)
    for name in runs:
        optimizer = name.partition(",")[0]
        wanted = expected(4, precision, accumulation, clip, optimizer)
        assert_matches([results[name] for results in ranks], wanted, precision, accumulation, optimizer)


# -------------------------------------------------------------------- the order of sums


def in_one_process(case: str, accumulation: int, world: int, size: int) -> dict[str, Tensor]:
    """Return the weights after SGD, with gradients summed as the groups do: at stage 1 over the batches of a rank, then
    within sets of ``size`` ranks, then over these; else within sets, over micro-batches, over sets; and with
    hierarchical shards within sets, over sets, over micro-batches."""
    model = models.build(models.OddModel, **SIZES[4])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def gradients(step: int, micro: int, rank: int) -> dict[str, Tensor]:
        model.zero_grad()
        (models.token_loss(model, models.token_batch(step, micro, rank)) / accumulation).backward()
        return {name: p.grad / world for name, p in trained.items() if p.grad is not None}

    def plus(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: one[name] + other[name] for name in one}

    def of_sets(of_ranks: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        return [functools.reduce(plus, of_ranks[first : first + size]) for first in range(0, world, size)]

    for step in range(STEPS):
        rows = [[gradients(step, micro, rank) for rank in range(world)] for micro in range(accumulation)]
        if case == "1":
            sets = of_sets([functools.reduce(plus, of_rank) for of_rank in zip(*rows, strict=True)])
        elif case == "hierarchical":
            sets = [functools.reduce(plus, of_sets(row)) for row in rows]
        else:
            sets = [functools.reduce(plus, of_set) for of_set in zip(*map(of_sets, rows), strict=True)]
        total = functools.reduce(plus, sets)
        with torch.no_grad():
            for name, gradient in total.items():
                trained[name].sub_(gradient * EXACT[1]["lr"])
    return {name: p.detach() for name, p in model.named_parameters()}


def replicated_bits(name: str, accumulation: int, size: int = 2) -> None:
    stage, sets = SETS[name]
    given = at(stage, "fp32", accumulation, 0.0, EXACT, zero=dict.fromkeys(sets, size))
    engine = make_engine(given, sizes=SIZES[4])
    run_steps(engine, STEPS, model="OddModel")
    found = snapshot(engine)
    assert_same_on_ranks(found)
    assert_same_bits(found, in_one_process(name, accumulation, engine.world_size, size), name)


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize("name", SETS)
def test_replicas_have_the_bits_of_one_process(name: str) -> None:
    """The embedding of a token is a sum over the batch, OddModel has an unused parameter, and one without elements."""
    for accumulation in (1, 4):
        replicated_bits(name, accumulation)


@pytest.mark.slow
@on_ranks(8)
@pytest.mark.parametrize("size", [2, 4])
def test_two_sets_of_four_ranks_and_four_of_two(size: int) -> None:
    for name in SETS:
        replicated_bits(name, 2, size)


# -------------------------------------------------------------------- what users read and write


def branches(stage: str, replicas: dict[str, int]) -> Any:
    leaf = {"leaf_modules": ["TwoBranches"]} if stage.startswith("3") else {}
    return make_engine(at(stage, "fp32", 1, 0.0, SGD, zero=leaf | replicas), "TwoBranches")


def use_states(stage: str, directory: Path, replicas: dict[str, int]) -> dict[str, Any]:
    """Train with ranks that use different layers, and read and write what could count replicas twice, or leave some
    out: norms, full tensors, values of one rank, a checkpoint."""
    engine = branches(stage, replicas)
    weight = engine.module.stem.weight
    values: dict[str, Any] = {}
    for step in range(3):
        x, y = models.float_batch(step, 0, engine.rank)
        engine.backward(nn.functional.mse_loss(engine(x, "left" if engine.rank or step else "right"), y))
        values[f"norm {step}"] = torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.3)
        values[f"gradient {step}"] = zerolite.get_full_grad(weight)
        engine.step()
    with zerolite.zero.GatheredParameters([weight], modifier_rank=3):
        if engine.rank == 3 or not stage.startswith("3"):
            weight.data.add_(1.0)
    engine.save_checkpoint(str(directory))
    return values | states_of(engine)


def states_of(engine: Any) -> dict[str, Any]:
    momentum = zerolite.get_full_optimizer_state(engine.module.stem.weight, "momentum_buffer")
    return {"momentum": momentum, **snapshot(engine)}


_SAVED = ("plain", "replicated")


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize("name", SETS)
def test_replicas_count_once(name: str, tmp_path: Path) -> None:
    """All values are those of four ranks without replicas, and each kind of engine loads the other's checkpoint."""
    stage, sets = SETS[name]
    plain = use_states(stage, tmp_path / "plain", {})
    replicated = use_states(stage, tmp_path / "replicated", {"mics_shard_size": 2} if sets is PAIRS else sets)
    from_plain, from_replicated = branches(stage, sets), branches(stage, {})
    from_plain.load_checkpoint(str(tmp_path / "plain"))
    from_replicated.load_checkpoint(str(tmp_path / "replicated"))
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).rglob("*.safetensors")) for name in _SAVED]
    assert 0 < sizes[1] <= sizes[0], "a replica has saved what another one saves"
    assert_same_on_ranks(replicated)
    torch.testing.assert_close(replicated, plain, rtol=1e-6, atol=1e-7)  # the order of sums
    for engine, saved in ((from_plain, plain), (from_replicated, replicated)):
        values = states_of(engine)
        assert_same_bits(values, {name: saved[name] for name in values}, "loaded")


def save(directory: str) -> dict[str, dict[str, Any]]:
    """Train and save each kind of sets. Returns what was saved."""
    saved = {}
    for name, (stage, sets) in SETS.items():
        engine = make_engine(at(stage, "fp32", 1, 0.0, ADAMW, zero=sets))
        run_steps(engine, 2, model="OddModel")
        engine.save_checkpoint(f"{directory}/{name}")
        saved[name] = states_and_weights(engine)
    return saved


def load(directory: str, stages: list[str]) -> dict[str, dict[str, Any]]:
    loaded = {}
    for name in SETS:
        for stage in stages:
            engine = make_engine(at(stage, "fp32", 1, 0.0, ADAMW))
            engine.load_checkpoint(f"{directory}/{name}")
            loaded[f"{name} at {stage}"] = states_and_weights(engine)
    return loaded


def states_and_weights(engine: Any) -> dict[str, Any]:
    parameters = dict(engine.module.named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    moments = zerolite.get_full_optimizer_state(trained.values(), "exp_avg_sq")
    return snapshot(engine) | {f"moment {name}": m for name, m in zip(trained, moments, strict=True) if m is not None}


@pytest.mark.slow
def test_any_grid_reads_what_sets_have_saved(pools: Pools, tmp_path: Path) -> None:
    """Two sets of two ranks save, and one, three and four ranks load at stages with and without shards."""
    saved = pools(4).run(save, {"directory": str(tmp_path)}, timeout=120)[0]
    for world, stages in ((1, ["0"]), (3, ["0", "1", "3 tight"]), (4, ["0", "2"])):
        for values in pools(world).run(load, {"directory": str(tmp_path), "stages": stages}, timeout=120):
            for name, found in values.items():
                assert_same_bits(found, saved[name.partition(" ")[0]], f"{name}, {world} ranks")


@on_ranks(4)
def test_parameters_split_over_other_ranks_are_refused() -> None:
    made = at("3", "fp32", 1, 0.0, SGD, zero=PAIRS)
    with zerolite.zero.Init():
        model = models.build(models.Mlp)
    said = raised(zerolite.initialize, model, made)
    expect_words(said, "ValueError", "'first.weight'", "over 2 ranks", "got", "over 4", "zero.Init")
    with zerolite.zero.Init(config_dict_or_path=made):
        torch.manual_seed(dist.get_rank())  # all ranks take rank 0's values, those of the other set too
        model = models.Mlp()
    engine = zerolite.initialize(model, made)
    run_steps(engine, 2, model="Mlp")
    assert_same_on_ranks(snapshot(engine))


# -------------------------------------------------------------------- other grids, and what is refused


@pytest.mark.fast("3 tight-2")
@on_ranks(2, 4)
@pytest.mark.parametrize("stage", ["1", "2", "3 tight"])
def test_a_set_of_one_rank_divides_nothing(stage: str) -> None:
    """Every rank holds all states. Offload to the host, a step that is skipped, an evaluation in between."""
    runs = []
    for zero in ({}, {"shard_size": 1, "offload_optimizer": {"device": "cpu"}}):
        engine = make_engine(at(stage, "fp32", 2, CLIP, SGD, zero=zero), "Mlp")
        losses = run_steps(engine, 2, model="Mlp")
        with torch.no_grad():
            engine.eval()(models.float_batch(7, 0, engine.rank)[0])
        engine.train()
        for micro in range(2):
            x, y = models.float_batch(9, micro, engine.rank)
            bad = torch.nan if engine.rank == 1 and micro else 1.0
            engine.backward(nn.functional.mse_loss(engine(x), y) * bad)
            engine.step()
        assert engine.skipped_steps == 1
        losses += run_steps(engine, 2, model="Mlp")
        runs.append((losses, snapshot(engine)))
    torch.testing.assert_close(*runs, rtol=1e-6, atol=1e-7)


@on_ranks(4)
def test_replicas_beside_tensor_parallel_ranks() -> None:
    runs = []
    for zero in ({}, {"shard_size": 1}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 3))
        made = at("2", "fp32", 1, CLIP, SGD, zero=zero, tensor_parallel={"size": 2, "plan": PLAN})
        engine = zerolite.initialize(model, made)
        for step in range(3):
            x, y = models.float_batch(step, 0, engine.data_parallel_rank)
            engine.backward(nn.functional.mse_loss(engine(x), y))
            engine.step()
        runs.append(engine.full_state_dict())
    torch.testing.assert_close(*runs, rtol=1e-6, atol=1e-7)


@on_ranks(4)
def test_a_replica_that_computes_something_else_is_named() -> None:
    engine = make_engine(at("3", "fp32", 1, 0.0, SGD, zero=PAIRS, consistency_check_interval=1), "Mlp")
    run_steps(engine, 1, model="Mlp")
    if engine.rank == 2:
        engine._parts.buffer.buckets[0].master[0] += 1
    said = raised(run_steps, engine, 2, model="Mlp")
    expect_words(said, "RuntimeError", "different weights", "rank 0", "rank 2", "part of 'second")
    assert "rank 1" not in said and "rank 3" not in said


@pytest.mark.fast("4-step", "4-a save*")
@pytest.mark.parametrize("then", ["step", "save", "a save that one rank refuses"])
@on_ranks(4)
def test_replicas_are_compared_behind_the_sums_of_their_gradients(then: str, tmp_path: Path) -> None:
    """A rank that drops a gradient waits for the sums, which launches the rest of them; the others have not yet."""
    engine = make_engine(at("2", "fp32", 1, 0.0, SGD, zero=PAIRS, consistency_check_interval=1), "Mlp")
    run_steps(engine, 1, model="Mlp")
    backward(engine, 1)
    if engine.rank == 3:
        next(engine.module.parameters()).grad = None
    if then != "step":
        tag = "a/b" if engine.rank == 1 and then != "save" else None
        assert bool(raised(engine.save_checkpoint, tmp_path, tag)) is (then != "save")
    expect_words(raised(engine.step), "is nothing on ranks 0-2, but set to None (1 gradients) on rank 3")


@on_ranks(4)
def test_sets_that_do_not_fit() -> None:
    key = "zero_optimization.shard_size"
    said = raised(make_engine, at("1", zero={"shard_size": 3}), "Mlp")
    expect_words(said, "ConfigError", key, "a divisor of the 4 data-parallel ranks, got 3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "3")
        said = raised(make_engine, at("1", zero=PAIRS), "Mlp")
    expect_words(said, "ConfigError", key, "got 2 data-parallel ranks", "on hosts of 3 ranks")
    said = raised(make_engine, at("1", zero={"shard_size": 2 if dist.get_rank() else 4}), "Mlp")
    expect_words(said, "RuntimeError", "different grids", key, "rank 0")
