"""Training and evaluation steps of a pipeline, with the loss on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from zerolite.comm import HostGroup, HostLinks, HostMaximum, RaiseTogether, Topology
from zerolite.data.micro_batch import MicroBatch
from zerolite.pipe.boundary import sampled_hash, shapes_of, stable_hash
from zerolite.pipe.schedules import ONE_CHUNK, make_schedule
from zerolite.pipe.stage import ChunkStage
from zerolite.pipe.step import Step
from zerolite.utils.nested import find_tensors
from zerolite.utils.text import name_ranks
from zerolite.zero.engine_parts import EngineParts

if TYPE_CHECKING:
    from zerolite.pipe.prepare import PreparedStage

READY, ENDED, FAILED = 0, 1, 2
LOSS_TAG = "loss"


class PipelineRunner:
    """``train_batch`` and ``eval_batch`` of an engine whose model is divided over the ranks of ``topology.pipe``.

    It is constructed on all ranks, in the same order; both methods are called on all ranks, in the same order.
    """

    def __init__(self, stage: PreparedStage, parts: EngineParts, on_loss: Callable[[torch.Tensor], None]) -> None:
        """
        Args:
            stage: this rank's chunks, and their schedule.
            parts: parts of the engine.
            on_loss: called with the loss of each step, before its update.

        Raises:
            ValueError: the schedule does not work with this number of micro-batches.
        """
        self._parts, self._chunks, self._on_loss = parts, list(stage.chunks), on_loss
        self._loss_fn, self._schedule = stage.loss_fn, stage.schedule
        self.micro_batches = parts.config.gradient_accumulation_steps or 1
        topology, device = parts.topology, parts.device
        pipe, group = topology.pipe, topology.pipe.group
        assert group is not None, "plans refuse pipelines"
        self._links = HostLinks(pipe, "pipeline")
        self._stages = [ChunkStage(chunk, stage.parts, device, group, self._links) for chunk in self._chunks]
        for chunk in self._chunks:
            chunk.connect(parts.precision, device, self._loss_fn)
        self._run = make_schedule(self._schedule, self._stages, self.micro_batches)
        self._barrier = StepBarrier(topology)
        self._has_last = any(chunk.index == stage.parts - 1 for chunk in self._chunks)

    def train_batch(self, batches: Iterator[object]) -> torch.Tensor:
        """Run one step of ``Engine.train_batch``.

        A rank that fails raises its error, and all others raise RuntimeError with its text.
        """
        loss = self.accumulate(batches)
        self.update()
        return loss

    def accumulate(self, batches: Iterator[object]) -> torch.Tensor:
        """Run forward and backward of a step's micro-batches and return the loss."""
        if not self._parts.accumulation.empty:
            raise RuntimeError(
                "engine.train_batch: expected no gradients since the last step, got some; call engine.zero_grad() first"
            )
        counters = self._parts.pipeline.state.counters
        before = counters.micro_steps
        with torch.enable_grad():
            step = self._begin("train_batch", batches, self.micro_batches)
            self._run_stages("train_batch", step, self._run)
        # The backward of each part has counted as a micro-step.
        counters.set_micro_steps(before + self.micro_batches)
        loss = self._mean_over_world(step)
        self._on_loss(loss)
        return loss

    def update(self) -> None:
        """Reduce and apply the gradients of :meth:`accumulate`."""
        self._parts.pipeline.step()

    def eval_batch(
        self, batches: Iterator[object], return_logits: bool, compute_loss: bool, micro_batches: int | None
    ) -> Any:
        """Run ``Engine.eval_batch``. Called in eval mode and without gradients."""
        run = self._run
        if micro_batches is None:
            micro_batches = self.micro_batches
        elif micro_batches != self.micro_batches:
            # 1F1B needs as many micro-batches as stages. Without a backward, gpipe runs the same forwards.
            name = "gpipe" if self._schedule in ONE_CHUNK else self._schedule
            run = make_schedule(name, self._stages, micro_batches)
        step = self._begin("eval_batch", batches, micro_batches, (return_logits or not compute_loss, compute_loss))
        self._run_stages("eval_batch", step, run)
        outputs = step.outputs if self._has_last else None
        if not compute_loss:
            return outputs
        loss = self._mean_over_world(step)
        return (loss, outputs) if return_logits else loss

    # ---------------------------------------------------------------- a step

    def _begin(
        self, call: str, batches: Iterator[object], micro_batches: int, results: tuple[bool, bool] | None = None
    ) -> Step:
        """Read the micro-batches, and compare with all ranks if that worked. Take over what the user has put into
        ``p.grad``.

        Args:
            results: keep the outputs, and compute the loss, without a backward. None: train.
        """
        training, (outputs, loss) = results is None, results or (False, True)
        status, read, content = READY, list[MicroBatch](), 0
        error: BaseException | None = None
        try:
            read, content = self._read(call, batches, micro_batches)
            if training:  # what is wrong with p.grad must not be found later, when the other ranks reduce gradients
                self._parts.pipeline.look_at_grads(before_backward=True)
        except StopIteration as stop:
            status, error = ENDED, stop
        except Exception as failure:
            status, error = FAILED, failure
        inputs = [(micro.args, micro.kwargs, micro.target) for micro in read]
        shapes = stable_hash(repr(shapes_of(inputs[:1])))
        self._barrier.begin(call, status, error, shapes, content)
        if training and self._parts.note_inputs is not None:
            self._parts.note_inputs(find_tensors(inputs))
        return Step(self._parts, self._loss_fn, read, (shapes, training), outputs, loss)

    def _read(self, call: str, batches: Iterator[object], micro_batches: int) -> tuple[list[MicroBatch], int]:
        """Return a step's micro-batches, and a hash of some values of each of their tensors on the host."""
        parts, read, batches_read = self._parts, list[MicroBatch](), []
        for _ in range(micro_batches):
            batches_read.append(next(batches))
            micro = MicroBatch.of(batches_read[-1], self._loss_fn, parts.device)
            args, kwargs = parts.precision.cast((micro.args, micro.kwargs))
            read.append(MicroBatch(args, kwargs, micro.target))
            _check_shapes(call, read[0], read[-1], len(read))
        for chunk in self._chunks:
            chunk.prepare(read[0])
        # A hash detects loaders whose ranks draw different random numbers and so read different samples.
        return read, stable_hash(repr([sampled_hash(tensor) for tensor in find_tensors(batches_read)]))

    def _run_stages(self, call: str, step: Step, run: Callable[[], None]) -> None:
        for stage in self._stages:
            stage.begin(step)
        try:
            with step.communicating():
                run()
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
        """Drop the gradients of a failed step, also those that a backward of inputs has left in ``p.grad``."""
        self._parts.pipeline.zero_grad()
        for chunk in self._chunks:
            for parameter in chunk.parameters():
                parameter.grad = None

    def _mean_over_world(self, step: Step) -> torch.Tensor:
        """Return the mean loss over micro-batches and data ranks on every rank, from the ranks with the last part."""
        topology, device = self._parts.topology, self._parts.device
        total = torch.zeros(1, dtype=torch.float64, device=device)
        if self._has_last:
            total += torch.stack(step.losses).mean().double()
        copies = topology.world.world_size // topology.pipe.world_size
        topology.world.all_reduce(total, LOSS_TAG, float(copies)).wait()
        return total.float().reshape(())


