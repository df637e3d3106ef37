"""Updates that `adam.py` compares: those of optimizers, and a loop in C that only moves as many bytes."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from zerolite.ops.launches import UpdateLaunch
from zerolite.ops.library import unavailable_reason
from zerolite.optim.update_rules import rule_of

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
Call = Callable[[], object]
Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


class Absent(Exception):
    """A contender does not take part; the message says why."""


def check_kernels(device: torch.device) -> None:
    reason = unavailable_reason(device)
    if reason is not None:
        raise Absent(reason)


def zerolite_update(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    table: torch.Tensor,
    rows: int,
    outs: list[torch.Tensor] | None = None,
    factor: torch.Tensor | None = None,
) -> Call:
    """Return one call of the kernel; every row of scalars is the same."""
    check_kernels(params[0].device)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(params[0])], **OPTIONS)
    rule = rule_of(optimizer)
    assert rule is not None
    scalars = torch.tensor([rule.row(optimizer.param_groups[0], 10)] * rows)
    states = [[torch.zeros_like(p) for p in params] for _ in rule.states]
    skip = None if factor is None else torch.zeros_like(factor)
    launch = UpdateLaunch(rule.number, table)
    return lambda: launch.run(params, grads, states, outs or [], scalars, factor, skip)


def torch_fused(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True, **OPTIONS)


def deepspeed_cpu(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, adamw_mode=True, **OPTIONS)


def deepspeed_fused(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import FusedAdam

    return FusedAdam(params, adam_w_mode=True, set_grad_none=False, **OPTIONS)


def apex_fused(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    from apex.optimizers import FusedAdam

    return FusedAdam(params, adam_w_mode=True, set_grad_none=False, **OPTIONS)


PEERS: dict[str, dict[str, Make]] = {
    "cpu": {"torch fused": torch_fused, "DeepSpeed CPUAdam": deepspeed_cpu},
    "cuda": {"torch fused": torch_fused, "DeepSpeed FusedAdam": deepspeed_fused, "apex FusedAdam": apex_fused},
}

_LOOP = """
void loop(float *restrict p, const float *restrict g, float *restrict m, float *restrict v, long begin, long end) {
  for (long i = begin; i < end; i++) {
    const float x = g[i] * 1e-9f;
    m[i] += x;
    v[i] += x;
    p[i] += x;
  }
}
"""


def bare_loop(arrays: list[torch.Tensor]) -> Call:
    """Read four arrays, write the first and the last two; a share for each of torch's threads."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise Absent("no C compiler")
    with tempfile.TemporaryDirectory(prefix="zerolite-adam-") as directory:
        source, library = Path(directory, "loop.c"), Path(directory, "loop.so")
        source.write_text(_LOOP, encoding="utf-8")
        command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        loop = ctypes.CDLL(str(library)).loop
    loop.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 2
    loop.restype = None
    threads, numel = torch.get_num_threads(), arrays[0].numel()
    addresses = [tensor.data_ptr() for tensor in arrays]
    bounds = [numel // 16 * i // threads * 16 for i in range(threads)] + [numel]
    team = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def call() -> object:
        waiting = [team.submit(loop, *addresses, *bounds[i : i + 2]) for i in range(1, threads)] if team else []
        loop(*addresses, *bounds[:2])
        return arrays, [one.result() for one in waiting]  # which keeps the arrays alive

    return call
