"""Loaders, evaluation and metrics at every stage and world size, against plain computation on one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import models
from tests.distributed.cases import evaluation
from tests.distributed.configs import config
from tests.pool import Pool, Pools
from zerolite.data.dataloader import EpochSampler

CASES = "tests.distributed.cases.evaluation"
_FAST = {(0, 1), (1, 2), (2, 3), (3, 2)}
STAGES_AND_WORLDS = pytest.mark.parametrize(
    ("stage", "world"),
    [
        pytest.param(stage, world, marks=() if (stage, world) in _FAST else pytest.mark.slow)
        for stage in range(4)
        for world in (1, 2, 3)
    ],
)
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
WORLDS = pytest.mark.parametrize("world", [1, 2, 3])


def same_everywhere(ranks: list[Any]) -> Any:
    """One rank's result, after a check that the others have the same bits."""
    for other in ranks[1:]:
        torch.testing.assert_close(other, ranks[0], rtol=0, atol=0, equal_nan=True)
    return ranks[0]


@pytest.mark.fast("own-0-1", "prepared-1-2", "whole-2-3", "whole-3-2")
@STAGES_AND_WORLDS
@pytest.mark.parametrize("how", ["own", "prepared", "whole"])
def test_every_item_is_evaluated_once_and_in_order(pools: Pools, stage: int, world: int, how: str) -> None:
    for count in (1, 12, 13) if how == "own" else (11,):
        kwargs = {"config": config(stage), "count": count, "batch_size": 3, "how": how}
        result = same_everywhere(pools(world).run(f"{CASES}:evaluate", kwargs))
        gathered = result["gathered"]
        assert gathered["index"].tolist() == list(range(count))
        model = models.build(models.Mlp)
        model.load_state_dict(result["weights"])
        x, y = evaluation.joint(list(range(count)))
        with torch.no_grad():
            outputs = model(x)
        torch.testing.assert_close(gathered["outputs"], outputs)
        assert torch.equal(gathered["half"], gathered["outputs"].bfloat16())
        assert torch.equal(gathered["near"], (gathered["outputs"] - y).abs() < 1)


@STAGES_AND_WORLDS
def test_gathers_of_uneven_nested_values(pools: Pools, stage: int, world: int) -> None:
    result = same_everywhere(pools(world).run(f"{CASES}:reduce_and_gather", {"config": config(stage)}))
    ranks = [evaluation.uneven(rank) for rank in range(world)]
    wanted = {
        "floats": torch.cat([rank["floats"] for rank in ranks]),
        "low": [torch.cat([rank["low"][i] for rank in ranks]) for i in range(2)],
        "bools": torch.cat([rank["bools"] for rank in ranks]),
        "longs": torch.cat([rank["longs"] for rank in ranks]),
        "scalar": (torch.arange(float(world)), torch.arange(world)),
        "strided": torch.cat([rank["floats"] for rank in ranks]),
        "none": None,
    }
    assert wanted["floats"].shape[0] == sum(range(world))
    torch.testing.assert_close(result["gathered"], wanted, rtol=0, atol=0)
    torch.testing.assert_close(result["metrics"], wanted, rtol=0, atol=0)


@STAGES_AND_WORLDS
def test_reductions_of_nested_values(pools: Pools, stage: int, world: int) -> None:
    result = same_everywhere(pools(world).run(f"{CASES}:reduce_and_gather", {"config": config(stage)}))["reduced"]
    ranks = [evaluation.mixed(rank) for rank in range(world)]
    losses = [rank["loss"] for rank in ranks]
    assert [result[op]["loss"] for op in ("sum", "mean", "max", "min")] == [
        sum(losses),
        sum(losses) / world,
        max(losses),
        0.0,
    ]
    assert [(type(result[op]["loss"])) for op in ("sum", "max")] == [float if world > 1 else int] * 2
    total = 3 * sum(range(world))
    assert [result[op]["count"] for op in ("sum", "mean", "max", "min")] == [total, total / world, 3 * (world - 1), 0]
    assert type(result["sum"]["count"]) is int
    assert [result[op]["flag"] for op in ("sum", "max", "min")] == [1, True, world == 1]
    for op, function in (("sum", torch.sum), ("mean", torch.mean), ("max", torch.amax), ("min", torch.amin)):
        for index in range(2):
            stacked = torch.stack([rank["tensors"][index] for rank in ranks]).double()
            found = result[op]["tensors"][index]
            assert found.dtype == (torch.float32 if index else torch.float64 if op == "mean" else torch.int64)
            torch.testing.assert_close(found, function(stacked, 0).to(found.dtype), rtol=0, atol=0)
    assert [result[op]["tensors"][2].item() for op in ("sum", "max", "min")] == [1, True, world == 1]
    assert result["sum"]["half"].tolist() == [1000.0 * sum(range(1, world + 1))] * 2


