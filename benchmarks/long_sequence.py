"""Train a Llama on long sequences: checkpointed blocks, flash attention, offload; tokens per second and memory.

    python benchmarks/long_sequence.py --size 1b --lengths 32768,65536 --offload none,optimizer,all
    python benchmarks/long_sequence.py --device cpu --size tiny --lengths 256

One process and device, bf16, stage 3, a sequence a step. Every block is checkpointed by `zerolite.checkpointing`, whose
inputs go to the host with `--offload all`, as do parameters and optimizer. The loss is computed in checkpointed pieces
of the sequence, so that the logits of a long one take no memory. Lengths run in their order until the time is up or the
memory is. "MFU" is of `--tflops`: 6 operations a parameter and token and causal attention, without recomputation.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import zerolite
from benchmarks import options

PIECE = 2048  # tokens whose logits exist at a time


@dataclass(frozen=True)
class Size:
    """Shape of a Llama."""

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocab: int


SIZES = {
    "tiny": Size(2, 64, 4, 2, 128, 256),
    "1b": Size(16, 2048, 32, 8, 8192, 128256),
    "3b": Size(28, 3072, 24, 8, 8192, 128256),
    "8b": Size(32, 4096, 32, 8, 14336, 128256),
}
PLACES: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "all": {
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
}


class Block(nn.Module):
    """`(1, time, width)` and the rotation of each position -> `(1, time, width)`."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size, self.head_width = size, size.width // size.heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key_value = nn.Linear(size.width, 2 * size.key_heads * self.head_width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attend(self.norm_attention(x), cosine, sine)
        y = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attend(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

        keys, values = self.key_value(x).chunk(2, -1)
        query, key = (rotate(heads(y), cosine, sine) for y in (self.query(x), keys))
        groups = self.size.heads // self.size.key_heads
        key, value = (y.repeat_interleave(groups, 1) for y in (key, heads(values)))
        return self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


class Llama(nn.Module):
    """`forward(tokens, targets)`, both `(1, time)`, gives the mean cross-entropy."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_width = size.width // size.heads
        self.embedding = nn.Embedding(size.vocab, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        positions = torch.arange(tokens.shape[1], device=x.device)
        powers = torch.arange(0, self.head_width, 2, device=x.device) / self.head_width
        angles = positions[:, None] / 5e5**powers
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = zerolite.checkpointing.checkpoint(block, x, cosine, sine)
        pieces = zip(self.norm(x).split(PIECE, 1), targets.split(PIECE, 1), strict=True)
        total = sum(torch_checkpoint(self.piece, *piece, use_reentrant=False) for piece in pieces)
        return total / targets.numel()

    def piece(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten(), reduction="sum")


def make_engine(size: Size, place: str, device: str) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, **PLACES[place]},
        "activation_checkpointing": {"cpu_checkpointing": place == "all"},
    }
    with torch.device(device), zerolite.zero.Init(config_dict_or_path=config):
        model = Llama(size)
    return zerolite.initialize(model, config)


def measure(engine: Any, size: Size, length: int, steps: int, device: str) -> dict[str, Any]:
    """Train a step, then `steps` with the time taken."""
    cuda = device == "cuda"
    tokens = torch.randint(size.vocab, (1, length + 1), generator=torch.Generator().manual_seed(1)).to(device)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
    losses, seconds = [], []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(1 + steps):
        start = time.perf_counter()
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    step_s = sum(seconds[1:]) / steps
    matrices = sum(p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in engine.parameters())
    matrices -= size.vocab * size.width  # looked up, not multiplied
    flops = length * (6 * matrices + 6 * size.layers * length * size.width)
    return {
        "length": length,
        "step_s": round(step_s, 3),
        "first_step_s": round(seconds[0], 3),
        "tokens_per_s": round(length / step_s),
        "tflops": round(flops / step_s / 1e12, 1),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if cuda else None,
        "losses": losses,
    }


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--lengths", type=options.positives, default=[32768])
    options.add_choice(parser, "--offload", PLACES)
    parser.add_argument("--steps", type=options.positive, default=2, help="timed steps of each length")
    parser.add_argument("--seconds", type=options.positive, default=600, help="no length begins later than that")
    parser.add_argument("--tflops", type=float, default=989.0, help="of the device, for MFU")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    begin, size = time.perf_counter(), SIZES[args.size]
    backend = SDPBackend.FLASH_ATTENTION
    for place in args.offload:
        start = time.perf_counter()
        engine = make_engine(size, place, args.device)
        made_s = round(time.perf_counter() - start, 1)
        for length in args.lengths:
            if time.perf_counter() - begin > args.seconds:
                break
            row: dict[str, Any] = {"size": args.size, "offload": place, "made_s": made_s, "length": length}
            try:
                with sdpa_kernel(backend):
                    row |= measure(engine, size, length, args.steps, args.device)
                row["mfu"] = round(row["tflops"] / args.tflops, 3)
            except torch.OutOfMemoryError as error:
                row["failed"] = str(error).split(".")[0]
            print(json.dumps(row), flush=True)
            if "failed" in row:
                break
        del engine
        gc.collect()
        zerolite.destroy()
    return 0


if __name__ == "__main__":
    sys.exit(main())
