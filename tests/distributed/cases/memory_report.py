"""Memory reports of one training run at several moments."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import torch
from torch import Tensor, nn

import zerolite
from tests import models
from zerolite.zero import GatheredParameters


class Mixed(nn.Module):
    """``x [B, 7]`` -> ``[B, 3]``: two trained layers, the middle one twice in the graph and once in the list of
    parameters, a frozen one, and buffers of 36 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)  # 91 + 13
        self.middle = nn.Linear(13, 13, bias=False)  # 169
        self.again = nn.Linear(13, 13, bias=False)
        self.again.weight = self.middle.weight
        self.frozen = nn.Linear(13, 13).requires_grad_(False)  # 169 + 13
        self.last = nn.Linear(13, 3)  # 39 + 3
        self.register_buffer("offset", torch.zeros(3))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("wide", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(self.again(self.middle(torch.tanh(self.first(x)))))
        return self.last(hidden) + self.offset.to(x.dtype)


def moments(
    config: dict[str, Any],
    optimizer: str | None = None,
    init: bool = False,
    windows: int = 2,
) -> dict[str, Any]:
    """The items at each moment of the last of ``windows``: after each backward, before the update (when all is
    reduced), after the window, with all parameters gathered. ``optimizer``: one of torch's by name, instead of the
    config's. ``init``: the model is made partitioned."""
    with zerolite.zero.Init() if init else contextlib.nullcontext():
        model = models.build(Mixed)
    given = {"optimizer": getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)} if optimizer else {}
    engine = zerolite.initialize(model, config, **given)
    found = {"made": engine.memory_report().items}
    for window in range(windows):
        for micro in range(engine.gradient_accumulation_steps):
            engine.backward(models.square_loss(engine, models.float_batch(window, micro, engine.rank)))
            found[f"backward {micro}"] = engine.memory_report().items
            if micro + 1 == engine.gradient_accumulation_steps:
                engine.reduce_gradients()
                found["reduced"] = engine.memory_report().items
            engine.step()
    found["after"] = engine.memory_report().items
    with GatheredParameters(engine.module):
        found["gathered"] = engine.memory_report().items
    found["released"] = engine.memory_report().items
    return found


def several_moments(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """:func:`moments` by name."""
    return {name: moments(**run) for name, run in runs.items()}


def several_places(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Report the memory after two steps, by name of the run and place."""
    found = {}
    for name, run in runs.items():
        engine = zerolite.initialize(models.build(Mixed), run["config"])
        for window in range(2):
            engine.backward(models.square_loss(engine, models.float_batch(window, 0, engine.rank)))
            engine.step()
        report = engine.memory_report()
        found[name] = {"device": report.items, "host": report.host, "disk": report.disk}
        text = str(report)
        assert all(f"({place})" in text for place in ("host", "disk") if any(found[name][place].values()))
    return found


def whole_report(config: dict[str, Any]) -> dict[str, Any]:
    """A report as text and as plain data, the collectives that it took, and what it says of views and new tensors."""
    engine = zerolite.initialize(models.build(Mixed), config)
    with zerolite.comm.record() as recorder:
        report = engine.memory_report()
    engine.module.register_buffer("seen", engine.module.offset[1:])  # another view of memory that counts already
    with_view = engine.memory_report().items
    engine.module.register_buffer("new", torch.zeros(1000))
    with_new = engine.memory_report().items
    del engine.module.new
    engine.module.register_buffer("sparse", torch.eye(3).to_sparse())
    return {
        "text": str(report),
        "data": json.loads(json.dumps(report.to_dict())),
        "total": report.total,
        "model_states": report.model_states,
        "calls": len(recorder.calls),
        "with_view": with_view,
        "with_new": with_new,
        "with_sparse": engine.memory_report().items,
    }
