"""Cross entropy over tiles of tokens: numbers beside plain PyTorch, memory, and what may be done with its logits."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zerolite
from zerolite.nn import DeferredLogits, tiled_cross_entropy
from zerolite.nn.deferred_logits import LossTiling
from zerolite.nn.heads import find_heads, tile_losses

TOKENS, WIDTH, VOCABULARY = 37, 12, 29
EXACT = {torch.float64: 1e-12, torch.float32: 1e-6}


def inputs(dtype: torch.dtype, tokens: int = TOKENS, ignored: float = 0.3) -> tuple[list[Tensor], Tensor]:
    """Hidden, weight and bias, which require gradients; and labels."""
    generator = torch.Generator().manual_seed(5)
    sizes = ((tokens, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    leaves = [torch.randn(*size, generator=generator).to(dtype).requires_grad_() for size in sizes]
    labels = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = -100
    return leaves, labels


def plain(leaves: list[Tensor], labels: Tensor, soft_cap: float | None = None, **options: Any) -> Tensor:
    logits = F.linear(leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None)
    logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    return F.cross_entropy(logits.double() if logits.dtype == torch.float64 else logits.float(), labels, **options)


def tiled(leaves: list[Tensor], labels: Tensor, **options: Any) -> Tensor:
    return tiled_cross_entropy(leaves[0], leaves[1], labels, leaves[2] if len(leaves) > 2 else None, **options)


def results(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """The loss and its gradients, with a factor that the forward does not know."""
    factor = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype) if loss.dim() else 1.7
    return [loss.detach(), *torch.autograd.grad((loss * factor).sum(), [leaf for leaf in leaves if leaf.requires_grad])]


def distance(made: list[Tensor], expected: list[Tensor]) -> float:
    assert [t.isnan().any().item() for t in made] == [t.isnan().any().item() for t in expected]
    pairs = [(a.double().nan_to_num(), b.double().nan_to_num()) for a, b in zip(made, expected, strict=True)]
    return max(((a - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in pairs)


@pytest.mark.fast("dtype0")
@pytest.mark.parametrize("dtype", EXACT)
def test_numbers(dtype: torch.dtype) -> None:
    off = {}
    for tile, reduction, smoothing, cap in itertools.product(
        (5, 100), ("mean", "sum", "none"), (0.0, 0.2), (None, 3.0)
    ):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "soft_cap": cap}
        for biased, ignored in itertools.product((2, 3), (0.0, 0.3, 1.1)):
            leaves, labels = inputs(dtype, ignored=ignored)
            expected = results(plain(leaves[:biased], labels, **options), leaves[:biased])
            made = results(tiled(leaves[:biased], labels, tile=tile, **options), leaves[:biased])
            case = (tile, *options.values(), biased, ignored)
            off[case] = distance(made, expected)
    assert {case: far for case, far in off.items() if far > EXACT[dtype]} == {}


def test_other_arguments() -> None:
    leaves, labels = inputs(torch.float64)
    labels[labels == -100] = 3
    weights = torch.rand(TOKENS, dtype=torch.float64)

    def each() -> Tensor:
        return plain(leaves, labels, ignore_index=3, reduction="none")

    valid = weights * (labels != 3)
    cases = {
        "items": (tiled(leaves, labels, ignore_index=3, num_items=torch.tensor(11), tile=5), each().sum() / 11),
        "weights": (
            tiled(leaves, labels, ignore_index=3, weights=weights, tile=5),
            (each() * valid).sum() / valid.sum(),
        ),
        "batch": (
            tiled_cross_entropy(leaves[0][:36].view(4, 9, -1), leaves[1], labels[:36].view(4, 9), tile=5),
            plain([leaves[0][:36], leaves[1]], labels[:36]),
        ),
    }
    for name, (made, expected) in cases.items():
        used = leaves if name != "batch" else leaves[:2]
        assert distance(results(made, used), results(expected, used)) < 1e-12, name
    with torch.no_grad():
        assert not tiled(leaves, labels, tile=5).requires_grad
    for frozen in range(3):  # a frozen head; a frozen body
        leaves, labels = inputs(torch.float64)
        leaves[frozen].requires_grad_(False)
        for reduction in ("mean", "none"):
            made = tiled(leaves, labels, tile=5, reduction=reduction)
            assert distance(results(made, leaves), results(plain(leaves, labels, reduction=reduction), leaves)) < 1e-12


def test_nothing_and_backwards_of_one_graph() -> None:
    leaves, labels = inputs(torch.float32, tokens=0)
    loss = tiled(leaves, labels)
    assert loss.isnan() and not any(gradient.any() for gradient in torch.autograd.grad(loss, leaves))
    assert tiled(leaves, labels, reduction="sum") == 0 and tiled(leaves, labels, reduction="none").shape == (0,)
    leaves, labels = inputs(torch.float32)
    loss = tiled(leaves, labels, tile=5)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(3 * loss, leaves)
    assert all(torch.allclose(3 * a, b) for a, b in zip(first, second, strict=True))
    (again,) = torch.autograd.grad(tiled(leaves, labels, tile=5), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError):
        again.sum().backward()


def test_16_bits_are_no_worse_than_whole_logits() -> None:
    """Beside fp64: many tiles of bf16, whose parts of the weight's gradient are added in fp32."""
    for dtype in (torch.bfloat16, torch.float16):
        leaves, labels = inputs(dtype, tokens=600)
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        truth = results(plain(exact, labels), exact)
        whole = [distance([a], [b]) for a, b in zip(results(plain(leaves, labels), leaves), truth, strict=True)]
        tiles = [distance([a], [b]) for a, b in zip(results(tiled(leaves, labels, tile=7), leaves), truth, strict=True)]
        assert all(a <= 1.2 * b for a, b in zip(tiles, whole, strict=True)), (dtype, tiles, whole)


