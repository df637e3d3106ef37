"""One partitioned parameter: shard, gather, release.

A parameter's whole values live in one tensor, ``full``, that stays and whose *storage* is resized: to its length when
the parameter is gathered, to nothing when it is released (where a user may have taken aliases, those keep the old
memory and there is a new ``full``). Autograd may hold views of a weight (``x @
w.t()``); they keep the storage, not the parameter's ``data``, so only this frees the memory and brings it back under
them. ``param.data`` is a view of ``full`` while the parameter is available and an empty tensor of shape [0] otherwise.

The shard may rest elsewhere than on the device that computes (see placements.py); ``full`` is always there. What
gathers is the parameter's group (see param_group.py). Fields are written here alone.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zerolite.comm import Communicator
from zerolite.offload.placements import Placement
from zerolite.utils.accelerator import address
from zerolite.utils.memory_tags import COMPUTE, DEVICE, resize, tag_memory
from zerolite.zero.buffer import dense_strides, flattened
from zerolite.zero.layout import part_numel
from zerolite.zero.stage3.released_parameter import close, open_again

if TYPE_CHECKING:
    from zerolite.zero.stage3.param_group import AllGather, ParamGroup

_ids = itertools.count()


class ZeroParamStatus(enum.Enum):
    """State of the whole values of a partitioned parameter: on this rank, nowhere, or on their way."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


AVAILABLE, NOT_AVAILABLE, INFLIGHT = ZeroParamStatus


