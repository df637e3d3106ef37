"""The calls of DeepSpeedExamples' pipeline example: one model as an ordinary engine, and as a PipelineModule whose
layers are joined from it."""

import argparse
import json
import os
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.utils import RepeatingLoader
from torch import nn

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}},
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
}


class ConvNet(nn.Module):
    """Features, pooling and a classifier with dropout that is off, as in AlexNet."""

    def __init__(self, num_classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=True),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Dropout(0.0), nn.Linear(64, 32), nn.ReLU(inplace=True), nn.Linear(32, num_classes)
        )

    def forward(self, x):
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def join_layers(model):
    return [*model.features, model.avgpool, lambda x: torch.flatten(x, 1), *model.classifier]


def trainset():
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(3, 32, 32, generator=generator), number % 10) for number in range(64)]


def train_base(args):
    torch.manual_seed(args.seed)
    net = ConvNet(10)
    engine, _, dataloader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=trainset(),
    )  # fmt: skip
    data_iter = iter(RepeatingLoader(dataloader))
    criterion, losses = nn.CrossEntropyLoss(), []
    for _ in range(args.steps * engine.gradient_accumulation_steps()):
        inputs, labels = next(data_iter)
        loss = criterion(engine(inputs.to(engine.device)), labels.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    mean = torch.stack(losses).view(args.steps, -1).mean(1)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()


def train_pipe(args, part="parameters"):
    torch.manual_seed(args.seed)
    deepspeed.runtime.utils.set_random_seed(args.seed)
    net = PipelineModule(
        layers=join_layers(ConvNet(10)), loss_fn=nn.CrossEntropyLoss(), num_stages=args.pipeline_parallel_size,
        partition_method=part, activation_checkpoint_interval=0,
    )  # fmt: skip
    engine = deepspeed.initialize(
        args=args, model=net, model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=trainset(),
    )[0]  # fmt: skip
    return [float(engine.train_batch()) for _ in range(args.steps)]


def main():
    out = sys.argv.pop(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("-s", "--steps", type=int, default=3)
    parser.add_argument("-p", "--pipeline-parallel-size", type=int, default=2)
    parser.add_argument("--backend", type=str, default="gloo")
    parser.add_argument("--seed", type=int, default=1138)
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed(dist_backend=args.backend)
    args.local_rank = int(os.environ["LOCAL_RANK"])
    path = f"{out}.config"
    with open(f"{path}.{args.local_rank}", "w") as file:
        json.dump(CONFIG, file)
    args.deepspeed_config = f"{path}.{args.local_rank}"
    result = {"base": train_base(args), "pipe": train_pipe(args)}
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump(result, file)


main()