def test_wrong_arguments() -> None:
    (hidden, weight, bias), labels = inputs(torch.float32)
    with pytest.raises(ValueError, match=r"for a head of shape \[width, vocabulary\] pass weight.t\(\)"):
        tiled_cross_entropy(hidden, weight.t(), labels)
    with pytest.raises(ValueError, match="expected labels of shape"):
        tiled_cross_entropy(hidden, weight, labels[1:])
    with pytest.raises(ValueError, match='expected reduction "none", "mean" or "sum"'):
        tiled_cross_entropy(hidden, weight, labels, reduction="avg")
    with pytest.raises(ValueError, match="at least 1 token"):
        tiled_cross_entropy(hidden, weight, labels, tile=0)
    with pytest.raises(IndexError, match="Target 29 is out of bounds"):
        tiled_cross_entropy(hidden, weight, labels.clamp(min=0) + 29 - labels.clamp(min=0).min())
    del bias


class Largest(TorchDispatchMode):
    """Largest result of an operation, in elements."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.device.type != "meta":
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_memory(reduction: str) -> None:
    """No tensor of an operation, forward or backward, is larger than one tile's logits, the weight or the hidden."""
    hidden = torch.randn(64, 8, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(50, 8, dtype=torch.bfloat16).requires_grad_()
    with Largest() as largest:
        tiled_cross_entropy(
            hidden, weight, torch.arange(64) % 50, soft_cap=5.0, reduction=reduction, tile=4
        ).sum().backward()
    assert largest.numel == 64 * 8
    with Largest() as largest:
        plain([hidden, weight], torch.arange(64) % 50).backward()
    assert largest.numel == 64 * 50


# -------------------------------------------------------------------- the head of a model


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, function: Callable[[Tensor], Any]) -> Any:
        return function(self.head(torch.tanh(self.embedding(tokens))))


