"""zero.Init, on one rank and several."""

from __future__ import annotations

import gc
import importlib
import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same, assert_same_on_ranks
from tests.toolkit.configs import ADAMW, at, config
from tests.toolkit.partitioned import ATTRIBUTES, assert_partitioned, build_in_init, seed_by_rank, stage3, whole
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import raises, run_steps
from zerolite import zero


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 9)
        self.gain = nn.Parameter(torch.ones(()))
        nn.init.xavier_uniform_(self.up.weight)


class Initialises(nn.Module):
    """Initialisation after the children exist, in all the ways that models have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=2)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.clones = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 7), 2, enable_nested_tensor=False)
        self.plain = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        self.grown = nn.ModuleList()
        for width in (3, 4):
            self.grown.append(nn.Linear(width, 2))
        self.rnn = nn.LSTM(3, 4)
        self.conv = nn.Conv2d(3, 5, 3)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self._set)
        for name, parameter in self.named_parameters():
            if name.endswith("up.weight") and parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.1 / parameter.shape[1])
        self.plain[0].weight.data = torch.randn(3, 3)
        self.plain[1].weight.data.mul_(2)
        with torch.no_grad():
            self.plain[2].weight[1:] = 3.0
            self.plain[2].bias.copy_(self.plain[1].bias + self.plain[0].bias)
        views = [parameter.data for parameter in self.parameters()]  # kept beyond the next one's gather
        for view in views:
            view.mul_(1.5)
        self.conv.to(memory_format=torch.channels_last)
        self.grown[0].weight.data = torch.randn(2, 3).double()
        self.grown[1].weight.data = torch.randn(2, 6)  # another shape
        self.numel = sum(parameter.numel() for parameter in self.parameters())
        with torch.no_grad():
            self.features = self.conv(torch.ones(1, 3, 5, 5)).shape[1]  # a dummy forward
            self.embed.weight[self.embed.padding_idx].fill_(0)

    def _set(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class Filled(nn.Module):
    """Its last act is to change parameters without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        with torch.no_grad():
            self.norm.weight.fill_(2.0)
            self.norm.bias.fill_(0.25)


class Grown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Filled(), nn.Linear(6, 3)


class Replaced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(6, 5)
        with torch.no_grad():
            self.a.weight.mul_(3)
        self.b.weight = self.a.weight
        self.a.bias = nn.Parameter(self.a.bias.detach().clone() * 2)
        with torch.no_grad():
            self.b.weight.add_(1)
        self.c = nn.Linear(5, 5)
        self.c.weight = nn.Parameter(self.a.weight[:, :5].clone())
        del self.c.bias
        self.c.bias = nn.Parameter(torch.ones(5))
        with torch.no_grad():
            self.c.bias.mul_(5)
            self.c.weight.set_(torch.full((5, 5), 0.5))


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.batch_norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        with torch.no_grad():
            self.linear.weight.fill_(0.5)
            self.batch_norm.running_mean.fill_(3)
            self.batch_norm.weight.fill_(4)
        self.register_buffer("twice", self.linear.weight.detach() * 2)
        self.register_buffer("copied", self.linear.weight.detach().clone())


class Parametrised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = weight_norm(nn.Linear(4, 3))
        self.b = parametrizations.weight_norm(nn.Linear(4, 3))
        self.c = parametrizations.orthogonal(nn.Linear(4, 4))
        self.d, self.e = spectral_norm(nn.Linear(4, 3)), parametrizations.spectral_norm(nn.Linear(4, 3))
        with torch.no_grad():
            self.b.bias.fill_(3)
            self.a.weight_g.mul_(2)
            self.b.weight = torch.ones(3, 4)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([nn.Parameter(torch.rand(3)) for _ in range(2)])
        with torch.no_grad():
            for parameter in self.list:
                parameter.mul_(2)
            self.list.append(nn.Parameter(torch.ones(2)))
            self.list[-1].fill_(4)
        self.q = nn.Parameter(torch.zeros(3))
        self.same = self.q
        nn.init.trunc_normal_(self.same)


@pytest.mark.fast("2")
@on_ranks(1, 2, 3)
def test_constructors_give_the_values_of_plain_construction() -> None:
    """Each rank has a seed of its own; all get what rank 0 alone would have built."""
    warnings.simplefilter("ignore")
    for cls in (Grown, Replaced, Buffers, Parametrised, Lists, Initialises):
        model, wanted = build_in_init(cls, 3)
        if cls is not Parametrised:  # its buffers are random numbers of each rank
            assert_same(dict(model.named_buffers()), dict(wanted.named_buffers()))
        with zero.GatheredParameters(model):
            for (name, one), other in zip(model.named_parameters(), wanted.parameters(), strict=True):
                assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype), name
    assert (model.numel, model.features) == (wanted.numel, wanted.features)
    names = {name: parameter._sharded_param.name for name, parameter in model.named_parameters()}
    assert {name for name in names if names[name] != name} == {n for n in names if n.startswith("grown")}


