"""Tracker of a dry run: bytes by item and over time, and operations."""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd import _get_sequence_nr
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from zerolite.monitor.flop_formulas import OperatorFlops
from zerolite.planning import shape_cache
from zerolite.planning.fake_backend import DryFakeMode
from zerolite.planning.training_step import STEP
from zerolite.utils.accelerator import fake_mode, is_fake
from zerolite.utils.memory_tags import DEVICE, DISK, HOST, ITEMS, OTHER, PLACES, listeners
from zerolite.utils.nested import find_tensors

ORIGINAL_MODEL = "original_model"
"""An item of the host's memory beside those of an engine: what a model is made in, until one takes it over."""


class TracePoint(NamedTuple):
    """Point of a run."""

    phase: str
    module: str
    op: str


class PeakMoment(NamedTuple):
    """The moment of the most bytes so far."""

    nbytes: int
    items: dict[str, int]
    point: TracePoint


class Flops(NamedTuple):
    """FLOPs of one rank's step.

    Attributes:
        model: of one forward and backward of each micro-batch.
        recomputed: of forwards that activation checkpointing runs again inside backward.
        unknown: names of operators that ran and have no formula.
        of_modules: all of them by the innermost module.
    """

    model: int
    recomputed: int
    unknown: frozenset[str]
    of_modules: dict[str, int]


_NOWHERE = TracePoint("", "", "")
_DEVICE_OF = torch.ops.prim.device.default


class ModulesAtWork:
    """The innermost module that computes now, by qualified name, in forward and in backward.

    In backward it is the module in whose forward the node that runs was made: nodes are numbered in the order in which
    they are made, so the numbers at which modules began and ended tell.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._owners: dict[int, str] = {}  # by parameter
        self._stack: list[str] = []
        self._starts: list[int] = []  # number of the next node where the module at work changed, ascending
        self._changed: list[str] = []

    def name(self, model: torch.nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._owners = {id(p): name.rpartition(".")[0] for name, p in model.named_parameters()}

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, forwards of modules are seen."""

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
        """The graph so far is gone: a step has ended."""
        self._stack.clear()
        self._starts.clear()
        self._changed.clear()

    def now(self) -> str:
        if self._stack:
            return self._stack[-1]
        node = torch._C._current_autograd_node()
        if node is None or not self._starts:
            return ""
        leaf = getattr(node, "variable", None)  # of the node that accumulates a parameter's gradient
        if leaf is not None:
            return self._owners.get(id(leaf), "")
        place = bisect_right(self._starts, node._sequence_nr()) - 1
        return self._changed[place] if 0 <= place else ""

    def _note(self) -> None:
        self._starts.append(_get_sequence_nr())
        self._changed.append(self._stack[-1] if self._stack else "")


class _TrackedStorage(NamedTuple):
    """A storage that counts. ref: keeps the callback at its death."""

    ref: weakref.ref[torch.UntypedStorage]
    nbytes: int
    item: str
    place: str


class MemoryTracker(TorchDispatchMode):
    """Tracker of every storage that operators make, until it dies.

    ``item`` is what new storages belong to and ``place`` where they are, unless a part of the engine says otherwise
    (memory_tags.py), and ``phase`` what is going on; the caller sets all three. Memory inside an operator is not seen.
    """

    def __init__(self, apart: bool = True) -> None:
        """apart: whether the device has memory of its own. The results of operators are then where their operands are,
        and the host's memory does not hold the device's."""
        super().__init__()
        self.item, self.place = OTHER, DEVICE
        self.phase = "initialize"
        self.modules = ModulesAtWork()
        self.items = {place: dict.fromkeys((*ITEMS, ORIGINAL_MODEL), 0) for place in PLACES}  # bytes now
        self.nbytes = dict.fromkeys(PLACES, 0)  # the sums of these
        self._apart = apart
        self._storages: dict[int, _TrackedStorage] = {}
        self._unreported: tuple[int, TracePoint] | None = None  # the storage made last, whose item may not be known yet
        self._peak = PeakMoment(0, self._on_device(), _NOWHERE)
        self._largest = self._items_by_place()
        self._host_peak = 0
        self._op = ""
        self._events: list[tuple[str, int, str, str]] | None = None  # item, bytes, phase, module
        self._before: dict[str, int] = {}
        self._operators = OperatorFlops()
        self._flops: list[int] | None = None  # the model's, and recomputed ones
        self._flops_of: Counter[str] = Counter()

    # ---------------------------------------------------------------- running

    def __enter__(self) -> MemoryTracker:
        listeners.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        listeners.remove(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled while memory is followed, and torch's guard against that takes its time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF and is_fake(args[0]) and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # asked as often as anything is computed
        given = kwargs or {}
        self._op, mode = func, fake_mode()
        if type(mode) is DryFakeMode:  # asked here already: its own turn would come after another dispatch by torch
            out = shape_cache.cached_call(mode, func, args, given, lambda: func(*args, **given))
        else:
            out = func(*args, **given)
        if self._flops is not None and self.phase != STEP:
            # A node of backward that records gradients runs a forward again: activation checkpointing.
            again = torch.is_grad_enabled() and torch._C._current_autograd_node() is not None
            flops = self._operators.of_call(func, args, given, out)
            if flops:
                self._flops[again] += flops
                self._flops_of[self.modules.now()] += flops
        before = self.place
        if self._apart and self.nbytes[HOST] + self.nbytes[DISK] and given.get("device") is None:
            self.place = self._place_of_result(args)
        if is_fake(out):
            self._see(out)
        else:
            for tensor in find_tensors(out):
                self._see(tensor)
        self._op, self.place = "", before
        return out

    def _place_of_result(self, args: Any) -> str:
        """The host, if what an engine keeps off the device is among the operands and nothing but numbers is on it."""
        tracked = [
            self._storages.get(operand.untyped_storage()._cdata)
            for operand in find_tensors(args)
            if operand.layout is torch.strided and operand.dim() > 0
        ]
        places = {entry.place for entry in tracked if entry is not None and entry.item != ORIGINAL_MODEL}
        return HOST if places and DEVICE not in places else self.place

    @property
    def peak(self) -> PeakMoment:
        """The device's fullest moment."""
        self._report_last()
        return self._peak

    @property
    def largest(self) -> dict[str, dict[str, int]]:
        """Bytes of each item at its own most, by place."""
        self._report_last()
        return self._largest

    @property
    def host_peak(self) -> int:
        """Bytes, since the beginning or :meth:`reset_host_peak`."""
        self._report_last()
        return self._host_peak

    def reset_peak(self) -> None:
        """Begin anew with the fullest moment and the items' largest."""
        self._report_last()
        self._peak = PeakMoment(self.nbytes[DEVICE], self._on_device(), TracePoint(self.phase, "", ""))
        self._largest = self._items_by_place()

    def reset_host_peak(self) -> None:
        """Begin anew with the most in the host's memory."""
        self._report_last()
        self._host_peak = self._in_host_memory()

    @contextlib.contextmanager
    def without_peaks(self) -> Iterator[None]:
        """Inside, nothing is the most: memory that a real job does not take."""
        self._report_last()
        before = self._peak, {place: dict(items) for place, items in self._largest.items()}, self._host_peak
        yield
        self._report_last()
        self._peak, self._largest, self._host_peak = before

    def record(self) -> None:
        """Begin to keep every change, for :meth:`timeline`, and to count FLOPs of forwards and backwards."""
        self._report_last()
        self._events, self._before = [], self._on_device()
        self._flops = [0, 0]

    @property
    def flops(self) -> Flops:
        """Since :meth:`record`."""
        model, recomputed = self._flops or (0, 0)
        return Flops(model, recomputed, frozenset(self._operators.unknown), dict(self._flops_of))

    def timeline(self, points: int) -> list[tuple[dict[str, int], str, str]]:
        """(bytes by item, phase, module) at no more than ``points`` moments since :meth:`record`: of equal numbers of
        changes the fullest one."""
        self._report_last()
        events, self._events = self._events or [], None
        width = max(1, -(-len(events) // points))
        items, total = dict(self._before), sum(self._before.values())
        course, best = [], (-1, items, "", "")
        for number, (item, nbytes, phase, module) in enumerate(events, 1):
            items[item] += nbytes
            total += nbytes
            if total > best[0]:
                best = (total, dict(items), phase, module)
            if number % width == 0 or number == len(events):
                course.append(best[1:])
                best = (-1, items, "", "")
        return course

    # ---------------------------------------------------------------- what the engine says

    def tag_memory(self, storage: torch.UntypedStorage, item: str, place: str) -> None:
        key = storage._cdata
        tracked = self._storages.get(key)
        if tracked is None:
            self._add(storage, item, place)
        elif (tracked.item, tracked.place) != (item, place):
            fresh = self._unreported is not None and self._unreported[0] == key
            if not fresh:
                self._report_last()
            self._storages[key] = tracked._replace(item=item, place=place)
            self._change(tracked.item, tracked.place, -tracked.nbytes)
            self._change(item, place, tracked.nbytes)
            if not fresh:
                self._report(tracked.item, tracked.place, -tracked.nbytes, self._point())
                self._report(item, place, tracked.nbytes, self._point())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """``storage`` is there, and may have another length than before."""
        tracked = self._storages.get(storage._cdata)
        if tracked is None:
            self._add(storage, self.item, self.place)
        elif tracked.nbytes != storage.nbytes():
            self._report_last()
            more = storage.nbytes() - tracked.nbytes
            self._storages[storage._cdata] = tracked._replace(nbytes=storage.nbytes())
            self._change(tracked.item, tracked.place, more)
            self._report(tracked.item, tracked.place, more, self._point())

    def claim(self, tensors: Iterable[torch.Tensor], item: str) -> None:
        """These are memory of ``item`` on the device."""
        for inner in (inner for tensor in tensors for inner in _tensors_with_memory(tensor)):
            self.tag_memory(inner.untyped_storage(), item, DEVICE)

    # ---------------------------------------------------------------- inside

    def _see(self, tensor: Any) -> None:
        if is_fake(tensor):
            if tensor.layout is torch.strided and tensor.fake_device.type != "meta":
                self.resized(tensor.untyped_storage())
        elif not tensor.is_meta:  # of a model's structure alone, which has no memory in a real run either
            for inner in _tensors_with_memory(tensor):
                self.resized(inner.untyped_storage())

    def _add(self, storage: torch.UntypedStorage, item: str, place: str) -> None:
        """It is told when the next change comes: until then it may be said that it is somewhere else."""
        self._report_last()
        # torch makes one Python object for a storage and keeps it as long as the memory, so the end of its weak
        # reference is the release. The address may be used again by then: it is the key until that moment alone.
        key, nbytes = storage._cdata, storage.nbytes()
        self._storages[key] = _TrackedStorage(weakref.ref(storage, lambda _: self._released(key)), nbytes, item, place)
        self._change(item, place, nbytes)
        self._unreported = key, self._point()

    def _report_last(self) -> None:
        fresh, self._unreported = self._unreported, None
        if fresh is not None:
            _, nbytes, item, place = self._storages[fresh[0]]
            self._report(item, place, nbytes, fresh[1])

    def _released(self, key: int) -> None:
        self._report_last()
        tracked = self._storages.pop(key)
        self._change(tracked.item, tracked.place, -tracked.nbytes)
        self._report(tracked.item, tracked.place, -tracked.nbytes, self._point())

    def _change(self, item: str, place: str, nbytes: int) -> None:
        self.items[place][item] += nbytes
        self.nbytes[place] += nbytes

    def _report(self, item: str, place: str, nbytes: int, where: TracePoint) -> None:
        """Report a change to the records of the fullest moment, and to the course of the device."""
        largest, now = self._largest[place], self.items[place][item]
        if now > largest[item]:
            largest[item] = now
        if nbytes > 0:  # less than before is never the most
            self._host_peak = max(self._host_peak, self._in_host_memory())
        if place != DEVICE or not nbytes:
            return
        if self.nbytes[DEVICE] > self._peak.nbytes:
            self._peak = PeakMoment(self.nbytes[DEVICE], self._on_device(), where)
        if self._events is not None:
            self._events.append((item, nbytes, where.phase, where.module))

    def _point(self) -> TracePoint:
        # To ask autograd for the module takes longer than all else here, and most answers would be thrown away.
        if self._events is None and self.nbytes[DEVICE] <= self._peak.nbytes:
            return _NOWHERE
        return TracePoint(self.phase, self.modules.now(), str(self._op))

    def _in_host_memory(self) -> int:
        return self.nbytes[HOST] + (0 if self._apart else self.nbytes[DEVICE])

    def _on_device(self) -> dict[str, int]:
        return {item: self.items[DEVICE][item] for item in ITEMS}

    def _items_by_place(self) -> dict[str, dict[str, int]]:
        return {place: dict(items) for place, items in self.items.items()}


def _tensors_with_memory(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own behind ``tensor``."""
    if is_fake(tensor) or type(tensor) in (torch.Tensor, torch.nn.Parameter):
        if tensor.layout is torch.strided:
            yield tensor
        return
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        for name in wrapper.__tensor_flatten__()[0]:
            yield from _tensors_with_memory(getattr(wrapper, name))
