"""The settings that a comparison plans, and which of them is the cheapest."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from tests.planning.jobs import NUMEL, stack
from tests.unit.plan_examples import GB, make_items, make_peak, make_plan
from zerolite import planning
from zerolite.config import ConfigError, ZeroliteConfig, load_config
from zerolite.planning import command
from zerolite.planning import settings as module
from zerolite.planning.errors import RefusedError
from zerolite.planning.make import plan
from zerolite.planning.result import Comparison, Plan
from zerolite.planning.settings import Setting, cheapest, compare, offload_settings, plain_settings, with_zero

DISK = {"device": "nvme", "nvme_path": "/fast"}
PLAIN = ["stage 0", "stage 1", "stage 2", "stage 3"]
HOST = ["stage 1, optimizer on the host", "stage 2, optimizer on the host"]
HOST_3 = ["stage 3, optimizer on the host", "stage 3, optimizer and parameters on the host"]


def config(**zero: Any) -> ZeroliteConfig:
    return load_config({"zero_optimization": zero})


def names(settings: list[Setting]) -> list[str]:
    return [setting.name for setting in settings]


def test_sizes_are_tried_where_nothing_is_offloaded() -> None:
    large = ["stage 1, buckets of 500M", "stage 2, buckets of 500M"]
    both = ["stage 3, prefetch 50M, live 100M", "stage 3, prefetch 500M, live 1000M"]
    assert set(names(plain_settings(config()))) == {*PLAIN, *large, *both}
    own = plain_settings(config(reduce_bucket_size=1e7))
    assert set(names(own)) == {*PLAIN, *large, *both, "stage 1, buckets of 50M", "stage 2, buckets of 50M"}
    assert [setting.name in PLAIN for setting in own] == [not setting.resized for setting in own]
    assert names(plain_settings(config(stage=1, offload_optimizer={"device": "cpu"}))) == PLAIN
    for setting in plain_settings(config(stage=3, offload_optimizer=DISK, offload_param=DISK)):
        zero = with_zero(config(stage=3, offload_optimizer=DISK, offload_param=DISK), **setting.keys).zero_optimization
        assert zero.stage == setting.stage and not (zero.offload_optimizer.enabled or zero.offload_param.enabled)


def test_what_may_rest_elsewhere() -> None:
    assert names(offload_settings(config(), "cuda")) == [*HOST, *HOST_3]
    assert offload_settings(config(), "cpu") == []  # the host's memory is the device's
    disk = [name.replace("the host", "disk") for name in (*HOST, *HOST_3)]
    for block in (DISK, {"device": "none", "nvme_path": "/fast"}, {"device": "cpu", "nvme_path": "/fast"}):
        own = config(stage=3, offload_optimizer={"device": "cpu", "ratio": 1}, offload_param=block)
        assert {*HOST, *HOST_3, *disk} <= set(names(offload_settings(own, "cuda")))
    assert names(offload_settings(config(stage=2, offload_optimizer=DISK), "cpu")) == disk


def test_the_configs_own_setting_is_among_them() -> None:
    blocks = {"offload_optimizer": DISK | {"buffer_count": 9}, "offload_param": {"device": "cpu"}}
    own = config(stage=3, sub_group_size=77, **blocks)
    name = "stage 3, optimizer on disk, parameters on the host"
    (setting,) = [setting for setting in offload_settings(own, "cuda") if setting.name == name]
    zero = with_zero(own, **setting.keys).zero_optimization
    assert (zero.sub_group_size, zero.offload_optimizer) == (77, own.zero_optimization.offload_optimizer)
    assert zero.offload_param.device == "cpu"
    half = config(stage=1, offload_optimizer={"device": "cpu", "ratio": 0.5, "nvme_path": "/fast"})
    found = names(offload_settings(half, "cuda"))
    assert found[:2] == ["stage 1, 50 % of the optimizer on the host", "stage 1, optimizer on disk"]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_none_contradicts_itself(device: str) -> None:
    blocks: tuple[Any, ...] = ({}, DISK, {"device": "none", "nvme_path": "/fast"})
    for optimizer, parameters in itertools.product((*blocks, {"device": "cpu", "ratio": 0.5}), blocks):
        own = config(stage=3, offload_optimizer=optimizer, offload_param=parameters)
        for setting in (*plain_settings(own), *offload_settings(own, device)):
            assert with_zero(own, **setting.keys).zero_optimization.stage == setting.stage


# -------------------------------------------------------------------- which is the cheapest


def row(stage: int, peak: int, host: int = 0, disk: int = 0, buckets: int = 0, **changes: Any) -> Plan:
    """Sizes in GB; the device has 80. buckets: a part of the peak."""
    held = {"host": make_items(optimizer_states=host * GB, offload_buffers=90 * GB) if host else None}
    held |= {"disk": make_items(optimizer_states=disk * GB) if disk else None}
    items = make_items(activations=(peak - buckets) * GB, communication_buckets=buckets * GB)
    made = make_plan(stage=stage, peak=make_peak(items), **held, **changes)
    traffic = [made.traffic[0].model_copy(update={"sent": {3: 90 * GB, 2: 45 * GB}.get(stage, 30 * GB)})]
    return made.model_copy(update={"traffic": traffic})


@pytest.mark.parametrize(
    ("plans", "chosen"),
    [
        pytest.param([row(0, 90), row(1, 70), row(1, 60), row(2, 10)], 2, id="traffic, stage, peak"),
        pytest.param([row(2, 70), row(1, 10, host=9)], 0, id="nothing offloaded before traffic"),
        pytest.param([row(2, 70, host=5), row(1, 10, host=9)], 1, id="traffic before what is offloaded"),
        pytest.param([row(3, 70, host=9), row(3, 60, host=12), row(3, 79)], 2, id="nothing is offloaded in vain"),
        pytest.param([row(3, 90), row(3, 60, host=12), row(3, 70, host=9)], 2, id="the fewest bytes"),
        pytest.param([row(1, 5, disk=9), row(1, 6, host=9)], 1, id="the host before a disk"),
        pytest.param([row(1, 5, host=9, host_memory=GB, host_peak=2 * GB, nodes=1), row(2, 70)], 1, id="a small host"),
        pytest.param([row(0, 90), row(3, 81)], None, id="none"),
    ],
)
def test_the_cheapest(plans: list[Plan], chosen: int | None) -> None:
    assert cheapest(plans) == chosen


# -------------------------------------------------------------------- which are planned

Compare = Callable[..., Comparison]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Compare:
    """`compared(config, peaks, **options)` is a comparison in which a stage needs ``peaks[stage]`` GB of 80, or half of
    it if it offloads; None: it is refused."""

    def compared(config: ZeroliteConfig, peaks: list[int | None], **options: Any) -> Comparison:
        def plan(model_fn: Any, config: ZeroliteConfig, world_size: int, **options: Any) -> Plan:
            zero = config.zero_optimization
            peak = peaks[zero.stage]
            if peak is None:
                raise RefusedError("the engine refuses this job:\n  it is too odd")
            if zero.offload_optimizer.enabled and "no offload" in options:
                raise ConfigError([("optimizer.params.capturable", "expected false with offload_optimizer, got true")])
            options.pop("no offload", None)
            offloads = zero.offload_optimizer.enabled or zero.offload_param.enabled
            return row(zero.stage, peak // (2 if offloads else 1), host=5 * offloads, **options)

        monkeypatch.setattr(module, "plan", plan)
        return compare(lambda: None, config, 8, **({"device_memory": 80 * GB} | options))  # type: ignore[arg-type,return-value]

    return compared


def rows_of(comparison: Comparison) -> list[str]:
    """Without those of sizes, which are of what is not offloaded."""
    return [name for name, _ in comparison.rows if "M" not in name]


def chosen_of(comparison: Comparison) -> str:
    assert comparison.chosen is not None
    return comparison.rows[comparison.chosen][0]


def test_offload_is_planned_where_nothing_else_fits(compared: Compare) -> None:
    made = compared(config(), [400, 300, 200, 100])
    assert rows_of(made) == ["stage 0", "stage 1", HOST[0], "stage 2", HOST[1], "stage 3", *HOST_3]
    assert chosen_of(made) == HOST_3[0]
    (line,) = made.left_out
    assert line.startswith("Other sizes of buckets") and all(name in (*PLAIN, *HOST, *HOST_3) for name, _ in made.rows)


def test_offload_is_planned_where_it_is_asked_for_or_the_memory_is_not_known(compared: Compare) -> None:
    own = compared(config(stage=1, offload_optimizer={"device": "cpu"}), [60, 50, 40, 30])
    assert set(rows_of(own)) == {*PLAIN, *HOST, *HOST_3} and chosen_of(own) == "stage 0"
    assert set(rows_of(compared(config(), [60, 50, 40, 30], device_memory=None))) == {*PLAIN, *HOST, *HOST_3}


@pytest.mark.parametrize(("peaks", "chosen"), [([90, 70, 60, 50], "stage 1"), ([400, 100, 70, 30], "stage 2")])
def test_offload_is_not_planned_where_a_stage_fits(compared: Compare, peaks: list[int], chosen: str) -> None:
    """Though a lower stage would fit if it offloaded."""
    made = compared(config(), peaks)
    assert rows_of(made) == PLAIN and chosen_of(made) == chosen
    (line,) = [line for line in made.left_out if "Settings with offload" in line]
    assert "are not planned" in line and "\n" not in line


# -------------------------------------------------------------------- offload


def job(stage: int = 2, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 4200, "offload_optimizer": {"device": "cpu"}, **more}
    optimizer = {"type": "Adam", "params": {"lr": 1e-3}}
    bf16 = {"enabled": True}
    return {"train_micro_batch_size_per_gpu": 2, "bf16": bf16, "optimizer": optimizer, "zero_optimization": zero}


@pytest.mark.slow
def test_a_comparison_plans_what_is_offloaded_and_what_is_not() -> None:
    config = job(stage=3, offload_param={"device": "cpu"})
    compared = compare(lambda: nn.Linear(64, 64), config, 2, device_memory=10**9, offload_host_memory=10**9, nodes=1)
    rows = dict(compared.rows)
    assert compared.left_out == [] and compared.rows[compared.chosen or 0][0] == "stage 0"
    assert [name for name, made in rows.items() if made.host is None] == [f"stage {stage}" for stage in range(4)]
    assert rows["stage 3"].host_spare is None and rows["stage 3"].offloaded == 0
    some, all_of_it = rows["stage 3, optimizer on the host"], rows["stage 3, optimizer and parameters on the host"]
    assert 0 < some.offloaded < all_of_it.offloaded and some.sent == all_of_it.sent == rows["stage 3"].sent
    assert some.host_spare is not None and some.host_spare > 0


@pytest.mark.slow
def test_what_rests_elsewhere_leaves_nothing_on_the_device() -> None:
    """A plan for CUDA, where what comes from the host is a copy: none of it stays between two steps."""
    moving = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_module_granularity_threshold": 0}
    config = job() | {"zero_optimization": {**moving, "offload_param": {"device": "cpu"}}}
    made = plan(stack, config, 2)
    assert made.host is not None and made.host["compute_parameters"] >= NUMEL  # 2 bytes, a half
    assert (made.at_rest["compute_parameters"], made.at_rest["offload_buffers"]) == (0, 0)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    made = plan(stack, config, 2)
    assert {item for item, nbytes in made.at_rest.items() if nbytes} <= {"activations", "other"}
    assert made.host is not None and made.host["optimizer_states"] >= 4 * NUMEL


CPU = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
MACHINE = command.find_memory("cpu")


@pytest.mark.parametrize(
    ("given", "config", "meant"),
    [
        (["--host-memory", "3GB"], {}, {"host_memory": 3 * GB}),
        (["--host-memory", "3GB"], CPU, {"host_memory": 3 * GB}),
        ([], CPU, {"host_memory": MACHINE}),
        ([], {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, {"host_memory": MACHINE}),
        (["--host-memory", "auto"], {}, {"host_memory": MACHINE}),
        ([], {}, {}),
        # Memory that only some of the settings take is this machine's where it is not given; memory that all take, too.
        (["--compare"], {}, {"offload_host_memory": MACHINE}),
        (["--compare", "--host-memory", "3GB"], {}, {"host_memory": 3 * GB}),
        (["--compare"], {"activation_checkpointing": {"cpu_checkpointing": True}}, {"host_memory": MACHINE}),
    ],
)
def test_the_memory_of_the_host_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, given: list[str], config: dict[str, Any], meant: dict[str, int]
) -> None:
    told: list[Any] = []
    for name in ("plan", "compare"):
        monkeypatch.setattr(planning, name, lambda *args, **options: told.append(options))
    monkeypatch.setattr(planning, "load_model_fn", lambda name: None)
    job = ["--model", "m:f", "--config", "c.json", "--world-size", "2", *given]
    command.make(command.parse_command_line(job), load_config(config))
    memory = {name: value for name, value in told[0].items() if "memory" in name and value is not None}
    assert memory == meant
