"""Step pipeline: one order of phases for all stages and precisions.

::

    reduce       wait for the reductions that backward has launched; reduce what no backward has reduced
    statistics   norm, overflow and used parameters, in one small all-reduce
    update       skip the step, or clip and update the shards that this rank owns
    all-gather   each bucket as soon as it is updated
    outcome      counters, learning rates, and last the loss scale
    zero_grad    drop the gradients

:meth:`StepPipeline.step` runs all phases; the first two also run when gradients or their norm are asked for before. The
loss scale of an accumulation is captured at its first backward, before anything can change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from zerolite.comm import collective
from zerolite.comm.flight_recorder import EVENTS
from zerolite.zero.grads import Factor, Gradients
from zerolite.zero.observers import REDUCE_WAIT, STEP
from zerolite.zero.optimizer import ShardedOptimizer
from zerolite.zero.reducer import Reducer
from zerolite.zero.stats import StatsCollector, StatsVector
from zerolite.zero.step_state import StepState, mean_weight
from zerolite.zero.step_update import StepUpdate, WrittenValues
from zerolite.zero.update import UpdateInputs

_NOT_IN_P_GRAD = (
    "with tensor_parallel or a pipeline a rank has a part of the model only. To clip, set gradient_clipping in the "
    "config, or call engine.clip_gradients(max_norm), which returns the norm; to read or change it, use "
    "zerolite.get_full_grad(p) and zerolite.set_full_grad(p, value) on all ranks"
)


@collective
class StepPipeline:
    """See the module.

    Attributes:
        state: what has happened in this step and in those before it.
        grads: values of ``p.grad``, and what the user changes there.
        written: values that the user writes into parameters.
        suspended: reason why nothing can be done now, with the remedy; "" if the pipeline is available.
    """

    def __init__(
        self,
        reducer: Reducer,
        optimizer: ShardedOptimizer,
        update: StepUpdate,
        collector: StatsCollector,
        state: StepState,
    ) -> None:
        self.state, self._observers, self._accumulation = state, state.observers, state.accumulation
        self._reducer, self._optimizer, self._collector, self._step_update = reducer, optimizer, collector, update
        self._buffer, self._param_gatherer = update.buffer, update.param_gatherer
        self.written = WrittenValues(update, state.observers)
        self.suspended = ""
        self._max_norm, self._updated = state.options.max_norm, False
        self.use_layout()
        self.grads = Gradients(self, reducer, collector)

    def use_layout(self) -> None:
        """Rebuild the parts that depend on the buckets. Called between steps, after the layout has changed."""
        self._collector.use(self._buffer)
        self._step_update.plan()
        for notify in self._observers.on_layout_changed:
            notify()

    # ---------------------------------------------------------------- a step

    def step(self) -> None:
        """Update the parameters, or skip the step on all ranks; then settle counters, learning rates and the loss
        scale. Afterwards there are no gradients."""
        self.look_at_grads(before_update=True)
        for begins in self._observers.on_phase_begin:
            begins(STEP)
        try:
            if self._step_update.failed_update:
                self.check_no_failed_update()
            if self._updated:
                raise RuntimeError(
                    "a step with these gradients has raised an error after its update had begun; call "
                    "engine.zero_grad() first"
                )
            if self._optimizer.run_hooks("pre"):
                self.look_at_grads()
            self._update()
            self._optimizer.run_hooks("post")
        finally:
            for phase_ended in self._observers.on_phase_end:
                phase_ended(STEP)
            for ended in self._observers.on_step_end:
                ended(self.state.global_steps)
        self.zero_grad()

    def _update(self) -> None:
        state, observers, update = self.state, self._observers, self._step_update
        state.raise_error()
        refused = self._attempt(self.written.collect, self._optimizer.method.take_over)
        if observers.before_update:
            facts = state.facts(self._max_norm, self.grads.changes)
            for check in observers.before_update:
                check(facts)
        vector = self._collected(refused)  # reduce, statistics
        if refused is None:
            refused = vector.refused
        elif vector.refused is None:  # clipping has collected them before
            state.leave_out(refused)
        self._updated = True  # set before the update: after an exception in it, nothing is applied twice
        if self.grads.is_touched:
            self.grads.clear()  # nothing corrects the statistics from here on
        # Where the host reads the statistics, all ranks read equal ones: all raise, launch the all-gathers, or skip.
        stats = None if update.device_decides else state.read(vector)
        factor, divisor = state.update_factor(vector, stats, self._max_norm)  # clip
        if stats is None:
            self._update_unread(vector, factor, divisor, refused is not None)
            return
        if not stats.skipped:
            update.run(UpdateInputs(factor, stats.used) if refused is None else None)  # update, gather
        state.end_step(stats, divisor)  # outcome

    def _update_unread(self, vector: StatsVector, factor: Factor, divisor: float, refuses: bool) -> None:
        """Update where the device decides on a skip, so that the host reads the statistics later. refuses: this rank
        cannot update."""
        state, update = self.state, self._step_update
        skips = vector.skips(bool(self._accumulation.weighted))
        update.run(None if refuses else UpdateInputs(factor, update.used_somewhere(vector), skips))
        state.read_later(vector, divisor)

    def _attempt(self, *actions: Callable[[], None]) -> Exception | None:
        """Take over what the user has changed on this rank. Return the error if the update cannot follow it: this rank
        must not raise it before the statistics have told the others, which would wait for it."""
        try:
            for action in actions:
                action()
        except Exception as error:
            if self._reducer.groups.agree.world_size == 1:
                raise
            return error
        return None

    def all_gather_params(self) -> None:
        """All-gather the updated values into the compute parameters of all ranks."""
        self.check_available()
        with self._observers.phase(STEP):
            for bucket in reversed(self._reducer.order):
                self._param_gatherer.gather_bucket(bucket)
            self._param_gatherer.end_step()

    def zero_grad(self) -> None:
        """Drop the accumulated gradients, with their clipping and loss scale."""
        if not (self._updated or self._accumulation.empty):
            self.state.on_sums_dropped()
            if (offloads := self._reducer.offloads) is not None:  # no step has told what it has lost
                self.state.left_out = self.state.left_out or offloads.lost
        self._reducer.clear()  # first: it ends a backward that has raised here, and launches as other ranks have
        for notify in self._observers.on_gradients_dropped:
            notify()
        if self.grads.is_touched:
            self.grads.clear()
        self._collector.clear()
        self._accumulation.reset()
        self._max_norm, self._updated = self.state.options.max_norm, False

    # ---------------------------------------------------------------- backward

    def begin_backward(self, engine_scaled: bool | None = None, weight: float | None = None) -> None:
        """Begin a backward, before its first gradient.

        Args:
            engine_scaled: True if ``engine.backward`` has divided the loss by the number of micro-batches, False if it
                has not; None inside a backward that the user has called.
            weight: factor by which ``engine.backward`` multiplies the loss instead, in units of
                :meth:`StepState.weight_unit`.

        Raises:
            RuntimeError: some backwards of the step have a weight, and others have none.
        """
        if self._reducer.current.open:
            return
        if not self._buffer.parameters:  # nothing is trained: the backward passes through the model to its inputs
            self.check_available()
            for notify in self._observers.before_backward:
                notify()
            return
        if self._updated:  # a step that has raised has used the gradients: nothing is added to them
            self.grads.refuse_assigned(self._reducer.shown.changed())
            self.zero_grad()
        self.look_at_grads(before_backward=True)
        for notify in self._observers.before_backward:
            notify()
        # This depends on counters, which are equal on all ranks, and not on gradients: all ranks must launch the same
        # collectives.
        reducing = self._reducer.reduces_each_backward or self._accumulation.next_backward_closes()
        divided = engine_scaled is None and self.state.options.divide_plain_backward
        if self._collector.latest is not None:
            self._collector.discard()
        self.state.on_backward(bool(engine_scaled), weight, divided)
        divisor = self._accumulation.micro_batches if divided else 1
        discards = weight == 0 and not self._accumulation.of_others
        self._reducer.begin_backward(reducing, engine_scaled is None, discards, divisor)
        for notify in self._observers.on_backward_begin:
            notify()

    def end_failed_backward(self) -> None:
        """End a backward that has raised. The next step compares if it has on all ranks."""
        self.grads.note_change("left incomplete by a backward that raised an error", count=0)
        self._reducer.end_backward(complete=False)

    def wait_for_reductions(self) -> None:
        """End an open backward and wait for its reductions. Accumulated gradients that it did not reduce stay so."""
        self._reducer.end_backward(complete=False)
        self._reducer.wait()

    # ---------------------------------------------------------------- gradients

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
            for notify in self._observers.on_reduced:
                notify()
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
        if self._updated:
            return "a step that has raised an error has used it"
        return _NOT_IN_P_GRAD if self.state.options.has_parts else ""

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
        current = self._reducer.current
        if current.open or current.lost_gradient:  # a backward has raised: what it has brought may not be shown yet
            self.end_failed_backward()
        if self._reducer.groups.replicate is not None and not before_backward:
            # To drop a gradient a rank waits for its sums, which on the CPU launches those over replicas. So all ranks
            # wait here: or it would wait for theirs, or launch on the replicas' group in another order.
            self._reducer.wait()
        if self.grads.is_touched:
            self.grads.check_writes()
        changed = self._reducer.shown.changed()
        if changed:
            self._adopt_changes(changed, before_update and not self._updated)
        if self.grads.assigned:
            if before_backward:
                self.grads.refuse_assigned(self.grads.assigned)
            if self._collector.latest is not None and not self._updated:
                self.grads.store(self._collector.latest)

    def _adopt_changes(self, changed: Mapping[int, torch.Tensor | None], before_update: bool) -> None:
        has_parts = self.state.options.has_parts
        if self._reducer.shown.all_dropped():
            if not before_update or has_parts:  # begin anew: sums over the parts of the model may have been added
                EVENTS.append(f"set p.grad of all parameters to None in step {self.state.global_steps + 1}")
                self.zero_grad()
                return
            self._reducer.losses.clear()
            self._reducer.bucket_sums.clear()
        elif has_parts:
            name = self._buffer.layout.slots[min(changed)].name
            raise RuntimeError(
                f"p.grad of parameter '{name}' was replaced, where tensor_parallel or a pipeline leaves parts of the "
                "model on other ranks; use zerolite.set_full_grad(p, value) on all ranks"
            )
        self.grads.adopt(changed)

    def stats(self) -> StatsVector:
        """Return the statistics of the accumulated gradients; collect them if that has not been done."""
        self.check_available()
        refused = None
        if self._collector.latest is None:
            self.look_at_grads()
            self.state.settle()  # a step that the device has skipped must not count in the optimizer states
            refused = self._attempt(self._optimizer.method.take_over)
        return self._collected(refused)

    def _collected(self, refused: Exception | None) -> StatsVector:
        if self._collector.latest is not None:
            return self._collector.latest
        self.finish_reductions()
        stats = self._collector.collect(self._reducer, self.state, self.state.left_out or refused)
        if self.grads.assigned:
            self.grads.store(stats)
        return stats

    def clip(self, max_norm: float) -> float:
        """Clip the accumulated gradients to ``max_norm`` in the update. Return their L2 norm before clipping."""
        if not max_norm > 0:
            raise ValueError(f"clip_gradients: expected max_norm > 0, got {max_norm}")
        self.look_at_grads()
        self._max_norm = float(max_norm)
        return self.stats().get().norm / self.divisor()

    def on_masters_loaded(self) -> None:
        """Copy loaded masters into the parameters, over values that were loaded into the parameters before."""
        self.written.forget()
        self._on_loaded()
        self.zero_grad()
        self.all_gather_params()
        self._param_gatherer.wait_all()  # what is compiled in the first forward must find parameters of their own class

    # ---------------------------------------------------------------- checkpoints

    @property
    def accumulating(self) -> bool:
        """True if there are gradients that no step has used; the same on all ranks."""
        return not (self._accumulation.empty or self._updated)

    def check_between_steps(self) -> None:
        """Settle what has been updated. Raises RuntimeError while the pipeline is suspended."""
        self.look_at_grads()
        self.state.settle()  # a step that the device has skipped must not count in the optimizer states

    @collective
    def check_ranks(self) -> None:
        """Raise on all ranks if their weights or the numbers of their updates differ. Called between steps."""
        self._param_gatherer.wait_all()
        self.state.raise_error()
        refused = self.state.left_out or self._attempt(self._optimizer.method.take_over)
        facts = self.state.facts(self._max_norm, ())._replace(divisor=self.state.next_loss_scale())
        for check in self._observers.before_save:
            check(facts)
        refusals, written, sums = self._collector.exchange_slices(refused)
        error = self.state.read_slices(written, sums)
        if refusals:
            self.state.raise_refusal(refused)
        if error is not None:
            raise error
        self.state.raise_error()

    @collective
    def on_all_loaded(self, state: Mapping[str, Any]) -> None:
        """Take over loaded weights, masters and states. Called after :meth:`zero_grad`.

        Args:
            state: saved :meth:`StepState.state_dict`.

        Raises:
            ValueError: ``state`` is not valid.
        """
        self._on_loaded()
        self.state.load_state_dict(state)

    def _on_loaded(self) -> None:
        self.state.on_weights_replaced()
        self._buffer.placements.drop_reads(replaced=True)
        self._step_update.forget_failed_update()

    # ---------------------------------------------------------------- inside

    @collective
    def divisor(self) -> float:
        """Return the divisor of the accumulated gradient."""
        divisor = self.state.local_divisor()
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
