"""The content of a state file, before anything of it is used."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from zerolite.checkpoint.state_check import check_state

STATE: dict[str, Any] = {
    "parameters": {},
    "buffers": {},
    "extra": {},
    "optimizer": {"type": "SGD", "groups": [], "scalars": {}},
    "lr_scheduler": None,
    "loss_scaler": None,
    "counters": {
        "micro_steps": 8,
        "global_steps": 2**53,
        "skipped_steps": 0,
        "skipped_in_a_row": 0,
        "last_norm": 1.0,
        "weight_unit": 1.0,
    },
    "loaders": None,
    "client_state": {},
}


@pytest.mark.parametrize("key", ["micro_steps", "global_steps", "skipped_steps", "skipped_in_a_row"])
@pytest.mark.parametrize("count", [-1, 2**53 + 1, 2**63, 10**400])
def test_counters_have_bounds(key: str, count: int) -> None:
    check_state(STATE, {})
    forged = copy.deepcopy(STATE)
    forged["counters"][key] = count
    with pytest.raises(ValueError, match=rf"counters.{key}: expected a number from 0 to 9007199254740992, found "):
        check_state(forged, {})
