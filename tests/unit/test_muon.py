"""Newton-Schulz in batches, and its owners."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerolite.optim.muon import MuonWithAdamW, adjusted_lr, orthogonalize, work_of
from zerolite.zero.owner_exchange import balanced_owners

aten = torch.ops.aten


class _Products(TorchDispatchMode):
    """Counts the products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
@pytest.mark.parametrize("form", [(24, 24), (17, 40), (40, 17), (1, 9), (9, 1)])
def test_matrices_are_orthogonalized_as_torch_does_it_in_one_batch(form) -> None:
    matrices = [torch.randn(form, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    one = torch.optim.Muon([torch.nn.Parameter(torch.zeros(form))], lr=1.0, weight_decay=0.0, momentum=0.0)
    (parameter,) = one.param_groups[0]["params"]
    with _Products() as products:
        found = orthogonalize([matrix.bfloat16() for matrix in matrices], (3.4445, -4.775, 2.0315), 5, 1e-7)
    assert products.count == 3 * 5
    for matrix, result in zip(matrices, found, strict=True):
        parameter.data.zero_()
        parameter.grad, one.state = matrix.clone(), defaultdict(dict)
        one.step()
        torch.testing.assert_close(-adjusted_lr(1.0, None, form) * result.float(), parameter.data, rtol=0, atol=0)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_go_on_as_the_optimizer_does(copied) -> None:
    parameters = [torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(5))]
    groups = [{"params": [parameter]} for parameter in parameters]
    pair = MuonWithAdamW(groups, lr=0.1, adam_lr=0.01), parameters

    def step(optimizer: MuonWithAdamW, parameters: list[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    step(*pair)
    twin = copied(pair)
    step(*pair), step(*twin)
    for one, other in zip(parameters, twin[1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    optimizer = twin[0]
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01, 0.01]


def test_owners_of_a_7b_model_have_equal_work() -> None:
    shapes = [(4096, 4096)] * 4 * 32 + [(11008, 4096)] * 2 * 32 + [(4096, 11008)] * 32
    for ranks, most in ((8, 1.01), (32, 1.03), (64, 1.2)):
        costs = [work_of(shape) for shape in shapes]
        loads = [0.0] * ranks
        for owner, cost in zip(balanced_owners(costs, loads[:]), costs, strict=True):
            loads[owner] += cost
        assert max(loads) <= most * sum(costs) / ranks


def test_later_owners_are_those_that_have_least() -> None:
    assert balanced_owners([5.0, 3.0], [4.0, 0.0, 2.0]) == [1, 2]
