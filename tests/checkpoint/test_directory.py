"""A directory of checkpoints: tags, ``latest``, the lock, what else a path may be; and runs: a save does not
harm the checkpoints of another one, a job that loads a checkpoint continues its run."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.checkpoint import crafted, faults
from tests.checkpoint.test_crashes import engine_after, go_on
from tests.toolkit.compare import assert_same_on_ranks
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import raised
from zerolite.checkpoint import directory as directories
from zerolite.checkpoint import filesystem
from zerolite.checkpoint.directory import (
    MANIFEST,
    NoCheckpoint,
    TrainingRun,
    complete_checkpoints,
    find,
    locked,
    run_of_this_job,
)
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.manifest import read_manifest


@pytest.fixture
def saved(ram: Path) -> Path:
    return ram / "saved"


def tags(save_dir: Path) -> set[str]:
    return {path.name for path in save_dir.iterdir() if (path / "manifest.json").exists()}


# -------------------------------------------------------------------- tags


@pytest.mark.parametrize("tag", ["global_step1", "best model", "größe", "--", "manifest.json"])
def test_tags_of_the_users(saved: Path, tag: str) -> None:
    assert faults.save(saved, 3, tag) == saved / tag
    assert faults.load(saved) == faults.load(saved, tag) == 3
    assert (saved / "latest").read_text() == f"{tag}\n"


def test_what_is_no_checkpoint_is_not_replaced(saved: Path) -> None:
    for path in (saved / "src" / "work.py", saved / "global_step1" / "precious"):
        path.parent.mkdir(parents=True)
        path.write_text("x")
    (saved / "notes").write_text("y")
    for tag in ("src", "notes"):
        with pytest.raises(CheckpointError, match=f"{tag}' is there, and is no checkpoint"):
            faults.save(saved, 1, tag)
    (saved / "empty").mkdir()
    faults.save(saved, 1, "empty")
    faults.save(saved, 3)
    assert (saved / "src" / "work.py").read_text() == "x" and (saved / "notes").read_text() == "y"
    assert (saved / "global_step1" / "precious").exists()
    assert tags(saved) == {"empty", "global_step3"} and faults.hidden(saved) == []


def test_what_cannot_be_removed_does_not_matter(
    saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults.save(saved, 1)

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(filesystem, "remove", lambda path: None if path.name.startswith(".latest") else refuse(path))
        faults.save(saved, 2, "global_step1")
    assert "could not be removed: Operation not permitted" in caplog.text
    assert faults.load(saved) == 2
    faults.save(saved, 3)
    assert tags(saved) == {"global_step1", "global_step3"} and faults.hidden(saved) == []


# -------------------------------------------------------------------- the lock


def test_the_lock_of_a_job_in_another_process(saved: Path) -> None:
    """Kept while it lives; free when it is killed."""
    program = (
        "import sys, pathlib\n"
        "from zerolite.checkpoint.directory import locked\n"
        "with locked(pathlib.Path(sys.argv[1])):\n"
        "    print('here', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(saved)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"here\n"
            with pytest.raises(CheckpointError, match="another job"), locked(saved):
                pass
        finally:
            process.kill()
    with locked(saved):
        pass


def test_processes_forked_meanwhile_do_not_keep_the_lock(saved: Path) -> None:
    """Workers that load data, forked while a save is under way in the background, do not keep its lock."""
    end, held = os.pipe()
    with locked(saved):
        process = os.fork()
        if process == 0:
            os.close(held)
            os.read(end, 1)
            os._exit(0)
    try:
        with locked(saved):
            pass
    finally:
        os.close(held)
        os.waitpid(process, 0)


@pytest.mark.parametrize("kind", [errno.EINVAL, errno.ENOTSUP])
def test_file_systems_that_can_neither_lock_nor_sync_directories(
    saved: Path, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    original = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(kind, os.strerror(kind))
        original(descriptor)

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(directories.fcntl, "flock", flock)
    faults.save(saved, 1)
    assert faults.load(saved) == 1


# -------------------------------------------------------------------- paths


def test_directory_latest_and_checkpoint_may_be_symlinks(saved: Path) -> None:
    real, link = saved / "real", saved / "link"
    real.mkdir(parents=True)
    link.symlink_to(real)
    faults.save(link, 1)
    assert link.is_symlink() and faults.load(real) == faults.load(link) == 1
    (saved / "target").write_text("untouched\n")
    (real / "latest").unlink()
    (real / "latest").symlink_to(saved / "target")
    (real / "global_step1").rename(saved / "elsewhere")
    (real / "global_step1").symlink_to(saved / "elsewhere")
    assert faults.load(real, "global_step1") == 1
    faults.save(link, 1)  # the links are replaced, and not what they name
    faults.save(link, 2)
    assert (saved / "target").read_text() == "untouched\n"
    assert faults.load(saved / "elsewhere") == 1
    assert tags(real) == {"global_step1", "global_step2"} and faults.load(link) == 2


def test_leftovers_that_are_links(saved: Path) -> None:
    """The link is removed, and not what it leads to."""
    (saved / "precious").mkdir(parents=True)
    (saved / "precious" / "file").touch()
    for name in (".incomplete-x", ".incomplete-y"):
        (saved / name).symlink_to(saved / "precious")
    faults.save(saved, 1)
    assert (saved / "precious" / "file").exists() and faults.hidden(saved) == []


@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_in_its_place(saved: Path, below: str) -> None:
    saved.write_text("x")
    with pytest.raises(CheckpointError, match=f"'{saved}.*(File exists|Not a directory)"):
        faults.save(saved / below, 1)
    with pytest.raises(CheckpointError, match=f"'{saved}.*cannot be read: Not a directory") as caught:
        find(saved / below)
    assert not isinstance(caught.value, NoCheckpoint)
    assert saved.read_text() == "x"


def test_loading_writes_nothing(saved: Path) -> None:
    faults.save(saved, 1)
    everything = sorted(saved.rglob("*"))
    for path in (*everything, saved):
        path.chmod(path.stat().st_mode & ~0o222)
    before = [(path, path.stat().st_mtime_ns) for path in (saved, *everything)]
    with faults.recorded() as operations:
        assert faults.load(saved) == 1
    assert operations == [] and before == [(path, path.stat().st_mtime_ns) for path in (saved, *everything)]
    saved.chmod(0o755)


# -------------------------------------------------------------------- runs


REMEDIES = 'call engine.load_checkpoint on that directory before the first save.*another directory.*"overwrite": true'


def test_another_run_is_not_harmed(ram: Path) -> None:
    """Its checkpoints are not replaced; those of the new run stand beside them."""
    for step, tag in ((1, None), (2, None), (3, "best")):
        faults.save(ram, step, tag)
    before = {known.tag: known.saved_at for known in complete_checkpoints(ram)}
    other = TrainingRun()
    for step, tag in ((4, "best"), (2, None)):
        with pytest.raises(CheckpointError, match=f"(?s)this save would replace .*of another run .*{REMEDIES}"):
            faults.save(ram, step, tag, run=other)
    assert faults.load(ram) == 3
    for step in (4, 5):
        faults.save(ram, step, run=other)
    after = {known.tag: known.saved_at for known in complete_checkpoints(ram)}
    assert after.keys() - before.keys() == {"global_step4", "global_step5"} and after.items() >= before.items()
    assert faults.load(ram) == 5
    faults.save(ram, 6, "best", run=None)  # as with "overwrite"
    assert faults.load(ram) == 6


def test_a_job_continues_the_run_that_it_has_loaded(ram: Path) -> None:
    """A run may save into two directories, of which the next job loads one."""
    first = TrainingRun()
    faults.save(ram / "a", 1, run=first)
    faults.save(ram / "b", 2, "best", run=first)
    second = faults.resumed(ram / "a")
    assert second.id == first.id
    faults.save(ram / "b", 3, "best", run=second)
    assert read_manifest(ram / "b" / "best").run == first.id


def test_what_names_no_run_is_replaced(ram: Path) -> None:
    """Checkpoints of earlier versions, and damaged ones."""
    for step in (1, 2):
        path = faults.save(ram, step)
        body = json.loads((path / MANIFEST).read_bytes())
        del body["run"]
        crafted.craft(path, MANIFEST, body)
    assert read_manifest(ram / "global_step1").run == "" and faults.load(ram) == 2
    later = faults.resumed(ram)
    assert later.id
    faults.save(ram, 3, run=later)
    (ram / "global_step3" / MANIFEST).write_text("{")
    faults.save(ram, 3, run=TrainingRun())


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


@on_ranks(2)
def test_engines_of_several_jobs_are_told_of_each_other(ram: Path) -> None:
    """All ranks raise the same sentence; a load makes it one run, whose id stays."""
    jobs = []
    for _ in range(2):
        run_of_this_job.cache_clear()
        jobs.append(engine_after(0, 2))

    def save(job: int) -> str:
        def call() -> None:
            jobs[job].save_checkpoint(ram, "last", async_save=True)
            jobs[job].wait_for_checkpoint()

        go_on(jobs[job])
        said = raised(call)
        assert_same_on_ranks({"said": said})
        return said

    assert save(0) == ""
    assert "of another run" in save(1)
    jobs[1].load_checkpoint(ram, load_module_only=True)
    assert "of another run" in save(1)
    jobs[1].load_checkpoint(ram)
    assert save(1) == save(0) == ""
    assert len({json.loads(path.read_bytes())["run"] for path in ram.glob("*/manifest.json")}) == 1
