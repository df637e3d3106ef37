"""Collectives over flat buckets, each as a handle that is waited for later.

A bucket of ``world_size`` equal parts goes in; the algorithm depends on the backend. NCCL has the collectives in
hardware. Gloo's own reduce-scatter and all-gather are several times slower than its point-to-point messages, so
there a reduce-scatter is an exchange of parts and a sum in rank order (which also lets 16-bit gradients be summed
in fp32 at no extra traffic), and a gather is an exchange.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerolite.comm import recorder
from zerolite.comm.host_memory import HostMemory, same_host
from zerolite.comm.process_group import keep_track

_serials = itertools.count(1)
_CHUNK = 1 << 16  # elements summed at once in fp32
_SMALL = 4096  # elements below which a message is as fast as shared memory
_HALF = (torch.float16, torch.bfloat16)


class Pending:
    """A collective in flight. Holds every tensor of it alive until :meth:`wait` has returned."""

    def __init__(self, works: Sequence[Any], keep: Sequence[torch.Tensor], finish: Callable[[], torch.Tensor]) -> None:
        self._works = list(works)
        self._keep = list(keep)
        self._finish: Callable[[], torch.Tensor] | None = finish
        self._result: torch.Tensor | None = None

    def arrived(self) -> bool:
        """True if nothing has to be waited for any more."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> torch.Tensor:
        """The result. On CUDA the current stream waits, not the host. May be called again."""
        if self._finish is not None:
            for work in self._works:
                work.wait()
            self._result = self._finish()
            self._works, self._keep, self._finish = [], [], None
        assert self._result is not None
        return self._result


def _done(result: torch.Tensor) -> Pending:
    return Pending((), (), lambda: result)


