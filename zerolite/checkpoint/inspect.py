"""`zerolite inspect`: list the contents of a checkpoint and check that it is complete."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerolite.checkpoint.directory import find
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.manifest import MANIFEST, SavedGrid
from zerolite.checkpoint.reader import CheckpointReader
from zerolite.utils.text import command_parser, format_size

DESCRIPTION = """\
Print what a checkpoint holds: step, world size, stage, precision, versions, parameters,
sizes and files. Every file must be there and have its size; --verify reads them all and
compares every checksum."""

EPILOG = """\
The exit status is 1, after a sentence for each file, if something is missing or damaged."""


def describe(reader: CheckpointReader) -> dict[str, Any]:
    """Return the manifest's contents as plain data, with "bytes" by kind of tensor and "files" with their bytes.

    Raises CheckpointError if the index is damaged.
    """
    about = asdict(reader.manifest.about)
    config, layout = about.pop("config"), about.pop("layout")
    sizes: dict[str, dict[str, int]] = {}
    for key, tensor in reader.tensors.items():
        kind = "/".join(key.split("/")[: 2 if key.startswith("optimizer/") else 1])
        of_kind = sizes.setdefault(kind, {"tensors": 0, "elements": 0, "bytes": 0})
        of_kind["tensors"] += 1
        of_kind["elements"] += tensor.numel
        of_kind["bytes"] += tensor.nbytes
    return {
        "path": str(reader.path),
        **about,
        "bytes": reader.manifest.nbytes,
        "tensors": dict(sorted(sizes.items())),
        "files": {name: entry.bytes for name, entry in sorted(reader.manifest.files.items())},
        "layout": layout,
        "config": config,
    }


def find_problems(reader: CheckpointReader, verify: bool) -> list[str]:
    """Return a sentence for each damaged or missing file.

    Args:
        reader: the checkpoint.
        verify: read every byte, and not only the sizes.
    """
    if verify:
        return [str(problem) for _, problem in reader.verify() if problem is not None]
    try:
        reader.check_sizes()
    except CheckpointError as error:
        return [str(error)]
    return []


def render(described: dict[str, Any]) -> str:
    """Format the description as aligned text, without layout and config."""
    lines = [f"checkpoint   {described['path']}"]
    for label, value in (
        ("saved", f"{described['saved_at']}, at step {described['global_steps']}"),
        ("ranks", f"{_ranks(described)}, stage {described['stage']}"),
        ("precision", _listed(described["precision"])),
        ("versions", _listed(described["versions"])),
        ("parameters", _listed(described["parameters"])),
        ("run", described["run"]),
        ("frozen", "left out" if described["exclude_frozen_parameters"] else ""),
        ("size", format_size(described["bytes"])),
    ):
        if value:
            lines.append(f"{label:<12} {value}")
    lines += ["", f"{'tensors':<28}{'count':>8}{'elements':>18}{'size':>12}"]
    for kind, size in described["tensors"].items():
        lines.append(f"  {kind:<26}{size['tensors']:>8}{size['elements']:>18,}{format_size(size['bytes']):>12}")
    lines += ["", f"{'files':<54}{'size':>12}"]
    lines += [f"  {name:<52}{format_size(nbytes):>12}" for name, nbytes in described["files"].items()]
    return "\n".join(lines)


def _ranks(described: dict[str, Any]) -> str:
    grid = SavedGrid(**described["layout"]["grid"]) if "grid" in described["layout"] else None
    more = f" ({grid})" if grid is not None and grid.data != described["world_size"] else ""
    return f"{described['world_size']}{more}"


def _listed(values: dict[str, object]) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {f'{value:,}' if isinstance(value, int) else value}"
        for name, value in values.items()
    )


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = command_parser(prog, DESCRIPTION, EPILOG)
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="a checkpoint, or a directory of checkpoints")
    parser.add_argument("--verify", action="store_true", help="read every file and compare its checksums")
    parser.add_argument("--json", action="store_true", help="print JSON, with layout and config")
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "zerolite inspect") -> int:
    """Run the command. Returns 0, or 1 after sentences on stderr."""
    options = build_parser(prog).parse_args(argv)
    described: dict[str, Any] = {}
    problems: list[str] = []
    try:
        reader = CheckpointReader(find(options.checkpoint))
        problems += find_problems(reader, options.verify)
        described = describe(reader)
    except CheckpointError as error:
        problems.append(str(error))
    if options.json:
        print(
            json.dumps(
                described | {"problems": problems} | ({"verified": not problems} if options.verify else {}), indent=1
            )
        )
    elif described:
        print(render(described))
        if options.verify and not problems:
            print(f"\nevery byte of {len(described['files'])} files and of {MANIFEST} is as it was saved")
    for problem in dict.fromkeys(problems):
        print(f"{prog}: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
