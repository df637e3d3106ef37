"""Processes that start torch.distributed, each from an environment of its own."""

from __future__ import annotations

import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerolite
from zerolite.comm import store_barrier


def start(
    places: list[dict[str, str] | None],
    env: dict[str, str] | None = None,
    timeout: float = 20.0,
    late: float = 0.0,
    warn_after: float = 30.0,
    **arguments: Any,
) -> dict[str, Any]:
    """Worker i starts with the variables ``places[i]`` (those of torchrun by its own number where it is None: it
    does not arrive) and ``env``. late: seconds that the last worker takes to come."""
    place = places[int(os.environ["RANK"])]
    result: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "error": "", "warnings": []}
    if place is None:
        return result
    if int(os.environ["RANK"]) == len(places) - 1:
        time.sleep(late)
    os.environ.update({**place, **(env or {})})
    for name in {"RANK", "WORLD_SIZE"} - set(place):
        del os.environ[name]
    handler = _Collect(result["warnings"])
    store_barrier.logger.addHandler(handler)
    before, store_barrier._FIRST_WARNING_S = store_barrier._FIRST_WARNING_S, warn_after
    began = time.monotonic()
    try:
        zerolite.init_distributed("gloo", timeout=timeout, **arguments)
        result["sum"] = float(_sum_of_ranks())
    except (RuntimeError, ValueError) as error:
        result["error"] = str(error)
    finally:
        result["seconds"] = time.monotonic() - began
        store_barrier._FIRST_WARNING_S = before
        store_barrier.logger.removeHandler(handler)
        zerolite.destroy()
    return result


def start_and_look(env: dict[str, str]) -> dict[str, Any]:
    """The addresses on which this process listens once it has started, as /proc/net has them."""
    os.environ.update(env)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    zerolite.init_distributed("gloo", timeout=20)
    _sum_of_ranks()
    sockets = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    ports = [line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets]
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    dist.barrier()
    zerolite.destroy()
    return {"ports": ports, "interface": interface, "after": os.environ.get("GLOO_SOCKET_IFNAME")}


def _is_link(descriptor: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{descriptor}")


def start_again(env: dict[str, str], times: int) -> list[float]:
    """Start and end several times in one process, at one address."""
    os.environ.update(env)
    sums = []
    for _ in range(times):
        zerolite.init_distributed("gloo", timeout=20)
        sums.append(float(_sum_of_ranks()))
        zerolite.destroy()
    return sums


def _sum_of_ranks() -> torch.Tensor:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total


class _Collect(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__()
        self.messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
