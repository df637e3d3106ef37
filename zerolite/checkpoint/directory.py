"""A directory of checkpoints: which there are, how one comes to be, and which is the latest.

A checkpoint is a directory with a manifest. It is written under a name that begins with a dot, and renamed when it is
complete; then the file ``latest``, with its name, is replaced. A process that is killed at any point leaves the
checkpoints that were there, ``latest`` pointing to one of them, and at most directories with dots, which the next save
removes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zerolite.checkpoint import filesystem
from zerolite.checkpoint.errors import CheckpointError

MANIFEST = "manifest.json"
LATEST = "latest"
_INCOMPLETE, _REPLACED, _REMOVED = ".incomplete-", ".replaced-", ".removed-"
_DEFAULT_TAG = re.compile(r"global_step(\d+)")


def default_tag(global_steps: int) -> str:
    return f"global_step{global_steps}"


def check_tag(tag: object) -> str:
    """Raises ValueError for what cannot be the name of a checkpoint."""
    if not isinstance(tag, str) or not tag or tag != os.path.basename(tag) or tag.startswith(".") or tag == LATEST:
        raise ValueError(
            f"expected tag to be the name of a directory, without '/', not beginning with '.' and not '{LATEST}', got "
            f"{tag!r}"
        )
    return tag


@dataclass(frozen=True, order=True)
class Complete:
    """A complete checkpoint; the last in order is the newest."""

    global_steps: int
    saved_at: str
    tag: str


def complete_checkpoints(directory: Path) -> list[Complete]:
    """In order; [] if there is no such directory."""
    found = []
    try:
        entries = list(os.scandir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    for entry in entries:
        if not entry.name.startswith("."):
            known = _read_head(Path(entry.path))
            if known is not None:
                found.append(known)
    return sorted(found)


def _read_head(path: Path) -> Complete | None:
    """What the manifest in ``path`` says of itself; None without a readable one."""
    try:
        head = json.loads((path / MANIFEST).read_bytes())
        return Complete(int(head["global_steps"]), str(head["saved_at"]), path.name)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def newest_complete(directory: Path) -> str:
    """For messages: which checkpoint could be loaded instead."""
    found = complete_checkpoints(directory)
    return f"The newest complete checkpoint there is '{found[-1].tag}'" if found else "There is no complete one there"


class NoCheckpoint(CheckpointError, FileNotFoundError):
    """There is nothing where a checkpoint was looked for."""


def find(directory: Path, tag: str | None = None) -> Path:
    """The directory of the checkpoint ``tag`` in ``directory``; without a tag the one that ``latest`` names, or, if
    no such file is there, the newest complete one.

    Raises NoCheckpoint if there is no checkpoint at all, CheckpointError if there are others than the one asked for.
    """
    if tag is None and (directory / MANIFEST).is_file():
        return directory  # it is a checkpoint itself
    named = tag if tag is not None else _latest(directory)
    if named is None:
        found = complete_checkpoints(directory)
        if not found:
            raise NoCheckpoint(
                f"no checkpoint in '{directory}': expected a file '{LATEST}' or directories with a {MANIFEST}"
            )
        return directory / found[-1].tag
    for path in (directory / named, directory / f"{_REPLACED}{named}"):
        if (path / MANIFEST).is_file():
            return path
    says = "" if tag is not None else f", which the file '{LATEST}' names"
    state = "has no manifest, so it is not complete" if (directory / named).is_dir() else "is not there"
    kind = CheckpointError if complete_checkpoints(directory) else NoCheckpoint
    raise kind(f"checkpoint '{named}' in '{directory}'{says}, {state}. {newest_complete(directory)}")


def _latest(directory: Path) -> str | None:
    path = directory / LATEST
    try:
        text = path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    try:
        return check_tag(text)
    except ValueError:
        raise CheckpointError(
            f"'{path}': expected the name of a checkpoint, got {text[:80]!r}; pass tag=, or remove the file. "
            f"{newest_complete(directory)}"
        ) from None


# -------------------------------------------------------------------- saving


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """While a save into ``directory`` is under way. Raises CheckpointError if another process has one. File systems
    without locks go without. Called by one rank."""
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
        os.close(descriptor)


def begin(directory: Path, tag: str) -> Path:
    """A fresh directory in which the checkpoint ``tag`` is written. Removes what killed saves have left. Called by
    one rank, with the lock."""
    for path in sorted(directory.iterdir()):
        if path.name.startswith((_INCOMPLETE, _REMOVED)):
            filesystem.remove(path)
        elif path.name.startswith(_REPLACED):
            _settle(path, directory / path.name.removeprefix(_REPLACED))
    path = directory / f"{_INCOMPLETE}{tag}-{secrets.token_hex(4)}"
    filesystem.make_directory(path)
    return path


def _settle(replaced: Path, path: Path) -> None:
    """A checkpoint was being replaced by another of its name: the old one is back, or gone if the new one is there."""
    if (path / MANIFEST).is_file():
        filesystem.remove(replaced)
    else:
        filesystem.remove(path)
        filesystem.rename(replaced, path)


def commit(written: Path, tag: str) -> Path:
    """Give the complete checkpoint in ``written`` its name; one that has it is replaced. Called by one rank, with
    the lock."""
    path = written.parent / tag
    filesystem.sync_directory(written)
    if path.exists():
        replaced = written.parent / f"{_REPLACED}{tag}"
        filesystem.rename(path, replaced)
        filesystem.rename(written, path)
        filesystem.remove(replaced)
    else:
        filesystem.rename(written, path)
    return path


def set_latest(directory: Path, tag: str) -> None:
    """Called by one rank, with the lock."""
    filesystem.replace_file(directory / LATEST, f"{tag}\n".encode())


def prune(directory: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints of those with a default tag, and never the latest: tags of the
    user's own stay. Called by one rank, with the lock."""
    latest = _latest(directory)
    ours = [known.tag for known in complete_checkpoints(directory) if _DEFAULT_TAG.fullmatch(known.tag)]
    for tag in ours[: len(ours) - keep]:
        if tag != latest:
            removed = directory / f"{_REMOVED}{tag}"
            filesystem.rename(directory / tag, removed)
            filesystem.remove(removed)