class PartitionedParameter:
    """Record behind the ``ds_*`` attributes of a partitioned parameter, to which it has a weak reference. Knows the
    parameter weakly."""

    __slots__ = (
        "__weakref__",
        "empty",
        "exposed",
        "full",
        "group",
        "index",
        "name",
        "nbytes",
        "numel",
        "pending",
        "persistent",
        "ref",
        "replaced",
        "shape",
        "shard",
        "status",
        "storage",
        "strides",
        "placement",
        "view",
        "writes",
    )

    def __init__(
        self, parameter: torch.nn.Parameter, name: str, group: ParamGroup, placement: Placement | None = None
    ) -> None:
        """Cut ``parameter``, whose values are the same on all ranks; keeps its dtype. placement: where the part rests;
        None: as the group says."""
        self.ref = weakref.ref(parameter)
        self.name = name
        self.group = group
        self.index = -1  # in an engine's group
        self.shape = parameter.shape
        self.numel = parameter.numel()
        self.strides = dense_strides(parameter.data)
        self.pending: AllGather | None = None
        self.exposed = False  # a user may hold aliases of the whole values
        self.persistent = False  # never released
        self.writes = 0  # how often the user has written new values
        self.replaced: list[tuple[int, int]] = []  # its age at each ``p.data = values``
        comm, device = group.comm, group.device
        part = part_numel(self.numel, comm.world_size)
        placement = placement or group.placement_of(part)
        values = flattened(parameter.data)
        shard = placement.zeros(part, parameter.dtype, COMPUTE)
        mine = values[comm.rank * part : (comm.rank + 1) * part]
        shard[: mine.numel()].copy_(mine)
        self.status = AVAILABLE
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=device)
        del values, mine
        self._adopt(parameter, shard, placement)
        self._expose(parameter)
        self._set_status(parameter, NOT_AVAILABLE)

    # ---------------------------------------------------------------- memory

    def _adopt(self, parameter: torch.nn.Parameter, shard: torch.Tensor, placement: Placement) -> None:
        """``shard`` [part_numel(numel, world_size)] of ``placement`` is this rank's part from now on; its dtype is the
        parameter's."""
        if self.group.reader is not None:
            self.group.reader.forget()
        self.shard = tag_memory(shard, COMPUTE, placement.place)
        self.placement = placement
        self.empty = torch.empty(0, dtype=shard.dtype, device=self.group.device)
        self._allocate()
        open_again(parameter)
        parameter.data = self.empty
        close(parameter)
        parameter.ds_tensor = shard  # type: ignore[attr-defined]

    @torch.inference_mode(False)  # what a use inside of one leaves is for uses outside, too
    def _allocate(self) -> None:
        """A new ``full``, without memory yet; on one rank it is the shard, if that is on the device."""
        self.exposed = False
        self.group.note_memory()
        self.storage: torch.UntypedStorage | None = None
        if self.comm.world_size == 1 and self.placement.place == DEVICE:
            self.full = self.shard
        else:
            shard = self.shard
            self.full = torch.empty(shard.numel() * self.comm.world_size, dtype=shard.dtype, device=self.group.device)
            self.storage = self.full.untyped_storage()
        self.nbytes = self.full.numel() * self.full.element_size()
        self.view = self.full.as_strided(self.shape, self.strides)
        if self.storage is not None:
            resize(self.storage, 0)

    def move(self, place: torch.Tensor, placement: Placement) -> None:
        """Copy the shard, rounded to ``place``'s dtype, into ``place``, of ``placement``, which is the shard from now
        on."""
        parameter = self.parameter
        whole = self.status is AVAILABLE
        self.release()
        place.copy_(self.shard)
        self.writes += 1  # holders of the old memory must look again
        self._adopt(parameter, place, placement)
        self._set_status(parameter, NOT_AVAILABLE)
        if whole:
            self.group.gather([self])

    def join(self, group: ParamGroup, index: int, name: str) -> None:
        """Become parameter ``index`` of ``group``, released."""
        self.release()
        self.group, self.index, self.name, self.persistent = group, index, name, False

    def rename(self, name: str) -> None:
        """Be called ``name`` in messages."""
        self.name = name

    def stay_whole(self) -> None:
        """Keep the parameter whole from now on."""
        self.persistent = True

    def _expose(self, parameter: torch.nn.Parameter) -> None:
        named: dict[str, Any] = {
            "ds_id": next(_ids),
            "ds_shape": self.shape,
            "ds_numel": self.numel,
            "partition": self.partition,
            "all_gather": self.all_gather,
            "partition_numel": self.partition_numel,
            "_zero_handle": self,
        }
        for name, value in named.items():
            setattr(parameter, name, value)

    def _set_status(self, parameter: torch.nn.Parameter, status: ZeroParamStatus) -> None:
        self.status = status
        parameter.ds_status = status  # type: ignore[attr-defined]

    def __reduce__(self) -> Any:
        raise RuntimeError(
            f"parameter '{self.name}' is partitioned over ranks and cannot be pickled; save engine.full_state_dict(), "
            "or a whole copy: copy.deepcopy(engine.module)"
        )

    @property
    def comm(self) -> Communicator:
        """Communicator of the gathers."""
        return self.group.comm

    @property
    def held(self) -> int:
        """The number of open gather contexts, zero.GatheredParameters for one."""
        return self.group.times_held(self)

    @property
    def parameter(self) -> torch.nn.Parameter:
        parameter = self.ref()
        assert parameter is not None, "a parameter outlives the code that works on it"
        return parameter

    @property
    def frozen(self) -> bool:
        parameter = self.ref()
        return parameter is not None and not parameter.requires_grad

    def own_part(self, full: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's part of ``full`` (None: the parameter's own, which is valid while it is available), without
        padding."""
        part = self.shard.numel()
        start = min(self.comm.rank * part, self.numel)
        return (self.full if full is None else full)[start : min(start + part, self.numel)]

    @property
    def age(self) -> tuple[int, int]:
        """Number of times that the values have changed, by updates and by writes; the same on all ranks."""
        return self.group.updates, self.writes

    @property
    def is_here(self) -> bool:
        """``full`` has the values."""
        return self.status is AVAILABLE or self.storage is None

    def take_memory(self) -> Callable[[], None]:
        """Gather into other memory, until what this returns is called."""
        full, storage, view = self.full, self.storage, self.view
        self._allocate()

        def give_back() -> None:
            self.full, self.storage, self.view = full, storage, view

        return give_back

    def replace(self, full: torch.Tensor) -> None:
        """Take the whole values of ``p.data = values``, alike on all ranks. What has been taken from the parameter
        before keeps the old ones."""
        self.replaced.append(self.age)
        self.write(full)

    def expose(self) -> None:
        """From now on a user may hold aliases of the whole values: they keep their memory when these are released."""
        self.exposed = True

    def bring_home(self) -> None:
        """``p.data = values`` has put other memory of the same shape in the parameter's place: copy them where they
        belong. Nothing if that has not happened."""
        data, view = self.parameter.data, self.view
        if address(data) == address(view) and data.stride() == view.stride() and data.dtype == view.dtype:
            return
        if data.untyped_storage()._cdata == view.untyped_storage()._cdata:
            data = data.clone()
        view.copy_(data)
        self.point_home()

    def point_home(self) -> None:
        """Give the parameter, which is available, its own memory back, whatever ``p.data = values`` has put there."""
        parameter = self.parameter
        parameter.data = self.view

    # ---------------------------------------------------------------- what users call

    def all_gather(self) -> None:
        """Make the parameter whole until :meth:`partition` is called or the engine releases it. Called on all ranks,
        in the same order."""
        self.exposed = True
        with torch._C.DisableTorchFunction():  # inside zero.Init its function mode would see a parameter in use
            self.group.gather([self])
        self.group.note_kept(self)

    def partition(self) -> None:
        """Drop the whole values, unless they are to stay (small parameters, open gather contexts). Changes to them are
        lost: see ``zero.GatheredParameters`` for how to make some."""
        if not self.persistent and not self.held:
            with torch._C.DisableTorchFunction():
                self.release()

    def partition_numel(self) -> int:
        """Elements in ``ds_tensor``, padding included: the same on every rank."""
        return self.shard.numel()

    def whole_copy(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """``copy.deepcopy``: an ordinary whole parameter of its own. Called on all ranks, in the same order."""
        parameter = self.parameter
        known = memo.get(id(parameter))
        if known is not None:
            return known
        whole = self.status is AVAILABLE
        self.group.gather([self])
        values = torch.empty_strided(self.shape, self.strides, dtype=self.full.dtype, device=self.full.device)
        values.copy_(parameter.data)  # which is other memory after ``p.data = values``
        if not whole:
            self.release()
        copied = torch.nn.Parameter(values, parameter.requires_grad)
        vars(copied).update(users_attributes(parameter))
        memo[id(parameter)] = copied
        return copied

    def make_whole(self) -> None:
        """Turn the parameter back into an ordinary one. Called on all ranks, in the same order."""
        parameter = self.parameter
        self.group.gather([self])
        parameter.data = self.view
        for name in vars(parameter).keys() - users_attributes(parameter).keys():
            delattr(parameter, name)

    def note_write(self) -> None:
        """The shard has other values, and the whole ones too where they are here."""
        self.writes += 1

    def write(self, full: torch.Tensor | None = None) -> None:
        """The whole values have been changed, alike on all ranks, in ``full`` (None: the parameter's own): this rank's
        part follows. Masters follow that where it is not what they round to, in the next update."""
        self.writes += 1
        if full is not None and full is not self.full and self.is_here:
            self.full.copy_(full)
        if self.storage is not None:
            part = self.own_part(full)
            self.shard[: part.numel()].copy_(part)
            if self.group.reader is not None:
                self.group.reader.written(self)

    # ---------------------------------------------------------------- where the whole values are

    def expire(self) -> None:
        """The whole values are outdated: they are to be gathered again, into the same memory."""
        self.status = NOT_AVAILABLE

    def release(self) -> None:
        """Drop the whole values, or end the gather that brings them. Nothing if they are not there."""
        if self.pending is not None:
            self.pending.wait()
        if self.status is AVAILABLE:
            self.drop()

    def show_shape(self) -> None:
        """Give a parameter that is not available its shape, without memory: autograd compares the gradient's with it.
        Ends with :meth:`drop`, or when the parameter is gathered."""
        parameter = self.ref()
        if self.status is not AVAILABLE and parameter is not None:
            open_again(parameter)
            parameter.data = self.empty.new_empty(()).expand(self.shape)
            close(parameter)

    def drop(self) -> None:
        """The whole values are gone, whatever there was."""
        self.pending = None
        self.status = NOT_AVAILABLE
        parameter = self.ref()
        if parameter is not None:
            if type(parameter) is not torch.nn.Parameter:
                open_again(parameter)  # a gather that has failed
            parameter.data = self.empty
            parameter.ds_status = NOT_AVAILABLE  # type: ignore[attr-defined]
            close(parameter)
        if self.storage is None:
            return
        if self.exposed:  # views that the user has taken from the parameter keep the old memory
            self._allocate()
        else:
            resize(self.storage, 0)


def wait_for(members: Sequence[PartitionedParameter], gather: AllGather) -> None:
    """The whole values of ``members`` are on their way."""
    for member in members:
        member.pending = gather
        member.status = INFLIGHT
        member.ref().ds_status = INFLIGHT  # type: ignore[union-attr]


def arrive(members: Sequence[PartitionedParameter]) -> None:
    """The whole values of ``members`` are here, and may be read."""
    for member in members:
        member.pending = None
        member.status = AVAILABLE
        parameter = member.ref()
        if parameter is not None:
            open_again(parameter)
            parameter.data = member.view
            parameter.ds_status = AVAILABLE  # type: ignore[attr-defined]


_OURS = ("partition", "all_gather", "partition_numel", "__deepcopy__", "_zero_handle")


def users_attributes(parameter: torch.nn.Parameter) -> dict[str, Any]:
    """Return the attributes that a user has set on a partitioned parameter."""
    return {k: value for k, value in vars(parameter).items() if not (k.startswith("ds_") or k in _OURS)}


def handle_of(tensor: object) -> PartitionedParameter | None:
    """Return the record of a partitioned parameter; None for anything else."""
    return getattr(tensor, "_zero_handle", None)


def move_shard(parameter: torch.nn.Parameter, place: torch.Tensor, placement: Placement) -> None:
    """Bring a partitioned parameter's shard to ``place``, of ``placement``, in its dtype."""
    handle = handle_of(parameter)
    assert handle is not None
    handle.move(place, placement)


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape of ``parameter`` when it is whole."""
    return getattr(parameter, "ds_shape", parameter.shape)


def whole_numel(parameter: torch.Tensor) -> int:
    """The elements of ``parameter`` when it is whole."""
    return getattr(parameter, "ds_numel", parameter.numel())
