"""`engine.join()`: ranks without batches take part in the collectives of the other ranks.

Inside ``engine.join()`` every rank announces what it is about to do (:class:`Command`) in a small exchange on the host.
A rank that has left its loop announces that it has finished. From then on it executes the commands of the others. It
counts as a rank whose gradients are zero, updates its shards and sends its parts. It runs no forward, needs no batch,
and ends with the same parameters, states and counters. While no rank has finished, this exchange is the only addition.
Afterwards stage 3 also announces what it gathers and reduces within a forward and backward.

The idea is that of ``torch.distributed.algorithms.Join``, which shadows collectives one by one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from zerolite.comm import Communicator, ControlChannel
from zerolite.zero.commands import Command, float_from_bits
from zerolite.zero.grad_reducer import GradReducer
from zerolite.zero.sharded_optimizer import LOCAL_GROUP_KEYS, ShardedOptimizer
from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator
from zerolite.zero.step import StepPipeline

logger = logging.getLogger("zerolite")

_ACTIVE, _FINISHED, _FAILED = 0, 1, 2
# A row of the exchange: status, command, count of numbers, and up to 13 numbers. Its length is fixed, so that ranks
# need not agree on a size first; a command with more numbers sends them by a broadcast.
_HEAD, _ROOM = 3, 13
ROW = _HEAD + _ROOM
_STEPS = (Command.ENGINE_STEP, Command.STEP, Command.UPDATE)  # commands that use the optimizer's hyperparameters
_STAGE3 = (Command.GROUP_END, Command.BACKWARD_END, Command.EXTERNAL)  # within a forward or backward that was announced


class _Engine(Protocol):
    """The methods of the engine that a finished rank calls."""

    optimizer: ShardedOptimizer
    coordinator: PartitionedParameterCoordinator | None

    def mirror_step(self, flush: bool, forced: int) -> None: ...

    def send_buffers(self) -> None: ...

    def absent_from_metric(self) -> None: ...

    def mirror_save(self) -> None: ...


class Join:
    """One ``with engine.join():`` block. Everything in it is called on all ranks; see the module."""

    def __init__(
        self,
        engine: _Engine,
        pipeline: StepPipeline,
        reducer: GradReducer,
        comm: Communicator,
        channel: ControlChannel,
        divide_by_initial_world_size: bool,
    ) -> None:
        self._engine = engine
        self._pipeline = pipeline
        self._reducer = reducer
        self._comm = comm
        self._channel = channel
        self._keep_divisor = divide_by_initial_world_size
        self._finished: tuple[int, ...] = ()  # ranks whose loops have ended
        self._depth = 0  # nested commands that are running
        self._serving = False  # this rank's loop has ended; it executes the commands of the others
        self._over = False  # the block has failed on all ranks
        self._warned = False

    @property
    def source(self) -> int:
        """The first rank that still has batches."""
        return next(rank for rank in range(self._comm.world_size) if rank not in self._finished)

    # ---------------------------------------------------------------- ranks with batches

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context of the user's loop."""
        self._install()
        try:
            yield
            self._serve()
        except BaseException:
            self._fail()
            raise
        finally:
            self._remove()

    @contextlib.contextmanager
    def announce(self, command: Command, *numbers: int) -> Iterator[None]:
        """Context of a command. Commands inside it belong to it and are not announced."""
        # While all ranks have batches, each does these by itself in its own forward and backward.
        within = command in _STAGE3 and not (self._finished and self._engine.coordinator is not None)
        if not (self._depth or self._serving or within):
            self._send_command(command, numbers)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _send_command(self, command: Command, numbers: Sequence[int]) -> None:
        if self._over:
            raise RuntimeError("engine.join: it has ended with an error, and nothing can follow inside its block")
        rows = self._channel.exchange([_ACTIVE, command, len(numbers), *numbers[:_ROOM]])
        self._look(rows)
        self._numbers(rows, numbers)
        if command is Command.OTHER and self._finished:
            self._over = True
            raise RuntimeError(self._refusal())
        if command in _STEPS and self._finished:
            self._channel.broadcast(_hyperparameters(self._engine.optimizer.param_groups), self.source)

    def _look(self, rows: list[list[int]]) -> None:
        """Read the rows of all ranks. Raises RuntimeError on all ranks if they cannot go on together."""
        failed = [rank for rank, row in enumerate(rows) if row[0] == _FAILED]
        said = {rank: row for rank, row in enumerate(rows) if row[0] == _ACTIVE}
        if failed:
            self._over = True
            raise RuntimeError(f"engine.join: rank {failed[0]} has left with an exception, so this rank stops too")
        if len({tuple(row) for row in said.values()}) > 1:
            self._over = True
            told = "; ".join(
                f"rank {rank} {Command(row[1]).name}{row[_HEAD : _HEAD + 3]}" for rank, row in said.items()
            )
            raise RuntimeError(
                f"engine.join: the ranks are at different places of their loops: {told}. They must call the engine "
                "alike, as long as they have batches"
            )
        finished = tuple(rank for rank, row in enumerate(rows) if row[0] == _FINISHED)
        if said and finished and not self._finished and self._engine.coordinator is not None:
            # The first rank has finished: a rank that runs no modules cannot follow a plan of module executions.
            self._engine.coordinator.schedule.pause()
        self._finished = finished
        if said and not self._keep_divisor:
            # The reduction divides by all ranks, but only some have gradients: make it the mean of those.
            self._reducer.set_rank_factor(self._comm.world_size / len(said))

    def _numbers(self, rows: list[list[int]], own: Sequence[int]) -> list[int]:
        """Return the numbers of the command that the ranks with batches have announced."""
        row = rows[self.source]
        count = row[2]
        if count <= _ROOM:
            return row[_HEAD : _HEAD + count]
        numbers: list[int] = self._channel.broadcast(list(own), self.source)
        return numbers

    def _fail(self) -> None:
        """Tell the other ranks that this one has left with an exception."""
        if not self._over:
            self._over = True
            # This row takes the place of the command for which the others wait. This rank itself waits for none of
            # them, so that its exception is raised at once; they only need to know that it has failed.
            self._channel.leave([_FAILED])

    def _refusal(self) -> str:
        ranks = ", ".join(map(str, self._finished))
        return (
            f"engine.join: rank {ranks} has finished its batches, but the other ranks called an operation that needs "
            "every rank (zerolite.get_full_..., unfreezing, gather_for_metrics and the like). Call it after the join "
            "block"
        )

    # ---------------------------------------------------------------- serving

    def _serve(self) -> None:
        """Execute the commands of the other ranks until all have finished."""
        self._serving = True
        while not self._over:
            rows = self._channel.exchange([_FINISHED])
            self._look(rows)
            if len(self._finished) == self._comm.world_size:
                return
            numbers = self._numbers(rows, ())
            command = Command(rows[self.source][1])
            if command in _STEPS:
                self._copy_hyperparameters(self._channel.broadcast(None, self.source))
            if command is Command.OTHER:
                self._over = True
                raise RuntimeError(self._refusal())
            _ACTIONS[command](self, *numbers)

    def _copy_hyperparameters(self, groups: list[dict[str, object]]) -> None:
        """Take over learning rates and other hyperparameters from the ranks that still have batches."""
        for index, (group, values) in enumerate(zip(self._engine.optimizer.param_groups, groups, strict=True)):
            for key, value in values.items():
                if _as_number(group.get(key)) == value:
                    continue
                if not self._warned:
                    self._warned = True
                    logger.warning(
                        "engine.join: param group %d has %s=%s on the ranks with batches and %s on rank %d, which has "
                        "finished and takes their value. A schedule that you step yourself is behind on this rank: "
                        "give it to zerolite.initialize, which steps it on all ranks",
                        index,
                        key,
                        value,
                        group.get(key),
                        self._comm.rank,
                    )
                _set_hyperparameter(group, key, value)

    def _gather(self, *indices: int) -> None:
        coordinator = self._engine.coordinator
        assert coordinator is not None
        coordinator.mirror_all_gather(indices)

    def _group_end(self, group: int) -> None:
        self._reducer.on_group_end(group)

    def _external(self, group: int, index: int) -> None:
        coordinator = self._engine.coordinator
        assert coordinator is not None
        coordinator.schedule.add_parameter(group, index)

    def _forward(self, sends: int) -> None:
        if sends:
            self._engine.send_buffers()

    # ---------------------------------------------------------------- sources of commands

    def _install(self) -> None:
        self._pipeline.announce.use(self.announce)
        self._comm.set_launch_hook(self._announce_other)
        coordinator = self._engine.coordinator
        if coordinator is not None:
            coordinator.comm.set_launch_hook(self._announce_unless_gather)
            coordinator.context.set_listener(self)

    def _remove(self) -> None:
        self._pipeline.announce.use(None)
        self._comm.set_launch_hook(None)
        self._reducer.set_rank_factor(1.0)
        coordinator = self._engine.coordinator
        if coordinator is not None:
            coordinator.comm.set_launch_hook(None)
            coordinator.context.set_listener(None)
            coordinator.schedule.resume()

    def _note(self, command: Command, *numbers: int) -> None:
        with self.announce(command, *numbers):
            pass

    def before_launch(self, indices: Sequence[int]) -> None:
        """Announce gathers that are not part of an announced forward or backward. Called by the coordinator."""
        coordinator = self._engine.coordinator
        assert coordinator is not None
        if self._finished or not coordinator.busy:
            self._note(Command.GATHER, *indices)

    def before_external(self, group: int, index: int) -> None:
        """Announce a parameter that a module will gather from now on. Called by the coordinator."""
        self._note(Command.EXTERNAL, group, index)

    def _announce_other(self, op: str) -> None:
        """Announce an unknown command before any other collective, so that it fails on all ranks if one has
        finished."""
        if not self._reducer.current.open:
            self._note(Command.OTHER)

    def _announce_unless_gather(self, op: str) -> None:
        """Announce as :meth:`_announce_other` does, except before gathers, which :meth:`before_launch` announces."""
        if op != "gather_shards":
            self._announce_other(op)


