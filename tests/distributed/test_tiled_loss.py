"""Losses over tiles of tokens in an engine: the numbers of whole logits at every stage, and no more collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerolite
from tests.toolkit.architectures import causal
from tests.toolkit.configs import ADAMW, SGD, at
from tests.toolkit.ranks import on_ranks
from tests.toolkit.sequences import needs_transformers
from tests.toolkit.tensor_parallel import relative
from tests.toolkit.training import raised
from zerolite.comm import record
from zerolite.nn import DeferredLogits
from zerolite.zero.stage3.live_view import refuse_operations

VOCABULARY, WIDTH, TILE = 19, 6, 4
Loss = Callable[["Reader", Tensor, Tensor], Tensor]


class Reader(nn.Module):
    """A language model of one block, whose loss is computed in its forward.

    Its own parameter is one that no other module gathers.
    """

    def __init__(self, loss: str = "mean", tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss = LOSSES[loss]

    def hidden(self, tokens: Tensor) -> Tensor:
        return self.block(self.embedding(tokens)) * self.scale

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.hidden(tokens)
        if labels is None:
            return self.head(hidden)
        return self.loss(self, hidden, labels)


def _mean(model: Reader, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(hidden).float().view(-1, VOCABULARY).to(hidden.dtype), labels.view(-1))


def _shifted(model: Reader, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = 3.0 * torch.tanh(model.head(hidden) / 3.0)
    rows = logits[..., :-1, :].contiguous().view(-1, VOCABULARY)
    return F.cross_entropy(rows, labels[:, 1:].flatten(), reduction="sum", label_smoothing=0.1) / 7


def _with_penalty(model: Reader, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = model.head(hidden)
    return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1)) + logits.logsumexp(-1).square().mean()


def _written(model: Reader, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = model.head(hidden)
    before = 2.0 * logits
    logits[..., :2] = -20.0
    losses = [F.cross_entropy(made.view(-1, VOCABULARY), labels.view(-1)) for made in (before, logits)]
    return losses[0] + losses[1]


def _recomputed(model: Reader, hidden: Tensor, labels: Tensor, reentrant: bool = False) -> Tensor:
    return checkpoint(lambda x: _mean(model, x, labels), hidden, use_reentrant=reentrant)


def _recomputed_reentrant(model: Reader, hidden: Tensor, labels: Tensor) -> Tensor:
    return _recomputed(model, hidden, labels, True)


def _head_recomputed_reentrant(model: Reader, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = checkpoint(lambda x: model.head(torch.tanh(x)), hidden, use_reentrant=True)
    return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


class _ChunkedLoss(torch.autograd.Function):
    """A client's own loss: its forward computes the gradients from the weight of the head."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros(weight.shape, dtype=weight.dtype)
        total, count = hidden.new_zeros(()), (labels != -100).sum()
        for start in range(0, len(hidden), 3):
            rows = hidden[start : start + 3].detach()
            logits = (rows @ weight.t()).requires_grad_()
            with torch.enable_grad():
                loss = F.cross_entropy(logits, labels[start : start + 3], reduction="sum") / count
            (gradient,) = torch.autograd.grad(loss, logits)
            of_hidden[start : start + 3] = gradient @ weight
            of_weight += gradient.t() @ rows
            total += loss.detach()
        ctx.save_for_backward(of_hidden, of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_hidden, of_weight = ctx.saved_tensors
        return gradient * of_hidden, gradient * of_weight, None


def _chunked(model: Reader, hidden: Tensor, labels: Tensor) -> Tensor:
    return _ChunkedLoss.apply(hidden.flatten(0, 1), model.head.weight, labels.flatten())


def _function_of_ours(model: Reader, hidden: Tensor, labels: Tensor) -> Tensor:
    return zerolite.nn.tiled_cross_entropy(hidden, model.head.weight, labels, model.head.bias, tile=TILE)


LOSSES: dict[str, Loss] = {
    "mean": _mean,
    "shifted": _shifted,
    "with penalty": _with_penalty,
    "written": _written,
    "recomputed": _recomputed,
    "recomputed reentrant": _recomputed_reentrant,
    "head recomputed reentrant": _head_recomputed_reentrant,
    "chunked": _chunked,
    "ours": _function_of_ours,
}
LIKE = {"chunked": "mean", "ours": "mean"}  # losses of clients, which are compared with the mean


def batch(step: int, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Two sequences, of another length on each rank."""
    rank = torch.distributed.get_rank()
    length = lengths[rank % len(lengths)]
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (2, length), generator=generator)
    labels = tokens.clone()
    labels[:, 0] = -100
    return tokens, labels


def trained(
    stage: str, tiled: Any, loss: str, lengths: tuple[int, ...] = (9, 2), plain: bool = False, **more: Any
) -> dict[str, Any]:
    """Three steps. Returns losses, gradients of the first step, parameters and collectives of the last one."""
    model_kinds = {"tied": more.pop("tied", False), "bias": more.pop("bias", False)}
    torch.manual_seed(3)
    model = Reader(loss, **model_kinds)
    if "fp32" not in more:
        model.double()
    more.pop("fp32", None)
    engine = zerolite.initialize(model, at(stage, optimizer=ADAMW, **({"tiled_loss": tiled} | more)))
    losses, gradients = [], {}
    for step in range(3):
        with record() as calls:
            value = engine(*batch(step, lengths))
            value.backward() if plain else engine.backward(value)
            if not step:
                gradients = {n: zerolite.get_full_grad(p) for n, p in model.named_parameters()}
            engine.step() if not plain else engine.optimizer.step()
        losses.append(value.detach())
    launched = [(call.op, call.tag, call.numel) for call in calls.select()]
    if stage[0] != "3":  # there buckets follow the order of gradients
        launched.sort()
    return {"losses": torch.stack(losses), **gradients, **engine.full_state_dict(), "calls": launched}


def worst(one: dict[str, Any], other: dict[str, Any]) -> float:
    values = [(value, other[name]) for name, value in one.items() if isinstance(value, Tensor)]
    return max(relative(value, expected) for value, expected in values)


@pytest.mark.fast("2-1-mean", "2-3-shifted", "2-3-recomputed reentrant")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("stage", "0 1 2 3".split())
@on_ranks(2, timeout=300)
def test_numbers(stage: str, loss: str) -> None:
    """Each loss beside the one with whole logits. One rank has fewer tokens than a tile."""
    for tied in (False, True) if loss in ("mean", "chunked") else (bool(list(LOSSES).index(loss) % 2),):
        expected = trained(stage, False, LIKE.get(loss, loss), tied=tied, bias=not tied and loss != "chunked")
        made = trained(stage, TILE, loss, tied=tied, bias=not tied and loss != "chunked", plain=tied)
        assert worst(made, expected) <= 1e-6, tied  # "mean" goes through fp32


@pytest.mark.fast("2-3 tight")
@pytest.mark.parametrize("stage", ["1", "3 kept", "3 tight"])
@on_ranks(2, timeout=300)
def test_collectives(stage: str) -> None:
    """The head's weight is gathered once for all tiles, and its gradient reduced once."""
    for tied in (False, True):
        runs = [trained(stage, tiled, "mean", tied=tied) for tiled in (False, TILE)]
        assert runs[0]["calls"] == runs[1]["calls"], tied


class WithLogits(Reader):
    """Returns its logits beside the loss, as models of Hugging Face do."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.hidden(tokens))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1)), "logits": logits}


@pytest.mark.parametrize("stage", "1 3".split())
@on_ranks(2, timeout=300)
def test_logits_beside_the_loss(stage: str) -> None:
    """They are computed if they are read, with a graph, and not after the update. Without a loss they are ordinary."""
    found = {}
    for tiled in (False, TILE):
        torch.manual_seed(3)
        model = WithLogits().double()
        engine = zerolite.initialize(model, at(stage, optimizer=ADAMW, tiled_loss=tiled))
        made = engine(*batch(0, (9, 2)))
        if tiled:
            deferred = stage == "3" or torch.distributed.get_rank() == 0  # at stage 3 on all ranks alike
            assert isinstance(made["logits"], DeferredLogits) == deferred
        engine.backward(made["loss"] + made["logits"].square().mean())
        engine.step()
        made = engine(*batch(1, (9, 2)))
        engine.backward(made["loss"])
        read = made["logits"].argmax(-1).double()
        engine.step()
        other = engine(*batch(2, (9, 9)))
        assert type(engine(batch(0, (9, 2))[0])["logits"]) is Tensor
        with torch.no_grad():
            evaluated = engine(*batch(1, (9, 2)))
            assert isinstance(evaluated["logits"], DeferredLogits) == (
                bool(tiled) and stage == "1" and torch.distributed.get_rank() == 0
            )
        copied = evaluated["logits"].clone()
        engine.backward(other["loss"])
        engine.step()
        late = raised(other["logits"].sum)
        assert ("got a read after it" in late) == bool(tiled), late
        if stage == "3" and tiled:  # as with DeepSpeed's interface, where one rank alone may read
            last = engine(*batch(3, (9, 2)))
            refuse_operations(model.parameters())
            assert '"tiled_loss": false keeps them' in raised(last["logits"].sum)
        found[bool(tiled)] = {"read": read, "evaluated": copied, **engine.full_state_dict()}
    assert worst(found[True], found[False]) < 1e-10


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 13), nn.Linear(WIDTH, 13)
        self.down_proj = nn.Linear(13, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        down: Tensor = self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))
        return down


class WrittenRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class MlpReader(Reader):
    def __init__(self) -> None:
        super().__init__("mean", tied=True)
        self.block = nn.Sequential(WrittenRMSNorm(), Mlp())  # type: ignore[assignment]


def trained_mlp(stage: str, tiled: Any, zero: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(3)
    model = MlpReader().double()
    engine = zerolite.initialize(model, at(stage, optimizer=ADAMW, zero=zero, tiled_mlp=tiled))
    for step in range(3):
        with record() as calls:
            engine.backward(engine(*batch(step, (9, 2))))
            engine.step()
    launched = [(call.op, call.tag, call.numel) for call in calls.select()]
    if stage[0] != "3":  # there buckets follow the order of gradients
        launched.sort()
    return {**engine.full_state_dict(), "calls": launched, "forwards": model.block[1].calls}


@pytest.mark.fast("2-2", "2-3 tight")
@pytest.mark.parametrize("stage", ["1", "2", "3 kept", "3 tight"])
@on_ranks(2, timeout=300)
def test_mlp(stage: str) -> None:
    """Numbers and collectives of whole tensors. Where stage 3 gathers the layers apart, nothing is tiled."""
    for zero in [{"leaf_modules": ["*Mlp"]}, {}] if stage[0] == "3" else [{}]:
        expected, made = (trained_mlp(stage, tiled, zero) for tiled in (False, TILE))
        assert worst(made, expected) < 1e-12
        assert made["calls"] == expected["calls"]
        tiles = torch.distributed.get_rank() == 0 and (bool(zero) or stage[0] != "3")
        assert expected["forwards"] == 3 and made["forwards"] == (3 * 2 * 5 if tiles else 3)


CAUSAL = {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Gemma2": {"final_logit_softcapping": 3.0},
    "Mistral": {},
    "GPTNeoX": {},
    "Mixtral": {"output_router_logits": True},
    "GPT2": {"kind": "LMHeadModel", "loss_type": "ForCausalLM"},
}


@needs_transformers
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["1", "3"])
@on_ranks(2, timeout=400)
def test_models_of_transformers(stage: str) -> None:
    """Loss, its tokens counted by the caller, and MLPs; logits of an evaluation."""
    found = {}
    for name, more in CAUSAL.items():
        results = []
        for tiled in (False, TILE):
            model = causal(name, **more).build()
            if name != "Mixtral":  # torch multiplies groups in at most fp32
                model.double()
            given = at(stage, optimizer=SGD, tiled_loss=tiled, tiled_mlp=tiled)
            engine = zerolite.initialize(model, given)
            losses = []
            for step in range(2):
                tokens, labels = batch(step, (9, 5))
                loss = engine(input_ids=tokens, labels=labels, num_items_in_batch=torch.tensor(11)).loss
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
            with torch.no_grad():
                logits = engine(input_ids=batch(7, (9, 5))[0]).logits
            assert type(logits) is Tensor
            results.append({"losses": torch.stack(losses), "logits": logits, **engine.full_state_dict()})
        found[name] = worst(results[1], results[0])
    assert {name: off for name, off in found.items() if off > 1e-6} == {}


@needs_transformers
@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_divided_sequences() -> None:
    """Each rank has tiles of its part of the tokens."""
    for stage in ("1", "3"):
        results = []
        for tiled in (False, 3):
            model = causal("Llama").build().double()
            given = at(stage, optimizer=SGD, tiled_loss=tiled, tiled_mlp=tiled, sequence_parallel={"size": 2})
            engine = zerolite.initialize(model, given)
            for step in range(2):
                torch.manual_seed(step)
                tokens = torch.randint(0, VOCABULARY, (2, 15))
                loss = engine(input_ids=tokens, labels=tokens.clone()).loss
                engine.backward(loss)
                engine.step()
            results.append({"loss": loss.detach(), **engine.full_state_dict()})
        assert worst(results[1], results[0]) < 1e-6  # its loss is in fp32
