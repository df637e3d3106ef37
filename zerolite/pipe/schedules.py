"""torch's pipeline schedules: lookup by the config's names, construction for stages, and launch of their messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from zerolite.utils.torch_private import run_schedule

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
ONE_CHUNK = ("gpipe", "1f1b")
V_SHAPED = ("zbv", "dualpipev")


class WorkList(list[Any]):
    """Works of messages launched together. Newer schedules of torch wait for each work, older ones for the list."""

    def wait(self) -> None:
        for work in self:
            work.wait()


Launch = Callable[..., WorkList]  # called with the arguments of torch's ``_batch_p2p``


def launch_batch(ops: list[dist.P2POp], desc: str | None = None) -> WorkList:
    return WorkList(dist.batch_isend_irecv(ops)) if ops else WorkList()


def available_schedules() -> list[str]:
    """Return the config's names of the schedules that the installed torch has."""
    return [name for name in SCHEDULES if _find_schedule(name) is not None]


def _find_schedule(name: str) -> object:
    schedule = getattr(schedules, SCHEDULES[name], None)
    if schedule is not None and name in V_SHAPED and schedules.PipelineScheduleMulti in schedule.__bases__:
        return None  # torch 2.6's would send messages from a rank to itself; later ones have another base
    return schedule


def schedule_class(name: str) -> Any:
    """Return torch's class for a schedule of the config. Raises ValueError if the installed torch has none."""
    schedule = _find_schedule(name)
    if schedule is None:
        raise ValueError(
            f'pipeline.schedule: "{name}" needs torch.distributed.pipelining.{SCHEDULES[name]}, got torch '
            f"{torch.__version__}, which lacks it; update torch, or use one of {', '.join(available_schedules())}"
        )
    return schedule


def make_schedule(name: str, stages: Sequence[ChunkStage], micro_batches: int) -> Callable[[], None]:
    """Return a function that runs one step of this rank's ``stages``.

    Raises ValueError if the schedule does not work with this number of micro-batches.
    """
    own_stages: Any = stages[0] if name in ONE_CHUNK else list(stages)
    try:
        schedule = schedule_class(name)(own_stages, micro_batches, loss_fn=_no_loss)
    except ValueError as error:
        raise ValueError(
            f"gradient_accumulation_steps: expected micro-batches that pipeline.schedule {name!r} can run on "
            f"{stages[0].group_size} stages with {len(stages)} parts each, got {micro_batches} ({error}); raise it to "
            f"a multiple of {stages[0].group_size}, or use another schedule"
        ) from None
    by_index = {stage.stage_index: stage for stage in stages}
    for index, stage in by_index.items():
        stage.set_neighbours(by_index.get(index - 1), by_index.get(index + 1))
    launch = type(stages[0]).launch
    return lambda: run_schedule(schedule, micro_batches, launch)


def _no_loss(outputs: object, target: object) -> object:
    """Loss function for torch's schedules, which run backward only with one. The stage itself computes the loss."""
    return None
