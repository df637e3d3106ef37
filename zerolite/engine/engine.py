"""The engine: forward, backward, step, and the phases of a step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from zerolite.comm import DeviceMesh, local_rank
from zerolite.comm.initial_sync import broadcast_together
from zerolite.data import metrics
from zerolite.data.dataloader import RepeatingLoader
from zerolite.data.micro_batch import check_batches
from zerolite.diagnostics.stack_report import EngineInternals
from zerolite.engine.arguments import check_loss, checked_weight
from zerolite.engine.compiling import compile_blocks
from zerolite.engine.components import Components
from zerolite.monitor.memory_report import MemoryReport, memory_report
from zerolite.precision.dtype_errors import explain
from zerolite.utils.nested import find_tensors
from zerolite.utils.torch_private import current_backward


class Engine:
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

    def __init__(self, components: Components) -> None:
        c = components
        self.config = c.config
        self.device = c.device
        self.topology = c.topology
        self.optimizer = c.optimizer
        self.loaders = c.loaders
        self.dataloader: Any = None  # set by ``initialize`` if it was given ``training_data``
        self.loss_fn = c.loss_fn
        self.monitor = c.monitor  # users may write their own values to it
        self.step_log = c.step_log
        self.comms_logger = c.comms_logger
        self.checkpointer = c.checkpointer
        self.coordinator = c.coordinator
        self.runner = c.runner
        self.internals = EngineInternals(c.module, c.topology.data, c.reducer, c.pipeline.state.counters)
        self.call = c.call
        self.tensor_owners = c.tensor_owners
        self.state_offload = c.state_offload
        self.activation_checkpointing = c.activation_checkpointing
        self.pending_gradients = c.pending_gradients
        self.parameter_access = c.parameter_access  # zerolite.get_full_grad and the like find it here
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
        self._reference = c.reference
        self._batches: Iterator[Any] | None = None  # endless, over ``dataloader``
        c.reference.bind(self)

    # ---------------------------------------------------------------- the loop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward.

        Floating inputs are cast to the compute dtype (fp16, bf16). If the module returns a loss, the loss alone comes
        back in fp32; otherwise all 16-bit outputs do (docs/precision.md).
        """
        # An exception has ended this rank's backward early. The other ranks have launched all its reductions, so this
        # rank launches the rest of them now: otherwise the next collective would meet another one.
        # A backward that recomputes this forward (``checkpoint(engine, x)``) goes on. Its ranks launch reductions at
        # different times, so no buffers can be sent between them.
        recomputes = current_backward() != -1
        if self._reducer.current.open and not recomputes:
            self._pipeline.end_failed_backward()
        if self._same_inputs is not None:
            self._same_inputs.compare(find_tensors((args, kwargs)))
        sends = self._broadcast_buffers and self._module.training and not recomputes
        if sends:
            broadcast_together(self._module.buffers(), self._comm, self.device, "buffers")
        args, kwargs = self._boundary.enter((args, kwargs))
        watch = self.coordinator.engine_call() if self.coordinator is not None else contextlib.nullcontext()
        with watch, self._precision.autocast_context(self.device):
            try:
                outputs = self.call.call_module(*args, **kwargs)
            except Exception as error:
                if isinstance(error, RuntimeError):
                    self._pipeline.check_available()
                    self._pipeline.written.collect()  # raises the clearer error if the user has cast the module
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

        Called on all ranks.
        """
        check_loss(loss)
        if self._reducer.current.open:
            self._pipeline.end_failed_backward()
        exact = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        share = None
        if weight is not None:
            share = checked_weight(weight, scale_wrt_gas) / self._pipeline.state.weight_unit()
        first = self.step_log is not None and self._accumulation.empty
        self._pipeline.begin_backward(engine_scaled=scale_wrt_gas, weight=share)
        if share != 0:
            self._reducer.losses.append(exact.detach().reshape(()).float())
        factor = 1.0 / self._accumulation.micro_batches if scale_wrt_gas else 1.0
        if self.step_log is not None:
            self.step_log.add_loss(exact, factor, self._pipeline.state.global_steps, first, share)
        factor = factor if share is None else share
        try:
            exact.backward(torch.full_like(exact, factor), retain_graph=retain_graph)
        except BaseException:
            # p.grad shows what has been accumulated, so that a user who catches the error can drop it.
            self._reducer.show_accumulated()
            if self.coordinator is not None:
                # A gather in flight may fail because of the first error, and must not hide it.
                with contextlib.suppress(RuntimeError):
                    self.coordinator.reset()
            raise
        self._reducer.end_backward(complete=True)
        return loss

    def step(self, flush: bool = False) -> bool:
        """End a micro-batch. If it completes a gradient accumulation, update the parameters.

        Args:
            flush: also update if the accumulation is not complete, with the mean over the micro-batches so far. Nothing
                happens if there are none.

        Returns:
            True if an update was due.

        Called on all ranks.
        """
        # All ranks call the same backwards, so all see the same answer here, even if one got no gradients.
        if flush and self._accumulation.empty:
            return False
        self._pipeline.check_available()  # a call that raises does not count as a micro-batch
        if flush:  # first, because on_engine_step counts this call as a micro-batch
            if self.step_log is not None:
                self.step_log.close_early(self._accumulation.flush_factor(), self._pipeline.state.global_steps)
            self._pipeline.state.flush()
        closes = self._accumulation.on_engine_step() or flush
        if closes:
            self._pipeline.step()
        return closes

    # ---------------------------------------------------------------- whole steps

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

        Called on all ranks.
        """
        return self.runner.train_batch(self._batches_of(data_iter, "train_batch"))

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

        Called on all ranks.
        """
        batches = self._batches_of(data_iter, "eval_batch")
        count = num_micro_batches
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ValueError(
                f"engine.eval_batch: expected num_micro_batches to be an integer of at least 1 or None, got {count!r}"
            )
        training = [module for module in self._module.modules() if module.training]
        self._module.eval()
        try:
            return self.runner.eval_batch(batches, return_logits, compute_loss, count)
        finally:
            for module in training:  # modules that the user had put in eval mode stay in it
                module.training = True

    def is_own(self, data_iter: object) -> bool:
        """Return True if these are the batches of ``engine.dataloader`` that :meth:`train_batch` takes by itself."""
        return data_iter is self._batches

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
        self._accumulation.sync_disabled += 1
        try:
            yield
        finally:
            self._accumulation.sync_disabled -= 1

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide by hand if the current micro-batch ends its gradient accumulation.

        Args:
            is_boundary: stays in force until the next call. None returns to counting micro-batches.
        """
        self._accumulation.force_boundary(is_boundary)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the next (or pending) ``engine.step()`` will update."""
        return self._accumulation.is_boundary()

    # ---------------------------------------------------------------- phases

    def reduce_gradients(self) -> None:
        """Finish the mean over ranks of all gradients since the last step. Called on all ranks."""
        self._pipeline.reduce()

    def get_global_grad_norm(self) -> float | None:
        """Return the L2 norm of the last step's mean gradient over all parameters, without loss scale, before clipping.

        None before the first step. After :meth:`update` the last step is the one whose phases are running. The call
        sends nothing, so one rank alone may call it at any time. It waits for the device. For gradients that no step
        has used yet, see :meth:`clip_gradients`.
        """
        return self._pipeline.state.grad_norm()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model with torch.compile: each of its repeated blocks, such as the layers of a transformer, or
        the whole model if it has none.

        One graph over the whole model would hide no reduction behind its backward. ``engine.module.compile()`` makes
        it.

        Args:
            *args: positional arguments of ``torch.nn.Module.compile``.
            **kwargs: its keyword arguments, such as ``backend``, ``mode`` and ``dynamic``.
        """
        compile_blocks(self.module, *args, **kwargs)

    def memory_report(self) -> MemoryReport:
        """Measure this rank's memory: bytes by item, and the allocator's totals.

        ``str(report)`` is a table, ``report.to_dict()`` plain data. The call sends nothing and does not wait for the
        device, so one rank alone may make it.
        """
        return memory_report(self.tensor_owners)

    def offload_states(
        self,
        include: Iterable[object] | None = None,
        device: object = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move this engine's tensors from its device to the host, until :meth:`reload_states`.

        Call it between two steps, to lend the device's memory to something else. Tensors that are offloaded already
        stay where they are. Until they are reloaded, every call that trains, saves, loads or reads raises RuntimeError.

        Args:
            include: a list of DeepSpeed's names: "optim_states", "hp_params" (separate master weights), "lp_params"
                (the parameters that the modules compute with), "lp_grads" and "contiguous_grad_buffer". None moves all
                of them. Without "lp_params" the module can still compute under ``torch.no_grad()``.
            device: "cpu" is the only choice.
            pin_memory: register the host's memory with CUDA, for fast copies.
            non_blocking: return before the copies are complete. Work that is queued on the device afterwards may use
                the memory at once.

        Raises:
            RuntimeError: between ``update`` and ``publish``, and after an earlier call.
            ValueError: for another device or another name.

        Called on all ranks.
        """
        self.state_offload.offload(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Undo :meth:`offload_states`. Without such a call, nothing happens.

        An engine that is deleted while its states are on the host gives the model its parameters back.

        Args:
            non_blocking: accepted for DeepSpeed's sake, without effect. This call frees the memory on the host, so it
                must wait for the copies.

        Called on all ranks.
        """
        self.state_offload.reload()

    def clip_gradients(self, max_norm: float) -> float:
        """Clip the pending gradients to an L2 norm, and return the norm before, as ``torch.nn.utils.clip_grad_norm_``.

        Args:
            max_norm: replaces the config's ``gradient_clipping`` for this step. ``float("inf")`` clips nothing.

        Called on all ranks.
        """
        return self._pipeline.clip(max_norm)

    def update(self) -> None:
        """Update the master weights that this rank owns, then counters, scheduler and loss scale.

        If a gradient is not finite, the update is skipped. :meth:`publish` and :meth:`zero_grad` must follow. Called on
        all ranks.
        """
        self._pipeline.update()

    def publish(self) -> None:
        """All-gather the updated values into the module's parameters. Called on all ranks."""
        self._pipeline.all_gather_params()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last step; ``set_to_none`` has no effect. Called on all ranks."""
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
        return self.loaders.make(dataset, batch_size, route, pin_memory, collate_fn, num_local_io_workers)

    def prepare_loader(self, loader: object) -> Any:
        """Return a loader over the batches of ``loader``, whose samples :meth:`gather_for_metrics` knows.

        Args:
            loader: a torch DataLoader with a ``DistributedSampler``. On one process the sampler may be left out.

        Raises:
            ValueError: for other loaders. They can be iterated over as they are, without ``gather_for_metrics``.
        """
        return self.loaders.prepare(loader)

    def reduce(self, value: object, op: str = "mean") -> Any:
        """Reduce ``value`` over all ranks, with the same result on all of them.

        Floats are computed in float64, in rank order. Float tensors come back in their dtype, those of 16 bits and less
        in float32. Integers stay integers, and a sum of integer tensors is int64. The mean of integers is a float, of
        integer tensors float64. For bools, "max" means any, "min" all, and "sum" counts. NaN on one rank gives NaN.

        Args:
            value: a number, a tensor, or nested dicts, lists and tuples of them. None stays None.
            op: "mean" (each rank counts the same), "sum", "max" or "min".

        Raises:
            ValueError: on all ranks if one passes a value or an ``op`` that cannot be reduced.
            RuntimeError: on all ranks if their values differ in structure, dtype or shape.

        Called on all ranks.
        """
        return metrics.reduce(value, op, self._comm, self.device)

    def gather(self, tensors: object) -> Any:
        """Concatenate the rows of all ranks, in rank order, on all of them.

        Args:
            tensors: a tensor ``[rows, ...]`` of any dtype, or nested dicts, lists and tuples of such tensors. Ranks may
                have different numbers of rows, and none. A 0-dim tensor or a number is one row.

        Raises the errors of :meth:`reduce`. Called on all ranks.
        """
        return metrics.gather(tensors, self._comm, self.device)

    def gather_for_metrics(self, tensors: object, loader: object = None) -> Any:
        """Gather one row for each sample, in the order of the data set, without samples that were repeated.

        Samplers repeat samples to give all ranks equally many; plain :meth:`gather` would count them twice. Call it
        inside a loop over a loader of :meth:`deepspeed_io` or :meth:`prepare_loader`. If the loader shuffles, the rows
        are in the order of the shuffle.

        Args:
            tensors: as in :meth:`gather`, with one row for each sample of the current batch.
            loader: such a loader, after its loop: ``tensors`` are then this rank's rows of all its batches.

        Raises the errors of :meth:`reduce`, and ValueError if there is not one row for each sample. Called on all
        ranks.
        """
        return metrics.gather(tensors, self._comm, self.device, self.loaders, loader)

    def comms_summary(self) -> list[dict[str, Any]]:
        """Return this rank's measurements by ``comms_logger``, one dict for each kind of collective.

        Returns:
            Dicts with ``op``, ``tag`` (its purpose), ``ranks`` (how many take part), ``nbytes`` (full tensors of one
            collective), ``count``, ``total_bytes``, ``mean_ms``, ``algbw`` and ``busbw`` (10^9 bytes a second). With
            ``debug`` also the ``caller``.

        Raises:
            RuntimeError: if the config has no comms_logger.
        """
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
        """Save everything that the next step depends on, and return the checkpoint's directory, ``save_dir/tag``.

        Gradients are not saved, so call it at the end of a gradient accumulation, after a :meth:`step` that returned
        True. In the middle of one a warning is logged. This job goes on with its gradients, but a job that loads the
        checkpoint begins the accumulation again. A checkpoint of the same tag is replaced when the new one is complete.

        Args:
            save_dir: a directory on a file system that all nodes share.
            tag: name of the checkpoint; default ``global_step<N>``.
            client_state: rank 0's plain data (numbers, strings, lists, dicts, tensors, …), which
                :meth:`load_checkpoint` returns.
            save_latest: write the tag into ``save_dir/latest``.
            exclude_frozen_parameters: leave out parameters that are not trained, as for adapters.
            async_save: return after the copy to host memory, and write in the background. If that fails, the next call
                that saves, loads or waits raises the error.

        Raises:
            CheckpointError: on all ranks (a full disk, a rank that does not come, …).
            RuntimeError: if ranks hold different weights or learning rates.
            FloatingPointError: for non-finite weights.
            TypeError: for a client_state that is not plain.

        Called on all ranks with the same arguments.
        """
        request = save_dir, tag, save_latest, exclude_frozen_parameters, async_save
        return self.checkpointer.save(self.lr_scheduler, client_state, *request)

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
        """Continue from a checkpoint of any stage and any grid of ranks. Gradients that no step has used are dropped.

        Args:
            load_dir: the ``save_dir`` of :meth:`save_checkpoint`.
            tag: default: the tag in ``load_dir/latest``, or without that file the newest complete checkpoint.
            load_module_strict: require exactly the model's parameters and buffers. False loads those that both have,
                also if an adapter has been put around a module or taken away.
            load_optimizer_states: also load the hyperparameters of param groups that have the same parameters.
            load_lr_scheduler_states: False lets ``lr_scheduler`` begin again, from the engine's own lr, momentum and
                betas.
            load_module_only: load parameters and buffers, but no counters and no random states.
            missing_ok: return (None, {}) if there is no checkpoint at all.

        Returns:
            The checkpoint's directory, and the client state.

        Raises:
            CheckpointError: on all ranks. If the checkpoint does not fit, nothing has been changed; if a file turns out
                to be damaged, a part has been loaded.

        Called on all ranks with the same arguments.
        """
        flags = load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, missing_ok
        return self.checkpointer.load(self.lr_scheduler, load_dir, tag, *flags)

    def wait_for_checkpoint(self) -> None:
        """Wait for a save in the background. Raises CheckpointError if it fails. Called on all ranks."""
        self.checkpointer.wait()

    # ---------------------------------------------------------------- full models

    def full_state_dict(self, rank0_only: bool = False, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Return the full model's state dict, at every stage and on every grid of ranks.

        Args:
            rank0_only: return an empty dict on the other ranks, which then need no memory for it.
            dtype: None gives the compute dtype. ``torch.float32`` gives the master weights of trained parameters;
                ``torch.bfloat16`` and ``torch.float16`` round these. Other floating tensors are cast.

        Returns:
            Full tensors, copies on the CPU. Tied tensors are one object.

        Called on all ranks.
        """
        return self.full_state.get(rank0_only, dtype)

    def load_full_state_dict(self, state: Mapping[str, object] | None, strict: bool = True) -> None:
        """Load rank 0's state dict of the full model, at every stage and on every grid of ranks, masters included.

        Args:
            state: full tensors. Ranks other than 0 may pass None.
            strict: require exactly the model's names.

        Raises:
            RuntimeError: on all ranks, before anything is changed, if shapes differ, or with ``strict`` if names are
                missing or unexpected.

        Called on all ranks.
        """
        self.full_state.load(state, strict)

    def full_optimizer_state_dict(self, rank0_only: bool = False) -> dict[str, Any]:
        """Return the optimizer's states with full tensors, as ``torch.optim.Optimizer.state_dict`` has them.

        An optimizer of the same class over the full model in plain PyTorch can load them. States are keyed by the
        position of the parameter in ``engine.optimizer.param_groups``; tensors are copies on the CPU.

        Args:
            rank0_only: return an empty dict on the other ranks.

        Raises:
            RuntimeError: with a pipeline.

        Called on all ranks, between steps.
        """
        return self.full_state.get_optimizer_state(rank0_only)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        max_shard_size: str | int = "5GB",
        exclude_frozen_parameters: bool = False,
    ) -> None:
        """Write the model in 16 bits, in the format of Hugging Face's ``from_pretrained``.

        Floating tensors are written in the engine's 16-bit dtype, or in bf16 if it computes in fp32. Tied weights are
        written once. Rank 0 writes.

        Args:
            save_dir: a directory, for ``model.safetensors``, or for several files and an index.
            max_shard_size: bytes of a file at most, such as "5GB" or "500MB".
            exclude_frozen_parameters: write only trained parameters, such as adapters.

        Raises:
            CheckpointError: on all ranks if rank 0 cannot write. Older files are left as they were.

        Called on all ranks.
        """
        self.full_state.save_16bit(save_dir, max_shard_size, exclude_frozen_parameters)

    # ---------------------------------------------------------------- state

    def destroy(self) -> None:
        """End the engine, even if something still refers to it: model and optimizer are ordinary ones again.

        ``del engine`` does the same for an engine that nothing else refers to; the user's optimizer then refuses to
        step. At stage 3 the model stays partitioned, for another engine or for ``zero.GatheredParameters``. May be
        called twice. Python's next garbage collection (``gc.collect()``) frees its memory.
        """
        self._reference.end()
        self._pipeline.suspend("engine.destroy() has ended this engine; make another one by zerolite.initialize")

    @property
    def module(self) -> torch.nn.Module:
        """The user's module. Access waits until updated parameters have been gathered."""
        self._param_gatherer.wait_all()
        return self._module

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The 16-bit dtype of the module's parameters. None in fp32 and under autocast, where each keeps its own."""
        return self._precision.compute

    @property
    def lr_scheduler(self) -> Any:
        """The learning rate schedule that the engine steps after every update, or None."""
        self._pipeline.state.settle()
        return self._schedule.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: object) -> None:
        self._schedule.use(scheduler)

    @property
    def global_steps(self) -> int:
        """Number of steps so far: updates, and updates that were skipped."""
        return self._pipeline.state.global_steps

    @property
    def global_samples(self) -> int | None:
        """Samples of :attr:`global_steps` steps over all ranks, the x axis of the monitors. None if the config does not
        set the batch size."""
        size = self.config.train_batch_size
        return None if size is None else self._pipeline.state.global_steps * size

    @property
    def skipped_steps(self) -> int:
        """Number of updates that were skipped because a gradient was not finite."""
        self._pipeline.state.settle()
        return self._pipeline.state.counters.skipped_steps

    @property
    def micro_steps(self) -> int:
        """Number of backwards so far. It is the number of micro-batches if each has one backward."""
        return self._pipeline.state.counters.micro_steps

    @property
    def loss_scale(self) -> float:
        """The fp16 loss scale in force; 1.0 in other precisions."""
        return self._pipeline.state.next_loss_scale()

    @property
    def rank(self) -> int:
        """Rank among all processes of the job."""
        return self.topology.world.rank

    @property
    def world_size(self) -> int:
        return self.topology.world.world_size

    @property
    def data_parallel_rank(self) -> int:
        """Rank among the data-parallel ranks, for samplers. Equal to :attr:`rank` with data parallelism alone."""
        return self.topology.data.rank

    @property
    def data_parallel_world_size(self) -> int:
        return self.topology.data.world_size

    @property
    def tensor_parallel_rank(self) -> int:
        """Index of this rank's shard of each layer."""
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
        """The grid of ranks with the dimensions "pipe", "data" and "tensor". None with data parallelism alone."""
        return self.topology.mesh

    @property
    def local_rank(self) -> int:
        return local_rank()

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.config.gradient_accumulation_steps or 1

    @property
    def train_batch_size(self) -> int | None:
        """Samples per update over all ranks. None if the config does not set it."""
        return self.config.train_batch_size

    @property
    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples per backward on one rank. None if the config does not set it."""
        return self.config.train_micro_batch_size_per_gpu

    def get_lr(self) -> list[float]:
        """Return the learning rate of each param group."""
        self._pipeline.state.settle()
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
        """Return the module's own state dict: names without a prefix, values in the compute dtype."""
        return self.module.state_dict(*args, **kwargs)

    if not TYPE_CHECKING:  # a type checker would take any misspelled attribute for one of the module

        def __getattr__(self, name: str) -> Any:
            """Return the module's attribute, for a name that the engine does not have."""
            # Python also calls this if a property of the engine raised AttributeError: raise that error again.
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)
            if "_module" not in vars(self) or (name.startswith("__") and name.endswith("__")):
                raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
            return getattr(self.module, name)

    def __reduce__(self) -> NoReturn:
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
            f"precision={precision}, device={self.device}, global_steps={self._pipeline.state.global_steps})"
        )