class Communicator:
    """Collectives of one data-parallel group. This class is the one of a group of one process: nothing to send.

    All methods are called on all ranks of the group, in the same order, with tensors of the same length and dtype.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, rank: int = 0, world_size: int = 1) -> None:
        self.group = group
        self.rank = rank
        self.world_size = world_size
        keep_track(self)

    def close(self) -> None:
        """Let go of the group, which is being destroyed."""
        self.group = None

    def staging(self, numel: int, dtype: torch.dtype, ahead: int) -> torch.Tensor | None:
        """Memory [numel] from which the collective after the next ``ahead`` ones sends without a copy; None if
        there is none.

        Whoever takes it must launch that very reduce-scatter with it.
        """
        return None

    def all_reduce(self, tensor: torch.Tensor, tag: str, divisor: float = 1.0) -> Pending:
        """Sum over ranks divided by ``divisor``, in place. ``wait()`` gives the tensor."""
        self._note("all_reduce", tensor, tag)
        return self._all_reduce(tensor, divisor)

    def all_reduce_max(self, tensor: torch.Tensor, tag: str) -> None:
        """Maximum over ranks of a small tensor, in place; returns when it is there."""
        if self.world_size > 1:
            recorder.note("all_reduce", tensor, tag)
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)

    def reduce_scatter(
        self, full: torch.Tensor, tag: str, divisor: float = 1.0, dtype: torch.dtype | None = None
    ) -> Pending:
        """``wait()`` gives the sum over ranks of this rank's part of ``full``, divided by ``divisor``; shape [numel
        / world_size], in ``dtype`` (default: ``full``'s). Where 16-bit values are summed in fp32, they are rounded
        to ``dtype`` only. ``full`` is clobbered.
        """
        self._note("reduce_scatter", full, tag)
        return self._reduce_scatter(full, divisor, dtype or full.dtype)

    def all_gather(self, full: torch.Tensor, tag: str) -> Pending:
        """In place: this rank's part of ``full`` is sent, the other parts are received."""
        self._note("all_gather", full, tag)
        return self._all_gather(full)

    def broadcast(self, tensor: torch.Tensor, tag: str, source: int = 0) -> None:
        """Rank ``source`` of the group overwrites everybody's ``tensor``; returns when it has."""
        if self.world_size == 1:
            return
        recorder.note("broadcast", tensor, tag)
        assert self.group is not None
        dist.broadcast(tensor, src=dist.get_global_rank(self.group, source), group=self.group)

    def part(self, full: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """Rank ``rank``'s part of ``full`` (default: this rank's), a view."""
        numel = full.numel() // self.world_size
        return full.narrow(0, (self.rank if rank is None else rank) * numel, numel)

    def _note(self, op: str, tensor: torch.Tensor, tag: str) -> None:
        if self.world_size > 1:
            recorder.note(op, tensor, tag)

    def _all_reduce(self, tensor: torch.Tensor, divisor: float) -> Pending:
        return _done(_divide(tensor, divisor))

    def _reduce_scatter(self, full: torch.Tensor, divisor: float, dtype: torch.dtype) -> Pending:
        return _done(_divide(full, divisor).to(dtype))

    def _all_gather(self, full: torch.Tensor) -> Pending:
        return _done(full)


class NativeCommunicator(Communicator):
    """The backend's own collectives (NCCL and everything else that is not gloo)."""

    def _all_reduce(self, tensor: torch.Tensor, divisor: float) -> Pending:
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return Pending((work,), (tensor,), lambda: _divide(tensor, divisor))

    def _reduce_scatter(self, full: torch.Tensor, divisor: float, dtype: torch.dtype) -> Pending:
        # Allocated on the current stream, used by the communication stream until wait() orders the two.
        out = torch.empty(full.numel() // self.world_size, dtype=full.dtype, device=full.device)
        work = _reduce_scatter_single(out, full, group=self.group, async_op=True)
        return Pending((work,), (full, out), lambda: _divide(out, divisor).to(dtype))

    def _all_gather(self, full: torch.Tensor) -> Pending:
        work = _all_gather_single(full, self.part(full), group=self.group, async_op=True)
        return Pending((work,), (full,), lambda: full)


class GlooCommunicator(Communicator):
    """Exchanges over gloo's point-to-point messages.

    Sums are taken in rank order on every rank, so that all stages give the same bits at any world size. Messages of
    different collectives carry different tags; a pair of ranks may have several in flight.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, world_size: int) -> None:
        super().__init__(group, rank, world_size)
        self._peers = [(peer, dist.get_global_rank(group, peer)) for peer in range(world_size) if peer != rank]
        self._tag = 0

    def _next_tag(self) -> int:
        self._tag = (self._tag + 1) % (1 << 20)
        return self._tag

    def _all_reduce(self, tensor: torch.Tensor, divisor: float) -> Pending:
        # Two terms have one sum, whatever their order, so at two ranks gloo's own algorithm gives the bits of the
        # exchange (not in 16 bits, where the exchange divides before it rounds). Lengths that cannot be cut in
        # equal parts take it as well: only small tensors have such.
        cut = tensor.dim() == 1 and tensor.numel() % self.world_size == 0
        if not cut or (self.world_size == 2 and tensor.dtype not in _HALF):
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
            return Pending((work,), (tensor,), lambda: _divide(tensor, divisor))
        scattered = self._reduce_scatter(tensor, divisor, tensor.dtype)

        def finish() -> torch.Tensor:
            self.part(tensor).copy_(scattered.wait())
            return self._all_gather(tensor).wait()

        return Pending((), (tensor,), finish)

    def _reduce_scatter(self, full: torch.Tensor, divisor: float, dtype: torch.dtype) -> Pending:
        sent = full.cpu()  # gloo's messages live on the host; a no-op for CPU tensors
        received = {
            peer: torch.empty(full.numel() // self.world_size, dtype=full.dtype, device="cpu")
            for peer, _ in self._peers
        }
        tag = self._next_tag()
        works = [dist.irecv(received[peer], src=source, group=self.group, tag=tag) for peer, source in self._peers]
        works += [
            dist.isend(self.part(sent, peer), dst=target, group=self.group, tag=tag) for peer, target in self._peers
        ]

        def finish() -> torch.Tensor:
            out = received[1 if self.rank == 0 else 0]
            if dtype != full.dtype:
                out = torch.empty_like(out, dtype=torch.float32 if full.dtype in _HALF else full.dtype)
            received[self.rank] = self.part(sent)
            parts = [received[peer] for peer in range(self.world_size)]
            return _mean_in_order(parts, divisor, out).to(device=full.device, dtype=dtype)

        return Pending(works, (full, sent, *received.values()), finish)

    def _all_gather(self, full: torch.Tensor) -> Pending:
        host = full.cpu()
        own = self.part(host)
        tag = self._next_tag()
        works = [
            dist.irecv(self.part(host, peer), src=source, group=self.group, tag=tag) for peer, source in self._peers
        ]
        works += [dist.isend(own, dst=target, group=self.group, tag=tag) for _, target in self._peers]

        def finish() -> torch.Tensor:
            if host is not full:
                full.copy_(host)
            return full

        return Pending(works, (full, host), finish)


def _divide(tensor: torch.Tensor, divisor: float) -> torch.Tensor:
    return tensor if divisor == 1.0 else tensor.div_(divisor)


def _mean_in_order(parts: list[torch.Tensor], divisor: float, out: torch.Tensor) -> torch.Tensor:
    """The sum of ``parts`` from rank 0 upwards, divided, in ``out``, which may be one of them if it has their dtype.

    16-bit parts are summed and divided in fp32, a chunk at a time, and rounded once, to ``out``'s dtype.
    """
    if parts[0].dtype not in _HALF:
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)
        return _divide(out, divisor)
    for start in range(0, out.numel(), _CHUNK):
        total = parts[0][start : start + _CHUNK].float()
        for part in parts[1:]:
            total.add_(part[start : start + _CHUNK])
        out[start : start + _CHUNK].copy_(_divide(total, divisor))
    return out


class SharedMemoryCommunicator(GlooCommunicator):
    """Gloo between processes of one host, with the payload in shared memory: a copy in, a fence, and a sum or copy
    out of the peers' memory.

    It costs a quarter of the processor time of messages over the loopback interface. Where shared memory runs short
    (a container's /dev/shm is often 64 MB) every rank falls back to messages.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, world_size: int) -> None:
        super().__init__(group, rank, world_size)
        self._memory = HostMemory(group, rank)
        self._count = 0  # collectives launched
        self._serial = next(_serials)
        self._last: Pending | None = None  # the latest, until it is finished

    def close(self) -> None:
        super().close()
        self._last = None
        self._memory.close()

    # Who joins the fence of collective j has finished collective j - 1; so who has seen fence j - 1 knows that all
    # have finished collective j - 2, and that what it sent from may be overwritten. With three regions in turn, the
    # next collective's region is that of collective j - 3: always free. The region of the one after it is that of j
    # - 2: free once fence j - 1 has been seen.

    def staging(self, numel: int, dtype: torch.dtype, ahead: int) -> torch.Tensor | None:
        if self._memory.exhausted:
            return None  # some collectives take no turn now
        free = ahead == 0 or (ahead == 1 and (self._last is None or self._last.arrived()))
        return self._memory.own_region(self._count + ahead, numel, dtype) if free else None

    def _exchange(
        self,
        full: torch.Tensor,
        copy_in: Callable[[torch.Tensor], object],
        finish: Callable[[list[torch.Tensor]], torch.Tensor],
    ) -> Pending | None:
        """One collective: ``copy_in(own region)`` unless ``full`` is there already, a fence, ``finish(all ranks'
        regions)``; None if shared memory ran out."""
        if self._last is not None:
            self._last.wait()
        regions = self._memory.regions(self._count, full.numel(), full.dtype)
        if regions is None:
            return None
        self._count += 1
        if full.data_ptr() != regions[self.rank].data_ptr():
            copy_in(regions[self.rank])
        ticket = self._serial * 2**32 + self._count
        arrived = torch.tensor([ticket], dtype=torch.float64)
        fence = dist.all_reduce(arrived, group=self.group, async_op=True)

        def conclude() -> torch.Tensor:
            self._last = None
            if float(arrived) != float(ticket) * self.world_size:
                raise RuntimeError(
                    f"rank {self.rank}: the ranks launched their collectives in different orders (here number "
                    f"{self._count} of "
                    f"communicator {self._serial}). Do the backwards of two engines overlap, with branches that "
                    "depend on the rank?"
                )
            return finish(regions)

        self._last = Pending((fence,), (full, arrived), conclude)
        return self._last

    def _all_reduce(self, tensor: torch.Tensor, divisor: float) -> Pending:
        # Everybody sums everything: up to four ranks that is no more work than two halves, and needs one fence.
        if tensor.dim() != 1 or tensor.numel() < _SMALL or self.world_size > 4:
            return super()._all_reduce(tensor, divisor)

        def finish(regions: list[torch.Tensor]) -> torch.Tensor:
            return _mean_in_order(regions, divisor, tensor)

        pending = self._exchange(tensor, lambda own: own.copy_(tensor), finish)
        return pending or super()._all_reduce(tensor, divisor)

    def _reduce_scatter(self, full: torch.Tensor, divisor: float, dtype: torch.dtype) -> Pending:
        def copy_in(own: torch.Tensor) -> None:
            for peer, _ in self._peers:
                self.part(own, peer).copy_(self.part(full, peer))

        def finish(regions: list[torch.Tensor]) -> torch.Tensor:
            parts = [self.part(region) for region in regions]
            parts[self.rank] = self.part(full)
            exact = full.dtype if full.dtype not in _HALF or dtype in _HALF else torch.float32
            return _mean_in_order(parts, divisor, torch.empty_like(parts[0], dtype=exact)).to(dtype)

        pending = self._exchange(full, copy_in, finish)
        return pending or super()._reduce_scatter(full, divisor, dtype)

    def _all_gather(self, full: torch.Tensor) -> Pending:
        def finish(regions: list[torch.Tensor]) -> torch.Tensor:
            for peer, _ in self._peers:
                self.part(full, peer).copy_(self.part(regions[peer], peer))
            return full

        pending = self._exchange(full, lambda own: self.part(own).copy_(self.part(full)), finish)
        return pending or super()._all_gather(full)


def create_communicator(device: torch.device, group: dist.ProcessGroup | None = None) -> Communicator:
    """The communicator of ``group`` (default: all processes) for tensors on ``device``."""
    group = group or dist.group.WORLD
    assert group is not None, "create_communicator is called after init_distributed"
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if world_size == 1:
        return Communicator(group, rank, world_size)
    if _backend_name(group, device) == "gloo":
        if device.type == "cpu" and same_host(group):
            return SharedMemoryCommunicator(group, rank, world_size)
        return GlooCommunicator(group, rank, world_size)
    return NativeCommunicator(group, rank, world_size)


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that serves ``device``: a group may have one per device type, as in 'cpu:gloo,cuda:nccl'."""
    config = str(dist.get_backend_config(group))
    backends = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    return backends.get(device.type, config)


# torch 2.13 renamed these two and warns at the old names.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
