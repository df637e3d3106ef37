"""Observers of a step: learning rate schedule, progress, loads and biases of experts, the program's own collectives."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from zerolite.activation_checkpointing import Attached
from zerolite.comm.process_group import program_collectives
from zerolite.moe.balancing import find_biases
from zerolite.moe.experts import SpreadCall
from zerolite.monitor import StepLog
from zerolite.zero.engine_parts import EngineParts, ModuleCall
from zerolite.zero.observers import StepObserver, UpdateFacts
from zerolite.zero.reducer import Reducer
from zerolite.zero.step_state import StepState

logger = logging.getLogger("zerolite")


class Progress(StepObserver):
    """Prints a line every ``steps_per_print`` steps. Exists on rank 0 alone."""

    def __init__(self, parts: EngineParts, checkpointing: Attached) -> None:
        self._optimizer, self._pipeline = parts.optimizer, parts.pipeline
        self._every, self._checkpointing = parts.config.steps_per_print, checkpointing

    def on_settled(self, step: int, norm: float) -> None:
        if step == 1:
            self._checkpointing.check_used()
        if self._every and step % self._every == 0:
            lr = ", ".join(f"{group['lr']:.3g}" for group in self._optimizer.inner.param_groups)
            skipped = self._pipeline.state.counters.skipped_steps
            scale = self._pipeline.state.next_loss_scale()
            print(f"step {step}: skipped {skipped}, lr {lr}, grad norm {norm:.4g}, loss scale {scale:g}", flush=True)


class LearningRateSchedule(StepObserver):
    """Schedule of learning rates, if there is one: moved after every update that was not skipped."""

    def __init__(self, scheduler: Any, state: StepState) -> None:
        self.scheduler, self._state = scheduler, state
        self._observes = False

    def observe(self) -> None:
        """Step the schedule, if there is one, after every update from now on."""
        if self.scheduler is not None and not self._observes:
            self._observes = True
            self._state.observers.add(self)

    def use(self, scheduler: object) -> None:
        """Step ``scheduler`` from now on; None for no schedule."""
        self.scheduler = scheduler
        self.observe()

    def settle(self) -> None:
        """Bring the learning rates up to date: the schedule is stepped when the outcome of a step is read. Without a
        schedule nothing is read, so a loop that steps its own schedule does not wait for the device."""
        if self.scheduler is not None:
            self._state.settle()

    def on_updated(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()


class ExpertLoads(StepObserver):
    """Writes how often each expert was chosen in a step, over all ranks and relative to the mean of its layer. The
    numbers are a slice of the statistics, so they cost no collective and no wait."""

    def __init__(self, calls: Mapping[str, SpreadCall], device: torch.device, log: StepLog) -> None:
        """
        Args:
            calls: the calls of experts, by the name of their module.
            log: writes on rank 0.
        """
        self._calls, self._log = calls, log
        self.slice_size = sum(call.experts for call in calls.values())
        self._loads = [call.count(device) for call in calls.values()]
        self._chosen = torch.zeros(self.slice_size, dtype=torch.float64)  # since the last step

    def write_slice(self, numbers: torch.Tensor) -> bool:
        numbers.copy_(torch.cat(self._loads))
        for load in self._loads:
            load.zero_()
        return True

    def read_slice(self, written: bool, sums: torch.Tensor) -> None:
        self._chosen += sums.to("cpu")  # clipping and saves collect statistics too, before the step does

    def on_settled(self, step: int, norm: float) -> None:
        first, values, chosen = 0, dict[str, float](), self._chosen.tolist()
        self._chosen.zero_()
        for name, call in self._calls.items():
            of_layer = chosen[first : first + call.experts]
            first += call.experts
            mean = sum(of_layer) / call.experts or 1.0
            values |= {f"{name}/{expert}": number / mean for expert, number in enumerate(of_layer)}
        self._log.write(step, values, "Experts")


class RouterBiases(StepObserver):
    """Moves the biases by which routers choose, so that experts have equal loads (arXiv:2412.19437, section 2.1.2):
    after the micro-batches of a step, also of one that is skipped. It costs a small all-reduce and no wait."""

    def __init__(self, parts: EngineParts, calls: Mapping[str, SpreadCall], coefficient: float) -> None:
        """
        Args:
            calls: the calls of experts, by the name of their module.
            coefficient: by which a bias moves.
        """
        self._coefficient, self._world = coefficient, parts.topology.world
        self._biases = list(find_biases(parts.model, calls).values())
        self._loads = [call.count(parts.device) for call in calls.values()]
        for module, name in self._biases:
            bias = module.get_buffer(name)
            if bias.element_size() < 4:  # it would lose small steps
                module._buffers[name] = bias.float()

    @torch.no_grad()
    def before_update(self, facts: UpdateFacts) -> None:
        loads = torch.cat(self._loads).double()
        self._world.all_reduce(loads, "experts").wait()
        of_layers = loads.split([len(load) for load in self._loads])
        for (module, name), load in zip(self._biases, of_layers, strict=True):
            bias = module.get_buffer(name)
            step = (load.mean() - load).sign().to(bias).view_as(bias)
            bias.add_(step, alpha=self._coefficient)
        self.on_gradients_dropped()

    def on_gradients_dropped(self) -> None:
        for load in self._loads:
            load.zero_()


class ProgramCollectives(StepObserver):
    """Counts the collectives of all groups that are not zerolite's, and tells the reducer when a backward has some.

    The first backward is not known yet. A model that communicates in its backward does so in its forward too, with few
    exceptions, so a forward of the engine that does is taken for a sign until a backward has ended.
    """

    def __init__(self, reducer: Reducer, call: ModuleCall, logs: bool) -> None:
        """
        Args:
            reducer: its ``program_communicates`` is set.
            call: the engine's forward.
            logs: this rank logs for all.
        """
        self._reducer, self._call, self._logs = reducer, call, logs
        self._call_module = call.replace(self._forward)
        self._learning = True
        self._before = 0

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        before = program_collectives()
        outputs = self._call_module(*args, **kwargs)
        if self._learning and program_collectives() != before:
            self._reducer.program_communicates = True
        return outputs

    def on_backward_begin(self) -> None:
        self._before = program_collectives()

    def on_backward_end(self) -> None:
        if self._learning:
            self._learning = self._reducer.program_communicates = False
            if self._call.call_module == self._forward:  # otherwise another one has been put around it
                self._call.replace(self._call_module)
        if not self._reducer.program_communicates and program_collectives() != self._before:
            self._reducer.program_communicates = True
            if self._logs:
                logger.info(
                    "the program launches collectives of its own within backward: from now on no reduction is waited "
                    "for inside it, which needs the memory of full gradients"
                )