@pytest.mark.parametrize("how", ["shared memory", "messages", "little memory", "native"])
@pytest.mark.parametrize("world", [2, 3])
def test_large_values_whichever_way_they_are_sent(pools: Pools, world: int, how: str) -> None:
    result = same_everywhere(pools(world).run(f"{CASES}:gather_large", {"how": how}))
    ranks = [evaluation.large(rank) for rank in range(world)]
    wanted = {name: torch.cat([rank[name] for rank in ranks]) for name in ranks[0]}
    torch.testing.assert_close(result["gathered"], [wanted, wanted], rtol=0, atol=0)
    assert torch.equal(result["total"], torch.full((20001,), sum(range(world))))


WORDS = {
    "dtype": r"RuntimeError: engine.gather: .*rank 0 has \['x'\]: torch.float64 \[\*, 3\] \| rank 1 has .*float32",
    "trailing shape": r"RuntimeError: engine.gather: .*rank 0 has \['x'\]: torch.float32 \[\*, 3\] \| .*\[\*, 2\]",
    "keys": r"RuntimeError: engine.gather: .*rank 0 has nothing more \| rank 1 has \['y'\]: torch.float32 \[\*, 3\]",
    "shape": r"RuntimeError: engine.reduce: .*rank 0 has \['x'\]: torch.float32 \[2, 3\] \| rank 1 has .*\[3\]",
    "op": r"RuntimeError: engine.reduce: .*rank 0 has engine.reduce, op=sum \| rank 1 has engine.reduce, op=max",
    "kind": r"RuntimeError: engine.reduce: .*rank 0 has \['x'\]: a number \| rank 1 has \['x'\]: torch.float32",
    "method": r"RuntimeError: engine\.\w+: .*rank 0 has engine.reduce, op=mean; .* \| rank 1 has engine.gather",
    "text": r"ValueError: engine.gather: rank 0: expected tensors, got str at \['x'\]",
    "wrong op": r"ValueError: engine.reduce: rank 0: expected op to be one of mean, sum, max, min, got 'average'",
    "rows": r"ValueError: engine.gather_for_metrics: rank 0: expected a row for each of the 2 samples .*3 rows at",
    "batch": r"RuntimeError: engine.gather_for_metrics: .*rank 0 has .*2 samples on each.*rank 1 has .*1 samples",
}


@pytest.mark.fast("0-2", "1-3", "2-2", "3-2")
@pytest.mark.parametrize("world", [2, 3])
@STAGES
def test_ranks_that_disagree_all_raise_and_go_on(pools: Pools, stage: int, world: int) -> None:
    for said in pools(world).run(f"{CASES}:disagreements", {"config": config(stage)}, timeout=30):
        assert set(said) == set(WORDS)
        for name, words in WORDS.items():
            assert re.search(words, said[name], re.DOTALL), (name, said[name])


