"""The engine: forward, backward, step, whole steps, and the phases of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from zerolite.comm import collective
from zerolite.comm.initial_sync import broadcast_together
from zerolite.data import metrics
from zerolite.data.dataloader import RepeatingLoader
from zerolite.data.micro_batch import check_batches
from zerolite.diagnostics.consistency import SameInputs
from zerolite.engine import whole_steps
from zerolite.engine.arguments import Arguments, checked_weight, loss_error
from zerolite.engine.compiling import compile_blocks
from zerolite.engine.engine_base import EngineBase
from zerolite.engine.step_observers import LearningRateSchedule
from zerolite.monitor.monitoring import Monitoring
from zerolite.precision.dtype_errors import explain
from zerolite.utils.nested import find_tensors
from zerolite.utils.torch_private import current_backward
from zerolite.zero.engine_parts import EngineParts

if TYPE_CHECKING:
    from zerolite.pipe.runner import PipelineRunner


class Engine(EngineBase):
    """A model in training; made by :func:`zerolite.initialize`.

    Two training loops give the same numbers and counters at every stage and precision::

        loss = engine(x)                         loss = engine(x)
        engine.backward(loss)                    loss.backward()
        engine.step()                            engine.optimizer.step()
                                                 engine.optimizer.zero_grad()

    In the left loop ``engine.backward`` divides the loss by ``gradient_accumulation_steps``. ``engine.step`` updates
    only at the end of a gradient accumulation. In the right loop the caller divides, and every ``optimizer.step()``
    updates. Both average gradients over ranks, and both clear them in the step.

    An attribute that the engine does not have is looked up in its module: ``engine.generate(...)``.
    """

    def __init__(
        self,
        parts: EngineParts,
        arguments: Arguments,
        schedule: LearningRateSchedule,
        monitoring: Monitoring,
        register_unfrozen_params: Callable[[], None],
        runner: PipelineRunner | None = None,
    ) -> None:
        """
        Args:
            arguments: those of ``initialize``.
            schedule: steps the learning rates after every update.
            register_unfrozen_params: trains parameters from now on that have been unfrozen since the last backward.
            runner: runs the steps of a pipeline.
        """
        super().__init__(parts, schedule, monitoring, register_unfrozen_params, arguments.collate_fn)
        self.loss_fn = arguments.loss_fn
        self.dataloader: Any = None  # set by ``initialize`` if it was given ``training_data``
        self._broadcast_buffers, self._runner = arguments.broadcast_buffers, runner
        self._step_log = monitoring.log if monitoring.monitor.enabled else None
        self._same_inputs, self._coordinator = SameInputs.of(parts), parts.coordinator
        self._batches: Iterator[Any] | None = None  # endless, over ``dataloader``

    # ---------------------------------------------------------------- the loop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward.

        Floating inputs are cast to the compute dtype (fp16, bf16). If the module returns a loss, the loss alone comes
        back in fp32; otherwise all 16-bit outputs do (docs/precision.md).
        """
        parts, pipeline, coordinator = self._parts, self._parts.pipeline, self._coordinator
        # An exception has ended this rank's backward early. The other ranks have launched all its reductions, so this
        # rank launches the rest of them now: otherwise the next collective would meet another one.
        # A backward that recomputes this forward (``checkpoint(engine, x)``) goes on. Its ranks launch reductions at
        # different times, so no buffers can be sent between them.
        recomputes = current_backward() != -1
        if parts.reducer.current.open and not recomputes:
            pipeline.end_failed_backward()
        if self._same_inputs is not None:
            self._same_inputs.compare(find_tensors((args, kwargs)))
        sends = self._broadcast_buffers and parts.model.training and not recomputes
        if sends:
            broadcast_together(parts.model.buffers(), parts.topology.data, self.device, "buffers")
        args, kwargs = parts.boundary.enter((args, kwargs))
        watch = coordinator.engine_call() if coordinator is not None else contextlib.nullcontext()
        with watch, parts.precision.autocast_context(self.device):
            try:
                outputs = parts.call.call_module(*args, **kwargs)
            except Exception as error:
                if isinstance(error, RuntimeError):
                    pipeline.check_available()
                    pipeline.written.collect()  # raises the clearer error if the user has cast the module
                explain(error, parts.model, self.compute_dtype)
                raise
        return parts.boundary.leave(outputs)

    forward = __call__

    @collective
    def backward(
        self,
        loss: torch.Tensor,
        scale_wrt_gas: bool = True,
        retain_graph: bool = False,
        *,
        weight: float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the backward of ``loss``. Gradients of several calls before a step add up.

        Without weights the gradient of a step is the mean over ranks and micro-batches. With weights it is the gradient
        of the joint batch: sum(weight × loss) / sum(weight) over ranks and micro-batches. Either all backwards of a
        step have a weight, on all ranks, or none has.

        Args:
            loss: a scalar.
            scale_wrt_gas: divide the loss by ``gradient_accumulation_steps``.
            retain_graph: as in ``torch.Tensor.backward``.
            weight: the number of tokens or samples of which ``loss`` is the mean. 0 leaves the batch out, even if its
                loss is not finite. Count on the host: the host waits for CUDA to read a tensor from a device.

        Returns:
            ``loss``, as it was given.

        Raises:
            ValueError: for a loss that is not a scalar or needs no gradient, and for a weight that is negative or not a
                number.
        """
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
            raise loss_error(loss)
        pipeline, reducer, accumulation = self._parts.pipeline, self._parts.reducer, self._parts.accumulation
        if reducer.current.open:
            pipeline.end_failed_backward()
        exact = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        share = None if weight is None else checked_weight(weight, scale_wrt_gas) / pipeline.state.weight_unit()
        first = self._step_log is not None and accumulation.empty
        pipeline.begin_backward(engine_scaled=scale_wrt_gas, weight=share)
        if share != 0 or accumulation.of_others:
            reducer.losses.append(exact.detach().reshape(()).float())
        factor = 1.0 / accumulation.micro_batches if scale_wrt_gas else 1.0
        if self._step_log is not None:
            self._step_log.add_loss(exact, factor, pipeline.state.global_steps, first, share)
        factor = factor if share is None else share
        try:
            exact.backward(torch.full_like(exact, factor), retain_graph=retain_graph)
        except BaseException:
            self._reset_backward()
            raise
        reducer.end_backward(complete=True)
        return loss

    def _reset_backward(self) -> None:
        """Reset the state of a backward that has raised."""
        self._parts.reducer.on_failure()
        if self._coordinator is not None:
            # A gather in flight may fail because of the first error, and must not hide it.
            with contextlib.suppress(RuntimeError):
                self._coordinator.reset()

    @collective
    def step(self, flush: bool = False) -> bool:
        """End a micro-batch. If it completes a gradient accumulation, update the parameters.

        Args:
            flush: also update if the accumulation is not complete, with the mean over the micro-batches so far. Nothing
                happens if there are none.

        Returns:
            True if an update was due.
        """
        pipeline, accumulation = self._parts.pipeline, self._parts.accumulation
        # All ranks call the same backwards, so all see the same answer here, even if one got no gradients.
        if flush and accumulation.empty:
            return False
        if pipeline.suspended:  # a call that raises does not count as a micro-batch
            pipeline.check_available()
        if flush:  # first, because on_engine_step counts this call as a micro-batch
            if self._step_log is not None:
                self._step_log.close_early(accumulation.flush_factor(), pipeline.state.global_steps)
            accumulation.flush()
        closes = accumulation.on_engine_step() or flush
        if closes:
            pipeline.step()
        return closes

    # ---------------------------------------------------------------- whole steps

    @collective
    def train_batch(self, data_iter: Iterator[object] | None = None) -> torch.Tensor:
        """Run one full step: forward and backward of ``gradient_accumulation_steps`` micro-batches, and the update.

        With a pipeline this is the only way to train.

        Args:
            data_iter: iterator over this data-parallel rank's micro-batches. Each is (inputs, targets) if a loss_fn was
                given to ``initialize``, otherwise the model's arguments, a tuple or a dict of keywords. Ranks with
                other parts of the same copy of the model need the same micro-batches. None takes them from
                ``engine.dataloader``, which begins again when it ends.

        Returns:
            The mean loss over micro-batches and data-parallel ranks: 0-dim, fp32, the same on every rank.

        Raises:
            StopIteration: if the iterator ends.
            RuntimeError: in the middle of a gradient accumulation.
        """
        batches = self._batches_of(data_iter, "train_batch")
        return whole_steps.train_batch(self, batches) if self._runner is None else self._runner.train_batch(batches)

    @collective
    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Iterator[object],
        return_logits: bool = False,
        compute_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Compute the mean loss of several micro-batches, in eval mode and without gradients.

        Args:
            data_iter: as in :meth:`train_batch`.
            return_logits: also return the model's outputs.
            compute_loss: False returns the outputs alone.
            num_micro_batches: number of micro-batches, the same on all ranks. None: as many as a step has.

        Returns:
            The loss as :meth:`train_batch` returns it, the outputs, or (loss, outputs). Outputs are a list over
            micro-batches; with a pipeline, None on ranks that do not have the last layers.
        """
        batches = self._batches_of(data_iter, "eval_batch")
        count = num_micro_batches
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ValueError(
                f"engine.eval_batch: expected num_micro_batches to be an integer of at least 1 or None, got {count!r}"
            )
        training = [module for module in self._parts.model.modules() if module.training]
        self._parts.model.eval()
        try:
            if self._runner is not None:
                return self._runner.eval_batch(batches, return_logits, compute_loss, count)
            return whole_steps.eval_batch(self, batches, return_logits, compute_loss, count)
        finally:
            for module in training:  # modules that the user had put in eval mode stay in it
                module.training = True

    def _batch_weight(self) -> int | None:
        """Return the weight of the micro-batch in hand; None if all batches count the same."""
        return None

    def _batches_of(self, data_iter: Iterator[object] | None, call: str) -> Iterator[object]:
        check_batches(data_iter, self.dataloader, call)
        if data_iter is not None:
            return data_iter
        if self._batches is None:
            self._batches = iter(RepeatingLoader(self.dataloader))
        return self._batches

    # ---------------------------------------------------------------- accumulation

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backwards only accumulate gradients. Stages 2 and 3 still reduce them into shards, to save
        memory."""
        self._parts.accumulation.sync_disabled += 1
        try:
            yield
        finally:
            self._parts.accumulation.sync_disabled -= 1

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide by hand if the current micro-batch ends its gradient accumulation.

        Args:
            is_boundary: stays in force until the next call. None returns to counting micro-batches.
        """
        self._parts.accumulation.force_boundary(is_boundary)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the next (or pending) ``engine.step()`` will update."""
        return self._parts.accumulation.is_boundary()

    # ---------------------------------------------------------------- phases

    @collective
    def reduce_gradients(self) -> None:
        """Finish the mean over ranks of all gradients since the last step."""
        self._parts.pipeline.reduce()

    def get_global_grad_norm(self) -> float | None:
        """Return the L2 norm of the last step's mean gradient over all parameters, without loss scale, before clipping.

        None before the first step. The call sends nothing, so one rank alone may call it at any time. It waits for the
        device. For gradients that no step has used yet, see :meth:`clip_gradients`.
        """
        return self._parts.pipeline.state.grad_norm()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model with torch.compile: each of its repeated blocks, such as the layers of a transformer, or
        the whole model if it has none.

        One graph over the whole model would hide no reduction behind its backward. ``engine.module.compile()`` makes
        it.

        Args:
            *args: positional arguments of ``torch.nn.Module.compile``.
            **kwargs: its keyword arguments, such as ``backend``, ``mode`` and ``dynamic``.

        Raises:
            RuntimeError: experts are on several ranks, which exchange tokens in a way that it does not follow yet.
        """
        if self._parts.topology.expert.world_size > 1:
            raise RuntimeError("engine.compile: expected expert_parallel.size 1, got more; leave one of the two out")
        compile_blocks(self.module, *args, **kwargs)

    @collective
    def clip_gradients(self, max_norm: float) -> float:
        """Clip the pending gradients to an L2 norm, and return the norm before, as ``torch.nn.utils.clip_grad_norm_``.

        Args:
            max_norm: replaces the config's ``gradient_clipping`` for this step. ``float("inf")`` clips nothing.
        """
        return self._parts.pipeline.clip(max_norm)

    @collective
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last step; ``set_to_none`` has no effect."""
        self._parts.pipeline.zero_grad()

    # ---------------------------------------------------------------- data and metrics

    def deepspeed_io(
        self,
        dataset: object,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        *,
        collate_fn: Callable[..., object] | None = None,
        num_local_io_workers: int = 0,
    ) -> Any:
        """Make a loader of this rank's part of ``dataset``, whose samples :meth:`gather_for_metrics` knows.

        Args:
            dataset: a map-style dataset, or an ``IterableDataset``.
            batch_size: samples of a batch; default: the config's micro-batch.
            route: "train" shuffles in every epoch, and follows ``dataloader_drop_last``. "eval" and "predict" keep the
                order and every sample.
            pin_memory: pin batches if the engine's device is CUDA.
            collate_fn: makes a batch of a list of samples; default: the collate_fn of ``initialize``.
            num_local_io_workers: number of processes that load. 0 loads in this process.

        Raises:
            ValueError: for a wrong route or batch size, and for a dataset with too few samples.
            TypeError: for a ``dataset`` that is not a dataset.
        """
        return self._loaders.make(dataset, batch_size, route, pin_memory, collate_fn, num_local_io_workers)

    def prepare_loader(self, loader: object) -> Any:
        """Return a loader over the batches of ``loader``, whose samples :meth:`gather_for_metrics` knows.

        Args:
            loader: a torch DataLoader with a ``DistributedSampler``. On one process the sampler may be left out.

        Raises:
            ValueError: for other loaders. They can be iterated over as they are, without ``gather_for_metrics``.
        """
        return self._loaders.prepare(loader)

    @collective
    def reduce(self, value: object, op: str = "mean") -> Any:
        """Reduce ``value`` over all ranks, with the same result on all of them.

        With ``sequence_parallel`` they include the ranks that have other parts of the same sequences.

        It is computed in float64, in rank order. Floating tensors come back in their dtype, those of 16 bits and less
        in float32. Other tensors come back in int64, and their mean in float64; bools count as 0 and 1. An int stays
        an int, except in a mean, and is exact up to 2**53.

        Args:
            value: a number, a tensor, or nested dicts, lists and tuples of them. None stays None.
            op: "mean" (each rank counts the same), "sum", "max" or "min".

        Raises:
            ValueError: on all ranks if one passes a value or an ``op`` that cannot be reduced.
            RuntimeError: on all ranks if their values differ in structure, dtype or shape.
        """
        return metrics.reduce(value, op, self._parts.topology.data, self.device)

    @collective
    def gather(self, tensors: object) -> Any:
        """Concatenate the rows of all ranks, in rank order, on all of them. With ``sequence_parallel`` these are the
        ranks that have the same part of other sequences.

        Args:
            tensors: a tensor ``[rows, ...]`` of any dtype, or nested dicts, lists and tuples of such tensors. Ranks may
                have different numbers of rows, and none. A 0-dim tensor or a number (float64) is one row.

        Raises the errors of :meth:`reduce`.
        """
        return metrics.gather(tensors, self._parts.topology.batch, self.device)

    @collective
    def gather_for_metrics(self, tensors: object, loader: object = None) -> Any:
        """Gather one row for each sample, in the order of the data set, without samples that were repeated.

        Samplers repeat samples to give all ranks equally many; plain :meth:`gather` would count them twice. Call it
        inside a loop over a loader of :meth:`deepspeed_io` or :meth:`prepare_loader`. If the loader shuffles, the rows
        are in the order of the shuffle.

        Args:
            tensors: as in :meth:`gather`, with one row for each sample of the current batch.
            loader: such a loader, after its loop: ``tensors`` are then this rank's rows of all its batches.

        Raises the errors of :meth:`reduce`, and ValueError if there is not one row for each sample.
        """
        return metrics.gather(tensors, self._parts.topology.batch, self.device, self._loaders, loader)

    # ---------------------------------------------------------------- parts of sequences

    def split_sequence(self, targets: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of targets that belong to the sequences of the last forward.

        For a loss outside of the model. Without ``sequence_parallel`` it is ``targets`` itself. Where no label of the
        part is counted, one is, so that the loss is a number; its weight is 0.

        Args:
            targets: [batch, length, ...], each at the token that it belongs to; -100 is not counted.
        """
        return targets

    @property
    def loss_weight(self) -> int:
        """Number of labels in this rank's part of the last forward, by which ``sequence_parallel`` weights its loss.
        1 without it, where all ranks count the same."""
        return 1

    # ---------------------------------------------------------------- modes

    def train(self, mode: bool = True) -> Engine:
        self._parts.model.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)
