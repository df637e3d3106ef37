"""Saved inputs of checkpoints: offloaded or sharded in forward, restored in backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from zerolite.activation_checkpointing.activation_shards import ActivationShards, checksum
from zerolite.activation_checkpointing.copies import Copies, Copy, Pair
from zerolite.activation_checkpointing.memory import BorrowedMemory, MemorySource
from zerolite.utils.accelerator import is_fake
from zerolite.utils.memory_tags import HOST
from zerolite.zero.flat import dense_strides

SMALLEST = 4096
"""Bytes: smaller inputs are not saved here."""
_ALIGNMENT = 512  # bytes: inputs begin at multiples of it in borrowed memory
_ALLOCATORS = 64  # bytes: operators compute the same bits for tensors that begin at multiples of it


class SavedInput:
    """An input that a checkpoint needs again in backward.

    It is saved in borrowed memory, completely or as this rank's part. An input that several checkpoints share stays on
    the device, because it exists only once anyway.

    Attributes:
        resident: the tensor itself, if it stays on the device.
        offloaded: the saved bytes, uint8.
        checksum: sum of the bits of the full tensor, if it is sharded.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.nbytes = tensor.numel() * tensor.element_size()
        self.resident: torch.Tensor | None = None
        self.offloaded: torch.Tensor | None = None
        self.checksum: torch.Tensor | None = None
        self._memory: BorrowedMemory | None = None
        self._version = tensor._version
        self._source: weakref.ref[torch.Tensor] = weakref.ref(tensor)
        self._changed = False

    def keep_resident(self, tensor: torch.Tensor) -> None:
        """Keep ``tensor`` itself instead of saved bytes."""
        self.resident, self._memory, self.offloaded = tensor, None, None

    def save(self, memory: BorrowedMemory, start: int, length: int, checksum: torch.Tensor | None) -> torch.Tensor:
        """Reserve ``length`` bytes of ``memory`` from ``start`` on, and return them."""
        self._memory, self.checksum = memory, checksum
        self.offloaded = memory.memory.narrow(0, start, length)
        return self.offloaded

    def unchanged(self) -> bool:
        """Return True if the tensor has not been written in place as long as it has existed."""
        source = self._source()
        self._changed = self._changed or (source is not None and source._version != self._version)
        return not self._changed

    def from_bytes(self, full: torch.Tensor) -> torch.Tensor:
        """Return the tensor that shares the memory of ``full``, uint8 [at least nbytes]."""
        return full[: self.nbytes].view(self.dtype).as_strided(self.shape, self.stride)


class _Prefetch:
    """Copy of the inputs of one checkpoint to the device, before it needs them."""

    def __init__(self, saved: Sequence[SavedInput], arrived: dict[SavedInput, torch.Tensor], copy: Copy) -> None:
        self.saved = list(saved)
        self.arrived = arrived
        self.copy = copy


