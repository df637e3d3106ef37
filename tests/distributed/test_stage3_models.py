"""Stage 3 with what real models do: the bits of stage 2, and nothing left gathered after any step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.distributed.cases import stage3_cases, stage3_graphs, stage3_library, stage3_models
from tests.toolkit.configs import ADAMW, config
from tests.toolkit.pool import Pools

CASES = list(stage3_cases.CLASSES)
assert stage3_models and stage3_graphs and stage3_library  # they fill the list

# The first variant of each model, and all whose graphs differ, run always.
_VARIED = (
    "Lora",
    "SharedBias-not",
    "Checkpointed",
    "CheckpointedInPart",
    "TiedHead",
    "ReturnedParameter",
    "ViewChangedInPlace",
)
_FIRST = {name.split("-")[0]: name for name in reversed(CASES)}
FAST_AND_SLOW = [
    name if name.startswith(_VARIED) or name in _FIRST.values() else pytest.param(name, marks=pytest.mark.slow)
    for name in CASES
]

_ALL = {"stage3_param_persistence_threshold": 0, "stage3_module_granularity_threshold": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    # Everything is released after every use.
    "everything moves": {**_ALL, "stage3_max_reuse_distance": 0},
    # Kept between forward and backward.
    "kept": _ALL,
    # One unit or two ahead, and evictions.
    "tight": {
        **_ALL,
        "stage3_prefetch_bucket_size": 100,
        "stage3_max_live_parameters": 250,
        "stage3_max_reuse_distance": 200,
    },
    # The whole model is one unit.
    "one unit": {"stage3_param_persistence_threshold": 0},
}


# A gradient that comes in two parts, from two inner backwards: until a plan is followed the second part is reduced by
# itself, and mean(a) + mean(b) is rounded otherwise than mean(a + b).
FIRES_TWICE = ("CheckpointedInside-reentrant",)


def run(
    pools: Pools, world: int, name: str, settings: dict[str, dict[str, Any]] = SETTINGS, **more: Any
) -> list[dict[str, Any]]:
    """A case at stage 2 and at stage 3 under each of the settings, on each rank; compared."""
    extra = stage3_cases.CLASSES[name].zero
    configs = {"stage 2": config(2, optimizer=ADAMW, **more)}
    configs |= {key: config(3, optimizer=ADAMW, zero={**zero, **extra}, **more) for key, zero in settings.items()}
    arguments = {"name": name, "configs": configs}
    ranks = pools(world).run("tests.distributed.cases.stage3_cases:train_all", arguments, timeout=90)
    problems = [
        f"rank {rank}, {key}: {problem}"
        for rank, results in enumerate(ranks)
        for key, result in results.items()
        for problem in differences(result, results["stage 2"], exact=name not in FIRES_TWICE)
    ]
    assert not problems, "\n".join(problems)
    return ranks


def differences(result: dict[str, Any], wanted: dict[str, Any], exact: bool = True) -> list[str]:
    """In what a run is not the other one's equal, and what it left gathered."""
    problems = [f"left gathered {result['left'][:8]}"] if result["left"] else []
    losses = wanted["losses"] if exact else pytest.approx(wanted["losses"], rel=1e-6)  # of weights that are as close
    close = {"losses": losses, "evaluations": pytest.approx(wanted["evaluations"], rel=1e-6)}
    for what, expected in {"tied": wanted["tied"], "trained": wanted["trained"], **close}.items():
        if result[what] != expected:
            problems.append(f"{what} {result[what]}, expected {wanted[what]}")
    state, other = result["state"], wanted["state"]
    if list(state) != list(other):
        return [*problems, f"names {list(state)}, expected {list(other)}"]
    same = torch.equal if exact else partial(torch.allclose, rtol=1e-5, atol=1e-6)
    wrong = [k for k in other if not same(state[k], other[k]) or state[k].stride() != other[k].stride()]
    return [*problems, f"{wrong} differ"] if wrong else problems


@pytest.mark.fast("Frozen-middle", "TiedHead-called", "BorrowedWeight", "Bags-sum")
@pytest.mark.parametrize("name", FAST_AND_SLOW)
def test_stage_3_gives_the_bits_of_stage_2(pools: Pools, name: str) -> None:
    stable = stage3_cases.CLASSES[name].stable
    for results in run(pools, 2, name):
        for setting in SETTINGS:
            assert results[setting]["units"] and all(results[setting]["gathers"]), setting
            assert stable is None or results[setting]["following"][-1] is stable, setting
        assert len(results["one unit"]["units"]) == 1 < len(results["kept"]["units"])
        assert results["everything moves"]["gathers"][-1] > results["one unit"]["gathers"][-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_process_gives_the_bits_of_stage_2(pools: Pools, name: str) -> None:
    run(pools, 1, name, {key: SETTINGS[key] for key in ("everything moves", "kept")})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MixtureOfExperts", "UnusedOnSomeRanks", "TiedHead-functional", "Lora-checkpointed"])
def test_three_ranks_give_the_bits_of_stage_2(pools: Pools, name: str) -> None:
    run(pools, 3, name, {key: SETTINGS[key] for key in ("everything moves", "tight")})


@pytest.mark.fast("TiedHead-functional")
@pytest.mark.parametrize("name", ["SeveralUses", "TiedHead-functional", "Checkpointed-reentrant", "Lora-plain"])
def test_accumulation_in_bf16_gives_the_bits_of_stage_2(pools: Pools, name: str) -> None:
    settings = {key: SETTINGS[key] for key in ("everything moves", "kept")}
    run(pools, 2, name, settings, precision="bf16", accumulation=2)


def test_what_is_frozen_has_no_gradient_no_master_and_no_state(pools: Pools) -> None:
    for name in ("Lora-plain", "HeadOnly"):
        for results in run(pools, 2, name, {"kept": SETTINGS["kept"]}):
            kept = results["kept"]
            adapters = [key for key in kept["state"] if key.endswith((".a", ".b"))]
            assert sorted(kept["trained"]) == sorted(adapters or ["head.weight", "head.bias"])
            trained = sum(kept["trained"].values())
            padding = 16 * len(kept["trained"])  # what a part may lack of half of its parameter, or have more
            assert trained <= kept["reduced"][-1] < trained + 2 * padding
            assert trained / 2 - padding < kept["masters"] < trained / 2 + padding
            assert trained - 2 * padding < kept["states"] < trained + 2 * padding  # AdamW has two
            assert sum(value.numel() for value in kept["state"].values()) > 3 * trained


def test_a_tied_weight_is_counted_once(pools: Pools) -> None:
    for results in run(pools, 2, "TiedHead-called", {"kept": SETTINGS["kept"]}):
        kept = results["kept"]
        assert kept["tied"]["embed.weight"] == ["embed.weight", "head.weight"]
        assert "head.weight" not in kept["trained"] and "embed.weight" in kept["trained"]


@pytest.mark.slow
def test_a_plan_is_followed_again_after_other_branches(pools: Pools) -> None:
    moving = {key: zero for key, zero in SETTINGS.items() if key != "one unit"}
    for results in run(pools, 2, "ChangingBranches", moving):
        for setting in moving:
            following = results[setting]["following"]
            assert following[4] and not any(following[5:7]), setting
            assert following[-1], setting
