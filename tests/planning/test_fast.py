"""Shortcuts that make dry runs fast change no number of a plan."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planning.jobs import KINDS, planned, settings
from zerolite.config import load_config
from zerolite.planning import dry_run, shape_cache
from zerolite.planning.make import plan
from zerolite.planning.settings import compare, plain_settings, with_zero

AUTO = {"buckets": "auto"}
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{kind}, stage {n}": (kind, {"stage": n, "precision": "bf16"}) for kind, n in (("moe", 1), ("even gpt", 3))},
    "tied, frozen and unused weights": ("odd", {"stage": 2}),
    "these in parts": ("odd", {"stage": 3}),
    "first and last layer tied": ("layers", {"stage": 1, "pipeline": {"stages": 2}}),
    "tensor parallelism": ("even gpt", {"stage": 1, "tensor_parallel": {"size": 2}}),
    "pipeline": ("even gpt", {"stage": 1, "pipeline": {"stages": 2, "schedule": "1f1b"}, "accumulation": 4, **AUTO}),
    "offload": ("even gpt", {"stage": 3, "offload": "all on disk"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "setting"), JOBS.values(), ids=JOBS)
def test_kernels_of_the_meta_device_say_what_torch_says(
    kind: str, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them every operator goes through torch's own FakeTensorMode; and later steps are like the third."""
    given = {"buckets": "small", "accumulation": 2, **setting}
    made = planned(kind, 4, nodes=2, **given)
    monkeypatch.setattr(shape_cache, "cached_call", lambda mode, func, args, kwargs, run: run())
    monkeypatch.setattr(dry_run.Job, "warm_up", dry_run.WARM_UP)
    assert planned(kind, 4, nodes=2, **given) == made


@pytest.mark.slow
def test_settings_that_are_compared_have_their_own_plans() -> None:
    job = KINDS["even gpt"]
    config = load_config(settings(stage=1, buckets="auto", accumulation=2))
    options: dict[str, Any] = {"batch": job.batch, "device": "cpu", "device_memory": 10**9}
    rows = dict(compare(job.make, config, 2, **options).rows)
    assert len(rows) == len(plain_settings(config))
    for setting in plain_settings(config):
        assert plan(job.make, with_zero(config, **setting.keys), 2, **options) == rows[setting.name]
