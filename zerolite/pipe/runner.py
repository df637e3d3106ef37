"""Training and evaluation steps of a pipeline, with the loss on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch

from zerolite.comm import HostGroup, HostLinks, HostMaximum, RaiseTogether, Topology
from zerolite.comm.ranks import name_ranks
from zerolite.data.micro_batch import MicroBatch
from zerolite.pipe.boundary import number_of, sampled_hash, shapes_of
from zerolite.pipe.chunks import Chunk
from zerolite.pipe.schedules import make_schedule
from zerolite.pipe.stage import ChunkStage
from zerolite.pipe.step import RunnerComponents, Step
from zerolite.utils.nested import find_tensors

FINE, ENDED, FAILED = 0, 1, 2
LOSS_TAG = "loss"


class PipelineRunner:
    """``train_batch`` and ``eval_batch`` of an engine whose model is divided over the ranks of ``topology.pipe``.

    It is made on all ranks, in the same order; both methods are called on all ranks, in the same order.
    """

    def __init__(self, chunks: Sequence[Chunk], parts: int, schedule: str, given: RunnerComponents) -> None:
        """
        Args:
            chunks: this rank's chunks, ascending.
            parts: number of chunks on all ranks.
            schedule: its name in the config.
            given: components of the engine.

        Raises:
            ValueError: the schedule does not work with this number of micro-batches.
        """
        self._parts, self._chunks = given, list(chunks)
        topology = given.topology
        pipe, group = topology.pipe, topology.pipe.group
        self._links = None if group is None else HostLinks(pipe, "pipeline")
        self._stages: list[ChunkStage]
        if group is None or self._links is None:
            from zerolite.pipe.dry_stage import DryStage  # of a plan only

            self._stages = [DryStage(chunk, parts, given.device, pipe) for chunk in self._chunks]
        else:
            self._stages = [ChunkStage(chunk, parts, given.device, group, self._links) for chunk in self._chunks]
        for chunk in self._chunks:
            chunk.connect(given.precision, given.device, given.loss_fn)
        self._run = make_schedule(schedule, self._stages, given.micro_batches)
        self._barrier = StepBarrier(topology)
        self._has_last = any(chunk.index == parts - 1 for chunk in self._chunks)

    def train_batch(self, batches: Iterator[object]) -> torch.Tensor:
        """Run one step, as ``Engine.train_batch``. If a rank fails, it raises its error and all others raise
        RuntimeError with it."""
        loss = self.accumulate(batches)
        self.update()
        return loss

    def accumulate(self, batches: Iterator[object]) -> torch.Tensor:
        """Run forward and backward of a step's micro-batches and return the loss."""
        parts = self._parts
        if not parts.accumulation.empty:
            raise RuntimeError(
                "engine.train_batch: expected no gradients since the last step, got some; call engine.zero_grad() first"
            )
        counters = parts.pipeline.outcomes.counters
        before = counters.micro_steps
        with torch.enable_grad():
            step = self._begin("train_batch", batches, training=True)
            self._run_stages("train_batch", step)
        counters.micro_steps = before + parts.micro_batches  # each part has counted a backward of its own
        loss = self._mean_over_world(step)
        self._parts.on_loss(loss)
        return loss

    def update(self) -> None:
        """Reduce and apply the gradients of :meth:`accumulate`."""
        self._parts.pipeline.step()

    def eval_batch(self, batches: Iterator[object], return_logits: bool = False, compute_loss: bool = True) -> Any:
        """Run ``Engine.eval_batch``. Called in eval mode and without gradients."""
        step = self._begin("eval_batch", batches, False, return_logits or not compute_loss, compute_loss)
        self._run_stages("eval_batch", step)
        outputs = step.outputs if self._has_last else None
        if not compute_loss:
            return outputs
        loss = self._mean_over_world(step)
        return (loss, outputs) if return_logits else loss

    # ---------------------------------------------------------------- a step

    def _begin(
        self, call: str, batches: Iterator[object], training: bool, outputs: bool = False, loss: bool = True
    ) -> Step:
        """Read the micro-batches, and exchange with all ranks if that has worked."""
        status, read, content = FINE, list[MicroBatch](), 0
        error: BaseException | None = None
        try:
            read, content = self._read(call, batches)
        except StopIteration as stop:
            status, error = ENDED, stop
        except Exception as failure:
            status, error = FAILED, failure
        shapes = number_of(repr(shapes_of([(micro.args, micro.kwargs, micro.target) for micro in read[:1]])))
        self._barrier.begin(call, status, error, shapes, content)
        if training and self._parts.note_inputs is not None:
            self._parts.note_inputs(find_tensors([(micro.args, micro.kwargs, micro.target) for micro in read]))
        return Step(self._parts, read, (shapes, training), outputs, loss)

    def _read(self, call: str, batches: Iterator[object]) -> tuple[list[MicroBatch], int]:
        """Return a step's micro-batches and a hash of their values."""
        parts, read, given = self._parts, list[MicroBatch](), []
        for _ in range(parts.micro_batches):
            given.append(next(batches))
            micro = MicroBatch.of(given[-1], parts.loss_fn, parts.device)
            args, kwargs = parts.precision.cast((micro.args, micro.kwargs))
            read.append(MicroBatch(args, kwargs, micro.target))
            _check_shapes(call, read[0], read[-1], len(read))
        for chunk in self._chunks:
            chunk.prepare(read[0])
        return read, self._barrier.content(given)

    def _run_stages(self, call: str, step: Step) -> None:
        for stage in self._stages:
            stage.begin(step)
        try:
            if self._links is None:
                self._run()
            else:
                with step.communicating():
                    self._run()
                    self._links.finish()
        finally:
            for stage in self._stages:
                stage.end()
        try:
            self._barrier.end(call, step.failure)
        except Exception:
            if step.training:
                self._drop_gradients()
            raise

    def _drop_gradients(self) -> None:
        """Drop the gradients of a failed step, including those that a backward in two halves has left in ``p.grad``."""
        self._parts.pipeline.zero_grad()
        for chunk in self._chunks:
            for parameter in chunk.parameters():
                parameter.grad = None

    def _mean_over_world(self, step: Step) -> torch.Tensor:
        """Return the mean loss over micro-batches and data ranks, on every rank; the ranks with the last part have
        it."""
        topology, device = self._parts.topology, self._parts.device
        total = torch.zeros(1, dtype=torch.float64, device=device)
        if self._has_last:
            total += torch.stack(step.losses).mean().double()
        copies = topology.world.world_size // topology.pipe.world_size
        topology.world.all_reduce(total, LOSS_TAG, float(copies)).wait()
        return total.float().reshape(())


