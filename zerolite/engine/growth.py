"""Parameters that become trainable later: unfrozen midway, or added in a param group.

They get buckets of their own behind the existing ones, so gradients, masters and states of the others stay in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerolite.comm import Communicator
from zerolite.diagnostics.agreement import Description, check_agreement, describe_parameter
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.grad_reducer import GradReducer
from zerolite.zero.layout import PartitionLayout
from zerolite.zero.param_gatherer import ParamGatherer
from zerolite.zero.sharded_optimizer import ShardedOptimizer
from zerolite.zero.stage3.partitioned_parameter import handle_of
from zerolite.zero.step import StepPipeline

_DIFFERENT = "zerolite: the ranks begin to train different parameters (unfrozen, or added in a param group)"

Parameters = Sequence[torch.nn.Parameter]


@dataclass(frozen=True)
class Ways:
    """Callbacks that depend on stage and config: they lay out new parameters in buckets, fill these, and tell other
    objects of the parameters that are trained by then."""

    layout_of: Callable[[Parameters, dict[int, str]], PartitionLayout]
    fill: Callable[[], None]
    tell: Callable[[Parameters], None]


class Growth:
    """All of it is called on all ranks at the same point, for the same parameters: the user's ``requires_grad_`` and
    ``add_param_group`` are calls of all ranks, as the engine's methods are. Which parameters they are is compared."""

    def __init__(
        self,
        model: torch.nn.Module,
        comm: Communicator,
        device: torch.device,
        buffer: ParameterBuffer,
        reducer: GradReducer,
        optimizer: ShardedOptimizer,
        param_gatherer: ParamGatherer,
        pipeline: StepPipeline,
        ways: Ways,
        adopts: bool,
        event: list[Callable[[], None]],
    ) -> None:
        """
        Args:
            adopts: whether a parameter that wakes up and is in no param group joins the only one; otherwise the user
                has chosen what is trained.
            event: the listeners of that in which :meth:`wake` is due.
        """
        self._model = model
        self._comm = comm
        self._device = device
        self._buffer = buffer
        self._reducer = reducer
        self._optimizer = optimizer
        self._param_gatherer = param_gatherer
        self._pipeline = pipeline
        self._ways = ways
        self._adopts = adopts
        self._event = event
        self._offloaded: list[torch.nn.Parameter] = []
        self._watch([p for p in model.parameters() if not p.requires_grad])

    def _watch(self, parameters: Parameters) -> None:
        """Train these as soon as they require a gradient."""
        if parameters and not self._offloaded and self.wake not in self._event:
            self._event.append(self.wake)
        self._offloaded += parameters

    def wake(self) -> None:
        """Train what was frozen when the engine was made and requires a gradient now. Before a backward's first
        gradient, and at stage 3 before the forward that uses it."""
        woken = [p for p in self._offloaded if p.requires_grad]
        if not woken:
            return
        groups = self._optimizer.inner.param_groups
        grouped = {id(p) for group in groups for p in group["params"]}
        homeless = [p for p in woken if id(p) not in grouped]
        if homeless and not (self._adopts and len(groups) == 1):
            name = self._names()[id(homeless[0])]
            raise RuntimeError(
                f"parameter '{name}' was frozen when zerolite.initialize was called, requires a gradient now, and is "
                "in no param group of the optimizer, so nothing would train it. Say how it is to be trained, before "
                "its forward: engine.optimizer.add_param_group({'params': [...], 'lr': ...})"
            )
        groups[0]["params"].extend(homeless)
        self._train(woken)

    def add_group(self, group: Mapping[str, Any]) -> None:
        """engine.optimizer.add_param_group. The group's parameters that are frozen are trained when they wake up."""
        given: Any = group["params"]
        parameters: list[Any] = [given] if isinstance(given, torch.Tensor) else list(given)
        names = self._names()
        trained = {id(p) for p in self._reducer.parameters}
        partitioned = any(handle_of(p) is not None for p in self._reducer.parameters)
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
        inner = self._optimizer.inner
        type(inner).add_param_group(inner, {**group, "params": parameters})
        offloaded = {id(p) for p in self._offloaded}
        self._watch([p for p in parameters if id(p) not in offloaded])
        self.wake()

    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self._model.named_parameters()}

    @torch.no_grad()
    def _train(self, parameters: Parameters) -> None:
        names = self._names()
        described = {f"parameter '{names[id(p)]}'": describe_parameter(p) for p in parameters}
        order = {"the parameters": [names[id(p)] for p in parameters]}
        check_agreement(Description(described, orders=order), self._comm, self._device, _DIFFERENT)
        self._pipeline.outcomes.settle()
        self._param_gatherer.wait_all()
        everything = [*self._reducer.parameters, *parameters]
        layout = self._buffer.layout.extended(self._ways.layout_of(parameters, names))
        self._buffer.use(layout, everything)
        self._ways.fill()
        strides = [h.strides if (h := handle_of(p)) is not None else p.stride() for p in everything]
        self._reducer.use(layout, everything, strides)
        self._reducer.arrivals.attach_rest()
        self._optimizer.extend()
        self._pipeline.count_buckets()
        self._param_gatherer.attach(self._model)
        self._ways.tell(parameters)
        woken = {id(p) for p in parameters}
        self._offloaded = [p for p in self._offloaded if id(p) not in woken]
