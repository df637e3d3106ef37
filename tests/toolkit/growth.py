"""A model whose parameters are trained later."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Frozen(nn.Module):
    """Some of it is frozen: a whole layer, a bias beside a trained weight, one with no dimension, one that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.second = nn.Linear(9, 7)
        self.third = nn.Linear(7, 7)
        self.fourth = nn.Linear(7, 7)
        self.fourth.weight = self.third.weight
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.last = nn.Linear(7, 3)
        for parameter in self.sleepers():
            parameter.requires_grad_(False)

    def sleepers(self) -> list[nn.Parameter]:
        return [self.first.weight, self.first.bias, self.second.bias, self.third.weight, self.scale]

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x)))) * self.scale
        return self.last(torch.tanh(self.fourth(torch.tanh(self.third(hidden)))))
