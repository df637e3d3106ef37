"""Generation by a model in training: gathered once, nothing launched inside, ranks of different lengths."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerolite
from tests.toolkit import grids, models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import at
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import make_engine, raises, run_steps
from zerolite.comm import record
from zerolite.zero import ZeroParamStatus


@torch.no_grad()
def greedy(model: Any, count: int) -> torch.Tensor:
    """A prompt with ``count`` tokens more."""
    tokens = torch.tensor([[1, 2, 3]])
    for _ in range(count):
        output = model(tokens[:, -8:])
        logits = getattr(output, "logits", output)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    return tokens


@pytest.mark.fast("3-2", "3 tight-2")
@on_ranks(2, timeout=30)
@pytest.mark.parametrize("stage", [0, 2, 3, "3 tight", "3 kept"])
def test_ranks_generate_different_lengths_without_a_collective(stage: int | str) -> None:
    engine, rank = make_engine(at(stage, "bf16")), dist.get_rank()
    run_steps(engine, 3, model="OddModel")
    plain = models.build(models.OddModel).bfloat16()
    for first in (3, 6):  # a plan of the training step is followed again
        plain.load_state_dict(engine.full_state_dict())
        with record() as recorder, zerolite.gathered_for_generation(engine) as model:
            gathered = recorder.count("all_gather")
            found = greedy(model, 4 + 5 * rank)
            assert len(recorder.calls) == gathered <= 1
        assert torch.equal(found, greedy(plain, 4 + 5 * rank))
        if str(stage).startswith("3"):
            assert engine.module.up.weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
        run_steps(engine, 3, first, model="OddModel")


@pytest.mark.fast("2")
@on_ranks(2, timeout=30)
def test_one_rank_alone_generates_or_fails() -> None:
    engine, rank = make_engine(at(3)), dist.get_rank()
    wanted = engine.full_state_dict()
    with zerolite.gathered_for_generation(engine) as model:
        if rank == 0:
            greedy(model, 3)
    for failing in (0, 1):
        try:
            with zerolite.gathered_for_generation(engine) as model:
                if rank == failing:
                    raise ValueError("a prompt that cannot be read")
        except ValueError:
            assert rank == failing
    assert_same_bits(engine.full_state_dict(), wanted, "the weights")
    run_steps(engine, 2, model="OddModel")


@on_ranks(2)
def test_a_pipeline_is_refused() -> None:
    engine = grids.make_engine(grids.on_grid(at(1, accumulation=2), (2, 1, 1)))
    with raises(RuntimeError, "a pipeline"), zerolite.gathered_for_generation(engine):
        pass


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@on_ranks(2, timeout=60)
def test_generate_of_transformers() -> None:
    engine, rank = make_engine(at(3), "hugging_face_llama"), dist.get_rank()
    run_steps(engine, 2, model="hugging_face_llama")
    plain: Any = models.build(models.hugging_face_llama)
    plain.load_state_dict(engine.full_state_dict())
    options = {"max_new_tokens": 2 + rank, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with record() as recorder, zerolite.gathered_for_generation(engine) as model:
        before = len(recorder.calls)
        found = model.generate(torch.tensor([[1, 2, 3]]), **options)  # type: ignore[operator]
        assert len(recorder.calls) == before
    assert torch.equal(found, plain.generate(torch.tensor([[1, 2, 3]]), **options))
    run_steps(engine, 2, 2, model="hugging_face_llama")
