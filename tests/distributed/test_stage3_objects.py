"""Stage 3: compiled blocks, deletion of engines, and what a module is without its engine."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerolite
from tests.toolkit.compare import assert_same
from tests.toolkit.memory import live_tensors, tensor_bytes
from tests.toolkit.ranks import on_ranks
from tests.toolkit.stage3_net import batch, build, loss_of, make_engine, no_grad, settings, train
from zerolite.engine.engine import Engine
from zerolite.zero.stage3.comm_context import AllGather
from zerolite.zero.stage3.module_hooks import ModuleExecution
from zerolite.zero.stage3.param_group import ParamGroup
from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator
from zerolite.zero.stage3.partitioned_parameter import PartitionedParameter

SETTINGS = ("moving", "kept", "tight")


# ---------------------------------------------------------------- torch.compile


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


@pytest.mark.fast("after-2")
@on_ranks(2, timeout=120)
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_blocks(when: str) -> None:
    plain = train(make_engine(3), steps=5, disturb=no_grad, at=(1,))
    for setting, mode in (("moving", "method"), ("kept", "wrapper")):
        backend = Counted()
        found = compiled(mode, when, setting, backend)
        assert backend.calls >= 5 * 3, "the blocks did not run compiled"
        state = {name.replace("_orig_mod.", ""): value for name, value in found["state"].items()}
        assert_same(state, plain["state"], f"{setting}, {mode}")
        assert_same(found["disturbed"], plain["disturbed"], f"{setting}, {mode}")
    # The backward of AOTAutograd is another graph, which saves weights or views of them.
    found = compiled("method", when, "kept" if when == "before" else "moving", "aot_eager")
    torch.testing.assert_close(found["seen"], plain["seen"], rtol=1e-5, atol=1e-6)


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
@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_after_initialize_compiles_once(stage: int) -> None:
    """Gathers stand between the graphs and not in them, so what is in flight asks for no other graph."""
    if stage == 1 and torch.__version__.startswith("2.6"):
        return  # it compiles each module's hooks anew, and soon gives up
    _, _, plain = recompiled("nothing", stage)
    for what in ("blocks", "module", "engine"):
        for leaf in (True, False) if stage == 3 else (False,):
            graphs, calls, loss = recompiled(what, stage, leaf)
            assert sum(graphs) <= 12 and not any(graphs[2:]), graphs  # parts of a block, with weights in flight or not
            assert len(set(calls[2:])) == 1 and calls[-1] >= 10, calls
            assert loss == pytest.approx(plain, rel=1e-6)


# ---------------------------------------------------------------- memory and objects


_OURS = (Engine, PartitionedParameterCoordinator, PartitionedParameter, ParamGroup, ModuleExecution, AllGather)


def census() -> dict[str, int]:
    """Live objects of our classes and tensors, and the tensors' bytes."""
    counts = {cls.__name__: 0 for cls in (*_OURS, Tensor, nn.Parameter)}
    ours = [item for item in gc.get_objects() if type(item) in _OURS]
    for item in [*ours, *live_tensors()]:
        counts[type(item).__name__] += 1
    return {**counts, "bytes": tensor_bytes()}


@pytest.mark.slow
@on_ranks(2, timeout=120)
def test_100_steps_grow_nothing() -> None:
    """Without any collection of cycles between."""
    for stage, setting in ((2, ""), (3, "moving"), (3, "tight")):
        engine = make_engine(stage, setting)
        train(engine, steps=2)
        gc.collect()
        gc.disable()
        try:
            counts: dict[int, list[dict[str, int]]] = {20: [], 100: []}
            for step in range(1, 101):
                engine.backward(loss_of(engine, step))
                engine.step()
                if step % 7 == 0:
                    no_grad(engine, step)
                for end, kept in counts.items():
                    if end - 10 < step <= end:
                        kept.append(census())
        finally:
            gc.enable()
        early, late = ({key: max(entry[key] for entry in kept) for key in kept[0]} for kept in counts.values())
        # Views of the communicator's regions come and go with the other ranks' timing: a few, not one a step.
        room = {"Tensor": 10}
        grown = {key: (early[key], late[key]) for key in early if late[key] > early[key] + room.get(key, 0)}
        assert not grown and (late["ModuleExecution"], late["AllGather"]) == (0, 0), (stage, setting, grown)


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(1, 2)
def test_a_module_outlives_its_engine(stage: int) -> None:
    """At stage 3 it is still partitioned, and hooks are gone; GatheredParameters makes it usable."""
    engine = make_engine(stage)
    train(engine, steps=2)
    state, model = engine.full_state_dict(), engine.module
    with torch.no_grad():
        expected = engine(batch(9))
    gone = weakref.ref(engine)
    del engine
    assert gone() is None
    gc.collect()
    with zerolite.zero.GatheredParameters(model), torch.no_grad():
        assert torch.equal(model(batch(9)), expected)
        assert_same(dict(model.state_dict()), state)
    if stage == 2:
        model(batch(9)).sum().backward()
        assert all(p.grad is not None for p in model.head.parameters())


@pytest.mark.fast("False-2")
@on_ranks(2)
@pytest.mark.parametrize("prepend", [False, True])
def test_users_hooks_see_whole_weights(prepend: bool) -> None:
    """In forward and backward, in the order of stage 2."""

    def read_by_hooks(stage: int, setting: str, when: str) -> list[Any]:
        model, seen = build(), []

        def read(module: nn.Module, *_: Any) -> None:
            own = {name: getattr(module, name).detach() for name in list(module._parameters)}
            seen.append((type(module).__name__, [(name, p.shape, p.sum().item()) for name, p in own.items()]))

        def install() -> None:
            for module in (model.first, model.blocks[1], model.blocks[1].up, model.head, model):
                module.register_forward_pre_hook(read, prepend=prepend)
                module.register_forward_hook(read, prepend=prepend)
                module.register_full_backward_pre_hook(read, prepend=prepend)
                module.register_full_backward_hook(read, prepend=prepend)

        if when == "before":
            install()
        engine = zerolite.initialize(model, settings(stage, setting))
        if when == "after":
            install()
        train(engine, steps=4)
        return seen

    for when in ("before", "after"):
        wanted = read_by_hooks(2, "", when)
        assert wanted
        for setting in ("moving", "kept", "tight"):
            assert_same(read_by_hooks(3, setting, when), wanted, f"{when}, {setting}")
