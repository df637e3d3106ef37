"""Stage 3 where blocks of a model, or all of it, are compiled before or after ``zerolite.initialize``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerolite
from tests.toolkit.compare import assert_same
from tests.toolkit.ranks import on_ranks
from tests.toolkit.stage3_net import build, make_engine, no_grad, settings, train


class Counted:
    """A backend of torch.compile that runs graphs as they are, and counts them and their calls."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return run


def compiled(mode: str, when: str, setting: str, backend: Any) -> dict[str, Any]:
    """Train a model whose blocks are compiled before or after initialize, by their method or as wrappers."""
    torch._dynamo.reset()
    model = build()

    def compile_blocks() -> None:
        for index, block in enumerate(model.blocks):
            if mode == "method":
                block.compile(backend=backend)
            else:
                model.blocks[index] = torch.compile(block, backend=backend)  # type: ignore[assignment]

    if when == "before":
        compile_blocks()
    engine = zerolite.initialize(model, settings(3, setting))
    if when == "after":
        compile_blocks()
    result = train(engine, steps=5, disturb=no_grad, at=(1,))
    torch._dynamo.reset()
    return result


@pytest.mark.slow
@on_ranks(2, timeout=120)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("setting", "mode"), [("moving", "method"), ("kept", "wrapper"), ("kept", "aot")])
def test_compiled_blocks(setting: str, mode: str, when: str) -> None:
    plain = train(make_engine(3), steps=5, disturb=no_grad, at=(1,))
    if mode == "aot":  # its backward is another graph, which saves weights or views of them
        found = compiled("method", when, setting, "aot_eager")
        torch.testing.assert_close(found["seen"], plain["seen"], rtol=1e-5, atol=1e-6)
        return
    backend = Counted()
    found = compiled(mode, when, setting, backend)
    assert backend.calls >= 5 * 3, "the blocks did not run compiled"
    assert_same({name.replace("_orig_mod.", ""): value for name, value in found["state"].items()}, plain["state"])
    assert_same(found["disturbed"], plain["disturbed"])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def recompiled(what: str, stage: int, leaf: bool = True) -> tuple[list[int], list[int], float]:
    """Return how many graphs each step compiles and runs where a model is compiled after initialize, and the last loss.
    what: "blocks", "module", "engine", or "nothing". leaf: each block is one unit."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Residual() for _ in range(10)))
    given = settings(stage)
    given["zero_optimization"] |= {"overlap_comm": True, "reduce_bucket_size": 200}
    if stage == 3 and leaf:
        given["zero_optimization"] |= {"leaf_modules": [str(n) for n in range(10)]}
    engine = zerolite.initialize(model, given)
    backend = Counted()
    for block in model if what == "blocks" else ():
        block.compile(backend=backend)
    if what == "engine":
        engine.compile(backend=backend)
    called: Any = torch.compile(engine.module, backend=backend) if what == "module" else engine
    graphs, calls = [], []
    for step in range(5):
        backend.graphs = backend.calls = 0
        loss = called(torch.randn(3, 6, generator=torch.Generator().manual_seed(step))).square().mean()
        engine.backward(loss)
        engine.step()
        graphs.append(backend.graphs)
        calls.append(backend.calls)
    torch._dynamo.reset()
    return graphs, calls, loss.item()


@pytest.mark.slow
@on_ranks(2, timeout=180)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_compiled_after_initialize_compiles_once(stage: int) -> None:
    """Gathers stand between the graphs and not in them, so what is in flight asks for no other graph."""
    if stage < 3 and torch.__version__.startswith("2.6"):
        return  # it compiles each module's hooks anew, and soon gives up
    _, _, plain = recompiled("nothing", stage)
    for what in ("blocks", "module", "engine") if stage in (1, 3) else ("engine",):
        for leaf in (True, False) if stage == 3 else (False,):
            graphs, calls, loss = recompiled(what, stage, leaf)
            assert sum(graphs) <= 12 and not any(graphs[2:]), graphs  # parts of a block, with weights in flight or not
            one = what == "module" and stage == 1  # nothing is in flight once the compiler is used
            assert len(set(calls[2:])) == 1 and (calls[-1] == 1 if one else calls[-1] >= 10), calls
            assert loss == pytest.approx(plain, rel=1e-6)
