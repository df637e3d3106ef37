"""Safe reader of DeepSpeed's ``torch.save`` files: no code of a file runs.

A pickle is a program that names functions and calls them. torch's ``weights_only`` reader calls only the few functions
that make tensors, and fails for all other names. Here DeepSpeed's names become a :class:`StubObject`, which stores the
attributes of an object and runs nothing.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from zerolite.checkpoint.errors import CheckpointError


class StubObject:
    """Replacement of an object of DeepSpeed's. ``fields``: its attributes, if they are all that it has."""

    fields: dict[str, Any]

    def __new__(cls, *_: Any) -> StubObject:
        self = object.__new__(cls)
        self.fields = {}
        return self

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: object) -> None:
        self.fields = state if isinstance(state, dict) else {}


def _stub_class(name: str) -> type[StubObject]:
    """Return a stub class with this full name. torch looks up the classes in a file by full name."""
    module, _, last = name.rpartition(".")
    return type(last, (StubObject,), {"__module__": module, "__qualname__": last})


def load_safely(path: Path) -> Any:
    """Load a file with its tensors on the CPU. The file is mapped and read when tensors are used, so it must stay.

    It is read to its end first, and compared with its own checksums.

    Raises:
        CheckpointError: the file cannot be read safely, or is damaged.
    """
    _verify_archive(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            names = [name for name in get_unsafe_globals_in_checkpoint(path) if name.startswith("deepspeed.")]
            with safe_globals([_stub_class(name) for name in names]):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        # torch wraps the reason in lines of advice about weights_only. The first line of the reason has the name.
        reason = str(error.__context__ or error).splitlines()[0].strip(" .")
        raise CheckpointError(
            f"'{path}' has more than plain data and tensors ({reason}), and zerolite runs no code from a file. If you "
            "trust it, load it with torch.load(weights_only=False), take out what is not plain, and torch.save it"
        ) from error
    except Exception as error:  # a damaged pickle can raise any exception
        raise CheckpointError(
            f"'{path}' is damaged: expected a file of torch.save, but reading it fails with {type(error).__name__}: "
            f"{(str(error) or 'no message').splitlines()[0]}"
        ) from error


def _verify_archive(path: Path) -> None:
    """Compare the file with its checksums: torch's own reader does not."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read: {error.strerror}") from error
    except (zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        raise CheckpointError(
            f"'{path}' is truncated or damaged, or a bare pickle (torch's format before 1.6): expected the zip archive "
            f"that torch.save writes, got {path.stat().st_size} bytes that are none ({error})"
        ) from error
    if damaged is not None:
        raise CheckpointError(
            f"'{path}' is damaged: its record '{damaged}' does not have the checksum that was written with it"
        )
