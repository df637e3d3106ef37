"""`benchmarks/deepspeed_suite.py` on a small suite that is laid out as DeepSpeed's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.helpers import ROOT
from tests.clients.test_clients import run_python

pytestmark = pytest.mark.slow

FILES = {
    "deepspeed/__init__.py": "raise AssertionError('the sources of the checkout were imported')",
    "tests/pytest.ini": "[pytest]\n",  # as DeepSpeed's: without it pytest would take the settings of any project above
    "tests/conftest.py": "",
    "tests/unit/__init__.py": "",
    "tests/unit/common.py": "def two():\n    return 2\n",
    "tests/unit/runtime/test_config.py": (
        "import deepspeed, pytest\n"
        "from unit.common import two\n"
        "def test_version(): assert 'zerolite' in deepspeed.__version__ and two() == 2\n"
        "def test_wrong(): assert two() == 3\n"
        "@pytest.mark.skip\n"
        "def test_left_out(): pass\n"
        "def test_moe(): deepspeed.moe\n"
        "def test_kind(): raise RuntimeError('no')\n"
    ),
    "tests/unit/moe/test_moe.py": "from deepspeed.moe.layer import MoE\ndef test_layer(): pass\n",
    "tests/unit/moe/test_crash.py": "import os\ndef test_crash(): os._exit(7)\n",
    "tests/unit/moe/test_slow.py": "import time\ndef test_slow(): time.sleep(600)\n",
}


def test_results_are_counted_by_kind(tmp_path: Path) -> None:
    checkout = tmp_path / "DeepSpeed"
    for name, text in FILES.items():
        path = checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    script = ROOT / "benchmarks" / "deepspeed_suite.py"
    printed = run_python(tmp_path, script, checkout, "--timeout", "25", "--json", tmp_path / "out.json", timeout=500)
    results = json.loads((tmp_path / "out.json").read_text())
    found = {(each["folder"], each["test"].rpartition("::")[2]): each["kind"] for each in results}
    assert found[("runtime", "test_version")] == "passed"
    assert found[("runtime", "test_wrong")] == "AssertionError"
    assert found[("runtime", "test_left_out")] == "skipped"
    assert found[("runtime", "test_moe")] == "absent: moe"
    assert found[("moe", "unit.moe.test_moe")] == "absent: moe"
    assert found[("runtime", "test_kind")] == "RuntimeError"
    assert found[("moe", "test_crash.py")] == "no report, exit status 7"
    assert found[("moe", "test_slow.py")] == "took too long"
    assert "| **all** | 1 | 6 | 1 |" in printed, printed
