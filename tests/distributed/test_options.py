"""Every option of zero_optimization and of communication gives the right numbers; and the other ways to make an
engine."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerolite
from tests.toolkit import models, reference
from tests.toolkit.compare import CLIP, EPSILON, assert_same_bits
from tests.toolkit.configs import ADAMW, SGD, config
from tests.toolkit.pool import Pool, Pools
from tests.toolkit.training import counters, engine_window, make_engine, snapshot


def two_engines(first: dict[str, Any], second: dict[str, Any], together: bool) -> dict[str, Any]:
    """Two models trained in turns, one step each, or one after the other."""
    if together:
        engines = [make_engine(first), make_engine(second, "Mlp")]
        for step in range(3):
            engine_window(engines[0], "OddModel", step, 1)
            engine_window(engines[1], "Mlp", step, 1)
    else:
        engines = [make_engine(first)]
        for step in range(3):
            engine_window(engines[0], "OddModel", step, 1)
        engines.append(make_engine(second, "Mlp"))
        for step in range(3):
            engine_window(engines[1], "Mlp", step, 1)
    return {"first": snapshot(engines[0]), "second": snapshot(engines[1])}


def state_round_trip(config: dict[str, Any]) -> dict[str, Any]:
    """Three steps, save, three more; then a new engine from the saved states and the same three."""
    engine = make_engine(config)
    for step in range(3):
        engine_window(engine, "OddModel", step, 1)
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"zerolite-test-{os.getpid()}.pt"
    try:
        torch.save({"optimizer": engine.optimizer.state_dict(), "module": engine.module.state_dict()}, path)
        for step in range(3, 6):
            engine_window(engine, "OddModel", step, 1)
        wanted = snapshot(engine)
        saved = torch.load(path, weights_only=False)
    finally:
        path.unlink(missing_ok=True)
    model = models.build(models.OddModel, seed=99)
    model.load_state_dict({name: value.float() for name, value in saved["module"].items()})
    resumed = zerolite.initialize(model, config)
    resumed.optimizer.load_state_dict(saved["optimizer"])
    for step in range(3, 6):
        engine_window(resumed, "OddModel", step, 1)
    return {"wanted": wanted, "resumed": snapshot(resumed)}


class Numbers(torch.utils.data.Dataset):
    """Item i is (i, i²)."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((7,), float(index)), torch.full((3,), float(index**2))


def training_data(config: dict[str, Any], count: int) -> list[list[float]]:
    """The items that this rank sees in one epoch, batch by batch; one step on each."""
    engine = make_engine(config, "Mlp", training_data=Numbers(count))
    seen = []
    for x, y in engine.dataloader:
        engine.backward(models.square_loss(engine, (x / 100, y / 10000)))
        engine.step()
        seen.append(x[:, 0].tolist())
    return seen


def given_optimizer(config: dict[str, Any], how: str) -> dict[str, Any]:
    """An optimizer from the user: an instance with two param groups, a class, a function; and a learning rate changed
    midway."""
    model = models.build(models.Mlp)
    groups = [
        {"params": [model.first.weight, model.second.weight], "weight_decay": 0.1},
        {"params": [model.first.bias, model.second.bias], "weight_decay": 0.0},
    ]
    make = lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True)  # noqa: E731
    if how == "instance":
        engine = zerolite.initialize(model, config, optimizer=make(groups))
    else:
        engine = zerolite.initialize(model, config, optimizer=make, model_parameters=groups)
    for step in range(4):
        if step == 2:
            engine.optimizer.param_groups[1]["lr"] = 1e-3
        engine_window(engine, "Mlp", step, 1)
    return {"parameters": snapshot(engine), **counters(engine)}


