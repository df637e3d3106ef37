"""The communication logger and the FLOPs profiler while an engine trains, and that nothing else changes."""

from __future__ import annotations

import contextlib
import gc
import io
import re
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, PARTITIONED, config
from tests.toolkit.monitoring import events_of, read_jsonl
from tests.toolkit.pool import Pools
from tests.toolkit.traffic import plain_calls
from tests.toolkit.training import WINDOWS, make_engine, snapshot
from zerolite.monitor.flops_profiler import FlopsProfiler

STEPS = 4
Setting = tuple[dict[str, Any], str, str]  # a config, the loop, the folder of its monitors or ""


def trained(settings: list[Setting], model: str = "OddModel") -> list[dict[str, Any]]:
    """A few windows with each of the settings; what this rank saw."""
    return [_trained(*setting, model) for setting in settings]


def _trained(config: dict[str, Any], loop: str, folder: str, model: str) -> dict[str, Any]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        engine = make_engine(config, model)
        with zerolite.comm.record() as recorder:
            losses = [WINDOWS[loop](engine, model, step, engine.gradient_accumulation_steps) for step in range(STEPS)]
        logged = engine.comms_summary() if engine.comms_logger is not None else None
        parameters = snapshot(engine)
        watchers = [len(comm._watchers) for comm in _communicators(engine)]
    watched = events_of(engine, FlopsProfiler)
    plain = engine.call.call_module is engine._module
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    dist.barrier()
    return {
        "losses": losses,
        "parameters": parameters,
        "calls": plain_calls(recorder),
        "logged": logged,
        "printed": printed.getvalue(),
        "written": read_jsonl(folder) if folder else [],
        "watchers": watchers,
        "watched": watched,
        "plain": plain,
        "stack": torch._C._len_torch_dispatch_stack(),
        "gone": gone() is None,
    }


def _communicators(engine: Any) -> list[Any]:
    """The engine's, each once."""
    own = [engine._comm] + ([engine.coordinator.comm] if engine.coordinator is not None else [])
    return list({id(comm): comm for comm in own}.values())


def summary_without(config: dict[str, Any]) -> str:
    """Return the error about a summary where nothing is logged."""
    engine = make_engine(config)
    try:
        engine.comms_summary()
    except RuntimeError as error:
        return str(error)
    return ""


