"""Pipeline stage without messages, for dry runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from zerolite.comm import Communicator, recorder
from zerolite.pipe.boundary import BoundarySpec
from zerolite.pipe.chunks import Chunk
from zerolite.pipe.schedules import WorkList
from zerolite.pipe.stage import ChunkStage, Method
from zerolite.pipe.step import TAG

if TYPE_CHECKING:
    from zerolite.pipe.runner import PipelineRunner

FORWARD, BACKWARD = "forward", "backward"
Phase = Callable[[str], contextlib.AbstractContextManager[object]]


class DryPipeline:
    """State that the dry runs of several stages share.

    Attributes:
        boundaries: tensors that each part passes to the next, by the number of the part. Parts run in order.
        phase: context around each computation, called with "forward" or "backward".
    """

    def __init__(self) -> None:
        self.boundaries: dict[int, BoundarySpec] = {}
        self.phase: Phase = contextlib.nullcontext

    def set_phase(self, phase: Phase) -> None:
        """Set the context around the computations of the next stage to run."""
        self.phase = phase

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context in which new :class:`DryStage` objects take the tensors of their receives from this pipeline."""
        _dry_pipelines.append(self)
        try:
            yield
        finally:
            _dry_pipelines.remove(self)


_dry_pipelines: list[DryPipeline] = []


def learn_boundaries(runners: Sequence[PipelineRunner], batches: Iterator[object]) -> None:
    """Fill the boundaries of the current dry pipeline by one forward of all parts, in order.

    Args:
        runners: one for each rank of the pipeline, in rank order.
        batches: an endless iterator of micro-batches.
    """
    stages = {stage.stage_index: (runner, stage) for runner in runners for stage in runner._stages}
    steps = {id(runner): runner._begin("train_batch", batches, runner.micro_batches) for runner in runners}
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
    """Replacement of a point-to-point operation of torch and of its work. It keeps the tensor alive as they do."""

    tensor: torch.Tensor
    peer: int  # torch's schedules sort operations by this field

    def wait(self) -> None:
        """Return at once: nothing is sent."""


def _launch(ops: list[_Message], desc: str | None = None) -> WorkList:
    return WorkList(ops)


class _WarmupResult:
    """Replacement of a tensor whose value, 1, torch's schedule reads: a tensor without memory has no value."""

    def item(self) -> int:
        return 1


def _in_phase(phase: str, method: Method) -> Method:
    """Return a method of DryStage that runs ``method`` in the context of a phase."""

    @functools.wraps(method)
    def call(stage: DryStage, *args: Any, **kwargs: Any) -> object:
        with stage._dry_pipeline.phase(phase):
            return method(stage, *args, **kwargs)

    return call  # type: ignore[return-value]


class DryStage(ChunkStage):
    """Stage that computes, allocates receive buffers and records messages, but sends nothing.

    Otherwise it works as :class:`~zerolite.pipe.stage.ChunkStage`. Values mean nothing; tensors may have no memory.
    """

    launch = _launch

    def __init__(self, chunk: Chunk, parts: int, device: torch.device, pipe: Communicator) -> None:
        """
        Args:
            pipe: communicator of the stages; it needs no process group.
        """
        self._dry_pipeline = _dry_pipelines[-1]
        # These attributes are normally set by torch's constructor, which needs a process group.
        self.submod, self.stage_index, self.num_stages, self.device = chunk.module, chunk.index, parts, device
        self.group, self.group_rank, self.group_size = None, pipe.rank, pipe.world_size
        self.stage_index_to_group_rank = {index: index % pipe.world_size for index in range(parts)}
        self.has_backward = False
        self._set_up(chunk, None, range(pipe.world_size))

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Any:
        return _WarmupResult()

    # ---------------------------------------------------------------- messages

    def _input_spec(self) -> BoundarySpec | None:
        key = self.step.key
        if key not in self._input_boundary.specs:
            self._input_boundary.specs[key] = self._dry_pipeline.boundaries[self.stage_index - 1]
        return self._input_boundary.spec(key)

    def _send_output_spec(self) -> None:
        key = self.step.key
        if not self._output_boundary.failed and key not in self._output_boundary.specs:
            fresh, self._new_output_spec = self._new_output_spec, None
            self._output_boundary.learn(key, fresh)
            if fresh is not None:
                self._dry_pipeline.boundaries[self.stage_index] = fresh

    def _send(self, tensor: torch.Tensor, stage_index: int) -> Any:
        tensor = tensor.contiguous()
        recorder.note("send", tensor, TAG, "pipe", self.group_size)
        return _Message(tensor, stage_index)

    def _receive(self, tensor: torch.Tensor, stage_index: int) -> Any:
        recorder.note("receive", tensor, TAG, "pipe", self.group_size)
        return _Message(tensor, stage_index)

    get_fwd_recv_ops = _in_phase(FORWARD, ChunkStage.get_fwd_recv_ops)
    get_bwd_recv_ops = _in_phase(BACKWARD, ChunkStage.get_bwd_recv_ops)
    forward_one_chunk = _in_phase(FORWARD, ChunkStage.forward_one_chunk)
    backward_one_chunk = _in_phase(BACKWARD, ChunkStage.backward_one_chunk)
    backward_weight_one_chunk = _in_phase(BACKWARD, ChunkStage.backward_weight_one_chunk)
