"""Guard of ``optimizer.state``: read shards, refuse changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from zerolite.zero.sharded_optimizer import StateView


class StateOfParameter(dict[str, Any]):
    """One parameter's states on this rank, read-only. A copy is an ordinary dict."""

    def _refuse(self, *ignored: Any, **more: Any) -> NoReturn:
        _refuse()

    __setitem__ = __delitem__ = __ior__ = pop = popitem = clear = update = setdefault = _refuse

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class GuardedState(StateView):
    """Optimizer state with two kinds of keys.

    The inner optimizer reads and writes states with its shards as keys. Users read, with the model's parameters as
    keys, this rank's part of the states in the shape of its shard. Only parameters appear in iteration and length.
    """

    def __init__(self, states: Mapping[Any, Any], read: Callable[[int], dict[str, Any]]) -> None:
        """
        Args:
            states: the states so far, by shard.
            read: function from the index of a parameter to its states on this rank.
        """
        super().__init__(dict, states)
        self._read = read
        self._parameters: dict[int, tuple[int, torch.Tensor]] = {}  # by id: index, parameter

    def set_parameters(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take these as the model's parameters. Any other key is a shard."""
        self._parameters = {id(parameter): (index, parameter) for index, parameter in enumerate(parameters)}

    def __getitem__(self, key: object) -> Any:
        found = self._parameters.get(id(key))
        return super().__getitem__(key) if found is None else StateOfParameter(self._read(found[0]))

    def __contains__(self, key: object) -> bool:
        found = self._parameters.get(id(key))
        return super().__contains__(key) if found is None else bool(self._read(found[0]))

    def get(self, key: object, default: object = None) -> Any:
        return super().get(key, default) if id(key) not in self._parameters else self[key] or default

    def __setitem__(self, key: object, value: object) -> None:
        self._check(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: object) -> None:
        self._check(key)
        super().__delitem__(key)

    def pop(self, key: object, *default: Any) -> Any:
        self._check(key)
        return super().pop(key, *default)

    def _check(self, key: object) -> None:
        if id(key) in self._parameters:
            _refuse()

    def _of_parameters(self) -> dict[torch.Tensor, StateOfParameter]:
        return {parameter: state for _, parameter in self._parameters.values() if (state := self[parameter])}

    def __iter__(self) -> Iterator[Any]:
        return iter(self._of_parameters())

    def __len__(self) -> int:
        return len(self._of_parameters())

    def __bool__(self) -> bool:
        return bool(self._of_parameters())

    def keys(self) -> Any:
        return self._of_parameters().keys()

    def values(self) -> Any:
        return self._of_parameters().values()

    def items(self) -> Any:
        return self._of_parameters().items()

    def copy(self) -> Any:
        return self._of_parameters()

    def __reduce__(self) -> Any:
        return dict, (self._of_parameters(),)

    def _refuse(self, *ignored: Any, **more: Any) -> NoReturn:
        _refuse()

    __ior__ = clear = popitem = update = setdefault = _refuse


def _refuse() -> NoReturn:
    raise RuntimeError(
        "optimizer.state is for reading: the engine has the states, in parts on all ranks. To change them, call "
        "zerolite.set_full_optimizer_state(p, name, value) on all ranks; to restore them, "
        "engine.optimizer.load_state_dict()"
    )
