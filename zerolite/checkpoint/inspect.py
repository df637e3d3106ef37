"""`zerolite inspect`: list the contents of a checkpoint and check that it is complete."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from zerolite.checkpoint.directory import find
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.manifest import MANIFEST, StoredTensor
from zerolite.checkpoint.reader import CheckpointReader
from zerolite.utils.text import command_parser, format_size

DESCRIPTION = """\
Print what a checkpoint holds: step, world size, stage, versions, tensors, sizes and
files. Every file must be there and have its size; --verify reads them all and
compares every checksum."""

EPILOG = """\
The exit status is 1, after a sentence for each file, if something is missing or damaged."""


def render(reader: CheckpointReader) -> str:
    """Format the manifest, without the config, and the sizes of tensors and files as aligned text.

    Raises CheckpointError if the index is damaged.
    """
    manifest = reader.manifest
    ranks = f"{manifest.grid.ranks}" + (f" ({manifest.grid})" if manifest.grid.data != manifest.grid.ranks else "")
    lines = [f"checkpoint   {reader.path}"]
    for label, value in (
        ("saved", f"{manifest.saved_at}, at step {manifest.global_steps}"),
        ("ranks", f"{ranks}, stage {manifest.stage}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
        ("run", manifest.run),
        ("frozen", "left out" if manifest.exclude_frozen_parameters else ""),
        ("size", format_size(manifest.nbytes)),
    ):
        if value:
            lines.append(f"{label:<12} {value}")
    kinds: dict[str, list[StoredTensor]] = {}
    for key, tensor in reader.tensors.items():
        kinds.setdefault("/".join(key.split("/")[: 2 if key.startswith("optimizer/") else 1]), []).append(tensor)
    lines += ["", f"{'tensors':<28}{'count':>8}{'elements':>18}{'size':>12}"]
    for section, tensors in sorted(kinds.items()):
        elements, size = (sum(numbers) for numbers in zip(*((t.numel, t.nbytes) for t in tensors), strict=True))
        lines.append(f"  {section:<26}{len(tensors):>8}{elements:>18,}{format_size(size):>12}")
    lines += ["", f"{'files':<54}{'size':>12}"]
    lines += [f"  {name:<52}{format_size(entry.bytes):>12}" for name, entry in sorted(manifest.files.items())]
    return "\n".join(lines)


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = command_parser(prog, DESCRIPTION, EPILOG)
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="a checkpoint, or a directory of checkpoints")
    parser.add_argument("--verify", action="store_true", help="read every file and compare its checksums")
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "zerolite inspect") -> int:
    """Run the command. Returns 0, or 1 after sentences on stderr."""
    options = build_parser(prog).parse_args(argv)
    problems: list[str] = []
    try:
        reader = CheckpointReader(find(options.checkpoint))
        problems += map(str, reader.problems(sizes_only=not options.verify))
        print(render(reader))
        if options.verify and not problems:
            print(f"\nevery byte of {len(reader.manifest.files)} files and of {MANIFEST} is as it was saved")
    except CheckpointError as error:
        problems.append(str(error))
    for problem in dict.fromkeys(problems):
        print(f"{prog}: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
