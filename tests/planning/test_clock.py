"""The time of a step: collectives on wires, events on the clock, and plans beside independent arithmetic."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.shapes import SHAPES, Decoder
from zerolite.comm.recorder import CollectiveCall
from zerolite.planning import Machine, plan
from zerolite.planning.clock import Compute, Event, Launch, Trace, Wait, step_time
from zerolite.planning.command import parse_command_line
from zerolite.planning.fake_backend import DryPlatform
from zerolite.planning.report import render
from zerolite.planning.result import Comparison, StepTime, Traffic
from zerolite.planning.settings import compare
from zerolite.planning.tracker import MemoryTracker
from zerolite.planning.traffic import Grid
from zerolite.planning.wire import Wires

MB = 10**6

MACHINE = Machine(tflops=1, intra_bandwidth=1, inter_bandwidth=1, latency=2000, memory_bandwidth=1)


def call(op: str, nbytes: int, tag: str = "parameters", dimension: str = "data", ranks: int = 4) -> CollectiveCall:
    return CollectiveCall(op, nbytes // 4, torch.float32, nbytes, tag, 1, dimension, ranks)


def wires(nodes: int, messages: bool = False, machine: Machine = MACHINE, data: int = 4) -> Wires:
    return Wires(machine, Grid(data=data), nodes, messages)


# -------------------------------------------------------------------- collectives


@pytest.mark.parametrize(
    ("op", "ranks", "dimension", "nodes", "messages", "latency", "transfer", "between"),
    [
        ("all_gather", 4, "data", 1, False, 3 * 2.5e-6, 0.75, False),
        ("reduce_scatter", 4, "data", 2, False, 2.5e-6 + 2 * 2e-3, 0.75, True),
        ("all_reduce", 4, "data", 1, False, 6 * 2.5e-6, 1.5, False),
        ("all_gather", 2, "shard", 2, False, 2.5e-6, 0.5, False),
        ("all_reduce", 2, "replicate", 2, False, 2e-3 * 2, 2.0, True),  # half of the node's bandwidth
        ("all_gather", 4, "data", 4, False, 2 * 2e-3, 0.75, True),  # a rank a node: PAT
        ("all_gather", 4, "data", 2, True, 2e-3, 1.0, True),  # two ranks send to two others, a quarter to each
        ("all_reduce", 4, "data", 2, True, 4e-3, 2.0, True),
        ("all_reduce", 2, "replicate", 2, True, 4e-3, 2.0, True),  # gloo's own ring
        ("broadcast", 4, "data", 2, False, 2.5e-6 + 2 * 2e-3, 1.0, True),
        ("all_to_all", 4, "expert", 2, False, 2.5e-6 + 2 * 2e-3, 1.0, True),  # as messages: a quarter to each
        ("permute", 4, "sequence", 2, False, 2e-3, 2.0, True),  # halves are swapped, all of them between nodes
    ],
)  # fmt: skip
def test_a_collective(
    op: str, ranks: int, dimension: str, nodes: int, messages: bool, latency: float, transfer: float, between: bool
) -> None:
    cost = wires(nodes, messages).cost(call(op, 10**9, dimension=dimension, ranks=ranks))
    assert cost == (pytest.approx(latency), pytest.approx(transfer), between)


def test_a_tree_where_rings_are_long() -> None:
    machine = MACHINE.model_copy(update={"latency": 10.0})
    small, large = (
        wires(128, machine=machine, data=1024).cost(call("all_reduce", size, ranks=1024)) for size in (1024, 10**10)
    )
    assert small.latency == pytest.approx(2 * (7 * 2.5e-6 + 7 * 10e-6))
    assert large.latency == pytest.approx(2 * (895 * 2.5e-6 + 128 * 10e-6))
    assert large.transfer == pytest.approx(2 * 10 * 1023 / 1024)


# -------------------------------------------------------------------- events


def play(*events: Event, messages: bool = False, **speeds: float) -> StepTime:
    machine = MACHINE.model_copy(update=speeds)
    return step_time([events], machine, wires(2, messages, machine))


def second(flops: int = 10**12) -> Compute:
    return Compute(flops, 0)


GATHER, OTHER = call("all_gather", 4 * 10**9), call("all_gather", 4 * 10**9)
REDUCTION = call("reduce_scatter", 4 * 10**9, "gradients")
ALONE = 3 + 2 * 2e-3 + 2.5e-6


def test_a_wait_is_exposed_communication() -> None:
    made = play(second(), Launch(GATHER), second(), Wait(GATHER), second(), Compute(0, 10**9))
    assert (made.products, made.passes) == (3, 1)
    assert made.exposed == pytest.approx(ALONE - 1) and made.step == pytest.approx(4 + made.exposed)
    assert play(Launch(GATHER), second(10**13), Wait(GATHER)).exposed == 0
    assert play(Launch(GATHER), second()).exposed == 0  # it outlives the step


def test_collectives_of_one_communicator_follow_each_other() -> None:
    made = play(Launch(GATHER), Launch(OTHER), Wait(OTHER))
    assert made.exposed == pytest.approx(2 * ALONE)
    ahead = play(Launch(GATHER), Launch(OTHER), Wait(OTHER), messages=True)
    assert ahead.exposed == pytest.approx(2 * 4 + 2e-3)  # messages follow without a gap


def test_communicators_share_the_wire() -> None:
    made = play(Launch(GATHER), Launch(REDUCTION), Wait(GATHER), Wait(REDUCTION))
    assert made.exposed == pytest.approx(ALONE + 3)
    within = call("all_gather", 4 * 10**9, dimension="shard", ranks=2)
    assert play(Launch(REDUCTION), Launch(within), Wait(REDUCTION), Wait(within)).exposed == pytest.approx(ALONE)
    late = play(Launch(GATHER), second(), Launch(REDUCTION), Wait(GATHER))
    assert late.exposed == pytest.approx(ALONE - 1 + (ALONE - 1), abs=0.02)  # from then on at half the speed


def test_ranks_of_a_node_copy_while_they_wait() -> None:
    """On the CPU nothing hides what goes through the memory of a node, and what goes between nodes is hidden."""
    within = call("all_gather", 4 * 10**9, dimension="shard", ranks=2)
    made = play(Launch(within), second(), Wait(within), messages=True, intra_latency=1e6)
    assert made.exposed == pytest.approx(1 + 2)
    across = call("all_gather", 4 * 10**9, dimension="replicate", ranks=2)
    assert play(Launch(across), second(4 * 10**12), Wait(across), messages=True).exposed == pytest.approx(2e-3)


def test_a_second_hop_begins_when_the_first_has_ended() -> None:
    """On a device a stream beside the model's waits for the first of two chained collectives and launches the other."""
    first = call("reduce_scatter", 2 * 10**9, "gradients", "shard", 2)
    hop = call("all_reduce", 10**9, "gradients", "replicate", 2)
    platform = DryPlatform("cuda")
    trace = Trace(MemoryTracker(), platform, overlaps=False)
    trace.begin_step()
    trace.on_launch(first)
    with platform.side_stream(torch.device("cpu")):
        trace.on_wait(first)
        trace.on_launch(hop)
    trace.on_update(10**9)
    trace.on_wait(hop)
    trace.end_step()
    assert trace.steps[0] == [Launch(first), Launch(hop, first), Compute(0, 10**9), Wait(hop)]
    made = step_time(trace.steps, MACHINE, wires(2))
    assert made.exposed == pytest.approx(1 + 2 + 4e-3 - 1, abs=1e-4)


