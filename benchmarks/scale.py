"""A count of what a step launches at up to thousands of ranks: collectives, bytes, messages, and the host's time.

    python benchmarks/scale.py                                    # Llama-2-7B, Qwen3-30B-A3B; 8 to 4096 ranks
    python benchmarks/scale.py --models llama-2-7b --ranks 8,64 --peers fsdp2
    python benchmarks/scale.py --markdown

Nothing is sent. zerolite: the planner's dry run on tensors without memory, as rank 0 of a job on CUDA; every collective
that the engine asks for is noted. Peers: FSDP2 on fake tensors and torch's fake process group, each block and the
model wrapped; DeepSpeed on the same group and real tensors, of a model `THINNER` times narrower with its sizes in
elements (buckets, prefetch, thresholds) smaller by as much as its parameters, so that it cuts as many buckets as of the
real one. All have bf16 weights or mixed precision, and clip the norm.

"launches" are calls of a communicator, several tensors in one group being one; "gathers" and "reductions" are those
for parameters and gradients, the rest are of the step itself (norms, flags). "sent": bytes of a rank as rings.
"smallest" and "median": of the messages for parameters and gradients, full tensors. "unaligned": tensors of
collectives, or ranks' parts of them, that do not begin on 16 bytes. "waits": reads of the device that the host waits
for in a step. "host ms": what the engine adds to forward and backward of plain PyTorch, its whole step included, in a
model `THINNEST` times narrower, as one of so many ranks that send nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.report import positive, render_table
from benchmarks.setting import CLIP, optimizer_for
from benchmarks.shapes import SHAPES, Decoder, Shape

TOKENS = (1, 2048)
THINNER = 32
THINNEST = 128  # times narrower: where the host's time is measured, so that arithmetic takes little of it
TIMED_STEPS = 10
WARM_UP = 5  # stage 3 follows its plan from then on
STAGES = ("zerolite-1", "zerolite-2", "zerolite-3")
PEERS = ("fsdp2", "deepspeed-1", "deepspeed-2", "deepspeed-3")
DEEPSPEED_SIZES = {  # its defaults, in elements
    "reduce_bucket_size": 5e8,
    "allgather_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
}
COLUMNS = (
    ("model", "model", "{}"),
    ("ranks", "ranks", "{}"),
    ("library", "name", "{}"),
    ("launches", "launches", "{}"),
    ("gathers", "gathers", "{}"),
    ("reductions", "reductions", "{}"),
    ("sent GB", "sent_gb", "{:.2f}"),
    ("smallest MB", "smallest_mb", "{:.3f}"),
    ("median MB", "median_mb", "{:.1f}"),
    ("unaligned", "unaligned", "{}"),
    ("waits", "waits", "{}"),
    ("host ms", "host_ms", "{:.1f}"),
)


@dataclass(frozen=True)
class Message:
    """One launch. kind: gather, reduction or other. nbytes: of the full tensors. factor: bytes sent over those, at
    very many ranks: 1, and 2 for an all-reduce."""

    kind: str
    nbytes: int
    factor: int


@dataclass(frozen=True)
class Row:
    """See the module. absent: why nothing was counted."""

    model: str
    ranks: int
    name: str
    absent: str | None = None
    launches: int | None = None
    gathers: int | None = None
    reductions: int | None = None
    sent_gb: float | None = None
    smallest_mb: float | None = None
    median_mb: float | None = None
    unaligned: int | None = None
    waits: int | None = None
    host_ms: float | None = None


def row_of(model: str, ranks: int, name: str, messages: list[Message], scale: float = 1.0, **more: float) -> Row:
    """scale: of the model to the one that was run."""
    sizes = [message.nbytes * scale / 1e6 for message in messages if message.kind != "other"]
    sent = sum(message.nbytes * message.factor for message in messages) * scale * (ranks - 1) / ranks
    counts = {kind: sum(message.kind == kind for message in messages) for kind in ("gather", "reduction")}
    return Row(
        model,
        ranks,
        name,
        launches=len(messages),
        gathers=counts["gather"],
        reductions=counts["reduction"],
        sent_gb=sent / 1e9,
        smallest_mb=min(sizes),
        median_mb=statistics.median(sizes),
        **more,
    )


# ------------------------------------------------------------------- zerolite


def zerolite_config(stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": TOKENS[0],
        "zero_optimization": {"stage": stage, **zero},
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }


def run_zerolite(shape: Shape, ranks: int, stage: int) -> tuple[list[Message], int, int]:
    """Return the launches, the number of unaligned tensors, and of reads for which the host waits."""
    from zerolite.config import load_config
    from zerolite.planning.dry_run import Job, run
    from zerolite.planning.places import Grid

    config = load_config(zerolite_config(stage)).resolve(ranks)
    batch = lambda: (torch.zeros(TOKENS, dtype=torch.long),)  # noqa: E731
    outcome = run(Job(lambda: Decoder(shape), config, Grid(data=ranks), batch=batch))
    kinds = {"parameters": "gather", "gradients": "reduction"}
    calls = [call for call in outcome.recorder.calls if call.ranks > 1]
    messages = [Message(kinds.get(call.tag, "other"), call.nbytes, 1 + (call.op == "all_reduce")) for call in calls]
    return messages, sum(call.unaligned for call in calls), outcome.host_waits


def host_ms(shape: Shape, ranks: int, stage: int) -> float:
    """See the module."""
    import zerolite
    from benchmarks.tiny_layers import CollectiveClock, null_communicator
    from zerolite.comm import use_communicator

    thin = shape.thinner(THINNEST)
    scale = parameters_of(thin) / parameters_of(shape)
    clock = CollectiveClock(time.process_time)

    config = zerolite_config(stage, reduce_bucket_size=int(automatic_bucket(shape, ranks) * scale))
    config["consistency_check_interval"] = 0  # ranks that send nothing do not agree
    torch.set_num_threads(1)
    tokens = torch.zeros((1, 16), dtype=torch.long)
    plain = Decoder(thin).to(torch.bfloat16)
    with use_communicator(lambda rank, world: null_communicator(clock, ranks)):
        engine = zerolite.initialize(Decoder(thin), config)

    def plain_step() -> None:
        plain(tokens).backward()
        plain.zero_grad()

    def step() -> None:
        engine.backward(engine(tokens))
        engine.step()

    ours, theirs = [], []
    for number in range(WARM_UP + TIMED_STEPS):
        theirs.append(_seconds(plain_step))
        clock.seconds = 0.0
        ours.append(_seconds(step) - clock.seconds)
        if number + 1 == WARM_UP:
            ours.clear()
            theirs.clear()
    return 1e3 * (statistics.median(ours) - statistics.median(theirs))


def automatic_bucket(shape: Shape, ranks: int) -> int:
    from zerolite.zero.layout import auto_bucket_numel

    return auto_bucket_numel(parameters_of(shape), ranks)


def _seconds(call: Callable[[], None]) -> float:
    """Return the processor's time: other work may keep it from this one."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def parameters_of(shape: Shape) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(shape).parameters())


