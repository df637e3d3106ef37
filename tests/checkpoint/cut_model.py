"""A model of which each rank has a stage and a part of each layer, cut by hand. Its forward sends nothing."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn

from zerolite.tensor_parallel.shard_spec import ShardSpec, set_names, shard_spec_of

VOCABULARY, WIDTH, HEADS = 7, 6, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * HEADS)
        self.proj = nn.Linear(HEADS, WIDTH)
        self.gain = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.table = nn.Parameter(torch.randn(HEADS, 3), requires_grad=False)
        self.bounds = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("passing", torch.ones(1), persistent=False)
        self.note = "new"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


class Net(nn.Module):
    """``forward(step)``: the sum over all elements of what depends on the element, its place and the step."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.shapes = {name: tuple(p.shape) for name, p in self.named_parameters()}

    def forward(self, step: int) -> Tensor:
        total = torch.zeros(())
        for name in self.trained:
            owner, _, last = name.rpartition(".")
            parameter = getattr(self.get_submodule(owner), last)
            factor = torch.randn(self.shapes[CANONICAL.get(name, name)], generator=_generator(name, step))
            cut = shard_spec_of(self.parameters_by_name[name])
            factor = factor if cut is None else cut.of(factor)
            total = total + (parameter * factor + 0.05 * parameter**2).sum()
        return total

    def settle(self) -> None:
        """Keep the values that are here."""
        self.parameters_by_name = dict(self.named_parameters())
        self.trained = [name for name, p in self.parameters_by_name.items() if p.requires_grad and p.numel()]


CANONICAL = {"head.weight": "embed.weight"}


def _generator(name: str, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(CANONICAL.get(name, name).encode()) + step)


def cut_for(name: str, shape: tuple[int, ...], rank: int, size: int) -> ShardSpec | None:
    if name.endswith(("embed.weight", "head.weight")):  # with padding
        length = -(-shape[0] // size)
        there = rank * length
        return ShardSpec(shape, 0, ((0, there, min(length, shape[0] - there)),), length, rank, size)
    length = HEADS // size
    if ".qkv." in name:
        ranges = tuple((part * length, part * HEADS + rank * length, length) for part in range(3))
        return ShardSpec(shape, 0, ranges, 3 * length, rank, size)
    if name.endswith(("proj.weight", "table")):
        return ShardSpec(shape, int("proj" in name), ((0, rank * length, length),), length, rank, size)
    return None


def keep_stage(model: Net, stage: int, stages: int) -> None:
    """The others' modules go, with their parameters; the names of what stays stay."""
    set_names(model.embed.weight, ["embed.weight", "head.weight"])
    units = ["embed", "blocks.0", "blocks.1", "norm head"]
    for number, names in enumerate(units):
        if number * stages // len(units) != stage:
            for name in names.split():
                owner, _, last = name.rpartition(".")
                setattr(model.get_submodule(owner), last, nn.Module())
