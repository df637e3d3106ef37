"""Hooks that an engine registers on a user's modules; copies of the modules drop them."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import torch
from torch.utils.hooks import RemovableHandle

Owner = TypeVar("Owner")

# Takes any arguments and returns None, as every hook may; and it is pickled by a name of the standard library.
_DOES_NOTHING = contextlib.nullcontext().__exit__

_LEFT_OUT = "zerolite: hooks that the copy does without"  # a key of deepcopy's memo, whose others are integers


_eval_frame: Any = torch._C._dynamo.eval_frame
Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Keep torch.compile out of ``function`` and of what it calls, as ``torch.compiler.disable`` does, which would
    import the compiler with zerolite."""
    kept_out: Any = function
    if hasattr(_eval_frame, "set_code_exec_strategy"):
        skip = _eval_frame._FrameAction.SKIP
        _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    else:  # torch 2.6

        @functools.wraps(function)
        def kept_out(*args: Any, **kwargs: Any) -> object:
            before = _eval_frame.set_eval_frame(None)
            try:
                return function(*args, **kwargs)
            finally:
                _eval_frame.set_eval_frame(before)

        _eval_frame.skip_code(kept_out.__code__)
    kept_out._torchdynamo_disable = True  # where it would be traced as part of a caller
    return cast(Function, kept_out)


class ModuleHook:
    """A hook of an engine on a module. A deep copy of the module is without it; a pickle of the module has a function
    of the standard library in its place, so that it can be loaded without zerolite. For one module each."""

    handle: RemovableHandle | None = None

    def install(self, register: Callable[..., RemovableHandle], **options: Any) -> RemovableHandle:
        """Put the hook on a module: ``register`` is a method such as ``module.register_forward_hook``."""
        self.handle = register(self, **options)
        return self.handle

    def stays_in_copies(self) -> bool:
        """True if a deep copy of the module needs the hook too."""
        return False

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        if self.stays_in_copies():
            return self
        hooks = None if self.handle is None else self.handle.hooks_dict_ref()
        if self.handle is not None and hooks is not None and id(hooks) in memo:
            left_out = memo.setdefault(_LEFT_OUT, _LeftOut())
            for known in (self.handle.hooks_dict_ref, *self.handle.extra_dict_ref):
                left_out.entries.append((copy.deepcopy(known(), memo), self.handle.id))
        return _DOES_NOTHING

    def __reduce__(self) -> Any:
        return _DOES_NOTHING.__reduce__()


class _LeftOut:
    """Entries to take out of a copy's dicts. ``copy.deepcopy`` fills those dicts itself, so they are taken out when it
    has ended, with its memo."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, int]] = []

    def __del__(self) -> None:
        for hooks, key in self.entries:
            hooks.pop(key, None)


class WeakHook(ModuleHook, Generic[Owner]):
    """A module's hook that knows its owner weakly, because the model may outlive the engine."""

    def __init__(self, owner: Owner) -> None:
        self.owner = weakref.ref(owner)


def is_compiled(module: torch.nn.Module) -> bool:
    """True if a module is compiled, and with it everything inside it, hooks too."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
