"""Report of this rank (engine call, user's line, module, step), read from the stack on request.

Nothing is recorded for it while training runs. The engine's call, the user's line that made it and the module in its
forward are frames on the main thread's stack. Steps are counted anyway, and each communicator remembers its latest
collectives. Another thread may ask while the main thread goes on: then the report may be slightly old.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

import torch

from zerolite.comm import HostGroup
from zerolite.comm.flight_recorder import EVENTS, WAIT, Entry, latest_calls
from zerolite.utils.text import name_ranks

if TYPE_CHECKING:
    from zerolite.comm import Communicator
    from zerolite.zero.engine_parts import EngineParts

LATEST = 48  # collectives of each communicator in a report, and twice as many module executions
_DEEPEST = 60  # frames of a stack in a report
WATCHDOG_THREAD = "zerolite watchdog"
"""Name of the thread that asks for reports."""


Entries = Sequence[tuple[int, str]]
"""Pairs of a number, counted from 1, and a description, in order."""


@dataclass(frozen=True)
class StackReport:
    """Place of one rank in its program.

    Attributes:
        rank: rank in the job.
        host: name of the rank's host.
        process: process id on that host.
        call: zerolite's call that is running, such as "engine.backward()"; "" outside of any.
        line: the user's line that made this call, or that runs now: "train.py:40, in main".
        inside: the user's line that runs inside this call, such as one of a model's forward; "" if there is none.
        module: innermost module whose forward is running, by its name in the model; "" if there is none.
        step: current step, counted from 1; 0 before the first engine.
        waits_for: the collective for which the rank waits; "" if it waits for none.
        collectives: by communicator, (number, description) of its latest collectives.
        executions: at stage 3, (number, "module entered" or "module left") of the current step of the schedule.
        schedule_step: number of this step of the schedule.
        stack: stack of the main thread, innermost call last.
        engine: the engine that was called, such as "engine 2"; "" if there is only one.
        events: what this rank has done that all ranks must do alike, latest last.
        calls: in a debug run, (number, name) of its latest calls that all ranks make.
    """

    rank: int
    host: str
    process: int
    call: str
    line: str
    inside: str
    module: str
    step: int
    waits_for: str
    collectives: dict[str, Entries] = field(default_factory=dict)
    executions: Entries = ()
    schedule_step: int = 0
    stack: str = ""
    engine: str = ""
    events: Sequence[str] = ()
    calls: Entries = ()

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> StackReport:
        return cls(**json.loads(text))

    def summary(self) -> str:
        """Return the step, call, module and line as half a sentence."""
        doing = (
            f"in {self.call}" + (f" of {self.engine}" if self.engine else "")
            if self.call
            else "in no call of the engine"
        )
        module = f", module '{self.module}'" if self.module else ""
        inside = f" (now at {self.inside})" if self.inside else ""
        step = f"step {self.step}" if self.step else "before the first step"
        return f"{step}, {doing}{module}, at {self.line or 'an unknown line'}{inside}"


def make_stack_report(rank: int, engines: Mapping[int, EngineParts], thread: int | None = None) -> StackReport:
    """Return this rank's report.

    Args:
        rank: this rank.
        engines: parts of living engines, by the number of the ``initialize`` call that made them (from 1, equal on
            all ranks).
        thread: identifies the training thread; default: the main thread.
    """
    training_thread = thread or threading.main_thread().ident
    frames = _frames(sys._current_frames().get(training_thread or 0))
    alive = {number: Names(engine) for number, engine in engines.items()}
    under_way = _engine_on(frames, engines)
    number = under_way or max(engines, default=0)
    engine, names = engines.get(number), alive.get(number)
    call, line, inside = _call_and_lines(frames)
    executions, steps = names.executions() if names is not None else ((), 0)
    waits_for = ""
    if WAIT.under_way():
        entry = WAIT.entry
        waits_for = describe(Entry(*entry), names) if entry is not None else _OTHERS
    elif any(isinstance(_owner(frame), HostGroup) for frame in frames):
        waits_for = _OTHERS
    return StackReport(
        rank=rank,
        host=socket.gethostname(),
        process=os.getpid(),
        call=call,
        line=line,
        inside=inside,
        module=_module_on(frames, engines.values()),
        step=0 if engine is None else engine.pipeline.state.global_steps + 1,
        waits_for=waits_for,
        collectives={
            (f"engine {number}: {name}" if max(engines) > 1 else name): entries
            for number, known in alive.items()
            for name, entries in known.collectives().items()
        },
        executions=executions,
        schedule_step=steps,
        stack=stacks(training_thread),
        engine=f"engine {under_way}" if under_way and len(engines) > 1 else "",
        events=list(EVENTS),
        calls=latest_calls() if engine is None or engine.topology.trivial else [],  # stages of a model make other calls
    )


_OTHERS = "the other ranks"
AMONG = " among "
"""Part of the name of a communicator that only some ranks have; these are compared only with each other."""


class Names:
    """Names of the parameters and modules in an engine's collectives."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._of = {id(parameter): name for name, parameter in parts.model.named_parameters()}

    def of_bucket(self, key: int) -> list[str]:
        """Return the names of the parameters in the bucket of this key (index + 1)."""
        buckets = self._parts.buffer.layout.buckets
        return [slot.name for slot in buckets[key - 1].slots] if 0 < key <= len(buckets) else []

    def of_parameter(self, key: int) -> list[str]:
        """Return the name of the partitioned parameter of this key (index + 1), as a list of one; [] if there is
        none."""
        coordinator = self._parts.coordinator
        if coordinator is None or not 0 < key <= len(coordinator.sharded_params):
            return []
        return [self._of.get(id(coordinator.sharded_params[key - 1].ref()), f"parameter {key}")]

    def collectives(self) -> dict[str, Entries]:
        """Return the latest collectives of each communicator."""
        topology, coordinator = self._parts.topology, self._parts.coordinator
        comms = topology.communicators()
        if coordinator is not None and coordinator.sharded_params and coordinator.comm is not topology.data:
            comms["gathers of parameters"] = coordinator.comm
        # Sequences may be of other lengths in other groups.
        alike = [comm for comm in comms.values() if topology.trivial and comm is not topology.sequence]
        return {
            name if comm in alike else f"{name}{AMONG}{_members(comm)}": [
                (number, describe(entry, self)) for number, entry in comm.flight_recorder.numbered()[-LATEST:]
            ]
            for name, comm in comms.items()
            if topology.trivial or comm.world_size > 1
        }

    def executions(self) -> tuple[Entries, int]:
        """Return the latest module executions of the current stage 3 step, and the number of that step."""
        coordinator = self._parts.coordinator
        if coordinator is None:
            return [], 0
        _, first, events = coordinator.schedule.events()
        names = [group.name or "the model" for group in coordinator.groups]
        entries = [
            # The schedule writes ~index where a module ends.
            (number, f"'{names[event]}' entered" if event >= 0 else f"'{names[~event]}' left")
            for number, event in enumerate(events, first)
        ]
        return entries[-2 * LATEST :], coordinator.schedule.steps


