"""Cost of post-training at stage 3: full weights for an inference engine, generation by the model itself, and a step;
zerolite beside DeepSpeed, and beside plain all-gathers and plain PyTorch.

    python benchmarks/post_training.py
    python benchmarks/post_training.py --ranks 4 --width 1024 --layers 16 --rounds 9 --lora

Both train the same Llama of transformers in bf16 with AdamW, in processes of their own that take turns; within a turn
the ways take turns. A ratio is the median over rounds. "by parameter" is `GatheredParameters` around each parameter,
as TRL and OpenRLHF write it. DeepSpeed generates as TRL lets it: all parameters gathered, its hooks removed.
Processor seconds are rank 0's, and depend less on other work of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import harness, options
from benchmarks.harness import Contest
from benchmarks.ranks import together
from benchmarks.setting import Competitor, Setting, by_name
from benchmarks.workers import Workers

MIB = 2**20
GATHER, SAME, STREAM, BY_PARAMETER = (
    *("plain gather", "plain gather, all into the same memory"),
    *("stream_full_weights", "GatheredParameters around each parameter"),
)
PLAIN, GENERATE, STEP = "plain PyTorch", "generation", "step"
Ways = dict[str, Callable[[], object]]
Turn = dict[str, tuple[float, float]]  # seconds and processor seconds by way


# -------------------------------------------------------------------- the ways


def make_model(args: argparse.Namespace) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": args.width, "intermediate_size": 4 * args.width, "num_hidden_layers": args.layers}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=8000, num_attention_heads=8, num_key_value_heads=8, **sizes))
    if args.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
    return model


def config() -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # DeepSpeed clips unless it is told not to
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }


def plain_gather(comm: Any, nbytes: int, bucket_bytes: int, reuse: bool) -> Callable[[], None]:
    """Return a function that gathers as many bytes as the model has, and no more.

    reuse: all buckets go into the same memory, otherwise each into new memory, as an inference
    engine needs it.
    """
    sizes = [min(bucket_bytes, nbytes - begin) for begin in range(0, nbytes, bucket_bytes)]
    # Ones, because pages that nobody has written are all the same one of zeros, and stay in the processor's cache.
    shards = [torch.ones(size // comm.world_size, dtype=torch.uint8) for size in sizes]
    same = torch.ones(max(shard.numel() for shard in shards) * comm.world_size, dtype=torch.uint8)

    def gather() -> None:
        for shard in shards:
            numel = shard.numel() * comm.world_size
            full = same[:numel] if reuse else torch.empty(numel, dtype=torch.uint8)
            comm.gather_shards([full], [shard], "benchmark").wait()

    return gather


def generate(model: Any) -> None:
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        model.generate(torch.arange(1, 17)[None], **options)


def step(engine: Any) -> None:
    tokens = torch.arange(128)[None]
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


def by_parameter(parameters: Any, gathered: Callable[..., Any]) -> None:
    for parameter in parameters:
        with gathered([parameter]):
            pass


def zerolite_ways(args: argparse.Namespace) -> Ways:
    import zerolite

    model = make_model(args)
    plain = copy.deepcopy(model).to(torch.bfloat16)
    engine: Any = zerolite.initialize(model, config())
    bucket_bytes, nbytes = args.bucket * MIB, sum(p.numel() * p.element_size() for p in plain.parameters())

    def stream() -> None:
        for bucket in zerolite.stream_full_weights(engine, bucket_bytes=bucket_bytes):
            for _, _tensor in bucket:
                pass

    def gathered() -> None:
        with zerolite.gathered_for_generation(engine) as whole:
            generate(whole)

    return {
        GATHER: plain_gather(engine.topology.data, nbytes, bucket_bytes, reuse=False),
        SAME: plain_gather(engine.topology.data, nbytes, bucket_bytes, reuse=True),
        STREAM: stream,
        BY_PARAMETER: lambda: by_parameter(
            engine.module.parameters(), lambda given: zerolite.zero.GatheredParameters(given, check=False)
        ),
        PLAIN: lambda: generate(plain),
        GENERATE: gathered,
        STEP: lambda: step(engine),
    }


def deepspeed_ways(args: argparse.Namespace) -> Ways:
    import deepspeed  # type: ignore[import-not-found]

    model = make_model(args)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config(), model_parameters=trained)

    def gathered() -> None:
        with deepspeed.zero.GatheredParameters(model.parameters()), _without_hooks(engine):
            generate(model)

    return {
        BY_PARAMETER: lambda: by_parameter(engine.module.parameters(), deepspeed.zero.GatheredParameters),
        GENERATE: gathered,
        STEP: lambda: step(engine),
    }


@contextlib.contextmanager
def _without_hooks(engine: Any) -> Iterator[None]:
    """Take DeepSpeed's hooks off the modules."""
    from trl.models.utils import add_hooks, remove_hooks  # type: ignore[import-not-found]

    remove_hooks(engine)
    try:
        yield
    finally:
        add_hooks(engine)


