"""torch's pipeline schedules: found by the config's names, made for stages, and the messages that they launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

if TYPE_CHECKING:
    from zerolite.pipe.stage import ChunkStage

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
ONE_PART = ("gpipe", "1f1b")
FOLDED = ("zbv", "dualpipev")


class Launched(list[Any]):
    """Messages launched together. Newer schedules of torch wait for each message, older ones for the whole list."""

    def wait(self) -> None:
        for work in self:
            work.wait()


Launch = Callable[..., Launched]  # called with the arguments of torch's ``_batch_p2p``


def launch_together(ops: list[dist.P2POp], desc: str | None = None) -> Launched:
    return Launched(dist.batch_isend_irecv(ops)) if ops else Launched()


# The schedules of torch 2.6 wait only for the last message of a batch. gloo does not finish messages in order, so a
# stage that receives two tensors could compute before the first has arrived.
KEEPS_ONE = not hasattr(schedules, "_wait_batch_p2p")


@contextlib.contextmanager
def _launched_by(launch: Launch | None) -> Iterator[None]:
    """Context in which torch's schedules launch messages with ``launch``; None: with torch's own function."""
    torchs: Any = schedules
    before = torchs._batch_p2p
    torchs._batch_p2p = launch or before
    try:
        yield
    finally:
        torchs._batch_p2p = before


def available_schedules() -> list[str]:
    """Return the config's names of the schedules that the installed torch has."""
    return [name for name in SCHEDULES if _find_schedule(name) is not None]


def _find_schedule(name: str) -> object:
    found = getattr(schedules, SCHEDULES[name], None)
    if found is not None and name in FOLDED and not issubclass(found, schedules._PipelineScheduleRuntime):
        return None  # torch 2.6's would send messages from a rank to itself
    return found


def schedule_class(name: str) -> Any:
    """Return torch's class for the schedule ``name`` of the config. Raises ValueError if the installed torch has
    none."""
    found = _find_schedule(name)
    if found is None:
        raise ValueError(
            f'pipeline.schedule: "{name}" needs a torch.distributed.pipelining.{SCHEDULES[name]} that torch '
            f"{torch.__version__} does not have; update torch, or use one of {', '.join(available_schedules())}"
        )
    return found


def make_schedule(name: str, stages: Sequence[ChunkStage], micro_batches: int) -> Callable[[], None]:
    """Return a function that runs one step of this rank's ``stages``. Raises ValueError if the number of micro-batches
    is wrong."""
    made = schedule_class(name)
    own: Any = stages[0] if name in ONE_PART else list(stages)
    try:
        schedule = made(own, micro_batches, loss_fn=_no_loss)
    except ValueError as error:
        raise ValueError(
            f"gradient_accumulation_steps: expected micro-batches that pipeline.schedule {name!r} can run on "
            f"{stages[0].group_size} stages with {len(stages)} parts each, got {micro_batches} ({error}); raise it to "
            f"a multiple of {stages[0].group_size}, or use another schedule"
        ) from None
    by_index = {stage.stage_index: stage for stage in stages}
    for index, stage in by_index.items():
        stage.previous_here, stage.next_here = by_index.get(index - 1), by_index.get(index + 1)
    nothing = [None] * micro_batches

    def run() -> None:
        with _launched_by(type(stages[0]).launch):
            schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches, nothing)

    return run


def _no_loss(outputs: object, target: object) -> object:
    """Tell torch's schedules that there is a loss; the stage computes it."""
    return None
