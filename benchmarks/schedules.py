"""Pipeline schedules of `bubble.py`: their theory, and a pipeline of sleeping layers by PyTorch and by zerolite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.timeline import Diary, Sleeper

WIDTH = 64


@dataclass(frozen=True)
class Schedule:
    """torch_name: of torch.distributed.pipelining. chunks: parts of the model on a rank. split: gradients of weights
    are computed apart. bubble(p, v): idle time, in units of the time that a forward of a whole rank takes, where the
    two halves of a backward take as long each."""

    torch_name: str
    chunks: int
    split: bool
    bubble: Callable[[int, int], float] | None

    def theory(self, stages: int, micro_batches: int) -> float | None:
        if self.bubble is None:
            return None
        bubble = self.bubble(stages, self.chunks)
        return bubble / (3 * micro_batches + bubble)


# Narayanan et al. 2021, section 2.2: (p - 1)(t_f + t_b), over v where each rank has v parts. Qi et al. 2023, "Zero
# Bubble Pipeline Parallelism", of ZB-H1: (p - 1)(t_f + t_b - t_w), here over v too.
SCHEDULES = {
    "gpipe": Schedule("ScheduleGPipe", 1, False, lambda p, v: 3 * (p - 1)),
    "1f1b": Schedule("Schedule1F1B", 1, False, lambda p, v: 3 * (p - 1)),
    "interleaved_1f1b": Schedule("ScheduleInterleaved1F1B", 2, False, lambda p, v: 3 * (p - 1) / v),
    "zero_bubble": Schedule("ScheduleInterleavedZeroBubble", 2, True, lambda p, v: (p - 1) / v),
    "zbv": Schedule("ScheduleZBVZeroBubble", 2, True, None),
}
FOLDED = ("zbv",)


@dataclass(frozen=True)
class Job:
    """seconds, kept_bytes: of the layers of a rank."""

    library: str
    schedule: str
    stages: int
    micro_batches: int
    seconds: float
    kept_bytes: int

    def layers(self, diary: Diary) -> list[nn.Module]:
        """Return a layer for each part of the model: those of a rank share its time and its bytes."""
        chunks = SCHEDULES[self.schedule].chunks
        seconds, kept = self.seconds / chunks, self.kept_bytes // chunks
        return [Sleeper(part, WIDTH, seconds, kept, diary) for part in range(self.stages * chunks)]


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def build_zerolite(job: Job, diary: Diary) -> Callable[[], object]:
    import zerolite

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": job.micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "pipeline": {"stages": job.stages, "schedule": job.schedule, "partition_method": "uniform"},
    }
    engine = zerolite.initialize(nn.Sequential(*job.layers(diary)), config, loss_fn=loss_of)
    batches = [(torch.ones(1, WIDTH), torch.zeros(1, WIDTH))] * job.micro_batches
    return lambda: engine.train_batch(iter(batches))


def build_torch(job: Job, diary: Diary) -> Callable[[], object]:
    from torch.distributed.pipelining import PipelineStage, schedules

    layers = job.layers(diary)
    rank, parts, known = dist.get_rank(), len(layers), SCHEDULES[job.schedule]
    own = [rank + turn * job.stages for turn in range(known.chunks)]
    if job.schedule in FOLDED:
        own = [rank, parts - 1 - rank]
    stages = [PipelineStage(layers[part], part, parts, torch.device("cpu")) for part in own]
    make = getattr(schedules, known.torch_name)
    runner = make(stages if known.chunks > 1 else stages[0], job.micro_batches, loss_fn=loss_of)
    tokens, targets = torch.ones(job.micro_batches, WIDTH), torch.zeros(job.micro_batches, WIDTH)
    inputs = [tokens] if 0 in own else []
    has_last = parts - 1 in own
    return lambda: runner.step(*inputs, **({"target": targets, "losses": []} if has_last else {}))


BUILD = {"zerolite": build_zerolite, "torch": build_torch}
