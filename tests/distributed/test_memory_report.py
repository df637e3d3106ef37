"""engine.memory_report() against layouts computed by hand, to the byte."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zerolite
from tests.toolkit import models
from tests.toolkit.configs import ADAMW, PARTITIONED, config
from tests.toolkit.mixed import Mixed
from tests.toolkit.pool import Pools
from zerolite.zero import GatheredParameters


def moments(
    config: dict[str, Any],
    optimizer: str | None = None,
    init: bool = False,
    windows: int = 2,
) -> dict[str, Any]:
    """The items at each moment of the last of ``windows``: after each backward, before the update (when all is
    reduced), after the window, with all parameters gathered. ``optimizer``: one of torch's by name, instead of the
    config's. ``init``: the model is made partitioned."""
    with zerolite.zero.Init() if init else contextlib.nullcontext():
        model = models.build(Mixed)
    given = {"optimizer": getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)} if optimizer else {}
    engine = zerolite.initialize(model, config, **given)
    found = {"made": engine.memory_report().items}
    for window in range(windows):
        for micro in range(engine.gradient_accumulation_steps):
            engine.backward(models.square_loss(engine, models.float_batch(window, micro, engine.rank)))
            found[f"backward {micro}"] = engine.memory_report().items
            if micro + 1 == engine.gradient_accumulation_steps:
                engine.reduce_gradients()
                found["reduced"] = engine.memory_report().items
            engine.step()
    found["after"] = engine.memory_report().items
    with GatheredParameters(engine.module):
        found["gathered"] = engine.memory_report().items
    found["released"] = engine.memory_report().items
    return found


def several_moments(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """:func:`moments` by name."""
    return {name: moments(**run) for name, run in runs.items()}


def several_places(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Report the memory after two steps, by name of the run and place."""
    found = {}
    for name, run in runs.items():
        engine = zerolite.initialize(models.build(Mixed), run["config"])
        for window in range(2):
            engine.backward(models.square_loss(engine, models.float_batch(window, 0, engine.rank)))
            engine.step()
        report = engine.memory_report()
        found[name] = {"device": report.items, "host": report.host, "disk": report.disk}
        text = str(report)
        assert all(f"({place})" in text for place in ("host", "disk") if any(found[name][place].values()))
    return found


def whole_report(config: dict[str, Any]) -> dict[str, Any]:
    """A report as text and as plain data, the collectives that it took, and what it says of views and new tensors."""
    engine = zerolite.initialize(models.build(Mixed), config)
    with zerolite.comm.record() as recorder:
        report = engine.memory_report()
    engine.module.register_buffer("seen", engine.module.offset[1:])  # another view of memory that counts already
    with_view = engine.memory_report().items
    engine.module.register_buffer("new", torch.zeros(1000))
    with_new = engine.memory_report().items
    del engine.module.new
    engine.module.register_buffer("sparse", torch.eye(3).to_sparse())
    return {
        "text": str(report),
        "data": json.loads(json.dumps(report.to_dict())),
        "total": report.total,
        "model_states": report.model_states,
        "calls": len(recorder.calls),
        "with_view": with_view,
        "with_new": with_new,
        "with_sparse": engine.memory_report().items,
    }


# -------------------------------------------------------------------- the tests


# The trained parameters of cases.memory_report.Mixed in the order of the layout, from the last one on, in buckets of at
# most 100 elements or one parameter; a slot begins at a multiple of 32 elements, a bucket ends at one of 32 per rank.
BUCKETS = [32 + 39, 169, 13, 91]  # last.bias and last.weight, middle, first.bias, first.weight
UNITS = [[91, 13], [169], [39, 3]]  # at stage 3: by module; a rank's part of each is a multiple of 16 elements
FROZEN = [169, 13]
BUFFERS = 3 * 4 + 8 + 2 * 8
REGION = 4096  # the least that is shared between processes: a page, three times per process and communicator
PRECISIONS = {"fp32": (4, 0), "bf16": (2, 4), "fp16": (2, 4)}  # bytes of a compute parameter, of a separate master


def up(numel: int, unit: int) -> int:
    return -(-numel // unit) * unit


def part(numel: int, world: int) -> int:
    return up(-(-numel // world), 16) if world > 1 else numel


def flat(world: int) -> int:
    """Elements of all buckets, stages 0 to 2."""
    return sum(up(numel, 32 * world) for numel in BUCKETS)


def rows(world: int) -> int:
    """Elements of this rank's rows, stage 3."""
    return sum(up(part(numel, world), 16) for unit in UNITS for numel in unit)


def whole(world: int, frozen: bool = True) -> int:
    """Elements of all parameters when gathered."""
    numels = [numel for unit in UNITS for numel in unit] + (FROZEN if frozen else [])
    return sum(world * part(numel, world) for numel in numels)


def states(stage: int, precision: str, world: int) -> dict[str, int]:
    """Bytes of what stays the same from the first update on."""
    compute, master = PRECISIONS[precision]
    if stage == 3:
        trained = owned = rows(world)
        frozen = sum(part(numel, world) for numel in FROZEN)
    else:
        trained, frozen = flat(world), sum(FROZEN)
        owned = trained if stage == 0 else trained // world
    return {
        "compute_parameters": compute * (trained + frozen),
        "master_weights": master * owned,
        "optimizer_states": 2 * 4 * owned,
        "buffers": BUFFERS,
        "persistent_parameters": 0,
        "gathered_parameters": 0,
        "offload_buffers": 0,
        "activations": 0,
    }


def gradients(stage: int, precision: str, world: int, accumulation: int) -> int:
    """Bytes of the mean gradient that an update takes: summed in fp32 where there are several contributions."""
    width = PRECISIONS[precision][0] if accumulation == 1 else 4
    owned = {0: flat(world), 3: rows(world)}.get(stage, flat(world) // world)
    return width * owned


def without(items: dict[str, int], *names: str) -> dict[str, int]:
    return {name: nbytes for name, nbytes in items.items() if name not in names}


def run(stage: int, precision: str = "fp32", accumulation: int = 1, **more: Any) -> dict[str, Any]:
    zero = more.pop("zero", PARTITIONED["moving"] if stage == 3 else {})
    extra = more.pop("extra", {})
    settings = config(stage, precision, accumulation, 0.0, ADAMW, zero, **extra)
    if "optimizer" in more:
        del settings["optimizer"]
    return {"config": settings, **more}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 3))])
