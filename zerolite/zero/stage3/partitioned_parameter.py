"""One partitioned parameter: shard, all-gather, release (FSDP2: ``FSDPParam``).

::

    shard    this rank's part, flat and padded; always has its values, on the device, the host or a disk
    full     the values of all ranks, flat; its storage has memory only while they are gathered
    view     ``full`` in the parameter's shape and strides

    NOT_AVAILABLE ── issue_all_gather ──▶ INFLIGHT ── AllGather.wait ──▶ AVAILABLE
          ▲          storage.resize_(n)                 p.data = view        │
          └────── release: p.data = absent, storage.resize_(0) ──────────────┘

The storage of ``full`` is resized and never replaced, because autograd saves *views* of a weight (for ``x @ w.t()``,
for example). A saved view holds the storage, not the parameter. Replacing ``p.data`` alone would not free that memory,
and the backward would not find the values that are gathered again. There is one exception: if a user may hold aliases
from ``GatheredParameters``, they keep the old storage and the parameter gets a new ``full``.

``absent`` is one element, not a number, expanded to the parameter's shape. So what autograd remembers of a released
parameter is right, and what reads it past torch's functions computes NaN.

Only this module writes the fields of a :class:`PartitionedParameter`. Its :class:`CommContext` launches the gathers.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from zerolite.comm import collective
from zerolite.offload.placement import Placement
from zerolite.utils.accelerator import address
from zerolite.utils.memory_tags import COMPUTE, DEVICE, resize, tag_memory
from zerolite.utils.nested import Arguments, Function, Keywords
from zerolite.utils.torch_private import as_plain_tensors, without_functions
from zerolite.zero.flat import dense_strides, flattened
from zerolite.zero.groups import RankGroups
from zerolite.zero.layout import shard_numel
from zerolite.zero.stage3.absent_parameter import (
    copy_with_values,
    not_a_number,
    restore_class,
    set_absent_class,
    user_attributes,
)
from zerolite.zero.stage3.live_view import no_gather_error, run_released

if TYPE_CHECKING:
    from zerolite.zero.stage3.param_group import AllGather, CommContext
    from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator

_ids = itertools.count()


class ZeroParamStatus(enum.Enum):
    """State of the full values of a partitioned parameter on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


AVAILABLE, NOT_AVAILABLE, INFLIGHT = ZeroParamStatus