class StepBarrier:
    """Barrier of all ranks on the host, twice a step: if one rank fails, all ranks raise and none waits for ever.

    Ranks exchange maxima, first along the pipeline, then along the other dimensions. The messages of all ranks are
    gathered only after a failure.
    """

    def __init__(self, topology: Topology) -> None:
        self._pipe = topology.pipe.world_size
        comms = (topology.pipe, topology.tensor, topology.data)
        self._maxima = [HostMaximum(comm) for comm in comms if comm.world_size > 1]
        self._host = HostGroup(topology.world, "pipeline")

    def begin(self, call: str, status: int, error: BaseException | None, shapes: int, content: int) -> None:
        """Raise on all ranks if one could not begin, or if the stages of one pipeline read others.

        Args:
            call: the engine's method, for messages.
            status: READY, ENDED or FAILED.
            error: exception of this rank, if it has failed or its iterator has ended.
            shapes: hash of the shapes of the micro-batches.
            content: hash of some of their values.
        """
        pipe, *others = self._maxima
        # The maxima of x and -x are the largest and the smallest number. They are equal if all stages have the same.
        worst, best, *extremes = pipe.of([status, -status, shapes, -shapes, content, -content])
        # Shapes and contents must agree only within one pipeline; the status is exchanged with all ranks.
        numbers = [worst, best, int(extremes[0] != -extremes[1] or extremes[2] != -extremes[3])]
        for maximum in others:
            numbers = maximum.of(numbers)
        worst, best, differs = numbers[0], -numbers[1], numbers[2]
        if best == ENDED == worst:
            raise StopIteration(f"engine.{call}: the iterator of micro-batches has ended")
        if worst != READY or differs:
            self._raise_different(call, worst, error, (status, shapes, content))

    def _raise_different(self, call: str, worst: int, error: BaseException | None, row: tuple[int, int, int]) -> None:
        """Raise the reason on all ranks, also on ranks whose own pipeline is correct.

        Args:
            row: this rank's status and hashes.
        """
        if worst == FAILED:
            self._raise(call, error if row[0] == FAILED else None, "could not begin")
        rows = self._host.gather(row)
        ended = [rank for rank, (state, *_) in enumerate(rows) if state == ENDED]
        if ended:
            raise RuntimeError(
                f"engine.{call}: expected micro-batches for a whole step on every rank, got none any more on "
                f"{name_ranks(ended)}; give all ranks as many, and the stages of one pipeline the same ones"
            ) from error
        for column, what in ((1, "shapes"), (2, "values")):
            self._check_equal(call, what, [other[column] for other in rows])

    def _check_equal(self, call: str, what: str, values: list[int]) -> None:
        step = len(values) // self._pipe
        different = [rank for rank, value in enumerate(values) if value != values[rank % step]]
        if different:
            first = different[0] % step
            raise RuntimeError(
                f"engine.{call}: expected the stages of one pipeline to read the same micro-batches, got other {what} "
                f"on {name_ranks(different)} than on rank {first}; give a DistributedSampler "
                "num_replicas=engine.data_parallel_world_size, rank=engine.data_parallel_rank and the same seed on all"
            )

    def end(self, call: str, failure: Exception | None) -> None:
        """Raise on all ranks if a computation of one rank has failed."""
        numbers = [int(failure is not None)]
        for maximum in self._maxima:
            numbers = maximum.of(numbers)
        if numbers[0]:
            self._raise(call, failure, "failed")

    def _raise(self, call: str, error: BaseException | None, what: str) -> NoReturn:
        RaiseTogether(self._host, f"engine.{call}", failed=f"{what}:").exchange(error)
        raise AssertionError("a rank has failed, so exchange() raises")


def _check_shapes(call: str, first: MicroBatch, latest: MicroBatch, number: int) -> None:
    """Check that all micro-batches of a step have the same shapes: stages allocate receive buffers for these."""
    for name, attribute in (("inputs", "args"), ("keywords", "kwargs"), ("targets", "target")):
        expected, got = shapes_of(getattr(first, attribute)), shapes_of(getattr(latest, attribute))
        if got != expected:
            raise ValueError(
                f"engine.{call}: expected all micro-batches of one step to have the same shapes, got {name} {got} in "
                f"micro-batch {number} and {expected} in the first; pad them to one length a step (other steps may "
                "have another one)"
            )
