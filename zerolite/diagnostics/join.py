"""`engine.join()`: ranks without batches take part in the collectives of the other ranks.

Inside ``engine.join()`` every rank says what it is about to do (:class:`Command`) in a small exchange on the host. A
rank that has left its loop says that it has finished, and does from then on what the others say: it counts as a rank
whose gradients are zero, updates its shards and sends its parts. It runs no forward, needs no batch, and ends like all
others with the same parameters, states and counters. Where no rank has finished, the exchange is all that is added;
afterwards stage 3 also announces what it gathers and reduces within a forward and backward.

The idea is that of ``torch.distributed.algorithms.Join``, which shadows collectives one by one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from zerolite.comm import Communicator, ControlChannel
from zerolite.zero.commands import Command, number_of
from zerolite.zero.grad_reducer import GradReducer
from zerolite.zero.sharded_optimizer import KEPT
from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator
from zerolite.zero.step import StepPipeline

logger = logging.getLogger("zerolite")

_ACTIVE, _FINISHED, _FAILED = 0, 1, 2
_HEAD, _ROOM = 3, 13  # status, command and how many numbers; the numbers
ROW = _HEAD + _ROOM
_STEPS = (Command.ENGINE_STEP, Command.STEP, Command.UPDATE)  # what uses the optimizer's hyperparameters
_STAGE3 = (Command.USE_END, Command.BACKWARD_END, Command.EXTERNAL)  # within a forward or backward that was announced


class _Owner(Protocol):
    """The engine."""

    coordinator: PartitionedParameterCoordinator | None

    def follow_step(self, flush: bool, forced: int) -> None: ...

    def send_buffers(self) -> None: ...

    def absent_from_metric(self) -> None: ...

    def follow_save(self) -> None: ...


class Join:
    """One ``with engine.join():``. Everything in it is called on all ranks; see the module."""

    def __init__(
        self,
        owner: _Owner,
        pipeline: StepPipeline,
        reducer: GradReducer,
        comm: Communicator,
        channel: ControlChannel,
        divide_by_initial_world_size: bool,
    ) -> None:
        self._owner = owner
        self._pipeline = pipeline
        self._reducer = reducer
        self._comm = comm
        self._channel = channel
        self._keep_divisor = divide_by_initial_world_size
        self._finished: tuple[int, ...] = ()  # ranks
        self._depth = 0  # commands under way
        self._serving = False
        self._over = False
        self._warned = False

    @property
    def source(self) -> int:
        """The first rank that goes on."""
        return next(rank for rank in range(self._comm.world_size) if rank not in self._finished)

    # ---------------------------------------------------------------- who goes on

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
        """Context of a command; commands inside it are part of it."""
        within = command in _STAGE3 and not (self._finished and self._owner.coordinator is not None)
        if not (self._depth or self._serving or within):
            self._tell(command, numbers)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _tell(self, command: Command, numbers: Sequence[int]) -> None:
        if self._over:
            raise RuntimeError("engine.join: it has ended with an error, and nothing can follow inside its block")
        rows = self._channel.exchange([_ACTIVE, command, len(numbers), *numbers[:_ROOM]])
        self._look(rows)
        self._numbers(rows, numbers)
        if command is Command.OTHER and self._finished:
            self._over = True
            raise RuntimeError(self._refusal())
        if command in _STEPS and self._finished:
            self._channel.broadcast(_hyperparameters(self._pipeline.param_groups), self.source)

    def _look(self, rows: list[list[int]]) -> None:
        """Read the result of the exchange; raise on all ranks if they cannot go on together."""
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
        if said and finished and not self._finished and self._owner.coordinator is not None:
            self._owner.coordinator.schedule.pause()
        self._finished = finished
        if said and not self._keep_divisor:
            self._reducer.share = self._comm.world_size / len(said)

    def _numbers(self, rows: list[list[int]], own: Sequence[int]) -> list[int]:
        """The numbers of the command that the active ranks have said."""
        row = rows[self.source]
        count = row[2]
        if count <= _ROOM:
            return row[_HEAD : _HEAD + count]
        numbers: list[int] = self._channel.broadcast(list(own), self.source)
        return numbers

    def _fail(self) -> None:
        if not self._over:
            self._over = True
            # In the row that the others wait for, with no text: it waits for no rank, and its message is its own.
            self._channel.leave([_FAILED])

    def _refusal(self) -> str:
        ranks = ", ".join(map(str, self._finished))
        return (
            f"engine.join: rank {ranks} has finished its batches, and a call that all ranks must make came on those "
            "that go on (zerolite.get_full_..., unfreezing, gather_for_metrics and the like). Call it after "
            "the join block"
        )

    # ---------------------------------------------------------------- serving

    def _serve(self) -> None:
        """Do what the others say until all have finished."""
        self._serving = True
        while not self._over:
            rows = self._channel.exchange([_FINISHED])
            self._look(rows)
            if len(self._finished) == self._comm.world_size:
                return
            numbers = self._numbers(rows, ())
            command = Command(rows[self.source][1])
            if command in _STEPS:
                self._take(self._channel.broadcast(None, self.source))
            if command is Command.OTHER:
                self._over = True
                raise RuntimeError(self._refusal())
            _ACTIONS[command](self, *numbers)

    def _take(self, groups: list[dict[str, object]]) -> None:
        """Learning rates and the like are those of the ranks that go on."""
        for index, (group, values) in enumerate(zip(self._pipeline.param_groups, groups, strict=True)):
            for key, value in values.items():
                if _plain(group.get(key)) == value:
                    continue
                if not self._warned:
                    self._warned = True
                    logger.warning(
                        "engine.join: param group %d has %s=%s on the ranks that go on and %s on rank %d, which has "
                        "finished and takes theirs. A schedule that you step yourself is behind on this rank: give it "
                        "to zerolite.initialize, which steps it on all ranks",
                        index,
                        key,
                        value,
                        group.get(key),
                        self._comm.rank,
                    )
                _put(group, key, value)

    def _gather(self, *indices: int) -> None:
        coordinator = self._owner.coordinator
        assert coordinator is not None
        coordinator.follow_gather(indices)

    def _use_end(self, unit: int) -> None:
        self._reducer.on_use_end(unit)

    def _external(self, unit: int, index: int) -> None:
        coordinator = self._owner.coordinator
        assert coordinator is not None
        coordinator.schedule.add_parameter(unit, index)

    def _forward(self, sends: int) -> None:
        if sends:
            self._owner.send_buffers()

    # ---------------------------------------------------------------- where commands come from

    def _install(self) -> None:
        self._pipeline.commands.announce_with(self.announce)
        self._comm.guard_with(self._guard)
        coordinator = self._owner.coordinator
        if coordinator is not None:
            coordinator.comm.guard_with(self._guard_gathers)
            coordinator.group.listen(self)

    def _remove(self) -> None:
        self._pipeline.commands.announce_with(None)
        self._comm.guard_with(None)
        self._reducer.share = 1.0
        coordinator = self._owner.coordinator
        if coordinator is not None:
            coordinator.comm.guard_with(None)
            coordinator.group.listen(None)
            coordinator.schedule.resume()

    def _note(self, command: Command, *numbers: int) -> None:
        with self.announce(command, *numbers):
            pass

    def before_launch(self, indices: Sequence[int]) -> None:
        """Announce gathers that no announced forward or backward implies. Called by the coordinator."""
        coordinator = self._owner.coordinator
        assert coordinator is not None
        if self._finished or not coordinator.busy:
            self._note(Command.GATHER, *indices)

    def before_external(self, unit: int, index: int) -> None:
        """Announce a parameter that a unit gathers from now on. Called by the coordinator."""
        self._note(Command.EXTERNAL, unit, index)

    def _guard(self, op: str) -> None:
        """Note a command before a collective of the engine's communicators."""
        if not self._reducer.current.open:
            self._note(Command.OTHER)

    def _guard_gathers(self, op: str) -> None:
        """The same on the communicator of the gathers, which :meth:`before_launch` announces."""
        if op != "gather_shards":
            self._guard(op)


