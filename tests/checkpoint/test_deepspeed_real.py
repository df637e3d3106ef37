"""Importing checkpoints that DeepSpeed itself has made: every value to the bit, and the weights as its own script finds
them.

They are made by this interpreter if it has DeepSpeed (`pip install zerolite[bench]`), or by the one that the
environment variable ZEROLITE_DEEPSPEED_PYTHON names; without either these tests are skipped.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerolite
from tests.checkpoint.deepspeed_writer import CASES, STEPS, make_config, make_model, make_optimizer, tokens_at
from tests.checkpoint.runs import assert_equal
from tests.toolkit.pool import Pools
from zerolite.compat.deepspeed_import import import_deepspeed
from zerolite.compat.deepspeed_reader import ImportedCheckpoint, read_deepspeed

pytestmark = pytest.mark.slow  # a minute or two, most of it DeepSpeed's

WRITER = Path(__file__).with_name("deepspeed_writer.py")
WORLD_SIZES = (2, 3)
MADE = [*((3, case) for case in CASES), (2, "stage1_bf16"), (2, "stage2_bf16"), (2, "stage3_sub_groups")]
FROZEN = {"blocks.1.linear.weight", "blocks.1.linear.bias"}
EMPTY = {"nothing", "nothing_either"}


def interpreter() -> str:
    """The Python that has DeepSpeed. Without one the test is skipped."""
    named = os.environ.get("ZEROLITE_DEEPSPEED_PYTHON")
    if not named and not importlib.util.find_spec("deepspeed"):
        pytest.skip("DeepSpeed is not installed, and ZEROLITE_DEEPSPEED_PYTHON names no interpreter that has it")
    return named or sys.executable


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `<world size>/<case>`."""
    python, directory = interpreter(), tmp_path_factory.mktemp("deepspeed")
    for world_size in WORLD_SIZES:
        command = [python, str(WRITER), str(directory / str(world_size)), str(world_size)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=directory)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return directory


def tensors_of(imported: ImportedCheckpoint) -> dict[str, torch.Tensor]:
    return {shard.key: shard.tensor() for shard in imported.tensors}


@pytest.mark.parametrize(("world_size", "case"), MADE)
def test_every_value_is_what_the_engine_held(made: Path, world_size: int, case: str) -> None:
    directory = made / str(world_size) / case
    expected = torch.load(directory / "expected.pt", weights_only=True)
    imported = read_deepspeed(directory)
    found = tensors_of(imported)
    keys = {f"buffers/{name}" for name in ("seen", "mean", "mask")}
    for name, values in expected["trained"].items():
        for kind, value in values.items():
            key = f"parameters/{name}" if kind == "master" else f"optimizer/{kind}/{name}"
            assert_equal(found[key], value, key)
            keys.add(key)
    for name, value in expected["frozen"].items():
        if name in EMPTY or not CASES[case].get("exclude_frozen_parameters"):
            assert_equal(found[f"parameters/{name}"], value, name)
            keys.add(f"parameters/{name}")
    for key in [key for key in keys if key.startswith("buffers/")]:
        assert_equal(found[key], expected["buffers"][key.removeprefix("buffers/")], key)
    assert set(found) == keys
    parameters = imported.state["parameters"]
    assert parameters["embedding.weight"]["aliases"] == ["head.weight"]
    assert {name for name, about in parameters.items() if not about["trained"]} <= FROZEN | EMPTY
    compute = {"bf16": "BF16", "fp16": "F16"}.get(CASES[case].get("dtype", ""), "F32")
    assert {about["dtype"] for about in parameters.values()} == {compute}
    if case != "stage1_bf16_fp32_grads":  # DeepSpeed's script refuses the files of its bf16 optimizer
        check_consolidated(imported, found, expected["consolidated"], CASES[case])


def check_consolidated(
    imported: ImportedCheckpoint,
    found: dict[str, torch.Tensor],
    consolidated: dict[str, torch.Tensor],
    case: dict[str, Any],
) -> None:
    kept = {alias: name for name, about in imported.state["parameters"].items() for alias in about["aliases"]}
    kept |= {name: name for name in imported.state["parameters"]}
    for name, value in consolidated.items():
        mine = found[f"parameters/{kept[name]}"] if name in kept else found[f"buffers/{name}"]
        if name not in EMPTY:  # it takes them for one parameter
            assert torch.equal(mine.float(), value.float()), name
    absent = {name for name in kept if name not in consolidated}
    assert absent <= FROZEN | EMPTY  # it leaves them out at stage 1, and on request
    assert not absent or case["stage"] == 1 or case.get("exclude_frozen_parameters")


def state_of(made: Path, case: str, world_size: int = 2) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    directory = made / str(world_size) / case
    imported = read_deepspeed(directory)
    return imported.state, torch.load(directory / "expected.pt", weights_only=True), imported.left_out


