"""All-gathers of updated parameters, overlapped with the step and with the next forward."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from zerolite.comm import Pending, collective
from zerolite.comm.process_group import before_groups_end
from zerolite.comm.shared_memory import LOCK
from zerolite.utils.accelerator import is_fake
from zerolite.utils.nested import Arguments, Function, Keywords
from zerolite.utils.torch_private import (
    before_scripting,
    compiler_is_used,
    deferred_tensor,
    profiler_is_on,
    transform_level,
    undispatched,
    untraced,
)
from zerolite.zero.bucket import Bucket
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.observers import GATHER, Observers
from zerolite.zero.stage3.absent_parameter import AbsentParameter

logger = logging.getLogger("zerolite")

END_S = 60.0  # that a rank, at its end, waits for others whose update takes longer

# These modules read weights of others, and their classes, before or without calling those.
_READ_CHILDREN = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    torch.jit.ScriptModule,
)

# Any thread may read a parameter in flight. The lock is held during a wait, so that each gather is ended once. The
# thread that holds it may take it again.
_lock = threading.Condition(LOCK)
_in_flight: list[ParamGatherer] = []  # those with gathers that have outlived their step
_hook: list[RemovableHandle] = []  # while there are such
_is_read_unseen = False  # something may read parameters that no code of Python sees, so no gather outlives its step


def _end_all_gathers() -> None:
    for param_gatherer in list(_in_flight):
        param_gatherer.wait_all()


def _is_waiting() -> bool:
    """Return True if this thread is inside a wait or a launch: in a signal's handler, or in a finalizer that collection
    runs."""
    try:
        _lock.notify(0)
    except RuntimeError:  # it has not acquired the lock
        return False
    return True


def _before_fork() -> None:
    try:
        _end_all_gathers()
    finally:
        _lock.acquire()  # no other thread hides a parameter now, or has the lock that the child inherits


def _after_fork_in_child() -> None:
    for param_gatherer in list(_in_flight):
        param_gatherer.lose("this process was forked while a thread of its parent trained, or after a rank was lost")
    _lock.release()


# A forked process (a worker of a DataLoader, for example) does not inherit the threads that gather, so it would wait
# for ever.
os.register_at_fork(before=_before_fork, after_in_parent=_lock.release, after_in_child=_after_fork_in_child)


def _end_in_time() -> None:
    """Wait for all gathers before this process, or its process groups, end: others still receive this rank's part.

    An update of another rank may take longer than that of this one. But a rank that has failed never comes, so the
    wait has a limit. What has not come by then raises where it is read.
    """
    if not _in_flight:
        return
    deadline, errors = time.monotonic() + END_S, ["another thread waits for them"]
    if _lock.acquire(timeout=END_S):
        try:
            errors = [error for param_gatherer in list(_in_flight) if (error := param_gatherer.end_in_time(deadline))]
        finally:
            _lock.release()
    for error in errors:
        logger.warning(
            "this rank, or its process groups, end while values of its last update are in flight: expected them from "
            "all ranks within %g s, got: %s. Other ranks may not get this rank's part of the weights",
            END_S,
            error,
        )


atexit.register(_end_in_time)
# Before other handlers at exit, which may read parameters; and in processes of multiprocessing that were forked, where
# there are none. Nothing public runs in both.
_before_threads_end: Any = getattr(threading, "_register_atexit", None)
if _before_threads_end is not None:
    _before_threads_end(_end_in_time)


def _end_overlap() -> None:
    global _is_read_unseen
    _is_read_unseen = True
    _end_all_gathers()


def _on_scripting(module: nn.Module) -> None:
    if any(parameter.requires_grad for parameter in module.parameters()):
        _end_overlap()


# From here on, and not from the first engine on, because a model may be scripted before.
before_scripting(_on_scripting)


@functools.cache
def _watch_groups() -> None:
    """End all gathers before process groups end."""
    before_groups_end(_end_in_time)


@functools.cache
def _watch_captures() -> None:
    """End all gathers, for good, before the first capture of a CUDA graph."""
    graph: Any = torch.cuda.CUDAGraph
    begin = graph.capture_begin

    @functools.wraps(begin)
    def capture_begin(*args: Any, **kwargs: Any) -> Any:
        _end_overlap()
        return begin(*args, **kwargs)

    graph.capture_begin = capture_begin


class ParamGatherer:
    """All-gathers of updated parameters, one for each bucket, which is launched as soon as the bucket is updated.

    Where they overlap they stay in flight after the step, in the order in which the next forward uses the
    parameters. Meanwhile the parameters are :class:`AbsentParameter`: a function of torch that reads one waits, and so
    does the call of a module that has one. A bucket whose memory has other users than its parameters is waited for in
    the step, and all are once the program uses ``torch.compile``, scripts or traces a module with trainable parameters,
    or captures CUDA graphs. All of this differs between ranks, and moves no launch.

    At stage 3 an update sends values only if several ranks have a row, of which each updates a part. What gathers from
    the row, or writes into it, waits.

    Attributes:
        pending: buckets whose gathers are in flight, in the order of their launches.
        overlaps: gathers may stay in flight after the step.
    """

    def __init__(self, buffer: ParameterBuffer, overlaps: bool, observers: Observers) -> None:
        """
        Args:
            buffer: buffer of the parameters.
            overlaps: see the attribute.
            observers: observers of the phase GATHER.
        """
        self._buffer, self._observers = buffer, observers
        groups = buffer.gradient_memory.groups
        self.overlaps = overlaps and groups.updated is not None and groups.states.world_size > 1
        self.pending: list[Bucket] = []
        self._update_stream: torch.cuda.Stream | None = None
        if self.overlaps:
            _watch_groups()
            if buffer.placements.device.type == "cuda":
                _watch_captures()

    def use_layout(self) -> None:
        """Prepare the buckets that are new. Called when the optimizer has its views of them, and the user has none."""
        for bucket in self._buffer.buckets if self.overlaps else ():
            if bucket.absent_class is AbsentParameter and not bucket.layout.rows:
                source = _Gathered(self, bucket)
                try:
                    if not is_fake(bucket.compute):
                        deferred_tensor(bucket.compute, source, "")
                except RuntimeError as error:
                    logger.warning(
                        "overlap_comm: gathers of an update end with the step and do not hide behind the next "
                        "forward, because reads of parameters in flight could not wait: %s",
                        error,
                    )
                    self.overlaps = False
                    return
                bucket.absent_class = type("InFlight", (AbsentParameter,), {"source": source})
                bucket.count_own_views()

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
        """Leave the step's gathers in flight, after the last bucket, or end them."""
        if self.pending:
            with _lock:
                in_flight = [b for b in self.pending if self.overlaps and b.gathering and not b.gathering.arrived()]
                if in_flight and not in_flight[0].layout.rows and (_is_read_unseen or compiler_is_used()):
                    self.overlaps, in_flight = False, []
                if self._buffer.placements.device.type == "cuda":
                    self._update_stream = torch.cuda.current_stream(self._buffer.placements.device)
                elif in_flight and profiler_is_on():  # the profiler may stop before they end
                    in_flight = []
                if in_flight:
                    self._outlive_step(hides=not in_flight[0].layout.rows)  # first: an exception (Ctrl-C) may follow
                for bucket in list(self.pending):
                    if bucket not in in_flight or not bucket.hide_parameters():
                        self._end_gather(bucket)
        for notify in self._observers.on_parameters_updated:
            notify()

    def _outlive_step(self, hides: bool) -> None:
        if self not in _in_flight:
            _in_flight.append(self)
        if hides and not _hook:
            # Installed only while there is something to wait for: hooks on the modules would cost every forward, turn
            # off the fast path of torch's transformer layers, and show in copies.
            _hook.append(register_module_forward_pre_hook(_before_forward))

    @untraced
    def wait(self, buckets: Iterable[Bucket], in_operator: bool = False) -> None:
        """Wait for the gathers of these buckets. A forward must not read parameters that a gather still writes, and an
        update must not write parameters that a gather still sends.

        Args:
            in_operator: an operator waits, in whatever state of autograd, autocast and torch.func it was called.

        Raises:
            RuntimeError: another rank has gone.
        """
        for bucket in buckets:
            if bucket.gathering is None:
                continue
            is_transformed = transform_level() is not None
            if not is_transformed and (not in_operator or _is_waiting()):
                self._wait_undispatched(bucket)
            elif _is_waiting():
                raise RuntimeError(
                    "expected no transform of torch.func in a signal's handler or a destructor that runs while this "
                    "thread waits for parameters, got one that reads them: let the handler set a flag, and read after "
                    "the step"
                )
            else:  # inside of torch.func's transforms, which are a thread's own, nothing else may be written
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(self._wait_undispatched, bucket).result()
        if self._update_stream is not None:
            current = torch.cuda.current_stream(self._update_stream.device)
            if current != self._update_stream:
                current.wait_stream(self._update_stream)

    def _wait_undispatched(self, bucket: Bucket) -> None:
        with _lock, torch.no_grad(), undispatched():
            self._end_gather(bucket)

    def _end_gather(self, bucket: Bucket) -> None:
        gathering = bucket.gathering
        if gathering is None:  # another thread has waited for it meanwhile
            return
        for begins in self._observers.on_phase_begin:
            begins(GATHER)
        try:
            # The next update runs on its stream without another wait, so that stream waits. So does the caller's then.
            with torch.cuda.stream(self._update_stream):
                gathering.wait()
        finally:
            for ended in self._observers.on_phase_end:
                ended(GATHER)
        if bucket.is_hidden:
            bucket.reveal_parameters()
        # Last, because other threads look there first to see if they must wait. A failed gather does not end, so every
        # read of its parameters raises.
        if bucket in self.pending:  # an earlier wait may have been interrupted here
            self.pending.remove(bucket)
        bucket.gathering = None
        if not self.pending and self in _in_flight:
            _in_flight.remove(self)
            if _hook and not _in_flight:
                _hook.pop().remove()

    def wait_all(self) -> None:
        self.wait(list(self.pending))

    def end_in_time(self, deadline: float) -> str:
        """Wait on the host until all gathers have ended here and this rank's parts are sent.

        Returns the error if another rank has gone, or has not come by ``deadline`` (of ``time.monotonic()``). Reads
        raise it from then on.
        """
        try:
            for bucket in list(self.pending):
                if bucket.gathering is not None:
                    bucket.gathering.wait_for_peers(deadline)
            self.wait_all()
        except RuntimeError as error:
            self.lose(str(error))
            return str(error)
        return ""

    def lose(self, why: str) -> None:
        """Let every read of parameters in flight raise, because their values do not come."""
        for bucket in self.pending:
            bucket.gathering = _Lost(why)
        _in_flight.remove(self)


