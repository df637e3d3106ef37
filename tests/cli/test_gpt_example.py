"""The main job, examples/gpt: started in every way a user may start it, and the numbers that it must reach."""

from __future__ import annotations

import importlib.util
import json
import math
import resource
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli import helpers
from tests.cli.helpers import COMMAND, ROOT
from zerolite.config import load_config

GPT = ROOT / "examples" / "gpt"
CONFIGS = sorted((GPT / "configs").glob("*.json"))
STEPS = 24
TINY = "--layers 1 --heads 2 --width 32 --context 32 --eval-crops 24 --sample-bytes 20".split()
METRIC_KEYS = {"step", "loss", "lr", "grad_norm", "tokens_per_s", "elapsed_s"}
VALIDATION_KEYS = {"step", "val_loss", "elapsed_s"}

Metrics = list[dict[str, Any]]
Trained = Callable[..., tuple[Path, Metrics]]


def write_config(directory: Path, base: str = "zero2", **changes: Any) -> Path:
    """A config of the example, fitted to a short run."""
    config = json.loads((GPT / "configs" / f"{base}.json").read_text())
    config["optimizer"]["params"]["lr"] = 1e-2
    config["scheduler"]["params"].update(total_num_steps=STEPS, warmup_num_steps=2)
    config.update(changes)
    path = directory / f"{base}.json"
    path.write_text(json.dumps(config))
    return path


