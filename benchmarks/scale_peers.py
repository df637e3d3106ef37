"""Launches of a step of FSDP2 and DeepSpeed at any number of ranks, on torch's fake process group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.competitors import wrap_fsdp2
from benchmarks.engines import DEEPSPEED_KEYS
from benchmarks.setting import CLIP, Setting, optimizer_for
from benchmarks.shapes import Decoder, Shape, parameters_of

TOKENS = (1, 2048)
THINNER = 32
DEEPSPEED_SIZES = {  # its defaults, in elements
    "reduce_bucket_size": 5e8,
    "allgather_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
}


@dataclass(frozen=True)
class Message:
    """One launch. kind: gather, reduction or other. nbytes: of the full tensors. factor: bytes sent over those, at
    very many ranks: 1, and 2 for an all-reduce."""

    kind: str
    nbytes: int
    factor: int


class Launches(TorchDispatchMode):
    """Notes the operators of torch.distributed that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if func.namespace in ("c10d", "_c10d_functional") and "wait_tensor" not in name and "barrier" not in name:
            nbytes = max(
                sum(tensor.nbytes for tensor in tree_leaves(argument) if isinstance(tensor, torch.Tensor))
                for argument in args
            )
            gather, scatter = "gather" in name, "scatter" in name
            kind = "gather" if gather else "reduction" if scatter or nbytes > 1e4 else "other"
            self.messages.append(Message(kind, nbytes, 1 if gather or scatter else 2))
        return func(*args, **(kwargs or {}))


def fake_group(ranks: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    places = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(places, MASTER_PORT="29500")
    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())


def run_fsdp2(shape: Shape, ranks: int) -> list[Message]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh

    fake_group(ranks)
    mesh = init_device_mesh("cpu", (ranks,))  # of real tensors, which are read
    with FakeTensorMode():
        model = wrap_fsdp2(Decoder(shape), Setting(dtype="bf16", world_size=ranks), mesh)
        with Launches() as launches:
            model(torch.zeros(TOKENS, dtype=torch.long)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    return launches.messages


def run_deepspeed(shape: Shape, ranks: int, stage: int) -> list[Message]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    fake_group(ranks)
    import deepspeed  # type: ignore[import-not-found]

    thin = shape.thinner(THINNER)
    scale = parameters_of(thin) / parameters_of(shape)
    sizes = {name: max(2, int(value * scale) // 2 * 2) for name, value in DEEPSPEED_SIZES.items()}
    config = {
        "train_micro_batch_size_per_gpu": TOKENS[0],
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        **DEEPSPEED_KEYS,
        # Its default, 100,000, keeps vectors whole and no matrix; so does this.
        "zero_optimization": {"stage": stage, **sizes, "stage3_param_persistence_threshold": 10 * thin.width},
    }
    model = Decoder(thin)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer_for(model, fused=False))
    for _ in range(3):  # it records in the first what it follows afterwards
        with Launches() as launches:
            engine.backward(engine(torch.zeros((1, 64), dtype=torch.long)))
            engine.step()
    return launches.messages
