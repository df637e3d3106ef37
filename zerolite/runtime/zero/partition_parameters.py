"""Partitioning from the user's side: ``zero.Init``, ``zero.GatheredParameters``, external parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from zerolite.accelerator import host_values
from zerolite.comm import Communicator
from zerolite.runtime.initial_sync import broadcast_into, content_hash, differing
from zerolite.runtime.zero.module_hooks import external_parameters
from zerolite.runtime.zero.partitioned_parameter import (
    AVAILABLE,
    PartitionedParameter,
    gather,
    handle_of,
    refresh,
)


def partition(
    parameter: torch.nn.Parameter, name: str, comm: Communicator, device: torch.device, dtype: torch.dtype | None = None
) -> PartitionedParameter:
    """Cut a plain parameter, equal on all ranks, into parts on ``device``, in ``dtype`` if it is floating. Its
    identity, attributes and strides stay. Called on all ranks, in the same order."""
    if dtype is not None and parameter.is_floating_point():
        parameter.data = parameter.data.to(dtype)
    return PartitionedParameter(parameter, name, comm, device)


def partition_model(
    model: torch.nn.Module, comm: Communicator, device: torch.device, dtype: torch.dtype | None = None
) -> None:
    """Partition every plain parameter of ``model``; rank 0's values are everyone's. Modules on the meta device are
    materialised one by one. Called on all ranks, with equal models."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    plain = [p for p in model.parameters() if handle_of(p) is None and not p.is_meta]
    different = differing(plain, comm, device)
    for parameter, differs in zip(plain, different, strict=True):
        if differs:
            broadcast_into(parameter.data, comm, device, "initial_sync")
        partition(parameter, names[id(parameter)], comm, device, dtype)
    for name, module in model.named_modules():
        _materialise(name, module, names, comm, device, dtype)


def _materialise(
    name: str,
    module: torch.nn.Module,
    names: dict[int, str],
    comm: Communicator,
    device: torch.device,
    dtype: torch.dtype | None,
) -> None:
    """Give a module's own meta parameters and buffers memory and values, then partition them."""
    meta = [p for p in module.parameters(recurse=False) if p.is_meta]
    if not meta and not any(b.is_meta for b in module.buffers(recurse=False)):
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise RuntimeError(
            f"zerolite: module '{name}' ({type(module).__name__}) is on the meta device and has no reset_parameters() "
            "method to give its parameters and buffers values; add one, or build the module inside zero.Init instead"
        )
    for parameter in meta:
        fresh = torch.nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
        attributes = dict(vars(parameter))
        torch.utils.swap_tensors(parameter, fresh)  # the same Parameter object, wherever it is used
        vars(parameter).update(attributes)
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = torch.empty_like(buffer, device=device)
    with GatheredParameters(module.parameters(recurse=False), modifier_rank=0), torch.no_grad():
        reset()
    for buffer in module.buffers(recurse=False):
        broadcast_into(buffer, comm, device, "initial_sync")
    for parameter in meta:
        broadcast_into(parameter.data, comm, device, "initial_sync")
        partition(parameter, names[id(parameter)], comm, device, dtype)


