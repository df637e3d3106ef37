"""When stage 3 gathers and releases: launches against the uses of modules, limits, departures, ranks that differ."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests import models
from tests.distributed.cases.edges import everywhere_equal
from tests.distributed.cases.traffic import gathered, stage3_engine, stage3_loss
from zerolite.zero import GatheredParameters, ZeroParamStatus

Event = tuple[str, Any]


class Watch:
    """Everything that the coordinator of ``engine`` does, in order: ("enter" | "leave", unit) as its schedule is told,
    ("launch", names), ("module", name) when a module's forward begins, ("gradient", name) when its backward does.

    ``peaks``: after each launch, elements that are live or in flight, and how many the open uses need.
    """

    def __init__(self, engine: Any) -> None:
        self.coordinator = engine.coordinator
        self.events: list[Event] = []
        self.peaks: list[tuple[int, int]] = []
        for name, module in engine.module.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(lambda module, args, name=name: self._note("module", name))
                module.register_full_backward_pre_hook(lambda module, grads, name=name: self._note("gradient", name))
        schedule = self.coordinator.schedule
        self._enter, self._leave = schedule.enter, schedule.leave
        schedule.enter = self._on_enter
        schedule.leave = self._on_leave

    def _note(self, kind: str, what: Any) -> None:
        self.events.append((kind, what))

    def _on_enter(self, unit: int) -> Any:
        self._note("enter", unit)
        return self._enter(unit)

    def _on_leave(self, unit: int) -> Any:
        self._note("leave", unit)
        return self._leave(unit)

    @contextlib.contextmanager
    def launches(self) -> Iterator[None]:
        """Note launches inside."""
        group = self.coordinator.group
        original = group.all_gather

        def launch(members: Sequence[Any]) -> None:
            original(members)
            self._note("launch", tuple(member.name for member in members))
            self.peaks.append((self._live(), self._needed()))

        group.all_gather = launch
        try:
            yield
        finally:
            del group.all_gather

    def _live(self) -> int:
        return sum(h.numel for h in self.coordinator.handles if h.status is not ZeroParamStatus.NOT_AVAILABLE)

    def _needed(self) -> int:
        uses = [*self.coordinator._stack, *self.coordinator._backward]
        wanted = {index for use in uses for index in self.coordinator.schedule.units[use.unit.index]}
        return sum(self.coordinator.handles[index].numel for index in wanted)

    def unhook(self) -> None:
        """The schedule's own methods again."""
        del self.coordinator.schedule.enter, self.coordinator.schedule.leave


def events_of_steps(
    config: dict[str, Any], model: str = "Tower", sizes: dict[str, Any] | None = None, steps: int = 4
) -> dict[str, Any]:
    """The events of every step, and what a plan for them needs: units, elements, names."""
    engine = stage3_engine(config, model, sizes)
    watch = Watch(engine)
    schedule = engine.coordinator.schedule
    windows, following = [], []
    with watch.launches():
        for step in range(steps):
            start = len(watch.events)
            engine.backward(stage3_loss(engine, model, step))
            windows.append(watch.events[start:])
            following.append(schedule.following)
            engine.step()
            assert not gathered(engine), gathered(engine)
    watch.unhook()
    return {
        "windows": windows,
        "following": following,
        "peaks": watch.peaks,
        "names": [handle.name for handle in engine.coordinator.handles],
        "unit names": [unit.name for unit in engine.coordinator.units],
        "units": [list(unit) for unit in schedule.units],
        "numels": [handle.numel for handle in engine.coordinator.handles],
        "parameters": whole_values(engine),
    }


def whole_values(engine: Any) -> dict[str, Tensor]:
    """The parameters by name, whole, copied."""
    with GatheredParameters(engine.module):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


class Ways(nn.Module):
    """Layers of different sizes that a string of digits calls in any order: each maps [B, 6] to [B, 6]. A "|" keeps
    gradients from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 6)) for hidden in (3, 5, 7)
        )

    def forward(self, x: Tensor, way: str) -> Tensor:
        for digit in way:
            x = x.detach() if digit == "|" else x + self.layers[int(digit)](x)
        return x


class Twins(nn.Module):
    """Two modules with one weight; ``way`` says which is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.left = nn.Linear(6, 6, bias=False)
        self.right = nn.Linear(6, 6, bias=False)
        self.right.weight = self.left.weight

    def forward(self, x: Tensor, way: str) -> Tensor:
        x = torch.tanh(self.first(x))
        for digit in way:
            x = torch.tanh([self.left, self.right][int(digit)](x))
        return x


