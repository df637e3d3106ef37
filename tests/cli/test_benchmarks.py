"""The benchmark scripts, each run once as a user runs them, with a tiny model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.helpers import ROOT, output_of

pytestmark = pytest.mark.slow

TINY = "--layers 1 --width 16 --heads 2 --context 8 --vocab 32"


def run(script: str, arguments: str, *more: str) -> str:
    """Run a script that must succeed, and return what it prints."""
    path = ROOT / "benchmarks" / script
    return output_of(sys.executable, path, *arguments.split(), *more, cwd=Path("/"), timeout=480, OMP_NUM_THREADS="1")


def results_of(script: str, arguments: str, out: Path, names: list[str] | None = None) -> dict[str, Any]:
    """Run a script, with these competitors if any, and return what it writes as JSON; all of them are there."""
    more = ["--json", str(out), *(["--competitors", ",".join(names)] if names else [])]
    printed = run(script, arguments, *more)
    document = json.loads(out.read_text(encoding="utf-8"))
    assert document.get("disagreements", []) == []
    results = document["results"]
    if isinstance(results, list):
        results = {row["name"]: row for row in results}
    if names:
        assert list(results) == names
        assert all(name in printed and results[name]["absent"] is None for name in names)
    return results


def test_compare(tmp_path: Path) -> None:
    """Each row learns what data-parallel ranks learn, and those of tensor and pipeline parallelism have peers."""
    grids = ["torch-tp", "zerolite-tp", "torch-pp-1f1b", "zerolite-pp-1f1b"]
    names = ["ddp", "zerolite-1", "zerolite-3", "zerolite-3-reshard", *grids]
    sizes = "--layers 3 --width 16 --heads 2 --context 8 --vocab 33 --rounds 1 --steps 2"
    results = results_of("compare.py", sizes, tmp_path / "out.json", names)
    for result in results.values():
        assert 0 < result["min_ms"] <= result["step_ms"] <= result["max_ms"]
        assert 0 < result["resident_bytes"] <= result["peak_bytes"]
        assert len(result["losses"]) == 8 and len(result["step_s"][0]) == 2
    ddp = results["ddp"]
    assert ddp["to_ddp"] == 1.0 and ddp["resident_bytes"] >= 12 * ddp["parameters"]  # weights and moments in fp32
    assert all(results[name]["to_peer"] > 0 for name in grids)
    assert ddp["to_peer"] is None and results["torch-tp"]["to_peer"] == 1.0


def test_bubble(tmp_path: Path) -> None:
    """The order of each schedule allows the idle time of the literature; more idle time than that is the cost of
    sending and of a busy machine. 1F1B keeps as many micro-batches as there are stages, all-forward-all-backward all of
    them."""
    few = "--library zerolite --stages 2 --micro-batches 4 --steps 2 --milliseconds 10 --schedules gpipe,1f1b,zbv"
    rows = results_of("bubble.py", few, tmp_path / "out.json")
    assert list(rows) == ["gpipe", "1f1b", "zbv"]
    for row in rows.values():
        assert row["order"] == pytest.approx(row["theory"] or row["order"], abs=1e-9)
        assert row["order"] - 0.02 < row["idle"] < 0.9
        assert row["kept_bytes"] == pytest.approx(row["kept"] * 4e6, rel=0.01)
    assert rows["gpipe"]["theory"] == rows["1f1b"]["theory"] == 0.2
    assert {name: rows[name]["kept"] for name in ("gpipe", "1f1b")} == {"gpipe": 4, "1f1b": 2}


def test_profile_step() -> None:
    printed = run("profile_step.py", f"{TINY} --stage 3 --steps 2 --rounds 1")
    phases = {line[:24].strip(): [float(value) for value in line[24:].split()] for line in printed.splitlines()[1:]}
    for name in ("forward", "backward", "update"):
        assert all(value > 0 for value in phases[name][:4]), printed
    for name in ("wait for reductions", "all-gather of parameters"):
        assert phases[name][0] == 0 < phases[name][2], printed


def test_adam(tmp_path: Path) -> None:
    results = results_of("adam.py", "--numel 4099 --rounds 1", tmp_path / "out.json")
    assert list(results) == ["fp32", "bf16", "tensors", "norm"]
    for rows in results.values():
        present = [row for row in rows if row["absent"] is None]
        assert len(present) >= 2
        assert all(0 < row["min_ms"] <= row["ms"] <= row["max_ms"] and row["gb_s"] > 0 for row in present)


# Two layers of two modules with parameters: launches of a step of zerolite as rank 0 of 64.
LAUNCHES = {"zerolite-3-w64": (1, 1), "zerolite-3-w64-modules": (3, 4), "zerolite-3-w64-modules-reshard": (6, 4)}


def test_host_overhead(tmp_path: Path) -> None:
    names = ["plain", "zerolite-0", "zerolite-3", *LAUNCHES]
    sizes = "--layers 2 --rounds 2 --steps 2 --warmup 5"
    results = results_of("host_overhead.py", sizes, tmp_path / "out.json", names)
    for name, row in results.items():
        assert 0 < row["min_ms"] <= row["step_ms"] and 0 < row["cpu_to_plain"]
        assert 0 < row["to_plain"] <= row["wall_to_plain"]
        assert (row["fake_ms"] is not None) == (name in LAUNCHES)
    launches = {name: (row["gathers"], row["reductions"]) for name, row in results.items()}
    assert launches == {"plain": (None, None), "zerolite-0": (None, None), "zerolite-3": (0, 0), **LAUNCHES}


def test_watchdog() -> None:
    printed = run("watchdog.py", "--layers 3 --rounds 2")
    # With a unit per module: three Linear and three LayerNorm are gathered, the first two together, and reduced; and
    # one all-reduce is for the norm.
    assert re.findall(r"(\d+) collectives a step", printed) == ["3", str(5 + 6 + 1)]
    launch, wait = (float(us) for us in re.findall(r"(?:launch|wait) ([0-9.-]+) us", printed))
    assert launch < 50 and wait < 50


def test_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    arguments = f"{TINY} --rounds 1 --steps 1 --warmup 1 --directory {tmp_path}/scratch"
    results = results_of("checkpoint.py", arguments, tmp_path / "out.json", ["zerolite-3", "fsdp2", "ddp"])
    assert not list((tmp_path / "scratch").iterdir())
    for name, row in results.items():
        assert 0 < row["save_s"] <= row["durable_s"] and 0 < row["warm_s"] and row["file_bytes"] > 0
        assert all(row[ratio] > 0 for ratio in ("of_zeros", "of_random", "warm_of_disk"))
        assert (row["copies"] is None) == (name == "ddp"), "DDP saves in the foreground alone"


def test_same_bits(tmp_path: Path) -> None:
    """Hashes of two runs of the same commit are equal, and another hash is named."""
    hashes, only = tmp_path / "hashes.json", "--only"
    run("same_bits.py", "", only, "1 ranks, stage 1", "--json", str(hashes))
    found = json.loads(hashes.read_text(encoding="utf-8"))
    assert len(found) == 4
    again = run("same_bits.py", "", only, "1 ranks, stage 1, fp32", "--compare", str(hashes))
    assert "all bits are the same" in again
    hashes.write_text(json.dumps(dict.fromkeys(found, "another")), encoding="utf-8")
    path = ROOT / "benchmarks" / "same_bits.py"
    told = subprocess.run(
        [sys.executable, path, only, "1 ranks, stage 1, fp32", "--compare", hashes], capture_output=True, text=True
    )
    assert told.returncode == 1 and "differs: 1 ranks, stage 1, fp32" in told.stdout
