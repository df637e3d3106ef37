"""Operations on released parameters: ``p.norm()``, averages, ``model.state_dict()``, a penalty in a forward.

An operation such as ``p.data`` runs in three steps:

1. Gather the parameters among the arguments into temporary copies.
2. Run the function on them as ordinary parameters, and release them again.
3. Return results that share memory with a copy as :class:`GatheredAlias`, which keeps the copy alive.

A write to a :class:`GatheredAlias` is copied into this rank's shard. A read after an update gathers the values again.
Autograd saves which part of which parameter a tensor is, and gathers that again in the backward.

All ranks run the same operations, so they make the same changes and a write needs no collective.

Inside a forward or backward the parameter itself is gathered instead, until the step ends, and belongs to the group of
the module that is executing (:func:`_run_in_execution`).

Programs for DeepSpeed read parameters on one rank alone: a save of PEFT calls ``state_dict()`` on rank 0 for its names.
So with DeepSpeed's interface nothing is gathered outside of forward and backward. ``p.data`` and ``p.detach()`` are
aliases without values there, which have shape and dtype, and any other operation raises on the rank that calls it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from zerolite.utils.accelerator import address
from zerolite.utils.nested import Arguments, Function, Keywords, find_tensors, map_tensors
from zerolite.utils.user_line import warn_of_collective
from zerolite.zero.stage3.comm_context import gather_copies
from zerolite.zero.stage3.partitioned_parameter import AVAILABLE, PartitionedParameter, handle_of
from zerolite.zero.stage3.released_parameter import (
    LIKE_FUNCTIONS,
    NEEDS_NO_VALUES,
    SHAPE_FUNCTIONS,
    ReleasedParameter,
    as_plain_tensors,
    no_gather_error,
    no_values_error,
    restore_class,
    set_released_class,
)
from zerolite.zero.stage3.saved_values import (
    GatheredCopy,
    check_graphs,
    coordinator_of,
    gathered_in,
    note_use_outside_groups,
    prepare_accumulation,
    save_sources,
)

_T = torch.Tensor
# Functions in Python that treat subclasses of torch.Tensor in another way.
_PLAIN_TENSOR_FUNCTIONS = frozenset([_T.__repr__, _T.__format__, _T.numpy, _T.__array__, _T.tolist])
_transform_level = torch._C._functorch.maybe_current_level  # None outside of torch.func's transforms
_current_graph_task = torch._C._current_graph_task_id
_GET_DATA, _SET_DATA = getattr(_T, "data").__get__, getattr(_T, "data").__set__  # noqa: B009
_ALIASING = frozenset([_T.detach, torch.detach, _GET_DATA])


class GatheredAlias(torch.Tensor):
    """Tensor that shares memory with a gathered copy of a parameter; see the module."""

    gathered: GatheredCopy

    def _bind(self, gathered: GatheredCopy) -> GatheredAlias:
        """Set the copy whose memory the tensor shares. Return the tensor."""
        self.gathered = gathered
        return self

    def _move_to(self, gathered: GatheredCopy) -> None:
        """Point the tensor to the same elements of another copy."""
        start = self.storage_offset() - self.gathered.full.storage_offset() + gathered.full.storage_offset()
        self.data = gathered.full.as_strided(self.shape, self.stride(), start).as_subclass(GatheredAlias)
        self.gathered = gathered

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: OpOverload, types: Iterable[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        """Run a function that :func:`run_gathered` has let through, or that C++ has called without it."""
        if any(kind is not GatheredAlias for kind in types):
            return NotImplemented  # another class, such as that of p.grad, has no memory to read
        if function.namespace == "c10d":
            name = find_tensors((args, kwargs), GatheredAlias)[0].gathered.handle.name
            raise no_values_error(name, "and torch.distributed would write into a copy: send a clone")
        with torch._C._DisableTorchDispatch():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_function__(
        cls, function: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        return run_gathered(function, args, kwargs or {})

    def __reduce_ex__(self, protocol: object) -> Any:
        """Pickle an ordinary tensor."""
        run_gathered(_T.detach, (self,), {})
        with as_plain_tensors():
            return self.detach().__reduce_ex__(protocol)

    def __copy__(self) -> torch.Tensor:
        return run_gathered(_T.detach, (self,), {})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return an ordinary tensor with memory of its own."""
        copied = memo[id(self)] = run_gathered(_T.clone, (self,), {}).detach()
        return copied.requires_grad_(self.requires_grad)


