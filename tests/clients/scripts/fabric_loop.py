"""A loop of Lightning's Fabric with its DeepSpeed strategy: `fabric_loop.py OUT STAGE ...`.

Six steps, a checkpoint after three, and a second Fabric that goes on from it. Rank 0 writes the losses of both, and
those of plain PyTorch on one process.
"""

import os

import lightning.fabric.strategies.deepspeed as strategies
import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CPUAccelerator
from shared import allow_cpus, run_cases

allow_cpus(strategies, CPUAccelerator)
RANK = int(os.environ["LOCAL_RANK"])
ROWS = torch.randn(6, 2, 4, 5, generator=torch.Generator().manual_seed(1))  # step, rank, batch, features


def make_net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))


def train_plain():
    """The losses of rank 0's rows, trained with the mean gradient of both ranks."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for rows in ROWS:
        ranks = [net(batch).pow(2).mean() for batch in rows]
        (sum(ranks) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(ranks[0].detach()))
    return losses


def train(stage, steps, checkpoint=None, save=None):
    strategy = strategies.DeepSpeedStrategy(stage=int(stage), process_group_backend="gloo", config=None)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision="32-true")
    fabric.launch()
    net = make_net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    if checkpoint:
        steps = range(fabric.load(checkpoint, {"model": model, "optimizer": optimizer})["step"], steps.stop)
    losses = []
    for step in steps:
        loss = model(ROWS[step, RANK]).pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step == 2 and save:
            fabric.save(save, {"model": model, "optimizer": optimizer, "step": step + 1})
    return losses


def run(checkpoint, stage):
    first = train(stage, range(6), save=checkpoint)
    second = train(stage, range(6), checkpoint=checkpoint)
    return {"first": first, "second": second, "plain": train_plain()}


if __name__ == "__main__":
    run_cases(run)
