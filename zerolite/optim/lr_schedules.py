"""DeepSpeed's five learning rate schedules, for torch's optimizers.

`scheduler.step()` is called once after each applied update. After n calls, `last_epoch` is n and the optimizer has the
learning rate of update n + 1.

DeepSpeed counts from -1: its `last_batch_iteration` is n - 1, and the learning rates are those of that count. So
WarmupLR has its lowest learning rate in the first two updates. It has its highest from update `warmup_num_steps` + 1
("log") or + 2 ("linear") on. `scheduler.step(n)` jumps: it sets `last_batch_iteration` to n.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zerolite.optim.keyword_params import is_number

logger = logging.getLogger("zerolite")


class _ClosedForm(LRScheduler):
    """Schedule whose learning rates depend on the number of updates alone.

    Its state is only that number. So after loading a checkpoint, the configuration of the new job still decides the
    learning rates.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        _check_whole(-1, last_batch_iteration=last_batch_iteration)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))
        super().__init__(optimizer, last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        """Number of updates done, counted like DeepSpeed: -1 before the first."""
        return self.last_epoch - 1

    def step(self, last_batch_iteration: int | None = None, *, batch_iteration: int | None = None) -> None:
        """Advance by one update, or jump to `last_batch_iteration`. DeepSpeed's schedules use both argument names."""
        jump = batch_iteration if last_batch_iteration is None else last_batch_iteration
        if jump is None:
            super().step()
        else:
            _check_whole(-1, last_batch_iteration=jump)
            self.last_epoch = jump + 1
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Return {"last_epoch": number of updates done}."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`, or from DeepSpeed's {"last_batch_iteration": n}.

        This sets the optimizer's learning rates (and momenta) for the next update.
        """
        if set(state_dict) == {"last_batch_iteration"}:
            self.step(state_dict["last_batch_iteration"])
            return
        if set(state_dict) != {"last_epoch"}:
            raise ValueError(
                f"The state of {type(self).__name__} has one key, 'last_epoch', but this one has {sorted(state_dict)}."
            )
        _check_whole(0, last_epoch=state_dict["last_epoch"])
        self.last_epoch = state_dict["last_epoch"]
        self._apply()

    def _apply(self) -> None:
        lrs = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            # Write into the tensor: a CUDA graph or a compiled step may read its memory.
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._last_lr = lrs

    def _per_group(self, name: str, value: float | Sequence[float]) -> list[float]:
        return _per_group(self.optimizer, name, value)


class WarmupLR(_ClosedForm):
    """Warm-up from `warmup_min_lr` to `warmup_max_lr`, then constant.

    Update n (from 1) has the learning rate min + (max - min) * f. With i = n - 2 and W = `warmup_num_steps`:

        f = 0                      for i < 0
        f = log(i + 1) / log(W)    for i < W, "log"
        f = i / W                  for i < W, "linear"
        f = 1                      afterwards

    So the first two updates both use min. W = 0 means no warm-up: max from the first update on. W = 1 counts as 2.

    Args:
        optimizer: its learning rates are set.
        warmup_min_lr: a number, or a list with one per parameter group.
        warmup_max_lr: the same. None: the optimizer's own learning rates.
        warmup_num_steps: W.
        warmup_type: "log" or "linear".
        last_batch_iteration: DeepSpeed's count of updates to start from.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: Literal["log", "linear"] = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        self.warmup_min_lr = warmup_min_lr
        self.warmup_max_lr = warmup_max_lr
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rates of the next update, one per parameter group."""
        lows = self._per_group("warmup_min_lr", self.warmup_min_lr)
        if self.warmup_max_lr is None:
            highs = [float(lr) for lr in self.base_lrs]
        else:
            highs = self._per_group("warmup_max_lr", self.warmup_max_lr)
        gamma = self._gamma(self.last_batch_iteration)
        return [low + (high - low) * gamma for low, high in zip(lows, highs, strict=True)]

    def _gamma(self, iteration: int) -> float:
        if _warming_up(iteration, self.warmup_num_steps):
            return _warmup_fraction(iteration, self.warmup_num_steps, self.warmup_type)
        return 1.0


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then a linear decay to `warmup_min_lr`.

    After the warm-up, update n has the learning rate min + (max - min) * (T - i) / (T - W). Here i = n - 2, W =
    `warmup_num_steps` and T = `total_num_steps`. For i >= T it is min.

    The other arguments are those of WarmupLR, but the default of `warmup_max_lr` is 0.001.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: Literal["log", "linear"] = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _total_steps(total_num_steps, warmup_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _gamma(self, iteration: int) -> float:
        if _warming_up(iteration, self.warmup_num_steps):
            return super()._gamma(iteration)
        left = (self.total_num_steps - iteration) / max(1, self.total_num_steps - self.warmup_num_steps)
        return min(1.0, max(0.0, left))


class WarmupCosineLR(_ClosedForm):
    """Warm-up to the optimizer's own learning rate, then half a cosine down to `cos_min_ratio` of it.

    Update n (from 1) has the optimizer's learning rate times a ratio. With i = n - 2, W = `warmup_num_steps`, T =
    `total_num_steps`, m = `warmup_min_ratio`, c = `cos_min_ratio` and f as in WarmupLR:

        ratio = 0                                                           for i < 0
        ratio = m + (1 - m) * f                                             for i < W
        ratio = c + (1 - c) * (1 + cos(pi * (i - W + 1) / (T - W))) / 2     afterwards
        ratio = c                                                           after T

    W = 0 means no warm-up: the ratio of the first update is 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: Literal["log", "linear"] = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        _check_not_negative(warmup_min_ratio=warmup_min_ratio, cos_min_ratio=cos_min_ratio)
        self.total_num_steps = _total_steps(total_num_steps, warmup_num_steps)
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rates of the next update, one per parameter group."""
        ratio = self._ratio(self.last_batch_iteration)
        return [float(lr) * ratio for lr in self.base_lrs]

    def _ratio(self, iteration: int) -> float:
        if _warming_up(iteration, self.warmup_num_steps):
            if iteration < 0:
                return 0.0
            fraction = _warmup_fraction(iteration, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * fraction
        decay_steps = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (iteration - self.warmup_num_steps + 1) / decay_steps)
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2


class LRRangeTest(_ClosedForm):
    """Smith's range test: the learning rate grows until training diverges, which shows the largest useful one.

    Update n (from 1) has the learning rate `lr_range_test_min_lr` * (1 + `lr_range_test_step_rate` * q) with q = (n -
    1) / `lr_range_test_step_size`. With `lr_range_test_staircase`, q is rounded down. `lr_range_test_min_lr` is a
    number, or a list with one per parameter group.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: float | list[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        _check_whole(1, lr_range_test_step_size=lr_range_test_step_size)
        if not is_number(lr_range_test_step_rate):
            raise ValueError(f"lr_range_test_step_rate must be a number, but is {lr_range_test_step_rate!r}.")
        self.min_lr = lr_range_test_min_lr
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rates of the next update, one per parameter group."""
        interval = self.last_epoch // self.step_size if self.staircase else self.last_epoch / self.step_size
        factor = 1 + self.step_rate * interval
        return [lr * factor for lr in self._per_group("lr_range_test_min_lr", self.min_lr)]


# After the cycle the momentum grows. It stops here, because Adam's bias correction divides by 1 - beta**step.
_LARGEST_MOMENTUM = 0.9999


class OneCycle(_ClosedForm):
    """Smith's one-cycle policy: the learning rate up and down again, the momentum down and up, then an optional decay.

    Learning rate: in the cycle it is min + (max - min) * s. The height s is 0 in the first update. It rises
    to 1 over `cycle_first_step_size` updates, and falls back to 0 over `cycle_second_step_size` updates (default: as
    many). If the stair count of a half is k > 0, s moves in k stairs. After the cycle the learning rate is min / (1 +
    `decay_lr_rate` * d / `decay_step_size`), where d counts the updates since the cycle. Without a rate or a size it
    stays at min.

    Momentum, with `cycle_momentum`: this is `betas[0]`, or `momentum` if that is not 0. In the cycle it is max - (max -
    min) * s with `cycle_max_mom` and `cycle_min_mom`. Afterwards it is max * (1 + `decay_mom_rate` * d /
    `decay_step_size`), at most 0.9999. The first update has `cycle_min_mom`, as in DeepSpeed. An optimizer without a
    momentum is left alone, with a warning.

    Two things differ from DeepSpeed: `betas[1]` stays as the optimizer has it (DeepSpeed: 0.99), and `momentum` is
    cycled too.

    `cycle_min_lr`, `cycle_max_lr`, `cycle_min_mom` and `cycle_max_mom` are numbers, or lists with one per parameter
    group.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float | list[float],
        cycle_max_lr: float | list[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | list[float] = 0.8,
        cycle_max_mom: float | list[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        second_size = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        _check_whole(1, cycle_first_step_size=cycle_first_step_size)
        _check_whole(0, cycle_second_step_size=second_size, cycle_first_stair_count=cycle_first_stair_count)
        _check_whole(0, cycle_second_stair_count=second_stairs, decay_step_size=decay_step_size)
        _check_not_negative(decay_lr_rate=decay_lr_rate, decay_mom_rate=decay_mom_rate)
        self.first_size, self.second_size = cycle_first_step_size, second_size
        self.first_stairs, self.second_stairs = cycle_first_stair_count, second_stairs
        self.lr_decay = decay_lr_rate / decay_step_size if decay_step_size else 0.0
        self.mom_decay = decay_mom_rate / decay_step_size if decay_step_size else 0.0
        self.min_lr, self.max_lr = cycle_min_lr, cycle_max_lr
        self.min_mom, self.max_mom = cycle_min_mom, cycle_max_mom
        self.cycle_momentum = cycle_momentum
        if cycle_momentum:
            for name, moms in (("cycle_min_mom", cycle_min_mom), ("cycle_max_mom", cycle_max_mom)):
                if max(_per_group(optimizer, name, moms)) >= 1:
                    raise ValueError(f"{name} must be below 1, but is {moms!r}.")
            if all(_momentum_key(group) is None for group in optimizer.param_groups):
                logger.warning(
                    "OneCycle: %s has no momentum to cycle; cycle_momentum is off.", type(optimizer).__name__
                )
                self.cycle_momentum = False
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rates of the next update, one per parameter group."""
        lows = self._per_group("cycle_min_lr", self.min_lr)
        highs = self._per_group("cycle_max_lr", self.max_lr)
        beyond = self._beyond()
        if beyond > 0:
            return [low / (1 + self.lr_decay * beyond) for low in lows]
        height = self._height()
        return [low + (high - low) * height for low, high in zip(lows, highs, strict=True)]

    def get_momentum(self) -> list[float] | None:
        """Return the momenta of the next update, one per parameter group; None if they are not cycled."""
        if not self.cycle_momentum:
            return None
        lows = self._per_group("cycle_min_mom", self.min_mom)
        highs = self._per_group("cycle_max_mom", self.max_mom)
        if self.last_epoch == 0:
            return lows
        beyond = self._beyond()
        if beyond > 0:
            return [min(high * (1 + self.mom_decay * beyond), max(high, _LARGEST_MOMENTUM)) for high in highs]
        height = self._height()
        return [high - (high - low) * height for low, high in zip(lows, highs, strict=True)]

    def _apply(self) -> None:
        super()._apply()
        for group, momentum in zip(self.optimizer.param_groups, self.get_momentum() or (), strict=False):
            key = _momentum_key(group)
            if key == "betas":
                group["betas"] = (momentum, *group["betas"][1:])
            elif key == "momentum":
                group["momentum"] = momentum

    def _beyond(self) -> int:
        """Return the number of updates since the end of the cycle; 0 during the cycle."""
        return max(0, self.last_epoch - self.first_size - self.second_size)

    def _height(self) -> float:
        """Return the position in the cycle: 0 at the lowest learning rate, 1 at the highest."""
        if self.last_epoch == self.first_size + self.second_size:
            return 0.0
        if self.last_epoch <= self.first_size:
            position, size, stairs = self.last_epoch, self.first_size, self.first_stairs
        else:
            position = self.first_size + self.second_size - self.last_epoch
            size, stairs = self.second_size, self.second_stairs
        return position / size if stairs == 0 else (position * stairs // size) / stairs


def _momentum_key(group: Mapping[str, object]) -> str | None:
    if "betas" in group:
        return "betas"
    return "momentum" if group.get("momentum") else None


def _per_group(optimizer: Optimizer, name: str, value: float | Sequence[float]) -> list[float]:
    """Return one number per parameter group. Raises ValueError for a list of another length."""
    count = len(optimizer.param_groups)
    values: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise ValueError(
            f"{name} has {len(values)} values, but the optimizer has {count} parameter groups: give one for each."
        )
    for one in values:
        _check_not_negative(**{name: one})
    return [float(one) for one in values]


def _warming_up(iteration: int, steps: int) -> bool:
    """Return True during the warm-up. The first update, iteration -1, belongs to it, but only if there is one."""
    return steps > 0 and iteration < steps


def _warmup_fraction(iteration: int, steps: int, warmup_type: str) -> float:
    """Return the progress of the warm-up from 0 to 1, for an ``iteration`` from -1 to ``steps`` - 1."""
    if iteration < 0:
        return 0.0
    return math.log(iteration + 1) / math.log(steps) if warmup_type == "log" else iteration / steps


def _warmup_steps(steps: int) -> int:
    """Check the length of the warm-up and return it. 0 means none; 1 counts as 2, because log(1) is 0."""
    _check_whole(0, warmup_num_steps=steps)
    return steps if steps == 0 else max(2, steps)


def _warmup_type(warmup_type: str) -> str:
    if warmup_type not in ("log", "linear"):
        raise ValueError(f"warmup_type must be 'log' or 'linear', but is {warmup_type!r}.")
    return warmup_type


def _total_steps(total: int, warmup: int) -> int:
    _check_whole(1, total_num_steps=total)
    if isinstance(warmup, int) and total < warmup:
        logger.warning("total_num_steps is %d, which is less than warmup_num_steps = %d.", total, warmup)
    return total


def _check_whole(minimum: int, **values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"{name} must be a whole number of at least {minimum}, but is {value!r}.")


def _check_not_negative(**values: Any) -> None:
    for name, value in values.items():
        if not is_number(value) or value < 0:
            raise ValueError(f"{name} must be a number of at least 0, but is {value!r}.")
