"""Training on parts of sequences is training on the joint batch in one process, weighted by counted labels."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import zerolite
from tests.toolkit import models, sequences
from tests.toolkit.compare import assert_same_on_ranks
from tests.toolkit.configs import at
from tests.toolkit.ranks import on_ranks
from zerolite.zero import GatheredParameters

EXACT, ROUNDED = 1e-12, 1e-6


def assert_like_one_process(model: str, size: int, tolerance: float, **how: Any) -> None:
    parameters, norms, (wanted, wanted_norms, _) = sequences.train(model, size, **how)
    assert_same_on_ranks(parameters)
    torch.testing.assert_close(parameters, wanted, rtol=0, atol=tolerance)
    assert norms == pytest.approx(wanted_norms, rel=tolerance)


@pytest.mark.fast("3 moving-3")
@on_ranks(2, 3, 4, timeout=120)
@pytest.mark.parametrize("stage", ["0", "1", "2", "3 moving", "3 tight"])
def test_stages_match_one_process(stage: str) -> None:
    """Micro-batches of a step have different lengths and numbers of labels, some ranks none, and norms are clipped."""
    size = torch.distributed.get_world_size()
    assert_like_one_process("Decoder", size, EXACT, stage=stage, double=True, accumulation=2, clip=0.3)


@pytest.mark.slow
@on_ranks(4, timeout=120)
@pytest.mark.parametrize("stage", ["0", "1", "2", "3 moving"])
def test_data_and_sequence_parallelism_match_one_process(stage: str) -> None:
    assert_like_one_process("Decoder", 2, EXACT, stage=stage, double=True, accumulation=2, clip=0.3)


@sequences.needs_transformers
@pytest.mark.fast("llama-sdpa-2")
@on_ranks(2, 3, 4, timeout=120)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model", ["llama", "gpt2", "mistral"])
def test_models_of_hugging_face_match_one_process(model: str, attention: str) -> None:
    size = torch.distributed.get_world_size()
    for how in ("", "masked", "packed") if model != "gpt2" else ("", "masked"):
        assert_like_one_process(model, size, ROUNDED * 5, how=how, attention=attention)


@sequences.needs_transformers
@pytest.mark.fast("1-2")
@on_ranks(2, 3, 4, timeout=120)
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_fewer_heads_of_key_and_value_are_repeated(kv_heads: int) -> None:
    size = torch.distributed.get_world_size()
    assert_like_one_process("Decoder", size, EXACT, double=True, kv_heads=kv_heads)
    assert_like_one_process("llama", size, ROUNDED * 5, kv_heads=kv_heads)


WAYS = {"ring": {"attention": "ring"}, "both": {"attention": "auto"}}


@contextlib.contextmanager
def way_of(name: str, size: int) -> Iterator[dict[str, Any]]:
    """Yield the config of a way of attention. For "both", hosts have half of the ranks of a sequence."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "both":
            patch.setenv("LOCAL_WORLD_SIZE", str(max(1, size // 2)))
        yield {"sequence_parallel": {"size": size, **WAYS[name]}}


@pytest.mark.fast("ring-3 moving-3")
@on_ranks(2, 3, 4, timeout=120)
@pytest.mark.parametrize("stage", ["0", "1", "2", "3 moving", "3 tight"])
@pytest.mark.parametrize("way", ["ring", "both"])
def test_rings_match_one_process(way: str, stage: str) -> None:
    """In fp64 with accumulation over different lengths, clipping, and ranks without a counted label."""
    size = torch.distributed.get_world_size()
    with way_of(way, size) as config:
        how: dict[str, Any] = {"stage": stage, "double": True, "clip": 0.3, "config": config}
        assert_like_one_process("Decoder", size, EXACT, **how, accumulation=2)
        assert_like_one_process("Decoder", size, EXACT, **how, causal=False, length=11 * size + 1, steps=1)


@sequences.needs_transformers
@pytest.mark.fast("ring-True-llama-packed-2")
@on_ranks(2, 3, 4, timeout=120)
@pytest.mark.parametrize("how", ["", "masked", "packed"])
@pytest.mark.parametrize("model", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize(("way", "double"), [("ring", False), ("ring", True), ("both", True)])
def test_masks_match_one_process(way: str, model: str, how: str, double: bool) -> None:
    """Causal attention and sliding windows, with padding and with packed documents. These models compute norms and
    their loss in fp32, even in fp64."""
    size, tolerance = torch.distributed.get_world_size(), ROUNDED if double else ROUNDED * 5
    with way_of(way, size) as config:
        assert_like_one_process(model, size, tolerance, how=how, double=double, config=config)


@sequences.needs_transformers
@pytest.mark.fast("3-1-2")
@on_ranks(2, 3, 4, timeout=120)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 3), (3, 1)])
def test_numbers_of_heads_that_ranks_cannot_share_go_round_a_ring(heads: int, kv_heads: int) -> None:
    size = torch.distributed.get_world_size()
    assert_like_one_process("llama", size, ROUNDED, double=True, heads=heads, kv_heads=kv_heads)


def architecture(name: str) -> Any:
    """Return a tiny model of a family of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": sequences.VOCABULARY, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 4, "max_position_embeddings": 64,
        "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    if name == "gpt_neox":
        sizes = {key: sizes[key] for key in sizes if key not in ("num_key_value_heads", "head_dim")}
    if name in ("gemma2", "gemma3_text"):
        sizes |= {"sliding_window": 5}
    if name == "llama4_text":
        sizes |= {"attention_chunk_size": 5, "intermediate_size_mlp": 32, "moe_layers": [], "num_local_experts": 2}
        sizes |= {"attn_temperature_tuning": False}
    if name == "mixtral":
        sizes |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    attention = "eager" if name == "gemma2" else "sdpa"  # soft caps are written out
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes), attn_implementation=attention)


def gradients(name: str, batch: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """Return the gradients of a family's loss, from an engine with ``size`` ranks or plain PyTorch's."""
    model = models.build(functools.partial(architecture, name)).train()
    if size == 1:
        model(**batch, use_cache=False).loss.backward()
        return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    engine = zerolite.initialize(model, at("2", sequence_parallel={"size": size}))
    engine.backward(engine(**batch).loss)
    found = {key: zerolite.get_full_grad(p) for key, p in model.named_parameters()}
    engine.zero_grad()
    engine.destroy()
    return found


FAMILIES = ["qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_neox", "mixtral", "llama4_text"]


@sequences.needs_transformers
@pytest.mark.slow
@on_ranks(2, 3, timeout=120)
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_families_are_those_of_one_process(name: str) -> None:
    """Relative to the largest one. One process in fp32 differs from fp64 by up to 4e-7 itself."""
    for how in ("", "masked", "packed"):
        batch = sequences.batch_of("llama", 0, 22, how)
        wanted, found = (gradients(name, batch, size) for size in (1, torch.distributed.get_world_size()))
        largest = max(float(gradient.abs().max()) for gradient in wanted.values())
        for key, gradient in wanted.items():
            assert float((found[key] - gradient).abs().max()) <= ROUNDED * largest, f"{how}, {key}"


@on_ranks(4, timeout=60)
def test_lengths_may_differ_between_data_parallel_ranks() -> None:
    """Some ranks have sequences that are too short to try the model on, and the trial waits for longer ones."""
    engine = zerolite.initialize(
        sequences.build("Decoder", True), at("3 moving", optimizer=("SGD", {"lr": 0.5}), sequence_parallel={"size": 2})
    )
    windows = [[sequences.batch_of("Decoder", 0, 3), sequences.batch_of("Decoder", 1, 21)]]
    windows += [[sequences.batch_of("Decoder", 2 * s, 16 + s), sequences.batch_of("Decoder", 2 * s, 9)] for s in (1, 2)]
    for window in windows:
        engine.backward(engine(**window[engine.data_parallel_rank]))
        engine.step()
    wanted, *_ = sequences.in_one_process("Decoder", windows, True, 0.0, 0.5, momentum=0.0)
    with GatheredParameters(engine.module, check=False):
        found = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    torch.testing.assert_close(found, wanted, rtol=0, atol=EXACT)


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=sequences.VOCABULARY, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=6, max_position_embeddings=64, attn_implementation="sdpa", hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, is_decoder=False,
    )  # fmt: skip
    return BertForMaskedLM(config)


@sequences.needs_transformers
@on_ranks(2, timeout=60)
def test_full_attention_with_masks_matches_one_process() -> None:
    """Labels of masked language models are not shifted; padding that the ranks add is masked."""
    model, plain = (models.build(bert).train() for _ in range(2))
    engine = zerolite.initialize(model, at("2", optimizer=("SGD", {"lr": 0.5}), sequence_parallel={"size": 2}))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for place in range(2):
        batch = sequences.batch_of("llama", place, 21, "masked")
        engine.backward(engine(**batch).loss)
        engine.step()
        plain(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(
        dict(engine.module.named_parameters()), dict(plain.named_parameters()), rtol=0, atol=1e-5
    )
