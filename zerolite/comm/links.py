"""Small objects from rank to rank, on the host and apart from all other communication."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.distributed as dist

from zerolite.comm.communicator import Communicator
from zerolite.comm.flight import blocked
from zerolite.comm.objects import pack, unpack
from zerolite.comm.process_group import second_group

_TAG = 1


class HostLinks:
    """Between the ranks of ``comm``, on all of which it is made, in the same order. Every :meth:`send` needs a
    :meth:`receive` there."""

    def __init__(self, comm: Communicator, purpose: str) -> None:
        assert comm.group is not None
        on_host = torch.device("cpu") in comm.group._device_types
        # Messages with a tag of their own do not meet others of the same group.
        self._group = comm.group if on_host else second_group(comm.group, "gloo", purpose)
        self._ranks = dist.get_process_group_ranks(comm.group)
        self._sent: list[tuple[Any, torch.Tensor]] = []  # works, and what they need alive

    def send(self, value: Any, rank: int) -> None:
        """``value`` to ``rank``, which need not wait for it yet."""
        packed = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)
        length = torch.tensor([packed.numel()], dtype=torch.int64, device="cpu")
        for tensor in (length, packed):
            self._sent.append((dist.isend(tensor, self._ranks[rank], group=self._group, tag=_TAG), tensor))

    def receive(self, rank: int) -> Any:
        """What ``rank`` sends next."""
        with blocked(("receive", "object", 0, None, 0)):
            length = torch.empty(1, dtype=torch.int64, device="cpu")
            dist.recv(length, self._ranks[rank], group=self._group, tag=_TAG)
            packed = torch.empty(int(length), dtype=torch.uint8, device="cpu")
            dist.recv(packed, self._ranks[rank], group=self._group, tag=_TAG)
        return unpack(ctypes.string_at(packed.data_ptr(), packed.numel()))

    def finish(self) -> None:
        """Wait until all that was sent has been received."""
        sent, self._sent = self._sent, []
        for work, _ in sent:
            work.wait()
