"""The benchmark scripts, each run once as a user runs them, with a tiny model."""

from __future__ import annotations

import json
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
