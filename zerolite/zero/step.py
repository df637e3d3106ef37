"""Step pipeline: one order of phases for all stages and precisions.

::

    reduce       wait for the reductions that backward has launched; reduce what no backward has reduced
    statistics   norm, overflow and used parameters, in one small all-reduce
    update       skip the step, or clip and update the shards that this rank owns
    all-gather   each bucket as soon as it is updated
    outcome      counters, learning rates, and last the loss scale
    zero_grad    drop the gradients

:meth:`StepPipeline.step` runs all phases. Each can be called by itself; it then runs the earlier phases that have not
run for the same gradients. The loss scale of an accumulation is captured at its first backward, before anything can
change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zerolite.comm import Communicator
from zerolite.comm.flight_recorder import EVENTS
from zerolite.precision.loss_scaler import LossScaler
from zerolite.zero.accumulation import GradAccumulation
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.checks import UpdateChecks, UpdateObserver
from zerolite.zero.grad_stats import StatsCollector, StatsVector
from zerolite.zero.gradient_changes import GradientChanges
from zerolite.zero.gradient_scale import GradientScale
from zerolite.zero.observers import REDUCE_WAIT, STEP, Observers
from zerolite.zero.optimizer import ShardedOptimizer
from zerolite.zero.outcomes import Outcomes, UnusedParameters, mean_weight
from zerolite.zero.param_gatherer import ParamGatherer
from zerolite.zero.reducer import Reducer
from zerolite.zero.stage3.fetch_schedule import ScheduleAgreement
from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator
from zerolite.zero.step_update import StagedUpdate, StepUpdate
from zerolite.zero.written_values import WrittenValues


@dataclass(frozen=True)
class StepOptions:
    """Options of a step, from the config.

    Attributes:
        max_norm: clip gradients to this L2 norm; 0 for never.
        check_finite: skip steps with non-finite gradients.
        max_skipped_in_a_row: raise after so many skipped steps; 0 for never.
        skip_on_device: let the device decide if a step is skipped, where the optimizer can, so that the host need not
            wait for the statistics.
        update_numel: number of master elements that torch's optimizer updates on the device in one call; a larger
            bucket is a call of its own.
        divide_plain_backward: divide the gradients of a backward that the user calls by the number of micro-batches.
    """

    max_norm: float
    check_finite: bool
    max_skipped_in_a_row: int
    skip_on_device: bool = False
    update_numel: int = 0
    divide_plain_backward: bool = False


class StepPipeline:
    """See the module. All methods are called on all ranks, in the same order.

    Attributes:
        outcomes: counters and outcomes of steps.
        gradient_scale: divisors of the accumulated gradients.
        changes: changes that the user makes to ``p.grad``.
        written: values that the user writes into parameters.
        suspended: reason why nothing can be done now, with the remedy; "" if the pipeline is available.
    """

    _same_gathers = True  # all ranks of the job gather the same number of parameters

    def __init__(
        self,
        buffer: ParameterBuffer,
        reducer: Reducer,
        optimizer: ShardedOptimizer,
        param_gatherer: ParamGatherer,
        comm: Communicator,
        accumulation: GradAccumulation,
        scaler: LossScaler | None,
        options: StepOptions,
        device: torch.device,
        staged: StagedUpdate,
        unused: UnusedParameters,
        collector: StatsCollector,
        observers: Observers,
        checks: UpdateChecks | None = None,
        observe_update: UpdateObserver | None = None,
    ) -> None:
        """
        Args:
            checks: checks whose numbers are reduced with the statistics.
            observe_update: observes the masters before and after each update.
        """
        self._buffer, self._reducer, self._optimizer, self._param_gatherer = buffer, reducer, optimizer, param_gatherer
        self._comm, self._device, self._collector, self._observers = comm, device, collector, observers
        self._accumulation, self._scaler, self._options = accumulation, scaler, options
        finite, limit = options.check_finite, options.max_skipped_in_a_row
        self.outcomes = Outcomes(optimizer.method, buffer, scaler, unused, observers, finite, limit, comm.main, checks)
        self.gradient_scale = GradientScale(accumulation, scaler, self.outcomes)
        self._step_update = StepUpdate(
            buffer,
            reducer,
            optimizer.method,
            param_gatherer,
            staged,
            self.gradient_scale,
            self.outcomes,
            options.update_numel,
            options.skip_on_device,
            comm.world_size,
            observe_update,
        )
        self.written = WrittenValues(buffer, param_gatherer, self._step_update, self.outcomes)
        self.suspended = ""
        self.use_layout()
        self.changes = GradientChanges(buffer, reducer, collector)
        self._begin_accumulation()

    def use_layout(self) -> None:
        """Rebuild the parts that depend on the buckets. Called between steps, after the layout has changed."""
        self._collector.use(self._buffer)
        self._step_update.plan()
        if self.outcomes.checks is not None:
            self.outcomes.checks.on_layout_changed()

    def use_coordinator(self, sharded: PartitionedParameterCoordinator) -> None:
        """Gather and write parameters through ``sharded``, at stage 3. Called before the first step."""
        self.written.use_coordinator(sharded)
        self.outcomes.use_schedules(ScheduleAgreement(sharded.schedule, self._comm.main))

    def _begin_accumulation(self) -> None:
        self._collector.clear()
        self.gradient_scale.begin_accumulation()
        self._max_norm = self._options.max_norm
        self._updated = False

    # ---------------------------------------------------------------- backward

    def begin_backward(self, engine_scaled: bool | None = None, weight: float | None = None) -> None:
        """Begin a backward, before its first gradient.

        Args:
            engine_scaled: True if ``engine.backward`` has divided the loss by the number of micro-batches, False if it
                has not; None inside a backward that the user has called.
            weight: factor by which ``engine.backward`` multiplies the loss instead, in units of
                :meth:`GradientScale.weight_unit`.

        Raises:
            RuntimeError: some backwards of the step have a weight, and others have none.
        """
        if self._reducer.current.open:
            return
        if self._updated:  # an update without zero_grad() has used the gradients: nothing is added to them
            self.zero_grad()
        scaled, weighted = bool(engine_scaled), weight is not None
        self.look_at_grads(before_backward=True)
        if self._reducer.shown.factors:
            self.changes.apply_factors()
        for notify in self._observers.before_backward:
            notify()
        self._accumulation.check_weight(weighted)
        # This depends on counters, which are equal on all ranks, and not on gradients: all ranks must launch the same
        # collectives.
        reducing = self._reducer.reduces_each_backward or self._accumulation.next_backward_closes()
        divided = engine_scaled is None and self._options.divide_plain_backward
        self._begin(scaled, weight, reducing, divided, end_with_backward=engine_scaled is None)
        for notify in self._observers.on_backward_begin:
            notify()

    def _begin(
        self, scaled: bool, weight: float | None, reducing: bool, divided: bool, end_with_backward: bool
    ) -> None:
        if self._collector.latest is not None:
            self._collector.discard()
        if self._scaler is not None:
            self.gradient_scale.loss_scale()
        self._reducer.begin_backward(
            reducing, end_with_backward, weight, self._accumulation.micro_batches if divided else 1
        )
        self._accumulation.on_backward(scaled, weight, divided)
        self.outcomes.counters.micro_steps += 1

    def end_failed_backward(self) -> None:
        """End a backward that has raised. The next step compares if it has on all ranks."""
        self._reducer.shown.note_change("left incomplete by a backward that raised an error", (), 0)
        self._reducer.end_backward(complete=False)

    def wait_for_reductions(self) -> None:
        """End an open backward and wait for its reductions. Accumulated gradients that it did not reduce stay so."""
        self._reducer.end_backward(complete=False)
        self._reducer.wait()

    # ---------------------------------------------------------------- phases

    def reduce(self) -> None:
        """Finish the mean of the gradients over ranks. Each rank then has the shard that it updates."""
        self.look_at_grads()
        self.finish_reductions()

    def finish_reductions(self) -> None:
        """Do the work of :meth:`reduce` after the caller has looked at ``p.grad`` with :meth:`look_at_grads`."""
        for begins in self._observers.on_phase_begin:
            begins(REDUCE_WAIT)
        try:
            self._reducer.finish()
        finally:
            for ended in self._observers.on_phase_end:
                ended(REDUCE_WAIT)

    def pending_parameters(self) -> frozenset[int]:
        """Return the indices of parameters with a gradient, on any rank, that no step has used."""
        self.look_at_grads()
        return frozenset() if self._accumulation.empty or self._updated else self.stats().get().used

    def unreadable_reason(self) -> str:
        """Return the reason why gradients cannot be read now, "" if they can."""
        self.check_available()
        if self._reducer.current.open:
            return "a backward is under way; read it when the backward has returned"
        return "engine.update() has used it" if self._updated else ""

    def look_at_grads(self, before_backward: bool = False, before_update: bool = False) -> None:
        """Apply the user's changes of ``p.grad``: None drops a gradient, a tensor replaces it.

        If the user has set all of them to None, this calls :meth:`zero_grad`: all ranks must have done so.

        Args:
            before_backward: more gradients will be added, which tensors refuse.
            before_update: the accumulation ends here. So it need not begin anew if all are None, and a rank on which
                they are launches what the others launch. The comparison of the ranks then finds it.
        """
        if self.suspended:
            self.check_available()
        if self._reducer.current.open:  # a backward has raised: what it has brought is not shown yet
            self.end_failed_backward()
        if self.changes.exposed:  # values that the user has written into lent memory count, even if it is dropped now
            self.changes.refresh_stats()
        found = self._reducer.shown.changed(self._reducer.parameters)
        if found:
            self._adopt_changes(found, before_update and not self._updated)
        if before_backward and self.changes.assigned:
            self.changes.refuse_assigned()
        stats = self._collector.latest
        if self.changes.assigned and stats is not None and not self._updated:
            self.changes.store_assigned(stats, self.gradient_scale.device_divisor(stats))

    def _adopt_changes(self, found: Mapping[int, torch.Tensor | None], before_update: bool) -> None:
        if self.changes.all_dropped(found):
            if not before_update:
                EVENTS.append(f"set p.grad of all parameters to None in step {self.outcomes.global_steps + 1}")
                self.zero_grad()
                return
            self._reducer.losses.clear()
            self._reducer.bucket_sums.clear()
        self.changes.adopt(found)

    def stats(self) -> StatsVector:
        """Return the statistics of the accumulated gradients; collect them if that has not been done."""
        self.check_available()
        if self._collector.latest is None:
            self.look_at_grads()
        return self._collected()

    def _collected(self) -> StatsVector:
        if self._collector.latest is not None:
            return self._collector.latest
        self.finish_reductions()
        schedules = self.outcomes.schedules
        stats = self._collector.collect(
            self._reducer.owned_shards(self._collector.noted),
            self._reducer.used,
            self._reducer.bucket_sums,
            0 if schedules is None else schedules.schedule_hash(),
            self._accumulation.weighted,
            self._accumulation.weight,
            self._reducer.losses,
            self.outcomes.checks,
        )
        if self.changes.assigned or self.changes.exposed:
            self.changes.store_assigned(stats, self.gradient_scale.device_divisor(stats))
        return stats

    def clip(self, max_norm: float) -> float:
        """Clip the accumulated gradients to ``max_norm`` in the update. Return their L2 norm before clipping."""
        if not max_norm > 0:
            raise ValueError(f"clip_gradients: expected max_norm > 0, got {max_norm}")
        self.look_at_grads()
        self._max_norm = float(max_norm)
        self.changes.apply_factors()
        return self.stats().get().norm / self.divisor()

    def update(self, gather: bool = False) -> None:
        """Update the shards that this rank owns, or skip the step on all ranks; then settle counters, learning rates
        and the loss scale."""
        self.look_at_grads(before_update=True)
        self._apply(gather)

    def _apply(self, gather: bool) -> None:
        """Run :meth:`update` after the caller has called :meth:`look_at_grads`."""
        for begins in self._observers.on_phase_begin:
            begins(STEP)
        try:
            if self._step_update.failed_update:
                self.check_no_failed_update()
            if self._updated:
                raise RuntimeError(
                    "engine.update() was called twice for the same gradients; call engine.zero_grad() first"
                )
            if self._step_update.params_outdated:
                raise RuntimeError("engine.update() was called twice without engine.publish() between")
            if self._optimizer.run_hooks("pre"):
                self.look_at_grads()
            self._update(gather)
            if gather:
                self._optimizer.run_hooks("post")
        finally:
            for phase_ended in self._observers.on_phase_end:
                phase_ended(STEP)
            for ended in self._observers.on_step_end:
                ended(self.outcomes.global_steps)

    def _update(self, gather: bool) -> None:
        checks, schedules = self.outcomes.checks, self.outcomes.schedules
        self.outcomes.raise_error()
        if schedules is not None:
            schedules.begin_update()
        self.written.collect()
        if checks is not None:
            gathers = schedules.schedule.gathers if schedules is not None and self._same_gathers else 0
            divisor = self.gradient_scale.local_divisor()
            changes = self._reducer.shown.changes
            checks.before_update(self.outcomes.counters, divisor, self._max_norm, gathers, changes)
        if self.changes.exposed:
            self.changes.refresh_stats()
        stats = self._collected()
        if schedules is not None:
            schedules.compare()
        given = self.changes.common_factor(stats) if self._reducer.shown.factors else 1.0
        self._updated = True  # set before the update: after an exception in it, nothing is applied twice
        self.changes.clear()  # nothing corrects the statistics from here on
        self._step_update.run(stats, given, self._max_norm, gather)

    def on_weights_replaced(self) -> None:
        """Forget the errors of earlier steps, because all weights have been loaded anew. Called on all ranks."""
        self.outcomes.drop_error()
        if self.outcomes.checks is not None:
            self.outcomes.checks.on_weights_written(all_of_them=True)

    def on_masters_loaded(self) -> None:
        """Copy loaded masters into the parameters, over values that were loaded into the parameters before."""
        self.written.forget()
        self.on_weights_replaced()
        self._buffer.placements.drop_reads()
        self._step_update.forget_failed_update()
        self.zero_grad()
        self.all_gather_params()

    def all_gather_params(self) -> None:
        """All-gather the updated values into the compute parameters of all ranks."""
        self.check_available()
        with self._observers.phase(STEP):
            for bucket in reversed(self._reducer.order):
                self._param_gatherer.gather_bucket(bucket)
            self._param_gatherer.end_step()
            if self._step_update.params_outdated:
                self._optimizer.run_hooks("post")
        self._step_update.on_params_gathered()

    def zero_grad(self) -> None:
        """Drop the accumulated gradients, with their clipping and loss scale."""
        for notify in self._observers.on_gradients_dropped:
            notify()
        self.changes.clear()  # first: the reducer checks which gradients the user still refers to
        self._reducer.clear()
        self._accumulation.reset()
        self._begin_accumulation()

    def step(self) -> None:
        """Run all phases. Afterwards there are no gradients."""
        self.look_at_grads(before_update=True)
        self._apply(gather=True)
        self.zero_grad()

    # ---------------------------------------------------------------- checkpoints

    @property
    def accumulating(self) -> bool:
        """True if there are gradients that no step has used; the same on all ranks."""
        return not (self._accumulation.empty or self._updated)

    def check_between_steps(self) -> None:
        """Settle what has been updated. Raises RuntimeError between ``update`` and ``publish``, and while the pipeline
        is suspended."""
        self.look_at_grads()
        self.outcomes.settle()  # a step that the device has skipped must not count in the optimizer states
        if self._step_update.params_outdated:
            raise RuntimeError(
                "a checkpoint was asked for between engine.update() and engine.publish(), where master weights are "
                "ahead of the parameters; call engine.publish() and engine.zero_grad() first"
            )

    def check_ranks(self) -> None:
        """Raise on all ranks if their weights or the numbers of their updates differ, or if the last update has made
        weights non-finite. Called on all ranks, between steps."""
        self.outcomes.raise_error()
        if self.outcomes.checks is not None:
            scale = self.gradient_scale.next_loss_scale()
            self.outcomes.checks.before_save(self.outcomes.counters, scale, self._max_norm)

    def on_all_loaded(self, state: Mapping[str, Any]) -> None:
        """Take over loaded weights, masters and states. Called on all ranks, after :meth:`zero_grad`.

        Args:
            state: saved :meth:`Outcomes.state_dict`.

        Raises:
            ValueError: ``state`` is not valid.
        """
        self.on_weights_replaced()
        self.outcomes.load_state_dict(state)
        self._buffer.placements.drop_reads()
        self._step_update.forget_failed_update()

    # ---------------------------------------------------------------- inside

    def divisor(self) -> float:
        """Return the divisor of the accumulated gradient. Called on all ranks."""
        divisor = self.gradient_scale.local_divisor()
        return divisor * mean_weight(self.stats().get()) if self._accumulation.weighted else divisor

    def suspend(self, why: str) -> None:
        """Refuse all operations with the reason ``why`` from now on, because the state is not there; "" ends it."""
        self.suspended = why

    def check_available(self) -> None:
        """Raise RuntimeError while the pipeline is suspended."""
        if self.suspended:
            raise RuntimeError(self.suspended)

    def check_no_failed_update(self) -> None:
        """Raise RuntimeError if an update has failed halfway and no checkpoint has been loaded since."""
        self._step_update.check_no_failed_update()
