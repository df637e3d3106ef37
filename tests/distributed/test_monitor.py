"""Values that monitors and profilers get while an engine trains; nothing else changes."""

from __future__ import annotations

import contextlib
import gc
import io
import re
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, PARTITIONED, config, dynamic_fp16
from tests.toolkit.monitoring import events_of, monitors, run_watched
from tests.toolkit.pool import Pools
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import make_engine, raises
from zerolite.monitor.wall_clock import PhaseClock

HALVING = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_every_step_is_written(tmp_path: Path, stage: int) -> None:
    made = config(stage, "fp32", 3, 0.4, ADAMW, scheduler=HALVING, fp16=dynamic_fp16())
    seen = run_watched(made, folder=tmp_path, spoil=True)
    if dist.get_rank():
        return
    *steps, own = seen["written"]
    batch = 2 * 3 * dist.get_world_size()
    assert [entry["step"] for entry in steps] == [batch * step for step in (1, 2, 3, 4)]
    assert own == {"step": 4 * batch, "accuracy": 0.5}
    for number, entry in enumerate(steps):
        losses = seen["losses"][number]  # rank 0's own
        assert entry["Train/Samples/train_loss"] == pytest.approx(sum(losses) / 3, rel=1e-6)
        norm = seen["norms"][number]
        assert entry["Train/Samples/grad_norm"] == norm
        assert entry["Train/Samples/lr"] == seen["lr"][number][0]
        assert entry["Train/Samples/loss_scale"] == seen["scales"][number]
        assert entry["Train/Samples/global_steps"] == number + 1
    assert seen["scales"] == [256.0, 256.0, 128.0, 128.0]
    assert seen["lr"] == [[1e-3], [5e-4], [5e-4], [2.5e-4]], "the schedule does not move in the skipped step"
    names = [f"Train_Samples_{name}.csv" for name in ("global_steps", "grad_norm", "loss_scale", "lr", "train_loss")]
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == [*names, "accuracy.csv"]
    rows = (tmp_path / "job" / "Train_Samples_lr.csv").read_text().splitlines()
    assert rows == ["step,lr", *(f"{entry['step']},{entry['Train/Samples/lr']}" for entry in steps)]


@on_ranks(2)
def test_all_ranks_raise_if_rank_0_cannot_open_its_monitors(tmp_path: Path) -> None:
    first = dist.get_rank() == 0
    if first:
        (tmp_path / "taken").write_text("")
    dist.barrier()
    broken = config() | monitors(tmp_path / "taken")
    words = ("a monitor could not be opened", "taken") if first else ("rank 0 could not open its monitors",)
    for others in (broken, config()):  # people enable monitors on rank 0 only
        with raises(RuntimeError, *words):
            make_engine(broken if first else others)
    make_engine(config() | monitors(tmp_path / "free") if first else config())


LINE = re.compile(
    r"^step (\d+): ms a step: forward ([\d.]+), backward ([\d.]+), reduce wait ([\d.]+), gather ([\d.]+), "
    r"step ([\d.]+), other ([\d.]+), all ([\d.]+)$",
    re.MULTILINE,
)


def timed(config: dict[str, Any], loop: str, pause: float, windows: int) -> dict[str, Any]:
    """Windows with a pause in each phase that a test can lengthen: forward, backward, and between steps."""
    engine = make_engine(config, "Mlp")
    out = io.StringIO()
    began = time.perf_counter()  # before the clock's first look, which engine.module takes: it waits for gathers
    engine.module.first.register_forward_hook(lambda *_: time.sleep(pause))
    with contextlib.redirect_stdout(out):
        for step in range(windows):
            x, y = models.float_batch(step, 0, dist.get_rank())
            engine.eval()
            engine(x)  # no part of training
            engine.train()
            output = engine(x)
            output.register_hook(lambda gradient: time.sleep(3 * pause))
            loss = (output - y).square().mean()
            if loop == "engine":
                engine.backward(loss)
                engine.step()
            else:
                loss.backward()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
    elapsed = (time.perf_counter() - began) * 1000.0
    root, measured, gone = engine.module, events_of(engine, PhaseClock), weakref.ref(engine)
    hooks = len(root._forward_pre_hooks) + len(root._forward_hooks)
    del engine
    gc.collect()
    assert gone() is None and len(root._forward_pre_hooks) + len(root._forward_hooks) == 0
    return {"printed": out.getvalue(), "elapsed": elapsed, "measured": measured, "hooks": hooks}


@pytest.mark.fast("0-engine-2")
@on_ranks(2)
@pytest.mark.parametrize(("stage", "loop"), [(0, "engine"), (1, "plain"), (3, "engine"), (3, "plain")])
def test_the_breakdown_is_where_the_time_goes(stage: int, loop: str) -> None:
    """Pauses of 10 ms in forward, 30 in backward, 10 in an evaluation between steps."""
    found = timed(config(stage, steps_per_print=2, wall_clock_breakdown=True), loop, 0.01, 4)
    if dist.get_rank():
        assert not LINE.search(found["printed"]) and found["measured"] == []
        return
    assert found["measured"]
    lines = [[float(number) for number in match] for match in LINE.findall(found["printed"])]
    assert [line[0] for line in lines] == [2, 4]
    for _, ahead, back, wait, gather, step, other, total in lines:
        assert 10 <= ahead and 30 <= back and 0 < wait and 0 < step and 5 <= other
        assert (gather > 0) == (stage > 0)
        assert ahead + back + wait + gather + step + other == pytest.approx(total, abs=0.05)
    assert 2 * sum(line[-1] for line in lines) <= found["elapsed"]
    assert 2 * sum(line[1] + line[2] for line in lines) >= 160.0


