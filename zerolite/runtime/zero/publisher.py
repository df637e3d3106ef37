"""Master weights to compute parameters on every rank, overlapped with the rest of the step and, if asked, with the
next forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerolite.comm import Communicator, Pending
from zerolite.runtime.module_hook import WeakHook
from zerolite.runtime.zero.buffer import ParameterBuffer


class Publisher:
    """Launches one all-gather per bucket as soon as it is updated and knows which are still in flight.

    With ``overlap_forward`` the gathers stay in flight after the step; a hook before each module's forward waits
    for the buckets of that module's own parameters. A parameter that is used outside the forward of its owner (a
    tied head called as a function) has no such hook: it is recognised when its gradient arrives, in the first step,
    before anything was in flight, and its bucket is waited for by the root module from then on.
    """

    def __init__(self, buffer: ParameterBuffer, comm: Communicator, gather: bool, overlap_forward: bool) -> None:
        self._buffer = buffer
        self._comm = comm
        self._gather = gather
        self.overlaps = overlap_forward and gather and comm.world_size > 1
        self._pending: dict[int, Pending] = {}
        self._entered: set[int] = set()  # parameters whose owner's forward ran since the last publish
        self._early: set[int] = set()  # buckets that hold parameters used outside their owner's forward
        self._raced: set[int] = set()  # buckets that were in flight when the current forward began
        self.handles: list[Any] = []  # of the installed hooks
        self.on_published: Callable[[], None] = lambda: None  # after the last bucket of a step

    def publish_bucket(self, bucket: int, rounded: bool = False) -> None:
        """Called for every bucket in index order by the update phase, on all ranks. ``rounded``: the update has already
        written this rank's range of the compute parameters; it came after :meth:`wait`."""
        self.wait([bucket])  # of the step before, if no forward has needed it since
        self._buffer.publish(bucket, rounded)
        if self._gather:
            pending = self._comm.all_gather(self._buffer.compute[bucket], "parameters", bucket + 1)
            self._pending[bucket] = pending

    def end_step(self) -> None:
        """After the last bucket: without ``overlap_forward`` the parameters are whole when this returns."""
        if not self.overlaps:
            self.wait_all()
        self._entered.clear()
        self._raced = set(self._pending)
        self.on_published()

    def wait(self, buckets: Sequence[int]) -> None:
        """Closes the hazard of a forward that reads parameters whose gather is still writing them, and of an update
        that writes what a gather is still sending."""
        for bucket in buckets:
            pending = self._pending.pop(bucket, None)
            if pending is not None:
                pending.wait()

    def wait_all(self) -> None:
        self.wait(sorted(self._pending))
        self._raced.clear()

    def attach(self, root: torch.nn.Module) -> None:
        """Install the hooks before forward (nothing without ``overlap_forward``), in the place of those there are."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        if not self.overlaps:
            return
        layout = self._buffer.layout
        index_of = {id(parameter): index for index, parameter in enumerate(self._buffer.parameters)}
        for module in root.modules():
            owned = [index_of[id(p)] for p in module.parameters(recurse=False) if id(p) in index_of]
            if module is root or owned:
                buckets = sorted({layout.slots[index].bucket for index in owned})
                hook = _ForwardHook(self, buckets, owned, is_root=module is root)
                self.handles.append(hook.install(module.register_forward_pre_hook, prepend=True))

    def before_forward(self, buckets: Sequence[int], owned: Sequence[int], is_root: bool) -> None:
        self._entered.update(owned)
        if self._pending:
            if is_root:
                self.wait(sorted(self._early))
            self.wait(buckets)

    def on_gradient(self, index: int) -> None:
        """A gradient arrived: was its parameter used through its owner's forward? Raises RuntimeError if it may
        have been read too early."""
        if not self.overlaps or index in self._entered:
            return
        slot = self._buffer.layout.slots[index]
        if slot.bucket in self._early:
            return
        self._early.add(slot.bucket)
        if slot.bucket in self._raced:
            raise RuntimeError(
                f"overlap_comm: parameter '{slot.name}' was used outside the forward of the module that owns it, "
                "for the first time "
                "after training began, while its new values may still have been on their way. This step's "
                "gradients are not "
                "to be trusted. Set zero_optimization.overlap_comm to false (or leave it out) for models that do this."
            )


class _ForwardHook(WeakHook[Publisher]):
    """A forward pre-hook; an object and not a closure, so that it shows its purpose in a module's hook list."""

    def __init__(self, publisher: Publisher, buckets: list[int], owned: list[int], is_root: bool) -> None:
        super().__init__(publisher)
        self._buckets = buckets
        self._owned = owned
        self._is_root = is_root

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        publisher = self.owner()
        if publisher is not None:
            publisher.before_forward(self._buckets, self._owned, self._is_root)
