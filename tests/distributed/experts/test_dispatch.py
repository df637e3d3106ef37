"""Exchange of tokens: uneven numbers, experts and ranks without tokens, what travels, and the graphs of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.toolkit import experts
from tests.toolkit.experts import CHOSEN, EXPERTS, WIDTH
from tests.toolkit.ranks import on_ranks
from zerolite.comm import create_communicator, data_topology, record, with_experts
from zerolite.moe.copies import Copies, copy_rows, sum_copies
from zerolite.moe.dispatch import TAG, over_ranks, with_capacity
from zerolite.moe.expert_parallel import ExpertParallel
from zerolite.moe.experts import find_experts, spread_experts


def layer() -> ExpertParallel:
    torch.manual_seed(5)
    return ExpertParallel(experts.Expert() for _ in range(EXPERTS)).double()


def tokens_of(rank: int, how: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, experts and weights of one rank's tokens."""
    generator = torch.Generator().manual_seed(rank)
    count = {"uneven": 3 + 5 * rank, "none on rank 0": 4 * rank, "nowhere": 0}.get(how, 6)
    hidden = torch.randn(count, WIDTH, dtype=torch.float64, generator=generator)
    index = torch.stack(
        [torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(count)]
        or [torch.zeros(CHOSEN, dtype=torch.int64)]
    )[:count]
    if how == "one expert":
        index = torch.full_like(index[:, :1], 5)
    if how == "empty places":  # the number behind the last expert
        index[:, 1] = EXPERTS
    return hidden, index, torch.rand(index.shape, dtype=torch.float64, generator=generator)