def describe(entry: Entry, names: Names | None) -> str:
    """Return a collective in words. Ranks that launch the same collective get the same words."""
    if entry.op == "message":
        return "a message from another stage of the pipeline"
    if entry.op == "call":
        return f"the other ranks in {entry.tag}"
    if isinstance(entry.what, int):
        numel, dtype, tensors = entry.what, entry.dtype, 1
        members = names.of_bucket(entry.key) if names is not None else []
    else:
        shards = entry.what
        numel, dtype, tensors = sum(shard.numel() for shard in shards), shards[0].dtype, len(shards)
        members = names.of_parameter(entry.key) if names is not None else []
    named = ""
    if members:
        more = max(len(members), tensors) - 1
        named = f" '{members[0]}'" + (f" and {more} more" if more else "")
    if entry.op == "new_group":
        return f"a new process group for {_TAGS.get(entry.tag, entry.tag)} ({numel} ranks)"
    size = f"{numel} {str(dtype).removeprefix('torch.')}" + ("" if isinstance(entry.what, int) else " on each rank")
    return f"{entry.op} for {_TAGS.get(entry.tag, entry.tag)}{named} ({size})"


_TAGS = {
    "stats": "the step's statistics",
    "initial_sync": "the start",
    "consistency": "the comparison of weights",
    "control": "an exchange of numbers on the host",
    "tensor": "parts of a layer",
    "loss": "the mean loss",
    "unfrozen": "the comparison of parameters that begin to train",
    "shared_gradients": "gradients that several parts share",
}


def _members(comm: Communicator) -> str:
    return name_ranks(comm.members())


# -------------------------------------------------------------------- the stack

_ZEROLITE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LAUNCHER = os.path.join(_ZEROLITE, "launcher") + os.sep
_MARKER = os.path.join(_ZEROLITE, "comm", "flight_recorder.py")  # around marked functions in a debug run
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STANDARD = os.path.abspath(sysconfig.get_paths()["stdlib"]) + os.sep
_PACKAGES = os.path.abspath(sysconfig.get_paths()["purelib"]) + os.sep