def script(config: Path, text: Path, out: Path, *more: str) -> list[str]:
    times = "--log-every 4 --eval-every 12 --save-every 0".split()
    paths = ["--config", str(config), "--data", str(text), "--out", str(out)]
    return [str(GPT / "train.py"), *paths, *times, *TINY, *more]


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return helpers.run(*command, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", **options)


def read_metrics(out: Path) -> Metrics:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def learning(metrics: Metrics) -> list[tuple[Any, ...]]:
    """Return the metrics that must not depend on how the run was started, nor on the stage."""
    keys = ("step", "loss", "val_loss", "lr", "grad_norm")
    return [tuple(line.get(key) for key in keys) for line in metrics]


def check_run(result: subprocess.CompletedProcess[str], out: Path) -> Metrics:
    """Check the files that every complete run leaves behind."""
    assert result.returncode == 0, result.stderr
    metrics = read_metrics(out)
    training = [line for line in metrics if "loss" in line]
    validation = [line for line in metrics if "val_loss" in line]
    assert [line["step"] for line in training] == list(range(4, STEPS + 1, 4))
    assert [line["step"] for line in validation] == [0, 12, STEPS]
    assert all(line.keys() == METRIC_KEYS for line in training)
    assert all(line.keys() == VALIDATION_KEYS for line in validation)
    assert all(line["tokens_per_s"] > 0 and line["grad_norm"] > 0 for line in training)
    assert validation[0]["val_loss"] == pytest.approx(math.log(256), abs=0.2)
    assert training[-1]["loss"] < 3.5 and validation[-1]["val_loss"] < 3.5
    assert result.stdout.count("a sample of 20 bytes after 'def ':") == 1  # from rank 0 only
    assert "\ndef " in result.stdout
    for shown in (f"{STEPS}/{STEPS}", "loss ", "lr ", "grad norm ", "tokens/s"):
        assert shown in result.stderr, f"{shown!r} is missing in the progress bar"
    if importlib.util.find_spec("matplotlib"):
        assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    return metrics


# Processes: data parallelism alone, and beside it parts of layers, stages of layers, both.
GRIDS = {"zero2": 2, "zero3": 2, "tensor2": 2, "pipeline2": 2, "grid": 4}
DEEP = ["--layers", "4", "--save-every", "12"]  # the configs begin the second stage with the third block


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """``trained("zero2", *options)``: directory and metrics of a run of `zerolite` with a config of the example; each
    runs once."""
    done: dict[tuple[str, ...], tuple[Path, Metrics]] = {}

    def run_of(base: str, *options: str) -> tuple[Path, Metrics]:
        key = (base, *options)
        if key not in done:
            directory = tmp_path_factory.mktemp(base)
            arguments = script(write_config(directory, base), text, directory / "out", *options)
            result = run([*COMMAND, "--nproc", str(GRIDS.get(base, 2)), *arguments])
            done[key] = directory / "out", check_run(result, directory / "out")
        return done[key]

    return run_of


def test_the_job_trains(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, alone. The slow tests start it in every way."""
    command = script(write_config(tmp_path), text, tmp_path / "out")
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.syspath_prepend(str(GPT))
    for name in ("data", "model", "report"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    runpy.run_path(command[0], run_name="__main__")
    check_run(subprocess.CompletedProcess(command, 0, *capsys.readouterr()), tmp_path / "out")


def same_learning(metrics: Metrics, expected: Metrics) -> None:
    for line, other in zip(learning(metrics), learning(expected), strict=True):
        assert line == tuple(None if value is None else pytest.approx(value, rel=1e-5) for value in other)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["tensor2", "pipeline2", "grid"])
def test_grids_agree(base: str, trained: Trained) -> None:
    """The same batch on every grid of processes: the same numbers but for the order of sums, validation too."""
    same_learning(trained(base, *DEEP)[1], trained("zero2", *DEEP)[1])


@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "resumed_by"), [("grid", "tensor2"), ("zero2", "grid")])
def test_resume_on_another_grid_or_stage(
    saved_by: str, resumed_by: str, text: Path, tmp_path: Path, trained: Trained
) -> None:
    out = tmp_path / "out"
    earlier, expected = trained(saved_by, *DEEP)
    shutil.copytree(earlier, out)
    (out / "checkpoints" / "latest").write_text("global_step12")
    shutil.rmtree(out / "checkpoints" / f"global_step{STEPS}")
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 16, "val_')  # what a killed process may leave
    arguments = script(write_config(tmp_path, resumed_by), text, out, "--layers", "4", "--resume")
    result = run([*COMMAND, "--nproc", str(GRIDS[resumed_by]), *arguments])
    assert f"resumes from {out / 'checkpoints' / 'global_step12'}" in result.stdout, result.stderr
    same_learning(check_run(result, out), expected)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_differ_in_stage_precision_and_grid_only(path: Path) -> None:
    """Each config is valid, at the stage that its name says; they differ in stage, precision and grid only, and all of
    them train on 16 crops a step with as many processes as the README says."""
    config = load_config(str(path))
    stage = int(path.stem[-1]) if path.stem.startswith("zero") else 1 if config.pipeline.stages > 1 else 2
    assert config.zero_optimization.stage == stage
    assert (config.fp16.enabled, config.bf16.enabled) == (path.stem == "fp16", path.stem == "bf16")
    varying = {"zero_optimization", "fp16", "bf16"}
    model_ranks = config.pipeline.stages * config.tensor_parallel.size
    assert (model_ranks > 1) == (path.stem in GRIDS and not path.stem.startswith("zero"))
    if model_ranks > 1:
        varying |= {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "pipeline", "tensor_parallel"}
    common, expected = (json.loads(file.read_text()) for file in (path, GPT / "configs" / "zero0.json"))
    assert {k: v for k, v in common.items() if k not in varying} == {
        k: v for k, v in expected.items() if k not in varying
    }
    data_ranks = GRIDS.get(path.stem, 2) // model_ranks
    batch = common["train_micro_batch_size_per_gpu"] * common.get("gradient_accumulation_steps", 1)
    assert batch * data_ranks == 16


@pytest.mark.slow
@pytest.mark.parametrize("base", ["bf16", "fp16"])
def test_sixteen_bits_learn_what_fp32_does(base: str, trained: Trained) -> None:
    """Close to fp32 all the way; fp16 may skip its first steps while the loss scale is too large."""
    full, half = trained("zero2")[1], trained(base)[1]
    assert half[-1]["val_loss"] == pytest.approx(full[-1]["val_loss"], rel=0.05)


@pytest.mark.slow
def test_the_main_job_learns_in_three_minutes(tmp_path: Path) -> None:
    """`make train` as it stands: two processes, below 2.0 nats on validation within three minutes of two cores."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [*COMMAND, "--nproc", "2", GPT / "train.py", "--config", GPT / "configs" / "zero2.json"]
    result = helpers.run(*command, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert result.returncode == 0, result.stderr
    validation = [line["val_loss"] for line in read_metrics(tmp_path / "runs" / "gpt") if "val_loss" in line]
    assert validation[0] == pytest.approx(math.log(256), abs=0.2)
    assert validation[-1] < 2.0
    assert seconds < 2 * 180, f"took {seconds:.0f} s of the processor"
