"""Pipeline stage without messages, for dry runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from zerolite.comm import Communicator, recorder
from zerolite.pipe.boundary import BoundarySpec
from zerolite.pipe.chunks import Chunk
from zerolite.pipe.schedules import Launched
from zerolite.pipe.stage import ChunkStage
from zerolite.pipe.step import TAG

if TYPE_CHECKING:
    from zerolite.pipe.runner import PipelineRunner

FORWARD, BACKWARD = "forward", "backward"


def _unseen(phase: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class Rehearsal:
    """State that the dry runs of several stages share. boundaries: what each part gives the next one, by its number; a
    part is run after the one before it. phase: around each computation, with "forward" or "backward"."""

    def __init__(self) -> None:
        self.boundaries: dict[int, BoundarySpec] = {}
        self.phase: Callable[[str], contextlib.AbstractContextManager[None]] = _unseen

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, a :class:`DryStage` that is made looks here for what it would receive."""
        _rehearsals.append(self)
        try:
            yield
        finally:
            _rehearsals.remove(self)


_rehearsals: list[Rehearsal] = []


def learn_boundaries(runners: Sequence[PipelineRunner], batches: Iterator[object]) -> None:
    """Fill the boundaries of the rehearsal under way.

    Args:
        runners: of all ranks of the pipeline, in their order.
        batches: micro-batches without end.
    """
    stages = {stage.stage_index: (runner, stage) for runner in runners for stage in runner._stages}
    steps = {id(runner): runner._begin("train_batch", batches, training=True) for runner in runners}
    for part in sorted(stages):
        runner, stage = stages[part]
        step = steps[id(runner)]
        stage.begin(step)
        stage.get_fwd_recv_ops(0)
        stage.forward_one_chunk(0)
        if step.failure is not None:
            raise step.failure
    for _, stage in stages.values():
        stage.end()


class _Message(NamedTuple):
    """Stand-in for one of torch's point-to-point operations, and for the work that it becomes: held as long as that."""

    tensor: torch.Tensor
    peer: int  # by which torch's schedules sort them

    def wait(self) -> None:
        """Return at once: no message is under way."""


def _launch(ops: list[_Message], desc: str | None = None) -> Launched:
    return Launched(ops)


class _One:
    """Stand-in for a tensor with this value, which torch's schedule reads, and which tensors without memory do not
    have."""

    def item(self) -> int:
        return 1


class DryStage(ChunkStage):
    """Computes, makes room for what it would receive, and notes what it would send, as a
    :class:`~zerolite.pipe.stage.ChunkStage` does. Values mean nothing; tensors may be without memory."""

    launch = _launch

    def __init__(self, chunk: Chunk, parts: int, device: torch.device, pipe: Communicator) -> None:
        """pipe: of the stages; needs no process group."""
        self._rehearsal = _rehearsals[-1]
        # What torch's own constructor would set, which asks a process group for this rank's place.
        self.submod, self.stage_index, self.num_stages, self.device = chunk.module, chunk.index, parts, device
        self.group, self.group_rank, self.group_size = None, pipe.rank, pipe.world_size
        self.stage_index_to_group_rank = {index: index % pipe.world_size for index in range(parts)}
        self.has_backward = False
        self._set_up(chunk, None, range(pipe.world_size))

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Any:
        return _One()

    # ---------------------------------------------------------------- messages

    def _incoming(self) -> BoundarySpec | None:
        key = self.step.key
        if key not in self._before.known:
            self._before.known[key] = self._rehearsal.boundaries[self.stage_index - 1]
        return self._before.spec(key)

    def _announce(self) -> None:
        key = self.step.key
        if not self._after.dead and key not in self._after.known:
            fresh, self._fresh = self._fresh, None
            self._after.learn(key, fresh)
            if fresh is not None:
                self._rehearsal.boundaries[self.stage_index] = fresh

    def _send(self, tensor: torch.Tensor, stage_index: int) -> Any:
        tensor = tensor.contiguous()
        recorder.note("send", tensor, TAG, "pipe", self.group_size)
        return _Message(tensor, stage_index)

    def _receive(self, tensor: torch.Tensor, stage_index: int) -> Any:
        recorder.note("receive", tensor, TAG, "pipe", self.group_size)
        return _Message(tensor, stage_index)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        with self._rehearsal.phase(FORWARD):
            return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        with self._rehearsal.phase(BACKWARD):
            return super().get_bwd_recv_ops(bwd_chunk_id)

    # ---------------------------------------------------------------- computations

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._rehearsal.phase(FORWARD):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._rehearsal.phase(BACKWARD):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._rehearsal.phase(BACKWARD):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
