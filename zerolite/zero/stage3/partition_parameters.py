"""Partitioning of parameters, and their values for code that initialises a model inside ``zero.Init``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from zerolite.comm import Communicator
from zerolite.comm.initial_sync import broadcast_into
from zerolite.offload.placements import Placement
from zerolite.utils.accelerator import address
from zerolite.utils.dtypes import is_castable
from zerolite.utils.nested import Arguments, Function, Keywords
from zerolite.zero.flat import dense_strides, flattened
from zerolite.zero.stage3.comm_context import CommContext, gather
from zerolite.zero.stage3.param_group import external_parameters
from zerolite.zero.stage3.partitioned_parameter import (
    AVAILABLE,
    NOT_AVAILABLE,
    PartitionedParameter,
    copy_with_values,
    handle_of,
)
from zerolite.zero.stage3.released_parameter import NEEDS_NO_VALUES, SHAPE_FUNCTIONS

_no_function_modes = torch._C.DisableTorchFunction  # context that hides calls of torch from function modes
_P = ParamSpec("_P")
_T = TypeVar("_T")


def hidden_from_modes(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Run ``function`` without gradients and without function modes."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        # In this order: entering and leaving `no_grad` is itself a torch function, which a mode would see.
        with _no_function_modes(), torch.no_grad():
            return function(*args, **kwargs)

    return call


@hidden_from_modes
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


def _deepcopy(handle: PartitionedParameter, memo: dict[int, Any]) -> torch.nn.Parameter:
    """Return the result of ``copy.deepcopy``: an ordinary parameter with full values, or a partitioned one inside
    ``zero.Init``. Called on all ranks, in the same order."""
    if not _entered_modes:
        return handle.full_copy(memo)
    with _no_function_modes():
        repartition_all()
        parameter = handle.parameter
        values = torch.empty_strided(
            handle.shape, handle.strides, dtype=handle.shard.dtype, device=handle.context.device
        )
        copied = copy_with_values(parameter, values, memo)
        del values
        partition(copied, handle.name, handle.context.context_for_copies(), placement=handle.placement).shard.copy_(
            handle.shard
        )
    return copied


@hidden_from_modes
def broadcast_from_rank0(parameter: torch.nn.Parameter, context: CommContext) -> None:
    """Copy rank 0's values into an ordinary parameter. Called on all ranks."""
    data = parameter.data
    if data.device == context.device and data.stride() == dense_strides(data):
        broadcast_flat(flattened(data), context.groups.mean, "initial_sync", 0)
    else:
        broadcast_into(data, context.groups.mean, context.device, "initial_sync")


def broadcast_flat(flat: torch.Tensor, comm: Communicator, tag: str, source: int) -> None:
    """Copy the values of rank ``source`` into ``flat`` [n], of any dtype, on all ranks. Called on all ranks."""
    if flat.numel():
        comm.broadcast(flat.view(torch.uint8), tag, source)


# -------------------------------------------------------------------- initialisation code


_entered_modes: list[GatherOnUse] = []  # the innermost last
# Parameters by the storage of their full values, to find tensors that share it (`p.data`, views).
_by_storage: weakref.WeakValueDictionary[int, PartitionedParameter] = weakref.WeakValueDictionary()