def _hyperparameters(groups: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    return [{key: _as_number(value) for key, value in group.items() if key not in LOCAL_GROUP_KEYS} for group in groups]


def _as_number(value: object) -> object:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _set_hyperparameter(group: dict[str, Any], key: str, value: object) -> None:
    if isinstance(group.get(key), torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


_ACTIONS: dict[Command, Callable[..., Any]] = {
    Command.FORWARD: Join._forward,
    Command.BACKWARD: lambda join, *numbers: join._pipeline.mirror_backward(*map(bool, numbers)),
    Command.GROUP_END: Join._group_end,
    Command.BACKWARD_END: lambda join: join._reducer.end_backward(complete=False),
    Command.GATHER: Join._gather,
    Command.EXTERNAL: Join._external,
    Command.ENGINE_STEP: lambda join, flush, forced: join._engine.mirror_step(bool(flush), forced),
    Command.STEP: lambda join: join._pipeline.step(),
    Command.UPDATE: lambda join, gather: join._pipeline.update(bool(gather)),
    Command.ALL_GATHER_PARAMS: lambda join: join._pipeline.all_gather_params(),
    Command.ZERO_GRAD: lambda join: join._pipeline.zero_grad(),
    Command.REDUCE: lambda join: join._pipeline.reduce(),
    Command.STATS: lambda join: join._pipeline.stats(),
    Command.CLIP: lambda join, bits: join._pipeline.clip(float_from_bits(bits)),
    Command.METRIC: lambda join: join._engine.absent_from_metric(),
    Command.SAVE: lambda join: join._engine.mirror_save(),
}
