"""Harness of the benchmarks: competitors in processes of their own or in this one, rounds in turn, the results.

A benchmark states its question: which competitors, what one turn of a competitor is, and what becomes of the turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.setting import Competitor
from benchmarks.workers import CompetitorFailed, Workers

Result = TypeVar("Result")


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

    def run(self) -> None:
        """Let all take their turns; every second round runs in the opposite order."""
        for number in range(self.args.rounds):
            flip = number % 2 == 1
            for name in self.present()[::-1] if flip else self.present():
                try:
                    self.rounds[name].append(self.turn(name, flip))
                except CompetitorFailed as failure:
                    self._drop(name, failure)
            print(f"round {number + 1} of {self.args.rounds} done", file=sys.stderr, flush=True)

    def _drop(self, name: str, failure: CompetitorFailed) -> None:
        print(f"{name} failed: {failure}\n{failure.details}", file=sys.stderr)
        self.absent[name] = "failed: " + " ".join(str(failure).split())
        self.failed.add(name)
        if name in self.workers:
            self.workers.pop(name).close()


def in_turns(calls: Mapping[str, Callable[[], Result]], rounds: int) -> dict[str, list[Result]]:
    """Call each once in every round, in this process; every second round runs in the opposite order."""
    found: dict[str, list[Result]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls)[::-1] if number % 2 == 1 else calls:
            found[name].append(calls[name]())
    return found


def machine() -> str:
    return f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}"


def publish(
    args: argparse.Namespace, description: str, texts: Sequence[str], disagreements: Sequence[str] = (), **document: Any
) -> None:
    """Print what was found, and write it to the file that the command line names."""
    print("\n".join([description, *texts, *(f"LOSSES DISAGREE: {sentence}" for sentence in disagreements)]))
    if args.json:
        document = {"setting": vars(args), "description": description, "disagreements": disagreements, **document}
        Path(args.json).write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")
