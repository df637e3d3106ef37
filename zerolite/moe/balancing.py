"""Balance of experts over the joint batch: auxiliary losses whose sums are those of all ranks, and biases of routers.

A load-balancing loss is a product of two means over tokens, of choices and of probabilities. The mean of the ranks'
losses is not that of the joint batch, which balances less strictly and is better for the model (arXiv:2501.11873). With
the choices of all ranks in each rank's loss it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerolite.comm import collective
from zerolite.config import ConfigError
from zerolite.moe.dispatch import TAG

BIASES = ("e_score_correction_bias", "expert_bias")
"""Names of the buffers that routers of transformers add to the scores by which they choose, and to nothing else."""


@collective
def load_balancing_loss(
    engine: Any, router_logits: Tensor | Sequence[Tensor], top_k: int, attention_mask: Tensor | None = None
) -> Tensor:
    """Return this rank's share of the joint batch's load-balancing loss (arXiv:2101.03961, equations 4 to 6)::

        outputs = engine(input_ids=tokens, labels=labels, output_router_logits=True)  # router_aux_loss_coef: 0
        balance = zerolite.moe.load_balancing_loss(engine, outputs.router_logits, top_k=8)
        engine.backward(outputs.loss + 0.001 * balance)

    The mean over data-parallel ranks, which is what trains, is transformers' ``load_balancing_loss_func`` of all their
    tokens, also where ranks have different numbers. It costs a small all-reduce.

    Args:
        engine: the engine that trains.
        router_logits: of this rank's tokens [n, experts], for each layer.
        top_k: experts that a token chooses.
        attention_mask: [batch, length], 0 for tokens that do not count; None if all do.
    """
    logits, counts = _tokens(router_logits, attention_mask)
    probabilities = logits.float().softmax(-1)
    chosen = probabilities.topk(top_k).indices
    experts = logits.shape[-1]
    weights = counts[:, None].expand_as(chosen).reshape(-1)
    load = counts.new_zeros(experts).scatter_add_(0, chosen.reshape(-1), weights)
    load, share = _joint(engine, load, counts)
    return (
        experts * (load.to(probabilities) * (counts.to(probabilities) @ probabilities)).sum() * share.to(probabilities)
    )


@collective
def router_z_loss(
    engine: Any, router_logits: Tensor | Sequence[Tensor], attention_mask: Tensor | None = None
) -> Tensor:
    """Return this rank's share of the joint batch's router z-loss (arXiv:2202.08906, equation 5), the mean over all
    tokens and layers. Arguments as of :func:`load_balancing_loss`."""
    logits, counts = _tokens(router_logits, attention_mask)
    squares = logits.float().logsumexp(-1).square()
    _, share = _joint(engine, counts.new_zeros(0), counts)
    return (counts.to(squares) @ squares) * share.to(squares)


def find_biases(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[nn.Module, str]]:
    """Return the module that has the router's bias, and the bias' name there, for modules of experts ``names``.

    Raises ConfigError for a block that has none, or several.
    """
    found = {}
    for name in names:
        block = model.get_submodule(name.rpartition(".")[0])
        biases = [(m, leaf) for m in block.modules() for leaf in BIASES if m._buffers.get(leaf) is not None]
        if len(biases) != 1:
            sentence = (
                f"expected 0 for a router without a buffer {' or '.join(BIASES)}, got one around '{name}'; leave the "
                "key out"
            )
            raise ConfigError([("expert_parallel.load_balance_coeff", sentence)])
        (found[name],) = biases
    return found


def _tokens(router_logits: Tensor | Sequence[Tensor], attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the logits of all layers one behind the other, and 1 for each token that counts, float64."""
    layers = [router_logits] if isinstance(router_logits, Tensor) else list(router_logits)
    device = layers[0].device
    logits = torch.cat([layer.reshape(-1, layer.shape[-1]).to(device) for layer in layers])
    if attention_mask is None:
        return logits, torch.ones(len(logits), dtype=torch.float64, device=device)
    counts = attention_mask.reshape(-1).to(device, torch.float64)
    if len(counts) * len(layers) != len(logits):
        raise ValueError(
            f"attention_mask: expected one number for each of the {len(logits) // len(layers)} tokens of a layer, got "
            f"{list(attention_mask.shape)}"
        )
    return logits, counts.repeat(len(layers))


@torch.no_grad()
def _joint(engine: Any, load: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``load`` of all ranks divided by their tokens, and what a token counts for in this rank's loss."""
    ranks = engine.topology.data
    sums = ranks.all_reduce(torch.cat([load, counts.sum()[None]]), TAG).wait()
    tokens = sums[-1].clamp(min=1.0)
    return sums[:-1] / tokens, ranks.world_size / tokens
