"""``deepspeed.runtime.engine``: the engine with DeepSpeed's methods."""

from __future__ import annotations

import copy
import inspect
import operator
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zerolite.checkpoint.partial_state import gather_in_copies
from zerolite.comm import collective
from zerolite.compat.deepspeed.absent import sentence_for
from zerolite.compat.deepspeed.runtime import checkpoints
from zerolite.compat.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, forward_to, make_optimizer
from zerolite.compat.deepspeed.runtime.config import DeepSpeedConfig
from zerolite.engine.engine import Engine
from zerolite.moe.experts import spread_calls
from zerolite.zero.stage3.live_view import refuse_operations


def _engine_attribute(name: str) -> property:
    """Make a property that returns the engine's attribute ``name``."""
    original = getattr(Engine, name, None)  # without those that a constructor sets
    return property(lambda self: getattr(self.zerolite, name), doc=original and original.__doc__)


def _setting(path: str) -> Callable[[DeepSpeedEngine], Any]:
    """Make a method that returns a setting of the engine's config."""
    get = operator.attrgetter(f"zerolite.config.{path}")

    def setting(self: DeepSpeedEngine) -> Any:
        return get(self)

    setting.__doc__ = f"Return the config's ``{path}``."
    return setting


class SyncedGenerate:
    """``generate`` of transformers' models whose experts are on several ranks: all run equally many forwards, because
    they exchange tokens in each. TRL asks for that at stage 3 alone."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    @classmethod
    def install(cls, model: torch.nn.Module) -> None:
        """Replace ``generate`` of the modules that have such an argument."""
        for module in model.modules():
            generate = getattr(type(module), "generate", None)
            if generate is not None and "synced_gpus" in inspect.signature(generate).parameters:
                vars(module)["generate"] = cls(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module
        if spread_calls(module):  # and not gathered for generation
            kwargs.setdefault("synced_gpus", True)
        return type(module).generate(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncedGenerate:
        return SyncedGenerate(copy.deepcopy(self._module, memo))


class ThroughputTimer:
    """DeepSpeed's timer of samples a second. The config's ``steps_per_print`` logs them here."""

    def update_epoch_count(self) -> None:
        """Do nothing: the rates that are logged do not depend on epochs."""


class DeepSpeedEngine(torch.nn.Module):
    """A module around the user's model, with the forward, backward and step of a :class:`zerolite.Engine`.

    Other names are looked up in the model.

    Attributes:
        module: the user's model.
        config: the dict that ``initialize`` was given.
        zerolite: the engine behind this one; None after :meth:`destroy`.
        optimizer: a :class:`DeepSpeedOptimizer`. An engine that only evaluates has None, or at stage 3 the owner of the
            hooks, as in DeepSpeed. TRL uses that when a reference model generates.
    """

    def __init__(self, engine: Engine, config: DeepSpeedConfig) -> None:
        super().__init__()
        self.module = engine.module
        self.training = self.module.training
        self.config = config.raw
        self.zerolite = engine
        self.optimizer = make_optimizer(engine)
        refuse_operations(engine.module.parameters())  # programs for DeepSpeed read parameters on one rank alone
        topology = engine.topology
        if topology.divides_layers and topology.pipe.world_size == 1:
            gather_in_copies(engine.module, engine._full_state.of)  # which accelerate makes of state dicts
        if topology.expert.world_size > 1:
            SyncedGenerate.install(engine.module)
        self.training_dataloader = engine.dataloader
        self.loaded_checkpoint_tag: str | None = None
        self._at_boundary = False  # the last step() was at the boundary of a gradient accumulation

    # ---------------------------------------------------------------- the loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.zerolite(*args, **kwargs)

    @collective
    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **ignored: Any
    ) -> torch.Tensor:
        """Run backward through ``loss`` and return it.

        Args:
            loss: divided by gradient_accumulation_steps unless ``scale_wrt_gas`` is False.
            retain_graph: as in ``Tensor.backward``.
            scale_wrt_gas: see ``loss``.
            ignored: DeepSpeed's deprecated arguments.
        """
        unknown = set(ignored) - {"allreduce_gradients", "release_loss"}
        if unknown:
            raise TypeError(f"DeepSpeedEngine.backward got unexpected arguments: {', '.join(sorted(unknown))}")
        return self.zerolite.backward(loss, scale_wrt_gas, retain_graph)

    @collective
    def step(self, lr_kwargs: Any = None) -> None:
        """End a micro-batch.

        At the boundary of a gradient accumulation, clip and update, clear the gradients and step the schedule.
        """
        if lr_kwargs:
            raise ValueError(
                f"DeepSpeedEngine.step: expected no lr_kwargs, got {lr_kwargs!r}; step the schedule yourself"
            )
        self._at_boundary = self.zerolite.step()

    @collective
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last step."""
        self.zerolite.zero_grad()

    train_batch = forward_to("zerolite", Engine.train_batch)  # with a pipeline the only way to train

    def eval_batch(
        self,
        data_iter: Iterator[object],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """See :meth:`zerolite.Engine.eval_batch`.

        Args:
            reduce_output: "avg". With ``compute_loss=False`` it has no effect: outputs are not reduced.
            bcast_loss: has no effect: every rank gets the loss.
        """
        if compute_loss and reduce_output != "avg":
            raise ValueError(
                f'DeepSpeedEngine.eval_batch: expected reduce_output="avg", got {reduce_output!r}; call it with '
                "compute_loss=False and compute the losses from the outputs"
            )
        return self.zerolite.eval_batch(data_iter, return_logits, compute_loss, num_micro_batches)

    @collective
    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Complete the average of all gradients over ranks."""
        self.zerolite.reduce_gradients()

    no_sync = forward_to("zerolite", Engine.no_sync)
    coalesce_grad_reduction = forward_to("zerolite", Engine.no_sync)  # what it leaves, the step reduces
    set_gradient_accumulation_boundary = forward_to("zerolite", Engine.set_gradient_accumulation_boundary)
    is_gradient_accumulation_boundary = forward_to("zerolite", Engine.is_gradient_accumulation_boundary)
    get_global_grad_norm = forward_to("zerolite", Engine.get_global_grad_norm)
    get_lr = forward_to("zerolite", Engine.get_lr)
    deepspeed_io = forward_to("zerolite", Engine.deepspeed_io)
    offload_states = forward_to("zerolite", Engine.offload_states)
    reload_states = forward_to("zerolite", Engine.reload_states)

    def empty_partition_cache(self) -> None:
        """Do nothing: between two steps stage 3 keeps no gathered parameters but the persistent ones."""

    def was_step_applied(self) -> bool:
        """Return True if the last ``step()`` changed weights. Waits for the step."""
        return self._at_boundary and isinstance(self.optimizer, DeepSpeedOptimizer) and not self.optimizer.overflow

    def compile(self, backend: object = None, compile_kwargs: dict[str, Any] | None = None, **ignored: Any) -> None:
        """Compile the repeated blocks of the module with torch.compile, or the module if it has none."""
        self.zerolite.compile(**{**({} if backend is None else {"backend": backend}), **(compile_kwargs or {})})

    def destroy(self) -> None:
        """End the engine, so that another one may use the model, and drop it. May be called twice."""
        if self.zerolite is not None:
            self.zerolite.destroy()
        self.zerolite = None  # type: ignore[assignment]  # nothing may be called afterwards
        self.optimizer = None
        self.training_dataloader = None

    @property
    def tput_timer(self) -> ThroughputTimer:
        """The object whose ``update_epoch_count`` scripts call at the end of an epoch."""
        return ThroughputTimer()

    # ---------------------------------------------------------------- checkpoints and full models

    @collective
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: object = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a checkpoint to ``save_dir/tag``, by default ``global_step<N>``.

        ``zero_to_fp32.py`` is written beside it. See :meth:`zerolite.Engine.save_checkpoint`.
        """
        checkpoints.save(self.zerolite, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        return True

    @collective
    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., object] | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint of this class or of DeepSpeed, of any stage and number of ranks.

        Returns:
            Its directory and the client state, or (None, {}) if there is none.
        """
        if custom_load_fn is not None:
            raise ValueError("DeepSpeedEngine.load_checkpoint: custom_load_fn is not supported; leave it out")
        flags = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        path, client_state = checkpoints.load(self.zerolite, load_dir, tag, flags)
        self.loaded_checkpoint_tag = None if path is None else os.path.basename(path)
        return path, client_state

    @collective
    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the full model as one file of ``torch.save``, in the compute dtype."""
        state = self._consolidated_16bit_state_dict(exclude_frozen_parameters)

        def write() -> None:
            os.makedirs(save_dir, exist_ok=True)
            torch.save(state, os.path.join(save_dir, save_filename))

        checkpoints.on_rank0(self.zerolite, "DeepSpeedEngine.save_16bit_model", write)
        return True

    save_fp16_model = save_16bit_model

    @collective
    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, object] | None:
        """Return the full model's state on rank 0's CPU in the compute dtype; None on other ranks."""
        state = self.zerolite.full_state_dict(rank0_only=True)
        if self.zerolite.rank != 0:
            return None
        return self._without_frozen(state) if exclude_frozen_parameters else state

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the module's state dict, with names without a prefix."""
        return self._without_frozen(self.module.state_dict()) if exclude_frozen_parameters else self.module.state_dict()

    def _without_frozen(self, state: dict[str, Any]) -> dict[str, Any]:
        frozen = {name for name, p in self.module.named_parameters(remove_duplicate=False) if not p.requires_grad}
        return {name: value for name, value in state.items() if name not in frozen}

    # ---------------------------------------------------------------- config and counters

    @property
    def lr_scheduler(self) -> Any:
        """The schedule that ``step`` moves, or None."""
        return self.zerolite.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: object) -> None:
        self.zerolite.lr_scheduler = scheduler

    global_steps = _engine_attribute("global_steps")
    micro_steps = _engine_attribute("micro_steps")
    skipped_steps = _engine_attribute("skipped_steps")
    device = _engine_attribute("device")
    monitor = _engine_attribute("monitor")
    local_rank = _engine_attribute("local_rank")
    global_rank = _engine_attribute("rank")
    world_size = _engine_attribute("world_size")
    dp_world_size = _engine_attribute("data_parallel_world_size")
    mp_world_size = _engine_attribute("tensor_parallel_world_size")

    @property
    def global_samples(self) -> int:
        return int(self.global_steps * self.train_batch_size())

    def train_batch_size(self) -> int:
        return int(self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.dp_world_size)

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.zerolite.train_micro_batch_size_per_gpu or 1

    def gradient_accumulation_steps(self) -> int:
        return self.zerolite.gradient_accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    gradient_clipping = _setting("gradient_clipping")
    steps_per_print = _setting("steps_per_print")
    wall_clock_breakdown = _setting("wall_clock_breakdown")
    fp16_enabled = _setting("fp16.enabled")
    bfloat16_enabled = _setting("bf16.enabled")
    zero_optimization_stage = _setting("zero_optimization.stage")
    zero_gather_16bit_weights_on_model_save = _setting("zero_optimization.stage3_gather_16bit_weights_on_model_save")
    zero_offload_param = _setting("zero_optimization.offload_param")
    zero_offload_optimizer = _setting("zero_optimization.offload_optimizer")

    def loss_scale(self) -> float:
        return self.zerolite.loss_scale

    def dynamic_loss_scale(self) -> bool:
        return isinstance(self.optimizer, DeepSpeedOptimizer) and self.optimizer.dynamic_loss_scale

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.zero_optimization_stage() == 3

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module for a name that this class lacks."""
        sentence = sentence_for(f"DeepSpeedEngine.{name}")
        if sentence is not None:
            raise AttributeError(sentence)
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = vars(self).get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise AttributeError(f"neither DeepSpeedEngine nor its module has an attribute {name!r}") from None
            return getattr(module, name)
