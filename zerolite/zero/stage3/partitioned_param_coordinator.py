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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from zerolite.comm.flight_recorder import Mismatch
from zerolite.offload.shard_reader import ShardReader
from zerolite.utils.memory_tags import DISK
from zerolite.utils.nested import find_in_objects
from zerolite.zero.observers import GATHER, Observers
from zerolite.zero.stage3.fetch_plan import Fetch, FetchLimits
from zerolite.zero.stage3.fetch_schedule import FetchSchedule
from zerolite.zero.stage3.module_hooks import Unit, Use
from zerolite.zero.stage3.param_group import ParamGroup, WholeParameters, refresh
from zerolite.zero.stage3.partitioned_parameter import AVAILABLE, NOT_AVAILABLE, PartitionedParameter, handle_of
from zerolite.zero.stage3.released_parameter import close_all, open_all
from zerolite.zero.stage3.units import UnitPlan

_current_graph_task = torch._C._current_graph_task_id
_transform_level = torch._C._functorch.maybe_current_level  # None outside of torch.func's transforms


class StepLinks(NamedTuple):
    """Callbacks of the coordinator. begin_backward: when a backward has begun. on_use_end(unit): when a unit's backward
    has ended, on all ranks in the same order."""

    observers: Observers
    begin_backward: Callable[[], None]
    on_use_end: Callable[[int], None]