def _frames(innermost: FrameType | None) -> list[FrameType]:
    """Return the frames from the outermost to the innermost."""
    frames = []
    while innermost is not None:
        frames.append(innermost)
        innermost = innermost.f_back
    return frames[::-1]


def _kind(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    if path.startswith((_LAUNCHER, "<frozen")) or path == _MARKER:
        return "other"
    if path.startswith(_ZEROLITE):
        return "zerolite"
    if path.startswith(_TORCH):
        return "torch"
    return "other" if path.startswith(_STANDARD) and not path.startswith(_PACKAGES) else "user"


def _call_and_lines(frames: Sequence[FrameType]) -> tuple[str, str, str]:
    """Return the outermost call of zerolite (or ``loss.backward()``), the user's line that made it, and the user's
    innermost line inside it."""
    call = line = inside = ""
    for frame in frames:
        origin = _kind(frame)
        if origin == "user":
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
            line, inside = (line, where) if call else (where, "")
        elif not call and origin == "zerolite":
            call = _call(frame)
        elif not call and origin == "torch" and frame.f_code.co_name == "backward":
            call = "loss.backward()"
    return call, line, inside


def _owner(frame: FrameType) -> object:
    """Return the object whose method the frame runs; None for functions and for most frames outside of zerolite.

    Only zerolite's frames, and those in which torch calls a module, are asked for their locals. Before Python 3.13 this
    leaves a copy of the locals in the frame until it returns. So the frame of a user's loop would keep its tensors.
    """
    if _kind(frame) == "zerolite" or frame.f_code.co_filename.endswith(_CALLS_MODULES):
        return frame.f_locals.get("self")
    return None


def _call(frame: FrameType) -> str:
    name, owner = frame.f_code.co_name, _owner(frame)
    if name.startswith("__torch_") and frame.f_code.co_filename.endswith("sharded_gradient.py"):
        return "an operation on p.grad"
    if owner is None:
        return f"zerolite.{name}()"
    owner_class = type(owner).__name__
    if owner_class == "Engine":
        return "the forward" if name == "__call__" else f"engine.{name}()"
    return {"ShardedOptimizer": f"engine.optimizer.{name}()"}.get(owner_class, f"{owner_class}.{name}()")


def _engine_on(frames: Sequence[FrameType], engines: Mapping[int, EngineParts]) -> int:
    """Return the number of the engine that is called on this stack; 0 for none."""
    for frame in frames:
        owner = _owner(frame)
        parts = getattr(owner, "__dict__", {}).get("_parts")  # of an engine, or of what works on one
        for number, engine in engines.items() if owner is not None else ():
            if parts is engine or owner is engine.optimizer:
                return number
    return 0


def _module_on(frames: Sequence[FrameType], engines: Iterable[EngineParts]) -> str:
    modules = {id(module): name for engine in engines for name, module in engine.model.named_modules()}
    owners = [_owner(frame) for frame in reversed(frames)]
    return next((modules[id(owner)] for owner in owners if id(owner) in modules), "")


def stacks(main_thread: int | None) -> str:
    """Return the main thread's stack, and those of other threads inside zerolite (on CUDA, backward runs in one)."""
    text: list[str] = []
    watchdogs = {thread.ident for thread in threading.enumerate() if thread.name == WATCHDOG_THREAD}
    for thread, innermost in sys._current_frames().items():
        frames = _frames(innermost)
        if thread == main_thread:
            text.insert(0, _stack(innermost))
        elif thread not in watchdogs and any(_kind(frame) == "zerolite" for frame in frames):
            text.append("another thread:\n" + _stack(innermost))
    return "".join(text)


def _stack(innermost: FrameType) -> str:
    """Return the stack without frames that say nothing: those in which torch calls a module, and those that ask for the
    stack."""
    entries = [
        entry
        for entry in traceback.extract_stack(innermost)
        if not entry.filename.endswith(_DULL) and not entry.filename.startswith((_LAUNCHER, "<frozen", "<string>"))
    ]
    return "".join(traceback.format_list(entries[-_DEEPEST:]))


_CALLS_MODULES = os.path.join("torch", "nn", "modules", "module.py")
_DULL = (
    _CALLS_MODULES,
    os.path.join("diagnostics", "watchdog.py"),
    os.path.join("diagnostics", "stack_report.py"),
)
