"""Tracker of the operators that run: memory by item and over time, and FLOPs."""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from zerolite.monitor.flops import Flops
from zerolite.planning import shape_cache
from zerolite.planning.fake_backend import DryFakeMode
from zerolite.planning.result import Peak, TimePoint
from zerolite.planning.training_step import STEP
from zerolite.utils.accelerator import is_fake
from zerolite.utils.memory_tags import BUCKETS, DEVICE, DISK, GRADIENTS, HOST, ITEMS, LOCATIONS, OTHER, listeners
from zerolite.utils.nested import find_tensors
from zerolite.utils.torch_private import current_node, fake_mode, next_sequence_number, sequence_number

ORIGINAL_MODEL = "original_model"
"""Item of host memory that is not the engine's: the model before the engine takes it over."""


_Place = tuple[str, str, str]
"""Phase, module and operator."""

_DEVICE_OF = torch.ops.prim.device.default


class RunningModules:
    """Innermost module that computes now, in forward and in backward, by qualified name.

    In backward it is the module whose forward has made the current autograd node. Autograd numbers nodes in the order
    in which they are made, so the numbers at which modules began and ended identify it. No hooks on tensors are needed.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._owners: dict[int, str] = {}  # module by parameter
        self._stack: list[str] = []
        self._starts: list[int] = []  # number of the next node at each change of the current module, ascending
        self._changed: list[str] = []  # the current module after each change

    def name(self, model: torch.nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._owners = {id(p): name.rpartition(".")[0] for name, p in model.named_parameters()}

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Context in which hooks follow the forwards of all modules."""

        def enter(module: torch.nn.Module, args: Any) -> None:
            self._stack.append(self._names.get(id(module), self.now()))
            self._note()

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            if self._stack:
                self._stack.pop()
            self._note()

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def forget(self) -> None:
        """Forget all nodes so far. Called after a step, when the graph is freed."""
        self._stack.clear()
        self._starts.clear()
        self._changed.clear()

    def now(self) -> str:
        """Return the current module; "" for the model itself, or if there is none."""
        if self._stack:
            return self._stack[-1]
        node = current_node()
        if node is None or not self._starts:
            return ""
        leaf = getattr(node, "variable", None)  # the parameter, of a node that accumulates its gradient
        if leaf is not None:
            return self._owners.get(id(leaf), "")
        change = bisect_right(self._starts, sequence_number(node)) - 1
        return self._changed[change] if change >= 0 else ""

    def _note(self) -> None:
        self._starts.append(next_sequence_number())
        self._changed.append(self._stack[-1] if self._stack else "")


class _TrackedStorage(NamedTuple):
    """Storage that is counted. ``ref`` has the callback that runs when it is freed."""

    ref: weakref.ref[torch.UntypedStorage]
    nbytes: int
    item: str
    location: str


