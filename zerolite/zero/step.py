"""The step pipeline: one order of phases for all stages and precisions.

reduce → stats → clip → update (→ publish, bucket by bucket) → loss scale. The scale of a window is captured at its
first backward, before anything can change it, and the loss scaler is told the outcome last.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from zerolite.comm import Communicator
from zerolite.offload.transfers import Transfers
from zerolite.precision.loss_scaler import LossScaler
from zerolite.utils.accelerator import host_value
from zerolite.zero.accumulation import AccumulationWindow
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.checks import UpdateChecks, UpdateLook
from zerolite.zero.commands import Command, Commands, bits_of, unannounced
from zerolite.zero.grad_reducer import GradReducer
from zerolite.zero.grad_stats import (
    Across,
    GradStats,
    StatsCollector,
    StatsVector,
    clip_coefficient,
    clip_coefficient_on_device,
)
from zerolite.zero.gradient_changes import GradientChanges
from zerolite.zero.gradient_sums import GradientSums
from zerolite.zero.observers import Observers
from zerolite.zero.publisher import Publisher
from zerolite.zero.sharded_optimizer import ShardedOptimizer
from zerolite.zero.step_outcome import StepCounters, UnusedParameters, describe_bad_losses, mean_weight
from zerolite.zero.update_sweep import UpdateSweep

logger = logging.getLogger("zerolite")

_MOST_DOUBTFUL = 32  # parameters that are updated one by one, so that the host need not wait
_NONE: Mapping[int, torch.Tensor] = {}


@dataclass(frozen=True)
class StepOptions:
    """Options of a step, from the config.

    Attributes:
        max_norm: clip to this L2 norm, 0 for never.
        check_finite: skip steps with non-finite gradients.
        max_skipped_in_a_row: raise after so many, 0 for never.
        skip_on_device: let the device decide whether a step is skipped, where the optimizer can, so that the host need
            not wait for the statistics.
        update_numel: master elements that are updated in one call on the device where torch's optimizer does it; a
            larger bucket is a call of its own.
        divide_plain_backward: divide the gradients of a backward that the user calls by the number of micro-batches.
    """

    max_norm: float
    check_finite: bool
    max_skipped_in_a_row: int
    skip_on_device: bool = False
    update_numel: int = 0
    divide_plain_backward: bool = False


class TraceCheck(Protocol):
    """What the pipeline knows of stage 3's schedule. gathers: a hash of all gathers so far."""

    gathers: int

    @property
    def candidate_hash(self) -> int: ...

    def adopt(self) -> None: ...

    def reject(self) -> None: ...


class ShardedParameters(Protocol):
    """What the pipeline knows of a model at stage 3."""

    @property
    def schedule(self) -> TraceCheck: ...

    def collect_writes(self) -> None:
        """Copy what somebody has written into whole parameters to their shards."""


@dataclass(frozen=True)
class _Unsettled:
    """A step whose outcome the host has not read yet. doubtful: parameters that this rank has not used, which the
    device has left out of the update if no other rank has."""

    stats: StatsVector
    divisor: float
    doubtful: frozenset[int]


