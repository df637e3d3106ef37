"""Safe reader of ``torch.save`` files: classes of other programs are read as data and no code runs.

A pickle is a program: it names functions and has them called. torch's ``weights_only`` reader calls none but the few
that make tensors, and fails at every other name. Here each other name stands for an :class:`Inert`: a class of ours
that keeps what it is given and does nothing. So an enumeration's member or a scaler's fields can be looked at, and a
command hidden in the file is a value like any other.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.serialization import (
    add_safe_globals,
    clear_safe_globals,
    get_safe_globals,
    get_unsafe_globals_in_checkpoint,
    safe_globals,
)

from zerolite.checkpoint.errors import CheckpointError


class Inert:
    """Stand-in for an object of a class, or the result of a function, that is not called.

    Args:
        arguments: what it would have been called with.
        state: what it would have been given afterwards, or None.
    """

    name = ""  # "module.class" of what it stands for

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Inert:
        self = object.__new__(cls)
        self.arguments, self.state = arguments, None
        return self

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        raise pickle.UnpicklingError(f"it has items of a {self.name}")

    def __repr__(self) -> str:
        return f"<an object of {self.name}>"

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes of an ordinary object; {} of others."""
        return self.state if isinstance(self.state, dict) else {}


def _stand_in(name: str) -> type[Inert]:
    """A class under the given full name: torch finds the classes that a file may use by theirs."""
    module, _, last = name.rpartition(".")
    return type(last, (Inert,), {"__module__": module, "__qualname__": last, "name": name})


@contextlib.contextmanager
def _nothing_declared_safe() -> Iterator[None]:
    """Ignore what other code of this process has told torch to unpickle, and torch itself for its distributed tensors.
    Not for several threads at a time: the declarations are the process's."""
    declared = get_safe_globals()
    clear_safe_globals()
    try:
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(declared)


def load_inert(path: Path, verify: bool = False) -> Any:
    """Load a file, with tensors on the CPU and mapped: their bytes are read when they are used, and the file must stay.
    Objects of classes other than torch's and plain ones are :class:`Inert`. verify: read the file to its end first, and
    compare it with its own checksums.

    Raises CheckpointError for a file that cannot be read in this way.
    """
    _check_archive(path)
    if verify:
        _verify_archive(path)
    try:
        with warnings.catch_warnings(), _nothing_declared_safe():
            warnings.simplefilter("ignore")
            with safe_globals([_stand_in(name) for name in get_unsafe_globals_in_checkpoint(path)]):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = str(error.__context__ or error).splitlines()[0].strip(" .")  # torch wraps it in much advice
        raise CheckpointError(
            f"'{path}' would need unpickling, which lets a file run any command, and zerolite does not do that "
            f"({reason}). Load it with the program that wrote it, and save it again with nothing in it but plain data "
            f"and tensors."
        ) from error
    except Exception as error:  # a damaged program fails in any way
        raise CheckpointError(
            f"'{path}' is damaged: expected a file of torch.save, but reading it fails with {type(error).__name__}: "
            f"{(str(error) or 'no message').splitlines()[0]}"
        ) from error


def _check_archive(path: Path) -> None:
    try:
        size = path.stat().st_size
        if zipfile.is_zipfile(path):
            return
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read: {error.strerror}") from error
    if start[:1] == b"\x80":
        raise CheckpointError(
            f"'{path}' is a bare pickle, torch's format before 1.6, and would need unpickling, which lets a file run "
            f"any command; zerolite does not do that. Load it with the program that wrote it, and save it again."
        )
    raise CheckpointError(
        f"'{path}' is truncated or damaged: expected the zip archive that torch.save writes, got {size} bytes without "
        f"the end of one"
    )


def _verify_archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, zlib.error, RuntimeError, NotImplementedError) as error:
        raise CheckpointError(f"'{path}' is damaged: {error}") from error
    if damaged is not None:
        raise CheckpointError(
            f"'{path}' is damaged: its record '{damaged}' does not have the checksum that was written with it"
        )
