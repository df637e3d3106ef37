"""``zero.GatheredParameters``: full values of partitioned parameters for a block of code that reads or changes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch

from zerolite.comm import collective
from zerolite.comm.flight_recorder import NOTHING_MAY_FOLLOW
from zerolite.comm.initial_sync import broadcast_flat, content_hash
from zerolite.utils.accelerator import address, host_values
from zerolite.utils.torch_private import without_functions
from zerolite.zero.inner_tensors import inner_tensors
from zerolite.zero.stage3.available_parameters import refresh
from zerolite.zero.stage3.group_plan import register_external_parameter
from zerolite.zero.stage3.live_view import changed_error
from zerolite.zero.stage3.param_group import group_by_context
from zerolite.zero.stage3.partitioned_parameter import AVAILABLE, NOT_AVAILABLE, PartitionedParameter, sharded_param_of

_entered_contexts: list[GatheredParameters] = []  # the innermost last
_WATCHED = "zerolite: a graph inside of GatheredParameters"
_RAISED = 2  # flag of a parameter: the block has raised on the modifier_rank


class GatheredParameters:
    """Context in which the given partitioned parameters have their full values.

    Args:
        params: a parameter, any iterable of them, a module, or None.
        modifier_rank: the rank of the group that may change values. When the context ends, its values reach the shards
            of all ranks and the master weights. None: a change raises RuntimeError on all ranks when the context ends.
        fwd_module: register the parameters as external ones of this module.
        enabled: False for a context that does nothing.
        check: False to trust that nothing is changed, which saves reading every value twice.

    Contexts nest. Parameters that are not partitioned are left alone, so at stages 0 to 2 all ranks must make a change.
    If the block raises, the parameters are released and changes are dropped; so they are on all ranks if it raises on
    ``modifier_rank`` alone, which is an error there too. A tensor that shares memory with a parameter (``p.data``, a
    view) keeps that memory alive beyond the context, and so does a graph that was built inside, until its backward.
    Entered and left on all ranks, in the same order.
    """

    def __init__(
        self,
        params: object,
        modifier_rank: int | None = None,
        fwd_module: torch.nn.Module | None = None,
        enabled: bool = True,
        check: bool = True,
    ) -> None:
        self._check = check
        self._modifier = modifier_rank
        self._sharded_params: list[PartitionedParameter] = []
        # Content hashes of values that must not change.
        self._digests: dict[PartitionedParameter, torch.Tensor] = {}
        # Copies of full values that the context does not release at its end, to undo changes.
        self._values_before: dict[PartitionedParameter, torch.Tensor] = {}
        self._graphs = contextlib.ExitStack()  # context for graphs that are built inside
        self._nodes: list[Any] = []  # their ends at the parameters
        self._in_graphs: list[PartitionedParameter] = []  # parameters that graphs on this rank refer to, at the end
        if not enabled:
            return
        self._parameters = list(_parameters_in(params))  # sharded_params reference them weakly
        sharded_params = [sharded_param_of(parameter) for parameter in self._parameters]
        self._sharded_params = list(
            dict.fromkeys(sharded_param for sharded_param in sharded_params if sharded_param is not None)
        )
        if modifier_rank is not None and any(p.groups.spread > 1 for p in self._sharded_params):
            raise ValueError(
                "zero.GatheredParameters: expected modifier_rank=None for parameters of experts, of which no rank has "
                f"all values (expert_parallel), got {modifier_rank!r}; call zerolite.set_full_master or "
                "engine.load_full_state_dict"
            )
        if modifier_rank is not None and self._sharded_params:
            world_size = self._sharded_params[0].groups.mean.world_size
            is_integer = isinstance(modifier_rank, int) and not isinstance(modifier_rank, bool)
            if not is_integer or not 0 <= modifier_rank < world_size:
                raise ValueError(
                    f"zero.GatheredParameters: expected modifier_rank from 0 to {world_size - 1} or None, got "
                    f"{modifier_rank!r}"
                )
        if fwd_module is not None:
            for sharded_param in self._sharded_params:
                register_external_parameter(fwd_module, sharded_param.parameter)

    def __enter__(self) -> GatheredParameters:
        with without_functions():
            outliving = [p for p in self._sharded_params if p.storage is None or p.status is not NOT_AVAILABLE]
            with contextlib.ExitStack() as undo:
                for context, sharded_params in group_by_context(self._sharded_params):
                    context.pin(sharded_params)
                    undo.callback(context.unpin, sharded_params)
                for sharded_param in self._sharded_params:
                    sharded_param.copy_assigned_data()
                    sharded_param.allow_aliases()  # the block may keep aliases of the values
                if self._check:
                    self._values_before = {sharded_param: sharded_param.full.clone() for sharded_param in outliving}
                    if self._modifier is None:
                        self._digests = {
                            sharded_param: content_hash(sharded_param.view) for sharded_param in self._sharded_params
                        }
                if torch.is_grad_enabled() and self._sharded_params:
                    self._watch_graphs()
                undo.pop_all()  # entered without an error, such as out of memory
            _entered_contexts.append(self)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with without_functions():
            self._find_graphs()
            _entered_contexts.remove(self)
            error_text: str | None = None
            changed: list[PartitionedParameter] = []
            failed = error is not None
            try:
                if failed:
                    self.drop_changes()
                # A rank whose block has raised takes part in what the others launch here: if its program catches the
                # exception, it would be one collective behind for ever.
                if error is None or (isinstance(error, Exception) and not isinstance(error, NOTHING_MAY_FOLLOW)):
                    if self._modifier is not None:
                        error_text = self._write_changes(self._modifier, failed)
                    else:
                        changed = self._find_and_drop_changes(failed)
            finally:
                for context, sharded_params in group_by_context(self._sharded_params):
                    context.unpin(sharded_params)
                values_before, self._values_before = self._values_before, {}
                self._digests = {}
            if changed:
                # Those that stay available still have the changes: gather them again from the shards.
                refresh([p for p in changed if p.status is AVAILABLE and p not in values_before])
        if error_text and not failed:
            raise RuntimeError(f"zero.GatheredParameters: {error_text}")
        if changed and not failed:
            self._report_dropped([sharded_param.name for sharded_param in changed])

    def _watch_graphs(self) -> None:
        """Let graphs that are built inside outlive the context, and mark their ends at the parameters."""
        outliving = [p for p in self._sharded_params if not p.persistent]
        self._graphs.enter_context(_save_values(outliving))
        of_engines = [p.parameter for p in outliving if p.coordinator is not None]
        self._nodes = [_graph_end(parameter) for parameter in of_engines if parameter.requires_grad]
        for node in self._nodes:
            node.metadata[_WATCHED] = True

    def _find_graphs(self) -> None:
        """Find the parameters to which graphs refer. The marked ends of others are gone."""
        self._graphs.close()
        watched, self._nodes = bool(self._nodes), []
        for sharded_param in self._sharded_params if watched else ():
            parameter = sharded_param.parameter
            if parameter.requires_grad and _WATCHED in _graph_end(parameter).metadata:
                self._in_graphs.append(sharded_param)

    @collective
    def _report_dropped(self, names: Sequence[str]) -> None:
        """Report dropped changes of the parameters ``names``. All ranks pass the same names."""
        raise RuntimeError(
            "zero.GatheredParameters: parameters were changed inside a read-only context, so ranks would disagree: "
            f"{', '.join(names)}. The changes are dropped; pass modifier_rank=0 (the rank whose values all ranks "
            "take) to make some."
        )

    @collective
    @torch.no_grad()
    def drop_changes(self) -> None:
        """Drop the changes since the context was entered. Parameters that outlive the context get their values back;
        the others are released at its end."""
        for sharded_param in self._sharded_params:
            if sharded_param in self._values_before:
                sharded_param.full.copy_(self._values_before[sharded_param])
            else:
                self._digests.pop(sharded_param, None)
            if sharded_param.status is AVAILABLE:
                sharded_param.restore_data()

    def _agree(self, flags: Sequence[int | torch.Tensor]) -> list[int]:
        """Return the largest flags of all ranks. A further one tells them if a graph of any rank uses the parameters:
        then all ranks launch the reductions of the next backward at its end."""
        together = torch.zeros(len(flags) + 1, dtype=torch.int64, device=self._sharded_params[0].context.device)
        for place, flag in enumerate((*flags, int(bool(self._in_graphs)))):
            together[place] = flag
        groups = self._sharded_params[0].groups
        some_are_spread = any(sharded_param.groups.spread > 1 for sharded_param in self._sharded_params)
        (groups.agree if some_are_spread else groups.mean).all_reduce_max(together, "parameters")
        *agreed, in_graphs = host_values(together)
        if in_graphs:
            _note_use_outside_groups(self._sharded_params)
        return list(map(int, agreed))

    @torch.no_grad()
    def _write_changes(self, source: int, failed: bool) -> str | None:
        """Copy the values of rank ``source`` to all ranks, unless its block has raised (``failed``). Return an error
        message, the same on all ranks, or None."""
        if not self._sharded_params:
            return None
        ranks = self._sharded_params[0].groups.mean
        fits = [sharded_param.parameter.data.shape == sharded_param.shape for sharded_param in self._sharded_params]
        of_source = [_RAISED] * len(fits) if failed else [int(not fit) for fit in fits]
        flags = self._agree(of_source if ranks.rank == source else [0] * len(fits))
        if flags[0] == _RAISED:
            self.drop_changes()
            return f"the block has raised an exception on rank {source}, the modifier_rank. Nothing is changed"
        wrong = [sharded_param for sharded_param, flag in zip(self._sharded_params, flags, strict=True) if flag]
        if wrong:
            self.drop_changes()
            names = ", ".join(f"{sharded_param.name} {tuple(sharded_param.shape)}" for sharded_param in wrong)
            return f"expected parameters to keep their shapes, rank {source} gave others to {names}. Nothing is changed"
        for sharded_param, fit in zip(self._sharded_params, fits, strict=True):
            if fit:
                sharded_param.copy_assigned_data()
            else:
                sharded_param.restore_data()
            broadcast_flat(sharded_param.full[: sharded_param.numel], sharded_param.groups.mean, "parameters", source)
            sharded_param.write()
            for context in _entered_contexts:  # contexts around this one must not take the change for their own
                if sharded_param in context._digests:
                    context._digests[sharded_param] = content_hash(sharded_param.view)
                if sharded_param in context._values_before:
                    context._values_before[sharded_param].copy_(sharded_param.full)
        return None

    def _find_and_drop_changes(self, failed: bool) -> list[PartitionedParameter]:
        """Return the parameters that any rank has changed, the same on all ranks, and drop the changes. failed: the
        block has raised on this rank, whose changes are dropped already."""
        if not self._check and any(sharded_param.coordinator is not None for sharded_param in self._sharded_params):
            self._agree(())
        if not (self._check and self._sharded_params):
            return []
        flags: list[Any] = [0] * len(self._sharded_params)
        for position, sharded_param in enumerate(self._sharded_params):
            if failed or sharded_param not in self._digests:
                continue
            data = sharded_param.parameter.data
            same = data.shape == sharded_param.shape and data.dtype == sharded_param.shard.dtype
            flags[position] = content_hash(data) != self._digests[sharded_param] if same else 1
            if same and address(data) != address(sharded_param.view):
                sharded_param.restore_data()
        # All ranks get the same flags and compose the same message, so they exchange no text.
        changed = [
            sharded_param for sharded_param, flag in zip(self._sharded_params, self._agree(flags), strict=True) if flag
        ]
        if changed:
            self.drop_changes()
        return changed


class _SavedValues(NamedTuple):
    """Values that a graph needs, in memory that the end of the context leaves alone.

    Attributes:
        values: the tensor that autograd saves, without its graph.
        sharded_param: the parameter whose values they are.
        version: its version when they were saved.
    """

    values: torch.Tensor
    sharded_param: PartitionedParameter
    version: tuple[int, int]


def _save_values(sharded_params: Sequence[PartitionedParameter]) -> torch.autograd.graph.saved_tensors_hooks:
    """Context in which autograd saves the values of these gathered parameters, and not the parameters themselves, which
    are released before the backward. So the backward gathers nothing, and may run on one rank alone."""
    by_storage = {id(p.storage): p for p in sharded_params if p.storage is not None}

    def pack(tensor: torch.Tensor) -> object:
        sharded_param = by_storage.get(id(tensor.untyped_storage())) if tensor.layout is torch.strided else None
        return tensor if sharded_param is None else _SavedValues(tensor.detach(), sharded_param, sharded_param.version)

    return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


def _unpack(saved: torch.Tensor | _SavedValues) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    if saved.version != saved.sharded_param.version:
        raise changed_error(saved.sharded_param.name)
    return saved.values


def _graph_end(parameter: torch.nn.Parameter) -> Any:
    """Return the node of graphs that accumulates the parameter's gradient, a new one if no graph has one."""
    with torch.inference_mode(False), torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


