"""Models and engines at stage 3 as Python objects: compiled, hooked, copied, pickled, deleted, and their states."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.distributed.cases.stage3_lifecycle import (
    batch,
    build,
    detached,
    gathered,
    loss_of,
    settings,
    state_of,
    train,
)
from zerolite.engine.engine import Engine
from zerolite.zero.stage3.module_hooks import Unit, Use
from zerolite.zero.stage3.param_group import AllGather
from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator
from zerolite.zero.stage3.partitioned_parameter import PartitionedParameter

# ---------------------------------------------------------------- torch.compile


def compiled(mode: str, when: str, setting: str, backend: str = "counted", steps: int = 5) -> dict[str, Any]:
    """``mode``: how blocks are compiled; ``when``: "before" or "after" initialize. ``calls``: of compiled graphs."""
    torch._dynamo.reset()
    calls = [0]

    def counted(graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            calls[0] += 1
            return graph.forward(*args)

        return run

    model = build()
    way: Any = counted if backend == "counted" else backend

    def compile_blocks() -> None:
        for index, block in enumerate(model.blocks):
            if mode == "method":
                block.compile(backend=way)
            else:
                model.blocks[index] = torch.compile(block, backend=way)  # type: ignore[assignment]

    if when == "before":
        compile_blocks()
    engine = zerolite.initialize(model, settings(3, setting))
    if when == "after":
        compile_blocks()
    result = train(engine, steps=steps, disturbance="no_grad", at=(1,))
    result["state"] = {name.replace("_orig_mod.", ""): value for name, value in result["state"].items()}
    torch._dynamo.reset()
    return {**result, "calls": calls[0]}


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
    graphs, calls = [0], [0]

    def counted(graph: Any, inputs: Any) -> Callable[..., Any]:
        graphs[0] += 1

        def run(*args: Any) -> Any:
            calls[0] += 1
            return graph.forward(*args)

        return run

    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Residual() for _ in range(10)))
    given = settings(stage, "move" if stage == 3 else "keep")
    given["zero_optimization"] |= {"overlap_comm": True, "reduce_bucket_size": 200}
    if stage == 3:
        given["zero_optimization"] |= {"stage3_module_granularity_threshold": 0}
        given["zero_optimization"] |= {"leaf_modules": [str(n) for n in range(10)]} if leaf else {}
    engine = zerolite.initialize(model, given)
    for block in model if what == "blocks" else ():
        block.compile(backend=counted)
    if what == "engine":
        engine.compile(backend=counted)
    called: Any = torch.compile(engine.module, backend=counted) if what == "module" else engine
    compiled, ran = [], []
    for step in range(5):
        graphs[0] = calls[0] = 0
        loss = called(torch.randn(3, 6, generator=torch.Generator().manual_seed(step))).square().mean()
        engine.backward(loss)
        engine.step()
        compiled.append(graphs[0])
        ran.append(calls[0])
    torch._dynamo.reset()
    return compiled, ran, loss.item()


def uncompiled(setting: str, steps: int = 5) -> dict[str, Any]:
    """The same training without compilation."""
    return train(zerolite.initialize(build(), settings(3, setting)), steps=steps, disturbance="no_grad", at=(1,))


# ---------------------------------------------------------------- users' hooks


class _Reader:
    """Hooks that read the weights of the module they are on; ``seen`` keeps the sums in order."""

    def __init__(self, seen: list[Any], change: bool) -> None:
        self.seen = seen
        self.change = change

    def _read(self, what: str, module: nn.Module) -> None:
        weights = {name: getattr(module, name).detach() for name in list(module._parameters)}
        facts = [(name, tuple(weight.shape), weight.sum().item()) for name, weight in weights.items()]
        self.seen.append((what, type(module).__name__, facts))

    def before_forward(self, module: nn.Module, args: Any) -> Any:
        self._read("before forward", module)
        return tuple(a * 1.5 for a in args) if self.change else None

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._read("after forward", module)
        return output + 0.25 if self.change else None

    def before_backward(self, module: nn.Module, gradients: Any) -> None:
        self._read("before backward", module)

    def after_backward(self, module: nn.Module, of_inputs: Any, of_outputs: Any) -> None:
        self._read("after backward", module)


def hook_modules(model: Any, seen: list[Any], prepend: bool) -> list[Any]:
    handles = []
    for number, module in enumerate([model.first, model.blocks[1], model.blocks[1].up, model.head, model]):
        reader = _Reader(seen, change=number == 2)
        handles.append(module.register_forward_pre_hook(reader.before_forward, prepend=prepend))
        handles.append(module.register_forward_hook(reader.after_forward, prepend=prepend))
        handles.append(module.register_full_backward_pre_hook(reader.before_backward, prepend=prepend))
        handles.append(module.register_full_backward_hook(reader.after_backward, prepend=prepend))
    return handles


def hook_parameters(model: Any, seen: list[Any]) -> list[Any]:
    """Gradients are read and changed on their way, and seen once more where they have been accumulated."""

    def on_gradient(gradient: Tensor) -> Tensor:
        seen.append((tuple(gradient.shape), gradient.sum().item()))
        return gradient * 0.5

    return [p.register_hook(on_gradient) for p in (model.head.weight, model.gain, model.blocks[0].up.weight)]


def hooked(stage: int, setting: str, what: str, when: str, prepend: bool = False) -> dict[str, Any]:
    """``seen``: everything that the hooks read, in order, until they are removed; then two steps without them."""
    model = build()
    seen: list[Any] = []
    install = (
        (lambda: hook_modules(model, seen, prepend)) if what == "modules" else lambda: hook_parameters(model, seen)
    )
    handles = install() if when == "before" else []
    engine = zerolite.initialize(model, settings(stage, setting))
    handles = handles or install()
    result = train(engine, steps=4)
    for handle in handles:
        handle.remove()
    train(engine, steps=2)
    return {"hooks": seen, "left": result["left"], "state": state_of(engine)}


# ---------------------------------------------------------------- copies


def copied(setting: str, when: str) -> dict[str, Any]:
    """A deep copy of the module in the middle of training: a whole plain model that lives alone."""
    model = build()
    model.head.weight.tag = "kept"  # type: ignore[attr-defined]
    engine = zerolite.initialize(model, settings(3, setting))
    train(engine, steps=3)
    if when == "gathered":
        with zerolite.zero.GatheredParameters(engine.module):
            twin = copy.deepcopy(engine.module)
    else:
        twin = copy.deepcopy(engine.module)
    left = gathered(engine)
    state = state_of(engine)
    with torch.no_grad():
        expected = engine(batch(50))
        same_output = torch.equal(twin(batch(50)), expected)
    kinds = {type(p) is nn.Parameter and not any(name.startswith("ds_") for name in vars(p)) for p in twin.parameters()}
    facts = {
        "left": left,
        "same_output": same_output,
        "same_state": _equal(twin.state_dict(), state),
        "plain": kinds == {True},
        "tied": twin.again.weight is twin.blocks[0].up.weight,
        "frozen": not twin.frozen.weight.requires_grad and twin.head.weight.requires_grad,
        "tag": getattr(twin.head.weight, "tag", None),
        "apart": not set(map(id, twin.parameters())) & set(map(id, engine.module.parameters())),
    }
    optimizer = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.1)
    twin(batch(50)).square().mean().backward()
    optimizer.step()
    facts["engine_untouched"] = _equal(state_of(engine), state)
    facts["twin_trained"] = not torch.equal(twin.head.weight, state["head.weight"])
    coordinator = weakref.ref(engine.coordinator)
    twin.zero_grad()
    del engine, model, optimizer
    gc.collect()
    facts["coordinator_gone"] = coordinator() is None
    again = zerolite.initialize(twin, settings(3, setting))
    facts["trains_again"] = not train(again, steps=3)["left"]
    return facts


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def saved(setting: str, where: str) -> str:
    """torch.save of the whole module: what it says, or "whole" if what was loaded computes the same."""
    engine = zerolite.initialize(build(), settings(3, setting))
    train(engine, steps=2)
    file = io.BytesIO()
    try:
        if where == "gathered":
            with zerolite.zero.GatheredParameters(engine.module):
                torch.save(engine.module, file)
        else:
            torch.save(engine.module, file)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with torch.no_grad():
        return "whole" if torch.equal(loaded(batch(3)), engine(batch(3))) else "different outputs"


# ---------------------------------------------------------------- memory and objects


def tensor_bytes() -> int:
    """Bytes of all live tensors' storages, each once; what a resized storage holds now."""
    sizes: dict[int, int] = {}
    for item in gc.get_objects():
        if type(item) in (Tensor, nn.Parameter):
            try:
                storage = item.untyped_storage()
            except NotImplementedError:  # torch 2.6 leaves undefined tensors behind
                continue
            sizes[storage._cdata] = storage.nbytes()
            if item.grad is not None:
                sizes[item.grad.untyped_storage()._cdata] = item.grad.untyped_storage().nbytes()
    return sum(sizes.values())


