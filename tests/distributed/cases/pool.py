"""Cases that behave well and badly, for the tests of the worker pool itself."""

from __future__ import annotations

import os
import random
import signal
import threading
import warnings

import torch
import torch.distributed as dist

kept: list[object] = []


def sum_of_ranks(offset: int) -> dict[str, object]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return {"total": total, "rank": dist.get_rank(), "pid": os.getpid(), "threads": torch.get_num_threads()}


def raise_on(ranks: list[int]) -> None:
    if dist.get_rank() in ranks:
        raise ValueError(f"planned failure on rank {dist.get_rank()}")


def raise_on_rank_0_while_others_wait() -> None:
    if dist.get_rank() == 0:
        raise ValueError("planned failure on rank 0")
    dist.barrier()


def wait_forever_on(rank: int) -> None:
    if dist.get_rank() == rank:
        a_wait_that_never_ends()


def a_wait_that_never_ends() -> None:
    threading.Event().wait()


def die_on(rank: int, exit_code: int | None) -> None:
    if dist.get_rank() == rank:
        print("last words", flush=True)
        if exit_code is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            os._exit(exit_code)
    else:
        dist.barrier()


def leave_a_group() -> None:
    kept.append(dist.new_group([0, 1]))


def leave_a_collective_on_rank_0() -> None:
    if dist.get_rank() == 0:
        kept.append(dist.all_reduce(torch.zeros(5), async_op=True))


def return_what_cannot_be_pickled() -> object:
    return threading.Lock()


def disturb_globals() -> None:
    warnings.simplefilter("error")
    os.environ["RANK"] = "77"
    torch.manual_seed(123)
    random.seed(123)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)


def read_globals() -> tuple[object, ...]:
    warnings.warn("not an error", stacklevel=1)
    state = (os.environ["RANK"], torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype())
    return (*state, torch.rand(2).tolist(), random.random())
