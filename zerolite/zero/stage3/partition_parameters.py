"""Partitioning of parameters and models, and ``zero.Init``: a model is partitioned while it is built."""

from __future__ import annotations

import functools
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

from zerolite.comm import (
    collective,
    create_communicator,
    data_topology,
    init_distributed,
    local_rank,
    with_replicas,
)
from zerolite.comm.initial_sync import broadcast_flat, broadcast_into, differing
from zerolite.config import ZeroliteConfig, load_config
from zerolite.config.offload import OffloadOptimizerConfig
from zerolite.offload.from_config import placements_of
from zerolite.offload.placement import HostPlacement, Placement, Placements
from zerolite.offload.transfers import Transfers
from zerolite.precision.dtypes import scales_of_quantized
from zerolite.utils.accelerator import default_device
from zerolite.utils.dtypes import is_castable
from zerolite.utils.torch_private import storage_users, swap_tensor
from zerolite.zero.flat import dense_strides, flattened
from zerolite.zero.groups import RankGroups
from zerolite.zero.inner_tensors import check_has_memory, separate
from zerolite.zero.stage3.absent_parameter import copy_with_values
from zerolite.zero.stage3.gathered_parameters import GatheredParameters
from zerolite.zero.stage3.live_view import LiveView
from zerolite.zero.stage3.param_group import CommContext, initialisations
from zerolite.zero.stage3.partitioned_parameter import PartitionedParameter, sharded_param_of
from zerolite.zero.stage3.shard_reader import ShardReader
from zerolite.zero.stages import STAGES


@collective
@torch.no_grad()
def partition(
    parameter: torch.nn.Parameter,
    name: str,
    context: CommContext,
    dtype: torch.dtype | None = None,
    placement: Placement | None = None,
) -> PartitionedParameter:
    """Partition an ordinary parameter. It remains the same object with the same attributes and strides.

    Args:
        parameter: the parameter, with the same values on all ranks.
        name: qualified name, for messages.
        context: context of its all-gathers.
        dtype: dtype of the shard if the parameter is floating and not quantized; None for its own.
        placement: placement of the shard; None for the one that the context chooses.
    """
    if dtype is not None and is_castable(parameter):
        parameter.data = parameter.data.to(dtype)
    sharded_param = PartitionedParameter(parameter, name, context, placement)
    parameter.__deepcopy__ = functools.partial(_deepcopy, sharded_param)  # type: ignore[method-assign]
    return sharded_param


@collective
@torch.no_grad()
def _deepcopy(sharded_param: PartitionedParameter, memo: dict[int, Any]) -> torch.nn.Parameter:
    """Return the result of ``copy.deepcopy``: an ordinary parameter with full values, or a partitioned one inside
    ``zero.Init``."""
    if not sharded_param.context.initialising:
        return sharded_param.full_copy(memo)
    values = torch.empty_strided(
        sharded_param.shape, sharded_param.strides, dtype=sharded_param.shard.dtype, device=sharded_param.context.device
    )
    copied = copy_with_values(sharded_param.parameter, values, memo)
    del values
    partitioned = partition(copied, sharded_param.name, sharded_param.context, placement=sharded_param.placement)
    partitioned.shard.copy_(sharded_param.shard)
    return copied


@collective
@torch.no_grad()
def broadcast_from_rank0(parameter: torch.nn.Parameter, context: CommContext) -> None:
    """Copy rank 0's values into an ordinary parameter."""
    data = parameter.data
    if data.device == context.device and data.stride() == dense_strides(data):
        broadcast_flat(flattened(data), context.groups.mean, "initial_sync", 0)
    else:
        broadcast_into(data, context.groups.mean, context.device, "initial_sync")


# -------------------------------------------------------------------- initialisation code


