"""Transport below the communicators: the few calls that move bytes between the ranks of a group.

Over a :class:`DryTransport` a communicator does everything as over a process group (copies, sums, buffers, records),
but nothing is sent: see :func:`~zerolite.comm.create.dry_communicator`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zerolite.comm.host_memory import share
from zerolite.comm.process_group import second_group


class Work(Protocol):
    """Handle of a launched operation."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Wait until the operation has ended: on CUDA the current stream waits, not the host. With a ``timeout`` the
        host waits at most so long.

        Raises:
            RuntimeError: it failed, or did not end in time.
        """
        ...

    def is_completed(self) -> bool:
        """Return True if the operation has ended or failed. A message of gloo tells only once it is waited for."""
        ...


_NO_LIMIT = timedelta(0)


class Message:
    """A message of gloo, which may be waited for several times. Torch's own handle must not: a second wait for it ends
    at the timeout of the group.

    A wait may be interrupted by an exception (Ctrl-C) or by the handler of a signal, which waits too.
    """

    def __init__(self, work: Work) -> None:
        self._work, self._has_begun, self._has_ended = work, False, False

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: timedelta = _NO_LIMIT) -> None:
        again, self._has_begun = self._has_begun, True
        if again and self._work.is_completed():  # the wait before has ended, and could not note it
            return
        if not self._has_ended:  # last: Python runs no handler between this line and the wait
            try:
                self._work.wait(timeout)
            except RuntimeError:  # every further wait raises at once
                self._has_begun = False
                raise
            self._has_ended = True


# torch 2.13 renamed these two and warns at the old names.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Transports over each group so far.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class ProcessGroupTransport:
    """Operations of a process group of torch.distributed.

    Tensors are contiguous, and the caller keeps them alive until it has waited for the work. All methods except
    ``send`` and ``receive`` are called on all ranks, in the same order.

    Attributes:
        rank: this rank in the group.
        world_size: ranks of the group.
        group: the process group; None once closed.
        serial: number of this transport among those of its group, from 1, the same on all ranks.
        is_dry: nothing is sent, and the other ranks are taken for copies of this one.
        is_rank0: this is the job's first rank, which prints for all.
    """

    is_dry = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.group: dist.ProcessGroup | None = group
        self.is_rank0 = dist.get_rank() == 0
        self.serial = _made[group] = _made.get(group, 0) + 1
        self._global_ranks = dist.get_process_group_ranks(group)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Sum over ranks, in place."""
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def all_reduce_max(self, tensor: torch.Tensor) -> Work:
        """Maximum over ranks, in place."""
        return dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group, async_op=True)

    def highest(self, numbers: Sequence[int]) -> tuple[Work, Callable[[], list[int]]]:
        """Maximum over ranks of each of a few 64-bit integers, on the host.

        Returns the work, and a function that returns the integers once the work has been waited for.
        """
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        return self.all_reduce_max(tensor), tensor.tolist

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Overwrite ``tensor`` with the values of rank ``source``."""
        return dist.broadcast(tensor, src=self._global_ranks[source], group=self.group, async_op=True)

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor) -> Work:
        """Write the sum over ranks of this rank's part of ``full`` into ``out`` [numel of ``full`` / world_size]."""
        return _reduce_scatter_single(out, full, group=self.group, async_op=True)

    def all_to_all(self, out: torch.Tensor, full: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> Work:
        """Write part ``rank`` of every rank's ``full`` into ``out``, in the order of ranks. Parts have as many rows of
        ``full`` and ``out`` as ``sent`` and ``received`` say, or elements of flat tensors; with () they are equal."""
        return dist.all_to_all_single(out, full, list(received), list(sent), group=self.group, async_op=True)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        """Write every rank's ``shard`` into ``full`` [world_size * numel of ``shard``]; ``shard`` may be this rank's
        part of it."""
        return _all_gather_single(full, shard, group=self.group, async_op=True)

    def all_gather_several(self, fulls: list[torch.Tensor], owns: list[torch.Tensor]) -> Work:
        """Gather several tensors in one launch."""
        # torch's coalescing manager ends in this method of the group, after bookkeeping in Python for every tensor.
        assert self.group is not None
        return self.group.allgather_into_tensor_coalesced(fulls, owns)

    def send(self, tensor: torch.Tensor, target: int, number: int) -> Work:
        """Send ``tensor`` to ``receive`` with the same ``number``, of at most 31 bits, on rank ``target``."""
        work = dist.isend(tensor, dst=self._global_ranks[target], group=self.group, tag=number)
        assert work is not None, "None is for ranks outside the group"
        return Message(work)

    def receive(self, tensor: torch.Tensor, source: int, number: int) -> Work:
        """Receive into ``tensor`` what rank ``source`` sends with the same ``number``."""
        work = dist.irecv(tensor, src=self._global_ranks[source], group=self.group, tag=number)
        assert work is not None, "None is for ranks outside the group"
        return Message(work)

    def share_memory(self, nbytes: int, like: torch.Tensor) -> list[torch.Tensor]:
        """Map the memory of every rank and return it as uint8 [nbytes], by rank. Waits for the other ranks.

        Returns an empty list on all ranks if there is no memory. ``like``: a tensor that will be copied there.
        """
        return share(nbytes, self.group) if self.group is not None else []

    def second(self, backend: str) -> ProcessGroupTransport:
        """Make a second transport between the same ranks, with an independent order of calls.

        Args:
            backend: a name such as "gloo".
        """
        assert self.group is not None
        return ProcessGroupTransport(second_group(self.group, backend))

    def close(self) -> None:
        """Drop the reference to the group."""
        self.group = None


class _Unsent:
    """Handle of an operation that sends nothing. It is complete when it is waited for, as on a slow wire."""

    _waited = False

    def wait(self, timeout: timedelta | None = None) -> None:
        self._waited = True

    def is_completed(self) -> bool:
        return self._waited


class DryTransport:
    """The same operations for rank ``rank`` of ``world_size``: it sends nothing, and waits for nothing.

    Memory to receive into is left as it is, so no value means anything, and tensors may be fake (torch.FakeTensorMode).
    """

    group: dist.ProcessGroup | None = None
    serial = 1
    is_dry = True
    is_rank0 = False  # in a dry run no rank prints

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def send(self, *args: Any) -> Work:
        return _Unsent()

    all_reduce = all_reduce_max = broadcast = reduce_scatter = all_to_all = send
    all_gather = all_gather_several = receive = send

    def highest(self, numbers: Sequence[int]) -> tuple[Work, Callable[[], list[int]]]:
        return _Unsent(), lambda: list(numbers)

    def share_memory(self, nbytes: int, like: torch.Tensor) -> list[torch.Tensor]:
        # Every process of the host maps the memory of all ranks, so the plan of each process counts all of it.
        with torch.inference_mode(False):
            return [like.new_empty(nbytes, dtype=torch.uint8, device="cpu") for _ in range(self.world_size)]

    def second(self, backend: str) -> DryTransport:
        return DryTransport(self.rank, self.world_size)

    def close(self) -> None:
        return


Transport = ProcessGroupTransport | DryTransport