_OURS = (Engine, PartitionedParameterCoordinator, PartitionedParameter, Unit, Use, AllGather)


def census() -> dict[str, int]:
    """Live objects of our classes and tensors, and the tensors' bytes."""
    counts = {cls.__name__: 0 for cls in (*_OURS, Tensor, nn.Parameter)}
    for item in gc.get_objects():
        name = type(item).__name__
        if type(item) in (*_OURS, Tensor, nn.Parameter):
            counts[name] += 1
    return {**counts, "bytes": tensor_bytes()}


def engines_in_a_row(setting: str, same_model: bool, collect: bool, count: int = 5) -> dict[str, Any]:
    """``count`` engines, each trained and deleted before the next. ``alive``: engines and coordinators that outlived
    their ``del``; ``bytes``: after each, model included; ``base``: before the first."""
    gc.collect()
    base = tensor_bytes()
    model = build() if same_model else None
    alive: list[str] = []
    seen: list[dict[str, int]] = []
    states = []
    gc.disable()
    try:
        for _ in range(count):
            engine = zerolite.initialize(model or build(), settings(3, setting))
            state = train(engine, steps=4)["state"]
            states.append(sum(value.double().sum().item() for value in state.values()))
            known = {"engine": weakref.ref(engine), "coordinator": weakref.ref(engine.coordinator)}
            del engine, state
            if collect:
                gc.collect()
            alive += [name for name, reference in known.items() if reference() is not None]
            seen.append(census())
    finally:
        gc.enable()
    return {"base": base, "alive": alive, "census": seen, "states": states}


