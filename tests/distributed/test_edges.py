"""Results do not depend on the data of one rank, on the transport, or on other engines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zerolite
from tests.toolkit.compare import everywhere_equal
from tests.toolkit.pool import Pools
from zerolite.comm import host_memory

SGD = {"type": "SGD", "params": {"lr": 0.1}}


class Branches(nn.Module):
    """Two branches; which one a forward takes is the caller's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)
        self.empty = nn.Parameter(torch.zeros(0))
        self.scalar = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        for name in way:
            x = {"l": self.left, "r": self.right}[name](x)
        return x * self.scalar + self.empty.sum()


def branches_on_one_rank(config: dict[str, Any], ways: list[list[str]]) -> dict[str, Any]:
    """``ways[rank]``: one way per micro-batch of a window; three windows. Gives parameters and norms."""
    torch.manual_seed(0)
    engine = zerolite.initialize(Branches(), config)
    generator = torch.Generator().manual_seed(engine.rank)
    norms = []
    for _ in range(3):
        for way in ways[engine.rank]:
            x = torch.randn(4, 6, generator=generator)
            engine.backward(engine(x, way).square().mean())
            engine.step()
        norms.append(engine.get_global_grad_norm())
    everywhere_equal(engine.module)
    return {"norms": norms, **{n: p.detach().float().clone() for n, p in engine.named_parameters()}}


