"""All-gather of updated parameters, overlapped with the step and optionally with the next forward."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from zerolite.comm import Communicator, Pending
from zerolite.utils.module_hook import WeakHook, is_compiled, untraced
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.observers import GATHER, Observers
from zerolite.zero.stage3.released_parameter import InFlightParameter

# Modules of torch that read weights of their children, and look at their classes, before these run.
_READ_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.TransformerEncoder)


_overlapping: weakref.WeakSet[ParamGatherer] = weakref.WeakSet()


def _end_all_gathers() -> None:
    """Wait for all gathers before this process forks. A child (a worker of a DataLoader) does not inherit the threads
    that gather, so it would wait for ever."""
    for param_gatherer in list(_overlapping):
        param_gatherer.wait_all()


os.register_at_fork(before=_end_all_gathers)


class ParamGatherer:
    """Launches one all-gather per bucket as soon as it is updated and knows which are still in flight.

    With ``overlap_forward`` the gathers stay in flight after the step. A hook before each module's forward waits for
    the buckets of that module's own parameters. Everywhere else a parameter in flight is an
    :class:`InFlightParameter`, so that a tied head called as a function, a ``state_dict()`` or an average of weights
    waits for what it reads.

    Attributes:
        pending: gathers in flight, by bucket.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        comm: Communicator,
        gather: bool,
        overlap_forward: bool,
        observers: Observers,
    ) -> None:
        self._buffer = buffer
        self._comm = comm
        self._gather = gather
        self.overlaps = overlap_forward and gather and comm.world_size > 1
        self.pending: dict[int, Pending] = {}
        # Any thread may read a parameter in flight. Held while a thread waits for one, so that each gather ends once.
        self._lock = threading.RLock()
        self._not_overlapped: set[int] = set()  # buckets whose gathers do not overlap the forward
        self._stream: Any = None  # of the update, on CUDA
        self.handles: list[Any] = []  # of the installed hooks
        self._observers = observers
        gatherer_ref = weakref.ref(self)
        if self.overlaps:
            _overlapping.add(self)

        def wait_for(parameters: Sequence[torch.Tensor]) -> None:
            param_gatherer = gatherer_ref()
            if param_gatherer is not None:
                param_gatherer._wait_for(parameters)

        self._in_flight_class: Any = type(
            "InFlightParameter", (InFlightParameter,), {"wait_for": staticmethod(wait_for)}
        )

    def gather_bucket(self, bucket: int, rounded: bool = False) -> None:
        """Launch the all-gather of a bucket. Called on all ranks, in the same order of buckets.

        Args:
            bucket: index of the bucket.
            rounded: the update has already written this rank's range of the compute parameters, after :meth:`wait`.
        """
        if bucket in self.pending:  # left from the step before, because no forward has read these parameters
            self.wait([bucket])
        self._buffer.sync_param_from_master(bucket, rounded)
        if self._gather:
            self.pending[bucket] = self._comm.all_gather(self._buffer.compute[bucket], "parameters", bucket + 1)

    def end_step(self) -> None:
        """Call after the last bucket. Without ``overlap_forward`` this waits until all parameters are complete."""
        if self.overlaps:
            with self._lock:
                self._leave_in_flight()
        elif self.pending:
            self.wait(list(self.pending))
        for notify in self._observers.on_parameters_updated:
            notify()

    def _leave_in_flight(self) -> None:
        self.wait(sorted(self._not_overlapped))
        for bucket in list(self.pending):
            members = self._members(bucket)
            if any(type(member) is not nn.Parameter for member in members):
                self.wait([bucket])  # the user has given them another class
                continue
            # No hook runs when a parameter is read as a plain tensor (a tied weight, state_dict()). A class whose
            # functions wait first is the only way to see such a read.
            for parameter in members:
                parameter.__class__ = self._in_flight_class
        if self._buffer.compute[0].device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._buffer.compute[0].device)

    @untraced
    def wait(self, buckets: Iterable[int]) -> None:
        """Wait for the gathers of these buckets.

        Otherwise a forward could read parameters while a gather writes them, or an update could write parameters that
        a gather still sends.
        """
        for bucket in buckets:
            if bucket in self.pending:
                with self._lock:
                    self._end(bucket)

    def _end(self, bucket: int) -> None:
        pending = self.pending.get(bucket)
        if pending is None:  # another thread has waited for it meanwhile
            return
        for begins in self._observers.on_phase_begin:
            begins(GATHER)
        try:
            if self._stream is None:
                pending.wait()
            else:
                self._finish_on(self._stream, pending)
        finally:
            for ended in self._observers.on_phase_end:
                ended(GATHER)
        if self.overlaps:
            for parameter in self._members(bucket):
                if type(parameter) is self._in_flight_class:
                    parameter.__class__ = nn.Parameter
        # Deleted last, because other threads look here first to see if they must wait. A failed gather stays, so that
        # every read of its parameters raises.
        del self.pending[bucket]

    def _finish_on(self, stream: Any, pending: Pending) -> None:
        """Let the stream of the update wait for the gather, and the caller's stream for that one if they differ."""
        current = torch.cuda.current_stream(stream.device)
        with torch.cuda.stream(stream):
            pending.wait()
        if current != stream:
            current.wait_stream(stream)

    def wait_all(self) -> None:
        self.wait(list(self.pending))

    def _members(self, bucket: int) -> list[nn.Parameter]:
        return [self._buffer.parameters[slot.index] for slot in self._buffer.layout.buckets[bucket].slots]

    def _wait_for(self, parameters: Sequence[torch.Tensor]) -> None:
        """Wait for the gathers of these parameters; for all if it is not gatherer_ref which are read."""
        wanted = {id(parameter) for parameter in parameters}
        if not wanted:
            self.wait_all()
        for bucket in list(self.pending):
            if any(id(member) in wanted for member in self._members(bucket)):
                self.wait([bucket])

    def attach(self, root: nn.Module) -> None:
        """Replace the forward pre-hooks that wait for gathers. Without ``overlap_forward`` there are none."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        if not self.overlaps:
            return
        slots = self._buffer.layout.slots
        bucket_of = {id(p): slots[index].bucket for index, p in enumerate(self._buffer.parameters)}

        def buckets(module: nn.Module, recurse: bool) -> list[int]:
            return sorted({bucket_of[id(p)] for p in module.parameters(recurse) if id(p) in bucket_of})

        self._not_overlapped = {bucket_of[id(p)] for p in self._buffer.parameters if type(p) is not nn.Parameter}
        for module in root.modules():
            if is_compiled(module):  # its guards would find another class of parameter than the one that was compiled
                self._not_overlapped.update(buckets(module, recurse=True))
        for module in root.modules():
            waited = [b for b in buckets(module, isinstance(module, _READ_CHILDREN)) if b not in self._not_overlapped]
            if waited:
                self.handles.append(_ForwardHook(self, waited).install(module.register_forward_pre_hook, prepend=True))

    def before_forward(self, buckets: Sequence[int]) -> None:
        if self.pending:
            self.wait(buckets)

    def on_gradient(self, index: int) -> None:
        """A gradient arrived. Raises RuntimeError if the values of its parameter are still on their way: then something
        has read them that goes past PyTorch's functions."""
        slot = self._buffer.layout.slots[index]
        if slot.bucket in self.pending:
            raise RuntimeError(
                f"overlap_comm: parameter '{slot.name}' got a gradient while its updated values were still on their "
                "way, so its old values may have been used. Code that is no PyTorch function (a C++ extension) was "
                "given it outside the forward of the module that owns it, or this is the backward of a forward before "
                "the step. Set zero_optimization.overlap_comm to false (or leave it out) for loops that do this."
            )


class _ForwardHook(WeakHook[ParamGatherer]):
    """A forward pre-hook; an object and not a closure, so that it shows its purpose in a module's hook list."""

    def __init__(self, param_gatherer: ParamGatherer, buckets: list[int]) -> None:
        super().__init__(param_gatherer)
        self._buckets = buckets

    def __call__(self, module: nn.Module, args: object) -> None:
        param_gatherer = self.owner()
        if param_gatherer is not None:
            param_gatherer.before_forward(self._buckets)
