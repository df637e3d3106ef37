"""``zero.Init``: build a model whose parameters are partitioned as they are created."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from zerolite.comm import Communicator, create_communicator, init_distributed, local_rank
from zerolite.config import ZeroliteConfig, load_config
from zerolite.config.offload import OffloadOptimizerConfig
from zerolite.offload.from_config import placements_of
from zerolite.offload.placement import HostPlacement, Placement, Placements
from zerolite.offload.transfers import Transfers
from zerolite.precision.dtypes import scales_of_quantized
from zerolite.utils.accelerator import default_device
from zerolite.zero.flat import check_has_memory
from zerolite.zero.groups import RankGroups
from zerolite.zero.stage3.comm_context import CommContext
from zerolite.zero.stage3.live_view import LiveView
from zerolite.zero.stage3.partition_parameters import Initialising, broadcast_from_rank0, partition
from zerolite.zero.stage3.partitioned_model import partition_model
from zerolite.zero.stage3.partitioned_parameter import handle_of
from zerolite.zero.stage3.shard_reader import ShardReader


class Init:
    """Context that partitions parameters as soon as their module has been built::

        with zerolite.zero.Init():
            model = Transformer(...)          # peak memory: the shards and the largest two modules
        engine = zerolite.initialize(model, config)

    Args:
        module: an existing model, which is partitioned at once, without entering the context.
        config_dict_or_path: the training config, checked now. Below stage 3 nothing is partitioned; with stage "auto"
            parameters are, until the engine has chosen. With zero_optimization.offload_param shards are on the host or
            on disk from the beginning. So a model may be larger than the memory of the device or the host.
            ``zerolite.initialize`` places them again.
        remote_device: placement of the shards: "none" or this process's device for the device, "cpu" for the host,
            "nvme" for the disk that the config names; None for the placement in the config.
        dtype: dtype of the shards; None for that of the parameters, so that the master weights are exact.
        enabled: False for a context that does nothing.

    A module's parameters are partitioned when the next module makes its own, or when it becomes part of another one.
    All ranks take rank 0's values. The model's own initialisation code (``apply``, loops over parameters) works: when
    a torch function uses values they are gathered, on all ranks, and rank 0's result is taken. Shapes can be read
    anywhere. A tensor taken from a parameter (``p.data``, a view) stays linked with it. Modules on the meta device are
    left for ``zerolite.initialize``, or for ``module=``, which call their ``reset_parameters()``.

    Starts torch.distributed if it does not run. Entered and left on all ranks, which build equal models.

    Raises:
        ValueError: for a wrong argument.
        ConfigError: for a wrong config.
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
        config = None if config_dict_or_path is None else load_config(config_dict_or_path)
        if config is not None:
            enabled = enabled and config.zero_optimization.stage == 3
        self._enabled = enabled
        self._dtype = dtype
        self._unpartitioned: dict[int, torch.nn.Module] = {}  # modules with parameters that are not partitioned yet
        self._hooks: list[RemovableHandle] = []
        self._initialising = Initialising(dtype)
        if not enabled:
            return
        init_distributed()
        device = default_device(local_rank())
        # The context of the parameters until an engine takes them over.
        self._context = _make_context(remote_device, config, device, create_communicator(device))
        if module is not None:
            partition_model(module, self._context, dtype)

    def __enter__(self) -> Init:
        if self._enabled:
            self._hooks = [
                register_module_parameter_registration_hook(self._on_parameter),  # type: ignore[arg-type]
                register_module_module_registration_hook(self._on_module),
            ]
            self._initialising.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        try:
            if kind is None:
                self._partition(list(self._unpartitioned.values()), shared=True)
        finally:
            self._initialising.__exit__(kind, error, trace)
            self._unpartitioned.clear()

    # Global hooks of torch on registrations in modules.

    def _on_parameter(self, module: torch.nn.Module, name: str, parameter: object) -> torch.nn.Parameter | None:
        if id(module) not in self._unpartitioned:  # the constructors of earlier modules have made their parameters
            self._partition(list(self._unpartitioned.values()))
            self._unpartitioned[id(module)] = module
        sharded_param = handle_of(parameter)
        alias = sharded_param is not None and sharded_param.ref() is not parameter
        if isinstance(parameter, torch.nn.Parameter) and (alias or isinstance(parameter, LiveView)):
            # torch.nn.Parameter(p) or torch.nn.Parameter(p.data) gets memory of its own.
            return torch.nn.Parameter(parameter.clone().detach(), parameter.requires_grad)
        return None

    def _on_module(self, module: torch.nn.Module, name: str, child: object) -> None:
        if isinstance(child, torch.nn.Module):
            self._partition(child.modules())
            for inside, parameter in child.named_parameters():
                sharded_param = handle_of(parameter)
                if sharded_param is not None and sharded_param.coordinator is None:
                    sharded_param.rename(f"{name}.{inside}")

    @torch.no_grad()
    def _partition(self, modules: Iterable[torch.nn.Module], shared: bool = False) -> None:
        """Partition the parameters of ``modules``. shared: also those whose memory other tensors share now, which would
        lose what is written to them later."""
        for module in modules:
            keeps, left = scales_of_quantized(module), False
            for name, parameter in module._parameters.items():
                if parameter is None or handle_of(parameter) is not None or is_lazy(parameter) or parameter.is_meta:
                    continue
                check_has_memory(name, parameter)
                if not shared and _has_other_users(parameter):
                    left = True
                    continue
                broadcast_from_rank0(parameter, self._context)
                partition(parameter, name, self._context, None if keeps(parameter) else self._dtype)
            if left:
                self._unpartitioned[id(module)] = module
            else:
                self._unpartitioned.pop(id(module), None)


