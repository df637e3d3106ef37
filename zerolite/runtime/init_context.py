"""``zero.Init``: building a model whose parameters never exist whole all at once."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from zerolite.accelerator import default_device
from zerolite.comm import Communicator, create_communicator, init_distributed, local_rank
from zerolite.config import load_config
from zerolite.runtime.initial_sync import broadcast_into
from zerolite.runtime.zero.partition_parameters import partition, partition_model
from zerolite.runtime.zero.partitioned_parameter import NOT_AVAILABLE, PartitionedParameter, gather, handle_of

_KEPT = 4  # parameters that an initialisation in hand may be working on


class Init:
    """Partition parameters as soon as their module has been built::

        with zerolite.zero.Init():
            model = Transformer(...)          # peak memory: the parts, and the largest module
        engine = zerolite.initialize(model, config)

    module: an existing model, partitioned at once; no context needed. config_dict_or_path: the training config,
    checked now; below stage 3 nothing is partitioned. remote_device: where parts rest: None or this process's device
    type. dtype: of the parts; by default the parameters' own, so that the master weights are exact. enabled: False
    for a context that does nothing.

    Rank 0's values are everyone's. Initialisation code of the model itself (``apply``, loops over parameters) finds
    parameters whole: they are gathered when a torch function touches them, and rank 0's result is taken. Modules on
    the meta device are left for ``zerolite.initialize``, or ``module=``, which call their ``reset_parameters()``.

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
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"zero.Init: expected dtype to be a floating torch.dtype or None, got {dtype!r}")
        if config_dict_or_path is not None:
            enabled = enabled and load_config(config_dict_or_path).zero_optimization.stage == 3
        self._enabled = enabled
        self._dtype = dtype
        self._built: dict[int, weakref.ref[torch.nn.Module]] = {}  # modules that got parameters in this context
        self._hooks: list[Any] = []
        self._mode: _GatherOnUse | None = None
        if not enabled:
            return
        init_distributed()
        self._device = default_device(local_rank())
        if remote_device not in (None, "none", self._device.type, str(self._device)):
            raise ValueError(
                f"zero.Init: expected remote_device to be None or '{self._device.type}', got {remote_device!r}; "
                "offloading parameters is not supported yet"
            )
        self._comm = init_communicator(self._device)
        if module is not None:
            partition_model(module, self._comm, self._device, dtype)

    def __enter__(self) -> Init:
        if self._enabled:
            self._hooks = [
                register_module_parameter_registration_hook(self._on_parameter),
                register_module_module_registration_hook(self._on_module),
            ]
            self._mode = _GatherOnUse(self._commit)
            self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mode is None:
            return
        self._mode.__exit__(kind, error, trace)
        mode, self._mode = self._mode, None
        for hook in self._hooks:
            hook.remove()
        if kind is None:
            mode.commit_all()
            self._partition(module for known in self._built.values() if (module := known()) is not None)
        self._built.clear()

    # Hooks of torch on every registration: (module, name, what) -> None.

    def _on_parameter(self, module: torch.nn.Module, name: str, parameter: Any) -> None:
        self._built[id(module)] = weakref.ref(module)

    def _on_module(self, module: torch.nn.Module, name: str, child: Any) -> None:
        if isinstance(child, torch.nn.Module) and self._mode is not None:
            with torch._C.DisableTorchFunction():
                self._mode.commit_all()
                self._partition(child.modules())

    @torch.no_grad()
    def _partition(self, modules: Iterable[torch.nn.Module]) -> None:
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.is_meta or handle_of(parameter) is not None:
                    continue
                broadcast_into(parameter.data, self._comm, self._device, "initial_sync")
                partition(parameter, f"{type(module).__name__}.{name}", self._comm, self._device, self._dtype)
            self._built.pop(id(module), None)

    @torch.no_grad()
    def _commit(self, handle: PartitionedParameter) -> None:
        """A parameter was gathered because something touched it: rank 0's values are everyone's again."""
        if handle.ref() is None:
            return
        data = handle.parameter.data
        if data.data_ptr() != handle.view.data_ptr():
            handle.view.copy_(data)
        broadcast_into(handle.full, self._comm, self._device, "initial_sync")
        handle.write()
        handle.release()


class _GatherOnUse(TorchFunctionMode):
    """Gathers partitioned parameters that a torch function or attribute touches, and keeps the latest few."""

    def __init__(self, commit: Callable[[PartitionedParameter], None]) -> None:
        super().__init__()
        self._commit = commit
        self._open: OrderedDict[int, PartitionedParameter] = OrderedDict()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__set__":
            with torch._C.DisableTorchFunction():
                self._prepare([*args, *(kwargs or {}).values()])
        return func(*args, **(kwargs or {}))

    def _prepare(self, values: Iterable[Any]) -> None:
        flat = [v for value in values for v in (value if isinstance(value, (list, tuple)) else (value,))]
        touched = [h for v in flat if isinstance(v, torch.nn.Parameter) and (h := handle_of(v)) is not None]
        for handle in touched:
            if handle.status is NOT_AVAILABLE:
                gather([handle])
                self._open[id(handle)] = handle
            elif id(handle) in self._open:
                self._open.move_to_end(id(handle))
        while len(self._open) > max(_KEPT, len(touched)):
            self._commit(self._open.popitem(last=False)[1])

    def commit_all(self) -> None:
        """Partition again what was gathered. Called on all ranks at the same place of the model's construction."""
        while self._open:
            self._commit(self._open.popitem(last=False)[1])


_kept: list[Communicator] = []  # one for all uses of Init, until its group ends


def init_communicator(device: torch.device) -> Communicator:
    """The communicator of parameters that no engine has taken over yet. Called on all ranks."""
    if not _kept or _kept[0].group is None or _kept[0].group is not torch.distributed.group.WORLD:
        _kept[:] = [create_communicator(device)]
    return _kept[0]
