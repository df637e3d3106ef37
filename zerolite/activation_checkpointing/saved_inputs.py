"""Saved inputs of checkpoints: copied to the host in forward, and back ahead of their use in backward.

The memory is pinned, and the copies run on a CUDA stream of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from zerolite.utils.accelerator import current_platform, is_fake
from zerolite.utils.memory_tags import ACTIVATIONS, HOST, tag_memory
from zerolite.utils.module_hook import finalize_before_exit
from zerolite.zero.flat import dense_strides

SMALLEST = 4096
"""Bytes: smaller inputs stay on the device."""
_ALIGNMENT = 512  # bytes: inputs begin at multiples of it in borrowed memory
_ALLOCATORS = 64  # bytes: operators compute the same bits for tensors that begin at multiples of it
_BLOCK = 4096  # bytes: lengths on the host are multiples of it, so that nearly equal inputs can share a buffer

Pair = tuple[torch.Tensor, torch.Tensor]
"""Source and target, of equal length and dtype."""


# -------------------------------------------------------------------- copies and memory


class Copy:
    """Copies in flight. Sources and targets stay alive until :meth:`wait`, which also runs when this is freed."""

    def __init__(self, pairs: Sequence[Pair] = (), event: torch.cuda.Event | None = None) -> None:
        self._pairs = list(pairs)
        self._event = event

    def wait(self) -> None:
        """Let the current stream wait for the copies. May be called again.

        So it can read the targets, and reuse the memory of the sources.
        """
        if self._event is not None:
            torch.cuda.current_stream(self._event.device).wait_event(self._event)
            self._event = None
        self._pairs.clear()

    def __del__(self) -> None:
        self.wait()


class Copies:
    """Stream of the copies in both directions. Without CUDA a copy is complete at once.

    One stream is enough: forward only copies to the host, and backward only from it. So a later copy never overwrites
    memory that an earlier one still reads.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def launch(self, pairs: Sequence[Pair]) -> Copy:
        """Start the copies."""
        if self._stream is None:
            for source, target in pairs:
                target.copy_(source)
            return Copy()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # it made the sources, and used the targets
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return Copy(pairs, event)

    def finish(self) -> None:
        """Let the host wait until no copy is in flight."""
        if self._stream is not None:
            self._stream.synchronize()


class BorrowedMemory:
    """Memory in use, uint8 [nbytes], which returns to its source when this object is freed."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory


class HostBuffers:
    """Page-aligned buffers on the host. They are reused, because registering one takes far longer than filling it.

    Copies to and from them run in the order of their launch, so returned memory may be reused at once.

    Attributes:
        free: buffers that are not in use.
    """

    def __init__(self, pin: bool, finish_copies: Callable[[], None]) -> None:
        """
        Args:
            pin: register the memory with CUDA.
            finish_copies: waits until no copy is in flight; called before memory is freed.
        """
        self._pin = pin
        self._finish_copies = finish_copies
        self.free: list[torch.Tensor] = []
        finalize_before_exit(self, finish_copies)

    def allocate(self, nbytes: int) -> BorrowedMemory:
        length = -(-nbytes // _BLOCK) * _BLOCK
        fitting = [index for index, memory in enumerate(self.free) if memory.numel() >= length]
        if fitting:
            memory = self.free.pop(min(fitting, key=lambda index: self.free[index].numel()))
        else:
            if self.free:  # free one that is too small: the number of buffers need not grow
                self._finish_copies()
                self.free.pop()
            with torch.inference_mode(False):
                memory = tag_memory(current_platform().host_memory(length, self._pin), ACTIVATIONS, HOST)
        borrowed = BorrowedMemory(memory)
        finalize_before_exit(borrowed, self.free.append, memory)
        return borrowed


# -------------------------------------------------------------------- inputs


class SavedInput:
    """An input that a checkpoint needs again in backward.

    It is saved in borrowed memory on the host. An input that several checkpoints share stays on the device, because it
    exists only once anyway.

    Attributes:
        resident: the tensor itself, if it stays on the device.
        offloaded: the saved bytes, uint8.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.nbytes = tensor.numel() * tensor.element_size()
        self.resident: torch.Tensor | None = None
        self.offloaded: torch.Tensor | None = None
        self._memory: BorrowedMemory | None = None
        self._version = tensor._version
        self._source: weakref.ref[torch.Tensor] = weakref.ref(tensor)
        self._changed = False

    def keep_resident(self, tensor: torch.Tensor) -> None:
        """Keep ``tensor`` itself instead of saved bytes."""
        self.resident, self._memory, self.offloaded = tensor, None, None

    def save(self, memory: BorrowedMemory, start: int) -> torch.Tensor:
        """Reserve bytes of ``memory`` from ``start`` on, and return them."""
        self._memory = memory
        self.offloaded = memory.memory.narrow(0, start, self.nbytes)
        return self.offloaded

    def unchanged(self) -> bool:
        """Return True if the tensor has not been written in place as long as it has existed."""
        source = self._source()
        self._changed = self._changed or (source is not None and source._version != self._version)
        return not self._changed

    def from_bytes(self, full: torch.Tensor) -> torch.Tensor:
        """Return the tensor that shares the memory of ``full``, uint8 [at least nbytes]."""
        return full[: self.nbytes].view(self.dtype).as_strided(self.shape, self.stride)


