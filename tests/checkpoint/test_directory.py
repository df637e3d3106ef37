"""A directory of checkpoints: tags, ``latest``, pruning, the lock, and what else a path may be."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import faults
from zerolite.checkpoint import directory as directories
from zerolite.checkpoint import filesystem
from zerolite.checkpoint.directory import NoCheckpoint, check_tag, complete_checkpoints, find, locked
from zerolite.checkpoint.errors import CheckpointError


@pytest.fixture
def saved(ram: Path) -> Path:
    return ram / "saved"


def tags(save_dir: Path) -> set[str]:
    return {path.name for path in save_dir.iterdir() if (path / "manifest.json").exists()}


# -------------------------------------------------------------------- tags


NO_TAGS = ["", "..", "a/b", ".hidden", "latest", " a", "a\n", "a\0", "\ud800", 7]


@pytest.mark.parametrize("tag", NO_TAGS)
def test_what_is_no_tag(tag: object) -> None:
    with pytest.raises(ValueError, match="expected tag to be the name of a directory"):
        check_tag(tag)


@pytest.mark.parametrize("tag", ["global_step1", "best model", "größe", "--", "manifest.json"])
def test_tags_of_the_users(saved: Path, tag: str) -> None:
    assert faults.save(saved, 3, tag) == saved / tag
    assert faults.load(saved) == faults.load(saved, tag) == 3
    assert (saved / "latest").read_text() == f"{tag}\n"


def test_what_is_no_checkpoint_is_not_replaced(saved: Path) -> None:
    (saved / "src").mkdir(parents=True)
    (saved / "src" / "work.py").write_text("x")
    (saved / "notes").write_text("y")
    for tag in ("src", "notes"):
        with pytest.raises(CheckpointError, match=f"{tag}' is there, and is no checkpoint"):
            faults.save(saved, 1, tag)
    assert (saved / "src" / "work.py").read_text() == "x" and (saved / "notes").read_text() == "y"
    (saved / "empty").mkdir()
    faults.save(saved, 1, "empty")
    assert faults.load(saved) == 1
    assert faults.hidden(saved) == []


# -------------------------------------------------------------------- latest


def test_latest_and_without(saved: Path) -> None:
    faults.save(saved, 5)
    faults.save(saved, 9, "of another time")
    faults.save(saved, 7)
    faults.save(saved, 11, save_latest=False)
    assert faults.load(saved) == 7
    (saved / "latest").unlink()
    assert faults.load(saved) == 11  # the most steps
    assert faults.load(saved / "global_step5") == 5  # a checkpoint itself


def test_none_and_others(saved: Path) -> None:
    for path in (saved, saved / "deeper"):
        with pytest.raises(NoCheckpoint, match=f"no checkpoint in '{path}'"):
            find(path)
        with pytest.raises(NoCheckpoint, match="checkpoint 'x' in '.*',? is not there"):
            find(path, "x")
    saved.mkdir()
    (saved / "something").mkdir()
    with pytest.raises(NoCheckpoint, match="no checkpoint in"):
        find(saved)
    faults.save(saved, 3)
    with pytest.raises(CheckpointError, match="'x'.*is not there. The newest complete .* is 'global_step3'") as caught:
        find(saved, "x")
    assert not isinstance(caught.value, NoCheckpoint)


def test_latest_names_what_is_gone(saved: Path) -> None:
    """Not as if there were nothing: a run that begins anew would be a loss."""
    faults.save(saved, 3)
    (saved / "global_step3" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="which the file 'latest' names, has no manifest") as caught:
        find(saved)
    assert not isinstance(caught.value, NoCheckpoint)
    shutil.rmtree(saved / "global_step3")
    with pytest.raises(CheckpointError, match="which the file 'latest' names, is not there") as caught:
        find(saved)
    assert not isinstance(caught.value, NoCheckpoint)


# -------------------------------------------------------------------- pruning


def steps(*numbers: int, **arguments: Any) -> list[tuple[int, str | None, dict[str, Any]]]:
    return [(step, None, arguments) for step in numbers]


USERS = ["best", "global_step", "global_step1b", "step1", "xglobal_step1"]
PRUNED: dict[str, tuple[Sequence[Any], set[str], int]] = {  # the saves, the tags that stay, and the step that is loaded
    "the last one": (steps(*range(1, 7), keep_last=1), {"global_step6"}, 6),
    "the last three": (steps(*range(1, 7), keep_last=3), {"global_step4", "global_step5", "global_step6"}, 6),
    "fewer": (steps(1, 2, keep_last=3), {"global_step1", "global_step2"}, 2),
    "tags of the users stay": (
        [(0, tag, {}) for tag in USERS] + steps(10, 11, 12, keep_last=1) + [(20, "mine", {"keep_last": 1})],
        {"global_step12", "mine", *USERS},
        20,
    ),
    "latest stays": (
        steps(1) + steps(2, 3, 4, 5, save_latest=False, keep_last=2),
        {"global_step1", "global_step4", "global_step5"},
        1,
    ),
    "after going back": (  # the last save counts, and not the number of its steps
        steps(80, 90, 100, 50, 60, keep_last=2), {"global_step50", "global_step60"}, 60,
    ),
    "after going back, without latest": (
        steps(50, 60) + steps(55, save_latest=False, keep_last=1), {"global_step55", "global_step60"}, 60,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PRUNED)
def test_keep_last(saved: Path, case: str) -> None:
    saves, stay, latest = PRUNED[case]
    for step, tag, arguments in saves:
        faults.save(saved, step, tag, **arguments)
    assert tags(saved) == stay and faults.load(saved) == latest and faults.hidden(saved) == []


def test_other_directories_are_left_alone(saved: Path) -> None:
    (saved / "global_step1").mkdir(parents=True)
    (saved / "global_step1" / "precious").touch()
    (saved / ".git").mkdir()
    for step in (2, 3):
        faults.save(saved, step, keep_last=1)
    assert (saved / "global_step1" / "precious").exists() and (saved / ".git").exists()


def test_what_cannot_be_removed_does_not_matter(
    saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults.save(saved, 1)

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(filesystem, "remove", lambda path: None if path.name.startswith(".latest") else refuse(path))
        faults.save(saved, 2, keep_last=1)
    assert "could not be removed: Operation not permitted" in caplog.text
    assert faults.load(saved) == 2
    faults.save(saved, 3, keep_last=1)
    assert tags(saved) == {"global_step3"} and faults.hidden(saved) == []


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


def test_file_systems_without_locks(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(directories.fcntl, "flock", none)
    faults.save(saved, 1)
    assert faults.load(saved) == 1


def fsync_failing(kind: int) -> Callable[[int], None]:
    """os.fsync, which fails for directories."""
    original = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(kind, os.strerror(kind))
        original(descriptor)

    return fsync


@pytest.mark.parametrize("kind", [errno.EINVAL, errno.ENOTSUP])
def test_file_systems_that_cannot_sync_directories(saved: Path, monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    monkeypatch.setattr(os, "fsync", fsync_failing(kind))
    faults.save(saved, 1)
    assert faults.load(saved) == 1


# -------------------------------------------------------------------- paths


def test_symlinks(saved: Path) -> None:
    """The directory, ``latest`` and a checkpoint may be symlinks."""
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
    faults.save(link, 2, keep_last=1)
    assert (saved / "target").read_text() == "untouched\n"
    assert faults.load(saved / "elsewhere") == 1
    assert tags(real) == {"global_step2"} and faults.load(link) == 2


def test_leftovers_that_are_links(saved: Path) -> None:
    """The link is removed, and not what it leads to."""
    (saved / "precious").mkdir(parents=True)
    (saved / "precious" / "file").touch()
    for name in (".incomplete-x", ".removed-x"):
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


def test_read_only(saved: Path) -> None:
    """Loading writes nothing."""
    faults.save(saved, 1)
    everything = sorted(saved.rglob("*"))
    for path in (*everything, saved):
        path.chmod(path.stat().st_mode & ~0o222)
    before = [(path, path.stat().st_mtime_ns) for path in (saved, *everything)]
    with faults.recorded() as operations:
        assert faults.load(saved) == 1
    assert operations == [] and before == [(path, path.stat().st_mtime_ns) for path in (saved, *everything)]
    saved.chmod(0o755)


def test_other_manifests_do_not_matter(saved: Path) -> None:
    faults.save(saved, 1)
    for number, text in enumerate(('{"global_steps": 1e999, "saved_at": ""}', "[" * 100_000, "[]", "", '{"a": 1}')):
        (saved / f"other{number}").mkdir()
        (saved / f"other{number}" / "manifest.json").write_text(text)
    (saved / "pipe").mkdir()
    os.mkfifo(saved / "pipe" / "manifest.json")
    assert [known.tag for known in complete_checkpoints(saved)] == ["global_step1"]
    faults.save(saved, 2, keep_last=1)
    (saved / "latest").unlink()
    assert faults.load(saved) == 2
