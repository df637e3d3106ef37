"""Loss scale of fp16 training, as a small state machine.

The loss is multiplied by the scale before backward, so that small gradients do not become 0 in fp16. If a gradient
overflows, the step is skipped and the scale is reduced; after many good steps it grows. This module works with plain
numbers: it imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

# Largest scale. Gradients are multiplied by its inverse in fp32, which is still a normal number.
MAX_SCALE = 2.0**126

FACTOR = 2.0  # by which the scale grows and is reduced


class ScaleChange(NamedTuple):
    """Result of one call of `LossScaler.update`.

    Attributes:
        before: the scale of the step that has just ended.
        after: the scale of the next step.
        at_minimum: the scale should have been reduced after an overflow, but was at `min_scale` already; always False
            for a static scale.
    """

    before: float
    after: float
    at_minimum: bool


class LossScaler:
    """A static or dynamic loss scale with DeepSpeed's parameters.

    Args:
        scale: the initial value, `2 ** initial_scale_power` for a dynamic scale.
        dynamic: False keeps `scale` unchanged.
        window: good steps in a row after which the scale doubles.
        hysteresis: number of overflows that it takes to halve the scale. The count starts anew when the scale grows,
            but not after it is halved, so that further overflows halve it at once.
        consecutive_hysteresis: the count also starts anew after every good step.
        min_scale: the scale is never reduced below it.

    The scale grows after exactly `window` good steps, counted from the start, from the last overflow, or from the last
    growth. DeepSpeed needs one good step more for the first growth and for the first one after an overflow.

    Raises:
        ValueError: values are wrong alone or together; the message has all mistakes.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        dynamic: bool = True,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
    ) -> None:
        errors = []
        if not _positive(scale) or scale > MAX_SCALE:
            errors.append(f"scale must be a positive number up to 2**126 (for fp32's sake), but is {scale!r}")
        if dynamic:
            if not _is_int(window):
                errors.append(f"window must be a whole number of steps of at least 1, but is {window!r}")
            if not _is_int(hysteresis):
                errors.append(f"hysteresis must be a whole number of overflows of at least 1, but is {hysteresis!r}")
            if not _positive(min_scale):
                errors.append(f"min_scale must be a positive number, but is {min_scale!r}")
            elif _positive(scale) and scale < min_scale:
                errors.append(
                    f"the initial scale (2 to the power of fp16.initial_scale_power) is {scale!r}, which is below "
                    f"min_scale (fp16.min_loss_scale) = {min_scale!r}"
                )
        if errors:
            raise ValueError("The loss scaler cannot be made: " + "; ".join(errors) + ".")
        self.dynamic = dynamic
        self.window = window
        self.hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
        self.min_scale = float(min_scale)
        self._scale = float(scale)
        self._good_steps = 0
        self._hysteresis_left = hysteresis

    @property
    def scale(self) -> float:
        """Factor for the loss of the current step."""
        return self._scale

    def update(self, overflow: bool) -> ScaleChange:
        """Update the scale at the end of a step.

        Args:
            overflow: a gradient was not finite on any rank; the same value on all ranks.
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
        self._scale = max(self._scale / FACTOR, self.min_scale)
        return at_minimum

    def _after_good_step(self) -> bool:
        self._good_steps += 1
        grows = self._good_steps >= self.window
        if grows:
            self._good_steps = 0
            if self._scale * FACTOR <= MAX_SCALE:
                self._scale *= FACTOR
        if grows or self.consecutive_hysteresis:
            self._hysteresis_left = self.hysteresis
        return False

    def state_dict(self) -> dict[str, float | int]:
        """Return the state without the configuration: {"scale", "good_steps", "hysteresis_left"}."""
        return {"scale": self._scale, "good_steps": self._good_steps, "hysteresis_left": self._hysteresis_left}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Continue from a saved `state_dict()`.

        This scaler's own configuration counts, not that of the saving run. A static scale stays as it is. A smaller
        window, a smaller hysteresis or a larger min_scale takes effect at once.

        Raises:
            ValueError: the state is not that of a LossScaler; nothing is changed then.
        """
        expected = set(self.state_dict())
        if set(state) != expected:
            raise ValueError(
                f"A loss scaler's state has the keys {sorted(expected)}, but this one has {sorted(map(str, state))}."
            )
        scale, good_steps, hysteresis_left = state["scale"], state["good_steps"], state["hysteresis_left"]
        if not _positive(scale) or scale > MAX_SCALE:
            raise ValueError(f"The saved loss scale must be a positive number up to 2**126, but is {scale!r}.")
        if not _is_int(good_steps, 0):
            raise ValueError(f"The saved good_steps must be a whole number of at least 0, but is {good_steps!r}.")
        if not _is_int(hysteresis_left):
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


def _is_int(value: object, minimum: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum
