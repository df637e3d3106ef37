"""Harness of the benchmarks: the command line, competitors in processes of their own, rounds in turn, what is printed.

A benchmark states its question: which competitors, what one turn of a competitor is, and what becomes of the turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.model import ModelSize
from benchmarks.report import positive
from benchmarks.setting import Competitor
from benchmarks.workers import CompetitorFailed, Workers


class Contest:
    """The competitors that take part, what they measured, and why the others do not.

    A subclass makes the processes of a competitor (`make`), and may say what a turn is.

    Attributes:
        started: by competitor, the first reply of its processes.
        rounds: by competitor, what its turns gave.
        absent: by competitor, why it has no figures.
        failed: competitors that failed, in contrast to those that are not installed.
    """

    def __init__(self, args: argparse.Namespace, known: Mapping[str, Competitor]) -> None:
        self.args = args
        self.workers: dict[str, Workers] = {}
        self.started: dict[str, Any] = {}
        self.rounds: dict[str, list[Any]] = {name: [] for name in args.competitors}
        self.absent = {name: reason for name in self.rounds if (reason := known[name].missing())}
        self.failed: set[str] = set()
        self._directory = tempfile.TemporaryDirectory(prefix="zerolite-benchmark-")
        self._stores = 0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        for workers in self.workers.values():
            workers.close()
        self._directory.cleanup()

    def present(self) -> list[str]:
        return [name for name in self.rounds if name not in self.absent]

    def make(self, name: str, store: Path) -> Workers:
        """Start the processes of a competitor, which meet at the file `store`."""
        raise NotImplementedError

    def start(self, name: str) -> Workers:
        """Return the competitor's processes, which are started and warmed up if there are none."""
        if name not in self.workers:
            self._stores += 1
            self.workers[name] = self.make(name, Path(self._directory.name) / f"store-{self._stores}")
            self.started[name] = self.workers[name].start()
        return self.workers[name]

    def turn(self, name: str, flip: bool) -> Any:
        """Measure once; `flip` in every second round."""
        return self.start(name).run(self.args.steps)

    def run_round(self, number: int) -> None:
        """One turn for everyone; every second round runs in the opposite order."""
        flip = number % 2 == 1
        for name in self.present()[::-1] if flip else self.present():
            try:
                self.rounds[name].append(self.turn(name, flip))
            except CompetitorFailed as failure:
                print(f"{name} failed: {failure}\n{failure.details}", file=sys.stderr)
                self.absent[name] = "failed: " + " ".join(str(failure).split())
                self.failed.add(name)
                if name in self.workers:
                    self.workers.pop(name).close()
        print(f"round {number + 1} of {self.args.rounds} done", file=sys.stderr, flush=True)

    def run(self) -> None:
        for number in range(self.args.rounds):
            self.run_round(number)


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="OUT", help="write everything measured to this file")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    return parser


def pick(parser: argparse.ArgumentParser, option: str, text: str, known: Iterable[str]) -> list[str]:
    """Return the names of a comma-separated option, each of them known."""
    names, every = [name.strip() for name in text.split(",") if name.strip()], list(known)
    unknown = [name for name in names if name not in every]
    if unknown or not names:
        parser.error(f"{option}: expected names of {', '.join(every)}, got {', '.join(unknown) or 'none'}")
    return names


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


def machine() -> str:
    return f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}"


def publish(
    args: argparse.Namespace, description: str, texts: Sequence[str], disagreements: Sequence[str], **document: Any
) -> None:
    """Print what was found, and write it to the file that the command line names."""
    print("\n".join([description, *texts, *(f"LOSSES DISAGREE: {sentence}" for sentence in disagreements)]))
    write_json(args, setting=vars(args), description=description, disagreements=list(disagreements), **document)


def write_json(args: argparse.Namespace, **document: Any) -> None:
    if args.json:
        Path(args.json).write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")