def interrupted(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Four windows with each config; in the second one, which a profiler counts, a forward and a backward raise."""
    return [_interrupted(config) for config in configs]


def _interrupted(config: dict[str, Any]) -> dict[str, Any]:
    stacks: list[int] = []
    with contextlib.redirect_stdout(io.StringIO()):
        engine = make_engine(config, "Mlp")
        for step in range(STEPS):
            if step == 1:
                for where in ("forward", "backward"):
                    with contextlib.suppress(_Stopped):
                        _stop_in(engine, where)
                    stacks.append(torch._C._len_torch_dispatch_stack())
                    engine.zero_grad()
            WINDOWS["engine"](engine, "Mlp", step, 1)
        return {"stacks": stacks, "parameters": snapshot(engine)}


class _Stopped(Exception):
    pass


def _stop(*_: Any) -> None:
    raise _Stopped


def _stop_in(engine: Any, where: str) -> None:
    x, y = models.float_batch(9, 0, dist.get_rank())
    module = engine.module
    handle = module.second.register_forward_pre_hook(_stop) if where == "forward" else None
    hidden: list[torch.Tensor] = []
    watch = module.first.register_forward_hook(lambda _module, _args, output: hidden.append(output))
    try:
        output = engine(x)
        hidden[0].register_hook(_stop)
        engine.backward((output - y).square().mean())
    finally:
        watch.remove()
        if handle is not None:
            handle.remove()
    raise AssertionError("nothing has raised")


# -------------------------------------------------------------------- the tests


STAGES = (0, 1, 2, 3)
LOGGER = {"enabled": True, "verbose": True, "debug": True}
PROFILER = {"enabled": True, "peak_tflops": 0.001}


def setting(stage: int, *args: Any, **more: Any) -> dict[str, Any]:
    return config(stage, *args, zero=PARTITIONED["tight"], **({"steps_per_print": 2} | more))


def kinds(calls: list[tuple[str, int, str, int, str]]) -> Counter[tuple[str, str, int]]:
    """Count recorded collectives by operation, purpose and bytes."""
    return Counter((op, tag, nbytes) for op, _, _, nbytes, tag in calls)


def logged(rows: list[dict[str, Any]]) -> Counter[tuple[str, str, int]]:
    counts: Counter[tuple[str, str, int]] = Counter()
    for row in rows:
        counts[row["op"], row["tag"], row["nbytes"]] += row["count"]
    return counts


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_logged_training_is_the_same_and_every_collective_is_counted(pools: Pools, world: int) -> None:
    """Bits of the parameters, losses and the collectives in their order, at every stage; counts and bytes to the
    byte."""
    plain = [setting(stage, "bf16", 1, 0.4, ADAMW) for stage in STAGES]
    measured = {"comms_logger": LOGGER, "flops_profiler": PROFILER, "wall_clock_breakdown": True}
    watched = [one | measured for one in plain]
    loops = ["engine", "plain", "engine", "plain"]
    settings = [(one, loop, "") for group in (plain, watched) for one, loop in zip(group, loops, strict=True)]
    for rank, results in enumerate(pools(world).run(trained, {"settings": settings})):
        for stage, without, with_them in zip(STAGES, results[:4], results[4:], strict=True):
            assert_same_bits(with_them["parameters"], without["parameters"], f"stage {stage}")
            assert with_them["losses"] == without["losses"]
            assert with_them["calls"] == without["calls"]
            assert logged(with_them["logged"]) == kinds(without["calls"])
            assert all(row["total_bytes"] == row["nbytes"] * row["count"] for row in with_them["logged"])
            assert all(
                row["mean_ms"] > 0 and re.fullmatch(r"\w+\.py:\d+ for (training|models)\.py:\d+", row["caller"])
                for row in with_them["logged"]
            )
            assert with_them["watchers"] == [1] * len(without["watchers"])
            assert (len(without["watchers"]) == 2) == (stage == 3 and world > 1), "two communicators at stage 3"
            assert ("collectives of" in with_them["printed"]) == (rank == 0 and world > 1)
            assert ("FLOPs of matrix products" in with_them["printed"]) == (rank == 0)
            assert with_them["plain"] and with_them["stack"] == 0
            check_off(without)


def check_off(result: dict[str, Any]) -> None:
    """Neither wrappers nor watchers, no word, and the engine can go."""
    assert set(result["watchers"]) == {0} and result["watched"] == [] and result["plain"]
    assert result["logged"] is None and "FLOPs" not in result["printed"] and "alg GB/s" not in result["printed"]
    assert result["gone"]


def test_only_the_operations_that_were_asked_for(pools: Pools, tmp_path: Path) -> None:
    logger = {"enabled": True, "prof_all": False, "prof_ops": ["all_gather_into_tensor"]}
    place = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    one = setting(1, comms_logger=logger, jsonl_monitor=place, check_collectives=True)  # which watches too
    first, second = pools(2).run(trained, {"settings": [(one, "engine", str(tmp_path))]})
    for (result,) in (first, second):
        assert {row["op"] for row in result["logged"]} == {"all_gather"}
        expected = {
            kind: count for kind, count in kinds(result["calls"]).items() if kind[:2] == ("all_gather", "parameters")
        }
        assert logged(result["logged"]) == expected
        assert "caller" not in result["logged"][0]
    rows = [line.split() for line in first[0]["printed"].splitlines() if line.startswith("  all_gather")]
    assert rows and all(row[1] == "parameters" for row in rows) and "reduce" not in first[0]["printed"]
    written = [entry for entry in first[0]["written"] if "Train/Comms/all_gather_busbw" in entry]
    assert [entry["step"] for entry in written] == [8, 16]
    assert sum(entry["Train/Comms/all_gather_busbw"] > 0 for entry in written) == 2
    assert not any("reduce" in name for entry in written for name in entry)
    assert "collectives of" not in second[0]["printed"]


def test_a_summary_without_a_logger_is_a_sentence(pools: Pools) -> None:
    (sentence,) = pools(1).run(summary_without, {"config": setting(0)})
    assert "expected comms_logger.enabled = true" in sentence


# Of Mlp with batches of 4: the first layer's input needs no gradient.
FORWARD = 2 * 4 * (7 * 13 + 13 * 3)
BACKWARD = 2 * 4 * (7 * 13 + 2 * 13 * 3)


@pytest.mark.parametrize("loop", ["engine", "plain"])
def test_flops_of_a_known_model(pools: Pools, tmp_path: Path, loop: str) -> None:
    """Two micro-batches of two linear layers, whole parameters and released ones; then the speed."""
    settings = []
    for stage in (0, 3):
        place = {"enabled": True, "output_path": str(tmp_path), "job_name": f"{stage}/job"}
        one = config(stage, "fp32", 2, zero=PARTITIONED["moving"], steps_per_print=2, jsonl_monitor=place)
        settings.append((one | {"flops_profiler": PROFILER}, loop, str(tmp_path / str(stage))))
    first, second = pools(2).run(trained, {"settings": settings, "model": "Mlp"})
    for result, other in zip(first, second, strict=True):
        counted, timed = (entry for entry in result["written"] if any("/Flops/" in name for name in entry))
        batch = 2 * 2 * 2
        assert counted == {
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
        printed = result["printed"]
        assert re.search(r"^step 2: FLOPs of matrix products, .* on rank 0", printed, re.MULTILINE)
        assert re.search(r"^  parameters +146$", printed, re.MULTILINE), "of whole parameters"
        assert re.search(r"^    second +Linear +42 +624 FLOP +1\.25 kFLOP +0 FLOP +39\.1%$", printed, re.MULTILINE)
        assert re.search(r"^step 4: .*FLOP/s on rank 0 .* model FLOPs utilization", printed, re.MULTILINE)
        assert other["written"] == result["written"] and "FLOP" not in other["printed"]
        assert result["plain"] and other["plain"] and result["gone"] and other["gone"]
        assert result["watched"] == ["on_step_end"] and other["watched"] == []


def test_an_exception_in_the_counted_step(pools: Pools) -> None:
    """No mode is left, and training goes on as without the profiler."""
    plain = [config(stage, zero=PARTITIONED["moving"]) for stage in (1, 3)]
    for results in pools(2).run(
        interrupted, {"configs": plain + [one | {"flops_profiler": PROFILER} for one in plain]}
    ):
        for without, with_it in zip(results[:2], results[2:], strict=True):
            assert with_it["stacks"] == [0, 0]
            assert_same_bits(with_it["parameters"], without["parameters"], "with the profiler")


def test_a_breakdown_of_memory(pools: Pools, tmp_path: Path) -> None:
    """On rank 0, every two steps: the engine's own report."""
    place = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    one = setting(2, optimizer=ADAMW, memory_breakdown=True, jsonl_monitor=place)
    (first,), (second,) = pools(2).run(trained, {"settings": [(one, "engine", str(tmp_path))]})
    assert re.findall(r"^step (\d+): memory of rank 0 on cpu$", first["printed"], re.MULTILINE) == ["2", "4"]
    assert "memory of" not in second["printed"] and first["gone"]
    entries = [entry for entry in first["written"] if "Train/Memory/resident" in entry]
    assert [entry["step"] for entry in entries] == [8, 16]
    assert entries[0]["Train/Memory/optimizer_states"] > entries[0]["Train/Memory/master_weights"] >= 0
    assert "Train/Memory/allocated" not in entries[0], "memory is not counted on the CPU"
