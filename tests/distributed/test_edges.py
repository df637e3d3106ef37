"""Results do not depend on the data of one rank, on the transport, or on other engines."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.toolkit.compare import assert_same_bits, everywhere_equal
from tests.toolkit.ranks import on_ranks
from tests.toolkit.traffic import Tower

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def values_of(engine: Any) -> dict[str, Tensor]:
    return {name: p.detach().float().clone() for name, p in engine.named_parameters()}


class Branches(nn.Module):
    """Two branches; the caller says which ones a forward takes."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.empty, self.scalar = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, taken: str) -> Tensor:
        for name in taken:
            x = {"l": self.left, "r": self.right}[name](x)
        return x * self.scalar + self.empty.sum()


@pytest.mark.fast("2-fp32-taken0", "2-bf16-taken1")
@pytest.mark.parametrize("taken", [[["l", "lr"], ["", ""]], [["l"], ["r"]], [["ll", "rl"], ["r", "l"]]])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@on_ranks(2)
def test_ranks_that_take_different_branches(precision: str, taken: list[list[str]]) -> None:
    """One rank uses every parameter, the other none, or others, or some of them several times: all stages agree."""
    results = []
    for stage, contiguous in ((0, True), (1, True), (1, False), (2, True), (2, False)):
        torch.manual_seed(0)
        block = {"stage": stage, "reduce_bucket_size": 40, "contiguous_gradients": contiguous}
        config = {"optimizer": SGD, "gradient_accumulation_steps": len(taken[0]), "zero_optimization": block}
        engine = zerolite.initialize(Branches(), config | {"bf16": {"enabled": precision == "bf16"}})
        generator, norms = torch.Generator().manual_seed(engine.rank), []
        for _ in range(3):
            for names in taken[engine.rank]:
                engine.backward(engine(torch.randn(4, 6, generator=generator), names).square().mean())
                engine.step()
            norms.append(engine.get_global_grad_norm())
        everywhere_equal(engine.module)
        results.append((stage, {"norms": torch.tensor(norms), **values_of(engine)}))
    # fp32: stage 2 adds means, the others average sums. bf16: stage 2 rounds each mean's terms where the others add
    # first.
    rtol, atol = (1e-6, 1e-7) if precision == "fp32" else (2**-6, 2**-7)
    for stage, found in results[1:]:
        if stage == 1:
            assert_same_bits(results[0][1], found, "stages 0 and 1")
        torch.testing.assert_close(found, results[0][1], rtol=rtol, atol=atol)


def through_two_engines(stage: int, precision: str, loop: str) -> dict[str, Tensor]:
    """A generator's loss through a discriminator of another engine, as in a GAN, and a plain module in front of and
    behind them. Gives the updates of both and the gradients of the plain modules."""
    torch.manual_seed(0)
    front, back = nn.Linear(4, 4), nn.Linear(4, 4)
    engines = {}
    for name, scale in (("generator", 64), ("discriminator", 16)):
        optimizer = {"type": "SGD", "params": {"lr": 4.0}}  # so large that fp16's rounding of weights does not show
        half = {"fp16": {"enabled": True, "loss_scale": scale}} if precision == "fp16" else {}
        config = {"optimizer": optimizer, "zero_optimization": {"stage": stage}, **half}
        engines[name] = zerolite.initialize(Tower((4, 8, 4)), config)
    before = {name: values_of(engine) for name, engine in engines.items()}
    generator, discriminator = engines.values()
    loss = back(discriminator(generator(front(torch.linspace(-1, 1, 8).view(2, 4))))).square().sum()
    if loop == "engine":
        generator.backward(loss)
    else:
        loss.backward()
    for engine in engines.values():
        (engine if loop == "engine" else engine.optimizer).step()
    assert front.weight.grad is not None and back.weight.grad is not None
    updates = {
        f"{name}.{n}": value - before[name][n]
        for name, engine in engines.items()
        for n, value in values_of(engine).items()
    }
    return {**updates, "front": front.weight.grad, "back": back.weight.grad}


@pytest.mark.parametrize(("stage", "loop"), [(0, "plain"), (2, "engine")])
@on_ranks(2)
def test_two_fp16_engines_in_one_graph(stage: int, loop: str) -> None:
    """Each engine's scale stays inside it: the same updates and the same outer gradients as in fp32, to fp16's
    rounding."""
    exact, half = (through_two_engines(stage, precision, loop) for precision in ("fp32", "fp16"))
    for name, value in exact.items():
        assert (half[name] - value).norm() <= 0.02 * value.norm(), name


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(2)
def test_values_loaded_into_the_module(stage: int) -> None:
    """With fp32 masters beside bf16 parameters: training goes on from what load_state_dict brings, and not from what it
    brings to a copy."""
    optimizer = {"type": "SGD", "params": {"lr": 0.0}}
    config = {"bf16": {"enabled": True}, "optimizer": optimizer, "zero_optimization": {"stage": stage}}
    torch.manual_seed(dist.get_rank())
    engine = zerolite.initialize(nn.Linear(3, 3), config)
    twin, before = copy.deepcopy(engine.module), values_of(engine)
    for module, value in ((twin, 7.0), (engine.module, 5.0)):
        module.load_state_dict({n: torch.full_like(v, value) for n, v in module.state_dict().items()})
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
        for name, found in values_of(engine).items():
            assert torch.equal(found, before[name] if module is twin else torch.full_like(found, 5.0)), name
            master = zerolite.get_full_master(engine.module.get_parameter(name))
            assert torch.equal(master.bfloat16().float(), found), name


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(1)
def test_an_outdated_graph_is_refused(stage: int) -> None:
    """Backward, step, and backward again through the same graph: torch refuses, and so must an engine."""
    engine = zerolite.initialize(Tower((3, 3, 3)), {"optimizer": SGD, "zero_optimization": {"stage": stage}})
    loss = engine(torch.ones(2, 3)).sum()
    loss.backward(retain_graph=True)
    engine.optimizer.step()
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()
