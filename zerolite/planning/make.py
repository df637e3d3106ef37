"""`plan`: makes a `Plan` of a model, a config and a number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zerolite.config import ZeroliteConfig, load_config
from zerolite.planning.clock import step_time
from zerolite.planning.dry_run import DryRun, Job, dry_grid, run
from zerolite.planning.result import Machine, Plan, PlanError, StepTime
from zerolite.planning.training_step import required_parameters
from zerolite.planning.wire import Wires
from zerolite.utils.text import format_size, parse_size

ConfigLike = ZeroliteConfig | dict[str, Any] | str | os.PathLike[str]

_SILENT = (
    *("csv_monitor", "tensorboard", "wandb", "flops_profiler", "steps_per_print"),
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
        rank: the rank to plan; None: rank 0.
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
    memory: dict[str, Any] = {
        name: None if size is None else parse_size(size)
        for name, size in (("device_memory", device_memory), ("host_memory", host_memory))
    }
    loaded = load_config(config)
    if loaded.pipeline.stages > 1:
        raise PlanError(
            f"expected a job without a pipeline, got pipeline.stages {loaded.pipeline.stages}: plan the layers of one "
            "stage as a model of their own, on the ranks of a stage. With 1f1b it has the activations of as many "
            "micro-batches at once as there are stages behind it, and its own"
        )
    with_samples = dry_grid(loaded, rank or 0, world_size, device, nodes).batch.world_size
    resolved = silent(loaded).resolve(with_samples)
    batches = batch_maker(batch, resolved.train_micro_batch_size_per_gpu)
    made = run(Job(model_fn, resolved, world_size, rank or 0, device, nodes, batches, loss))
    return _plan_of(made, machine, memory)


def silent(config: ZeroliteConfig) -> ZeroliteConfig:
    """Return ``config`` without the keys that print, write and measure."""
    fields = type(config).model_fields
    return config.model_copy(update={name: fields[name].get_default(call_default_factory=True) for name in _SILENT})


def _check_arguments(
    world_size: int, nodes: int | None, rank: int | None, device: str, machine: Machine | None
) -> None:
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"expected world_size, a number of ranks, 1 or more, got {world_size!r}")
    if rank is not None and not 0 <= rank < world_size:
        raise ValueError(f"expected rank from 0 to {world_size - 1} (world_size - 1), got {rank}")
    if nodes is not None and (nodes < 1 or world_size % nodes):
        raise ValueError(
            f"expected nodes that divide world_size {world_size} evenly, got {nodes}; every node has the same number "
            "of processes"
        )
    if device not in ("cuda", "cpu"):
        raise ValueError(f"expected device 'cuda' or 'cpu', got {device!r}")
    if machine is not None and (lacking := machine.lacks(world_size, nodes)):
        raise ValueError(f"the time of a step of {world_size} ranks needs {lacking}")


def batch_maker(batch: Callable[..., Any] | None, size: int | None) -> Callable[[], Any] | None:
    """Return ``batch`` as a function without arguments. If it takes one, that is the micro-batch ``size``."""
    if batch is None or not required_parameters(batch):
        return batch
    if size is None:
        raise PlanError(
            "the batch function takes the micro-batch size, and the config has none: set train_micro_batch_size_per_gpu"
        )
    return lambda: batch(size)


def _plan_of(made: DryRun, machine: Machine | None, memory: dict[str, Any]) -> Plan:
    job, config, grid = made.job, made.job.config, made.grid
    untimed = _why_untimed(job)
    time: StepTime | None = None
    if machine is not None and not untimed:
        nodes = job.nodes or 1
        wires = Wires(machine, grid, nodes, messages=job.device == "cpu" and nodes > 1)
        time = step_time(made.events, machine, wires)
    return Plan(
        stage=config.zero_optimization.stage,
        world_size=job.world_size,
        nodes=job.nodes,
        rank=job.rank,
        device=job.device,
        precision=_precision(config),
        micro_batch=config.train_micro_batch_size_per_gpu,
        accumulation=config.gradient_accumulation_steps or 1,
        batch=None if job.batch is None else _describe(job.batch()),
        grid=_describe_grid(made),
        data_parallel=grid.data,
        time=time,
        notes=list(_notes(made, untimed if machine is not None else "")),
        **made.fields,
        **memory,
    )


def _why_untimed(job: Job) -> str:
    """Return why the time of a step is not computed; "" if it is."""
    zero = job.config.zero_optimization
    if job.batch is None:
        return "needs a batch"
    if zero.offload_optimizer.enabled or zero.offload_param.enabled:
        return "is not computed with offload, whose copies the clock does not know"
    return ""


def _describe_grid(made: DryRun) -> str:
    """Return the dimensions with several ranks, as in "data 4 × tensor 2"; "" for data parallelism alone."""
    grid, experts = made.grid, made.job.config.expert_parallel.ranks
    sizes = {"data": grid.data // grid.sequence, "sequence": grid.sequence, "tensor": grid.tensor}
    text = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    if experts > 1:
        return f"{text}, experts over {experts}"
    return "" if grid.sequence * grid.tensor == 1 else text


def _precision(config: ZeroliteConfig) -> str:
    if config.torch_autocast.enabled:
        return f"autocast to {config.torch_autocast.dtype}"
    return "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"


def _describe(batch: Any) -> str:
    if isinstance(batch, dict):
        return ", ".join(f"{name}: {_describe(value)}" for name, value in batch.items())
    if isinstance(batch, tuple):
        return ", ".join(map(_describe, batch))
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    return type(batch).__name__


def _notes(made: DryRun, untimed: str) -> Iterator[str]:
    job = made.job
    if untimed:
        yield f"The time of a step {untimed}."
    if job.batch is None:
        yield "No batch was given: activations are not in the numbers."
    elif made.recurrent:
        yield (
            "Recurrent layers were run step by step. Their fused kernels keep other tensors for backward, which may "
            "take half as much memory again."
        )
    if job.batch is not None and job.config.expert_parallel.ranks > 1:
        yield "All sets of experts are taken to be chosen equally often, so that every expert has the same load."
    if made.unknown:
        yield (
            f"The FLOPs leave out {', '.join(sorted(made.unknown))}, which have no known formula. "
            "Add one with torch.utils.flop_counter.register_flop_formula."
        )
    if job.device == "cuda":
        yield (
            "The numbers do not contain the driver's context, NCCL's buffers, cuBLAS workspaces and fragmentation, "
            "which take 1 to 2 GB on most devices."
        )
        yield "The plan's tensors are on the CPU, so attention and similar operators allocate as their CPU kernels do."
        if made.original_model:
            yield (
                f"Every process first makes the full model, which takes {format_size(made.original_model)} of host "
                "memory. zerolite.zero.Init partitions it while it is made."
            )
