"""Graphs whose backward needs the values of a parameter when it is released again.

- Autograd saves which part of which parameter a tensor is (:class:`SavedView`), and gathers that in the backward.
- The node that accumulates a parameter's gradient is made while the parameter has its full shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zerolite.zero.stage3.comm_context import gather_copies
from zerolite.zero.stage3.partitioned_parameter import PartitionedParameter
from zerolite.zero.stage3.released_parameter import as_plain_tensors

if TYPE_CHECKING:
    from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator


class GatheredCopy:
    """Copy of the full values of a parameter, gathered at one moment, whose memory several tensors may share.

    Attributes:
        full: the values, flat and with padding.
        version: version of the parameter to which the values belong.
        replacements_before: number of ``p.data = values`` before the gather. The next one gives the parameter other
            values, and unlinks this copy from it.
    """

    __slots__ = ("full", "handle", "replacements_before", "version")

    def __init__(self, handle: PartitionedParameter, full: torch.Tensor) -> None:
        self.handle, self.full, self.version, self.replacements_before = (
            handle,
            full,
            handle.version,
            len(handle.replaced_at),
        )

    @property
    def linked(self) -> bool:
        """True if the copy still stands for the parameter, so that a change of one changes the other."""
        return self.replacements_before == len(self.handle.replaced_at)

    @property
    def stale(self) -> bool:
        """True if the parameter has changed since the gather, or may have, because a user holds it gathered.

        Raises:
            RuntimeError: for an unlinked copy that missed a change before it was unlinked.
        """
        if self.linked:
            return self.version != self.handle.version or self.handle.holds > 0
        if self.version != self.handle.replaced_at[self.replacements_before]:
            raise RuntimeError(
                f"a tensor that was taken from parameter '{self.handle.name}' before an update was not read between "
                "that and p.data = values, which has replaced its values: they are gone; clone a tensor to keep it"
            )
        return False

    def write(self) -> None:
        """Copy changed values into this rank's shard, if the copy is still linked."""
        if self.linked:
            self.handle.write(self.full)
            self.version = self.handle.version

    def update_from(self, other: GatheredCopy) -> None:
        """Take over the values of a newer copy."""
        self.full.copy_(other.full)
        self.version = other.version


def gathered_in(tensor: torch.Tensor, by_storage: Mapping[int, GatheredCopy]) -> GatheredCopy | None:
    """Return the copy whose memory ``tensor`` shares; None if there is none."""
    return by_storage.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None


class SavedView:
    """View of gathered values that autograd saves: the backward gathers them again."""

    __slots__ = ("handle", "shape", "start", "strides", "version")

    def __init__(self, gathered: GatheredCopy, tensor: torch.Tensor) -> None:
        self.handle, self.version = gathered.handle, gathered.handle.version
        self.shape, self.strides = tensor.shape, tensor.stride()
        self.start = tensor.storage_offset() - gathered.full.storage_offset()

    def unpack(self) -> torch.Tensor:
        """Gather and return the values. Called on all ranks, in the order of the backward's nodes, which is the same
        on all of them. Raises RuntimeError if the parameter has changed since the forward."""
        if self.handle.version != self.version:
            raise RuntimeError(
                f"parameter '{self.handle.name}' has changed since it was used in the forward whose backward this is; "
                "call backward before the step, or use a clone of it"
            )
        with as_plain_tensors(), torch.no_grad():
            return gather_copies([self.handle])[self.handle].as_strided(self.shape, self.strides, self.start)


def save_sources(
    by_storage: Mapping[int, GatheredCopy], keep: Callable[[PartitionedParameter], bool] | None = None
) -> torch.autograd.graph.saved_tensors_hooks:
    """Context in which autograd saves parts of a copy as :class:`SavedView`, without their memory.

    Args:
        by_storage: the copies, by the address of their storage.
        keep: tells if parts of a parameter are saved as they are at this moment; None: never.
    """

    def pack(tensor: torch.Tensor) -> torch.Tensor | SavedView:
        gathered = gathered_in(tensor, by_storage)
        if gathered is None or not gathered.linked or tensor.dtype != gathered.full.dtype:
            return tensor
        return tensor if keep is not None and keep(gathered.handle) else SavedView(gathered, tensor)

    return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


def _unpack(saved: torch.Tensor | SavedView) -> torch.Tensor:
    return saved.unpack() if isinstance(saved, SavedView) else saved


