"""Pipelines and leaf modules through `zerolite.compat.deepspeed`, beside plain PyTorch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zerolite.compat.deepspeed as deepspeed
from zerolite.compat.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

WORDS, WIDTH, MICRO_BATCHES, STEPS = 11, 6, 3, 2


def tokens(step: int, micro_batch: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (2, 5), generator=torch.Generator().manual_seed(10 * step + micro_batch))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def as_head(embedding: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, embedding.weight)


def make_pipeline(stages: int) -> PipelineModule:
    layers = [
        TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        torch.tanh,
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH, forward_fn=as_head),
    ]
    options = {"partition_method": "uniform", "base_seed": 3}
    return PipelineModule(layers=layers, loss_fn=loss_of, num_stages=stages, **options)


def pipeline(stage: int) -> dict[str, list[float]]:
    """The losses of `train_batch`, and those of the same layers in one process."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    model = make_pipeline(dist.get_world_size())
    engine = deepspeed.initialize(model=model, config=config)[0]
    whole = nn.ModuleDict(
        {"words": nn.Embedding(WORDS, WIDTH), "a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)}
    )
    places = {"words": 0, "a": 1, "b": 3}
    for name, module in whole.items():  # as seed_layers does
        torch.manual_seed(3 + places[name])
        module.reset_parameters()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1, weight_decay=0.0)
    found, expected = [], []
    for step in range(STEPS):
        batches = [(tokens(step, m), tokens(step, m).roll(1, 1)) for m in range(MICRO_BATCHES)]
        found.append(float(engine.train_batch(iter(batches))))
        losses = [
            loss_of(as_head(whole["words"], whole["b"](torch.tanh(whole["a"](whole["words"](x))))), y)
            for x, y in batches
        ]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(torch.stack(losses).mean()))
    evaluated = float(engine.eval_batch(iter(batches)))
    losses = [
        loss_of(as_head(whole["words"], whole["b"](torch.tanh(whole["a"](whole["words"](x))))), y) for x, y in batches
    ]
    return {"found": [*found, evaluated], "expected": [*expected, float(torch.stack(losses).mean())]}


class Experts(nn.Module):
    """Two layers, of which a rank uses the one with its number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return self.layers[number](x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.experts = nn.Linear(WIDTH, WIDTH), Experts()

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return self.experts(self.first(x), number).pow(2).mean()


def leaf_modules() -> float:
    """The largest difference of a weight after two steps in which each rank uses another expert."""
    model, plain, rank = Mixture(), Mixture(), dist.get_rank()
    assert deepspeed.utils.set_z3_leaf_modules(model, [Experts]) == [model.experts]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    for step in range(STEPS):
        batches = [torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(2)]
        engine.backward(engine(batches[rank], rank))
        engine.step()
        torch.stack([plain(x, number) for number, x in enumerate(batches)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = engine.zerolite.full_state_dict()
    return max(float((state[name] - value).abs().max()) for name, value in plain.state_dict().items())