KINDS = {"Ways": Ways, "Twins": Twins}


def ways(config: dict[str, Any], model: str, steps: Sequence[Sequence[str]], evaluate: bool = False) -> dict[str, Any]:
    """Train with ``steps[step][rank]`` (or ``[0]``) as the way through the model; at any stage."""
    engine = zerolite.initialize(models.build(KINDS[model]), config)
    schedule = engine.coordinator.schedule if engine.coordinator is not None else None
    following, losses, collectives, warnings = [], [], [], []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zerolite")
    logger.addHandler(handler)
    try:
        for step, choices in enumerate(steps):
            way = choices[engine.rank % len(choices)]
            generator = torch.Generator().manual_seed(100 * step + engine.rank)
            x = torch.randn(4, 6, generator=generator)
            with zerolite.comm.record() as recorder:
                loss = engine(x, way).square().mean()
                engine.backward(loss)
                following.append(schedule is not None and schedule.following)
                engine.step()
            losses.append(loss.item())
            collectives.append([(c.op, c.numel, c.tag) for c in recorder.calls])
            if schedule is not None:
                assert not gathered(engine), gathered(engine)
            if evaluate:
                with torch.no_grad():
                    losses.append(engine(x, way[::-1]).square().mean().item())
    finally:
        logger.removeHandler(handler)
    values = whole_values(engine)
    everywhere_equal_values(values)
    return {
        "following": following,
        "losses": losses,
        "collectives": collectives,
        "warnings": warnings,
        "parameters": values,
        "on demand only": schedule is not None and schedule.on_demand_only,
    }


def everywhere_equal_values(values: dict[str, Tensor]) -> None:
    """The same bits on all ranks."""
    holder = nn.Module()
    for name, value in values.items():
        holder.register_parameter(name.replace(".", "_"), nn.Parameter(value.clone()))
    everywhere_equal(holder)


def different_orders(config: dict[str, Any], after: int) -> dict[str, Any]:
    """From step ``after`` on rank 1 calls the layers in another order: what each rank raises there."""
    engine = zerolite.initialize(models.build(Ways), config)
    for step in range(after + 1):
        way = "021" if step == after and dist.get_rank() == 1 else "012"
        try:
            engine.backward(engine(torch.ones(4, 6), way).square().mean())
            engine.step()
        except RuntimeError as error:
            assert step == after
            return {"message": str(error), "cause": str(error.__cause__)}
    raise AssertionError("nothing was raised")


class Towering(nn.Module):
    """A chain whose ``spare`` layer, registered last, gets a gradient only when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6 if not i else 8 + i, 9 + i) for i in range(5))
        self.spare = nn.Linear(6, 13)

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        hidden = x
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden + self.spare(x) if spare else hidden


def launch_order(config: dict[str, Any], spare_on: Sequence[int] = ()) -> dict[str, Any]:
    """Train a model with an unused layer; ``spare_on``: the ranks that use it from step 2 on. Of every step: the
    buckets in the order of their reductions, and how many of them were launched before the last gradient came."""
    engine = zerolite.initialize(models.build(Towering), config)
    orders, early = [], []
    for step in range(5):
        use = step >= 2 and engine.rank in spare_on
        with zerolite.comm.record() as recorder:
            seen: list[int] = []
            first = engine.module.layers[0].weight
            handle = first.register_hook(
                lambda gradient, recorder=recorder, seen=seen: seen.append(recorder.count(tag="gradients"))
            )
            generator = torch.Generator().manual_seed(10 * step + engine.rank)
            x = torch.randn(4, 6, generator=generator)
            engine.backward(engine(x, use).square().mean())
            handle.remove()
            engine.step()
        orders.append([call.key - 1 for call in recorder.select(tag="gradients")])
        early.append(max(seen))
    result = {"orders": orders, "early": early, "buckets": {}}
    for bucket in engine._reducer.layout.buckets:
        result["buckets"][bucket.index] = bucket.slots[0].name
    values = whole_values(engine)
    everywhere_equal_values(values)
    return result | {"parameters": values}


def over_messages(function: str, kwargs: dict[str, Any]) -> Any:
    """Another function of this module, without shared memory."""
    os.environ["ZEROLITE_SHARED_MEMORY"] = "0"
    return globals()[function](**kwargs)
