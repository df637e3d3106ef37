"""Checkpoints that DeepSpeed itself has made and converted: training goes on as DeepSpeed's own.

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
from tests.toolkit.pool import Pools
from zerolite.checkpoint.errors import CheckpointError
from zerolite.compat.deepspeed_import import import_deepspeed

pytestmark = pytest.mark.slow  # a minute or two, most of it DeepSpeed's

WRITER = Path(__file__).with_name("deepspeed_writer.py")
RANKS = 2  # DeepSpeed's


def interpreter() -> str:
    """The Python that has DeepSpeed. Without one the test is skipped."""
    named = os.environ.get("ZEROLITE_DEEPSPEED_PYTHON")
    if not named and not importlib.util.find_spec("deepspeed"):
        pytest.skip("DeepSpeed is not installed, and ZEROLITE_DEEPSPEED_PYTHON names no interpreter that has it")
    return named or sys.executable


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the cases."""
    python, directory = interpreter(), tmp_path_factory.mktemp("deepspeed")
    command = [python, str(WRITER), str(directory), str(RANKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=directory)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return directory


KEYS = ("gradient_clipping", "scheduler", "bf16", "fp16", "optimizer", "train_micro_batch_size_per_gpu")


def go_on(checkpoint: str, case: str, stage: int) -> tuple[list[float], list[float], float]:
    """Load a checkpoint, and train three steps on the micro-batches of DeepSpeed's ranks.

    Weights, buffers and settings of the engine are others until it has loaded the checkpoint.

    Returns:
        Losses of the first micro-batch of each step; and, after loading, learning rates and loss scale.
    """
    settings = CASES[case]
    model: Any = make_model(settings)
    with torch.no_grad():
        for values in (*model.parameters(), model.mean):
            values.add_(1.0)
    config: dict[str, Any] = {key: v for key, v in make_config(settings, RANKS).items() if key in KEYS}
    config["zero_optimization"] = {"stage": stage}
    micro_batches = config["gradient_accumulation_steps"] = RANKS // dist.get_world_size()
    optimizer = make_optimizer(model, settings)
    for group in optimizer.param_groups if optimizer else ():
        group["weight_decay"] = 0.7
    engine = zerolite.initialize(model, config, optimizer=optimizer)
    path, client_state = engine.load_checkpoint(checkpoint)
    start = settings.get("steps", STEPS)
    assert path is not None and (engine.global_steps, engine.micro_steps) == (start, start)
    assert client_state == {"epoch": 4, "history": [0.5, 0.25], "nested": {"kept": (1, 2)}}
    assert model.seen.item() == 8 * start
    rates, scale = [group["lr"] for group in engine.optimizer.param_groups], engine.loss_scale
    losses = []
    for step in range(start, start + 3):
        for micro_batch in range(micro_batches):
            loss = engine(tokens_at(step, dist.get_rank() + micro_batch * dist.get_world_size()))
            engine.backward(loss)
            if micro_batch == 0:
                losses.append(loss.item())
            engine.step()
    return losses, rates, scale


FP32 = [(f"stage{i}", world, stage) for i, world in ((1, 1), (2, 2), (3, 1), (3, 2)) for stage in range(4)]
OTHERS = [("stage3_offload", 1, 2), ("stage2_no_step", 1, 3)]


@pytest.mark.parametrize(("case", "world_size", "stage"), FP32 + OTHERS)
def test_training_goes_on_as_with_deepspeed(
    made: Path, tmp_path: Path, pools: Pools, case: str, world_size: int, stage: int
) -> None:
    """The next losses at any stage, and on one rank that accumulates, are DeepSpeed's own."""
    import_deepspeed(made / case, tmp_path)
    kwargs = {"checkpoint": str(tmp_path), "case": case, "stage": stage}
    losses, rates, scale = pools(world_size).run(go_on, kwargs)[0]
    expected = torch.load(made / case / "expected.pt", weights_only=True)
    assert rates == pytest.approx(expected["lrs"], rel=1e-12) and scale == (expected["loss_scale"] or 1.0)
    # DeepSpeed's own Adam takes 1 - beta2 of fp32 numbers: 1.3e-5 away for 0.999, and with it exp_avg_sq.
    assert losses == pytest.approx(expected["next_losses"], rel=1e-5 if CASES[case].get("own") else 1e-6)


@pytest.mark.parametrize(("case", "stage"), [("stage1_bf16", 2), ("stage1_bf16", 3), ("stage2_fp16", 3)])
def test_half_precision_goes_on_as_with_deepspeed(
    made: Path, tmp_path: Path, pools: Pools, case: str, stage: int
) -> None:
    """The first loss is DeepSpeed's to the bit, and so are the next ones until the loss scale grows."""
    import_deepspeed(made / case, tmp_path)
    losses, rates, scale = pools(2).run(go_on, {"checkpoint": str(tmp_path), "case": case, "stage": stage})[0]
    expected = torch.load(made / case / "expected.pt", weights_only=True)
    assert rates == pytest.approx(expected["lrs"], rel=1e-12) and scale == (expected["loss_scale"] or 1.0)
    # In the second step the scale grows. DeepSpeed divides the gradients by the new scale, so its update is of halves.
    count = 2 if case == "stage2_fp16" else 3
    assert losses[0] == expected["next_losses"][0]
    assert losses[:count] == pytest.approx(expected["next_losses"][:count], rel=1e-6)


def test_its_own_layout_is_refused_with_the_command_that_converts_it(made: Path) -> None:
    with pytest.raises(CheckpointError, match=f"ds_to_universal --input_folder {made}/stage3/native --output_folder"):
        import_deepspeed(made / "stage3", made / "ours", "native")
