"""Results do not depend on the data of one rank, on the transport, or on other engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pool import Pools

CASES = "tests.distributed.cases.edges"
SGD = {"type": "SGD", "params": {"lr": 0.1}}


def close(a: Any, b: Any, rtol: float, atol: float = 0.0) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@pytest.mark.fast("[['l', 'lr'], ['', '']]-fp32-True", "[['l'], ['r']]-bf16-True")
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ways", [[["l", "lr"], ["", ""]], [["l"], ["r"]], [["ll", "rl"], ["r", "l"]]], ids=str)
def test_ranks_that_take_different_branches(
    pools: Pools, ways: list[list[str]], precision: str, contiguous: bool
) -> None:
    """One rank uses every parameter, the other none, or others, or some of them several times: all stages agree."""
    results = []
    for stage in (0, 1, 2):
        config: dict[str, Any] = {
            "optimizer": SGD,
            "gradient_accumulation_steps": len(ways[0]),
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 40, "contiguous_gradients": contiguous},
        }
        if precision == "bf16":
            config["bf16"] = {"enabled": True}
        results.append(pools(2).run(f"{CASES}:branches_on_one_rank", {"config": config, "ways": ways})[0])
    # fp32: stage 2 adds means, the others average sums. bf16: stage 2 rounds each mean's terms where the others add
    # first.
    rtol, atol = (1e-6, 1e-7) if precision == "fp32" else (2**-6, 2**-7)
    close(results[1], results[0], 0.0)
    close(results[2], results[0], rtol, atol)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("zero", [{}, {"reduce_scatter": False}, {"overlap_comm": True}], ids=str)
def test_transports_give_the_same_bits(pools: Pools, world: int, dtype: str, zero: dict[str, Any]) -> None:
    """Shared memory, messages, and shared memory that runs out when a larger bucket comes: same bits at all stages."""
    results, kinds = [], set()
    for stage in (0, 1, 2):
        for limit in (None, 0, 3 * 4096, 3 * 12288):
            config: dict[str, Any] = {
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "foreach": True}},
                "gradient_clipping": 0.5,
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, **zero},
            }
            if dtype == "bf16":
                config["bf16"] = {"enabled": True}
            result = pools(world).run(f"{CASES}:transports", {"config": config, "limit": limit})[0]
            assert not result["left"]
            kinds.add((result["kind"], result["exhausted"]))
            results.append(result["parameters"])
    assert kinds == {
        ("SharedMemoryCommunicator", False),
        ("SharedMemoryCommunicator", True),
        ("GlooCommunicator", None),
    }
    for other in results[1:]:
        close(other, results[0], 0.0)


@pytest.mark.parametrize("loop", ["engine", "plain"])
@pytest.mark.parametrize("stage", [0, 2])
def test_two_fp16_engines_in_one_graph(pools: Pools, stage: int, loop: str) -> None:
    """Each engine's scale stays inside it: the same updates and the same outer gradients as in fp32, to fp16's
    rounding."""
    run = lambda precision: pools(2).run(  # noqa: E731
        f"{CASES}:two_engines_in_one_graph", {"stage": stage, "precision": precision, "loop": loop}
    )[0]
    exact, half = run("fp32"), run("fp16")
    for name, value in exact.items():
        assert (half[name] - value).norm() <= 0.02 * value.norm(), name


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_late_parameter_beside_momentum(pools: Pools, stage: int) -> None:
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": stage},
    }
    results = pools(2).run(f"{CASES}:late_momentum", {"config": config})
    close(results[0], results[1], 0.0)
    torch.manual_seed(0)
    from tests.distributed.cases.edges import Branches

    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for way in ("l", "l", "lr", "r", "lr"):
        model(torch.ones(2, 6), way).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    close(results[0], [p.detach() for p in model.parameters()], 1e-6, 1e-7)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_flush(pools: Pools, accumulation: int) -> None:
    """An empty window is not a step; a partial one is the mean of what it contains."""
    config = {"optimizer": SGD, "gradient_accumulation_steps": accumulation, "zero_optimization": {"stage": 2}}
    answers = pools(2).run(f"{CASES}:flush_and_boundaries", {"config": config})[0]
    assert (answers["empty"], answers["steps"], answers["flushed"], answers["after"]) == (False, 0, True, 1)
    assert answers["boundary"] is (accumulation == 1)
    assert answers["update"] == pytest.approx([-0.2] * 3, rel=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_values_loaded_into_the_module(pools: Pools, stage: int) -> None:
    assert pools(2).run(f"{CASES}:values_loaded_into_the_module", {"stage": stage}) == [(True, True)] * 2


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_outdated_graph_is_refused(pools: Pools, stage: int) -> None:
    for message in pools(1).run(f"{CASES}:outdated_graph", {"stage": stage}):
        assert "inplace operation" in message