@contextlib.contextmanager
def graphs_outlive_gather(handles: Sequence[PartitionedParameter]) -> Iterator[list[PartitionedParameter]]:
    """Context in which graphs over the gathered parameters of an engine may be built whose backward comes when they are
    released again. It returns a list, which contains the parameters of such graphs on this rank when it has ended."""
    used: list[PartitionedParameter] = []
    outliving = [h for h in handles if not h.persistent and h.context.coordinator is not None]
    by_storage = {h.full.untyped_storage()._cdata: GatheredCopy(h, h.full) for h in outliving}
    nodes = [prepare_accumulation(handle) for handle in outliving]  # kept until a graph refers to them
    try:
        # The hooks of a group that is executing gather its parameters again in its backward.
        with save_sources(by_storage, lambda handle: coordinator_of(handle).is_executing(handle)):
            yield used
    finally:
        by_storage.clear()  # autograd keeps the pack hook
        nodes.clear()
        used += [handle for handle in outliving if _is_in_graph(handle)]


_SHOWS_SHAPE = "zerolite shows the shape"


def _is_in_graph(handle: PartitionedParameter) -> bool:
    """Return True if a graph refers to the node of :func:`prepare_accumulation`, which would be gone otherwise."""
    return handle.parameter.requires_grad and _SHOWS_SHAPE in _node_of(handle.parameter).metadata


def note_use_outside_groups(handles: Iterable[PartitionedParameter]) -> None:
    """Note that graphs use these parameters outside of all groups. Called on all ranks, in the same step."""
    for handle in handles:
        coordinator = handle.context.coordinator
        if coordinator is not None:
            coordinator.on_use_outside_groups()


def prepare_accumulation(handle: PartitionedParameter) -> torch.autograd.graph.Node | None:
    """Prepare a parameter for a gradient that comes when it is released again.

    An AccumulateGrad node remembers the shape of its parameter at creation, and one created with the shape [0] would
    refuse every gradient. So it is created now, while the parameter has its full shape. Its hook shows the full shape
    again before the gradient is accumulated.

    Returns:
        The node, to be kept until a graph refers to it, because the parameter references it weakly. None if the
        parameter requires no gradient.
    """
    if not handle.parameter.requires_grad:
        return None
    accumulator = _accumulator(handle)
    if _SHOWS_SHAPE not in accumulator.metadata:
        accumulator.metadata[_SHOWS_SHAPE] = True

        def show(gradients: object) -> None:
            coordinator = handle.context.coordinator
            if coordinator is None:
                handle.show_full_shape()
            else:
                coordinator.show_full_shape(handle)

        accumulator.register_prehook(show)
    return accumulator


def _node_of(parameter: torch.nn.Parameter) -> Any:
    """Return the parameter's AccumulateGrad node, a new one if no graph has one."""
    with torch.inference_mode(False), torch.enable_grad():
        return parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _accumulator(handle: PartitionedParameter) -> Any:
    """Return the AccumulateGrad node of a parameter that has its full shape.

    Raises:
        RuntimeError: a graph has one already that was created while the parameter was released.
    """
    accumulator = _node_of(handle.parameter)
    if tuple(accumulator._input_metadata[0].shape) != tuple(handle.shape):
        raise RuntimeError(
            f"parameter '{handle.name}' was given to a torch.autograd.Function (a fused loss, the adjoint of an ODE) "
            "while it was partitioned over ranks, so autograd would refuse its gradient. Expected it to be gathered: "
            "name the module whose forward calls the function in zero_optimization.leaf_modules, or call "
            "zerolite.zero.register_external_parameter(module, parameter) before the first step. Outside of a forward "
            "call the function inside zerolite.zero.GatheredParameters(parameters)"
        )
    return accumulator


def check_graphs(handles: Iterable[PartitionedParameter]) -> None:
    """Raise RuntimeError if a graph refers to one of these gathered parameters as it was while it was released.

    torch.autograd.Function tells no one that it is given a parameter.
    """
    for handle in handles:
        if handle.parameter.requires_grad:
            _accumulator(handle)


def coordinator_of(handle: PartitionedParameter) -> PartitionedParameterCoordinator:
    coordinator = handle.context.coordinator
    assert coordinator is not None, "the caller has looked"
    return coordinator
