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
        arguments: arguments of the constructor or function.
        state: state that the pickle sets afterwards, or None.
    """

    name = ""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> StubObject:
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
        """Attributes of an ordinary object; an empty dict if the state is not a dict."""
        return self.state if isinstance(self.state, dict) else {}


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
    _check_archive(path)
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


def _check_archive(path: Path) -> None:
    try:
        size = path.stat().st_size
        if zipfile.is_zipfile(path):
            return
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read: {error.strerror}") from error
    # b"\x80" is the first opcode (PROTO) of every binary pickle.
    if start[:1] == b"\x80":
        raise CheckpointError(
            f"'{path}' is a bare pickle, torch's format before 1.6, and would need unpickling, which lets a file run "
            f"any command; zerolite does not do that. Load it with the program that wrote it, and save it again"
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
