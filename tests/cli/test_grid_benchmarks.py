"""The benchmarks of tensor and pipeline parallelism: the rows of compare.py, and the time line of bubble.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import bubble
from benchmarks.compare import parse_args
from benchmarks.grids import GRIDS, order_heads, stage_starts
from benchmarks.model import ModelSize, make_batches
from benchmarks.report import Row, columns_in_use, summarise
from benchmarks.setting import Setting
from benchmarks.timeline import Event, idle_shares, least_idle
from benchmarks.workers import RoundResult, Started, batches_of
from tests.cli.helpers import ROOT, TIMEOUT_S, job_environment


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    environ = job_environment(OMP_NUM_THREADS="1")
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environ, cwd="/")


SMALL = "--layers 3 --width 16 --heads 2 --context 8 --vocab 33".split()


@pytest.mark.slow
def test_compare_grids(tmp_path: Path) -> None:
    """Every row learns what data-parallel ranks learn, or the exit status is 1; each of ours has its peer."""
    out = tmp_path / "out.json"
    names = ["ddp", *(competitor.name for competitor in GRIDS)]
    done = run(
        "compare.py", *SMALL, "--rounds", "1", "--steps", "2", "--competitors", ",".join(names), "--json", str(out)
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


def events(text: str) -> list[Event]:
    """A line for each rank: operations as `F0.1`, kind, part, micro-batch, or dots for as much time without one."""
    found = []
    for rank, line in enumerate(text.split("\n")):
        for start, word in enumerate(line.split()):
            if word != ".":
                part, _, number = word[1:].partition(".")
                found.append(Event(rank, word[0], int(part), int(number), float(start), start + 1.0))
    return found


SPLIT = "F0.0 F0.1 . B0.0 W0.0 B0.1 W0.1\n. F1.0 B1.0 F1.1 B1.1 W1.0 W1.1"


def test_idle_shares_of_a_time_line() -> None:
    assert idle_shares(events(SPLIT)) == pytest.approx([1 / 7, 1 / 7])
    assert idle_shares(events("F0.0 . . B0.0 W0.0\n. F1.0 B1.0 . .")) == pytest.approx([2 / 5, 3 / 5])


def test_least_idle_of_an_order() -> None:
    """The same order takes longer where both halves of a backward must be over before the gradient is sent."""
    assert least_idle(events(SPLIT), 2, split_backward=True) == pytest.approx(1 / 7)
    assert least_idle(events(SPLIT), 2, split_backward=False) == pytest.approx(1 - 6 / 10)
    delayed = SPLIT.replace("F1.0", ". . F1.0")
    assert least_idle(events(delayed), 2, split_backward=True) == pytest.approx(1 / 7)


def test_theory_of_schedules() -> None:
    """(p - 1) / (m + p - 1) of Narayanan et al. 2021 for the two without chunks."""
    for name in ("gpipe", "1f1b"):
        assert bubble.SCHEDULES[name].theory(4, 8) == pytest.approx(3 / 11)
    assert bubble.SCHEDULES["interleaved_1f1b"].theory(4, 8) == pytest.approx(1.5 / 9.5)
    assert bubble.SCHEDULES["zero_bubble"].theory(4, 8) == pytest.approx(1.5 / 25.5)


def test_joint_batches_are_those_of_all_ranks() -> None:
    size, setting = ModelSize(context=4), Setting(micro_batch=3, world_size=2)
    own = [make_batches(size, 3, rank) for rank in range(2)]
    for step, (tokens, targets) in enumerate(batches_of(1, setting, size, joint=True)):
        assert tokens.equal(torch.cat([own[0][step][0], own[1][step][0]]))
        assert targets.equal(torch.cat([own[0][step][1], own[1][step][1]]))
    assert batches_of(1, setting, size, joint=False)[2][0].equal(own[1][2][0])


def test_heads_stay_together() -> None:
    """Rows of two heads of query, key and value: each half has one head of the three."""
    fused = nn.Linear(1, 6)
    with torch.no_grad():
        fused.bias.copy_(torch.tensor([0.0, 1.0, 10.0, 11.0, 20.0, 21.0]))
    order_heads(fused, 2)
    assert fused.bias.tolist() == [0, 10, 20, 1, 11, 21]


def test_stage_starts() -> None:
    assert stage_starts(7, 2) == [4] and stage_starts(8, 4) == [2, 4, 6]
    with pytest.raises(ValueError, match="at least the 4 stages, got 3"):
        stage_starts(3, 4)


def test_ratio_over_a_peer_and_columns_without_figures() -> None:
    started = {name: Started(10, [1.0], 100, 50) for name in ("torch-tp", "zerolite-tp")}
    rounds = {"torch-tp": [RoundResult([2.0], 1.0, [1.0])], "zerolite-tp": [RoundResult([1.0], 0.8, [1.0])]}
    rows = summarise(started, rounds, {}, 100, {"zerolite-tp": "torch-tp", "torch-tp": "absent"})
    assert [(row.to_peer, row.to_peer_cpu) for row in rows] == [(None, None), (0.5, 0.8)]
    titles = [title for title, *_ in columns_in_use(rows)]
    assert "x peer" in titles and "x DDP" not in titles and "step ms" in titles
    assert "x peer" not in [title for title, *_ in columns_in_use([Row("ddp", to_ddp=1.0)])]


def test_refuses_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--pipeline-micro-batches", "3"])
    assert "must divide the 4 sequences of a step, got 3" in capsys.readouterr().err
    for arguments, sentence in (
        (["--schedules", "gpip"], "got gpip"),
        (["--stages", "1"], "expected 2 or more, got 1"),
    ):
        with pytest.raises(SystemExit):
            bubble.parse_args(arguments)
        assert sentence in capsys.readouterr().err
