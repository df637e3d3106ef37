"""Shortcuts that make dry runs fast change no number of a plan."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planning.jobs import KINDS, settings
from zerolite.config import load_config
from zerolite.planning import dry_run, shortcuts
from zerolite.planning.make import plan
from zerolite.planning.result import Plan
from zerolite.planning.settings import compare, plain_settings, with_zero

JOBS: list[Any] = [
    pytest.param("odd", {"stage": 2}, id="tied, frozen and unused weights"),
    *(
        pytest.param(kind, {"stage": stage, "precision": "bf16"}, marks=pytest.mark.slow)
        for kind in ("even gpt", "moe")
        for stage in range(4)
    ),
    pytest.param("odd", {"stage": 3}, marks=pytest.mark.slow),
    pytest.param(
        "layers", {"stage": 1, "pipeline": {"stages": 2}}, id="first and last layer tied", marks=pytest.mark.slow
    ),
    pytest.param("even gpt", {"stage": 1, "tensor_parallel": {"size": 2}}, marks=pytest.mark.slow),
    pytest.param(
        "even gpt",
        {"stage": 1, "pipeline": {"stages": 2, "schedule": "1f1b"}, "accumulation": 4, "buckets": "auto"},
        id="pipeline",
        marks=pytest.mark.slow,
    ),
    pytest.param("even gpt", {"stage": 3, "offload": "all on disk"}, marks=pytest.mark.slow),
]


def planned(kind: str, setting: dict[str, Any]) -> Plan:
    job = KINDS[kind]
    config = settings(**{"buckets": "small", "accumulation": 2, **setting})
    return plan(job.make, config, 4, batch=job.batch, loss=job.loss, device="cpu", nodes=2)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "setting"), JOBS)
def test_kernels_of_the_meta_device_say_what_torch_says(
    kind: str, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them every operator goes through torch's own FakeTensorMode; and later steps are like the third."""
    made = planned(kind, setting)
    monkeypatch.setattr(shortcuts, "call", lambda mode, func, args, kwargs, otherwise: otherwise())
    monkeypatch.setattr(dry_run.Job, "warm_up", dry_run.WARM_UP)
    assert planned(kind, setting) == made


@pytest.mark.slow
def test_settings_that_are_compared_have_their_own_plans() -> None:
    job = KINDS["even gpt"]
    config = load_config(settings(stage=1, buckets="auto", accumulation=2))
    options: dict[str, Any] = {"batch": job.batch, "device": "cpu", "device_memory": 10**9}
    rows = dict(compare(job.make, config, 2, **options).rows)
    assert len(rows) == len(plain_settings(config))
    for setting in plain_settings(config):
        assert plan(job.make, with_zero(config, **setting.keys), 2, **options) == rows[setting.name]
