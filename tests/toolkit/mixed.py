"""A model with parameters of many kinds."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Mixed(nn.Module):
    """``x [B, 7]`` -> ``[B, 3]``: two trained layers, the middle one twice in the graph and once in the list of
    parameters, a frozen one, and buffers of 36 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)  # 91 + 13
        self.middle = nn.Linear(13, 13, bias=False)  # 169
        self.again = nn.Linear(13, 13, bias=False)
        self.again.weight = self.middle.weight
        self.frozen = nn.Linear(13, 13).requires_grad_(False)  # 169 + 13
        self.last = nn.Linear(13, 3)  # 39 + 3
        self.register_buffer("offset", torch.zeros(3))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("wide", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(self.again(self.middle(torch.tanh(self.first(x)))))
        return self.last(hidden) + self.offset.to(x.dtype)
