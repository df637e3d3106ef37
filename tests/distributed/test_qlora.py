"""QLoRA as transformers and PEFT make it: weights in 4 bits by ``BitsAndBytesConfig``, in 8 by ``TorchAoConfig``, and
in NF4 and fp8 by torchao alone, beside plain PyTorch."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.distributed.test_quantized import installed, losses, train_engine
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import at
from tests.toolkit.ranks import on_ranks
from zerolite.checkpoint.export import export_checkpoint
from zerolite.zero.inner_tensors import flattened

LIBRARIES = ("bitsandbytes", "torchao")
ADAMW = ("AdamW", {"lr": 0.01, "torch_adam": True, "weight_decay": 0})


def save_base(directory: Path) -> None:
    """Save a Llama. Its layers have even numbers of inputs: for odd ones bitsandbytes compiles its dequantization on
    the CPU."""
    import transformers

    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 8}
    config = transformers.LlamaConfig(vocab_size=models.VOCABULARY, num_attention_heads=4, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


def quantized(directory: Path, library: str) -> Any:
    """Return a Llama with quantized weights and adapters, the same on each call."""
    import peft
    import transformers

    options: Any
    if library == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig  # type: ignore[import-not-found]

        options = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    else:
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


def train_steps(engine: Any, steps: range) -> list[float]:
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
    """Return the bytes of the quantized weights and of their scales."""
    packed = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is not None and hasattr(weight, "__tensor_flatten__"):  # of torchao
            inner = weight.__tensor_flatten__()[0]
            packed.update({f"{name}.{key}": getattr(weight, key).detach().clone() for key in inner})
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "Params4bit":
            assert parameter.bnb_quantized
            packed[name] = parameter.detach().clone().as_subclass(Tensor)
            packed.update({f"{name}.{k}": v.clone() for k, v in parameter.quant_state.as_dict(packed=True).items()})
    return packed


CASES = [pytest.param(*case, marks=installed(case[0])) for case in itertools.product(LIBRARIES, (1, 2, 3))]


@installed("peft")
@pytest.mark.slow
@on_ranks(2, timeout=240)
@pytest.mark.parametrize(("library", "stage"), CASES)
def test_qlora_of_transformers(library: str, stage: int, tmp_path: Path) -> None:
    """Losses and gradients of plain PyTorch, bits of the packed weights, save, load, and PEFT's own merge."""
    base = tmp_path / "base"
    save_base(base)  # transformers lets rank 0 write
    dist.barrier()
    plain = quantized(base, library)
    frozen = packed_of(plain)
    assert len(frozen) >= 2 * 7 * 2
    wanted, gradients = train_plain(plain, range(4))
    assert wanted[0] != wanted[-1]

    engine: Any = zerolite.initialize(quantized(base, library), at(stage, optimizer=ADAMW))
    tokens = torch.randint(models.VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(0))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            gradient = zerolite.get_full_grad(parameter)
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-6, atol=1e-7, msg=name)
    engine.zero_grad()
    found = train_steps(engine, range(2))
    engine.save_checkpoint(str(tmp_path / "saved"))
    train_steps(engine, range(5, 7))  # to be undone
    engine.load_checkpoint(str(tmp_path / "saved"))
    found += train_steps(engine, range(2, 4))
    assert found == pytest.approx(wanted, rel=1e-6)

    with zerolite.zero.GatheredParameters(engine.module):
        assert_same_bits(packed_of(engine.module), frozen, "packed weights")
        merged = copy.deepcopy(engine.module)
    streamed = {n: v for bucket in zerolite.stream_full_weights(engine, bucket_bytes=5000) for n, v in bucket}
    assert_same_bits(streamed, flattened(merged.merge_and_unload().state_dict()), "merged")
    with zerolite.zero.GatheredParameters(engine.module):
        assert_same_bits(packed_of(engine.module), frozen, "packed weights after the stream")
    if library == "torchao":  # PEFT puts other weights into the layers
        names = [name for name, _ in engine.module.named_parameters()]
        engine.module.merge_adapter()
        merged_in_place = packed_of(engine.module)
        assert any(not torch.equal(value, frozen[name]) for name, value in merged_in_place.items())
        engine.full_state_dict()
        with zerolite.zero.GatheredParameters(engine.module):
            assert_same_bits(packed_of(engine.module), merged_in_place, "merged in place")
        engine.module.unmerge_adapter()
        quantized_again = packed_of(engine.module)
        engine.save_checkpoint(str(tmp_path / "again"))
        assert [name for name, _ in engine.module.named_parameters()] == names
        with zerolite.zero.GatheredParameters(engine.module, modifier_rank=0):
            engine.module.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.qdata.data.zero_()
        engine.load_checkpoint(str(tmp_path / "again"))
        with zerolite.zero.GatheredParameters(engine.module):
            assert_same_bits(packed_of(engine.module), quantized_again, "quantized again")
    train_steps(engine, range(1))