@on_ranks(1)
def test_off_it_leaves_nothing_behind_and_by_default_it_is_of_ten_steps() -> None:
    off = timed(config(0), "engine", 0.0, 1)
    assert off["measured"] == [] and off["hooks"] == 0 and not LINE.search(off["printed"])
    setting = config(0, wall_clock_breakdown=True)
    del setting["steps_per_print"]
    printed = timed(setting, "engine", 0.0, 20)["printed"]
    assert [match[0] for match in LINE.findall(printed)] == ["10", "20"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none")
@pytest.mark.parametrize("stage", [0, 3])
def test_on_cuda_the_last_step_is_written_too(pools: Pools, tmp_path: Path, stage: int) -> None:
    """Its outcome is read when the engine goes."""
    made = config(stage, "bf16", 1, 0.4, ADAMW, steps_per_print=1, wall_clock_breakdown=True) | monitors(tmp_path)
    (result,) = pools(1).run(timed, {"config": made, "loop": "engine", "pause": 0.0, "windows": 5})
    rows = (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", "2", "4", "6", "8", "10"]
    assert len(LINE.findall(result["printed"])) >= 3


# -------------------------------------------------------------------- FLOPs, memory


PROFILER = {"enabled": True, "peak_tflops": 0.001}
LOOPS = ("engine", "plain")
PHASES = ("forward", "backward", "reduce_wait", "gather", "step", "other")


def setting(stage: int, *args: Any, **more: Any) -> dict[str, Any]:
    return config(stage, *args, zero=PARTITIONED["tight"], **({"steps_per_print": 2} | more))


@pytest.mark.fast("2")
@on_ranks(1, 2)
def test_watched_training_is_the_same(tmp_path: Path) -> None:
    """Bits of the parameters, losses and the collectives in their order, at every stage. Off, it leaves not a word."""
    first, world = dist.get_rank() == 0, dist.get_world_size()
    measured = {"flops_profiler": PROFILER, "wall_clock_breakdown": True}
    times = ["step", *(f"Train/Samples/elapsed_time_ms_{phase}" for phase in PHASES)]
    for stage in range(4):
        plain, loop = setting(stage, "bf16", 1, 0.4, ADAMW), LOOPS[stage % 2]
        without, with_them = run_watched(plain, loop), run_watched(plain | measured, loop, tmp_path / str(stage))
        assert [entry["step"] for entry in with_them["written"] if list(entry) == times] == [4 * world, 8 * world]
        assert_same_bits(with_them["parameters"], without["parameters"], f"stage {stage}")
        assert with_them["losses"] == without["losses"] and with_them["calls"] == without["calls"]
        assert ("matrix products" in with_them["printed"]) == first
        assert without["watched"] == [] and "FLOP" not in without["printed"]


# Of Mlp with batches of 4: the first layer's input needs no gradient.
FORWARD = 2 * 4 * (7 * 13 + 13 * 3)
BACKWARD = 2 * 4 * (7 * 13 + 2 * 13 * 3)


@on_ranks(2)
def test_flops_of_a_known_model(tmp_path: Path) -> None:
    """Two micro-batches of two linear layers, whole parameters and released ones; then the speed."""
    for stage, loop in ((0, "engine"), (3, "engine"), (3, "plain")):
        one = config(stage, "fp32", 2, zero=PARTITIONED["moving"], steps_per_print=2, flops_profiler=PROFILER)
        found = run_watched(one, loop, tmp_path / f"{stage}{loop}", "Mlp")
        printed = found["printed"]
        if dist.get_rank():
            assert "FLOP" not in printed and found["watched"] == []
            continue
        flops, timed = (entry for entry in found["written"] if any("/Flops/" in name for name in entry))
        batch = 2 * 2 * 2
        assert flops == {
            "step": 2 * batch,
            "Train/Flops/forward_tflop_per_step": 2 * FORWARD / 1e12,
            "Train/Flops/backward_tflop_per_step": 2 * BACKWARD / 1e12,
            "Train/Flops/recomputed_tflop_per_step": 0.0,
            "Train/Flops/model_tflop_per_step": 2 * (FORWARD + BACKWARD) / 1e12,
        }
        assert timed["step"] == 4 * batch
        speed = 2 * (FORWARD + BACKWARD) / timed["Train/Flops/step_seconds"]
        assert timed["Train/Flops/tflops"] == pytest.approx(speed / 1e12)
        assert timed["Train/Flops/mfu"] == timed["Train/Flops/hfu"] == pytest.approx(speed / 1e9)
        line = r"^step 2: matrix products, .* on rank 0: forward 2\.08 kFLOP, backward 2\.7 kFLOP, recomputed 0 FLOP"
        assert re.search(line, printed, re.MULTILINE)
        assert re.search(r"^step 4: .*FLOP/s on rank 0 .* model FLOPs utilization", printed, re.MULTILINE)
        assert found["watched"] == ["on_step_end"]


@on_ranks(2)
def test_a_breakdown_of_memory(tmp_path: Path) -> None:
    """On rank 0, every two steps: the engine's own report."""
    found = run_watched(setting(2, optimizer=ADAMW, memory_breakdown=True), folder=tmp_path)
    if dist.get_rank():
        assert "memory of" not in found["printed"]
        return
    assert re.findall(r"^step (\d+): memory of rank 0 on cpu$", found["printed"], re.MULTILINE) == ["2", "4"]
    entries = [entry for entry in found["written"] if "Train/Memory/resident" in entry]
    assert [entry["step"] for entry in entries] == [8, 16]
    assert entries[0]["Train/Memory/optimizer_states"] > entries[0]["Train/Memory/master_weights"] >= 0
    assert "Train/Memory/allocated" not in entries[0], "memory is not counted on the CPU"
