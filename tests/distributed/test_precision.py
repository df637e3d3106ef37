"""Modules that stay in fp32, at every stage, against plain PyTorch with the same casts; and the table of dtypes in
docs/precision.md, cell by cell."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.cases import precision as cases
from tests.toolkit import reference
from tests.toolkit.compare import EPSILON, HALF_RELATIVE, assert_same_bits, mean_losses
from tests.toolkit.configs import ADAMW, PARTITIONED, SGD, STATIC_SCALE, config
from tests.toolkit.pool import Pools

CASES = "tests.distributed.cases.precision"
STEPS = 5
CLIP = 0.4
FOREACH = (ADAMW[0], {**ADAMW[1], "foreach": True})  # torch's own arithmetic
# Where the order of sums flips the rounding of an activation, gradients differ by a share of 2^-8 of a contribution,
# and what is kept in fp32 by that times lr.
FLIPPED = 2e-4
OPTIMIZERS = {"adamw": ADAMW, "sgd": SGD, "foreach": FOREACH}
STAGES: dict[str, tuple[int, dict[str, Any] | None]] = {
    "0": (0, None),
    "1": (1, None),
    "2": (2, None),
    "3": (3, PARTITIONED["moving"]),
    "3-one-unit": (3, PARTITIONED["one unit"]),
}
WORLDS = [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]


def settings(
    stage: str, precision: str, accumulation: int, optimizer: str, clip: float = 0.0, low: bool = False
) -> dict[str, Any]:
    number, zero = STAGES[stage]
    result = config(number, precision, accumulation, clip, OPTIMIZERS[optimizer], zero, fp32_modules=cases.PATTERNS)
    if low:
        result[precision][f"{precision}_master_weights_and_grads"] = True
    return result


@functools.cache
def expected(
    world: int, precision: str, accumulation: int, optimizer: str, clip: float, low: bool
) -> reference.Trajectory:
    scale = STATIC_SCALE if precision == "fp16" else 1.0
    dtype = reference.DTYPES[precision]
    return cases.train_plain(dtype, OPTIMIZERS[optimizer], world, accumulation, STEPS, clip, scale, low)


def in_fp32(name: str) -> bool:
    return name.startswith(("norm.", "gate.", "positions.")) or ".adapter." in name


FAST = {(2, "bf16", 2), (2, "fp16", 1)}
MATRIX = [
    pytest.param(*entry, marks=() if entry in FAST else pytest.mark.slow)
    for entry in itertools.product((1, 2, 3), ("bf16", "fp16"), (1, 2))
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "precision", "accumulation"), MATRIX)
def test_all_stages_match_casts_by_hand(pools: Pools, world: int, precision: str, accumulation: int) -> None:
    variants = [("foreach", 0.0, False), ("adamw", CLIP, False), ("sgd", CLIP, True)]
    runs = {
        f"{stage} {number}": {
            "config": settings(stage, precision, accumulation, optimizer, clip, low),
            "steps": STEPS,
        }
        for number, (optimizer, clip, low) in enumerate(variants)
        for stage in STAGES
    }
    ranks = pools(world).run(f"{CASES}:train_many", {"runs": runs}, timeout=240)
    for number, (optimizer, clip, low) in enumerate(variants):
        wanted = expected(world, precision, accumulation, optimizer, clip, low)
        for stage in STAGES:
            results = [results[f"{stage} {number}"] for results in ranks]
            assert_dtypes(results[0], precision, low)
            for other in results[1:]:
                assert_same_bits(results[0]["parameters"], other["parameters"], "parameters of two ranks")
            assert_same_bits(results[0]["parameters"], results[0]["reloaded"], "saved and loaded")
            # Stages 0 and 1 sum a window's gradients and then reduce; stages 2 and 3 do it as the reference does.
            exact = optimizer == "foreach" and (accumulation == 1 or stage[0] in "23" or world == 1)
            assert_matches(results, wanted, precision, accumulation, exact)
        assert_stages_agree(ranks[0], number, accumulation)


def assert_dtypes(result: dict[str, Any], precision: str, low: bool) -> None:
    half = reference.DTYPES[precision]
    for name, value in result["parameters"].items():
        assert value.dtype is (torch.float32 if in_fp32(name) else half), name
    for name, value in result["masters"].items():
        assert value.dtype is (half if low and not in_fp32(name) else torch.float32), name
        assert result["second copies"][name] is (not low and not in_fp32(name)), f"{name}: masters"
    assert result["steps"] == (STEPS, 0)


def assert_matches(
    results: list[dict[str, Any]], wanted: reference.Trajectory, precision: str, accumulation: int, exact: bool
) -> None:
    result, relative = results[0], HALF_RELATIVE[precision]
    assert mean_losses(results, accumulation) == pytest.approx(wanted.losses, rel=1e-6 if exact else relative)
    assert result["norms"] == pytest.approx(wanted.norms, rel=1e-6 if exact else relative)
    if exact:
        assert_same_bits(result["parameters"], wanted.parameters, "engine and plain PyTorch")
        trained = {name: wanted.masters[name] for name in result["masters"]}
        assert_same_bits(result["masters"], trained, "masters of the engine and of plain PyTorch")
        return
    for name, value in wanted.parameters.items():
        difference = (result["parameters"][name].float() - value.float()).abs()
        unit = 2e-6 if in_fp32(name) else EPSILON[precision]
        assert torch.all(difference <= unit * value.float().abs() + FLIPPED), f"{name}: {difference.max()}"


def assert_stages_agree(runs: dict[str, dict[str, Any]], number: int, accumulation: int) -> None:
    pairs = [("0", "1"), ("2", "3"), ("2", "3-one-unit")]
    for one, other in [*pairs, ("0", "2")] if accumulation == 1 else pairs:
        a, b = runs[f"{one} {number}"], runs[f"{other} {number}"]
        assert_same_bits(a["parameters"], b["parameters"], f"stages {one} and {other}")
        assert_same_bits(a["masters"], b["masters"], f"masters of stages {one} and {other}")
        assert a["losses"] == b["losses"]
        assert b["norms"] == pytest.approx(a["norms"], rel=1e-14, abs=0)


@pytest.mark.slow
def test_ways_to_build_and_to_compile(pools: Pools) -> None:
    runs = {
        f"{stage} {how}": {"config": settings(stage, "bf16", 1, "adamw"), "steps": 3, "how": how}
        for stage, how in (("0", ""), ("3", "init"), ("0", "compiled"), ("3", "compiled"))
    }
    results = pools(2).run(f"{CASES}:train_many", {"runs": runs}, timeout=120)[0]
    for name in list(runs)[1:]:
        assert_same_bits(results["0 "]["parameters"], results[name]["parameters"], name)


# -------------------------------------------------------------------- corners

HEAD = {"fp32_modules": ["head"]}
CORNERS = [0, 2, 3]


def corner(stage: int, precision: str = "bf16", **more: Any) -> dict[str, Any]:
    zero = PARTITIONED["moving"] if stage == 3 else None
    if precision == "autocast":
        more, precision = {"torch_autocast": {"enabled": True}, **more}, "fp32"
    return config(stage, precision, 1, 0.0, ADAMW, zero, **HEAD, **more)


@pytest.mark.parametrize("stage", CORNERS)
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_outputs_where_an_fp32_module_comes_last(pools: Pools, stage: int, precision: str) -> None:
    found = pools(2).run(f"{CASES}:head_last", {"config": corner(stage, precision)})[0]
    half = reference.DTYPES[precision]
    for widen in (False, True):
        wanted = found[f"train {widen}"]
        assert wanted.dtype is torch.float32
        for name in ("no_grad", "inference"):
            assert torch.equal(found[f"{name} {widen}"], wanted), f"{name} {widen}"
        direct = found[f"module {widen}"]
        assert direct.dtype is (torch.float32 if widen else half) and torch.equal(direct.float(), wanted)
    rounded, exact = found["train False"], found["train True"]
    assert torch.equal(rounded, exact.to(half).float()) and not torch.equal(rounded, exact)


@pytest.mark.fast("fp32-bf16")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("output_dtype", [None, "fp32", "16 bits"])
def test_outputs_beside_a_loss_are_not_copied(pools: Pools, precision: str, output_dtype: str | None) -> None:
    half = reference.DTYPES[precision]
    logits = torch.float32 if output_dtype == "fp32" else half
    for stage in (0, 3) if output_dtype is None else (1,):
        settings = config(stage, precision, 1, 0.0, ADAMW, PARTITIONED["moving"] if stage == 3 else None)
        settings[precision]["output_dtype"] = precision if output_dtype == "16 bits" else output_dtype
        for found in pools(2).run(f"{CASES}:beside_a_loss", {"config": settings}):
            assert all(found["same"].values()), found["same"]
            copies = 1 if logits is torch.float32 else 0
            assert found["train"] == found["eval"] == (torch.float32, logits, copies)
            assert found["no loss"] is (half if output_dtype == "16 bits" else torch.float32)
            assert found["module"] is half


@pytest.mark.fast("bf16-0")
@pytest.mark.parametrize("stage", CORNERS)
@pytest.mark.parametrize("precision", ["bf16", "autocast"])
def test_an_exception_inside_leaves_nothing_behind(pools: Pools, stage: int, precision: str) -> None:
    for found in pools(2).run(f"{CASES}:exceptions", {"config": corner(stage, precision)}):
        assert found["message"] == "as the test wants it" and not found["autocast"]
        assert_same_bits(found["first"], found["second"], "after an exception and without one")


@pytest.mark.parametrize("stage", CORNERS)
def test_parameters_that_are_trained_later(pools: Pools, stage: int) -> None:
    ranks = pools(2).run(f"{CASES}:grown", {"config": corner(stage)})
    for found in ranks:
        assert_same_bits(found["after"], ranks[0]["after"], "parameters of two ranks")
        inside = {name: value for name, value in found["after"].items() if name.startswith("head.")}
        assert len(inside) == (4 if stage == 3 else 6)
        assert {value.dtype for value in inside.values()} == {torch.float32}
        assert set(found["masters"].values()) == {torch.float32}
        assert found["outputs"] == {torch.bfloat16}
        assert found["before"]["head.1.bias"].dtype is torch.float32
        assert not torch.equal(found["before"]["head.1.bias"], found["after"]["head.1.bias"])


@pytest.mark.parametrize("stage", CORNERS)
def test_an_engine_takes_its_casts_with_it(pools: Pools, stage: int) -> None:
    for found in pools(2).run(f"{CASES}:ended", {"config": corner(stage)}):
        assert 'fp32_modules: expected patterns of names of modules in the model, got "haed"' in found["message"]
        assert '"head"' in found["message"] and found["untouched"] == {torch.float32}
        assert found["during"] == ["head", "head.0", "head.1"] and found["after"] == []
        assert {found["dtypes"][name] for name in ("trunk.weight", "trunk.bias")} == {torch.float32}
        assert found["dtypes"]["head.0.weight"] is torch.bfloat16 and found["again"] is torch.float32


@pytest.mark.parametrize("stage", CORNERS)
def test_gradients_travel_in_fp32_unless_all_are_asked_not_to(pools: Pools, stage: int) -> None:
    safe = {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]}
    for more, wanted in (
        ({}, torch.float32),
        ({"bf16": {"enabled": False}, "torch_autocast": safe}, torch.float32),
        ({"communication_data_type": "bf16"}, torch.bfloat16),
    ):
        assert pools(2).run(f"{CASES}:reduced_in", {"config": corner(stage, **more)})[0] == {wanted}


# -------------------------------------------------------------------- the table of dtypes

TABLE_CASES = "tests.distributed.cases.precision_table"
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "precision.md"
MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": STATIC_SCALE}},
    "bf16 low": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "fp16 low": {"fp16": {"enabled": True, "loss_scale": STATIC_SCALE, "fp16_master_weights_and_grads": True}},
    "bf16 lowest": {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    },
    "autocast bf16": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
    "autocast fp16": {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"loss_scale": STATIC_SCALE}},
}
BATCH_NORM = "BatchNorm"


def tables() -> list[dict[str, dict[str, str]]]:
    """The document's tables with a column for each mode: row, mode, cell."""
    found: list[dict[str, dict[str, str]]] = []
    modes: list[str] | None = None
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if cells and cells[0] == "" and len(cells) > 2:
            modes = cells[1:]
            found.append({})
        elif not cells:
            modes = None
        elif modes is not None and not cells[0].startswith("---"):
            assert cells[0] not in found[-1], f"{cells[0]} is there twice"
            found[-1][cells[0]] = dict(zip(modes, cells[1:], strict=True))
    return found


