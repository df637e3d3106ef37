"""Grids of ranks used in every way that there is, and wrongly: the numbers of plain PyTorch, or a sentence, and no rank
that waits for ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import test_grid
from tests.distributed.cases.grid import Grid, on_grid
from tests.distributed.test_grid import CLIP, FP32, assert_ranks_agree, expected, worst
from tests.distributed.test_hang_processes import run as run_processes
from tests.toolkit.configs import PARTITIONED, SGD, Optimizer, config, dynamic_fp16
from tests.toolkit.pool import CaseFailed, Pools

CASES = "tests.distributed.cases.grid_breaks"
TENSOR, PIPE, DATA_TENSOR, PIPE_TENSOR = (1, 1, 2), (2, 1, 1), (1, 2, 2), (2, 1, 2)
ADAM_OF_CONFIG: Optimizer = test_grid.ADAMW


def settings(
    grid: Grid,
    stage: int = 1,
    precision: str = "fp32",
    count: int = 4,
    sequence: bool = False,
    optimizer: Optimizer | None = SGD,
    pipeline: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    zero = {**(PARTITIONED["moving"] if stage == 3 else {}), **(zero or {})}
    made = config(stage, precision, count, CLIP, optimizer or SGD, zero)
    if optimizer is None:
        del made["optimizer"]
    return on_grid(made, grid, sequence, **(pipeline or {})) | more


def run(pools: Pools, grid: Grid, case: str, timeout: float = 60, **kwargs: Any) -> list[Any]:
    pipe, data, tensor = grid
    return pools(pipe * data * tensor).run(f"{CASES}:{case}", kwargs, timeout=timeout)


def assert_as_plain(ranks: list[dict[str, Any]]) -> None:
    """Check a case that has plain PyTorch beside it."""
    assert_ranks_agree(ranks)
    got = ranks[0]
    assert got["losses"] == pytest.approx(got["wanted_losses"], rel=FP32)
    assert got["norms"] == pytest.approx(got["wanted_norms"], rel=FP32)
    assert got["lrs"] == got["wanted_lrs"]
    assert worst(got["parameters"], got["wanted"]) < (FP32, "")


def assert_as_expected(ranks: list[dict[str, Any]], grid: Grid, count: int = 4) -> None:
    """Check a case that trains the tied model for some of the first steps."""
    assert_ranks_agree(ranks)
    wanted = expected(grid[1], "fp32", True, CLIP, count)
    steps = len(ranks[0]["losses"])
    assert ranks[0]["losses"] == pytest.approx(wanted.losses[:steps], rel=FP32)
    assert ranks[0]["norms"] == pytest.approx(wanted.norms[:steps], rel=FP32)


def assert_everywhere(ranks: list[str], *words: str) -> None:
    for said in ranks:
        for word in words:
            assert word in said, said


# ---------------------------------------------------------------- what users bring

OWN: dict[str, dict[str, Any]] = {
    "an optimizer with groups, and a schedule": {"made": "own_optimizer"},
    "torch's Adam": {"made": "torch_adam"},
    "some parameters": {"made": "some_parameters", "optimizer": SGD},
    "param groups": {"made": "groups_for_config", "optimizer": ADAM_OF_CONFIG},
    "unfreezing": {"change": "unfreeze", "optimizer": SGD, "steps": 5},
    "one token": {"sample": {"size": 1, "length": 1}, "optimizer": SGD},
    "odd sizes": {"sample": {"size": 3, "length": 5}, "optimizer": SGD, "vocabulary": 13},
}


@pytest.mark.slow
@pytest.mark.parametrize("what", list(OWN))
@pytest.mark.parametrize(
    ("grid", "stage", "sequence"),
    [(PIPE, 1, False), (TENSOR, 1, False), (TENSOR, 3, True), (PIPE_TENSOR, 1, True), (DATA_TENSOR, 2, False)],
)
def test_what_users_bring(pools: Pools, grid: Grid, stage: int, sequence: bool, what: str) -> None:
    kwargs = dict(OWN[what])
    if sequence and "sample" in kwargs:
        kwargs["sample"] = {"size": 1, "length": 2}
    made = settings(grid, stage, sequence=sequence, optimizer=kwargs.pop("optimizer", None))
    assert_as_plain(run(pools, grid, "compare", config=made, **kwargs))


OPTIONS: dict[str, dict[str, Any]] = {
    "offload_optimizer": {"stage": 2, "zero": {"offload_optimizer": {"device": "cpu"}}},
    "offload_optimizer 3": {"stage": 3, "zero": {"offload_optimizer": {"device": "cpu"}}},
    "offload_param": {"stage": 3, "zero": {"offload_param": {"device": "cpu"}}},
    "memory_check": {"stage": 3, "memory_check": "error"},
    "wall_clock_breakdown": {"stage": 2, "wall_clock_breakdown": True},
    "memory_check, pipeline": {"grid": PIPE, "memory_check": "error"},
    "wall_clock_breakdown, pipeline": {"grid": PIPE, "wall_clock_breakdown": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OPTIONS))
def test_options(pools: Pools, name: str) -> None:
    given = dict(OPTIONS[name])
    grid = given.pop("grid", TENSOR)
    assert_as_plain(run(pools, grid, "compare", config=settings(grid, **given)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["engine", "plain", "phases"])
@pytest.mark.parametrize(("stage", "sequence"), [(0, False), (1, False), (2, True), (3, True)])
def test_loops(pools: Pools, kind: str, stage: int, sequence: bool) -> None:
    ranks = run(pools, TENSOR, "loops", config=settings(TENSOR, stage, sequence=sequence), kind=kind)
    assert_as_expected(ranks, TENSOR)


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "stage"), [(TENSOR, 0), (TENSOR, 3), (PIPE, 1)])
def test_evaluation_and_states_on_the_host(pools: Pools, grid: Grid, stage: int) -> None:
    made = settings(grid, stage)
    for rank, found in enumerate(run(pools, grid, "evaluation", config=made)):
        for way in ("eval_batch", "inference", "with logits"):
            assert found[way] == pytest.approx(found["wanted"], rel=FP32), way
        assert found["training"] and found["step"]
        assert found["logits"] == (None if grid == PIPE and rank == 0 else [()] * 4)
    ranks = run(pools, grid, "offloaded", config=made)
    assert_as_expected(ranks, grid)
    assert_everywhere([found["said"] for found in ranks], "engine.reload_states()")


@pytest.mark.slow
def test_engines_with_different_grids_in_one_process(pools: Pools) -> None:
    grids = [(PIPE, 1, False), (TENSOR, 3, True), ((1, 2, 1), 2, False)]
    configs = [settings(grid, stage, sequence=sequence) for grid, stage, sequence in grids]
    ranks = run(pools, PIPE, "two_engines", configs=configs)
    for number, (grid, _, _) in enumerate(grids):
        assert_as_expected([found[number] for found in ranks], grid)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_dropout_draws_the_same_numbers_where_the_same_is_computed(pools: Pools, sequence: bool) -> None:
    """Replicated parameters stay equal to the bit for 20 steps, and blocks that are computed anew change nothing."""
    blocks = {"modules": ["blocks.*"]}
    kinds: dict[str, dict[str, Any]] = {
        "kept": {},
        "engine": {"activation_checkpointing": blocks},
        "on the host": {"activation_checkpointing": {**blocks, "cpu_checkpointing": True}},
    }
    for stage in (1, 3):
        losses = {}
        for name, more in kinds.items():
            made = settings(TENSOR, stage, count=2, sequence=sequence, **more)
            ranks = run(pools, TENSOR, "dropouts", config=made)
            assert_ranks_agree(ranks)
            losses[name] = ranks[0]["losses"]
        made = settings(TENSOR, stage, count=2, sequence=sequence)
        losses["torch"] = run(pools, TENSOR, "dropouts", config=made, how="not")[0]["losses"]
        assert all(found == losses["kept"] for found in losses.values()), losses


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_blocks_that_checkpoint_themselves(pools: Pools, sequence: bool) -> None:
    """A reentrant checkpoint is an autograd function of the block's own input, whose shape is told for the rank's
    part."""
    made = settings(TENSOR, sequence=sequence)
    assert_as_expected(run(pools, TENSOR, "dropouts", config=made, how="not", dropout=0.0, steps=4), TENSOR)
    with pytest.raises(CaseFailed, match=r"use_reentrant=False"):
        run(pools, TENSOR, "dropouts", config=made, how="reentrant", dropout=0.0, steps=4)


@pytest.mark.slow
def test_dropout_in_stages(pools: Pools) -> None:
    made = settings(PIPE, count=2)
    losses = [run(pools, PIPE, "dropouts", config=made, how=how)[0]["losses"] for how in ("", "not", "reentrant")]
    made["activation_checkpointing"] = {"modules": ["blocks.*"]}
    losses.append(run(pools, PIPE, "dropouts", config=made)[0]["losses"])
    assert all(found == losses[0] for found in losses)
    assert_ranks_agree(run(pools, PIPE_TENSOR, "dropouts", config=settings(PIPE_TENSOR, count=2, sequence=True)))


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "stage", "sequence"), [(TENSOR, 1, False), (TENSOR, 3, True), (PIPE, 1, False)])
def test_mixed_precisions(pools: Pools, grid: Grid, stage: int, sequence: bool) -> None:
    """Beside one process with the same options: twice the rounding of one value in bf16."""
    for more in (
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"precision": "bf16", "fp32_modules": ["*.norm", "*.second_norm", "norm"]},
    ):
        no_place = {"place": (9, 9, 9)}
        alone = run(pools, (1, 1, 1), "skips", config=settings((1, 1, 1), stage, **more), **no_place)
        ranks = run(pools, grid, "skips", config=settings(grid, stage, sequence=sequence, **more), **no_place)
        assert_ranks_agree(ranks)
        wanted = [float(norm) for norm in alone[0]["norms"]]
        assert [float(norm) for norm in ranks[0]["norms"]] == pytest.approx(wanted, rel=2.0**-7)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [TENSOR, PIPE, PIPE_TENSOR, DATA_TENSOR])
def test_one_rank_writes(pools: Pools, grid: Grid, tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    more = {"steps_per_print": 2, "wall_clock_breakdown": True, "jsonl_monitor": monitor}
    ranks = run(pools, grid, "printed", config=settings(grid, **more))
    lines = [found["lines"].splitlines() for found in ranks]
    assert [line.split(":")[0] for line in lines[0]] == ["step 2", "step 2", "step 4", "step 4"]
    assert not any(lines[1:]), lines
    assert [found["writes"] for found in ranks] == [True] + [False] * (len(ranks) - 1)
    events = [json.loads(line) for line in (tmp_path / "job" / "events.jsonl").read_text().splitlines()]
    losses = [event["Train/Samples/train_loss"] for event in events if "Train/Samples/train_loss" in event]
    assert len(losses) == 4, events
    assert len(list(tmp_path.rglob("*.jsonl"))) == 1


# ---------------------------------------------------------------- Hugging Face

PLANS = {"GPT2": {"*.c_attn": "column", "*.c_fc": "column", "*.c_proj": "row", "lm_head": "vocab"}}
LISTS = {"GPT2": "transformer.h", "Llama": "model.layers", "Qwen2": "model.layers", "Qwen3": "model.layers"}


@pytest.mark.slow
@pytest.mark.parametrize("family", list(LISTS))
@pytest.mark.parametrize(
    ("grid", "stage", "sequence"),
    [(TENSOR, 3, False), (TENSOR, 3, True), (PIPE, 1, False), (PIPE_TENSOR, 1, True), (DATA_TENSOR, 3, False)],
)
def test_hugging_face(pools: Pools, family: str, grid: Grid, stage: int, sequence: bool) -> None:
    pytest.importorskip("transformers")
    made = settings(grid, stage, count=2, sequence=sequence)
    if grid[2] > 1:
        made["tensor_parallel"] = {"size": 2, "plan": PLANS.get(family, "auto"), "sequence_parallel": sequence}
    if grid[0] > 1:
        made["pipeline"] = {"stages": 2, "split": [f"{LISTS[family]}.2"]}
    for tied in (True, False) if family == "Llama" else (True,):
        assert_as_plain(run(pools, grid, "train_hugging_face", config=made, family=family, tied=tied))


# ---------------------------------------------------------------- what is not finite


@pytest.mark.parametrize(
    ("grid", "place", "stage"),
    [
        (PIPE, (0, 0, 0), 1),
        pytest.param(PIPE, (1, 0, 0), 1, marks=pytest.mark.slow),
        pytest.param(TENSOR, (0, 0, 1), 3, marks=pytest.mark.slow),
        pytest.param(PIPE_TENSOR, (1, 0, 1), 1, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_skipped_on_all_ranks(pools: Pools, grid: Grid, place: Any, stage: int) -> None:
    """One element of one rank's gradients is not finite in the third of six steps."""
    for value, more, scale in (("nan", {}, 1.0), ("inf", {"fp16": dynamic_fp16()}, 128.0)):
        ranks = run(pools, grid, "skips", config=settings(grid, stage, **more), place=place, value=float(value))
        assert_ranks_agree(ranks)
        for found in ranks:
            assert found["counters"][:3] == (6, 1, scale)
            assert found["norms"][2] == value and found["norms"][3] not in ("nan", "inf")