@collective
def _note_use_outside_groups(sharded_params: Iterable[PartitionedParameter]) -> None:
    """Note that graphs use these parameters outside of all groups. Called on all ranks, in the same step."""
    for sharded_param in sharded_params:
        if sharded_param.coordinator is not None:
            sharded_param.coordinator.on_use_outside_groups()


def check_not_gathered(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raise RuntimeError for a parameter inside an open context. Otherwise the end of the context would release it
    while the engine uses it."""
    inside = {sharded_param for context in _entered_contexts for sharded_param in context._sharded_params}
    for sharded_param in map(sharded_param_of, parameters) if inside else ():
        if sharded_param in inside:
            raise RuntimeError(
                f"zerolite.initialize: parameter '{sharded_param.name}' is inside a zero.GatheredParameters context; "
                "call zerolite.initialize after the context has ended"
            )


def _parameters_in(params: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``params``. Raises ValueError for other objects."""
    if params is None:
        return
    if isinstance(params, torch.nn.Module):
        yield from params.parameters()
    elif isinstance(params, torch.Tensor):
        yield from inner_tensors(params)
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes)):
        for each in params.values() if isinstance(params, Mapping) else params:
            yield from _parameters_in(each)
    else:
        raise ValueError(
            "zero.GatheredParameters: expected a parameter, an iterable of parameters, a module or None, got "
            f"{type(params).__name__}"
        )
