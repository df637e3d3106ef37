"""`plan`: makes a `Plan` of a model, a config and a number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zerolite.config import ConfigError, ZeroliteConfig, load_config
from zerolite.config.parallelism import TWO_CHUNKS
from zerolite.planning.clock import step_time
from zerolite.planning.dry_run import Job, Outcome, run_stages
from zerolite.planning.result import Items, Machine, Peak, Plan, PlanError, StepTime, TimePoint
from zerolite.planning.tracker import PeakMoment
from zerolite.planning.traffic import grid_of, resolve, summarize
from zerolite.planning.training_step import required_parameters
from zerolite.planning.wire import Wires
from zerolite.utils.memory_tags import BUFFERS, DEVICE, DISK, HOST, ITEMS, MODEL_STATES
from zerolite.utils.text import format_size, parse_size

ConfigLike = ZeroliteConfig | dict[str, Any] | str | os.PathLike[str]

_SILENT = (
    *("csv_monitor", "jsonl_monitor", "tensorboard", "wandb", "flops_profiler", "steps_per_print"),
    *("wall_clock_breakdown", "memory_breakdown", "dump_state"),
)
"""Keys of the config that print, write or measure, and change no numbers of a plan."""


def plan(
    model_fn: Callable[[], torch.nn.Module],
    config: ConfigLike,
    world_size: int,
    *,
    nodes: int | None = None,
    rank: int | None = None,
    device: str = "cuda",
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    batch: Callable[..., Any] | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    machine: Machine | None = None,
) -> Plan:
    """Plan memory and traffic of one rank of a training job, and the time of a step, on tensors without memory.

    Args:
        model_fn: makes the model: an ordinary one, in ``zerolite.zero.Init``, or on the meta device.
        config: the engine's config, which sets the grid of the ranks.
        world_size: number of all ranks.
        nodes: number of hosts, which the ranks fill evenly and in order.
        rank: the rank to plan; None: rank 0, or with a pipeline the first rank of the stage with the highest peak.
        device: "cuda" or "cpu", for the communicators and code paths of that kind.
        device_memory: memory of each rank's device, in bytes or as text such as "80GB".
        host_memory: memory of each host, which its ranks share, in the same forms.
        batch: ``batch()`` or ``batch(micro_batch_size)`` makes the arguments of one forward, a tuple, or a dict by
            name. Without it no forward runs, and activations are not in the numbers.
        loss: function of the model's output, or of outputs and targets (then a batch is a pair of inputs and targets);
            default: the output itself, its ``loss``, or the mean of its first floating tensor.
        machine: speeds of devices and wires, for the time of a step.

    Raises:
        PlanError: the model reads values of tensors, or the engine refuses the job (RefusedError).
        ConfigError: for the config.
        ValueError: for the other arguments.
    """
    _check_arguments(world_size, nodes, rank, device, machine)
    memory = _memory("device_memory", device_memory), _memory("host_memory", host_memory)
    loaded = load_config(config)
    _check_ring(loaded, nodes)
    grid, resolved = grid_of(loaded, world_size), resolve(silent(loaded), world_size)
    batches = batch_maker(batch, resolved.train_micro_batch_size_per_gpu)
    job = Job(model_fn, resolved, grid, rank or 0, device, nodes, batches, loss)
    outcomes = run_stages(job)
    plans = {stage: _plan_of(job.at_stage(stage), made, machine, *memory) for stage, made in outcomes.items()}
    if grid.pipe == 1:
        return plans[0]
    chosen = None if rank is None else plans[job.stage]
    return _with_stages(chosen or max(plans.values(), key=lambda made: made.peak.bytes), plans, outcomes)


def _with_stages(chosen: Plan, plans: dict[int, Plan], outcomes: dict[int, Outcome]) -> Plan:
    """Return the plan ``chosen`` with those of all pipeline stages, and the parameters of all."""
    update = {
        "parameters": sum(one.parameters - one.tied_parameters for one in outcomes.values()),
        "trained_parameters": sum(one.trained_parameters - one.tied_parameters for one in outcomes.values()),
        "stages": [made.model_copy(update={"timeline": [], "notes": []}) for made in plans.values()],
    }
    return chosen.model_copy(update=update)


def silent(config: ZeroliteConfig) -> ZeroliteConfig:
    """Return ``config`` without the keys that print, write and measure."""
    fields = type(config).model_fields
    return config.model_copy(update={name: fields[name].get_default(call_default_factory=True) for name in _SILENT})


def _check_arguments(
    world_size: int, nodes: int | None, rank: int | None, device: str, machine: Machine | None
) -> None:
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"plan: expected world_size, a number of ranks, 1 or more, got {world_size!r}")
    if rank is not None and not 0 <= rank < world_size:
        raise ValueError(f"plan: expected rank from 0 to {world_size - 1} (world_size - 1), got {rank}")
    if nodes is not None and (nodes < 1 or world_size % nodes):
        raise ValueError(
            f"plan: expected nodes that divide world_size {world_size} evenly, got {nodes}; every node has the same "
            "number of processes"
        )
    if device not in ("cuda", "cpu"):
        raise ValueError(f"plan: expected device 'cuda' or 'cpu', got {device!r}")
    if machine is not None and (lacking := machine.lacks(world_size, nodes)):
        raise ValueError(f"plan: the time of a step of {world_size} ranks needs {lacking}")


def _check_ring(config: ZeroliteConfig, nodes: int | None) -> None:
    block = config.sequence_parallel
    if block.size > 1 and block.attention != "ulysses" and (nodes or 1) > 1:
        sentence = (
            f'expected "ulysses" in a plan of several nodes, which does not count rings across them yet, got '
            f'"{block.attention}"; plan with "ulysses", or without the number of nodes'
        )
        raise ConfigError([("sequence_parallel.attention", sentence)])


def _memory(name: str, size: int | str | None) -> int | None:
    try:
        return None if size is None else parse_size(size)
    except ValueError as error:
        raise ValueError(f"plan: {name}: {error}") from None


def batch_maker(batch: Callable[..., Any] | None, size: int | None) -> Callable[[], Any] | None:
    """Return ``batch`` as a function without arguments. If it takes one, that is the micro-batch ``size``."""
    if batch is None:
        return None
    if not required_parameters(batch):
        return batch
    if size is None:
        raise PlanError(
            "the batch function takes the micro-batch size, and the config has none: set train_micro_batch_size_per_gpu"
        )
    return lambda: batch(size)


def _time(job: Job, outcome: Outcome, machine: Machine | None) -> StepTime | None:
    """Return the time of a step; None where it is not asked for, or where the clock does not know all of it."""
    if machine is None or why_untimed(job):
        return None
    nodes = job.nodes or 1
    messages = job.device == "cpu" and nodes > 1
    return step_time(outcome.events, machine, Wires(machine, job.grid, nodes, messages))


def why_untimed(job: Job) -> str:
    """Return why the time of a step is not computed; "" if it is."""
    zero = job.config.zero_optimization
    if job.batch is None:
        return "needs a batch"
    if job.grid.pipe > 1:
        return "is not computed for pipelines, whose stages wait for each other"
    if zero.offload_optimizer.enabled or zero.offload_param.enabled:
        return "is not computed with offload, whose copies the clock does not know"
    return ""


def _plan_of(
    job: Job, outcome: Outcome, machine: Machine | None, device_memory: int | None, host_memory: int | None
) -> Plan:
    """Make the plan of one rank from its dry run. Sizes in bytes."""
    config = job.config
    # The parts are on ranks 0, 1, ..., 0, 1, ..., so the last rank sends to the first.
    looped = config.pipeline.chunks_per_rank > 1 and config.pipeline.schedule not in TWO_CHUNKS
    peaks = [_peak(moment, outcome) for moment in (outcome.initialize, outcome.warm_up, outcome.step)]
    on_device = outcome.largest[DEVICE]
    states = dict.fromkeys(ITEMS, 0) | {item: on_device[item] for item in (*MODEL_STATES, BUFFERS)}
    return Plan(
        model=outcome.model_name,
        **_describe_job(job),
        nodes=job.nodes,
        parameters=outcome.parameters,
        trained_parameters=outcome.trained_parameters,
        rank_parameters=outcome.rank_parameters,
        states=states,
        at_rest=_items(outcome.at_rest),
        peak=max(peaks, key=lambda peak: peak.bytes),
        initialize_peak=peaks[0],
        step_peak=peaks[2],
        timeline=[TimePoint(items=items, phase=phase, module=module) for items, phase, module in outcome.timeline],
        traffic=summarize(outcome.recorder.calls, job.grid, job.nodes, job.stage, looped),
        host_waits=outcome.host_waits if job.device == "cuda" else 0,
        host=_items_or_none(outcome.largest[HOST]),
        disk=_items_or_none(outcome.largest[DISK]),
        host_peak=outcome.host_peak,
        checkpoint=outcome.checkpoint,
        flops=None if outcome.flops is None else outcome.flops.model,
        recomputed_flops=0 if outcome.flops is None else outcome.flops.recomputed,
        time=_time(job, outcome, machine),
        device_memory=device_memory,
        host_memory=host_memory,
        notes=list(_notes(job, outcome, machine is not None)),
    )


def _describe_job(job: Job) -> dict[str, Any]:
    """Return the fields of a plan that its job has."""
    config, grid = job.config, job.grid
    return {
        "stage": config.zero_optimization.stage,
        "world_size": job.world_size,
        "rank": job.rank,
        "device": job.device,
        "precision": _precision(config),
        "micro_batch": config.train_micro_batch_size_per_gpu,
        "accumulation": config.gradient_accumulation_steps or 1,
        "batch": _describe_batch(job),
        "pipeline_stages": grid.pipe,
        "data_parallel": grid.data,
        "tensor_parallel": grid.tensor,
        "pipeline_stage": job.stage,
        "schedule": config.pipeline.schedule if grid.pipe > 1 else None,
    }


def _items(items: dict[str, int]) -> Items:
    return {item: items[item] for item in ITEMS}


def _items_or_none(items: dict[str, int]) -> Items | None:
    return _items(items) if any(items[item] for item in ITEMS) else None


def _peak(moment: PeakMoment, outcome: Outcome) -> Peak:
    point = moment.point
    return Peak(
        bytes=moment.nbytes,
        items=moment.items,
        phase=point.phase,
        module=point.module,
        module_class=outcome.classes.get(point.module, ""),
        op=point.op.removesuffix(".default"),
    )


def _precision(config: ZeroliteConfig) -> str:
    if config.fp16.enabled:
        return "fp16"
    if config.bf16.enabled:
        return "bf16"
    if config.torch_autocast.enabled:
        return f"autocast to {config.torch_autocast.dtype}"
    return "fp32"


def _describe_batch(job: Job) -> str | None:
    if job.batch is None:
        return None
    batch = job.batch()
    if isinstance(batch, dict):
        return ", ".join(f"{name}: {_describe(value)}" for name, value in batch.items())
    return ", ".join(map(_describe, batch if isinstance(batch, tuple) else (batch,)))


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


def _notes(job: Job, outcome: Outcome, timed: bool) -> Iterator[str]:
    if timed and (why := why_untimed(job)):
        yield f"The time of a step {why}."
    if job.batch is None:
        yield "No batch was given: activations are not in the numbers."
    elif outcome.recurrent:
        yield (
            "Recurrent layers were run step by step. Their fused kernels keep other tensors for backward, which may "
            "take half as much memory again."
        )
    if outcome.flops is not None and outcome.flops.unknown:
        yield (
            f"The FLOPs leave out {', '.join(sorted(outcome.flops.unknown))}, which have no known formula. "
            "Add one with torch.utils.flop_counter.register_flop_formula."
        )
    if job.device == "cuda":
        yield (
            "The numbers do not contain the driver's context, NCCL's buffers, cuBLAS workspaces and fragmentation, "
            "which take 1 to 2 GB on most devices."
        )
        yield "The plan's tensors are on the CPU, so attention and similar operators allocate as their CPU kernels do."
        if outcome.original_model:
            yield (
                f"Every process first makes the full model, which takes {format_size(outcome.original_model)} of host "
                "memory. zerolite.zero.Init partitions it while it is made."
            )
