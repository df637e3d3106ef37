"""Placement of a rank's shards between uses: on the device, on the host or on disk.

A placement allocates flat tensors. All of them can be read and written as tensors, so checkpoints and access by
parameter do not depend on the placement. A tensor on disk is a part of a file that is mapped into memory; the kernel
reads its pages and writes them back. The step does not use the mapping. It copies what it needs next into staging
buffers while it works: see :mod:`zerolite.offload.transfers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zerolite.utils.accelerator import current_platform
from zerolite.utils.memory_tags import DEVICE, DISK, HOST, tag_memory

BLOCK = 4096
"""Bytes. Direct I/O needs multiples: for addresses, for positions in a file and for lengths."""
SPAN_ALIGNMENT = 4096
"""Elements. A part of a shard that is moved by itself begins at a multiple: whole blocks of a disk in every dtype."""


def whole_blocks(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


class Transfer:
    """Copy under way, which keeps source and target alive. An object of this class itself is a copy that has ended."""

    def wait(self) -> None:
        """Wait until the target may be used. The host waits for a target on the host or on disk, the current stream for
        one on a device. May be called several times.

        Raises:
            OSError: the disk failed; the message has the file, the position and the bytes.
        """

    def finish(self) -> None:
        """Wait on the host until all is done, so that the source may be overwritten or freed."""
        self.wait()

    def advance(self) -> None:
        """Wait for the first of two chained transfers and begin the second."""


DONE = Transfer()


class File(Protocol):
    """The part of :class:`zerolite.offload.swap_file.SwapFile` that placements and transfers use."""

    def zeros(self, nbytes: int) -> torch.Tensor: ...

    def read(self, offloaded: torch.Tensor, into: torch.Tensor) -> Transfer: ...

    def write(self, offloaded: torch.Tensor, source: torch.Tensor) -> Transfer: ...

    def drop_page_cache(self, replaced: bool = False) -> None: ...

    def verify(self) -> None: ...


class Placement:
    """Placement on the device.

    Attributes:
        location: one of :data:`zerolite.utils.memory_tags.LOCATIONS`.
        device: device of its tensors; the CPU for host and disk.
        pin: its memory on the host, or its staging buffers, are pinned for asynchronous copies.
    """

    location = DEVICE
    pin = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, numel: int, dtype: torch.dtype, category: str) -> torch.Tensor:
        """Return zeros of shape [numel] for ``category``, one of :data:`zerolite.utils.memory_tags.ITEMS`."""
        return tag_memory(torch.zeros(numel, dtype=dtype, device=self.device), category, self.location)


class HostPlacement(Placement):
    """Placement in the host's memory."""

    location = HOST

    def __init__(self, pin: bool) -> None:
        super().__init__(torch.device("cpu"))
        self.pin = pin

    def zeros(self, numel: int, dtype: torch.dtype, category: str) -> torch.Tensor:
        memory = current_platform().host_memory(numel * dtype.itemsize, self.pin)
        return tag_memory(memory.view(dtype), category, self.location)


class DiskPlacement(Placement):
    """Placement in a file of this rank.

    While an engine is made, the other ranks would wait for one whose disk is full. So that rank goes on with other
    memory until :meth:`end_start`.
    """

    location = DISK

    def __init__(self, file: File, pin: bool) -> None:
        super().__init__(torch.device("cpu"))
        self.file = file
        self.pin = pin
        self._starts = True
        self._error: OSError | None = None
        self._stand_in = torch.empty(0, dtype=torch.uint8, device="cpu")  # one for all, because nothing will read it

    def zeros(self, numel: int, dtype: torch.dtype, category: str) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        try:
            memory = self.file.zeros(nbytes)
        except OSError as error:
            if not self._starts:
                raise
            self._error = self._error or error
            if len(self._stand_in) < nbytes:
                self._stand_in = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
            memory = self._stand_in[:nbytes]
        return tag_memory(memory.view(dtype), category, self.location)

    def end_start(self) -> OSError | None:
        """Return the first error so far, for all ranks to raise. Later ones are raised where they come."""
        self._starts = False
        return self._error


@dataclass(frozen=True)
class OffloadOptions:
    """Share of the states that is offloaded, and the portions of its copies.

    Attributes:
        ratio: fraction of the elements, from 0 to 1, whose states are offloaded; the others stay on the device.
        sub_group_numel: most elements of a shard in one sub-group of an update that runs on the host or is staged.
        buffer_count: sub-groups that are staged, updated or written back at the same time.
        max_in_host: elements of this rank's shards that stay on the host if the others are on disk.
    """

    ratio: float = 1.0
    sub_group_numel: int = 1_000_000_000
    buffer_count: int = 4
    max_in_host: int = 0


