"""Idioms that read a weight in flight, each in one row: all wait for its values, also those that go past functions of
torch. A pointer to its memory is refused."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.flop_counter import FlopCounterMode

from tests.toolkit.refused_reads import refuse_reads
from tests.unit.test_launches import stack, train
from tests.unit.test_reads_in_flight import overlapping
from zerolite.zero.stage3.absent_parameter import AbsentParameter

pytestmark = [
    pytest.mark.usefixtures("without_ranks", "nothing_compiled"),
    pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*torch.ao.quantization", "ignore:To copy construct"),
]
X = torch.ones(1, 8)


def in_flight(model: nn.Module) -> Any:
    """Train, so that all weights are in flight. Returns the events, and the engine, which must live."""
    comm, engine = overlapping(model)
    train(engine, 2)
    assert comm.of("wait") == comm.of("launch")[:8], "nothing has waited for the second step's"
    assert all(isinstance(p, AbsentParameter) for p in model.parameters())
    return comm, engine


def saved(model: nn.Module) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return list(torch.load(file, weights_only=False).parameters())


def averaged(model: nn.Module) -> list[Tensor]:
    means = [torch.zeros_like(p) for p in model.parameters()]
    for mean, parameter in zip(means, model.parameters(), strict=True):
        mean.lerp_(parameter, 0.5)
    torch._foreach_lerp_(means, list(model.parameters()), 0.5)
    average = AveragedModel(model)
    average.update_parameters(model)
    return [*means, *average.parameters()]


def reloaded(model: nn.Module) -> list[Tensor]:
    model.load_state_dict({name: torch.zeros_like(p) for name, p in model.named_parameters()})
    return list(model.parameters())


def snapshots(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def shared_with_a_module(model: nn.Module) -> list[Tensor]:
    other = nn.Linear(8, 8, bias=False)
    other.weight = model[3].weight
    return [other(torch.ones(1, 8))]


class Product(torch.autograd.Function):
    """Its forward is called by C++."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()


def under_grad_of_func(model: nn.Module) -> list[Tensor]:
    return [torch.func.grad(lambda x: nn.functional.linear(x, model[2].weight).sum())(torch.ones(1, 8))]


def in_inference_mode(model: nn.Module) -> list[Tensor]:
    with torch.inference_mode():
        return [model(torch.ones(1, 8)).clone()]


READS: dict[str, Callable[[Any], list[Tensor]]] = {
    "state_dict": lambda model: list(model.state_dict().values()),
    "snapshot": snapshots,
    "numpy": lambda model: [torch.from_numpy(p.detach().numpy()) for p in model.parameters()],
    "average": averaged,
    "deepcopy": lambda model: list(copy.deepcopy(model).parameters()),
    "torch.save": saved,
    "a forward of a submodule": lambda model: [model[2](torch.ones(1, 8))],
    "functional_call": lambda model: [
        torch.func.functional_call(model, {k: v.detach() for k, v in model.named_parameters()}, torch.ones(1, 8))
    ],
    "parameters_to_vector": lambda model: [nn.utils.parameters_to_vector(model.parameters())],
    "pickle": lambda model: list(pickle.loads(pickle.dumps(model)).parameters()),
    "in another thread": lambda model: ThreadPoolExecutor(1).submit(snapshots, model).result(),
    "another module with the same weight": shared_with_a_module,
    "autograd.Function": lambda model: [Product.apply(torch.ones(1, 8), model[2].weight)],  # type: ignore[no-untyped-call]
    "inside torch.func.grad": under_grad_of_func,
    "inference_mode": in_inference_mode,
    "data_ptr": lambda model: [p for p in model.parameters() if p.data_ptr()],
    "load_state_dict": reloaded,
}


