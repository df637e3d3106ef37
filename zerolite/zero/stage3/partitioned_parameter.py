"""One partitioned parameter: shard, gather, release.

A parameter's whole values live in one tensor, ``full``, that stays and whose *storage* is resized: to its length when
the parameter is gathered, to nothing when it is released (where a user may have taken aliases, those keep the old
memory and there is a new ``full``). Autograd may hold views of a weight (``x @
w.t()``); they keep the storage, not the parameter's ``data``, so only this frees the memory and brings it back under
them. ``param.data`` is a view of ``full`` while the parameter is available and an empty tensor of shape [0] otherwise.

The shard may rest elsewhere than on the device that computes (see tiers.py); ``full`` is always there. A gather then
begins with bringing the shard (see shard_reader.py).
"""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerolite.comm import Communicator, Pending
from zerolite.offload.shard_reader import Arrival, ShardReader, undispatched
from zerolite.offload.tiers import Tier
from zerolite.utils.memory_items import BUCKETS, COMPUTE, DEVICE, GATHERED, PERSISTENT, listeners, own, resize
from zerolite.zero.buffer import dense_strides, flattened
from zerolite.zero.layout import part_numel
from zerolite.zero.stage3.released_parameter import close, open_again

_ids = itertools.count()


class ZeroParamStatus(enum.Enum):
    """Where a partitioned parameter's whole values are: on this rank, nowhere, or on their way."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


AVAILABLE, NOT_AVAILABLE, INFLIGHT = ZeroParamStatus


Home = Callable[[int], tuple[Tier, ShardReader]]
"""Where a shard of so many elements is to rest, and what brings it to the device from there."""


class _Launch:
    """One gather of several parameters, until somebody needs one of them."""

    __slots__ = ("arrival", "members", "pending")

    def __init__(
        self, members: Sequence[PartitionedParameter], pending: Pending | None, arrival: Arrival | None
    ) -> None:
        self.members = members
        self.pending = pending
        self.arrival = arrival  # of the shards that have rested elsewhere


class PartitionedParameter:
    """What stands behind the ``ds_*`` attributes of a partitioned parameter. Knows the parameter weakly."""

    __slots__ = (
        "__weakref__",
        "clock",
        "comm",
        "device",
        "empty",
        "exposed",
        "full",
        "held",
        "key",
        "launch",
        "manager",
        "name",
        "nbytes",
        "numel",
        "persistent",
        "reader",
        "ref",
        "replaced",
        "shape",
        "shard",
        "status",
        "storage",
        "strides",
        "tier",
        "trained",
        "use_whole",
        "view",
        "writes",
    )

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        name: str,
        comm: Communicator,
        device: torch.device,
        home: Home | None = None,
    ) -> None:
        """Cut ``parameter``, whose values are the same on all ranks, for use on ``device``; keeps its dtype. home:
        where the part rests, by default there."""
        self.ref = weakref.ref(parameter)
        self.name = name
        self.key = 0  # tells gathers apart where ranks compare what they launch; equal on all ranks
        self.comm = comm
        self.device = device
        self.shape = parameter.shape
        self.numel = parameter.numel()
        self.strides = dense_strides(parameter.data)
        self.launch: _Launch | None = None
        self.held = 0  # open gather contexts
        self.exposed = False  # a user may hold aliases of the whole values
        self.persistent = False  # never released
        self.manager: Any = None  # weak reference to the coordinator that gathers it
        self.trained = False  # by the engine that has it
        self.writes = 0  # how often somebody has written new values
        self.clock = [0]  # updates of the engine that has it, which it may outlive
        self.replaced: list[tuple[int, int]] = []  # its age at each ``p.data = values``
        self.use_whole: Callable[..., Any]  # calls a function with the whole values, where they are not here
        part = part_numel(self.numel, comm.world_size)
        tier: Tier
        self.reader: ShardReader | None
        tier, self.reader = (Tier(device), None) if home is None else home(part)
        values = flattened(parameter.data)
        shard = tier.zeros(part, parameter.dtype, COMPUTE)
        mine = values[comm.rank * part : (comm.rank + 1) * part]
        shard[: mine.numel()].copy_(mine)
        self.status = AVAILABLE
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=device)
        del values, mine
        self._adopt(parameter, shard, tier)
        self._expose(parameter)
        self._set_status(parameter, NOT_AVAILABLE)

    # ---------------------------------------------------------------- memory

    def _adopt(self, parameter: torch.nn.Parameter, shard: torch.Tensor, tier: Tier) -> None:
        """``shard`` [part_numel(numel, world_size)] of ``tier`` is this rank's part from now on; its dtype is the
        parameter's."""
        if self.reader is not None:
            self.reader.forget()
        self.shard = own(shard, COMPUTE, tier.place)
        self.tier = tier
        self.empty = torch.empty(0, dtype=shard.dtype, device=self.device)
        self._allocate()
        open_again(parameter)
        parameter.data = self.empty
        close(parameter)
        parameter.ds_tensor = shard  # type: ignore[attr-defined]

    @torch.inference_mode(False)  # what a use inside of one leaves is for uses outside, too
    def _allocate(self) -> None:
        """A new ``full``, without memory yet; on one rank it is the shard, if that is on the device."""
        self.exposed = False
        self.storage: torch.UntypedStorage | None = None
        if self.comm.world_size == 1 and self.tier.place == DEVICE:
            self.full = self.shard
        else:
            shard = self.shard
            self.full = torch.empty(shard.numel() * self.comm.world_size, dtype=shard.dtype, device=self.device)
            self.storage = self.full.untyped_storage()
        self.nbytes = self.full.numel() * self.full.element_size()
        self.view = self.full.as_strided(self.shape, self.strides)
        if self.storage is not None:
            resize(self.storage, 0)

    def move(self, place: torch.Tensor, tier: Tier) -> None:
        """Copy the shard, rounded to ``place``'s dtype, into ``place``, of ``tier``, which is the shard from now on."""
        parameter = self.parameter
        whole = self.status is AVAILABLE
        self.release()
        place.copy_(self.shard)
        self.writes += 1  # whoever has the memory of before must look again
        self._adopt(parameter, place, tier)
        self._set_status(parameter, NOT_AVAILABLE)
        if whole:
            gather([self])

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
    def home(self) -> Home | None:
        """For parameters that take the place of this one; None: on the device that computes."""
        tier, reader = self.tier, self.reader
        return None if reader is None else lambda numel: (tier, reader)

    @property
    def parameter(self) -> torch.nn.Parameter:
        parameter = self.ref()
        assert parameter is not None, "a parameter outlives whoever works on it"
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
        """How often the values have changed, by updates and by writes; the same on all ranks."""
        return self.clock[0], self.writes

    @property
    def is_here(self) -> bool:
        """``full`` has the values."""
        return self.status is AVAILABLE or self.storage is None

    def take_memory(self) -> Callable[[PartitionedParameter], None]:
        """Gather into other memory, until what this returns is called."""
        full, storage, view = self.full, self.storage, self.view
        self._allocate()

        def give_back(handle: PartitionedParameter) -> None:
            handle.full, handle.storage, handle.view = full, storage, view

        return give_back

    # ---------------------------------------------------------------- what users call

    def all_gather(self) -> None:
        """Make the parameter whole until :meth:`partition` is called or the engine releases it. Called on all ranks,
        in the same order."""
        self.exposed = True
        with torch._C.DisableTorchFunction():  # inside zero.Init its function mode would see a parameter in use
            gather([self])

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
        gather([self])
        values = torch.empty_strided(self.shape, self.strides, dtype=self.full.dtype, device=self.full.device)
        values.copy_(self.view)
        if not whole:
            self.release()
        copied = torch.nn.Parameter(values, parameter.requires_grad)
        vars(copied).update(users_attributes(parameter))
        memo[id(parameter)] = copied
        return copied

    def make_whole(self) -> None:
        """Turn the parameter back into an ordinary one. Called on all ranks, in the same order."""
        parameter = self.parameter
        gather([self])
        parameter.data = self.view
        for name in vars(parameter).keys() - users_attributes(parameter).keys():
            delattr(parameter, name)

    def in_use(self) -> bool:
        """Whether a forward or backward of the engine that has the parameter is under way."""
        manager = self.manager() if self.manager is not None else None
        return manager is not None and manager.busy

    def write(self, full: torch.Tensor | None = None) -> None:
        """The whole values have been changed, alike on all ranks, in ``full`` (None: the parameter's own): this rank's
        part follows. Masters follow that where it is not what they round to, in the next update."""
        self.writes += 1
        if full is not None and full is not self.full and self.is_here:
            self.full.copy_(full)
        if self.storage is not None:
            part = self.own_part(full)
            self.shard[: part.numel()].copy_(part)
            if self.reader is not None:
                self.reader.written(self)

    def release(self) -> None:
        """Drop the whole values, or end the gather that brings them. Nothing if they are not there."""
        if self.launch is not None:
            finish(self.launch)
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
        self.launch = None
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
        if self.exposed:  # what somebody has taken from the parameter keeps the old memory
            self._allocate()
        else:
            resize(self.storage, 0)