@pytest.mark.slow
@pytest.mark.parametrize("grid", [PIPE, TENSOR])
def test_loss_scales_shrink_together(pools: Pools, grid: Grid) -> None:
    made = settings(grid, fp16=dynamic_fp16(initial_scale_power=32))
    ranks = run(pools, grid, "skips", config=made, place=(9, 9, 9))
    assert_ranks_agree(ranks)
    assert ranks[0]["counters"][:3] == (6, 6, 2.0**26)


# ---------------------------------------------------------------- what raises


@pytest.mark.fast("place1-backward-gpipe")
@pytest.mark.parametrize(
    ("place", "when", "schedule"),
    [
        ((0, 0, 0), "forward", "1f1b"),
        ((1, 0, 0), "backward", "gpipe"),
        *(
            pytest.param((stage, 0, 0), when, schedule, marks=pytest.mark.slow)
            for stage in (0, 1)
            for when in ("forward", "backward")
            for schedule in ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble")
        ),
    ],
)
def test_a_stage_that_raises(pools: Pools, place: Any, when: str, schedule: str) -> None:
    """All ranks hear of it at once, and training goes on as if the step had not been."""
    made = settings(PIPE, pipeline={"schedule": schedule, "partition_method": "uniform"})
    ranks = run(pools, PIPE, "raises_inside", config=made, place=place, when=when, timeout=30)
    assert_ranks_agree(ranks)
    for rank, found in enumerate(ranks):
        own = "_Deliberate: on purpose"
        other = f"RuntimeError: engine.train_batch: rank {place[0]} failed: {own}"
        assert found["said"] == (own if rank == place[0] else other)
        assert found["seconds"] < 10
        assert found["later"] == pytest.approx(expected(1, "fp32", True, CLIP, 4).losses[1:3], rel=FP32)
        assert found["counters"][:2] == (3, 0)


