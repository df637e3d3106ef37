"""Memory check at ``zerolite.initialize``, and choice of the stage if the config says "auto"."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from zerolite.comm import Communicator, HostGroup, Topology, largest, raise_together
from zerolite.comm.ranks import name_ranks
from zerolite.config import ConfigError, ZeroliteConfig
from zerolite.engine.build import Arguments
from zerolite.planning.available import available_memory
from zerolite.planning.dry_run import Job, run
from zerolite.planning.errors import PlanError
from zerolite.planning.host_room import (
    Room,
    Shortage,
    bytes_of_parameters,
    describe,
    find_room,
    find_shortage,
    is_ample,
    itemised,
    offloads,
)
from zerolite.planning.make import plan_of, silent, with_defaults
from zerolite.planning.rank_grid import Grid
from zerolite.planning.result import Plan, counted, item_label
from zerolite.planning.settings import cheapest, with_zero
from zerolite.planning.skeleton import DrySkeleton
from zerolite.utils.memory_tags import ACTIVATIONS, BUCKETS, COMPUTE, MASTERS, STATES
from zerolite.utils.sizes import format_size

logger = logging.getLogger("zerolite")

FOR_STATES = 0.8
"""Share of the free memory for model states with stage "auto". The rest is for activations, which are unknown before
the first batch."""

_BYTES = {"cuda": 32, "cpu": 64}
"""Upper bound of bytes per parameter over all stages and precisions, by device type, with states of Adam's size. These
are eight numbers in fp32: parameter, original parameter, gradient, bucket, master, two moments, one copy. On the CPU
there are regions of shared memory too."""


def choose_stage(
    model: torch.nn.Module, config: ZeroliteConfig, arguments: Arguments, topology: Topology, device: torch.device
) -> tuple[ZeroliteConfig, Plan | None]:
    """Replace the stage "auto" by a number.

    Of the stages that need at most :data:`FOR_STATES` of the free memory it is the one that sends the least, then the
    lowest. If there is none, it is the stage that needs the least. The free memory is that of the rank with the least.
    Ranks may have different parts of the model, so all use the highest stage that a rank chooses. Rank 0 logs the
    reason. Called on all ranks.

    Args:
        model: this rank's part of it.
        config: resolved.
        arguments: the engine's arguments.
        topology: all ranks.
        device: this rank's.

    Returns:
        The config with the stage, and this rank's plan of that stage if it has made one.
    """
    if config.zero_optimization.stage != "auto":
        return config, None
    world = topology.world
    stages = _possible_stages(config)
    least, most = largest([-_available(model, device), _upper_bound(model, device)], world, device, "memory")
    limit = int(-least * FOR_STATES)
    if most <= limit:
        _log(world, f"stage {stages[0]}: model states need {format_size(most)} at most, of {format_size(-least)}")
        return with_zero(config, stage=stages[0]), None

    def plan_stage(stage: int) -> Plan:
        return _dry_run(model, with_zero(config, stage=stage), arguments, topology.data, device, limit)

    plans, refusal = _plan_stages(stages, plan_stage, limit)
    raise_together(world, device, "memory", refusal, "zerolite.initialize", PlanError)
    chosen = cheapest(plans)
    best = plans[chosen] if chosen is not None else min(plans, key=lambda plan: plan.peak.bytes)
    (stage,) = largest([best.stage], world, device, "memory")
    needs = ", ".join(f"stage {plan.stage} {format_size(plan.peak.bytes)}" for plan in plans)
    below = f"{format_size(limit)}, 80 % of what is free, without activations ({needs})"
    if chosen is None:
        _log(world, f"stage {stage}: none stays below {below}", logging.WARNING)
    else:
        _log(world, f"stage {stage}: the least traffic of those that stay below {below}")
    return with_zero(config, stage=stage), next((plan for plan in plans if plan.stage == stage), None)


def _plan_stages(
    stages: Sequence[int], plan_stage: Callable[[int], Plan], limit: int
) -> tuple[list[Plan], Exception | None]:
    """Plan ``stages``, without those that cannot be chosen. Return the plans, and an error if there are none.

    Stage 1 comes first: its states are lower bounds for stages 0 and 2, which mostly need no plan then.
    """
    plans: list[Plan] = []
    errors: list[Exception] = []
    for stage in sorted(stages, key=(1, 0, 2, 3).index):
        if _cannot_be_chosen(stage, plans, limit):
            continue
        try:
            plans.append(plan_stage(stage))
        except Exception as error:  # for example an optimizer that works at stage 0 only
            errors.append(error)
    return plans, None if plans else _refusal(errors[0])


def _cannot_be_chosen(stage: int, plans: list[Plan], limit: int) -> bool:
    """Return True if a stage needs no plan.

    Stages 2 and 3 need none if a lower one fits, because that one sends no more. Stage 2 needs none if the states that
    it shares with stage 1 are too large. Stage 0 needs none if the states that stage 1 shards are too large without
    sharding.
    """
    if stage >= 2 and any(plan.fits for plan in plans):
        return True
    if stage not in (0, 2) or not plans or plans[0].stage != 1:
        return False
    states, parts = plans[0].states, plans[0].world_size if stage == 0 else 1
    return states[COMPUTE] + (states[MASTERS] + states[STATES]) * parts > limit


def _possible_stages(config: ZeroliteConfig) -> list[int]:
    """Return the stages that the other keys of ``config`` allow. Raises ConfigError if there is none."""
    possible, refused = [], []
    for stage in range(4):
        try:
            with_zero(config, stage=stage)
        except ConfigError as error:
            refused.append(error)
        else:
            possible.append(stage)
    if not possible:
        raise refused[-1]
    return possible


def _refusal(error: Exception) -> Exception:
    """Return ``error`` of a dry run if its message is about the job; otherwise a PlanError that quotes it."""
    if isinstance(error, (ConfigError, ValueError, PlanError)):
        return error
    refusal = PlanError(
        f'zero_optimization.stage "auto" plans the job on tensors without memory, which failed with '
        f"{type(error).__name__}: {error}; give a stage, 0 to 3"
    )
    refusal.__cause__ = error
    return refusal


def check_memory(
    model: torch.nn.Module,
    config: ZeroliteConfig,
    arguments: Arguments,
    topology: Topology,
    device: torch.device,
    plan: Plan | None = None,
) -> None:
    """Raise MemoryError on all ranks, or log a warning, if a rank has too little memory for the engine.

    Activations are not counted. The memory is the device's and, with offload, the host's and the disk's. Called on all
    ranks; it costs one small all-reduce if all ranks have enough.

    Args:
        model: this rank's part of it.
        config: resolved; ``memory_check`` chooses between error, warning and no check.
        arguments: the engine's arguments.
        topology: all ranks.
        device: this rank's.
        plan: the plan, if :func:`choose_stage` has made it.
    """
    if config.memory_check == "off":
        return
    free = _available(model, device)
    world = topology.world
    room = find_room(model, config, world) if offloads(config) else None
    short: Shortage | None = None
    if _upper_bound(model, device) > free or not (room is None or is_ample(room, config, _numel(model))):
        try:
            plan = plan or _dry_run(model, config, arguments, topology.data, device, free)
        except Exception as error:  # maybe on this rank alone; if the job is wrong, the engine raises a better error
            logger.warning(
                "memory_check: no plan can be made (%s: %s); the engine is made without the check",
                type(error).__name__,
                error,
            )
        else:
            short = _shortage(plan.model_copy(update={"device_memory": free}), room, device, topology)
    if not largest([int(short is not None)], world, device, "memory")[0]:
        return
    message = _message(short, world)
    if config.memory_check == "error":
        raise MemoryError(message)
    logger.warning("%s", message)


def _available(model: torch.nn.Module, device: torch.device) -> int:
    return available_memory(device) + bytes_of_parameters(model, device.type)


def _numel(model: torch.nn.Module) -> int:
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())


def _upper_bound(model: torch.nn.Module, device: torch.device) -> int:
    return _BYTES.get(device.type, 64) * _numel(model) + sum(
        buffer.numel() * buffer.element_size() for buffer in model.buffers()
    )


def _dry_run(
    model: torch.nn.Module,
    config: ZeroliteConfig,
    arguments: Arguments,
    comm: Communicator,
    device: torch.device,
    limit: int,
) -> Plan:
    """Plan this rank without a batch, and change nothing of the real job.

    The rank's part of the model is planned like a full model on the ranks of ``comm``.
    """
    copies: list[DrySkeleton] = []

    def make_model() -> torch.nn.Module:
        copies.append(DrySkeleton(model))
        return copies[0].model

    job = Job(
        make_model=make_model,
        config=_without_grid(config),
        grid=Grid(data=comm.world_size),
        rank=comm.rank,
        device="cuda" if device.type == "cuda" else "cpu",
        make_arguments=lambda: copies[0].arguments(model, arguments),
        divided=True,
    )
    outcome = run(job)
    return _own_share(plan_of(job, outcome, None, limit), outcome.mapped_from_peers)


def _without_grid(config: ZeroliteConfig) -> ZeroliteConfig:
    """Return ``config`` without tensor_parallel and pipeline: the model has been divided already."""
    return with_defaults(silent(config), ("tensor_parallel", "pipeline"))


def _own_share(plan: Plan, mapped_from_peers: int) -> Plan:
    """Subtract the shared memory that other ranks of the host allocate.

    Each rank is compared with an equal share of the host's free memory, so each counts only its own part.
    """
    peaks = []
    for peak in (plan.peak, plan.initialize_peak, plan.step_peak):
        less = min(mapped_from_peers, peak.items[BUCKETS])
        items = {**peak.items, BUCKETS: peak.items[BUCKETS] - less}
        peaks.append(peak.model_copy(update={"bytes": peak.bytes - less, "items": items}))
    peak = max(peaks, key=lambda peak: peak.bytes)
    return plan.model_copy(update={"peak": peak, "host_peak": plan.host_peak - min(mapped_from_peers, plan.host_peak)})


def _shortage(plan: Plan, room: Room | None, device: torch.device, topology: Topology) -> Shortage | None:
    """Return the shortage on the device, otherwise the one on the host; None if there is none."""
    if plan.fits:
        return None if room is None else find_shortage(plan, room)
    grid, here = ("", "") if topology.trivial else (f" ({topology.grid})", " here")
    named = {item_label(item): nbytes for item, nbytes in plan.peak.items.items()}
    named["gradients not yet in their buckets"] = named.pop(ACTIVATIONS)
    piped = topology.pipe.world_size > 1
    higher = "" if piped else 'a higher zero_optimization.stage ("auto" chooses), '
    offload = "more stages" if piped else "zero_optimization.offload_optimizer"
    job = describe(plan, counted(topology.world.world_size, "rank") + grid, here)
    return Shortage(
        f"{job} {format_size(plan.peak.bytes)} on {device} "
        f"without activations, and {format_size(plan.device_memory or 0)} are free: {itemised(named)}",
        f"Use more ranks, {higher}{offload}, or a device with more memory",
    )


def _message(short: Shortage | None, comm: Communicator) -> str:
    """Return the same message on all ranks: the shortage of the first rank with one, and the list of such ranks."""
    shortages = [short] if comm.world_size == 1 else HostGroup(comm, "memory").gather(short)
    by_rank = {rank: of_rank for rank, of_rank in enumerate(shortages) if of_rank is not None}
    ranks = list(by_rank)
    reason, remedy = by_rank[ranks[0]]
    return (
        f"zerolite.initialize: {reason} (memory_check; on {name_ranks(ranks)} of {comm.world_size}). {remedy}; "
        '`zerolite plan` shows what each stage needs. "memory_check": "warn" tries it nevertheless'
    )


def _log(comm: Communicator, message: str, level: int = logging.INFO) -> None:
    if comm.main:
        logger.log(level, 'zero_optimization.stage "auto": %s', message)
