"""Weights for an inference engine at stage 3, beside a plain all-gather of the same bytes on the same transport; and
generation inside `gathered_for_generation`, beside the same model in plain PyTorch.

    python benchmarks/post_training.py
    python benchmarks/post_training.py --generate
    python benchmarks/post_training.py --ranks 4 --width 1024 --layers 16 --rounds 9 --lora

The ways take turns, and each ratio is the median over rounds of a way's time over the plain gather's in the same round.
"by parameter" is what programs for DeepSpeed do: `GatheredParameters` around each parameter.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import zerolite
from benchmarks.options import positive
from benchmarks.ranks import join_group, together
from benchmarks.setting import Setting

MIB = 2**20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + hidden


def make_engine(args: argparse.Namespace) -> Any:
    model: Any = nn.Sequential(*(Block(args.width) for _ in range(args.layers)))
    if args.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=["up", "down"]))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    return zerolite.initialize(model, config)


def plain_gather(engine: Any, bucket_bytes: int, reuse: bool) -> Callable[[], None]:
    """Return a function that gathers as many bytes as the model has, and no more.

    reuse: all buckets go into the same memory, otherwise each into new memory, as an inference
    engine needs it.
    """
    comm = engine.topology.data
    nbytes = sum(p.ds_numel * p.element_size() for p in engine.module.parameters())
    numel = -(-min(bucket_bytes, nbytes) // comm.world_size)
    shard, same = torch.empty(numel, dtype=torch.uint8), torch.empty(numel * comm.world_size, dtype=torch.uint8)

    def gather() -> None:
        for _ in range(-(-nbytes // same.numel())):
            full = same if reuse else torch.empty_like(same)
            comm.gather_shards([full], [shard], "benchmark").wait()

    return gather


def stream(engine: Any, bucket_bytes: int) -> None:
    for bucket in zerolite.stream_full_weights(engine, bucket_bytes=bucket_bytes):
        for _, _tensor in bucket:
            pass


def by_parameter(engine: Any) -> None:
    for parameter in engine.module.parameters():
        with zerolite.zero.GatheredParameters(parameter, check=False):
            pass


def generate(args: argparse.Namespace) -> None:
    """Compare tokens per second, on all ranks at once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": args.width, "intermediate_size": 4 * args.width, "num_hidden_layers": args.layers}
    config = LlamaConfig(vocab_size=8000, num_attention_heads=8, num_key_value_heads=8, **sizes)
    plain: Any = LlamaForCausalLM(config).eval()
    options = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt = torch.arange(1, 17)[None]
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
    }
    engine = zerolite.initialize(copy.deepcopy(plain), settings)

    def gathered() -> None:
        with zerolite.gathered_for_generation(engine) as model:
            model.generate(prompt, **options)  # type: ignore[operator]

    ways: dict[str, Callable[[], object]] = {
        "plain PyTorch": lambda: plain.generate(prompt, **options),
        "gathered_for_generation": gathered,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.rounds + 1):
        for name, way in ways.items():
            taken = together(way)
            if turn:
                seconds[name].append(taken)
    if engine.rank == 0:
        count = sum(p.numel() for p in plain.parameters())
        print(f"{args.ranks} ranks, {count / 1e6:.0f} M parameters in fp32, 32 tokens, {args.rounds} rounds")
        print("| | tokens/s of a rank | of plain PyTorch |\n|---|---|---|")
        for name, taken_by in seconds.items():
            ratio = statistics.median(b / a for a, b in zip(taken_by, seconds["plain PyTorch"], strict=True))
            print(f"| {name} | {32 / statistics.median(taken_by):.1f} | {ratio:.2f} |")
    zerolite.destroy()


def serve(rank: int, args: argparse.Namespace, store: str) -> None:
    join_group(rank, Setting(world_size=args.ranks, device="cpu"), store)
    torch.manual_seed(0)
    if args.generate:
        return generate(args)
    engine = make_engine(args)
    bucket_bytes = args.bucket * MIB
    ways: dict[str, Callable[[], object]] = {
        "plain gather": plain_gather(engine, bucket_bytes, reuse=False),
        "plain gather, same memory": plain_gather(engine, bucket_bytes, reuse=True),
        "stream_full_weights": lambda: stream(engine, bucket_bytes),
        "by parameter": lambda: by_parameter(engine),
        "full_state_dict": lambda: engine.full_state_dict(rank0_only=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.rounds + 1):
        for name, way in ways.items():
            begin = time.process_time()
            taken = together(way)
            if turn:  # the first one makes memory
                seconds[name].append(taken)
                processor[name].append(time.process_time() - begin)
    if rank == 0:
        count = sum(p.ds_numel for p in engine.module.parameters())
        print(
            f"{args.ranks} ranks, {count / 1e6:.0f} M parameters in bf16, {args.bucket} MiB a bucket"
            f"{', LoRA merged' if args.lora else ''}; medians of {args.rounds} rounds"
        )
        print("| | seconds | over the plain gather | processor seconds of a rank |\n|---|---|---|---|")
        for name, taken_by in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(taken_by, seconds["plain gather"], strict=True))
            of_processor = statistics.median(processor[name])
            print(f"| {name} | {statistics.median(taken_by):.3f} | {ratio:.2f} | {of_processor:.3f} |")
        if importlib.util.find_spec("deepspeed") is None:
            print("DeepSpeed is not installed here, so it is not measured.")
    zerolite.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("width", 768), ("layers", 12), ("bucket", 32), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=positive, default=default, help="(default: %(default)s)")
    parser.add_argument("--generate", action="store_true", help="measure generation; needs transformers")
    parser.add_argument("--lora", action="store_true", help="put adapters around all linear layers, and merge them")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(serve, args=(args, f"{folder}/store"), nprocs=args.ranks)


if __name__ == "__main__":
    main()
