"""Directory of checkpoints: list, begin, commit, the file `latest`, and whose run a checkpoint is of.

A checkpoint is a directory with a manifest. It is written under a name that begins with a dot, and renamed when it is
complete. Then the file ``latest``, which contains its name, is replaced. So a process may be killed at any point: all
earlier checkpoints stay, and ``latest`` points to one of them. Directories with dots may be left, which the next save
removes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zerolite.checkpoint import filesystem
from zerolite.checkpoint.errors import CheckpointError, NoCheckpoint

logger = logging.getLogger("zerolite")
MANIFEST = "manifest.json"
LATEST = "latest"
_INCOMPLETE, _REPLACED = ".incomplete-", ".replaced-"
MOST_JSON_BYTES = 1 << 30  # limit of a manifest, which has 8 bytes for each MiB of the checkpoint
_MOST_LATEST_BYTES = 4096
_JOB_ID_VARIABLE = "ZEROLITE_JOB_ID"  # the launcher's: the same on all nodes, then "-" and the node


def default_tag(global_steps: int) -> str:
    return f"global_step{global_steps}"


def check_tag(tag: object) -> str:
    """Return the tag. Raises ValueError if it cannot be the name of a checkpoint."""
    one_name = isinstance(tag, str) and tag == os.path.basename(tag).strip() and tag.isprintable()
    if not isinstance(tag, str) or not one_name or not tag or tag.startswith(".") or tag == LATEST:
        raise ValueError(
            f"expected tag to be the name of a directory, without '/', not beginning with '.' and not '{LATEST}', got "
            f"{tag!r}"
        )
    return tag


@dataclass(frozen=True, order=True)
class CompleteCheckpoint:
    """A complete checkpoint; the last in order is the newest. ``run`` is "" if it does not name its run."""

    global_steps: int
    saved_at: str
    tag: str
    run: str = ""


def complete_checkpoints(directory: Path) -> list[CompleteCheckpoint]:
    """List the complete checkpoints in order; [] if there is no such directory."""
    try:
        candidates = _candidates(directory)
    except OSError:
        return []
    heads = (_read_head(path, tag) for tag, path in candidates.items())
    return sorted(head for head in heads if head is not None)


def _candidates(directory: Path) -> dict[str, Path]:
    """Return the directories that have a manifest, by tag.

    If one is being replaced and the new one is not there yet, it is the old one.
    """
    names = sorted(entry.name for entry in os.scandir(directory))
    paths = {name.removeprefix(_REPLACED): directory / name for name in names if name.startswith(_REPLACED)}
    paths = {tag: path for tag, path in paths.items() if _has_manifest(path)}
    for name in names:
        if not name.startswith(".") and _has_manifest(directory / name):
            paths[name] = directory / name
    return paths


def _has_manifest(path: Path) -> bool:
    return os.path.lexists(path / MANIFEST)


def _read_head(path: Path, tag: str) -> CompleteCheckpoint | None:
    """Read the head of the manifest in ``path``; None if it is not readable."""
    try:
        head = json.loads(filesystem.read_file(path / MANIFEST, MOST_JSON_BYTES))
        return CompleteCheckpoint(int(head["global_steps"]), str(head["saved_at"]), tag, str(head.get("run", "")))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def newest_complete(directory: Path, besides: str | None = None) -> str:
    """Return a sentence that names the newest complete checkpoint, ``besides`` one."""
    which = "complete" if besides is None else "other"
    tags = [known.tag for known in complete_checkpoints(directory) if known.tag != besides]
    return f"The newest {which} checkpoint there is '{tags[-1]}'" if tags else f"There is no {which} checkpoint there"


def find(directory: Path, tag: str | None = None) -> Path:
    """Return the directory of a checkpoint in ``directory``: of ``tag``, or of ``latest``, or of the newest complete
    one.

    Raises:
        NoCheckpoint: there is no checkpoint at all.
        CheckpointError: there are only other checkpoints, none is readable, or ``latest`` names one that does not
            exist.
    """
    try:
        return _find(directory, tag)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"'{error.filename}' cannot be read: {error.strerror}") from error


def _find(directory: Path, tag: str | None) -> Path:
    if tag is None and (directory / MANIFEST).is_file():
        return directory  # it is a checkpoint itself
    named = tag if tag is not None else _latest(directory)
    if named is None:
        candidates = _candidates(directory) if directory.exists() else {}
        complete = complete_checkpoints(directory)
        if complete:
            return candidates[complete[-1].tag]
        if candidates:
            raise CheckpointError(f"no checkpoint in '{directory}' can be read: the {MANIFEST} of each is damaged")
        raise NoCheckpoint(
            f"no checkpoint in '{directory}': expected a file '{LATEST}' or directories with a {MANIFEST}"
        )
    for path in (directory / named, directory / f"{_REPLACED}{named}"):
        if _has_manifest(path):
            return path
    says = "" if tag is not None else f", which the file '{LATEST}' names,"
    state = "has no manifest, so it is not complete" if (directory / named).is_dir() else "is not there"
    error_type = CheckpointError if tag is None or complete_checkpoints(directory) else NoCheckpoint
    raise error_type(f"checkpoint '{named}' in '{directory}'{says} {state}. {newest_complete(directory)}")


def _latest(directory: Path) -> str | None:
    path = directory / LATEST
    try:
        text = filesystem.read_file(path, _MOST_LATEST_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    try:
        return check_tag(text)
    except ValueError:
        raise CheckpointError(
            f"'{path}': expected the name of a checkpoint, got {text[:80]!r}; pass tag=, or remove the file. "
            f"{newest_complete(directory)}"
        ) from None


# -------------------------------------------------------------------- runs


class TrainingRun:
    """The run of one job: a save never replaces a checkpoint of another run, whose id its manifest names.

    A run is one training, of one or more jobs: a job that loads a checkpoint completely continues its run. Only the
    rank that commits uses it, so ranks cannot disagree on it.
    """

    def __init__(self, run_id: str = "") -> None:
        """
        Args:
            run_id: default: a random one.
        """
        self.id = run_id or secrets.token_hex(16)
        self._earlier = {""}  # runs that this one continues; imported checkpoints name none

    def resume(self, run: str) -> None:
        """Continue the run of a loaded checkpoint, which may name none ("")."""
        self._earlier.add(self.id)
        self.id = run or self.id

    def owns(self, known: CompleteCheckpoint) -> bool:
        """Return True if a save of this job may replace a checkpoint."""
        return known.run == self.id or known.run in self._earlier


@functools.cache
def run_of_this_job() -> TrainingRun:
    """Return the run of this process, which all its engines share."""
    return TrainingRun(os.environ.get(_JOB_ID_VARIABLE, "").partition("-")[0])


# -------------------------------------------------------------------- saving


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Context of a save into ``directory``, which locks it. Called by one rank.

    Raises CheckpointError if another process holds the lock. On file systems without locks it does nothing.
    """
    filesystem.make_directory(directory, exist_ok=True)
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
                raise CheckpointError(
                    f"another job is saving into '{directory}' at this moment; give each job, and each engine, a "
                    "directory of its own"
                ) from None
        yield
    finally:
        with contextlib.suppress(OSError):
            # Unlock explicitly: a process that was forked meanwhile has the descriptor too, and would keep the lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def begin(directory: Path, tag: str, run: TrainingRun | None) -> Path:
    """Make a fresh directory for the checkpoint ``tag``. Called by one rank, with the lock.

    It removes the remains of killed saves.

    Args:
        run: run of the job; None may replace the checkpoints of all runs.

    Raises:
        CheckpointError: something that is not a checkpoint has the name, or a checkpoint that the job does not own.
    """
    path = _candidates(directory).get(tag)
    known = None if path is None else _read_head(path, tag)
    if known is not None and run is not None and not run.owns(known):
        raise CheckpointError(
            f"this save would replace checkpoint '{tag}' (step {known.global_steps}, saved at {known.saved_at}), which "
            f"is of another run ('{known.run}'). To continue that run, call engine.load_checkpoint on that directory "
            "before the first save; to begin anew, save into another directory, remove the checkpoints, or set "
            '"checkpoint": {"overwrite": true}; to keep both, pass another tag'
        )
    for path in sorted(directory.iterdir()):
        if path.name.startswith(_INCOMPLETE) or path.name == f".{LATEST}.new":
            filesystem.remove(path)
        elif path.name.startswith(_REPLACED):
            _settle(path, directory / path.name.removeprefix(_REPLACED))
    named = directory / tag
    if os.path.lexists(named) and not _has_manifest(named) and not (named.is_dir() and not any(named.iterdir())):
        raise CheckpointError(
            f"'{named}' is there, and is no checkpoint: it has no {MANIFEST}. Move it away, or save under another tag"
        )
    path = directory / f"{_INCOMPLETE}{tag}-{secrets.token_hex(4)}"
    filesystem.make_directory(path)
    return path


