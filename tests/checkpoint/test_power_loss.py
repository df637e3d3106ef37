"""Power is lost, or the disk fails, at any system call of a save: the checkpoint before, or the new one, is there, and
the next save works."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import faults
from tests.checkpoint.block_layer import Change, Disk, Recorder, crashes, read_tree, write_tree
from tests.checkpoint.test_crashes import about_to_save
from tests.toolkit.compare import from_all_ranks
from tests.toolkit.pool import Pools
from zerolite.checkpoint import filesystem
from zerolite.checkpoint.directory import NoCheckpoint, TrainingRun, find
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.reader import CheckpointReader

Save = Callable[[Path], Any]


def save(step: int, *arguments: Any, **options: Any) -> Save:
    return lambda path: faults.save(path, step, *arguments, **options)


SCENARIOS: dict[str, tuple[Save, Save, set[int]]] = {
    # What is there, the save that comes to grief, and the steps of the checkpoints that may be found then (0: none).
    "first": (lambda path: None, save(3), {0, 3}),
    "second": (save(2), save(3), {2, 3}),
    "overwrite": (save(2, "best"), save(3, "best"), {2, 3}),
    "overwrite without latest": (save(2, "best", save_latest=False), save(3, "best", save_latest=False), {2, 3}),
    "after crashes": (lambda path: overwritten_halfway(path), save(3, "best"), {2, 3}),
}


def overwritten_halfway(save_dir: Path) -> None:
    """A save was killed while it replaced a checkpoint, and another before."""
    faults.save(save_dir, 1)
    faults.save(save_dir, 2, "best")
    os.rename(save_dir / "best", save_dir / ".replaced-best")
    shutil.copytree(save_dir / "global_step1", save_dir / ".incomplete-best-0123")


def found_in(save_dir: Path) -> int:
    try:
        return faults.load(save_dir)
    except NoCheckpoint:
        return 0


def check_next_save(save_dir: Path, found: int) -> None:
    """Another job resumes, if there is a checkpoint, and saves; what was there stays."""
    faults.save(save_dir, 4, run=faults.resumed(save_dir) if found else TrainingRun())
    assert faults.load(save_dir) == 4 and faults.hidden(save_dir) == []
    tags = [path.name for path in save_dir.iterdir() if (path / "manifest.json").exists()]
    assert not found or found in [faults.load(save_dir, tag) for tag in tags]


def recorded(root: Path, act: Callable[[Path], Any]) -> list[Change]:
    """Record the changes of ``act`` below ``root``, of which a copy, as it was, is left in ``root.before``."""
    before = root.with_suffix(".before")
    shutil.copytree(root, before, symlinks=True)
    with Recorder(root) as recorder:
        act(root / "saved")
    disk = Disk(before)
    for change in recorder.changes:
        disk.apply(change)
    assert disk.now == read_tree(root), "all changes were recorded"
    return recorder.changes


def check_crashes(
    root: Path, act: Callable[[Path], Any], allowed: set[int], new: int, most: int, saves: int, deep: bool = False
) -> int:
    """Power is lost after each system call of ``act``, which saves the step ``new``. Returns the number of states.

    Args:
        allowed: steps of the checkpoints that may be found.
        most: how many states are tried after each call.
        saves: the next save is tried in one of so many states.
        deep: power is lost in the next save too, in states in which the first has left something.
    """
    changes = recorded(root, act)
    after = root.with_suffix(".after")
    count = 0
    for done, tree in crashes(root.with_suffix(".before"), changes, most):
        write_tree(tree, after)
        found = found_in(after / "saved")
        assert found in allowed, changes[:done][-1:]
        assert done < len(changes) or found == new, "the save had returned"
        count += 1
        if deep and (after / "saved").exists() and faults.hidden(after / "saved"):
            run = faults.resumed(after / "saved") if found else TrainingRun()
            shutil.copytree(after, after.with_name("again"))
            count += check_crashes(after.with_name("again"), save(5, "best", run=run), {found, 5}, 5, 12, 4)
        if count % saves == 0:
            check_next_save(after / "saved", found)
        shutil.rmtree(after)
    for left in (root, root.with_suffix(".before")):
        shutil.rmtree(left)
    return count


def crash_scenario(ram: Path, scenario: str, **how: Any) -> int:
    prepare, act, allowed = SCENARIOS[scenario]
    (ram / "now").mkdir()
    prepare(ram / "now" / "saved")
    return check_crashes(ram / "now", act, allowed, 3, **how)


@pytest.mark.parametrize("scenario", ["first", "overwrite without latest"])
def test_power_loss_leaves_a_whole_checkpoint(ram: Path, scenario: str) -> None:
    assert crash_scenario(ram, scenario, most=12, saves=4) >= 30


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["overwrite", "after crashes"])
def test_power_loss_in_all_states(ram: Path, scenario: str) -> None:
    """Power is lost a second time in the next save."""
    assert crash_scenario(ram, scenario, most=10**6, saves=1, deep=True) >= 30


class LeavesOut:
    """The module ``os``, whose fsync does nothing for some files."""

    def __init__(self, skipped: Callable[[Path], bool]) -> None:
        self._skipped = skipped

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, descriptor: int) -> None:
        if not self._skipped(Path(os.readlink(f"/proc/self/fd/{descriptor}"))):
            os.fsync(descriptor)


SKIPPED: dict[str, Callable[[Path], bool]] = {
    "files": lambda path: path.is_file(),
    "latest": lambda path: path.name == ".latest.new",
    "the directory": lambda path: path.name == "saved",
    "the checkpoint's directory": lambda path: path.name.startswith(".incomplete"),
}


@pytest.mark.slow
@pytest.mark.parametrize("skipped", SKIPPED)
def test_a_missing_fsync_is_found(ram: Path, monkeypatch: pytest.MonkeyPatch, skipped: str) -> None:
    """The simulation loses what a file system may lose."""
    monkeypatch.setattr(filesystem, "os", LeavesOut(SKIPPED[skipped]))
    with pytest.raises((AssertionError, CheckpointError)) as caught:
        crash_scenario(ram, "overwrite", most=12, saves=100)
    assert "all changes were recorded" not in str(caught.value)


def recorded_save(root: Path, background: bool) -> list[tuple[int, Change]]:
    """The system calls of this rank in the second save, each with its time. ``root.before`` is what was there."""
    engine = about_to_save(root / "saved")
    if engine.rank == 0:
        shutil.copytree(root, root.with_suffix(".before"))
    from_all_ranks(None)
    with Recorder(root) as recorder:
        engine.save_checkpoint(root / "saved", async_save=background)
        engine.wait_for_checkpoint()
    from_all_ranks(None)
    return list(zip(recorder.times, recorder.changes, strict=True))


@pytest.mark.fast("sync")
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_power_loss_on_two_ranks(pools: Pools, ram: Path, background: bool) -> None:
    """Every rank's file is safe before the checkpoint gets its name."""
    ranks = pools(2).run(recorded_save, {"root": ram / "now", "background": background})
    changes = [change for _, change in sorted(itertools.chain(*ranks), key=lambda timed: timed[0])]
    written = {change[1].rpartition("/")[2] for change in changes if change[0] == "write"}
    assert {"rank_00000.safetensors", "rank_00001.safetensors"} <= written
    after = ram / "after"
    for done, tree in crashes(ram / "now.before", changes, most=20):
        write_tree(tree, after)
        reader = CheckpointReader(find(after / "saved"))
        assert list(reader.problems()) == []
        step = reader.manifest.global_steps
        assert step == 2 if done == len(changes) else step in (1, 2), changes[:done][-1:]
        shutil.rmtree(after)


