"""Communicators over every transport."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.null_communicator import NullCommunicator
from zerolite.comm import Communicator, Pending, create, create_communicator, host_memory, second_communicator
from zerolite.comm.communicator import NativeCommunicator
from zerolite.comm.process_group import second_group
from zerolite.comm.transport import Message, ProcessGroupTransport

CPU = torch.device("cpu")


F32, BF16, F64, I64, U8 = torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8


# Lengths of the shards and their dtypes. The last ones are longer than what travels as one message.
UNITS: dict[str, list[tuple[int, torch.dtype]]] = {
    "nothing": [],
    "one element": [(1, F32)],
    "no element": [(0, F32), (0, BF16)],
    "odd lengths": [(3, F32), (17, F32), (1, F32), (1001, F32)],
    "mixed": [(5, U8), (7, F32), (0, I64), (3, BF16), (9, F64), (2, BF16), (11, I64)],
    "long": [(33333, F32), (0, F32), (1, BF16), (20001, BF16)],
}


@contextlib.contextmanager
def transport(name: str) -> Iterator[None]:
    """``shared memory``, ``messages``, ``little memory`` (files of at most 20000 bytes), or ``native``."""
    make_file = host_memory._create
    with pytest.MonkeyPatch.context() as patch, _native() if name == "native" else contextlib.nullcontext():
        if name == "little memory":
            patch.setattr(host_memory, "_create", lambda name, size: make_file(name, size) if size <= 20000 else None)
        patch.setenv("ZEROLITE_SHARED_MEMORY", "0" if name == "messages" else "1")
        yield  # with "native", gloo knows the calls that NCCL gets


def pair() -> tuple[Communicator, Communicator]:
    comm = create_communicator(CPU)
    return comm, second_communicator(comm, CPU)


Launch = tuple[int, str, int]  # number of the communicator, operation, elements


@contextlib.contextmanager
def late() -> Iterator[list[Launch]]:
    """NCCL's calls over gloo, by transports that deliver as late as NCCL may: see :class:`LateTransport`.

    Yields this rank's launches, which :func:`check_order` compares.
    """
    with pytest.MonkeyPatch.context() as patch, _native(LateTransport):
        patch.setattr(LateTransport, "made", 0)
        patch.setattr(LateTransport, "launched", [])
        yield LateTransport.launched


def check_order(launched: list[Launch]) -> None:
    """Check that all ranks have launched the same on their communicators, in one order over all of them.

    Over NCCL a collective keeps processors of the device busy until the others have launched it, too. Two ranks that
    launch on two communicators in different orders may wait for each other for ever.
    """
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, launched)
    for rank, other in enumerate(of_ranks):
        for place, (one, two) in enumerate(itertools.zip_longest(of_ranks[0], other)):
            assert one == two, f"launch {place} parts: rank 0 has {one}, rank {rank} has {two}"


@contextlib.contextmanager
def _native(made: type[ProcessGroupTransport] = ProcessGroupTransport) -> Iterator[None]:
    """The communicators of all groups make the backend's own calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(create, "ProcessGroupTransport", made)
        for kind in ("GlooCommunicator", "SharedMemoryCommunicator"):
            patch.setattr(create, kind, NativeCommunicator)
        yield


