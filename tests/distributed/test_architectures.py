"""Architectures of transformers over two ranks, beside one process: each is equal, or refused with a sentence that
says what to do."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.distributed.cases.architectures import ALL, PLANS
from tests.distributed.test_tensor_parallel import GRADIENTS, LOSS
from tests.toolkit.pool import Pools

CASES = "tests.distributed.cases.architectures"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]

HAVE_A_PLAN = set(
    "gpt_neox llama llama_mqa mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma_mqa gemma2 gemma3 phi phi3 "
    "phimoe olmo olmo2 olmoe starcoder2 cohere cohere2 granite granitemoe glm glm4 nemotron helium smollm3 exaone4 "
    "ernie4_5 gpt_oss deepseek_v3 jamba minimax lfm2 qwen3_next".split()
)
ATTENTION_STAYS_WHOLE = {"bloom", "falcon_alibi", "gpt_neox_japanese", "mpt"}


def cut(pools: Pools, world: int, name: str, **others: Any) -> list[dict[str, Any]]:
    given = {"names": [name], **others}
    return [found[name] for found in pools(world).run(f"{CASES}:cut", given, timeout=180)]


def assert_equal(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert not result["said"] and result["loss"] <= LOSS and result["gradients"] <= GRADIENTS, result


@pytest.mark.parametrize("name", ALL)
def test_cut(pools: Pools, name: str) -> None:
    results = cut(pools, 2, name)
    said = results[0]["said"]
    assert all(result["said"] == said for result in results)
    if name in ATTENTION_STAYS_WHOLE:
        assert "leave the layers in" in said and "out of tensor_parallel.plan" in said
    elif name in HAVE_A_PLAN or name in PLANS:
        assert_equal(results)
    else:
        assert "which brings none; write the patterns of its layers" in said


FEW_HEADS = "falcon gemma_mqa gpt_bigcode_mqa llama llama_mqa phi qwen2_moe qwen3 starcoder2 t5".split()


@pytest.mark.parametrize("name", FEW_HEADS)
def test_more_ranks_than_heads_of_key_and_value(pools: Pools, name: str) -> None:
    assert_equal(cut(pools, 4, name))


def test_groups_of_queries_with_their_key_and_value_are_not_divided(pools: Pools) -> None:
    for result in cut(pools, 4, "falcon_new"):
        assert "choose a size that divides 2; leave the layers in 'transformer.h.*.self_attention'" in result["said"]


SEQUENCES = "bert falcon gemma_mqa gpt2 gptj llama llama_mqa mixtral opt opt_post_norm qwen3_moe".split()
NOT_IN_PARTS = {
    "fnet": "'fnet.encoder.layer.0.fourier' (FNetFourierTransform), which is not",
    "olmo2": "'model.layers.0.self_attn' (Olmo2Attention), which is not",
    "qwen3_next": "'model.layers.0.linear_attn' (Qwen3NextGatedDeltaNet), which is not",
    "swin": "leave tensor_parallel.sequence_parallel out",
    "t5": "expected self-attention only",
    "vit": "a multiple of tensor_parallel.size 2, got 17",
}


@pytest.mark.parametrize("name", [*SEQUENCES, *NOT_IN_PARTS])
def test_the_sequence_in_parts(pools: Pools, name: str) -> None:
    results = cut(pools, 2, name, sequence_parallel=True)
    if name in NOT_IN_PARTS:
        assert NOT_IN_PARTS[name] in results[0]["said"]
    else:
        assert_equal(results)


STAGES = "gpt2 granitemoe llama mixtral olmoe opt opt_post_norm qwen2_moe qwen3_moe".split()


@pytest.mark.parametrize("name", STAGES)
def test_in_two_stages(pools: Pools, name: str) -> None:
    """Experts are grouped matrix products; OPT registers its last norm in front of its blocks."""
    for results in pools(2).run(f"{CASES}:in_stages", {"names": [name]}, timeout=180):
        assert max(results[name].values()) <= 1e-6
