"""`zerolite export`: a checkpoint as an ordinary safetensors model, on one process, tensor by tensor."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from zerolite.checkpoint.directory import find
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.huggingface import INDEX, exported_dtype, plan_files, torchao_metadata, write_model
from zerolite.checkpoint.reader import CheckpointReader
from zerolite.checkpoint.safetensors import ToStore
from zerolite.checkpoint.state import StoredModel
from zerolite.utils.dtypes import BY_CODE, DTYPES, is_quantized
from zerolite.utils.text import command_parser, size_argument

logger = logging.getLogger("zerolite")

DESCRIPTION = """\
Write the model in a checkpoint as safetensors files with an index, as Hugging Face's
from_pretrained and safetensors.torch read them. One process, no GPU; in memory is
the largest tensor at a time."""

EPILOG = """\
examples:
  zerolite export runs/a/checkpoints model          the latest one there
  zerolite export runs/a/checkpoints/global_step500 model --dtype bf16

Without --dtype each parameter has the dtype that it was trained in (rounded from its
master weights), and buffers have their own; with it every floating tensor has that one.
Tied weights are written once, under the first of their names."""


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    dtype: torch.dtype | None = None,
    max_shard_size: str | int = "5GB",
    exclude_frozen: bool = False,
) -> list[Path]:
    """Write the model in ``checkpoint`` (one, or the latest in a directory of several) into the directory ``out``, and
    return the files with tensors.

    Args:
        checkpoint: path of the checkpoint.
        out: directory to write into.
        dtype: of all floating tensors; None: the dtype in which each parameter was trained, and each buffer's own.
        max_shard_size: bytes per file, as a number or as in "5GB".
        exclude_frozen: write only trained parameters, and the buffers of modules that have some.

    Raises:
        CheckpointError: the checkpoint cannot be read or the files cannot be written.
        ValueError: the size is invalid.
    """
    reader = CheckpointReader(find(checkpoint))
    entries, aliases = reader.trust(lambda: _contents(reader, dtype, exclude_frozen))
    names, quantized = {entry.name for entry in entries.values()}, reader.read_state(StoredModel).quantized
    metadata = reader.trust(lambda: torchao_metadata(names, quantized))
    plan = plan_files(entries.values(), max_shard_size, aliases, metadata)
    keys = {entry.name: key for key, entry in entries.items()}
    return write_model(out, plan, (_read(reader, keys[entry.name], entry) for file in plan for entry in file.entries))


def read_model(checkpoint: Path, dtype: torch.dtype | None = None, exclude_frozen: bool = False) -> dict[str, Any]:
    """Return the tensors that :func:`export_checkpoint` writes, by all their names, and the buffers of all modules.

    Tied weights share memory.
    """
    reader = CheckpointReader(find(checkpoint))
    entries, aliases = reader.trust(lambda: _contents(reader, dtype, exclude_frozen, all_buffers=True))
    state = {entry.name: _read(reader, key, entry) for key, entry in entries.items()}
    return state | {alias: state[name] for alias, name in aliases.items()}


def _contents(
    reader: CheckpointReader, dtype: torch.dtype | None, exclude_frozen: bool, all_buffers: bool = False
) -> tuple[dict[str, ToStore], dict[str, str]]:
    """Return the tensors to be written by their key in the checkpoint, and other names -> the name that is written."""
    entries: dict[str, ToStore] = {}
    aliases: dict[str, str] = {}
    owners: set[str] = set()  # modules with a trained parameter
    state = reader.read_state(StoredModel)
    frozen = {name: BY_CODE[about.dtype] for name, about in state.parameters.items() if not about.trained}
    quantized = {name.rpartition(".")[0] for name, stored in frozen.items() if is_quantized(stored)}
    for name, about in state.parameters.items():
        if about.trained:
            owners.update(known.rpartition(".")[0] for known in (name, *about.aliases))
        elif exclude_frozen:
            continue
        key = f"parameters/{name}"
        if key not in reader.tensors:
            raise CheckpointError(
                f"the checkpoint '{reader.path}' has no values of the frozen parameter '{name}': it was saved with "
                "exclude_frozen_parameters=True. Pass --exclude-frozen-parameters to export what was trained."
            )
        module, _, last = name.rpartition(".")
        is_scale = name in frozen and module in quantized and last != "bias"  # a cast would change every weight
        written = BY_CODE[about.dtype] if is_scale else exported_dtype(BY_CODE[about.dtype], dtype)
        entries[key] = ToStore(name, written, tuple(reader.tensors[key].shape))
        aliases.update(dict.fromkeys(about.aliases, name))
    for name, buffer in state.buffers.items():
        if all_buffers or not exclude_frozen or name.rpartition(".")[0] in owners:
            stored = reader.tensors[f"buffers/{name}"]
            entries[f"buffers/{name}"] = ToStore(name, exported_dtype(stored.dtype, dtype), tuple(stored.shape))
            aliases.update(dict.fromkeys(buffer.aliases, name))
    return entries, aliases


def _read(reader: CheckpointReader, key: str, entry: ToStore) -> torch.Tensor:
    value = reader.read(key, entry.dtype)
    if entry.dtype is torch.float16 and reader.tensors[key].dtype is not torch.float16 and bool(value.isinf().any()):
        logger.warning(
            "export: '%s' has values beyond what fp16 holds (±65504), infinite in the export; use bf16 or fp32",
            entry.name,
        )
    return value


# -------------------------------------------------------------------- the command


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = command_parser(prog, DESCRIPTION, EPILOG)
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="a checkpoint, or a directory of checkpoints")
    parser.add_argument("out", metavar="OUT", type=Path, help="the directory to write into; made if it is not there")
    parser.add_argument("--dtype", choices=DTYPES, help="of all floating tensors (default: as trained)")
    parser.add_argument(
        "--max-shard-size",
        type=size_argument,
        default="5GB",
        metavar="SIZE",
        help="of one file (default: 5GB = 5 * 10**9 bytes)",
    )
    parser.add_argument(
        "--exclude-frozen-parameters", action="store_true", help="write only what trains, such as adapters"
    )
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "zerolite export") -> int:
    """Run the command. Returns 0, or 1 after a sentence on stderr."""
    options = build_parser(prog).parse_args(argv)
    try:
        files = export_checkpoint(
            options.checkpoint,
            options.out,
            DTYPES.get(options.dtype),
            options.max_shard_size,
            options.exclude_frozen_parameters,
        )
    except CheckpointError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    where = str(files[0]) if len(files) == 1 else f"{len(files)} files and {INDEX} in '{options.out}'"
    print(f"exported '{options.checkpoint}' to {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