class Placements:
    """Placements of an engine's states.

    Attributes:
        device: device that computes.
        optimizer: placement of separate masters, of optimizer states, and of gradients that wait for the step.
        parameters: placement of stage 3's shards.
        separate_memory: device and host have different memories. If the CPU computes they are the same, and nothing is
            copied between them.
        options: see the class.
        on_drop_reads: callbacks that drop reads ahead.
    """

    def __init__(
        self,
        device: torch.device,
        optimizer: Placement,
        parameters: Placement,
        separate_memory: bool = True,
        options: OffloadOptions = OffloadOptions(),
    ) -> None:
        self.device, self.optimizer, self.parameters = device, optimizer, parameters
        self.separate_memory, self.options = separate_memory, options
        self.on_drop_reads: list[Callable[[], None]] = []
        self._room_in_host = options.max_in_host
        self._device_buckets: set[int] = set()  # buckets whose optimizer states stay on the device
        self._buckets = 0  # number of buckets that `set_buckets` has seen

    def set_buckets(self, numels: Sequence[int]) -> None:
        """Choose the buckets whose states stay on the device, so that ``options.ratio`` of all elements are offloaded.

        The last buckets stay: their gradients come last, so nothing would hide their transfers. Buckets that are added
        later are offloaded.

        Args:
            numels: elements of each bucket.
        """
        if self._buckets or self.optimizer.location == DEVICE:
            return
        self._buckets = len(numels)
        self._device_buckets = set(_last_ones(numels, 1.0 - self.options.ratio))

    def optimizer_placement(self, bucket: int) -> Placement:
        """Return the placement of a bucket's masters, states and gradients."""
        return self.on_device if bucket in self._device_buckets else self.optimizer

    def place_parameters(self, numel: int, persistent: bool = False) -> Placement:
        """Return the placement of new shards. Called once for each shard: if ``parameters`` is the disk, the first
        ``options.max_in_host`` elements stay on the host.

        Args:
            numel: elements of the shards.
            persistent: the whole parameters stay on the device. Then their shards stay on the host, too.
        """
        placement = self.parameters
        if isinstance(placement, DiskPlacement) and (persistent or numel <= self._room_in_host):
            if not persistent:
                self._room_in_host -= numel
            return HostPlacement(placement.pin)
        return placement

    def is_accessible(self, placement: Placement, on_host: bool) -> bool:
        """Return True if an update can read and write tensors of ``placement`` without staging.

        Args:
            placement: placement of the tensors.
            on_host: the update runs on the host; False: on the device.
        """
        if placement.location == DISK:
            return False
        return not self.separate_memory or (placement.location == HOST) == on_host

    def update_devices(self) -> list[torch.device]:
        """Return every device on which buckets may be updated."""
        both = self.options.ratio < 1.0 and self.optimizer.location != DEVICE
        return list(dict.fromkeys([self.optimizer.device, *([self.device] if both else [])]))

    @property
    def on_device(self) -> Placement:
        return Placement(self.device)

    @property
    def on_disk(self) -> bool:
        """True if anything is stored on disk."""
        return DISK in (self.optimizer.location, self.parameters.location)

    def end_start(self) -> OSError | None:
        """Return the first error of allocations on disk so far, for all ranks to raise."""
        placements = (
            placement for placement in (self.optimizer, self.parameters) if isinstance(placement, DiskPlacement)
        )
        return next(filter(None, [placement.end_start() for placement in placements]), None)

    def drop_reads(self, replaced: bool = False) -> None:
        """Drop reads ahead and cached pages, because stored tensors were read or written as tensors and not by the
        step. Called while no other transfer is under way.

        Args:
            replaced: all tensors have new values.
        """
        for drop in self.on_drop_reads:
            drop()
        for placement in (self.optimizer, self.parameters):
            if isinstance(placement, DiskPlacement):
                placement.file.drop_page_cache(replaced)

    def verify(self) -> None:
        """Raise OSError if the disk is known to have lost what it stores."""
        for drop in self.on_drop_reads:
            drop()
        for placement in (self.optimizer, self.parameters):
            if isinstance(placement, DiskPlacement):
                placement.file.verify()


def _last_ones(numels: Sequence[int], fraction: float) -> list[int]:
    """Return the indices of the last numbers that together come nearest to ``fraction`` of the sum."""
    total, chosen, size = sum(numels), [], 0
    for index in reversed(range(len(numels))):
        if abs(size + numels[index] - fraction * total) >= abs(size - fraction * total):
            break
        chosen.append(index)
        size += numels[index]
    return chosen
