"""Loss scale of fp16 training, as a small state machine.

The loss is multiplied by the scale before backward, so that small gradients do not vanish in fp16. A gradient that
overflows costs one skipped step and a smaller scale; a long run of good steps earns a larger one. This module knows
numbers only: it imports no torch and touches no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

# Growth stops here: the scale is multiplied in fp32, and the inverse of this one is still a normal fp32 number.
MAX_SCALE = 2.0**126


class ScaleChange(NamedTuple):
    """Result of one call of `LossScaler.update`.

    Attributes:
        before: the scale of the step that has just ended.
        after: the scale of the next step.
        at_minimum: an overflow came, the scale was at `min_scale` already and no hysteresis was left, so that nothing
            could be done about it; always False for a static scale.
    """

    before: float
    after: float
    at_minimum: bool


class LossScaler:
    """A static or dynamic loss scale with DeepSpeed's parameters.

    Args:
        scale: the initial value, `2 ** initial_scale_power` for a dynamic scale.
        dynamic: False keeps `scale` for ever.
        window: good steps in a row after which the scale is multiplied by `factor`.
        hysteresis: the number of overflows it takes to divide the scale by `factor`; those before the last only use the
            hysteresis up. It is refilled when the scale grows, or, with `consecutive_hysteresis`, by every good step;
            it is not refilled by a division, so that overflows which follow divide at once.
        min_scale: the scale is never divided below it.

    The scale grows after exactly `window` good steps, counted from the start, from the last overflow, or from the last
    growth. DeepSpeed needs one good step more for the first growth and for the first one after an overflow.

    Raises ValueError, with all that is wrong in one message, for values that make no sense together.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        dynamic: bool = True,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
        factor: float = 2.0,
    ) -> None:
        errors = []
        if not _positive(scale) or scale > MAX_SCALE:
            errors.append(f"scale must be a positive number up to 2**126 (for fp32's sake), but is {scale!r}")
        if dynamic:
            if not _whole(window):
                errors.append(f"window must be a whole number of steps of at least 1, but is {window!r}")
            if not _whole(hysteresis):
                errors.append(f"hysteresis must be a whole number of overflows of at least 1, but is {hysteresis!r}")
            if not _positive(min_scale):
                errors.append(f"min_scale must be a positive number, but is {min_scale!r}")
            elif _positive(scale) and scale < min_scale:
                errors.append(f"the initial scale is {scale!r}, which is below min_scale = {min_scale!r}")
            if not _positive(factor) or factor <= 1:
                errors.append(f"factor must be a number above 1, but is {factor!r}")
        if errors:
            raise ValueError("The loss scaler cannot be made: " + "; ".join(errors) + ".")
        self.dynamic = dynamic
        self.window = window
        self.hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
        self.min_scale = float(min_scale)
        self.factor = float(factor)
        self._scale = float(scale)
        self._good_steps = 0
        self._hysteresis_left = hysteresis

    @property
    def scale(self) -> float:
        """The factor for the loss of the step under way."""
        return self._scale

    def update(self, overflow: bool) -> ScaleChange:
        """Ends a step. Call it last in the step, with the same value on all ranks.

        overflow: some gradient was not finite, on any rank.
        """
        before = self._scale
        at_minimum = False
        if self.dynamic:
            at_minimum = self._after_overflow() if overflow else self._after_good_step()
        return ScaleChange(before, self._scale, at_minimum)

    def _after_overflow(self) -> bool:
        self._good_steps = 0
        if self._hysteresis_left > 1:
            self._hysteresis_left -= 1
            return False
        at_minimum = self._scale <= self.min_scale
        self._scale = max(self._scale / self.factor, self.min_scale)
        return at_minimum

    def _after_good_step(self) -> bool:
        self._good_steps += 1
        grows = self._good_steps >= self.window
        if grows:
            self._good_steps = 0
            if self._scale * self.factor <= MAX_SCALE:
                self._scale *= self.factor
        if grows or self.consecutive_hysteresis:
            self._hysteresis_left = self.hysteresis
        return False

    def state_dict(self) -> dict[str, float | int]:
        """The state of a run, without its configuration: {"scale", "good_steps", "hysteresis_left"}."""
        return {"scale": self._scale, "good_steps": self._good_steps, "hysteresis_left": self._hysteresis_left}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Continues from `state_dict()`. The configuration of this scaler wins over the one that saved: a static
        scale stays as it is; a smaller window, a smaller hysteresis and a larger min_scale take effect at once.

        Raises ValueError for a state that is not from a LossScaler; nothing is changed then.
        """
        expected = set(self.state_dict())
        if set(state) != expected:
            raise ValueError(
                f"A loss scaler's state has the keys {sorted(expected)}, but this one has {sorted(map(str, state))}."
            )
        scale, good_steps, hysteresis_left = state["scale"], state["good_steps"], state["hysteresis_left"]
        if not _positive(scale) or scale > MAX_SCALE:
            raise ValueError(f"The saved loss scale must be a positive number up to 2**126, but is {scale!r}.")
        if not _whole(good_steps, 0):
            raise ValueError(f"The saved good_steps must be a whole number of at least 0, but is {good_steps!r}.")
        if not _whole(hysteresis_left):
            raise ValueError(
                f"The saved hysteresis_left must be a whole number of at least 1, but is {hysteresis_left!r}."
            )
        if not self.dynamic:
            return
        self._scale = max(float(scale), self.min_scale)
        self._good_steps = int(good_steps)
        self._hysteresis_left = min(int(hysteresis_left), self.hysteresis)


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _whole(value: object, minimum: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum
