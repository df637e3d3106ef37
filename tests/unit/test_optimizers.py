"""Optimizers by name, the claim that the elementwise ones are, and Lion against a plain loop."""

from __future__ import annotations

import re

import pytest
import torch

import zerolite
from zerolite.config.errors import ConfigError
from zerolite.ops import Lion
from zerolite.optim.muon import MuonWithAdamW, muon_groups
from zerolite.optim.optimizers import (
    ELEMENTWISE,
    NOT_ELEMENTWISE,
    TORCH_OPTIMIZERS,
    check_elementwise,
    needs_whole_parameters,
    resolve_optimizer,
)

USABLE = sorted(set(TORCH_OPTIMIZERS) - {"lbfgs", "sparseadam"}) + ["lion"]


def one_update(optimizer_class, defaults, start=1.0, grad=0.5):
    p = torch.nn.Parameter(torch.full((3, 2), start))
    optimizer = optimizer_class([p], **defaults)
    p.grad = torch.full_like(p, grad)
    optimizer.step()
    return p.detach()


@pytest.mark.parametrize("name", USABLE)
def test_every_name_resolves_in_any_case_and_can_be_made(name):
    for spelling in (name, name.upper(), name.title()):
        spec = resolve_optimizer(spelling, {"lr": 0.01})
        assert spec.defaults["lr"] == 0.01
        assert torch.isfinite(one_update(spec.cls, spec.defaults)).all()


def test_adam_decouples_its_weight_decay_unless_told_otherwise():
    params = {"lr": 0.1, "weight_decay": 0.5}
    decoupled = resolve_optimizer("Adam", params)
    coupled = resolve_optimizer("Adam", {**params, "adam_w_mode": False})
    assert (decoupled.cls, coupled.cls) == (torch.optim.AdamW, torch.optim.Adam)
    # Adam's first step is lr * sign(grad); the decoupled decay multiplies by 1 - lr * weight_decay.
    torch.testing.assert_close(one_update(decoupled.cls, decoupled.defaults), torch.full((3, 2), 0.85))
    torch.testing.assert_close(one_update(coupled.cls, coupled.defaults), torch.full((3, 2), 0.9))


def test_values_that_change_nothing_and_values_of_json():
    for key in ("torch_adam", "bias_correction", "fp32_optimizer_states", "set_grad_none"):
        for name in ("Adam", "AdamW"):
            assert resolve_optimizer(name, {key: True}) == resolve_optimizer(name)
    for same in ({"torch_adam": False}, {"adam_w_mode": "auto", "torch_adam": "auto"}):
        assert resolve_optimizer("Adam", same) == resolve_optimizer("Adam")
    spec = resolve_optimizer("AdamW", {"lr": "auto", "betas": [0, 0.95], "eps": 1, "weight_decay": "auto"})
    assert spec.defaults == {"betas": (0, 0.95), "eps": 1}
    assert all(type(beta) is float for beta in spec.defaults["betas"])
    if "muon" in TORCH_OPTIMIZERS:
        assert resolve_optimizer("Muon", {"ns_steps": 3.0}).defaults == {"ns_steps": 3}


@pytest.mark.parametrize(("name", "key"), [("Adam", "bias_correction"), ("AdamW", "fp32_optimizer_states")])
def test_switches_of_our_own_are_options_of_the_groups(name, key):
    spec = resolve_optimizer(name, {key: False})
    assert spec.options == {key: False} and key not in spec.defaults
    assert spec.make([torch.nn.Parameter(torch.zeros(2))]).param_groups[0][key] is False
    with pytest.raises(ConfigError, match=f"optimizer.params.{key}: expected true beside 'amsgrad'"):
        resolve_optimizer(name, {key: False, "amsgrad": True})


