"""`zerolite plan --check`: a plan beside a real run of the same job."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.unit.plan_examples import make_items, make_plan
from zerolite.planning import check
from zerolite.planning.check import TOLERANCE, Line, compare, find_problem, run_check
from zerolite.planning.errors import PlanError
from zerolite.planning.make import plan
from zerolite.planning.measure import Measurement
from zerolite.planning.result import Plan
from zerolite.planning.sources import load_batch, load_function, load_model_fn

CONFIG = """{
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5000},
    "csv_monitor": {"enabled": true, "output_path": "must_not_be_written"}
}"""
MODULE = """\
import os
import torch
def build():
    return torch.nn.Sequential(torch.nn.Linear(64, 192), torch.nn.GELU(), torch.nn.Linear(192, 64))
def batch(size):
    return torch.randn(size, 64)
def loss(output):
    return output.square().sum()
def fails(size):
    if "RANK" in os.environ:
        raise OSError("the data is elsewhere")
    return batch(size)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory, which is a new one, with a model and what belongs to it."""
    (tmp_path / "checked_job.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "checked_job"


def given(module: str, batch: str = "batch") -> dict[str, str]:
    return {"model": f"{module}:build", "config": CONFIG, "batch": f"{module}:{batch}", "loss": f"{module}:loss"}


def planned(names: dict[str, str], world: int) -> Plan:
    batch, loss = load_batch(names["batch"]), load_function(names["loss"], "--loss")
    return plan(load_model_fn(names["model"]), names["config"], world, device="cpu", batch=batch, loss=loss)


def differing(made: Plan, measured: Measurement) -> list[Line]:
    return [line for line in compare(made, measured, TOLERANCE["cpu"]) if not line.agrees]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_real_job_beside_its_plan(module: str, world: int, capfd: Any) -> None:
    names = given(module)
    made = planned(names, world)
    wrong = made.model_copy(update={"states": made.states | {"gradients": made.states["gradients"] + 4}})
    measured = check.run_job(names, world, "cpu")
    assert not differing(made, measured)
    assert [line.name for line in differing(wrong, measured)] == ["gradients"]
    assert capfd.readouterr() == ("", "")
    assert not Path("must_not_be_written").exists()


def test_run_check_prints_both_and_says_by_its_status_whether_they_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_plan(world_size=2, nodes=None, device="cpu")
    job = Mock(side_effect=[measurement(made), measurement(made, step_peak=int(made.step_peak.bytes * 0.97))])
    monkeypatch.setattr(check, "run_job", job)
    request = {"model": "a:b", "config": "c.json", "batch": "a:c", "loss": None}
    assert run_check(request, "cpu", made) == 0
    job.assert_called_once_with(request, 2, "cpu")
    assert "The plan is right: states and traffic are equal, the peak is within 2%." in capsys.readouterr().out
    assert run_check(request, "cpu", made) == 1
    assert "The plan differs from the job: peak of a step." in capsys.readouterr().out


def measurement(made: Plan, **changes: Any) -> Measurement:
    fields: dict[str, Any] = {
        "rank": 0, "world_size": made.world_size, "device": "cpu", "states": made.states, "at_rest": made.at_rest,
        "host": made.host or make_items(), "disk": made.disk or make_items(), "step_peak": made.step_peak.bytes,
        "traffic": [row.model_copy(update={"inter_node": None}) for row in made.traffic],
    }  # fmt: skip
    return Measurement(**(fields | changes))


def test_what_cannot_run_here_is_a_sentence(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_problem(2, "cpu") is None
    assert (find_problem(100_000, "cpu") or "").startswith("--world-size 100000 would start 100000 processes")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    one = "a device for each of its 2 ranks, and this machine has 1 CUDA device;"
    assert one in (find_problem(2, "cuda") or "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "has no CUDA device; plan and check with --device cpu" in (find_problem(1, "cuda") or "")
    with pytest.raises(PlanError, match="--check: the real job needs a device for each of its 2 ranks"):
        run_check({}, "cuda", make_plan(world_size=2))


@pytest.mark.slow
def test_a_job_that_fails_shows_its_last_lines(module: str) -> None:
    with pytest.raises(PlanError) as error:
        check.run_job(given(module, "fails"), 2, "cpu")
    assert "--check: the real job of 2 processes failed (exit status 1)" in str(error.value)
    assert "OSError: the data is elsewhere" in str(error.value)
