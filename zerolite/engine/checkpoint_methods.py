"""Engine methods for checkpoints and whole models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from zerolite.checkpoint.checkpointer import Checkpointer, directory_of
from zerolite.checkpoint.loading import LoadRequest
from zerolite.checkpoint.saving import SaveRequest
from zerolite.comm import Topology
from zerolite.data.dataloader import Loaders
from zerolite.engine.full_optimizer_state import full_optimizer_state_dict
from zerolite.engine.full_state import full_state_dict, load_full_state_dict, save_16bit_model
from zerolite.engine.parameter_access import ParameterAccess
from zerolite.engine.whole_model import Masters
from zerolite.precision.dtypes import Precision
from zerolite.utils.dtypes import HALF
from zerolite.zero.commands import Command
from zerolite.zero.step import StepPipeline

Path = str | os.PathLike[str]


class CheckpointMethods:
    """The part of :class:`~zerolite.engine.engine.Engine` that is about checkpoints and whole models."""

    checkpointer: Checkpointer
    _module: torch.nn.Module
    _pipeline: StepPipeline
    _precision: Precision
    device: torch.device
    loaders: Loaders
    parameter_access: ParameterAccess  # what zerolite.get_full_grad and its like ask
    topology: Topology

    @property
    def module(self) -> torch.nn.Module:
        raise NotImplementedError

    @property
    def lr_scheduler(self) -> Any:
        raise NotImplementedError

    def save_checkpoint(
        self,
        save_dir: Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        async_save: bool = False,
    ) -> str:
        """Save everything that makes the next step the same, and return the checkpoint's directory, ``save_dir/tag``.

        It loads at any stage and at any grid of ranks. Until it is complete, what was there stays, ``latest`` included;
        a checkpoint of the same tag is replaced. In the middle of a window its gradients are saved too, but not with a
        pipeline or sequence parallelism.

        save_dir: on a file system that all nodes share. tag: default ``global_step<N>``. client_state: plain data
        (numbers, strings, lists, dicts, tensors, …), that of rank 0, which :meth:`load_checkpoint` gives back.
        save_latest: let ``save_dir/latest`` name it. exclude_frozen_parameters: leave out what is not trained, as for
        adapters. async_save: return when all has been copied to host memory, and write in the background; what goes
        wrong there is raised by the next call that saves, loads or waits (:meth:`wait_for_checkpoint`,
        ``zerolite.destroy``).

        Raises CheckpointError on all ranks (a full disk, a rank that does not come within ``checkpoint.timeout_s``, …),
        RuntimeError if ranks hold different weights or learning rates (``consistency_check_interval``),
        FloatingPointError if the last update has made weights non-finite, TypeError for a client_state that is not
        plain, ValueError for a tag that is no name. Called on all ranks with the same arguments, between steps.
        """
        request = SaveRequest(
            directory_of(save_dir, "save_dir"),
            tag,
            bool(save_latest),
            bool(exclude_frozen_parameters),
            bool(async_save),
        )
        with self._pipeline.commands(Command.SAVE):
            return self.checkpointer.save(request, client_state, self.lr_scheduler, self.loaders)

    def follow_save(self) -> None:
        """A save of the ranks that go on. Called by ``Join``."""
        self.checkpointer.follow_save(self.lr_scheduler)

    def load_checkpoint(
        self,
        load_dir: Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        missing_ok: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Continue from a checkpoint, saved at whichever stage and grid of ranks. Gradients that no step has used are
        dropped. Returns its directory and the client state.

        tag: default the one that ``load_dir/latest`` names, or, without that file, the newest complete one.
        load_module_strict: the checkpoint must have exactly the model's parameters and buffers; False loads what both
        have, also where an adapter has been put around a module or taken away. load_optimizer_states: also the
        hyperparameters of param groups that have the same parameters. load_lr_scheduler_states: of ``lr_scheduler``;
        False lets it begin anew, from the engine's own lr, momentum and betas.
        load_module_only: parameters and buffers, and nothing else: no counters, no random states. missing_ok: (None,
        {}) if there is no checkpoint at all, instead of an error.

        Raises CheckpointError on all ranks: if nothing fits, before anything is changed; if a file turns out to be
        damaged while it is read, when a part has been loaded. Nothing in the files is executed. Called on all ranks
        with the same arguments, between steps.
        """
        request = LoadRequest(
            directory_of(load_dir, "load_dir"),
            tag,
            bool(load_module_strict),
            bool(load_optimizer_states),
            bool(load_lr_scheduler_states),
            bool(load_module_only),
            bool(missing_ok),
        )
        with self._pipeline.commands(Command.OTHER):
            return self.checkpointer.load(request, self.lr_scheduler, self.loaders)

    def wait_for_checkpoint(self) -> None:
        """Until a checkpoint that is being saved in the background is complete. Raises CheckpointError if that has
        failed. Called on all ranks."""
        self.checkpointer.wait()

    # ---------------------------------------------------------------- whole models

    def full_state_dict(self, rank0_only: bool = False, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """The whole model's state dict at every stage, and however layers are spread over ranks: whole tensors, copies
        on the CPU, tied ones shared. ``rank0_only``: other ranks get an empty dict, and need no memory for it.

        dtype: None gives the compute dtype; ``torch.float32`` the master weights of what trains, ``torch.bfloat16`` and
        ``torch.float16`` these rounded; other floating tensors are cast. Raises ValueError for another dtype. Called on
        all ranks.
        """
        self._check_readable()
        return full_state_dict(self.module, self.topology, self.device, rank0_only, dtype, self._masters())

    def load_full_state_dict(self, state: Mapping[str, Any] | None, strict: bool = True) -> None:
        """Take rank 0's ``state`` of the whole model (other ranks may pass None) as the module's values, at every stage
        and grid of ranks; master weights follow. Optimizer states stay. Raises RuntimeError on all ranks, before
        anything is changed, if shapes differ or, with ``strict``, names are missing or unexpected. Called on all
        ranks."""
        self._pipeline.check_here()
        loaded = set(load_full_state_dict(self.module, state, self.topology, self.device, strict))
        named = self._module.named_parameters(remove_duplicate=False)
        self._pipeline.on_parameters_loaded(p for name, p in named if name in loaded)

    def full_optimizer_state_dict(self, rank0_only: bool = False) -> dict[str, Any]:
        """The optimizer's states with whole tensors, in the form of ``torch.optim.Optimizer.state_dict``: by position
        of the parameters in ``engine.optimizer.param_groups``, copies on the CPU. An optimizer of the same class over
        the whole model in plain PyTorch loads it. ``rank0_only``: other ranks get an empty dict.

        States are gathered one by one, over every stage and over tensor parallelism. Raises RuntimeError with a
        pipeline. Called on all ranks, between steps.
        """
        self._check_readable()
        self._pipeline.settle()
        return full_optimizer_state_dict(self.checkpointer.parts.model, self.parameter_access, rank0_only)

    def save_16bit_model(
        self, save_dir: Path, max_shard_size: str | int = "5GB", exclude_frozen_parameters: bool = False
    ) -> None:
        """Write the model into the directory ``save_dir`` as Hugging Face's ``from_pretrained`` reads it:
        ``model.safetensors``, or files of at most ``max_shard_size`` bytes ("5GB", "500MB") and an index. All floating
        tensors in the engine's 16-bit dtype, bf16 if it computes in fp32; tied weights once. In memory at any time: one
        parameter.

        exclude_frozen_parameters: only what trains, such as adapters. Raises CheckpointError on all ranks if rank 0,
        which writes, cannot; what was there is left then. Called on all ranks.
        """
        self._check_readable()
        computes = self._precision.compute or self._precision.autocast
        dtype = computes if computes in HALF else torch.bfloat16
        assert dtype is not None
        directory = directory_of(save_dir, "save_dir")
        save_16bit_model(
            self.module,
            self.topology,
            self.device,
            directory,
            dtype,
            self._masters(),
            max_shard_size,
            exclude_frozen_parameters,
        )

    def _check_readable(self) -> None:
        self._pipeline.check_here()
        self._pipeline.check_whole()

    def _masters(self) -> Masters:
        return Masters(self.parameter_access.positions(), self.parameter_access.parts_of_masters)
