"""One partitioned parameter: shard, gather, release.

::

    full     one flat tensor with the values of all ranks; its storage has memory only while the parameter is whole
    view     ``full`` in the parameter's shape and strides
    shard    this rank's part, which always has its values; on the device, the host or a disk

    NOT_AVAILABLE ── issue_all_gather ──▶ INFLIGHT ── AllGather.wait ──▶ AVAILABLE
          ▲            storage gets memory                p.data = view      │
          └── release: p.data = empty(0), storage is resized to nothing ─────┘

The storage of ``full`` is resized, and ``full`` never replaced, because autograd saves *views* of a weight (of
``x @ w.t()``, for one). They hold the storage, not the parameter. Replacing ``param.data`` would neither free their
memory nor bring the values back under them for the backward. The exception are aliases that a user may have taken:
they keep the old memory, and the parameter gets a new ``full``.

A record's fields are written here alone. Its gathers are launched by its :class:`CommContext`.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from zerolite.comm import Communicator
from zerolite.offload.placements import Placement
from zerolite.utils.accelerator import address
from zerolite.utils.memory_tags import COMPUTE, DEVICE, resize, tag_memory
from zerolite.zero.buffer import dense_strides, flattened
from zerolite.zero.layout import part_numel
from zerolite.zero.stage3.released_parameter import restore_class, set_released_class

if TYPE_CHECKING:
    from zerolite.zero.stage3.comm_context import AllGather, CommContext

_ids = itertools.count()


class ZeroParamStatus(enum.Enum):
    """State of the whole values of a partitioned parameter: on this rank, nowhere, or on their way."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


AVAILABLE, NOT_AVAILABLE, INFLIGHT = ZeroParamStatus


