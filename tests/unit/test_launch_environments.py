"""The variables of the table in docs/launching.md: those of Kubernetes and SkyPilot. test_process_group.py has those of
torchrun, srun and mpirun, tests/clients/test_ray.py runs Ray."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zerolite.comm.environment import Rendezvous, read_environment

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "launching.md").read_text()

# As Kubeflow's PyTorchJob sets them in the second of three pods; PET_... are for torchrun.
POD = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NNODES": "3",
    "PET_NODE_RANK": "1",
    "PYTHONUNBUFFERED": "1",
    "RANK": "1",
    "WORLD_SIZE": "3",
}


def test_a_pod_with_one_process() -> None:
    """No variable says the local rank. Devices are counted modulo those that the pod has, so that any will do."""
    found = read_environment(POD)
    assert found == Rendezvous(1, 3, 1, "job-master-0", 23456)


def test_torchrun_in_a_pod() -> None:
    """torchrun gives its processes variables of their own, which replace those of the pod."""
    inside = {**POD, "RANK": "5", "WORLD_SIZE": "12", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert read_environment(inside) == Rendezvous(5, 12, 1, "job-master-0", 23456)


@pytest.mark.parametrize("node", [0, 1])
def test_the_command_for_skypilot(tmp_path: Path, node: int) -> None:
    """The line of the page, in a shell with SkyPilot's variables alone."""
    found = re.search(r"^  zerolite (--no-ssh .*\n.*SKYPILOT.*)$", PAGE, re.MULTILINE)
    assert found is not None
    (tmp_path / "train.py").touch()
    variables = {
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        "SKYPILOT_NODE_RANK": str(node),
        "SKYPILOT_NUM_GPUS_PER_NODE": "4",
        "SKYPILOT_NUM_NODES": "2",
    }
    command = f"{sys.executable} {ROOT}/bin/zerolite --dry-run {found[1]}"
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **variables}
    done = subprocess.run(
        ["bash", "-c", command], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    ranks = [line for line in done.stdout.splitlines() if "LOCAL_RANK=" in line]
    assert len(ranks) == 4 and all("MASTER_ADDR=127.0.0.1 " in line for line in ranks), done.stdout
