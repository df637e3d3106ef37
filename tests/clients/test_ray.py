"""zerolite in Ray Train: two workers on CPUs, with Ray itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.helpers import ROOT
from tests.clients.test_clients import need, run_python

pytestmark = pytest.mark.slow


SCRIPT = str(ROOT / "examples" / "ray_train" / "train.py")

# One cluster for all runs: starting it takes most of the time.
DRIVER = """
import json, runpy, sys
import ray

ray.init(num_cpus=4, include_dashboard=False)
script, *runs = sys.argv[1:]
for arguments in map(json.loads, runs):
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
"""


def train(tmp_path: Path, *runs: tuple[str, int, int]) -> list[Any]:
    """Run the example; returns what its workers have reported. runs: output directory, stage and steps."""
    need("ray")
    arguments = [["--out", str(tmp_path / o), "--stage", str(stage), "--steps", str(n)] for o, stage, n in runs]
    settings = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "180",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "180",
    }
    printed = run_python(tmp_path, "-c", DRIVER, SCRIPT, *map(json.dumps, arguments), **settings)
    return [json.loads(line) for line in printed.splitlines() if line.startswith('{"losses"')]


def test_two_workers_of_ray_train_and_go_on_at_another_stage(tmp_path: Path) -> None:
    whole, first, second = train(tmp_path, ("whole", 2, 6), ("parts", 2, 3), ("parts", 3, 3))
    assert (whole["workers"], whole["step"], second["step"]) == (2, 6, 6)
    assert first["losses"] + second["losses"] == pytest.approx(whole["losses"], rel=1e-6)
