"""The engine: forward, backward, step, and the phases of a step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from zerolite.comm import ControlChannel, DeviceMesh, local_rank
from zerolite.comm.initial_sync import broadcast_together
from zerolite.data import metrics
from zerolite.data.dataloader import RepeatingLoader
from zerolite.data.micro_batch import check_batches
from zerolite.diagnostics.join import ROW, Join
from zerolite.diagnostics.stack_report import Parts
from zerolite.engine.arguments import check_loss, checked_weight
from zerolite.engine.components import Components
from zerolite.monitor.memory_report import MemoryReport, memory_report
from zerolite.precision.dtype_errors import explain
from zerolite.utils.nested import find_tensors
from zerolite.zero.commands import Command


class Engine:
    """A model in training; made by :func:`zerolite.initialize`.

    Two loops give the same numbers and counters at every stage and precision::

        loss = engine(x)                         loss = engine(x)
        engine.backward(loss)                    loss.backward()
        engine.step()                            engine.optimizer.step()
                                                 engine.optimizer.zero_grad()

    Attributes that the engine does not have are those of its module: ``engine.generate(...)``.

    ``engine.backward`` divides the loss by ``gradient_accumulation_steps`` and ``engine.step`` applies only at the
    boundary of an accumulation; the plain loop divides by itself and steps when it says so. Gradients are averaged over
    ranks either way, and consumed by the step.
    """

    def __init__(self, components: Components) -> None:
        c = components
        self.config = c.config
        self.device = c.device
        self.topology = c.topology
        self.optimizer = c.optimizer
        self.loaders = c.loaders
        self.dataloader: Any = None  # of ``training_data``
        self.loss_fn = c.loss_fn
        self.monitor = c.monitor  # for values of the user's own, too
        self.step_log = c.step_log
        self.comms_logger = c.comms_logger
        self.checkpointer = c.checkpointer
        self.coordinator = c.coordinator
        self.runner = c.runner
        self.parts = Parts(c.module, c.topology.data, c.reducer, c.pipeline.outcomes.counters)
        self.call = c.call
        self.memory_parts = c.memory
        self.state_offload = c.state_offload
        self.activation_checkpointing = c.activation_checkpointing
        self.pending_gradients = c.pending_gradients
        self.parameter_access = c.parameter_access  # what zerolite.get_full_grad and its like ask
        self.full_state = c.full_state
        self._module = c.module
        self._comm = c.topology.data
        self._precision = c.precision
        self._pipeline = c.pipeline
        self._reducer = c.reducer
        self._param_gatherer = c.param_gatherer
        self._accumulation = c.accumulation
        self._boundary = c.boundary
        self._same_inputs = c.same_inputs
        self._broadcast_buffers = c.broadcast_buffers
        self._schedule = c.schedule
        self._join: Join | None = None
        self._batches: Iterator[Any] | None = None  # over ``dataloader``, again and again
        c.reference.bind(self)

    # ---------------------------------------------------------------- the loop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. Floating inputs are cast to the compute dtype (fp16, bf16). A loss comes back in fp32;
        where the module returns none, all 16-bit outputs do (docs/precision.md)."""
        if self._reducer.current.open:  # an exception has cut this rank's backward short: launch what the others have
            self._reducer.end_backward(complete=False)
        if self._same_inputs is not None:
            self._same_inputs.compare(find_tensors((args, kwargs)))
        sends = self._broadcast_buffers and self._module.training
        with self._pipeline.commands(Command.FORWARD, sends):
            if sends:
                self.send_buffers()
        args, kwargs = self._boundary.enter((args, kwargs))
        watch = self.coordinator.calling() if self.coordinator is not None else contextlib.nullcontext()
        with watch, self._precision.autocast_context(self.device):
            try:
                outputs = self.call.call_module(*args, **kwargs)
            except Exception as error:
                if isinstance(error, RuntimeError):
                    self._pipeline.check_available()
                    self._pipeline.written.take()  # says so if the module has been cast
                explain(error, self._module, self.compute_dtype)
                raise
        return self._boundary.leave(outputs)

    forward = __call__

    def backward(
        self,
        loss: torch.Tensor,
        scale_wrt_gas: bool = True,
        retain_graph: bool = False,
        *,
        weight: float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Backward through ``loss``, a scalar, divided by ``gradient_accumulation_steps`` unless ``scale_wrt_gas``
        is False.

        weight: how much this loss, a mean over tokens or samples, counts in the step: their number. The step's gradient
        is then that of the one joint batch, sum(weight × loss) / sum(weight) over ranks and micro-batches, instead of
        the mean over them. 0 for a batch in which nothing counts, even if its loss is not finite. A tensor is read from
        its device, for which CUDA must be waited for: count on the host. All backwards of a step have a weight, on all
        ranks, or none has.

        Several calls before a step add up. Returns ``loss``. Raises ValueError for a loss that is not a scalar or
        needs no gradient, and for a weight that is not a number of at least 0. Called on all ranks.
        """
        check_loss(loss)
        if self._reducer.current.open:
            self._reducer.end_backward(complete=False)
        exact = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        share = None
        if weight is not None:
            share = checked_weight(weight, scale_wrt_gas) / self._pipeline.gradient_scale.weight_unit()
        first = self.step_log is not None and self._accumulation.empty
        self._pipeline.begin_backward(engine_scaled=scale_wrt_gas, weight=share)
        if share != 0:
            self._reducer.losses.append(exact.detach().reshape(()).float())
        factor = 1.0 / self._accumulation.micro_batches if scale_wrt_gas else 1.0
        if self.step_log is not None:
            self.step_log.add_loss(exact, factor, self._pipeline.outcomes.global_steps, first, share)
        factor = factor if share is None else share
        try:
            exact.backward(torch.full_like(exact, factor), retain_graph=retain_graph)
        except BaseException:
            self._reducer.show_held()  # for the user to drop
            if self.coordinator is not None:
                with contextlib.suppress(RuntimeError):  # of a gather in flight: the first error is the one to see
                    self.coordinator.sweep()
            raise
        self._reducer.end_backward(complete=True)
        return loss

    def step(self, flush: bool = False) -> bool:
        """End a micro-batch; at the boundary of an accumulation, update. True if an update was due.

        ``flush``: apply an accumulation that is not full, as the mean over the micro-batches it contains; nothing
        happens if it is empty. Called on all ranks.
        """
        if flush and self._accumulation.empty:  # of backwards, which all ranks call alike, with or without gradients
            return False
        if self._join is not None:
            self._pipeline.look_at_grads()  # what the others are told of it comes before the step
        with self._pipeline.commands(Command.ENGINE_STEP, flush, _FORCED.index(self._accumulation.forced_boundary)):
            if flush:  # what the accumulation contains, before this call counts as a micro-batch
                if self.step_log is not None:
                    self.step_log.close_early(self._accumulation.flush_factor(), self._pipeline.outcomes.global_steps)
                self._pipeline.gradient_scale.flush()
            closes = self._accumulation.on_engine_step() or flush
            if closes:
                self._pipeline.step()
        return closes

    def follow_step(self, flush: bool, forced: int) -> None:
        """A :meth:`step` of the ranks that go on, with their boundary. Called by :class:`Join`."""
        self._accumulation.force_boundary(_FORCED[forced])
        self.step(flush)

    @contextlib.contextmanager
    def join(self, divide_by_initial_world_size: bool = True) -> Iterator[None]:
        """Context of a loop in which ranks may have different numbers of batches, 0 included: those that have finished
        serve the others until all have, with gradients of zero, and end with the same parameters and counters.

        divide_by_initial_world_size: gradients are divided by the number of all ranks to the end, as
        ``torch.distributed.algorithms.Join`` does by default; False: by the number of those that still have batches.
        With ``engine.backward(..., weight=)`` it does not matter: the gradient is that of the joint batch.

        :meth:`reduce` and :meth:`gather` are over the ranks that go on. A call that needs all ranks (unfreezing,
        ``zerolite.get_full_...``) raises RuntimeError once one has finished; so does every rank if one leaves with an
        exception, or if they call the engine differently. Collectives of your own do not know who has finished. Costs a
        small exchange on the host at each forward, backward and step. Called on all ranks.
        """
        self._pipeline.check_available()
        if self._comm.world_size == 1 or self._comm.group is None:
            yield
            return
        if self._join is not None:
            raise RuntimeError("engine.join: this engine is inside a join block already; it cannot be entered twice")
        channel = ControlChannel(self._comm, ROW)
        self._join = Join(self, self._pipeline, self._reducer, self._comm, channel, divide_by_initial_world_size)
        try:
            with self._join.running():
                yield
        finally:
            self._join = None

    # ---------------------------------------------------------------- whole steps

    def train_batch(self, data_iter: Iterator[object] | None = None) -> torch.Tensor:
        """One whole step: ``gradient_accumulation_steps`` micro-batches from ``data_iter``, forward, backward, update.
        With a pipeline this is how an engine trains.

        data_iter: gives this data-parallel rank's micro-batches: (inputs, targets) where ``initialize`` was given a
        loss_fn, the model's arguments otherwise (a tuple, or a dict of keywords). Ranks with other parts of the same
        model need the same ones. None: over ``engine.dataloader``, again from its start when it ends. Returns the mean
        loss over micro-batches and data-parallel ranks, 0-dim fp32, the same on every rank. Raises StopIteration if the
        iterator ends, RuntimeError inside :meth:`~zerolite.Engine.join` and in the middle of an accumulation. Called on
        all ranks.
        """
        return self.runner.train_batch(self._batches_of(data_iter, "train_batch"))

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[object], return_logits: bool = False, compute_loss: bool = True) -> Any:
        """The mean loss of as many micro-batches as a step has, without gradients, in eval mode: as
        :meth:`train_batch` gives it.

        Args:
            return_logits: also the model's outputs, a list over micro-batches (None on ranks that do not have the last
                layers).
            compute_loss: False gives the outputs alone.

        Called on all ranks.
        """
        batches = self._batches_of(data_iter, "eval_batch")
        training = [module for module in self._module.modules() if module.training]
        self._module.eval()
        try:
            return self.runner.eval_batch(batches, return_logits, compute_loss)
        finally:
            for module in training:  # those that the user has put in eval mode stay there
                module.training = True

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
        """Backwards inside only accumulate. Stage 2 reduces them into shards all the same, to save memory."""
        self._accumulation.sync_disabled += 1
        try:
            yield
        finally:
            self._accumulation.sync_disabled -= 1

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say by hand whether the micro-batch in hand closes its accumulation, until said otherwise; None returns to
        counting."""
        self._accumulation.force_boundary(is_boundary)

    def is_gradient_accumulation_boundary(self) -> bool:
        """True if the next (or pending) ``engine.step()`` will update."""
        return self._accumulation.is_boundary()

    # ---------------------------------------------------------------- phases

    def reduce_gradients(self) -> None:
        """Finish the mean over ranks of all gradients since the last step. Called on all ranks."""
        self._pipeline.reduce()

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of the last step's mean gradient over all parameters, unscaled and before clipping; None before the
        first step. From :meth:`update` on, the step is the one in hand.

        Sends nothing, so one rank alone may call it at any time, also inside an accumulation. It waits for the device.
        :meth:`clip_gradients` returns the norm of gradients that no step has used yet.
        """
        return self._pipeline.outcomes.grad_norm()

    def memory_report(self) -> MemoryReport:
        """Return what this rank's memory holds now: bytes by item, measured, and what the allocator says of the whole.
        It has a table for people, ``str(report)``, and plain data, ``report.to_dict()``. Of this rank alone: nothing is
        sent and the device is not waited for."""
        return memory_report(self.memory_parts)

    def offload_states(
        self,
        include: Iterable[object] | None = None,
        device: object = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Bring what this engine holds on its device to the host, between two steps, so that something else has the
        device's memory until :meth:`reload_states`. What is offloaded already stays where it is.

        Args:
            include: some of DeepSpeed's names "optim_states", "hp_params" (separate master weights), "lp_params" (what
                the modules compute with), "lp_grads" and "contiguous_grad_buffer"; None: all. Without "lp_params" the
                module can still compute under ``torch.no_grad()``.
            pin_memory: registered with CUDA, for fast copies.
            non_blocking: return while copies are under way; the device's memory is free for what is queued after them.

        Raises RuntimeError between ``update`` and ``publish``, inside :meth:`join` and if states are out already;
        whatever trains, saves, loads or reads meanwhile raises RuntimeError as well. Called on all ranks.
        """
        if self._join is not None:
            raise RuntimeError("engine.offload_states: expected a call outside of engine.join()")
        self.state_offload.offload(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Undo :meth:`offload_states`; nothing if it has not been called. non_blocking: accepted for DeepSpeed's loops;
        the memory on the host goes when this returns, so it waits for the copies. An engine that goes while states are
        out gives the model's back. Called on all ranks."""
        self.state_offload.reload()

    def clip_gradients(self, max_norm: float) -> float:
        """Clip the pending gradients to L2 norm ``max_norm`` instead of the config's, and return their norm before, as
        ``torch.nn.utils.clip_grad_norm_`` does; ``float("inf")`` clips nothing. Called on all ranks."""
        return self._pipeline.clip(max_norm)

    def update(self) -> None:
        """Update the master weights that this rank owns, or skip if a gradient is not finite; counters, scheduler
        and loss scale follow. Called on all ranks; :meth:`publish` and :meth:`zero_grad` must follow."""
        self._pipeline.update()

    def publish(self) -> None:
        """Bring updated master weights to the module's parameters on all ranks. Called on all ranks."""
        self._pipeline.publish()

    def zero_grad(self) -> None:
        """Drop all gradients since the last step. Called on all ranks."""
        self._pipeline.zero_grad()

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
        """A loader of this rank's part of ``dataset``, in batches of ``batch_size`` samples (default: the config's
        micro-batch), whose samples :meth:`gather_for_metrics` knows.

        Args:
            route: "train" shuffles, in each pass anew, and obeys ``dataloader_drop_last``; "eval" and "predict" keep
                the order and every sample.
            pin_memory: where the engine's device is CUDA.
            collate_fn: a list of samples to a batch; default: that of ``initialize``.
            num_local_io_workers: processes that load; 0 loads in this one.

        Raises:
            ValueError: for data that cannot be loaded.
            TypeError: for data that cannot be loaded.
        """
        return self.loaders.make(dataset, batch_size, route, pin_memory, collate_fn, num_local_io_workers)

    def prepare_loader(self, loader: object) -> Any:
        """``loader``, a torch DataLoader with a ``DistributedSampler`` (or without, on one process), so that
        :meth:`gather_for_metrics` knows its samples: iterate over what this returns. Raises ValueError for other
        loaders, which work as they are but without that."""
        return self.loaders.prepare(loader)

    def reduce(self, value: object, op: str = "mean") -> Any:
        """``value`` over all ranks, the same on all of them.

        Args:
            value: a number, a tensor, or nested dicts, lists and tuples of them; None stays.
            op: "mean" (each rank counts the same), "sum", "max", "min".

        Floats are computed in float64, in rank order; tensors come back in their dtype, those of 16 bits and less in
        float32. Integers stay integers (tensors: a sum is int64); their mean is a float (tensors: float64). Of bools,
        max is any, min is all, sum counts. NaN on one rank is NaN.

        Raises:
            ValueError: on all ranks if one passes something else or they differ in structure, dtype or shape.
            RuntimeError: on all ranks if one passes something else or they differ in structure, dtype or shape.

        Called on all ranks.
        """
        with self._pipeline.commands(Command.METRIC):
            return metrics.reduce(value, op, self._comm, self.device)

    def gather(self, tensors: object) -> Any:
        """The rows of all ranks, in rank order, on all of them: tensors ``[rows, ...]``, any dtype, or nested dicts,
        lists and tuples of them. Rows may differ from rank to rank, and be 0; a 0-dim tensor or number is one row.
        Raises as :meth:`reduce` does. Called on all ranks."""
        with self._pipeline.commands(Command.METRIC):
            return metrics.gather(tensors, self._comm, self.device)

    def gather_for_metrics(self, tensors: object, loader: object = None) -> Any:
        """Gather as :meth:`gather` does; inside a pass over a loader of :meth:`deepspeed_io` or :meth:`prepare_loader`,
        for values with one row for each sample of the batch in hand: in the order of the data set (or of its shuffle),
        without the samples that were repeated to make ranks even.

        loader: such a loader; the rows are those of a whole pass over it, collected on this rank. Raises as
        :meth:`reduce` does, and ValueError where the rows are not one for each sample. Called on all ranks.
        """
        with self._pipeline.commands(Command.METRIC):
            return metrics.gather(tensors, self._comm, self.device, self.loaders, loader)

    def absent_from_metric(self) -> None:
        """Take part in the others' :meth:`reduce` or :meth:`gather` with nothing. Called by :class:`Join`."""
        metrics.be_absent(self._comm, self.device)

    def comms_summary(self) -> list[dict[str, Any]]:
        """Return what ``comms_logger`` has measured here: a dict for each kind of collective, with op, tag (what it is
        for), ranks (that take part), nbytes (of one, of its full tensors), count, total_bytes, mean_ms, algbw and busbw
        (10^9 bytes a second), and with ``debug`` the caller. Raises RuntimeError without a logger."""
        if self.comms_logger is None:
            raise RuntimeError(
                "engine.comms_summary: expected comms_logger.enabled = true in the config, got false; set it"
            )
        return self.comms_logger.summary()

    # ---------------------------------------------------------------- checkpoints

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        async_save: bool = False,
    ) -> str:
        """Save everything that makes the next step the same, and return the checkpoint's directory, ``save_dir/tag``.

        Gradients are not saved, so call it at the end of a gradient accumulation, after a :meth:`step` that returned
        True. A save in its middle says so in the log: training goes on with them, but a job that continues from the
        checkpoint begins that accumulation anew. Until the checkpoint is complete, what was there stays; one of the
        same tag is replaced.

        Args:
            save_dir: on a file system that all nodes share.
            tag: default ``global_step<N>``.
            client_state: plain data (numbers, strings, lists, dicts, tensors, …), that of rank 0, which
                :meth:`load_checkpoint` gives back.
            save_latest: let ``save_dir/latest`` name it.
            exclude_frozen_parameters: leave out what is not trained, as for adapters.
            async_save: return when all has been copied to host memory, and write in the background; what goes wrong
                there is raised by the next call that saves, loads or waits.

        Raises:
            CheckpointError: on all ranks (a full disk, a rank that does not come, …).
            RuntimeError: if ranks hold different weights or learning rates.
            FloatingPointError: for non-finite weights.
            TypeError: for a client_state that is not plain.

        Called on all ranks with the same arguments.
        """
        request = save_dir, tag, save_latest, exclude_frozen_parameters, async_save
        return self.checkpointer.save(self.lr_scheduler, client_state, *request)

    def follow_save(self) -> None:
        """A save of the ranks that go on. Called by :class:`Join`."""
        self.checkpointer.follow_save(self.lr_scheduler)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        missing_ok: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Continue from a checkpoint, saved at whichever stage and grid of ranks. Gradients that no step has used are
        dropped. Returns its directory and the client state.

        Args:
            tag: default the one that ``load_dir/latest`` names, or, without that file, the newest complete one.
            load_module_strict: the checkpoint must have exactly the model's parameters and buffers; False loads what
                both have, also where an adapter has been put around a module or taken away.
            load_optimizer_states: also the hyperparameters of param groups that have the same parameters.
            load_lr_scheduler_states: False lets ``lr_scheduler`` begin anew, from the engine's own lr, momentum and
                betas.
            load_module_only: parameters and buffers, no counters, no random states.
            missing_ok: (None, {}) if there is no checkpoint at all.

        Raises CheckpointError on all ranks: before anything is changed if it does not fit; when a part has been loaded
        if a file turns out to be damaged. Called on all ranks with the same arguments.
        """
        flags = load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, missing_ok
        return self.checkpointer.load(self.lr_scheduler, load_dir, tag, *flags)

    def wait_for_checkpoint(self) -> None:
        """Wait for a save in the background. Raises CheckpointError if it has failed. Called on all ranks."""
        self.checkpointer.wait()

    # ---------------------------------------------------------------- whole models

    def full_state_dict(self, rank0_only: bool = False, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """The whole model's state dict at every stage, and however layers are spread over ranks: whole tensors, copies
        on the CPU, tied ones shared. ``rank0_only``: other ranks get an empty dict, and need no memory for it. dtype:
        None gives the compute dtype; ``torch.float32`` the master weights of what trains, ``torch.bfloat16`` and
        ``torch.float16`` these rounded; other floating tensors are cast. Called on all ranks."""
        return self.full_state.get(rank0_only, dtype)

    def load_full_state_dict(self, state: Mapping[str, object] | None, strict: bool = True) -> None:
        """Take rank 0's ``state`` of the whole model (other ranks may pass None) as the module's values, at every stage
        and grid of ranks; master weights follow. Raises RuntimeError on all ranks, before anything is changed, if
        shapes differ or, with ``strict``, names are missing or unexpected. Called on all ranks."""
        self.full_state.load(state, strict)

    def full_optimizer_state_dict(self, rank0_only: bool = False) -> dict[str, Any]:
        """The optimizer's states with whole tensors, in the form of ``torch.optim.Optimizer.state_dict``: by position
        of the parameters in ``engine.optimizer.param_groups``, copies on the CPU, for an optimizer of the same class
        over the whole model in plain PyTorch. ``rank0_only``: other ranks get an empty dict. Raises RuntimeError with a
        pipeline. Called on all ranks, between steps."""
        return self.full_state.of_optimizer(rank0_only)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        max_shard_size: str | int = "5GB",
        exclude_frozen_parameters: bool = False,
    ) -> None:
        """Write the model into the directory ``save_dir`` as Hugging Face's ``from_pretrained`` reads it:
        ``model.safetensors``, or files of at most ``max_shard_size`` bytes ("5GB", "500MB") and an index. All floating
        tensors in the engine's 16-bit dtype, bf16 if it computes in fp32; tied weights once. exclude_frozen_parameters:
        only what trains, such as adapters. Raises CheckpointError on all ranks if rank 0, which writes, cannot; what
        was there is left then. Called on all ranks."""
        self.full_state.save_16bit(save_dir, max_shard_size, exclude_frozen_parameters)

    # ---------------------------------------------------------------- state

    @property
    def module(self) -> torch.nn.Module:
        """The user's module, its parameters up to date."""
        self._param_gatherer.wait_all()
        return self._module

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The 16-bit dtype of the module's parameters; None in fp32 and under autocast, where each keeps its own."""
        return self._precision.compute

    @property
    def lr_scheduler(self) -> Any:
        """The schedule that the engine steps after every update, or None."""
        self._pipeline.outcomes.settle()
        return self._schedule.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: object) -> None:
        self._schedule.use(scheduler)

    @property
    def global_steps(self) -> int:
        """Windows that ended in an update or in a skipped one."""
        return self._pipeline.outcomes.global_steps

    @property
    def global_samples(self) -> int | None:
        """Samples of :attr:`global_steps` steps over all ranks, the x axis of the monitors; None if the config leaves
        the batch size to the user's loader."""
        size = self.config.train_batch_size
        return None if size is None else self._pipeline.outcomes.global_steps * size

    @property
    def skipped_steps(self) -> int:
        """Updates skipped because a gradient was not finite."""
        self._pipeline.outcomes.settle()
        return self._pipeline.outcomes.counters.skipped_steps

    @property
    def micro_steps(self) -> int:
        """Backwards so far: micro-batches, where each has one."""
        return self._pipeline.outcomes.counters.micro_steps

    @property
    def loss_scale(self) -> float:
        """The fp16 loss scale in force; 1.0 in other precisions."""
        return self._pipeline.gradient_scale.of_next()

    @property
    def rank(self) -> int:
        """Among all processes of the job."""
        return self.topology.world.rank

    @property
    def world_size(self) -> int:
        return self.topology.world.world_size

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's batches among those of a step, for samplers. The rank, where no other kind of
        parallelism is."""
        return self.topology.data.rank

    @property
    def data_parallel_world_size(self) -> int:
        return self.topology.data.world_size

    @property
    def tensor_parallel_rank(self) -> int:
        """Index of this rank's part of each layer."""
        return self.topology.tensor.rank

    @property
    def tensor_parallel_world_size(self) -> int:
        return self.topology.tensor.world_size

    @property
    def pipeline_stage(self) -> int:
        """Index of this rank's pipeline stage."""
        return self.topology.pipe.rank

    @property
    def pipeline_stages(self) -> int:
        return self.topology.pipe.world_size

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks as a grid with the dimensions "pipe", "data" and "tensor"; None with data parallelism alone."""
        return self.topology.mesh

    @property
    def local_rank(self) -> int:
        return local_rank()

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.config.gradient_accumulation_steps or 1

    @property
    def train_batch_size(self) -> int | None:
        """Samples per update over all ranks; None if the config leaves it to the user's loader."""
        return self.config.train_batch_size

    @property
    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples per backward on one rank; None if the config leaves it to the user's loader."""
        return self.config.train_micro_batch_size_per_gpu

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        self._pipeline.outcomes.settle()
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def train(self, mode: bool = True) -> Engine:
        self._module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        return self.module.parameters(recurse)

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.module.named_parameters(prefix, recurse)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The module's state dict, names without a prefix, in the compute dtype."""
        return self.module.state_dict(*args, **kwargs)

    if not TYPE_CHECKING:  # a checker knows the engine's own attributes only

        def __getattr__(self, name: str) -> Any:
            """An attribute of the module, for a name that the engine does not have."""
            if hasattr(type(self), name):  # a property of the engine has failed: its error, not the module's
                return object.__getattribute__(self, name)
            if "_module" not in vars(self) or (name.startswith("__") and name.endswith("__")):
                raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
            return getattr(self.module, name)

    def __reduce__(self) -> Any:
        raise TypeError(
            "an engine is a part of a job on several processes and cannot be copied or pickled; save "
            "engine.full_state_dict() and engine.optimizer.state_dict(), or copy.deepcopy(engine.module)"
        )

    def __repr__(self) -> str:
        precision = self._precision.compute or self._precision.autocast or "parameters' own"
        grid = f"{self.topology.grid}, " if not self.topology.trivial else ""
        stage = self.config.zero_optimization.stage
        return (
            f"Engine({grid}stage={stage}, world_size={self.world_size}, rank={self.rank}, "
            f"precision={precision}, device={self.device}, global_steps={self._pipeline.outcomes.global_steps})"
        )

    def send_buffers(self) -> None:
        """Buffers take the values of the first rank that has batches. Called on all ranks, before a forward."""
        source = self._join.source if self._join is not None else 0
        broadcast_together(self._module.buffers(), self._comm, self.device, "buffers", source)


_FORCED = (None, False, True)  # boundaries said by hand, by the number that travels