class MemoryTracker(TorchDispatchMode):
    """Tracker of every storage that operators make, until it is freed. Memory inside an operator is not seen.

    Attributes:
        item: item of new storages, unless a component of the engine tags them (memory_tags.py).
        location: location of new storages: device, host or disk.
        phase: the current phase.
        items: bytes now, by location and item.
        nbytes: sums of ``items`` by location.
        flops: FLOPs of forward and backward since :meth:`count_anew`; None before it.
    """

    def __init__(self, separate_memory: bool = True) -> None:
        """
        Args:
            separate_memory: the device's memory is not the host's. Then results of operators are where their operands
                are, and host memory does not include the device's.
        """
        super().__init__()
        self.item, self.location = OTHER, DEVICE
        self.phase = "initialize"
        self.modules = RunningModules()
        self.items = {location: dict.fromkeys((*ITEMS, ORIGINAL_MODEL), 0) for location in LOCATIONS}
        self.nbytes = dict.fromkeys(LOCATIONS, 0)
        self._separate_memory = separate_memory
        self._storages: dict[int, _TrackedStorage] = {}
        # The latest storage is reported only at the next change, because its tag comes after the operator has made it.
        self._unreported: tuple[int, _Place] | None = None
        self._peak = Peak(0, self._on_device())
        self._largest = self._items_by_location()
        self._host_peak = 0
        self._op = ""
        self._events: list[tuple[str, int, str]] | None = None  # item, bytes, phase
        self._before: dict[str, int] = {}
        self.flops: Flops | None = None
        self._passed = 0

    # ---------------------------------------------------------------- running

    def tag_new(self, item: str, location: str = DEVICE, phase: str | None = None) -> None:
        """Count new storages as ``item`` at ``location`` from now on, and begin a phase if one is given."""
        self.item, self.location, self.phase = item, location, phase or self.phase

    def __enter__(self) -> MemoryTracker:
        listeners.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        listeners.remove(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled while memory is tracked, and torch's guard against it costs time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF and is_fake(args[0]) and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # a shortcut: torch asks for the device with every operator
        given = kwargs or {}
        self._op, mode = func, fake_mode()
        if type(mode) is DryFakeMode:  # ask the cache here, before torch dispatches again to reach that mode
            out = shape_cache.cached_call(mode, func, args, given, lambda: func(*args, **given))
        else:
            out = func(*args, **given)
        if self.flops is not None:
            self._passed += self._bytes_passed(func, args, given, out)
            if self.phase != STEP:
                self.flops.add(func, args, given, out)
        before = self.location
        if self._separate_memory and self.nbytes[HOST] + self.nbytes[DISK] and given.get("device") is None:
            self.location = self._location_of_result(args)
        if is_fake(out):
            self._count(out)
        else:
            for tensor in find_tensors(out):
                self._count(tensor)
        self._op, self.location = "", before
        return out

    def _location_of_result(self, args: Any) -> str:
        """Return the host if an operand is offloaded and only 0-dim tensors are on the device; else ``location``."""
        tracked = [
            self._storages.get(id(operand.untyped_storage()))
            for operand in find_tensors(args)
            if operand.layout is torch.strided and operand.dim() > 0
        ]
        locations = {entry.location for entry in tracked if entry is not None and entry.item != ORIGINAL_MODEL}
        return HOST if locations and DEVICE not in locations else self.location

    @property
    def peak(self) -> Peak:
        """Moment of the most device memory since the beginning or :meth:`reset_peak`."""
        self._report_last()
        return self._peak

    @property
    def largest(self) -> dict[str, dict[str, int]]:
        """Largest bytes of each item since the beginning or :meth:`reset_peak`, by location."""
        self._report_last()
        return self._largest

    @property
    def host_peak(self) -> int:
        """Most bytes of host memory since the beginning or :meth:`reset_host_peak`."""
        self._report_last()
        return self._host_peak

    def reset_peak(self) -> None:
        """Reset :attr:`peak` and :attr:`largest` to the current memory."""
        self._report_last()
        self._peak = Peak(self.nbytes[DEVICE], self._on_device(), self.phase)
        self._largest = self._items_by_location()

    def reset_host_peak(self) -> None:
        """Reset :attr:`host_peak` to the current memory."""
        self._report_last()
        self._host_peak = self._in_host_memory()

    def record(self) -> None:
        """Start to record all changes, for :meth:`timeline`."""
        self._report_last()
        self._events, self._before = [], self._on_device()

    def count_anew(self) -> None:
        """Start to count operations."""
        self.flops, self._passed = Flops(), 0

    @property
    def counted(self) -> tuple[int, int]:
        """FLOPs of forward and backward, and bytes that passes over buckets of gradients have read and written there,
        since :meth:`count_anew`."""
        flops = self.flops or Flops()
        return flops.model + flops.recomputed, self._passed

    def _bytes_passed(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> int:
        """Return the bytes that an operator reads and writes, if it is a pass of the engine over gradients."""
        if func in shape_cache.VIEWS or func in shape_cache.UNREAD:
            return 0
        tensors = {id(tensor): tensor for tensor in find_tensors((args, kwargs, out)) if tensor.layout is torch.strided}
        tracked = [self._storages.get(id(tensor.untyped_storage())) for tensor in tensors.values()]
        if not any(entry is not None and entry.item in (BUCKETS, GRADIENTS) for entry in tracked):
            return 0
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def timeline(self, points: int = 1000) -> list[TimePoint]:
        """Return the memory of the device since :meth:`record` at some moments.

        There are at most ``points`` moments. Each is the one with the most memory among an equal number of changes.
        """
        self._report_last()
        events, self._events = self._events or [], None
        width = max(1, -(-len(events) // points))
        items, total = dict(self._before), sum(self._before.values())
        course: list[TimePoint] = []
        highest, best = -1, TimePoint(items, "")
        for number, (item, nbytes, phase) in enumerate(events, 1):
            items[item] += nbytes
            total += nbytes
            if total > highest:
                highest, best = total, TimePoint(dict(items), phase)
            if number % width == 0 or number == len(events):
                course.append(best)
                highest = -1
        return course

    # ---------------------------------------------------------------- listener of memory_tags

    def tag_memory(self, storage: torch.UntypedStorage, item: str, location: str) -> None:
        """Count ``storage`` as ``item`` at ``location``."""
        key = id(storage)
        tracked = self._storages.get(key)
        if tracked is None:
            self._add(storage, item, location)
        elif (tracked.item, tracked.location) != (item, location):
            fresh = self._unreported is not None and self._unreported[0] == key
            if not fresh:
                self._report_last()
            self._storages[key] = tracked._replace(item=item, location=location)
            self._change(tracked.item, tracked.location, -tracked.nbytes)
            self._change(item, location, tracked.nbytes)
            if not fresh:
                self._report(tracked.item, tracked.location, -tracked.nbytes, self._point())
                self._report(item, location, tracked.nbytes, self._point())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count ``storage``, which is new or may have changed its length."""
        tracked = self._storages.get(id(storage))
        if tracked is None:
            self._add(storage, self.item, self.location)
        elif tracked.nbytes != storage.nbytes():
            self._report_last()
            more = storage.nbytes() - tracked.nbytes
            self._storages[id(storage)] = tracked._replace(nbytes=storage.nbytes())
            self._change(tracked.item, tracked.location, more)
            self._report(tracked.item, tracked.location, more, self._point())

    def claim(self, tensors: Iterable[torch.Tensor], item: str) -> None:
        """Count ``tensors`` as ``item`` on the device."""
        for inner in (inner for tensor in tensors for inner in _tensors_with_memory(tensor)):
            self.tag_memory(inner.untyped_storage(), item, DEVICE)

    # ---------------------------------------------------------------- counting

    def _count(self, tensor: Any) -> None:
        if is_fake(tensor):
            if tensor.layout is torch.strided and tensor.fake_device.type != "meta":
                self.resized(tensor.untyped_storage())
        elif not tensor.is_meta:  # meta tensors have no memory in a real run either
            for inner in _tensors_with_memory(tensor):
                self.resized(inner.untyped_storage())

    def _add(self, storage: torch.UntypedStorage, item: str, location: str) -> None:
        """Count a new storage. It is reported at the next change, because the engine may tag it before."""
        self._report_last()
        # torch keeps one Python object for a storage as long as its memory exists, so the callback of a weak reference
        # is the release. It also removes the key, because the address may be used again.
        key, nbytes = id(storage), storage.nbytes()
        self._storages[key] = _TrackedStorage(
            weakref.ref(storage, lambda _: self._released(key)), nbytes, item, location
        )
        self._change(item, location, nbytes)
        self._unreported = key, self._point()

    def _report_last(self) -> None:
        fresh, self._unreported = self._unreported, None
        if fresh is not None:
            _, nbytes, item, location = self._storages[fresh[0]]
            self._report(item, location, nbytes, fresh[1])

    def _released(self, key: int) -> None:
        self._report_last()
        tracked = self._storages.pop(key)
        self._change(tracked.item, tracked.location, -tracked.nbytes)
        self._report(tracked.item, tracked.location, -tracked.nbytes, self._point())

    def _change(self, item: str, location: str, nbytes: int) -> None:
        self.items[location][item] += nbytes
        self.nbytes[location] += nbytes

    def _report(self, item: str, location: str, nbytes: int, where: _Place) -> None:
        """Update peaks and time line after a change of ``nbytes``."""
        largest, now = self._largest[location], self.items[location][item]
        if now > largest[item]:
            largest[item] = now
        if nbytes > 0:  # a release is never a peak
            self._host_peak = max(self._host_peak, self._in_host_memory())
        if location != DEVICE or not nbytes:
            return
        if self.nbytes[DEVICE] > self._peak.bytes:
            phase, module, op = where
            self._peak = Peak(self.nbytes[DEVICE], self._on_device(), phase, module, op=op)
        if self._events is not None:
            self._events.append((item, nbytes, where[0]))

    def _point(self) -> _Place:
        # Look up the module only at a peak: asking autograd takes longer than everything else here.
        if self.nbytes[DEVICE] <= self._peak.bytes:
            return self.phase, "", ""
        return self.phase, self.modules.now(), str(self._op).removesuffix(".default")

    def _in_host_memory(self) -> int:
        return self.nbytes[HOST] + (0 if self._separate_memory else self.nbytes[DEVICE])

    def _on_device(self) -> dict[str, int]:
        return {item: self.items[DEVICE][item] for item in ITEMS}

    def _items_by_location(self) -> dict[str, dict[str, int]]:
        return {location: dict(items) for location, items in self.items.items()}


def _tensors_with_memory(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield ``tensor``, or the tensors inside a wrapper subclass, that have memory of their own."""
    if is_fake(tensor) or type(tensor) in (torch.Tensor, torch.nn.Parameter):
        if tensor.layout is torch.strided:
            yield tensor
        return
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        for name in wrapper.__tensor_flatten__()[0]:
            yield from _tensors_with_memory(getattr(wrapper, name))
