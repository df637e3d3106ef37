"""The hash of the numbers that an update uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerolite.diagnostics.consistency import UpdateNumbers, numbers_of

GROUP: dict[str, Any] = {
    "lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0, "amsgrad": False, "foreach": None, "initial_lr": 0.5,
}  # fmt: skip
KEYS = ("lr", "betas", "weight_decay", "amsgrad", "foreach")


def fingerprint(step: int = 3, divisor: float = 1.0, max_norm: float = 0.0, **changed: Any) -> int:
    numbers = UpdateNumbers(step, numbers_of([GROUP | changed, GROUP], KEYS), divisor, max_norm)
    value, tensors = numbers.fingerprint()
    assert not tensors and 0 <= value < 2**52
    return value


@pytest.mark.parametrize(
    "change",
    [{"lr": 1.000001e-3}, {"betas": (0.9, 0.96)}, {"betas": (0.95, 0.9)}, {"weight_decay": 1e-40}, {"amsgrad": True},
     {"foreach": False}, {"lr": float("nan")}, {"lr": torch.tensor(2e-3)}, {"step": 4}, {"divisor": 2.0},
     {"max_norm": 1.0}],
)  # fmt: skip
def test_a_change_shows(change: dict[str, Any]) -> None:
    assert fingerprint(**change) != fingerprint()


@pytest.mark.parametrize(
    "change", [{"lr": 1e-3 * (1 + 2**-52)}, {"lr": torch.tensor(1e-3)}, {"betas": (0.9, 0.95)}, {"initial_lr": 7.0}]
)
def test_what_the_update_does_not_see_is_no_change(change: dict[str, Any]) -> None:
    """The last bit of a double, the kind of a container, what only a scheduler reads."""
    assert fingerprint(**change) == fingerprint()


def test_values_are_those_of_the_moment() -> None:
    rate = torch.tensor(0.5)
    betas = [0.9, 0.95]
    kept = numbers_of([{"lr": rate, "betas": betas}], KEYS)
    rate.mul_(2)
    betas[0] = 0.0
    assert kept[0]["lr"].item() == 0.5 and kept[0]["betas"] == (0.9, 0.95)
