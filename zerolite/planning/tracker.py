"""Counts the memory of tensors, by item and over time, while a dry run executes."""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd import _get_sequence_nr
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from zerolite.accelerator import is_fake
from zerolite.memory_items import ITEMS, OTHER, listeners

HOST = "host"
"""Memory that is not the device's: what a model is made in, until an engine takes it over."""


class Place(NamedTuple):
    """Where a run is."""

    phase: str
    module: str
    op: str


class Fullest(NamedTuple):
    """The moment of the most bytes so far."""

    nbytes: int
    items: dict[str, int]
    place: Place


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


class _Known(NamedTuple):
    """A storage that counts. ref: keeps the callback at its death."""

    ref: weakref.ref[torch.UntypedStorage]
    nbytes: int
    item: str


class MemoryTracker(TorchDispatchMode):
    """Follows every storage that operators make, until it dies.

    ``item`` is what new storages belong to, unless a part of the engine says otherwise (zerolite.memory_items), and
    ``phase`` what is going on; the caller sets both. Memory inside an operator is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.item = OTHER
        self.phase = "initialize"
        self.modules = ModulesAtWork()
        self.items = dict.fromkeys((*ITEMS, HOST), 0)  # bytes now
        self.nbytes = 0  # of the device
        self.fullest = Fullest(0, dict.fromkeys(ITEMS, 0), Place("", "", ""))
        self.largest = dict(self.items)  # bytes of each item at its own most
        self._known: dict[int, _Known] = {}
        self._op = ""
        self._events: list[tuple[str, int, str, str]] | None = None  # item, bytes, phase, module
        self._before: dict[str, int] = {}

    # ---------------------------------------------------------------- running

    def __enter__(self) -> MemoryTracker:
        listeners.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        listeners.remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._op = func
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self._see(out)
        elif isinstance(out, (tuple, list)):
            for value in out:
                if isinstance(value, torch.Tensor):
                    self._see(value)
        self._op = ""
        return out

    def measure_from_here(self) -> None:
        """Begin anew with the fullest moment and the items' largest."""
        self.fullest = Fullest(self.nbytes, self._on_device(), Place(self.phase, "", ""))
        self.largest = dict(self.items)

    def record(self) -> None:
        """Begin to keep every change, for :meth:`course`."""
        self._events, self._before = [], self._on_device()

    def course(self, points: int) -> list[tuple[dict[str, int], str, str]]:
        """(bytes by item, phase, module) at no more than ``points`` moments since :meth:`record`: of equal numbers of
        changes the fullest one."""
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

    def own(self, storage: torch.UntypedStorage, item: str) -> None:
        known = self._known.get(storage._cdata)
        if known is None:
            self._count(storage, item)
        elif known.item != item:
            self._known[storage._cdata] = known._replace(item=item)
            self._change(known.item, -known.nbytes)
            self._change(item, known.nbytes)

    def resized(self, storage: torch.UntypedStorage) -> None:
        known = self._known.get(storage._cdata)
        if known is None:
            self._count(storage, self.item)
        elif known.nbytes != storage.nbytes():
            self._known[storage._cdata] = known._replace(nbytes=storage.nbytes())
            self._change(known.item, storage.nbytes() - known.nbytes)

    def claim(self, tensors: Iterable[torch.Tensor], item: str) -> None:
        """These are memory of ``item``."""
        for tensor in tensors:
            for inner in _plain(tensor):
                self.own(inner.untyped_storage(), item)

    # ---------------------------------------------------------------- inside

    def _see(self, tensor: torch.Tensor) -> None:
        if not is_fake(tensor) or tensor.layout is not torch.strided:
            for inner in _plain(tensor):
                self._see_storage(inner.untyped_storage())
            return
        self._see_storage(tensor.untyped_storage())

    def _see_storage(self, storage: torch.UntypedStorage) -> None:
        known = self._known.get(storage._cdata)
        if known is None:
            self._count(storage, self.item)
        elif known.nbytes != storage.nbytes():
            self.resized(storage)

    def _count(self, storage: torch.UntypedStorage, item: str) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._known[key] = _Known(weakref.ref(storage, lambda _: self._gone(key)), nbytes, item)
        self._change(item, nbytes)

    def _gone(self, key: int) -> None:
        known = self._known.pop(key)
        self._change(known.item, -known.nbytes)

    def _change(self, item: str, nbytes: int) -> None:
        if not nbytes:
            return
        self.items[item] += nbytes
        if self.items[item] > self.largest[item]:
            self.largest[item] = self.items[item]
        if item == HOST:
            return
        self.nbytes += nbytes
        fuller = self.nbytes > self.fullest.nbytes
        if not fuller and self._events is None:
            return
        module = self.modules.now()
        if fuller:
            self.fullest = Fullest(self.nbytes, self._on_device(), Place(self.phase, module, str(self._op)))
        if self._events is not None:
            self._events.append((item, nbytes, self.phase, module))

    def _on_device(self) -> dict[str, int]:
        return {item: self.items[item] for item in ITEMS}


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own behind ``tensor``."""
    if is_fake(tensor) or type(tensor) in (torch.Tensor, torch.nn.Parameter):
        if tensor.layout is torch.strided:
            yield tensor
        return
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        for name in wrapper.__tensor_flatten__()[0]:
            yield from _plain(getattr(wrapper, name))