def test_every_stage_and_precision_to_the_byte(pools: Pools, world: int) -> None:
    kinds = [(stage, precision, micros) for stage in range(4) for precision in PRECISIONS for micros in (1, 2)]
    runs = {f"{kind}": run(*kind) for kind in kinds}
    for found in pools(world).run(several_moments, {"runs": runs}):
        for stage, precision, micros in kinds:
            moments = found[f"{(stage, precision, micros)}"]
            expected = states(stage, precision, world)
            if world == 1 and stage in (1, 2):
                expected |= states(0, precision, 1)
            gradient = gradients(stage, precision, world, micros)
            changing = ("gradients", "communication_buckets")
            for moment in ("reduced", "after", "released"):
                got = without(moments[moment], *changing)
                assert got == expected, (stage, precision, micros, moment)
            assert moments["reduced"]["gradients"] == gradient, (stage, precision, micros)
            # At stage 0 the buckets stay, to be used again: those on the CPU are expensive to allocate.
            assert moments["after"]["gradients"] == (gradient if stage == 0 else 0), (stage, precision, micros)
            made = without(moments["made"], *changing)
            assert made == expected, (stage, precision)
            full = PRECISIONS[precision][0] * whole(world) if stage == 3 and world > 1 else 0
            assert without(moments["gathered"], *changing) == {**expected, "gathered_parameters": full}


def test_sums_in_the_middle_of_a_window(pools: Pools) -> None:
    runs = {f"{stage}": run(stage, "bf16", 3) for stage in range(4)}
    ranks = pools(2).run(several_moments, {"runs": runs})
    for found in ranks:
        # Nothing is reduced before the last micro-batch at stages 0 and 1: whole sums, in fp32.
        assert found["0"]["backward 0"]["gradients"] == 4 * flat(2)
        assert found["1"]["backward 0"]["gradients"] == 4 * flat(2)
        assert found["1"]["backward 1"]["gradients"] == 4 * flat(2)
        # The others reduce each; what is still on its way is no gradient yet: the last two buckets at stage 2.
        assert found["2"]["backward 0"]["gradients"] == 4 * (flat(2) - sum(up(b, 64) for b in BUCKETS[-2:])) // 2
        assert found["2"]["backward 1"]["gradients"] == 4 * flat(2) // 2
        assert found["3"]["backward 1"]["gradients"] == 4 * rows(2)


def test_what_stays_whole_and_what_a_communicator_keeps(pools: Pools) -> None:
    runs = {
        "persistent": run(3, zero=PARTITIONED["defaults"]),
        "in zero.Init": run(3, init=True),
        "moving": run(3),
        "stage 2": run(2),
        "stage 0": run(0),
    }
    for found in pools(2).run(several_moments, {"runs": runs}):
        persistent = found["persistent"]["after"]
        assert persistent["persistent_parameters"] == 4 * whole(2)
        assert persistent["gathered_parameters"] == found["persistent"]["gathered"]["gathered_parameters"] == 0
        assert found["in zero.Init"] == found["moving"]
        buckets = {name: moments["after"]["communication_buckets"] for name, moments in found.items()}
        # Every process maps the regions of both; gathers have a communicator of their own. Sums of fewer than 4096
        # elements, such as the statistics and all of stage 0's here, have regions of their own.
        one = 2 * 3 * REGION
        assert buckets == {
            "persistent": 3 * one,
            "in zero.Init": 3 * one,
            "moving": 3 * one,
            "stage 2": 2 * one,
            "stage 0": one,
        }


