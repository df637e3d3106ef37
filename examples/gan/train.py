"""A GAN with two engines: a generator learns eight Gaussians on a circle.

    zerolite --nproc 2 train.py --stage 3
    torchrun --nproc-per-node 2 train.py --config generator.json discriminator.json

Any number of processes trains on the same data: they divide the batch of a step (train_batch_size in the configs) among
themselves.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerolite

HERE = Path(__file__).resolve().parent
MODES, SPREAD = 8, 0.1  # Gaussians on a circle of radius 2, and their standard deviation
NOISE = 16  # numbers that a sample is made of
PENALTY = 0.05


def network(inputs: int, outputs: int, width: int = 128) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.LeakyReLU(), nn.Linear(width, width), nn.LeakyReLU(), nn.Linear(width, outputs)
    )


def networks() -> tuple[nn.Module, nn.Module]:
    """The generator, [batch, NOISE] to points [batch, 2], and the discriminator, [batch, 2] to scores [batch, 1]."""
    torch.manual_seed(0)
    return network(NOISE, 2), network(2, 1)


def centres() -> Tensor:
    """[MODES, 2]"""
    angles = torch.arange(MODES) * (2 * math.pi / MODES)
    return 2 * torch.stack([angles.cos(), angles.sin()], dim=1)


def draw(step: int, count: int, first: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows first to first + size of a step's batch of count: real points [size, 2], noise for each network's turn
    [size, NOISE]."""
    random = torch.Generator().manual_seed(step)
    modes = centres()[torch.randint(MODES, (count,), generator=random)]
    real = modes + SPREAD * torch.randn(count, 2, generator=random)
    noise = torch.randn(2, count, NOISE, generator=random)
    rows = slice(first, first + size)
    return real[rows], noise[0, rows], noise[1, rows]


def discriminator_loss(discriminator: Any, real: Tensor, fake: Tensor) -> Tensor:
    """The loss of a GAN, and a penalty on the slope of the scores at real points, without which the two would circle
    around each other. Its backward goes through a gradient."""
    real.requires_grad_()
    score = discriminator(real)
    (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
    penalty = slope.square().sum(dim=1).mean()
    return F.softplus(-score).mean() + F.softplus(discriminator(fake)).mean() + PENALTY * penalty


def generator_loss(generator: Any, discriminator: Any, noise: Tensor) -> Tensor:
    return F.softplus(-discriminator(generator(noise))).mean()


def train_step(generator: Any, discriminator: Any, step: int) -> tuple[Tensor, Tensor]:
    """One update of each. Returns this process's two losses, the discriminator's first."""
    size = generator.train_micro_batch_size_per_gpu
    rows = draw(step, generator.train_batch_size, generator.rank * size, size)
    real, noise, more_noise = (tensor.to(generator.device) for tensor in rows)

    with torch.no_grad():
        fake = generator(noise)
    loss_d = discriminator_loss(discriminator, real, fake)
    discriminator.backward(loss_d)
    discriminator.step()

    loss_g = generator_loss(generator, discriminator, more_noise)
    generator.backward(loss_g)
    generator.step()
    discriminator.zero_grad()  # loss_g came through it
    return loss_d.detach(), loss_g.detach()


@torch.no_grad()
def judge(generator: Any, count: int = 2048) -> tuple[float, int]:
    """The share of generated points within three standard deviations of a centre, and the number of centres that have
    their share of them, or at least a third of it."""
    mine = range(generator.rank, count, generator.world_size)
    noise = torch.randn(count, NOISE, generator=torch.Generator().manual_seed(0))[mine]
    points = generator.gather(generator(noise.to(generator.device))).cpu()
    distance, nearest = torch.cdist(points, centres()).min(dim=1)
    good = distance < 3 * SPREAD
    found = torch.bincount(nearest[good], minlength=MODES) > count / MODES / 3
    return good.float().mean().item(), int(found.sum())


def make_engines(configs: list[dict[str, Any]], stage: int | None = None) -> tuple[Any, Any]:
    """One engine for each network. stage: instead of the configs'."""
    if stage is not None:
        configs = [{**config, "zero_optimization": {"stage": stage}} for config in configs]
    generator, discriminator = networks()
    return zerolite.initialize(generator, configs[0]), zerolite.initialize(discriminator, configs[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GAN with two engines.", allow_abbrev=False)
    default = [HERE / "generator.json", HERE / "discriminator.json"]
    add = parser.add_argument
    add("--config", type=Path, nargs=2, default=default, metavar="JSON", help="the generator's, the discriminator's")
    add("--stage", type=int, choices=range(4), help="ZeRO stage of both (default: that of the configs)")
    add("--steps", type=int, default=1500, help="updates of each network (default: %(default)s)")
    add("--log-every", type=int, default=250, help="steps between two lines (default: %(default)s)")
    args = parser.parse_args()

    generator, discriminator = make_engines([json.loads(path.read_text()) for path in args.config], args.stage)
    for step in range(1, args.steps + 1):
        losses = train_step(generator, discriminator, step)
        if step % args.log_every == 0:
            loss_d, loss_g = generator.reduce([loss.item() for loss in losses])
            share, found = judge(generator)
            if generator.rank == 0:
                print(
                    f"step {step}: loss of the discriminator {loss_d:.4f}, of the generator {loss_g:.4f}; "
                    f"{share:.0%} of the points are good, {found} of {MODES} Gaussians found",
                    flush=True,
                )
    zerolite.destroy()


if __name__ == "__main__":
    main()