class StepBarrier:
    """Exchange of all ranks on the host, twice a step: if one rank fails, all learn of it and none waits in vain.

    Ranks pass on the largest numbers that they know, first along the pipeline, then along the other dimensions. Only if
    something is wrong are the texts of all ranks gathered.
    """

    def __init__(self, topology: Topology) -> None:
        self._pipe = topology.pipe.world_size
        comms = (topology.pipe, topology.tensor, topology.data)
        self._maxima = [HostMaximum(comm) for comm in comms if comm.world_size > 1]
        self._host = HostGroup(topology.world, "pipeline")

    def content(self, batches: Sequence[object]) -> int:
        """Return a hash of some values of each tensor on the host.

        It detects loaders whose ranks draw different random numbers and so read different samples.
        """
        return number_of(repr([sampled_hash(tensor) for tensor in find_tensors(batches)]))

    def begin(self, call: str, status: int, error: BaseException | None, shapes: int, content: int) -> None:
        """Raise on all ranks if one could not read its micro-batches, or if stages of one pipeline read different
        ones."""
        pipe, *others = self._maxima
        # A maximum of x and -x gives the largest and the smallest: they are equal if all stages have the same number.
        worst, best, *extremes = pipe.of([status, -status, shapes, -shapes, content, -content])
        # Shapes and contents must agree only within one pipeline; the status is exchanged with all ranks.
        found = [worst, best, int(extremes[0] != -extremes[1] or extremes[2] != -extremes[3])]
        for maximum in others:
            found = maximum.of(found)
        worst, best, differs = found[0], -found[1], found[2]
        if best == ENDED == worst:
            raise StopIteration(f"engine.{call}: the iterator of micro-batches has ended")
        if worst != FINE or differs:
            self._raise_different(call, worst, error, (status, shapes, content))

    def _raise_different(self, call: str, worst: int, error: BaseException | None, row: tuple[int, int, int]) -> None:
        """Raise the reason on all ranks, including those whose own pipeline is fine.

        Args:
            row: this rank's status and hashes.
        """
        if worst == FAILED:
            self._raise(call, error if row[0] == FAILED else None, "could not read its micro-batches")
        rows = self._host.gather(row)
        ended = [rank for rank, (state, *_) in enumerate(rows) if state == ENDED]
        if ended:
            raise RuntimeError(
                f"engine.{call}: expected every rank to have a whole step's micro-batches, got none any more on "
                f"{name_ranks(ended)}; give all ranks as many, and the stages of one pipeline the same ones"
            ) from error
        for place, what in ((1, "shapes"), (2, "values")):
            self._check_equal(call, what, [other[place] for other in rows])

    def _check_equal(self, call: str, what: str, values: list[int]) -> None:
        step = len(values) // self._pipe
        different = [rank for rank, value in enumerate(values) if value != values[rank % step]]
        if different:
            first = different[0] % step
            raise RuntimeError(
                f"engine.{call}: expected the stages of one pipeline to read the same micro-batches, got other {what} "
                f"on {name_ranks(different)} than on rank {first}; give a DistributedSampler "
                "num_replicas=engine.data_parallel_world_size and rank=engine.data_parallel_rank, and the same seed"
            )

    def end(self, call: str, failure: Exception | None) -> None:
        """Raise on all ranks if the computations of one have failed."""
        found = [int(failure is not None)]
        for maximum in self._maxima:
            found = maximum.of(found)
        if found[0]:
            self._raise(call, failure, "failed")

    def _raise(self, call: str, error: BaseException | None, what: str) -> NoReturn:
        RaiseTogether(self._host, f"engine.{call}", failed=f"{what}:").exchange(error)
        raise AssertionError("a rank has failed, so exchange() raises")


def _check_shapes(call: str, first: MicroBatch, latest: MicroBatch, number: int) -> None:
    """Check that all micro-batches of a step have the same shapes, because stages allocate memory to receive into."""
    names = ("inputs", "keywords", "targets")
    for name, one, other in zip(names, _parts_of(first), _parts_of(latest), strict=True):
        if shapes_of(one) != shapes_of(other):
            raise ValueError(
                f"engine.{call}: expected all micro-batches of one step to have the same shapes, got {name} "
                f"{shapes_of(other)} in micro-batch {number} and {shapes_of(one)} in the first; pad them to one length "
                "a step (other steps may have another one)"
            )


def _parts_of(micro: MicroBatch) -> tuple[object, object, object]:
    return micro.args, micro.kwargs, micro.target
