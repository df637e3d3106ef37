"""Parameter coordinator: executes the answers of the `FetchSchedule` with gathers, waits and releases.

Hooks on modules report the executions of parameter groups:

- A forward execution lasts from the pre-forward hook to the forward hook.
- A backward execution begins when a gradient reaches an output of the forward. It ends when another execution begins
  that is not inside it. Autograd runs nodes in reverse order of their creation, so by then the backward of everything
  in this forward is done. Hooks on gradients could not tell, because frozen weights have none.

All ranks run the same model, so they call everything here in the same order.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from zerolite.comm import collective
from zerolite.comm.flight_recorder import Mismatch
from zerolite.utils.memory_tags import DISK
from zerolite.utils.torch_private import after_backward, current_backward, transform_level
from zerolite.zero.backward import coordinators
from zerolite.zero.observers import GATHER
from zerolite.zero.stage3.available_parameters import AvailableParameters, refresh
from zerolite.zero.stage3.fetch_plan import NOTHING, Fetch
from zerolite.zero.stage3.fetch_schedule import FetchSchedule
from zerolite.zero.stage3.group_plan import groups_of_parameters
from zerolite.zero.stage3.module_hooks import RECOMPUTED, ModuleExecution
from zerolite.zero.stage3.param_group import ParamGroup
from zerolite.zero.stage3.partitioned_parameter import AVAILABLE, NOT_AVAILABLE, PartitionedParameter, sharded_param_of

if TYPE_CHECKING:
    from zerolite.zero.bucket import Bucket
    from zerolite.zero.engine_parts import EngineParts
    from zerolite.zero.stage3.partitioned_model import PartitionedModel


class PartitionedParameterCoordinator:
    """Executor of the fetch schedule; see the module.

    Gathers follow from the sequence of executions alone. A rank whose data leads it through other groups, forward or
    backward, would gather other parameters than the other ranks. So all ranks must run the same groups, and modules
    that some ranks may skip belong in one group with the module that calls them (``leaf_modules``).

    Attributes:
        sharded_params: parameter ``i`` of the schedule is ``sharded_params[i]``.
        groups: group ``g`` of the schedule is ``groups[g]``.
        param_gatherer: gathers of updates, which may still write shards.
        has_graph: a forward is under way, or a graph of one waits for its backward, which gathers.
        thread: thread of the last forward.
        engine_calls: calls of the engine under way. The user's hooks on the root module run outside of its execution.
    """

    def __init__(self, partitioned: PartitionedModel, parts: EngineParts) -> None:
        self._observers, self._pipeline, self._reducer = parts.observers, parts.pipeline, parts.reducer
        self.param_gatherer = parts.param_gatherer
        self.context, self.comm = partitioned.context, partitioned.context.groups.shard
        self.sharded_params, self.groups = partitioned.sharded_params, partitioned.groups
        indices = [[sharded_param.index for sharded_param in group.parameters] for group in self.groups]
        persistent = [sharded_param.index for sharded_param in self.sharded_params if sharded_param.persistent]
        numels = [sharded_param.numel for sharded_param in self.sharded_params]
        self.schedule = FetchSchedule(indices, numels, persistent, partitioned.limits)
        self._group_of = {id(module): group for group in self.groups for module in (group.module, *group.inside)}
        self._forward: list[ModuleExecution] = []  # forwards under way, the outermost first
        self._backward: list[ModuleExecution] = []  # backwards under way
        self._clock = 0
        self._tasks: list[int] = []  # autograd's graph tasks under way, the outermost first
        self.has_graph = False
        self._builds_graph = False  # the outermost forward does
        self._second_order = False  # a backward with create_graph: weights are needed again, at an unknown time
        self._pinned_for_step: list[PartitionedParameter] = []  # no hook tells when their use ends
        self._bucket_of: dict[int, Bucket] = {}  # of trained parameters, to which updates give new values
        self._trained_persistent = AvailableParameters(self.context, ())
        self._round = 0  # changes with each update, and with `reset`
        self._used_outside = False  # since the last update a graph uses parameters outside of all groups
        self.thread = threading.get_ident()
        self.engine_calls = 0
        self.weak_self = weakref.ref(self)  # for executions, which graphs keep alive
        self.context.set_coordinator(self)
        coordinators.add(self)
        self._find_tied()

    def _find_tied(self) -> None:
        """Find the groups of the parameters that have several."""
        self._tied = {p: groups for p, groups in groups_of_parameters(self.groups).items() if len(groups) > 1}

    @collective
    def add_external(self, module: torch.nn.Module, sharded_param: PartitionedParameter) -> None:
        """Add a parameter to the group of ``module``, or of the root if it has none. It is gathered with this group
        from the next execution on, and now if one is under way."""
        if sharded_param.context is not self.context or sharded_param.persistent:
            return
        group = self._group_of.get(id(module), self.groups[0])
        if any(execution.group is group for execution in (*self._forward, *self._backward)):
            self.context.gather([sharded_param])
        self._add_parameter(group, sharded_param)

    def _add_parameter(self, group: ParamGroup, sharded_param: PartitionedParameter) -> None:
        index = sharded_param.index
        if index not in self.schedule.groups[group.index]:
            self.schedule.add_parameter(group.index, index)
            group.parameters.append(sharded_param)
            self._find_tied()
            if index in self._bucket_of:
                group.add_bucket(self._bucket_of[index])
            if group.is_embedding:  # its values are needed from now on, in a backward that is under way too
                group.need_values()
                for _ in [execution for execution in self._backward if execution.group is group]:
                    group.open_executions += 1
                    self._execute(self.schedule.enter(group.index))

    def set_trained(self, parameters: Iterable[torch.nn.Parameter], buckets: Iterable[Bucket]) -> None:
        """Set the parameters to which each update gives new values. Called when their shards have their placement.

        Args:
            buckets: the bucket of each.
        """
        pairs = zip(map(sharded_param_of, parameters), buckets, strict=True)
        self._bucket_of = {known.index: bucket for known, bucket in pairs if known is not None}
        for group in self.groups:
            group.buckets.clear()
        in_bucket: dict[Bucket, set[int]] = {}
        for index, bucket in self._bucket_of.items():
            in_bucket.setdefault(bucket, set()).update([index] if self.sharded_params[index].numel else [])
        for bucket, indices in in_bucket.items():
            groups = [g for g in self.groups if not indices.isdisjoint(self.schedule.groups[g.index])]
            in_groups = {index for group in groups for index in self.schedule.groups[group.index]}
            bucket.local.set_groups(groups, ends_last=not indices <= in_groups)
            for group in groups:
                group.buckets.append(bucket)
        persistent = [p for p in self.sharded_params if p.persistent and p.index in self._bucket_of]
        self._trained_persistent = AvailableParameters(self.context, persistent)
        on_disk = (p for p in self.sharded_params if p.placement.location == DISK)
        self.schedule.set_on_disk({p.index: p.shard.numel() for p in on_disk})

    def wait_for_shards(self, sharded_params: Iterable[PartitionedParameter]) -> None:
        """Wait for the new values of these shards, which an update still sends where several ranks have a shard."""
        buckets = dict.fromkeys(self._bucket_of.get(sharded_param.index) for sharded_param in sharded_params)
        self.param_gatherer.wait(bucket for bucket in buckets if bucket is not None)

    # ---------------------------------------------------------------- forward

    def enter_forward(self, group: ParamGroup) -> None:
        """Begin a forward execution of ``group``. Called before the forward of its module, or of a module inside it
        that is called directly; also when a backward recomputes the forward."""
        if transform_level() is not None:
            raise RuntimeError(
                f"module '{group.name}' is called inside a transform of torch.func (grad, vmap, …), where "
                "stage 3 cannot gather its parameters; call a full copy of the model: copy.deepcopy(engine.module)"
            )
        if not self._forward:
            self._begin_outermost()
        self._clock += 1
        self._forward.append(ModuleExecution(self.weak_self, group, self._clock))
        group.open_executions += 1
        if (fetch := self.schedule.enter(group.index)) is not NOTHING:
            self._execute(fetch)
        if group.hidden:
            group.show()
        if self._used_outside or self._second_order:
            group.check_parameters()

    def leave_forward(self, group: ParamGroup, module: torch.nn.Module, outputs: object) -> None:
        """End a forward execution of ``group``, whose ``module`` has returned ``outputs``; None if it raised."""
        forward = self._forward
        if not forward or forward[-1].group is not group:
            if not any(execution.group is group for execution in forward):
                return  # `reset` has ended it
            while forward[-1].group is not group:  # an exception has skipped their hooks
                self._end_forward(forward.pop())
        execution = forward.pop()
        hooked = execution.hook_outputs(self, module, outputs)
        if self._tasks:  # a recomputation is the end of another forward's backward
            execution.round = RECOMPUTED
        elif hooked:
            execution.round = self._round
            group.unfinished += 1
        elif forward and self._builds_graph and not torch.is_grad_enabled():
            group.on_forward_without_graph()
        self._end_forward(execution)
        if not forward and not self._tasks and not hooked:
            self._end_step()

    def _end_forward(self, execution: ModuleExecution) -> None:
        """End a forward and release the parameters that are not kept for its backward."""
        self._clock += 1
        execution.end_forward(self._clock)
        group = execution.group
        released = self.schedule.leave(group.index)
        if released:
            self.release(released)
        if len(released) < len(group.parameters):
            group.hide(self._tied)

    def _begin_outermost(self) -> None:
        """Prepare for a forward that is not inside another one, and begin a step if none is open."""
        if self._tasks:
            if current_backward() != -1:
                return  # a recomputation inside backward
            self.reset()  # that backward ended with an exception
        self.thread = threading.get_ident()
        self._builds_graph = torch.is_grad_enabled()
        if not self.has_graph:
            if torch.is_grad_enabled():
                for notify in self._observers.before_forward:
                    notify()
            self.has_graph = True
            self.schedule.begin_step("train" if torch.is_grad_enabled() else "eval")

    @contextlib.contextmanager
    def engine_call(self) -> Iterator[None]:
        """Context of the engine's call of the model, including the user's hooks on it."""
        self.end_failed()
        self.engine_calls += 1
        try:
            yield
        finally:
            self.engine_calls -= 1
            if self._pinned_for_step and not self.engine_calls and not self.has_graph:
                self._unpin_after_step()

    def end_failed(self) -> None:
        """End the executions that an exception has left open. Does nothing inside a backward."""
        if (self._forward or self._tasks) and current_backward() == -1:
            self.reset()

    def pin_if_returned(self, group: ParamGroup, tensor: torch.Tensor) -> None:
        """Keep a parameter gathered that the module of ``group`` returns, or a view of one: its caller will use it."""
        sharded_param = sharded_param_of(tensor) or sharded_param_of(tensor._base)
        if sharded_param is None and tensor.grad_fn is None and self._forward:
            storage = tensor.untyped_storage()
            live = (self.sharded_params[i] for i in self.schedule.groups[group.index])
            sharded_param = next((p for p in live if p.full.untyped_storage() is storage), None)
        if sharded_param is None or sharded_param.persistent or sharded_param.context is not self.context:
            return
        if not self._forward or sharded_param.index not in self.schedule.groups[self._forward[-1].group.index]:
            self._pin_for_step(sharded_param)

    # ---------------------------------------------------------------- backward

    def on_output_gradient(self, execution: ModuleExecution, task: int) -> None:
        """Begin the backward of ``execution``: the first gradient of graph task ``task`` has reached its outputs."""
        if task not in self._tasks:
            self._begin_task(task)
        if torch.is_grad_enabled():
            self._second_order = True
        backward, place = self._backward, len(self._backward)
        while place:
            last = backward[place - 1]
            if last.task != task or (last.start <= execution.start and execution.end <= last.end):
                break
            place -= 1
            if not execution.contains(last):  # otherwise both return the same tensor: its inner hook has run first
                del backward[place]
                self._end_backward(last)
        backward.insert(place, execution)
        group = execution.group
        group.is_entered = True
        if group.is_embedding:
            return  # its backward needs the shape of the weight and not the values
        group.open_executions += 1
        if (fetch := self.schedule.enter(group.index)) is not NOTHING:
            self._execute(fetch)
        if group.hidden:
            group.show()

    def _end_backward(self, execution: ModuleExecution) -> None:
        group = execution.group
        if not group.is_embedding:
            group.open_executions -= 1
            if not self._second_order and (released := self.schedule.leave(group.index)):
                self.release(released)
        if execution.round == self._round:
            execution.round = -1
            group.unfinished -= 1
        elif execution.round == RECOMPUTED:
            group.on_recomputed()
        if not self._used_outside:  # otherwise a gradient may come at any time
            self._reducer.on_group_end(group)

    def on_use_outside_groups(self) -> None:
        """Note that a graph uses a parameter outside of all groups, so that its gradient may come at any time."""
        self._used_outside = True
        for group in self.groups:
            group.is_entered = True

    def _begin_task(self, task: int) -> None:
        """Begin a backward, which may run inside another one (reentrant checkpointing)."""
        if not self._tasks and not self.has_graph:
            self.has_graph = True
            self.schedule.begin_step("backward")
        self._tasks.append(task)
        after_backward(functools.partial(self._end_task, task))
        if not self._forward:  # torch.autograd.grad inside a forward is no backward of the engine
            self._pipeline.begin_backward()

    def _end_task(self, task: int) -> None:
        """End a backward with all its executions, and the step if no other backward is under way."""
        if task not in self._tasks:
            return  # `reset` has ended it
        del self._tasks[self._tasks.index(task) :]
        while self._backward and (not self._tasks or self._backward[-1].task == task):
            self._end_backward(self._backward.pop())
        if not (self._tasks or self._forward or self._second_order):
            self._end_step()

    # ---------------------------------------------------------------- steps of the schedule

    def _end_step(self) -> None:
        self.has_graph = False
        if released := self.schedule.end_step():
            self.release(released)
        if self._pinned_for_step or self.context.reader is not None:
            self._end_unscheduled()

    def _end_unscheduled(self) -> None:
        """End the step's pins and reads, of which the schedule does not know."""
        self._unpin_after_step()
        if self.context.reader is not None:
            self.context.reader.drop_reads()  # read ahead for gathers that did not follow

    @collective
    def reset(self) -> None:
        """End all executions and release what is not pinned, after an exception or a change of values. Called on all
        ranks."""
        self.has_graph = self._second_order = False
        for execution in (*self._forward, *self._backward):
            execution.group.reset()
        self._begin_round()
        self._forward.clear()
        self._backward.clear()
        self._tasks.clear()
        self.release(self.schedule.forget())
        self._end_unscheduled()

    def _begin_round(self) -> None:
        """Expect no backward of an earlier forward any more."""
        self._round += 1
        for group in self.groups:
            group.unfinished, group.is_entered = 0, False
            if group.without_graph:
                group.on_not_recomputed()

    def _unpin_after_step(self) -> None:
        pinned, self._pinned_for_step = self._pinned_for_step, []
        for sharded_param in pinned:
            if sharded_param.pin_count == 1:  # otherwise a gather context of the user decides
                sharded_param.keep_written_values()
        self.context.unpin(pinned)

    @collective
    def on_update(self) -> None:
        """Bring the new values of an update to available parameters. The parameter gatherer calls it."""
        self.context.on_update()
        self._used_outside = False
        self._begin_round()
        if self.has_graph or self._pinned_for_step:
            for sharded_param in self.sharded_params:  # their full values are older than the shards now
                sharded_param.mark_seen()
            self.reset()
        for begins in self._observers.on_phase_begin:
            begins(GATHER)
        try:
            if self.schedule.state.pinned or self.context.shared.gathered_by_user:  # more than persistent ones
                refresh([p for p in self.sharded_params if p.status is AVAILABLE and p.index in self._bucket_of])
            else:
                self._trained_persistent.refresh()
        finally:
            for ended in self._observers.on_phase_end:
                ended(GATHER)

    def collect_writes(self) -> None:
        """Copy the user's writes into trained available parameters, the same on all ranks, into their shards."""
        self._trained_persistent.copy_writes_to_shards()
        if self.has_graph or self._pinned_for_step:  # otherwise persistent ones alone are available
            for sharded_param in self.sharded_params:
                if not sharded_param.persistent and sharded_param.pin_count <= 1:
                    sharded_param.keep_written_values()

    def collect_frozen_writes(self) -> None:
        """Copy the user's writes into frozen persistent parameters into their shards."""
        frozen = [p for p in self.sharded_params if p.persistent and p.index not in self._bucket_of]
        AvailableParameters(self.context, frozen).copy_writes_to_shards()

    @property
    def busy(self) -> bool:
        """True inside a forward, a backward or a call of the engine."""
        return bool(self._forward or self._tasks or self.engine_calls) or current_backward() != -1

    def pin_in_forward(self, sharded_param: PartitionedParameter) -> None:
        """Gather a parameter that a forward under way uses, if one is, until the step ends."""
        if self._forward:
            self._pin_for_step(sharded_param)

    def _pin_for_step(self, sharded_param: PartitionedParameter) -> None:
        """Gather a parameter for the group under way, which owns none, until the step ends; with it from then on."""
        if self._forward and not self._tasks:
            self._add_parameter(self._forward[-1].group, sharded_param)
        if sharded_param not in self._pinned_for_step:
            for group in self.groups:
                group.is_entered |= sharded_param in group.parameters  # its values are there in every backward
            with self._observers.phase(GATHER):
                self.context.pin([sharded_param])
            self._pinned_for_step.append(sharded_param)

    # ---------------------------------------------------------------- execution of the schedule's answers

    def _execute(self, fetch: Fetch) -> None:
        release, launch, prefetch, needed, read = fetch
        observed = self._observers.on_phase_begin if launch or prefetch or needed else ()
        try:
            for notify in observed:
                notify(GATHER)
            if release:
                self.release(release)
            for indices in (launch, prefetch):
                chosen = [p for p in map(self.sharded_params.__getitem__, indices) if p.status is NOT_AVAILABLE]
                if chosen:
                    self.context.issue_all_gather(chosen)
            if read and self.context.reader is not None:
                self.context.reader.read_ahead([self.sharded_params[index] for index in read])
            for index in needed:
                if (pending := self.sharded_params[index].pending) is not None:
                    pending.wait()
        except RuntimeError as error:
            if type(error) not in (RuntimeError, Mismatch):
                raise  # subclasses, such as out of memory, keep their type
            raise type(error)(f"{error}\nThis rank was {self._position()}.") from error
        finally:
            if observed:
                for notify in self._observers.on_phase_end:
                    notify(GATHER)

    def release(self, indices: Iterable[int]) -> None:
        """Release these parameters, with what their modules have written into them."""
        for index in indices:
            self.sharded_params[index].release(keep_writes=True)

    def _position(self) -> str:
        names = [
            ", ".join(execution.group.name or "the model" for execution in executions) or "nothing"
            for executions in (self._forward, self._backward)
        ]
        return f"in the forward of {names[0]}, and in the backward of {names[1]}"
