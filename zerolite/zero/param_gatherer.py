"""All-gather of updated parameters, overlapped with the step and optionally with the next forward."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zerolite.comm import collective
from zerolite.utils.module_hook import WeakHook, is_compiled
from zerolite.utils.nested import Arguments, Function, Keywords
from zerolite.utils.torch_private import untraced
from zerolite.zero.bucket import Bucket
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.observers import GATHER, Observers
from zerolite.zero.stage3.absent_parameter import AbsentParameter

# These modules of torch read weights of their children, and their classes, before the children run.
_READ_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.TransformerEncoder)


_overlapping: weakref.WeakSet[ParamGatherer] = weakref.WeakSet()


def _end_all_gathers() -> None:
    """Wait for all gathers before this process forks. The child (a worker of a DataLoader, for example) does not
    inherit the threads that gather, so it would wait for ever."""
    for param_gatherer in list(_overlapping):
        param_gatherer.wait_all()


os.register_at_fork(before=_end_all_gathers)


class ParamGatherer:
    """All-gathers of updated parameters, one for each bucket, which is launched as soon as the bucket is updated.

    With ``overlap_forward`` the gathers stay in flight after the step. A hook before each module's forward waits for
    the buckets of that module's own parameters. Other code can read parameters, too: a tied head called as a function,
    a ``state_dict()``, an average of weights. So a parameter in flight is an :class:`AbsentParameter`, which waits when
    it is read.

    Attributes:
        pending: buckets whose gathers are in flight, in the order of their launches.
        overlaps: gathers stay in flight after the step.
        handles: handles of the installed hooks.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        overlap_forward: bool,
        observers: Observers,
    ) -> None:
        """
        Args:
            buffer: buffer of the parameters.
            overlap_forward: let the gathers stay in flight during the next forward.
            observers: observers of the phase GATHER.
        """
        self._buffer = buffer
        self.overlaps = overlap_forward and buffer.shard and buffer.gradient_memory.groups.shard.world_size > 1
        self.pending: list[Bucket] = []
        # Any thread may read a parameter in flight. The lock is held during a wait, so that each gather is ended once.
        self._lock = threading.RLock()
        self._not_overlapped: set[Bucket] = set()  # those whose gathers do not overlap the forward
        self._update_stream: torch.cuda.Stream | None = None
        self.handles: list[RemovableHandle] = []
        self._observers = observers
        self._in_flight_class: type[nn.Parameter] = type("InFlight", (AbsentParameter,), {"source": _InFlight(self)})
        if self.overlaps:
            _overlapping.add(self)

    @collective
    def gather_bucket(self, bucket: Bucket, rounded: bool = False) -> None:
        """Launch the all-gather of a bucket. All ranks call it in the same order of buckets.

        Args:
            bucket: the bucket.
            rounded: the update has already written this rank's range of the compute parameters.
        """
        if bucket.gathering is not None:  # from the step before: no forward has read these parameters
            self.wait([bucket])
        bucket.gather(rounded)
        if bucket.gathering is not None:
            self.pending.append(bucket)

    def end_step(self) -> None:
        """End the step's gathers, after the last bucket. Without ``overlap_forward`` this waits for all of them."""
        if self.overlaps:
            with self._lock:
                self._leave_in_flight()
        elif self.pending:
            self.wait(list(self.pending))
        for notify in self._observers.on_parameters_updated:
            notify()

    def _leave_in_flight(self) -> None:
        self.wait(bucket for bucket in self._buffer.buckets if bucket in self._not_overlapped)
        for bucket in list(self.pending):
            if any(type(member) is not nn.Parameter for member in bucket.parameters):
                self.wait([bucket])  # the user has given them another class
                continue
            # No hook runs when a parameter is read as a tensor. A class whose functions wait first is the only way to
            # notice such a read.
            for parameter in bucket.parameters:
                parameter.__class__ = self._in_flight_class
        if self._buffer.buckets[0].compute.device.type == "cuda":
            self._update_stream = torch.cuda.current_stream(self._buffer.buckets[0].compute.device)

    @untraced
    def wait(self, buckets: Iterable[Bucket]) -> None:
        """Wait for the gathers of these buckets. A forward must not read parameters that a gather still writes, and an
        update must not write parameters that a gather still sends."""
        for bucket in buckets:
            if bucket.gathering is not None:
                with self._lock:
                    self._wait_for_bucket(bucket)

    def _wait_for_bucket(self, bucket: Bucket) -> None:
        gathering = bucket.gathering
        if gathering is None:  # another thread has waited for it meanwhile
            return
        for begins in self._observers.on_phase_begin:
            begins(GATHER)
        try:
            if self._update_stream is None:
                gathering.wait()
            else:
                # The next update runs on its stream without another wait, so that stream waits, and the caller's too.
                current = torch.cuda.current_stream(self._update_stream.device)
                with torch.cuda.stream(self._update_stream):
                    gathering.wait()
                if current != self._update_stream:
                    current.wait_stream(self._update_stream)
        finally:
            for ended in self._observers.on_phase_end:
                ended(GATHER)
        if self.overlaps:
            for parameter in bucket.parameters:
                if type(parameter) is self._in_flight_class:
                    parameter.__class__ = nn.Parameter
        # Last, because other threads look there first to see if they must wait. A failed gather does not end, so every
        # read of its parameters raises.
        self.pending.remove(bucket)
        bucket.gathering = None

    def wait_all(self) -> None:
        self.wait(list(self.pending))

    def wait_for(self, parameters: Sequence[torch.Tensor]) -> None:
        """Wait for the gathers of these parameters. If the list is empty it is not known which parameters are read, so
        wait for all."""
        wanted = {id(parameter) for parameter in parameters}
        if not wanted:
            self.wait_all()
        for bucket in list(self.pending):
            if any(id(member) in wanted for member in bucket.parameters):
                self.wait([bucket])

    def install_hooks(self, root: nn.Module) -> None:
        """Install the forward pre-hooks that wait for gathers, instead of those of an earlier call. Without
        ``overlap_forward`` there are none."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        if not self.overlaps:
            return
        bucket_of = {id(p): bucket for bucket in self._buffer.buckets for p in bucket.parameters}

        def buckets(module: nn.Module, recurse: bool) -> list[Bucket]:
            return list(dict.fromkeys(bucket_of[id(p)] for p in module.parameters(recurse) if id(p) in bucket_of))

        self._not_overlapped = {bucket_of[id(p)] for p in self._buffer.parameters if type(p) is not nn.Parameter}
        for module in root.modules():
            if is_compiled(module):  # its guards compare the classes of parameters, so another class would recompile it
                self._not_overlapped.update(buckets(module, recurse=True))
        for module in root.modules():
            waited = [b for b in buckets(module, isinstance(module, _READ_CHILDREN)) if b not in self._not_overlapped]
            if waited:
                self.handles.append(_ForwardHook(self, waited).install(module.register_forward_pre_hook, prepend=True))

    def on_gradient(self, index: int) -> None:
        """Check a parameter that has got a gradient.

        Raises:
            RuntimeError: its gather is in flight, so code has read it that bypasses PyTorch's functions.
        """
        slot = self._buffer.layout.slots[index]
        if self._buffer.buckets[slot.bucket].gathering is not None:
            raise RuntimeError(
                f"overlap_comm: parameter '{slot.name}' got a gradient while its updated values were still being "
                "gathered, so its old values may have been used. Code that is no PyTorch function (a C++ extension) "
                "was given it outside the forward of the module that owns it, or this is the backward of a forward "
                "before the step. Set zero_optimization.overlap_comm to false (or leave it out) for loops that do this."
            )


class _InFlight:
    """Source of parameters in flight, which waits for their gathers. References the gatherer weakly."""

    def __init__(self, param_gatherer: ParamGatherer) -> None:
        self._owner = weakref.ref(param_gatherer)

    def run(self, function: Function, args: Arguments, kwargs: Keywords, absent: Sequence[torch.Tensor]) -> object:
        """Return the result of ``function`` after a wait for ``absent``."""
        param_gatherer = self._owner()
        if param_gatherer is not None:
            param_gatherer.wait_for(absent)
        late = [parameter for parameter in absent if getattr(type(parameter), "source", None) is self]
        if late:
            raise RuntimeError(
                f"the updated values of a parameter of shape {tuple(late[0].shape)} never came: the engine that "
                "gathers them ended in the middle of a step. Call zerolite.destroy() before the engine goes out of use"
            )
        return function(*args, **kwargs)


class _ForwardHook(WeakHook[ParamGatherer]):
    """Forward pre-hook that waits for the gathers of some buckets. It is a class, so that a list of hooks shows its
    name."""

    def __init__(self, param_gatherer: ParamGatherer, buckets: list[Bucket]) -> None:
        super().__init__(param_gatherer)
        self._buckets = buckets

    def __call__(self, module: nn.Module, args: object) -> None:
        param_gatherer = self.owner()
        if param_gatherer is not None and param_gatherer.pending:
            param_gatherer.wait(self._buckets)