@pytest.mark.parametrize("case", ["stage2_round_robin", "stage3_sub_groups"])
def test_the_optimizer_s_settings_and_counts(made: Path, case: str) -> None:
    state, expected, left_out = state_of(made, case)
    optimizer = state["optimizer"]
    assert optimizer["type"] == "AdamW"
    values = [group["values"] for group in optimizer["groups"]]
    assert [value["lr"] for value in values] == expected["lrs"]
    assert [value["weight_decay"] for value in values] == [0.1, 0.0]
    names = [set(group["names"]) for group in optimizer["groups"]]
    assert names[0] == {f"{name}.weight" for name in ("embedding", "blocks.0.linear", "blocks.0.back", "blocks.1.back")}
    assert names[0] | names[1] == set(expected["trained"]) == set(optimizer["scalars"]["step"])
    assert {float(step) for step in optimizer["scalars"]["step"].values()} == {float(STEPS)}
    assert state["lr_scheduler"] == {"type": "WarmupLR", "state": {"last_epoch": STEPS}}
    counters = state["counters"]
    assert (counters["global_steps"], counters["micro_steps"], counters["skipped_steps"]) == (STEPS, STEPS, 0)
    assert state["client_state"] == {"epoch": 4, "history": [0.5, 0.25], "nested": {"kept": (1, 2)}}
    assert left_out == ["client_state['nested']['where'], a pathlib.PosixPath"]


def test_other_optimizers_and_kinds_of_checkpoints(made: Path) -> None:
    state, expected, _ = state_of(made, "stage2_fp16")
    assert state["loss_scaler"]["scale"] == expected["loss_scale"] == 512.0  # it has grown once, from 256
    assert state["counters"]["skipped_steps"] == expected["skipped_steps"]
    state, _, _ = state_of(made, "stage2_sgd")
    assert state["optimizer"]["type"] == "SGD" and state["optimizer"]["groups"][0]["values"]["momentum"] == 0.9
    state, _, left_out = state_of(made, "stage1_elastic")
    assert [group["values"] for group in state["optimizer"]["groups"]] == [{}, {}]
    assert any("elastic checkpoint does not contain" in text for text in left_out)
    state, _, _ = state_of(made, "stage2_before_any_step")
    assert state["optimizer"]["scalars"] == {} and state["counters"]["global_steps"] == 0
    state, expected, _ = state_of(made, "stage3_optimizer_of_config")
    (group,) = state["optimizer"]["groups"]
    assert set(group["names"]) == set(expected["trained"]) and state["lr_scheduler"] is None


@pytest.mark.parametrize("case", ["stage1_own_adam", "stage2_offload", "stage3_offload"])
def test_deepspeed_s_own_optimizers_count_in_other_places(made: Path, case: str) -> None:
    state, expected, _ = state_of(made, case)
    steps = state["optimizer"]["scalars"]["step"]
    assert set(steps) == set(expected["trained"])
    assert all(torch.equal(step, torch.tensor(float(STEPS))) for step in steps.values())
    assert state["optimizer"]["type"] == "AdamW" and "step" not in state["optimizer"]["groups"][0]["values"]


# DeepSpeed's stage 3 rounds a linear layer's result in bf16 twice, and its fp16 differs where the loss scale changes.
CONTINUED = [
    ("stage1_bf16", 2, 2, 2), ("stage2_round_robin", 3, 1, 1), ("stage2_bf16", 2, 2, 3),
    ("stage2_sgd", 2, 2, 1), ("stage2_before_any_step", 2, 1, 3), ("stage3_sub_groups", 3, 1, 3),
    ("stage3_fp32", 2, 2, 0),
]  # fmt: skip


KEYS = ("gradient_clipping", "scheduler", "bf16", "train_micro_batch_size_per_gpu")


def go_on(checkpoint: str, case: str, deepspeed_ranks: int, stage: int, start: int, count: int) -> list[float]:
    """The losses of this rank's first micro-batches of ``count`` steps from step ``start`` on, which are those of
    DeepSpeed's rank with the same number. Weights, settings and schedule of the engine are others until it has loaded
    the checkpoint."""
    model = make_model(CASES[case])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    config: dict[str, Any] = {key: v for key, v in make_config(CASES[case], deepspeed_ranks).items() if key in KEYS}
    config["zero_optimization"] = {"stage": stage}
    micro_batches = config["gradient_accumulation_steps"] = deepspeed_ranks // dist.get_world_size()
    optimizer = make_optimizer(model, CASES[case].get("optimizer", "adamw"))
    assert optimizer is not None
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.7
    engine = zerolite.initialize(model, config, optimizer=optimizer)
    path, client_state = engine.load_checkpoint(checkpoint)
    assert path is not None and path.endswith(f"global_step{start}") and client_state["epoch"] == 4
    assert (engine.global_steps, engine.micro_steps) == (start, start)
    losses = []
    for step in range(start, start + count):
        for micro_batch in range(micro_batches):
            loss = engine(tokens_at(step, dist.get_rank() + micro_batch * dist.get_world_size()))
            engine.backward(loss)
            if micro_batch == 0:
                losses.append(loss.item())
            engine.step()
    return losses


@pytest.mark.parametrize(("case", "ranks", "world_size", "stage"), CONTINUED)
def test_training_goes_on_as_with_deepspeed(
    made: Path, tmp_path: Path, pools: Pools, case: str, ranks: int, world_size: int, stage: int
) -> None:
    """The next losses at another stage, on fewer ranks that accumulate, are DeepSpeed's own."""
    directory = made / str(ranks) / case
    start = CASES[case].get("steps", STEPS)
    import_deepspeed(directory, tmp_path)
    kwargs = {
        "checkpoint": str(tmp_path), "case": case, "deepspeed_ranks": ranks, "stage": stage, "start": start, "count": 3,
    }  # fmt: skip
    losses = pools(world_size).run(go_on, kwargs)[0]
    expected = torch.load(directory / "expected.pt", weights_only=True)["next_losses"]
    assert losses[0] == expected[0]
    assert losses == pytest.approx(expected, rel=1e-5)
