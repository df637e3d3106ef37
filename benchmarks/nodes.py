"""Two nodes of two ranks with a slow wire between them: step times that a plan predicts, and those measured.

    python benchmarks/nodes.py                               # 1 Gbit/s and 2 ms; needs root on Linux
    python benchmarks/nodes.py --gbits 0.25 --rounds 5
    python benchmarks/nodes.py --competitors zerolite-3,zerolite-3-hierarchical,fsdp2-hsdp

The nodes are network namespaces of this machine, see slow_wire.py. Ranks exchange by gloo; those of a node that form a
group of their own, by shared memory. All competitors train the same layers in fp32, each in its turn in every round,
every second round in the opposite order.

A prediction takes from the same rounds, and from nothing that sends during a step: "alone", steps of the same stage
that each rank trains without the others, all at once, for its compute, copies and host time; and single exchanges
of two sizes, within the nodes and between them, for latency and bandwidth. As in a step, the ranks of a node begin an
exchange between nodes together; if each went on alone, one would send while the other waits for the delay.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from benchmarks import harness, options
from benchmarks.engines import DEEPSPEED_KEYS
from benchmarks.report import Row, render_table
from benchmarks.slow_wire import Node, add_options, describe, two_nodes, why_not
from zerolite.comm import Communicator, use_communicator
from zerolite.engine.engine_base import parts_of
from zerolite.planning import Machine, plan

RANKS, NODES = 4, 2
WIDTH, BATCH = 512, 4
PORT = 29_631
FEW_BITS = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8}}
OF_SETS = ("shard_size", "zero_hpz_partition_size", *FEW_BITS)
SMALL, LARGE = 1 << 10, 1 << 18  # elements of the exchanges that are timed
REPEATS = 8  # of an exchange in a turn
CHECKS = "consistency_check_interval"
ALL_RELEASED = {
    "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0
}  # fmt: skip
ZEROLITE: dict[str, dict[str, Any]] = {
    "zerolite-1": {"stage": 1},
    "zerolite-2": {"stage": 2},
    "zerolite-1-waits": {"stage": 1},
    "zerolite-2-waits": {"stage": 2},
    "zerolite-3": {"stage": 3, **ALL_RELEASED},
    "zerolite-1-replicas": {"stage": 1, "shard_size": 2},
    "zerolite-3-replicas": {"stage": 3, "shard_size": 2, **ALL_RELEASED},
    "zerolite-3-hierarchical": {"stage": 3, "zero_hpz_partition_size": 2, **ALL_RELEASED},
    "zerolite-3-compressed": {"stage": 3, "zero_hpz_partition_size": 2, **FEW_BITS, **ALL_RELEASED},
}
WAITS = "-waits"  # for the values of the update at the end of a step; a plan has no such step
DEEPSPEED: dict[str, dict[str, Any]] = {
    "deepspeed-1": {"stage": 1},
    "deepspeed-3": {"stage": 3, **ALL_RELEASED},
    "deepspeed-3-hpz": {"stage": 3, "zero_hpz_partition_size": 2, **ALL_RELEASED},
}
NAMES = (*ZEROLITE, "fsdp2", "fsdp2-hsdp", *DEEPSPEED)
EXCHANGES = tuple((where, numel) for where in ("shard", "replicate") for numel in (SMALL, LARGE))
COLUMNS = (
    ("competitor", "name", "{}"), ("step ms", "step_ms", "{:.0f}"), ("min", "min_ms", "{:.0f}"),
    ("max", "max_ms", "{:.0f}"), ("alone ms", "alone_ms", "{:.0f}"), ("predicted ms", "predicted_ms", "{:.0f}"),
    ("measured / predicted", "ratio", "{:.2f}"),
)  # fmt: skip


class Layers(nn.Module):
    """``x [B, WIDTH]`` -> the loss. ``blocks`` is what FSDP2's users wrap."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def config_of(name: str, without: Sequence[str] = ()) -> dict[str, Any]:
    zero = {key: value for key, value in (ZEROLITE | DEEPSPEED)[name].items() if key not in without}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.0,  # DeepSpeed clips unless it is told not to
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"reduce_bucket_size": 2 * (WIDTH + 1) * WIDTH, **zero},
        CHECKS: 0,
    }


def batch() -> Tensor:
    return torch.ones(BATCH, WIDTH)