@pytest.mark.slow
def test_a_tensor_rank_that_raises_ends_the_others(tmp_path: Path) -> None:
    script = """
import torch.nn as nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        hidden = self.up(x)
        if rank == 1 and engine.global_steps == 2:
            raise ValueError("bad layer")
        return self.down(hidden).square().mean()

settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
settings["tensor_parallel"] = {"size": 2, "plan": {"up": "column", "down": "row"}}
engine = zerolite.initialize(Net(), {**settings, "desync_timeout_s": 30.0})
for i in range(4):
    engine.train_batch(iter([torch.ones(2, 8)]))
"""
    (status, said), (odd, own) = run_processes(tmp_path, script)
    assert odd == 1 and "ValueError: bad layer" in own
    assert status != 0 and "rank 1" in said, said


def test_iterators(pools: Pools) -> None:
    own, others = reversed(run(pools, PIPE, "iterators", config=settings(PIPE), timeout=30))
    for said in (own, others):
        for key in ("short on one", "eval short"):
            assert "expected every rank to have a whole step's micro-batches, got none any more on rank 1" in said[key]
        assert said["short on all"].startswith("StopIteration: engine.train_batch: the iterator")
        assert said["empty"] == said["short on all"]
        assert "expected an iterator, got list; pass iter(loader)" in said["list"]
        assert "expected an iterator of micro-batches, got none" in said["none"]
        assert "the same shapes, got inputs" in said["lengths"] and "pad them" in said["lengths"]
        assert (
            "the stages of one pipeline to read the same micro-batches, got other values on rank 1"
            in said["other data"]
        )
        assert (said["works"], said["steps"]) == ("nothing was raised", 1)
    assert own["raises"] == "_Deliberate: no file"
    assert (
        others["raises"]
        == "RuntimeError: engine.train_batch: rank 1 could not read its micro-batches: " + own["raises"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("grid", [TENSOR, PIPE])
def test_ranks_of_one_model_read_other_data(pools: Pools, grid: Grid) -> None:
    for shapes in (False, True):
        said = run(pools, grid, "other_data", config=settings(grid), shapes=shapes, timeout=30)
        assert_everywhere(said, "RuntimeError: ", "expected", "engine.data_parallel_rank")


@pytest.mark.slow
def test_calls_that_a_pipeline_has_not(pools: Pools) -> None:
    for said in run(pools, PIPE, "wrong_use", config=settings(PIPE)):
        for key in ("call", "forward", "backward", "step", "join", "no_sync", "boundary", "optimizer"):
            assert said[key].startswith("RuntimeError") and "engine.train_batch" in said[key], (key, said[key])


# ---------------------------------------------------------------- what initialize says


def plan(**styles: str) -> dict[str, Any]:
    return {"tensor_parallel": {"size": 2, "plan": {name.replace("__", "."): style for name, style in styles.items()}}}


def misfits() -> dict[str, tuple[dict[str, Any], str]]:
    named = {"split": ["blocks.2"]}
    return {
        "zero 2": (settings(PIPE, 2), "expected 0 or 1 with a pipeline (pipeline.stages = 2), got 2: stage 2 would"),
        "zero 3": (settings(PIPE, 3), "got 3: stage 3 would gather all parameters"),
        "tensor 3": (
            settings((1, 1, 3)),
            "a multiple of pipeline.stages × tensor_parallel.size, got 2 processes for 1",
        ),
        "stages 3": (settings((3, 1, 1)), "got 2 processes for 3 × 1 = 3"),
        "2 × 2": (settings(PIPE_TENSOR), "got 2 processes for 2 × 2 = 4"),
        "split": (
            settings(PIPE, pipeline={"split": ["block.2"]}),
            "got 'block.2', which the model has not; did you mean",
        ),
        "splits": (settings(PIPE, pipeline={"split": ["blocks.1", "blocks.2"]}), "pipeline.split: expected 1 name"),
        "no match": (
            settings(TENSOR) | plan(blocks__0__qkvv="column"),
            "qkvv', which matches nothing; the nearest names are",
        ),
        "no row": (settings(TENSOR) | plan(blocks__0__qkv="column"), "expected a row in 'blocks.0' for the column"),
        "no column": (settings(TENSOR) | plan(blocks__0__proj="row"), "expected a column in 'blocks.0' for the row"),
        "no layer": (settings(TENSOR) | plan(norm="column"), "expected an nn.Linear as 'norm'"),
        "no style": (settings(TENSOR) | plan(head="colum"), "got 'colum'; known are column, row, vocab"),
        "one micro-batch": (
            settings(PIPE, count=1),
            "gradient_accumulation_steps: expected micro-batches that pipeline.schedule '1f1b' can run on 2 stages",
        ),
        "parts": (settings(PIPE, pipeline={"schedule": "interleaved_1f1b", "chunks": 4}), "at least 8 equal blocks"),
        "schedule": (settings(PIPE, pipeline={"schedule": "2f2b"}), 'pipeline.schedule: expected "gpipe" or "1f1b"'),
        "interval": (
            settings(PIPE, pipeline={**named, "activation_checkpoint_interval": 2}),
            "expected 0 for a model that is no sequence of layers, got 2",
        ),
        "batch": (settings(TENSOR, train_batch_size=16), "train_batch_size: expected 2 x 4 x 1 = 8, got 16"),
        "offload": (
            settings(PIPE, zero={"offload_optimizer": {"device": "cpu"}}),
            'expected "none" with pipeline.stages, got "cpu"',
        ),
    }


@pytest.mark.slow
def test_what_does_not_fit_is_said_on_all_ranks(pools: Pools) -> None:
    for name, (made, words) in misfits().items():
        said = run(pools, PIPE, "initialize_says", config=made)
        assert said[0] == said[1] and words in said[0], (name, said)
    assert_everywhere(run(pools, TENSOR, "init_context", config=settings(TENSOR, 3)), "zero.Init", "tensor_parallel")


@pytest.mark.slow
def test_configs_that_differ_are_named(pools: Pools) -> None:
    first = settings(PIPE, pipeline={"split": ["blocks.2"]})
    for odd, words in (
        (settings(PIPE, pipeline={"split": ["blocks.1"]}), "config key pipeline.split is ['blocks.2'] on rank 0"),
        (settings(TENSOR), "config key pipeline.stages is 2 on rank 0, but 1 on rank 1"),
        (first | {"gradient_clipping": 3.0}, "config key gradient_clipping is 0.4 on rank 0, but 3.0 on rank 1"),
    ):
        assert_everywhere(run(pools, PIPE, "initialize_says", config=first, odd=odd), words)