class Chain(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@contextlib.contextmanager
def limited_memory(limit: int | None) -> Iterator[None]:
    """Limit /dev/shm to files of ``limit`` bytes; 0: the transport is off."""
    create = host_memory._create
    if limit is not None:
        host_memory._create = lambda path, size: size <= limit and create(path, size)
    os.environ["ZEROLITE_SHARED_MEMORY"] = "0" if limit == 0 else "1"
    try:
        yield
    finally:
        host_memory._create = create
        del os.environ["ZEROLITE_SHARED_MEMORY"]


def transports(config: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """A chain whose layers differ in size, so that buckets do; the communicator's kind and the final parameters."""
    with limited_memory(limit):
        torch.manual_seed(0)
        engine = zerolite.initialize(Chain([16, 64, 8, 128, 16, 200, 16]), config)
        generator = torch.Generator().manual_seed(engine.rank)
        for _ in range(6):
            engine.backward(engine(torch.randn(4, 16, generator=generator)).square().mean())
            engine.step()
    everywhere_equal(engine.module)
    large = getattr(engine._comm, "_large", None)
    exhausted = None if large is None else large.memory.exhausted
    left = [name for name in os.listdir("/dev/shm") if name.startswith(f"zerolite-{os.getpid()}-")]
    return {
        "kind": type(engine._comm).__name__,
        "exhausted": exhausted,
        "left": left,
        "parameters": {n: p.detach().clone() for n, p in engine.named_parameters()},
    }


def two_engines_in_one_graph(stage: int, precision: str, loop: str) -> dict[str, Any]:
    """A generator's loss through a discriminator of another engine, as in a GAN, and a plain module in front of and
    behind them. Gives the updates of the generator and the gradients of the plain modules."""
    optimizer = {"type": "SGD", "params": {"lr": 4.0}}  # so large that fp16's rounding of weights does not show
    config: dict[str, Any] = {"optimizer": optimizer, "zero_optimization": {"stage": stage}}
    other: dict[str, Any] = dict(config)
    if precision == "fp16":
        config = {**config, "fp16": {"enabled": True, "loss_scale": 64}}
        other = {**other, "fp16": {"enabled": True, "loss_scale": 16}}
    torch.manual_seed(0)
    front, back = nn.Linear(4, 4), nn.Linear(4, 4)
    generator = zerolite.initialize(Chain([4, 8, 4]), config)
    discriminator = zerolite.initialize(Chain([4, 8, 4]), other)
    before = {
        f"{name}.{n}": p.detach().float().clone()
        for name, engine in (("g", generator), ("d", discriminator))
        for n, p in engine.named_parameters()
    }
    loss = back(discriminator(generator(front(torch.linspace(-1, 1, 8).view(2, 4))))).square().sum()
    if loop == "engine":
        generator.backward(loss)
        generator.step()
        discriminator.step()
    else:
        loss.backward()
        generator.optimizer.step()
        discriminator.optimizer.step()
    updates = {
        f"{name}.{n}": p.detach().float() - before[f"{name}.{n}"]
        for name, engine in (("g", generator), ("d", discriminator))
        for n, p in engine.named_parameters()
    }
    assert front.weight.grad is not None and back.weight.grad is not None
    return {**updates, "front": front.weight.grad, "back": back.weight.grad}


def late_momentum(config: dict[str, Any]) -> list[torch.Tensor]:
    """A parameter that is used for the first time when its neighbours have momentum already."""
    torch.manual_seed(0)
    engine = zerolite.initialize(Branches(), config)
    for way in ("l", "l", "lr", "r", "lr"):
        engine.backward(engine(torch.ones(2, 6), way).square().mean())
        engine.step()
    return [p.detach().clone() for p in engine.parameters()]


def flush_and_boundaries(config: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    engine = zerolite.initialize(nn.Linear(3, 1), config)
    answers: dict[str, Any] = {"empty": engine.step(flush=True), "steps": engine.global_steps}
    before = engine.module.weight.detach().clone()
    engine.backward(engine(torch.ones(2, 3)).sum())
    answers["boundary"] = engine.is_gradient_accumulation_boundary()
    answers["flushed"] = engine.step(flush=True)
    answers["update"] = (engine.module.weight.detach() - before).flatten().tolist()
    answers["after"] = engine.global_steps
    return answers


def values_loaded_into_the_module(stage: int) -> tuple[bool, bool]:
    """With fp32 masters beside bf16 parameters: what load_state_dict brings is what training goes on from; a copy's
    is not."""
    import copy

    torch.manual_seed(0)
    engine = zerolite.initialize(
        nn.Linear(3, 3),
        {
            "bf16": {"enabled": True},
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "zero_optimization": {"stage": stage},
        },
    )

    def one_step() -> None:
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()

    masters = [m.clone() for m in engine._pipeline._buffer.master]
    twin = copy.deepcopy(engine.module)
    twin.load_state_dict({n: torch.full_like(v, 7.0) for n, v in twin.state_dict().items()})
    one_step()
    untouched = all(torch.equal(a, b) for a, b in zip(masters, engine._pipeline._buffer.master, strict=True))
    engine.module.load_state_dict({n: torch.full_like(v, 5.0) for n, v in engine.module.state_dict().items()})
    one_step()
    return untouched, all(bool((p == 5.0).all()) for p in engine.parameters())


def outdated_graph(stage: int) -> str:
    """Backward, step, and backward again through the same graph: torch refuses, and so must an engine."""
    torch.manual_seed(0)
    engine = zerolite.initialize(Chain([3, 3, 3]), {"optimizer": SGD, "zero_optimization": {"stage": stage}})
    loss = engine(torch.ones(2, 3)).sum()
    loss.backward(retain_graph=True)
    engine.optimizer.step()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


# -------------------------------------------------------------------- the tests


def close(a: Any, b: Any, rtol: float, atol: float = 0.0) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@pytest.mark.fast("[['l', 'lr'], ['', '']]-fp32-True", "[['l'], ['r']]-bf16-True")
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ways", [[["l", "lr"], ["", ""]], [["l"], ["r"]], [["ll", "rl"], ["r", "l"]]], ids=str)
def test_ranks_that_take_different_branches(
    pools: Pools, ways: list[list[str]], precision: str, contiguous: bool
) -> None:
    """One rank uses every parameter, the other none, or others, or some of them several times: all stages agree."""
    results = []
    for stage in (0, 1, 2):
        config: dict[str, Any] = {
            "optimizer": SGD,
            "gradient_accumulation_steps": len(ways[0]),
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 40, "contiguous_gradients": contiguous},
        }
        if precision == "bf16":
            config["bf16"] = {"enabled": True}
        results.append(pools(2).run(branches_on_one_rank, {"config": config, "ways": ways})[0])
    # fp32: stage 2 adds means, the others average sums. bf16: stage 2 rounds each mean's terms where the others add
    # first.
    rtol, atol = (1e-6, 1e-7) if precision == "fp32" else (2**-6, 2**-7)
    close(results[1], results[0], 0.0)
    close(results[2], results[0], rtol, atol)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("zero", [{}, {"reduce_scatter": False}, {"overlap_comm": True}], ids=str)
def test_transports_give_the_same_bits(pools: Pools, world: int, dtype: str, zero: dict[str, Any]) -> None:
    """Shared memory, messages, and shared memory that runs out when a larger bucket comes: same bits at all stages."""
    results, kinds = [], set()
    for stage in (0, 1, 2):
        for limit in (None, 0, 3 * 4096, 3 * 12288):
            config: dict[str, Any] = {
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "foreach": True}},
                "gradient_clipping": 0.5,
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, **zero},
            }
            if dtype == "bf16":
                config["bf16"] = {"enabled": True}
            result = pools(world).run(transports, {"config": config, "limit": limit})[0]
            assert not result["left"]
            kinds.add((result["kind"], result["exhausted"]))
            results.append(result["parameters"])
    assert kinds == {
        ("SharedMemoryCommunicator", False),
        ("SharedMemoryCommunicator", True),
        ("GlooCommunicator", None),
    }
    for other in results[1:]:
        close(other, results[0], 0.0)


