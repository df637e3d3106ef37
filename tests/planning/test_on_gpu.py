"""A plan for CUDA against a real run on one device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from zerolite.planning.check import TOLERANCE, compare, run_job
from zerolite.planning.make import plan
from zerolite.planning.sources import load_batch, load_model_fn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# 134 million parameters, beside whose states cuBLAS' workspace of up to 32 MB is little.
MODULE = """\
import torch
def build():
    layers = [torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.GELU()) for _ in range(8)]
    return torch.nn.Sequential(*layers)
def batch(size):
    return torch.randn(size, 4096)
"""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, precision: str) -> None:
    (tmp_path / "job_on_gpu.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {
        "train_micro_batch_size_per_gpu": 1024,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
    }
    names = {"model": "job_on_gpu:build", "config": json.dumps(config), "batch": "job_on_gpu:batch", "loss": None}
    batch = load_batch("job_on_gpu:batch")
    made = plan(load_model_fn("job_on_gpu:build"), names["config"] or "", 1, device="cuda", batch=batch)
    lines = list(compare(made, run_job(names, 1, "cuda"), TOLERANCE["cuda"]))
    assert [line for line in lines if not line.agrees] == []
