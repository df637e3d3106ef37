"""Layers that are sharded against the same layers whole: losses, gradients, random numbers, and what is sent."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import zerolite
from examples.gpt.model import GPT, GPTConfig
from tests.toolkit import tensor_parallel as toolkit
from tests.toolkit.compare import assert_same_on_ranks, from_all_ranks
from tests.toolkit.configs import ADAMW, PARTITIONED, config
from tests.toolkit.ranks import on_ranks
from tests.toolkit.tensor_parallel import CPU, LOSS, Shapes, Stack, communicator, compare, relative, settings, tokens
from tests.toolkit.training import raises
from zerolite.comm import Communicator
from zerolite.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    parallelize_module,
    tensor_ranks,
)
from zerolite.tensor_parallel.shard_spec import shard_spec_of

LAYERS = 2
VOCABULARY = 2  # all-reduces of cross entropy: the largest logits, and the sums


def check(result: dict[str, Any]) -> dict[str, Any]:
    """All ranks have the same loss, that of the whole model, and their parts of its gradients."""
    assert_same_on_ranks({"loss": result["value"]})
    assert result["loss"] <= LOSS
    assert {name: off for name, off in result["gradients"].items() if off > toolkit.GRADIENTS} == {}
    return result


def calls(result: dict[str, Any], when: str) -> dict[str, int]:
    assert {tag for _, tag in result[when]} <= {"tensor"}
    return {op: count for (op, _), count in result[when].items()}


# -------------------------------------------------------------------- models


@pytest.mark.fast("False-64-2")
@on_ranks(2, 4)
@pytest.mark.parametrize("vocabulary", [64, 67])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_example(sequence_parallel: bool, vocabulary: int) -> None:
    """Each all-reduce is two halves where the sequence is in parts. Hidden states are cut once and made whole once."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(context=16, layers=2, heads=4, width=32, vocabulary=vocabulary))
    x, y = tokens(vocabulary=vocabulary), tokens(vocabulary=vocabulary, seed=4)
    result = check(compare(model, lambda m: m(x, y), sequence_parallel=sequence_parallel))
    halves = {"all_gather": 2 * LAYERS + 1, "reduce_scatter": 2 * LAYERS} if sequence_parallel else {}
    whole = 0 if sequence_parallel else 2 * LAYERS
    assert calls(result, "forward") == {**halves, "all_reduce": whole + VOCABULARY}
    if sequence_parallel:  # a column's input is gathered once more, for the gradient of its weight
        halves["all_gather"] += 2 * LAYERS
    assert calls(result, "backward") == {**halves, "all_reduce": whole + 1}  # and the head's input
    assert "head.weight" in result["cut"] and len(result["cut"]) == 6 * LAYERS + 1


def blocks(kind: str, tied: bool = False, vocabulary: int = 37, **others: Any) -> dict[str, Any]:
    torch.manual_seed(2)
    made = [toolkit.Nano() if kind == "nano" else Shapes(kind) for _ in range(2)]
    model = Stack(made, vocabulary=vocabulary, tied=tied)
    x, y = tokens(vocabulary=vocabulary), tokens(vocabulary=vocabulary, seed=4)
    return check(compare(model, lambda m: F.cross_entropy(m(x).flatten(0, 1), y.flatten()), **others))


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("kind", ["nano", "separate", "fused", "norms"])
def test_ways_of_writing_a_block(kind: str) -> None:
    """nanoGPT's; query, key and value in layers of their own, grouped; fused; norms of heads. An embedding and a head
    with padding_idx, an odd vocabulary and a bias, or one weight."""
    for tied in (False, True):
        for sequence_parallel in (False, True):
            result = blocks(kind, tied, sequence_parallel=sequence_parallel)
            assert ("embed.weight" in result["cut"]) == tied
            rows = 2 if kind == "nano" else 4  # attention alone, or with a feed-forward layer
            op, count = ("reduce_scatter", rows) if sequence_parallel else ("all_reduce", rows + 1)
            assert calls(result, "backward")[op] == count


# -------------------------------------------------------------------- layers by themselves


