"""Models that a plan can follow, and the messages about those that it cannot."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerolite
from tests.planning.jobs import NUMEL, planned, stack
from tests.toolkit.configs import PARTITIONED
from zerolite.engine.build import build_engine
from zerolite.engine.engine import Engine
from zerolite.planning import dry_run
from zerolite.planning.make import plan
from zerolite.planning.result import PlanError
from zerolite.utils.lazy import collector_off
from zerolite.utils.memory_tags import MODEL_STATES

ALL_MOVE = {"stage": 3, **PARTITIONED["kept"]}
ADAFACTOR = {"type": "Adafactor", "params": {}}


def config(**changes: Any) -> dict[str, Any]:
    adamw = {"type": "AdamW", "params": {"lr": 1e-3}}
    made = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "optimizer": adamw}
    return {**made, "zero_optimization": {"stage": 2}, **changes}


def batch() -> Tensor:
    return torch.ones(2, 64)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["meta", "partitioned"])
def test_models_however_they_are_made(kind: str) -> None:
    def build() -> nn.Module:
        if kind == "meta":
            with torch.device("meta"):
                return stack()
        with zerolite.zero.Init():
            return stack()

    for zero in ({"stage": 0}, ALL_MOVE):
        wanted = plan(stack, config(zero_optimization=zero), 4, batch=batch)
        made = plan(build, config(zero_optimization=zero), 4, batch=batch)
        assert [made.states[item] for item in MODEL_STATES] == [wanted.states[item] for item in MODEL_STATES]
        assert (made.step_peak, made.traffic) == (wanted.step_peak, wanted.traffic)


@pytest.mark.slow
def test_it_needs_and_leaves_no_process_group_and_no_modes() -> None:
    started = torch.distributed.is_initialized()
    random = torch.random.get_rng_state()
    hooks = len(nn.modules.module._global_forward_hooks)
    plan(stack, config(csv_monitor={"enabled": True, "output_path": "/nowhere/at/all"}), 4, batch=batch)
    assert torch.distributed.is_initialized() is started
    assert torch._C._len_torch_dispatch_stack() == 0
    assert len(nn.modules.module._global_forward_hooks) == hooks
    assert torch.equal(torch.random.get_rng_state(), random)


def test_an_exact_account_of_a_stack() -> None:
    made = plan(stack, config(zero_optimization={"stage": 2}), 4, batch=batch)
    assert made.parameters == made.trained_parameters == NUMEL
    padded = made.at_rest["compute_parameters"] // 2
    assert NUMEL <= padded < NUMEL * 1.02
    # Masters have 4 bytes, a quarter.
    held = [made.at_rest[item] for item in ("master_weights", "optimizer_states", "gradients")]
    assert held == [padded, 2 * padded, 0] and made.states["gradients"] == padded // 2
    rows = {(row.op, row.tag): row for row in made.traffic}
    assert rows["reduce_scatter", "gradients"].nbytes == rows["all_gather", "parameters"].nbytes == 2 * padded


class Does(nn.Module):
    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        return self.what(x)


def reads(what: Callable[[Tensor], Tensor]) -> nn.Module:
    inner = nn.Sequential(nn.Linear(64, 64), Does(what))
    return nn.Sequential(OrderedDict(inner=inner, loss=Does(torch.sum)))


READY = nn.Linear(8, 8)


def needs_values_here() -> nn.Module:
    layer = nn.Linear(64, 64)
    if layer.weight.norm() > 1e6:
        raise RuntimeError("too large")
    return layer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda x: x * x.mean().item(), ["forward, in module 'inner.1'", "values of a tensor", "_local_scalar_dense"]),
        (lambda x: x if (x > 0).any() else -x, ["forward, in module 'inner.1'", "values of a tensor"]),
        (lambda x: x[x > 0], ["forward, in module 'inner.1'", "shape depends on values", "nonzero"]),
        (lambda x: x.cuda(), ["forward, in module 'inner.1'", "Name no device in the model: zerolite.initialize"]),
        (lambda x: x + torch.ones(64, device="cuda").to("cpu"), ["forward, in module 'inner.1'", "Name no device in"]),
        (lambda x: x @ torch.ones(3, 3), ["forward, in module 'inner.1'", "test_dry_run.py"]),
    ],
    ids=["item", "bool", "mask", "cuda", "made on cuda", "shapes"],
)
def test_forwards_that_need_values(what: Callable[[Tensor], Tensor], words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        plan(lambda: reads(what), config(), 2, batch=batch)
    for word in words:
        assert word in str(caught.value)
    plan(lambda: reads(what), config(), 2)  # without a batch no forward is run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_fn", "changes", "sentence"),
    [
        (needs_values_here, {}, r"constructor \(test_dry_run.py:\d+: if layer.weight.norm\(\) > 1e6:\) reads"),
        (lambda: stack().cuda(), {}, "constructor.*asks for a CUDA device"),
        (lambda: {}["no such"], {}, "constructor.*KeyError: 'no such'"),
        (lambda: 3, {}, "refuses this job: expected model to be a torch.nn.Module, got int"),
        (lambda: READY, {}, "got one that returns a model made before; make it inside the function"),
        (nn.ReLU, {}, "engine refuses this job: .*parameter"),
        (
            stack,
            {
                "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}},
                "optimizer": ADAFACTOR,
            },
            "engine refuses this job: .*Adafactor",
        ),
    ],
    ids=["values", "device", "error", "no module", "ready", "no parameters", "optimizer"],
)
def test_what_cannot_be_planned_is_a_sentence(model_fn: Any, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        plan(model_fn, config(**changes), 2)


@pytest.mark.slow
def test_what_a_step_cannot_do_is_a_sentence() -> None:
    with pytest.raises(PlanError, match="expected a dense gradient for parameter 'weight'"):
        plan(lambda: nn.Embedding(50, 8, sparse=True), config(), 2, batch=lambda: torch.ones(2, 3, dtype=torch.long))
    with pytest.raises(PlanError, match="a loss or a floating tensor .*, got a tensor of torch.int64; give"):
        plan(lambda: reads(lambda x: x.long()), config(), 2, batch=batch)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_engine_ends_with_its_plan(monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """Without the garbage collector: hooks and backwards of the process would go on to serve it."""
    made: list[weakref.ref[Engine]] = []

    def build(*arguments: Any, **more: Any) -> Engine:
        engine = build_engine(*arguments, **more)
        made.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(dry_run, "build_engine", build)
    with collector_off():
        planned("gpt", 2, stage=stage, buckets="auto")
        assert [engine() for engine in made] == [None]
