"""`zerolite import-deepspeed`: convert a universal checkpoint of DeepSpeed, in one process on the CPU.

It needs no DeepSpeed and runs no code from the files. They are mapped, so a tensor is read when it is written.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from zerolite.checkpoint import json_codec
from zerolite.checkpoint.directory import MANIFEST, TrainingRun, check_tag
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.flat_ranges import Shard
from zerolite.checkpoint.manifest import Manifest, SavedGrid, library_versions
from zerolite.checkpoint.storage import Commit, now, write_checkpoint
from zerolite.compat.deepspeed_universal import UniversalReader, find_checkpoint
from zerolite.utils.text import command_parser

DESCRIPTION = """\
Convert a universal checkpoint of DeepSpeed to one of zerolite, with its optimizer
states. No code from the files is run; one that needs it is refused."""

EPILOG = """\
OUT becomes a directory of checkpoints for engine.load_checkpoint."""


def import_deepspeed(directory: Path, out: Path, tag: str | None = None) -> Path:
    """Convert a universal checkpoint of DeepSpeed into the directory of checkpoints ``out``, under the same tag.

    Args:
        directory: directory of DeepSpeed's checkpoints, or the checkpoint itself.
        out: directory to write into.
        tag: the checkpoint; default: the one that ``latest_universal`` names.

    Returns:
        Directory of the new checkpoint.

    Raises:
        CheckpointError: the checkpoint cannot be imported, or ``out`` contains something else with that name.
    """
    source = find_checkpoint(directory, tag)
    try:
        check_tag(source.name)
    except ValueError as error:
        raise CheckpointError(f"'{source}' cannot be imported under its name: {error}") from error
    path = out / source.name
    if path.exists() and not (path / MANIFEST).is_file():
        raise CheckpointError(f"'{path}' is there already, and is no checkpoint of zerolite; choose another directory")
    imported = UniversalReader(source)
    tensors: list[torch.Tensor] = []
    scalars = imported.state["optimizer"].pop("scalars")
    try:
        state = {key: json_codec.encode(value, key, tensors) for key, value in imported.state.items()}
    except TypeError as error:
        raise CheckpointError(f"'{source}' was not imported: {error}") from error
    of_client = [Shard.whole(f"client_state/{index}", tensor) for index, tensor in enumerate(tensors)]
    parameters = imported.state["parameters"].values()
    manifest = Manifest(
        tag=source.name,
        saved_at=now(),
        global_steps=imported.state["counters"]["global_steps"],
        grid=SavedGrid(1, imported.world_size, 1),
        stage=imported.stage,
        config=imported.config,
        versions={**library_versions(), "deepspeed": imported.deepspeed_version},
        # DeepSpeed does not record if it has left out frozen parameters. Assume so if there are none with elements.
        exclude_frozen_parameters=all(entry["trained"] or not math.prod(entry["shape"]) for entry in parameters),
    )
    try:
        # The manifest of an imported checkpoint names no run, so every job may replace it.
        commit = Commit(out, manifest, state, TrainingRun())
        return write_checkpoint(out, source.name, imported.tensors + of_client, scalars, commit)
    except CheckpointError as error:
        raise CheckpointError(f"'{source}' was not imported: {error}") from error


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = command_parser(prog, DESCRIPTION, EPILOG)
    parser.add_argument("directory", metavar="DIR", type=Path, help="the directory of DeepSpeed's checkpoints")
    parser.add_argument("out", metavar="OUT", type=Path, help="the directory to write into; it is made if necessary")
    parser.add_argument("--tag", help="the checkpoint in DIR (default: the one that 'latest_universal' names)")
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "zerolite import-deepspeed") -> int:
    """Run the command. Return 0, or 1 after a message on stderr."""
    options = build_parser(prog).parse_args(argv)
    try:
        path = import_deepspeed(options.directory, options.out, options.tag)
    except CheckpointError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    print(f"imported '{options.directory}' to '{path}'")
    return 0


if __name__ == "__main__":
    sys.exit(main())