@pytest.mark.slow
@on_ranks(1, 2)
def test_parameters_that_change_inside_the_context() -> None:
    """An engine takes them as they are then; one that is put in the place of another must have its shape."""
    torch.manual_seed(4)
    plain = Grown()
    torch.manual_seed(4)
    with zero.Init():
        engine = zerolite.initialize(Grown(), config(3, optimizer=ADAMW))
    assert_same(engine.full_state_dict(), whole(plain))
    with raises(RuntimeError, "weight", "(3, 6)", "set .data"), zero.Init():
        head = nn.Linear(6, 3)
        head.weight = nn.Parameter(torch.ones(3, 6))
        last = nn.Sequential(head)
        last[0].weight.data = torch.empty(0)


@pytest.mark.fast("0-2", "3 moving-2")
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("stage", ["0", "2", "3 moving", "3 defaults"])
def test_a_model_built_partitioned_trains_like_one_that_was_built_whole(stage: str) -> None:
    """Bit for bit what plain construction on rank 0's seed gives, where each rank has a seed of its own. Below stage 3
    the model becomes whole."""
    partitioned, settings = stage[0] == "3", at(stage, optimizer=ADAMW)
    torch.manual_seed(4)
    plain = zerolite.initialize(models.Mlp(), config(2, optimizer=ADAMW))
    losses = run_steps(plain, 5)
    seed_by_rank(4)
    with zero.Init(config_dict_or_path=settings if partitioned else None):
        model = models.Mlp()
    parameters = list(model.parameters())
    parameters[0].label = "mine"
    ids = [p.ds_id for p in parameters]
    engine = zerolite.initialize(model, settings)
    assert all(p is q for p, q in zip(parameters, engine.module.parameters(), strict=True))
    assert parameters[0].label == "mine"
    if partitioned:
        assert ids == [p.ds_id for p in parameters]
    else:
        assert_plain(engine.module)
    assert run_steps(engine, 5) == losses
    assert_same(whole(engine.module), whole(plain.module))


@pytest.mark.fast("1")
@on_ranks(1, 2)
def test_many_kinds_of_init() -> None:
    class Outer(nn.Module):
        def __init__(self, nested: bool) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(3))
            with zero.Init(enabled=nested):
                self.inner = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
                nn.init.ones_(self.inner[0].weight)
                self.scale.data.add_(1)
            nn.init.normal_(self.inner[1].weight)

    torch.manual_seed(1)
    wanted = whole(Outer(False))
    seed_by_rank(1)
    with zero.Init():
        model = Outer(True)
    assert_partitioned(model)
    assert_same(whole(model), wanted)

    context = zero.Init()  # one object, twice; and a part built in another
    for _ in range(2):
        with context:
            second = nn.Sequential(model, nn.Linear(3, 2))
        assert_partitioned(second)

    model = models.build(models.Mlp)
    seen = whole(model)
    zero.Init(module=model)
    assert_partitioned(model)
    assert_same(whole(model), seen)


@pytest.mark.slow
@on_ranks(1, 2)
def test_exceptions_in_the_context() -> None:
    with zero.Init():
        kept = nn.Sequential(nn.Linear(3, 3))
    before = whole(kept)
    with raises(KeyError, "boom"), zero.Init():
        nn.Sequential(nn.Linear(3, 3))
        raise KeyError("boom")
    assert_partitioned(kept)
    assert_same(whole(kept), before)
    assert_plain(nn.Linear(2, 2))  # no hook and no mode is left


