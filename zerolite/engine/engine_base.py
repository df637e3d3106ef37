"""Base of all engines: their module, counters and sizes, and their states in checkpoints and as full tensors."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from zerolite.checkpoint.full_state import FullState
from zerolite.checkpoint.loading import Loader, LoadRequest
from zerolite.checkpoint.model_state import ModelState
from zerolite.checkpoint.parameter_access import ParameterAccess
from zerolite.checkpoint.saving import Saver, SaveRequest, directory_of
from zerolite.comm import HostGroup, collective, local_rank
from zerolite.data.dataloader import Loaders
from zerolite.engine.lifetime import EngineRef
from zerolite.engine.state_offload import StateOffload
from zerolite.engine.step_observers import LearningRateSchedule
from zerolite.monitor.memory_report import MemoryReport, memory_report
from zerolite.monitor.monitoring import Monitoring
from zerolite.precision.dtype_errors import explain
from zerolite.zero.engine_parts import EngineParts


class EngineBase:
    """Base class of engines: everything but the training loop.

    Attributes:
        config: the config, with its batch sizes resolved.
        device: the device of this rank.
        topology: the grid of ranks.
        optimizer: None for an engine without one.
        monitor: writes values to the config's monitors, also the user's own.
    """

    def __init__(
        self,
        parts: EngineParts,
        schedule: LearningRateSchedule,
        monitoring: Monitoring,
        register_unfrozen_params: Callable[[], None],
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        config, device, batch = parts.config, parts.device, parts.topology.batch
        self.config, self.device, self.topology = config, device, parts.topology
        self.optimizer: Any = parts.optimizer if parts.trains else None
        self.monitor = monitoring.monitor
        self._parts, self._schedule, self._monitoring = parts, schedule, monitoring
        size, drops = config.train_micro_batch_size_per_gpu, config.dataloader_drop_last
        self._loaders = Loaders(batch, device.type, size, drops, collate_fn)
        self._access = ParameterAccess(parts)  # zerolite.get_full_grad and the like find it by EngineRef.access
        self._offload = StateOffload(parts)
        model_state = ModelState(parts)
        shared = model_state, HostGroup(parts.topology.world, "checkpoint"), self._loaders, register_unfrozen_params
        self._saver, self._loader = Saver(*shared), Loader(*shared)
        self._full_state = FullState(model_state, self._access)
        self._reference = EngineRef(self)

    # ---------------------------------------------------------------- memory and traffic

    def memory_report(self) -> MemoryReport:
        """Measure this rank's memory: bytes by item, and the allocator's totals.

        ``str(report)`` is a table, ``report.to_dict()`` plain data. The call sends nothing and does not wait for the
        device, so one rank alone may make it.
        """
        return memory_report(self._parts)

    @collective
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
            RuntimeError: after an earlier call.
            ValueError: for another device or another name.
        """
        self._offload.offload(include, device, pin_memory, non_blocking)

    @collective
    def reload_states(self, non_blocking: bool = False) -> None:
        """Undo :meth:`offload_states`. Without such a call, nothing happens.

        An engine that is deleted while its states are on the host gives the model its parameters back.

        Args:
            non_blocking: accepted for DeepSpeed's sake, without effect. This call frees the memory on the host, so it
                must wait for the copies.
        """
        self._offload.reload()

    # ---------------------------------------------------------------- checkpoints

    @collective
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
            TypeError: for a client_state that is not plain.
        """
        flags = bool(save_latest), bool(exclude_frozen_parameters), bool(async_save)
        request = SaveRequest(directory_of(save_dir, "save_dir"), tag, *flags)
        return self._saver.save(request, client_state, self.lr_scheduler)

    @collective
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
            load_module_strict: require exactly the model's parameters and buffers. False loads those that both have.
            load_optimizer_states: also load the hyperparameters of the param groups, which must be the same.
            load_lr_scheduler_states: False lets ``lr_scheduler`` begin again, from the engine's own lr, momentum and
                betas.
            load_module_only: load parameters and buffers, but no counters and no random states.
            missing_ok: return (None, {}) if there is no checkpoint at all.

        Returns:
            The checkpoint's directory, and the client state.

        Raises:
            CheckpointError: on all ranks. If the checkpoint does not fit, nothing has been changed; if a file turns out
                to be damaged, a part has been loaded.
        """
        flags = load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, missing_ok
        request = LoadRequest(directory_of(load_dir, "load_dir"), tag, *map(bool, flags))
        self._saver.wait_for_all()
        return self._loader.load(request, self.lr_scheduler)

    @collective
    def wait_for_checkpoint(self) -> None:
        """Wait for a save in the background. Raises CheckpointError if it fails."""
        self._saver.wait()

    # ---------------------------------------------------------------- full models

    @collective
    def full_state_dict(self, rank0_only: bool = False, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Return the full model's state dict, at every stage and on every grid of ranks.

        Args:
            rank0_only: return an empty dict on the other ranks, which then need no memory for it.
            dtype: None gives the compute dtype. ``torch.float32`` gives the master weights of trained parameters;
                ``torch.bfloat16`` and ``torch.float16`` round these. Other floating tensors are cast.

        Returns:
            Full tensors, copies on the CPU. Tied tensors are one object.
        """
        return self._full_state.get(rank0_only, dtype)

    @collective
    def load_full_state_dict(self, state: Mapping[str, object] | None, strict: bool = True) -> None:
        """Load rank 0's state dict of the full model, at every stage and on every grid of ranks, masters included.

        Args:
            state: full tensors. Ranks other than 0 may pass None.
            strict: require exactly the model's names.

        Raises:
            RuntimeError: on all ranks, before anything is changed, if shapes differ, or with ``strict`` if names are
                missing or unexpected.
        """
        self._full_state.load(state, strict)

    @collective
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
            ValueError: for a wrong ``max_shard_size``.
        """
        self._full_state.save_16bit(save_dir, max_shard_size, exclude_frozen_parameters)

    # ---------------------------------------------------------------- state

    def destroy(self) -> None:
        """End the engine, even if something still refers to it: model and optimizer are ordinary ones again.

        ``del engine`` does the same for an engine that nothing else refers to; the user's optimizer then refuses to
        step. At stage 3 the model stays partitioned, for another engine or for ``zero.GatheredParameters``. May be
        called twice. Python's next garbage collection (``gc.collect()``) frees its memory.
        """
        self._reference.end()
        self._parts.pipeline.suspend("engine.destroy() has ended this engine; make another one by zerolite.initialize")

    @property
    def module(self) -> torch.nn.Module:
        """The user's module. Access waits until updated parameters have been gathered."""
        self._parts.param_gatherer.wait_all()
        return self._parts.model

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The 16-bit dtype of the module's parameters. None in fp32 and under autocast, where each keeps its own."""
        return self._parts.precision.compute

    @property
    def lr_scheduler(self) -> Any:
        """The learning rate schedule that the engine steps after every update, or None."""
        self._parts.pipeline.state.settle()
        return self._schedule.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: object) -> None:
        self._schedule.use(scheduler)

    @property
    def global_steps(self) -> int:
        """Number of steps so far: updates, and updates that were skipped."""
        return self._parts.pipeline.state.global_steps

    @property
    def global_samples(self) -> int | None:
        """Samples of :attr:`global_steps` steps over all ranks, the x axis of the monitors. None if the config does not
        set the batch size."""
        size = self.config.train_batch_size
        return None if size is None else self._parts.pipeline.state.global_steps * size

    @property
    def skipped_steps(self) -> int:
        """Number of updates that were skipped because a gradient was not finite."""
        self._parts.pipeline.state.settle()
        return self._parts.pipeline.state.counters.skipped_steps

    @property
    def micro_steps(self) -> int:
        """Number of backwards so far. It is the number of micro-batches if each has one backward."""
        return self._parts.pipeline.state.counters.micro_steps

    @property
    def loss_scale(self) -> float:
        """The fp16 loss scale in force; 1.0 in other precisions."""
        return self._parts.pipeline.state.next_loss_scale()

    @property
    def rank(self) -> int:
        """Rank among all processes of the job."""
        return self.topology.world.rank

    @property
    def world_size(self) -> int:
        return self.topology.world.world_size

    @property
    def data_parallel_rank(self) -> int:
        """Rank among the data-parallel ranks, for samplers. Equal to :attr:`rank` with data parallelism alone. Ranks
        that have parts of the same sequences have the same."""
        return self.topology.batch.rank

    @property
    def data_parallel_world_size(self) -> int:
        return self.topology.batch.world_size

    @property
    def sequence_parallel_rank(self) -> int:
        """Index of this rank's part of each sequence."""
        return self.topology.sequence.rank

    @property
    def sequence_parallel_world_size(self) -> int:
        return self.topology.sequence.world_size

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
        self._parts.pipeline.state.settle()
        return [float(group["lr"]) for group in self.optimizer.param_groups]

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
            if "_parts" not in vars(self) or (name.startswith("__") and name.endswith("__")):
                raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
            value = getattr(self.module, name)
            if isinstance(value, types.MethodType) and value.__self__ is self._parts.model and self.compute_dtype:
                return _explained(value, self.compute_dtype)
            return value

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an engine is a part of a job on several processes and cannot be copied or pickled; save "
            "engine.full_state_dict() and engine.optimizer.state_dict(), or copy.deepcopy(engine.module)"
        )

    def __repr__(self) -> str:
        precision = self._parts.precision.compute or self._parts.precision.autocast or "parameters' own"
        plain = self.topology.trivial and self.topology.sequence.world_size == 1
        grid = "" if plain else f"{self.topology.grid}, "
        stage = self.config.zero_optimization.stage
        return (
            f"Engine({grid}stage={stage}, world_size={self.world_size}, rank={self.rank}, "
            f"precision={precision}, device={self.device}, global_steps={self._parts.pipeline.state.global_steps})"
        )


def _explained(method: types.MethodType, compute: torch.dtype) -> types.MethodType:
    """Return a method of the user's module whose dtype errors say what to do, as those of the forward do."""

    @functools.wraps(method.__func__)
    def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return method.__func__(module, *args, **kwargs)
        except Exception as error:
            explain(error, module, compute)
            raise

    return types.MethodType(call, method.__self__)


def parts_of(engine: EngineBase) -> EngineParts:
    """Return the parts of an engine, for reports and plans."""
    return engine._parts