@pytest.mark.fast("True-0-1")
@STAGES_AND_WORLDS
@pytest.mark.parametrize("drop_last", [False, True])
def test_training_on_data_equals_plain_training(pools: Pools, stage: int, world: int, drop_last: bool) -> None:
    count, updates, accumulation, size = 15, 5, 2, 2
    settings = config(stage, accumulation=accumulation, dataloader_drop_last=drop_last)
    kwargs = {"config": settings, "count": count, "updates": updates}
    ranks = pools(world).run(f"{CASES}:train_on_data", kwargs)
    passes, micro = [], []
    while len(micro) < updates * accumulation:
        sampler = EpochSampler(range(count), 1, 0)
        sampler.set_epoch(len(passes))
        passes.append(list(sampler))
        held = passes[-1][: count // (size * world) * size * world] if drop_last else passes[-1]
        micro += [held[start : start + size * world] for start in range(0, len(held), size * world)]
    assert [rank["gathered"] for rank in ranks] == [micro[: updates * accumulation]] * world
    assert {rank["length"] for rank in ranks} == {len(micro) // len(passes)}
    model = models.build(models.Mlp)
    name, params = settings["optimizer"]["type"], settings["optimizer"]["params"]
    optimizer = getattr(torch.optim, name)(model.parameters(), **params, foreach=True)
    for update in range(updates):
        for rank in ranks:
            for part in rank["seen"][update]:
                x, y = evaluation.joint(part)
                (F.mse_loss(model(x), y) / (world * accumulation)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank in ranks:
        torch.testing.assert_close(rank["weights"], dict(model.named_parameters()))


def test_arguments_of_initialize_reach_the_loaders(pools: Pools) -> None:
    for result in pools(2).run(f"{CASES}:loader_options", {"config": config(1)}):
        assert result == {"workers": (2, 0), "batch sizes": (2, 3), "batches": [3]}


# -------------------------------------------------------------------- synchronised batch norm


def plain_batch_norm(settings: dict[str, Any], world: int, steps: int) -> dict[str, Any]:
    """The joint batch on one process."""
    model = evaluation.normalised_model(nn.BatchNorm1d)
    optimizer = torch.optim.SGD(model.parameters(), **settings["optimizer"]["params"], foreach=True)
    norms = []
    for step in range(steps):
        batches = [models.float_batch(step, 0, rank) for rank in range(world)]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        F.mse_loss(model(x), y).backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
        optimizer.step()
        optimizer.zero_grad()
    buffers = {name: buffer for name, buffer in model.named_buffers() if "batches" not in name}
    return {"norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}, "buffers": buffers}


@pytest.mark.fast("2-0", "3-1", "2-2", "2-3")
@STAGES
@pytest.mark.parametrize("world", [2, 3])
def test_statistics_of_all_ranks_equal_those_of_the_joint_batch(pools: Pools, stage: int, world: int) -> None:
    settings = config(stage)
    ranks = pools(world).run(f"{CASES}:sync_batch_norm", {"config": settings, "steps": 4, "real": False})
    wanted = plain_batch_norm(settings, world, 4)
    for rank in ranks:
        torch.testing.assert_close(rank, wanted, rtol=1e-4, atol=1e-6)


@STAGES
def test_torchs_sync_batch_norm_evaluates_on_the_cpu_and_refuses_to_train(pools: Pools, stage: int) -> None:
    model = evaluation.normalised_model(nn.BatchNorm1d).eval()
    with torch.no_grad():
        outputs = model(models.float_batch(0, 0, 0)[0])
    for rank in pools(2).run(f"{CASES}:torch_sync_batch_norm_on_cpu", {"config": config(stage)}):
        torch.testing.assert_close(rank["outputs"], outputs)
        assert "SyncBatchNorm expected input tensor to be on GPU" in rank["error"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's SyncBatchNorm trains on CUDA only; none here")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_torchs_sync_batch_norm_equals_the_joint_batch(stage: int) -> None:
    settings = config(stage)
    with Pool(2) as pair:  # two ranks that share the device, over gloo
        ranks = pair.run(f"{CASES}:sync_batch_norm", {"config": settings, "steps": 4, "real": True}, timeout=180)
    wanted = plain_batch_norm(settings, 2, 4)
    for rank in ranks:
        torch.testing.assert_close(rank, wanted, rtol=1e-3, atol=1e-5)
