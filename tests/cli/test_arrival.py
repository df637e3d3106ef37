"""Ranks that find each other, and sentences about those that do not come."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerolite
from tests.cli.helpers import free_port, output_of
from tests.toolkit.faults import Warnings
from tests.toolkit.pool import Pool
from zerolite.comm import rendezvous
from zerolite.utils.failure_record import EXIT_COUNT, NUMBERED_EXIT

# -------------------------------------------------------------------- what a process of the pool runs


def start_on_rank(
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
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch, Warnings() as warnings:
        patch.setattr(rendezvous, "_FIRST_WARNING_S", warn_after)
        try:
            zerolite.init_distributed("gloo", timeout=timeout, **arguments)
            result["sum"] = float(_sum_of_ranks())
        except (RuntimeError, ValueError) as error:
            result["error"] = str(error)
        result["seconds"] = time.monotonic() - began
        zerolite.destroy()
    return {**result, "warnings": warnings.messages}


def start_and_look(env: dict[str, str]) -> dict[str, Any]:
    """The addresses on which this process listens once it has started, as /proc/net has them."""
    os.environ.update(env)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    zerolite.init_distributed("gloo", timeout=20)
    _sum_of_ranks()
    sockets = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    ports = [line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets]
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    dist.barrier()
    zerolite.destroy()
    return {"ports": ports, "interface": interface, "after": os.environ.get("GLOO_SOCKET_IFNAME")}


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


# -------------------------------------------------------------------- what is said of it


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Three processes without a process group."""
    with Pool(3, init_group=False) as pool:
        yield pool


def ranks(*numbers: int | None, world: int = 3) -> list[dict[str, str] | None]:
    """Variables of processes with these ranks; None for one that does not come."""
    return [None if number is None else {"RANK": str(number), "WORLD_SIZE": str(world)} for number in numbers]


def start(pool: Pool, places: list[dict[str, str] | None], port: int | None = None, **case: Any) -> list[Any]:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port()), **case.pop("env", {})}
    return pool.run(start_on_rank, {"places": places, "env": env, **case})


def test_they_may_start_again_in_the_same_processes(pool: Pool) -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert pool.run(start_again, {"env": env, "times": 3}) == [[3.0] * 3] * 3


@pytest.mark.slow
@pytest.mark.parametrize("missing", [[1], [1, 2]])
def test_who_does_not_come_is_named(pool: Pool, missing: list[int]) -> None:
    places = ranks(*(None if number in missing else number for number in range(3)))
    results = start(pool, places, timeout=1.0, warn_after=0.3)
    words = {(1,): "rank 1 of 3", (1, 2): "ranks 1 and 2 of 3"}[tuple(missing)]
    for rank in set(range(3)) - set(missing):
        wanted = f"init_distributed: {words} did not arrive within 1 s; rank 0 runs on {results[rank]['host']}"
        assert wanted in results[rank]["error"], results[rank]
        assert 0.9 < results[rank]["seconds"] < 8
    (warning,) = [warning for result in results for warning in result["warnings"]]  # one rank speaks for all
    have = "has" if len(missing) == 1 else "have"
    assert f"init_distributed: {words} {have} not arrived yet (waiting for 0 s, giving up after 1 s)" in warning


def test_rank_0_does_not_come(pool: Pool) -> None:
    port = free_port()
    results = start(pool, ranks(None, 1, 2), port, timeout=1.0, warn_after=0.3)
    for rank in (1, 2):
        error, warnings = results[rank]["error"], results[rank]["warnings"]
        assert f"rank {rank} on {results[rank]['host']} could not reach rank 0 at 127.0.0.1:{port} within 1 s" in error
        assert "(Connection refused)" in error and "MASTER_ADDR" in error
        assert (
            warnings and f"rank {rank} cannot reach rank 0 at 127.0.0.1:{port} yet: Connection refused" in warnings[0]
        )


def test_two_processes_of_one_rank_are_named(pool: Pool) -> None:
    results = start(pool, ranks(0, 1, 1))
    pids = sorted([results[1]["pid"], results[2]["pid"]])
    for result in results:
        assert "2 processes say that they are rank 1 of 3: process" in result["error"]
        assert all(f"process {pid} on {result['host']}" in result["error"] for pid in pids)
        assert result["seconds"] < 10


def test_ranks_that_disagree_how_many_they_are(pool: Pool) -> None:
    places = [*ranks(0, world=2), *ranks(1, 2, world=3)]
    for result in start(pool, places, timeout=5.0, late=0.5):
        assert "the ranks do not agree how many they are: WORLD_SIZE is" in result["error"]


def test_a_rank_that_has_exited_is_not_waited_for(pool: Pool) -> None:
    """The launcher's agent, which keeps the store, says so."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "a"}
    store.set(NUMBERED_EXIT.format(store.add(EXIT_COUNT, 1)), "2")
    results = start(pool, ranks(0, 1, None), store.port, env=env, timeout=60.0)
    for result in results[:2]:
        assert "init_distributed: rank 2 of 3 exited with status 0 before this call" in result["error"]
        assert result["seconds"] < 20


def test_on_one_machine_nothing_listens_to_others(pool: Pool) -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    found = pool.run(start_and_look, {"env": env})
    assert found[0]["ports"] and {address for one in found for address in one["ports"]} == {"0100007F"}
    assert [one["interface"] for one in found] == ["lo"] * 3
    assert [one["after"] for one in found] == [None] * 3, "what was set is taken back at the end"


SCRIPT = """
import os, sys
import zerolite
zerolite.init_distributed("gloo")
import torch
total = torch.ones(())
torch.distributed.all_reduce(total)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    os._exit(7)
zerolite.destroy()
print(f"sum {int(total)} restart {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n", end="", flush=True)  # one write
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["c10d", "static"])
def test_torchrun_restarts(tmp_path: Path, kind: str) -> None:
    """Both attempts share a store that no rank keeps: what the first one left is still there."""
    (tmp_path / "train.py").write_text(SCRIPT)
    more = ["--standalone"] if kind == "c10d" else ["--master-port", str(free_port())]
    options = ["--nproc-per-node", "2", "--max-restarts", "1", tmp_path / "train.py"]
    command = ["-m", "torch.distributed.run", *more, *options]
    assert output_of(sys.executable, *command, OMP_NUM_THREADS="1").count("sum 2 restart 1") == 2
