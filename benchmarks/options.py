"""Options that the commands of several benchmarks have."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from benchmarks.model import ModelSize


def positive(text: str) -> int:
    """Parse a number of the command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return value


def positives(text: str) -> list[int]:
    """Parse numbers separated by commas."""
    return [positive(part) for part in text.split(",")]


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="OUT", help="write everything measured to this file")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    return parser


def add_choice(parser: argparse.ArgumentParser, option: str, known: Iterable[str], default: Iterable[str] = ()) -> None:
    """Add an option that takes names, separated by commas, of those in `known`; by default all of them."""
    every = list(known)

    def names(text: str) -> list[str]:
        found = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in found if name not in every]
        if unknown or not found:
            got = ", ".join(unknown) or "none"
            raise argparse.ArgumentTypeError(f"expected names of {', '.join(every)}, got {got}")
        return found

    text = ",".join(default or every)
    about = f"comma-separated, of: {', '.join(every)} (default: {text})"
    parser.add_argument(option, type=names, default=text, help=about)


def add_model(parser: argparse.ArgumentParser, default: ModelSize | type[ModelSize] = ModelSize) -> None:
    """Add the options for the size of the model and of a step."""
    parser.add_argument("--nproc", type=positive, default=2, help="ranks")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="compute dtype; masters are fp32")
    for name in ("layers", "width", "heads", "vocab", "context"):
        parser.add_argument(f"--{name}", type=positive, default=getattr(default, name))


def model_size(args: argparse.Namespace, parser: argparse.ArgumentParser | None = None) -> ModelSize:
    """Return the size that the options of `add_model` say; a mistake ends the program."""
    if parser is not None and args.width % args.heads:
        parser.error(f"--width must be a multiple of --heads, got {args.width} and {args.heads}")
    return ModelSize(args.layers, args.width, args.heads, args.vocab, args.context)
