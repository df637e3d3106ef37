"""The sentence behind torch's errors about dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zerolite.precision.dtype_errors import explain

BF16 = torch.bfloat16


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.mask


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inside = nn.Sequential(nn.ReLU(), Masked())
        self.conv, self.norm = nn.Conv1d(4, 4, 1), nn.LayerNorm(4)
        self.gru, self.lstm = nn.GRU(4, 4), nn.LSTM(4, 4)

    def own(self) -> torch.Tensor:
        return self.first.weight @ torch.ones(4, 4)


def raised(call, model, compute=BF16):
    with pytest.raises((RuntimeError, ValueError)) as caught:
        call()
    explain(caught.value, model, compute)
    explain(caught.value, model, compute)  # once only
    return str(caught.value)


def test_the_module_and_the_remedies_are_named():
    model = Model().to(BF16)
    model.inside[1].mask = torch.ones(4, 4)
    x = torch.ones(2, 4)
    calls = {
        "first": lambda: model.first(x),
        "inside.1": lambda: model.inside(x.to(BF16)),
        "conv": lambda: model.conv(torch.ones(1, 4, 3)),
        "norm": lambda: model.norm(x),
        "gru": lambda: model.gru(x.to(BF16), torch.zeros(1, 4)),
        "lstm": lambda: model.lstm(x),
    }
    for name, call in calls.items():
        message = raised(call, model)
        first, sentence = message.rsplit("\n", 1)
        assert f"module '{name}' ({type(model.get_submodule(name)).__name__})" in sentence
        assert first and "zerolite" not in first, "torch's own words come first"
        for remedy in (f'"fp32_modules": ["{name}"]', '"data_types": {"buffer_dtype": "bf16"}', "torch_autocast"):
            assert remedy in sentence
    assert "(Model)" in (message := raised(model.own, model)) and "fp32_modules" not in message


def test_other_errors_and_other_precisions_are_left_alone():
    model = Model().to(BF16)
    assert "zerolite" not in raised(lambda: model.first(torch.ones(2, 4)), model, None)
    assert "zerolite" not in raised(lambda: model.first(torch.ones(2, 5, dtype=BF16)), model)
    assert "zerolite" not in raised(lambda: nn.Linear(4, 4).to(BF16)(torch.ones(2, 4)), model), "of no module of ours"