_OURS = ("partition", "all_gather", "partition_numel", "__deepcopy__", "_zero_handle")


def users_attributes(parameter: torch.nn.Parameter) -> dict[str, Any]:
    """What a user has hung on a partitioned parameter."""
    return {k: value for k, value in vars(parameter).items() if not (k.startswith("ds_") or k in _OURS)}


def handle_of(tensor: Any) -> PartitionedParameter | None:
    """What stands behind a partitioned parameter; None for anything else."""
    return getattr(tensor, "_zero_handle", None)


def move_shard(parameter: torch.nn.Parameter, place: torch.Tensor, tier: Tier) -> None:
    """Bring a partitioned parameter's shard to ``place``, of ``tier``, in its dtype."""
    handle = handle_of(parameter)
    assert handle is not None
    handle.move(place, tier)


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape of ``parameter`` when it is whole."""
    return getattr(parameter, "ds_shape", parameter.shape)


def whole_numel(parameter: torch.Tensor) -> int:
    """The elements of ``parameter`` when it is whole."""
    return getattr(parameter, "ds_numel", parameter.numel())


# -------------------------------------------------------------------- gathers


def launch(members: Sequence[PartitionedParameter]) -> None:
    """Start to gather ``members``, of one communicator and not available, in one launch. Called on all ranks, in the
    same order."""
    comm = members[0].comm
    manager = members[0].manager() if members[0].manager is not None else None
    if manager is not None:
        manager.schedule.note_gather(members[0].key, len(members))
        if manager.listener is not None:
            manager.listener.before_launch([member.key - 1 for member in members])
    reader, pending, arrival = members[0].reader, None, None
    try:
        moved = [member for member in members if member.storage is not None]
        if moved:
            for member in moved:
                resize(member.storage, member.nbytes)  # type: ignore[arg-type]
            if listeners:
                for member in moved:
                    own(member.full, PERSISTENT if member.persistent else GATHERED)
            with undispatched():
                fulls, shards = [member.full for member in moved], [member.shard for member in moved]
                if reader is None:
                    pending = comm.gather_shards(fulls, shards, "parameters", members[0].key)
                else:
                    arrival = reader.bring(moved, alone=comm.world_size == 1)
                    with arrival.behind_copies():
                        pending = comm.gather_shards(fulls, arrival.shards, "parameters", members[0].key, shards)
    except BaseException:
        if arrival is not None:
            arrival.end()  # nothing may be copied into memory that is freed now
        for member in members:
            member.drop()
        raise
    started = _Launch(members, pending, arrival)
    for member in members:
        member.launch = started
        member.status = INFLIGHT
        member.ref().ds_status = INFLIGHT  # type: ignore[union-attr]


def finish(started: _Launch) -> None:
    """Wait for a gather: its parameters may be read from now on. On CUDA the stream waits, not the host."""
    try:
        if started.pending is not None:
            with undispatched():
                started.pending.wait()
                if started.arrival is not None:
                    started.arrival.end()
    except BaseException:
        for member in started.members:
            member.drop()
        raise
    for member in started.members:
        member.launch = None
        member.status = AVAILABLE
        parameter = member.ref()
        if parameter is not None:
            open_again(parameter)
            parameter.data = member.view
            parameter.ds_status = AVAILABLE  # type: ignore[attr-defined]


def gather(members: Sequence[PartitionedParameter]) -> None:
    """Make ``members`` whole and wait for it: one launch per communicator. Called on all ranks, in the same order."""
    missing: dict[int, dict[int, PartitionedParameter]] = {}
    for member in members:
        if member.status is NOT_AVAILABLE:
            missing.setdefault(id(member.comm), {})[id(member)] = member
    for group in missing.values():
        launch(list(group.values()))
    for member in members:
        if member.launch is not None:
            finish(member.launch)


@torch.no_grad()
def refresh(handles: Sequence[PartitionedParameter]) -> None:
    """Gather new values into parameters of one communicator that are available, in one launch. Shards that lie side by
    side travel as one tensor. Called on all ranks, in the same order."""
    near: list[PartitionedParameter] = []
    for handle in handles:
        if handle.storage is not None and handle.tier.place == DEVICE:
            near.append(handle)
        else:
            handle.status = NOT_AVAILABLE
    gather([handle for handle in handles if handle.status is NOT_AVAILABLE])
    if near:
        _gather_rows(_rows(near))


def _rows(handles: Sequence[PartitionedParameter]) -> list[list[PartitionedParameter]]:
    """Return ``handles`` in runs whose shards follow each other in one memory. Runs are in the order of ``handles``,
    which is the same on all ranks; addresses are not."""
    rows: list[list[PartitionedParameter]] = []
    latest: dict[Any, tuple[list[PartitionedParameter], int]] = {}  # by memory: its last run, and where that ends
    for handle in handles:
        shard = handle.shard
        memory, start = (shard.untyped_storage()._cdata, shard.dtype), int(shard.storage_offset())
        row, end = latest.get(memory, ([], -1))
        if start != end:
            row = []
            rows.append(row)
        row.append(handle)
        latest[memory] = (row, start + shard.numel())
    return rows


def _gather_rows(rows: Sequence[list[PartitionedParameter]]) -> None:
    """Gather each run as one tensor, and copy it into the whole values of its members; a run of one, straight there."""
    first = rows[0][0]
    manager = first.manager() if first.manager is not None else None
    if manager is not None:
        manager.schedule.note_gather(first.key, sum(map(len, rows)))
    world = first.comm.world_size
    with undispatched():
        shards = [row[0].shard.as_strided((sum(member.shard.numel() for member in row),), (1,)) for row in rows]
        fulls = [
            row[0].full if len(row) == 1 else own(shard.new_empty(world * shard.numel()), BUCKETS)
            for row, shard in zip(rows, shards, strict=True)
        ]
        first.comm.gather_shards(fulls, shards, "parameters", first.key).wait()
        for row, full in zip(rows, fulls, strict=True):
            if len(row) > 1:
                parts = [member.shard.numel() for member in row]
                wholes = [member.full.view(world, part) for member, part in zip(row, parts, strict=True)]
                torch.split_with_sizes_copy(full.view(world, -1), parts, dim=1, out=wholes)
