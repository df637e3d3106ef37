"""The corpus: files as bytes, split by file into training and validation text, and the crops that a model trains on."""

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Left out of directories: what others installed, and tests. Where the standard library has its tests they are two
# thirds of it, but many installations come without them, and the corpus should not differ so much between machines.
SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
VALIDATION_SHARE = 0.1  # of the files


class DataError(ValueError):
    """The corpus cannot be used; the message says what to do."""


@dataclass(frozen=True)
class Corpus:
    """Two texts, each a one-dimensional uint8 tensor, and the number of files that each is made of."""

    train: Tensor
    validation: Tensor
    train_files: int
    validation_files: int


def load_corpus(paths: Iterable[str | Path] = ()) -> Corpus:
    """Read the given files and directories, or the source of Python's standard library if there are none.

    A directory gives the files below it, in sorted order, hidden ones and `SKIPPED_DIRECTORIES` left out. Which side a
    file is on follows from its path relative to the directory given, so it is the same everywhere; a single file is cut
    at nine tenths. Raises DataError if a path cannot be read or a side would be empty.
    """
    paths = [Path(path) for path in paths]
    files = _standard_library() if not paths else [file for path in paths for file in _files_at(path)]
    texts = [(name, text) for name, text in ((name, _read(file)) for name, file in files) if text]
    where = ", ".join(map(str, paths)) or "Python's standard library"
    if not texts:
        raise DataError(f"expected text to train on, but every file in {where} is empty or there is none; check --data")
    if len(texts) == 1:
        text = texts[0][1]
        cut = int(len(text) * (1 - VALIDATION_SHARE))
        train, validation = [text[:cut]], [text[cut:]]
    else:
        train = [text for name, text in texts if not _is_for_validation(name)]
        validation = [text for name, text in texts if _is_for_validation(name)]
    if not any(train) or not any(validation):
        raise DataError(
            f"expected text for training and for validation, but the split by file left one side empty: {len(texts)} "
            f"files in {where}; give more files with --data, or a single one, which is cut in two"
        )
    return Corpus(_as_tensor(train), _as_tensor(validation), len(train), len(validation))


def random_crops(text: Tensor, context: int, first: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Crops number `first` to `first + count - 1` of an endless stream: two int64 tensors [count, context], the bytes
    and the bytes that follow them.

    Where crop number i starts follows from the seed and i alone. Ranks that take different numbers share no randomness,
    and the crops of a step are the same whatever the number of ranks that divide them among themselves.
    """
    starts = len(text) - context
    return crops_at(text, context, [_hash(f"{seed}/{number}") % starts for number in range(first, first + count)])


def evenly_spaced(text: Tensor, context: int, count: int) -> list[int]:
    """Starts of `count` crops from the beginning of the text to its end."""
    last = len(text) - context - 1
    return [number * last // max(1, count - 1) for number in range(count)]


def crops_at(text: Tensor, context: int, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The crops that start there: int64 [len(starts), context], the bytes and the bytes that follow them."""
    crops = text[torch.tensor(starts)[:, None] + torch.arange(context + 1)].long()
    return crops[:, :-1], crops[:, 1:]


def check_length(corpus: Corpus, context: int) -> None:
    """Raises DataError if a side of the corpus is too short for one crop."""
    for side, text in (("training", corpus.train), ("validation", corpus.validation)):
        if len(text) <= context:
            raise DataError(
                f"expected at least {context + 1} bytes of {side} text, one more than --context, but there are "
                f"{len(text)}; give more with --data"
            )


def _standard_library() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [(name, file) for name, file in _files_at(root) if file.suffix == ".py"]
    if not files:
        raise DataError(
            f"expected the source of Python's standard library in {root}, but found no .py file; use --data"
        )
    return files


def _files_at(path: Path) -> list[tuple[str, Path]]:
    """Pairs of the name that decides the split and the file."""
    if path.is_file():
        return [(path.name, path)]
    if not path.is_dir():
        raise DataError(f"expected a file or a directory of text, but there is none at {path}; check --data")
    below = sorted((file.relative_to(path).as_posix(), file) for file in path.rglob("*") if file.is_file())
    return [(name, file) for name, file in below if not _is_skipped(name)]


def _is_skipped(name: str) -> bool:
    return any(part in SKIPPED_DIRECTORIES or part.startswith(".") for part in name.split("/"))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(
            f"expected a readable file, but {file} cannot be read: {error.strerror}; check --data"
        ) from None


def _is_for_validation(name: str) -> bool:
    return _hash(name) < VALIDATION_SHARE * 2**64


def _hash(text: str) -> int:
    """64 well-mixed bits, the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(text), digest_size=8).digest(), "big")


def _as_tensor(texts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