def inputs_and_outputs(config: dict[str, Any]) -> dict[str, Any]:
    """Return what the module sees and what the caller gets, for nested inputs and outputs."""
    seen: dict[str, Any] = {}

    class Nested(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(7, 3)

        def forward(self, batch: dict[str, Any], *, scale: float) -> dict[str, Any]:
            seen["x"] = batch["x"].dtype
            seen["ids"] = batch["more"][0].dtype
            out = self.layer(batch["x"]) * scale
            return {"out": out, "list": [out, batch["more"][0]], "text": "kept"}

    engine = zerolite.initialize(Nested(), config)
    result = engine({"x": torch.randn(2, 7), "more": (torch.arange(3),)}, scale=2.0)
    types = {"out": result["out"].dtype, "list": [t.dtype for t in result["list"]], "text": result["text"]}
    engine.backward(result["out"].sum() + result["list"][0].sum())
    engine.step()
    return {"seen": seen, "types": types, "steps": engine.global_steps}


def threads_after_destroy(directory: str) -> dict[str, Any]:
    """For workers without a process group: zerolite starts one, trains, ends it."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    before = native_threads()
    zerolite.init_distributed("gloo", f"file://{directory}/store", rank, world_size)
    zerolite.init_distributed()
    during = native_threads()
    engine = make_engine(
        {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, "Mlp"
    )
    world = engine.world_size
    engine_window(engine, "Mlp", 0, 1)
    trained = native_threads()
    del engine
    zerolite.destroy()
    zerolite.destroy()
    after = native_threads()
    return {
        "before": before,
        "during": during,
        "trained": trained,
        "after": after,
        "initialized": dist.is_initialized(),
        "world": world,
        "python threads": [thread.name for thread in threading.enumerate()],
    }


def native_threads() -> list[str]:
    """The names of this process's threads as the kernel sees them, also those that Python does not know."""
    return sorted(Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task"))


# -------------------------------------------------------------------- the tests


TRAIN = "tests.toolkit.training"
STEPS = 4
LOW_BF16 = {"enabled": True, "bf16_master_weights_and_grads": True}

# name: (precision of the reference, masters of the reference, accumulation, relative tolerance of weights and norms,
# config) Exact options are held to fp32's 1e-6. What travels or accumulates in 16 bits loses half a unit (2^-9 in
# bf16, 2^-12 in fp16) per rounding, a few roundings per step; lr × gradient is of order 0.1, so weights move by less
# than EPSILON × 0.5 over four steps.
OPTIONS: dict[str, tuple[str, str, int, float, dict[str, Any]]] = {
    "reduce_scatter": ("fp32", "fp32", 1, 1e-6, {"zero": {"reduce_scatter": False}}),
    "reduce_scatter, accumulation": ("bf16", "fp32", 3, EPSILON["bf16"], {"zero": {"reduce_scatter": False}}),
    "contiguous_gradients": ("fp32", "fp32", 3, 1e-6, {"zero": {"contiguous_gradients": False}}),
    "contiguous_gradients, bf16": ("bf16", "fp32", 1, EPSILON["bf16"], {"zero": {"contiguous_gradients": False}}),
    "allgather_bucket_size": ("fp32", "fp32", 1, 1e-6, {"zero": {"allgather_bucket_size": 40}}),
    "large buckets": ("fp32", "fp32", 3, 1e-6, {"zero": {"allgather_bucket_size": 10**9, "reduce_bucket_size": 10**9}}),
    "overlap_comm": ("fp32", "fp32", 3, 1e-6, {"zero": {"overlap_comm": True}}),
    "no overlap_comm": ("fp32", "fp32", 3, 1e-6, {"zero": {"overlap_comm": False}}),
    "prescale_gradients": ("fp32", "fp32", 1, 1e-6, {"prescale_gradients": True}),
    "prescale_gradients, accumulation": ("fp32", "fp32", 3, 1e-6, {"prescale_gradients": True}),
    "gradient_predivide_factor": ("fp32", "fp32", 1, 1e-6, {"gradient_predivide_factor": 1.5}),
    "communication_data_type fp32": ("bf16", "fp32", 1, EPSILON["bf16"], {"communication_data_type": "fp32"}),
    "communication_data_type bf16": ("fp32", "fp32", 1, EPSILON["bf16"], {"communication_data_type": "bf16"}),
    "communication_data_type fp16": ("fp32", "fp32", 3, EPSILON["fp16"], {"communication_data_type": "fp16"}),
    "grad_accum_dtype fp32": ("bf16", "fp32", 3, EPSILON["bf16"], {"data_types": {"grad_accum_dtype": "fp32"}}),
    "grad_accum_dtype bf16": ("bf16", "fp32", 3, 2 * EPSILON["bf16"], {"data_types": {"grad_accum_dtype": "bf16"}}),
    "bf16 masters": ("bf16", "rounded", 1, EPSILON["bf16"], {"bf16": LOW_BF16}),
    "bf16 masters and states": (
        "bf16",
        "none",
        1,
        EPSILON["bf16"],
        {"bf16": {**LOW_BF16, "bf16_optimizer_states": True}},
    ),
    "fp16 masters": (
        "fp16",
        "rounded",
        1,
        EPSILON["fp16"],
        {"fp16": {"enabled": True, "loss_scale": 256.0, "fp16_master_weights_and_grads": True}},
    ),
    "torch_autocast": (
        "autocast",
        "fp32",
        1,
        EPSILON["bf16"],
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    ),
}


@pytest.mark.fast("fp16 masters")
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_gives_the_right_numbers(pools: Pools, name: str) -> None:
    precision, masters, accumulation, tolerance, more = OPTIONS[name]
    low = precision if precision in ("bf16", "fp16") else "fp32"
    batches = [
        [[models.token_batch(step, micro, rank) for rank in range(3)] for micro in range(accumulation)]
        for step in range(STEPS)
    ]
    scale = 256.0 if precision == "fp16" else 1.0
    model = models.build(models.OddModel)
    wanted = reference.train(model, models.token_loss, batches, precision, SGD, 0.0, scale, masters)
    runs = {
        str(stage): {"config": config(stage, low, accumulation, 0.0, SGD, **more), "steps": STEPS}
        for stage in (0, 1, 2)
        if not (masters != "fp32" and stage == 0)  # DeepSpeed has 16-bit masters with ZeRO only
    }
    ranks = pools(3).run(f"{TRAIN}:train_many", {"runs": runs})
    for stage in runs:
        result = ranks[0][stage]
        assert_same_bits(result["parameters"], ranks[2][stage]["parameters"], f"stage {stage}, two ranks")
        assert result["norms"] == pytest.approx(wanted.norms, rel=tolerance), f"stage {stage}"
        for parameter, value in wanted.parameters.items():
            torch.testing.assert_close(
                result["parameters"][parameter].float(),
                value,
                rtol=tolerance,
                atol=tolerance / 2,
                msg=lambda m, s=stage, p=parameter: f"stage {s}, {p}: {m}",
            )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_overlap_does_not_change_a_bit(pools: Pools, precision: str) -> None:
    for stage in (0, 1, 2):
        runs = {
            str(overlap): {
                "config": config(stage, precision, 2, CLIP, ADAMW, zero={"overlap_comm": overlap}),
                "steps": 5,
            }
            for overlap in (None, True, False)
        }
        for results in pools(3).run(f"{TRAIN}:train_many", {"runs": runs}):
            for other in ("True", "False"):
                assert_same_bits(
                    results["None"]["parameters"], results[other]["parameters"], f"stage {stage}, overlap_comm {other}"
                )
                assert results["None"]["norms"] == results[other]["norms"]


def test_two_engines_in_one_process(pools: Pools) -> None:
    kwargs = {"first": config(2, "bf16", optimizer=ADAMW), "second": config(1, zero={"overlap_comm": True})}
    together = pools(2).run(two_engines, {**kwargs, "together": True})[1]
    apart = pools(2).run(two_engines, {**kwargs, "together": False})[1]
    for name in ("first", "second"):
        assert_same_bits(together[name], apart[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_optimizer_state_makes_a_round_trip(pools: Pools, stage: int, precision: str) -> None:
    for result in pools(3).run(state_round_trip, {"config": config(stage, precision, 1, CLIP, ADAMW)}):
        assert_same_bits(result["wanted"], result["resumed"], "the run that went on and the one that was resumed")


def test_training_data_is_shared_out_among_ranks(pools: Pools) -> None:
    ranks = pools(2).run(training_data, {"config": config(1), "count": 12})
    assert [len(batches) for batches in ranks] == [3, 3]
    assert all(len(batch) == 2 for batches in ranks for batch in batches)
    seen = [item for batches in ranks for batch in batches for item in batch]
    assert sorted(seen) == [float(index) for index in range(12)]


@pytest.mark.parametrize("how", ["instance", "function"])
def test_an_optimizer_of_the_users_keeps_its_groups(pools: Pools, how: str) -> None:
    model = models.build(models.Mlp)
    weights, biases = [model.first.weight, model.second.weight], [model.first.bias, model.second.bias]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=True)
    for step in range(4):
        if step == 2:
            optimizer.param_groups[1]["lr"] = 1e-3
        optimizer.zero_grad()
        models.square_loss(model, reference.join([models.float_batch(step, 0, rank) for rank in range(2)])).backward()
        optimizer.step()
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    for stage in (0, 1, 2):
        setting = {key: value for key, value in config(stage).items() if key != "optimizer"}
        result = pools(2).run(given_optimizer, {"config": setting, "how": how})[0]
        torch.testing.assert_close(result["parameters"], wanted, rtol=0, atol=0.02 * 1e-2)
        assert result["lr"] == [1e-2, 1e-3]


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_inputs_are_cast_and_outputs_come_back_in_fp32(pools: Pools, precision: str, dtype: torch.dtype) -> None:
    for result in pools(2).run(inputs_and_outputs, {"config": config(1, precision)}):
        assert result["seen"] == {"x": dtype, "ids": torch.int64}
        assert result["types"] == {"out": torch.float32, "list": [torch.float32, torch.int64], "text": "kept"}
        assert result["steps"] == 1


def test_destroy_leaves_no_thread(tmp_path: Path) -> None:
    with Pool(2, init_group=False) as pool:
        for result in pool.run(threads_after_destroy, {"directory": str(tmp_path)}):
            assert result["world"] == 2
            assert not result["initialized"]
            assert len(result["during"]) > len(result["before"]), "the test sees no thread of the process group"
            assert result["after"] == result["before"]
            assert set(result["python threads"]) == {"MainThread", "parent-watch"}