@installed("torchao")
@pytest.mark.slow
@on_ranks(2, timeout=240)
@pytest.mark.parametrize("stage", [0, 3])
def test_transformers_loads_exported_weights_of_torchao(stage: int, tmp_path: Path) -> None:
    """From files that the engine writes, and from an export of its checkpoint, in one file and in several."""
    import transformers

    save_base(tmp_path / "base")
    dist.barrier()
    model = quantized(tmp_path / "base", "torchao").unload()
    for parameter in (model.lm_head.weight, model.model.norm.weight):
        parameter.requires_grad_(True)
    engine: Any = zerolite.initialize(model, at(stage, "bf16", optimizer=ADAMW))
    train_steps(engine, range(2))
    engine.save_checkpoint(str(tmp_path / "saved"))
    engine.save_16bit_model(str(tmp_path / "one"))
    engine.save_16bit_model(str(tmp_path / "several"), max_shard_size="20KB")
    wanted = flattened(engine.full_state_dict())
    if dist.get_rank() == 0:
        export_checkpoint(tmp_path / "saved", tmp_path / "exported")
        assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
        for directory in (tmp_path / "one", tmp_path / "several", tmp_path / "exported"):
            engine.module.config.save_pretrained(directory)
            loaded: Any = transformers.LlamaForCausalLM.from_pretrained(directory)
            assert type(loaded.model.layers[1].mlp.up_proj.weight).__name__ == "Int8Tensor"
            found = flattened(loaded.state_dict())
            assert found.keys() == wanted.keys()
            assert_same_bits(found, {name: wanted[name] for name in found}, directory.name)
    dist.barrier()


@installed("torchao")
@pytest.mark.slow
@on_ranks(2, timeout=240)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_weight_of_torchao_that_two_layers_share(stage: int) -> None:
    """It stays one weight, tied before its parameters are partitioned or after, and in a model that exists."""
    for when in ("before", "after", "never"):
        with zerolite.zero.Init(enabled=stage == 3 and when != "never"):
            first, second = adapted("Int8Tensor")[0], adapted("Int8Tensor")[0]
            if when == "before":
                second.base.weight = first.base.weight
                model = nn.Sequential(first, second)
            else:
                model = nn.Sequential(first, second)
                second.base.weight = first.base.weight
        engine: Any = zerolite.initialize(model, at(stage, "bf16", optimizer=ADAMW))
        layers = {name[0] for name, _ in engine.module.named_parameters() if "base._weight" in name}
        assert layers == {"0"}, when
        state = engine.full_state_dict()
        assert torch.equal(state["0.base.weight"].qdata, state["1.base.weight"].qdata), when


class Adapted(nn.Module):
    """Linear layer with a frozen weight, and LoRA beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def adapted(kind: str) -> nn.Sequential:
    """Return layers in bf16 with weights of a class of torchao, the same on each call."""
    import torchao.quantization as quantization
    from torchao.prototype._nf4tensor_api import NF4WeightOnlyConfig  # type: ignore[import-not-found]

    nf4 = NF4WeightOnlyConfig()
    nf4.scaler_block_size = 64
    configs = {
        "NF4Tensor": nf4,
        "Int8Tensor": quantization.Int8WeightOnlyConfig(),
        "Float8Tensor": quantization.Float8WeightOnlyConfig(),
        "IntxUnpackedToInt8Tensor": quantization.IntxWeightOnlyConfig(torch.int4, quantization.PerGroup(32)),
    }
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.GELU(), nn.Linear(256, 128)).bfloat16()
    quantization.quantize_(model, configs[kind])
    assert type(model[0].weight).__name__ == kind
    return nn.Sequential(*(Adapted(layer).bfloat16() if isinstance(layer, nn.Linear) else layer for layer in model))


@installed("torchao")
@pytest.mark.slow
@on_ranks(2, timeout=240)
@pytest.mark.parametrize("kind", ["NF4Tensor", "Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor"])
def test_weights_of_torchao(kind: str, tmp_path: Path) -> None:
    """Bits of plain PyTorch with fp32 master weights at every stage, of the frozen weights too; a checkpoint of one
    stage at the next, and half of the bytes on each rank at stage 3."""
    plain = adapted(kind)
    frozen = packed_of(plain)
    pairs = [(p.detach().float(), p) for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD([master for master, _ in pairs], lr=0.5)

    def step(loss: Tensor) -> None:
        loss.backward()
        for master, parameter in pairs:
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        for master, parameter in pairs:
            parameter.data.copy_(master)

    wanted = losses(plain, 3, step, 128)
    for stage in (0, 1, 2, 3, 0):
        engine, found = train_engine(adapted(kind), stage, 128)
        assert found == wanted, f"stage {stage}: {found}, and plain PyTorch {wanted}"
        if stage == 3:
            held = [p.ds_tensor for name, p in engine.module.named_parameters() if "base._weight" in name]
            assert sum(t.nbytes for t in held) < 0.6 * sum(t.nbytes for t in frozen.values())
        if (tmp_path / "latest").exists():
            engine.load_checkpoint(str(tmp_path))
        engine.save_checkpoint(str(tmp_path))
        with zerolite.zero.GatheredParameters(engine.module):
            assert_same_bits(packed_of(engine.module), frozen, f"stage {stage}")
        assert_same_bits(packed_of(engine.module), frozen, f"stage {stage}, gathered by reads")
        state = engine.full_state_dict()
        assert type(state["0.base.weight"]).__name__ == kind
        adapted(kind).load_state_dict(state)
        engine.module.load_state_dict(state)
