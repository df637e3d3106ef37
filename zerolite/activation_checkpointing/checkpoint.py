"""Activation checkpointing on top of torch's, with saved inputs that may be offloaded."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zerolite.activation_checkpointing.activation_shards import ActivationShards
from zerolite.activation_checkpointing.copies import Copies, Copy
from zerolite.activation_checkpointing.memory import DeviceMemory, HostBuffers, MemorySource
from zerolite.activation_checkpointing.saved_inputs import InputSaver, SavedInput
from zerolite.comm import Communicator
from zerolite.config import ActivationCheckpointingConfig

_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")  # of torch's checkpoint


class _Nesting(threading.local):
    """Depth of checkpoints in this thread: inner checkpoints are kept by the outer one."""

    depth = 0


_nesting = _Nesting()


class Checkpointing:
    """One way of checkpointing, with its memory."""

    def __init__(
        self,
        settings: ActivationCheckpointingConfig,
        device: torch.device,
        group: Callable[[], Communicator | None],
    ) -> None:
        """
        Args:
            device: the one that computes.
            group: gives the ranks over which inputs are sharded, None where there are none.
        """
        self.settings = settings
        self.used = False  # whether a checkpoint was called
        self._device = device
        self._latest: weakref.ref[_Call] | None = None
        keeps = settings.cpu_checkpointing or settings.partition_activations
        self._saver = self._make_saver(group) if keeps else None

    def _make_saver(self, group: Callable[[], Communicator | None]) -> InputSaver:
        settings, cuda = self.settings, self._device.type == "cuda"
        copies = Copies(self._device)
        source: MemorySource = DeviceMemory(self._device)
        if settings.cpu_checkpointing:
            source = HostBuffers(cuda, copies.finish)
        sharding = _Sharding(group if settings.partition_activations else lambda: None)
        return InputSaver(self._device, source, sharding, copies)

    def checkpoint(self, function: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)``, computed again in backward; see :func:`zerolite.checkpointing.checkpoint`."""
        self.used = True
        kwargs = dict(kwargs)
        if kwargs.pop("use_reentrant", None):
            raise ValueError(
                "zerolite.checkpointing.checkpoint: expected use_reentrant to be False, which is how it works, got "
                "True; leave it out (the numbers are the same)"
            )
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if self._saver is None or _nesting.depth or torch.compiler.is_compiling():
            return torch_checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
        call = _Call(self, function, args, kwargs)
        try:
            return torch_checkpoint(call, *call.passed, use_reentrant=False, **options)
        finally:
            call.end_forward()

    def save(self, call: _Call, leaves: list[Any]) -> tuple[dict[int, SavedInput], Copy | None]:
        """Save ``leaves``, and return the saved inputs by position."""
        if self._saver is None:
            return {}, None
        chosen = [index for index, leaf in enumerate(leaves) if self._saver.takes(leaf)]
        if not chosen:
            return {}, None
        call.before, self._latest = self._latest, weakref.ref(call)
        saved, copy = self._saver.save([leaves[index] for index in chosen])
        return dict(zip(chosen, saved, strict=True)), copy

    def restore(self, call: _Call) -> dict[int, torch.Tensor]:
        """Return the inputs that :meth:`save` has saved, on the device, in backward."""
        if self._saver is None or not call.saved:
            return {}
        before = None if call.before is None else call.before()
        following = [] if before is None else list(before.saved.values())
        tensors = self._saver.restore(list(call.saved.values()), following, call.name)
        return dict(zip(call.saved, tensors, strict=True))

    def memory(self) -> list[torch.Tensor]:
        """Buffers for inputs that are not in use now."""
        return [] if self._saver is None else self._saver.memory()


class _Sharding:
    """The way that inputs are sharded now: over the ranks of ``group()``."""

    def __init__(self, group: Callable[[], Communicator | None]) -> None:
        self._group = group
        self._latest: tuple[Communicator, ActivationShards] | None = None

    def __call__(self) -> ActivationShards | None:
        comm = self._group()
        if comm is None or comm.world_size == 1:
            return None
        if self._latest is None or self._latest[0] is not comm:
            self._latest = (comm, ActivationShards(comm))
        return self._latest[1]


class _Call:
    """One call of a function that is checkpointed, which torch calls for the first time and again in backward. What it
    keeps lives as long as the graph does that needs it."""

    def __init__(
        self, owner: Checkpointing, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        self.name = _name(function)
        self.before: weakref.ref[_Call] | None = None  # the one before it in forward, whose backward comes after
        self._owner = owner
        self._function = function
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)  # until forward has ended
        leaves, self._structure = _pytree.tree_flatten((args, kwargs), is_leaf=_is_leaf)
        self.saved, self._copy = owner.save(self, leaves)
        self._requires = {index: leaves[index].requires_grad for index in self.saved}
        positional = {id(value) for value in args if isinstance(value, torch.Tensor)}
        self._others = [i for i, leaf in enumerate(leaves) if id(leaf) in positional and i not in self.saved]
        elsewhere = {*self.saved, *self._others}
        self._constants = [None if i in elsewhere else leaf for i, leaf in enumerate(leaves)]
        devices = {leaves[index].device: leaves[index] for index in self.saved}
        # What torch keeps, with its checks; and something of every device, whose random state it keeps.
        self.passed = [leaves[i] for i in self._others] + [tensor.new_empty(0) for tensor in devices.values()]

    def __call__(self, *passed: torch.Tensor) -> object:
        args, kwargs = self._again(passed) if self._first is None else self._first
        _nesting.depth += 1
        try:
            return self._function(*args, **kwargs)
        finally:
            _nesting.depth -= 1

    def _again(self, passed: tuple[torch.Tensor, ...]) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments once more, in containers of their own."""
        leaves = list(self._constants)
        for index, tensor in self._owner.restore(self).items():
            leaves[index] = tensor.detach().requires_grad_(self._requires[index])
        for index, tensor in zip(self._others, passed, strict=False):
            leaves[index] = tensor
        args, kwargs = _pytree.tree_unflatten(leaves, self._structure)
        return args, kwargs

    def end_forward(self) -> None:
        """Let go of the inputs."""
        for entry in self.saved.values():
            entry.unchanged()  # looks while they are there
        if self._copy is not None:
            self._copy.wait()
        self._first = self._copy = None
        self.passed = []


def _is_leaf(value: object) -> bool:
    """True for all but the containers of Python itself: others may not survive being taken apart."""
    return type(value) not in (list, tuple, dict) and not (isinstance(value, tuple) and hasattr(value, "_fields"))


def _name(function: Callable[..., object]) -> str:
    while isinstance(function, functools.partial):
        owner = function.args[0] if function.args else None
        function = type(owner) if isinstance(owner, torch.nn.Module) else function.func
    bound = getattr(function, "__self__", None)
    if isinstance(bound, torch.nn.Module):
        function = type(bound)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"the checkpoint of {name}"