class _Prefetch(NamedTuple):
    """Copy of the inputs of one checkpoint to the device, before it needs them."""

    saved: list[SavedInput]
    arrived: dict[SavedInput, torch.Tensor]
    copy: Copy


class InputSaver:
    """Saver of checkpoints' inputs in forward, in memory of the host, which restores them in backward."""

    def __init__(self, device: torch.device) -> None:
        """device: the device that computes."""
        self._device = device
        self._copies = Copies(device)
        self.buffers = HostBuffers(device.type == "cuda", self._copies.finish)
        self._by_tensor = WeakTensorKeyDictionary()  # weak references to saved inputs, by the tensor
        self._prefetch: _Prefetch | None = None

    # ---------------------------------------------------------------- forward

    def accepts(self, value: Any) -> bool:
        """Return True if ``value`` is saved on the host.

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
            and not (value.is_inference() or value.is_conj() or value.is_neg())
            and value.storage_offset() * value.element_size() % _ALLOCATORS == 0
            and dense_strides(value) == value.stride()
        )

    @torch.no_grad()
    def save(self, tensors: Sequence[torch.Tensor]) -> tuple[list[SavedInput], Copy]:
        """Save the tensors. Return their saved inputs, and the copy to wait for before they are changed or freed."""
        self._prefetch = None  # of a backward that has not used it: a copy is waited for when it is freed
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
        return saved, self._store(new)

    def _look_up(self, tensor: torch.Tensor) -> SavedInput | None:
        reference = self._by_tensor.get(tensor)
        entry: SavedInput | None = None if reference is None else reference()
        return entry if entry is not None and entry.unchanged() else None

    def _store(self, new: Sequence[tuple[SavedInput, torch.Tensor]]) -> Copy:
        starts = [0]
        for entry, _ in new:
            starts.append(starts[-1] + -(-entry.nbytes // _ALIGNMENT) * _ALIGNMENT)
        if not new:
            return Copy()
        memory = self.buffers.allocate(starts[-1])
        pairs: list[Pair] = []
        for (entry, tensor), start in zip(new, starts, strict=False):
            flat = tensor.detach().as_strided((tensor.numel(),), (1,))
            pairs.append((flat.view(torch.uint8), entry.save(memory, start)))
        return self._copies.launch(pairs)

    # ---------------------------------------------------------------- backward

    @torch.no_grad()
    def restore(self, saved: Sequence[SavedInput], needed_next: Sequence[SavedInput], what: str) -> list[torch.Tensor]:
        """Return the tensors of ``saved`` on the device, without gradients.

        Args:
            saved: the inputs of a checkpoint.
            needed_next: inputs of the next checkpoint in backward, whose copy begins now.
            what: the checkpoint, for messages.

        Raises:
            RuntimeError: an input has been written in place.
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
            fetched = self._fetch(entries)
        fetched.copy.wait()
        following = list(dict.fromkeys(entry for entry in needed_next if entry.resident is None))
        if following:
            self._prefetch = self._fetch(following)
        tensors = {entry: entry.from_bytes(fetched.arrived[entry]) for entry in entries}
        return [entry.resident if entry.resident is not None else tensors[entry] for entry in saved]

    def _fetch(self, entries: Sequence[SavedInput]) -> _Prefetch:
        arrived: dict[SavedInput, torch.Tensor] = {}
        pairs: list[Pair] = []
        for entry in entries:
            assert entry.offloaded is not None
            arrived[entry] = torch.empty(entry.nbytes, dtype=torch.uint8, device=self._device)
            pairs.append((entry.offloaded, arrived[entry]))
        return _Prefetch(list(entries), arrived, self._copies.launch(pairs) if pairs else Copy())