class _Lost(Pending):
    """A gather whose values do not come."""

    def __init__(self, why: str) -> None:
        super().__init__((), (), None)
        self._why = why

    def wait(self) -> torch.Tensor:
        raise RuntimeError(
            f"expected the values of an update from all ranks, got none: {self._why}. Load the last checkpoint"
        )


class _Gathered:
    """Source of a bucket's parameters while its gather is in flight: it waits."""

    def __init__(self, param_gatherer: ParamGatherer, bucket: Bucket) -> None:
        self._param_gatherer, self._bucket = param_gatherer, bucket

    def wait(self) -> None:
        self._param_gatherer.wait([self._bucket])

    def wait_in_operator(self) -> None:
        self._param_gatherer.wait([self._bucket], in_operator=True)

    def values_of(self, alias: torch.Tensor) -> torch.Tensor:
        return self._bucket.compute.as_strided(alias.shape, alias.stride(), alias.storage_offset())

    def run(self, function: Function, args: Arguments, kwargs: Keywords, absent: Sequence[torch.Tensor]) -> object:
        """Return the result of ``function`` after a wait for ``absent``."""
        for parameter in absent:
            _wait_for(parameter)
        return function(*args, **kwargs)


def _wait_for(parameter: torch.Tensor | None) -> None:
    source = getattr(type(parameter), "source", None)
    if isinstance(source, _Gathered):
        source.wait()


def _before_forward(module: nn.Module, args: object) -> None:
    """Wait for the parameters of a module that is called. Its forward may give them to code that asks for pointers.

    A fused kernel takes those of all layers of a block, which are its children and have none themselves (the mixer of
    Mamba, fused MLPs). A block that calls such children waits for all of them together, which hides little less.
    """
    for parameter in module._parameters.values():
        if type(parameter) is not nn.Parameter:
            _wait_for(parameter)
    if children := module._modules:
        if "_orig_mod" in children:  # what is compiled in this call must meet neither such parameters nor this hook
            _end_all_gathers()
        for reader in _modules_read_by(module, children.values()):
            for parameter in reader._parameters.values():
                if type(parameter) is not nn.Parameter:
                    _wait_for(parameter)


def _modules_read_by(module: nn.Module, children: Iterable[nn.Module | None]) -> Iterable[nn.Module]:
    """Return modules whose parameters the forward of ``module`` may use before, or without, calling them."""
    if isinstance(module, _READ_CHILDREN):
        return module.modules()
    if type(module) is nn.Sequential:
        return ()
    present = [child for child in children if child is not None]
    return () if any(child._modules for child in present) else present
