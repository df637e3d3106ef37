"""Architectures of transformers over two ranks, beside one process, built small from their configs: each is equal, or
refused with a sentence that says what to do."""

from __future__ import annotations

import copy
import importlib.util
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerolite
from tests.toolkit.architectures import ALL, Architecture
from tests.toolkit.compare import assert_same_on_ranks
from tests.toolkit.configs import SGD, config
from tests.toolkit.ranks import on_ranks
from tests.toolkit.tensor_parallel import GRADIENTS, LOSS, compare
from tests.toolkit.training import raised

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]


def built(architecture: Architecture) -> nn.Module:
    """Many models begin with biases of 0 and norms of 1, which hide where they act."""
    model = architecture.build()
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def loss_of(architecture: Architecture, model: nn.Module) -> Tensor:
    torch.manual_seed(5)  # of routers that draw
    return model(**architecture.batch()).loss


def said_of(name: str, **others: Any) -> str:
    """Compare the model cut by its plan with the whole one; or return why it is refused."""
    found: dict[str, Any] = {}
    made = ALL[name]
    said = raised(lambda: found.update(compare(built(made), partial(loss_of, made), plan=made.plan, **others)))
    assert_same_on_ranks({"said": said})
    assert said or (found["loss"] <= LOSS and max(found["gradients"].values()) <= GRADIENTS), found
    return said


@pytest.mark.parametrize("name", ALL)
@on_ranks(2, timeout=180)
def test_cut(name: str) -> None:
    said = said_of(name)
    if name in ("bloom", "falcon_alibi", "mpt"):
        assert "leave the layers in" in said and "out of tensor_parallel.plan" in said
    elif name in ("mamba", "resnet"):
        assert "which brings none; write the patterns of its layers" in said
    else:
        assert said == "", said


def same_steps(engine: zerolite.Engine, made: Architecture, whole: nn.Module, batches: int) -> None:
    """Two steps of SGD with the losses of the whole model."""
    optimizer = torch.optim.SGD(whole.parameters(), **SGD[1])
    for _ in range(2):
        loss = engine.train_batch(iter([made.batch() for _ in range(batches)])).item()
        optimizer.zero_grad()
        expected = loss_of(made, whole)
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("name", "falcon falcon_new gemma_mqa gpt_bigcode_mqa llama_mqa qwen2_moe t5".split())
@on_ranks(4, timeout=180)
def test_more_ranks_than_heads_of_key_and_value(name: str) -> None:
    """Groups of queries with their key and value in one layer are not divided."""
    groups = "choose a size that divides 2; leave the layers in 'transformer.h.*.self_attention'"
    said = said_of(name)
    assert groups in said if name == "falcon_new" else said == ""


NOT_IN_PARTS = {
    "fnet": "'fnet.encoder.layer.0.fourier' (FNetFourierTransform), which is not",
    "olmo2": "'model.layers.0.self_attn' (Olmo2Attention), which is not",
    "qwen3_next": "'model.layers.0.linear_attn' (Qwen3NextGatedDeltaNet), which is not",
    "swin": "leave tensor_parallel.sequence_parallel out",
    "t5": "expected only self-attention",
    "vit": "a multiple of tensor_parallel.size 2, got 17",
}


@pytest.mark.parametrize(
    "name", [*"bert falcon gemma_mqa gpt2 gptj llama mixtral opt_post_norm".split(), *NOT_IN_PARTS]
)
@on_ranks(2, timeout=180)
def test_the_sequence_in_parts(name: str) -> None:
    said = said_of(name, sequence_parallel=True)
    assert NOT_IN_PARTS[name] in said if name in NOT_IN_PARTS else said == ""


@pytest.mark.parametrize("name", "gpt2 granitemoe llama mixtral opt_post_norm qwen2_moe".split())
@on_ranks(2, timeout=180)
def test_in_two_stages(name: str) -> None:
    """Experts are grouped matrix products; OPT registers its last norm in front of its blocks."""
    made = ALL[name]
    model = built(made)
    whole = copy.deepcopy(model)
    engine = zerolite.initialize(model, config(0, "fp32", 2, optimizer=SGD) | {"pipeline": {"stages": 2}})
    same_steps(engine, made, whole, 2)
    values = dict(whole.named_parameters())
    for key, parameter in model.named_parameters():
        assert (parameter - values[key]).detach().abs().max() <= 1e-6, key
