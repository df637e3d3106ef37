"""Parameter coordinator: executes the `FetchSchedule` with gathers, waits and releases.

Modules' hooks report the uses of *units* (a module, or a subtree gathered as one). A forward use lasts from the
module's pre-forward hook to its forward hook. A backward use begins when a gradient reaches one of the outputs; it
ends when a use begins that is not inside it, because autograd runs nodes in reverse order of their creation: by then
everything that the unit did in its forward has been undone. Gradient hooks could not tell (frozen weights have none).

All ranks call everything here in the same order, by running the same model.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from zerolite.comm import Communicator
from zerolite.comm.flight import Mismatch
from zerolite.offload.shard_reader import ShardReader
from zerolite.utils.accelerator import address
from zerolite.utils.memory_items import DISK
from zerolite.utils.nested import find_in_objects
from zerolite.zero.buffer import take_values
from zerolite.zero.observers import Observers
from zerolite.zero.stage3.fetch_plan import Fetch, FetchLimits
from zerolite.zero.stage3.fetch_schedule import FetchSchedule
from zerolite.zero.stage3.partitioned_parameter import (
    AVAILABLE,
    NOT_AVAILABLE,
    PartitionedParameter,
    finish,
    gather,
    handle_of,
    launch,
    refresh,
)
from zerolite.zero.stage3.released_parameter import close_all, open_all

_current_graph_task = torch._C._current_graph_task_id


class Unit:
    """What is gathered as one: a module or a subtree. ``uses`` is how many of its uses are open, in which its values
    are there; ``inside`` the module in it that was called without it, in the use under way."""

    __slots__ = ("index", "inside", "name", "uses")

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.uses = 0
        self.inside: torch.nn.Module | None = None

    def reset(self) -> None:
        """No use is open any more."""
        self.uses, self.inside = 0, None


class GatherListener(Protocol):
    """What is told of gathers before this rank launches them, on all ranks in the same order."""

    def before_launch(self, indices: Sequence[int]) -> None:
        """These parameters are about to be gathered, in one launch."""

    def before_external(self, unit: int, index: int) -> None:
        """From now on ``unit`` gathers a parameter that it turns out to use."""


class StepLinks(NamedTuple):
    """What the coordinator calls. begin_backward: when a backward has begun. on_use_end(unit): when a unit's backward
    has ended, on all ranks in the same order."""

    observers: Observers
    begin_backward: Callable[[], None]
    on_use_end: Callable[[int], None]


class Use:
    """One forward of a unit, remembered by the hooks on its outputs until its backward. ``start`` and ``end`` are
    times of a clock that ticks at every begin and end, so that nesting is a comparison."""

    __slots__ = ("end", "start", "task", "unit")

    def __init__(self, unit: Unit, start: int) -> None:
        self.unit = unit
        self.start = start
        self.end = start
        self.task = -1  # the backward (autograd's graph task) that has entered it last

    def contains(self, other: Use) -> bool:
        return self.start <= other.start and other.end <= self.end


class _OnGradient:
    """A hook on an output. Graphs outlive backwards (whoever keeps a loss keeps its graph), so it knows the
    coordinator weakly."""

    __slots__ = ("coordinator", "use")

    def __init__(self, coordinator: PartitionedParameterCoordinator, use: Use) -> None:
        self.coordinator = coordinator.itself
        self.use = use

    def __call__(self, gradient: torch.Tensor) -> None:
        coordinator = self.coordinator()
        if coordinator is not None:
            coordinator.on_output_gradient(self.use)


class PartitionedParameterCoordinator:
    """See the module. ``handles[i]`` is parameter ``i`` of the schedule; ``units[u]`` lists unit ``u``'s parameters.

    Gathers follow the uses of units, so a rank whose data lead it through other units, forward or backward, would
    gather other parameters than the rest. A model's ranks must run the same units; what some of them may skip belongs
    in one unit (``leaf_modules``). Everything else here follows from the sequence of uses alone.
    """

    def __init__(
        self,
        handles: Sequence[PartitionedParameter],
        unit_names: Sequence[str],
        units: Sequence[Sequence[int]],
        tables: Collection[int],
        limits: FetchLimits,
        reader: ShardReader,
        links: StepLinks,
    ) -> None:
        """tables: the units whose backward needs no values (``UnitPlan.is_table``)."""
        self._links, self._observers = links, links.observers
        self.handles = list(handles)
        self.units = [Unit(index, name) for index, name in enumerate(unit_names)]
        self._index = {id(handle): index for index, handle in enumerate(self.handles)}
        persistent = [index for index, handle in enumerate(self.handles) if handle.persistent]
        self.schedule = FetchSchedule(units, [handle.numel for handle in self.handles], persistent, limits)
        self.reader = reader
        self._tables = set(tables)
        self._stack: list[Use] = []  # forward uses under way
        self._backward: list[Use] = []  # backward uses under way
        self._recomputed: list[Use] = []  # forward uses that ended inside a backward and are still needed
        self._closed: list[PartitionedParameter] = []  # gathered for a backward that has not begun
        self._leaving = 0  # the unit whose outputs are looked at
        self._tasks: list[int] = []  # backwards under way, the outermost first
        self._step_open = False
        self._second_order = False  # a backward with create_graph: weights are needed again, nobody can say when
        self._shown: list[PartitionedParameter] = []  # not here, and with their shapes
        self._strays: list[int] = []  # gathered for a use that no hook will end; held to the end of the step
        self._clock = 0
        self._whole: list[tuple[PartitionedParameter, torch.Tensor]] = []  # trained and whole, with their values
        self._parts: list[torch.Tensor] = []
        self._shards: list[torch.Tensor] = []
        self._clock_of_updates = [0]  # how often shards have got new values
        self.used_outside = False  # since the last update, in a graph: gradients may come after a unit's backward
        self.thread = threading.get_ident()  # of the last forward
        self.calls = 0  # calls of the engine under way: user's hooks on the root run outside of its use
        # What engine.join() wants to know of: gathers, and parameters that a unit turns out to use.
        self.listener: GatherListener | None = None
        self._unit_of: dict[int, int] = {}  # id of a module -> the unit that it is, or is part of
        self.itself = weakref.ref(self)
        for index, handle in enumerate(self.handles):
            handle.manager, handle.key, handle.clock = self.itself, index + 1, self._clock_of_updates

    def listen(self, listener: GatherListener | None) -> None:
        """Tell ``listener`` of gathers from now on, instead of the one before; None: nobody."""
        self.listener = listener

    def assign(self, module: torch.nn.Module, unit: Unit) -> None:
        """``module`` is the unit, or part of it."""
        self._unit_of[id(module)] = unit.index

    def add_external(self, module: torch.nn.Module, handle: PartitionedParameter) -> None:
        """Gather a parameter with ``module``'s unit (the root where it has none) from its next use on. Called on all
        ranks."""
        index = self._index.get(id(handle))
        if index is None or handle.persistent:
            return
        unit = self.units[self._unit_of.get(id(module), 0)]
        if any(use.unit is unit for use in (*self._stack, *self._backward)):
            gather([handle])
        self._add_parameter(unit.index, index)

    def _add_parameter(self, unit: int, index: int) -> None:
        if index not in self.schedule.parameters_of(unit):
            if self.listener is not None:
                self.listener.before_external(unit, index)
            self.schedule.add_parameter(unit, index)
            if unit in self._tables:  # its values are needed from now on, in a backward that is under way too
                self._tables.remove(unit)
                for use in [use for use in self._backward if use.unit.index == unit]:
                    use.unit.uses += 1
                    self._execute(self.schedule.enter(unit))

    # ---------------------------------------------------------------- forward

    def enter_forward(self, unit: Unit) -> None:
        """Begin a use of ``unit``: before its forward, recomputations in backward included, or before the forward of
        a module inside it that is called without the unit."""
        if not self._stack:
            self._begin_outermost()
        self._clock += 1
        self._stack.append(Use(unit, self._clock))
        unit.uses += 1
        self._execute(self.schedule.enter(unit.index))

    def leave_forward(self, unit: Unit, module: torch.nn.Module, outputs: Any) -> None:
        """After the forward of the unit's module; ``outputs`` is None if it raised."""
        stack = self._stack
        if not stack or stack[-1].unit is not unit:
            if not any(use.unit is unit for use in stack):
                return  # swept meanwhile
            while stack[-1].unit is not unit:
                self._close(stack.pop())
        use = stack.pop()
        self._leaving = unit.index
        watched = self._watch(use, module, outputs) if torch.is_grad_enabled() else self._escaped(outputs)
        if self._tasks and any(self.handles[i].frozen for i in self.schedule.parameters_of(unit.index)):
            # A recomputation. What torch.utils.checkpoint compares afterwards is the frozen parameter itself.
            self._end(use)
            self._recomputed.append(use)
        else:
            self._close(use)
        if not stack and not self._tasks:
            if watched:
                self._close_available()
            else:
                self._end_step()

    def _close_available(self) -> None:
        """Between forward and backward, what stays gathered for the backward is closed as the rest is: somebody may
        take its values, whose memory is about to be released."""
        self._closed = [h for h in self.handles if h.status is AVAILABLE and not h.persistent and not h.held]
        close_all([handle.ref() for handle in self._closed])

    def _open_again(self) -> None:
        closed, self._closed = self._closed, []
        if closed:
            open_all([handle.ref() for handle in closed if handle.status is AVAILABLE])

    def _close(self, use: Use) -> None:
        self._end(use)
        self._release(self.schedule.leave(use.unit.index))

    def _end(self, use: Use) -> None:
        self._clock += 1
        use.end = self._clock
        use.unit.uses -= 1
        if not use.unit.uses:
            use.unit.inside = None

    def _begin_outermost(self) -> None:
        if self._tasks:
            if _current_graph_task() != -1:
                return  # a recomputation inside backward
            self.sweep()  # that backward ended with an exception
        self._open_again()
        self.used_outside = False  # since the last update, in a graph: gradients may come after a unit's backward
        self.thread = threading.get_ident()
        if not self._step_open:
            if torch.is_grad_enabled():
                for notify in self._observers.before_forward:
                    notify()
            self._begin_step("train" if torch.is_grad_enabled() else "eval")

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Around the engine's call of the model, with the user's hooks on it."""
        self.drop_failed()
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1
            if not self.calls and not self._step_open:
                self._let_strays_go()

    def drop_failed(self) -> None:
        """End what an exception has left open, outside of any forward and backward. Called where a new one begins."""
        if (self._stack or self._tasks) and _current_graph_task() == -1:
            self.sweep()

    def _watch(self, use: Use, module: torch.nn.Module, outputs: Any) -> bool:
        """Hook every tensor through which a backward may come: outputs, and what the module keeps as an attribute.
        True if there is one."""
        hook = _OnGradient(self, use)
        watched = False
        for value in module.__dict__.values():
            if type(value) is torch.Tensor and value.grad_fn is not None and not self._from_before(value, use):
                value.register_hook(hook)
        if type(outputs) is torch.Tensor and outputs._base is None and outputs.grad_fn is not None:  # nearly always
            if not self._from_before(outputs, use):
                outputs.register_hook(hook)
            return True
        for tensor in find_in_objects(outputs):
            self._check_escape(tensor)
            base = tensor._base
            if base is not None and base.grad_fn is not None and not self._from_before(base, use):
                base.register_hook(hook)  # a caller may change the view in place; then gradients come this way
            if tensor.grad_fn is not None:
                watched = True
                if not self._from_before(tensor, use):
                    tensor.register_hook(hook)
        return watched

    def _from_before(self, tensor: torch.Tensor, use: Use) -> bool:
        """The unit hands on what a use that ended before this one has made (T5's position bias). A gradient that
        reaches it comes when the backward of that use begins, and says nothing of this one; least of all of one that
        checkpointing repeats, whose hooks are the last on the tensor."""
        hooks = tensor._backward_hooks  # None after a change in place: then this use has made it
        if not hooks:
            return False
        ours = [hook for hook in hooks.values() if type(hook) is _OnGradient]
        return any(hook.coordinator is self.itself and hook.use.end < use.start for hook in ours)

    def _escaped(self, outputs: Any) -> bool:
        for tensor in find_in_objects(outputs):
            self._check_escape(tensor)
        return False

    def _check_escape(self, tensor: torch.Tensor) -> None:
        """A parameter, or an alias of one, that a unit returns stays gathered with whoever called the unit."""
        handle = handle_of(tensor) or handle_of(tensor._base)
        if handle is None and tensor.grad_fn is None and self._stack:
            storage = tensor.untyped_storage()._cdata
            live = (self.handles[i] for i in self.schedule.parameters_of(self._leaving))
            handle = next((h for h in live if h.full.untyped_storage()._cdata == storage), None)
        if handle is None or handle.persistent:
            return
        index = self._index.get(id(handle))
        caller = self._stack[-1].unit.index if self._stack else None
        if index is not None and (caller is None or index not in self.schedule.parameters_of(caller)):
            self._attach(index)

    # ---------------------------------------------------------------- backward

    def on_output_gradient(self, use: Use) -> None:
        """A gradient has reached an output of ``use``."""
        task = _current_graph_task()
        if use.task == task:
            return
        use.task = task
        if task not in self._tasks:
            self._begin_task(task)
        if torch.is_grad_enabled():
            self._second_order = True
        open_uses = self._backward
        position = len(open_uses)
        while position:
            last = open_uses[position - 1]
            if last.task != task or last.contains(use):
                break
            position -= 1
            if not use.contains(last):  # else: both return the same tensor, whose hooks run from the inside out
                del open_uses[position]
                self._end_backward_use(last)
        open_uses.insert(position, use)
        if use.unit.index in self._tables:
            for index in self.schedule.parameters_of(use.unit.index):
                self.show_shape(self.handles[index])
        else:
            use.unit.uses += 1
            self._execute(self.schedule.enter(use.unit.index))

    def _end_backward_use(self, use: Use) -> None:
        if self._recomputed:
            self._close_recomputed(use.unit)
        if use.unit.index not in self._tables:
            use.unit.uses -= 1
            if not self._second_order:
                self._release(self.schedule.leave(use.unit.index))
        self._links.on_use_end(use.unit.index)

    def show_shape(self, handle: PartitionedParameter) -> None:
        """A gradient comes to a parameter whose values are not here; until the backward ends it has its shape."""
        handle.show_shape()
        self._shown.append(handle)

    def _hide_shapes(self) -> None:
        shown, self._shown = self._shown, []
        for handle in shown:
            if handle.status is NOT_AVAILABLE:
                handle.drop()

    def _close_recomputed(self, unit: Unit | None) -> None:
        """End the recomputed forward uses of ``unit`` (None: all)."""
        mine = [use for use in self._recomputed if unit is None or use.unit is unit]
        self._recomputed = [use for use in self._recomputed if unit is not None and use.unit is not unit]
        for use in mine:
            self._release(self.schedule.leave(use.unit.index))

    def _begin_task(self, task: int) -> None:
        """A backward begins, perhaps inside another (reentrant checkpointing)."""
        self._open_again()
        if not self._tasks and not self._step_open:
            self._begin_step("backward")
        self._tasks.append(task)
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._end_task, task))
        if not self._stack:  # torch.autograd.grad inside a forward is no backward of the engine's
            self._links.begin_backward()

    def _end_task(self, task: int) -> None:
        if task not in self._tasks:
            return  # swept
        del self._tasks[self._tasks.index(task) :]
        while self._backward and self._backward[-1].task == task:
            self._end_backward_use(self._backward.pop())
        if self._tasks:
            return
        while self._backward:
            self._end_backward_use(self._backward.pop())
        self._close_recomputed(None)
        if not self._stack and not self._second_order:
            self._end_step()

    # ---------------------------------------------------------------- steps of the schedule

    def _begin_step(self, kind: str) -> None:
        self._step_open = True
        self.schedule.begin_step(kind)

    def _end_step(self) -> None:
        self._step_open = False
        self._release(self.schedule.end_step())
        self._hide_shapes()
        self._let_strays_go()
        self.reader.forget()

    def sweep(self) -> None:
        """End everything under way and release all that nobody holds: after an exception, and when values have
        changed. Called on all ranks."""
        self._step_open = self._second_order = False
        for use in (*self._stack, *self._backward):
            use.unit.reset()
        self._hide_shapes()
        self._stack.clear()
        self._backward.clear()
        self._recomputed.clear()
        self._tasks.clear()
        self._release(self.schedule.forget())
        self._let_strays_go()
        self.reader.forget()

    def _let_strays_go(self) -> None:
        if self._strays:
            strays, self._strays = self._strays, []
            self.unhold(strays)

    def on_update(self) -> None:
        """After an update: shards have new values, so whole copies are stale. Released, or gathered anew where they
        stay. Called on all ranks, by the publisher."""
        self._clock_of_updates[0] += 1
        self.used_outside = False
        self.sweep()
        stale = [handle for handle in self.handles if handle.status is AVAILABLE and handle.trained]
        with self._observers.gathering():
            refresh(stale)

    @torch.no_grad()
    def collect_writes(self) -> None:
        """What somebody has written into parameters that stay whole, alike on all ranks, reaches their shards."""
        if any(handle.view is not view for handle, view in self._whole):
            self.look_at_whole()
        for handle, view in self._whole:
            if address(handle.parameter) != address(view):
                take_values(handle.name, handle.parameter, view)
        if self._shards:
            self.reader.write(self._shards, self._parts)

    def look_at_disk(self) -> None:
        """Find the parameters whose shards are on disk."""
        on_disk = {i: handle.shard.numel() for i, handle in enumerate(self.handles) if handle.tier.place == DISK}
        self.schedule.set_on_disk(on_disk)

    def look_at_whole(self) -> None:
        """Find the trained parameters that stay whole, and their parts."""
        kept = [handle for handle in self.handles if handle.persistent and handle.trained]
        self._whole = [(handle, handle.view) for handle in kept]
        self._parts, self._shards = [], []
        apart = [handle for handle in kept if handle.storage is not None]
        self._parts = [handle.own_part() for handle in apart]
        self._shards = [handle.shard[: len(part)] for handle, part in zip(apart, self._parts, strict=True)]

    # ---------------------------------------------------------------- uses that no hook sees

    def on_read(self, handle: PartitionedParameter) -> None:
        """A parameter that is not available was read from its module, inside some forward or backward: gather it, for
        the unit under way from now on. All ranks read alike, whatever each of them then does with the parameter."""
        task = _current_graph_task()
        if task != -1 and not self._tasks:  # a user's hook, before any output's
            self._begin_task(task)
        index = self._index.get(id(handle))
        if index is None:
            gather([handle])
            return
        self._attach(index)

    @property
    def busy(self) -> bool:
        """Whether a forward or backward is under way."""
        return bool(self._stack or self._tasks or self.calls) or _current_graph_task() != -1

    def _attach(self, index: int) -> None:
        if self._stack and not self._tasks:
            self._add_parameter(self._stack[-1].unit.index, index)
        self.gather_stray([index])

    def gather_stray(self, indices: Iterable[int]) -> None:
        """Gather parameters for a use whose end no hook reports; they stay until the step of the schedule ends."""
        new = [index for index in indices if index not in self._strays]
        self.hold(new)
        self._strays += new

    def hold(self, indices: Sequence[int]) -> None:
        """Gather these parameters and keep them until :meth:`unhold`; calls nest. Called on all ranks."""
        with self._observers.gathering():
            gather([self.handles[index] for index in indices])
        for index in indices:
            self.handles[index].held += 1
        self.schedule.hold(indices)

    def unhold(self, indices: Sequence[int]) -> None:
        """End one :meth:`hold`. Called on all ranks."""
        for index in indices:
            self.handles[index].held -= 1
        self._release(self.schedule.unhold(indices))

    def let_go(self, indices: Sequence[int]) -> None:
        """End gathers that this rank has taken part in for the others."""
        for index in indices:
            started = self.handles[index].launch
            if started is not None:
                finish(started)
        self._release(indices)

    @property
    def comm(self) -> Communicator:
        """Of the gathers."""
        return self.handles[0].comm

    def index_of(self, handle: PartitionedParameter) -> int | None:
        """The schedule's number of a parameter of this model."""
        return self._index.get(id(handle))

    # ---------------------------------------------------------------- doing it

    def _execute(self, fetch: Fetch) -> None:
        release, starting, prefetch, needed, read = fetch
        watched = self._observers.on_gather_begin if starting or prefetch or needed else ()
        try:
            for notify in watched:
                notify()
            if release:
                self._release(release)
            if starting:
                self._launch(starting)
            if prefetch:
                self._launch(prefetch)
            if read:
                self.reader.ahead([self.handles[index] for index in read])
            for index in needed:
                started = self.handles[index].launch
                if started is not None:
                    finish(started)
        except RuntimeError as error:
            if type(error) not in (RuntimeError, Mismatch):
                raise  # out of memory, for one, is caught by its type
            raise type(error)(f"{error}\nThis rank stood at {self.where()}.") from error
        finally:
            if watched:
                for notify in self._observers.on_gather_end:
                    notify()

    def _launch(self, indices: Iterable[int]) -> None:
        handles = self.handles
        missing = [handles[index] for index in indices if handles[index].status is NOT_AVAILABLE]
        if missing:
            launch(missing)

    def _release(self, indices: Iterable[int]) -> None:
        for index in indices:
            handle = self.handles[index]
            if not handle.held and not handle.persistent:
                handle.release()

    def where(self) -> str:
        """At which use of which module this rank stands, for people."""
        forward = [use.unit.name or "the model" for use in self._stack]
        backward = [use.unit.name or "the model" for use in self._backward]
        return (
            f"{self.schedule.where()} (forward of {', '.join(forward) or 'nothing'}; backward of "
            f"{', '.join(backward) or 'nothing'})"
        )