def test_gathers_that_outlive_the_step() -> None:
    trace = Trace(MemoryTracker(), DryPlatform("cuda"), overlaps=True)
    for _ in range(2):
        trace.begin_step()
        trace.on_use(0)
        trace.on_launch(GATHER)
        trace.on_wait(GATHER)  # in a dry run
    trace.end_step()
    # Before it is gathered again, in place of a use.
    assert trace.steps == [[Launch(GATHER)], [Wait(GATHER), Launch(GATHER)]]


# -------------------------------------------------------------------- plans


def stack() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def small(stage: int) -> dict[str, Any]:
    return {"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 2}


def test_what_a_time_needs() -> None:
    fast = Machine(tflops=1)
    assert [fast.lacks(1, None), fast.lacks(8, None), fast.lacks(8, 1)] == ["", "nodes", "intra_bandwidth"]
    assert [MACHINE.lacks(8, 2), Machine(tflops=1, intra_bandwidth=1).lacks(8, 2)] == ["", "inter_bandwidth"]
    with pytest.raises(ValueError, match="the time of a step of 4 ranks needs intra_bandwidth"):
        plan(stack, small(1), 4, nodes=2, machine=fast)
    made = plan(stack, small(1), 4, nodes=2, machine=MACHINE)
    assert made.time is None and "The time of a step needs a batch." in made.notes


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--nodes", "2", "--latency", "9"], "--latency is for the time of a step, which needs --tflops"),
        (["--tflops", "0"], "expected a number above 0, got '0'"),
        (["--tflops", "nan"], "expected a number above 0, got 'nan'"),
    ],
)
def test_mistakes_on_the_command_line(given: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_command_line(["--model", "m:f", "--config", "{}", "--world-size", "8", *given])
    assert ended.value.code == 2 and expected in capsys.readouterr().err


SETS = [*(f"stage {stage}, replicas of 2" for stage in (1, 2, 3)), "stage 3, parameters in 2"]
COMPARED = [*(f"stage {stage}" for stage in range(4)), *SETS, *(f"{name}, compressed" for name in SETS)]


def compared(**zero: Any) -> Comparison:
    """Compare settings on 2 nodes of 2 ranks, whose wire is so slow that the fewest bytes are the fastest step."""
    batch = lambda: torch.ones(2, 64)  # noqa: E731
    machine = MACHINE.model_copy(update={"inter_bandwidth": 0.01, "latency": 0})
    own = small(0) | {"zero_optimization": {"stage": 3, **zero}}
    return compare(stack, own, 4, nodes=2, machine=machine, batch=batch, device_memory=10**9)


def test_a_comparison_of_nodes() -> None:
    """Replicas and compressed traffic stand beside the plain stages, and the fastest that keeps the numbers is
    chosen."""
    made = compared()
    assert [name for name, _ in made.rows] == COMPARED
    rows, times = dict(made.rows), [one.time.step for _, one in made.rows if one.time is not None]
    assert len(times) == 12 and made.chosen == times.index(min(times[:8])) != times.index(min(times))
    text, sent = render(made), {name: one.inter_node or 0 for name, one in rows.items()}
    assert "exposed" in text and "is the fastest that fits" in text
    assert f"{COMPARED[times.index(min(times))].capitalize()} is the fastest that fits, and is not" in made.left_out[-1]
    # Gradients in 4 bits, replicas' sums in 8: 1.53 in place of 8 bytes. Hierarchical shards: 1.53 in place of 8, too.
    for name in SETS:
        assert 1.5 / 8 < sent[f"{name}, compressed"] / sent[name] < 1.8 / 8
    assert json.loads(made.model_dump_json())["rows"][0][1]["time"]["step"] == times[0]


def test_a_comparison_for_a_config_that_compresses() -> None:
    """Rows have the config's own compression, which may be chosen; the others are without."""
    made = compared(zero_hpz_partition_size=2, zero_quantized_weights=True)
    assert [name for name, _ in made.rows] == [*COMPARED[:8], f"{SETS[3]}, compressed"]
    sent = {name: one.inter_node or 0 for name, one in made.rows}
    assert 5 / 8 < sent[f"{SETS[3]}, compressed"] / sent[SETS[3]] < 5.7 / 8  # values in 1 byte, not 4
    assert made.chosen is not None and made.rows[made.chosen][0] == f"{SETS[3]}, compressed"


def rows_of(traffic: list[Traffic]) -> dict[tuple[str, str, str], int]:
    return {(row.op, row.dimension, row.tag): row.nbytes for row in traffic if row.tag != "stats"}


def test_what_a_device_sends_between_nodes() -> None:
    """16 bits in a node of few ranks, 32 between nodes, whatever the number of ranks."""
    zero = {"stage": 3, "zero_hpz_partition_size": 8}
    numel, batch = 64 * 8 * 4096, lambda: torch.ones(2, 4096)
    model = lambda: nn.Linear(4096, 512, bias=False)  # noqa: E731
    made = plan(model, {**small(3), "bf16": {"enabled": True}, "zero_optimization": zero}, 64, nodes=8, batch=batch)
    assert rows_of(made.traffic) == {
        ("all_gather", "shard", "parameters"): 2 * numel, ("reduce_scatter", "shard", "gradients"): 2 * numel,
        ("reduce_scatter", "replicate", "gradients"): 4 * numel // 8,
        ("all_gather", "replicate", "parameters"): 2 * numel // 8,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("gather", "exposed"), [(0.5, 1.5), (2, 11)])
def test_new_values_arrive_behind_the_forward(gather: float, exposed: float) -> None:
    """Six layers of 1 s forward and 2 s backward, but 1 s the first one's; nothing takes long but what goes over nodes,
    ``gather`` s for each layer.

    Forward waits for the values of two layers, because the second one's gather within the node is launched before the
    first layer. With 0.5 s all others arrive in time, and backward ends with one reduction: 0.5 + 0.5 + 0.5. With 2 s
    the last values arrive after 12 s, before the fifth layer, and 2 layers follow: 14 - 6. Then backward ends at 25,
    its last but one reduction at 26 and the last one at 28: 28 - 25.
    """
    numel, layers = 64 * 64, 6
    zero = {
        "stage": 3, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0, "stage3_module_granularity_threshold": 0, "reduce_bucket_size": numel,
        "stage3_prefetch_bucket_size": numel, "stage3_max_live_parameters": 3 * numel,
    }  # fmt: skip
    # Each of the two ranks of a node sends half of its half of 4 bytes, and has half of the wire.
    machine = Machine(
        tflops=2 * 64**3 / 1e12, intra_bandwidth=1e6, inter_bandwidth=2 * numel / gather / 1e9, latency=1e-3
    )
    model = lambda: nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers)))  # noqa: E731
    config = {"optimizer": {"type": "Adam"}, "zero_optimization": zero, "train_micro_batch_size_per_gpu": 64}
    made = plan(model, config, 4, nodes=2, machine=machine, batch=lambda: torch.ones(64, 64))
    assert made.time is not None and made.time.products == 17
    assert made.time.exposed == pytest.approx(exposed, abs=0.1)  # the statistics take 0.02 and 0.08 s