class GatheredParameters:
    """Inside, the given partitioned parameters are whole.

    params: a parameter, any iterable of them, a module, or None. modifier_rank: that rank of the group may change
    values; when the context ends the change reaches every rank's part and the master weights. Without it changes are
    refused when the context ends: RuntimeError on all ranks, naming the parameter. fwd_module: register the
    parameters as external ones of this module. enabled: False for a context that does nothing. check: False to trust
    that nothing is changed, which saves reading every value twice. Contexts nest; what is not partitioned is left
    alone.

    If the block raises, the parameters are released and changes are dropped. Entered and left on all ranks, in the
    same order.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: torch.nn.Module | None = None,
        enabled: bool = True,
        check: bool = True,
    ) -> None:
        self._check = check
        self._modifier = modifier_rank
        self._handles: list[PartitionedParameter] = []
        self._digests: dict[int, torch.Tensor] = {}  # of what must not change
        self._saved: dict[int, torch.Tensor] = {}  # on one process, where the whole values are the shard itself
        if not enabled:
            return
        handles = [handle_of(parameter) for parameter in _parameters_in(params)]
        self._handles = list(dict.fromkeys(handle for handle in handles if handle is not None))
        if modifier_rank is not None and self._handles:
            world_size = self._handles[0].comm.world_size
            if isinstance(modifier_rank, bool) or not 0 <= modifier_rank < world_size:
                raise ValueError(
                    f"zero.GatheredParameters: expected modifier_rank from 0 to {world_size - 1} or None, got "
                    f"{modifier_rank!r}"
                )
        if fwd_module is not None:
            for handle in self._handles:
                register_external_parameter(fwd_module, handle.parameter)

    def __enter__(self) -> GatheredParameters:
        _hold(self._handles)
        if self._modifier is None and self._check:
            outermost = [handle for handle in self._handles if handle.held == 1]
            self._digests = {id(handle): content_hash(handle.view) for handle in outermost}
        self._saved = {id(h): h.shard.clone() for h in self._handles if h.comm.world_size == 1}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None:
                for handle in self._handles:
                    self._restore(handle)
            elif self._modifier is not None:
                self._write_changes(self._modifier)
            else:
                self._refuse_changes()
        finally:
            _unhold(self._handles)
            self._digests.clear()
            self._saved.clear()

    @torch.no_grad()
    def _write_changes(self, source: int) -> None:
        for handle in self._handles:
            self._take_replaced(handle)
            handle.comm.broadcast(handle.full[: handle.numel], "parameters", source)
            handle.write()

    @torch.no_grad()
    def _restore(self, handle: PartitionedParameter) -> None:
        """Drop what was written into a gathered parameter."""
        if id(handle) in self._saved:
            handle.shard.copy_(self._saved[id(handle)])
        if handle.status is AVAILABLE:
            handle.parameter.data = handle.view

    def _take_replaced(self, handle: PartitionedParameter) -> None:
        """``p.data = values`` put other memory in the parameter's place: bring its values home."""
        parameter = handle.parameter
        data = parameter.data
        if data.data_ptr() == handle.view.data_ptr() and data.stride() == handle.view.stride():
            return
        if data.shape != handle.shape:
            raise RuntimeError(
                f"zero.GatheredParameters: expected parameter '{handle.name}' to keep its shape "
                f"{tuple(handle.shape)}, it has {tuple(data.shape)} now"
            )
        handle.view.copy_(data)
        parameter.data = handle.view

    def _refuse_changes(self) -> None:
        outermost = [handle for handle in self._handles if id(handle) in self._digests]
        if not outermost:
            return
        comm = outermost[0].comm
        changed = torch.zeros(len(outermost), dtype=torch.int64, device=outermost[0].full.device)
        for position, handle in enumerate(outermost):
            now = content_hash(handle.parameter.data)
            changed[position] = (now != self._digests[id(handle)]).to(torch.int64)
        comm.all_reduce_max(changed, "parameters")
        guilty = [h for h, flag in zip(outermost, host_values(changed), strict=True) if flag]
        if guilty:
            for handle in guilty:
                self._restore(handle)
            refresh([handle for handle in guilty if handle.persistent])
            raise RuntimeError(
                "zero.GatheredParameters: parameters were changed inside a read-only context, so ranks would disagree: "
                f"{', '.join(handle.name for handle in guilty)}. The changes are dropped; pass modifier_rank=0 (the "
                "rank whose values everybody takes) to make some."
            )


def _hold(handles: Sequence[PartitionedParameter]) -> None:
    free, managed = _by_manager(handles)
    gather(free)
    for handle in free:
        handle.held += 1
    for coordinator, indices in managed:
        coordinator.hold(indices)


def _unhold(handles: Sequence[PartitionedParameter]) -> None:
    free, managed = _by_manager(handles)
    for handle in free:
        handle.held -= 1
        if not handle.held:
            handle.release()
    for coordinator, indices in managed:
        coordinator.unhold(indices)


def _by_manager(
    handles: Sequence[PartitionedParameter],
) -> tuple[list[PartitionedParameter], list[tuple[Any, list[int]]]]:
    """Those that belong to no engine, and those of each coordinator by its numbers."""
    free: list[PartitionedParameter] = []
    managed: dict[int, tuple[Any, list[int]]] = {}
    for handle in handles:
        coordinator = handle.manager() if handle.manager is not None else None
        if coordinator is None:
            free.append(handle)
        else:
            managed.setdefault(id(coordinator), (coordinator, []))[1].append(coordinator.index_of(handle))
    return free, list(managed.values())


def _parameters_in(params: Any) -> Iterator[torch.Tensor]:
    if params is None:
        return
    if isinstance(params, torch.nn.Module):
        yield from params.parameters()
    elif isinstance(params, torch.Tensor):
        yield params
    elif isinstance(params, Iterable):
        for item in params:
            yield from _parameters_in(item)
    else:
        raise ValueError(
            "zero.GatheredParameters: expected a parameter, an iterable of parameters, a module or None, got "
            f"{type(params).__name__}"
        )


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Gather ``parameter`` with ``module``, which uses it in its forward without owning it. Uses through another
    module's attribute are found without this. Called on all ranks."""
    if not isinstance(module, torch.nn.Module) or not isinstance(parameter, torch.nn.Parameter):
        raise ValueError(
            "zero.register_external_parameter: expected a module and a parameter, got "
            f"{type(module).__name__} and {type(parameter).__name__}"
        )
    known = module.__dict__.setdefault("_zero_external_parameters", [])
    if all(parameter is not other for other in known):
        known.append(parameter)
    handle = handle_of(parameter)
    coordinator = handle.manager() if handle is not None and handle.manager is not None else None
    if coordinator is not None:
        coordinator.add_external(module, handle)


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Undo :func:`register_external_parameter`. Raises ValueError if it was not registered. An engine that exists
    goes on gathering the two together; the next one does not."""
    known = external_parameters(module)
    rest = [other for other in known if other is not parameter]
    if len(rest) == len(known):
        raise ValueError(
            f"zero.unregister_external_parameter: the parameter of shape {tuple(getattr(parameter, 'ds_shape', ()))} "
            f"was not registered with this {type(module).__name__}"
        )
    module.__dict__["_zero_external_parameters"] = rest
