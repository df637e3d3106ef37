"""AdamW with moments in 8 bits, by itself: its codes, its blocks, and its numbers beside torch's AdamW."""

from __future__ import annotations

import pickle
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.toolkit.compare import assert_same_bits
from zerolite.optim import adamw8bit
from zerolite.optim.adamw8bit import BLOCK, MAXIMA, AdamW8bit, Blocks, block_count

SEED = torch.Generator().manual_seed(0)


def stored(values: Tensor, lead: int = 0, signed: bool = True) -> Blocks:
    """The blocks of flat values."""
    maxima = torch.zeros(block_count(values.numel(), lead))
    table = adamw8bit._table(signed, values.device)
    blocks = Blocks(torch.zeros(values.numel(), dtype=torch.uint8), maxima, lead, table)
    for chunk in blocks.chunks():
        blocks.write(chunk, values[chunk])
    return blocks


def numbers(blocks: Blocks) -> Tensor:
    return torch.cat([blocks.read(chunk) for chunk in blocks.chunks()])


def spread(count: int) -> Tensor:
    """Normal values whose scale falls by five powers of ten, with zeros."""
    values = torch.randn(count, generator=SEED) * torch.logspace(0, -5, count)
    values[::11] = 0.0
    return values


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("lead", [0, 3, 255])
def test_codes_are_near_and_are_the_same_when_stored_again(signed: bool, lead: int) -> None:
    values = spread(5 * BLOCK + 17)
    values = values if signed else values.square()
    blocks = stored(values, lead, signed)
    found = numbers(blocks)
    again = stored(found, lead, signed)
    assert torch.equal(again.codes, blocks.codes) and torch.equal(again.maxima, blocks.maxima)
    bound = blocks.maxima.repeat_interleave(BLOCK)[lead : lead + len(values)]
    assert bool(((found - values).abs() <= bound * (0.0072 if signed else 0.0036)).all())
    assert torch.equal(found == 0, values == 0) or signed
    assert bool((found[values == 0] == 0).all())


def test_a_shard_has_the_blocks_of_the_whole_parameter() -> None:
    """A border within a block changes the numbers of that block alone."""
    values, border = spread(6 * BLOCK), 2 * BLOCK + 32
    whole = numbers(stored(values))
    parts = torch.cat([numbers(stored(values[:border])), numbers(stored(values[border:], border % BLOCK))])
    different = (whole != parts).nonzero().view(-1)
    assert 0 < len(different) and set((different // BLOCK).tolist()) == {2}


def train(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def test_vectors_have_the_bits_of_torch_and_matrices_are_near() -> None:
    start = [torch.randn(300, generator=SEED), torch.randn(40, 30, generator=SEED).t()]
    ours, theirs = ([value.clone() for value in start] for _ in range(2))
    options = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    train(AdamW8bit(ours, **options), ours)  # type: ignore[arg-type]
    train(torch.optim.AdamW(theirs, **options, foreach=False), theirs)  # type: ignore[arg-type]
    assert torch.equal(ours[0], theirs[0])
    moved = (theirs[1] - start[1]).norm()
    assert 0 < (ours[1] - theirs[1]).norm() < 0.02 * moved


def test_an_attribute_decides_and_wrong_arguments_are_refused() -> None:
    matrix, vector = (torch.nn.Parameter(torch.ones(shape)) for shape in ((4, 4), (16,)))
    matrix.fp32_states, vector.fp32_states = True, False  # type: ignore[attr-defined]
    optimizer = AdamW8bit([matrix, vector])
    train(optimizer, [matrix, vector])
    assert MAXIMA[0] not in optimizer.state[matrix] and optimizer.state[vector]["exp_avg"].dtype == torch.uint8
    for wrong in ({"lr": -1.0}, {"eps": -1.0}, {"weight_decay": -1.0}, {"betas": (0.9, 1.0)}):
        with pytest.raises(ValueError, match="Invalid"):
            AdamW8bit([matrix], **wrong)


def held(optimizer: AdamW8bit) -> dict[str, Tensor]:
    return {
        f"{index} {name}": torch.as_tensor(value)
        for index, parameter in enumerate(optimizer.param_groups[0]["params"])
        for name, value in {"weights": parameter, **optimizer.state[parameter]}.items()
    }


@pytest.mark.fast(every=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle"])
def test_a_copy_goes_on_with_the_same_bits(way: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Codes stay uint8, and maxima and the vector's moments fp32 under parameters in bf16."""
    begun = [torch.randn(300, generator=SEED).to(dtype), torch.randn(40, 30, generator=SEED).to(dtype)]
    optimizer = AdamW8bit(begun, lr=0.01)
    train(optimizer, begun)
    if way == "state_dict":
        torch.save(optimizer.state_dict(), tmp_path / "saved")
        copy = AdamW8bit([value.clone() for value in begun], lr=0.01)
        copy.load_state_dict(torch.load(tmp_path / "saved"))
    else:
        copy = deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    for one in (optimizer, copy):
        train(one, one.param_groups[0]["params"])
    assert_same_bits(held(copy), held(optimizer), way)
