"""Architectures of transformers, built small from their configs, with a batch and a loss of each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import zerolite
from tests.distributed.cases.tensor_parallel import compare
from tests.toolkit.configs import SGD, config

VOCABULARY, LENGTH = 67, 12
Batch = Callable[[], dict[str, Tensor]]

# Names of sizes in transformers' configs. A config gets those that it has: another name would say nothing.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "embed_dim": 32,
    "hidden_dim": 32,
    "dim": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "d_ff": 48,
    "d_inner": 48,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "head_dim": 8,
    "d_kv": 8,
    "max_position_embeddings": 32,
    "n_positions": 32,
    "max_seq_len": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "use_cache": False,
}
DROPOUTS = (
    "attention_dropout activation_dropout dropout hidden_dropout attn_pdrop resid_pdrop embd_pdrop emb_pdrop "
    "hidden_dropout_prob attention_probs_dropout_prob dropout_rate layerdrop encoder_layerdrop decoder_layerdrop "
    "embed_dropout resid_dropout qa_dropout seq_classif_dropout classifier_dropout attention_probs_dropout_prob "
    "drop_path_rate hidden_dropout_rate attn_dropout embedding_dropout feat_proj_dropout final_dropout "
    "summary_last_dropout mask_time_prob output_dropout ffn_dropout classifier_dropout_prob "
    "attention_dropout_prob residual_dropout"
).split()


def tokens() -> dict[str, Tensor]:
    x = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    return {"input_ids": x, "labels": x}


def pixels(size: int = 16) -> Batch:
    def make() -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        return {"pixel_values": torch.randn(2, 3, size, size, generator=generator), "labels": torch.tensor([0, 1])}

    return make


@dataclass(frozen=True)
class Architecture:
    """config, model: names of classes. more: of the config, beyond SIZES."""

    config: str
    model: str
    more: dict[str, Any] = field(default_factory=dict)
    batch: Batch = tokens

    def build(self, **more: Any) -> nn.Module:
        """The same values at each call."""
        import transformers

        kind = getattr(transformers, self.config)
        known = {**vars(kind()), **getattr(kind, "attribute_map", {})}
        given = {name: value for name, value in SIZES.items() if name in known}
        given |= {name: 0.0 for name in DROPOUTS if name in known}
        for name, target in getattr(kind, "attribute_map", {}).items():
            if name in given and target in given:
                given.pop(name)
        torch.manual_seed(1)
        model: nn.Module = getattr(transformers, self.model)(kind(**{**given, **self.more, **more}))
        # Many models begin with biases of 0 and norms of 1, which hide where they act.
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
        return model

    def loss(self, model: nn.Module) -> Tensor:
        torch.manual_seed(5)  # of routers that draw
        outputs = model(**self.batch())
        loss = getattr(outputs, "loss", None)
        if loss is not None:
            return loss
        hidden = next(value for value in outputs.to_tuple() if value.is_floating_point())
        return hidden.float().square().mean() + hidden.float().mean()


def causal(name: str, model: str = "", **more: Any) -> Architecture:
    return Architecture(f"{name}Config", model or f"{name}ForCausalLM", more)


CAUSAL: dict[str, Architecture] = {
    "gpt2": causal("GPT2", "GPT2LMHeadModel"),
    "gpt_neo": causal("GPTNeo", attention_types=[[["global", "local"], 1]], window_size=4),
    "gptj": causal("GPTJ", rotary_dim=4),
    "gpt_neox": causal("GPTNeoX"),
    "gpt_neox_japanese": causal("GPTNeoXJapanese"),
    "gpt_bigcode": causal("GPTBigCode", multi_query=False),
    "gpt_bigcode_mqa": causal("GPTBigCode", multi_query=True),
    "opt": causal("OPT"),
    "opt_post_norm": causal("OPT", do_layer_norm_before=False, word_embed_proj_dim=16),
    "bloom": causal("Bloom"),
    "mpt": causal("Mpt"),
    "falcon": causal("Falcon", alibi=False),
    "falcon_alibi": causal("Falcon", alibi=True, multi_query=False),
    "falcon_new": causal("Falcon", new_decoder_architecture=True, num_kv_heads=2),
    "codegen": causal("CodeGen", rotary_dim=4),
    "llama": causal("Llama"),
    "llama_mqa": causal("Llama", num_key_value_heads=1),
    "mistral": causal("Mistral"),
    "mixtral": causal("Mixtral"),
    "qwen2": causal("Qwen2"),
    "qwen2_moe": causal("Qwen2Moe"),
    "qwen3": causal("Qwen3"),
    "qwen3_moe": causal("Qwen3Moe"),
    "gemma": causal("Gemma", num_key_value_heads=4),
    "gemma_mqa": causal("Gemma", num_key_value_heads=1),
    "gemma2": causal("Gemma2"),
    "gemma3": causal("Gemma3Text", "Gemma3ForCausalLM"),
    "phi": causal("Phi"),
    "phi3": causal("Phi3"),
    "phimoe": causal("Phimoe"),
    "olmo": causal("Olmo"),
    "olmo2": causal("Olmo2"),
    "olmoe": causal("Olmoe"),
    "stablelm": causal("StableLm", num_key_value_heads=2),
    "starcoder2": causal("Starcoder2"),
    "cohere": causal("Cohere"),
    "cohere2": causal("Cohere2"),
    "persimmon": causal("Persimmon"),
    "granite": causal("Granite"),
    "granitemoe": causal("GraniteMoe"),
    "glm": causal("Glm"),
    "glm4": causal("Glm4"),
    "nemotron": causal("Nemotron"),
    "helium": causal("Helium"),
    "smollm3": causal("SmolLM3"),
    "exaone4": causal("Exaone4"),
    "ernie4_5": causal("Ernie4_5"),
    "gpt_oss": causal("GptOss"),
    "deepseek_v3": causal(
        "DeepseekV3",
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        head_dim=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_key_value_heads=4,
        first_k_dense_replace=1,
    ),
    "mamba": causal("Mamba", state_size=4, time_step_rank=4, intermediate_size=64),
    "mamba2": causal("Mamba2", state_size=4, num_heads=8, head_dim=8, n_groups=1),
    "jamba": causal(
        "Jamba", attn_layer_offset=1, attn_layer_period=2, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False
    ),
    "recurrent_gemma": causal("RecurrentGemma", lru_width=32, num_hidden_layers=3),
    "rwkv": causal("Rwkv", attention_hidden_size=32),
    "biogpt": causal("BioGpt"),
    "xglm": causal("XGLM"),
    "bart_decoder": causal("Bart"),
    "openai_gpt": causal("OpenAIGPT", "OpenAIGPTLMHeadModel"),
    "ctrl": causal("CTRL", "CTRLLMHeadModel", dff=48),
    "xlnet": causal("XLNet", "XLNetLMHeadModel"),
    "bert_decoder": causal("Bert", "BertLMHeadModel", is_decoder=True),
    "moshi": causal("Moshi"),
    "jetmoe": causal("JetMoe", kv_channels=8),
    "minimax": causal("MiniMax", layer_types=["full_attention", "linear_attention"]),
    "lfm2": causal("Lfm2", layer_types=["full_attention", "conv"]),
    "qwen3_next": causal(
        "Qwen3Next",
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
}


def other(name: str, model: str, batch: Batch = tokens, **more: Any) -> Architecture:
    return Architecture(f"{name}Config", model, more, batch)


def audio() -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 400, generator=torch.Generator().manual_seed(3))}


def mels() -> dict[str, Tensor]:
    made = tokens()
    return {
        "input_features": torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(3)),
        "labels": made["labels"],
    }


_VISION = {"image_size": 16, "patch_size": 4, "num_labels": 3}
OTHERS: dict[str, Architecture] = {
    "bert": other("Bert", "BertForMaskedLM"),
    "roberta": other("Roberta", "RobertaForMaskedLM", max_position_embeddings=40),
    "distilbert": other("DistilBert", "DistilBertForMaskedLM"),
    "albert": other("Albert", "AlbertForMaskedLM"),
    "electra": other("Electra", "ElectraForMaskedLM"),
    "deberta_v2": other("DebertaV2", "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "mpnet": other("MPNet", "MPNetForMaskedLM", max_position_embeddings=40),
    "modernbert": other("ModernBert", "ModernBertForMaskedLM"),
    "t5": other("T5", "T5ForConditionalGeneration", decoder_start_token_id=0),
    "t5_gated": other(
        "T5",
        "T5ForConditionalGeneration",
        decoder_start_token_id=0,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    ),
    "t5_encoder": other("T5", "T5EncoderModel", lambda: {"input_ids": tokens()["input_ids"]}),
    "mt5": other("MT5", "MT5ForConditionalGeneration"),
    "umt5": other("UMT5", "UMT5ForConditionalGeneration"),
    "bart": other("Bart", "BartForConditionalGeneration"),
    "pegasus": other("Pegasus", "PegasusForConditionalGeneration"),
    "whisper": other(
        "Whisper",
        "WhisperForConditionalGeneration",
        mels,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
    ),
    "vit": other("ViT", "ViTForImageClassification", pixels(), **_VISION),
    "deit": other("DeiT", "DeiTForImageClassification", pixels(), **_VISION),
    "beit": other("Beit", "BeitForImageClassification", pixels(), use_relative_position_bias=True, **_VISION),
    "dinov2": other("Dinov2", "Dinov2ForImageClassification", pixels(), **_VISION),
    "swin": other(
        "Swin",
        "SwinForImageClassification",
        pixels(),
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 4],
        window_size=2,
        **{**_VISION, "patch_size": 2},
    ),
    "swinv2": other(
        "Swinv2",
        "Swinv2ForImageClassification",
        pixels(),
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 4],
        window_size=2,
        **{**_VISION, "patch_size": 2},
    ),
    "resnet": other(
        "ResNet",
        "ResNetForImageClassification",
        pixels(32),
        depths=[1, 1],
        hidden_sizes=[8, 16],
        embedding_size=8,
        num_labels=3,
    ),
    "segformer": other(
        "Segformer",
        "SegformerForImageClassification",
        pixels(32),
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[2, 2, 2, 2],
        num_labels=3,
    ),
    "wav2vec2": other(
        "Wav2Vec2",
        "Wav2Vec2Model",
        audio,
        conv_dim=[8, 8],
        conv_kernel=[10, 4],
        conv_stride=[5, 4],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_feature_prob=0.0,
    ),
    "funnel": other("Funnel", "FunnelForMaskedLM", block_sizes=[1, 1], d_head=8),
    "longformer": other("Longformer", "LongformerForMaskedLM", attention_window=4, max_position_embeddings=40),
    "fnet": other("FNet", "FNetForMaskedLM"),
    "xlm_roberta": other("XLMRoberta", "XLMRobertaForMaskedLM", max_position_embeddings=40),
}
ALL = {**CAUSAL, **OTHERS}


def _patterns(columns: str, rows: str, head: str = "lm_head") -> dict[str, str]:
    """Last parts of names."""
    plan = {f"*.{name}": "column" for name in columns.split()} | {f"*.{name}": "row" for name in rows.split()}
    return plan | ({head: "vocab"} if head else {})


_SEPARATE = _patterns("q_proj k_proj v_proj fc1", "out_proj fc2")
_VISION = _patterns("q_proj k_proj v_proj fc1", "o_proj fc2", "")
_BERT = _patterns("self.query self.key self.value intermediate.dense", "output.dense", "")
_NEOX = _patterns("query_key_value dense_h_to_4h", "dense dense_4h_to_h")
PLANS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gpt_bigcode_mqa", "openai_gpt"), _patterns("c_attn c_fc", "c_proj")),
    **dict.fromkeys(("opt", "opt_post_norm", "xglm", "bart", "pegasus"), _SEPARATE),
    **dict.fromkeys(("bloom", "falcon", "falcon_alibi", "falcon_new", "persimmon"), _NEOX),
    **dict.fromkeys(("bert", "roberta", "electra"), _BERT),
    **dict.fromkeys(("vit", "deit", "dinov2", "swin"), _VISION),
    "t5": _patterns("q k v wi", "o wo"),
    "t5_gated": _patterns("q k v wi_0 wi_1", "o wo"),
    "gpt_neo": _patterns("q_proj k_proj v_proj c_fc", "out_proj c_proj"),
    "gptj": _patterns("q_proj k_proj v_proj fc_in", "out_proj fc_out"),
    "gpt_neox_japanese": _patterns("query_key_value dense_h_to_4h", "dense dense_4h_to_h", "embed_out"),
    "stablelm": _patterns("q_proj k_proj v_proj gate_proj up_proj", "o_proj down_proj"),
    "distilbert": _patterns("q_lin k_lin v_lin lin1", "out_lin lin2", ""),
    "modernbert": _patterns("Wqkv Wi", "Wo", "decoder"),
    "mpt": _patterns("Wqkv up_proj", "out_proj down_proj"),
    "fnet": _patterns("intermediate.dense", "output.dense", ""),
}
"""Of models that bring none of their own, what a user writes."""


def cut(names: list[str], **others: Any) -> dict[str, dict[str, Any]]:
    """By name: the largest differences between the model cut by its plan, or by that of :data:`PLANS`, and whole; or
    why it is refused."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            result = compare(ALL[name].build(), ALL[name].loss, PLANS.get(name, "auto"), **others)
        except (ValueError, RuntimeError, AssertionError) as error:
            found[name] = {"said": f"{type(error).__name__}: {error}"}
            continue
        worst = max(result["gradients"].items(), key=lambda item: item[1])
        of_result = {"loss": result["loss"], "gradients": worst[1], "worst": worst[0], "cut": len(result["cut"])}
        found[name] = {**of_result, "said": ""}
    return found


def in_stages(names: list[str]) -> dict[str, dict[str, float]]:
    """By name: the largest differences between the model in two stages and one process in two steps."""
    return {name: _train_in_stages(ALL[name].build(), ALL[name]) for name in names}


def _train_in_stages(model: nn.Module, made: Architecture) -> dict[str, float]:
    whole = copy.deepcopy(model)
    settings = config(0, "fp32", 2, optimizer=SGD) | {"pipeline": {"stages": 2}}
    engine = zerolite.initialize(model, settings)
    optimizer = torch.optim.SGD(whole.parameters(), **SGD[1])
    off = {}
    for step in range(2):
        loss = engine.train_batch(iter([made.batch(), made.batch()])).item()
        optimizer.zero_grad()
        expected = made.loss(whole)
        expected.backward()
        optimizer.step()
        off[f"loss {step}"] = abs(loss - expected.item()) / abs(expected.item())
    values = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        off[name] = float((parameter - values[name]).detach().abs().max())
    return off
