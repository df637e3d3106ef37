"""A save does not harm the checkpoints of another run; a job that loads a checkpoint continues its run."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import crafted, faults
from tests.checkpoint.cases.resume import message
from tests.checkpoint.test_crashes import engine_after, go_on
from tests.toolkit.compare import assert_same_on_ranks
from tests.toolkit.ranks import on_ranks
from zerolite.checkpoint.directory import MANIFEST, complete_checkpoints
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.manifest import read_manifest
from zerolite.checkpoint.run import TrainingRun, run_of_this_job

REMEDIES = 'call engine.load_checkpoint on that directory before the first save.*another directory.*"overwrite": true'


@pytest.mark.parametrize(
    ("more", "harm"),
    [
        ({"tag": "best", "save_latest": False}, "replace checkpoint 'best'"),
        ({}, "move 'latest' away from checkpoint 'best'"),
        ({"tag": "mine", "save_latest": False, "keep_last": 1}, "remove, because of keep_last, .* 'global_step1'"),
    ],
    ids=["replace", "latest", "prune"],
)
def test_another_run_is_not_harmed(ram: Path, more: dict[str, Any], harm: str) -> None:
    for step in (1, 2):
        faults.save(ram, step)
    faults.save(ram, 3, "best")
    before = {known.tag: known.saved_at for known in complete_checkpoints(ram)}
    with pytest.raises(CheckpointError, match=f"(?s)this save would {harm}.*of another run .*{REMEDIES}"):
        faults.save(ram, 4, run=TrainingRun(), **more)
    assert faults.load(ram) == 3
    after = {known.tag: known.saved_at for known in complete_checkpoints(ram)}
    beside = set() if more.get("tag") == "best" else {more.get("tag", "global_step4")}  # written, and nothing else
    assert after.keys() - before.keys() == beside and after.items() >= before.items()
    for tag in beside:
        shutil.rmtree(ram / tag)
    faults.save(ram, 4, run=faults.resumed(ram), **more)
    faults.save(ram, 5, "beside", run=TrainingRun(), save_latest=False)  # harms nothing


def test_without_the_file_latest_the_newest_counts(ram: Path) -> None:
    faults.save(ram, 1)
    (ram / "latest").unlink()
    with pytest.raises(CheckpointError, match="move 'latest' away from checkpoint 'global_step1'"):
        faults.save(ram, 2, run=TrainingRun())


def test_a_job_continues_the_run_that_it_has_loaded(ram: Path) -> None:
    """Also elsewhere: a run saves into two directories, and the next job loads from one of them."""
    first = TrainingRun()
    faults.save(ram / "a", 1, run=first)
    faults.save(ram / "b", 2, "best", run=first)
    second = faults.resumed(ram / "a")
    assert second.id == first.id
    faults.save(ram / "b", 3, "best", run=second)
    assert read_manifest(ram / "b" / "best").about.run == first.id


def test_parameters_alone_begin_a_run(ram: Path) -> None:
    """A run that begins with parameters alone, as fine-tuning does, may save where the run before did."""
    faults.save(ram / "base", 1)
    one, other = faults.resumed(ram / "base", whole=False), faults.resumed(ram / "base", whole=False)
    assert len({one.id, other.id, faults.RUN.id}) == 3
    faults.save(ram / "base", 2, run=one, keep_last=1)
    faults.save(ram / "tuned", 3, run=one)
    with pytest.raises(CheckpointError, match="of another run"):
        faults.save(ram / "tuned", 4, run=other)


def test_two_jobs_resume_from_one_checkpoint(ram: Path) -> None:
    """The one that saves first goes on, the other is told."""
    faults.save(ram, 1)
    loser, winner = faults.resumed(ram), faults.resumed(ram)
    faults.save(ram, 2, run=winner)
    with pytest.raises(CheckpointError, match="another job of the same run has saved since .* End one of them"):
        faults.save(ram, 2, run=loser)
    faults.save(ram, 3, run=winner)
    faults.save(ram, 4, run=faults.resumed(ram))


def test_what_names_no_run_is_replaced(ram: Path) -> None:
    """Checkpoints of earlier versions, and damaged ones."""
    for step in (1, 2):
        path = faults.save(ram, step)
        body = json.loads((path / MANIFEST).read_bytes())
        del body["run"]
        crafted.craft(path, MANIFEST, body)
    assert read_manifest(ram / "global_step1").about.run == "" and faults.load(ram) == 2
    later = faults.resumed(ram)
    assert later.id
    faults.save(ram, 3, run=later, keep_last=1)
    (ram / "global_step3" / MANIFEST).write_text("{")
    faults.save(ram, 3, run=TrainingRun())


def test_overwrite(ram: Path) -> None:
    """``overwrite`` is about what is there at the first save; a job that comes later is told all the same."""
    faults.save(ram, 1)
    run = TrainingRun()
    faults.save(ram, 1, run=run, overwrite=True)
    other = TrainingRun()
    faults.save(ram, 2, run=other, overwrite=True)
    with pytest.raises(CheckpointError, match="another run"):
        faults.save(ram, 3, run=run, overwrite=True)


def test_jobs_race_for_one_directory(ram: Path) -> None:
    """One wins, and all others are told. (Locks of two threads keep each other out as those of two processes do.)"""
    for trial in range(5):
        told: list[str] = []

        def job(directory: Path = ram / str(trial), told: list[str] = told) -> None:
            try:
                faults.save(directory, 1, run=TrainingRun())
            except CheckpointError as error:
                told.append(str(error))

        jobs = [threading.Thread(target=job) for _ in range(3)]
        for thread in jobs:
            thread.start()
        for thread in jobs:
            thread.join()
        assert len(told) == 2 and all("of another run" in text or "another job is saving" in text for text in told)
        assert faults.load(ram / str(trial)) == 1


def test_restarts_of_the_launcher_are_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run_of_this_job.cache_clear()
    monkeypatch.setenv("ZEROLITE_JOB_ID", "0123abcd-1")
    assert run_of_this_job().id == "0123abcd"
    run_of_this_job.cache_clear()
    monkeypatch.delenv("ZEROLITE_JOB_ID")
    assert run_of_this_job() is run_of_this_job() and len(run_of_this_job().id) == 32
    run_of_this_job.cache_clear()


@pytest.mark.fast("2-sync")
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
@on_ranks(2)
def test_engines(ram: Path, background: bool) -> None:
    """All ranks raise the same sentence; a load makes it one run, whose id stays."""
    jobs = []
    for _ in range(3):
        run_of_this_job.cache_clear()
        jobs.append(engine_after(0, 2))

    def save(job: int) -> str:
        def call() -> None:
            jobs[job].save_checkpoint(ram, async_save=background)
            jobs[job].wait_for_checkpoint()

        go_on(jobs[job])
        said = message(call)
        assert_same_on_ranks({"said": said})
        return said

    assert save(0) == ""
    assert "of another run" in save(1)
    jobs[1].load_checkpoint(ram)
    assert save(1) == ""
    assert "another job of the same run" in save(0)
    jobs[2].load_checkpoint(ram)
    assert save(2) == ""
    assert len({json.loads(path.read_bytes())["run"] for path in ram.glob("*/manifest.json")}) == 1