@torch.library.custom_op("zerolite_tests::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


class FusedBlock(nn.Module):
    """Its kernel takes the weights of its children, as Mamba's mixer and fused MLPs do."""

    def __init__(self, one: nn.Module, two: nn.Module) -> None:
        super().__init__()
        self.one, self.two = one, two

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return x @ self.one.weight @ self.two.weight


def in_a_hook(model: Any) -> list[Tensor]:
    seen: list[Tensor] = []
    hook = model[3].register_forward_pre_hook(lambda module, args: seen.append(module.weight + model[2].weight))
    seen.append(model(X))
    hook.remove()
    return seen


def by_an_optimizer(model: nn.Module) -> list[Tensor]:
    for parameter in model.parameters():
        parameter.grad = torch.ones(8, 8)
    torch.optim.AdamW(model.parameters(), fused=True).step()
    model.zero_grad()
    return list(model.parameters())


def written(write: Callable[[Tensor], object]) -> Callable[[Any], list[Tensor]]:
    def run(model: Any) -> list[Tensor]:
        with torch.no_grad():
            write(model[2].weight)
        return [model[2].weight]

    return run


def value(read: Callable[[Any], Any]) -> Callable[[Any], list[Tensor]]:
    return lambda model: [torch.as_tensor(read(model[2].weight))]


def functional(model: Any) -> list[Tensor]:
    return [torch.func.functional_call(model, dict(model.named_parameters()), (X,))]


def per_sample(model: Any) -> list[Tensor]:
    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(model, parameters, (x,)).sum()
        return result

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(model.named_parameters()), torch.ones(3, 8))
    return list(found.values())


READS |= {
    "__array__": value(lambda p: p.detach().__array__()),
    "from_dlpack(p.detach())": value(lambda p: torch.from_dlpack(p.detach())),
    "untyped_storage": value(lambda p: bytearray(p.untyped_storage().tolist())),
    "asarray(p)": value(torch.asarray),
    "nn.Buffer(p)": value(nn.Buffer),
    "x.set_(p.detach())": value(lambda p: torch.zeros(8, 8).set_(p.detach())),
    "foreach": lambda model: torch._foreach_mul(list(model.parameters()), 2.0),
    "an operator of ATen": value(lambda p: torch.ops.aten.mm(p, p)),
    "a custom operator": value(lambda p: product(X, p)),
    "iteration": lambda model: list(model[2].weight),
    "f-string": value(lambda p: float(f"{p[0, 0]:.3f}")),
    "multiprocessing": value(lambda p: p if ForkingPickler.dumps(p) else 0),
    "share_memory": lambda model: list(model.share_memory().parameters()),
    "spectral_norm": lambda model: [nn.utils.parametrizations.spectral_norm(model[2])(X)],
    "a fused kernel": lambda model: [FusedBlock(model[2], model[3])(X)],
    "a hook": in_a_hook,
    "an optimizer of the user's": by_an_optimizer,
    "nn.init": written(nn.init.kaiming_uniform_),
    "p.data.copy_": written(lambda p: p.data.copy_(torch.ones(8, 8))),
    "autograd.grad": value(lambda p: torch.autograd.grad((p * p).sum(), p)[0]),
    "functional_call": functional,
    "stack_module_state": lambda model: list(torch.func.stack_module_state([model, model])[0].values()),
    "func.jvp": value(lambda p: torch.func.jvp(torch.square, (p,), (torch.ones(8, 8),))[1]),
    "fx": lambda model: [torch.fx.symbolic_trace(model)(X)],
    "compile": value(lambda p: torch.compile(torch.square, backend="eager")(p)),
    "export": lambda model: [torch.export.export(model, (X,), strict=False).module()(X)],
}


def data_of(weight: Tensor) -> Tensor:
    x = torch.zeros(8, 8)
    x.data = weight
    return x


PAST: dict[str, Callable[[Any], list[Tensor]]] = {
    "tensor(p)": value(lambda p: torch.tensor(p)),
    "asarray(p, dtype=)": value(lambda p: torch.asarray(p, dtype=torch.float64)),
    "Variable(p)": value(torch.autograd.Variable),
    "Tensor(p)": value(torch.Tensor),
    "x.data = p": value(data_of),
    "nested_tensor([p])": value(lambda p: torch.nested.nested_tensor([p]).to_padded_tensor(0.0)),
    "a scripted function": value(lambda p: torch.jit.script(nn.functional.relu)(p)),
    "a traced function": value(lambda p: torch.jit.trace(lambda x: x * 2, (torch.ones(8, 8),))(p)),
    "vmap": value(lambda p: torch.vmap(torch.sum)(p)),
    "func.grad": value(lambda p: torch.func.grad(lambda w: (w * w).sum())(p)),
    "gradients of single samples": per_sample,
}


READS |= PAST


