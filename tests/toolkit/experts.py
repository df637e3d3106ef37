"""Mixtures of experts that several ranks spread, and the same training in one process."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerolite
from tests.toolkit import models
from tests.toolkit.configs import at
from zerolite.moe import ExpertParallel
from zerolite.zero import GatheredParameters

VOCABULARY, WIDTH, EXPERTS, CHOSEN = 17, 12, 8, 3


class Expert(nn.Module):
    def __init__(self, inner: int = 7) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.up(x)))
        return out


class Block(nn.Module):
    """A block with a router, experts and a shared expert. ``favourite`` is the one expert of all tokens."""

    def __init__(self, favourite: int | None) -> None:
        super().__init__()
        self.favourite = favourite
        self.norm, self.router, self.shared = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS), Expert(6)
        self.experts = ExpertParallel(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, and the router's z-loss (arXiv:2202.08906, section 3.2)."""
        rows = self.norm(x).reshape(-1, WIDTH)
        logits = self.router(rows)
        weights, index = logits.softmax(-1).topk(CHOSEN)
        if self.favourite is not None:
            weights, index = weights[:, :1], torch.full_like(index[:, :1], self.favourite)
        mixed = self.experts(rows, index, weights / weights.sum(-1, keepdim=True).detach())
        return x + mixed.view(x.shape) + self.shared(self.norm(x)), logits.logsumexp(-1).square().mean()


class Mixture(nn.Module):
    """A model of tokens, which computes its own loss."""

    def __init__(self, favourite: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(favourite) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, z_losses = self.embed(input_ids), []
        for block in self.blocks:
            x, z_loss = block(x)
            z_losses.append(z_loss)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.1 * sum(z_losses)


ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 4,
}  # fmt: skip
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
LINEAR = {
    "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {"head_dim": 6},
    "qwen2_moe": {"shared_expert_intermediate_size": 16},
    "olmoe": {},
    "deepseek_v3": ROUTED | LATENT,
    "deepseek_v2": ROUTED | LATENT,
    "gpt_oss": {"head_dim": 6},
    "glm4_moe": ROUTED | {"head_dim": 6},
    "glm4_moe_lite": ROUTED | LATENT | {"mlp_layer_types": ["dense", "sparse"]},
    "qwen3_next": {"shared_expert_intermediate_size": 16, "head_dim": 8, **MIXED, **LINEAR},
    "granitemoe": {},
    "minimax": {"head_dim": 6, "block_size": 8, **MIXED},
    "minimax_m2": {"head_dim": 6},
    "llama4_text": {"intermediate_size_mlp": 16, "head_dim": 6},
    # Families that nothing here was written for.
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "hunyuan_v1_moe": {"moe_topk": 2, "head_dim": 6},
    "dots1": ROUTED,
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "jamba": {"use_mamba_kernels": False, "attn_layer_offset": 0, "attn_layer_period": 2},
}
"""Families of transformers with experts, and the sizes that they alone have."""


def family(name: str, **more: Any) -> Any:
    """Return a tiny model of a family of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 16, "moe_intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 0,
        "eos_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    own = FAMILIES.get(name, {})
    if {"n_routed_experts", "moe_num_experts"} & set(own):  # other names of the same
        del sizes["num_experts"], sizes["num_local_experts"]
    attention = "eager" if name == "gpt_oss" else "sdpa"
    config = AutoConfig.for_model(name, **(sizes | own | more))
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def build(name: str, double: bool, **options: Any) -> nn.Module:
    made = (
        models.build(Mixture, **options)
        if name == "Mixture"
        else models.build(functools.partial(family, name), **options)
    )
    made.train()
    return made.double() if double else made


def batch_of(place: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + place)
    tokens = torch.randint(VOCABULARY, (2, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens.roll(-1, 1)}


def loss_of(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs.loss


def in_one_process(
    name: str, windows: list[list[dict[str, Tensor]]], double: bool, clip: float, factor: int = 1, **options: Any
) -> tuple[dict[str, Tensor], list[float]]:
    """Train on ``factor`` times the mean loss of each window. Returns parameters and norms."""
    made, norms = build(name, double, **options), []
    kind, settings = optimizer_of(double)
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(made.parameters(), **settings)
    for window in windows:
        for batch in window:
            (loss_of(made(**batch)) * factor / len(window)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(made.parameters(), clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in made.named_parameters()}, norms


def optimizer_of(double: bool) -> tuple[str, dict[str, Any]]:
    """Return Adam in fp64, which would show the rounding of small gradients in fp32."""
    return ("AdamW", {"lr": 0.1, "eps": 1e-3}) if double else ("SGD", {"lr": 0.5, "momentum": 0.9})


def make(name: str, size: int, stage: str = "2", double: bool = False, **more: Any) -> Any:
    """Make an engine whose experts ``size`` ranks spread; a stage "in sets" has two sets of ranks, and a
    "hierarchical" one divides parameters within them."""
    for ending, key in ((" in sets", "shard_size"), (" hierarchical", "zero_hpz_partition_size")):
        if stage.endswith(ending):
            stage, more["zero"] = stage.removesuffix(ending), {key: dist.get_world_size() // 2}
    options, optimizer = more.pop("options", {}), more.pop("optimizer", optimizer_of(double))
    config = at(stage, optimizer=optimizer, **({"expert_parallel": {"size": size}} | more))
    return zerolite.initialize(build(name, double, **options), config)


def train(
    name: str,
    size: int,
    stage: str = "2",
    *,
    double: bool = False,
    accumulation: int = 1,
    clip: float = 0.0,
    steps: int = 2,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, list[float], list[list[dict[str, Tensor]]]]:
    """Train with experts over ``size`` ranks, on as many tokens as the rank's number says. Returns the engine, norms
    and what all ranks have computed."""
    engine = make(name, size, stage, double, options=options, accumulation=accumulation, clip=clip, **(config or {}))
    windows, norms, ranks = [], [], engine.data_parallel_world_size
    for step in range(steps):
        window = []
        for micro in range(accumulation):
            first = (step * accumulation + micro) * ranks
            batches = [batch_of(first + rank, 3 + 4 * rank) for rank in range(ranks)]
            engine.backward(loss_of(engine(**batches[engine.data_parallel_rank])))
            engine.step()
            window += batches
        windows.append(window)
        norms.append(engine.get_global_grad_norm())
    return engine, norms, windows


def own_part(engine: Any, full: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of full parameters that this rank has."""
    from zerolite.tensor_parallel.shard_spec import shard_spec_of

    specs = {name: shard_spec_of(p) for name, p in engine.module.named_parameters()}
    return {name: value if (spec := specs[name]) is None else spec.of(value) for name, value in full.items()}


def parameters_of(engine: Any) -> dict[str, Tensor]:
    """Return what this rank has of the parameters."""
    with GatheredParameters(engine.module, check=False):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}
