"""Architectures of transformers with a few thousand parameters, by their configurations, and how to shard them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH = 67, 12

# Names of sizes in transformers' configs. A config gets those that it has: another name would say nothing.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(
        (
            "hidden_size d_model n_embd embed_dim hidden_dim dim embedding_size word_embed_proj_dim "
            "max_position_embeddings n_positions max_seq_len"
        ).split(),
        32,
    ),
    **dict.fromkeys(
        "intermediate_size ffn_dim ffn_hidden_size encoder_ffn_dim decoder_ffn_dim d_ff d_inner".split(), 48
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers "
            "num_key_value_heads eos_token_id num_experts_per_tok"
        ).split(),
        2,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads num_heads n_head n_heads attention_heads encoder_attention_heads "
            "decoder_attention_heads num_local_experts num_experts"
        ).split(),
        4,
    ),
    **dict.fromkeys("head_dim d_kv".split(), 8),
    **dict.fromkeys("pad_token_id decoder_start_token_id".split(), 0),
    "bos_token_id": 1,
    **dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size".split(), 16),
    "use_cache": False,
}


@dataclass(frozen=True)
class Architecture:
    """A model of transformers.

    Attributes:
        config: the name of its config's class.
        model: the name of its model's class.
        plan: of its layers for tensor parallelism: "auto", where it brings one, or the patterns that a user writes.
        more: of the config, beyond SIZES.
    """

    config: str
    model: str
    plan: str | dict[str, str] = "auto"
    more: dict[str, Any] = field(default_factory=dict)

    def build(self, seed: int = 1) -> nn.Module:
        """The same values at each call."""
        torch.manual_seed(seed)
        import transformers

        kind = getattr(transformers, self.config)
        known = {**vars(kind()), **getattr(kind, "attribute_map", {})}
        given = {name: value for name, value in SIZES.items() if name in known}
        given |= {name: 0.0 for name, value in known.items() if "drop" in name and isinstance(value, float)}
        for name, target in getattr(kind, "attribute_map", {}).items():
            if name in given and target in given:
                given.pop(name)
        model: nn.Module = getattr(transformers, self.model)(kind(**{**given, **self.more}))
        return model

    @property
    def inputs(self) -> str:
        """Kind of its inputs: "causal", "masked", "seq2seq" or "image"."""
        ends = {"MaskedLM": "masked", "ConditionalGeneration": "seq2seq", "MTModel": "seq2seq"}
        image = {"ImageClassification": "image"}
        return next((kind for end, kind in {**ends, **image}.items() if self.model.endswith(end)), "causal")

    def batch(self, seed: int = 3) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        if self.inputs == "image":
            size = self.more.get("image_size", 32)
            return {"pixel_values": torch.randn(2, 3, size, size, generator=generator), "labels": torch.tensor([0, 1])}
        tokens = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
        return {"input_ids": tokens, "labels": tokens.flip(1) if self.inputs == "seq2seq" else tokens}


def causal(name: str, plan: str | dict[str, str] = "auto", kind: str = "ForCausalLM", **more: Any) -> Architecture:
    return Architecture(f"{name}Config", f"{name}{kind}", plan, more)


def vision(name: str, plan: str | dict[str, str] = "auto", **more: Any) -> Architecture:
    made = {"image_size": 16, "patch_size": 4, "num_labels": 3, **more}
    return causal(name, plan, "ForImageClassification", **made)


def patterns(columns: str, rows: str, head: str = "lm_head") -> dict[str, str]:
    """The last parts of names, as a user writes them for a model that brings no plan."""
    plan = {f"*.{name}": "column" for name in columns.split()} | {f"*.{name}": "row" for name in rows.split()}
    return plan | ({head: "vocab"} if head else {})


GPT2, OPT = patterns("c_attn c_fc", "c_proj"), patterns("q_proj k_proj v_proj fc1", "out_proj fc2")
BERT = patterns("self.query self.key self.value intermediate.dense", "output.dense", "")
VISION = patterns("q_proj k_proj v_proj fc1", "o_proj fc2", "")
STABLE = patterns("q_proj k_proj v_proj gate_proj up_proj", "o_proj down_proj")
NEO = patterns("q_proj k_proj v_proj c_fc", "out_proj c_proj")
NEOX = patterns("query_key_value dense_h_to_4h", "dense dense_4h_to_h")
T5: dict[str, Any] = {"kind": "ForConditionalGeneration", "decoder_start_token_id": 0}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
ALL: dict[str, Architecture] = {
    "gpt2": causal("GPT2", GPT2, "LMHeadModel"),
    "gpt_neo": causal("GPTNeo", NEO, attention_types=[[["global", "local"], 1]], window_size=4),
    "gptj": causal("GPTJ", patterns("q_proj k_proj v_proj fc_in", "out_proj fc_out"), rotary_dim=4),
    "gpt_neox": causal("GPTNeoX"),
    "gpt_bigcode_mqa": causal("GPTBigCode", GPT2, multi_query=True),
    "opt": causal("OPT", OPT),
    "opt_post_norm": causal("OPT", OPT, do_layer_norm_before=False, word_embed_proj_dim=16),
    "bloom": causal("Bloom", NEOX),
    "mpt": causal("Mpt", patterns("Wqkv up_proj", "out_proj down_proj")),
    "falcon": causal("Falcon", NEOX, alibi=False),
    "falcon_alibi": causal("Falcon", NEOX, alibi=True, multi_query=False),
    "falcon_new": causal("Falcon", NEOX, new_decoder_architecture=True, num_kv_heads=2),
    "llama": causal("Llama"),
    "llama_mqa": causal("Llama", num_key_value_heads=1),
    "mixtral": causal("Mixtral"),
    "qwen2": causal("Qwen2"),
    "qwen2_moe": causal("Qwen2Moe"),
    "qwen3": causal("Qwen3"),
    "qwen3_moe": causal("Qwen3Moe"),
    "gemma_mqa": causal("Gemma", num_key_value_heads=1),
    "gemma2": causal("Gemma2"),
    "phi": causal("Phi"),
    "phi3": causal("Phi3"),
    "phimoe": causal("Phimoe"),
    "olmo2": causal("Olmo2"),
    "stablelm": causal("StableLm", STABLE, num_key_value_heads=2),
    "cohere2": causal("Cohere2"),
    "persimmon": causal("Persimmon", NEOX),
    "granitemoe": causal("GraniteMoe"),
    "glm": causal("Glm"),
    "gpt_oss": causal("GptOss"),
    "deepseek_v3": causal("DeepseekV3", head_dim=4, num_key_value_heads=4, **ROUTED, **LATENT),
    "mamba": causal("Mamba", state_size=4, time_step_rank=4, intermediate_size=64),
    "jamba": causal("Jamba", attn_layer_offset=1, attn_layer_period=2, mamba_d_state=4, use_mamba_kernels=False),
    "minimax": causal("MiniMax", layer_types=["full_attention", "linear_attention"]),
    "qwen3_next": causal("Qwen3Next", layer_types=["linear_attention", "full_attention"], **LINEAR),
    "bert": causal("Bert", BERT, "ForMaskedLM"),
    "modernbert": causal(
        "ModernBert", patterns("Wqkv Wi", "Wo", "decoder"), "ForMaskedLM", cls_token_id=1, sep_token_id=2
    ),
    "fnet": causal("FNet", patterns("intermediate.dense", "output.dense", ""), "ForMaskedLM"),
    "bart": causal("Bart", OPT, "ForConditionalGeneration"),
    "t5": causal("T5", patterns("q k v wi", "o wo"), **T5),
    "t5_gated": causal("T5", patterns("q k v wi_0 wi_1", "o wo"), **T5, **GATED),
    "vit": vision("ViT", VISION),
    "swin": vision("Swin", VISION, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=2),
    "resnet": vision("ResNet", image_size=32, depths=[1, 1], hidden_sizes=[8, 16], embedding_size=8),
}