def gathered(parameter: Tensor, comm: Communicator) -> Tensor:
    """The whole values of a parameter that is cut."""
    cut = shard_spec_of(parameter)
    if cut is None:
        return parameter
    full = torch.zeros(cut.full_shape)
    for here, there, length in cut.ranges:
        full.narrow(cut.dim, there, length).copy_(parameter.data.narrow(cut.dim, here, length))
    return comm.all_reduce(full.view(-1), "tensor").wait().view(cut.full_shape)


@pytest.mark.fast("2")
@on_ranks(1, 2, 4)
def test_layers_by_themselves() -> None:
    """Layers made by their constructors beside those of torch.nn with the same values."""
    comm = communicator()
    size = comm.world_size
    found: dict[str, float] = {}
    torch.manual_seed(5 + comm.rank)  # the first rank's values count

    def check(name: str, made: nn.Module, whole: nn.Module, x: Tensor, part: slice | None = None) -> None:
        with torch.no_grad():
            for parameter, full in zip(made.parameters(), whole.parameters(), strict=True):
                full.copy_(gathered(parameter, comm))
        inputs = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
        mine = inputs[0] if part is None else inputs[0][..., part]
        out, expected = made(mine), whole(inputs[1])
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
        if out.shape != expected.shape:
            width = expected.shape[-1] // size
            expected = expected.narrow(-1, comm.rank * width, width)
            weights = weights.narrow(-1, comm.rank * width, width)
        (out * weights).sum().backward()
        total = (expected * weights).sum()
        total.backward()
        found[f"{name} output"] = relative(out, expected)
        for key, parameter in made.named_parameters():
            full = dict(whole.named_parameters())[key]
            found[f"{name} {key}"] = relative(parameter.grad, toolkit.own_part(parameter, full.grad))
        if x.is_floating_point() and part is None and out.shape == whole(x).shape:
            found[f"{name} input"] = relative(inputs[0].grad, inputs[1].grad)

    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(6))
    for bias in (True, False):
        column = ColumnParallelLinear(8, 12, bias, comm=comm, gather_output=True)
        check(f"column {bias}", column, nn.Linear(8, 12, bias), x)
        own = slice(comm.rank * 8 // size, (comm.rank + 1) * 8 // size)
        check(f"row {bias}", RowParallelLinear(8, 6, bias, comm=comm), nn.Linear(8, 6, bias), x, own)
        split = RowParallelLinear(8, 6, bias, comm=comm, input_is_parallel=False)
        check(f"row of a whole input {bias}", split, nn.Linear(8, 6, bias), x)
    parts = ColumnParallelLinear(8, 24, comm=comm, gather_output=True, parts=[16, 4, 4])
    check("parts", parts, nn.Linear(8, 24), x)
    check("column part", ColumnParallelLinear(8, 12, comm=comm), nn.Linear(8, 12), x)
    for vocabulary in (3, 7, 64):
        indices = tokens(vocabulary=vocabulary)
        embedding = VocabParallelEmbedding(vocabulary, 4, padding_idx=-1, comm=comm)
        check(f"embedding {vocabulary}", embedding, nn.Embedding(vocabulary, 4, padding_idx=-1), indices)
        for wrong in (-1, vocabulary):
            with raises(IndexError):
                embedding(torch.tensor([0, wrong]))
    assert {name: off for name, off in found.items() if off > LOSS} == {} and len(found) >= 32


class OwnLayers(nn.Module):
    """Written with the layers themselves, as docs/tensor-parallelism.md shows."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(8, 12, comm=comm)
        self.down = RowParallelLinear(12, 8, comm=comm)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_model_that_is_written_with_the_layers(stage: int) -> None:
    """Two engines one after the other on the same model."""
    ranks = tensor_ranks(2)
    torch.manual_seed(10 + ranks.rank)
    model = OwnLayers(ranks)
    torch.manual_seed(10)
    plain = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    settings = config(stage, optimizer=("SGD", {"lr": 0.5}), tensor_parallel={"size": 2})
    optimizer, generator = torch.optim.SGD(plain.parameters(), 0.5), torch.Generator().manual_seed(3)
    for _ in range(2):
        engine = zerolite.initialize(model, settings)
        for _ in range(3):
            x = torch.randn(4, 8, generator=generator)
            loss, expected = engine(x).pow(2).mean(), plain(x).pow(2).mean()
            engine.backward(loss)
            engine.step()
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
            assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
        del engine, loss
        gc.collect()


@on_ranks(2)
def test_a_second_engine_that_is_to_treat_sequences_otherwise_is_refused() -> None:
    model = GPT(GPTConfig(context=8, layers=2, heads=2, width=8, vocabulary=12))
    first, second = (config(tensor_parallel={"size": 2, "sequence_parallel": sequence}) for sequence in (False, True))
    zerolite.initialize(model, first)
    gc.collect()
    with raises(ValueError, "as it was when the layers of ", " were sharded for an earlier engine"):
        zerolite.initialize(model, second)


@on_ranks(4, timeout=30)
def test_a_data_rank_without_an_element_of_what_tensor_ranks_sum_waits_for_none() -> None:
    """Stage 3: the norms and biases that both tensor-parallel ranks use have at most 16 elements, so the second data
    rank owns nothing of them. In their sum it must not ask for values, which the first one would have to gather."""
    torch.manual_seed(0)
    model = Stack([Shapes("separate", width=16, kv_heads=4)], width=16)
    sharding = {"size": 2, "sequence_parallel": True}
    zero = {**PARTITIONED["moving"], "reduce_bucket_size": 10**6}
    engine = zerolite.initialize(model, config(3, optimizer=ADAMW, zero=zero, tensor_parallel=sharding))
    for step in range(3):
        x = tokens(vocabulary=37, seed=10 * step + engine.data_parallel_rank)
        engine.backward(F.cross_entropy(engine(x).flatten(0, 1), x.flatten()))
        engine.step()
    assert engine.global_steps == 3


# -------------------------------------------------------------------- random numbers and memory


@pytest.mark.fast("False-2")
@on_ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_random_numbers(sequence_parallel: bool) -> None:
    """Inside of what is cut each rank has its own; outside all have the same, unless each has a part of the sequence.
    Blocks that are computed anew draw the same ones."""
    comm = communicator()
    torch.manual_seed(11)
    model = Stack([Shapes("separate", kv_heads=4, dropout=0.3) for _ in range(2)])
    for block in model.blocks:
        block.register_module("outer", nn.Dropout(0.3))
        block.register_forward_hook(lambda module, args, out: module.outer(out))
    torch.manual_seed(comm.rank)
    parallelize_module(model, settings(comm.world_size, sequence_parallel=sequence_parallel), comm, CPU)
    x, y = tokens(vocabulary=37), tokens(vocabulary=37, seed=4)
    masks: dict[str, list[Tensor]] = {"inside": [], "outside": []}
    for block in model.blocks:
        block.dropout.register_forward_hook(lambda module, args, out: masks["inside"].append(out == 0))
        block.outer.register_forward_hook(lambda module, args, out: masks["outside"].append(out == 0))

    def step(again: str) -> tuple[float, dict[str, Tensor]]:
        torch.manual_seed(13)
        model.zero_grad()
        hidden = model.embed(x)
        for block in model.blocks:
            if again:
                hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=again == "reentrant")
            else:
                hidden = block(hidden)
        loss = F.cross_entropy(model.head(hidden).flatten(0, 1), y.flatten())
        loss.backward()
        return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}

    before = torch.get_rng_state()
    loss, gradients = step("")
    drawn = {name: torch.cat([mask.flatten() for mask in seen]).tolist() for name, seen in masks.items()}
    state = torch.get_rng_state()
    assert not torch.equal(before, state)
    for checkpoint in ("reentrant", "not"):
        again, same = step(checkpoint)
        assert again == loss and all(torch.equal(gradients[name], same[name]) for name in gradients)
        assert torch.equal(state, torch.get_rng_state())
    here, there = from_all_ranks((loss, state.tolist(), drawn["outside"], drawn["inside"]))
    (*one, outside, inside), (*other, outside_there, inside_there) = here, there
    assert one == other and inside != inside_there and (outside == outside_there) is not sequence_parallel