def many_steps(setting: str, steps: int = 200) -> list[dict[str, int]]:
    """The largest census of steps 11 to 20 and that of the last 10, without any collection of cycles between."""
    engine = zerolite.initialize(build(), settings(3, setting))
    train(engine, steps=2)
    gc.collect()
    gc.disable()
    try:
        counts: dict[int, list[dict[str, int]]] = {20: [], steps: []}
        for step in range(1, steps + 1):
            _one_step(engine, step)
            if step % 7 == 0:
                with torch.no_grad():
                    engine(batch(step))
            for end, kept in counts.items():
                if end - 10 < step <= end:
                    kept.append(census())
    finally:
        gc.enable()
    assert not gathered(engine)
    return [{key: max(entry[key] for entry in kept) for key in kept[0]} for kept in counts.values()]


def used_after_its_engine(setting: str) -> dict[str, Any]:
    """The module outlives its engine: still partitioned, hooks gone; GatheredParameters makes it usable."""
    engine = zerolite.initialize(build(), settings(3, setting))
    train(engine, steps=2)
    state, model = state_of(engine), engine.module
    with torch.no_grad():
        expected = engine(batch(9))
    del engine
    gc.collect()
    with zerolite.zero.GatheredParameters(model), torch.no_grad():
        inside = torch.equal(model(batch(9)), expected)
        same = _equal(dict(model.state_dict()), state)
    plain = type(model.first._parameters) is dict
    return {"inside": inside, "same": same, "plain": plain}