class LateTransport(ProcessGroupTransport):
    """Outputs are NaN until the work is waited for, whatever else has been waited for before, on this communicator or
    another. By then its inputs must not have changed, and no memory of it may have been freed."""

    made = 0  # in this context
    launched: list[Launch] = []

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        LateTransport.made += 1
        self.number = LateTransport.made

    def _note(self, op: str, *tensors: Tensor) -> None:
        self.launched.append((self.number, op, sum(tensor.numel() for tensor in tensors)))

    def all_reduce(self, tensor: Tensor) -> Any:
        self._note("all_reduce", tensor)
        return _LateWork(super().all_reduce, [tensor], [tensor])

    def all_reduce_max(self, tensor: Tensor) -> Any:
        self._note("all_reduce_max", tensor)
        return _LateWork(super().all_reduce_max, [tensor], [tensor])

    def broadcast(self, tensor: Tensor, source: int) -> Any:
        self._note("broadcast", tensor)
        return _LateWork(lambda copy: super(LateTransport, self).broadcast(copy, source), [tensor], [tensor])

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Any:
        self._note("reduce_scatter", full)
        return _LateWork(super().reduce_scatter, [out], [full], (out, full))

    def all_to_all(self, out: Tensor, full: Tensor, received: Sequence[int], sent: Sequence[int]) -> Any:
        self._note("all_to_all", full)
        started = super().all_to_all
        return _LateWork(lambda to, taken: started(to, taken, received, sent), [out], [full], (out, full))

    def all_gather(self, full: Tensor, own: Tensor) -> Any:
        self._note("all_gather", full)
        return _LateWork(super().all_gather, [full], [own], (full, own))

    def all_gather_several(self, fulls: list[Tensor], owns: list[Tensor]) -> Any:
        self._note("all_gather_several", *fulls)
        started = super().all_gather_several
        count = len(fulls)
        return _LateWork(lambda *all: started(list(all[:count]), list(all[count:])), fulls, owns, (*fulls, *owns))

    def second(self, backend: str) -> LateTransport:
        assert self.group is not None
        return LateTransport(second_group(self.group, backend))


class _LateWork:
    def __init__(
        self, start: Any, outputs: list[Tensor], inputs: list[Tensor], arguments: tuple[Tensor, ...] | None = None
    ) -> None:
        """Start the collective on copies of ``arguments`` (default: the outputs)."""
        arguments = tuple(outputs) if arguments is None else arguments
        copies = {id(tensor): tensor.clone() for tensor in arguments}
        self._results = [(tensor, copies[id(tensor)]) for tensor in outputs]
        in_place = {id(tensor) for tensor in outputs}
        self._sent = [(tensor, tensor.clone()) for tensor in inputs if id(tensor) not in in_place]
        self._storages = [(t.untyped_storage(), t.untyped_storage().nbytes()) for t in (*outputs, *inputs)]
        self._work = start(*(copies[id(tensor)] for tensor in arguments))
        for tensor in outputs:
            with torch.no_grad():
                tensor.view(-1).view(torch.uint8).fill_(255)  # NaN in every floating dtype
        for tensor, value in self._sent:  # an all-gather may send a part of its output
            tensor.copy_(value)
        self._done = False

    def is_completed(self) -> bool:
        return self._done

    def wait(self, timeout: timedelta | None = None) -> None:
        if self._done:
            return
        self._work.wait()
        for storage, nbytes in self._storages:
            assert storage.nbytes() == nbytes, "memory of a collective in flight was freed"
        for tensor, value in self._sent:
            same = torch.equal(tensor.view(torch.uint8), value.view(torch.uint8))
            assert same, "the input of a collective in flight was overwritten"
        for tensor, result in self._results:
            tensor.copy_(result)
        self._done = True


class RawMessage:
    """Torch's handle of a message of gloo: it has ended once it is waited for, and must not be waited for again."""

    def __init__(self) -> None:
        self._waited = False

    def wait(self, timeout: timedelta | None = None) -> None:
        assert not self._waited, "a second wait ends at the timeout of the process group"
        self._waited = True

    def is_completed(self) -> bool:
        return self._waited


class LateGathers(NullCommunicator):
    """One rank alone, whose gathers give NaN until they are waited for.

    Attributes:
        events: launches of gathers and waits for them, with the number of the bucket.
        in_wait: called in each wait.
    """

    def __init__(self, rank: int = 0, world_size: int = 4) -> None:
        super().__init__(rank, world_size)
        self.events: list[tuple[str, int]] = []
        self.in_wait: Callable[[], object] = lambda: None

    def all_gather(self, full: Tensor, tag: str, key: int = 0) -> Pending:
        own, values, bucket = self.shard(full).clone(), full.clone(), key - 1
        full.fill_(torch.nan)
        self.shard(full).copy_(own)
        self.events.append(("launch", bucket))

        def finish() -> Tensor:
            self.in_wait()
            self.events.append(("wait", bucket))
            return full.copy_(values)

        return Pending([Message(RawMessage()), Message(RawMessage())], (full,), finish)

    def of(self, event: str) -> list[int]:
        return [bucket for name, bucket in self.events if name == event]