def machine_of(seconds: dict[str, float], flops: int, alone: float) -> Machine:
    """Return the machine on which single exchanges take as long as measured, and a step without them ``alone``.

    Args:
        seconds: of an exchange, by its place and number of elements.
        flops: operations of a step.
        alone: seconds.
    """
    more = {where: seconds[f"{where} {LARGE}"] - seconds[f"{where} {SMALL}"] for where in ("shard", "replicate")}
    sent = 4 * (LARGE - SMALL) / 2  # bytes, by each of two ranks
    return Machine(
        tflops=flops / 1e12 / alone,
        intra_bandwidth=sent / more["shard"] / 1e9,
        inter_bandwidth=2 * sent / more["replicate"] / 1e9,  # by the two ranks of a node at once
        intra_latency=1e6 * seconds[f"shard {SMALL}"],
        latency=1e6 * seconds[f"replicate {SMALL}"],
    )


def predict(name: str, layers: int, alone: float, exchanges: dict[str, float]) -> float:
    """Return the seconds of a step.

    Args:
        name: of a competitor of zerolite.
        layers: of the model.
        alone: seconds of its step where nothing is sent.
        exchanges: seconds of single exchanges.
    """
    flops = plan(lambda: Layers(layers), config_of("zerolite-1"), 1, device="cpu", batch=batch).flops
    assert flops is not None
    machine = machine_of(exchanges, flops, alone)
    made = plan(lambda: Layers(layers), config_of(name), RANKS, nodes=NODES, device="cpu", batch=batch, machine=machine)
    assert made.time is not None
    return made.time.step


# -------------------------------------------------------------------- the ranks


