"""A module of experts made of a list of modules, for models whose own are not known."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from zerolite.moe.copies import Copies, copy_rows, histogram, sum_copies
from zerolite.moe.loads import equal_loads, read_numbers


class ExpertParallel(nn.Module):
    """Experts of one layer, which ``expert_parallel`` can spread over ranks::

        self.experts = zerolite.moe.ExpertParallel(MLP(width) for _ in range(8))
        ...
        weights, index = router(x).softmax(-1).topk(2)       # [n, 2] each
        x = x + self.experts(x, index, weights)              # x [n, width]

    Their parameters are stacked: ``up.weight`` of all experts becomes one parameter ``up_weight`` [experts, ...]. An
    expert without tokens gets a gradient of zeros.

    Args:
        experts: modules of one class and equal shapes, from [rows, width] to [rows, width]. They have no buffers. The
            first one's forward computes for all.
    """

    def __init__(self, experts: Iterable[nn.Module]) -> None:
        super().__init__()
        members = list(experts)
        if not members:
            raise ValueError("zerolite.moe.ExpertParallel: expected modules, got none")
        first = [(name, p.shape, p.dtype, p.requires_grad) for name, p in members[0].named_parameters()]
        for place, member in enumerate(members):
            described = [(name, p.shape, p.dtype, p.requires_grad) for name, p in member.named_parameters()]
            if type(member) is not type(members[0]) or described != first or any(True for _ in member.buffers()):
                raise ValueError(
                    "zerolite.moe.ExpertParallel: expected modules of one class, with parameters of equal shapes and "
                    "dtypes that are frozen in all of them or in none, and without buffers, got another one at place "
                    f"{place} ({type(member).__name__})"
                )
        self.num_experts = len(members)
        self._names = [name for name, *_ in first]
        for name, _, _, requires_grad in first:
            stacked = torch.stack([member.get_parameter(name).detach() for member in members])
            self.register_parameter(_stacked(name), nn.Parameter(stacked, requires_grad))
        without_values = {id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in members[0].parameters()}
        self.__dict__["_expert"] = copy.deepcopy(members[0], without_values)  # not registered

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            hidden_states: [n, width].
            top_k_index: experts of each token [n, k].
            top_k_weights: their weights [n, k].
        """
        expert: Any = self.__dict__["_expert"].train(self.training)
        # One gradient for all experts: a view of each would be a gradient of the size of all.
        values = {name: self.get_parameter(_stacked(name)).unbind(0) for name in self._names}
        flat = top_k_index.reshape(-1)
        equal = [*equal_loads(len(flat), self.num_experts), 0]
        counts = read_numbers(histogram(flat, self.num_experts + 1), in_plan=equal)
        chosen = flat.argsort(stable=True)[: sum(counts[:-1])]  # the last number is of places that are left empty
        copies = Copies.of(chosen // top_k_index.shape[1], len(hidden_states))
        outputs = []
        for place, rows in enumerate(copy_rows(hidden_states, copies).split(counts[:-1])):
            if len(rows) or not place:  # one of them is called at least: the result has its graph
                outputs.append(
                    functional_call(expert, {name: stacked[place] for name, stacked in values.items()}, (rows,))
                )
        weights = top_k_weights.reshape(-1).index_select(0, chosen)[:, None]
        return sum_copies(torch.cat(outputs) * weights, copies).to(hidden_states.dtype)


def _stacked(name: str) -> str:
    return name.replace(".", "_")
