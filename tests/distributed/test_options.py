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
from tests.toolkit.compare import EPSILON, assert_same_on_ranks
from tests.toolkit.configs import ADAMW, SGD, config
from tests.toolkit.pool import Pool
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import engine_window, make_engine, snapshot, train_engine

STEPS = 4

# By name: precision of the reference, accumulation, relative tolerance of weights and norms, config. Exact options are
# held to fp32's 1e-6. What travels or accumulates in 16 bits loses half a unit (2^-9 in bf16, 2^-12 in fp16) per
# rounding, a few roundings per step; lr × gradient is of order 0.1, so weights move by less than EPSILON × 0.5 over
# four steps.
OPTIONS: dict[str, tuple[str, int, float, dict[str, Any]]] = {
    "reduce_scatter": ("fp32", 1, 1e-6, {"zero": {"reduce_scatter": False}}),
    "contiguous_gradients": ("fp32", 3, 1e-6, {"zero": {"contiguous_gradients": False}}),
    "allgather_bucket_size": ("fp32", 1, 1e-6, {"zero": {"allgather_bucket_size": 40}}),
    "large buckets": ("fp32", 3, 1e-6, {"zero": {"allgather_bucket_size": 10**9, "reduce_bucket_size": 10**9}}),
    "prescale_gradients, accumulation": ("fp32", 3, 1e-6, {"prescale_gradients": True}),
    "gradient_predivide_factor": ("fp32", 1, 1e-6, {"gradient_predivide_factor": 1.5}),
    "communication_data_type fp32": ("bf16", 1, EPSILON["bf16"], {"communication_data_type": "fp32"}),
    "communication_data_type bf16": ("fp32", 1, EPSILON["bf16"], {"communication_data_type": "bf16"}),
    "communication_data_type fp16": ("fp32", 3, EPSILON["fp16"], {"communication_data_type": "fp16"}),
    "grad_accum_dtype fp32": ("bf16", 3, EPSILON["bf16"], {"data_types": {"grad_accum_dtype": "fp32"}}),
    "grad_accum_dtype bf16": ("bf16", 3, 2 * EPSILON["bf16"], {"data_types": {"grad_accum_dtype": "bf16"}}),
    "torch_autocast": ("autocast", 1, EPSILON["bf16"], {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
}


@pytest.mark.fast("grad_accum_dtype bf16-3")
@on_ranks(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_gives_the_right_numbers(name: str) -> None:
    precision, accumulation, tolerance, more = OPTIONS[name]
    low = "bf16" if precision == "bf16" else "fp32"
    batches = [
        [[models.token_batch(step, micro, rank) for rank in range(3)] for micro in range(accumulation)]
        for step in range(STEPS)
    ]
    wanted = reference.train(models.build(models.OddModel), models.token_loss, batches, precision, SGD)
    for stage in (0, 1, 2):
        engine = make_engine(config(stage, low, accumulation, 0.0, SGD, **more))
        norms = train_engine(engine, "OddModel", STEPS)["norms"]
        assert_same_on_ranks(snapshot(engine))
        assert norms == pytest.approx(wanted.norms, rel=tolerance), f"stage {stage}"
        found = {parameter: value.float() for parameter, value in snapshot(engine).items()}
        torch.testing.assert_close(found, wanted.parameters, rtol=tolerance, atol=tolerance / 2)


def native_threads() -> list[str]:
    """The names of this process's threads as the kernel sees them, also those that Python does not know."""
    return sorted(Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task"))


def threads_after_destroy(directory: str) -> None:
    """For workers without a process group: zerolite starts one, trains, ends it."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    before = native_threads()
    zerolite.init_distributed("gloo", f"file://{directory}/store", rank, world_size)
    zerolite.init_distributed()
    assert len(native_threads()) > len(before), "the test sees no thread of the process group"
    engine = make_engine(config(optimizer=ADAMW), "Mlp")
    assert engine.world_size == 2
    engine_window(engine, "Mlp", 0, 1)
    del engine
    zerolite.destroy()
    zerolite.destroy()
    assert not dist.is_initialized() and native_threads() == before
    assert {thread.name for thread in threading.enumerate()} == {"MainThread", "parent-watch"}


def test_destroy_leaves_no_thread(tmp_path: Path) -> None:
    with Pool(2, init_group=False) as pool:
        pool.run(threads_after_destroy, {"directory": str(tmp_path)})
