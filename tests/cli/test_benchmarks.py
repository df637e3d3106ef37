"""The benchmark scripts, run as a user runs them, with a tiny model."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest

from benchmarks import adam, checkpoint, disk
from benchmarks import host_overhead as overhead
from benchmarks.checkpoint_report import goals
from benchmarks.checkpoint_report import summarise as summarise_turns
from benchmarks.checkpoint_turn import Background, check_resumed
from benchmarks.checkpoint_turn import Turn as SavingTurn
from benchmarks.report import Row, render_table, summarise
from benchmarks.tiny_layers import CollectiveClock, Ready, Trainee, Turn, make_inputs, warm_up
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


@pytest.mark.slow
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


def test_adam_takes_ratios_within_a_round() -> None:
    """The machine was three times slower in the second round; a contender that cannot start keeps its line."""
    one = adam.Contender("x", 600, lambda: None)  # type: ignore[arg-type, return-value]
    row = adam._row(one, [1.5, 4.5, 1.5], [1.2, 3.6, 1.2], [1.0, 3.0, 1.0], {})
    assert (row.to_limit, row.to_first, row.ms) == (pytest.approx(0.8), 1.5, 1500.0)
    assert row.gb_s == pytest.approx(600 / 1.5 / 1e9)

    def broken() -> adam.Call:
        raise OSError("no such luck")

    slow = adam.Contender("slow", 8, lambda: lambda: time.sleep(0.06))
    first, second = adam.contest([adam.Contender("broken", 8, broken), slow], rounds=2, device="cpu")
    assert first == adam.Row("broken", absent="no such luck")
    assert second.ms is not None and second.ms >= 60 and (second.to_first, second.to_limit) == (None, None)


# Two layers of two modules with parameters: launches of a step of zerolite as rank 0 of 64.
LAUNCHES = {
    "zerolite-3-w64": (1, 1),
    "zerolite-3-w64-modules": (3, 4),
    "zerolite-3-w64-modules-reshard": (6, 4),
}


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
def test_host_overhead_profiles_one_competitor() -> None:
    arguments = "--profile zerolite-3-w64-modules --layers 2 --steps 1 --warmup 5 --top 3".split()
    done = run("host_overhead.py", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 gathers, 4 reductions" in done.stdout and "Ordered by: internal time" in done.stdout


def test_host_overhead_leaves_out_pretended_collectives() -> None:
    """The machine was three times slower during the second pair; plain ran before the competitor, at 1 s a step."""
    pairs = [
        (Turn([1.0, 1.0], 2.0, [0.0, 0.0]), Turn([2.0, 2.0], 3.0, [0.5, 0.5])),
        (Turn([3.0, 3.0], 2.0, [0.0, 0.0]), Turn([6.0, 6.0], 3.0, [1.5, 1.5])),
    ]
    row = overhead.summarise("x", 10, Ready([1.0], 4, 2), pairs)
    assert (row.wall_to_plain, row.to_plain, row.cpu_to_plain) == (2.0, 1.5, 1.5)
    assert row.us_per_layer == pytest.approx(1e5) and row.step_ms == 4000.0 and row.fake_ms == 1000.0
    assert (row.min_ms, row.cpu_ms, row.gathers, row.reductions) == (2000.0, 1500.0, 4, 2)


class _Sleepers:
    """Stands in for the processes of a competitor; a turn's CPU seconds say who took it, its time when."""

    turns: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, steps: int) -> Turn:
        self.turns.append(self.name)
        return Turn([float(len(self.turns))] * steps, 0.0 if self.name == "plain" else 1.0, [0.0] * steps)


def test_host_overhead_pairs_every_turn_with_one_of_plain() -> None:
    contest = overhead.Contest(overhead.parse_args(["--competitors", "ddp,fsdp2"]), layers=2)
    contest.workers = {name: _Sleepers(name) for name in ("plain", "ddp", "fsdp2")}  # type: ignore[misc]
    for number in range(2):
        contest.run_round(number)
    assert _Sleepers.turns == ["plain", "ddp", "plain", "fsdp2", "fsdp2", "plain", "ddp", "plain"]
    for pairs in contest.rounds.values():
        assert [(plain.cpu_s, turn.cpu_s) for plain, turn in pairs] == [(0.0, 1.0)] * 2
        assert [abs(plain.step_s[0] - turn.step_s[0]) for plain, turn in pairs] == [1.0, 1.0]