class GatherOnUse(TorchFunctionMode):
    """Function mode of ``zero.Init`` that gathers parameters without an engine for the code that initialises them.

    A parameter is gathered for the torch function that uses it, and stays so until a function uses another one. Then
    all ranks take rank 0's values and it is partitioned again, in its new dtype, shape and strides if ``.data`` was
    set. Torch functions that use values must be called on all ranks, in the same order.

    A tensor that shares memory with a parameter (``p.data``, a view, what autograd saves) keeps that memory when the
    parameter is released, and gets it filled again when a function uses one of the two. So both have the same values
    inside the context, and the tensor has its last ones after it.
    """

    def __init__(self, dtype: torch.dtype | None = None, before_creation: Callable[[], None] | None = None) -> None:
        """
        Args:
            dtype: dtype of the shards; None for that of the parameter.
            before_creation: called before a function without tensors among its arguments, which may create one.
        """
        super().__init__()
        self._dtype = dtype
        self._before_creation = before_creation
        # Gathered parameters by the id of the handle. With the parameter itself, so that it lives on all ranks until it
        # is partitioned again.
        self._open: dict[int, tuple[PartitionedParameter, torch.nn.Parameter]] = {}

    def __enter__(self) -> GatherOnUse:
        with _no_function_modes():
            repartition_all()
        super().__enter__()
        _entered_modes.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _entered_modes.remove(self)
        super().__exit__(kind, error, trace)
        with _no_function_modes():
            if kind is None:
                self.repartition()
            for handle, _ in self._open.values():
                _release(handle)
            self._open.clear()

    def __torch_function__(
        self, func: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        with _no_function_modes():
            if func in SHAPE_FUNCTIONS:
                args = [value if (handle := self._released_handle(value)) is None else handle.view for value in args]
            elif func not in NEEDS_NO_VALUES:
                self._prepare([*args, *(kwargs or {}).values()])
        return func(*args, **(kwargs or {}))

    def _released_handle(self, value: object) -> PartitionedParameter | None:
        """Return the handle of ``value`` if it is a released parameter without an engine, or shares memory with one."""
        handle = _handle_in_memory_of(value)
        if handle is None or handle.status is not NOT_AVAILABLE or handle.ref() is None:
            return None
        return handle if handle.context.coordinator is None else None

    @hidden_from_modes
    def unshare_memory(self, parameter: torch.nn.Parameter) -> None:
        """Give an ordinary parameter its own memory if it was made from the values of a partitioned one, as
        parametrizations do. Called on all ranks, in the same order."""
        handle = _handle_in_memory_of(parameter)
        if handle is not None:
            was_available = handle.status is AVAILABLE
            _gather([handle])
            parameter.data = parameter.data.clone()
            if not was_available:
                _release(handle)

    def _prepare(self, values: Iterable[object]) -> None:
        """Gather the released parameters among a function's arguments, and partition those of earlier functions."""
        flat = [v for value in values for v in (value if isinstance(value, (list, tuple)) else (value,))]
        if self._before_creation is not None and not any(isinstance(v, torch.Tensor) for v in flat):
            self._before_creation()
        hidden = {id(handle): handle for v in flat if (handle := self._released_handle(v)) is not None}
        if not hidden:
            return
        self.repartition(keep={id(handle) for v in flat if (handle := _handle_in_memory_of(v)) is not None})
        for handle in hidden.values():
            self._open[id(handle)] = (handle, handle.parameter)
        _gather(list(hidden.values()))

    @hidden_from_modes
    def repartition(self, keep: Iterable[int] = ()) -> None:
        """Partition the gathered parameters again with rank 0's values. Called on all ranks, at the same point of the
        model's construction.

        Args:
            keep: ids of handles whose parameters stay gathered.
        """
        kept = {key: self._open[key] for key in keep if key in self._open}
        done = [both for key, both in self._open.items() if key not in kept]
        self._open = kept
        for handle, parameter in done:
            if handle.status is not AVAILABLE:
                continue  # the user has called its partition()
            if _is_replaced(parameter.data, handle.view):  # tensors taken from the old values keep them
                data = parameter.data
                if handle.numel and not data.numel():
                    raise RuntimeError(
                        f"zero.Init: expected parameter '{handle.name}' of shape {tuple(handle.shape)} to keep values, "
                        f"got .data of shape {tuple(data.shape)}; set .data to a tensor that has elements, or put "
                        "another parameter in its place"
                    )
                handle.unpartition()
                parameter.data = data
                broadcast_from_rank0(parameter, handle.context)
                partition(parameter, handle.name, handle.context, self._dtype, handle.placement)
                continue
            broadcast_flat(handle.full[: handle.numel], handle.groups.mean, "initial_sync", 0)
            handle.write()
            _release(handle)


def _is_replaced(data: torch.Tensor, view: torch.Tensor) -> bool:
    """Return True if a user has set ``data``, where ``view`` was before."""
    same = address(data) == address(view) and data.dtype == view.dtype
    return not same or (data.shape, data.stride()) != (view.shape, view.stride())


def _handle_in_memory_of(value: object) -> PartitionedParameter | None:
    """Return the handle of a partitioned parameter, or of the one whose memory a tensor shares; None if there is
    none."""
    handle = handle_of(value) if isinstance(value, torch.nn.Parameter) else None
    if handle is not None or not _by_storage or not isinstance(value, torch.Tensor):
        return handle
    if value.layout is not torch.strided:
        return None
    storage = value.untyped_storage()._cdata
    handle = _by_storage.get(storage)
    if handle is None or handle.storage is None:
        return None
    if storage == handle.storage._cdata:
        return handle
    left = handle.left_storage  # the parameter may have got another storage since
    return handle if left is not None and storage == left.cdata else None


def _gather(handles: Sequence[PartitionedParameter]) -> None:
    """Gather parameters into the memory that a user's tensors share, if there are some. Called on all ranks."""
    for handle in handles:
        handle.take_back_storage()
        if handle.storage is not None:
            _by_storage[handle.storage._cdata] = handle
    gather(handles)


def _release(handle: PartitionedParameter) -> None:
    """Release a parameter and leave its memory to the tensors that share it."""
    handle.allow_aliases()
    handle.release()


def repartition_all(then_gather: Iterable[PartitionedParameter] = ()) -> None:
    """Partition the parameters again that initialisation code has used. Called on all ranks.

    Args:
        then_gather: handles that the caller gathers next. Their memory is shared with a user's tensors again.
    """
    for mode in _entered_modes:
        mode.repartition()
    for handle in then_gather if _entered_modes else ():
        if handle.context.coordinator is None:
            handle.take_back_storage()


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
