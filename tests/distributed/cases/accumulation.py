"""Windows of micro-batches, phases by hand, unusual graphs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests import models
from tests.distributed.cases.training import make_engine, snapshot


def loss_on(engine: Any, step: int, micro: int) -> Tensor:
    return models.token_loss(engine, models.token_batch(step, micro, dist.get_rank()))


def window_in_many_ways(base: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """The same four micro-batches per window, in every way that a user may write them. ``base`` has accumulation 4."""
    single = base | {"gradient_accumulation_steps": 1}
    divided = base | {"divide_plain_backward": True}

    def counted(engine: Any, step: int) -> None:
        for micro in range(4):
            engine.backward(loss_on(engine, step, micro))
            engine.step()

    def no_sync(engine: Any, step: int) -> None:
        with engine.no_sync():
            for micro in range(3):
                engine.backward(loss_on(engine, step, micro))
                engine.step()
        engine.backward(loss_on(engine, step, 3))
        engine.step()

    def no_sync_around_all(engine: Any, step: int) -> None:
        with engine.no_sync():
            for micro in range(4):
                engine.backward(loss_on(engine, step, micro))
                engine.step()

    def boundary_by_hand(engine: Any, step: int) -> None:
        for micro in range(4):
            engine.set_gradient_accumulation_boundary(micro == 3)
            assert engine.is_gradient_accumulation_boundary() is (micro == 3)
            engine.backward(loss_on(engine, step, micro))
            engine.step()

    def four_backwards_one_step(engine: Any, step: int) -> None:
        for micro in range(4):
            engine.backward(loss_on(engine, step, micro) / 4, scale_wrt_gas=False)
        engine.step()

    def plain(engine: Any, step: int) -> None:
        for micro in range(4):
            (loss_on(engine, step, micro) / 4).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    def plain_divided(engine: Any, step: int) -> None:
        for micro in range(4):
            loss_on(engine, step, micro).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    def mixed_divided(engine: Any, step: int) -> None:
        for micro in range(4):
            if micro % 2:
                loss_on(engine, step, micro).backward()
            else:
                engine.backward(loss_on(engine, step, micro))
            engine.step()

    def plain_with_no_sync(engine: Any, step: int) -> None:
        with engine.no_sync():
            for micro in range(3):
                (loss_on(engine, step, micro) / 4).backward()
        (loss_on(engine, step, 3) / 4).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    def mixed(engine: Any, step: int) -> None:
        """Two of the engine's backwards, two of torch's."""
        for micro in range(2):
            engine.backward(loss_on(engine, step, micro) / 4, scale_wrt_gas=False)
        for micro in range(2, 4):
            (loss_on(engine, step, micro) / 4).backward()
        engine.step()

    def phases(engine: Any, step: int) -> None:
        for micro in range(4):
            engine.backward(loss_on(engine, step, micro) / 4, scale_wrt_gas=False)
        engine.reduce_gradients()
        norm = engine.clip_gradients(0.4)
        engine.update()
        assert engine.get_global_grad_norm() == norm > 0
        engine.publish()
        engine.zero_grad()

    def phases_twice(engine: Any, step: int) -> None:
        """Phases that have run may be asked for again."""
        for micro in range(4):
            engine.backward(loss_on(engine, step, micro) / 4, scale_wrt_gas=False)
        engine.reduce_gradients()
        engine.reduce_gradients()
        assert engine.clip_gradients(float("inf")) == engine.clip_gradients(0.4)
        engine.step()

    def reduced_in_the_middle(engine: Any, step: int) -> None:
        for micro in range(4):
            engine.backward(loss_on(engine, step, micro) / 4, scale_wrt_gas=False)
            engine.reduce_gradients()
        engine.step()

    ways = {
        "counted": (base, counted),
        "no_sync": (base, no_sync),
        "no_sync around all": (base, no_sync_around_all),
        "boundary by hand": (base, boundary_by_hand),
        "boundary by hand, accumulation 4 undeclared": (single, lambda e, s: by_hand_undeclared(e, s)),
        "four backwards, one step": (single, four_backwards_one_step),
        "plain": (base, plain),
        "plain, accumulation undeclared": (single, plain),
        "plain, divided by the engine": (divided, plain_divided),
        "mixed, divided by the engine": (divided, mixed_divided),
        "plain with no_sync": (single, plain_with_no_sync),
        "mixed": (single, mixed),
        "phases": (single, phases),
        "phases twice": (single, phases_twice),
        "reduced in the middle": (single, reduced_in_the_middle),
    }
    results: dict[str, Any] = {}
    for name, (config, way) in ways.items():
        engine = make_engine(config)
        norms = []
        for step in range(steps):
            way(engine, step)
            norms.append(engine.get_global_grad_norm())
        results[name] = {"norms": norms, "parameters": snapshot(engine), "steps": engine.global_steps}
    return results


def by_hand_undeclared(engine: Any, step: int) -> None:
    for micro in range(4):
        engine.set_gradient_accumulation_boundary(micro == 3)
        engine.backward(loss_on(engine, step, micro) / 4)
        engine.step()


def partial_window(config: dict[str, Any], contained: int) -> dict[str, Any]:
    """``step(flush=True)`` after ``contained`` of the config's micro-batches; then a full window."""
    engine = make_engine(config)
    assert engine.step(flush=True) is False, "there is nothing to flush"
    for micro in range(contained):
        if config.get("divide_plain_backward"):
            loss_on(engine, 0, micro).backward()
        else:
            engine.backward(loss_on(engine, 0, micro))
        engine.step(flush=micro == contained - 1)
    flushed = {"parameters": snapshot(engine), "norm": engine.get_global_grad_norm(), "steps": engine.global_steps}
    for micro in range(config["gradient_accumulation_steps"]):
        engine.backward(loss_on(engine, 1, micro))
        engine.step()
    return {"flushed": flushed, "then": snapshot(engine), "steps": engine.global_steps}


