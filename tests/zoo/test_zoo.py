"""Architectures of transformers and torchvision, tiny: every stage, precision and way of construction against plain
PyTorch."""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.toolkit.architectures import ALL, VISION, Architecture, causal, vision
from tests.toolkit.compare import assert_same
from tests.toolkit.configs import SGD, config
from tests.toolkit.ranks import on_ranks
from zerolite import zero

STEPS = 3
TOLERANCE = 1e-6  # of values, where a sum over ranks is rounded otherwise than plain PyTorch's

Result = tuple[list[float], list[list[int]], dict[str, Tensor]]  # losses, generated tokens, parameters

# Every module moves by itself; and, with gradient checkpointing, blocks are units.
_MODULES = {"stage3_param_persistence_threshold": 0, "stage3_module_granularity_threshold": 0}
_BLOCKS = {"stage3_param_persistence_threshold": 20, "stage3_module_granularity_threshold": 13_000}


class Classifier(nn.Module):
    """A model of torchvision, called as those of transformers are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.model(pixel_values).float(), labels))


CLASSES = 2
_MAKERS: dict[str, Callable[[Any], Any]] = {  # each given torchvision.models; thin, and without dropout
    "ResNet": lambda of: of.ResNet(of.resnet.BasicBlock, [1, 1, 1, 1], CLASSES),
    "MobileNetV2": lambda of: of.MobileNetV2(CLASSES, width_mult=0.1, dropout=0.0),
    "ShuffleNetV2": lambda of: of.ShuffleNetV2([2, 2, 2], [8, 8, 16, 32, 32], CLASSES),
    "DenseNet": lambda of: of.DenseNet(4, (2, 2, 2, 2), 8, num_classes=CLASSES),
    "RegNet": lambda of: of.RegNet(
        of.regnet.BlockParams.from_init_params(1, 8, 4.0, 2.0, 8, se_ratio=0.25), CLASSES, stem_width=8
    ),
    "ConvNeXt": lambda of: of.ConvNeXt(
        [of.convnext.CNBlockConfig(8, 16, 1), of.convnext.CNBlockConfig(16, None, 1)], num_classes=CLASSES
    ),
    "VisionTransformer": lambda of: of.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=CLASSES),
    "SwinTransformer": lambda of: of.SwinTransformer(
        [4, 4], 8, [1, 1], [1, 2], [2, 2], stochastic_depth_prob=0.0, num_classes=CLASSES
    ),
}


@dataclass(frozen=True)
class OfTorchvision(Architecture):
    """A model of torchvision, by its name in ``_MAKERS``."""

    inputs = "image"  # type: ignore[assignment]

    def build(self, seed: int = 1) -> nn.Module:
        from torchvision import models

        torch.manual_seed(seed)
        return Classifier(_MAKERS[self.model](models))


_OF_TRANSFORMERS = "llama qwen3 gemma2 phi3 olmo2 mixtral qwen2_moe gpt2 gpt_neo gptj opt bloom falcon mpt mamba"
_OF_TRANSFORMERS += " bert modernbert t5 bart vit"
ARCHITECTURES: dict[str, Architecture] = {
    **{name: ALL[name] for name in _OF_TRANSFORMERS.split()},
    "albert": causal("Albert", kind="ForMaskedLM"),
    "deberta_v2": causal("DebertaV2", kind="ForMaskedLM"),
    "distilbert": causal("DistilBert", kind="ForMaskedLM"),
    "marian": causal("Marian", kind="MTModel", forced_eos_token_id=None),
    "convnext": vision("ConvNext", hidden_sizes=[4, 6, 8, 10], depths=[1, 1, 1, 1], patch_size=2, num_hidden_layers=4),
    "dinov2": vision("Dinov2", VISION, mlp_ratio=2),
    **{name: OfTorchvision("", name) for name in _MAKERS},
}
WITHOUT_CHECKPOINTING = ("albert", "convnext", *_MAKERS)


def batch(architecture: Architecture, step: int, rank: int) -> dict[str, Tensor]:
    return architecture.batch(1000 * step + rank)


def generate(module: Any, architecture: Architecture) -> list[int]:
    """A few tokens, alike on all ranks; none for a model that has no ``generate``."""
    if architecture.inputs not in ("causal", "seq2seq"):
        return []
    module.eval()
    prompt = batch(architecture, 0, 0)["input_ids"][:1]
    tokens = module.generate(prompt, max_new_tokens=3, do_sample=False)
    module.train()
    return list(tokens.flatten().tolist())


def checkpoint(model: Any, kind: str) -> Any:
    """kind: "" for none, "reentrant" or "kept out" (of the graph: not reentrant)."""
    if kind:
        model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
    return model


def plain(architecture: Architecture, dtypes: dict[str, torch.dtype], checkpointing: str = "") -> Result:
    """Every rank trains on the batches of all; losses are this rank's. With fp32 masters, and compute weights of these
    dtypes, or in fp32: gradients of a rank in the compute dtype, their mean over ranks in fp32, rounded once."""
    model = checkpoint(architecture.build(), checkpointing).train()
    masters = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes.get(name, torch.float32))
    optimizer = torch.optim.SGD(masters.values(), **SGD[1], foreach=True)
    losses, tokens = [], []
    for step in range(STEPS):
        sums: dict[str, Tensor] = {}
        for rank in range(dist.get_world_size()):
            given = batch(architecture, step, rank)
            if dtypes:
                given = {name: v.bfloat16() if v.is_floating_point() else v for name, v in given.items()}
            loss = model(**given).loss
            loss.backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums.get(name, 0.0) + parameter.grad.float()
            model.zero_grad()
            if rank == dist.get_rank():
                losses.append(loss.item())
        for name, total in sums.items():
            masters[name].grad = (total / dist.get_world_size()).to(dtypes.get(name, torch.float32)).float()
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(masters[name].data)
        tokens.append(generate(model, architecture))
    return losses, tokens, {name: p.detach().clone() for name, p in model.named_parameters()}


def engine_run(
    architecture: Architecture, settings: dict[str, Any], checkpointing: str, init: bool = False
) -> tuple[Result, dict[str, torch.dtype]]:
    """Return what the engine gives, and the dtypes of the parameters."""
    with zero.Init(enabled=init):
        model = architecture.build()
    engine = zerolite.initialize(checkpoint(model, checkpointing).train(), settings)
    losses, tokens = [], []
    for step in range(STEPS):
        loss = engine(**batch(architecture, step, engine.rank)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        tokens.append(generate(engine.module, architecture))
    state = engine.full_state_dict()
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    return (losses, tokens, {name: state[name] for name in dtypes}), dtypes


def assert_same_run(found: Result, wanted: Result, tolerance: float, what: str) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=tolerance, abs=tolerance), f"{what}: losses"
    assert found[1] == wanted[1], f"{what}: generated tokens"
    torch.testing.assert_close(found[2], wanted[2], rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def assert_same_values(model: Any, wanted: Any, what: str) -> None:
    with zero.GatheredParameters(model):
        assert_same(dict(model.named_parameters()), dict(wanted.named_parameters()), what)
    assert_same(dict(model.named_buffers()), dict(wanted.named_buffers()), what)


def assert_init(architecture: Architecture) -> None:
    """Construction inside zero.Init, and loading there what was saved, against plain construction, bit for bit."""
    wanted = architecture.build()
    with zero.Init():
        model = architecture.build()
    assert_same_values(model, wanted, "zero.Init")
    if not isinstance(architecture, OfTorchvision):
        with tempfile.TemporaryDirectory() as own:
            directory = [own]
            dist.broadcast_object_list(directory)
            if dist.get_rank() == 0:  # transformers 5 writes nothing elsewhere
                wanted.save_pretrained(own)
            dist.barrier()
            with zero.Init():
                model = type(wanted).from_pretrained(directory[0])
            dist.barrier()
        assert_same_values(model, wanted, "from_pretrained")


def case(name: str) -> Any:
    package = "torchvision" if name in _MAKERS else "transformers"
    missing = importlib.util.find_spec(package) is None
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"{package} is not installed"))


@pytest.mark.slow
@on_ranks(2, timeout=600)
@pytest.mark.parametrize("name", [case(name) for name in ARCHITECTURES])
def test_every_stage_gives_what_plain_pytorch_gives(name: str) -> None:
    """They are equal to the rounding of sums in fp32, and to the bit in bf16."""
    architecture = ARCHITECTURES[name]
    if not isinstance(architecture, OfTorchvision):
        import transformers

        transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert_init(architecture)
    wanted = plain(architecture, {})
    for checkpointing in ("",) if name in WITHOUT_CHECKPOINTING else ("", "kept out", "reentrant"):
        in_bf16: Result | None = None
        for stage in (2, 3) if checkpointing else range(4):
            section = (_BLOCKS if checkpointing else _MODULES) if stage == 3 else {}
            what = f"stage {stage}, {checkpointing or 'no'} checkpointing"
            found, _ = engine_run(architecture, config(stage, optimizer=SGD, zero=section), checkpointing)
            assert_same_run(found, wanted, TOLERANCE, f"{what}, fp32")
            made = config(stage, "bf16", optimizer=SGD, zero=section)
            found, dtypes = engine_run(architecture, made, checkpointing)
            in_bf16 = in_bf16 or plain(architecture, dtypes, checkpointing)
            assert_same_run(found, in_bf16, 0.0, f"{what}, bf16")
        found, _ = engine_run(architecture, config(3, optimizer=SGD), checkpointing, init=True)
        assert_same_run(found, wanted, TOLERANCE, f"{what}, zero.Init")
    torch.use_deterministic_algorithms(False)