def test_host_overhead_tells_of_wrong_losses() -> None:
    args = overhead.parse_args(["--competitors", "ddp,zerolite-3,zerolite-3-w64,deepspeed-3"])
    contest = overhead.Contest(args, layers=2)
    contest.started = {name: Ready([1.0, 0.9]) for name in ("plain", "ddp")}
    contest.started["zerolite-3"] = Ready([1.0, 0.8])
    contest.started["zerolite-3-w64"] = Ready([1.0, 7.0])  # its peers are copies of it: other numbers are right
    contest.absent["deepspeed-3"] = "not installed: deepspeed"
    (sentence,) = contest.disagreements()
    assert sentence.startswith("zerolite-3, 2 layers: the loss of step 2 is 1.00e-01")
    contest.started["zerolite-3"] = Ready([1.0, float("nan")])
    assert len(contest.disagreements()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [["zerolite-3"], pytest.param(["zerolite-2", "fsdp2", "ddp"], marks=pytest.mark.slow)],
    ids=["zerolite", "peers"],
)
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


def _saving_turn(machine: float, save: float, stall: float | None = None) -> SavingTurn:
    """On a machine so many times slower. The disk takes 1 s to write and 2 to read, a copy 0.1; a load takes `save`."""
    background = None
    if stall is not None:
        background = Background(
            first_stall_s=2 * machine * stall,
            stall_s=machine * stall,
            total_s=machine * (stall + 4.5),
            wait_s=0.0,
            plain_s=4 * machine,
            copy_s=0.1 * machine,
            new_copy_s=machine,
        )
    return SavingTurn(
        parameters=8,
        file_bytes=10**9,
        save_s=machine * save / 2,
        durable_s=machine * save,
        zeros_s=machine,
        random_s=2 * machine,
        direct_s=0.5 * machine,
        warm_s=machine * save,
        cold_s=machine * save,
        read_warm_s=machine,
        read_cold_s=2 * machine,
        train_s=8 * machine,
        losses=[],
        background=background,
    )


def test_checkpoint_takes_ratios_within_a_turn_and_a_round() -> None:
    """The machine was ten times slower in the second round, and twice in the third, where all savers were slow too."""
    rounds = {
        "zerolite-2": [_saving_turn(*turn) for turn in ((1.0, 1.25, 0.11), (10.0, 1.25, 0.11), (2.0, 2.5, 0.22))],
        "fsdp2": [_saving_turn(*turn) for turn in ((1.0, 2.5, 0.5), (10.0, 2.5, 0.5), (2.0, 5.0, 1.0))],
        "deepspeed-2": [_saving_turn(*turn) for turn in ((1.0, 1.0), (10.0, 1.0), (2.0, 2.0))],
        "ddp": [],
    }
    ours, fsdp2, deepspeed, ddp = summarise_turns(rounds, {"ddp": "no luck"}, steps=4)
    assert ours.of_zeros == pytest.approx(0.8) and ours.of_random == pytest.approx(1.6) and ours.save_to_first == 1.0
    assert ours.of_direct == pytest.approx(0.4)
    assert ours.cold_of_disk == pytest.approx(1.6) and ours.warm_of_disk == pytest.approx(0.8)
    assert ours.copies == pytest.approx(1.1) and ours.first_copies == pytest.approx(2.2)
    assert ours.durable_s == pytest.approx(5.0) and ours.gb_s == pytest.approx(0.2)
    assert ours.train_ms == pytest.approx(4000) and ours.added_ms == pytest.approx(2 * (0.22 + 0.5) * 1e3)
    assert fsdp2.save_to_first == 2.0 and deepspeed.copies is None and deepspeed.stall_ms is None
    assert (ddp.absent, ddp.durable_s) == ("no luck", None)
    assert goals(rounds, {"ddp": "no luck"}) == [
        "zerolite-2 saves at 0.8 of the disk's speed: 0.80, met",
        "zerolite-2 loads at 0.8 of the disk's speed: 1.60, met",
        "zerolite-2 saves faster than deepspeed-2: 0.80 times its speed, missed",
        "zerolite-2 loads, cold, faster than deepspeed-2: 0.80 times its speed, missed",
        "zerolite-2 loads, warm, faster than deepspeed-2: 0.80 times its speed, missed",
        "zerolite-2 saves faster than fsdp2: 2.00 times its speed, met",
        "zerolite-2 loads, cold, faster than fsdp2: 2.00 times its speed, met",
        "zerolite-2 loads, warm, faster than fsdp2: 2.00 times its speed, met",
        "zerolite-2 stalls for at most 1.2 copies: 1.10, met",
    ]
    absent = {"deepspeed-2": "not installed", "fsdp2": "not installed"}
    assert goals(rounds, absent)[2].endswith("not measured")
    slow = {"zerolite-3": [_saving_turn(1.0, 1.26, 0.13)]}
    assert [sentence.rpartition(", ")[2] for sentence in (goals(slow, {})[0], goals(slow, {})[-1])] == ["missed"] * 2