def _make_context(
    remote_device: str | None, config: ZeroliteConfig | None, device: torch.device, comm: Communicator
) -> CommContext:
    """Return the context of the parameters until an engine takes them over.

    Raises:
        ValueError: for a wrong ``remote_device``.
        OSError: if the disk cannot be used.
    """
    offload_device: str = "none" if config is None else config.zero_optimization.offload_param.device
    if remote_device not in (None, offload_device):
        if remote_device == "cpu":
            offload_device = "cpu"
        elif remote_device in ("none", device.type, str(device)):
            offload_device = "none"
        elif remote_device == "nvme":
            raise ValueError(
                'zero.Init: remote_device "nvme" needs a config that says where the disk is; pass '
                "config_dict_or_path with zero_optimization.offload_param.device and nvme_path"
            )
        else:
            raise ValueError(
                f"zero.Init: expected remote_device to be None, 'none', 'cpu', 'nvme' or '{device.type}', got "
                f"{remote_device!r}"
            )
    groups = RankGroups.over(comm)
    if offload_device == "none":
        return CommContext(groups, device)
    host = HostPlacement(pin=False)  # not pinned: the engine moves the shards to other memory
    placements = Placements(device, Placement(device), host, separate_memory=device.type != "cpu")
    if offload_device == "nvme" and config is not None:
        placements = placements_of(_without_optimizer_offload(config), device, device.type, comm)
    return CommContext(groups, device, ShardReader(placements, Transfers(placements)), placements.place_parameters)


def _without_optimizer_offload(config: ZeroliteConfig) -> ZeroliteConfig:
    """Return ``config`` without an offloaded optimizer."""
    zero = config.zero_optimization
    return config.model_copy(
        update={"zero_optimization": zero.model_copy(update={"offload_optimizer": OffloadOptimizerConfig()})}
    )


def _has_other_users(tensor: torch.Tensor) -> bool:
    """Return True if another tensor, or a graph, shares the memory of ``tensor``."""
    storage = tensor.untyped_storage()  # which is one user, the tensor another
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)
