"""Exchanges on the host, independent of all other collectives: objects, largest numbers, and errors.

If one rank fails, all ranks raise. Otherwise the others would go on to a collective for which the failed one does not
come. The failing rank catches its exception and takes part in the exchange. Then it raises its own exception, and every
other rank raises one that quotes the first rank that has failed:

    engine.save_checkpoint: rank 2 stopped with OSError: No space left on device (and 1 more rank)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerolite.comm import recorder
from zerolite.comm.communicator import Communicator
from zerolite.comm.flight_recorder import blocked, collective, wait_for
from zerolite.comm.objects import broadcast_object, gather_objects, pack, unpack
from zerolite.comm.process_group import second_group
from zerolite.utils.accelerator import HostRead
from zerolite.utils.torch_private import backends_of

T = TypeVar("T", int, float)
Result = TypeVar("Result")

_MAXIMUM, _OBJECT = "control", 1  # tags of messages


@collective
class HostGroup:
    """Exchange of Python objects on the host between the ranks of ``comm``.

    The methods do not wait for the device, and do not disturb collectives in flight.
    """

    def __init__(self, comm: Communicator, purpose: str) -> None:
        self.rank, self.world_size = comm.rank, comm.world_size
        self._comm, self._purpose = comm, purpose
        self._alone = comm.group is None or comm.world_size == 1
        self.global_rank = comm.rank if self._alone else comm.members()[comm.rank]
        self._group: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The gloo group, which all ranks make together when they first ask for it; None in a job of one process."""
        if self._group is None and not self._alone:
            if self._comm.group is None:
                raise RuntimeError(
                    f"expected the process group to be there for what ranks tell each other ({self._purpose}), but it "
                    "has been destroyed; make this call before zerolite.destroy()"
                )
            self._group = second_group(self._comm.group, "gloo", self._purpose)
        return self._group

    @property
    def alive(self) -> bool:
        """True if there is one process, or the group has not been destroyed."""
        return self._alone or dist.is_initialized()

    def gather(self, value: object, call: str = "") -> list[Any]:
        """Return every rank's ``value``, in rank order.

        Args:
            call: function of the user's that all ranks must be in; the watchdog times the wait for them. "": nothing
                does.
        """
        group = self.group
        if group is None:
            return [value]
        with blocked(("call", call, 0, None, 0)) if call else contextlib.nullcontext():
            return gather_objects(value, group)

    def gather_to_first(self, value: object) -> list[Any]:
        """Return every rank's ``value``, in rank order, on the first rank, and [] on the others."""
        group = self.group
        return [value] if group is None else gather_objects(value, group, to_first=True)

    def broadcast(self, value: object, source: int) -> Any:
        """Return rank ``source``'s ``value``."""
        group = self.group
        return value if group is None else broadcast_object(value, source, group)


class HostLinks:
    """Objects from one rank of ``comm`` to another.

    It is made on all ranks of ``comm``, in the same order. Every :meth:`send` needs a :meth:`receive` on the other
    rank.
    """

    def __init__(self, comm: Communicator, purpose: str) -> None:
        assert comm.group is not None
        on_host = "cpu" in dict(backends_of(comm.group))
        # The same gloo group may carry other messages; these have a tag of their own, so that they do not match those.
        self._group = comm.group if on_host else second_group(comm.group, "gloo", purpose)
        self._ranks = comm.members()
        self._sent: list[tuple[Any, torch.Tensor]] = []  # works, and the tensors that they read

    def send(self, value: object, rank: int) -> None:
        """Send ``value`` to ``rank`` without waiting."""
        packed = pack(value)
        for tensor in (torch.tensor([packed.numel()], device="cpu"), packed):
            self._sent.append((dist.isend(tensor, self._ranks[rank], group=self._group, tag=_OBJECT), tensor))

    def receive(self, rank: int) -> Any:
        """Return the next object that ``rank`` sends."""
        with blocked(("receive", "object", 0, None, 0)):
            length = torch.empty(1, dtype=torch.int64, device="cpu")
            dist.recv(length, self._ranks[rank], group=self._group, tag=_OBJECT)
            packed = torch.empty(int(length), dtype=torch.uint8, device="cpu")
            dist.recv(packed, self._ranks[rank], group=self._group, tag=_OBJECT)
        return unpack(packed, packed.numel())

    def finish(self) -> None:
        """Wait until all sent objects have been received."""
        sent, self._sent = self._sent, []
        for work, _ in sent:
            work.wait()


