"""Writer of Hugging Face models: ``model.safetensors``, or shards with an index, tensor by tensor."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch

from zerolite.checkpoint import filesystem
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.filesystem import FileWriter
from zerolite.checkpoint.safetensors import ToStore, build_header, bytes_of
from zerolite.checkpoint.state import clean
from zerolite.utils.dtypes import FLOATS
from zerolite.utils.text import parse_size
from zerolite.zero.inner_tensors import weights_of

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NUMBERED = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_INCOMPLETE = ".incomplete"


def exported_dtype(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a tensor of dtype ``stored`` is written if ``dtype`` was asked for.

    Only floating tensors of 16 bits or more are cast.
    """
    return dtype if dtype is not None and stored in (*FLOATS, torch.float64) else stored


@dataclass(frozen=True)
class ModelFile:
    """A file to be written: its tensors, in their order in the file."""

    name: str
    entries: tuple[ToStore, ...]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def plan_files(
    entries: Iterable[ToStore], max_shard_size: str | int, aliases: Mapping[str, str], metadata: Mapping[str, str]
) -> list[ModelFile]:
    """Divide tensors, in the order given, into files of at most ``max_shard_size`` bytes, or of one larger tensor.

    Args:
        entries: the tensors.
        max_shard_size: bytes per file. Raises ValueError if it is invalid.
        aliases: other names of these tensors, with the name that is written. They go into the metadata of the file, as
            ``safetensors.torch.save_model`` does it.
        metadata: further metadata of every file (:func:`torchao_metadata`).
    """
    limit = parse_size(max_shard_size)
    shards: list[list[ToStore]] = [[]]
    filled = 0
    for entry in entries:
        if filled + entry.nbytes > limit and filled:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.nbytes
    others: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        others.setdefault(name, []).append(alias)
    count = len(shards)
    return [
        ModelFile(
            SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors",
            tuple(sorted(shard, key=lambda entry: -entry.dtype.itemsize)),  # so that every tensor is aligned
            {alias: entry.name for entry in shard for alias in others.get(entry.name, ())}
            | {**metadata, "format": "pt"},
        )
        for number, shard in enumerate(shards, start=1)
    ]


def torchao_descriptions(model: torch.nn.Module) -> dict[str, str]:
    """Return what torchao's safetensors files say of each quantized weight that consists of other tensors: its class
    and its attributes, in JSON, by name. Weights of classes that these files do not have are left out."""
    found: dict[str, str] = {}
    for name, weight in weights_of(model):
        try:
            from torchao.prototype.safetensors.safetensors_utils import (  # type: ignore[import-not-found]
                ALLOWED_TENSORS_SUBCLASSES,
                TensorSubclassAttributeJSONEncoder,
            )
        except ImportError:  # torchao 0.14 has other names
            break
        if type(weight).__name__ in ALLOWED_TENSORS_SUBCLASSES:
            found[clean(name)] = json.dumps(weight, cls=TensorSubclassAttributeJSONEncoder)
    return found


def torchao_metadata(names: Set[str], quantized: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata by which transformers and torchao put quantized weights together again; {} if no file needs
    it. transformers takes the list of names from one file, so every file has all of it.

    Args:
        names: of the tensors that are written.
        quantized: :func:`torchao_descriptions` of the model's weights.
    """
    found: dict[str, str] = {}
    inner: set[str] = set()
    for name, description in quantized.items():
        module, _, weight = name.rpartition(".")
        keys = {f"{module}._{weight}_{key}" for key in json.loads(description)["_tensor_data_names"]}
        if module and keys <= names:  # torchao reads no names without a dot
            found[name] = description
            inner |= keys
    if found:
        found |= dict.fromkeys((name for name in sorted(names - inner) if "." in name), '{"_type": "Tensor"}')
        found["tensor_names"] = json.dumps(list(found))
    return found


def write_model(directory: Path, files: Sequence[ModelFile], values: Iterator[torch.Tensor]) -> list[Path]:
    """Write the files of :func:`plan_files` into ``directory``, and return their paths.

    They replace the model that is there: the files of the plan, the index, and the files that an earlier index names.
    Other files stay. Until all are complete nothing in the directory changes, and after a failure nothing is left
    behind. A process that is killed leaves the earlier model, the new one, or none that looks complete.

    Args:
        values: yields the tensors of all files in their order, on any device. None is kept until the next one.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"expected '{directory}' to be a directory or not to exist, found a file")
    try:
        filesystem.make_directory(directory, exist_ok=True)
        _remove_incomplete(directory)
        for file in files:
            with FileWriter(_incomplete(directory / file.name)) as writer:
                writer.write(memoryview(build_header(file.entries, file.metadata)[0]))
                for entry in file.entries:
                    writer.write(_bytes_of(next(values), entry))
                writer.finish()
        _replace(directory, files)
    except OSError as error:
        where = error.filename or directory
        raise CheckpointError(f"'{where}' could not be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            _remove_incomplete(directory)
    return [directory / file.name for file in files]


def _bytes_of(value: torch.Tensor, entry: ToStore) -> memoryview:
    if value.dtype != entry.dtype or tuple(value.shape) != entry.shape:
        raise ValueError(
            f"tensor '{entry.name}': expected {entry.dtype} {entry.shape}, got {value.dtype} {tuple(value.shape)}"
        )
    return bytes_of(value)


def _replace(directory: Path, files: Sequence[ModelFile]) -> None:
    """Remove the earlier model, and rename the complete files to their names."""
    names, index = [file.name for file in files], directory / INDEX
    stale = [name for name in _named_by(index) if name not in names]
    if names != [SINGLE]:
        stale.append(SINGLE)  # readers prefer it to an index
    filesystem.remove(index)  # first: without an index no reader takes a mixture of old and new files
    for name in stale:
        filesystem.remove(directory / name)
    for name in names:
        filesystem.rename(_incomplete(directory / name), directory / name)
    if names != [SINGLE]:
        weight_map = {entry.name: file.name for file in files for entry in file.entries}
        total = sum(file.nbytes for file in files)
        body = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        filesystem.replace_file(index, (json.dumps(body, indent=2, ensure_ascii=False) + "\n").encode())


def _named_by(index: Path) -> list[str]:
    """Return the numbered files that an existing index names; [] if it cannot be read."""
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return sorted(name for name in names if isinstance(name, str) and _NUMBERED.fullmatch(name))


def _incomplete(path: Path) -> Path:
    return path.with_name(f".{path.name}{_INCOMPLETE}")


def _remove_incomplete(directory: Path) -> None:
    for path in sorted(directory.glob(f".model*.safetensors{_INCOMPLETE}")):
        filesystem.remove(path)
