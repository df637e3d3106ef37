"""Plans made by hand, for what shows plans."""

from __future__ import annotations

from typing import Any

from zerolite.planning.result import Comparison, Items, Peak, Plan, TimePoint, Traffic
from zerolite.utils.memory_tags import ITEMS

GB = 10**9


def make_items(**sizes: int) -> Items:
    """Every item; those not named are 0."""
    return {item: sizes.get(item, 0) for item in ITEMS}


STATES = make_items(
    compute_parameters=15 * GB, gradients=15 * GB // 64, master_weights=30 * GB // 64, optimizer_states=60 * GB // 64
)
REST = STATES | {"gradients": 0}


def make_peak(items: Items, phase: str = "backward", **changes: Any) -> Peak:
    fields = {"module": "layers.3.mlp", "module_class": "FeedForward", "op": "aten.mm"}
    return Peak(bytes=sum(items.values()), items=items, phase=phase, **(fields | changes))


def make_timeline() -> list[TimePoint]:
    """Activations rise through 40 points of forward and fall through 40 of backward; a step of 8."""

    buckets = STATES | {"communication_buckets": GB}
    rise = [TimePoint(items=REST | {"activations": k * GB // 4}, phase="forward") for k in range(1, 41)]
    fall = [TimePoint(items=buckets | {"activations": k * GB // 4}, phase="backward") for k in range(40, 0, -1)]
    return [*rise, *fall, *[TimePoint(items=REST, phase="step")] * 8]


def make_plan(**changes: Any) -> Plan:
    """7.5 billion parameters at stage 2 on 64 ranks; ``changes`` are fields of Plan."""
    at_peak = STATES | {"activations": 10 * GB, "communication_buckets": GB}
    large = {"nbytes": 15 * GB, "sent": 14_765_625_000, "inter_node": 13 * GB}
    traffic = [
        Traffic(op="reduce_scatter", tag="gradients", count=30, **large),
        Traffic(op="all_gather", tag="parameters", count=15, **large),
        Traffic(op="all_reduce", tag="stats", count=1, nbytes=12, sent=23, inter_node=20),
    ]
    fields: dict[str, Any] = {
        "model": "models.gpt:build_model", "stage": 2, "world_size": 64, "nodes": 8, "rank": 0, "data_parallel": 64,
        "device": "cuda", "precision": "bf16", "micro_batch": 4, "accumulation": 2, "batch": "input_ids int64[4,1024]",
        **dict.fromkeys(("parameters", "trained_parameters"), 7_500_000_000),
        "states": STATES, "at_rest": REST, "peak": make_peak(at_peak), "step_peak": make_peak(at_peak),
        "initialize_peak": make_peak(REST, "initialize", module="", module_class="GPT", op=""),
        "timeline": make_timeline(), "traffic": traffic, "host_waits": 0, "host": None, "disk": None, "host_peak": 0,
        "flops": 368_640_000_000_000, "device_memory": 80 * GB, "host_memory": None,
        "notes": ["The memory of a CUDA context, of NCCL and fragmentation of the allocator are not in these numbers."],
    }  # fmt: skip
    return Plan(**(fields | changes))


def make_comparison(**changes: Any) -> Comparison:
    """Stages 0 and 2, of which only the second fits."""
    whole = make_items(compute_parameters=15 * GB, gradients=15 * GB, master_weights=30 * GB, optimizer_states=60 * GB)
    large = whole | {"activations": 10 * GB}
    peaks = {"peak": make_peak(large), "step_peak": make_peak(large)}
    first = make_plan(stage=0, states=whole, at_rest=whole, **peaks, **changes)
    return Comparison(rows=[("stage 0", first), ("stage 2", make_plan(**changes))], chosen=1)
