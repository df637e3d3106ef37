"""Recipes of training, saving and loading: models, batches, optimizers and schedules, by name.

A batch belongs to all ranks; each takes its share of the rows. So a run means the same at every world size.
"""

from __future__ import annotations

import functools
import math
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from tests.toolkit import models
from tests.toolkit.configs import ADAMW, SGD, dynamic_fp16
from zerolite.ops import Lion

ROWS = 12  # of a batch: a multiple of every world size
Batch = tuple[Tensor, ...]
Kwargs = dict[str, Any]

# Settings under which the small models are partitioned, and fill several buckets.
BUCKETS = {"reduce_bucket_size": 100, "allgather_bucket_size": 100}
ZERO = {**BUCKETS, "stage3_param_persistence_threshold": 4, "stage3_module_granularity_threshold": 0}


class Mixture(nn.Module):
    """``x [B, 7]`` -> ``[B, 3]``: odd and prime sizes, fewer elements than ranks, none, no dimension, weights that
    memory holds in another order, a tied one, frozen ones, one that is never used, dropout."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.first.weight = nn.Parameter(torch.randn(7, 13).mul_(0.3).t())
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.bend = nn.Conv2d(1, 3, 3, padding=1, bias=False).to(memory_format=torch.channels_last)
        self.mix = nn.Conv2d(3, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.tied = nn.Linear(13, 13)
        self.again = nn.Linear(13, 13, bias=False)
        self.again.weight = self.tied.weight
        self.gain = nn.Parameter(torch.tensor(0.75))
        self.single = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.unused = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(13, 3)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("offset", torch.randn(3))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = torch.tanh(self.frozen(self.first(x)))
        image = hidden[:, None, :, None].expand(-1, -1, -1, 2)
        hidden = hidden + self.mix(torch.tanh(self.bend(image))).mean((1, 3)) * self.single
        hidden = self.again(self.dropout(torch.tanh(self.tied(hidden)))) * self.gain
        return self.last(hidden) + self.offset.to(x.dtype) + self.empty.sum()


class Adapted(nn.Module):
    """A linear layer that is frozen, with a low-rank adapter that is trained, in the names that peft gives."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def adapted() -> nn.Module:
    model = models.Mlp()
    model.first, model.second = Adapted(model.first), Adapted(model.second)
    return model


def mlp_with(**parts: Any) -> nn.Module:
    """An Mlp with these layers and, where they are tensors, buffers."""
    model = models.Mlp()
    for name, part in parts.items():
        add = model.register_buffer if isinstance(part, torch.Tensor) else model.add_module
        add(name, part)
    return model


def sleeper() -> nn.Module:
    """An Mlp of which a part is frozen until it is unfrozen."""
    later, added = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3).requires_grad_(False)
    return nn.Sequential(OrderedDict(net=models.Mlp(), later=later, bend=nn.Tanh(), added=added))


class Strange(nn.Module):
    """Names that look like parts of a key, buffers of many dtypes, state that is no tensor."""

    BUFFERS = (torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.float64, torch.complex64)

    def __init__(self) -> None:
        super().__init__()
        keys = ("a/b", "x@0,0", "é", "ranks", "$tensor", "with space")
        self.table = nn.ParameterDict({key: nn.Parameter(torch.randn(7, 3)) for key in keys})
        for dtype in self.BUFFERS:
            self.register_buffer(str(dtype).replace(".", "_"), (torch.randn(5) * 3).to(dtype))
        self.counts: dict[str, Any] = {"calls": 0, "last": torch.zeros(2)}

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.counts = {"calls": self.counts["calls"] + 1, "last": self.counts["last"] + 1}
        hidden = sum(x @ weight.to(x.dtype) for weight in self.table.values())
        return torch.tanh(hidden) * (1 + 0.01 * self.counts["calls"])

    def get_extra_state(self) -> dict[str, Any]:
        return self.counts

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.counts = state


class Exact(models.Mlp):
    """One layer is in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.second.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)).double()).float()


def normed() -> nn.Module:
    """Each rank has its own batch statistics."""
    return nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Tanh(), nn.Linear(13, 3))


def float_batch(step: int, micro: int) -> Batch:
    return models.float_batch(step, micro, 0, ROWS)


def token_batch(step: int, micro: int) -> Batch:
    return models.token_batch(step, micro, 0, ROWS)


def overflowing(*when: tuple[int, int]) -> Callable[[int, int], Batch]:
    """Batches, of which those at these steps and micro-batches overflow in fp16."""

    def batch(step: int, micro: int) -> Batch:
        x, y = float_batch(step, micro)
        return (x * 1e30 if (step, micro) in when else x), y

    return batch


def random_loss(model: Any, batch: Batch) -> Tensor:
    """Depends on all random number generators of the process but torch's."""
    import numpy

    return models.square_loss(model, batch) * (1.0 + 0.1 * random.random() + 0.1 * float(numpy.random.rand()))


