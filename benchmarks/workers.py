"""The processes of one competitor: started once, then told by the parent when to run, asleep while the others run.

Each competitor has processes of its own, so that what one library changes in torch, allocates or breaks
touches no other.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.ranks import join_group
from benchmarks.setting import Setting

REPLY_TIMEOUT_S = 600.0


class CompetitorFailed(Exception):
    """A rank of a competitor raised, or died; the message is its own, `details` its traceback."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class _Failure:
    message: str
    details: str


class Workers:
    """The ranks of one competitor. Use `start`, then `run` as often as wanted, then `close`.

    A rank calls `serve(pipe, rank, setting, *arguments)`, a function at the top of a module: it sends one reply when it
    is ready and one for each number of steps that it receives, until that is 0. The ranks meet at the file `store`.
    """

    def __init__(self, serve: Callable[..., None], setting: Setting, arguments: tuple[Any, ...], store: Path) -> None:
        # Forked from a server that has imported torch once and started nothing: a rank starts in a moment.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "torch.profiler", "torch.distributed.fsdp"])
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(setting.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(serve, rank, setting, arguments, str(store), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def start(self) -> Any:
        """Wait until the model is built and the warm-up steps are done; rank 0's first reply."""
        return self._receive()

    def run(self, steps: int) -> Any:
        """Train `steps` more steps; rank 0's reply."""
        for pipe in self.pipes:
            pipe.send(steps)
        return self._receive()

    def _receive(self) -> Any:
        """Rank 0's reply; raises `CompetitorFailed` with the first failing rank's own words."""
        replies: dict[int, Any] = {}
        rank_of = {id(pipe): rank for rank, pipe in enumerate(self.pipes)}
        while len(replies) < len(self.pipes):
            ready = wait([pipe for pipe in self.pipes if rank_of[id(pipe)] not in replies], timeout=REPLY_TIMEOUT_S)
            if not ready:
                raise CompetitorFailed(f"no answer within {REPLY_TIMEOUT_S:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = rank_of[id(pipe)]
                try:
                    reply = replies[rank] = pipe.recv()
                except EOFError:
                    raise CompetitorFailed(f"rank {rank} died without a word") from None
                if isinstance(reply, _Failure):
                    raise CompetitorFailed(f"rank {rank}: {reply.message}", reply.details)
        return replies[0]

    def close(self) -> None:
        """End the processes. Harmless when they are gone already."""
        for pipe in self.pipes:
            try:
                pipe.send(0)
            except OSError:
                pass
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()


def _rank_main(
    serve: Callable[..., None], rank: int, setting: Setting, arguments: tuple[Any, ...], store: str, pipe: Connection
) -> None:
    os.dup2(2, 1)  # what a library prints is not part of the report
    try:
        join_group(rank, setting, store)
        serve(pipe, rank, setting, *arguments)
        dist.destroy_process_group()
    except BaseException as error:
        pipe.send(_Failure(f"{type(error).__name__}: {error}", traceback.format_exc()))
        os._exit(1)  # the other ranks may wait in a collective for us: do not wait for them in turn
