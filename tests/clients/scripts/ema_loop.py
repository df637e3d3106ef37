"""diffusers' moving average of weights at stage 3: `ema_loop.py OUT`. Rank 0 writes how far it is from one by hand."""

import sys

import deepspeed
import torch
from shared import finish
from transformers.integrations import HfDeepSpeedConfig

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
keep = HfDeepSpeedConfig(CONFIG)  # before diffusers is imported: it looks at this once

from diffusers.training_utils import EMAModel  # noqa: E402


def run(foreach):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    average = EMAModel(model.parameters(), decay=0.5, foreach=foreach)
    engine = deepspeed.initialize(model=model, config=CONFIG, model_parameters=model.parameters())[0]
    for _ in range(4):
        engine.backward(engine(torch.randn(2, 5)).pow(2).mean())
        engine.step()
        average.step(model.parameters())
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            pairs = list(zip(expected, [p.detach().clone() for p in model.parameters()], strict=True))
        expected = [old.lerp(new, 1 - average.cur_decay_value) for old, new in pairs]
    return max(float((a - b).abs().max()) for a, b in zip(average.shadow_params, expected, strict=True))


def main(out):
    deepspeed.init_distributed("gloo")
    finish(out, [run(foreach) for foreach in (False, True)])


if __name__ == "__main__":
    main(*sys.argv[1:])