@pytest.mark.fast(every=2)
@pytest.mark.parametrize("read", READS)
def test_whoever_reads_weights_after_a_step_waits_for_them(read: str) -> None:
    model = stack()
    comm, engine = in_flight(model)
    found = [value.detach().clone() for value in READS[read](model)]
    assert all(value.isfinite().all() and type(value) is Tensor for value in found)
    if read in PAST:
        assert engine.module is not None, "which waits for all"
        torch.testing.assert_close(found, [value.detach() for value in PAST[read](model)], rtol=0, atol=0)
    train(engine)
    assert all(comm.of("wait").count(bucket) >= 2 for bucket in range(8))  # more, where the read leaves a view


def test_an_alias_that_code_past_functions_of_torch_has_made_gets_the_values() -> None:
    model = stack()
    _, engine = in_flight(model)
    weight = model[2].weight
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # as a C++ extension
        alias, row = weight.data, weight.data[1]
        alias.add_(1.0)
    assert engine.module is not None and weight.isfinite().all()
    assert torch.equal(alias, weight) and torch.equal(row, weight[1]) and alias.data_ptr() == weight.data_ptr()


@pytest.mark.slow
def test_an_alias_outlives_the_engine_without_values() -> None:
    model = stack()
    _, engine = in_flight(model)
    with torch._C.DisableTorchFunctionSubclass():
        alias = model[2].weight.data
    del engine, model, _
    gc.collect()
    with pytest.raises(RuntimeError, match="whose engine has ended: keep the engine"):
        alias.sum()


@pytest.mark.parametrize("refuses", [False, True], ids=["torch for CPUs", "torch built with CUDA"])
def test_a_pointer_to_a_weight_in_flight_is_refused(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_reads(monkeypatch, refuses)
    model = stack()
    _, engine = in_flight(model)
    weight = model[2].weight
    with torch._C.DisableTorchFunctionSubclass():  # as a C++ extension
        assert weight.shape == (8, 8)
        with pytest.raises(RuntimeError):
            weight.data_ptr()
        with pytest.raises(
            RuntimeError, match=r"parameter '2\.weight': expected a read" if refuses else "not allocated"
        ):
            weight.untyped_storage().tolist()
    with pytest.raises(RuntimeError, match="Creating a Parameter"):
        nn.Parameter(weight)
    assert engine.module[2].weight.data_ptr()


@pytest.mark.parametrize("read", ["vmap", "a scripted function", "tensor(p)"])
def test_inside_a_dispatch_mode_what_goes_past_functions_of_torch_raises(read: str) -> None:
    """Torch does not find the operators' fallback there."""
    model = stack()
    _, engine = in_flight(model)
    with FlopCounterMode(display=False), pytest.raises(RuntimeError, match="INTERNAL ASSERT"):
        PAST[read](model)
    with FlopCounterMode(display=False):
        assert model[2](X).isfinite().all() and engine.module is not None
        assert all(value.isfinite().all() for value in PAST[read](model))


# ---------------------------------------------------------------- TorchScript


def loaded(scripted: Any) -> list[Tensor]:
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    return list(torch.jit.load(file).parameters())


OF_SCRIPTED: dict[str, Callable[[Any], list[Tensor]]] = {
    "call": lambda scripted: [scripted(X)],
    "save": loaded,
    "freeze": lambda scripted: [torch.jit.freeze(scripted.eval())(X)],
}


@pytest.mark.slow
@pytest.mark.parametrize("use", OF_SCRIPTED)
@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, X)], ids=["script", "trace"])
def test_scripted_models_have_the_values_and_end_gathers_with_the_step(make: Any, use: str) -> None:
    model = stack()
    comm, engine = in_flight(model)
    scripted = make(model)
    assert sorted(comm.of("wait")) == sorted(comm.of("launch"))
    for _ in range(2):
        assert all(found.isfinite().all() for found in OF_SCRIPTED[use](scripted))
        train(engine)
        assert sorted(comm.of("wait")) == sorted(comm.of("launch"))


def test_models_scripted_before_the_engine_is_made_end_gathers_too() -> None:
    model = stack()
    scripted = torch.jit.script(model)
    comm, engine = overlapping(model)
    train(engine, 2)
    assert comm.of("wait") == comm.of("launch") and all(found.isfinite().all() for found in loaded(scripted))


def test_scripted_modules_without_trainable_parameters_end_nothing() -> None:
    torch.jit.script(nn.Sequential(nn.ReLU()))
    comm, engine = overlapping(stack())
    train(engine)
    assert not comm.of("wait")
