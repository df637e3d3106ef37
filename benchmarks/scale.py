"""A count of what a step launches at up to thousands of ranks: collectives, bytes, messages, and the host's time.

    python benchmarks/scale.py                                    # Llama-2-7B, Qwen3-30B-A3B; 8 to 4096 ranks
    python benchmarks/scale.py --models llama-2-7b --ranks 8,64 --libraries zerolite-3,fsdp2
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
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness, options
from benchmarks.report import Row, make_rows, render_table
from benchmarks.scale_peers import THINNER, Message, run_deepspeed, run_fsdp2
from benchmarks.scale_zerolite import host_ms, run_zerolite
from benchmarks.shapes import SHAPES, parameters_of

STAGES = ("zerolite-1", "zerolite-2", "zerolite-3")
PEERS = ("fsdp2", "deepspeed-1", "deepspeed-2", "deepspeed-3")
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


def figures(messages: list[Message], ranks: int, scale: float = 1.0) -> Row:
    """Return the counts and bytes of a step; scale: of the model to the one that was run."""
    sizes = [message.nbytes * scale / 1e6 for message in messages if message.kind != "other"]
    sent = sum(message.nbytes * message.factor for message in messages) * scale * (ranks - 1) / ranks
    return {
        "launches": len(messages),
        "gathers": sum(message.kind == "gather" for message in messages),
        "reductions": sum(message.kind == "reduction" for message in messages),
        "sent_gb": sent / 1e9,
        "smallest_mb": min(sizes),
        "median_mb": statistics.median(sizes),
    }


def measure(model: str, ranks: int, name: str) -> Row:
    """Count in this process, which has measured nothing yet."""
    shape = SHAPES[model]
    library, _, stage = name.partition("-")
    if library == "zerolite":
        messages, unaligned, waits = run_zerolite(shape, ranks, int(stage))
        added = host_ms(shape, ranks, int(stage))
        return figures(messages, ranks) | {"unaligned": unaligned, "waits": waits, "host_ms": added}
    if library == "fsdp2":
        return figures(run_fsdp2(shape, ranks), ranks)
    scale = parameters_of(shape) / parameters_of(shape.thinner(THINNER))
    return figures(run_deepspeed(shape, ranks, int(stage)), ranks, scale)


def row_of(model: str, ranks: int, name: str, seconds: int) -> Row:
    """Measure in a process of its own."""
    found: Row = {}
    absent: dict[str, str] = {}
    command = [sys.executable, __file__, "--one", model, str(ranks), name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        if done.returncode:
            absent[name] = (done.stderr.strip().splitlines() or ["no reason given"])[-1][:120]
        else:
            found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        absent[name] = f"took more than {seconds} s"
    print(f"{model}, {ranks} ranks, {name}: done", file=sys.stderr)
    return make_rows([name], absent, COLUMNS, lambda name: found)[0] | {"model": model, "ranks": ranks}


def main(argv: list[str] | None = None) -> None:
    parser = options.make_parser(__doc__)
    options.add_choice(parser, "--models", SHAPES)
    parser.add_argument("--ranks", type=options.positives, default=[8, 64, 512, 4096])
    options.add_choice(parser, "--libraries", [*STAGES, *PEERS])
    parser.add_argument("--seconds", type=options.positive, default=900, help="for one line")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        model, ranks, name = args.one
        print(json.dumps(measure(model, int(ranks), name)))
        return
    rows = [
        row_of(model, ranks, name, args.seconds)
        for model in args.models
        for ranks in args.ranks
        for name in args.libraries
    ]
    harness.publish(args, harness.machine(), [render_table(rows, args.markdown, COLUMNS)], results=rows)


if __name__ == "__main__":
    main()
