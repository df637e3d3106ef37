"""Parameters that become trainable later: unfrozen midway, or added in a param group.

They get new buckets behind the existing ones, so gradients, masters and states of the other parameters stay in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zerolite.access.parameter_access import OWNERS
from zerolite.comm.flight_recorder import EVENTS
from zerolite.diagnostics.rank_comparison import Description, check_equal_on_ranks, describe_parameter
from zerolite.engine.build_stage3 import launch_by_groups
from zerolite.engine.components import EngineRef
from zerolite.engine.model_values import fill_buckets
from zerolite.zero.stage3.partitioned_parameter import handle_of

if TYPE_CHECKING:
    from zerolite.engine.build_step import StepComponents

_DIFFERENT = "zerolite: the ranks begin to train different parameters (unfrozen, or added in a param group)"

Parameters = Sequence[torch.nn.Parameter]


class UnfrozenParams:
    """Registers parameters that become trainable. Called on all ranks at the same point, for the same parameters.

    So the user must call ``requires_grad_`` and ``add_param_group`` on all ranks, like the engine's methods. The ranks
    compare which parameters they register.
    """

    def __init__(self, parts: StepComponents, engine: EngineRef, adopts: bool, event: list[Callable[[], None]]) -> None:
        """
        Args:
            parts: the engine's components, which must learn of such parameters.
            engine: the engine that owns such parameters from then on.
            adopts: an unfrozen parameter without a param group joins the only group. False if the user has chosen which
                parameters are trained.
            event: list of listeners to which :meth:`register_unfrozen_params` is added.
        """
        self._parts, self._engine = parts, engine
        self._adopts, self._event = adopts, event
        self._frozen: list[torch.nn.Parameter] = []
        self._watch([p for p in parts.setup.model.parameters() if not p.requires_grad])

    def _watch(self, parameters: Parameters) -> None:
        """Register these as soon as they require a gradient."""
        if parameters and not self._frozen and self.register_unfrozen_params not in self._event:
            self._event.append(self.register_unfrozen_params)
        self._frozen += parameters

    def register_unfrozen_params(self) -> None:
        """Train parameters that were frozen and require a gradient now. Called before a backward's first gradient, at
        stage 3 before the forward."""
        unfrozen = [p for p in self._frozen if p.requires_grad]
        if not unfrozen:
            return
        groups = self._parts.sharded.inner.param_groups
        grouped = {id(p) for group in groups for p in group["params"]}
        homeless = [p for p in unfrozen if id(p) not in grouped]
        if homeless and not (self._adopts and len(groups) == 1):
            name = self._names()[id(homeless[0])]
            raise RuntimeError(
                f"parameter '{name}' was frozen when zerolite.initialize was called, requires a gradient now, and is "
                "in no param group of the optimizer, so nothing would train it. Say how it is to be trained, before "
                "its forward: engine.optimizer.add_param_group({'params': [...], 'lr': ...})"
            )
        groups[0]["params"].extend(homeless)
        self._train(unfrozen)

    def add_group(self, group: Mapping[str, object]) -> None:
        """Run ``engine.optimizer.add_param_group``. Frozen parameters of the group are trained once they are
        unfrozen."""
        given: Any = group["params"]
        parameters: list[Any] = [given] if isinstance(given, torch.Tensor) else list(given)
        names = self._names()
        trained = {id(p) for p in self._parts.reducer.parameters}
        partitioned = any(handle_of(p) is not None for p in self._parts.reducer.parameters)
        for p in parameters:
            name = names.get(id(p))
            problem = None
            if name is None:
                problem = f"a tensor of shape {tuple(p.shape)} that is no parameter of the engine's module"
            elif id(p) in trained:
                problem = f"parameter '{name}', which is trained already"
            elif p.grad is not None:
                problem = f"parameter '{name}' with a gradient, which would be lost; call zero_grad first"
            elif partitioned and handle_of(p) is None:
                problem = (
                    f"parameter '{name}', which the module did not have when it was partitioned; at stage 3 add "
                    "modules before zerolite.initialize"
                )
            if problem is not None:
                raise ValueError(f"engine.optimizer.add_param_group: expected parameters to train, got {problem}")
        inner = self._parts.sharded.inner
        type(inner).add_param_group(inner, {**group, "params": parameters})
        frozen = {id(p) for p in self._frozen}
        self._watch([p for p in parameters if id(p) not in frozen])
        self.register_unfrozen_params()

    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self._parts.setup.model.named_parameters()}

    @torch.no_grad()
    def _train(self, parameters: Parameters) -> None:
        names = self._names()
        more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        step = self._parts.pipeline.state.global_steps + 1
        EVENTS.append(f"began to train parameter '{names[id(parameters[0])]}'{more} in step {step}")
        described = {f"parameter '{names[id(p)]}'": describe_parameter(p) for p in parameters}
        order = {"the parameters": [names[id(p)] for p in parameters]}
        parts, setup = self._parts, self._parts.setup
        check_equal_on_ranks(Description(described, orders=order), parts.comm, setup.device, _DIFFERENT, tag="unfrozen")
        parts.pipeline.state.settle()
        parts.param_gatherer.wait_all()
        if parts.partitioned is not None:
            parts.partitioned.coordinator.collect_frozen_writes()
        everything = [*parts.reducer.parameters, *parameters]
        layout = parts.buffer.layout.extended(parts.layout_of(parameters, names))
        first = len(parts.buffer.buckets)
        parts.buffer.set_layout(layout, everything)
        fill_buckets(parts.buffer, setup.precision, parts.comm, setup.device)
        parts.reducer.use_layout()
        parts.reducer.attach_new()
        parts.sharded.add_buckets(parts.buffer.buckets[first:])
        parts.pipeline.use_layout()
        parts.param_gatherer.install_hooks(setup.model)
        for parameter in parameters:
            OWNERS[parameter] = self._engine
        if parts.partitioned is not None:
            launch_by_groups(parts.partitioned, parts.reducer)
        unfrozen = {id(p) for p in parameters}
        self._frozen = [p for p in self._frozen if id(p) not in unfrozen]