# ---------------------------------------------------------------- several engines


def interleaved_engines(stages: Sequence[int], together: bool, setting: str = "move") -> list[dict[str, Tensor]]:
    """One engine per stage, trained step by step in turn (``together``) or one after the other; final states."""
    engines = [zerolite.initialize(build(seed), settings(stage, setting)) for seed, stage in enumerate(stages)]
    turns = (
        [(step, e) for step in range(6) for e in engines] if together else [(s, e) for e in engines for s in range(6)]
    )
    for step, engine in turns:
        train(engine, steps=1) if step % 2 else _one_step(engine, step)
    return [state_of(engine) for engine in engines]


def _one_step(engine: Any, step: int) -> None:
    engine.backward(loss_of(engine, step))
    engine.step()


def chained_engines(stages: tuple[int, int], setting: str) -> Any:
    """One graph through two engines, as in a GAN: the second one's output is judged, both are trained."""
    first = zerolite.initialize(nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))), settings(stages[0], setting))
    second = zerolite.initialize(build(), settings(stages[1], setting))
    left = []
    for step in range(6):
        loss = second(torch.tanh(first(batch(step)))).square().mean()
        loss.backward()
        first.optimizer.step()
        second.optimizer.step()
        left += gathered(first) + gathered(second)
    return {"left": left, "states": [state_of(first), state_of(second)]}


# ---------------------------------------------------------------- windows and phases


def phases(stage: int, setting: str, accumulation: int = 1) -> Any:
    """Every way to end a window; gives all numbers on the way."""
    engine = zerolite.initialize(build(), settings(stage, setting, accumulation=accumulation))
    seen: list[Any] = []

    def backward(step: int, micro: int = 0) -> None:
        loss = loss_of(engine, step, micro)
        engine.backward(loss)
        seen.append(detached(loss))

    for step in range(3):  # phases by hand
        for micro in range(accumulation):
            backward(step, micro)
            if micro < accumulation - 1:
                engine.step()
        engine.reduce_gradients()
        seen.append(engine.get_global_grad_norm())
        seen.append(engine.clip_gradients(0.1))
        engine.update()
        seen.append(engine.get_global_grad_norm())
        engine.publish()
        engine.zero_grad()
        seen.append(gathered(engine))
    for step in range(3, 6):  # no_sync, then a boundary by hand
        with engine.no_sync():
            backward(step, 0)
        engine.set_gradient_accumulation_boundary(False)
        seen.append(engine.step())
        engine.set_gradient_accumulation_boundary(True)
        backward(step, 1)
        seen.append(engine.step())
        engine.set_gradient_accumulation_boundary(None)
    backward(6)
    engine.zero_grad()  # dropped
    backward(7)
    seen.append(engine.step(flush=True))
    seen.append([engine.global_steps, engine.micro_steps, engine.get_global_grad_norm()])
    seen.append(gathered(engine))
    return {"seen": seen, "state": state_of(engine)}


# ---------------------------------------------------------------- states


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def plain_state_dicts(setting: str) -> None:
    """Plain state dicts of the model and of its parts are whole, and loading one reaches shards and masters."""
    engine = zerolite.initialize(build(), settings(3, setting))
    train(engine, steps=1)
    whole = state_of(engine)
    for state in (engine.module.state_dict(), engine.state_dict()):
        assert state.keys() == whole.keys() and _equal(state, whole)
    part = engine.module.blocks[1].up.state_dict(prefix="blocks.1.up.")
    assert _equal(part, {name: whole[name] for name in part}) and len(part) == 2
    assert not nn.Sequential(nn.Tanh()).state_dict()
    wanted = build(seed=11).state_dict()
    engine.module.load_state_dict(wanted)
    assert not gathered(engine)
    assert _equal(state_of(engine), wanted)
    engine.module.head.load_state_dict({name: whole[f"head.{name}"] for name in ("weight", "bias")})
    assert _equal(engine.module.head.state_dict(prefix="head."), {n: whole[n] for n in ("head.weight", "head.bias")})
    train(engine, steps=2)