def assert_plain(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.numel() and not any(hasattr(parameter, name) for name in (*ATTRIBUTES, "_sharded_param"))


@on_ranks(2)
def test_dtype_and_device() -> None:
    torch.manual_seed(0)
    wanted = nn.Linear(5, 3).weight.data.bfloat16()
    torch.manual_seed(0)
    with zero.Init(dtype=torch.bfloat16, remote_device="cpu"):
        model = nn.Sequential(nn.Linear(5, 3))
        model[0].bias.data = torch.zeros(3)
        model.register_parameter("count", nn.Parameter(torch.arange(3), requires_grad=False))
    assert model[0].weight.ds_tensor.dtype == model[0].bias.ds_tensor.dtype == torch.bfloat16
    assert model.count.ds_tensor.dtype == torch.int64
    assert torch.equal(whole(model)["0.weight"], wanted) and whole(model)["count"].tolist() == [0, 1, 2]
    wrong_stage = {"train_batch_size": 2, "zero_optimization": {"stage": 7}}
    refused: list[tuple[dict[str, Any], list[str]]] = [
        ({"remote_device": "nvme"}, ["remote_device", "nvme_path", "config_dict_or_path"]),
        ({"remote_device": "cuda"}, ["remote_device", "'cuda'", "expected", "'nvme'"]),
        ({"dtype": torch.int32}, ["dtype", "int32"]),
        ({"module": "model"}, ["module", "str"]),
        ({"config_dict_or_path": wrong_stage}, ["stage"]),
    ]
    for arguments, words in refused:
        with raises(ValueError, *words):
            zero.Init(**arguments)


# -------------------------------------------------------------------- Init: memory


class Listed(nn.Module):
    """Layers without an owner while the list is built."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(depth)])
        for layer in self.layers:
            nn.init.normal_(layer.weight)
        self.apply(lambda module: module.weight.data.mul_(2) if isinstance(module, nn.Linear) else None)


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors held after any operation. The profiler cannot tell here: gloo's threads drop what
    they have sent, and it does not see what other threads release."""

    peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, live_bytes())
        return result


def live_bytes() -> int:
    """Without what only uint8 views hold: those are sent by gloo, whose threads let go of them a moment later."""
    with torch._C.DisableTorchFunction():
        tensors = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter) and not item.is_meta]
        tensors = [tensor for tensor in tensors if tensor.dtype is not torch.uint8]
        storages = {id(tensor.untyped_storage()): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@on_ranks(2)
@pytest.mark.parametrize("meta", [False, True])
def test_construction_holds_the_shards_and_two_layers(meta: bool) -> None:
    os.environ["ZEROLITE_SHARED_MEMORY"] = "0"  # its regions would count
    gc.collect()
    importlib.import_module("torch._dynamo")  # torch does it in its first dispatch mode
    gc.freeze()  # what is there now is not looked at
    with LiveBytes() as live:
        if meta:
            with torch.device("meta"):
                model = Listed(8, 160)
            zero.Init(module=model)
        else:
            with zero.Init():
                model = Listed(8, 160)
    assert_partitioned(model)
    gc.collect()
    layer = 4 * 160**2
    assert live_bytes() <= 8 / 2 * layer * 1.05
    assert live.peak <= (7 / 2 + 2) * layer * 1.05  # the last layer is made before the one before it is partitioned


# -------------------------------------------------------------------- meta models


class Metaful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.rnn = nn.LSTM(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(6, 7)
        self.head.weight = self.embed.weight


@pytest.mark.fast("3")
@on_ranks(1, 2, 3)
def test_meta_model() -> None:
    with torch.device("meta"):
        model = Metaful()
    parameters = dict(model.named_parameters())
    model.embed.weight.label = "mine"
    seed_by_rank(2)
    zero.Init(module=model)
    assert_partitioned(model)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert model.head.weight is model.embed.weight and model.embed.weight.label == "mine"
    assert model.rnn._flat_weights[0] is model.rnn.weight_ih_l0
    torch.manual_seed(2)
    wanted = nn.Embedding(7, 6).weight.data
    values = whole(model)
    assert torch.equal(values["embed.weight"], wanted)  # the first owner's values, as in plain construction
    assert values["attention.out_proj.bias"].eq(0).all()  # set by the attention, after its child has been made
    assert values["norm.weight"].eq(1).all() and model.norm.running_var.eq(1).all()
    assert values["rnn.weight_ih_l0"].abs().max() <= 5**-0.5
    assert_same_on_ranks(values)


@on_ranks(2)
def test_meta_engine() -> None:
    """Meta models go straight into initialize, and have the values of plain construction on rank 0."""
    torch.manual_seed(6)
    wanted = whole(models.Mlp())
    with torch.device("meta"):
        model = models.Mlp()
        bare = nn.Sequential(nn.Linear(3, 3), models.Scale())
    seed_by_rank(6)
    engine = zerolite.initialize(model, stage3())
    assert_same(whole(engine.module), wanted)
    run_steps(engine, 2)
    with raises(RuntimeError, "'1' (Scale)", "meta device", "reset_parameters()"):
        zero.Init(module=bare)
