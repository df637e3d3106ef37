"""End of an engine: what the user's model and optimizer are afterwards."""

from __future__ import annotations

import functools

import torch
from torch.utils.hooks import RemovableHandle

from zerolite.access.parameter_access import OWNERS
from zerolite.engine.build_step import StepComponents
from zerolite.engine.components import EngineRef
from zerolite.engine.connections import remove_hooks
from zerolite.engine.state_offload import StateOffload
from zerolite.utils.finalizers import finalize_before_exit
from zerolite.zero.optimizer import GONE
from zerolite.zero.shown_gradients import GradientPlaceholder


def end_with(reference: EngineRef, parts: StepComponents, offload: StateOffload, hooks: list[RemovableHandle]) -> None:
    """Let the engine of ``reference`` own its parameters until it ends. ``hooks``: those on the model's modules."""
    engine = reference()
    for parameter in parts.owned:
        earlier = OWNERS.get(parameter)
        if earlier is not None:
            remove_hooks(earlier.refusals)
            earlier.refusals = []
        OWNERS[parameter] = reference
    reference.finalizers.append(finalize_before_exit(engine, _end, reference, parts, offload, hooks))


def _end(reference: EngineRef, parts: StepComponents, offload: StateOffload, hooks: list[RemovableHandle]) -> None:
    """Leave an ordinary model, whose backwards average nothing, and refuse everything else.

    On several ranks gradients that nothing averages are refused too where they can only be a mistake: before the first
    backward, where the engine was never kept, and at stage 3, because each rank has a part of the parameters only.
    """
    offload.restore()
    parts.param_gatherer.wait_all()
    if parts.partitioned is not None:
        parts.partitioned.context.gathers_for_operations = True  # the next engine decides
    parts.reducer.current.end()  # an exception may have cut its last backward short
    parameters = parts.reducer.parameters
    remove_hooks(parts.reducer.handles, parts.param_gatherer.handles, hooks, parts.setup.fp32.handles)
    for parameter in parameters:  # pending gradients are gone; those of a later life of the model stay
        if reference.destroyed or isinstance(parameter.grad, GradientPlaceholder):
            parameter.grad = None
    parts.sharded.release_inner(refuses=not reference.destroyed)
    parts.pipeline.suspend(f"expected an engine, but {GONE}")
    if parts.comm.world_size == 1 or not parts.setup.trains:
        return
    unused = not parts.pipeline.state.counters.micro_steps
    if parts.partitioned is not None or (unused and not reference.destroyed):
        for slot, parameter in zip(parts.buffer.layout.slots, parameters, strict=True):
            refuse = functools.partial(_refuse_gradient, slot.name)
            reference.refusals.append(parameter.register_post_accumulate_grad_hook(refuse))


def _refuse_gradient(name: str, parameter: torch.Tensor) -> None:
    parameter.grad = None
    raise RuntimeError(f"parameter '{name}' got a gradient that nothing averages over the ranks: {GONE}")