def _hyperparameters(groups: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    return [{key: _plain(value) for key, value in group.items() if key not in KEPT} for group in groups]


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _put(group: dict[str, Any], key: str, value: object) -> None:
    if isinstance(group.get(key), torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


_ACTIONS: dict[Command, Callable[..., Any]] = {
    Command.FORWARD: Join._forward,
    Command.BACKWARD: lambda join, *numbers: join._pipeline.follow_backward(*map(bool, numbers)),
    Command.USE_END: Join._use_end,
    Command.BACKWARD_END: lambda join: join._reducer.end_backward(complete=False),
    Command.GATHER: Join._gather,
    Command.EXTERNAL: Join._external,
    Command.ENGINE_STEP: lambda join, flush, forced: join._owner.follow_step(bool(flush), forced),
    Command.STEP: lambda join: join._pipeline.step(),
    Command.UPDATE: lambda join, publish: join._pipeline.update(bool(publish)),
    Command.PUBLISH: lambda join: join._pipeline.publish(),
    Command.ZERO_GRAD: lambda join: join._pipeline.zero_grad(),
    Command.REDUCE: lambda join: join._pipeline.reduce(),
    Command.STATS: lambda join: join._pipeline.stats(),
    Command.CLIP: lambda join, bits: join._pipeline.clip(number_of(bits)),
    Command.METRIC: lambda join: join._owner.absent_from_metric(),
    Command.SAVE: lambda join: join._owner.follow_save(),
}