def test_checkpoint_fails_a_load_that_does_not_continue() -> None:
    check_resumed([2.0, 1.0], [2.0, 1.0 + 1e-5])
    for value in (1.1, float("nan")):
        with pytest.raises(RuntimeError, match="the loss of step 2 after the save was 1.000000"):
            check_resumed([2.0, 1.0], [2.0, value])


def test_disk_writes_and_reads_as_many_bytes_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = 3 * disk.DD_BLOCK + 4097
    source = memoryview(bytes(range(256)))
    disk.dd_write(tmp_path / "zeros", numbers)
    if disk.allows_direct(tmp_path / "direct"):
        disk.dd_write(tmp_path / "direct", numbers, direct=True)
        assert (tmp_path / "direct").stat().st_size == numbers
        (tmp_path / "direct").unlink()
    disk.write(tmp_path / "repeated", 1000, source)
    assert disk.files_under(tmp_path) == [tmp_path / "repeated", tmp_path / "zeros"]
    assert disk.size_of(disk.files_under(tmp_path)) == numbers + 1000
    assert (tmp_path / "repeated").read_bytes() == (bytes(source) * 4)[:1000]
    disk.sync([*disk.files_under(tmp_path), tmp_path])
    counts = []
    for _ in range(5):  # the kernel may take pages back at any time
        disk.dd_read(tmp_path / "zeros")
        with open(tmp_path / "zeros", "rb") as file:
            counts.append(disk._cached_pages(file.fileno()))
    assert max(counts) == -(-numbers // 4096)
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: None)
    assert not disk.forget([tmp_path / "zeros"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--competitors", "zerolite"], "expected names of"),
        (["--width", "10", "--heads", "4"], "must be a multiple"),
        (["--directory", "/nowhere"], "expected a directory, got '/nowhere'"),
        (["--layers", "1000000", "--width", "8192", "--heads", "8"], "GB of free space in"),
    ],
)
def test_checkpoint_refuses_wrong_arguments(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        checkpoint.parse_args(arguments)
    assert sentence in capsys.readouterr().err


class _Schedule:
    following = False


class _Coordinator:
    schedule = _Schedule()


def test_host_overhead_refuses_to_measure_another_path() -> None:
    trainee = Trainee(lambda x: x.sum(), CollectiveClock(), _Coordinator())
    with pytest.raises(RuntimeError, match="expected stage 3 to follow its plan after 2 steps"):
        warm_up(trainee, make_inputs(), 2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--competitors", "plane"], "expected names of"),
        (["--layers", "ten"], "expected numbers separated by commas"),
        (["--layers", "100,0"], "--layers: expected 1 or more, got 0"),
        (["--warmup", "4"], "--warmup: expected 5 or more, got 4"),
        (["--profile", "x"], "invalid choice"),
    ],
)
def test_host_overhead_refuses_wrong_arguments(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        overhead.parse_args(arguments)
    assert sentence in capsys.readouterr().err


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
