"""Values that monitors get while an engine trains, at every stage; nothing else changes."""

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

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, config, dynamic_fp16
from tests.toolkit.faults import Warnings, poison
from tests.toolkit.monitoring import events_of, read_jsonl
from tests.toolkit.pool import Pools
from tests.toolkit.traffic import plain_calls
from tests.toolkit.training import WINDOWS, make_engine, snapshot
from zerolite.monitor.wall_clock import PhaseObserver

STEPS = 4


def logged(config: dict[str, Any], loop: str = "engine", folder: str = "") -> dict[str, Any]:
    """A few windows, then a value of the user's own; what each rank saw, and what is in ``folder`` in the end. In the
    second step the gradient of the last rank is not finite."""
    torn = io.StringIO()
    with contextlib.redirect_stdout(torn), Warnings():
        engine = make_engine(config)
        losses, rates, norms, scales = [], [], [], []
        with zerolite.comm.record() as recorder:
            for step in range(STEPS):
                bad = step == 1 and dist.get_rank() == dist.get_world_size() - 1
                handle = poison(engine, "up.weight", float("inf")) if bad else None
                rates.append(engine.get_lr())
                scales.append(engine.loss_scale)
                losses.append(WINDOWS[loop](engine, "OddModel", step, engine.gradient_accumulation_steps))
                norms.append(engine.get_global_grad_norm())
                if handle is not None:
                    handle.remove()
        place = engine.global_steps if engine.global_samples is None else engine.global_samples
        engine.monitor.write([("accuracy", 0.5, place)])
        skipped = engine.skipped_steps
        parameters = snapshot(engine)
    del engine
    gc.collect()
    dist.barrier()
    return {
        "losses": losses,
        "lr": rates,
        "norms": norms,
        "scales": scales,
        "skipped": skipped,
        "parameters": parameters,
        "calls": plain_calls(recorder),
        "written": read_jsonl(folder) if folder else [],
        "printed": torn.getvalue(),
    }


def flushed(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """A window of three micro-batches that ends after two, then a full one."""
    engine = make_engine(config)
    losses = []
    for step, count in enumerate((2, 3)):
        for micro in range(count):
            loss = models.token_loss(engine, models.token_batch(step, micro, dist.get_rank()))
            engine.backward(loss)
            losses.append(loss.item())
            engine.step(flush=micro == 1 and count == 2)
    return {"losses": losses, "steps": engine.global_steps, "written": read_jsonl(folder)}


def refused(configs: list[dict[str, Any]]) -> str:
    """Rank 0 and the others have configs of their own; what initialize raises on this rank."""
    try:
        make_engine(configs[min(dist.get_rank(), 1)])
    except RuntimeError as error:
        return str(error)
    return ""


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
    root = engine.module
    watched = len(root._forward_pre_hooks), len(root._forward_hooks)
    measured = events_of(engine, PhaseObserver)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    left = len(root._forward_pre_hooks), len(root._forward_hooks)
    return {
        "printed": out.getvalue(),
        "elapsed": elapsed,
        "measured": measured,
        "hooks": watched,
        "left": left,
        "gone": gone() is None,
    }


# -------------------------------------------------------------------- the tests


HALVING = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}


def monitored(folder: Path, *args: Any, **more: Any) -> dict[str, Any]:
    place = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    return config(*args, **more) | {"jsonl_monitor": place, "csv_monitor": place}


def without_monitors(setting: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in setting.items() if key not in ("jsonl_monitor", "csv_monitor")}


