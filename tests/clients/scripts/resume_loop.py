"""A script that calls DeepSpeed: `resume_loop.py OUT save|resume STAGE PRECISION DIRECTORY`.

"save" trains three steps and saves first. Then an engine with other weights loads the checkpoint and trains three more.
Rank 0 writes their losses. What DeepSpeed has saved, zerolite resumes.
"""

import argparse
import json

import deepspeed
import torch
from shared import finish

MICRO_BATCHES = 2


class Net(torch.nn.Module):
    """Odd sizes, tied weights and frozen ones."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 7)
        self.first = torch.nn.Linear(7, 13)
        self.frozen = torch.nn.Linear(13, 13).requires_grad_(False)
        self.second = torch.nn.Linear(13, 7)
        self.head = torch.nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.second(self.frozen(self.first(x).tanh()).tanh())
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.roll(1, 1).flatten())


def make_config(stage, precision):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 12, "warmup_num_steps": 4}},
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 10**9,
    }


def train(engine, steps):
    losses = []
    for step in steps:
        for micro in range(MICRO_BATCHES):
            seed = 100 * step + 10 * micro + engine.global_rank
            tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(seed))
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def make_engine(args, seed):
    torch.manual_seed(seed)
    model = Net()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(args=args, model=model, model_parameters=trained)[0]


def main():
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    for name in ("out", "mode", "stage", "precision", "directory"):
        parser.add_argument(name)
    args = parser.parse_args()
    deepspeed.init_distributed("gloo")
    args.deepspeed_config = f"{args.out}.{deepspeed.comm.get_rank()}.json"
    with open(args.deepspeed_config, "w") as file:
        json.dump(make_config(int(args.stage), args.precision), file)
    if args.mode == "save":
        engine = make_engine(args, 1)
        train(engine, range(3))
        engine.save_checkpoint(args.directory, client_state={"epoch": 4})
        engine.destroy()
    engine = make_engine(args, 2)
    path, client_state = engine.load_checkpoint(args.directory)
    assert path is not None and client_state["epoch"] == 4 and engine.global_steps == 3
    losses = train(engine, range(3, 6))
    rate, norm = engine.optimizer.param_groups[0]["lr"], float(engine.get_global_grad_norm())
    finish(args.out, {"losses": losses, "rate": rate, "norm": norm})


if __name__ == "__main__":
    main()
