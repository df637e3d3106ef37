"""Zerolite's kernels in an engine's step: states that are loaded, kernels that are missing, launches, skipped steps."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed.test_kernels import ALL, LATE, STAGES, assert_close, assert_near
from tests.toolkit.compare import CLIP, assert_same_bits, assert_same_on_ranks
from tests.toolkit.configs import config, dynamic_fp16
from tests.toolkit.faults import Warnings, poison
from tests.toolkit.optimizers import (
    Branches,
    assert_same_facts,
    by_name,
    counted,
    engine_steps,
    facts,
    loss_of,
    plain,
    train,
    without_kernels,
)
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import make_engine
from zerolite.ops import library

# -------------------------------------------------------------------- saving


def save_and_load(
    first: dict[str, Any], second: dict[str, Any], model: str = "Late", branches: Branches | None = LATE
) -> dict[str, dict[str, Any]]:
    """Three steps with config ``first``, a save, three more; and the same three by another engine with config
    ``second`` that loads what was saved, the module's values first."""
    engine = make_engine(first, model)
    engine_steps(engine, model, range(3), branches)
    values = engine.full_state_dict()
    saved = copy.deepcopy(engine.optimizer.state_dict())
    engine_steps(engine, model, range(3, 6), branches)
    resumed = make_engine(second, model)

    resumed.load_full_state_dict(values)
    resumed.optimizer.load_state_dict(saved)
    loaded = facts(resumed)
    assert_same_facts({**loaded, "states": by_name(engine, saved["state"])}, loaded, "at once")
    assert "c.weight" not in loaded["states"]  # its first gradient comes afterwards
    engine_steps(resumed, model, range(3, 6), branches)
    return {"wanted": facts(engine), "resumed": facts(resumed)}


@pytest.mark.fast("2-SGD dampening")
@pytest.mark.parametrize("name", ["SGD dampening", "AdamW"])
@on_ranks(2)
def test_states_travel_between_kernels_and_torchs_implementation(name: str) -> None:
    foreach = (ALL[name][0], {**ALL[name][1], "foreach": True})
    methods = {"FlatUpdate": ALL[name], "TorchUpdate": foreach}
    for stage in (0, 2):
        for first, second in (list(methods), list(methods)[::-1]):
            result = save_and_load(*(config(stage, optimizer=methods[one]) for one in (first, second)))
            assert (result["wanted"]["method"], result["resumed"]["method"]) == (first, second)
            assert_near(result["resumed"]["parameters"], result["wanted"]["parameters"], name)


@pytest.mark.fast("2-capturable")
@pytest.mark.parametrize("key", ["amsgrad", "capturable"])
@on_ranks(2)
def test_what_the_kernels_cannot_follow_is_said(key: str) -> None:
    """An option appears in the param groups midway, and goes again."""
    for stage in STAGES:
        engine = make_engine(config(stage, optimizer=ALL["AdamW"]), "Mlp")
        engine_steps(engine, "Mlp", range(2))
        before, old = facts(engine), engine.optimizer.param_groups[0][key]
        engine.optimizer.param_groups[0][key] = True
        with pytest.raises(ValueError, match=rf"(?s)(?=.*param_groups\[0\]\['{key}'\])(?=.*True).*optimizer is made"):
            engine_steps(engine, "Mlp", range(2, 3))
        assert_same_facts(before, facts(engine), "a refused step")
        engine.optimizer.param_groups[0][key] = old
        engine.zero_grad()
        engine_steps(engine, "Mlp", range(2, 4))
        assert all(int(state["step"]) == 4 for state in facts(engine)["states"].values())


# -------------------------------------------------------------------- kernels that are not there


@pytest.mark.fast("3-Adagrad-ranks2-stages2")
@pytest.mark.parametrize(
    ("name", "ranks", "stages"),
    [("AdamW", [1], [0, 2]), ("Lion", [0, 1, 2], [3]), ("Adagrad", [0, 2], [0]), ("SGD dampening", [0], STAGES)],
)
@on_ranks(3)
def test_without_kernels_on_a_rank_all_use_torchs(name: str, ranks: list[int], stages: list[int]) -> None:
    module, _ = plain(ALL[name])
    for stage in stages:
        reason = f"the compiler of {name} is on holiday at stage {stage}. Call it back."
        setting = config(stage, optimizer=ALL[name])
        with Warnings() as warnings, without_kernels(ranks, reason), counted() as calls:
            result, again = train(setting), train(setting)
        assert calls["update"] == []
        assert (result["method"], result["fused"]) == ("TorchUpdate", True if name == "AdamW" else None)
        if dist.get_rank() == max(ranks):  # which tells for all, once for both engines
            (told,) = warnings.messages
            for word in (f"rank {max(ranks)}", "CPU kernels are not available", reason, "torch's optimizers"):
                assert word in told
        else:
            assert warnings.messages == []
        assert_same_bits(result["parameters"], again["parameters"], "a second engine")
        assert_same_on_ranks(result["parameters"])
        assert_close(result["parameters"], module, ALL[name], f"stage {stage}")


@on_ranks(2)
def test_kernels_switched_off() -> None:
    """A user who switches kernels off gets no warning."""
    setting = config(1, optimizer=ALL["AdamW"])
    os.environ["ZEROLITE_KERNELS"] = "0"
    library._load.cache_clear()
    try:
        with Warnings() as warnings, counted() as calls:
            result = train(setting)
    finally:
        del os.environ["ZEROLITE_KERNELS"]
        library._load.cache_clear()
    assert (calls["update"], result["method"], warnings.messages) == ([], "TorchUpdate", [])
    assert_close(result["parameters"], plain(ALL["AdamW"])[0], ALL["AdamW"])
    assert train(setting)["method"] == "FlatUpdate"


