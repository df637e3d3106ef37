"""``p.grad`` between backward and step: the bits of the config's clipping, and what using it costs.

What loops do with it is compared with plain PyTorch in test_drop_in.py.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.cases.p_grad_loops import LOOPS
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, PARTITIONED, SGD, config
from tests.toolkit.pool import Pools

CASES = "tests.distributed.cases.p_grad"
COMPARE = "tests.distributed.cases.p_grad_loops:compare"
FAST = [(0, "fp32", "", 1), (1, "bf16", "cpu", 1), (2, "fp16", "", 2), (3, "fp32", "nvme", 1)]
EVERY = itertools.product((0, 1, 2, 3), ("fp32", "bf16", "fp16"), ("", "cpu", "nvme"), (1, 2))


def at(stage: int, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    return config(stage, precision, zero=PARTITIONED["moving"] if stage == 3 else {}, **more)


def settings(stage: int, precision: str, offload: str, micros: int, directory: Path, clip: float) -> dict[str, Any]:
    zero: dict[str, Any] = dict(PARTITIONED["moving"]) if stage == 3 else {}
    if offload:
        zero["offload_optimizer"] = {"device": offload, **({"nvme_path": str(directory)} if offload == "nvme" else {})}
    return config(stage, precision, micros, clip, ADAMW if offload else SGD, zero)


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("stage", "precision", "offload", "micros"),
    [
        pytest.param(*one, marks=() if one in FAST else pytest.mark.slow)
        for one in EVERY
        if not (one[0] == 0 and one[2])
    ],
)
def test_clipping_by_torch_has_the_bits_and_the_collectives_of_the_config(
    pools: Pools, tmp_path: Path, stage: int, precision: str, offload: str, micros: int, world: int
) -> None:
    def run(how: str, **more: Any) -> list[dict[str, Any]]:
        clip = 0.05 if how == "config" else 0.0
        kwargs = {"config": settings(stage, precision, offload, micros, tmp_path, clip), "how": how, "micros": micros}
        return pools(world).run(f"{CASES}:clipped", {**kwargs, **more})

    wanted = run("config")
    for more in ({"foreach": None}, {"foreach": True}):
        for got, want in zip(run("torch", **more), wanted, strict=True):
            assert got["norms"] == pytest.approx(want["norms"], rel=1e-12)
            assert_same_bits(want["parameters"], got["parameters"], f"{more}")
            assert got["launched"] == want["launched"]


@pytest.mark.slow
def test_a_step_launches_what_it_would_without_p_grad_whether_that_is_used_or_not(pools: Pools) -> None:
    """A reduction for each bucket of gradients, statistics, and the gathers of parameters: no call and no byte more."""
    statistics = [("all_reduce", "stats", 160)]
    buckets = [512, 256, 512]  # bytes of the gradients of Mlp on two ranks, in the order in which they come
    reduced = [("reduce_scatter", "gradients", nbytes) for nbytes in buckets]
    gathered = [("all_gather", "parameters", nbytes) for nbytes in buckets]
    units = [("all_gather", "parameters", nbytes) for nbytes in (896, 384, 512)]  # forward: together; backward: each
    wanted = [
        [("all_reduce", "gradients", nbytes) for nbytes in buckets] + statistics,
        reduced + statistics + gathered,
        reduced + statistics + gathered,
        units + [("reduce_scatter", "gradients", nbytes) for nbytes in (384, 512)] + statistics,
    ]
    for ranks in pools(2).run(f"{CASES}:launched", {"configs": [at(stage) for stage in range(4)]}):
        for calls, expected in zip(ranks, wanted, strict=True):
            for use, launched in calls.items():
                assert launched == expected, use


@pytest.mark.fast("2")
@pytest.mark.parametrize("stage", range(4))
def test_norms_and_factors_allocate_nothing_of_a_gradients_size(pools: Pools, stage: int) -> None:
    width = 512  # a weight's part on two ranks: 512 KiB
    for largest in pools(2).run(f"{CASES}:allocated", {"config": config(stage, "fp32", 1, 0.0, ADAMW), "width": width}):
        assert max(largest.values()) < 16384, largest


@pytest.mark.parametrize("stage", [1, pytest.param(0, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_a_gather_is_warned_of_once_per_line(pools: Pools, stage: int) -> None:
    zero = PARTITIONED["moving"] if stage == 3 else {}
    first, second = pools(2).run(f"{CASES}:said", {"config": config(stage, zero=zero)})
    assert second == []  # the first rank speaks
    assert len(first) == (2 if stage else 0)
    for message in first:
        assert message.startswith("p_grad.py: ") and "zerolite.get_full_grad(p)" in message and "collective" in message


@pytest.mark.parametrize("stage", [2, pytest.param(0, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_a_gradient_that_is_not_there_says_so(pools: Pools, stage: int) -> None:
    zero = PARTITIONED["moving"] if stage == 3 else {}
    for heard in pools(2).run(f"{CASES}:refused", {"config": config(stage, zero=zero)}):
        assert "engine.update() has used it" in heard["after an update"]
        assert "'first.weight'" in heard["after a step"] and "after the next backward" in heard["after a step"]
        assert "when that has returned" in heard["inside a backward"]
        assert "'first.weight'" in heard["shown"] and "(13, 7)" in heard["shown"]


@pytest.mark.parametrize("stage", [1, pytest.param(0, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_that_use_different_parameters_clip_alike(pools: Pools, stage: int) -> None:
    zero = {**PARTITIONED["moving"], "leaf_modules": ["MixtureOfExperts"]} if stage == 3 else {}
    results = pools(2).run(f"{CASES}:unused_here", {"config": config(stage, zero=zero)})
    assert results[0]["norms"] == results[1]["norms"]
    assert_same_bits(results[0]["parameters"], results[1]["parameters"], "of both ranks")


EVERYWHERE = [(0, {}), (1, {"whole_parameters": True}), (2, {}), (3, PARTITIONED["moving"])]


@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("stage", "zero"), [pytest.param(*one, marks=pytest.mark.slow if one[0] in (0, 3) else ()) for one in EVERYWHERE]
)
def test_what_gradients_were_multiplied_by_is_in_all_that_reads_them(
    pools: Pools, stage: int, zero: dict[str, Any], precision: str
) -> None:
    for read in pools(2).run(f"{CASES}:scaled_and_read", {"config": config(stage, precision, zero=zero)}):
        for before, after, shown in zip(read["before"], read["after"], read["shown"], strict=True):
            assert torch.equal(before * 0.5, after)
            dtype = torch.float32 if precision == "fp32" else torch.float16
            assert torch.equal(after.to(dtype).sort(stable=True).values.float(), shown)
        total = torch.stack([gradient.double().square().sum() for gradient in read["after"]]).sum().sqrt()
        assert read["norm"] == pytest.approx(float(total), rel=1e-6)
        wanted = read["after"][0].clone()
        wanted[0] = 0.25
        torch.testing.assert_close(
            read["changed"], (wanted + 1).reshape(-1), rtol=0, atol=1e-7 if precision == "fp32" else 2e-3
        )


@pytest.mark.parametrize("stage", [1, pytest.param(0, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["read", "call", "clip", "drop"])
def test_a_rank_that_has_left_a_join_misses_no_change(pools: Pools, stage: int, how: str) -> None:
    zero = PARTITIONED["moving"] if stage == 3 else {}
    going, gone = pools(2).run(f"{CASES}:joined", {"config": config(stage, zero=zero), "how": how})
    assert len(going["norms"]) == 3 and gone["norms"] == going["norms"][:2]
    if how in ("read", "call"):
        assert_same_bits(going["parameters"], gone["parameters"], "of both ranks")
    else:
        assert "rank 1 has finished its batches" in going["error"] and "rank 1 has finished" in gone["error"]


@pytest.mark.slow
def test_parts_of_layers_have_no_gradient_in_p_grad(pools: Pools) -> None:
    setting = config(1, tensor_parallel={"size": 2, "plan": "auto"})
    for rank in pools(2).run(f"{CASES}:with_parts", {"config": setting}):
        assert len(rank["said"]) == 2 and rank["norm"] > 0
        for said in rank["said"]:
            assert "tensor_parallel" in said and "engine.clip_gradients(max_norm)" in said
        assert len(rank["replaced"]) == 4
        for said in rank["replaced"]:
            assert "'blocks.0.attention.project.weight' was replaced" in said, rank["replaced"]
            assert "zerolite.set_full_grad(p, value)" in said


@pytest.mark.parametrize(
    "stage", [0, 1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_gradient_that_is_kept_is_not_that_of_the_next_step(pools: Pools, stage: int) -> None:
    zero = PARTITIONED["moving"] if stage == 3 else {}
    for heard in pools(2).run(f"{CASES}:kept", {"config": config(stage, zero=zero)}):
        assert len(heard["messages"]) == heard["count"]
        assert all("clone what is to outlive the step" in message for message in heard["messages"])


@pytest.mark.fast("2-looked_at_on_one_rank")
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_loop_is_that_of_plain_pytorch(pools: Pools, tmp_path: Path, name: str, world: int) -> None:
    for wrong in pools(world).run(COMPARE, {"names": [name], "directory": str(tmp_path)}, timeout=120.0):
        assert not wrong, "\n".join(f"{where}: {what}" for where, what in wrong.items())


def test_a_tensor_in_p_grad_is_refused_until_it_is_cleared_where_backwards_have_weights(pools: Pools) -> None:
    for stage in range(4):
        for found in pools(2).run(
            f"{CASES}:assigned_with_weights", {"config": at(stage, optimizer=("SGD", {"lr": 0.5}))}
        ):
            assert len(found["refusals"]) == 6
            for said in found["refusals"]:
                assert "'first.weight'" in said and "the mean weight" in said and "engine.zero_grad()" in said
            torch.testing.assert_close(found["moved"], 0.5 * found["own"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_norms_of_two_engines_at_once_are_those_of_each(pools: Pools, world: int) -> None:
    for stages in ((0, 2), (2, 0), (3, 1)):
        for pairs in pools(world).run(f"{CASES}:of_two_engines", {"first": at(stages[0]), "second": at(stages[1])}):
            for asked, wanted in zip(pairs[::2], pairs[1::2], strict=True):
                assert asked == pytest.approx(wanted, rel=1e-5)


def test_a_gradient_that_is_kept_scaled_has_no_memory(pools: Pools) -> None:
    for found in pools(2).run(f"{CASES}:memory_of_a_scaled", {"config": at(0, "fp16")}):
        assert found["same"] and not found["writeable"]
        assert all("times a loss scale" in said and "zerolite.get_full_grad(p)" in said for said in found["said"])


def test_an_assigned_tensor_that_overflows_is_noticed_on_all_ranks(pools: Pools) -> None:
    for stage in range(4):
        for found in pools(2).run(f"{CASES}:overflow_of_an_assigned", {"config": at(stage, "fp16")}):
            assert found["skipped"] == [1, 1] and found["norm"] >= 1.0, stage