@pytest.mark.parametrize(
    ("name", "words"),
    [("AdmaW", "'AdmaW' is not known.*nearest: 'AdamW'"), ("zzz", "known are .*Lion.*initialize"), ("LBFGS", "closure"),
     ("OneBitAdam", "nearest that is: 'Adam'"), ("MuSGD", "nearest that is: 'SGD'"), ("SparseAdam", "sparse grad")],
)  # fmt: skip
def test_unknown_names_name_the_nearest(name, words):
    with pytest.raises(ConfigError, match=f"optimizer.type: .*{words}"):
        resolve_optimizer(name)


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("AdamW", {"beta": [0.9, 0.99]}, "optimizer.params.beta: .*nearest: 'betas'"),
        ("Adam", {"adamw_mode": True}, "optimizer.params.adamw_mode: .*nearest: 'adam_w_mode'"),
        ("Adam", {"adam_w_mode": False, "decoupled_weight_decay": True}, "params.decoupled_weight_decay: not a param"),
        ("AdamW", {"lr": "1e-3"}, "optimizer.params.lr: expected a number, got '1e-3'.*quotes"),
        ("AdamW", {"betas": [0.9, "x"]}, "optimizer.params.betas: expected a list of 2 numbers"),
        ("AdamW", {"amsgrad": 1}, "optimizer.params.amsgrad: expected true or false, got 1"),
        ("AdamW", {"lr": -1}, "optimizer.params: AdamW does not take these values.*-1"),
        ("Adam", {"freeze_step": 100}, "optimizer.params.freeze_step: .*1-bit"),
        ("Adam", {"max_grad_norm": 1.0}, "optimizer.params.max_grad_norm: .*gradient_clipping"),
        ("AdamW", {"adam_w_mode": False}, "optimizer.params.adam_w_mode: .*set optimizer.type to 'Adam'"),
        ("AdamW", {"differentiable": True}, "optimizer.params.differentiable: expected false"),
        ("SGD", {"params": []}, "optimizer.params.params: not a parameter"),
        ("AdamW", {"lr": float("nan")}, "optimizer.params.lr: expected a number, got nan"),
        ("Adam", {"torch_adam": "yes"}, "optimizer.params.torch_adam: expected true or false"),
    ],
)
def test_wrong_params_are_named(name, params, words):
    with pytest.raises(ConfigError, match=words):
        resolve_optimizer(name, params)


CUTS = (1, 7, 11, 40)
OPTIONS = {  # beside weight_decay, which all but Rprop take
    torch.optim.SGD: [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.5}],
    torch.optim.Adam: [{"amsgrad": True}],
    torch.optim.AdamW: [{"amsgrad": True}, {"maximize": True}],
    torch.optim.RMSprop: [{"centered": True, "momentum": 0.9}],
    torch.optim.Adagrad: [{"lr_decay": 0.1, "initial_accumulator_value": 0.1}],
    torch.optim.ASGD: [{"t0": 1}],
    torch.optim.NAdam: [{"decoupled_weight_decay": True}],
    torch.optim.Rprop: [],
}
VARIANTS = [
    (cls, {**options, **implementation})
    for cls in sorted(ELEMENTWISE, key=lambda cls: cls.__name__)
    for options in [{}, *({"weight_decay": 0.1, **more} for more in OPTIONS.get(cls, [{}]))]
    for implementation in ([{}] if cls is Lion else [{"foreach": True}, {"foreach": False}])
]