class InputSaver:
    """Saver of checkpoints' inputs in forward, in memory of ``source``, which restores them in backward."""

    def __init__(
        self,
        device: torch.device,
        source: MemorySource,
        sharding: Callable[[], ActivationShards | None],
        copies: Copies,
    ) -> None:
        """
        Args:
            device: the device that computes.
            source: memory for saved inputs.
            sharding: called at each checkpoint, returns the sharding of inputs; None: inputs are not sharded.
            copies: stream of the copies.
        """
        self._device = device
        self._source = source
        self._sharding = sharding
        self._copies = copies
        self._by_tensor = WeakTensorKeyDictionary()  # weak references to saved inputs, by the tensor
        self._prefetch: _Prefetch | None = None

    # ---------------------------------------------------------------- forward

    def accepts(self, value: Any) -> bool:
        """Return True if ``value`` is saved here.

        These are not: parameters and other leaves, which always exist; tensors on other devices; small ones; and ones
        that are not dense.
        """
        return (
            (type(value) is torch.Tensor or is_fake(value))
            and not isinstance(value, torch.nn.Parameter)
            and not (value.requires_grad and value.is_leaf)
            and value.device == self._device
            and value.layout is torch.strided
            and value.numel() * value.element_size() >= SMALLEST
            and (self._source.location == HOST or self._sharding() is not None)
            and not (value.is_inference() or value.is_conj() or value.is_neg())
            and value.storage_offset() * value.element_size() % _ALLOCATORS == 0
            and dense_strides(value) == value.stride()
        )

    @torch.no_grad()
    def save(self, tensors: Sequence[torch.Tensor]) -> tuple[list[SavedInput], Copy]:
        """Save the tensors. Return their saved inputs, and the copy to wait for before they are changed or freed."""
        self._drop_prefetch()
        shards = self._sharding()
        saved: list[SavedInput] = []
        new: list[tuple[SavedInput, torch.Tensor]] = []
        for tensor in tensors:
            entry = self._look_up(tensor)
            if entry is None:
                entry = SavedInput(tensor)
                self._by_tensor[tensor] = weakref.ref(entry)
                new.append((entry, tensor))
            elif all(entry is not other for other, _ in new):
                entry.keep_resident(tensor)
            saved.append(entry)
        return saved, self._store(new, shards)

    def _look_up(self, tensor: torch.Tensor) -> SavedInput | None:
        reference = self._by_tensor.get(tensor)
        entry: SavedInput | None = None if reference is None else reference()
        return entry if entry is not None and entry.unchanged() else None

    def _store(self, new: Sequence[tuple[SavedInput, torch.Tensor]], shards: ActivationShards | None) -> Copy:
        lengths = [entry.nbytes if shards is None else shards.shard_nbytes(entry.nbytes) for entry, _ in new]
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + -(-length // _ALIGNMENT) * _ALIGNMENT)
        if not new:
            return Copy((), None, self._device)
        memory = self._source.allocate(starts[-1])
        pairs: list[Pair] = []
        for (entry, tensor), start, length in zip(new, starts, lengths, strict=False):
            flat = tensor.detach().as_strided((tensor.numel(),), (1,))
            offloaded = entry.save(memory, start, length, None if shards is None else checksum(flat))
            part = flat.view(torch.uint8) if shards is None else shards.shard(flat.view(torch.uint8))
            pairs.append((part, offloaded[: part.numel()]))
        if self._source.location == HOST:
            return self._copies.launch(pairs)
        for part, offloaded in pairs:
            offloaded.copy_(part)
        return Copy((), None, self._device)

    # ---------------------------------------------------------------- backward

    @torch.no_grad()
    def restore(self, saved: Sequence[SavedInput], needed_next: Sequence[SavedInput], what: str) -> list[torch.Tensor]:
        """Return the tensors of ``saved`` on the device, without gradients.

        Args:
            saved: the inputs of a checkpoint.
            needed_next: inputs of the next checkpoint in backward, whose copy begins now.
            what: the checkpoint, for messages.

        Raises:
            RuntimeError: an input has been written in place, or :meth:`ActivationShards.gather` raises it.
        """
        if not all(entry.unchanged() for entry in saved):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                f"input of {what} was written in place after the call, so it cannot be recomputed; change a copy of it "
                "instead"
            )
        entries = list(dict.fromkeys(entry for entry in saved if entry.resident is None))
        fetched, self._prefetch = self._prefetch, None
        if fetched is None or fetched.saved != entries:
            if fetched is not None:
                fetched.copy.wait()
            fetched = self._fetch(entries)
        fetched.copy.wait()
        following = list(dict.fromkeys(entry for entry in needed_next if entry.resident is None))
        if following and self._source.location == HOST:
            self._prefetch = self._fetch(following)
        full = self._gather(entries, fetched.arrived, what)
        tensors = {entry: entry.from_bytes(full[entry]) for entry in entries}
        return [entry.resident if entry.resident is not None else tensors[entry] for entry in saved]

    def _fetch(self, entries: Sequence[SavedInput]) -> _Prefetch:
        arrived: dict[SavedInput, torch.Tensor] = {}
        pairs: list[Pair] = []
        for entry in entries:
            assert entry.offloaded is not None
            if self._source.location == HOST:
                arrived[entry] = torch.empty(entry.offloaded.numel(), dtype=torch.uint8, device=self._device)
                pairs.append((entry.offloaded, arrived[entry]))
            else:
                arrived[entry] = entry.offloaded
        copy = self._copies.launch(pairs) if pairs else Copy((), None, self._device)
        return _Prefetch(entries, arrived, copy)

    def _gather(
        self, entries: Sequence[SavedInput], arrived: dict[SavedInput, torch.Tensor], what: str
    ) -> dict[SavedInput, torch.Tensor]:
        sums = {entry: entry.checksum for entry in entries if entry.checksum is not None}
        shards = self._sharding()
        if not sums or shards is None:
            return arrived
        full = shards.gather([arrived[entry] for entry in sums], list(sums.values()), what)
        return {**arrived, **dict(zip(sums, full, strict=True))}

    def _drop_prefetch(self) -> None:
        """Drop a prefetch that was not needed: a new forward has begun."""
        if self._prefetch is not None:
            self._prefetch.copy.wait()
            self._prefetch = None

    def memory(self) -> list[torch.Tensor]:
        """Return the buffers that are not in use."""
        return self._source.memory()