COMPETITORS = by_name([Competitor("zerolite", zerolite_ways), Competitor("deepspeed", deepspeed_ways, "deepspeed")])


# -------------------------------------------------------------------- the turns


def serve(pipe: Connection, rank: int, setting: Setting, name: str, args: argparse.Namespace) -> None:
    """Answer each number with a turn, in the processes of one competitor."""
    ways = COMPETITORS[name].build(args)

    def turn() -> Turn:
        taken: Turn = {}
        for way, action in ways.items():
            begin = time.process_time()
            seconds = together(action)
            taken[way] = seconds, time.process_time() - begin
        return taken

    turn()  # makes memory
    pipe.send(None)
    while pipe.recv():
        pipe.send(turn())


class PostTraining(Contest):
    def make(self, name: str, store: Path) -> Workers:
        return Workers(serve, Setting(world_size=self.args.ranks), (name, self.args), store)


def table(rounds: dict[str, list[Turn]]) -> list[str]:
    """Return the lines of a table: seconds, processor seconds, and both over the line that each is compared with."""
    of: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for name, turns in rounds.items():
        for taken in turns:
            for way, figures in taken.items():
                of.setdefault((name, way), []).append(figures)
    ours = "zerolite"
    lines = ["| | seconds | processor seconds | compared with | ratio of seconds | of processor seconds |"]
    lines.append("|---|---:|---:|---|---:|---:|")
    for (name, way), measured in of.items():
        base = {STREAM: (ours, GATHER), SAME: (ours, GATHER), GENERATE: (ours, PLAIN)}.get(way, (ours, way))
        if way == BY_PARAMETER:
            base = ours, STREAM
        seconds, processor = (statistics.median(column) for column in zip(*measured, strict=True))
        ratios = [""] * 3
        if base in of and base != (name, way):
            pairs = list(zip(measured, of[base], strict=False))
            columns = [statistics.median(one[i] / other[i] for one, other in pairs) for i in (0, 1)]
            ratios = [base[1] if base[1] != way else f"{ours}'s", *(f"{ratio:.2f}" for ratio in columns)]
        lines.append(f"| {name}: {way} | {seconds:.3f} | {processor:.3f} | {' | '.join(ratios)} |")
    return lines


def main() -> int:
    parser = options.make_parser(__doc__)
    for option, default in (("ranks", 2), ("width", 512), ("layers", 8), ("bucket", 32), ("rounds", 7)):
        parser.add_argument(f"--{option}", type=options.positive, default=default, help="(default: %(default)s)")
    options.add_choice(parser, "--competitors", COMPETITORS, default=tuple(COMPETITORS))
    parser.add_argument("--lora", action="store_true", help="put adapters around all linear layers, and merge them")
    args = parser.parse_args()
    args.steps = 1
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with PostTraining(args, COMPETITORS) as contest:
        contest.run()
    about = f"{args.ranks} ranks, width {args.width}, {args.layers} layers, bf16, {args.bucket} MiB a bucket"
    about += f"{', LoRA merged' if args.lora else ''}, medians of {args.rounds} rounds, {harness.machine()}"
    notes = [f"{name}: {reason}" for name, reason in contest.absent.items()]
    harness.publish(args, about, [*table(contest.rounds), *notes], rounds=contest.rounds)
    return 1 if contest.failed else 0


if __name__ == "__main__":
    sys.exit(main())