def run_in_pieces(cls, options, cuts, shape=(103,), steps=8):
    """The parameter after some steps, and its states of full length, updated in pieces of rows that begin at `cuts`."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(shape, generator=generator)
    bounds = list(zip([0, *cuts], [*cuts, shape[0]], strict=True))
    pieces = [torch.nn.Parameter(start[a:b].clone()) for a, b in bounds]
    optimizer = cls(pieces, **options)
    for _ in range(steps):
        grad = torch.randn(shape, generator=generator)
        grad.view(-1)[5] = 0.0
        for piece, (a, b) in zip(pieces, bounds, strict=True):
            piece.grad = grad[a:b].clone()
        optimizer.step()
    names = sorted(name for name, value in optimizer.state[pieces[0]].items() if getattr(value, "ndim", 0))
    states = {name: torch.cat([optimizer.state[p][name].flatten() for p in pieces]) for name in names}
    return {"parameter": torch.cat([p.detach().flatten() for p in pieces]), **states}


@pytest.mark.parametrize(
    ("cls", "options"),
    VARIANTS,
    ids=[f"{c.__name__}-{'-'.join(f'{k}={v}' for k, v in o.items())}" for c, o in VARIANTS],
)
def test_elementwise_optimizers_give_the_same_bits_in_pieces(cls, options):
    whole, pieces = run_in_pieces(cls, options, ()), run_in_pieces(cls, options, CUTS)
    assert whole.keys() == pieces.keys()
    for name in whole:
        assert torch.equal(whole[name], pieces[name]), name


def test_every_torch_optimizer_is_in_one_table():
    assert set(TORCH_OPTIMIZERS.values()) | {Lion, MuonWithAdamW} == ELEMENTWISE | set(NOT_ELEMENTWISE)
    assert not ELEMENTWISE & set(NOT_ELEMENTWISE)


def test_unknown_classes_are_taken_at_their_own_word_only():
    silent = type("Silent", (torch.optim.AdamW,), {})
    promises = type("Promises", (torch.optim.Optimizer,), {"zerolite_elementwise": True})
    inherits = type("Inherits", (promises,), {})
    denies = type("Denies", (torch.optim.SGD,), {"zerolite_elementwise": False})
    decomposed = type("Decomposed", (torch.optim.Adafactor,), {})
    assert [needs_whole_parameters(cls) for cls in (silent, inherits, promises, denies, decomposed)] == [False] * 3 + [
        True
    ] * 2
    for cls in (silent, inherits):
        assert re.search(rf"{cls.__name__}.*zerolite_elementwise = True", check_elementwise(cls))
    assert check_elementwise(promises) is None
    assert "zerolite_elementwise = False" in check_elementwise(denies)


def test_a_graph_cannot_be_captured_on_the_cpu() -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.1, "capturable": True}}
    with pytest.raises(ValueError, match=r"'capturable'\]: expected false on the CPU, where the CPU updates"):
        zerolite.initialize(torch.nn.Linear(2, 2), {"optimizer": optimizer})


@pytest.mark.skipif("muon" in TORCH_OPTIMIZERS, reason="torch has Muon")
def test_muon_says_which_torch_it_needs() -> None:
    with pytest.raises(ConfigError, match="torch 2.9"):
        resolve_optimizer("Muon")


class Tagger(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.heads = torch.nn.MultiheadAttention(4, 2)
        self.up = torch.nn.Linear(4, 8)
        self.lm_head = torch.nn.Linear(4, 5)
        self.tied = torch.nn.Linear(4, 5)
        self.tied.weight = self.embed.weight


def test_muon_is_for_matrices_in_hidden_layers() -> None:
    model = Tagger()
    names = {id(p): name for name, p in model.named_parameters()}

    def muon(groups) -> set[str]:
        return {names[id(p)] for group in groups for p in group["params"] if group["use_muon"]}

    every = [{"params": list(model.parameters()), "lr": 0.5}]
    groups = muon_groups(model, every)
    assert muon(groups) == {"heads.in_proj_weight", "heads.out_proj.weight", "up.weight"}
    assert [group["lr"] for group in groups] == [0.5, 0.5]
    assert sum(len(group["params"]) for group in groups) == len(names)
    model.lm_head.weight.use_muon = True
    assert muon(muon_groups(model, every)) == {"lm_head.weight"}
    model.up.bias.use_muon = True
    with pytest.raises(ValueError, match=r"'up.bias' of shape \(8,\)"):
        muon_groups(model, every)


# -------------------------------------------------------------------- Lion


SHAPES = [(), (1,), (7,), (3, 5), (2, 1, 33), (0,), (4, 0)]


def plain_lion(p, g, m, lr, beta1, beta2, weight_decay):
    """Algorithm 2 of the paper for one tensor: the new parameter and the new momentum."""
    change = torch.sign(torch.lerp(m, g, 1 - beta1)) * -lr
    if weight_decay:
        change = torch.add(change, p, alpha=-lr * weight_decay)
    return p + change, torch.lerp(m, g, 1 - beta2)


def gradients(shapes, dtype, step):
    generator = torch.Generator().manual_seed(step)
    grads = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    for grad in grads:
        if grad.numel() > 2:
            grad.view(-1)[1] = 0.0  # sign(0) is 0: no step
    return grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_decay", [0.0, 0.25])
def test_lion_equals_a_plain_loop_to_the_bit(dtype, weight_decay):
    params = [torch.nn.Parameter(t) for t in gradients(SHAPES, dtype, step=99)]
    expected = [(p.detach().clone(), torch.zeros_like(p)) for p in params]
    # These factors are exact in every dtype: 16-bit foreach kernels round the scalar itself, plain ones do not.
    lr, betas = 2.0**-6, (0.875, 0.96875)
    optimizer = Lion(params, lr=lr, betas=betas, weight_decay=weight_decay)
    for step in range(5):
        grads = gradients(SHAPES, dtype, step)
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.clone()
        optimizer.step()
        expected = [plain_lion(p, g, m, lr, *betas, weight_decay) for (p, m), g in zip(expected, grads, strict=True)]
        for p, grad, (want, momentum) in zip(params, grads, expected, strict=True):
            assert torch.equal(optimizer.state[p]["exp_avg"], momentum)
            assert torch.equal(p.detach(), want)
            assert torch.equal(p.grad, grad), "gradients stay as they are"
