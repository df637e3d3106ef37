"""The benchmark scripts, run as a user runs them, with a tiny model."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import bubble
from benchmarks.grids import GRIDS
from benchmarks.report import Row, summarise
from benchmarks.workers import RoundResult, Started

ROOT = Path(__file__).resolve().parents[2]
TINY = "--layers 1 --width 16 --heads 2 --context 8 --vocab 32".split()


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd="/",
    )


@pytest.mark.slow
def test_compare_measures_trains_and_reports(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    names = ["ddp", "zerolite-1", "zerolite-3", "zerolite-3-reshard"]
    if importlib.util.find_spec("deepspeed") is None:
        names.append("deepspeed-1")  # must be named as absent
    done = run(
        "compare.py", *TINY, "--rounds", "1", "--steps", "2", "--competitors", ",".join(names), "--json", str(out)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text(encoding="utf-8"))
    assert document["disagreements"] == []
    assert list(document["results"]) == names
    assert all(name in done.stdout for name in names)
    for name in names[:4]:
        result = document["results"][name]
        assert result["absent"] is None
        assert 0 < result["min_ms"] <= result["step_ms"] <= result["max_ms"]
        assert 0 < result["resident_bytes"] <= result["peak_bytes"]
        assert len(result["losses"]) == 8 and len(result["step_s"]) == 1 and len(result["step_s"][0]) == 2
    assert document["results"]["ddp"]["to_ddp"] == 1.0
    parameters = document["results"]["ddp"]["parameters"]
    assert document["results"]["ddp"]["resident_bytes"] >= 12 * parameters  # weights and two Adam moments, fp32
    if "deepspeed-1" in names:
        assert "not installed" in document["results"]["deepspeed-1"]["absent"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_profile_step_names_the_phases(stage: int) -> None:
    done = run("profile_step.py", *TINY, "--stage", str(stage), "--steps", "2", "--rounds", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    phases = {line[:24].strip(): [float(value) for value in line[24:].split()] for line in done.stdout.splitlines()[1:]}
    for name in ("forward", "backward", "update"):
        assert all(value > 0 for value in phases[name][:4]), (name, done.stdout)
    own = {1: "publish: launch", 3: "hooks and schedule"}[stage]
    for name in ("gradients into buckets", "launch reductions", own):
        assert phases[name][0] == 0 < phases[name][2], (name, done.stdout)


@pytest.mark.slow
def test_adam_measures_every_section(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run("adam.py", "--numel", "4099", "--rounds", "1", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert list(results) == ["fp32", "bf16", "tensors", "norm"]
    for name, rows in results.items():
        present = {row["name"]: row for row in rows if row["absent"] is None}
        assert all(row["name"] in done.stdout for row in rows) and len(present) >= 2, done.stdout
        for row in present.values():
            assert 0 < row["min_ms"] <= row["ms"] <= row["max_ms"] and row["gb_s"] > 0
            assert (row["to_limit"] is None) == ("limit" not in present)
        assert name == "tensors" or present.get("limit", {"to_limit": 1.0})["to_limit"] == 1.0
    if importlib.util.find_spec("deepspeed") is None:
        assert "No module named 'deepspeed'" in done.stdout


# Two layers of two modules with parameters: launches of a step of zerolite as rank 0 of 64.
LAUNCHES = {"zerolite-3-w64": (1, 1), "zerolite-3-w64-modules": (3, 4), "zerolite-3-w64-modules-reshard": (6, 4)}


@pytest.mark.slow
def test_host_overhead_measures_what_it_says(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    names = ["plain", "zerolite-0", "zerolite-3", *LAUNCHES]
    if importlib.util.find_spec("deepspeed") is None:
        names.append("deepspeed-3")
    sizes = "--layers 2 --rounds 2 --steps 2 --warmup 5".split()
    done = run("host_overhead.py", *sizes, "--competitors", ",".join(names), "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text(encoding="utf-8"))
    results = {row["name"]: row for row in document["results"]}
    assert list(results) == names and document["disagreements"] == []
    assert all(name in done.stdout for name in names)
    for name in names[:6]:
        row = results[name]
        assert row["absent"] is None and row["layers"] == 2
        assert 0 < row["min_ms"] <= row["step_ms"] and 0 < row["cpu_to_plain"]
        assert (row["fake_ms"] or 0) > 0 if name in LAUNCHES else row["fake_ms"] is None
        assert 0 < row["to_plain"] <= row["wall_to_plain"]
    launches = {name: (results[name]["gathers"], results[name]["reductions"]) for name in names[:6]}
    assert launches == {"plain": (None, None), "zerolite-0": (None, None), "zerolite-3": (0, 0), **LAUNCHES}
    if "deepspeed-3" in names:
        assert "not installed" in results["deepspeed-3"]["absent"]
    assert len(document["turns"]) == 2 * 6


@pytest.mark.slow
def test_watchdog_counts_what_a_step_launches_and_times_a_note() -> None:
    done = run("watchdog.py", "--layers", "3", "--rounds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [int(count) for count in re.findall(r"(\d+) collectives a step", done.stdout)]
    # With a unit per module: each Linear and each LayerNorm is gathered and reduced, and one all-reduce for the norm.
    assert len(counts) == 2 and counts[0] == 3 and counts[1] == 4 * 3 + 1
    launch, wait = (float(us) for us in re.findall(r"(?:launch|wait) ([0-9.-]+) us", done.stdout))
    assert launch < 50 and wait < 50


@pytest.mark.slow
@pytest.mark.parametrize("names", [["zerolite-3"], ["zerolite-2", "fsdp2", "ddp"]], ids=["zerolite", "peers"])
def test_checkpoint_saves_loads_and_reports(names: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    named = list(names)
    if importlib.util.find_spec("deepspeed") is None:
        named.append("deepspeed-3")
    sizes = "--rounds 1 --steps 1 --warmup 1".split()
    places = ["--directory", str(scratch), "--json", str(out)]
    done = run("checkpoint.py", *TINY, *sizes, "--competitors", ",".join(named), *places)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(scratch.iterdir())
    document = json.loads(out.read_text(encoding="utf-8"))
    assert list(document["results"]) == named
    for name in names:
        row, (turn,) = document["results"][name], document["turns"][name]
        assert row["absent"] is None and name in done.stdout
        assert row["file_bytes"] >= 12 * turn["parameters"] > 0  # fp32 weights and two moments
        assert 0 < row["save_s"] <= row["durable_s"] and 0 < row["warm_s"] and len(turn["losses"]) == 2
        assert all(row[ratio] > 0 for ratio in ("of_zeros", "of_random", "warm_of_disk"))
        if name == "ddp":
            assert row["stall_ms"] is None and turn["background"] is None
        else:
            assert row["copies"] > 0 and row["first_copies"] > 0 and row["added_ms"] is not None
    assert any(sentence.startswith(f"{names[0]} saves at 0.8 of the disk's speed") for sentence in document["goals"])
    if "deepspeed-3" in named:
        assert "not installed" in document["results"]["deepspeed-3"]["absent"]


def test_ratios_are_taken_within_a_round() -> None:
    """The machine was three times slower in the second round; the ratio is 1.5 all the same."""
    started = {name: Started(10, [1.0], 100, 50) for name in ("ddp", "x")}
    rounds = {
        "ddp": [RoundResult([1.0, 1.0], 2.0, [1.0]), RoundResult([3.0, 3.0], 2.0, [1.0])],
        "x": [RoundResult([1.5, 1.5], 2.0, [1.0]), RoundResult([4.5, 4.5], 2.0, [1.0])],
        "y": [],
    }
    ddp, x, y = summarise(started, rounds, {"y": "not installed: y"}, tokens_per_step=100)
    assert (ddp.to_ddp, x.to_ddp, x.to_compute) == (1.0, 1.5, None)
    assert x.step_ms == 3000.0 and x.tokens_per_s == pytest.approx(100 / 3) and x.cpu_ms == 1000.0
    assert y == Row("y", absent="not installed: y")


# ------------------------------------------------------------------ tensor and pipeline parallelism


GRID = "--layers 3 --width 16 --heads 2 --context 8 --vocab 33".split()


@pytest.mark.slow
def test_compare_grids(tmp_path: Path) -> None:
    """Every row learns what data-parallel ranks learn, or the exit status is 1; each of ours has its peer."""
    out = tmp_path / "out.json"
    names = ["ddp", *(competitor.name for competitor in GRIDS)]
    done = run(
        "compare.py", *GRID, "--rounds", "1", "--steps", "2", "--competitors", ",".join(names), "--json", str(out)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert list(results) == names and all(results[name]["absent"] is None for name in names), done.stderr
    assert all(results[name]["to_peer"] > 0 for name in names[1:])
    assert results["ddp"]["to_peer"] is None and results["torch-tp"]["to_peer"] == 1.0
    assert "x peer" in done.stdout and "x FSDP2" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torch", "zerolite"])
def test_bubble_finds_the_order_of_each_schedule(library: str, tmp_path: Path) -> None:
    """The order of each schedule allows the idle time of the literature; more idle time than that is the cost of
    sending and of a busy machine. 1F1B keeps as many micro-batches as there are stages, all-forward-all-backward all of
    them."""
    out = tmp_path / "out.json"
    few = "--stages 2 --micro-batches 4 --steps 2 --milliseconds 10".split()
    done = run("bubble.py", "--library", library, *few, "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads(out.read_text(encoding="utf-8"))["results"]}
    assert list(rows) == list(bubble.SCHEDULES)
    for row in rows.values():
        assert row["order"] == pytest.approx(row["theory"] or row["order"], abs=1e-9)
        assert row["order"] - 0.02 < row["idle"] < 0.9
    assert rows["gpipe"]["theory"] == rows["1f1b"]["theory"] == 0.2
    assert {name: rows[name]["kept"] for name in ("gpipe", "1f1b")} == {"gpipe": 4, "1f1b": 2}
    for row in rows.values():
        assert row["kept_bytes"] == pytest.approx(row["kept"] * 4e6, rel=0.01)
