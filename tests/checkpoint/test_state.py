"""The content of a state file, before anything of it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerolite.checkpoint.state import SavedState, validated

COUNTS = {"micro_steps": 8, "global_steps": 2**53, "skipped_steps": 0, "skipped_in_a_row": 0}
STATE: dict[str, Any] = {
    "parameters": {}, "buffers": {}, "extra": {}, "optimizer": {"type": "SGD", "groups": [], "scalars": {}},
    "lr_scheduler": None, "loss_scaler": None, "counters": {**COUNTS, "last_norm": 1.0, "weight_unit": 1.0},
    "loaders": None, "client_state": {},
}  # fmt: skip


def said(state: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        validated(lambda: SavedState.model_validate(state))
    return str(caught.value)


def test_a_problem_names_the_entry_what_was_expected_and_what_is_there() -> None:
    groups = [{"names": [], "values": {}}, {"names": [7], "values": {}}]
    optimizer: dict[str, Any] = {"type": "SGD", "groups": groups, "scalars": {"step": {"w": torch.zeros(2)}}}
    assert said({**STATE, "optimizer": optimizer}) == "optimizer.groups.1.names.0: expected a valid string, found 7"
    optimizer["groups"] = []
    assert "expected a number, found tensor([0., 0.])" in said({**STATE, "optimizer": optimizer})
    buffers = {"b": {"dtype": "F33", "shape": []}}
    assert said({**STATE, "buffers": buffers}).startswith("buffers.b.dtype: expected a dtype out of ")
    assert said({key: STATE[key] for key in STATE if key != "extra"}) == "extra: expected this entry, found none"
