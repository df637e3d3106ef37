"""Defaults of the user's, such as ``torch.set_default_device("cuda")``: what the engine keeps on the host stays there,
and its numbers have the dtypes that they need.

The meta device takes the place of CUDA: a tensor of the engine's that lands on it has no values, and its first use
raises. bf16, as the default dtype, holds no step count above 256.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, at
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import snapshot

HOST, DISK = {"device": "cpu"}, {"device": "nvme"}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "0": ("0", {}),
    "2, offload": ("2", {"offload_optimizer": HOST}),
    "3, disk": ("3 moving", {"offload_optimizer": DISK, "offload_param": DISK}),
    "pipeline": ("1", {}),
}


def train(name: str, model: nn.Module, batches: list[Any], directory: Path) -> Any:
    stage, zero = SETTINGS[name]
    zero = {key: {**value, "nvme_path": str(directory)} if value is DISK else value for key, value in zero.items()}
    more = {"pipeline": {"stages": 2}} if name == "pipeline" else {}
    engine = zerolite.initialize(
        model, at(stage, "fp32", 2, 0.4, ADAMW, zero=zero, **more), loss_fn=nn.functional.mse_loss
    )
    for first in range(0, len(batches), 2):
        engine.train_batch(iter(batches[first : first + 2]))
    return engine


def use(engine: Any, directory: Path) -> None:
    """Everything that makes tensors of its own."""
    parameter = next(iter(engine.module.parameters()))
    zerolite.get_full_optimizer_state(parameter, "exp_avg")
    zerolite.set_full_optimizer_state(parameter, "step", 257)
    assert zerolite.get_full_optimizer_state(parameter, "step") == 257
    engine.save_checkpoint(directory, async_save=True)
    engine.wait_for_checkpoint()
    engine.load_checkpoint(directory)
    assert zerolite.get_full_optimizer_state(parameter, "step") == 257
    engine.full_state_dict()


@pytest.mark.fast("2-2, offload")
@pytest.mark.parametrize("name", SETTINGS)
@on_ranks(2)
def test_results_do_not_depend_on_them(name: str, tmp_path: Path) -> None:
    made = [models.build(models.Mlp) for _ in range(3)]
    plain, on_meta, in_bf16 = (nn.Sequential(mlp.first, nn.Tanh(), mlp.second) for mlp in made)
    rank = dist.get_rank() if name != "pipeline" else 0
    batches = [models.float_batch(step, 0, rank) for step in range(8)]
    wanted = snapshot(train(name, plain, batches, tmp_path))
    with torch.device("meta"):
        engine = train(name, on_meta, batches, tmp_path)
        if name != "pipeline":
            use(engine, tmp_path / "meta")
    assert_same_bits(snapshot(engine), wanted, "with a default device")
    torch.set_default_dtype(torch.bfloat16)
    engine = train(name, in_bf16, batches, tmp_path)
    if name != "pipeline":
        use(engine, tmp_path / "bf16")
    torch.set_default_dtype(torch.float32)
    assert_same_bits(snapshot(engine), wanted, "with a default dtype")
