"""Uses of an engine besides forward, backward, step; at stage 3, where weights come and go.

One model, and ways to train it: *disturbances* are whatever must leave training as it was, *loops* are other shapes of
a step. Every function runs on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.toolkit.configs import ADAMW, config
from zerolite.zero import ZeroParamStatus

WIDTH = 6
_ALL_MOVES = {"stage3_param_persistence_threshold": 0, "stage3_module_granularity_threshold": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "move": {**_ALL_MOVES, "stage3_max_reuse_distance": 0},  # gathered at every use, released after it
    "keep": _ALL_MOVES,  # kept from forward to backward
    "tight": {  # one or two units ahead, and weights evicted all the time
        **_ALL_MOVES,
        "stage3_prefetch_bucket_size": 60,
        "stage3_max_live_parameters": 150,
        "stage3_max_reuse_distance": 200,
    },
    "one": {"stage3_param_persistence_threshold": 0},  # the whole model is one unit
    "whole": {},  # so small that nothing is released
}


class Boom(Exception):
    """Error that the failing parts raise."""


class Block(nn.Module):
    """``[B, WIDTH]`` -> the same. ``actions`` maps a place in the forward to a function of the tensor there."""

    def __init__(self, actions: dict[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.actions = actions
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.actions.get("block begins", _same)(x)
        hidden = self.up(self.norm(hidden))
        hidden = self.actions.get("inside the block", _same)(hidden)
        hidden = self.down(torch.tanh(hidden)) * self.scale
        return self.actions.get("block ends", _same)(x + hidden)


class Net(nn.Module):
    """``x [B, 5]`` -> ``[B, 3]``; the root owns a parameter, a weight is tied, a layer is frozen, one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: dict[str, Callable[[Tensor], Tensor]] = {}
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList([Block({}), Block(self.actions), Block({})])
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.again = nn.Linear(WIDTH, 7, bias=False)
        self.again.weight = self.blocks[0].up.weight
        self.head = nn.Linear(7, 3)
        self.register_buffer("offset", torch.tensor([0.1, 0.2, 0.3]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.actions.get("model begins", _same)(x)
        x = self.first(x)
        x = self.actions.get("after the first", _same)(x)
        for block in self.blocks:
            x = block(x)
        x = self.again(self.frozen(x) * self.gain)
        return self.actions.get("model ends", _same)(self.head(torch.tanh(x)) + self.offset)


def _same(x: Tensor) -> Tensor:
    return x


def build(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net()


def settings(stage: int, setting: str = "move", **more: Any) -> dict[str, Any]:
    """A config; ``setting`` matters at stage 3 only."""
    zero = SETTINGS[setting] if stage == 3 else {}
    return config(stage, optimizer=ADAMW, clip=0.5, zero=zero, **more)


def batch(step: int, micro: int = 0) -> Tensor:
    """This rank's ``[4, 5]``."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10_000 * step + 100 * micro + rank))


def loss_of(engine: Any, step: int, micro: int = 0) -> Tensor:
    return engine(batch(step, micro)).square().mean()


def gathered(engine: Any) -> list[str]:
    """Names of the parameters that are whole, or on their way, and should not be."""
    if engine.coordinator is None:
        return []
    return [
        handle.name
        for handle in engine.coordinator.handles
        if not handle.persistent and (handle.status is not ZeroParamStatus.NOT_AVAILABLE or handle.held)
    ]


def state_of(engine: Any) -> dict[str, Tensor]:
    return engine.full_state_dict()


# ---------------------------------------------------------------- disturbances


def no_grad(engine: Any, step: int) -> Any:
    with torch.no_grad():
        return engine(batch(step, 7))


def inference_mode(engine: Any, step: int) -> Any:
    with torch.inference_mode():
        return [engine(batch(step, micro)).clone() for micro in (7, 8)]


def raw_module(engine: Any, step: int) -> Any:
    engine.eval()
    with torch.no_grad():
        results = [engine.module(batch(step, 7)), engine.module.blocks[1](torch.ones(2, WIDTH))]
    engine.train()
    return results


def raw_module_with_grad(engine: Any, step: int) -> Any:
    return [engine.module(batch(step, 7)).detach(), engine.module.blocks[1](torch.ones(2, WIDTH)).detach()]


def forward_only(engine: Any, step: int) -> Any:
    """Under grad, and the graphs are kept while the next forward runs."""
    outputs = [engine(batch(step, micro)) for micro in (7, 8, 9)]
    return [output.detach() for output in outputs]


def _input_gradient(engine: Any, step: int) -> Any:
    """Only the inputs' gradient is asked for: none of the parameters gets one."""
    x = batch(step, 7).requires_grad_()
    return torch.autograd.grad(engine(x).square().sum(), x)


def input_gradient(engine: Any, step: int) -> Any:
    result = _input_gradient(engine, step)
    engine.zero_grad()
    return result


def dropped_backward(engine: Any, step: int) -> Any:
    engine.backward(loss_of(engine, step, 7))
    engine.zero_grad()


def clone_and_state(engine: Any, step: int) -> Any:
    """Reading values in the middle of training."""
    with zerolite.zero.GatheredParameters(engine.module):
        inside = {name: value.clone() for name, value in engine.module.state_dict().items()}
    return [inside, state_of(engine)]


def _raise(error: type[BaseException], x: Tensor) -> Tensor:
    raise error("on purpose")


def _raise_in_backward(error: type[BaseException], x: Tensor) -> Tensor:
    x = x.view_as(x)  # the module's output itself may carry other hooks
    x.register_hook(lambda gradient: _raise(error, gradient))
    return x


@contextlib.contextmanager
def acting(engine: Any, place: str, action: Callable[[Tensor], Tensor]) -> Iterator[None]:
    actions = engine.module.actions
    actions[place] = action
    try:
        yield
    finally:
        del actions[place]


def failing_forward(place: str, error: type[BaseException], engine: Any, step: int) -> Any:
    with acting(engine, place, functools.partial(_raise, error)):
        try:
            engine(batch(step, 7))
        except error as caught:
            assert str(caught) == "on purpose"
        else:
            raise AssertionError("it was to raise")
    if error is Boom:
        assert not gathered(engine), gathered(engine)


def failing_evaluation(engine: Any, step: int) -> Any:
    with torch.no_grad():
        failing_forward("inside the block", Boom, engine, step)


def failing_backward(place: str, plain: bool, engine: Any, step: int) -> Any:
    """The gradients that did come are dropped as in any PyTorch loop: by zero_grad."""
    with acting(engine, place, functools.partial(_raise_in_backward, Boom)):
        loss = loss_of(engine, step, 7)
    try:
        loss.backward() if plain else engine.backward(loss)
    except Boom:
        pass
    else:
        raise AssertionError("it was to raise")
    engine.zero_grad()
    if not (plain and place == "model ends"):  # raised before any hook of the engine could see that a backward began
        assert not gathered(engine), gathered(engine)


def failing_then_forward(engine: Any, step: int) -> Any:
    """A failed plain backward, then straight on with an evaluation, its graph still alive."""
    with acting(engine, "inside the block", functools.partial(_raise_in_backward, Boom)):
        loss = loss_of(engine, step, 7)
    with contextlib.suppress(Boom):
        loss.backward()
    result = no_grad(engine, step)
    engine.zero_grad()
    return result


FORWARD_PLACES = ["model begins", "after the first", "block begins", "inside the block", "block ends", "model ends"]
BACKWARD_PLACES = ["after the first", "block begins", "inside the block", "block ends", "model ends"]
DISTURBANCES: dict[str, Callable[[Any, int], Any]] = {
    "no_grad": no_grad,
    "inference_mode": inference_mode,
    "raw module": raw_module,
    "raw module with grad": raw_module_with_grad,
    "forward only": forward_only,
    "input gradient": input_gradient,
    "dropped backward": dropped_backward,
    "clone and state": clone_and_state,
    "failing evaluation": failing_evaluation,
    "interrupt": functools.partial(failing_forward, "inside the block", KeyboardInterrupt),
    "failed backward, then forward": failing_then_forward,
    **{f"forward raises: {place}": functools.partial(failing_forward, place, Boom) for place in FORWARD_PLACES},
    **{f"backward raises: {place}": functools.partial(failing_backward, place, False) for place in BACKWARD_PLACES},
    **{
        f"plain backward raises: {place}": functools.partial(failing_backward, place, True) for place in BACKWARD_PLACES
    },
}

# ---------------------------------------------------------------- loops: one step each; give what to compare


def one_loss(engine: Any, step: int) -> Any:
    loss = loss_of(engine, step)
    engine.backward(loss)
    return loss


def plain_loop(engine: Any, step: int) -> Any:
    loss = loss_of(engine, step)
    loss.backward()
    return loss


def two_forwards(engine: Any, step: int) -> Any:
    loss = loss_of(engine, step, 0) + loss_of(engine, step, 1)
    engine.backward(loss)
    return loss


def two_forwards_two_backwards(engine: Any, step: int) -> Any:
    losses = [loss_of(engine, step, 0), loss_of(engine, step, 1)]
    for loss in losses if step % 2 else reversed(losses):
        engine.backward(loss)
    return losses


def interleaved(engine: Any, step: int) -> Any:
    first = loss_of(engine, step, 0)
    second = loss_of(engine, step, 1)
    engine.backward(first)
    third = loss_of(engine, step, 2)
    third.backward()
    second.backward()
    return [first, second, third]


def several_losses(engine: Any, step: int) -> Any:
    output = engine(batch(step))
    losses = [output[:, 0].square().sum(), output[:, 1:].abs().sum()]
    engine.backward(losses[0], retain_graph=True)
    losses[1].backward()
    return losses


def retained_twice(engine: Any, step: int) -> Any:
    loss = loss_of(engine, step)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    return loss


def with_autograd_grad(engine: Any, step: int) -> Any:
    x = batch(step).requires_grad_()
    loss = engine(x).square().mean()
    (of_input,) = torch.autograd.grad(loss, x, retain_graph=True)
    engine.backward(loss)
    return [loss, of_input]


def grad_of_parameters(engine: Any, step: int) -> Any:
    loss = loss_of(engine, step)
    chosen = [engine.module.head.weight, engine.module.gain, engine.module.blocks[0].up.weight]
    gradients = torch.autograd.grad(loss, chosen, retain_graph=True)
    engine.backward(loss)
    return [loss, *gradients]


def gradient_penalty(engine: Any, step: int) -> Any:
    x = batch(step).requires_grad_()
    output = engine(x)
    (of_input,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    loss = output.square().mean() + 0.1 * of_input.square().sum()
    engine.backward(loss)
    return [loss, of_input]


def block_alone(engine: Any, step: int) -> Any:
    """A part of the model is called by itself in the same graph."""
    hidden = engine.module.blocks[1](torch.ones(2, WIDTH))
    loss = loss_of(engine, step) + hidden.square().mean()
    engine.backward(loss)
    return loss


LOOPS: dict[str, Callable[[Any, int], Any]] = {
    "one loss": one_loss,
    "plain loop": plain_loop,
    "two forwards": two_forwards,
    "two forwards, two backwards": two_forwards_two_backwards,
    "interleaved": interleaved,
    "several losses": several_losses,
    "retained twice": retained_twice,
    "autograd.grad of inputs": with_autograd_grad,
    "autograd.grad of parameters": grad_of_parameters,
    "gradient penalty": gradient_penalty,
    "block alone": block_alone,
}

# ---------------------------------------------------------------- running


def detached(value: Any) -> Any:
    """A copy that can be compared and pickled."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: detached(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [detached(item) for item in value]
    return value


def train(
    engine: Any,
    steps: int = 8,
    loop: str = "one loss",
    disturbance: str | None = None,
    at: tuple[int, ...] = (0, 2, 6),
) -> dict[str, Any]:
    """``seen``: what the loop gave; ``disturbed``: what the disturbance gave; ``left``: what was gathered after some
    step; ``followed``: which steps ran on a plan."""
    seen, disturbed, norms, left, followed = [], [], [], [], []
    for step in range(steps):
        if disturbance is not None and step in at:
            disturbed.append(detached(DISTURBANCES[disturbance](engine, step)))
        seen.append(detached(LOOPS[loop](engine, step)))
        followed.append(engine.coordinator is not None and engine.coordinator.schedule.following)
        engine.step()
        norms.append(engine.get_global_grad_norm())
        left += gathered(engine)
    return {
        "seen": seen,
        "disturbed": disturbed,
        "norms": norms,
        "left": left,
        "followed": followed,
        "state": state_of(engine),
    }


def train_many(runs: dict[str, dict[str, Any]], stage: int, setting: str = "move") -> dict[str, Any]:
    """Every run on a model of its own."""
    results = {}
    for name, run in runs.items():
        engine = zerolite.initialize(build(), settings(stage, setting))
        try:
            results[name] = train(engine, **run)
        except BaseException as error:
            error.add_note(f"run {name!r}, stage {stage}, setting {setting!r}")
            raise
        del engine
    return results


class Plain:
    """The same loops over a plain model."""

    coordinator = None

    def __init__(self, model: nn.Module) -> None:
        self.module = model
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, **ADAMW[1])
        self.norm = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)

    def step(self) -> None:
        self.norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), 0.5))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def get_global_grad_norm(self) -> float:
        return self.norm

    def full_state_dict(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.module.state_dict().items()}


def whole_by_hand() -> list[bool]:
    """After each of some steps, whether a parameter has the values of its master: also where ``p.all_gather()`` has
    made it whole before the update, until the next forward releases it."""
    engine = zerolite.initialize(build(), settings(3))
    weight: Any = max(engine.module.parameters(), key=lambda parameter: parameter.ds_numel)
    same = []
    for step in range(3):
        engine.backward(loss_of(engine, step))
        if step == 1:
            weight.all_gather()
        engine.step()
        assert (weight.ds_status is ZeroParamStatus.AVAILABLE) is (step == 1), step
        same.append(torch.equal(weight.detach(), zerolite.get_full_master(weight)))
    return same
