"""Step times on stated machines, by the plan's clock: zerolite's settings beside FSDP2 and its HSDP.

    python benchmarks/step_times.py                              # Llama-2-7B; 8 to 4096 ranks, 8 a node
    python benchmarks/step_times.py --models llama-3-70b --ranks 64,1024
    python benchmarks/step_times.py --settings 3,hierarchical,fsdp2-hsdp --markdown

One sequence of 4096 tokens a rank, bf16 with fp32 masters, clipping; 70B with every block checkpointed. The default
machine is one of H100s: see --help. zerolite: a dry run of the engine. FSDP2 (`fully_shard` on each block and the
model, defaults): gathers of the model's own parameters and of each block in forward, of each block in backward, each
prefetched one block ahead; a reduce-scatter of each, with the next one waiting for it, on the same communicator; HSDP
adds an all-reduce of the reduced part over nodes. Gradients travel as zerolite's: in fp32 from 64 ranks on. Its passes,
in bytes an element: 4 for the copies of a gather, 4 or with fp32 6 for the copy of gradients; and of the part that a
rank updates 30, and 12 for the norm.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks import harness, options
from benchmarks.report import Row, render_table
from benchmarks.shapes import SHAPES, Block, Decoder, Shape
from zerolite.comm.recorder import CollectiveCall
from zerolite.engine.options import EXACT_SUMS_FROM
from zerolite.planning import Machine, plan
from zerolite.planning.clock import Compute, Event, Launch, Trace, Wait, step_time
from zerolite.planning.result import StepTime
from zerolite.planning.tracker import MemoryTracker
from zerolite.planning.traffic import Grid
from zerolite.planning.wire import Wires

TOKENS = (1, 4096)
MODELS = SHAPES | {"llama-3-70b": Shape(128_256, 8192, 80, 64, 8, 128, 28_672)}
CHECKPOINTED = ("llama-3-70b",)
OVERLAP = {"overlap_comm": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "1": {"stage": 1}, "1-overlap": {"stage": 1, **OVERLAP}, "3": {"stage": 3}, "replicas": {"stage": 3},
    "hierarchical": {"stage": 3},
}  # fmt: skip
IN_NODE = {"replicas": "shard_size", "hierarchical": "zero_hpz_partition_size"}
COLUMNS = (
    ("model", "model", "{}"), ("ranks", "ranks", "{}"), ("setting", "name", "{}"), ("step ms", "step", "{:.0f}"),
    ("forward, backward", "products", "{:.0f}"), ("passes", "passes", "{:.0f}"), ("exposed", "exposed", "{:.0f}"),
)  # fmt: skip


class CheckpointedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return made


def make_model(name: str) -> Decoder:
    model = Decoder(MODELS[name])
    if name in CHECKPOINTED:
        for block in model.blocks:
            block.__class__ = CheckpointedBlock
    return model


def batch() -> tuple[Tensor]:
    return (torch.zeros(TOKENS, dtype=torch.long),)


def config_of(name: str, setting: str, per_node: int) -> dict[str, Any]:
    zero = SETTINGS[setting] | ({IN_NODE[setting]: per_node} if setting in IN_NODE else {})
    return {
        "train_micro_batch_size_per_gpu": TOKENS[0], "zero_optimization": zero, "bf16": {"enabled": True},
        "gradient_clipping": 1.0, "optimizer": {"type": "AdamW"},
    }  # fmt: skip


def time_zerolite(name: str, setting: str, ranks: int, nodes: int, machine: Machine) -> StepTime:
    config = config_of(name, setting, ranks // nodes)
    made = plan(lambda: make_model(name), config, ranks, nodes=nodes, machine=machine, batch=batch)
    assert made.time is not None
    return made.time


def _flops(name: str) -> tuple[int, int]:
    """Return the operations of a block and of all else, forward."""
    shape = MODELS[name]
    own = shape.width * shape.head_width * (2 * shape.heads + 2 * shape.key_heads)
    inner = 3 * shape.width * shape.inner * max(1, shape.active) + shape.width * shape.experts
    attention = 4 * TOKENS[1] ** 2 * shape.heads * shape.head_width
    return 2 * TOKENS[1] * (own + inner) + attention, 2 * TOKENS[1] * shape.width * shape.vocabulary


def time_fsdp2(name: str, ranks: int, nodes: int, machine: Machine, hybrid: bool) -> StepTime:
    """Play a step of FSDP2, see the module."""
    with torch.device("meta"):
        model = Decoder(MODELS[name])
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    root, count = sum(map(torch.Tensor.numel, model.parameters())) - block * len(model.blocks), len(model.blocks)
    shards = ranks // nodes if hybrid else ranks
    again = int(name in CHECKPOINTED)
    forward, head = _flops(name)
    events: list[Event] = []

    def call(op: str, numel: int, size: int, tag: str, dimension: str, of: int) -> CollectiveCall:
        return CollectiveCall(op, numel, torch.float32, numel * size, tag, 1, dimension, of)

    def gather(numel: int) -> CollectiveCall:
        made = call("all_gather", numel, 2, "parameters", "shard" if hybrid else "data", shards)
        events.append(Launch(made))
        return made

    def use(gathered: CollectiveCall) -> None:
        events.extend((Wait(gathered), Compute(0, 4 * gathered.numel)))

    def reduce(numel: int) -> CollectiveCall:
        size = 4 if ranks >= EXACT_SUMS_FROM else 2
        events.append(Compute(0, (2 + size) * numel))
        made = call("reduce_scatter", numel, size, "parameters", "shard" if hybrid else "data", shards)
        events.append(Launch(made))
        if hybrid and nodes > 1:
            summed = call("all_reduce", numel // shards, size, "gradients", "replicate", nodes)
            events.append(Launch(summed, made))
            return summed
        return made

    gathered = [gather(root)]
    use(gathered[0])
    ahead = gather(block)
    for number in range(count):
        use(ahead)
        if number + 1 < count:
            ahead = gather(block)
        events.append(Compute(forward, 0))
    events.append(Compute(3 * head, 0))  # the head's backward too
    ahead, reduction = gather(block), None
    for number in range(count):
        use(ahead)
        if number + 1 < count:
            ahead = gather(block)
        attention = 4 * TOKENS[1] ** 2 * MODELS[name].heads * MODELS[name].head_width
        # A recomputed forward stops before its last product, whose result no backward reads.
        last_product = 2 * TOKENS[1] * MODELS[name].width * MODELS[name].inner * max(1, MODELS[name].active)
        events.append(Compute(2 * forward + again * (forward - last_product) + attention // 2, 0))
        if reduction is not None:
            events.append(Wait(reduction))
        reduction = reduce(block)
    last = reduce(root)
    assert reduction is not None
    norm = call("all_reduce", 1, 4, "stats", "data", ranks)
    own = (block * count + root) // shards
    events += [Wait(reduction), Wait(last), Compute(0, 12 * own), Launch(norm), Wait(norm), Compute(0, 30 * own)]
    trace = Trace(MemoryTracker(), on_device=True, overlaps=False)
    trace.steps.append(events)
    return step_time(trace, machine, Wires(machine, Grid(data=ranks), nodes, messages=False))


def row_of(model: str, ranks: int, name: str, machine: Machine, per_node: int) -> Row | None:
    nodes = max(1, ranks // per_node)
    if nodes == 1 and (name in IN_NODE or name == "fsdp2-hsdp"):
        return None
    if name in SETTINGS:
        time = time_zerolite(model, name, ranks, nodes, machine)
    else:
        time = time_fsdp2(model, ranks, nodes, machine, name == "fsdp2-hsdp")
    about = {"model": model, "ranks": ranks, "name": name, "absent": None}
    return about | {part: 1e3 * seconds for part, seconds in time.model_dump().items()}


def main(argv: list[str] | None = None) -> None:
    parser = options.make_parser(__doc__)
    options.add_choice(parser, "--models", MODELS, ["llama-2-7b"])
    options.add_choice(parser, "--settings", [*SETTINGS, "fsdp2", "fsdp2-hsdp"])
    parser.add_argument("--ranks", type=options.positives, default=[8, 64, 512, 1024, 4096])
    parser.add_argument("--per-node", type=options.positive, default=8, help="ranks of a node")
    speeds = {"tflops": 547, "intra-bandwidth": 360, "inter-bandwidth": 340, "latency": 10, "memory-bandwidth": 3000}
    for option, value in speeds.items():
        parser.add_argument(f"--{option}", type=float, default=value, help=f"see `zerolite plan --help` ({value})")
    args = parser.parse_args(argv)
    machine = Machine(**{option.replace("-", "_"): getattr(args, option.replace("-", "_")) for option in speeds})
    rows = []
    for model in args.models:
        for ranks in args.ranks:
            for name in args.settings:
                row = row_of(model, ranks, name, machine, args.per_node)
                if row is not None:
                    rows.append(row)
                    print(row, file=sys.stderr, flush=True)
    harness.publish(args, str(machine), [render_table(rows, args.markdown, COLUMNS)], results=rows)


if __name__ == "__main__":
    main()