class PartitionedParameter:
    """State of one partitioned parameter, behind its ``ds_*`` attributes. Refers to the parameter weakly.

    Attributes:
        context: communicator, device and shard reader; the context of ``zero.Init`` until an engine takes over.
        index: number of the parameter in its engine; -1 without an engine.
        pending: the all-gather of the values, while they are in flight.
        storage: storage of ``full``; None where ``full`` is the shard itself (one rank, shard on the device).
        pin_count: number of open gather contexts, such as :class:`zero.GatheredParameters`; above 0 it is not released.
        persistent: True for a parameter that is never released.
        may_have_aliases: True if a user may hold tensors that share memory with ``full``.
        writes: number of times that the user has written new values.
        seen_version: the parameter's own version counter when its values were gathered, or a gather context ended. If
            the counter has grown, the model has written values in place. None while it is not available.
    """

    __slots__ = (
        "__weakref__",
        "absent",
        "context",
        "full",
        "pin_count",
        "index",
        "may_have_aliases",
        "name",
        "nbytes",
        "numel",
        "pending",
        "persistent",
        "placement",
        "ref",
        "seen_version",
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
        """Keep this rank's part of ``parameter`` and release the rest.

        Args:
            parameter: an ordinary parameter with the same values on all ranks.
            name: qualified name, for messages.
            placement: placement of the shard; None for the one that the context chooses.
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
        self.pin_count = 0
        self.writes = 0
        self.seen_version: int | None = None
        ranks, part = context.groups.shard, shard_numel(self.numel, context.groups.shard.world_size)
        placement = placement or context.placement_of(part)
        values = flattened(parameter.data)
        shard = placement.zeros(part, parameter.dtype, COMPUTE)
        mine = values[ranks.rank * part : (ranks.rank + 1) * part]
        shard[: mine.numel()].copy_(mine)
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=context.device)
        del values, mine  # free the full values before `full` is allocated
        self._set_shard(parameter, shard, placement)
        vars(parameter).update(
            ds_id=next(_ids),
            ds_shape=self.shape,
            ds_numel=self.numel,
            ds_status=AVAILABLE,  # what an absent parameter is, its class knows
            partition=self.partition,
            all_gather=self.all_gather,
            partition_numel=self.partition_numel,
            _sharded_param=self,
        )

    def __reduce__(self) -> Any:
        raise RuntimeError(
            f"parameter '{self.name}' is partitioned over ranks and cannot be pickled; save engine.full_state_dict(), "
            "or a full copy: copy.deepcopy(engine.module)"
        )

    # ---------------------------------------------------------------- memory

    def _set_shard(self, parameter: torch.nn.Parameter, shard: torch.Tensor, placement: Placement) -> None:
        """Make ``shard`` [shard_numel(numel, world_size)], which lies in ``placement``, this rank's shard, and release
        the parameter. The parameter takes the dtype of the shard."""
        if self.context.reader is not None:
            self.context.reader.drop_reads()  # it may have read the old shard ahead
        self.shard = tag_memory(shard, COMPUTE, placement.location)
        self.placement = placement
        self.absent = not_a_number(shard.dtype, self.context.device).expand(self.shape)
        self._create_full()
        restore_class(parameter)  # an absent one would refuse the assignment
        parameter.data = self.absent if self.storage is not None else self.view
        set_absent_class(parameter)
        vars(parameter)["ds_tensor"] = shard
        self.status = NOT_AVAILABLE

    @torch.inference_mode(False)  # the tensors outlive the user's inference mode, and are used outside of it
    def _create_full(self) -> None:
        """Create ``full`` with an empty storage. On one rank ``full`` is the shard itself if that is on the device."""
        self.may_have_aliases = False
        self.context.on_allocation()
        self.full = self.view = self.absent  # free the old memory before there is new
        self.storage: torch.UntypedStorage | None = None
        shard, world_size = self.shard, self.context.groups.shard.world_size
        if world_size == 1 and self.placement.location == DEVICE:
            self.full = shard
        else:
            self.full = torch.empty(shard.numel() * world_size, dtype=shard.dtype, device=self.context.device)
            self.storage = self.full.untyped_storage()
        self.nbytes = self.full.numel() * self.full.element_size()
        self.view = self.full.as_strided(self.shape, self.strides)
        if self.storage is not None:
            resize(self.storage, 0)  # only now: as_strided checks that the storage is large enough

    def move_shard(self, target: torch.Tensor, placement: Placement) -> None:
        """Copy the shard into ``target`` of ``placement``, in the dtype of ``target``, which becomes the shard."""
        was_available = self.status is AVAILABLE
        self.release()
        target.copy_(self.shard)
        self.writes += 1  # holders of copies compare versions: `full` is another tensor from here on
        self._set_shard(self.parameter, target, placement)
        if was_available:
            self.context.gather([self])

    def allow_aliases(self) -> None:
        """Let tensors that a user may take from the full values from now on keep their memory after a release."""
        self.may_have_aliases = True

    def copy_assigned_data(self) -> None:
        """Copy the values that a user has set by ``p.data = values`` into ``full``, and point the parameter back to
        it. Does nothing if ``p.data`` is still ``view``."""
        data, view = self.parameter.data, self.view
        if address(data) == address(view) and data.stride() == view.stride() and data.dtype == view.dtype:
            return
        if data.untyped_storage() is view.untyped_storage():  # another view of `full`: they may overlap
            data = data.clone()
        view.copy_(data)
        self.restore_data()

    def restore_data(self) -> None:
        """Point an available parameter back to ``full`` and drop what a user has set by ``p.data = values``."""
        self.parameter.data = self.view

    # ---------------------------------------------------------------- engine and identity

    def attach_to_engine(self, context: CommContext, index: int, name: str) -> None:
        """Release the parameter and make it parameter ``index`` of an engine."""
        self.release()
        self.context, self.index, self.name = context, index, name
        self.persistent, self.pin_count = False, 0

    def rename(self, name: str) -> None:
        """Set the name that messages use."""
        self.name = name

    def make_persistent(self) -> None:
        """Keep the full values from the next gather on: the parameter is never released."""
        self.persistent = True

    @property
    def groups(self) -> RankGroups:
        """The ranks that shard the parameter, with the communicators of its gathers."""
        return self.context.groups

    @property
    def parameter(self) -> torch.nn.Parameter:
        parameter = self.ref()
        assert parameter is not None, "a parameter outlives the code that works on it"
        return parameter

    # ---------------------------------------------------------------- values

    @property
    def has_full_values(self) -> bool:
        """True if ``full`` has the values of all ranks."""
        return self.status is AVAILABLE or self.storage is None

    @property
    def version(self) -> tuple[int, int]:
        """Numbers of updates by the engine and of writes by the user so far; the same on all ranks."""
        return self.context.shared.updates, self.writes

    def local_shard(self, full: torch.Tensor | None = None) -> torch.Tensor:
        """Return this rank's part of ``full``, without padding.

        Args:
            full: full values, flat; None for the parameter's own, which are valid while it is available.
        """
        part = self.shard.numel()
        start = min(self.groups.shard.rank * part, self.numel)
        return (self.full if full is None else full)[start : min(start + part, self.numel)]

    def current_shard(self) -> torch.Tensor:
        """Return the shard, after a wait for the values that an update may still send to it."""
        if (coordinator := self.coordinator) is not None and coordinator.param_gatherer.pending:
            coordinator.wait_for_shards([self])
        return self.shard

    def write(self, full: torch.Tensor | None = None) -> None:
        """Copy new values, the same on all ranks, into this rank's shard. Where the master weights do not round to
        them, the next update takes them over.

        Args:
            full: the new full values, flat, with or without padding; None if they are in the parameter's own ``full``
                already.
        """
        self.writes += 1
        if full is not None and full is not self.full and self.has_full_values:
            self.full[: full.numel()].copy_(full)
        if self.storage is not None:
            part = self.local_shard(full)
            self.current_shard()[: part.numel()].copy_(part)
            if self.context.reader is not None:
                self.context.reader.on_written(self)

    def keep_written_values(self) -> None:
        """Copy values into the shard that the model has written in place inside a forward or backward, such as a
        normalised weight. All ranks have written the same ones."""
        seen, parameter = self.seen_version, self.ref()
        if seen is not None and parameter is not None and _version_of(parameter) != seen:
            self.write()
            self.mark_seen()

    def mark_seen(self) -> None:
        """Take the present values for those of the shards, or for older ones."""
        parameter = self.ref()
        if self.seen_version is not None and parameter is not None:
            self.seen_version = _version_of(parameter)

    @property
    def coordinator(self) -> PartitionedParameterCoordinator | None:
        """The coordinator of the engine that has the parameter; None without an engine."""
        return self.context.coordinator

    # ---------------------------------------------------------------- operations of users on a released parameter

    def run(self, function: Function, args: Arguments, kwargs: Keywords, absent: Sequence[torch.Tensor]) -> Any:
        """Return the result of ``function``, which touches the values of ``absent``, with the values."""
        return run_released(function, args, kwargs, absent)

    # ---------------------------------------------------------------- called by users, as methods of the parameter

    @collective
    def all_gather(self) -> None:
        """Gather the full values and keep them until :meth:`partition` is called or the engine releases them."""
        self.may_have_aliases = True
        with without_functions():  # otherwise the function mode of zero.Init would gather, too
            self.context.gather([self])
        if not self.persistent:
            self.context.shared.gathered_by_user.add(self)

    def partition(self) -> None:
        """Release the full values, unless the parameter is persistent or held by an open gather context.

        Changes of the values are lost. Use ``zero.GatheredParameters`` to change values.
        """
        if not self.persistent and not self.pin_count:
            with without_functions():
                self.release()

    def partition_numel(self) -> int:
        """Return the number of elements in ``ds_tensor``, padding included, which is the same on all ranks."""
        return self.shard.numel()

    @collective
    def full_copy(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """Return an ordinary parameter with a copy of the full values, for ``copy.deepcopy``."""
        parameter = self.parameter
        known = memo.get(id(parameter))
        if known is not None:
            return known
        values = torch.empty_strided(self.shape, self.strides, dtype=self.full.dtype, device=self.full.device)
        if self.status is AVAILABLE:
            values.copy_(parameter.data)  # not `view`: after `p.data = values` it has the newer values
        elif not self.context.shared.gathers_for_operations:
            raise no_gather_error(self.name)
        else:
            values.copy_(self.context.gather_copies([self])[0].as_strided(self.shape, self.strides))
        return copy_with_values(parameter, values, memo)

    @collective
    def unpartition(self) -> None:
        """Turn the parameter into an ordinary one with full values."""
        self.context.gather([self])
        self._become_ordinary(self.view)

    def abandon(self, values: torch.Tensor) -> torch.nn.Parameter:
        """Turn the parameter into an ordinary one with other values. This record and its shard stay for the views that
        were taken from it."""
        self.release()
        parameter = self._become_ordinary(values)
        self.ref = _no_parameter  # type: ignore[assignment]
        return parameter

    def _become_ordinary(self, values: torch.Tensor) -> torch.nn.Parameter:
        parameter = self.parameter
        restore_class(parameter)
        parameter.data = values
        for name in vars(parameter).keys() - user_attributes(parameter).keys():
            delattr(parameter, name)
        return parameter

    # ---------------------------------------------------------------- states

    def pin(self) -> bool:
        """Begin a gather context; contexts nest. Return True if this is the outermost one."""
        if self.persistent:
            return False
        self.pin_count += 1
        return self.pin_count == 1

    def unpin(self) -> bool:
        """End a gather context. Return True if this was the outermost one."""
        if self.persistent or not self.pin_count:
            return False
        self.pin_count -= 1
        return not self.pin_count

    def set_in_flight(self, all_gather: AllGather) -> None:
        """Go from NOT_AVAILABLE to INFLIGHT: ``all_gather`` brings the full values."""
        assert self.status is NOT_AVAILABLE, self.name
        self.pending, self.status = all_gather, INFLIGHT

    def set_available(self) -> None:
        """Go from INFLIGHT to AVAILABLE: the full values may be read."""
        assert self.status is INFLIGHT, self.name
        self.pending, self.status = None, AVAILABLE
        parameter = self.ref()
        if parameter is not None:
            restore_class(parameter)
            # Keeps the parameter's version counter. Autograd compares the counters of saved tensors, and would take the
            # gather for a change in place.
            parameter.data = self.view
            self.seen_version = None if parameter.is_inference() else _version_of(parameter)

    def mark_stale(self) -> None:
        """Go from AVAILABLE to NOT_AVAILABLE and keep the memory, for a gather of new values into it."""
        assert self.status is AVAILABLE, self.name
        self.status = NOT_AVAILABLE

    def release(self, keep_writes: bool = False) -> None:
        """Free the full values, after their all-gather has ended if one is in flight.

        Args:
            keep_writes: copy into the shard what the model has written in place. All ranks have written the same.
        """
        if self.pending is not None:
            self.pending.wait()  # the collective still writes into the memory
        if self.status is AVAILABLE:
            if keep_writes:
                self.keep_written_values()
            self.free_full_values()

    def free_full_values(self) -> None:
        """Go to NOT_AVAILABLE from any state and free the memory, after a failed gather too."""
        self.pending = self.seen_version = None
        self.status = NOT_AVAILABLE
        parameter = self.ref()
        if parameter is not None:
            if type(parameter) is not torch.nn.Parameter:
                restore_class(parameter)
            if self.storage is not None:
                parameter.data = self.absent
            set_absent_class(parameter)
        if self.storage is None:
            return
        if self.may_have_aliases:  # they keep the old storage
            self._create_full()
        else:
            resize(self.storage, 0)


def _no_parameter() -> None:
    """Stand in for the weak reference to a parameter that has got another record."""


def _version_of(parameter: torch.nn.Parameter) -> int:
    """Return torch's count of writes in place. A class that intercepts functions would intercept this one too."""
    if type(parameter) is torch.nn.Parameter:
        return parameter._version
    with as_plain_tensors():
        return parameter._version


def sharded_param_of(tensor: object) -> PartitionedParameter | None:
    """Return the record of a partitioned parameter; None for any other object."""
    return getattr(tensor, "_sharded_param", None)


def unpartitioned_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the shape of the full values of ``parameter``, partitioned or not."""
    return getattr(parameter, "ds_shape", parameter.shape)


def unpartitioned_numel(parameter: torch.Tensor) -> int:
    """Return the number of elements of the full values of ``parameter``, partitioned or not."""
    return getattr(parameter, "ds_numel", parameter.numel())
