"""Life of an engine: the weak reference to it, and what the user's model and optimizer are after its end."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from zerolite.checkpoint.parameter_access import OWNERS, ParameterAccess
from zerolite.utils.module_hook import finalize_before_exit
from zerolite.zero.engine_parts import EngineParts
from zerolite.zero.optimizer import GONE
from zerolite.zero.sharded_gradient import ShardedGradient

if TYPE_CHECKING:
    from zerolite.engine.engine_base import EngineBase


class EngineRef:
    """Weak reference to an engine. A call returns the engine; None after its end.

    Nothing but the user's own references keeps an engine alive. It ends when they are gone, or by :meth:`end`.

    Attributes:
        finalizers: what the end of the engine runs, in order.
        destroyed: the user has called :meth:`end`.
        refusals: hooks that refuse gradients after the end, until another engine takes the parameters.
    """

    def __init__(self, engine: EngineBase) -> None:
        self._ref: weakref.ref[EngineBase] | None = weakref.ref(engine)
        self.finalizers: list[weakref.finalize[..., Any]] = []
        self.destroyed = False
        self.refusals: list[RemovableHandle] = []

    def end(self) -> None:
        """End the engine, even if something still refers to it. May be called twice."""
        self.destroyed = True
        for finalizer in self.finalizers:
            alive = finalizer.detach()
            if alive is not None:
                _, function, args, _ = alive
                function(*args)
        self._ref = None

    def remove_refusals(self) -> None:
        """Remove the hooks that refuse gradients, because another engine takes the parameters."""
        _remove(self.refusals)
        self.refusals = []

    def access(self) -> ParameterAccess | None:
        """Return the access to the engine's gradients, masters and states; None after its end."""
        engine = self()
        return None if engine is None else engine._access

    def __call__(self) -> EngineBase | None:
        return None if self._ref is None else self._ref()


def own_until_end(engine: EngineBase, hooks: Sequence[list[Any]]) -> None:
    """Let ``engine`` own its parameters until it ends. ``hooks``: lists of hooks to remove, which may still grow."""
    reference, parts, restore = engine._reference, engine._parts, engine._offload.restore
    for parameter in parts.owned:
        earlier = OWNERS.get(parameter)
        if earlier is not None:
            earlier.remove_refusals()
        OWNERS[parameter] = reference
    reference.finalizers.append(finalize_before_exit(engine, _end, reference, parts, restore, hooks))


def _end(reference: EngineRef, parts: EngineParts, restore: Callable[[], None], hooks: Sequence[list[Any]]) -> None:
    """Leave an ordinary model, whose backwards average nothing, and refuse everything else.

    On several ranks gradients that nothing averages are refused too where they can only be a mistake: before the first
    backward, where the engine was never kept, and at stage 3, because each rank has a part of the parameters only.
    """
    restore()
    try:
        parts.param_gatherer.wait_all()
    finally:  # if another rank has gone, the parameters whose values do not come raise, and all else ends
        _leave_model(reference, parts, hooks)


def _leave_model(reference: EngineRef, parts: EngineParts, hooks: Sequence[list[Any]]) -> None:
    if parts.partitioned is not None:
        parts.partitioned.context.set_gathers_for_operations(True)  # the next engine decides
    parts.reducer.current.end()  # an exception may have cut its last backward short
    parameters = parts.reducer.parameters
    _remove(parts.reducer.hooks.handles, [*parts.reducer.hooks.early.values()], *hooks)
    for parameter in parameters:  # pending gradients are gone; those of a later life of the model stay
        if reference.destroyed or isinstance(parameter.grad, ShardedGradient):
            parameter.grad = None
    parts.optimizer.release_inner(refuses=not reference.destroyed)
    parts.pipeline.suspend(f"expected an engine, but {GONE}")
    if parts.topology.data.world_size == 1 or not parts.trains:
        return
    unused = not parts.pipeline.state.counters.micro_steps
    if parts.partitioned is not None or (unused and not reference.destroyed):
        for slot, parameter in zip(parts.buffer.layout.slots, parameters, strict=True):
            refuse = functools.partial(_refuse_gradient, slot.name)
            reference.refusals.append(parameter.register_post_accumulate_grad_hook(refuse))


def _refuse_gradient(name: str, parameter: torch.Tensor) -> None:
    parameter.grad = None
    raise RuntimeError(f"parameter '{name}' got a gradient that nothing averages over the ranks: {GONE}")


def _remove(*lists: list[Any]) -> None:
    for handle in [handle for handles in lists for handle in handles]:
        handle.remove()
