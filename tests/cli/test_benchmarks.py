"""The benchmark scripts, run as a user runs them, with a tiny model."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import Row, render_table, summarise
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


def test_compare_measures_trains_and_reports(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    names = ["ddp", "zerolite-1"]
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
    for name in ("ddp", "zerolite-1"):
        result = document["results"][name]
        assert result["absent"] is None
        assert 0 < result["min_ms"] <= result["step_ms"] <= result["max_ms"]
        assert 0 < result["resident_bytes"] <= result["peak_bytes"]
        assert len(result["losses"]) == 5 and len(result["step_s"]) == 1 and len(result["step_s"][0]) == 2
    assert document["results"]["ddp"]["to_ddp"] == 1.0
    parameters = document["results"]["ddp"]["parameters"]
    assert document["results"]["ddp"]["resident_bytes"] >= 12 * parameters  # weights and two Adam moments, fp32
    if "deepspeed-1" in names:
        assert "not installed" in document["results"]["deepspeed-1"]["absent"]


PATCHED = """
import sys
sys.path.insert(0, {root!r})
from benchmarks import compare, competitors

def other(model, setting):
    step = competitors.build_ddp(model, setting)
    return lambda tokens, targets: step(tokens, tokens)

def broken(model, setting):
    raise ValueError("no such luck")

for build in (other, broken):
    competitors.COMPETITORS[build.__name__] = competitors.Competitor(build.__name__, build)
if __name__ == "__main__":
    sys.exit(compare.main({arguments!r}))
"""


def test_compare_tells_of_wrong_losses_and_failures(tmp_path: Path) -> None:
    """One competitor learns other targets than the rest, one cannot start; alone, a rank shares only the first loss."""
    arguments = [*TINY, *"--nproc 1 --rounds 2 --steps 1 --warmup 2 --competitors ddp,compute,other,broken".split()]
    script = tmp_path / "patched.py"
    script.write_text(PATCHED.format(root=str(ROOT), arguments=arguments), encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    complaints = [line for line in done.stdout.splitlines() if line.startswith("LOSSES DISAGREE")]
    assert len(complaints) == 1 and "other: the loss of step" in complaints[0]
    assert "failed: rank 0: ValueError: no such luck" in done.stdout
    assert "Traceback" in done.stderr


def test_profile_step_names_the_phases() -> None:
    done = run("profile_step.py", *TINY, "--stage", "1", "--steps", "2", "--rounds", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    phases = {line[:24].strip(): [float(value) for value in line[24:].split()] for line in done.stdout.splitlines()[1:]}
    for name in ("forward", "backward", "update"):
        assert all(value > 0 for value in phases[name][:4]), (name, done.stdout)
    for name in ("gradients into buckets", "launch reductions", "publish: launch"):
        assert phases[name][0] == 0 < phases[name][2], (name, done.stdout)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--competitors", "dpp"], "expected names of"),
        (["--competitors", ","], "got none"),
        (["--rounds", "0"], "expected a positive integer"),
        (["--width", "10", "--heads", "4"], "must be a multiple"),
    ],
)
def test_compare_refuses_wrong_arguments(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.compare import parse_args

    with pytest.raises(SystemExit):
        parse_args(arguments)
    assert sentence in capsys.readouterr().err


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


@pytest.mark.parametrize("markdown", [False, True])
def test_table_keeps_absent_competitors(markdown: bool) -> None:
    rows = [
        Row("ddp", step_ms=12.0, min_ms=10.0, max_ms=15.0, tokens_per_s=5.0),
        Row("gone", absent="not installed: gone"),
    ]
    lines = render_table(rows, markdown).splitlines()
    assert len(lines) == (4 if markdown else 3)
    assert "12" in lines[-2] and "gone" in lines[-1] and "not installed" in lines[-1]
    if markdown:
        assert len({line.count("|") for line in lines}) == 1