class PartitionedParameter:
    """Record behind the ``ds_*`` attributes of a partitioned parameter, which it references weakly.

    Attributes:
        context: communicator, device and shard reader; that of ``zero.Init`` until an engine takes the parameter over.
        index: number of the parameter in its engine.
        pending: the all-gather that brings the values, while they are in flight.
        storage: of ``full``; None where ``full`` is the shard itself (one rank, not offloaded).
        holds: number of open gather contexts (:class:`zero.GatheredParameters` is one): not released before they end.
        persistent: True for a parameter that is never released.
        may_have_aliases: True if a user may hold aliases of the whole values.
        writes: number of times that the user has written new values.
        replaced_at: ``version`` at each ``p.data = values``.
    """

    __slots__ = (
        "__weakref__",
        "context",
        "empty",
        "may_have_aliases",
        "full",
        "holds",
        "index",
        "name",
        "nbytes",
        "numel",
        "pending",
        "persistent",
        "placement",
        "ref",
        "replaced_at",
        "shape",
        "shard",
        "status",
        "storage",
        "strides",
        "view",
        "writes",
    )

    def __init__(
        self, parameter: torch.nn.Parameter, name: str, context: CommContext, placement: Placement | None = None
    ) -> None:
        """Keep this rank's part of ``parameter``, whose values are the same on all ranks, and release the rest.

        placement: where the part is kept; None: as the context says.
        """
        self.ref = weakref.ref(parameter)
        self.name = name
        self.context = context
        self.index = -1
        self.shape = parameter.shape
        self.numel = parameter.numel()
        self.strides = dense_strides(parameter.data)
        self.pending: AllGather | None = None
        self.may_have_aliases = False
        self.persistent = False
        self.holds = 0
        self.writes = 0
        self.replaced_at: list[tuple[int, int]] = []
        comm, part = context.comm, part_numel(self.numel, context.comm.world_size)
        placement = placement or context.placement_of(part)
        values = flattened(parameter.data)
        shard = placement.zeros(part, parameter.dtype, COMPUTE)
        mine = values[comm.rank * part : (comm.rank + 1) * part]
        shard[: mine.numel()].copy_(mine)
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=context.device)
        del values, mine  # before there is other memory
        self._set_shard(parameter, shard, placement)
        vars(parameter).update(
            ds_id=next(_ids),
            ds_shape=self.shape,
            ds_numel=self.numel,
            partition=self.partition,
            all_gather=self.all_gather,
            partition_numel=self.partition_numel,
            _zero_handle=self,
        )

    def __reduce__(self) -> Any:
        raise RuntimeError(
            f"parameter '{self.name}' is partitioned over ranks and cannot be pickled; save engine.full_state_dict(), "
            "or a whole copy: copy.deepcopy(engine.module)"
        )

    # ---------------------------------------------------------------- memory

    def _set_shard(self, parameter: torch.nn.Parameter, shard: torch.Tensor, placement: Placement) -> None:
        """``shard`` [part_numel(numel, world_size)] of ``placement`` is this rank's part from now on; its dtype is the
        parameter's, which is released."""
        if self.context.reader is not None:
            self.context.reader.forget()
        self.shard = tag_memory(shard, COMPUTE, placement.place)
        self.placement = placement
        self.empty = torch.empty(0, dtype=shard.dtype, device=self.context.device)
        self._create_full()
        restore_class(parameter)
        parameter.data = self.empty
        set_released_class(parameter)
        vars(parameter).update(ds_tensor=shard, ds_status=NOT_AVAILABLE)
        self.status = NOT_AVAILABLE

    @torch.inference_mode(False)  # the tensors outlive the user's inference mode, and are used outside of it
    def _create_full(self) -> None:
        """Make a ``full`` without memory; on one rank it is the shard, if that is on the device."""
        self.may_have_aliases = False
        self.context.on_allocation()
        self.storage: torch.UntypedStorage | None = None
        shard, world_size = self.shard, self.context.comm.world_size
        if world_size == 1 and self.placement.place == DEVICE:
            self.full = shard
        else:
            self.full = torch.empty(shard.numel() * world_size, dtype=shard.dtype, device=self.context.device)
            self.storage = self.full.untyped_storage()
        self.nbytes = self.full.numel() * self.full.element_size()
        self.view = self.full.as_strided(self.shape, self.strides)
        if self.storage is not None:
            resize(self.storage, 0)

    def move_shard(self, target: torch.Tensor, placement: Placement) -> None:
        """Copy the shard, rounded to ``target``'s dtype, into ``target``, of ``placement``, which is the shard from now
        on."""
        whole = self.status is AVAILABLE
        self.release()
        target.copy_(self.shard)
        self.writes += 1  # holders of the old memory must look again
        self._set_shard(self.parameter, target, placement)
        if whole:
            self.context.gather([self])

    def allow_aliases(self) -> None:
        """Let aliases of the whole values, which a user may take from now on, keep their memory after a release."""
        self.may_have_aliases = True

    def copy_assigned_data(self) -> None:
        """Copy the values of ``p.data = values`` into the parameter's own memory, and point it there. Nothing if no
        user has put other memory of the same shape in its place."""
        data, view = self.parameter.data, self.view
        if address(data) == address(view) and data.stride() == view.stride() and data.dtype == view.dtype:
            return
        if data.untyped_storage()._cdata == view.untyped_storage()._cdata:
            data = data.clone()
        view.copy_(data)
        self.restore_data()

    def restore_data(self) -> None:
        """Give the parameter, which is available, its own memory back, whatever ``p.data = values`` has put there."""
        self.parameter.data = self.view

    # ---------------------------------------------------------------- who has it

    def attach_to_engine(self, context: CommContext, index: int, name: str) -> None:
        """Become parameter ``index`` of an engine, released."""
        self.release()
        self.context, self.index, self.name = context, index, name
        self.persistent, self.holds = False, 0

    def rename(self, name: str) -> None:
        """Be called ``name`` in messages."""
        self.name = name

    def make_persistent(self) -> None:
        """Never release the parameter from now on."""
        self.persistent = True

    @property
    def comm(self) -> Communicator:
        """Communicator of the gathers."""
        return self.context.comm

    @property
    def parameter(self) -> torch.nn.Parameter:
        parameter = self.ref()
        assert parameter is not None, "a parameter outlives the code that works on it"
        return parameter

    @property
    def frozen(self) -> bool:
        parameter = self.ref()
        return parameter is not None and not parameter.requires_grad

    # ---------------------------------------------------------------- values

    @property
    def has_full_values(self) -> bool:
        """True if ``full`` has the values."""
        return self.status is AVAILABLE or self.storage is None

    @property
    def version(self) -> tuple[int, int]:
        """Number of changes of the values, by updates and by writes; the same on all ranks."""
        return self.context.updates, self.writes

    def local_part(self, full: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's part of ``full`` (None: the parameter's own, which is valid while it is available), without
        padding."""
        part = self.shard.numel()
        start = min(self.comm.rank * part, self.numel)
        return (self.full if full is None else full)[start : min(start + part, self.numel)]

    def write(self, full: torch.Tensor | None = None) -> None:
        """Take into this rank's part what has been changed, alike on all ranks, in ``full`` (None: the parameter's
        own). The next update takes it into the masters where they do not round to it."""
        self.writes += 1
        if full is not None and full is not self.full and self.has_full_values:
            self.full.copy_(full)
        if self.storage is not None:
            part = self.local_part(full)
            self.shard[: part.numel()].copy_(part)
            if self.context.reader is not None:
                self.context.reader.on_written(self)

    def on_written_in_place(self) -> None:
        """The shard, and the whole values where they are here, have been given other values."""
        self.writes += 1

    def replace_values(self, full: torch.Tensor) -> None:
        """Take the whole values of ``p.data = values``, alike on all ranks. Aliases taken before keep the old ones."""
        self.replaced_at.append(self.version)
        self.write(full)

    # ---------------------------------------------------------------- what users call

    def all_gather(self) -> None:
        """Make the parameter whole until :meth:`partition` is called or the engine releases it. Called on all ranks,
        in the same order."""
        self.may_have_aliases = True
        with torch._C.DisableTorchFunction():  # inside zero.Init its function mode would see a parameter in use
            self.context.gather_for_user(self)

    def partition(self) -> None:
        """Drop the whole values, unless they are to stay (small parameters, open gather contexts). Changes to them are
        lost: see ``zero.GatheredParameters`` for how to make some."""
        if not self.persistent and not self.holds:
            with torch._C.DisableTorchFunction():
                self.release()

    def partition_numel(self) -> int:
        """Elements in ``ds_tensor``, padding included: the same on every rank."""
        return self.shard.numel()

    def full_copy(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """``copy.deepcopy``: an ordinary whole parameter of its own. Called on all ranks, in the same order."""
        parameter = self.parameter
        known = memo.get(id(parameter))
        if known is not None:
            return known
        values = torch.empty_strided(self.shape, self.strides, dtype=self.full.dtype, device=self.full.device)
        if self.status is AVAILABLE:
            values.copy_(parameter.data)  # which is not ``view`` after ``p.data = values``
        else:
            values.copy_(self.context.gather_copies([self])[0].as_strided(self.shape, self.strides))
        copied = torch.nn.Parameter(values, parameter.requires_grad)
        vars(copied).update(user_attributes(parameter))
        memo[id(parameter)] = copied
        return copied

    def unpartition(self) -> None:
        """Turn the parameter back into an ordinary one. Called on all ranks, in the same order."""
        parameter = self.parameter
        self.context.gather([self])
        parameter.data = self.view
        for name in vars(parameter).keys() - user_attributes(parameter).keys():
            delattr(parameter, name)

    # ---------------------------------------------------------------- states

    def hold(self) -> bool:
        """Begin a gather context; contexts nest. True if this is the outermost."""
        if self.persistent:
            return False
        self.holds += 1
        return self.holds == 1

    def unhold(self) -> bool:
        """End a gather context. True if this was the outermost."""
        if self.persistent or not self.holds:
            return False
        self.holds -= 1
        return not self.holds

    def release(self) -> None:
        """Drop the whole values, or end the gather that brings them. Nothing if they are not there."""
        if self.pending is not None:
            self.pending.wait()
        if self.status is AVAILABLE:
            self.free_full_values()

    def mark_stale(self) -> None:
        """Mark whole values as outdated: they are to be gathered again, into the memory that they have."""
        assert self.status is AVAILABLE, self.name
        self.status = NOT_AVAILABLE

    def free_full_values(self) -> None:
        """Go to NOT_AVAILABLE from any state, after a gather that has failed too."""
        self.pending = None
        self.status = NOT_AVAILABLE
        parameter = self.ref()
        if parameter is not None:
            if type(parameter) is not torch.nn.Parameter:  # it was never open, or is of a user's class
                restore_class(parameter)
            parameter.data = self.empty
            parameter.ds_status = NOT_AVAILABLE  # type: ignore[attr-defined]
            set_released_class(parameter)
        if self.storage is None:
            return
        if self.may_have_aliases:  # aliases that the user has taken keep the old memory
            self._create_full()
        else:
            resize(self.storage, 0)

    def show_shape(self) -> None:
        """Give a parameter that is not available its shape, without memory, until :meth:`free_full_values` or a gather:
        autograd compares the shape of a gradient with it."""
        parameter = self.ref()
        if self.status is not AVAILABLE and parameter is not None:
            restore_class(parameter)
            parameter.data = self.empty.new_empty(()).expand(self.shape)
            set_released_class(parameter)


def mark_in_flight(members: Sequence[PartitionedParameter], gather: AllGather) -> None:
    """Go from NOT_AVAILABLE to INFLIGHT: ``gather`` brings the whole values."""
    for member in members:
        assert member.status is NOT_AVAILABLE, member.name
        member.pending = gather
        member.status = INFLIGHT
        member.ref().ds_status = INFLIGHT  # type: ignore[union-attr]


def mark_available(members: Sequence[PartitionedParameter]) -> None:
    """Go from INFLIGHT to AVAILABLE: the whole values may be read.

    ``p.data = view`` keeps the parameter's version counter. So autograd, which compares the counters of what it has
    saved, does not take the gather for a change in place.
    """
    for member in members:
        assert member.status is INFLIGHT, member.name
        member.pending = None
        member.status = AVAILABLE
        parameter = member.ref()
        if parameter is not None:
            restore_class(parameter)
            parameter.data = member.view
            parameter.ds_status = AVAILABLE  # type: ignore[attr-defined]


_OURS = ("partition", "all_gather", "partition_numel", "__deepcopy__", "_zero_handle")


def user_attributes(parameter: torch.nn.Parameter) -> dict[str, Any]:
    """Return the attributes that a user has set on a partitioned parameter."""
    return {k: value for k, value in vars(parameter).items() if not (k.startswith("ds_") or k in _OURS)}


def handle_of(tensor: object) -> PartitionedParameter | None:
    """Return the record of a partitioned parameter; None for anything else."""
    return getattr(tensor, "_zero_handle", None)


def move_shard(parameter: torch.nn.Parameter, target: torch.Tensor, placement: Placement) -> None:
    """Bring a partitioned parameter's shard to ``target``, of ``placement``, in its dtype."""
    handle = handle_of(parameter)
    assert handle is not None
    handle.move_shard(target, placement)


def unpartitioned_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape of ``parameter`` when it is whole."""
    return getattr(parameter, "ds_shape", parameter.shape)


def unpartitioned_numel(parameter: torch.Tensor) -> int:
    """The elements of ``parameter`` when it is whole."""
    return getattr(parameter, "ds_numel", parameter.numel())
