"""Saved inputs of checkpoints: offloaded or sharded in forward, restored in backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from zerolite.activation_checkpointing.activation_shards import ActivationShards, checksum
from zerolite.activation_checkpointing.copies import Copies, Copy, Pair
from zerolite.activation_checkpointing.memory import BorrowedMemory, MemorySource
from zerolite.utils.memory_tags import HOST
from zerolite.zero.buffer import dense_strides

SMALLEST = 4096
"""Bytes: smaller inputs stay as they are."""
_ALIGNMENT = 512  # bytes; where inputs begin in a region
_ALLOCATORS = 64  # bytes: tensors that begin at multiples get the same arithmetic wherever they are


class SavedInput:
    """An input that a checkpoint needs again.

    It is saved in memory of :mod:`memory`, whole or as this rank's part. One that several checkpoints share stays where
    it is, because it is there only once anyway.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.nbytes = tensor.numel() * tensor.element_size()
        self.resident: torch.Tensor | None = None
        self.offloaded: torch.Tensor | None = None  # uint8
        self.checksum: torch.Tensor | None = None  # of one that is sharded
        self.region: BorrowedMemory | None = None
        self._version = tensor._version
        self._source: weakref.ref[torch.Tensor] = weakref.ref(tensor)
        self._changed = False

    def stay(self, tensor: torch.Tensor) -> None:
        """Keep ``tensor`` itself from now on."""
        self.resident, self.region, self.offloaded = tensor, None, None

    def unchanged(self) -> bool:
        """True if the tensor has not been written into, as far as it is there."""
        source = self._source()
        self._changed = self._changed or (source is not None and source._version != self._version)
        return not self._changed

    def from_bytes(self, whole: torch.Tensor) -> torch.Tensor:
        """The tensor over ``whole``, uint8 [at least nbytes]."""
        return whole[: self.nbytes].view(self.dtype).as_strided(self.shape, self.stride)


class _Ahead:
    """Inputs of one checkpoint on their way to the device, before it needs them."""

    def __init__(self, saved: Sequence[SavedInput], arrived: dict[SavedInput, torch.Tensor], copy: Copy) -> None:
        self.saved = list(saved)
        self.arrived = arrived
        self.copy = copy


class InputSaver:
    """Save checkpoints' inputs in forward, where ``source`` is or sharded, and restore them in backward."""

    def __init__(
        self,
        device: torch.device,
        source: MemorySource,
        sharding: Callable[[], ActivationShards | None],
        copies: Copies,
    ) -> None:
        """sharding: asked at each checkpoint; None: inputs are saved whole."""
        self._device = device
        self._source = source
        self._sharding = sharding
        self._copies = copies
        self._known = WeakTensorKeyDictionary()  # inputs that are there -> weak references to their saved inputs
        self._ahead: _Ahead | None = None

    # ---------------------------------------------------------------- forward

    def takes(self, value: Any) -> bool:
        """True if ``value`` is saved here. Not: parameters and other leaves, which are there all the time; what is
        elsewhere, small, or not dense."""
        return (
            type(value) in (torch.Tensor, FakeTensor)
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
        """Save the tensors. Returns the saved input of each, in order, and the copy that must be waited for before they
        may be changed or freed."""
        self._forget_ahead()
        shards = self._sharding()
        saved: list[SavedInput] = []
        new: list[tuple[SavedInput, torch.Tensor]] = []
        for tensor in tensors:
            entry = self._look_up(tensor)
            if entry is None:
                entry = SavedInput(tensor)
                self._known[tensor] = weakref.ref(entry)
                new.append((entry, tensor))
            elif all(entry is not other for other, _ in new):
                entry.stay(tensor)
            saved.append(entry)
        return saved, self._store(new, shards)

    def _look_up(self, tensor: torch.Tensor) -> SavedInput | None:
        known = self._known.get(tensor)
        entry: SavedInput | None = None if known is None else known()
        return entry if entry is not None and entry.unchanged() else None

    def _store(self, new: Sequence[tuple[SavedInput, torch.Tensor]], shards: ActivationShards | None) -> Copy:
        lengths = [entry.nbytes if shards is None else shards.part_nbytes(entry.nbytes) for entry, _ in new]
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + -(-length // _ALIGNMENT) * _ALIGNMENT)
        if not new:
            return Copy((), None, self._device)
        region = self._source.take(starts[-1])
        pairs: list[Pair] = []
        for (entry, tensor), start, length in zip(new, starts, lengths, strict=False):
            flat = tensor.detach().as_strided((tensor.numel(),), (1,))
            entry.region, entry.offloaded = region, region.memory.narrow(0, start, length)
            part = flat.view(torch.uint8)
            if shards is not None:
                entry.checksum = checksum(flat)
                part, _ = shards.part(part)
            pairs.append((part, entry.offloaded[: part.numel()]))
        if self._source.location == HOST:
            return self._copies.launch(pairs)
        for part, offloaded in pairs:
            offloaded.copy_(part)
        return Copy((), None, self._device)

    # ---------------------------------------------------------------- backward

    @torch.no_grad()
    def restore(self, saved: Sequence[SavedInput], before: Sequence[SavedInput], what: str) -> list[torch.Tensor]:
        """Return the tensors of ``saved`` on the device, without gradients.

        Args:
            before: what is needed next, whose way begins now.
            what: the checkpoint, for messages.

        Raises RuntimeError if one has been written into, and as :meth:`ActivationShards.gather` does.
        """
        if not all(entry.unchanged() for entry in saved):
            raise RuntimeError(_written_into(what))
        entries = list(dict.fromkeys(entry for entry in saved if entry.resident is None))
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.saved != entries:
            if ahead is not None:
                ahead.copy.wait()
            ahead = self._fetch(entries)
        ahead.copy.wait()
        following = list(dict.fromkeys(entry for entry in before if entry.resident is None))
        if following and self._source.location == HOST:
            self._ahead = self._fetch(following)
        wholes = self._gather(entries, ahead.arrived, what)
        found = {entry: entry.from_bytes(wholes[entry]) for entry in entries}
        return [entry.resident if entry.resident is not None else found[entry] for entry in saved]

    def _fetch(self, entries: Sequence[SavedInput]) -> _Ahead:
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
        return _Ahead(entries, arrived, copy)

    def _gather(
        self, entries: Sequence[SavedInput], arrived: dict[SavedInput, torch.Tensor], what: str
    ) -> dict[SavedInput, torch.Tensor]:
        parted = [entry for entry in entries if entry.checksum is not None]
        shards = self._sharding()
        if not parted or shards is None:
            return arrived
        sums = [entry.checksum for entry in parted if entry.checksum is not None]
        wholes = shards.gather([arrived[entry] for entry in parted], sums, what)
        return {**arrived, **dict(zip(parted, wholes, strict=True))}

    def _forget_ahead(self) -> None:
        """A new forward: what has been fetched was not needed."""
        if self._ahead is not None:
            self._ahead.copy.wait()
            self._ahead = None

    def memory(self) -> list[torch.Tensor]:
        """Buffers that are not in use now."""
        return self._source.memory()


def _written_into(what: str) -> str:
    return (
        f"one of the variables needed for gradient computation has been modified by an inplace operation: an input of "
        f"{what} was written into after the call, so it cannot be computed again; change a copy of it instead"
    )
