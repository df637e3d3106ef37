"""Steps of peers as events of the plan's clock: FSDP2 and HSDP, and DeepSpeed's stages with hpZ and ZeRO++.

Of DeepSpeed 0.19.8 the launches and bytes of stages 1 and 3 were counted (scale.py), those of hpZ and ZeRO++ follow the
paper (arXiv 2306.10209). The clock takes the host to be ahead, so hooks around each module cost nothing here, and what
DeepSpeed waits for is a lower bound. Passes, in bytes an element: see the methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.shapes import Decoder, Shape
from zerolite.comm.recorder import CollectiveCall
from zerolite.engine.options import EXACT_SUMS_FROM
from zerolite.planning import Machine
from zerolite.planning.clock import Compute, Event, Launch, Wait, step_time
from zerolite.planning.result import StepTime
from zerolite.planning.traffic import Grid
from zerolite.planning.wire import Wires

PEERS = ("fsdp2", "fsdp2-hsdp", "deepspeed-1", "deepspeed-3", "deepspeed-3-hpz", "deepspeed-3-zero++")
IN_NODE = ("fsdp2-hsdp", "deepspeed-3-hpz", "deepspeed-3-zero++")
BUCKET = 500_000_000  # elements: DeepSpeed's reduce_bucket_size
AHEAD = 50_000_000  # its stage3_prefetch_bucket_size
LIVE = 1_000_000_000  # its stage3_max_live_parameters
PERSISTENT = 100_000  # its stage3_param_persistence_threshold
INT8, INT4 = 1 + 4 / 2048, 0.5 + 4 / 2048  # bytes an element, with a scale for each 2048 (csrc/quantization)


@dataclass(frozen=True)
class Work:
    """Operations of one rank.

    Attributes:
        block: elements of a block's large parameters, in order.
        blocks: number of blocks.
        others: elements outside of blocks: the embedding and the head.
        forward: operations of a block forward.
        backward: operations of a block backward, with what it recomputes.
        head: operations of the head forward.
    """

    block: list[int]
    blocks: int
    others: tuple[int, int]
    forward: int
    backward: int
    head: int

    @classmethod
    def of(cls, shape: Shape, tokens: int, checkpointed: bool) -> Work:
        own = shape.width * shape.head_width * (2 * shape.heads + 2 * shape.key_heads)
        inner = 3 * shape.width * shape.inner * max(1, shape.active) + shape.width * shape.experts
        attention = 4 * tokens**2 * shape.heads * shape.head_width
        forward = 2 * tokens * (own + inner) + attention
        # A recomputed forward stops before its last product, whose result no backward reads.
        last_product = 2 * tokens * shape.width * shape.inner * max(1, shape.active)
        backward = 2 * forward + attention // 2 + (forward - last_product if checkpointed else 0)
        with torch.device("meta"):
            block = [p.numel() for p in Decoder(shape).blocks[0].parameters() if p.numel() >= PERSISTENT]
        ends = shape.vocabulary * shape.width
        return cls(block, shape.layers, (ends, ends), forward, backward, 2 * tokens * ends)

    @property
    def numel(self) -> int:
        return sum(self.block) * self.blocks + sum(self.others)


class Step:
    """Events of one step. Gradients travel as zerolite's: in fp32 from 64 ranks on. All of a library's gathers and
    reductions over the same ranks are on one communicator, and follow each other."""

    def __init__(self, work: Work, ranks: int, nodes: int) -> None:
        self.work, self.ranks, self.nodes = work, ranks, nodes
        self.events: list[Event] = []
        self.gradient = 4 if ranks >= EXACT_SUMS_FROM else 2

    def launch(self, op: str, nbytes: float, over: str = "data", after: CollectiveCall | None = None) -> CollectiveCall:
        of = {"data": self.ranks, "shard": self.ranks // self.nodes, "replicate": self.nodes}[over]
        made = CollectiveCall(op, int(nbytes) // 4, torch.float32, int(nbytes), "parameters", 1, over, of)
        self.events.append(Launch(made, after))
        return made

    def wait(self, *calls: CollectiveCall) -> None:
        self.events += map(Wait, calls)

    def compute(self, flops: float = 0, nbytes: float = 0) -> None:
        self.events.append(Compute(int(flops), int(nbytes)))

    def update(self, shards: int) -> None:
        """The norm reads gradients (12 bytes an element: squares and clipping), the update reads and writes 30."""
        own = self.work.numel // shards
        self.compute(nbytes=12 * own)
        self.wait(self.launch("all_reduce", 4))
        self.compute(nbytes=30 * own)


def fsdp2(step: Step, hybrid: bool) -> None:
    """`fully_shard` on each block and the model, defaults: gathers of the model's own parameters and of each block in
    forward, of each block in backward, each prefetched one block ahead; a reduce-scatter of each, with the next one
    waiting for it; HSDP adds an all-reduce of the reduced part over nodes. Passes: 4 for the copies of a gather, 4 or
    with fp32 6 for the copy of gradients."""
    work, over = step.work, "shard" if hybrid and step.nodes > 1 else "data"
    shards = step.ranks // step.nodes if over == "shard" else step.ranks
    block, root = sum(work.block), sum(work.others)

    def reduce(numel: int) -> CollectiveCall:
        step.compute(nbytes=(2 + step.gradient) * numel)
        made = step.launch("reduce_scatter", step.gradient * numel, over)
        if over == "data":
            return made
        return step.launch("all_reduce", step.gradient * numel // shards, "replicate", made)

    def through_blocks(flops: int, reduces: bool) -> CollectiveCall | None:
        ahead, reduction = step.launch("all_gather", 2 * block, over), None
        for number in range(work.blocks):
            step.wait(ahead)
            step.compute(nbytes=4 * block)
            if number + 1 < work.blocks:
                ahead = step.launch("all_gather", 2 * block, over)
            step.compute(flops)
            if reduces:
                step.wait(*([] if reduction is None else [reduction]))
                reduction = reduce(block)
        return reduction

    step.wait(step.launch("all_gather", 2 * root, over))
    step.compute(nbytes=4 * root)
    through_blocks(work.forward, False)
    step.compute(3 * work.head)
    reduction = through_blocks(work.backward, True)
    last = reduce(root)
    assert reduction is not None
    step.wait(reduction, last)
    step.update(shards)


def deepspeed_1(step: Step) -> None:
    """Stage 1 with overlap_comm: gradients are copied into buckets of `reduce_bucket_size` (4 or with fp32 6 bytes an
    element) and all-reduced on a stream beside backward, a bucket at a time; the update; then a gather of all
    parameters, for which the step waits."""
    work, left = step.work, 0
    buckets: list[CollectiveCall] = []

    def arrive(numel: int) -> None:
        nonlocal left
        step.compute(nbytes=(2 + step.gradient) * numel)
        left += numel
        if left >= BUCKET:
            flush()

    def flush() -> None:
        nonlocal left
        step.wait(*buckets[-1:])
        buckets.append(step.launch("all_reduce", step.gradient * left))
        left = 0

    step.compute(work.forward * work.blocks + 3 * work.head)
    arrive(work.others[1])
    for _ in range(work.blocks):
        step.compute(work.backward)
        arrive(sum(work.block))
    arrive(work.others[0])
    flush()
    step.wait(*buckets[-2:])
    step.update(step.ranks)
    step.wait(step.launch("all_gather", 2 * work.numel))


def deepspeed_3(step: Step, in_node: bool, quantized: bool) -> None:
    """Stage 3: a module waits for its parameters and then launches those behind it, up to `stage3_prefetch_bucket_size`
    elements as one gather, while `stage3_max_live_parameters` are not reached; so many of forward's last stay for
    backward. Gradients fill buckets of `reduce_bucket_size` (4 or with fp32 6 bytes an element for the copy, and a flat
    tensor that is reduced), of which the next one waits for the one before it.

    in_node (hpZ): backward gathers from the node's copy, which forward writes (4 bytes an element of it). quantized
    (ZeRO++): forward gathers in 8 bits (3 bytes an element to unpack); gradients in 4 bits by an all-to-all in the node
    and one between nodes (2.5 bytes an element to pack, 0.5 to add what arrives, 2.5 of the sum to pack it again).
    """
    work = step.work
    per_element = work.forward / sum(work.block), work.backward / sum(work.block)
    units = [work.others[0], *work.block * work.blocks, work.others[1]]
    kept, total = 0, 0
    while kept < len(units) and total + units[-1 - kept] <= LIVE:
        total += units[-1 - kept]
        kept += 1
    passes = (3 if quantized else 0) + (4 * step.nodes / step.ranks if in_node else 0)
    for number in _gathered(step, units, INT8 if quantized else 2, "data", ()):
        flops = [0.0, per_element[0] * units[number], work.head][(number > 0) + (number + 1 == len(units))]
        step.compute(flops, passes * units[number])
    reductions: list[CollectiveCall] = []
    left = 0
    units.reverse()
    for number in _gathered(step, units, 2, "shard" if in_node else "data", range(kept)):
        flops = [2.0 * work.head, per_element[1] * units[number], 0.0][(number > 0) + (number + 1 == len(units))]
        step.compute(flops, (2 + step.gradient) * units[number])
        left += units[number]
        if left >= BUCKET or number + 1 == len(units):
            step.wait(*reductions[-1:])
            reductions.append(_reduce(step, left, quantized))
            left = 0
    step.wait(*reductions[-2:])
    step.update(step.ranks)


def _reduce(step: Step, numel: int, quantized: bool) -> CollectiveCall:
    if not quantized:
        step.compute(nbytes=2 * step.gradient * numel)
        return step.launch("reduce_scatter", step.gradient * numel)
    local = step.ranks // step.nodes
    step.compute(nbytes=2.5 * numel + INT4 * numel + 2.5 * numel / local)
    within = step.launch("all_to_all", INT4 * numel, "shard")
    return step.launch("all_to_all", INT4 * numel / local, "replicate", within)


def _gathered(step: Step, units: Sequence[int], nbytes: float, over: str, available: Sequence[int]) -> Iterator[int]:
    """Yield the number of each unit when it has been waited for and those behind it are on their way.

    Args:
        units: their elements.
        nbytes: of an element on the wire.
        over: the ranks.
        available: units that need no gather.
    """
    launched: dict[int, CollectiveCall] = {}
    live, ahead = sum(units[number] for number in available), len(available)

    def launch(most: int) -> None:
        nonlocal ahead, live
        first, numel = ahead, 0
        while ahead < len(units) and (numel < most and live < LIVE or ahead == first and most == 1):
            numel, live, ahead = numel + units[ahead], live + units[ahead], ahead + 1
        if numel:
            launched.update(dict.fromkeys(range(first, ahead), step.launch("all_gather", nbytes * numel, over)))

    for number in range(len(units)):
        if number >= ahead:
            launch(1)
        if number in launched:
            step.wait(launched[number])
        launch(AHEAD)
        yield number
        live -= units[number]


def time_of(name: str, work: Work, ranks: int, nodes: int, machine: Machine) -> StepTime:
    """Play a step of a peer."""
    step = Step(work, ranks, nodes)
    if name.startswith("fsdp2"):
        fsdp2(step, name == "fsdp2-hsdp")
    elif name == "deepspeed-1":
        deepspeed_1(step)
    else:
        deepspeed_3(step, in_node=name in IN_NODE, quantized=name == "deepspeed-3-zero++")
    return step_time([step.events], machine, Wires(machine, Grid(data=ranks), nodes, messages=False))
