"""Before there is an engine: of a whole model, the part that this rank has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from zerolite.comm import Topology
from zerolite.config import ZeroliteConfig
from zerolite.runtime.agreement import check_agreement, describe_config, describe_process, joined
from zerolite.runtime.micro_batch import LossFunction

if TYPE_CHECKING:
    from zerolite.pipe import Staged


def part_of_model(
    model: torch.nn.Module,
    config: ZeroliteConfig,
    topology: Topology,
    device: torch.device,
    loss_fn: LossFunction | None,
) -> tuple[Staged | None, LossFunction | None]:
    """Leave in ``model`` this rank's stage, and of its layers this rank's part. Gives what the engine needs of the
    pipeline, None without one, and the loss function: the given one, or the model's. Called on all ranks."""
    staged: Any = None
    if not topology.trivial:
        described = joined(describe_process(), describe_config(config))
        different = "zerolite.initialize: the ranks hold different configs or versions"
        check_agreement(described, topology.world, device, different)
    if topology.pipe.world_size > 1 or getattr(model, "is_pipeline_module", False):
        from zerolite import pipe

        staged = pipe.prepare(model, config.pipeline, topology, device, loss_fn)
    if topology.tensor.world_size > 1:
        from zerolite import tensor_parallel

        tensor_parallel.apply(model, config.tensor_parallel, topology.tensor, device)
    if staged is not None:
        loss_fn = staged.loss_fn
    return staged if topology.pipe.world_size > 1 else None, loss_fn