class StepPipeline:
    """All phases are called on all ranks in the same order; each runs what it depends on if that has not run in
    this window."""

    def __init__(
        self,
        buffer: ParameterBuffer,
        reducer: GradReducer,
        optimizer: ShardedOptimizer,
        publisher: Publisher,
        comm: Communicator,
        window: AccumulationWindow,
        scaler: LossScaler | None,
        options: StepOptions,
        device: torch.device,
        transfers: Transfers,
        unused: UnusedParameters,
        collector: StatsCollector,
        observers: Observers,
    ) -> None:
        self.unused = unused
        self._collector = collector
        self._observers = observers
        self._sharded: ShardedParameters | None = None
        self.trace: TraceCheck | None = None  # stage 3's schedule, whose trace the ranks compare
        self._written: set[int] = set()  # parameters into which somebody has loaded values
        self._buffer = buffer
        self._reducer = reducer
        self._optimizer = optimizer
        self._publisher = publisher
        self._comm = comm
        self._window = window
        self._scaler = scaler
        self._options = options
        self._device = device
        self.counters = StepCounters()
        self._unsettled: _Unsettled | None = None
        self._minimum: float | None = None  # the loss scale, if the last step was skipped and it cannot fall further
        self._failure: Exception | None = None  # found while an outcome was read; raised by the next update
        self._unpublished = False  # masters are ahead of the parameters
        self.commands: Commands = unannounced
        self.away = False  # engine.offload_states() has emptied what is worked on here
        self._vote_sent = 0  # for this rank's trace, in the statistics collected last
        self._last_vote = 0  # ... in the last step's
        self._agreed = True  # whether all ranks gave the same
        numel = options.update_numel
        self._sweep = UpdateSweep(buffer, reducer, optimizer.method, publisher, transfers, numel)
        self._checks: UpdateChecks | None = None
        self._bad_losses: tuple[int, ...] = ()  # ranks whose loss was not finite in the last step
        self._torn = ""  # why masters are not all of one step
        self._across: Across | None = None
        self._sums: GradientSums | None = None
        self.count_buckets()
        self.changes = GradientChanges(
            buffer, reducer, lambda: self._stats, lambda bucket: self._collector.forget(bucket)
        )
        self._begin_window()

    def count_buckets(self) -> None:
        """Look at the layout anew: it has other buckets than before. Between steps."""
        layout = self._buffer.layout
        fragments = list(layout.fragments(self._buffer.rank))
        self._collector.use(layout, fragments, self._across)
        self._sweep.plan()
        if self._checks is not None:
            self._checks.replan()

    def check_with(self, checks: UpdateChecks, look: UpdateLook | None) -> None:
        """Check more than gradients from now on; look: at what updates do. Before the first step."""
        self._checks, self._sweep.look = checks, look

    def follow(self, sharded: ShardedParameters) -> None:
        """The model is at stage 3. Before the first step."""
        self._sharded, self.trace = sharded, sharded.schedule

    @property
    def checks_finite(self) -> bool:
        """Whether steps with non-finite gradients are skipped."""
        return self._options.check_finite

    def spread(self, across: Across, sums: GradientSums) -> None:
        """The model has parts on other ranks. Before the first step."""
        self._across, self._sums = across, sums
        self.count_buckets()

    def note_inputs(self, tensors: Iterable[torch.Tensor]) -> None:
        """What a forward is given, which ranks with parts of the same layers compare in the step's statistics."""
        self._collector.note_inputs(tensors)

    def _begin_window(self) -> None:
        self._stats: StatsVector | None = None
        if self._sums is not None:
            self._sums.clear()
        self._collector.forget()
        self._max_norm = self._options.max_norm
        self._loss_scale: float | None = None
        self._mean_weight: torch.Tensor | None = None
        self._flush_factor = 1.0
        self._updated = False

    # ---------------------------------------------------------------- backward

    def begin_backward(self, engine_scaled: bool | None = None, weight: float | None = None) -> None:
        """Before the first gradient of a backward.

        ``engine_scaled``: None inside a backward that the user called; otherwise ``engine.backward`` is about to
        call it, and has divided (or not) the loss by the number of micro-batches. ``weight``: by which it multiplies
        the loss instead, in units of :meth:`weight_unit`.
        """
        if self._reducer.pass_open:
            return
        self.check_here()
        if self._updated:
            self.zero_grad()
        self._add_assigned(weighted=weight is not None)
        for notify in self._observers.before_backward:
            notify()
        self._check_weighted(weight is not None)
        reducing = self._reducer.will_reduce()
        scaled, weighted = bool(engine_scaled), weight is not None
        divided = engine_scaled is None and self._options.divide_plain_backward
        with self.commands(Command.BACKWARD, scaled, weighted, reducing, divided):
            self._begin_pass(scaled, weight, reducing, divided, end_with_backward=engine_scaled is None)
        for notify in self._observers.on_backward_begin:
            notify()

    def follow_backward(self, scaled: bool, weighted: bool, reducing: bool, divided: bool) -> None:
        """A backward of the ranks that go on, to which this one, which has finished (``engine.join``), adds nothing.
        At stage 3 they say what comes next; elsewhere it is all buckets in their order."""
        self._begin_pass(scaled, 0.0 if weighted else None, reducing, divided, end_with_backward=False)
        if not self._reducer.follows_units:
            self._reducer.end_pass(complete=False)

    def _begin_pass(
        self, scaled: bool, weight: float | None, reducing: bool, divided: bool, end_with_backward: bool
    ) -> None:
        self._stats = self._mean_weight = None
        if self._sums is not None:
            self._sums.reopen()
        self.window_scale()
        if weight is not None:
            self._reducer.share = 1.0  # a weight says all about how much a rank counts
        self._reducer.divisor = self._window.micro_batches if divided else 1
        self._reducer.begin_pass(reducing, end_with_backward, void=weight == 0)
        self._window.on_backward(scaled, weight, divided)
        self.counters.micro_steps += 1

    def weight_unit(self) -> float:
        """What weights are divided by before they multiply anything, so that fp16 gradients keep their size: about the
        mean weight of the step before, a power of two, the same on all ranks and for the whole window; 1 where there
        is no loss scale."""
        self.window_scale()
        return self.counters.weight_unit

    def _check_weighted(self, weighted: bool) -> None:
        if self._window.weighted not in (None, weighted):
            raise RuntimeError(
                "engine.backward: expected all backwards of a step to have a weight, or none of them; got one "
                f"{'with' if weighted else 'without'} after one {'without' if weighted else 'with'}"
            )

    def end_backward(self, complete: bool) -> None:
        """After a backward, or when one is found to have been cut short by an exception."""
        self._reducer.end_pass(complete)

    def wait_for_reductions(self) -> None:
        """None is under way afterwards. Nothing is launched for it that is not launched anyway."""
        if self._reducer.pass_open:
            self.end_backward(complete=False)
        self._reducer.wait()

    def window_scale(self) -> float:
        """The loss scale of the window in hand; the same from its first backward to its step."""
        if self._scaler is None:
            return 1.0
        if self._loss_scale is None:
            self.settle()
            self._loss_scale = self._scaler.scale
        return self._loss_scale

    # ---------------------------------------------------------------- phases

    def reduce(self) -> None:
        """Afterwards the mean gradient over ranks is where its owner needs it."""
        self.check_here()
        self.look_at_grads()
        self.finish_reductions()

    def finish_reductions(self) -> None:
        """:meth:`reduce` where it is known that the user has not dropped the gradients."""
        for notify in self._observers.on_reduce_begin:
            notify()
        try:
            with self.commands(Command.REDUCE):
                self._reducer.finish()
                if self._sums is not None:
                    self._sums.run()
        finally:
            for notify in self._observers.on_reduce_end:
                notify()

    def pending(self) -> frozenset[int]:
        """Parameters with a gradient that no step has used, on any rank."""
        self.look_at_grads()
        return frozenset() if self._window.empty or self._updated else self.stats().get().used

    def on_gradient_set(self, index: int, given: bool) -> None:
        """Somebody has put another value into the reduced gradient of a parameter, or taken it out."""
        (self._reducer.used.add if given else self._reducer.used.discard)(index)
        self.changes.set_by_call(index, given)
        self._collector.forget(self._buffer.layout.slots[index].bucket)
        self._stats = None

    def on_gradient_changed(self, index: int) -> None:
        """The user has changed a gradient in place, on all ranks."""
        self._collector.forget(self._buffer.layout.slots[index].bucket)
        self._buffer.tiers.written_in_place()
        self._stats = None

    def why_no_gradients(self) -> str:
        """Return why there are no gradients to be read now, "" if there are."""
        self.check_here()
        if self._reducer.pass_open:
            return "a backward is under way; read it when that has returned"
        return "engine.update() has used it" if self._updated else ""

    def refuse_second_scale(self) -> None:
        """Raises RuntimeError if the engine scales losses itself."""
        if self._scaler is not None:
            raise RuntimeError(
                'torch.amp.GradScaler was to unscale FP16 gradients, but with "fp16": {"enabled": true} in the config '
                "the engine scales the loss itself; leave one of them out"
            )

    def look_at_grads(self) -> None:
        """Take over what the user has put into ``p.grad``: None drops a gradient, a tensor takes its place. None for
        all parameters is :meth:`zero_grad` in other words, a call that all ranks make."""
        self._take_replaced()
        if self._stats is not None:
            self.changes.assign(self._stats, self.divisor_on_device(self._stats))

    def _take_replaced(self) -> None:
        """Drop gradients that were set to None, and note tensors, which count as :meth:`look_at_grads` or
        :meth:`_add_assigned` says."""
        if self._reducer.pass_open:  # a backward that has raised, with the sums of the user's hooks still in p.grad
            self.end_backward(complete=False)
        self.changes.refresh()
        found = self.changes.found()
        if found and self.changes.all_dropped(found):
            self.zero_grad()
            return
        if found and self._across is not None:
            name = self._buffer.layout.slots[next(iter(found))].name
            raise RuntimeError(
                f"p.grad of parameter '{name}' was replaced, where tensor_parallel or a pipeline leaves parts of the "
                "model on other ranks; use zerolite.set_full_grad(p, value) on all ranks"
            )
        if found:
            with self.commands(Command.OTHER):  # a rank that has left engine.join() would not know
                self.changes.take(found)

    def _add_assigned(self, weighted: bool) -> None:
        """Before a backward: what the user has put into ``p.grad`` counts like a gradient of this rank's."""
        self._take_replaced()
        self.changes.add(self.window_scale, weighted or self._window.weighted is True)
        self.changes.apply_factors()

    def stats(self) -> StatsVector:
        self.check_here()
        if self._stats is None:
            self.look_at_grads()
        return self._collected()

    def _collected(self) -> StatsVector:
        if self._stats is None:
            with self.commands(Command.STATS):
                self._collect()
        assert self._stats is not None
        return self._stats

    def _collect(self) -> None:
        if self._stats is None:
            self.finish_reductions()
            noted, part = self._collector.noted, self._reducer.owned_part
            parts = [None if noted(b.index) else part(b.index) for b in self._buffer.layout.buckets]
            self._vote_sent = trace_vote(self.trace)
            self._stats = self._collector.collect(
                parts,
                self._reducer.used,
                self._reducer.probes,
                self._vote_sent,
                self._window.weighted,
                self._window.weight,
                self._reducer.losses,
                self._checks,
            )
            self.changes.assign(self._stats, self.divisor_on_device(self._stats))

    def grad_norm(self) -> float | None:
        """L2 norm of the last step's gradient, unscaled, before clipping; None before the first step. No collective
        follows, so one rank alone may ask, whatever is pending."""
        self.settle()
        return self.counters.last_norm

    def clip(self, max_norm: float) -> float:
        """Clip this window's gradient to ``max_norm`` when it is applied. Gives the norm before clipping."""
        if not max_norm > 0:
            raise ValueError(f"clip_gradients: expected max_norm > 0, got {max_norm}")
        self.look_at_grads()
        with self.commands(Command.CLIP, bits_of(max_norm)):
            self._max_norm = float(max_norm)
            self.changes.apply_factors()
            return self.stats().get().norm / self.divisor()

    def flush(self) -> None:
        """The window ends before it is full: what it holds becomes the mean of what it contains."""
        self._flush_factor = self._window.flush_factor()

    def update(self, publish: bool = False) -> None:
        """Update what this rank owns, or skip the step on all ranks, and settle the counters, the scheduler and the
        loss scale."""
        self.look_at_grads()
        self.apply(publish)

    def apply(self, publish: bool) -> None:
        """:meth:`update` where it is known that the user has not dropped the gradients."""
        for notify in self._observers.on_step_begin:
            notify()
        try:
            self._apply(publish)
        finally:
            for ended in self._observers.on_step_end:
                ended(self.global_steps)

    def _apply(self, publish: bool) -> None:
        self.check_whole()
        if self._updated:
            raise RuntimeError("engine.update() was called twice for the same gradients; call engine.zero_grad() first")
        if self._unpublished:
            raise RuntimeError("engine.update() was called twice without engine.publish() between")
        with self.commands(Command.UPDATE, publish):
            if self._optimizer.run_hooks("pre"):
                self.look_at_grads()
            self._update(publish)
            if publish:
                self._optimizer.run_hooks("post")

    def _update(self, publish: bool) -> None:
        self.settle()
        self._raise_failure()
        self._decide_on_trace()
        self.refresh_written()
        if self._checks is not None:
            # With tensor parallelism a part may be small enough to stay whole on one rank and not on another.
            gathers = self.trace.gathers if self.trace is not None and self._across is None else 0
            self._checks.before_update(self.counters.global_steps, self._own_divisor(), self._max_norm, gathers)
        self.changes.refresh()
        stats = self._collected()
        self._last_vote = self._vote_sent  # only now: clipping may have collected these before the last one was decided
        given = self.changes.common_factor(stats) if self._reducer.shown.factors else 1.0
        self._updated = True
        self.changes.clear()  # from here on nothing corrects the statistics
        self._optimizer.mark_called()
        if self._skips_on_device:
            self._update_unread(stats, given, publish)
            return
        outcome = stats.get()
        outcome.check_inputs()
        if self._checks is not None:
            self._checks.note(outcome.extra)
            self._checks.act()
        divisor = self._own_divisor() * mean_weight(outcome)
        # Every rank reads the same statistics here, so either all of them launch the gathers of an update or none.
        if self._applies(outcome):
            self.unused.check(outcome.used, self._buffer.layout.slots, outcome.unused_elsewhere)
            norm = outcome.norm / divisor
            factor = (clip_coefficient(norm, self._max_norm) if self._max_norm else 1.0) / divisor
            factor *= float(host_value(given)) if isinstance(given, torch.Tensor) else given
            self._update_buckets(factor, outcome.used, None, publish)
        self._settle(outcome, divisor)
        self._raise_if_hopeless(outcome)

    def refresh_written(self) -> None:
        """Masters follow the values that somebody has loaded into parameters, or put in their place by ``p.data =
        values``. Raises RuntimeError if those have another shape or dtype."""
        self.check_here()
        if not self._unpublished:
            self._publisher.wait_all()
            self._buffer.bring_home()
            if self._sharded is not None:
                self._sharded.collect_writes()
        if self._written:
            self._buffer.refresh_masters(self._written)
            self._buffer.tiers.written_in_place()
            self._written.clear()
            if self._checks is not None:
                self._checks.forget(update=False)

    def follow_writes(self) -> None:
        """The same, and masters follow what has been written into parameters in place, as they do in an update."""
        self.refresh_written()
        for bucket in () if self._unpublished else range(len(self._buffer.layout.buckets)):
            self._buffer.follow(bucket)
        self._buffer.tiers.written_in_place()

    def _decide_on_trace(self) -> None:
        """Let stage 3 follow its recorded trace once all ranks have been seen to have the same. One step after it was
        recorded, on all ranks in the same place: when the host reads the statistics is each rank's own affair.

        ``agreed`` is the same on all ranks, and while they agree their votes are, so all adopt the same traces."""
        agreed, self._agreed = self._agreed, True
        vote, self._last_vote = self._last_vote, 0
        if self.trace is None or (agreed and not vote):
            return
        if not agreed:
            self.trace.reject()
            if self._comm.main:
                logger.warning("stage 3: the ranks run their modules in different orders; nothing is prefetched")
        elif trace_vote(self.trace) == vote:
            self.trace.adopt()

    def on_values_loaded(self, indices: Iterable[int]) -> None:
        """Somebody loaded values into these parameters of the module: they are what the next update starts from."""
        self._written.update(indices)

    def on_parameters_loaded(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """The same, for those of ``parameters`` that are trained."""
        index_of = {id(parameter): index for index, parameter in enumerate(self._buffer.parameters)}
        self.on_values_loaded(index_of[id(p)] for p in parameters if id(p) in index_of)

    def on_weights_replaced(self) -> None:
        """All weights have been replaced by others, a checkpoint's: what was wrong with steps before does not matter
        any more. Called on all ranks."""
        self.settle()
        self._failure = None
        if self._checks is not None:
            self._checks.forget(update=True)

    def on_masters_loaded(self) -> None:
        """Somebody loaded masters: the parameters follow, also those into which values were loaded before."""
        self._written.clear()
        self.on_weights_replaced()
        self._buffer.tiers.written_in_place()
        self._torn = ""
        self.zero_grad()
        self.publish()

    def publish(self) -> None:
        """Bring the updated masters to the compute parameters of all ranks."""
        self.check_here()
        for notify in self._observers.on_publish_begin:
            notify()
        try:
            with self.commands(Command.PUBLISH):
                for bucket in reversed(self._reducer.order):
                    self._publisher.publish_bucket(bucket)
                self._publisher.end_step()
                if self._unpublished:
                    self._optimizer.run_hooks("post")
        finally:
            for notify in self._observers.on_publish_end:
                notify()
        self._unpublished = False

    def zero_grad(self) -> None:
        """Drop the window: its gradients, clip and scale."""
        with unannounced(Command.ZERO_GRAD) if self._window.empty else self.commands(Command.ZERO_GRAD):
            for notify in self._observers.on_gradients_dropped:
                notify()
            self.changes.clear()  # first: the reducer looks at which gradients are still referred to
            self._reducer.clear()
            self._window.reset()
            self._begin_window()

    def step(self) -> None:
        """All phases. Gradients are consumed."""
        self.look_at_grads()
        with self.commands(Command.STEP):
            self.apply(publish=True)
            self.zero_grad()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""
        return self._optimizer.param_groups

    # ---------------------------------------------------------------- outcome

    def settle(self) -> None:
        """Read the outcome of the last step if that has not happened, and bring counters, scheduler and loss scale
        up to date.

        What is wrong with that step is raised by the next update and not here: each rank reads the outcome when it
        first needs it (rank 0 to print a loss scale, say), and the others would wait for it in their next collective.
        """
        if self._unsettled is None:
            return
        unsettled, self._unsettled = self._unsettled, None
        outcome = unsettled.stats.get()
        if outcome.weight == 0 or outcome.mixed or not self._applies(outcome):
            self._optimizer.method.forget_last()
        elif unsettled.doubtful:
            self._optimizer.method.leave_out(unsettled.doubtful - outcome.used)
        if self._checks is not None:
            self._checks.note(outcome.extra)
        try:
            outcome.check_inputs()
            divisor = unsettled.divisor * mean_weight(outcome)
        except RuntimeError as error:
            self._failure, divisor = error, unsettled.divisor
        self._settle(outcome, divisor)  # whatever is wrong with it, the step has been taken, or skipped
        try:
            if self._applies(outcome):
                self.unused.check(outcome.used, self._buffer.layout.slots, outcome.unused_elsewhere)
            self._raise_if_hopeless(outcome)
        except (RuntimeError, FloatingPointError) as error:
            self._failure = self._failure or error

    def _raise_failure(self) -> None:
        """Raise what was wrong with a step that has been settled. Called on all ranks, which have settled the same
        steps by then."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @property
    def global_steps(self) -> int:
        return self.counters.global_steps + (self._unsettled is not None)

    @property
    def skipped_steps(self) -> int:
        self.settle()
        return self.counters.skipped_steps

    @property
    def micro_steps(self) -> int:
        """Backwards so far."""
        return self.counters.micro_steps

    @property
    def scale(self) -> float:
        """The loss scale that the next window will use (this one's, if it has begun)."""
        if self._scaler is None:
            return 1.0
        if self._loss_scale is not None:
            return self._loss_scale
        self.settle()
        return self._scaler.scale

    # ---------------------------------------------------------------- checkpoints

    @property
    def accumulating(self) -> bool:
        """Whether there have been backwards whose gradients no step has used; the same on all ranks."""
        return not (self._window.empty or self._updated)

    def check_between_steps(self) -> None:
        """Settle what has been updated. Raises RuntimeError while an update is in the middle, between ``update`` and
        ``publish``, and while ``engine.offload_states()`` holds."""
        self.check_here()
        self.look_at_grads()
        self.settle()  # a step that the device has skipped is taken back from the counts of optimizer states
        if self._unpublished:
            raise RuntimeError(
                "a checkpoint was asked for between engine.update() and engine.publish(), where master weights are "
                "ahead of the parameters; call engine.publish() and engine.zero_grad() first"
            )

    def check_ranks(self) -> None:
        """Raise on all ranks if they hold different weights or would update with different numbers, and if the last
        update has made weights non-finite. Called on all ranks, between steps."""
        self.settle()
        self._raise_failure()
        if self._checks is not None:
            self._checks.before_save(self.counters.global_steps, self.scale, self._max_norm)

    def state_dict(self) -> dict[str, Any]:
        """Counters and the loss scale, as plain data."""
        self.settle()
        return {"counters": self.counters.state_dict(), "loss_scaler": self._scaler and self._scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`, after :meth:`zero_grad`, when all values have been loaded. A loss scale of
        another precision is left out. Raises ValueError if what was saved makes no sense."""
        self.on_weights_replaced()
        if self._scaler is not None and state["loss_scaler"] is not None:
            self._scaler.load_state_dict(state["loss_scaler"])
        self.counters.load_state_dict(state["counters"])
        self._buffer.tiers.written_in_place()
        self._torn = ""

    # ---------------------------------------------------------------- inside

    def divisor(self) -> float:
        """What the accumulated gradient must be divided by: the loss scale, less what a partial window lacks, and the
        mean weight. Called on all ranks."""
        return self._own_divisor() * (mean_weight(self.stats().get()) if self._window.weighted else 1.0)

    def shown_divisor(self) -> float | torch.Tensor:
        """What a reduced gradient must be divided by to be what ``p.grad`` shows; see :meth:`divisor_on_device`."""
        if not self._window.weighted:
            return self._own_divisor()
        if self._mean_weight is None:  # kept: changes of gradients leave it as it is
            self._mean_weight = self.stats().weight()
        return self._own_divisor() * self._mean_weight

    def divisor_on_device(self, stats: StatsVector) -> float | torch.Tensor:
        """The same, for which the host does not wait."""
        if not self._window.weighted:
            return self._own_divisor()
        return self._own_divisor() * stats.weight()

    def _own_divisor(self) -> float:
        """The same without what only all ranks know."""
        return self.window_scale() / self._flush_factor

    @property
    def _skips_on_device(self) -> bool:
        """Follows from config, optimizer and layout alone: which gradients came to this rank must not decide it,
        because an update whose skip the host decides launches no gathers when it is skipped."""
        options, method = self._options, self._optimizer.method
        return options.skip_on_device and method.can_skip_on_device and self._sweep.all_on_device

    def _update_unread(self, stats: StatsVector, given: float | torch.Tensor, publish: bool) -> None:
        """Update, or skip on the device, without reading the statistics: the same gathers on every rank, whatever the
        outcome. Of parameters that this rank has not used the device leaves out those that no rank has. Where they are
        many the host waits for the statistics to learn which, and does nothing else with them."""
        divisor = self._own_divisor()
        used: frozenset[int] | None = None
        doubtful: frozenset[int] = frozenset()
        if len(self._reducer.used) < len(self._buffer.layout.slots):
            used = frozenset(self._reducer.used)
            if self._comm.world_size > 1:
                doubtful = frozenset(s.index for s in self._buffer.layout.slots if s.numel and s.index not in used)
            if len(doubtful) > _MOST_DOUBTFUL:
                used, doubtful = stats.get().used, frozenset()
        total = stats.total_square()
        found_inf = ~torch.isfinite(total) | stats.mixed() if self._options.check_finite else None
        scale: float | torch.Tensor = divisor
        if self._window.weighted:
            scale = divisor * stats.weight()
            nothing = stats.mixed() | (stats.weight() == 0)
            found_inf = nothing if found_inf is None else found_inf | nothing
        factor: float | torch.Tensor = given / scale
        if self._max_norm:
            factor = clip_coefficient_on_device(total.sqrt() / scale, self._max_norm) / scale * given
        if isinstance(factor, torch.Tensor):
            factor = factor.float()
        left_out = {index: stats.unused(index) for index in sorted(doubtful)}
        if found_inf is not None:
            left_out = {index: unused | found_inf for index, unused in left_out.items()}
            found_inf = found_inf.float()
        left_out = {index: flag.float() for index, flag in left_out.items()}
        self._update_buckets(factor, used, found_inf, publish, left_out)
        stats.start_read()
        self._unsettled = _Unsettled(stats, divisor, doubtful)

    def _update_buckets(
        self,
        factor: float | torch.Tensor,
        used: frozenset[int] | None,
        found_inf: torch.Tensor | None,
        publish: bool,
        doubtful: Mapping[int, torch.Tensor] = _NONE,
    ) -> None:
        taking_part = used if used is None else used | doubtful.keys()
        self._optimizer.method.begin(taking_part, frozenset(doubtful))
        self._unpublished = not publish
        try:
            self._sweep.run(factor, used, found_inf, publish, doubtful)
        except BaseException as error:
            self._torn, self._unpublished = f"{type(error).__name__}: {error}", False
            raise

    def check_here(self) -> None:
        """Raises RuntimeError while what is worked on here is away."""
        if self.away:
            raise RuntimeError(
                "engine.offload_states() has brought states of this engine to the host; call engine.reload_states() "
                "before it is trained, saved, loaded or read"
            )

    def check_whole(self) -> None:
        """Raises RuntimeError if an update has failed in its middle, unless a checkpoint has been loaded since."""
        if self._torn:
            raise RuntimeError(
                f"an update has failed in its middle ({self._torn}), so some weights are a step ahead of others; they "
                "cannot be trained on, nor saved. Start again from the last checkpoint"
            )

    def _settle(self, outcome: GradStats, divisor: float) -> None:
        self._agreed = outcome.agreed
        skipped = not self._applies(outcome)
        norm = self.counters.count(outcome, divisor, skipped, scaled=self._scaler is not None)
        if skipped and self._comm.main:
            logger.warning("%s", self._describe(outcome))
        if outcome.finite and outcome.bad_losses not in ((), self._bad_losses) and self._comm.main:
            logger.warning("%s", describe_bad_losses(self.counters.global_steps, outcome.bad_losses))
        self._bad_losses = outcome.bad_losses
        if not skipped:
            for updated in self._observers.on_updated:
                updated()
        change = self._scaler.update(skipped) if self._scaler else None
        self._minimum = change.after if skipped and change is not None and change.at_minimum else None
        for settled in self._observers.on_settled:
            settled(self.global_steps, norm)

    def _applies(self, outcome: GradStats) -> bool:
        """Whether a step with these gradients updates anything."""
        return outcome.finite or not self._options.check_finite

    def _raise_if_hopeless(self, outcome: GradStats) -> None:
        """After :meth:`_settle`."""
        if not self._applies(outcome):
            limit = self._options.max_skipped_in_a_row
            self.counters.raise_if_hopeless(self._describe(outcome), limit, self._minimum)

    def _describe(self, outcome: GradStats) -> str:
        blame = self._checks.blame if self._checks is not None else ""
        return self.counters.describe_skip(outcome, self._buffer.layout.slots, blame)


def trace_vote(trace: TraceCheck | None) -> int:
    """A number from 1 to 2^20 for a trace that waits to be compared; 0 if there is none."""
    waiting = trace.candidate_hash if trace is not None else 0
    return waiting % 1_048_573 + 1 if waiting else 0