def in_sets(nodes: int, replicas: bool) -> float:
    """ms of a step whose shards are divided in a node of 8: what does not hide behind forward and backward.

    Both ends of a step wait for the first block and the embedding: a gather within the node, before it with parameters
    divided there the new values between nodes (16 bits); and a reduction in 16 bits within the node and in 32 between
    nodes, as a scatter or with replicas as an all-reduce. Passes: gradients are copied into buckets and checked (6
    bytes an element), the node's part becomes fp32 (6), norm and update take 36 of what a rank owns.
    """
    block, embedding = 4 * 4096**2 + 3 * 4096 * 11_008, 32_000 * 4096
    numel, first = 32 * block + 2 * embedding, block + embedding
    owned = numel / 8 / (1 if replicas else nodes)
    passes = (6 * numel + 6 * numel / 8 + 36 * owned) / 3000e9
    within = 2 * first * 7 / 8 / 360e9
    byte_between = first / 8 * (nodes - 1) / nodes / (340e9 / 8)  # of each element
    hops = math.log2(nodes) * 10e-6
    start = within + (0.0 if replicas else 2 * byte_between + hops)
    end = within + (8 if replicas else 4) * byte_between + (2 if replicas else 1) * hops
    return 1e3 * (0.353 + passes + start + end)


