"""``deepspeed.utils.zero_to_fp32``: fp32 weights of a checkpoint of zerolite, or of a universal one of DeepSpeed."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from zerolite.checkpoint.directory import find
from zerolite.checkpoint.export import export_checkpoint, read_model
from zerolite.compat.deepspeed.runtime.checkpoints import is_from_deepspeed
from zerolite.compat.deepspeed_import import import_deepspeed


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Return the full model's state dict on the CPU, with fp32 master weights. Tied weights share memory.

    Args:
        checkpoint_dir: directory of the checkpoints.
        tag: the checkpoint; default: the latest.
        exclude_frozen_parameters: leave out parameters that are not trained.
        lazy_mode: accepted and ignored: tensors are read at once.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
    """
    with _zerolite_checkpoint(Path(checkpoint_dir), tag) as path:
        return read_model(path, torch.float32, exclude_frozen_parameters)


@contextlib.contextmanager
def _zerolite_checkpoint(directory: Path, tag: str | None) -> Iterator[Path]:
    """Context with the directory of a zerolite checkpoint: the found one, or a temporary conversion of DeepSpeed's."""
    if not is_from_deepspeed(directory, tag):
        yield find(directory, tag)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield import_deepspeed(directory, Path(folder), tag)


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> torch.nn.Module:
    """Load a checkpoint's fp32 weights into an ordinary model on the CPU, and return it."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write a checkpoint's fp32 weights as one file ``pytorch_model.bin``, or as safetensors files.

    Args:
        checkpoint_dir: directory of the checkpoints.
        output_dir: directory to write into, or the file itself if its name ends in .bin, .pt or .pth.
        max_shard_size: largest size of a safetensors file.
        safe_serialization: write safetensors.
        tag: the checkpoint; default: the latest.
        exclude_frozen_parameters: leave out parameters that are not trained.
    """
    directory, out = Path(checkpoint_dir), Path(output_dir)
    if safe_serialization:
        with _zerolite_checkpoint(directory, tag) as path:
            export_checkpoint(path, out, torch.float32, max_shard_size, exclude_frozen_parameters)
        return
    state = get_fp32_state_dict_from_zero_checkpoint(directory, tag, exclude_frozen_parameters)
    file = out if out.suffix in (".bin", ".pt", ".pth") else out / "pytorch_model.bin"
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, file)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that ``save_checkpoint`` writes beside checkpoints."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32.py", description="Write the fp32 weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="the directory with the file 'latest'")
    parser.add_argument("output_dir", help="a directory, or a file that ends in .bin or .pt")
    parser.add_argument("--max_shard_size", default="5GB", help="largest size of a safetensors file")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="the checkpoint (default: the one that the file 'latest' names)")
    parser.add_argument(
        "--exclude_frozen_parameters", action="store_true", help="leave out parameters that are not trained"
    )
    parser.add_argument("-d", "--debug", action="store_true", help="accepted, without effect")
    options = vars(parser.parse_args(argv))
    options.pop("debug")
    convert_zero_checkpoint_to_fp32_state_dict(**options)


if __name__ == "__main__":
    main()