@pytest.mark.parametrize("loop", ["engine", "plain"])
@pytest.mark.parametrize("stage", [0, 2])
def test_two_fp16_engines_in_one_graph(pools: Pools, stage: int, loop: str) -> None:
    """Each engine's scale stays inside it: the same updates and the same outer gradients as in fp32, to fp16's
    rounding."""
    run = lambda precision: pools(2).run(  # noqa: E731
        two_engines_in_one_graph, {"stage": stage, "precision": precision, "loop": loop}
    )[0]
    exact, half = run("fp32"), run("fp16")
    for name, value in exact.items():
        assert (half[name] - value).norm() <= 0.02 * value.norm(), name


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_late_parameter_beside_momentum(pools: Pools, stage: int) -> None:
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": stage},
    }
    results = pools(2).run(late_momentum, {"config": config})
    close(results[0], results[1], 0.0)
    torch.manual_seed(0)

    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for way in ("l", "l", "lr", "r", "lr"):
        model(torch.ones(2, 6), way).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    close(results[0], [p.detach() for p in model.parameters()], 1e-6, 1e-7)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_flush(pools: Pools, accumulation: int) -> None:
    """An empty window is not a step; a partial one is the mean of what it contains."""
    config = {"optimizer": SGD, "gradient_accumulation_steps": accumulation, "zero_optimization": {"stage": 2}}
    answers = pools(2).run(flush_and_boundaries, {"config": config})[0]
    assert (answers["empty"], answers["steps"], answers["flushed"], answers["after"]) == (False, 0, True, 1)
    assert answers["boundary"] is (accumulation == 1)
    assert answers["update"] == pytest.approx([-0.2] * 3, rel=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_values_loaded_into_the_module(pools: Pools, stage: int) -> None:
    assert pools(2).run(values_loaded_into_the_module, {"stage": stage}) == [(True, True)] * 2


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_outdated_graph_is_refused(pools: Pools, stage: int) -> None:
    for message in pools(1).run(outdated_graph, {"stage": stage}):
        assert "inplace operation" in message
