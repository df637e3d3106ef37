"""Launches of a step of zerolite at any number of ranks, by the planner's dry run, and the host's time for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import zerolite
from benchmarks.scale_peers import TOKENS, Message
from benchmarks.setting import CLIP
from benchmarks.shapes import Decoder, Shape, parameters_of
from benchmarks.tiny_layers import CollectiveClock, null_communicator
from zerolite.comm import use_communicator
from zerolite.config import load_config
from zerolite.planning.dry_run import Job, run
from zerolite.zero.layout import auto_bucket_numel

THINNEST = 128  # times narrower: where the host's time is measured, so that arithmetic takes little of it
TIMED_STEPS = 10
WARM_UP = 5  # stage 3 follows its plan from then on


def zerolite_config(stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": TOKENS[0],
        "zero_optimization": {"stage": stage, **zero},
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }


def run_zerolite(shape: Shape, ranks: int, stage: int) -> tuple[list[Message], int, int]:
    """Return the launches, the number of unaligned tensors, and of reads for which the host waits."""
    config = load_config(zerolite_config(stage)).resolve(ranks)
    batch = lambda: (torch.zeros(TOKENS, dtype=torch.long),)  # noqa: E731
    made = run(Job(lambda: Decoder(shape), config, ranks, batch=batch))
    kinds = {"parameters": "gather", "gradients": "reduction"}
    calls = [call for call in made.recorder.calls if call.ranks > 1]
    messages = [Message(kinds.get(call.tag, "other"), call.nbytes, 1 + (call.op == "all_reduce")) for call in calls]
    return messages, sum(call.unaligned for call in calls), made.fields["host_waits"]


def host_ms(shape: Shape, ranks: int, stage: int) -> float:
    """Return what the engine adds to forward and backward, its whole step included, in a model `THINNEST` times
    narrower, as one of so many ranks that send nothing."""
    thin = shape.thinner(THINNEST)
    scale = parameters_of(thin) / parameters_of(shape)
    clock = CollectiveClock(time.process_time)

    config = zerolite_config(stage, reduce_bucket_size=int(auto_bucket_numel(parameters_of(shape), ranks) * scale))
    config["consistency_check_interval"] = 0  # ranks that send nothing do not agree
    torch.set_num_threads(1)
    tokens = torch.zeros((1, 16), dtype=torch.long)
    plain = Decoder(thin).to(torch.bfloat16)
    with use_communicator(lambda rank, world: null_communicator(clock, ranks)):
        engine = zerolite.initialize(Decoder(thin), config)

    def plain_step() -> None:
        plain(tokens).backward()
        plain.zero_grad()

    def step() -> None:
        engine.backward(engine(tokens))
        engine.step()

    ours, theirs = [], []
    for number in range(WARM_UP + TIMED_STEPS):
        theirs.append(_seconds(plain_step))
        clock.seconds = 0.0
        ours.append(_seconds(step) - clock.seconds)
        if number + 1 == WARM_UP:
            ours.clear()
            theirs.clear()
    return 1e3 * (statistics.median(ours) - statistics.median(theirs))


def _seconds(call: Callable[[], None]) -> float:
    """Return the processor's time: other work may keep it from this one."""
    begin = time.process_time()
    call()
    return time.process_time() - begin