def written_inside(setting: str) -> list[bool]:
    """load_state_dict inside GatheredParameters(module, modifier_rank=0): every rank and the masters take it."""
    engine = zerolite.initialize(build(), settings(3, setting))
    train(engine, steps=2)
    wanted = build(seed=11).state_dict()
    with zerolite.zero.GatheredParameters(engine.module, modifier_rank=0):
        if engine.rank == 0:
            engine.module.load_state_dict(wanted)
    same = _equal(state_of(engine), wanted)
    engine.zero_grad()
    train(engine, steps=1)
    near = all((state_of(engine)[name] - value).abs().max() < 0.01 for name, value in wanted.items())
    return [same, near]


def state_roundtrip(stages: tuple[int, int], setting: str, precision: str, rank0_only: bool) -> dict[str, Any]:
    """The state of an engine of one stage into an engine of another, on a different model; both go on alike."""
    first = zerolite.initialize(build(), settings(stages[0], setting, precision=precision))
    train(first, steps=3)
    state = first.full_state_dict(rank0_only=rank0_only)
    facts: dict[str, Any] = {
        "names": list(state),
        "empty": not state,
        "tied": bool(state) and state["again.weight"] is state["blocks.0.up.weight"],
        "dtypes": sorted({str(value.dtype) for value in state.values()}),
        "cpu": all(value.device.type == "cpu" for value in state.values()),
        "same_as_module": stages[0] == 3 or not state or _equal(dict(first.module.state_dict()), state),
    }
    kept = detached(state)
    _one_step(first, 70)
    facts["copies"] = not state or _equal(state, kept)
    second = zerolite.initialize(build(seed=8), settings(stages[1], setting, precision=precision))
    train(second, steps=2)
    second.load_full_state_dict(state if second.rank == 0 else None)
    loaded = state_of(second)
    facts["loaded"] = not state or _equal(loaded, state)
    facts["left"] = gathered(first) + gathered(second)
    _one_step(second, 71)
    facts["masters follow"] = max(
        float((state_of(second)[n].float() - v.float()).abs().max()) for n, v in loaded.items()
    )
    return facts


def names() -> list[str]:
    """Return the names of a plain model's state dict."""
    return list(build().state_dict())


def load_errors(stage: int) -> dict[str, str]:
    """On all ranks, and nothing is changed. Only rank 0's state counts."""
    engine = zerolite.initialize(build(), settings(stage, "move"))
    state = state_of(engine)
    rank = dist.get_rank()
    wrong = {**state, "head.bias": torch.zeros(4)}
    short = {name: value for name, value in state.items() if not name.startswith("first")}
    long = {**state, "spare.weight": torch.zeros(1)}
    messages = {
        "shape": _message(lambda: engine.load_full_state_dict(wrong if rank == 0 else state)),
        "missing": _message(lambda: engine.load_full_state_dict(short if rank == 0 else None)),
        "unexpected": _message(lambda: engine.load_full_state_dict(long)),
        "not strict": _message(lambda: engine.load_full_state_dict({**short, "spare": state["gain"]}, strict=False)),
        "not strict, wrong shape": _message(lambda: engine.load_full_state_dict(wrong, strict=False)),
        "other ranks' state": _message(lambda: engine.load_full_state_dict(state if rank == 0 else wrong)),
    }
    assert _equal(state_of(engine), state)
    assert not gathered(engine)
    return messages