def check_errors(ram: Path, scenario: str, kind: int, always: bool) -> int:
    """Each system call of a save fails in turn (``always``: so do all that follow, but removals), and then power is
    lost. Returns the number of calls."""
    prepare, act, allowed = SCENARIOS[scenario]
    for at in itertools.count():
        root, after = ram / f"{at}", ram / f"{at}.after"
        root.mkdir()
        prepare(root / "saved")
        disk = Disk(root)

        def before(number: int, name: str, path: str, at: int = at) -> None:
            if number == at or (always and number > at and name not in ("unlink", "rmdir")):
                raise OSError(kind, os.strerror(kind), path)

        said = None
        with Recorder(root, before) as recorder:
            try:
                act(root / "saved")
            except CheckpointError as error:
                said = str(error)
        if recorder.tried <= at:
            return at
        for change in recorder.changes:
            disk.apply(change)
        for tree in (*disk.crashes(6, random.Random(at)), read_tree(root)):
            write_tree(tree, after)
            found = found_in(after / "saved")
            assert found == 3 if said is None else found in allowed, (at, recorder.changes[-1:])
            shutil.rmtree(after)
        assert said is None or os.strerror(kind) in said or not always, said
        check_next_save(root / "saved", found)
        shutil.rmtree(root)
    raise AssertionError("not reached")


ONCE = [(name, errno.EIO, False) for name in SCENARIOS]


@pytest.mark.fast("first-*")
@pytest.mark.parametrize(
    ("scenario", "kind", "always"), [*ONCE, ("overwrite", errno.EIO, True), ("overwrite", errno.ENOSPC, True)]
)
def test_a_system_call_that_fails_leaves_a_whole_checkpoint(ram: Path, scenario: str, kind: int, always: bool) -> None:
    assert check_errors(ram, scenario, kind, always) >= 20