def make_step(name: str, layers: int, without: Sequence[str] = ()) -> Callable[[], object]:
    """Return a function that trains one step as this competitor, of zerolite's ``without`` some keys."""
    torch.manual_seed(0)
    model, x = Layers(layers), batch()
    if name in ZEROLITE:
        engine = zerolite.initialize(model, config_of(name, without))

        def step() -> None:
            engine.backward(engine(x))
            engine.step()
            if name.endswith(WAITS):
                assert engine.module is not None

        return step
    if name in DEEPSPEED:
        return make_deepspeed_step(name, model, x)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    hybrid = init_device_mesh("cpu", (NODES, RANKS // NODES), mesh_dim_names=("replicate", "shard"))
    mesh = hybrid if name == "fsdp2-hsdp" else init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def plain() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return plain


def make_deepspeed_step(name: str, model: nn.Module, x: Tensor) -> Callable[[], object]:
    import deepspeed  # type: ignore[import-not-found]

    config = {key: value for key, value in config_of(name).items() if key not in ("optimizer", CHECKS)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine, *_ = deepspeed.initialize(model=model, config=config | DEEPSPEED_KEYS, optimizer=optimizer)

    def step() -> None:
        engine.backward(engine(x))
        engine.step()

    return step


def make_exchange(where: str, numel: int) -> Callable[[], object]:
    """Return a function that gathers ``numel`` elements over two ranks, of a node or of two nodes, several times.

    Before each gather between nodes, the ranks of a node wait for each other by a gather of ``SMALL`` elements.
    """
    torch.manual_seed(0)
    groups = parts_of(zerolite.initialize(Layers(1), config_of("zerolite-3-hierarchical"))).groups
    comm, full, small = getattr(groups, where), torch.ones(numel), torch.ones(SMALL)

    def exchange() -> None:
        for _ in range(REPEATS):
            if where == "replicate":
                groups.shard.all_gather(small, "exchange").wait()
            comm.all_gather(full, "exchange").wait()

    return exchange


def all_of(names: list[str], layers: int) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return what makes each function that is timed, by its name."""
    made: dict[str, Callable[[], Callable[[], object]]] = {
        f"{where} {numel}": functools.partial(make_exchange, where, numel) for where, numel in EXCHANGES
    }

    def alone(name: str) -> Callable[[], object]:
        with use_communicator(lambda rank, world: Communicator()):
            return make_step(name, layers, OF_SETS)

    for name in names:
        made[name] = functools.partial(make_step, name, layers)
        if name in ZEROLITE:
            made[f"{name} alone"] = functools.partial(alone, name)
    return made


def train(names: list[str], layers: int, rounds: int, steps: int, out: str) -> None:
    """Measure all competitors as one rank; rank 0 writes the seconds of their steps, by round."""
    torch.set_num_threads(1)
    zerolite.init_distributed(timeout=120)
    made, absent = {}, {}
    for name, make in all_of(names, layers).items():
        try:
            made[name] = make()
            for _ in range(4):
                made[name]()
        except (ImportError, RuntimeError, NotImplementedError) as error:
            if name in ZEROLITE or name not in NAMES:
                raise
            absent[name] = f"{type(error).__name__}: {error}"[:200]
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for number in range(rounds):
        for name in list(made)[:: -1 if number % 2 else 1]:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                made[name]()
            seconds[name].append((time.perf_counter() - begin) / steps)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({"seconds": seconds, "absent": absent}), encoding="utf-8")
    made.clear()
    zerolite.comm.destroy()


def launch(nodes: list[Node], arguments: list[str], limit: float) -> None:
    """Run the ranks, two a node, and wait for them at most ``limit`` seconds. Raises RuntimeError if one fails."""
    ranks = []
    try:
        for rank in range(RANKS):
            node, local = nodes[rank // 2], rank % 2
            places = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": 2}
            variables = {**places, "MASTER_ADDR": nodes[0].address, "MASTER_PORT": PORT, "OMP_NUM_THREADS": 1}
            command = node.command([sys.executable, __file__, "--rank", *arguments])
            ranks.append(subprocess.Popen(command, env={**os.environ, **{k: str(v) for k, v in variables.items()}}))
        until = time.monotonic() + limit
        for rank, process in enumerate(ranks):
            if process.wait(max(0.0, until - time.monotonic())):
                raise RuntimeError(f"rank {rank} has ended with status {process.returncode}")
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def measure(names: list[str], layers: int, rounds: int, steps: int, gbits: float, delay_ms: float) -> dict[str, Any]:
    """Return the seconds of steps by competitor and round, and why others have none."""
    with tempfile.TemporaryDirectory() as directory, two_nodes(gbits, delay_ms) as nodes:
        out = f"{directory}/seconds.json"
        arguments = [",".join(names), str(layers), str(rounds), str(steps), out]
        launch(nodes, arguments, limit=120 + 30 * len(names) * rounds)
        found: dict[str, Any] = json.loads(Path(out).read_text(encoding="utf-8"))
        return found


def medians(found: dict[str, Any]) -> dict[str, float]:
    """Return the median seconds of each function that was timed."""
    return {name: statistics.median(seconds) for name, seconds in found["seconds"].items()}


def exchanges_in(middle: dict[str, float]) -> dict[str, float]:
    """Return the seconds of one exchange of each place and size."""
    seconds = {f"{where} {numel}": middle[f"{where} {numel}"] / REPEATS for where, numel in EXCHANGES}
    within = seconds[f"shard {SMALL}"]
    return {name: each - within if name.startswith("replicate") else each for name, each in seconds.items()}


def rows_of(args: argparse.Namespace) -> list[Row]:
    found = measure(list(args.competitors), args.layers, args.rounds, args.steps, args.gbits, args.delay)
    middle = medians(found)
    exchanges = exchanges_in(middle)
    print({name: round(1e3 * seconds, 3) for name, seconds in exchanges.items()}, file=sys.stderr)
    rows: list[Row] = []
    for name in args.competitors:
        row: Row = dict.fromkeys((key for _, key, _ in COLUMNS), None) | {"name": name}
        row["absent"] = found["absent"].get(name)
        if name in middle:
            seconds = found["seconds"][name]
            row |= {"step_ms": 1e3 * middle[name], "min_ms": 1e3 * min(seconds), "max_ms": 1e3 * max(seconds)}
        if name in middle and name in ZEROLITE and not name.endswith(WAITS):
            alone = middle[f"{name} alone"]
            step = predict(name, args.layers, alone, exchanges)
            row |= {"alone_ms": 1e3 * alone, "predicted_ms": 1e3 * step, "ratio": middle[name] / step}
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> None:
    if sys.argv[1:2] == ["--rank"]:
        names, layers, rounds, steps, out = sys.argv[2:]
        train(names.split(","), int(layers), int(rounds), int(steps), out)
        return
    parser = options.make_parser(__doc__)
    options.add_choice(parser, "--competitors", NAMES)
    add_options(parser, 1.0, "(default: 1)")
    parser.add_argument("--layers", type=options.positive, default=12, help=f"of {WIDTH} x {WIDTH}")
    parser.add_argument("--rounds", type=options.positive, default=5)
    parser.add_argument("--steps", type=options.positive, default=3, help="of a competitor in a round")
    args = parser.parse_args(argv)
    if reason := why_not():
        parser.error(reason)
    rows = rows_of(args)
    about = f"{harness.machine()}; {describe(args.gbits, args.delay)}; {args.layers} layers"
    harness.publish(args, about, [render_table(rows, args.markdown, COLUMNS)], results=rows)


if __name__ == "__main__":
    main()