def test_states_of_torchs_own_optimizers_and_masters_in_16_bits(pools: Pools) -> None:
    low = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    runs = {
        "NAdam": run(1, optimizer="NAdam"),
        "Rprop at stage 0": run(0, optimizer="Rprop"),
        "16-bit masters": run(2, "bf16", extra=low),
    }
    ranks = pools(2).run(several_moments, {"runs": runs})
    # Of the pieces alone, without padding: bucket by bucket the first half is rank 0's. Two moments, and two numbers of
    # four bytes for each piece.
    pieces = {0: [3, 32, 96, 13, 64], 1: [7, 73, 27]}
    for rank, found in enumerate(ranks):
        wanted = 2 * 4 * sum(pieces[rank]) + 2 * 4 * len(pieces[rank])
        assert found["NAdam"]["after"]["optimizer_states"] == wanted
        numel = sum(numel for unit in UNITS for numel in unit)
        assert found["Rprop at stage 0"]["after"]["optimizer_states"] == 2 * 4 * numel + 4 * 5
        low_bits = found["16-bit masters"]["after"]
        assert low_bits["master_weights"] == 0  # they are the compute parameters
        assert low_bits["optimizer_states"] == 2 * 2 * flat(2) // 2


def test_a_report_is_text_and_plain_data_and_counts_each_storage_once(pools: Pools) -> None:
    for rank, found in enumerate(pools(2).run(whole_report, {"config": config(2, "bf16")})):
        data, items = found["data"], found["data"]["items"]
        assert found["calls"] == 0
        assert (data["rank"], data["device"], data["other"], data["allocated"]) == (rank, "cpu", None, None)
        assert data["resident_peak"] >= data["resident"] > 50e6
        assert found["total"] == sum(items.values())
        states = ("compute_parameters", "master_weights", "optimizer_states")
        assert found["model_states"] == sum(items[name] for name in states)
        assert set(data["host"].values()) == set(data["disk"].values()) == {0}
        assert f"memory of rank {rank} on cpu" in found["text"]
        assert f"  compute parameters     {2 * (flat(2) + sum(FROZEN)) / 1000:>7.2f} KB" in found["text"].splitlines()
        assert found["with_view"] == items
        assert found["with_new"] == {**items, "buffers": BUFFERS + 4000}
        assert found["with_sparse"] == items


def test_what_rests_off_the_device_is_told_apart_where_the_device_is_the_cpu(pools: Pools, tmp_path: Path) -> None:
    host, disk = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(tmp_path)}
    kinds = {
        "optimizer on the host": (2, {"offload_optimizer": host}),
        "optimizer on disk": (1, {"offload_optimizer": disk}),
        "all on the host": (3, {**PARTITIONED["moving"], "offload_optimizer": host, "offload_param": host}),
        "on both": (
            3,
            {**PARTITIONED["moving"], "offload_optimizer": disk, "offload_param": disk | {"max_in_cpu": 150}},
        ),
    }
    runs = {name: {"config": config(stage, "bf16", 1, 0.0, ADAMW, zero)} for name, (stage, zero) in kinds.items()}
    for found in pools(2).run(several_places, {"runs": runs}):
        for name, (stage, _) in kinds.items():
            places, expected = found[name], states(stage, "bf16", 2)
            everywhere = {item: sum(places[place][item] for place in places) for item in expected}
            assert without(everywhere, "offload_buffers") == without(expected, "offload_buffers"), name
            away = "disk" if name in ("optimizer on disk", "on both") else "host"
            for item in ("master_weights", "optimizer_states"):
                assert places[away][item] == expected[item], (name, item)
            assert places["disk"]["offload_buffers"] == places["device"]["offload_buffers"] == 0
            assert places["host"]["offload_buffers"] > 0 or away == "host"
        compute = {name: [found[name][place]["compute_parameters"] for place in found[name]] for name in kinds}
        whole_ones, shards = (states(stage, "bf16", 2)["compute_parameters"] for stage in (2, 3))
        assert compute["optimizer on the host"] == compute["optimizer on disk"] == [whole_ones, 0, 0]
        assert compute["all on the host"] == [0, shards, 0]
        device, on_host, on_disk = compute["on both"]
        assert device == 0 and 0 < on_host <= 2 * 150 and on_host + on_disk == shards