class PartitionedParameterCoordinator:
    """See the module. ``handles[i]`` is parameter ``i`` of the schedule; ``units[u]`` lists unit ``u``'s parameters.

    Gathers follow the uses of units, so a rank whose data lead it through other units, forward or backward, would
    gather other parameters than the rest. A model's ranks must run the same units; what some of them may skip belongs
    in one unit (``leaf_modules``). Everything else here follows from the sequence of uses alone.
    """

    def __init__(
        self,
        group: ParamGroup,
        handles: Sequence[PartitionedParameter],
        plans: Sequence[UnitPlan],
        limits: FetchLimits,
        links: StepLinks,
    ) -> None:
        """group: that of ``handles``."""
        self._links, self._observers = links, links.observers
        self.group, self.comm = group, group.comm
        self.handles = list(handles)
        self.units = [Unit(index, plan.name, plan.is_table) for index, plan in enumerate(plans)]
        index_of = {id(handle.ref()): handle.index for handle in self.handles}
        units = [[index_of[id(parameter)] for parameter in plan.parameters] for plan in plans]
        persistent = [index for index, handle in enumerate(self.handles) if handle.persistent]
        self.schedule = FetchSchedule(units, [handle.numel for handle in self.handles], persistent, limits)
        self._stack: list[Use] = []  # forward uses under way
        self._backward: list[Use] = []  # backward uses under way
        self._recomputed: list[Use] = []  # forward uses that ended inside a backward and are still needed
        self._staying: set[int] = set()  # parameters of units that have ended and keep some for the backward
        self._closed: list[PartitionedParameter] = []  # gathered for a backward that has not begun
        self._tasks: list[int] = []  # backwards under way, the outermost first
        self._step_open = False
        self._second_order = False  # a backward with create_graph: weights are needed again, at an unknown time
        self._shown: list[PartitionedParameter] = []  # not here, and with their shapes
        self._strays: list[int] = []  # gathered for a use that no hook will end; held to the end of the step
        self._read_ahead: ShardReader | None = None  # that has read shards ahead in this step
        self._clock = 0
        self._trained: set[int] = set()
        self._whole = WholeParameters(group, ())  # of those
        self._used_outside = False  # since the last update, in a graph: gradients may come after a unit's backward
        self.thread = threading.get_ident()  # of the last forward
        self.calls = 0  # calls of the engine under way: user's hooks on the root run outside of its use
        self._unit_of: dict[int, int] = {}  # id of a module -> the unit that it is, or is part of
        self.itself = weakref.ref(self)
        group.serve(self)

    def assign(self, module: torch.nn.Module, unit: Unit) -> None:
        """``module`` is the unit, or part of it."""
        self._unit_of[id(module)] = unit.index

    def add_external(self, module: torch.nn.Module, handle: PartitionedParameter) -> None:
        """Gather a parameter with ``module``'s unit (the root where it has none) from its next use on. Called on all
        ranks."""
        if handle.group is not self.group or handle.persistent:
            return
        unit = self.units[self._unit_of.get(id(module), 0)]
        if any(use.unit is unit for use in (*self._stack, *self._backward)):
            self.group.gather([handle])
        self._add_parameter(unit, handle.index)

    def _add_parameter(self, unit: Unit, index: int) -> None:
        if index not in self.schedule.units[unit.index]:
            if self.group.listener is not None:
                self.group.listener.before_external(unit.index, index)
            self.schedule.add_parameter(unit.index, index)
            if unit.is_table:  # its values are needed from now on, in a backward that is under way too
                unit.need_values()
                for _ in [use for use in self._backward if use.unit is unit]:
                    unit.uses += 1
                    self._execute(self.schedule.enter(unit.index))

    def train(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """These are the parameters to which each update gives new values, from where their shards are by now."""
        of_group = (handle for p in parameters if (handle := handle_of(p)) is not None)
        self._trained = {handle.index for handle in of_group}
        trained_whole = [h for h in self.handles if h.persistent and h.index in self._trained]
        self._whole = WholeParameters(self.group, trained_whole)
        self.schedule.set_on_disk({h.index: h.shard.numel() for h in self.handles if h.placement.place == DISK})

    # ---------------------------------------------------------------- forward

    def enter_forward(self, unit: Unit) -> None:
        """Begin a use of ``unit``: before its forward, recomputations in backward included, or before the forward of
        a module inside it that is called without the unit."""
        if _transform_level() is not None:
            raise RuntimeError(
                f"module '{unit.name}' is called inside a transform of torch.func (grad, vmap, …), where "
                "stage 3 cannot gather its parameters; call a whole copy of the model: copy.deepcopy(engine.module)"
            )
        if not self._stack:
            self._begin_outermost()
        self._clock += 1
        self._stack.append(Use(self.itself, unit, self._clock))
        unit.uses += 1
        self._execute(self.schedule.enter(unit.index))

    def leave_forward(self, unit: Unit, module: torch.nn.Module, outputs: object) -> None:
        """End a use, after the forward of the unit's module; ``outputs`` is None if it raised."""
        stack = self._stack
        if not stack or stack[-1].unit is not unit:
            if not any(use.unit is unit for use in stack):
                return  # swept meanwhile
            while stack[-1].unit is not unit:
                self._end(stack.pop())
        use = stack.pop()
        watched = False
        if torch.is_grad_enabled():
            watched = self._watch(use, module, outputs)
        else:
            for tensor in find_in_objects(outputs):
                self._check_escape(unit, tensor)
        if self._tasks and any(self.handles[i].frozen for i in self.schedule.units[unit.index]):
            # A recomputation. What torch.utils.checkpoint compares afterwards is the frozen parameter itself.
            self._clock += 1
            use.close(self._clock)
            self._recomputed.append(use)
        else:
            self._end(use)
        if not stack and not self._tasks:
            if not watched:
                self._end_step()
            elif self._staying:
                self._close_available()

    def _end(self, use: Use) -> None:
        """End a forward use that is not under way in a backward."""
        self._clock += 1
        use.close(self._clock)
        index = use.unit.index
        released = self.schedule.leave(index)
        if released:
            self._release(released)
        if len(released) < len(self.schedule.units[index]):
            self._staying.update(self.schedule.units[index])

    def _close_available(self) -> None:
        """Between forward and backward, what stays gathered for the backward is closed as the rest is: the user
        may take its values, whose memory is about to be released."""
        staying = [self.handles[index] for index in self._staying - self.schedule.held.keys()]
        self._closed = [handle for handle in staying if handle.status is AVAILABLE]
        close_all([handle.ref() for handle in self._closed])

    def _open_again(self) -> None:
        closed, self._closed = self._closed, []
        open_all([handle.ref() for handle in closed if handle.status is AVAILABLE])

    def _begin_outermost(self) -> None:
        if self._tasks:
            if _current_graph_task() != -1:
                return  # a recomputation inside backward
            self.sweep()  # that backward ended with an exception
        if self._closed:
            self._open_again()
        self._used_outside = False
        self.thread = threading.get_ident()
        if not self._step_open:
            if torch.is_grad_enabled():
                for notify in self._observers.before_forward:
                    notify()
            self._step_open = True
            self.schedule.begin_step("train" if torch.is_grad_enabled() else "eval")

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Context of the engine's call of the model, with the user's hooks on it."""
        if self._stack or self._tasks:
            self.drop_failed()
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1
            if self._strays and not self.calls and not self._step_open:
                self._let_strays_go()

    def drop_failed(self) -> None:
        """End what an exception has left open, outside of any forward and backward. Called where a new one begins."""
        if (self._stack or self._tasks) and _current_graph_task() == -1:
            self.sweep()

    def _watch(self, use: Use, module: torch.nn.Module, outputs: object) -> bool:
        """Hook every tensor through which a backward may come: outputs, and what the module keeps as an attribute.
        True if there is one."""
        watched = False
        for value in module.__dict__.values():
            if type(value) is torch.Tensor and value.grad_fn is not None:
                use.hook(value)
        if type(outputs) is torch.Tensor and outputs._base is None and outputs.grad_fn is not None:  # nearly always
            use.hook(outputs)
            return True
        for tensor in find_in_objects(outputs):
            self._check_escape(use.unit, tensor)
            base = tensor._base
            if base is not None and base.grad_fn is not None:
                use.hook(base)  # a caller may change the view in place; then gradients come this way
            if tensor.grad_fn is not None:
                watched = True
                use.hook(tensor)
        return watched

    def _check_escape(self, unit: Unit, tensor: torch.Tensor) -> None:
        """A parameter, or an alias of one, that ``unit`` returns stays gathered with the unit that called it."""
        handle = handle_of(tensor) or handle_of(tensor._base)
        if handle is None and tensor.grad_fn is None and self._stack:
            storage = tensor.untyped_storage()._cdata
            live = (self.handles[i] for i in self.schedule.units[unit.index])
            handle = next((h for h in live if h.full.untyped_storage()._cdata == storage), None)
        if handle is None or handle.persistent or handle.group is not self.group:
            return
        if not self._stack or handle.index not in self.schedule.units[self._stack[-1].unit.index]:
            self._attach(handle.index)

    # ---------------------------------------------------------------- backward

    def on_output_gradient(self, use: Use, task: int) -> None:
        """A gradient of a backward has reached an output of ``use``, the first one."""
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
        if use.unit.is_table:
            for index in self.schedule.units[use.unit.index]:
                self.show_shape(self.handles[index])
        else:
            use.unit.uses += 1
            self._execute(self.schedule.enter(use.unit.index))

    def _end_backward_use(self, use: Use) -> None:
        if self._recomputed:
            self._close_recomputed(use.unit)
        if not use.unit.is_table:
            use.unit.uses -= 1
            if not self._second_order:
                self._release(self.schedule.leave(use.unit.index))
        self._links.on_use_end(use.unit.index)

    def note_use_outside(self) -> None:
        """A parameter is used in a graph, without any unit: gradients may come after a unit's backward."""
        self._used_outside = True

    def show_shape(self, handle: PartitionedParameter) -> None:
        """A gradient comes to a parameter whose values are not here; until the backward ends it has its shape."""
        handle.show_shape()
        self._shown.append(handle)

    def _close_recomputed(self, unit: Unit | None) -> None:
        """End the recomputed forward uses of ``unit`` (None: all)."""
        recomputed, self._recomputed = self._recomputed, []
        for use in recomputed:
            if unit is None or use.unit is unit:
                self._release(self.schedule.leave(use.unit.index))
            else:
                self._recomputed.append(use)

    def _begin_task(self, task: int) -> None:
        """A backward begins, perhaps inside another (reentrant checkpointing)."""
        if self._closed:
            self._open_again()
        if not self._tasks and not self._step_open:
            self._step_open = True
            self.schedule.begin_step("backward")
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
        if self._recomputed:
            self._close_recomputed(None)
        if not self._stack and not self._second_order:
            self._end_step()

    # ---------------------------------------------------------------- steps of the schedule

    def _end_step(self) -> None:
        self._step_open = False
        self._release(self.schedule.end_step())
        self._end_others()

    def _end_others(self) -> None:
        """End what the schedule does not know of."""
        self._staying.clear()
        shown, self._shown = self._shown, []
        for handle in shown:
            if handle.status is NOT_AVAILABLE:
                handle.drop()
        if self._strays:
            self._let_strays_go()
        if self._read_ahead is not None:
            self._read_ahead.forget()
            self._read_ahead = None

    def sweep(self) -> None:
        """End everything under way and release all that is not held: after an exception, and when values have
        changed. Called on all ranks."""
        self._step_open = self._second_order = False
        for use in (*self._stack, *self._backward):
            use.unit.reset()
        self._stack.clear()
        self._backward.clear()
        self._recomputed.clear()
        self._tasks.clear()
        self._release(self.schedule.forget())
        self._end_others()

    def _let_strays_go(self) -> None:
        strays, self._strays = self._strays, []
        self.unhold(strays)

    def on_update(self) -> None:
        """After an update: shards have new values, so whole copies are stale. Released, or gathered anew where they
        stay. Called on all ranks, by the parameter gatherer."""
        self.group.on_update()
        self._used_outside = False
        if self._step_open or self._strays:
            self.sweep()
        with self._observers.phase(GATHER):
            if self.schedule.held or (self.group.kept and self.group.keeps_some()):
                refresh([h for h in self.handles if h.status is AVAILABLE and h.index in self._trained])
            else:
                self._whole.refresh()

    def collect_writes(self) -> None:
        """Copy the user's writes into parameters that stay whole, which are alike on all ranks, into their shards."""
        self._whole.take_writes()

    def collect_frozen_writes(self) -> None:
        """The same for frozen ones, whose shards are read only when they are to be trained or to leave the device."""
        frozen = [h for h in self.handles if h.persistent and h.index not in self._trained]
        WholeParameters(self.group, frozen).take_writes()

    def plan_progress(self) -> tuple[int, bool]:
        """The number of the plan that uses follow and gradients come by, and whether it is done; (0, False) if none."""
        return (0, False) if self._used_outside else self.schedule.plan_progress

    # ---------------------------------------------------------------- uses that no hook sees

    def on_read(self, handle: PartitionedParameter) -> None:
        """A parameter that is not available was read from its module, inside some forward or backward: gather it, for
        the unit under way from now on. All ranks read alike, whatever each of them then does with the parameter."""
        task = _current_graph_task()
        if task != -1 and not self._tasks:  # a user's hook, before any output's
            self._begin_task(task)
        if handle.group is not self.group:
            handle.group.gather([handle])
            return
        self._attach(handle.index)

    @property
    def busy(self) -> bool:
        """True while a forward or backward is under way."""
        return bool(self._stack or self._tasks or self.calls) or _current_graph_task() != -1

    def _attach(self, index: int) -> None:
        if self._stack and not self._tasks:
            self._add_parameter(self._stack[-1].unit, index)
        self.gather_stray([index])

    def gather_stray(self, indices: Iterable[int]) -> None:
        """Gather parameters for a use whose end no hook reports; they stay until the step of the schedule ends."""
        new = [index for index in indices if index not in self._strays]
        self.hold(new)
        self._strays += new

    def hold(self, indices: Sequence[int]) -> None:
        """Gather these parameters and keep them until :meth:`unhold`; calls nest. Called on all ranks."""
        with self._observers.phase(GATHER):
            self.group.gather([self.handles[index] for index in indices])
        self.schedule.hold(indices)

    def unhold(self, indices: Sequence[int]) -> None:
        """End one :meth:`hold`. Called on all ranks."""
        self._release(self.schedule.unhold(indices))

    def follow_gather(self, indices: Sequence[int]) -> None:
        """Take part in a gather for the other ranks."""
        self.group.all_gather([self.handles[index] for index in indices])
        for index in indices:
            handle = self.handles[index]
            if not handle.persistent and index not in self.schedule.held:
                handle.release()
            elif handle.pending is not None:
                handle.pending.wait()

    # ---------------------------------------------------------------- doing it

    def _execute(self, fetch: Fetch) -> None:
        release, starting, prefetch, needed, read = fetch
        watched = self._observers.on_phase_begin if starting or prefetch or needed else ()
        try:
            for notify in watched:
                notify(GATHER)
            if release:
                self._release(release)
            if starting:
                self._launch(starting)
            if prefetch:
                self._launch(prefetch)
            if read and self.group.reader is not None:
                self._read_ahead = self.group.reader
                self._read_ahead.ahead([self.handles[index] for index in read])
            for index in needed:
                started = self.handles[index].pending
                if started is not None:
                    started.wait()
        except RuntimeError as error:
            if type(error) not in (RuntimeError, Mismatch):
                raise  # out of memory, for one, is caught by its type
            raise type(error)(f"{error}\nThis rank stood at {self.where()}.") from error
        finally:
            if watched:
                for notify in self._observers.on_phase_end:
                    notify(GATHER)

    def _launch(self, indices: Iterable[int]) -> None:
        handles = self.handles
        missing = [handles[index] for index in indices if handles[index].status is NOT_AVAILABLE]
        if missing:
            self.group.all_gather(missing)

    def _release(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.handles[index].release()

    def where(self) -> str:
        """Describe for people at which use of which module this rank is."""
        forward = [use.unit.name or "the model" for use in self._stack]
        backward = [use.unit.name or "the model" for use in self._backward]
        return (
            f"{self.schedule.where()} (forward of {', '.join(forward) or 'nothing'}; backward of "
            f"{', '.join(backward) or 'nothing'})"
        )
