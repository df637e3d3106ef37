"""One layer's causal attention over sequences that ranks divide, on the CPU: seconds, peak memory and bytes sent.

    python benchmarks/long_context.py --ranks 4 --tokens 8192

Beside zerolite's two ways, in one run and by turns:

- DeepSpeed's Ulysses, ``DistributedAttention``, where DeepSpeed is installed.
- torch's context_parallel. It has no attention for tensors on the CPU, so its ring is called with torch's kernel for
  the CPU, on tokens in the order of its load balancer, and with heads of key and value repeated.

Ratios are to the first row. The peak is that of all tensors that operations make on one rank, its query, key and value
left out; what gloo and shared memory hold from one call to the next is not in it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ranks import join_group, together
from benchmarks.setting import Setting
from benchmarks.tiled_loss import Peak
from zerolite.comm import Communicator, create_communicator
from zerolite.sequence_parallel.attention import to_heads
from zerolite.sequence_parallel.exchange import exchange
from zerolite.sequence_parallel.ring import Ring, attend_over_ring
from zerolite.sequence_parallel.visibility import Visibility

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def ulysses(comm: Communicator) -> Attention:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        states, _ = to_heads(comm, (query, key, value))
        out = F.scaled_dot_product_attention(*states, is_causal=True, enable_gqa=True)
        return exchange(out, comm, 2, 1)

    return attend


def ring(comm: Communicator) -> Attention:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        call = Ring(comm, Visibility(causal=True), query.shape[2], query.shape[3] ** -0.5, 0.0, 0)
        return attend_over_ring(call, (query, key, value))

    return attend


def deepspeed_ulysses() -> Attention:
    """Return DeepSpeed's attention. It takes tokens before heads, as the projections of a model make them."""
    from deepspeed import comm  # type: ignore[import-not-found]
    from deepspeed.sequence.layer import DistributedAttention  # type: ignore[import-not-found]

    def local(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        states = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return F.scaled_dot_product_attention(*states, is_causal=True, enable_gqa=True).transpose(1, 2)

    comm.init_distributed("gloo")
    layer = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeats = max(1, dist.get_world_size() // key.shape[1])
        key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
        states = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out: Tensor = layer(*states, batch_dim_idx=0)
        return out.transpose(1, 2)

    return attend


class _ContextParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = torchs._templated_ring_attention(dist.group.WORLD, 2, op, query, key, value, True)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

        query, key, value, out, lse = ctx.saved_tensors
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return torchs._templated_ring_attention_backward(
            dist.group.WORLD, 2, op, gradient, "grad_out", query, key, value, out, lse, True, dropout_p=0.0
        )


def torchs_context_parallel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    result: Tensor = _ContextParallel.apply(query, key, value)
    return result


def run(attend: Attention, states: list[Tensor], gradient: Tensor) -> None:
    for state in states:
        state.grad = None
    attend(*states).backward(gradient)


def serve(rank: int, args: argparse.Namespace, store: str) -> None:
    join_group(rank, Setting(world_size=args.ranks), store)
    comm = create_communicator(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, args.tokens, args.width) for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads)]
    whole = [torch.randn(shape, generator=generator, dtype=getattr(torch, args.dtype)) for shape in shapes]
    ways: dict[str, Attention] = {
        "torch's context_parallel": torchs_context_parallel,
        "zerolite, ulysses": ulysses(comm),
        "zerolite, ring": ring(comm),
    }
    if find_spec("deepspeed"):
        ways = {"DeepSpeed's Ulysses": deepspeed_ulysses(), **ways}
    wanted = F.scaled_dot_product_attention(*whole[:3], is_causal=True, enable_gqa=True)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, float] = {}
    for name, attend in ways.items():
        states, gradient, places = parts_of(whole, comm, name)
        with Peak() as first:
            run(attend, states, gradient)
            with torch.no_grad():
                difference = float((attend(*states) - wanted[:, :, places]).abs().max())
            assert difference < 1e-2, f"{name} differs by {difference}"
        for state in states:
            state.grad = None
        with Peak() as peak:
            peak.ignore_like(first)
            run(attend, states, gradient)
        most = torch.tensor(peak.peak / 2**20)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        peaks[name] = float(most)
    for _ in range(args.rounds):
        for name, attend in ways.items():
            states, gradient, _ = parts_of(whole, comm, name)
            seconds[name].append(together(lambda a=attend, s=states, g=gradient: run(a, s, g)))  # type: ignore[misc]
    if rank == 0:
        report(args, seconds, peaks)
    dist.destroy_process_group()


def parts_of(whole: list[Tensor], comm: Communicator, name: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return this rank's query, key, value and gradient, and the places of its tokens.

    In memory tokens come before heads, as the projections of a model make them.
    """
    places = torch.arange(whole[0].shape[2])
    if "context_parallel" in name:
        halves = places.chunk(2 * comm.world_size)
        places = torch.cat([halves[comm.rank], halves[2 * comm.world_size - 1 - comm.rank]])
    else:
        places = places.chunk(comm.world_size)[comm.rank]
    *states, gradient = (tensor[:, :, places].transpose(1, 2).contiguous().transpose(1, 2) for tensor in whole)
    return [state.requires_grad_() for state in states], gradient, places


def report(args: argparse.Namespace, seconds: dict[str, list[float]], peaks: dict[str, float]) -> None:
    heads = f"{args.heads} heads, {args.kv_heads} of key and value, of {args.width}"
    print(f"{args.tokens} tokens over {args.ranks} ranks, {heads}, {args.dtype}, {args.rounds} rounds")
    print("| | forward and backward, s | ratio | peak, MiB | ratio |\n|---|---|---|---|---|")
    first = next(iter(seconds))
    for name, times in seconds.items():
        ratio = statistics.median(one / other for one, other in zip(times, seconds[first], strict=True))
        print(
            f"| {name} | {statistics.median(times):.3f} | {ratio:.2f} | {peaks[name]:.1f} | "
            f"{peaks[name] / peaks[first]:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (("ranks", 4), ("tokens", 8192), ("heads", 8), ("kv-heads", 8), ("width", 64), ("rounds", 5))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="(default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(serve, (args, str(Path(folder) / "store")), nprocs=args.ranks)


if __name__ == "__main__":
    main()
