"""`zerolite plan`: what it prints and writes, every mistake's sentence, and the exit status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.helpers import ROOT, job_environment
from tests.unit.plan_examples import GB, make_comparison, make_plan
from zerolite.planning import command
from zerolite.planning.report import render
from zerolite.planning.result import Comparison, Plan

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}
MODELS = """\
import torch
print("a module that says something")
def build():
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
def reads_values():
    model = build()
    if float(model[0].weight.detach().sum()) > 0:
        return model
    return torch.nn.Identity()
def make_batch(size):
    return (torch.zeros(size, 16, dtype=torch.bfloat16),)
def loss(output):
    return output.square().sum()
"""

Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """`ask(*options)` runs the command in a directory with zero2.json and plan_models.py, as a job of 8 ranks where
    nothing else is said: (exit status, standard output, standard error)."""
    (tmp_path / "zero2.json").write_text(json.dumps(CONFIG))
    (tmp_path / "plan_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "plan_models", None)
    monkeypatch.delitem(sys.modules, "plan_models")

    def ask(*options: str, model: str = "plan_models:build", config: str = "zero2.json") -> tuple[int, str, str]:
        given = ["--model", model, "--config", config, *([] if "--world-size" in options else ["--world-size", "8"])]
        try:
            status = command.main([*given, *options])
        except SystemExit as leaving:  # of the parser
            assert isinstance(leaving.code, int)
            status = leaving.code
        return status, *capsys.readouterr()

    return ask


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record what is planned, as the last element, instead of running the engine."""
    shown: list[Any] = [make_plan()]
    monkeypatch.setattr(command, "make", lambda options, config: shown[-1])
    return shown


# -------------------------------------------------------------------- what it prints and writes


def test_a_plan_is_printed(ask: Ask, made: list[Any]) -> None:
    status, out, err = ask()
    assert (status, out, err) == (0, render(made[0]) + "\n", "")


@pytest.mark.parametrize(
    ("shown", "status"),
    [
        pytest.param(make_plan(device_memory=None), 0, id="no memory given"),
        pytest.param(make_plan(device_memory=20 * GB), 1, id="does not fit"),
        pytest.param(Comparison(rows=make_comparison().rows, chosen=None), 1, id="none fits"),
        pytest.param(Comparison(rows=make_comparison(device_memory=None).rows, chosen=None), 0, id="none was given"),
    ],
)
def test_the_status_says_whether_it_fits(ask: Ask, made: list[Any], shown: Any, status: int) -> None:
    made.append(shown)
    assert ask()[0] == status


def test_json_in_a_file_and_on_the_output(ask: Ask, made: list[Any]) -> None:
    status, out, _ = ask("--json", "plan.json")
    assert status == 0 and out.startswith("models.gpt")
    assert Plan.model_validate_json(Path("plan.json").read_text()) == made[0]
    status, out, _ = ask("--json", "-")
    assert status == 0 and Plan.model_validate_json(out) == made[0]
    made.append(make_comparison())
    assert Comparison.model_validate_json(ask("--json", "-")[1]) == made[-1]


# -------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--modle", "x"], "unrecognized arguments: --modle x"),
        (["--world-size", "0"], "argument --world-size: expected a whole number, 1 or more, got '0'"),
        (["--device-memory", "80XB"], "argument --device-memory: expected a size such as '5GB'"),
        (["--batch", "m:f", "--input-spec", "int64[2]"], "argument --input-spec: not allowed with argument --batch"),
        (["--loss", "m:f"], "--loss needs --batch or --input-spec"),
        (["--seq-len", "9"], "--seq-len and S in --input-spec go together, as in --seq-len auto"),
        (["--input-spec", "int64[B,S]"], "--seq-len and S in --input-spec go together"),
        (["--input-spec", "int64[B,S]", "--seq-len", "auto"], "--seq-len auto needs --device-memory"),
        (["--input-spec", "int64[S]", "--seq-len", "many"], "expected a whole number, 1 or more, got 'many'"),
    ],
)
def test_mistakes_of_the_command_line(ask: Ask, made: list[Any], options: list[str], sentence: str) -> None:
    made.append("must not be planned")
    status, out, err = ask(*options)
    assert (status, out) == (2, "") and err.startswith("zerolite plan: ") and sentence in err
    assert err.count("\n") == 1


def test_a_picture_without_matplotlib(ask: Ask, made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = ask("--png", "plan.png")
    assert (status, err) == (2, "zerolite plan: --png needs matplotlib: pip install 'zerolite[plot]'\n")


WRONG = "zerolite plan: 1 error in the configuration:\n.*"
BATCH = ("--batch", "plan_models:make_batch")


@pytest.mark.parametrize(
    ("given", "options", "sentence"),
    [
        ({"config": "nonsuch.json"}, (), rf'{WRONG}expected a configuration file in UTF-8 at "nonsuch.json"'),
        (
            {"config": '{"zero_optimization": {"stagee": 1}}'},
            (),
            rf"{WRONG}zero_optimization.stagee: expected a key of",
        ),
        ({"config": '{"train_batch_size": 7}'}, (), rf"{WRONG}train_batch_size: expected a multiple of"),
        ({}, ("--nodes", "3"), "zerolite plan: expected nodes that divide world_size 8 evenly, got 3"),
        ({}, ("--rank", "8"), "zerolite plan: expected rank from 0 to 7"),
        ({}, ("--tflops", "9"), "zerolite plan: the time of a step of 8 ranks needs nodes"),
        ({"model": "plan_models:bild"}, (), "module 'plan_models' has no attribute 'bild'"),
        ({}, ("--input-spec", "x:int64"), r"expected name:dtype\[sizes\] for each tensor"),
        ({}, (*BATCH, "--loss", "plan_models:los"), "--loss plan_models:los: importing it failed"),
        ({"model": "plan_models:reads_values"}, (), r"zerolite plan: [^\n]*without values"),
    ],
)
def test_mistakes_of_the_config_and_of_names(
    ask: Ask, given: dict[str, str], options: tuple[str, ...], sentence: str
) -> None:
    status, out, err = ask(*options, **given)
    assert (status, out) == (2, "") and "Traceback" not in err
    assert re.search(sentence, err), err


# -------------------------------------------------------------------- what the documentation shows


def test_every_option_is_documented() -> None:
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    options = {name for action in command.build_parser("zerolite plan")._actions for name in action.option_strings}
    assert [name for name in options - {"-h", "--help"} if f"| `{name}" not in text] == []


# -------------------------------------------------------------------- for real


def test_a_reader_that_has_seen_enough() -> None:
    """The output is a pipe without a reader: silence, and the status of a process that SIGPIPE has ended."""
    program = "import sys; from zerolite.planning import command; sys.exit(command.main(['--help']))"
    reading, writing = os.pipe()
    os.close(reading)
    env = job_environment(PYTHONUNBUFFERED=None)
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, cwd=ROOT, env=env, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
