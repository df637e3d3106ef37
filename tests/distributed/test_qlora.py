"""QLoRA as transformers and PEFT make it: weights in 4 bits by ``BitsAndBytesConfig``, beside plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerolite
from tests.distributed.test_quantized import installed
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import at
from tests.toolkit.ranks import on_ranks

ADAMW = ("AdamW", {"lr": 0.01, "torch_adam": True, "weight_decay": 0})


def save_base(directory: Path) -> None:
    """Save a Llama. Its layers have even numbers of inputs: for odd ones bitsandbytes compiles its dequantization on
    the CPU."""
    import transformers

    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 8}
    config = transformers.LlamaConfig(vocab_size=models.VOCABULARY, num_attention_heads=4, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


def quantized(directory: Path) -> Any:
    """Return a Llama with weights in 4 bits and adapters, the same on each call."""
    import peft
    import transformers

    options = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base: Any = transformers.LlamaForCausalLM.from_pretrained(directory, quantization_config=options, device_map="cpu")
    torch.manual_seed(2)
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear")).train()


def train(model: Any, steps: range, step: Any) -> list[float]:
    """step: function of a loss."""
    losses = []
    for number in steps:
        tokens = torch.randint(models.VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(number))
        loss = model(input_ids=tokens, labels=tokens).loss
        step(loss)
        losses.append(loss.item())
    return losses


def train_engine(engine: Any, steps: range) -> list[float]:
    def step(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return train(engine, steps, step)


def train_plain(model: Any, steps: range) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses, and the gradients of the adapters at the first step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0)
    gradients: dict[str, Tensor] = {}

    def step(loss: Tensor) -> None:
        loss.backward()
        if not gradients:
            gradients.update({name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})
        optimizer.step()
        optimizer.zero_grad()

    return train(model, steps, step), gradients


def packed_of(model: Any) -> dict[str, Tensor]:
    """Return the bytes of the weights in 4 bits and of their scales."""
    packed = {}
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "Params4bit":
            assert parameter.bnb_quantized
            packed[name] = parameter.detach().clone().as_subclass(Tensor)
            packed.update({f"{name}.{k}": v.clone() for k, v in parameter.quant_state.as_dict(packed=True).items()})
    return packed


@installed("peft")
@installed("bitsandbytes")
@pytest.mark.slow
@on_ranks(2, timeout=240)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_qlora_of_transformers(stage: int, tmp_path: Path) -> None:
    """Losses and gradients of plain PyTorch, bits of the packed weights, save, load, and PEFT's own merge."""
    base = tmp_path / "base"
    save_base(base)  # transformers lets rank 0 write
    dist.barrier()
    plain = quantized(base)
    frozen = packed_of(plain)
    assert len(frozen) >= 2 * 7 * 2
    wanted, gradients = train_plain(plain, range(4))
    assert wanted[0] != wanted[-1]

    engine: Any = zerolite.initialize(quantized(base), at(stage, optimizer=ADAMW))
    tokens = torch.randint(models.VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(0))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            gradient = zerolite.get_full_grad(parameter)
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-6, atol=1e-7, msg=name)
    engine.zero_grad()
    found = train_engine(engine, range(2))
    engine.save_checkpoint(str(tmp_path / "saved"))
    train_engine(engine, range(5, 7))  # to be undone
    engine.load_checkpoint(str(tmp_path / "saved"))
    found += train_engine(engine, range(2, 4))
    assert found == pytest.approx(wanted, rel=1e-6)

    with zerolite.zero.GatheredParameters(engine.module):
        assert_same_bits(packed_of(engine.module), frozen, "packed weights")
        merged = copy.deepcopy(engine.module)
    streamed = {n: v for bucket in zerolite.stream_full_weights(engine, bucket_bytes=5000) for n, v in bucket}
    assert_same_bits(streamed, dict(merged.merge_and_unload().state_dict()), "merged")
    with zerolite.zero.GatheredParameters(engine.module):
        assert_same_bits(packed_of(engine.module), frozen, "packed weights after the stream")
    train_engine(engine, range(1))
