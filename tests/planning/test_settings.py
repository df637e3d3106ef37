"""The settings that a comparison plans, and which of them it chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from tests.planning.jobs import NUMEL, stack
from tests.unit.plan_examples import GB, make_items, make_peak, make_plan
from zerolite.config import ZeroliteConfig, load_config
from zerolite.planning import settings as module
from zerolite.planning.make import plan
from zerolite.planning.result import Comparison, Plan, RefusedError
from zerolite.planning.settings import (
    Setting,
    compare,
    offload_settings,
    with_zero,
)

DISK = {"device": "nvme", "nvme_path": "/fast"}
PLAIN = ["stage 0", "stage 1", "stage 2", "stage 3"]
HOST = [
    *(f"stage {stage}, optimizer on the host" for stage in (1, 2, 3)), "stage 3, optimizer and parameters on the host"
]  # fmt: skip


def config(**zero: Any) -> ZeroliteConfig:
    return load_config({"zero_optimization": zero})


def names(settings: list[Setting]) -> list[str]:
    return [setting.name for setting in settings]


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
    assert found[0] == "stage 1, 50 % of the optimizer on the host" and found[4] == "stage 1, optimizer on disk"


# -------------------------------------------------------------------- which are planned, and which is chosen


Compare = Callable[..., Comparison]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Compare:
    """`compared(config, peaks, **options)` is a comparison in which a stage needs ``peaks[stage]`` GB of 80, or half of
    it if it offloads; None: it is refused. Offload takes 5 GB of the host."""

    def compared(config: ZeroliteConfig, peaks: list[int | None], **options: Any) -> Comparison:
        def plan(model_fn: Any, config: ZeroliteConfig, world_size: int, **options: Any) -> Plan:
            zero = config.zero_optimization
            peak = peaks[zero.stage]
            if peak is None:
                raise RefusedError("the engine refuses this job:\n  it is too odd")
            offloads = zero.offload_optimizer.enabled or zero.offload_param.enabled
            host = {"host": make_items(optimizer_states=5 * GB), "host_peak": 5 * GB} if offloads else {}
            items = make_items(activations=peak * GB // (2 if offloads else 1))
            return make_plan(stage=zero.stage, peak=make_peak(items), world_size=8, nodes=1, **host, **options)

        monkeypatch.setattr(module, "plan", plan)
        return compare(lambda: None, config, 8, **({"device_memory": 80 * GB} | options))  # type: ignore[arg-type,return-value]

    return compared


def rows_of(comparison: Comparison) -> list[str]:
    return [name for name, _ in comparison.rows]


def chosen_of(comparison: Comparison) -> str | None:
    return None if comparison.chosen is None else comparison.rows[comparison.chosen][0]


@pytest.mark.parametrize(("peaks", "chosen"), [([90, 70, 60, 50], "stage 1"), ([400, 100, 70, 30], "stage 2")])
def test_the_lowest_stage_that_fits_is_chosen(compared: Compare, peaks: list[int], chosen: str) -> None:
    """Though a lower stage would fit if it offloaded, or a higher one has a smaller peak."""
    made = compared(config(), peaks)
    assert rows_of(made) == PLAIN and chosen_of(made) == chosen
    (line,) = made.left_out
    assert "Settings with offload are not planned" in line and "\n" not in line


def test_offload_is_planned_where_nothing_else_fits(compared: Compare) -> None:
    made = compared(config(), [400, 300, 200, 100])
    assert (rows_of(made), chosen_of(made), made.left_out) == ([*PLAIN, *HOST], HOST[2], [])
    # Each of 8 ranks takes 5 GB of the host.
    assert chosen_of(compared(config(), [400, 300, 200, 100], host_memory=39 * GB)) is None
    disk = compared(config(offload_optimizer={"device": "none", "nvme_path": "/fast"}), [400, 150, 200, 100])
    assert chosen_of(disk) == HOST[0], "the host comes before the disk"


def test_offload_is_planned_where_it_is_asked_for_or_the_memory_is_not_known(compared: Compare) -> None:
    own = compared(config(stage=1, offload_optimizer={"device": "cpu"}), [60, 50, 40, 30])
    assert rows_of(own) == [*PLAIN, *HOST] and chosen_of(own) == "stage 0"
    unknown = compared(config(), [60, 50, 40, 30], device_memory=None)
    assert rows_of(unknown) == [*PLAIN, *HOST] and chosen_of(unknown) is None


def test_settings_that_the_engine_refuses_are_left_out(compared: Compare) -> None:
    made = compared(config(), [None, None, 100, 90])
    assert rows_of(made) == [*PLAIN[2:], *HOST[1:]] and chosen_of(made) == HOST[1]
    name = "stage 0; stage 1; stage 1, optimizer on the host"
    assert made.left_out == [f"{name} are left out: the engine refuses this job: it is too odd"]
    with pytest.raises(RefusedError, match="it is too odd"):
        compared(config(), [None] * 4)


# -------------------------------------------------------------------- offload


def job(stage: int = 2, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 4200, "offload_optimizer": {"device": "cpu"}, **more}
    optimizer = {"type": "Adam", "params": {"lr": 1e-3}}
    bf16 = {"enabled": True}
    return {"train_micro_batch_size_per_gpu": 2, "bf16": bf16, "optimizer": optimizer, "zero_optimization": zero}


@pytest.mark.slow
def test_a_comparison_plans_what_is_offloaded_and_what_is_not() -> None:
    config = job(stage=3, offload_param={"device": "cpu"})
    compared = compare(lambda: nn.Linear(64, 64), config, 2, device_memory=10**9, host_memory=10**9, nodes=1)
    rows = dict(compared.rows)
    assert compared.left_out == [] and compared.rows[compared.chosen or 0][0] == "stage 0"
    assert [name for name, made in rows.items() if made.host is None] == [f"stage {stage}" for stage in range(4)]
    assert rows["stage 3"].offloaded == 0
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