@collective
class HostMaximum:
    """The largest numbers of all ranks, on the host, in few messages.

    In round k a rank sends its numbers to rank + 2^k and receives those of rank - 2^k. So 1,000 ranks need ten rounds
    of one message each, where gloo's all-reduce takes 2,000. Nothing is sent in a dry run.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._group = None if comm.group is None else second_group(comm.group, "gloo", _MAXIMUM)
        ranks = range(comm.world_size) if comm.group is None else dist.get_process_group_ranks(comm.group)
        steps = [1 << k for k in range((comm.world_size - 1).bit_length())]
        self._rounds = [
            (ranks[(comm.rank + step) % comm.world_size], ranks[(comm.rank - step) % comm.world_size]) for step in steps
        ]

    def of(self, numbers: Sequence[int]) -> list[int]:
        """Return for each of ``numbers``, 64-bit integers, the largest of all ranks.

        All ranks pass equally many numbers.
        """
        known = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        recorder.note("all_reduce", known, _MAXIMUM, self._comm.dimension, self._comm.world_size)
        if self._group is None:
            return list(numbers)
        # After round k every rank knows the maximum of the 2^(k+1) ranks up to itself.
        for to, source in self._rounds:
            heard = torch.empty_like(known)
            works = [dist.irecv(heard, source, self._group), dist.isend(known, to, self._group)]
            wait_for(works, ("all_reduce", _MAXIMUM, known.numel(), known.dtype, 0))
            known = torch.maximum(known, heard)
        return known.tolist()


@collective
def largest(
    numbers: Sequence[T], comm: Communicator, device: torch.device, tag: str, dtype: torch.dtype = torch.int64
) -> list[T]:
    """Return for each of ``numbers`` the largest of all ranks: one small all-reduce on ``device``, for which the host
    waits.

    All ranks pass equally many numbers.
    """
    if comm.world_size == 1:
        return list(numbers)
    values = torch.tensor(numbers, dtype=dtype, device=device)
    comm.all_reduce_max(values, tag)
    highest: list[T] = HostRead(values).get().tolist()
    return highest


# -------------------------------------------------------------------- errors


@dataclass(frozen=True)
class RaiseTogether:
    """Calls that fail on all ranks if they fail on one.

    Every method is one exchange on the host, and is called on all ranks of ``host``, in the same order.

    Attributes:
        host: the ranks.
        call: The function that the user has called; the message begins with it.
        kind: Type of the exception on ranks that have none of their own. An error of this type is quoted without verb
            and type, unless it is RuntimeError, which any library raises.
        failed: The verb of the message.
        same: Errors of these types are raised unchanged on all ranks; if several ranks have one, that of the first.
    """

    host: HostGroup
    call: str
    kind: type[Exception] = RuntimeError
    failed: str = "stopped with"
    same: type[Exception] | tuple[()] = ()

    def run(self, action: Callable[[], Result]) -> Result:
        """Return the result of ``action()`` on this rank, if it raises on no rank."""
        result, error = _attempt(action)
        self.exchange(error)
        return result  # type: ignore[return-value]

    def gather(self, action: Callable[[], Result]) -> list[Result]:
        """Return the results of ``action()`` in rank order, if it raises on no rank."""
        result, error = _attempt(action)
        return self.exchange(error, result)

    def exchange(self, error: BaseException | None, value: object = None) -> list[Any]:
        """Return every rank's ``value``, in rank order, if no rank has an ``error``."""
        # The failing rank takes part too: without it the others would wait in this exchange.
        rows = self.host.gather([self._to_raise(error), value])
        messages = [message for message, _ in rows if message is not None]
        is_first = all(message is None for message, _ in rows[: self.host.rank])
        if error is not None and (is_first or not isinstance(error, self.same)):
            raise error
        if not messages:
            return [value for _, value in rows]
        if isinstance(messages[0], Exception):
            raise messages[0]
        more = f" (and {len(messages) - 1} more rank{'s' if len(messages) > 2 else ''})" if len(messages) > 1 else ""
        raise self.kind(messages[0] + more)

    def _to_raise(self, error: BaseException | None) -> object:
        """Return the exception, or the message of one, that the other ranks raise."""
        if error is None or isinstance(error, self.same):
            return error
        speaks = self.kind is not RuntimeError and isinstance(error, self.kind)
        verb = "" if speaks else f" {self.failed} {type(error).__name__}"
        text = str(error).removeprefix(f"{self.call}: ")
        return f"{self.call}: rank {self.host.global_rank}{verb}: {text}"


@collective
def raise_together(
    comm: Communicator,
    device: torch.device,
    tag: str,
    error: Exception | None,
    call: str,
    kind: type[Exception] = RuntimeError,
    failed: str = "stopped with",
) -> None:
    """Raise on all ranks if one of them has an ``error``; it costs one small all-reduce while none has.

    Only after a failure are the texts exchanged, as by :class:`RaiseTogether`.
    """
    if largest([int(error is not None)], comm, device, tag)[0]:
        RaiseTogether(HostGroup(comm, "errors"), call, kind, failed).exchange(error)


def _attempt(action: Callable[[], Result]) -> tuple[Result | None, BaseException | None]:
    try:
        return action(), None
    except BaseException as error:  # raised again when all ranks know of it: Ctrl-C and SystemExit too
        return None, error
