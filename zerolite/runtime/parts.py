"""Before there is an engine: of a whole model, the part that this rank has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from zerolite.accelerator import is_dry_run
from zerolite.comm import HostGroup, Topology
from zerolite.config import ZeroliteConfig
from zerolite.runtime.agreement import check_agreement, describe_config, describe_process, joined
from zerolite.runtime.full_state import guard_parts
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
        _cut(model, config, topology, device)
    guard_parts(model, topology)
    if staged is not None:
        loss_fn = staged.loss_fn
    return staged if topology.pipe.world_size > 1 else None, loss_fn


def _cut(model: torch.nn.Module, config: ZeroliteConfig, topology: Topology, device: torch.device) -> None:
    """A plan may be wrong, or match nothing, on one stage alone: all of them raise."""
    from zerolite import tensor_parallel
    from zerolite.tensor_parallel.plan import unmatched

    stages = topology.pipe.world_size
    if stages == 1 or is_dry_run():
        tensor_parallel.apply(model, config.tensor_parallel, topology.tensor, device, stage=stages > 1)
        return
    unused: list[str] = []
    error: ValueError | None = None
    try:
        unused = tensor_parallel.apply(model, config.tensor_parallel, topology.tensor, device, stage=True)
    except ValueError as wrong:
        error = wrong
    told = HostGroup(topology.pipe, "tensor parallelism").gather((None if error is None else str(error), unused))
    for stage, (said, _) in enumerate(told):
        if said is not None:
            raise error or ValueError(f"{said} (stage {stage + 1} of {stages})")
    nowhere = set.intersection(*(set(of_stage) for _, of_stage in told))
    if nowhere:
        raise ValueError(f"tensor_parallel.plan: {unmatched(min(nowhere), ())}, on any stage")
