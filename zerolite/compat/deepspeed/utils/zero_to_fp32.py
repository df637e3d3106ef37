"""``deepspeed.utils.zero_to_fp32``: fp32 weights of a checkpoint of this package or of DeepSpeed, in one process."""

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
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.export import export_checkpoint
from zerolite.checkpoint.reader import CheckpointReader
from zerolite.checkpoint.state import StoredModel
from zerolite.compat.deepspeed.runtime.checkpoints import is_from_deepspeed
from zerolite.compat.deepspeed_import import import_deepspeed


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Return the whole model's state dict on the CPU, master weights in fp32, tied weights shared under all their
    names.

    Args:
        tag: default the latest.
        lazy_mode: accepted; tensors are read at once.

    Raises CheckpointError.
    """
    with _found(Path(checkpoint_dir), tag) as path:
        return _state(path, exclude_frozen_parameters)


@contextlib.contextmanager
def _found(directory: Path, tag: str | None) -> Iterator[Path]:
    """Context with the directory of a checkpoint of this package; one of DeepSpeed is converted to a temporary one."""
    if not is_from_deepspeed(directory, tag):
        yield find(directory, tag)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield import_deepspeed(directory, Path(folder), tag)


def _state(path: Path, without_frozen: bool) -> dict[str, object]:
    reader = CheckpointReader(path)
    stored = reader.read_state(StoredModel)
    state: dict[str, Any] = {}
    for kind, entries in (("parameters", stored.parameters), ("buffers", stored.buffers)):
        for name, about in entries.items():
            key = f"{kind}/{name}"
            if kind == "parameters" and without_frozen and not about.trained:  # type: ignore[attr-defined]
                continue
            if key not in reader.tensors:
                raise CheckpointError(
                    f"'{path}' has no values of '{name}': it was saved with exclude_frozen_parameters=True; pass "
                    "exclude_frozen_parameters=True"
                )
            value = reader.read(key)
            value = value.float() if value.is_floating_point() else value
            state.update(dict.fromkeys((name, *about.aliases), value))
    return state


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
    """Write a checkpoint's fp32 weights.

    It writes one file ``pytorch_model.bin`` in the directory ``output_dir`` (or the file itself, if its name ends in
    .bin or .pt), or safetensors files of at most ``max_shard_size``.
    """
    directory, out = Path(checkpoint_dir), Path(output_dir)
    if safe_serialization:
        with _found(directory, tag) as path:
            export_checkpoint(path, out, torch.float32, max_shard_size, exclude_frozen_parameters)
        return
    state = get_fp32_state_dict_from_zero_checkpoint(directory, tag, exclude_frozen_parameters)
    file = out if out.suffix in (".bin", ".pt", ".pth") else out / "pytorch_model.bin"
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, file)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that ``save_checkpoint`` puts beside checkpoints."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32.py", description="Write the fp32 weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="the directory that has the file 'latest'")
    parser.add_argument("output_dir", help="a directory, or a file that ends in .bin or .pt")
    parser.add_argument("--max_shard_size", default="5GB", help="of one safetensors file")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="which checkpoint (default: the one that 'latest' names)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="write only what trains")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted, without effect")
    options = vars(parser.parse_args(argv))
    options.pop("debug")
    convert_zero_checkpoint_to_fp32_state_dict(**options)


if __name__ == "__main__":
    main()
