"""A default device of the user's (``torch.set_default_device("cuda")``): what the engine keeps on the host stays there.

The meta device takes its place: a tensor of the engine's that lands on it has no values, and its first use raises.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

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


def train(name: str, model: torch.nn.Module, batches: list[Any], directory: Path) -> Any:
    stage, zero = SETTINGS[name]
    zero = {key: {**value, "nvme_path": str(directory)} if value is DISK else value for key, value in zero.items()}
    more = {"pipeline": {"stages": 2}} if name == "pipeline" else {}
    engine = zerolite.initialize(
        model, at(stage, "fp32", 2, 0.4, ADAMW, zero=zero, **more), loss_fn=torch.nn.functional.mse_loss
    )
    for first in range(0, len(batches), 2):
        engine.train_batch(iter(batches[first : first + 2]))
    return engine


def use(engine: Any, directory: Path) -> None:
    """Everything that makes tensors of its own."""
    parameter = next(iter(engine.module.parameters()))
    zerolite.get_full_optimizer_state(parameter, "exp_avg")
    steps = zerolite.get_full_optimizer_state(parameter, "step")
    zerolite.set_full_optimizer_state(parameter, "step", steps)
    engine.save_checkpoint(directory, async_save=True)
    engine.wait_for_checkpoint()
    engine.load_checkpoint(directory)
    engine.full_state_dict()


@pytest.mark.fast("2-2, offload")
@pytest.mark.parametrize("name", SETTINGS)
@on_ranks(2)
def test_results_do_not_depend_on_it(name: str, tmp_path: Path) -> None:
    parts = [models.build(models.Mlp).first, torch.nn.Tanh(), models.build(models.Mlp).second]
    other = [models.build(models.Mlp).first, torch.nn.Tanh(), models.build(models.Mlp).second]
    rank = torch.distributed.get_rank() if name != "pipeline" else 0
    batches = [models.float_batch(step, 0, rank) for step in range(8)]
    wanted = snapshot(train(name, torch.nn.Sequential(*other), batches, tmp_path))
    model = torch.nn.Sequential(*parts)
    with torch.device("meta"):
        engine = train(name, model, batches, tmp_path)
        if name != "pipeline":
            use(engine, tmp_path / "checkpoints")
    assert_same_bits(snapshot(engine), wanted, "with a default device")