# ms of a step of Llama-2-7B, 4096 tokens a rank, on H100s with 8 network cards of 400 Gb/s for 8 GPUs, computed by hand
# block by block, without a clock: forward and backward 353 ms.
STAGE_1 = {"stage": 1}
STAGE_3, HIERARCHICAL = {"stage": 3}, {"stage": 3, "zero_hpz_partition_size": 8}
REPLICAS = {"stage": 3, "shard_size": 8}
BY_HAND = [
    (8, STAGE_1, 379), (8, STAGE_3, 378), (64, STAGE_1, 386), (64, STAGE_3, 385), (64, REPLICAS, in_sets(8, True)),
    (64, HIERARCHICAL, in_sets(8, False)), (1024, STAGE_1, 401), (1024, STAGE_3, 425),
    (1024, REPLICAS, in_sets(128, True)), (1024, HIERARCHICAL, in_sets(128, False)),
]  # fmt: skip


@pytest.mark.slow
def test_times_are_those_of_arithmetic_by_hand() -> None:
    """Within 3 %, and in the same order. By hand the first block and the embedding were one gather and one reduction,
    whose latencies count at 1024 ranks."""
    machine = Machine(tflops=547, intra_bandwidth=360, inter_bandwidth=340, latency=10, memory_bandwidth=3000)
    by_hand, found = [ms for *_, ms in BY_HAND], []
    for ranks, zero, _ in BY_HAND:
        config = {
            "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW"}, "zero_optimization": zero,
        }  # fmt: skip
        batch = lambda: (torch.zeros(1, 4096, dtype=torch.long),)  # noqa: E731
        model = lambda: Decoder(SHAPES["llama-2-7b"])  # noqa: E731
        made = plan(model, config, ranks, nodes=-(-ranks // 8), machine=machine, batch=batch)
        assert made.time is not None
        found.append(1e3 * made.time.step)
    assert found == pytest.approx(by_hand, rel=0.03)
    sets = [index for index, (_, zero, _) in enumerate(BY_HAND) if zero in (REPLICAS, HIERARCHICAL)]
    assert [found[index] for index in sets] == pytest.approx([by_hand[index] for index in sets], rel=0.01)
    for one, other in itertools.permutations(range(len(BY_HAND)), 2):
        if by_hand[one] > 1.02 * by_hand[other]:
            assert found[one] > found[other], (BY_HAND[one], BY_HAND[other])