class Initialising:
    """Context for code that initialises a model whose parameters are partitioned, and have no engine yet.

    What it writes into them becomes rank 0's values on all ranks, and ``p.data = values`` may give them another dtype,
    shape and strides. Such code runs on all ranks, and calls torch's functions in the same order.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """
        Args:
            dtype: dtype of the shards; None for that of the parameter.
        """
        self._dtype = dtype

    def __enter__(self) -> None:
        initialisations.append(self)

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        initialisations.remove(self)

    @torch.no_grad()
    def replace_values(self, sharded_param: PartitionedParameter, values: torch.Tensor) -> None:
        """Partition a parameter anew, with other values. What was taken from it before keeps the old ones."""
        if sharded_param.numel and not values.numel():
            raise RuntimeError(
                f"zero.Init: expected parameter '{sharded_param.name}' of shape {tuple(sharded_param.shape)} to keep "
                f"values, got .data of shape {tuple(values.shape)}; set .data to a tensor that has elements, or put "
                "another parameter in its place"
            )
        parameter = sharded_param.abandon(values.detach().clone())
        broadcast_from_rank0(parameter, sharded_param.context)
        partition(parameter, sharded_param.name, sharded_param.context, self._dtype, sharded_param.placement)


# -------------------------------------------------------------------- models


@collective
@torch.no_grad()
def partition_model(model: torch.nn.Module, context: CommContext, dtype: torch.dtype | None = None) -> None:
    """Partition every ordinary parameter of ``model`` with rank 0's values. Modules on the meta device are
    materialised one by one, children first."""
    separate(model.modules())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        check_has_memory(name, parameter)
    plain = [p for p in model.parameters() if sharded_param_of(p) is None and not p.is_meta]
    keeps = scales_of_quantized(model)
    different = differing(plain, context.groups.mean, context.device)
    for parameter, differs in zip(plain, different, strict=True):
        if differs:
            broadcast_from_rank0(parameter, context)
        partition(parameter, names[id(parameter)], context, None if keeps(parameter) else dtype)
    for name, module in _children_first(model):
        _materialise(name, module, names, context, dtype)


def _children_first(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return every module once, after the modules inside it, because its initialisation may overwrite theirs."""
    modules: list[tuple[str, torch.nn.Module]] = []
    seen: set[int] = set()

    def walk(name: str, module: torch.nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        for child_name, child in module.named_children():
            walk(f"{name}.{child_name}" if name else child_name, child)
        modules.append((name, module))

    walk("", model)
    return modules


def _materialise(
    name: str, module: torch.nn.Module, names: dict[int, str], context: CommContext, dtype: torch.dtype | None
) -> None:
    """Give a module's own meta parameters and buffers memory and values, then partition the parameters. Own parameters
    that have values already (tied weights, from their first owner) keep them."""
    parameters = list(module.parameters(recurse=False))
    meta = [p for p in parameters if p.is_meta]
    if not meta and not any(b.is_meta for b in module.buffers(recurse=False)):
        return
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is None:
        raise RuntimeError(
            f"zerolite: module '{name}' ({type(module).__name__}) is on the meta device and has no reset_parameters() "
            "method to give its parameters and buffers values; add one, or build the module inside zero.Init instead"
        )
    for parameter in meta:
        # Keeps the Parameter object, which may be used in several places. torch.utils.swap_tensors would swap the
        # attributes too, and refuses parameters with weak references, of which recurrent layers keep some.
        fresh = torch.nn.Parameter(torch.empty_like(parameter, device=context.device), parameter.requires_grad)
        swap_tensor(parameter, fresh)
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = torch.empty_like(buffer, device=context.device)
    kept = GatheredParameters([p for p in parameters if sharded_param_of(p) is not None])
    with Initialising(dtype), kept:
        reset()
        kept.drop_changes()
    for buffer in module.buffers(recurse=False):
        broadcast_into(buffer, context.groups.mean, context.device, "initial_sync")
    for parameter in meta:
        broadcast_from_rank0(parameter, context)
        partition(parameter, names[id(parameter)], context, dtype)


# -------------------------------------------------------------------- zero.Init


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
        topology = data_topology(create_communicator(device))
        if config is not None and config.zero_optimization.ranks_of_shards is not None:
            topology = with_replicas(topology, device, config.zero_optimization.ranks_of_shards)
        self._context = _make_context(remote_device, config, device, RankGroups.of(topology, STAGES[3]))
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
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        try:
            if error is None:
                self._partition(list(self._unpartitioned.values()), shared=True)
        finally:
            self._initialising.__exit__(error_type, error, trace)
            self._unpartitioned.clear()

    # Global hooks of torch on registrations in modules.

    def _on_parameter(self, module: torch.nn.Module, name: str, parameter: object) -> torch.nn.Parameter | None:
        if id(module) not in self._unpartitioned:  # the constructors of earlier modules have made their parameters
            self._partition(list(self._unpartitioned.values()))
            self._unpartitioned[id(module)] = module
        sharded_param = sharded_param_of(parameter)
        alias = sharded_param is not None and sharded_param.ref() is not parameter
        if isinstance(parameter, torch.nn.Parameter) and (alias or isinstance(parameter, LiveView)):
            # torch.nn.Parameter(p) or torch.nn.Parameter(p.data) gets memory of its own.
            return torch.nn.Parameter(parameter.clone().detach(), parameter.requires_grad)
        return None

    def _on_module(self, module: torch.nn.Module, name: str, child: object) -> None:
        if isinstance(child, torch.nn.Module):
            self._partition(child.modules())
            for inside, parameter in child.named_parameters():
                sharded_param = sharded_param_of(parameter)
                if sharded_param is not None and sharded_param.coordinator is None:
                    sharded_param.rename(f"{name}.{inside}")

    @torch.no_grad()
    def _partition(self, modules: Iterable[torch.nn.Module], shared: bool = False) -> None:
        """Partition the parameters of ``modules``. shared: also those whose memory other tensors share now, which would
        lose what is written to them later."""
        for module in modules:
            separate([module])
            keeps, left = scales_of_quantized(module), False
            for name, parameter in module._parameters.items():
                if (
                    parameter is None
                    or sharded_param_of(parameter) is not None
                    or is_lazy(parameter)
                    or parameter.is_meta
                ):
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
    remote_device: str | None, config: ZeroliteConfig | None, device: torch.device, groups: RankGroups
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
    if offload_device == "none":
        return CommContext(groups, device)
    host = HostPlacement(pin=False)  # not pinned: the engine moves the shards to other memory
    placements = Placements(device, Placement(device), host, separate_memory=device.type != "cpu")
    if offload_device == "nvme" and config is not None:
        placements = placements_of(_without_optimizer_offload(config), device, device.type, groups.mean)
    return CommContext(groups, device, ShardReader(placements, Transfers(placements)), placements.place_parameters)


def _without_optimizer_offload(config: ZeroliteConfig) -> ZeroliteConfig:
    """Return ``config`` without an offloaded optimizer."""
    zero = config.zero_optimization
    return config.model_copy(
        update={"zero_optimization": zero.model_copy(update={"offload_optimizer": OffloadOptimizerConfig()})}
    )


def _has_other_users(tensor: torch.Tensor) -> bool:
    """Return True if another tensor, or a graph, shares the memory of ``tensor``."""
    return storage_users(tensor.untyped_storage()) > 2  # the storage's object is one user, the tensor another
