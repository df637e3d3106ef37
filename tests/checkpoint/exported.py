"""A checkpoint made without an engine, and the reader of exported models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint import faults
from zerolite.checkpoint.directory import TrainingRun
from zerolite.checkpoint.manifest import SavedGrid
from zerolite.checkpoint.storage import Commit, write_checkpoint
from zerolite.utils.dtypes import BY_CODE, CODES

Tensors = dict[str, torch.Tensor]

PARAMETERS: dict[str, dict[str, Any]] = {
    "embed.weight": faults.describe([11, 5], aliases=["head.weight", "again.weight"]),
    "gain": faults.describe([]),
    "empty": faults.describe([0, 3]),
    "frozen.weight": faults.describe([4, 4], trained=False),
    "norm.weight": faults.describe([5], "F32"),
}
BUFFERS: dict[str, Any] = {"norm.mean": torch.float32, "norm.calls": torch.int64, "frozen.wide": torch.float64}


def contents() -> Tensors:
    """Return the tensors of a checkpoint with :data:`PARAMETERS` and :data:`BUFFERS`, by its keys."""
    made = torch.Generator().manual_seed(3)
    tensors = {}
    for name, about in PARAMETERS.items():
        values = torch.randn(about["shape"], generator=made)
        tensors[f"parameters/{name}"] = values if about["trained"] else values.bfloat16()
    for name, dtype in BUFFERS.items():
        tensors[f"buffers/{name}"] = (torch.randn(3, generator=made) * 100).to(dtype)
    tensors["optimizer/exp_avg/embed.weight"] = torch.randn(11, 5, generator=made)
    return tensors


def make_checkpoint(path: Path, tensors: Tensors, parameters: dict[str, Any], buffers: Any = (), **about: Any) -> None:
    """A checkpoint as the ranks of a job would have written it, of which each has a half of every tensor."""
    stored = {name: tensors[f"buffers/{name}"] for name in buffers}
    of_buffers = {name: {"shape": list(t.shape), "dtype": CODES[t.dtype]} for name, t in stored.items()}
    facts: dict[str, Any] = {
        "saved_at": "2026-01-02T03:04:05.000000+00:00", "grid": SavedGrid(1, 2, 1), "stage": 3,
        "config": {"bf16": {"enabled": True}}, "versions": {"zerolite": "0.1", "torch": "2.13"},
    }  # fmt: skip
    described = faults.manifest(12, path.name, **facts, **about)
    shards = [shard for key, tensor in tensors.items() for shard in faults.shards_of(key, tensor, ranks=2)]
    state = {"parameters": parameters, "buffers": of_buffers, "optimizer": {}}
    write_checkpoint(path.parent, path.name, shards, {}, Commit(path.parent, described, state, TrainingRun()))


def read_file(path: Path) -> tuple[dict[str, str], Tensors]:
    """Metadata and tensors, all of which are aligned."""
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    metadata = header.pop("__metadata__")
    tensors: Tensors = {}
    for name, entry in header.items():
        dtype, low = BY_CODE[entry["dtype"]], start + entry["data_offsets"][0]
        assert low % dtype.itemsize == 0 and entry["data_offsets"][1] <= len(content) - start
        numel = math.prod(entry["shape"])
        flat = torch.frombuffer(content, dtype=dtype, count=numel, offset=low) if numel else torch.empty(0, dtype=dtype)
        tensors[name] = flat.view(entry["shape"]).clone()
    return metadata, tensors


def read_model(directory: Path) -> tuple[Tensors, dict[str, str]]:
    """Tensors and the aliases in the metadata, as readers find them: one file, or those of the index."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    tensors: Tensors = {}
    metadata: dict[str, str] = {}
    weight_map = {} if single.exists() else json.loads(index.read_bytes())["weight_map"]
    for path in [single] if single.exists() else sorted({directory / name for name in weight_map.values()}):
        of_file, found = read_file(path)
        assert of_file["format"] == "pt"
        assert not found.keys() & tensors.keys()
        assert single.exists() or all(weight_map[name] == path.name for name in found)
        tensors |= found
        metadata |= of_file
    assert single.exists() or tensors.keys() == weight_map.keys()
    del metadata["format"]
    return tensors, metadata