def _settle(replaced: Path, path: Path) -> None:
    """Finish a replacement that was interrupted: restore the old checkpoint, or remove it if the new one is there."""
    if _has_manifest(path) or not _has_manifest(replaced):
        filesystem.remove(replaced)
    elif not os.path.lexists(path):
        filesystem.rename(replaced, path)


def commit(written: Path, tag: str) -> Path:
    """Rename the complete checkpoint in ``written`` to its tag; it replaces one of that name. Called by one rank, with
    the lock."""
    path = written.parent / tag
    # The files' names must be on the disk before the directory gets its final name. Otherwise a checkpoint with that
    # name could lack files after a power failure.
    filesystem.sync_directory(written)
    if not _has_manifest(path):
        filesystem.rename(written, path)
        return path
    # A directory cannot replace another in one step: move the old one aside, so that it is found until the new one is
    # there.
    replaced = written.parent / f"{_REPLACED}{tag}"
    try:
        filesystem.rename(path, replaced)
        filesystem.rename(written, path)
    except OSError:
        with contextlib.suppress(OSError):  # the first rename may have been the one that failed
            filesystem.rename(replaced, path)
        raise
    try:
        filesystem.remove(replaced)
    except OSError as error:  # it does no harm until the next save removes it
        logger.warning("'%s' could not be removed: %s", replaced, error.strerror)
    return path


def set_latest(directory: Path, tag: str) -> None:
    """Write the file `latest`. Called by one rank, with the lock."""
    filesystem.replace_file(directory / LATEST, f"{tag}\n".encode())