@dataclass(frozen=True)
class Recipe:
    """A way to train.

    Attributes:
        model: is made after a seed.
        states: the optimizer's, whole, by name.
        engine: further arguments of zerolite.initialize for a model.
        change: what the user does with an engine before a step.
        same_everywhere: the numbers at another world size are close.
        stages: those that take the optimizer.
        plain_loop: PyTorch's own loop, with ``loss.backward()`` and ``optimizer.step()``.
    """

    model: Callable[[], nn.Module] = models.Mlp
    loss: Callable[[Any, Batch], Tensor] = models.square_loss
    batch: Callable[[int, int], Batch] = float_batch
    optimizer: tuple[str, Kwargs] | None = ADAMW
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq", "step")
    config: Kwargs = field(default_factory=dict)
    engine: Callable[[nn.Module], Kwargs] = lambda model: {}
    change: Callable[[Any, int], Any] = lambda engine, step: None
    micros: int = 1
    weighted: bool = False
    same_everywhere: bool = True
    stages: tuple[int, ...] = (0, 1, 2, 3)
    plain_loop: bool = False


class OneOfTwo(models.TwoBranches):
    """Model of which the batch chooses one of two branches."""

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, "right" if branch[0] else "left")


def branches(step: int, micro: int) -> Batch:
    """The last ranks use the other branch in the first micro-batch of a window."""
    x, y = float_batch(step, micro)
    return x, torch.arange(ROWS) >= (ROWS // 2 if micro == 0 else ROWS), y


def three_groups(model: Any) -> Kwargs:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    biases = {"params": [p for name, p in named if name.endswith("bias")], "lr": 3e-3, "weight_decay": 0.0}
    rest = [p for name, p in named if not name.endswith("bias")]
    return {"model_parameters": [{"params": rest[:3]}, biases, {"params": rest[3:], "lr": 2e-3}]}


def by(make: Callable[[Any], Any]) -> Callable[[nn.Module], Kwargs]:
    """``lr_scheduler=make``."""
    return lambda model: {"lr_scheduler": make}


def instance(make: Callable[..., Any], **params: Any) -> Callable[[nn.Module], Kwargs]:
    """``optimizer=`` one that the user has made."""
    return lambda model: {"optimizer": make([p for p in model.parameters() if p.requires_grad], **params)}


def wake(engine: Any, step: int) -> None:
    if step == 1:
        engine.module.later.requires_grad_(True)


def add_group(engine: Any, step: int) -> None:
    if step == 2:
        engine.module.added.requires_grad_(True)
        engine.optimizer.add_param_group({"params": list(engine.module.added.parameters()), "lr": 5e-3})


def falls_asleep(engine: Any, step: int) -> None:
    if step == 2:
        engine.module.second.bias.requires_grad_(False)


def sequential(optimizer: Any) -> Any:
    parts = [schedulers.ConstantLR(optimizer, 0.5, 2), schedulers.ExponentialLR(optimizer, 0.9)]
    return schedulers.SequentialLR(optimizer, parts, [2])


def mixture(dropout: float = 0.0) -> Callable[[], nn.Module]:
    return functools.partial(Mixture, dropout)


def scheduler(name: str, **params: Any) -> Kwargs:
    return {"scheduler": {"type": name, "params": params}}


FUSED = instance(torch.optim.AdamW, lr=1e-3, fused=True)
MIXTURE = {"model": mixture(), "engine": three_groups}
# Seven rows: the ranks' shares differ.
UNEVEN = {**MIXTURE, "batch": lambda step, micro: models.float_batch(step, micro, 0, 7), "micros": 3, "weighted": True}
MOMENTUM = ("momentum_buffer",)
FP16 = {"fp16": dynamic_fp16(loss_scale_window=2)}
BF16 = {"bf16": {"enabled": True}}

RECIPES: dict[str, Recipe] = {
    "mixture": Recipe(**MIXTURE, config=scheduler("WarmupLR", warmup_num_steps=10)),
    "mixture in bf16": Recipe(**MIXTURE, config=BF16),
    "mixture in fp16": Recipe(**MIXTURE, batch=overflowing((1, 0), (4, 0)), config=FP16),
    "tied tokens": Recipe(models.OddModel, models.token_loss, token_batch),
    "dropout and other random numbers": Recipe(mixture(0.3), random_loss, same_everywhere=False),
    "adapters": Recipe(adapted),
    "adapters in bf16": Recipe(adapted, config=BF16),
    "normed": Recipe(normed, same_everywhere=False),
    "fp32 modules": Recipe(models.OddModel, models.token_loss, token_batch, config={**BF16, "fp32_modules": ["norm"]}),
    "groups": Recipe(engine=three_groups),
    "SGD": Recipe(optimizer=SGD, states=MOMENTUM),
    "Lion": Recipe(optimizer=("Lion", {"lr": 1e-3}), states=("exp_avg",)),
    "Lion, an instance": Recipe(optimizer=None, engine=instance(Lion, lr=1e-3), states=("exp_avg",)),
    "NAdam": Recipe(optimizer=("NAdam", {"lr": 1e-3})),
    "RMSprop": Recipe(optimizer=("RMSprop", {"lr": 1e-3, "momentum": 0.5}), states=("square_avg", *MOMENTUM, "step")),
    "Adagrad": Recipe(optimizer=("Adagrad", {"lr": 1e-2}), states=("sum", "step")),
    "amsgrad": Recipe(
        optimizer=("AdamW", {"lr": 1e-3, "amsgrad": True}), states=("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
    ),
    "moments in bf16": Recipe(mixture(), optimizer=("AdamW", {"lr": 1e-3, "fp32_optimizer_states": False})),
    "an instance": Recipe(mixture(), optimizer=None, engine=instance(torch.optim.AdamW, lr=1e-3, foreach=True)),
    "fused at stage 0": Recipe(mixture(), optimizer=None, engine=FUSED, stages=(0,)),  # the parameters' own strides
    "Adafactor": Recipe(optimizer=("Adafactor", {"lr": 1e-2}), states=("step",), stages=(0,)),
    "Muon": Recipe(
        optimizer=("Muon", {"lr": 1e-2}),
        config=scheduler("WarmupLR", warmup_num_steps=4),  # of AdamW's group too, which is empty
        states=MOMENTUM,
        stages=(0,),
        engine=lambda model: {"model_parameters": [p for p in model.parameters() if p.dim() == 2]},
    ),
    "bf16 masters": Recipe(
        **MIXTURE,
        config={"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
    ),
    "autocast": Recipe(**MIXTURE, config={"torch_autocast": {"enabled": True}}),
    "WarmupDecayLR": Recipe(
        engine=three_groups, config=scheduler("WarmupDecayLR", warmup_num_steps=2, total_num_steps=9)
    ),
    "LambdaLR": Recipe(engine=by(lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1.0 / (step + 1)))),
    "CosineAnnealingLR": Recipe(engine=by(lambda optimizer: schedulers.CosineAnnealingLR(optimizer, T_max=8))),
    "SequentialLR": Recipe(engine=by(sequential)),
    "MultiStepLR": Recipe(engine=by(lambda optimizer: schedulers.MultiStepLR(optimizer, [1, 2, 4, 5], 0.5))),
    "CyclicLR": Recipe(
        engine=by(lambda optimizer: schedulers.CyclicLR(optimizer, 1e-4, 1e-2, 2, cycle_momentum=True)),
        optimizer=SGD,
        states=MOMENTUM,
    ),
    "strange": Recipe(Strange),
    # Torch's own update, which is taken there, gives other bits where memory is cut otherwise, as at stage 3.
    "double": Recipe(Exact, stages=(0, 1, 2)),
    "woken": Recipe(sleeper, change=wake),
    "added group": Recipe(sleeper, change=add_group),
    "asleep": Recipe(change=falls_asleep),
    "accumulation": Recipe(**MIXTURE, micros=3),
    "accumulation with weights": Recipe(**UNEVEN),
    "accumulation with weights in fp16": Recipe(**UNEVEN, config=FP16),
    "accumulation in the plain loop": Recipe(**MIXTURE, micros=3, plain_loop=True),
    "accumulation that overflows": Recipe(**MIXTURE, batch=overflowing((3, 0)), micros=3, config=FP16),
    "accumulation, branches": Recipe(  # at stage 3 ranks must use the same modules
        OneOfTwo, batch=branches, micros=3, same_everywhere=False, stages=(0, 1, 2)
    ),
}


def share(batch: Batch, rank: int, world: int) -> Batch:
    """This rank's rows: equally many, or one fewer on the last ranks."""
    rows = len(batch[0])
    low, high = (math.ceil(r * rows / world) for r in (rank, rank + 1))
    return tuple(tensor[low:high] for tensor in batch)
