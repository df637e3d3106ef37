"""Activation checkpointing on top of torch's, whose saved inputs may be on the host."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zerolite.activation_checkpointing.saved_inputs import InputSaver, SavedInput
from zerolite.config import ActivationCheckpointingConfig

_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")  # of torch's checkpoint


class _Nesting(threading.local):
    """Depth of checkpoints in this thread. The outermost checkpoint saves the inputs of the inner ones."""

    depth = 0


_nesting = _Nesting()


class Checkpointing:
    """Checkpoints with some settings, and the memory of their saved inputs."""

    def __init__(self, settings: ActivationCheckpointingConfig, device: torch.device) -> None:
        """device: the device that computes."""
        self.settings = settings
        self.used = False  # a checkpoint has been called
        self.latest: weakref.ref[_Call] | None = None  # the latest call with saved inputs
        self._saver = InputSaver(device) if settings.cpu_checkpointing else None

    def checkpoint(self, function: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, Any]) -> Any:
        """Return ``function(*args, **kwargs)``, which is recomputed in backward: see the user's function
        :func:`zerolite.checkpointing.checkpoint`."""
        self.used = True
        kwargs = dict(kwargs)
        if kwargs.pop("use_reentrant", None):
            raise ValueError(
                "zerolite.checkpointing.checkpoint: expected use_reentrant=False, the only supported value, got True; "
                "leave it out (the numbers are the same)"
            )
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if self._saver is None or _nesting.depth or torch.compiler.is_compiling():
            return torch_checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
        call = _Call(self, self._saver, function, args, kwargs)
        try:
            return torch_checkpoint(call, *call.passed, use_reentrant=False, **options)
        finally:
            call.end_forward()

    def memory(self) -> list[torch.Tensor]:
        """Return the buffers for inputs that are not in use."""
        return [] if self._saver is None else list(self._saver.buffers.free)


class _Call:
    """One call of a checkpointed function. torch calls it in forward and again in backward.

    The saved inputs live as long as the graph that needs them.
    """

    def __init__(
        self,
        owner: Checkpointing,
        saver: InputSaver,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> None:
        self._saver = saver
        self._function = function
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)  # until forward has ended
        leaves, self._structure = _pytree.tree_flatten((args, kwargs), is_leaf=_is_leaf)
        chosen = [index for index, leaf in enumerate(leaves) if saver.accepts(leaf)]
        saved, self._copy = saver.save([leaves[index] for index in chosen])
        self.saved: dict[int, SavedInput] = dict(zip(chosen, saved, strict=True))  # by position
        self._before: weakref.ref[_Call] | None = None  # the previous call in forward, which comes next in backward
        if chosen:
            self._before, owner.latest = owner.latest, weakref.ref(self)
        self._requires = {index: leaves[index].requires_grad for index in self.saved}
        positional = {id(value) for value in args if isinstance(value, torch.Tensor)}
        self._others = [i for i, leaf in enumerate(leaves) if id(leaf) in positional and i not in self.saved]
        elsewhere = {*self.saved, *self._others}
        self._constants = [None if i in elsewhere else leaf for i, leaf in enumerate(leaves)]
        devices = {leaves[index].device: leaves[index] for index in self.saved}
        # torch saves these tensors with its checks. It also saves the random state of the devices of the empty ones.
        self.passed = [leaves[i] for i in self._others] + [tensor.new_empty(0) for tensor in devices.values()]

    def __call__(self, *passed: torch.Tensor) -> object:
        args, kwargs = self._restored(passed) if self._first is None else self._first
        _nesting.depth += 1
        try:
            return self._function(*args, **kwargs)
        finally:
            _nesting.depth -= 1

    def _restored(self, passed: tuple[torch.Tensor, ...]) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return the arguments again, in new containers."""
        leaves = list(self._constants)
        if self.saved:
            previous = None if self._before is None else self._before()
            needed_next = [] if previous is None else list(previous.saved.values())
            tensors = self._saver.restore(list(self.saved.values()), needed_next, _name(self._function))
            for index, tensor in zip(self.saved, tensors, strict=True):
                leaves[index] = tensor.detach().requires_grad_(self._requires[index])
        for index, tensor in zip(self._others, passed, strict=False):
            leaves[index] = tensor
        args, kwargs = _pytree.tree_unflatten(leaves, self._structure)
        return args, kwargs

    def end_forward(self) -> None:
        """Release the inputs."""
        for entry in self.saved.values():
            entry.unchanged()  # a later check would not find the tensor any more
        self._copy.wait()
        self._first = None
        self.passed = []


def _is_leaf(value: object) -> bool:
    """Return True for all but Python's own containers: other classes may not survive being flattened and rebuilt."""
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
