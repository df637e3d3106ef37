"""Models that stage 3 must train to the bits of stage 2: how they are registered, trained and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same
from tests.toolkit.configs import ADAMW, at, config
from zerolite.zero import ZeroParamStatus

WIDTH = 6
HIDDEN = 11
LENGTH = 5
SETTINGS = ("moving", "tight", "one unit")


class Parts(nn.Module):
    """A module with the given submodules, parameters and other attributes."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Case(Parts):
    """A model to compare. ``stable``: every step does the same, so the plan is followed in the end. ``evaluates``: an
    evaluation precedes each forward. ``zero``: more keys for its config at stage 3."""

    stable, evaluates = True, False
    zero: dict[str, Any] = {}

    def prepare(self, step: int) -> None:
        """Called before each step."""

    @staticmethod
    def step(engine: Any, step: int) -> Tensor:
        """The loss of a micro-batch."""
        return loss_of(engine(batch(step)))


class Cases:
    """The cases of one file, by name."""

    def __init__(self) -> None:
        self._cases: dict[str, tuple[Any, ...]] = {}  # a class and its arguments

    def __iter__(self) -> Any:
        return iter(self._cases)

    def add(self, cls: type[Case]) -> type[Case]:
        """Register a class under its name."""
        self._cases[cls.__name__] = (cls,)
        return cls

    def variants(self, **values: Any) -> Callable[[type[Case]], type[Case]]:
        """Register one case per keyword, whose value is the class's only argument."""

        def register(cls: type[Case]) -> type[Case]:
            self._cases.update({f"{cls.__name__}-{name}": (cls, value) for name, value in values.items()})
            return cls

        return register

    def train(self, name: str, config: dict[str, Any], steps: int = 7) -> dict[str, Any]:
        """Per step: losses, gathers and whether a plan was followed. In the end: whole parameters and buffers, which of
        them share memory, and the trained ones."""
        cls, *arguments = self._cases[name]
        torch.manual_seed(0)
        engine = zerolite.initialize(cls(*arguments), config)
        coordinator = engine._parts.coordinator
        losses, evaluations, gathers, following = [], [], [], []
        # torch runs a transformer layer as one kernel where no module has hooks, so not at stage 3: other rounding.
        torch.backends.mha.set_fastpath_enabled(False)
        for step in range(steps):
            engine.module.prepare(step)
            torch.manual_seed(100 * step + engine.rank)
            with zerolite.comm.record() as record:
                for _ in range(engine.gradient_accumulation_steps):
                    if cls.evaluates:
                        with torch.no_grad():
                            evaluations.append(cls.step(engine.eval(), step).item())
                    loss = cls.step(engine.train(), step)
                    engine.backward(loss)
                    following.append(coordinator is not None and coordinator.schedule.following)
                    engine.step()
                    losses.append(loss.item())
            gathers.append(record.count("all_gather", "parameters"))
            assert not left_gathered(engine), f"{name}, step {step}: {left_gathered(engine)}"
        torch.backends.mha.set_fastpath_enabled(True)
        state = engine.full_state_dict()
        return {
            "losses": losses,
            "skipped": engine.skipped_steps,
            "evaluations": evaluations,
            "gathers": gathers,
            "following": following,
            "state": state,
            "strides": {key: value.stride() for key, value in state.items()},
            "tied": {a: [b for b in state if state[a].data_ptr() == state[b].data_ptr() != 0] for a in state},
            "trained": {slot.name: slot.numel for slot in engine._parts.pipeline._buffer.layout.slots},
            "units": [] if coordinator is None else [unit.name for unit in coordinator.groups],
        }

    def compare(
        self, name: str, settings: Sequence[str] = SETTINGS, steps: int = 7, **more: Any
    ) -> dict[str, dict[str, Any]]:
        """Train a case at stage 2 and at stage 3 with each of the settings, and find no difference."""
        wanted, case = self.train(name, config(2, optimizer=ADAMW, **more), steps), self._cases[name][0]
        found = {}
        for setting in settings:
            made = at(f"3 {setting}", optimizer=ADAMW, zero=case.zero, **more)
            found[setting] = self.train(name, made, steps)
            for key in ("tied", "trained", "losses", "skipped", "evaluations", "state", "strides"):
                assert_same(found[setting][key], wanted[key], f"{name}, {setting}: {key}")
            assert found[setting]["following"][-1] or not case.stable, f"{name}, {setting}"
        return found


def left_gathered(engine: Any) -> list[str]:
    """Return the parameters that stage 3 should have released, and has not."""
    if engine._parts.coordinator is None:
        return []
    wrong = []
    for handle in engine._parts.coordinator.sharded_params:
        wanted = ZeroParamStatus.AVAILABLE if handle.persistent else ZeroParamStatus.NOT_AVAILABLE
        memory = 0 if handle.storage is None else handle.storage.nbytes()
        if handle.status is not wanted or handle.pin_count or (memory and not handle.persistent):
            wrong.append(f"{handle.name} is {handle.status.name}, held {handle.pin_count} times, {memory} bytes")
        elif not handle.persistent and not models.has_no_values(handle.parameter):
            wrong.append(f"{handle.name} has memory or, to torch itself, a shape")
    return wrong


def batch(step: int, *shape: int) -> Tensor:
    """This rank's input of a step: [2, LENGTH, WIDTH], or ``shape``."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(shape or (2, LENGTH, WIDTH), generator=generator)


def tokens(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(13, (2, LENGTH), generator=generator)


def loss_of(value: Tensor) -> Tensor:
    return (value - 0.3).square().mean()


class Block(nn.Module):
    """A residual block with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.relu(self.up(self.norm(x))))
