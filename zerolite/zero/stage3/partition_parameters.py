"""Partitioning of parameters, and their values for code that initialises a model inside ``zero.Init``."""

from __future__ import annotations

import functools
from types import TracebackType
from typing import Any

import torch

from zerolite.comm.initial_sync import broadcast_flat, broadcast_into
from zerolite.offload.placement import Placement
from zerolite.utils.dtypes import is_castable
from zerolite.zero.flat import dense_strides, flattened
from zerolite.zero.stage3.comm_context import CommContext, initialisations
from zerolite.zero.stage3.param_group import external_parameters
from zerolite.zero.stage3.partitioned_parameter import PartitionedParameter, copy_with_values, handle_of


@torch.no_grad()
def partition(
    parameter: torch.nn.Parameter,
    name: str,
    context: CommContext,
    dtype: torch.dtype | None = None,
    placement: Placement | None = None,
) -> PartitionedParameter:
    """Partition an ordinary parameter. It remains the same object with the same attributes and strides. Called on all
    ranks, in the same order.

    Args:
        parameter: the parameter, with the same values on all ranks.
        name: qualified name, for messages.
        context: context of its all-gathers.
        dtype: dtype of the shard if the parameter is floating and not quantized; None for its own.
        placement: placement of the shard; None for the one that the context chooses.
    """
    if dtype is not None and is_castable(parameter):
        parameter.data = parameter.data.to(dtype)
    handle = PartitionedParameter(parameter, name, context, placement)
    parameter.__deepcopy__ = functools.partial(_deepcopy, handle)  # type: ignore[method-assign]
    return handle


@torch.no_grad()
def _deepcopy(handle: PartitionedParameter, memo: dict[int, Any]) -> torch.nn.Parameter:
    """Return the result of ``copy.deepcopy``: an ordinary parameter with full values, or a partitioned one inside
    ``zero.Init``. Called on all ranks, in the same order."""
    if not handle.context.initialising:
        return handle.full_copy(memo)
    values = torch.empty_strided(handle.shape, handle.strides, dtype=handle.shard.dtype, device=handle.context.device)
    copied = copy_with_values(handle.parameter, values, memo)
    del values
    context = handle.context.context_for_copies()
    partition(copied, handle.name, context, placement=handle.placement).shard.copy_(handle.shard)
    return copied


@torch.no_grad()
def broadcast_from_rank0(parameter: torch.nn.Parameter, context: CommContext) -> None:
    """Copy rank 0's values into an ordinary parameter. Called on all ranks."""
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
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


# -------------------------------------------------------------------- external parameters


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Gather ``parameter`` together with ``module``, which uses it in its forward without owning it. Called on all
    ranks.

    Uses that read the parameter as an attribute of its own module are found without this.
    """
    if not isinstance(module, torch.nn.Module) or not isinstance(parameter, torch.nn.Parameter):
        raise ValueError(
            "zero.register_external_parameter: expected a module and a parameter, got "
            f"{type(module).__name__} and {type(parameter).__name__}"
        )
    known = module.__dict__.setdefault("_zero_external_parameters", [])
    if all(parameter is not other for other in known):
        known.append(parameter)
    handle = handle_of(parameter)
    if handle is not None and handle.context.coordinator is not None:
        handle.context.coordinator.add_external(module, handle)


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Undo :func:`register_external_parameter` for engines that are made later. An existing engine goes on gathering
    the two together. Raises ValueError if the parameter was not registered."""
    known = external_parameters(module)
    rest = [other for other in known if other is not parameter]
    if len(rest) == len(known):
        raise ValueError(
            f"zero.unregister_external_parameter: the parameter of shape {tuple(getattr(parameter, 'ds_shape', ()))} "
            f"was not registered with this {type(module).__name__}"
        )
    module.__dict__["_zero_external_parameters"] = rest
