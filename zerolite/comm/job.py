"""Number of ranks of a job, before and after the rendezvous."""

from __future__ import annotations

import os

import torch.distributed as dist

from zerolite.comm.rendezvous import read_environment


def ranks_of_job() -> int:
    """Return the number of ranks of torch.distributed where it runs, else of the environment; 1 where that says
    nothing."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    found = read_environment(os.environ)
    return 1 if found is None else found.world_size
