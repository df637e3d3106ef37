"""One rank and the others: joining the group, values and times of all ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.setting import Setting


def join_group(rank: int, setting: Setting, store: str) -> None:
    """Make this process, on its node, rank `rank` of a default group that meets at the file `store`."""
    local, master = setting.world_size, "127.0.0.1"
    if setting.nodes:
        local //= len(setting.nodes)
        node, master = setting.nodes[rank // local], setting.nodes[0].address
        node.enter()
        os.environ["GLOO_SOCKET_IFNAME"] = node.interface
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % local), WORLD_SIZE=str(setting.world_size))
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # its start and stop messages are no news here
    os.environ.update(LOCAL_SIZE=str(local), MASTER_ADDR=master, MASTER_PORT="0")
    if setting.device == "cpu":
        torch.set_num_threads(1)
        backend, device_id = "gloo", None
    else:
        torch.cuda.set_device(rank)
        backend, device_id = "nccl", torch.device("cuda", rank)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=setting.world_size, device_id=device_id
    )


def mean_over_ranks(values: list[float], device: str) -> list[float]:
    """Average each value over the ranks of the default group."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    mean: list[float] = (tensor / dist.get_world_size()).tolist()
    return mean


def together(action: Callable[[], object]) -> float:
    """Return seconds from the moment when all ranks begin until the last one is ready."""
    dist.barrier()
    start = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def settled(action: Callable[[], object]) -> float:
    """Do the same when nothing waits to be written to a disk."""
    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
    return together(action)


def most_of_ranks(count: int | None, device: str) -> int | None:
    """Return the largest of the ranks' counts; None if there are none."""
    if count is None:
        return None
    most = torch.tensor(count, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


class StepClock:
    """Seconds between ticks. On CUDA by events on the current stream, so that timing adds no synchronisation."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.marks: list[Any] = []
        self.tick()

    def tick(self) -> None:
        if self.cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            self.marks.append(mark)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if self.cuda:
            torch.cuda.synchronize()
            return [before.elapsed_time(after) / 1e3 for before, after in pairs]
        return [after - before for before, after in pairs]
