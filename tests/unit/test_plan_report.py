"""A plan as text and as a picture: its numbers are those of the plan, and it fits where it is shown."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.unit.plan_examples import GB, REST, STATES, make_comparison, make_items, make_peak, make_plan
from zerolite.planning.report import WIDTH, draw, render
from zerolite.planning.result import Comparison, Plan
from zerolite.utils.memory_tags import ITEMS
from zerolite.utils.text import format_size


def rows_of(text: str, head: str) -> dict[str, list[str]]:
    """The table that begins with ``head``: cells by the first one of their line."""
    lines = text[text.index(head) :].partition("\n\n")[0].splitlines()
    cells = [re.split(r" {2,}", line.strip()) for line in lines]
    return {first: rest for first, *rest in cells}


def told(shown: Plan | Comparison) -> str:
    """The report as one line."""
    return " ".join(render(shown).split())


# -------------------------------------------------------------------- numbers


def test_the_table_holds_the_numbers_of_the_plan() -> None:
    plan = make_plan(host=make_items(optimizer_states=7 * GB))
    rows = rows_of(render(plan), "memory ")
    assert rows["memory"] == ["at rest", "in a step", "at the peak", "host"]
    shown = [item for item in ITEMS if any(held[item] for held in (plan.at_rest, plan.states, plan.peak.items))]
    assert list(rows) == ["memory", *(item.replace("_", " ") for item in shown), "model states", "all"]
    assert rows["optimizer states"][:4] == ["937.50 MB", "937.50 MB", "937.50 MB", "7.00 GB"]
    assert rows["activations"] == ["-", "-", "10.00 GB", "-"]
    assert rows["model states"][:2] == ["16.41 GB", format_size(plan.model_states)]
    assert rows["all"] == [format_size(sum(REST.values())), format_size(plan.peak.bytes), "7.00 GB"]


def offloaded(**changes: Any) -> Plan:
    """Return the plan of :func:`make_plan` with masters and states on host and disk."""
    host = make_items(master_weights=30 * GB // 64, offload_buffers=5 * GB // 2)
    disk = make_items(optimizer_states=60 * GB // 64)
    return make_plan(host=host, disk=disk, host_peak=3 * GB, **changes)


def test_what_is_off_the_device_has_columns_and_a_verdict_of_its_own() -> None:
    rows = rows_of(render(offloaded(host_memory=100 * GB)), "memory ")
    assert rows["memory"] == ["at rest", "in a step", "at the peak", "host", "disk"]
    assert rows["offload buffers"] == ["-", "-", "-", "2.50 GB", "-"]
    assert rows["all"][2:] == ["2.97 GB", "937.50 MB"]
    text = told(offloaded(host_memory=100 * GB))
    fits = "up to 3.00 GB of host memory, and the 8 ranks of a host 24.00 GB. That fits: 76.00 GB of 100.00 GB are free"
    assert fits in text
    assert "Add --host-memory, as in --host-memory 512GB, to see if it fits." in told(offloaded())
    assert "sets how many ranks share a host." in told(offloaded(nodes=None, host_memory=GB))
    assert "of host memory" not in told(make_plan(host_peak=3 * GB))


def test_a_host_that_is_too_small() -> None:
    plan = offloaded(host_memory=20 * GB)
    assert (plan.fits, plan.host_spare, plan.ranks_per_host) == (False, -4 * GB, 8)
    assert (offloaded(host_memory=24 * GB).fits, offloaded(device_memory=None, host_memory=GB).fits) == (True, False)
    assert offloaded(device_memory=None, host_memory=24 * GB).fits is None
    assert (offloaded(nodes=None, host_memory=GB).fits, offloaded(world_size=1, nodes=None).ranks_per_host) == (True, 1)
    assert "It fits: 52.36 GB of 80.00 GB are free" in told(plan)
    assert "That does not fit: it is 4.00 GB more than the host's 20.00 GB." in told(plan)


def test_traffic_with_and_without_nodes() -> None:
    plan = make_plan()
    rows = rows_of(render(plan), "traffic of a step")
    assert rows["all_gather"] == ["parameters", "data 1", "15", "15.00 GB", "14.77 GB", "13.00 GB"]
    assert rows["all"] == ["46", "30.00 GB", format_size(plan.sent), "26.00 GB"]
    assert plan.collectives == {"reduce_scatter": 30, "all_gather": 15, "all_reduce": 1}
    alone = [entry.model_copy(update={"inter_node": None}) for entry in plan.traffic]
    rows = rows_of(render(make_plan(nodes=None, traffic=alone)), "traffic of a step")
    assert rows["all_gather"] == ["parameters", "data 1", "15", "15.00 GB", "14.77 GB"]
    assert "traffic of a step: none" in told(make_plan(traffic=[]))


# -------------------------------------------------------------------- fits or not


def test_settings_side_by_side() -> None:
    comparison = make_comparison()
    rows = rows_of(render(comparison), "setting")
    for setting, plan in comparison.rows:
        peak, sent = format_size(plan.peak.bytes), format_size(plan.sent)
        assert rows[setting][:4] == [format_size(plan.model_states), peak, sent, format_size(plan.inter_node or 0)]
    assert rows["stage 0"][4] == "no" and rows["stage 2"][4:6] == ["yes", "<- chosen"]
    assert f"Stage 2 is the first that fits in 80.00 GB. It sends {format_size(plan.sent)} per rank" in told(comparison)
    assert "off the device" not in told(comparison)
    none = Comparison(rows=make_comparison(device_memory=20 * GB, host_memory=10 * GB).rows, chosen=None)
    assert "None of them fits in 20.00 GB and a host's 10.00 GB." in told(none)


LONG = {"model": "x" * 150, "batch": "y" * 200, "notes": ["z" * 130], "parameters": 10**18}


@pytest.mark.parametrize("memory", [None, 20 * GB, 80 * GB])
def test_no_paragraph_is_wider_than_the_screen(memory: int | None) -> None:
    peak = make_peak(STATES, module="m" * 300)
    plan = make_plan(device_memory=memory, host=STATES, disk=STATES, host_memory=memory, peak=peak, **LONG)
    for shown in (plan, Comparison(rows=[("a setting", plan), *make_comparison().rows], chosen=0)):
        assert max(map(len, render(shown).splitlines())) <= WIDTH


@pytest.mark.parametrize("shown", [make_plan(), make_comparison()], ids=["plan", "comparison"])
def test_pictures(shown: Plan | Comparison, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(shown, tmp_path / "plan.png")
    head = (tmp_path / "plan.png").read_bytes()[:24]
    width, height = struct.unpack(">II", head[16:])
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and width > 1000 and height == 600