def run(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """Return the output, and gradients of tokens, weights and experts."""
    inputs = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    output = module(inputs[0], index, inputs[1])
    factors = torch.arange(1.0, output.numel() + 1, dtype=output.dtype).view_as(output).cos()
    (output * factors).sum().backward()
    return output.detach(), *(one.grad for one in inputs)


def spread(module: ExpertParallel, rank: int, size: int) -> Any:
    """Leave ``module`` the experts of one rank, and return its call."""
    share = EXPERTS // size
    for parameter in module.parameters():
        parameter.data = parameter.data[rank * share : (rank + 1) * share].clone()
    module.num_experts = share
    comm = create_communicator(torch.device("cpu"))
    return lambda hidden, index, weights: over_ranks(
        comm, share, module.forward, list(module.parameters()), (hidden, index, weights)
    )


def assert_gradients_are_of_part(part: nn.Module, whole: nn.Module) -> None:
    """The gradients of this rank's experts are those of ``whole``, which has had the tokens of all ranks."""
    first = dist.get_rank() * (share := EXPERTS // dist.get_world_size())
    for one, other in zip(part.parameters(), whole.parameters(), strict=True):
        gradient = other.grad[first : first + share]  # type: ignore[index]
        of_rank = torch.zeros_like(one) if one.grad is None else one.grad
        torch.testing.assert_close(of_rank, gradient, rtol=0, atol=1e-12)


HOW = ["uneven", "none on rank 0", "nowhere", "one expert", "empty places"]


@on_ranks(2, 4, timeout=60)
@pytest.mark.parametrize("how", HOW)
def test_values_and_gradients_are_those_of_one_rank(how: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, part = layer(), layer()
    call = spread(part, rank, size)
    found = run(call, *tokens_of(rank, how))
    wanted = [run(whole, *tokens_of(other, how)) for other in range(size)]
    torch.testing.assert_close(found, wanted[rank], rtol=0, atol=1e-12)
    assert_gradients_are_of_part(part, whole)


@on_ranks(4, timeout=60)
@pytest.mark.parametrize("how", HOW)
def test_every_rank_launches_the_same(how: str) -> None:
    """Three collectives in a forward and two in its backward, whatever a rank's tokens are, also where a checkpoint
    computes the layer again, and where only experts require gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    hidden, index, weights = tokens_of(rank, how)
    call = spread(layer(), rank, size)
    with record() as plain:
        run(call, hidden, index, weights)
    with record() as repeated:
        run(lambda h, i, w: checkpoint(call, h, i, w, use_reentrant=False), hidden, index, weights)
    with record() as of_experts:
        call(hidden, index, weights).sum().backward()
    with record() as in_evaluation, torch.no_grad():
        call(hidden, index, weights)
    runs = (plain, repeated, of_experts, in_evaluation)
    counts = [(one.count("all_gather", TAG), one.count("all_to_all", TAG)) for one in runs]
    assert counts == [(1, 4), (2, 6), (1, 3), (1, 2)]


def test_copies_are_summed_in_their_order() -> None:
    """A sum of fp32 values depends on its order. Copies that are stored in another order have the same sums."""
    generator = torch.Generator().manual_seed(0)
    source, rows = torch.randint(50, (400,), generator=generator), 53  # three rows have no copies
    values = torch.randn(400, 7, generator=generator) * 10.0 ** torch.randint(-4, 5, (400, 1), generator=generator)
    copies = Copies.of(source, rows)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensor = values.to(dtype, copy=True).requires_grad_()
        exact = torch.float32 if dtype == torch.bfloat16 else dtype
        wanted = [torch.zeros(7, dtype=exact) for _ in range(rows)]
        for row, value in zip(source.tolist(), tensor.detach().to(exact), strict=True):
            wanted[row] = wanted[row] + value
        assert torch.equal(sum_copies(tensor, copies), torch.stack(wanted).to(dtype))
        moved = torch.randperm(400, generator=generator)  # arrived in another order
        place = moved.argsort()
        arrived = Copies(source[moved], place[copies.by_row], copies.starts)
        assert torch.equal(sum_copies(tensor[moved], arrived), torch.stack(wanted).to(dtype))
    factors = torch.randn(rows, 7, dtype=torch.float64, generator=generator)
    copied, tensor = factors.clone().requires_grad_(), values.double().requires_grad_()
    (copy_rows(copied, copies) * tensor).sum().backward()
    torch.testing.assert_close(copied.grad, sum_copies(tensor, copies), rtol=0, atol=1e-12)
    torch.testing.assert_close(tensor.grad, copied[source], rtol=0, atol=0)


@pytest.mark.fast(every=3)
@on_ranks(2, 4, timeout=60)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("capacity", [1, 3, 100])
def test_a_capacity_drops_the_last_tokens(how: str, capacity: int) -> None:
    """Values and gradients are those of one rank whose tokens beyond the capacity leave that place empty."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, part = layer(), layer()
    share, comm = EXPERTS // size, create_communicator(torch.device("cpu"))
    spread(part, rank, size)
    with record() as recorder:
        found = run(
            lambda h, i, w: with_capacity(comm, share, capacity, part.forward, (h, i, w)), *tokens_of(rank, how)
        )
    assert {call.tag: call.op for call in recorder.calls} == {TAG: "all_to_all"}
    assert recorder.count("all_to_all", TAG) == 4
    wanted = []
    for other in range(size):
        hidden, index, weights = tokens_of(other, how)
        taken = [0] * EXPERTS
        for token, place in ((t, p) for t in range(len(index)) for p in range(index.shape[1])):
            if (expert := int(index[token, place])) < EXPERTS:
                taken[expert] += 1
                index[token, place] = expert if taken[expert] <= capacity else EXPERTS
        wanted.append(run(whole, hidden, index, weights))
    torch.testing.assert_close(found, wanted[rank], rtol=0, atol=1e-12)
    for one, other_one in zip(part.parameters(), whole.parameters(), strict=True):
        gradient = other_one.grad[rank * share : (rank + 1) * share]  # type: ignore[index]
        torch.testing.assert_close(one.grad, gradient, rtol=0, atol=1e-12)


@on_ranks(4, timeout=60)
def test_bytes_are_those_of_the_formula() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    hidden, index, weights = tokens_of(rank, "uneven")
    share = EXPERTS // size
    rows = [sum(len({int(e) // share for e in of_token} & {r}) for of_token in index) for r in range(size)]
    all_rows = torch.tensor(rows)
    everyone = [torch.empty_like(all_rows) for _ in range(size)]
    dist.all_gather(everyone, all_rows)
    sent, came = sum(rows), int(sum(int(row[rank]) for row in everyone))
    with record() as recorder:
        run(spread(layer(), rank, size), hidden, index, weights)
    counts, forth, back, back_again, gradients = (call.nbytes for call in recorder.calls if call.tag == TAG)
    assert counts == 2 * 8 * size**2
    assert (forth, back) == (sent * (8 * WIDTH + CHOSEN * (8 + 4)), came * 8 * WIDTH)
    assert (back_again, gradients) == (sent * 8 * WIDTH, came * (8 * WIDTH + CHOSEN * 8))


class Llama4TextExperts(nn.Module):
    """Experts that are called as Llama-4's, and known by that name."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * 5, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(EXPERTS, 5, WIDTH, dtype=torch.float64))

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, up = (hidden_states.view(len(self.up), -1, WIDTH) @ self.up).chunk(2, -1)
        return (F.silu(gate) * up @ self.down).view(-1, WIDTH)


class BlockOfEveryRow(nn.Module):
    def __init__(self, top_k: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.top_k, self.experts = top_k, Llama4TextExperts()

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        scores = weights.new_zeros(len(index), EXPERTS).scatter(1, index, weights)
        rows = hidden.repeat(EXPERTS, 1) * scores.t().reshape(-1, 1)
        out: Tensor = self.experts(rows).view(EXPERTS, len(hidden), WIDTH).sum(0)
        return out


@pytest.mark.fast("0-uneven-2")
@on_ranks(2, 4, timeout=60)
@pytest.mark.parametrize("how", [how for how in HOW if how != "empty places"])
@pytest.mark.parametrize("capacity", [0, 100])
def test_experts_that_are_called_with_every_row(how: str, capacity: int) -> None:
    """Only the rows of choices travel, in one exchange. A token of zeros has no choice, and the same values."""
    rank, size = dist.get_rank(), dist.get_world_size()
    batches = [tokens_of(other, how) for other in range(size)]
    for hidden, _, _ in batches:
        hidden[::3] = 0.0
    top_k = batches[0][1].shape[1]
    whole, part = BlockOfEveryRow(top_k), BlockOfEveryRow(top_k)
    device = torch.device("cpu")
    topology = with_experts(data_topology(create_communicator(device)), device, size)
    spread_experts(part, find_experts(part, size), topology, device, capacity)
    with record() as recorder:
        found = run(part, *batches[rank])
    assert recorder.count("all_to_all", TAG) == 4 and recorder.count("all_gather", TAG) == (not capacity)
    wanted = [run(whole, *batch) for batch in batches]
    torch.testing.assert_close(found, wanted[rank], rtol=0, atol=1e-12)
    assert_gradients_are_of_part(part, whole)