@pytest.mark.fast("0-1", "1-2", "2-1", "3-1")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_step_is_written(pools: Pools, tmp_path: Path, stage: int, world: int) -> None:
    setting = monitored(tmp_path, stage, "fp32", 3, 0.4, ADAMW, scheduler=HALVING, fp16=dynamic_fp16())
    ranks = pools(world).run(logged, {"config": setting, "folder": str(tmp_path)})
    first = ranks[0]
    assert [result["skipped"] for result in ranks] == [1] * world
    steps, own = first["written"][:-1], first["written"][-1]
    batch = 2 * 3 * world
    assert [entry["step"] for entry in steps] == [batch * step for step in (1, 2, 3, 4)]
    assert own == {"step": 4 * batch, "accuracy": 0.5}
    for number, entry in enumerate(steps):
        losses = first["losses"][number]  # rank 0's own
        assert entry["Train/Samples/train_loss"] == pytest.approx(sum(losses) / 3, rel=1e-6)
        norm = first["norms"][number]
        assert entry["Train/Samples/grad_norm"] == (norm if number != 1 else None), "JSON has no infinity"
        assert entry["Train/Samples/lr"] == first["lr"][number][0]
        assert entry["Train/Samples/loss_scale"] == first["scales"][number]
        assert entry["Train/Samples/global_steps"] == number + 1
    assert first["scales"] == [256.0, 256.0, 128.0, 128.0]
    assert first["lr"] == [[1e-3], [5e-4], [5e-4], [2.5e-4]], "the schedule does not move in the skipped step"
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == [
        "Train_Samples_global_steps.csv",
        "Train_Samples_grad_norm.csv",
        "Train_Samples_loss_scale.csv",
        "Train_Samples_lr.csv",
        "Train_Samples_train_loss.csv",
        "accuracy.csv",
        "events.jsonl",
    ]
    rows = (tmp_path / "job" / "Train_Samples_lr.csv").read_text().splitlines()
    assert rows == ["step,lr", *(f"{entry['step']},{entry['Train/Samples/lr']}" for entry in steps)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_is_the_same_with_and_without(pools: Pools, tmp_path: Path, stage: int) -> None:
    """Bits of the parameters, and the collectives in their order, on both ranks."""
    setting = monitored(tmp_path, stage, "bf16", 1, 0.4, ADAMW, wall_clock_breakdown=True)
    with_them = pools(2).run(logged, {"config": setting, "folder": str(tmp_path)})
    without = pools(2).run(logged, {"config": without_monitors(setting) | {"wall_clock_breakdown": False}})
    assert with_them[0]["written"] and not without[0]["written"]
    for one, other in zip(with_them, without, strict=True):
        assert_same_bits(one["parameters"], other["parameters"], "with monitors")
        assert one["calls"] == other["calls"]
        assert one["losses"] == other["losses"]


def test_a_plain_loop_without_batch_sizes(pools: Pools, tmp_path: Path) -> None:
    """The engine sees no losses, and does not know how many samples there are."""
    setting = monitored(tmp_path, 2, optimizer=ADAMW)
    del setting["train_micro_batch_size_per_gpu"]
    first, _ = pools(2).run(logged, {"config": setting, "loop": "plain", "folder": str(tmp_path)})
    assert [entry["step"] for entry in first["written"]] == [1, 2, 3, 4, 4]
    assert list(first["written"][0]) == [
        "step",
        "Train/Steps/lr",
        "Train/Steps/grad_norm",
        "Train/Steps/loss_scale",
        "Train/Steps/global_steps",
    ]


def test_a_window_that_is_flushed_has_the_mean_of_what_it_contains(pools: Pools, tmp_path: Path) -> None:
    (result,) = pools(1).run(flushed, {"config": monitored(tmp_path, accumulation=3), "folder": str(tmp_path)})
    losses = result["losses"]
    assert result["steps"] == 2
    assert [entry["Train/Samples/train_loss"] for entry in result["written"]] == pytest.approx(
        [sum(losses[:2]) / 2, sum(losses[2:]) / 3], rel=1e-6
    )


def test_all_ranks_raise_if_rank_0_cannot_open_its_monitors(pools: Pools, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    broken = monitored(tmp_path / "taken")
    for others in (broken, config()):  # people enable monitors on rank 0 only
        first, second = pools(2).run(refused, {"configs": [broken, others]})
        assert "a monitor could not be opened" in first and "taken" in first
        assert "rank 0 could not open its monitors" in second
    fine = monitored(tmp_path / "free")
    assert pools(2).run(refused, {"configs": [fine, config()]}) == ["", ""]


LINE = re.compile(
    r"^step (\d+): ms a step: forward ([\d.]+), backward ([\d.]+), reduce wait ([\d.]+), gather ([\d.]+), "
    r"step ([\d.]+), other ([\d.]+), all ([\d.]+)$",
    re.MULTILINE,
)


@pytest.mark.fast("0-engine")
@pytest.mark.parametrize(("stage", "loop"), [(0, "engine"), (1, "plain"), (2, "engine"), (3, "engine"), (3, "plain")])
def test_the_breakdown_is_where_the_time_goes(pools: Pools, stage: int, loop: str) -> None:
    """Pauses of 10 ms in forward, 30 in backward, 10 in an evaluation between steps."""
    setting = config(stage, steps_per_print=2, wall_clock_breakdown=True)
    first, second = pools(2).run(timed, {"config": setting, "loop": loop, "pause": 0.01, "windows": 4})
    assert not LINE.search(second["printed"]) and second["measured"] == [] != first["measured"]
    lines = [[float(number) for number in match] for match in LINE.findall(first["printed"])]
    assert [line[0] for line in lines] == [2, 4]
    for _, forward, backward, wait, gather, step, other, total in lines:
        assert 10 <= forward and 30 <= backward and 0 < wait and 0 < step and 5 <= other
        assert (gather > 0) == (stage > 0)
        assert forward + backward + wait + gather + step + other == pytest.approx(total, abs=0.05)
    assert 2 * sum(line[-1] for line in lines) <= first["elapsed"]
    assert 2 * sum(line[1] + line[2] for line in lines) >= 160.0
    assert first["gone"] and first["left"] == second["left"]


def test_the_breakdown_goes_to_the_monitors(pools: Pools, tmp_path: Path) -> None:
    setting = monitored(tmp_path, 1, steps_per_print=2, wall_clock_breakdown=True)
    first, _ = pools(2).run(logged, {"config": setting, "folder": str(tmp_path)})
    times = [entry for entry in first["written"] if "Train/Samples/elapsed_time_ms_forward" in entry]
    assert [entry["step"] for entry in times] == [8, 16]
    phases = ("forward", "backward", "reduce_wait", "gather", "step", "other")
    for entry in times:
        assert list(entry) == ["step", *(f"Train/Samples/elapsed_time_ms_{phase}" for phase in phases)]
        assert all(entry[f"Train/Samples/elapsed_time_ms_{phase}"] > 0 for phase in phases)


def test_off_it_leaves_nothing_behind(pools: Pools) -> None:
    (result,) = pools(1).run(timed, {"config": config(0), "loop": "engine", "pause": 0.0, "windows": 1})
    assert result["measured"] == [] and result["hooks"] == (0, 0)
    assert not LINE.search(result["printed"])


def test_a_breakdown_without_steps_per_print_is_of_ten_steps(pools: Pools) -> None:
    setting = config(0, wall_clock_breakdown=True)
    del setting["steps_per_print"]
    (result,) = pools(1).run(timed, {"config": setting, "loop": "engine", "pause": 0.0, "windows": 20})
    assert [match[0] for match in LINE.findall(result["printed"])] == ["10", "20"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none")
@pytest.mark.parametrize("stage", [0, 3])
def test_on_cuda_the_last_step_is_written_too(pools: Pools, tmp_path: Path, stage: int) -> None:
    """Its outcome is read when the engine goes."""
    setting = monitored(tmp_path, stage, "bf16", 1, 0.4, ADAMW, steps_per_print=1, wall_clock_breakdown=True)
    (result,) = pools(1).run(timed, {"config": setting, "loop": "engine", "pause": 0.0, "windows": 5})
    rows = (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", "2", "4", "6", "8", "10"]
    assert result["gone"] and len(LINE.findall(result["printed"])) >= 3
