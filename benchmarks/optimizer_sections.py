"""Sections of `adam.py`: whose call is timed, and how many bytes it must move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.optimizers import PEERS, Call, Make, bare_loop, check_kernels, torch_fused, zerolite_update
from zerolite.ops.launches import SquaresLaunch

SCALE = 1024.0  # the loss scale, in bf16
UPDATE_BYTES = 28  # an element: read p, g, m, v, write p, m, v; in bf16 g is 2 and the weight 2 more
COUNT, LENGTH = 1000, 1000  # of the section "tensors"


@dataclass(frozen=True)
class Contender:
    """``make`` allocates what is needed and returns one call of what is measured; ``bytes``: those that must move."""

    bytes: int
    make: Callable[[], Call]


class Field:
    """The arrays that all contenders of a section share: parameter, gradient (also in bf16), weight in bf16."""

    def __init__(self, numel: int, device: str) -> None:
        self.numel, self.device = numel, device
        generator = torch.Generator(device).manual_seed(0)
        self.param = torch.randn(numel, generator=generator, device=device)
        self.grad = torch.randn(numel, generator=generator, device=device)
        self.small_grad = (self.grad * SCALE).bfloat16()
        self.weight = self.param.bfloat16()
        self.factor = torch.tensor(1.0 / SCALE, device=device)

    def zerolite(self, bf16: bool) -> Call:
        table = torch.tensor([[0, 0, self.numel, 0]])
        if not bf16:
            return zerolite_update([self.param], [self.grad], table, 1)
        return zerolite_update([self.param], [self.small_grad], table, 1, [self.weight], self.factor)

    def peer(self, make: Make, bf16: bool) -> Call:
        """An optimizer in fp32, and the passes that are needed around it with bf16."""
        param = torch.nn.Parameter(self.param)
        param.grad = torch.empty_like(self.grad) if bf16 else self.grad
        optimizer = make([param])
        if not bf16:
            return optimizer.step
        grad = param.grad

        @torch.no_grad()
        def step() -> None:
            grad.copy_(self.small_grad)
            grad.mul_(self.factor)
            optimizer.step()
            self.weight.copy_(param)

        return step

    def limit(self) -> Call:
        if self.device == "cuda":
            source = torch.empty(self.numel * UPDATE_BYTES // 2, dtype=torch.uint8, device=self.device)
            target = torch.empty_like(source)
            return lambda: target.copy_(source)
        return bare_loop([self.param, self.grad, torch.zeros_like(self.param), torch.zeros_like(self.param)])


def update_section(numel: int, device: str, bf16: bool) -> dict[str, Contender]:
    field, total = Field(numel, device), numel * UPDATE_BYTES
    found = {"zerolite": Contender(total, lambda: field.zerolite(bf16))}
    for name, make in PEERS[device].items():
        title = f"cast, unscale, {name}, cast" if bf16 else name
        found[title] = Contender(total, lambda make=make: field.peer(make, bf16))  # type: ignore[misc]
    return found | {"limit": Contender(total, field.limit)}


def tensors_section(device: str) -> dict[str, Contender]:
    def arrays(shapes: list[int]) -> list[torch.Tensor]:
        return [torch.randn(n, device=device) for n in shapes]

    def ours(shapes: list[int], table: torch.Tensor, rows: int) -> Contender:
        return Contender(total, lambda: zerolite_update(arrays(shapes), arrays(shapes), table, rows))

    def torchs(shapes: list[int]) -> Call:
        params = [torch.nn.Parameter(p) for p in arrays(shapes)]
        for p in params:
            p.grad = torch.randn_like(p)
        return torch_fused(list(params)).step

    one, many, total = [COUNT * LENGTH], [LENGTH] * COUNT, COUNT * LENGTH * UPDATE_BYTES
    segments = torch.tensor([[0, i * LENGTH, LENGTH, i % 2] for i in range(COUNT)])
    apart = torch.tensor([[i, 0, LENGTH, 0] for i in range(COUNT)])
    return {
        "zerolite, one tensor of a million": ours(one, torch.tensor([[0, 0, COUNT * LENGTH, 0]]), 1),
        "zerolite, 1,000 segments of a buffer": ours(one, segments, 2),
        "zerolite, 1,000 tensors": ours(many, apart, 1),
        "torch fused, one tensor of a million": Contender(total, lambda: torchs(one)),
        "torch fused, 1,000 tensors": Contender(total, lambda: torchs(many)),
    }


def norm_section(numel: int, device: str) -> dict[str, Contender]:
    grad = torch.randn(numel, device=device)
    sums = torch.zeros(1, dtype=torch.float64, device=device)
    table = torch.tensor([[0, 0, numel, 0]])

    def ours() -> Call:
        check_kernels(grad.device)
        launch = SquaresLaunch(table)
        return lambda: launch.run(sums, [grad])

    def in_double() -> torch.Tensor:
        return torch.linalg.vector_norm(grad, dtype=torch.float64)

    calls: dict[str, Callable[[], Call]] = {
        "zerolite, in double": ours,
        "torch foreach_norm, in fp32": lambda: lambda: torch._foreach_norm([grad]),
        "torch vector_norm, in double": lambda: in_double,
        "limit": lambda: grad.sum,
    }
    return {name: Contender(4 * numel, make) for name, make in calls.items()}


SECTIONS: dict[str, Callable[[int, str], dict[str, Contender]]] = {
    "fp32": lambda numel, device: update_section(numel, device, bf16=False),
    "bf16": lambda numel, device: update_section(numel, device, bf16=True),
    "tensors": lambda numel, device: tensors_section(device),
    "norm": norm_section,
}
