"""Learning rate schedules by name: DeepSpeed's five and torch's."""

from __future__ import annotations

from collections.abc import Mapping

import torch.optim.lr_scheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zerolite.config.errors import ConfigError
from zerolite.optim.keyword_params import check_keyword_params, nearest
from zerolite.optim.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

_PATH = "scheduler.params"


def build_scheduler(type_name: str, params: Mapping[str, object] | None, optimizer: Optimizer) -> LRScheduler:
    """Build the schedule of `{"scheduler": {"type": type_name, "params": params}}` for `optimizer`.

    Args:
        type_name: WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle, or a class of
            torch.optim.lr_scheduler, in upper or lower case.
        params: the constructor's parameters, without the optimizer; "auto" means the default.
        optimizer: its learning rates are set.

    Raises:
        ConfigError: with a sentence for each key that is unknown, missing or of the wrong type.
    """
    known = {**TORCH_SCHEDULES, **SCHEDULES}
    name = type_name.lower()
    if name in _UNUSABLE:
        raise ConfigError([("scheduler.type", f"'{type_name}' is not supported: {_UNUSABLE[name]}")])
    if name not in known:
        names = sorted(cls.__name__ for key, cls in known.items() if key not in _UNUSABLE)
        sentence = (
            f"'{type_name}' is not known{nearest(type_name, names)}; known are {', '.join(names)}; a schedule of your "
            f"own goes to zerolite.initialize(..., lr_scheduler=...)"
        )
        raise ConfigError([("scheduler.type", sentence)])
    cls = known[name]
    kwargs, errors = check_keyword_params(_PATH, cls, params or {}, hidden=("optimizer", "verbose"))
    length = _PERIODS.get(name, "")
    if length in kwargs and kwargs[length] < 1:
        errors.append((f"{_PATH}.{length}", f"expected a whole number of at least 1, got {kwargs[length]}"))
    if errors:
        raise ConfigError(errors)
    try:
        return cls(optimizer, **kwargs)
    except Exception as error:  # torch checks few of these values: any exception is about them
        reason = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ConfigError([(_PATH, f"{cls.__name__} does not take these values: {reason}")]) from error


SCHEDULES: dict[str, type[LRScheduler]] = {
    cls.__name__.lower(): cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}
TORCH_SCHEDULES: dict[str, type[LRScheduler]] = {
    name.lower(): cls
    for name, cls in vars(torch.optim.lr_scheduler).items()
    if isinstance(cls, type) and issubclass(cls, LRScheduler) and not name.startswith("_") and cls is not LRScheduler
}
_PERIODS = {"steplr": "step_size", "cosineannealinglr": "T_max"}
"""Argument that torch's schedule divides by, unchecked, in its first step."""
_OBJECTS = "it is made of other schedules; build it in Python and pass it to zerolite.initialize(..., lr_scheduler=...)"
_UNUSABLE = {
    "reducelronplateau": "its step() needs a metric, and the engine has none; call it in your own loop",
    "sequentiallr": _OBJECTS,
    "chainedscheduler": _OBJECTS,
}
