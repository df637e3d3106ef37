"""Safe reader of ``torch.save`` files: objects of other programs are read as data, and no code of the file runs.

A pickle is a program that names functions and calls them. torch's ``weights_only`` reader calls only the few functions
that make tensors, and fails for all other names. Here every other name becomes a :class:`StubObject`, which stores its
arguments and runs nothing. So the fields of an unknown object can be read, and a command hidden in the file is only a
value.
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


class StubObject:
    """Replacement of an object without importing its class, or of a result without calling its function.

    Attributes:
        name: "module.class" of the object.
        fields: attributes of an ordinary object; an empty dict if it has another state.
    """

    name = ""

    fields: dict[str, Any]

    def __new__(cls, *_: Any) -> StubObject:
        self = object.__new__(cls)
        self.fields = {}
        return self

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: object) -> None:
        self.fields = state if isinstance(state, dict) else {}

    def __setitem__(self, key: object, value: object) -> None:
        raise pickle.UnpicklingError(f"it has items of a {self.name}")


def _stub_class(name: str) -> type[StubObject]:
    """Return a stub class with this full name. torch looks up the classes in a file by full name."""
    module, _, last = name.rpartition(".")
    return type(last, (StubObject,), {"__module__": module, "__qualname__": last, "name": name})


@contextlib.contextmanager
def _nothing_declared_safe() -> Iterator[None]:
    """Context without the classes that other code, or torch for its distributed tensors, has declared safe.

    The declarations belong to the process, so only one thread at a time may use it.
    """
    declared = get_safe_globals()
    clear_safe_globals()
    try:
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(declared)


def load_safely(path: Path) -> Any:
    """Load a file with its tensors on the CPU. The file is mapped and read when tensors are used, so it must stay.

    It is read to its end first, and compared with its own checksums. Objects become :class:`StubObject`, except those
    of torch and of Python's basic types.

    Raises:
        CheckpointError: the file cannot be read safely, or is damaged.
    """
    _verify_archive(path)
    try:
        with warnings.catch_warnings(), _nothing_declared_safe():
            warnings.simplefilter("ignore")
            with safe_globals([_stub_class(name) for name in get_unsafe_globals_in_checkpoint(path)]):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        # torch wraps the reason in lines of advice about weights_only. The first line of the reason has the name.
        reason = str(error.__context__ or error).splitlines()[0].strip(" .")
        raise CheckpointError(
            f"'{path}' would need unpickling, which lets a file run any command, and zerolite does not do that "
            f"({reason}). Load it with the program that wrote it, and save only plain data and tensors"
        ) from error
    except Exception as error:  # a damaged pickle can raise any exception
        raise CheckpointError(
            f"'{path}' is damaged: expected a file of torch.save, but reading it fails with {type(error).__name__}: "
            f"{(str(error) or 'no message').splitlines()[0]}"
        ) from error


def _verify_archive(path: Path) -> None:
    damaged = None
    try:
        size, is_archive = path.stat().st_size, zipfile.is_zipfile(path)
        if is_archive:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, zlib.error, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is damaged, {error}"
        raise CheckpointError(f"'{path}' cannot be read: {reason}") from error
    if not is_archive:
        raise CheckpointError(
            f"'{path}' is truncated or damaged, or a bare pickle (torch's format before 1.6): expected the zip archive "
            f"that torch.save writes, got {size} bytes without the end of one"
        )
    if damaged is not None:
        raise CheckpointError(
            f"'{path}' is damaged: its record '{damaged}' does not have the checksum that was written with it"
        )
