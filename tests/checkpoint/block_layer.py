"""A simulated disk that loses power: the system calls of a save are recorded, and every prefix of them is turned into
states that a file system may be in after a crash.

What has been synced is there: a file's content after its fsync, a directory's names after the directory's. The rest may
or may not be. Changes of one directory happen in their order, but independently of those of other directories. A file's
bytes may be there or not, by halves, or as zeros where only its length has been written.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CALLS = ("open", "close", "write", "writev", "ftruncate", "fsync", "mkdir", "rename", "unlink", "rmdir")
Change = tuple[Any, ...]  # the name of a call, the path, and what else it takes


class Recorder:
    """Records, while it is entered, what this process changes below ``root``. Before each change ``before`` is called
    with its number, name and path, and may raise."""

    def __init__(self, root: Path, before: Callable[[int, str, str], None] = lambda number, name, path: None) -> None:
        self.changes: list[Change] = []
        self.times: list[int] = []
        self._root = os.path.realpath(root) + "/"
        self._before = before
        self._paths: dict[int, str] = {}  # of open descriptors
        self._places: dict[int, int] = {}
        self.tried = 0
        self._lock = threading.RLock()
        self._real = {name: getattr(os, name) for name in CALLS}

    def __enter__(self) -> Recorder:
        for name in CALLS:
            setattr(os, name, getattr(self, f"_{name}", functools.partial(self._at, name)))
        return self

    def __exit__(self, *error: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    @contextlib.contextmanager
    def _change(self, *change: Any) -> Iterator[None]:
        """Around the call; it is recorded if it succeeds. change: as recorded, if the path is below the root."""
        if change[1] is None:
            yield
            return
        with self._lock:
            self.tried += 1
            self._before(self.tried - 1, change[0], change[1])
            yield
            self.changes.append(change)
            self.times.append(time.monotonic_ns())

    def _below(self, path: Any, dir_fd: int | None) -> str | None:
        """Relative to the root; None if it is elsewhere."""
        if isinstance(path, int):
            return self._paths.get(path)
        if dir_fd is not None:
            directory = self._paths.get(dir_fd)
            return None if directory is None else os.path.normpath(os.path.join(directory, os.fspath(path)))
        absolute = os.path.abspath(os.fspath(path))
        return absolute[len(self._root) :] or "." if f"{absolute}/".startswith(self._root) else None

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        below = self._below(path, dir_fd)
        new = below is not None and flags & os.O_CREAT and not os.path.lexists(os.path.join(self._root, below))
        with self._change("create", below if new else None):
            descriptor: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        if below is not None:
            self._paths[descriptor], self._places[descriptor] = below, 0
        return descriptor

    def _close(self, descriptor: int) -> None:
        self._paths.pop(descriptor, None)
        self._real["close"](descriptor)

    def _write(self, descriptor: int, data: Any) -> int:
        return self._writev(descriptor, [data])

    def _writev(self, descriptor: int, views: Any) -> int:
        path = self._paths.get(descriptor)
        if path is None:
            return self._real["writev"](descriptor, views)
        content = b"".join(views)
        with self._change("write", path, self._places[descriptor], content):
            written: int = self._real["writev"](descriptor, views)
            assert written == len(content)
        self._places[descriptor] += written
        return written

    def _ftruncate(self, descriptor: int, size: int) -> None:
        with self._change("truncate", self._paths.get(descriptor), size):
            self._real["ftruncate"](descriptor, size)

    def _rename(self, source: Any, target: Any, **where: Any) -> None:
        with self._change("rename", self._below(source, None), self._below(target, None)):
            self._real["rename"](source, target, **where)

    def _at(self, name: str, path: Any, *arguments: Any, **where: Any) -> None:
        with self._change(name, self._below(path, where.get("dir_fd"))):
            self._real[name](path, *arguments, **where)


@dataclass(eq=False)
class File:
    """synced: the content at the last fsync. now: the content that processes see."""

    synced: bytes = b""
    now: bytes = b""

    @property
    def outcomes(self) -> list[bytes]:
        """The contents that may be there after a crash: nothing of what has not been synced, all of it, its length
        alone, and others."""
        if self.synced == self.now:
            return [self.now]
        old = self.synced.ljust(len(self.now), b"\0")[: len(self.now)]
        half = len(self.now) // 2
        torn = [old, self.now[:half] + old[half:], old[:half] + self.now[half:], self.now[:half], b""]
        return list(dict.fromkeys([self.synced, self.now, *torn]))


Names = dict[str, "File | Directory"]


@dataclass(eq=False)
class Directory:
    """outcomes: the names at the last fsync, and after each change since."""

    outcomes: list[Names] = field(default_factory=lambda: [{}])

    @property
    def now(self) -> Names:
        return self.outcomes[-1]

    def change(self, removed: str | None = None, **added: File | Directory) -> None:
        self.outcomes.append({name: node for name, node in self.now.items() if name != removed} | added)


class Disk:
    """The directory ``root``, all of which is synced."""

    def __init__(self, root: Path) -> None:
        self._root = _synced(read_tree(root))

    def _find(self, path: str) -> Any:
        node: Any = self._root
        for name in Path(path).parts:
            node = node.now[name]
        return node

    def _parent(self, path: str) -> tuple[Directory, str]:
        return self._find(os.path.dirname(path)), os.path.basename(path)

    def apply(self, change: Change) -> None:
        name, path, *rest = change
        if name in ("write", "truncate", "fsync"):
            node = self._find(path)
            if name == "fsync" and isinstance(node, Directory):
                node.outcomes = [node.now]
            elif name == "fsync":
                node.synced = node.now
            elif name == "truncate":
                node.now = node.now[: rest[0]].ljust(rest[0], b"\0")
            else:
                start, data = rest
                node.now = node.now[:start].ljust(start, b"\0") + data + node.now[start + len(data) :]
            return
        parent, base = self._parent(path)
        if name == "rename":
            target, new = self._parent(rest[0])
            assert parent is target, "renames between directories are not simulated"
            parent.change(base, **{new: parent.now[base]})
        elif name in ("create", "mkdir"):
            parent.change(**{base: File() if name == "create" else Directory()})
        else:
            parent.change(base)

    def crashes(self, most: int, choose: random.Random) -> Iterator[Tree]:
        """Yield at most ``most`` of the trees that may be there after a crash. First those in which all, or nothing,
        of one kind has been written, or one thing has been written alone, or is missing alone; then others by chance.
        """
        dirty = [node for node in _below(self._root) if len(node.outcomes) > 1]
        outcomes = [node.outcomes for node in dirty]
        names = [len(node.outcomes) - 1 if isinstance(node, Directory) else 0 for node in dirty]
        everything = [index or 1 for index in names]
        corners = [[0] * len(dirty), everything, names, *([index or torn for index in names] for torn in (2, 3))]
        for at in range(len(dirty)):
            corners.append([index if at == i else 0 for i, index in enumerate(everything)])
            corners.append([index if at != i else 0 for i, index in enumerate(everything)])
        total = math.prod(map(len, outcomes))
        if total <= most:
            picks: Iterator[Sequence[int]] = itertools.product(*(range(len(possible)) for possible in outcomes))
        else:
            by_chance = ([choose.randrange(len(possible)) for possible in outcomes] for _ in range(most))
            picks = itertools.islice(itertools.chain(corners, by_chance), most)
        for pick in picks:
            chosen = {id(n): o[min(i, len(o) - 1)] for n, o, i in zip(dirty, outcomes, pick, strict=True)}
            yield _tree(self._root, chosen)

    @property
    def now(self) -> Tree:
        """Files as processes see them."""
        return _tree(self._root, {id(node): node.now for node in _below(self._root)})


def _synced(tree: Tree) -> Directory:
    def node(inner: Any) -> File | Directory:
        return File(inner, inner) if isinstance(inner, bytes) else _synced(inner)

    return Directory([{name: node(inner) for name, inner in tree.items()}])


Tree = dict[str, Any]
"""What is in a directory, by name: bytes, or again a tree."""


def _below(node: File | Directory) -> Iterator[File | Directory]:
    """Yield ``node`` and all that any of its outcomes holds; some of it more than once."""
    yield node
    inner = {id(one): one for names in node.outcomes for one in names.values()} if isinstance(node, Directory) else {}
    for one in inner.values():
        yield from _below(one)


def _tree(node: Directory, chosen: dict[int, Any]) -> Tree:
    """chosen: outcomes of nodes; of all others the first one."""

    def value(one: File | Directory) -> Any:
        return _tree(one, chosen) if isinstance(one, Directory) else chosen.get(id(one), one.outcomes[0])

    return {name: value(one) for name, one in chosen.get(id(node), node.outcomes[0]).items()}


def write_tree(tree: Tree, path: Path) -> None:
    path.mkdir()
    for name, content in tree.items():
        if isinstance(content, bytes):
            (path / name).write_bytes(content)
        else:
            write_tree(content, path / name)


def read_tree(path: Path) -> Tree:
    return {inner.name: read_tree(inner) if inner.is_dir() else inner.read_bytes() for inner in path.iterdir()}


def crashes(before: Path, changes: Sequence[Change], most: int, seed: int = 0) -> Iterator[tuple[int, Tree]]:
    """Different trees that may be there if power is lost after each number of ``changes``, with that number.

    Args:
        before: directory that the changes were made to, as it was.
        most: how many for each number.
    """
    disk, choose = Disk(before), random.Random(seed)
    seen: set[str] = set()
    for done in range(len(changes) + 1):
        if done:
            disk.apply(changes[done - 1])
        if done == len(changes):
            seen.clear()  # what is there at the end is looked at as such
        for tree in disk.crashes(most, choose):
            digest = hashlib.sha1(repr(tree).encode()).hexdigest()
            if digest not in seen:
                seen.add(digest)
                yield done, tree
