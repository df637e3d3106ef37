"""Cost that the watchdog adds to a step of the main thread: notes of collectives and of waits.

    python benchmarks/watchdog.py
    python benchmarks/watchdog.py --layers 400 --rounds 500

A note cannot be switched off, so it is timed by itself: a launch of a collective that sends nothing, and a wait for one
that has ended, each beside the same code without the note, in turn; the least of many short rounds, since whatever else
runs on the machine only adds. A step has as many of each as
rank 0 of 64 counts in a stack of tiny layers (see tiny_layers.py), with the default units and with a unit per module,
the most that there can be. The watchdog's own thread is not in it: it looks a few times in `desync_timeout_s`.
"""

from __future__ import annotations

import argparse
import math
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import zerolite
from benchmarks.null_communicator import NullCommunicator
from benchmarks.options import positive
from benchmarks.tiny_layers import FAKE_WORLD, MODULES, build_stack, loss_of, make_inputs
from zerolite import comm
from zerolite.comm import recorder
from zerolite.comm.flight_recorder import wait_for

CALLS = 2_000  # of what is timed, in a round
OWN_UNITS = {"stage3_param_persistence_threshold": 0, **MODULES}
ENTRY = ("reduce_scatter", "gradients", 1024, torch.float32, 1)


class _Ended:
    def wait(self) -> None:
        """Nothing to wait for."""


class _Without(NullCommunicator):
    """Notes nothing but what a recorder asks for."""

    def _note(self, op: str, tensor: torch.Tensor, tag: str, key: int = 0) -> None:
        if self._launch_hook is not None:
            self._launch_hook(op)
        if self.world_size == 1:
            return
        if recorder.active:
            recorder.note(op, tensor, tag)


def collectives_of_a_step(layers: int, zero: dict[str, Any]) -> int:
    """Launches of one step at stage 3, once its schedule is known."""
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, **zero},
        "consistency_check_interval": 0,  # a pretended rank says nothing of its numbers
    }
    with comm.use_communicator(lambda rank, world: NullCommunicator(0, FAKE_WORLD)):
        engine = zerolite.initialize(build_stack(layers), config)
    for x in make_inputs(4):
        with comm.record() as recorded:
            engine.backward(loss_of(engine(x)))
            engine.step()
    return recorded.count()


def seconds_of_notes(rounds: int) -> tuple[float, float]:
    """(a launch, a wait): what the note adds, in seconds."""
    tensor, works = torch.empty(1024), [_Ended()]
    noted, plain = NullCommunicator(0, FAKE_WORLD), _Without(0, FAKE_WORLD)

    def bare() -> None:
        for work in works:
            work.wait()

    timed: list[Callable[[], object]] = [
        lambda: noted.all_reduce(tensor, "gradients", FAKE_WORLD, 1),
        lambda: plain.all_reduce(tensor, "gradients", FAKE_WORLD, 1),
        lambda: wait_for(list(works), ENTRY),
        bare,
    ]
    least = [math.inf] * len(timed)
    for _ in range(rounds):
        for index, call in enumerate(timed):
            least[index] = min(least[index], timeit.timeit(call, number=CALLS) / CALLS)
    return least[0] - least[1], least[2] - least[3]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=positive, default=100)
    parser.add_argument("--rounds", type=positive, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    launch, wait = seconds_of_notes(options.rounds)
    print(f"a launch {launch * 1e6:.3f} us, a wait {wait * 1e6:.3f} us")
    for name, zero in {
        "default units": {"stage3_param_persistence_threshold": 0},
        "a unit per module": OWN_UNITS,
    }.items():
        count = collectives_of_a_step(options.layers, zero)
        print(f"{options.layers} layers, {name}: {count} collectives a step, {count * (launch + wait) * 1e6:.1f} us")
    zerolite.destroy()
    return 0


if __name__ == "__main__":
    sys.exit(main())
