"""Placement of a rank's shards between uses: on the device, on the host or on disk.

A placement is one of these places and hands out flat tensors. Wherever they are, they can be read and written as
tensors, so that everything outside of the step (checkpoints, access by parameter) does not depend on the placement:
tensors on disk are the file, mapped into memory, and the kernel fetches and writes back their pages. The step does not
go that way: it has what it needs next copied into staging buffers while it works (see transfers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from zerolite.utils.accelerator import current_platform
from zerolite.utils.memory_tags import DEVICE, DISK, HOST, tag_memory

SPAN_ALIGNMENT = 4096
"""Parts of a shard that are moved by themselves begin at multiples of so many elements: whole blocks of a disk in every
dtype."""


class Transfer:
    """A copy under way, which keeps both ends alive. This class is the one of a copy that has ended."""

    def wait(self) -> None:
        """Afterwards the target may be used where it is: the host waits for a target on the host or on disk, the
        current stream for one on a device. Raises OSError with the file, the position and the bytes if the disk failed.
        May be called several times."""

    def finish(self) -> None:
        """The host waits until all is done: the source may be overwritten, and freed."""
        self.wait()

    def advance(self) -> None:
        """Wait for the first of two transfers and begin the second."""


class File(Protocol):
    """The part of :class:`zerolite.offload.swap_file.SwapFile` that is used here."""

    def zeros(self, nbytes: int) -> torch.Tensor: ...

    def read(self, offloaded: torch.Tensor, into: torch.Tensor) -> Transfer: ...

    def write(self, offloaded: torch.Tensor, source: torch.Tensor) -> Transfer: ...

    def forget_cached(self) -> None: ...


class Placement:
    """place: of :data:`zerolite.utils.memory_tags.PLACES`. device: of its tensors; the CPU for host and disk."""

    place = DEVICE
    pin = False  # the host's memory, for copies beside the device's work

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, numel: int, dtype: torch.dtype, item: str) -> torch.Tensor:
        """[numel] of zeros for ``item`` (of :data:`zerolite.utils.memory_tags.ITEMS`)."""
        return tag_memory(torch.zeros(numel, dtype=dtype, device=self.device), item, self.place)


class HostPlacement(Placement):
    """The host's memory; pin: registered with CUDA."""

    place = HOST

    def __init__(self, pin: bool) -> None:
        super().__init__(torch.device("cpu"))
        self.pin = pin

    def zeros(self, numel: int, dtype: torch.dtype, item: str) -> torch.Tensor:
        memory = current_platform().host_memory(numel * dtype.itemsize, self.pin)
        return tag_memory(memory.view(dtype), item, self.place)


class DiskPlacement(Placement):
    """A file of this rank."""

    place = DISK

    def __init__(self, file: File, pin: bool) -> None:
        super().__init__(torch.device("cpu"))
        self.file = file
        self.pin = pin  # of the buffers on the way there

    def zeros(self, numel: int, dtype: torch.dtype, item: str) -> torch.Tensor:
        return tag_memory(self.file.zeros(numel * dtype.itemsize).view(dtype), item, self.place)


@dataclass
class Placements:
    """The placements of an engine.

    Attributes:
        apart: whether device and host are different memories; where the CPU computes they are the same, and nothing is
            copied between the two.
        optimizer: of masters that are separate, states, and gradients that wait for the step.
        parameters: of stage 3's shards.
        ratio: the part of the elements, from 0 to 1, that ``optimizer`` has; the rest stays on the device.
        sub_group_numel: most elements of a shard in one sub-group of an update that runs off the device, or stages.
        buffer_count: sub-groups that are staged, updated or written back at the same time.
        max_in_host: elements of this rank's shards that stay in the host's memory where ``parameters`` is the disk.
    """

    device: torch.device
    optimizer: Placement
    parameters: Placement
    apart: bool = True
    ratio: float = 1.0
    sub_group_numel: int = 1_000_000_000
    buffer_count: int = 4
    max_in_host: int = 0
    on_written: list[Callable[[], None]] = field(default_factory=list)  # of readers ahead
    _resident: set[int] = field(default_factory=set)  # buckets whose optimizer states stay on the device
    _buckets: int = 0  # that have been divided

    @classmethod
    def on(cls, device: torch.device) -> Placements:
        """Return the placement on one device: nothing is offloaded."""
        placement = Placement(device)
        return cls(device, placement, placement)

    @property
    def offloads(self) -> bool:
        return self.optimizer.place != DEVICE or self.parameters.place != DEVICE

    def divide(self, buckets: Sequence[int]) -> None:
        """Decide which buckets, of so many elements each, keep their states on the device, so that as near as can be
        ``ratio`` of the elements do not: the last ones, whose gradients come last. Buckets that are added later go to
        the placement."""
        if self._buckets or self.optimizer.place == DEVICE:
            return
        self._buckets = len(buckets)
        self._resident = set(_last_ones(buckets, 1.0 - self.ratio))

    def of_optimizer(self, bucket: int) -> Placement:
        """Return the placement of a bucket's masters, states and gradients."""
        return self.on_device if bucket in self._resident else self.optimizer

    def place_parameters(self, numel: int, stays: bool = False) -> Placement:
        """Return the placement of ``numel`` elements of shards, for each caller once. Where ``parameters`` is the disk,
        the first ``max_in_host`` elements are kept on the host.

        stays: the whole parameters never leave the device; then their shards are kept on the host, too.
        """
        placement = self.parameters
        if isinstance(placement, DiskPlacement) and (stays or numel <= self.max_in_host):
            if not stays:
                self.max_in_host -= numel
            return HostPlacement(placement.pin)
        return placement

    def updates_on_host(self, bucket: int) -> bool:
        """True if the CPU updates a bucket: its states are on host or disk."""
        return self.of_optimizer(bucket).place != DEVICE

    def is_accessible(self, placement: Placement, on_host: bool) -> bool:
        """True if an update on the host, or on the device, can read and write tensors of ``placement`` where they are:
        they need no staging."""
        if placement.place == DISK:
            return False
        return not self.apart or (placement.place == HOST) == on_host

    def update_devices(self) -> list[torch.device]:
        """Every one on which something may be updated."""
        both = self.ratio < 1.0 and self.optimizer.place != DEVICE
        return list(dict.fromkeys([self.optimizer.device, *([self.device] if both else [])]))

    @property
    def on_device(self) -> Placement:
        return Placement(self.device)

    @property
    def on_disk(self) -> bool:
        """True if anything is stored on disk."""
        return DISK in (self.optimizer.place, self.parameters.place)

    def _files(self) -> list[File]:
        placements = (self.optimizer, self.parameters)
        return [placement.file for placement in placements if isinstance(placement, DiskPlacement)]

    def written_in_place(self) -> None:
        """Drop reads ahead after stored tensors were written as tensors, not by the step. While nothing is under way
        but reads ahead."""
        for forget in self.on_written:
            forget()
        for file in self._files():
            file.forget_cached()


def _last_ones(numels: Sequence[int], part: float) -> list[int]:
    """The last of several lengths that together come nearest to ``part`` of their sum."""
    total, chosen, size = sum(numels), [], 0
    for index in reversed(range(len(numels))):
        if abs(size + numels[index] - part * total) >= abs(size - part * total):
            break
        chosen.append(index)
        size += numels[index]
    return chosen