X = torch.randint(0, VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(2))
Y, V = X.flatten(), VOCABULARY
TILED: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: F.cross_entropy(x.float().view(-1, V), Y),
    "flatten": lambda x: F.cross_entropy(x.flatten(0, 1), Y),
    "reshape": lambda x: F.cross_entropy(x.contiguous().reshape(24, -1), Y),
    "shift": lambda x: F.cross_entropy(x[:, :-1].reshape(-1, V), X[:, 1:].flatten()),
    "shift in the middle": lambda x: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, V), X[:, 1:].flatten()),
    "numbers": lambda x: F.cross_entropy((2 * (x * 0.5 / 3)).flatten(0, 1), Y),
    "soft cap": lambda x: F.cross_entropy(((x / 5.0).tanh() * 5.0).flatten(0, 1), Y),
    "module": lambda x: nn.CrossEntropyLoss(reduction="none")(x.flatten(0, 1), Y).sum(),
    "to": lambda x: F.cross_entropy(x.to(torch.float64).to("cpu").flatten(0, 1), Y, label_smoothing=0.1),
    "type": lambda x: F.cross_entropy(x.type_as(torch.zeros(1)).view_as(x).flatten(0, 1), Y, reduction="sum"),
    "questions": lambda x: F.cross_entropy(x.view(-1, x.size(-1)), Y.to(x.device)) if x.requires_grad else None,
}
WHOLE: dict[str, Callable[[Tensor], Any]] = {
    "one token": lambda x: F.cross_entropy(x[1, 2], X[1, 2]),
    "classes second": lambda x: F.cross_entropy(x.transpose(1, 2), X),
    "class weights": lambda x: F.cross_entropy(x.flatten(0, 1), Y, weight=torch.arange(1.0, V + 1)),
    "soft targets": lambda x: F.cross_entropy(x.flatten(0, 1), torch.full((24, V), 1 / V)),
    "softmax": lambda x: x.softmax(-1)[..., 2].sum(),
    "cat": lambda x: torch.cat([x, 2 * x], 1).pow(2).sum(),
    "some classes": lambda x: x[..., 1:5].exp().sum(),
    "other views": lambda x: x.view(3, 8 * V).std(1).sum() + x.reshape(-1).pow(3).mean(),
    "by a tensor": lambda x: (x * torch.arange(float(V))).pow(2).mean(),
    "detached": lambda x: F.cross_entropy(x.detach().flatten(0, 1), Y) + x.mean(),
    "without a graph": lambda x: F.cross_entropy(x.flatten(0, 1), _best(x)),
    "a hook": lambda x: _hooked(x),
}


def _best(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.argmax(-1).flatten()


def _hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: 3 * gradient)
    return F.cross_entropy(x.flatten(0, 1), Y)


@pytest.mark.parametrize("name", [*TILED, *WHOLE])
def test_what_is_done_with_logits(name: str) -> None:
    function = (TILED | WHOLE)[name]
    torch.manual_seed(1)
    model = Model()
    expected = results(model(X, function), list(model.parameters()))
    tile_losses(model, 5, LossTiling(always=False, logs=False))
    with Largest() as largest:
        made = results(model(X, function), list(model.parameters()))
    assert distance(made, expected) < 1e-6
    assert (largest.numel < 24 * V) == (name in TILED and name != "one token")


def test_what_leaves_the_model() -> None:
    """Logits are ordinary unless a loss was computed from them; few tokens are not deferred."""
    model = Model()
    plain_model = copy.deepcopy(model)
    handles = tile_losses(model, 5, LossTiling(always=False, logs=False))
    made = model(X, lambda logits: logits)
    assert type(made) is Tensor and torch.equal(made, plain_model(X, lambda logits: logits))
    assert model(X[:1, :5], lambda logits: (type(logits), 0))[0] is Tensor
    loss, logits = model(X, lambda logits: (F.cross_entropy(logits.flatten(0, 1), Y), logits))
    assert isinstance(logits, DeferredLogits) and "shape=[3, 8, 29]" in repr(logits)
    assert torch.equal(logits + 0, plain_model(X, lambda logits: logits)) and loss.requires_grad
    copied = copy.deepcopy(model)
    assert type(copied(X, lambda logits: logits.flatten(0, 1).view(3, 8, V))) is Tensor
    model.head.register_forward_hook(lambda module, args, logits: logits + 1)  # it needs logits
    assert torch.equal(model(X, lambda logits: logits), plain_model(X, lambda logits: logits) + 1)
    for handle in handles:
        handle.remove()
    assert "_call_impl" not in vars(model.head)


def test_heads_are_found_by_structure() -> None:
    model = Model()
    assert list(find_heads(model)) == [model.head]
    model.other = nn.Linear(WIDTH, VOCABULARY + 1)
    assert list(find_heads(model)) == [model.head]
    assert tile_losses(model, "auto", LossTiling(always=False, logs=False)) == []  # a small vocabulary
    assert tile_losses(model, False, LossTiling(always=False, logs=False)) == []


class Long(nn.Module):
    """A model whose vocabulary is large enough for "auto"."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16_384, 8), nn.Linear(8, 16_384)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.embedding(tokens))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


@pytest.mark.slow
def test_the_plan_has_no_logits_either() -> None:
    tokens, tile = 2 * 16_384, 4096
    config = {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}, "bf16": {"enabled": True},
        "tiled_loss": "auto",
    }  # fmt: skip
    made = zerolite.plan(Long, config, 1, device="cpu", batch=lambda: torch.zeros(2, tokens // 2, dtype=torch.long))
    logits = tile * 16_384
    assert 6 * logits < made.peak.bytes < 6.2 * logits  # a tile in bf16 and in fp32
