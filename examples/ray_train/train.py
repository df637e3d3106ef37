"""zerolite in Ray Train: ``python examples/ray_train/train.py --workers 2 --stage 2``.

Ray starts the workers and torch.distributed; each calls ``zerolite.initialize`` as under any other launcher. A run
that is started again in the same directory goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import zerolite


def train_loop(settings: dict[str, Any]) -> None:
    """Train on one worker."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": settings["stage"]},
    }
    inputs = torch.randn(256, 16)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())
    engine = zerolite.initialize(model, config, training_data=data)
    engine.load_checkpoint(settings["checkpoints"], missing_ok=True)
    losses = []
    for x, y in itertools.islice(engine.dataloader, settings["steps"]):
        loss = torch.nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(engine.reduce(loss.item()))
    engine.save_checkpoint(settings["checkpoints"])
    found = {"losses": losses, "step": engine.global_steps, "workers": engine.world_size}
    ray.train.report(found)
    if engine.rank == 0:
        Path(settings["report"]).write_text(json.dumps(found))
    zerolite.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one GPU for each worker")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="at most, in one pass over the data")
    parser.add_argument("--out", type=Path, default=Path("runs/ray_train"), help="a directory that all workers have")
    options = parser.parse_args()
    out = options.out.resolve()
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={
            "stage": options.stage,
            "steps": options.steps,
            "checkpoints": str(out / "checkpoints"),
            "report": str(out / "report.json"),
        },
        torch_config=TorchConfig(backend=None if options.gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
        run_config=RunConfig(name="zerolite", storage_path=str(out / "ray")),
    )
    trainer.fit()
    print((out / "report.json").read_text())


if __name__ == "__main__":
    main()
