"""``zero.Init``: building a model whose parameters never exist whole all at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from zerolite.accelerator import default_device
from zerolite.comm import create_communicator, init_distributed, local_rank
from zerolite.config import load_config
from zerolite.runtime.full_state import guard_module, guard_state_dict
from zerolite.runtime.zero.partition_parameters import GatherOnUse, partition, partition_model, take_rank0
from zerolite.runtime.zero.partitioned_parameter import handle_of


class Init:
    """Partition parameters as soon as their module has been built::

        with zerolite.zero.Init():
            model = Transformer(...)          # peak memory: the parts, and the largest module
        engine = zerolite.initialize(model, config)

    module: an existing model, partitioned at once; no context needed. config_dict_or_path: the training config,
    checked now; below stage 3 nothing is partitioned (with stage "auto" it is, until the engine has chosen).
    remote_device: where parts rest: None or this process's device type. dtype: of the parts; by default the parameters'
    own, so that the master weights are exact. enabled: False for a context that does nothing.

    Rank 0's values are everyone's. Initialisation code of the model itself (``apply``, loops over parameters) finds
    parameters whole: they are gathered when a torch function touches their values, on all ranks, and rank 0's result
    is taken; their shape can be read anywhere. Modules on the meta device are left for ``zerolite.initialize``, or
    ``module=``, which call their ``reset_parameters()``.

    Starts torch.distributed if it does not run. Raises ValueError for the arguments, ConfigError for the config.
    Entered and left on all ranks, which build equal models.
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        config_dict_or_path: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        remote_device: str | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
    ) -> None:
        if module is not None and not isinstance(module, torch.nn.Module):
            raise ValueError(f"zero.Init: expected module to be a torch.nn.Module or None, got {type(module).__name__}")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"zero.Init: expected dtype to be a floating torch.dtype or None, got {dtype!r}")
        if config_dict_or_path is not None:
            stage = load_config(config_dict_or_path).zero_optimization.stage
            enabled = enabled and stage in (3, "auto")
        self._enabled = enabled
        self._dtype = dtype
        self._built: dict[int, torch.nn.Module] = {}  # modules that got parameters and have not been partitioned
        self._hooks: list[Any] = []
        self._mode: GatherOnUse | None = None
        if not enabled:
            return
        init_distributed()
        self._device = default_device(local_rank())
        if remote_device not in (None, "none", self._device.type, str(self._device)):
            raise ValueError(
                f"zero.Init: expected remote_device to be None or '{self._device.type}', got {remote_device!r}; "
                "offloading parameters is not supported yet"
            )
        self._comm = create_communicator(self._device)  # until an engine takes the parameters over
        if module is not None:
            partition_model(module, self._comm, self._device, dtype)
            guard_state_dict(module)

    def __enter__(self) -> Init:
        if self._enabled:
            self._hooks = [
                register_module_parameter_registration_hook(self._on_parameter),
                register_module_module_registration_hook(self._on_module),
            ]
            self._mode = GatherOnUse(self._dtype, self._partition_finished)
            self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mode is None:
            return
        for hook in self._hooks:
            hook.remove()
        try:
            self._mode.__exit__(kind, error, trace)
            if kind is None:
                self._partition(list(self._built.values()))
        finally:
            self._mode = None
            self._built.clear()

    # Hooks of torch on every registration: (module, name, what) -> None.

    def _on_parameter(self, module: torch.nn.Module, name: str, parameter: Any) -> None:
        self._built[id(module)] = module

    def _on_module(self, module: torch.nn.Module, name: str, child: Any) -> None:
        if isinstance(child, torch.nn.Module) and self._mode is not None:
            self._mode.commit()
            self._partition(child.modules())
            for inside, parameter in child.named_parameters():
                handle = handle_of(parameter)
                if handle is not None and handle.manager is None:
                    handle.name = f"{name}.{inside}"

    def _partition_finished(self) -> None:
        """Before a tensor is made: partition the modules whose constructors have returned."""
        if self._built and self._mode is not None:
            unfinished = _under_construction()
            finished = [module for key, module in self._built.items() if key not in unfinished]
            if finished:
                self._mode.commit()
                self._partition(finished)

    @torch.no_grad()
    def _partition(self, modules: Iterable[torch.nn.Module]) -> None:
        with torch._C.DisableTorchFunction():
            for module in modules:
                for name, parameter in module._parameters.items():
                    if parameter is None or handle_of(parameter) is not None or is_lazy(parameter):
                        continue
                    if not parameter.is_meta:
                        take_rank0(parameter, self._comm, self._device)
                        partition(parameter, name, self._comm, self._device, self._dtype)
                if module._parameters:
                    guard_module(module)
                self._built.pop(id(module), None)


def _under_construction() -> set[int]:
    """The ids of the modules whose ``__init__`` this thread is running."""
    found: set[int] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            found.add(id(frame.f_locals.get(code.co_varnames[0])))
        frame = frame.f_back
    return found