BODY, EXACT = tables()
PARTS = {"body": BODY, "exact": EXACT}


def table_config(stage: str, mode: str, part: str, accumulation: int = 1) -> dict[str, Any]:
    number, zero = STAGES[stage]
    patterns = {} if part == "body" else {"fp32_modules": [part]}
    zero = {**(zero or {}), "reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000}
    return config(number, "fp32", accumulation, 0.0, ADAMW, zero, **MODES[mode], **patterns)


def measured(pools: Pools, world: int, stage: str, part: str) -> dict[tuple[str, str], set[str]]:
    """Return the contents of each cell (row, mode), on all ranks, with one micro-batch and with two."""
    runs = {
        f"{mode}, {accumulation}": {"config": table_config(stage, mode, part, accumulation), "part": part}
        for mode in MODES
        for accumulation in (1, 2)
    }
    cells: dict[tuple[str, str], set[str]] = {}
    for results in pools(world).run(f"{TABLE_CASES}:measure_many", {"runs": runs}, timeout=240):
        for name, rows in results.items():
            for row, cell in rows.items():
                cells.setdefault((row, name.partition(",")[0]), set()).add(cell)
    return cells


@pytest.mark.fast("2-exact")
@pytest.mark.parametrize("part", list(PARTS))
@pytest.mark.parametrize("world", WORLDS)
def test_every_cell_of_the_table(pools: Pools, world: int, part: str) -> None:
    cells: dict[tuple[str, str], set[str]] = {}
    for stage in ("0", "1", "2", "3"):
        for key, found in measured(pools, world, stage, part).items():
            cells.setdefault(key, set()).update(found)
    wanted = {(row, mode): {cell} for row, modes in PARTS[part].items() for mode, cell in modes.items()}
    wanted = {key: cell for key, cell in wanted.items() if key[0] != BATCH_NORM}
    if world == 1:
        wanted = {key: cell for key, cell in wanted.items() if "travel" not in key[0]}
    assert cells == wanted


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_batch_norm(pools: Pools, world: int) -> None:
    for part, patterns in (("body", []), ("exact", ["norm"])):
        for stage in ("0", "3"):
            configs = {mode: table_config(stage, mode, part) | {"fp32_modules": patterns} for mode in MODES}
            for results in pools(world).run(f"{TABLE_CASES}:batch_norm", {"configs": configs}):
                assert results == PARTS[part][BATCH_NORM]


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_batch_norm_trains_as_in_plain_pytorch(pools: Pools, world: int) -> None:
    for stage, (number, zero) in STAGES.items():
        setting = config(number, "bf16", 1, 0.0, ("SGD", {"lr": 0.0625}), zero)
        for differing in pools(world).run(f"{TABLE_CASES}:batch_norm_parity", {"config": setting, "lr": 0.0625}):
            assert differing == [], stage


@pytest.mark.parametrize("stage", ["0", "3"])
def test_buffers_are_cast_where_the_config_says_so(pools: Pools, stage: int) -> None:
    setting = {"config": table_config(stage, "bf16", "body"), "buffer_dtype": "bf16"}
    for rank in pools(2).run(f"{CASES}:buffers_cast", setting):
        assert "must have the same dtype" in rank["error"] or "expected" in rank["error"]
        assert "(Masked)" in rank["error"] and '"data_types": {"buffer_dtype": "bf16"}' in rank["error"]
        wanted = {"mask": torch.bfloat16, "count": torch.int64, "norm.num_batches_tracked": torch.int64}
        assert rank["buffers"] == wanted | dict.fromkeys(("norm.running_mean", "norm.running_var"), torch.float32)
        assert rank["losses"][-1] < rank["losses"][0] and rank["alias"]


def test_the_tables_have_all_modes() -> None:
    for table in PARTS.values():
        assert all(list(cells) == list(MODES) for cells in table.values())