# ---------------------------------------------------------------------- peers


class Launches(TorchDispatchMode):
    """Notes the operators of torch.distributed that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if func.namespace in ("c10d", "_c10d_functional") and "wait_tensor" not in name and "barrier" not in name:
            nbytes = max(
                sum(tensor.nbytes for tensor in tree_leaves(argument) if isinstance(tensor, torch.Tensor))
                for argument in args
            )
            gather, scatter = "gather" in name, "scatter" in name
            kind = "gather" if gather else "reduction" if scatter or nbytes > 1e4 else "other"
            self.messages.append(Message(kind, nbytes, 1 if gather or scatter else 2))
        return func(*args, **(kwargs or {}))


def fake_group(ranks: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    places = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(places, MASTER_PORT="29500")
    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())


def run_fsdp2(shape: Shape, ranks: int) -> list[Message]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    fake_group(ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with FakeTensorMode():
        model = Decoder(shape)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        with Launches() as launches:
            model(torch.zeros(TOKENS, dtype=torch.long)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    return launches.messages


def run_deepspeed(shape: Shape, ranks: int, stage: int) -> list[Message]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    fake_group(ranks)
    import deepspeed  # type: ignore[import-not-found]

    thin = shape.thinner(THINNER)
    scale = parameters_of(thin) / parameters_of(shape)
    sizes = {name: max(2, int(value * scale) // 2 * 2) for name, value in DEEPSPEED_SIZES.items()}
    config = {
        "train_micro_batch_size_per_gpu": TOKENS[0],
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        # Its default, 100,000, keeps vectors whole and no matrix; so does this.
        "zero_optimization": {"stage": stage, **sizes, "stage3_param_persistence_threshold": 10 * thin.width},
    }
    model = Decoder(thin)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer_for(model, fused=False))
    for _ in range(3):  # it records in the first what it follows afterwards
        with Launches() as launches:
            engine.backward(engine(torch.zeros((1, 64), dtype=torch.long)))
            engine.step()
    return launches.messages


# ---------------------------------------------------------------- the command


def measure(model: str, ranks: int, name: str) -> Row:
    """In this process, which has measured nothing yet."""
    shape = SHAPES[model]
    library, _, stage = name.partition("-")
    if library == "zerolite":
        messages, unaligned, waits = run_zerolite(shape, ranks, int(stage))
        added = host_ms(shape, ranks, int(stage))
        return row_of(model, ranks, name, messages, unaligned=unaligned, waits=waits, host_ms=added)
    if library == "fsdp2":
        return row_of(model, ranks, name, run_fsdp2(shape, ranks))
    scale = parameters_of(shape) / parameters_of(shape.thinner(THINNER))
    return row_of(model, ranks, name, run_deepspeed(shape, ranks, int(stage)), scale)


def in_a_process(model: str, ranks: int, name: str, seconds: int) -> Row:
    command = [sys.executable, __file__, "--one", model, str(ranks), name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Row(model, ranks, name, absent=f"took more than {seconds} s")
    if done.returncode:
        return Row(model, ranks, name, absent=(done.stderr.strip().splitlines() or ["no reason given"])[-1][:120])
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES), help="of " + ", ".join(SHAPES))
    parser.add_argument("--ranks", default="8,64,512,4096")
    parser.add_argument("--zerolite", default=",".join(STAGES), help="stages")
    parser.add_argument("--peers", default=",".join(PEERS), help="of " + ", ".join(PEERS) + "; empty: none")
    parser.add_argument("--seconds", type=positive, default=900, help="for one line")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    if args.one:
        model, ranks, name = args.one
        print(json.dumps(asdict(measure(model, int(ranks), name))))
        return
    names = [name for name in (*args.zerolite.split(","), *args.peers.split(",")) if name]
    rows: list[Row] = []
    for model in args.models.split(","):
        for ranks in map(int, args.ranks.split(",")):
            for name in names:
                rows.append(in_a_process(model, ranks, name, args.seconds))
                print(f"{model}, {ranks} ranks, {name}: done", file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    show(rows, args.markdown)


def show(rows: Iterable[Row], markdown: bool) -> None:
    print(render_table(list(rows), markdown, COLUMNS))


if __name__ == "__main__":
    main()
