"""Models and configs that cannot be divided raise a sentence on all ranks, when the engine is made or at its first
forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerolite
from tests.toolkit import sequences
from tests.toolkit.configs import at
from tests.toolkit.ranks import on_ranks
from tests.toolkit.sequences import Decoder, batch_of
from tests.toolkit.training import expect_words, raised
from zerolite.config import load_config


def make(model: nn.Module, size: int = 2, **more: Any) -> Any:
    return zerolite.initialize(model, at("2", **{"sequence_parallel": {"size": size}, **more}))


class CountsItself(Decoder):
    """It counts positions itself."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens, targets)


class LooksBack(Decoder):
    """Each token is embedded with the one before it."""

    def forward(self, tokens: Tensor, targets: Tensor, position_ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward((tokens + F.pad(tokens, (1, 0))[:, :-1]) % sequences.VOCABULARY, targets, position_ids)


class WritesOut(Decoder):
    """It computes attention where no hook sees it."""

    def forward(self, tokens: Tensor, targets: Tensor, position_ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
        x = self.embed(tokens)
        x = x + torch.softmax(x @ x.transpose(1, 2) / 24, -1) @ x
        return sequences.cross_entropy(self.head(x), targets)


class Shifts(Decoder):
    """It shifts targets by itself, so the label at a seam is lost."""

    def forward(self, tokens: Tensor, targets: Tensor, position_ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(tokens, F.pad(targets[:, 1:], (0, 1), value=-100), position_ids)


@on_ranks(2, timeout=60)
def test_models_whose_parts_are_not_the_whole_are_refused_before_the_first_forward() -> None:
    for model in (CountsItself, LooksBack, WritesOut, Shifts):
        engine = make(model())
        error = raised(lambda engine=engine: engine(**batch_of("Decoder", 0, 24)))
        expect_words(
            f"{model.__name__}: {error}",
            "same outputs for parts of a sequence",
            "position_ids",
            "leave sequence_parallel out",
        )
        engine.destroy()


class Recurrent(Decoder):
    def __init__(self, state: str) -> None:
        super().__init__()
        self.mixer = nn.Conv1d(4, 4, 3) if state == "conv" else nn.LSTM(4, 4) if state == "lstm" else nn.Linear(2, 2)
        if state == "A_log":
            self.mixer.A_log = nn.Parameter(torch.ones(2))


@sequences.needs_transformers
@on_ranks(2, timeout=60)
def test_bad_models_and_sizes_are_refused_by_initialize() -> None:
    for state in ("conv", "lstm", "A_log"):
        expect_words(raised(lambda state=state: make(Recurrent(state))), "'mixer'", "leave")
    three = sequences.build("llama", False, heads=3, kv_heads=3)
    error = raised(lambda: make(three, sequence_parallel={"size": 2, "attention": "ulysses"}))
    expect_words(error, "attention heads", "2", "got 3", "ring")
    eager = sequences.build("llama", False, attention="eager")
    error = raised(lambda: make(eager, sequence_parallel={"size": 2, "attention": "ring"}))
    expect_words(error, "eager", "sdpa")
    unknown = sequences.build("llama", False)
    unknown.config._attn_implementation_internal = "paged|sdpa"
    expect_words(raised(lambda: make(unknown)), "attn_implementation", "paged|sdpa")
    for model in (three, eager, unknown):  # nothing of a refused model has been changed
        assert "sequence_parallel" not in model.config._attn_implementation
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    error = raised(lambda: make(Decoder(), size=3))
    expect_words(error, "sequence_parallel.size", "divisor of the 2 data-parallel ranks")
    assert F.scaled_dot_product_attention.__module__ != "zerolite.sequence_parallel.attention"


@sequences.needs_transformers
@on_ranks(2, timeout=60)
def test_positions_that_depend_on_the_whole_sequence_are_refused() -> None:
    """RoPE by length is refused by initialize, and OPT, which counts positions from the mask, by its first forward."""
    from transformers import OPTConfig, OPTForCausalLM

    for rope in ({"rope_type": "dynamic", "factor": 2.0}, {"type": "dynamic", "factor": 2.0}):
        error = raised(lambda rope=rope: make(sequences.build("llama", False, heads=6, kv_heads=2, rope_scaling=rope)))
        expect_words(error, "rope_type=dynamic", "leave sequence_parallel out")
    sizes = {"hidden_size": 24, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 6, "dropout": 0.0}
    config = OPTConfig(vocab_size=sequences.VOCABULARY, max_position_embeddings=64, word_embed_proj_dim=24, **sizes)
    engine, batch = make(OPTForCausalLM(config)), batch_of("llama", 0, 20)
    mask = torch.ones_like(batch["input_ids"])
    expect_words(raised(lambda: engine(**batch, attention_mask=mask)), "same outputs", "position_ids")
    positions = torch.arange(20).expand(2, -1)
    engine.backward(engine(**batch, attention_mask=mask, position_ids=positions).loss)
    engine.step()


@on_ranks(2, timeout=60)
def test_bad_calls_are_refused() -> None:
    engine, batch = make(Decoder()), batch_of("Decoder", 0, 16)
    mine = batch_of("Decoder", engine.rank, 16)
    expect_words(raised(lambda: engine(**mine)), "same inputs", "engine.data_parallel_rank")
    loss = engine(**batch)
    expect_words(raised(loss.backward), "engine.backward(loss)", "weight")
    engine.zero_grad()
    loss = engine(**batch)
    expect_words(raised(lambda: engine.backward(loss)), "one forward with labels", "2 forwards")
    loss = engine(**batch)
    engine.backward(loss)
    engine.step()
    with torch.no_grad():
        expect_words(raised(lambda: engine(torch.zeros(3))), "[batch, length, ...]")
        wrong = {**batch, "targets": batch["targets"][:, :5]}
        expect_words(raised(lambda: engine(**wrong)), "[2, 5]", "whole sequences")
    logits = engine(batch["tokens"])
    expect_words(raised(lambda: engine.backward(logits.mean())), "without labels", "weight=")
    loss = engine(**batch)
    weight = engine.loss_weight
    with torch.no_grad():  # another forward before the backward, whose labels do not count
        engine(**batch_of("Decoder", 5, 60))
    assert engine.loss_weight != weight
    engine.backward(loss)
    assert engine._parts.accumulation.weight == weight
    expect_words(raised(engine.compile), "sequence_parallel.size 1")


@on_ranks(2, timeout=60)
def test_later_batches_that_differ_are_refused_by_the_step() -> None:
    engine = make(Decoder())
    engine.backward(engine(**batch_of("Decoder", 0, 16)))
    engine.step()
    engine.backward(engine(**batch_of("Decoder", 1 + engine.rank, 16)))
    expect_words(raised(engine.step), "same batches", "sequence_parallel")


class Bidirectional(Decoder):
    def __init__(self) -> None:
        super().__init__(causal=False)


@on_ranks(2, timeout=60)
def test_padding_that_full_attention_would_see_is_refused() -> None:
    engine = make(Bidirectional())
    engine.backward(engine(**batch_of("Decoder", 0, 16)))
    engine.step()
    expect_words(raised(lambda: engine(**batch_of("Decoder", 0, 15))), "15", "padding")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"sequence_parallel": {"size": 2}, "pipeline": {"stages": 2}}, "pipeline"),
        (
            {"sequence_parallel": {"size": 2}, "tensor_parallel": {"size": 2, "sequence_parallel": True}},
            "tensor_parallel.sequence_parallel",
        ),
    ],
)
def test_what_does_not_compose_is_refused_by_the_config(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_config(more)
