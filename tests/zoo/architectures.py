"""Tables of architectures of a few thousand parameters: of transformers by their configurations, and of torchvision,
thin and without dropout: convolutions, batch norms, shuffles, windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

VOCABULARY = 40
LENGTH = 7

_BASE: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {
    **_BASE,
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 32, "head_dim": 4},
}
_GPT2 = {**_BASE, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
_QUIET = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_BERT = {
    **_BASE,
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
_SEQ2SEQ = {
    **_BASE,
    **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32},
    **{"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "decoder_start_token_id": 1},
}
_T5 = {
    **_BASE,
    **{"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
    "decoder_start_token_id": 0,
}
_VISION = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"image_size": 8, "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
_MOE = {"num_experts_per_tok": 2}


@dataclass(frozen=True)
class Architecture:
    """A model class of transformers by name, its configuration, and the kind of its inputs; or what makes another one.

    inputs: "causal", "masked", "seq2seq" or "image". checkpointing: whether the class supports gradient checkpointing.
    """

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    inputs: str = "causal"
    checkpointing: bool = True
    make: Callable[[], Any] | None = None


_CAUSAL: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "Gemma2ForCausalLM": _LLAMA,
    "Phi3ForCausalLM": {**_LLAMA, **_QUIET},
    "Olmo2ForCausalLM": _LLAMA,
    "MixtralForCausalLM": {**_LLAMA, **_MOE, "num_local_experts": 3},
    "Qwen2MoeForCausalLM": {
        **_LLAMA,
        **_MOE,
        **{"num_experts": 3, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    },
    "GPT2LMHeadModel": {**_GPT2, **_QUIET},
    "GPTNeoForCausalLM": {
        **_BASE,
        **{"hidden_size": 16, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        **{"max_position_embeddings": 32, "embed_dropout": 0.0, "attention_dropout": 0.0, "resid_dropout": 0.0},
    },
    "GPTJForCausalLM": {**_GPT2, **_QUIET, "rotary_dim": 4},
    "OPTForCausalLM": {
        **_LLAMA,
        **{"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0, "attention_dropout": 0.0},
    },
    "BloomForCausalLM": {**_BASE, **_QUIET, "hidden_size": 16, "n_layer": 2, "n_head": 4},
    "FalconForCausalLM": {**_BASE, **_QUIET, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4},
    "MptForCausalLM": {**_BASE, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
    "MambaForCausalLM": {**_BASE, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
}
_MASKED: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": _BERT,
    "AlbertForMaskedLM": {**_BERT, "embedding_size": 8},
    "DebertaV2ForMaskedLM": _BERT,
    "DistilBertForMaskedLM": {
        **_BASE,
        **{"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32},
        **{"dropout": 0.0, "attention_dropout": 0.0},
    },
    "ModernBertForMaskedLM": {**_BERT, "cls_token_id": 1, "sep_token_id": 2},
}
_SEQUENCES: dict[str, dict[str, Any]] = {
    "T5ForConditionalGeneration": _T5,
    "BartForConditionalGeneration": _SEQ2SEQ,
    "MarianMTModel": {**_SEQ2SEQ, "forced_eos_token_id": None},
}
_IMAGES: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": _VISION,
    "ConvNextForImageClassification": {"hidden_sizes": [4, 6, 8, 10], "depths": [1, 1, 1, 1], "patch_size": 2},
    "Dinov2ForImageClassification": {**_VISION, "mlp_ratio": 2},
}

# Classes that refuse gradient checkpointing.
_WITHOUT_CHECKPOINTING = ("AlbertForMaskedLM", "ConvNextForImageClassification")

ARCHITECTURES = [
    *(Architecture(model, config) for model, config in _CAUSAL.items()),
    *(Architecture(model, config, "masked", model not in _WITHOUT_CHECKPOINTING) for model, config in _MASKED.items()),
    *(Architecture(model, config, "seq2seq") for model, config in _SEQUENCES.items()),
    *(Architecture(model, config, "image", model not in _WITHOUT_CHECKPOINTING) for model, config in _IMAGES.items()),
]

CLASSES = 2

_MAKERS: dict[str, Callable[[Any], Any]] = {  # each given torchvision.models
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


def make(name: str) -> Any:
    """The model of that name. Raises ImportError without torchvision."""
    from torchvision import models

    return _MAKERS[name](models)


ARCHITECTURES += [
    Architecture(name, {"image_size": 32}, "image", checkpointing=False, make=partial(make, name)) for name in _MAKERS
]
