"""``deepspeed.comm``: the functions of torch.distributed, and :func:`init_distributed`."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import zerolite.comm
from zerolite.comm import local_rank

_DEFAULT_PORT = 29500


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = _DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start torch.distributed if it is not running, with DeepSpeed's arguments.

    The environment of torchrun, mpirun or srun is always read, also for the port.
    """
    if dist_init_required is False:
        return
    if dist_backend not in (None, "nccl", "gloo"):
        raise ValueError(f'init_distributed: expected dist_backend "nccl", "gloo" or None, got {dist_backend!r}')
    if distributed_port != _DEFAULT_PORT:
        warnings.warn("init_distributed: distributed_port is ignored; set MASTER_PORT instead", stacklevel=2)
    # NCCL has no collectives for tensors on the host, which checkpoints and checks need: the default is both backends.
    backend = None if dist_backend == "nccl" else dist_backend
    zerolite.comm.init_distributed(
        backend,
        init_method,
        rank=None if rank < 0 else rank,
        world_size=None if world_size < 0 else world_size,
        timeout=timeout,
    )


def inference_all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None) -> Any:
    """Sum ``tensor`` over the ranks in place, as ``all_reduce`` does. Neither has a gradient."""
    options = {} if op is None else {"op": op}
    return dist.all_reduce(tensor, group=group, **options)


def get_local_rank() -> int:
    """Return this process's rank on its host."""
    return local_rank()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(dist, name)
