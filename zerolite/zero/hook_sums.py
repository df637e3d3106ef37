"""Local gradient sums that user hooks see in ``p.grad`` during a backward."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerolite.zero.shown_gradients import GradientPlaceholder
from zerolite.zero.stage3.released_parameter import opened, set_grad


class HookSums:
    """For parameters with a hook of ``register_post_accumulate_grad_hook``: plain PyTorch shows such a hook the sum of
    all backwards since the last step, and the hook may change it. The engine's own hook runs last, and takes what has
    been added to the sum.

    ``users``: indices of those parameters. Only they keep a copy of their gradient on this rank.
    """

    def __init__(self) -> None:
        self.users: set[int] = set()
        self._sums: dict[int, torch.Tensor] = {}
        self._early: list[tuple[OrderedDict[int, Any], int]] = []  # hooks from before the engine, and the engine's key

    def register(self, index: int, parameter: Any, hook: Callable[[torch.Tensor], None]) -> Any:
        """Register the engine's hook, which stays behind those of the user; return its handle."""
        early = parameter._post_accumulate_grad_hooks
        if not early:
            parameter._post_accumulate_grad_hooks = _OursLast(index, self.users)
        handle = parameter.register_post_accumulate_grad_hook(hook)
        if early:  # the handles of the user's hooks know this dict
            self._early.append((early, handle.id))
            self.users.add(index)
        return handle

    def show(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Before a backward: let autograd add to the sums."""
        for hooks, ours in self._early:
            if ours in hooks and next(reversed(hooks)) != ours:
                hooks[ours] = hooks.pop(ours)
        for index, total in self._sums.items():
            set_grad(parameters[index], total.clone())

    def hide(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """After a backward, or when one has raised: what is in ``p.grad`` of these parameters, and is not what the
        engine shows, is this rank's sum."""
        for index in self.users:
            with opened():
                if not isinstance(parameters[index].grad, GradientPlaceholder):
                    parameters[index].grad = None

    @torch.no_grad()
    def taken(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return what this backward and the hooks have added to the sum, which is ``gradient`` now."""
        before, total = self._sums.get(index), gradient.detach()
        self._sums[index] = total
        return total if before is None else total - before

    def forget(self, index: int) -> None:
        """The user has dropped the gradient of this parameter."""
        self._sums.pop(index, None)

    def clear(self) -> None:
        """No gradient is wanted any more."""
        self._sums.clear()


class _OursLast(OrderedDict[int, Any]):
    """Hooks of a parameter, of which the engine's, the first to be registered, runs last."""

    def __init__(self, index: int, users: set[int]) -> None:
        """users: takes ``index`` when there is another hook."""
        super().__init__()
        self._index, self._users = index, users
        self._ours: int | None = None

    def __setitem__(self, key: int, hook: Any) -> None:
        super().__setitem__(key, hook)
        if self._ours is None:
            self._ours = key
        elif key != self._ours and self._ours in self:
            super().__setitem__(self._ours, self.pop(self._ours))
            self._users.add(self._index)
