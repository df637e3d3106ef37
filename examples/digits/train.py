"""Classify scikit-learn's handwritten digits with a network whose batch norm sees the samples of all processes.

    zerolite --nproc 2 train.py --config digits.json
    torchrun --nproc-per-node 2 train.py --stage 3

The data are 1797 images of 8 by 8 pixels, which are part of scikit-learn: pip install 'zerolite[digits]'. The losses
follow the same curve for any number of processes: they divide a batch (train_batch_size in the config) among
themselves.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import zerolite
from batch_norm import JointBatchNorm2d

TEST_SAMPLES = 357


class Classifier(nn.Module):
    def __init__(self, norm: type[nn.Module], width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            norm(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2, bias=False),
            norm(2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 4 * 4, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 1, 8, 8] to scores, [batch, 10]."""
        return self.layers(images)


def build_model(on_gpu: bool) -> nn.Module:
    torch.manual_seed(0)
    if on_gpu:
        return nn.SyncBatchNorm.convert_sync_batchnorm(Classifier(nn.BatchNorm2d))
    return Classifier(JointBatchNorm2d)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """For training and for testing: images, [samples, 1, 8, 8] from 0 to 1, and digits, int64 [samples]."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("train.py: expected scikit-learn, whose digits are the data: pip install 'zerolite[digits]'")
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:-TEST_SAMPLES], order[-TEST_SAMPLES:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def make_engine(config: dict[str, Any], train_set: TensorDataset) -> Any:
    return zerolite.initialize(build_model(torch.cuda.is_available()), config, training_data=train_set)


def train_step(engine: Any, images: Tensor, labels: Tensor) -> Tensor:
    """One update. Returns the loss of this process's samples."""
    loss = F.cross_entropy(engine(images.to(engine.device)), labels.to(engine.device))
    engine.backward(loss)
    engine.step()
    return loss.detach()


@torch.no_grad()
def accuracy(engine: Any, loader: Any) -> float:
    """The share of the loader's samples that the model classifies correctly, each counted once."""
    engine.eval()
    right = []
    for images, labels in loader:
        guesses = engine(images.to(engine.device)).argmax(dim=1)
        right.append(engine.gather_for_metrics(guesses == labels.to(engine.device)))
    engine.train()
    return torch.cat(right).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Classify handwritten digits.", allow_abbrev=False)
    add = parser.add_argument
    add("--config", type=Path, default=Path(__file__).with_name("digits.json"), help="(default: %(default)s)")
    add("--stage", type=int, choices=range(4), help="ZeRO stage (default: that of the config)")
    add("--epochs", type=int, default=8, help="passes over the training data (default: %(default)s)")
    args = parser.parse_args()
    config = json.loads(args.config.read_text())
    if args.stage is not None:
        config["zero_optimization"] = {"stage": args.stage}

    train_set, test_set = load_data()
    engine = make_engine(config, train_set)
    test_loader = engine.deepspeed_io(test_set, batch_size=64, route="eval")
    for epoch in range(1, args.epochs + 1):
        started = time.perf_counter()
        losses = [train_step(engine, images, labels) for images, labels in engine.dataloader]
        loss = engine.reduce(torch.stack(losses).mean().item())
        per_s = len(train_set) / (time.perf_counter() - started)
        correct = accuracy(engine, test_loader)
        if engine.rank == 0:
            print(
                f"epoch {epoch}: loss {loss:.4f}, {correct:.1%} of the test images right, {per_s:,.0f} images/s",
                flush=True,
            )
    zerolite.destroy()


if __name__ == "__main__":
    main()
