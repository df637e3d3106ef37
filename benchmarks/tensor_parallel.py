"""Tensor parallelism over all ranks, by PyTorch's own API and by zerolite.

PyTorch's is written as its tutorials and torchtitan write it: `parallelize_module` with column- and row-parallel
styles, a vocabulary-parallel embedding and head under `loss_parallel`. Both sides have torch's fused AdamW and clip the
norm over all ranks. All ranks are given all sequences of a step, so that the losses are those of the data-parallel
competitors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.engines import engine_loop, grid_config, pair
from benchmarks.model import GPT
from benchmarks.setting import CLIP, Competitor, Setting, Step, autocast, optimizer_for

PLAN = {
    "token_embedding": "vocab",
    "blocks.*.qkv": "column",
    "blocks.*.project": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "head": "vocab",
}


def build_torch_tensor(model: GPT, setting: Setting, sequence_parallel: bool) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    check_heads(model, setting)
    for block in model.blocks:
        order_heads(block.qkv, setting.world_size)
        block.heads //= setting.world_size
    plan = torch_sequence_plan() if sequence_parallel else torch_plan()
    parallelize_module(model, init_device_mesh(setting.device, (setting.world_size,)), plan)
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    groups = [[p for p in model.parameters() if isinstance(p, DTensor)], *([whole] if whole else [])]
    optimizer = optimizer_for([{"params": group} for group in groups], fused=True)  # no mixture in one fused update

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            with autocast(setting):
                loss = model(tokens, targets)
            loss.backward()
        for group in groups:
            _sum_partial(group)
        norms = [_whole(get_total_norm([p.grad for p in group])) for group in groups]
        norm = torch.stack(norms).norm()
        for group in groups:
            clip_grads_with_norm_(group, CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()
        return _whole(loss.detach())

    return step


def _whole(value: Any) -> Tensor:
    """A DTensor's full value; a plain tensor as it is."""
    full: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full


def _sum_partial(parameters: list[nn.Parameter]) -> None:
    """Sum what ranks have of a gradient each, once: otherwise the norm does it and the update does it again."""
    from torch.distributed.tensor import DTensor, Replicate

    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
            parameter.grad = grad.redistribute(placements=[Replicate()])


def check_heads(model: GPT, setting: Setting) -> None:
    heads = model.blocks[0].heads
    if heads % setting.world_size:
        raise ValueError(
            f"expected --heads to be a multiple of the {setting.world_size} ranks that share them, got {heads}; "
            "say --heads 8"
        )


def order_heads(fused: nn.Linear, ranks: int) -> None:
    """Order the rows [query; key; value] such that each of `ranks` equal parts has the three of its own heads: then the
    even cut of torch's column-parallel style is one by heads."""
    rows = torch.arange(fused.out_features, device=fused.weight.device)
    order = rows.view(3, ranks, -1).transpose(0, 1).flatten()
    with torch.no_grad():
        fused.weight.copy_(fused.weight[order])
        fused.bias.copy_(fused.bias[order])


def torch_plan() -> dict[str, Any]:
    """Norms are computed by every rank."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {
        "token_embedding": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.qkv": ColwiseParallel(),
        "blocks.*.project": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }


def torch_sequence_plan() -> dict[str, Any]:
    """Between the layers that are cut, each rank has a part of the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

    part = Shard(1)
    return {
        "token_embedding": RowwiseParallel(input_layouts=Replicate()),
        "blocks.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=part, use_local_output=True),
        "blocks.*.norm_attention": SequenceParallel(),
        "blocks.*.qkv": ColwiseParallel(input_layouts=part),
        "blocks.*.project": RowwiseParallel(output_layouts=part),
        "blocks.*.norm_mlp": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=part),
        "blocks.*.down": RowwiseParallel(output_layouts=part),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=part, output_layouts=Shard(-1), use_local_output=False),
    }


def build_zerolite_tensor(model: GPT, setting: Setting, sequence_parallel: bool) -> Step:
    import zerolite

    check_heads(model, setting)
    block = {"size": setting.world_size, "plan": PLAN, "sequence_parallel": sequence_parallel}
    return engine_loop(zerolite.initialize(model, grid_config(setting, tensor_parallel=block)))


TENSOR_PARALLEL: list[Competitor] = [
    competitor
    for suffix, options in (("tp", {"sequence_parallel": False}), ("tp-sp", {"sequence_parallel": True}))
    for competitor in pair(suffix, build_torch_tensor, build_zerolite_tensor, options, options)
]