# -------------------------------------------------------------------- what a step costs


class Passes(TorchDispatchMode):
    """The operators that read or write some memory; those that only make views do not count."""

    def __init__(self, memory: dict[str, list[Tensor]]) -> None:
        super().__init__()
        self._ranges = {
            name: [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors if t.numel()]
            for name, tensors in memory.items()
        }
        self.seen: dict[str, list[str]] = {name: [] for name in memory}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returned = [r.alias_info for r in func._schema.returns]
        view = any(info is not None and not info.is_write for info in returned)
        tensors = [t for t in tree_leaves((args, kwargs or {}, result)) if isinstance(t, Tensor) and t.numel()]
        for name, ranges in self._ranges.items():
            touched = any(
                t.data_ptr() < end and t.data_ptr() + t.numel() * t.element_size() > start
                for t in tensors
                for start, end in ranges
            )
            if touched and not view:
                self.seen[name].append(str(func).removesuffix(".default"))
        return result


def step_costs(
    config: dict[str, Any], model: str = "Mlp", branches: Branches | None = None
) -> tuple[int, dict[str, list[int]], dict[str, list[str]]]:
    """The buckets; the launches, and the passes over gradients, masters and compute parameters, of the third step."""
    engine = make_engine(config, model)
    engine_steps(engine, model, range(2), branches)
    for micro in range(engine.gradient_accumulation_steps - 1):
        engine.backward(loss_of(engine, model, 2, micro, dist.get_rank(), branches))
        engine.step()
    engine.backward(loss_of(engine, model, 2, 9, dist.get_rank(), branches))
    engine.reduce_gradients()
    buffer, reducer = engine._pipeline._buffer, engine._reducer
    buckets = range(len(buffer.layout.buckets))
    gradients = [reducer.reduced(bucket) for bucket in buckets]
    with (
        counted() as calls,
        Passes({"gradients": gradients, "masters": buffer.master, "compute": buffer.compute}) as passes,
    ):
        engine.step()
    return len(buckets), calls, passes.seen


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(1, 2)
def test_a_step_is_one_norm_launch_and_one_update_launch(stage: int) -> None:
    """And one launch that reads the updated masters, to find those that are not finite. Nothing else touches a
    gradient, or a master where masters are apart: the update reads and writes them once, unscales, clips and rounds
    into the compute parameters."""
    world = dist.get_world_size()
    for name, precision, accumulation in (("AdamW", "fp32", 1), ("SGD nesterov", "bf16", 3), ("AdamW", "bf16", 1)):
        operator = f"zerolite.{'adam' if name == 'AdamW' else 'sgd'}_"
        buckets, calls, passes = step_costs(config(stage, precision, accumulation, 0.01, ALL[name]))
        assert buckets > 1
        assert calls == {"update": [buckets], "squares": [buckets, buckets]}
        assert passes["gradients"] == ["zerolite.squares_", operator]
        # What the user may have written into parameters that stay whole, the small ones, reaches their shards.
        whole = ["aten._foreach_copy_"] if stage == 3 and world == 2 else []
        if precision != "fp32" or world == 1 or stage in (0, 3):  # else the gather reads them
            before = whole if precision == "fp32" else []
            assert passes["masters"] == [*before, operator, "zerolite.squares_"]
        if world == 1 or stage in (0, 3):
            looked_at = ["zerolite.squares_"] if precision == "fp32" else []  # they are the masters
            assert passes["compute"] == [*whole, operator, *looked_at]
    buckets, calls, _ = step_costs(config(stage, optimizer=ALL["AdamW"]), "TwoDtypes")
    assert sum(calls["update"]) == sum(calls["squares"]) / 2 == buckets
    assert [len(calls[kind]) for kind in ("update", "squares")] == [2, 4]
    unused = [["abc", "abc"], ["abc", "abc"], ["ab", "a"]]
    _, calls, passes = step_costs(config(stage, optimizer=ALL["AdamW"]), "Late", unused)
    assert [len(calls[kind]) for kind in ("update", "squares")] == [1, 2]
    assert passes["gradients"] == ["zerolite.squares_", "zerolite.adam_"]


# -------------------------------------------------------------------- skipped steps, several engines


@pytest.mark.slow
@on_ranks(2)
def test_a_skipped_step_leaves_no_trace() -> None:
    """Between the second and the third of four steps comes one whose gradient is infinite on rank 0."""
    kinds = [("SGD dampening", "fp32", {}), ("AdamW", "fp16", {"fp16": dynamic_fp16()}), ("Adagrad", "fp16", {})]
    for stage in STAGES:
        for name, precision, more in kinds:
            setting = config(stage, precision, clip=CLIP, optimizer=ALL[name], **more)
            engine = make_engine(setting, "Mlp")
            engine_steps(engine, "Mlp", range(2))
            before = facts(engine)
            hook = poison(engine, "first.weight", float("inf")) if dist.get_rank() == 0 else None
            engine_steps(engine, "Mlp", range(7, 8))
            if hook is not None:
                hook.remove()
            assert (before["skipped"], engine.skipped_steps) == (0, 1)
            assert_same_facts(before, facts(engine), f"stage {stage}")
            engine_steps(engine, "Mlp", range(2, 4))
            if not more:  # whose scale falls
                assert_same_facts(facts(engine), train(setting, "Mlp"), f"stage {stage}, without the skip")
