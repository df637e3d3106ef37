"""Attention is replaced in torch and in a model while sequences are divided, and others may replace it too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zerolite
from tests.toolkit import sequences
from tests.toolkit.configs import at
from tests.toolkit.ranks import on_ranks
from tests.toolkit.sequences import batch_of
from tests.toolkit.training import expect_words, raised
from zerolite.engine import build

TWO = {"sequence_parallel": {"size": 2}}


def counting(attention: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], list[int]]:
    """Return another library's attention around ``attention``, and the number of tokens of each call."""
    calls: list[int] = []

    def wrapped(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(query.shape[2])
        return attention(query, *args, **kwargs)

    return wrapped, calls


@on_ranks(2)
def test_others_may_replace_attention_before_and_after_an_engine() -> None:
    plain, name = F.scaled_dot_product_attention, "scaled_dot_product_attention"
    batch = batch_of("Decoder", 0, 16)
    with pytest.MonkeyPatch.context() as patch:
        before, seen_before = counting(plain)
        patch.setattr(F, name, before)
        engine = zerolite.initialize(sequences.build("Decoder", True), at("1", **TWO))
        engine.backward(engine(**batch))
        engine.step()
        assert set(seen_before) == {16}  # whole sequences, and some heads
        after, seen_after = counting(getattr(F, name))
        patch.setattr(F, name, after)
        wanted = float(engine(**batch).detach())
        assert set(seen_after) == {8}
        engine.destroy()
        assert getattr(F, name) is after  # theirs stays, and calls what it has found
        model = sequences.build("Decoder", True)
        model(**batch)
        engine = zerolite.initialize(model, at("1", **TWO))  # around theirs, which goes around the first one's
        engine.backward(engine(**batch))
        engine.step()
        assert float(engine(**batch).detach()) == pytest.approx(wanted, abs=1e-12)
        engine.destroy()
        assert getattr(F, name) is after
    assert getattr(F, name) is plain


@sequences.needs_transformers
@on_ranks(2)
def test_attention_finds_its_own_name_in_the_config_and_nothing_is_written_there() -> None:
    """Flash attention chooses its kernel by that name."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    names: list[tuple[str, str, int]] = []

    def attend(module: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = module.config._attn_implementation
        names.append((chosen, model.config._attn_implementation, module.config.num_attention_heads))
        return sdpa_attention_forward(module, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("named", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("named", sdpa_mask)
    model = sequences.build("llama", False)
    model.config._attn_implementation_internal = "named"
    engine = zerolite.initialize(model, at("1", **TWO))
    batch = batch_of("llama", 0, 16)
    with torch.no_grad():
        engine(**batch)  # whose trial calls the model undivided, too
        assert set(names) == {("named", "sequence_parallel_named", 12)}
        names.clear()
        engine.module(**batch)  # past the engine
    assert set(names) == {("named", "sequence_parallel_named", 12)}
    engine.destroy()
    assert model.config._attn_implementation == "named"


@sequences.needs_transformers
@on_ranks(2)
def test_no_cache_is_kept_of_divided_sequences() -> None:
    model = sequences.build("llama", False)
    assert model.config.use_cache
    engine, batch = zerolite.initialize(model, at("1", **TWO)), batch_of("llama", 0, 16)
    with torch.no_grad():
        assert engine(**batch).past_key_values is None
        assert engine.module(**batch).past_key_values is not None


@sequences.needs_transformers
@on_ranks(2)
def test_two_engines_may_not_share_a_config() -> None:
    first = sequences.build("llama", False)
    second, third = type(first)(first.config), type(first)(copy.deepcopy(first.config))
    engine = zerolite.initialize(first, at("1", **TWO))
    expect_words(raised(lambda: zerolite.initialize(second, at("1", **TWO))), "copy.deepcopy(config)", "destroy")
    engine.destroy()
    for model in (second, third):
        zerolite.initialize(model, at("1", **TWO)).destroy()


@sequences.needs_transformers
@on_ranks(2)
def test_an_engine_that_could_not_be_made_leaves_attention_as_it_was() -> None:
    plain, model = F.scaled_dot_product_attention, sequences.build("llama", False)

    def fail(*args: Any) -> Any:
        raise OSError("no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_engine_class", lambda *args: fail)
        expect_words(raised(lambda: zerolite.initialize(model, at("1", **TWO))), "no room")
    assert F.scaled_dot_product_attention is plain and model.config._attn_implementation == "sdpa"