def float_training(
    config: dict[str, Any],
    model: str,
    steps: int = 4,
    sizes: dict[str, Any] | None = None,
    branches: list[list[str]] | None = None,
) -> dict[str, Any]:
    """Train a model on floating inputs; ``branches[step][rank]`` is passed to its forward if given."""
    engine = make_engine(config, model, sizes)
    losses = []
    for step in range(steps):
        x, y = models.float_batch(step, 0, dist.get_rank())
        more = () if branches is None else (branches[step][dist.get_rank()],)
        loss = torch.nn.functional.mse_loss(engine(x, *more), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return {"losses": losses, "parameters": snapshot(engine)}


def exception_in_backward(config: dict[str, Any]) -> dict[str, Any]:
    """Backward fails on every rank after some gradients have arrived; zero_grad, and go on."""

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ArithmeticError("planned failure in backward")

    engine = make_engine(config, "Mlp")
    fail_now = False
    engine.module.first.register_forward_hook(lambda _m, _i, output: Fail.apply(output) if fail_now else output)
    for step in range(4):
        batch = models.float_batch(step, 0, dist.get_rank())
        fail_now = step == 2
        loss = models.square_loss(engine, batch)
        if fail_now:
            before = snapshot(engine)
            try:
                engine.backward(loss)
            except ArithmeticError:
                engine.zero_grad()
            else:
                raise AssertionError("the exception did not reach the caller")
            assert all(torch.equal(before[name], value) for name, value in snapshot(engine).items())
            continue
        engine.backward(loss)
        engine.step()
    return {"parameters": snapshot(engine), "steps": engine.global_steps}


def without_step(config: dict[str, Any], steps: list[int]) -> dict[str, Any]:
    """Run without the step that failed, which :func:`exception_in_backward` must equal."""
    engine = make_engine(config, "Mlp")
    for step in steps:
        engine.backward(models.square_loss(engine, models.float_batch(step, 0, dist.get_rank())))
        engine.step()
    return {"parameters": snapshot(engine), "steps": engine.global_steps}


def dropped_gradients(config: dict[str, Any]) -> dict[str, Any]:
    """A backward whose gradients are dropped leaves no trace."""
    engine = make_engine(config, "Mlp")
    for step in range(3):
        engine.backward(models.square_loss(engine, models.float_batch(100 + step, 0, dist.get_rank())))
        engine.zero_grad()
        engine.backward(models.square_loss(engine, models.float_batch(step, 0, dist.get_rank())))
        engine.step()
    return {"parameters": snapshot(engine), "steps": engine.global_steps}


def message_of(config: dict[str, Any], model: str, what: str) -> str:
    """The text of the exception that ``what`` raises on this rank."""
    try:
        _MISUSES[what](config, model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{what} raised nothing")


def _unused(config: dict[str, Any], model: str) -> None:
    engine = make_engine(config, model)
    engine.backward(loss_on(engine, 0, 0))
    engine.step()


class SparseModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(models.VOCABULARY, 3, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)


def _sparse(config: dict[str, Any], model: str) -> None:
    import zerolite

    engine = zerolite.initialize(SparseModel(), config)
    engine.backward(engine(torch.tensor([[1, 2]])).sum())
    engine.step()


def _not_elementwise(config: dict[str, Any], model: str) -> None:
    make_engine(config | {"optimizer": {"type": "Adafactor", "params": {"lr": 0.1}}}, "Mlp")


def _foreign_parameters(config: dict[str, Any], model: str) -> None:
    other = models.build(models.Mlp)
    config = {key: value for key, value in config.items() if key != "optimizer"}
    make_engine(config, "Mlp", optimizer=torch.optim.SGD(other.parameters(), lr=0.1))


_MISUSES = {
    "unused": _unused,
    "sparse": _sparse,
    "not elementwise": _not_elementwise,
    "foreign parameters": _foreign_parameters,
}
