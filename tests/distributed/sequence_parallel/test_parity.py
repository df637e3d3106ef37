"""Training on parts of sequences is training on the joint batch in one process, weighted by counted labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.toolkit import sequences
from tests.toolkit.compare import assert_same_on_ranks
from tests.toolkit.ranks import on_ranks

EXACT, ROUNDED = 1e-12, 1e-6


def assert_like_one_process(model: str, size: int, tolerance: float, **how: Any) -> None:
    parameters, norms, (wanted, wanted_norms, _) = sequences.train(model, size, **how)
    assert_same_on_ranks(parameters)
    torch.testing.assert_close(parameters, wanted, rtol=0, atol=tolerance)
    assert norms == pytest.approx(wanted_norms, rel=tolerance)


@pytest.mark.fast("2-2", "3 moving-3")
@on_ranks(2, 3, 4, timeout=120)
@pytest.mark.parametrize("stage", ["0", "1", "2", "3 moving", "3 tight"])
def test_stages_match_one_process(stage: str) -> None:
    """In fp64 with accumulation over different lengths, clipping, and ranks without a counted label."""
    size = torch.distributed.get_world_size()
    assert_like_one_process("Decoder", size, EXACT, stage=stage, double=True, accumulation=2, clip=0.3)


@pytest.mark.fast("2-4")
@on_ranks(4, timeout=120)
@pytest.mark.parametrize("stage", ["0", "1", "2", "3 moving"])
def test_data_and_sequence_parallelism_match_one_process(stage: str) -> None:
    assert_like_one_process("Decoder", 2, EXACT, stage=stage, double=True, accumulation=2, clip=0.3)


@pytest.mark.fast("llama-sdpa-2", "mistral-sdpa-3")
@on_ranks(2, 3, 4, timeout=120)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model", ["llama", "gpt2", "mistral"])
def test_models_of_hugging_face_match_one_process(model: str, attention: str) -> None:
    size = torch.distributed.get_world_size()
    for how in ("", "masked", "packed") if model != "gpt2" else ("", "masked"):
        assert_like_one_process(model, size, ROUNDED * 5, how=how, attention=attention)


@pytest.mark.fast("1-3")
@on_ranks(2, 3, 4, timeout=120)
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_fewer_heads_of_key_and_value_are_repeated(kv_heads: int) -> None:
    size = torch.distributed.get_world_size()
    assert_like_one_process("Decoder", size, EXACT, double=True, kv_heads=kv_heads)
    assert_like_one_process("llama", size, ROUNDED * 5, kv_heads=kv_heads)