def run_gathered(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Call ``function`` with released parameters and :class:`GatheredAlias` among its arguments.

    Called on all ranks, in the same order, if one of these must be gathered.

    Raises:
        RuntimeError: on another thread than the engine's, for functions that hand out memory, and for writes inside a
            forward or backward.
    """
    if function is _T.__iter__:
        return iter(run_gathered(_T.unbind, args, kwargs))
    aliases = find_tensors((args, kwargs), GatheredAlias)
    with as_plain_tensors():
        like = function in LIKE_FUNCTIONS and isinstance(next(iter(args), None), GatheredAlias)
        if like or function in NEEDS_NO_VALUES or function in SHAPE_FUNCTIONS:
            return function(*args, **kwargs)
        released = find_tensors((args, kwargs), ReleasedParameter)
        used = list(dict.fromkeys(vars(parameter)["_zero_handle"] for parameter in released))
        shared = list({id(alias.gathered): alias.gathered for alias in aliases}.values())
        stale = [gathered for gathered in shared if gathered.stale]
        if stale and function in (_T.__repr__, _T.__format__):  # a debugger calls them on one rank alone
            return f"tensor(of parameter '{stale[0].handle.name}', whose current values are not here)"
        missing = list(dict.fromkeys([*used, *(gathered.handle for gathered in stale)]))
        refused = [*filter(_refuses, missing), *(copy.handle for copy in stale if copy.version == _NO_VALUES)]
        if refused and function in _ALIASING:
            return _alias_without_values(refused[0])
        if refused:
            raise no_gather_error(refused[0].name)
        _check_allowed(function, missing or [gathered.handle for gathered in shared], bool(missing))
        executing = [handle for handle in missing if _is_executing(handle)]
        if executing:
            _check_reads(function, executing, stale)
            for handle in executing:
                coordinator_of(handle).on_read(handle)
    if executing:
        return _run_in_execution(function, args, kwargs, executing)
    with as_plain_tensors():
        fulls = gather_copies(missing)
        _warn_of_gather(missing)
        with torch.no_grad():
            current = _share_current_values(fulls, aliases)
        return _call(function, args, kwargs, {handle: current[handle] for handle in used}, aliases)


def _run_in_execution(
    function: Function, args: Arguments, kwargs: Keywords, handles: Sequence[PartitionedParameter]
) -> Any:
    """Call ``function`` inside a forward or backward. The parameters of ``handles``, which it uses, are gathered.

    Raises:
        RuntimeError: ``function`` has changed one of them. The change would be lost with the release.
    """
    check_graphs(handles)
    parameters = [handle.parameter for handle in handles]
    versions = [parameter._version for parameter in parameters]
    result = function(*args, **kwargs)
    for handle, parameter, version in zip(handles, parameters, versions, strict=True):
        if parameter._version != version:
            raise _write_error(handle, function)
    return result


def _share_current_values(
    fulls: Mapping[PartitionedParameter, torch.Tensor], aliases: Sequence[GatheredAlias]
) -> dict[PartitionedParameter, GatheredCopy]:
    """Let all aliases of a parameter share one copy with its current values, so that a change of one changes all.

    Returns:
        The copy of each parameter in ``fulls`` or behind ``aliases``.
    """
    current = {handle: GatheredCopy(handle, full) for handle, full in fulls.items()}
    for alias in aliases:
        own = alias.gathered
        if not own.linked:
            continue
        first = current.setdefault(own.handle, own)
        if first is own:
            continue
        if own.stale:
            own.update_from(first)
        if alias.grad_fn is None and alias.dtype == first.full.dtype:
            alias._move_to(first)
    return current


def _call(
    function: Function,
    args: Arguments,
    kwargs: Keywords,
    used: dict[PartitionedParameter, GatheredCopy],
    aliases: Sequence[GatheredAlias],
) -> Any:
    """Call ``function`` while the parameters in ``used`` have the values of their copies."""
    parameters = {handle: handle.parameter for handle in used}
    for handle, parameter in parameters.items():
        restore_class(parameter)
        parameter.data = used[handle].full.as_strided(handle.shape, handle.strides)
    in_place = _changed_in_place(function, args)
    versions = {id(tensor): _version(tensor, in_place) for tensor in (*parameters.values(), *aliases)}
    all_gathered = [*used.values(), *(alias.gathered for alias in aliases)]
    by_storage = {gathered.full.untyped_storage()._cdata: gathered for gathered in all_gathered}
    if function in _PLAIN_TENSOR_FUNCTIONS:
        args = [arg.detach() if isinstance(arg, GatheredAlias) else arg for arg in args]
    try:
        if torch.is_grad_enabled():
            note_use_outside_groups(used)
            nodes = [prepare_accumulation(handle) for handle in used]  # kept until a graph refers to them
            with save_sources(by_storage):
                result = function(*args, **kwargs)
            del nodes
        else:
            result = function(*args, **kwargs)
        return _as_aliases(result, by_storage)
    finally:
        by_storage.clear()  # autograd keeps the pack hook, and would keep all copies with it
        with torch.no_grad():
            _apply_changes(used, parameters, aliases, versions, in_place)


def _apply_changes(
    used: dict[PartitionedParameter, GatheredCopy],
    parameters: dict[PartitionedParameter, torch.nn.Parameter],
    aliases: Sequence[GatheredAlias],
    versions: dict[int, float],
    in_place: set[int],
) -> None:
    """Release the parameters again, and copy what the function has changed into their shards."""
    written: dict[int, GatheredCopy] = {}
    replaced: list[tuple[PartitionedParameter, torch.Tensor]] = []
    for handle, parameter in parameters.items():
        data, gathered = parameter.data, used[handle]
        differs = _version(parameter, in_place) != versions[id(parameter)]
        parameter.data = handle.view if handle.status is AVAILABLE else handle.empty
        set_released_class(parameter)
        if address(data) != address(gathered.full) or (data.shape, data.stride()) != (handle.shape, handle.strides):
            replaced.append((handle, data))
        elif differs:
            written[id(gathered)] = gathered
    for handle, data in replaced:
        _replace_values(handle, data)
    for alias in aliases:
        if _version(alias, in_place) != versions[id(alias)]:
            written[id(alias.gathered)] = alias.gathered
    for gathered in written.values():
        gathered.write()


def _replace_values(handle: PartitionedParameter, data: torch.Tensor) -> None:
    """Take over the values of ``p.data = data``. Aliases of the parameter keep the old values."""
    view = handle.view
    if (data.shape, data.dtype, data.device) != (view.shape, view.dtype, view.device):
        raise RuntimeError(
            f"parameter '{handle.name}': expected .data of shape {tuple(view.shape)}, {view.dtype} on {view.device}, "
            f"got {tuple(data.shape)}, {data.dtype} on {data.device}. Casts and moves of a module are for before "
            "zerolite.initialize"
        )
    full = data.new_zeros(handle.full.numel())
    full.as_strided(handle.shape, handle.strides).copy_(data)
    handle.replace_values(full)


def _changed_in_place(function: Function, args: Arguments) -> set[int]:
    """Return the ids of the arguments that a function changes according to its name, such as ``add_``.

    With ``p.grad`` among the arguments the function runs where torch does not count changes.
    """
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return {id(tensor) for tensor in find_tensors(args[:1])} if in_place else set()


def _version(tensor: torch.Tensor, in_place: set[int]) -> float:
    """Return the number of changes in place so far. Where torch does not count them, return NaN: it equals nothing, so
    the tensor counts as changed."""
    return math.nan if id(tensor) in in_place or tensor.is_inference() else tensor._version


def _as_aliases(result: Any, by_storage: Mapping[int, GatheredCopy]) -> object:
    """Return ``result`` with a :class:`GatheredAlias` for each tensor in gathered memory. A numpy array there becomes
    read-only."""

    def mark(value: torch.Tensor) -> torch.Tensor:
        gathered = gathered_in(value, by_storage) if type(value) is torch.Tensor else None
        if gathered is None:
            return value
        return value.as_subclass(GatheredAlias)._bind(gathered)

    if not isinstance(result, torch.Tensor) and hasattr(result, "__array_interface__"):
        result.flags.writeable = False
    return map_tensors(mark, result)


# -------------------------------------------------------------------- refusals


def refuse_operations(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Let operations on released parameters raise on the rank that calls them, for the life of their engine."""
    for handle in filter(None, map(handle_of, parameters)):
        handle.context.gathers_for_operations = False


def _refuses(handle: PartitionedParameter) -> bool:
    """Return True if an operation outside of forward and backward must not gather the parameter."""
    coordinator = handle.context.coordinator
    return not handle.context.gathers_for_operations and (coordinator is None or not coordinator.busy)


_NO_VALUES = (-1, -1)  # version of the copy behind an alias without values, which is always stale


def _alias_without_values(handle: PartitionedParameter) -> GatheredAlias:
    """Return an alias that has the parameter's shape, and one element of memory."""
    gathered = GatheredCopy(handle, handle.empty)
    gathered.version = _NO_VALUES
    return handle.empty.new_empty(()).expand(handle.shape).as_subclass(GatheredAlias)._bind(gathered)


# Functions that hand out memory. The copy ends with the operation, so writes into it would be lost.
_MEMORY_FUNCTIONS = frozenset(
    [
        *(_T.data_ptr, _T.untyped_storage, _T.storage, _T.share_memory_, _T.set_, _T.resize_, _T.as_subclass),
        *(_T.__dlpack__, _T.__dlpack_device__, _T.is_shared, _T.pin_memory),
    ]
)


def _check_allowed(function: Function, handles: Sequence[PartitionedParameter], gathers: bool) -> None:
    """Raise RuntimeError if ``function`` cannot run on these parameters here; ``gathers``: it needs a gather."""
    first = handles[0]
    if function in _MEMORY_FUNCTIONS:
        raise no_values_error(first.name, f"Tensor.{function.__name__} hands out memory that it does not have")
    if not gathers:
        return
    if _transform_level() is not None:
        raise no_values_error(
            first.name,
            "stage 3 cannot gather inside a transform of torch.func (grad, vmap, …): use copy.deepcopy(model)",
        )
    for handle in handles:
        coordinator = handle.context.coordinator
        if coordinator is None or _current_graph_task() != -1:  # autograd has threads of its own
            continue
        if threading.get_ident() != coordinator.thread:
            raise no_values_error(handle.name, "and this thread is not the one that trains")


def _is_executing(handle: PartitionedParameter) -> bool:
    """Return True if an operation on a released parameter is part of a forward or backward."""
    coordinator = handle.context.coordinator
    return coordinator is not None and coordinator.busy and handle.status is not AVAILABLE


def _check_reads(function: Function, handles: Sequence[PartitionedParameter], stale: Sequence[GatheredCopy]) -> None:
    """Raise RuntimeError where ``function``, inside a forward or backward, may write to a parameter, or reads a tensor
    that was taken from one before its last change."""
    if function == _GET_DATA or function == _SET_DATA:
        raise _write_error(handles[0], function)
    if stale:
        name = stale[0].handle.name
        raise no_values_error(name, "a tensor that was taken from it is older, and a forward or backward is under way")


def _write_error(handle: PartitionedParameter, function: Function) -> RuntimeError:
    name = getattr(function, "__name__", function)
    what = ".data" if name in ("__get__", "__set__") else name
    return no_values_error(
        handle.name,
        f"and what {what} writes inside a forward or backward would be lost with the release: change parameters "
        "between steps. For a read use p.detach()",
    )


def _warn_of_gather(handles: Sequence[PartitionedParameter]) -> None:
    """Warn that a line of the user's code has gathered parameters. Called after the gather: if warnings are errors,
    this one is raised on one rank alone."""
    if handles and handles[0].groups.shard.world_size > 1 and handles[0].groups.shard.main:
        warn_of_collective(
            f"this line uses the values of parameter '{handles[0].name}', of which each rank owns a part: they are "
            "gathered for it, in a collective that all ranks must call. Inside "
            "zerolite.zero.GatheredParameters(parameters) parameters are gathered together and once"
        )
