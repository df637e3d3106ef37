"""Time one AdamW update, and what a mixed-precision step does around it, beside torch, DeepSpeed and the memory's own.

    python benchmarks/adam.py                                   # 50 M parameters on the CPU
    python benchmarks/adam.py --numel 5000000 --rounds 15 --sections fp32,norm --markdown
    python benchmarks/adam.py --device cuda --numel 500000000   # the limit is a copy on the device

fp32: parameter, gradient and both moments in fp32. bf16: gradient bf16, master and moments fp32, weight bf16; zerolite
takes all of it in one call, others cast and unscale the gradient before their optimizer and cast the weight after it.
tensors: 1,000 tensors of 1,000 elements, in fp32: as segments of one buffer with rows of scalars in turn (so that no
two neighbours are one segment), as tensors of their own, and as one tensor of a million. norm: the sum of squares.

"limit" is no optimizer: on the CPU a loop in C that reads and writes the same fp32 arrays with one addition for each
that is written (-O3 -march=native, as many threads as torch), on CUDA a copy of as many bytes within the device, for
the norm torch's sum. GB/s are the bytes that must move at least, over the median time of a call: what a competitor
moves more than once counts once. All run in one process, in turns; the order turns around every round, and ratios are
medians over rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import harness
from benchmarks.report import positive, render_table
from zerolite.ops.library import why_unavailable
from zerolite.optim.update_rules import rule_of

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
SCALE = 1024.0  # the loss scale, in bf16
TURN_S = 0.1  # calls in a turn take about this long together
FP32_BYTES, BF16_BYTES = 28, 28  # an element: read p, g, m, v, write p, m, v; in bf16 g is 2 and the weight 2 more
SECTIONS = ("fp32", "bf16", "tensors", "norm")
COUNT, LENGTH = 1000, 1000  # of the section "tensors"
Call = Callable[[], object]


@dataclass(frozen=True)
class Contender:
    """``make`` allocates what is needed and returns one call of what is measured; ``bytes``: those that must move."""

    name: str
    bytes: int
    make: Callable[[], Call]


@dataclass(frozen=True)
class Row:
    """Times of one call. ``to_limit``: share of the limit's speed; ``to_first``: time over the first contender's."""

    name: str
    absent: str | None = None
    ms: float | None = None
    min_ms: float | None = None
    max_ms: float | None = None
    gb_s: float | None = None
    to_limit: float | None = None
    to_first: float | None = None


class Absent(Exception):
    """Why a contender does not take part."""


# ---------------------------------------------------------------- measuring


def contest(contenders: list[Contender], rounds: int, device: str) -> list[Row]:
    """The first contender is what ``to_first`` compares with, the one named "limit" is what ``to_limit`` does."""
    calls: dict[str, Call] = {}
    absent: dict[str, str] = {}
    for one in contenders:
        try:
            calls[one.name] = one.make()
            calls[one.name]()
        except Exception as error:  # of another library, of a compiler: it keeps its line, with the reason
            calls.pop(one.name, None)
            absent[one.name] = " ".join(str(error).split())[:160] or type(error).__name__
    repeats = {name: max(1, round(TURN_S / _seconds(call, 2, device))) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls) if number % 2 == 0 else list(calls)[::-1]:
            times[name].append(_seconds(calls[name], repeats[name], device))
    first = contenders[0].name
    return [_row(one, times.get(one.name), times.get("limit"), times.get(first), absent) for one in contenders]


def _seconds(call: Call, repeats: int, device: str) -> float:
    """Of one call, on average of several."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize()
    return (time.perf_counter() - start) / repeats


def _row(
    one: Contender,
    times: list[float] | None,
    limit: list[float] | None,
    first: list[float] | None,
    absent: dict[str, str],
) -> Row:
    if times is None:
        return Row(one.name, absent=absent[one.name])
    median = statistics.median(times)
    return Row(
        one.name,
        ms=1e3 * median,
        min_ms=1e3 * min(times),
        max_ms=1e3 * max(times),
        gb_s=one.bytes / median / 1e9,
        to_limit=_ratio(limit, times),
        to_first=_ratio(times, first),
    )


def _ratio(a: list[float] | None, b: list[float] | None) -> float | None:
    if a is None or b is None:
        return None
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------- who takes part


class Field:
    """The arrays that all contenders of a section share: parameter, gradient (also in bf16), weight in bf16."""

    def __init__(self, numel: int, device: str) -> None:
        self.numel, self.device = numel, device
        generator = torch.Generator(device).manual_seed(0)
        self.param = torch.randn(numel, generator=generator, device=device)
        self.grad = torch.randn(numel, generator=generator, device=device)
        self.small_grad = (self.grad * SCALE).bfloat16()
        self.weight = self.param.bfloat16()
        self.factor = torch.tensor(1.0 / SCALE, device=device)

    def zerolite(self, bf16: bool) -> Call:
        table = torch.tensor([[0, 0, self.numel, 0]])
        if not bf16:
            return zerolite_update([self.param], [self.grad], table, 1)
        return zerolite_update([self.param], [self.small_grad], table, 1, [self.weight], self.factor)

    def peer(self, make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], bf16: bool) -> Call:
        """An optimizer in fp32, and the passes that are needed around it with bf16."""
        param = torch.nn.Parameter(self.param)
        param.grad = torch.empty_like(self.grad) if bf16 else self.grad
        optimizer = make([param])
        if not bf16:
            return optimizer.step
        grad = param.grad

        @torch.no_grad()
        def step() -> None:
            grad.copy_(self.small_grad)
            grad.mul_(self.factor)
            optimizer.step()
            self.weight.copy_(param)

        return step

    def limit(self, total: int) -> Call:
        """``total``: bytes that move."""
        if self.device == "cuda":
            source = torch.empty(total // 2, dtype=torch.uint8, device=self.device)
            target = torch.empty_like(source)
            return lambda: target.copy_(source)
        return bare_loop([self.param, self.grad, torch.zeros_like(self.param), torch.zeros_like(self.param)])


def zerolite_update(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    table: torch.Tensor,
    rows: int,
    outs: list[torch.Tensor] | None = None,
    factor: torch.Tensor | None = None,
) -> Call:
    """One call of the operator; every row of scalars is the same."""
    reason = why_unavailable(params[0].device)
    if reason is not None:
        raise Absent(reason)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(params[0])], **OPTIONS)
    rule = rule_of(optimizer)
    assert rule is not None
    scalars = torch.tensor([rule.row(optimizer.param_groups[0], 10)] * rows)
    states = [[torch.zeros_like(p) for p in params] for _ in rule.states]
    skip = None if factor is None else torch.zeros_like(factor)
    return lambda: rule.launch(params, grads, states, outs or [], table, scalars, factor, skip)


def torch_fused(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True, **OPTIONS)


def deepspeed_cpu(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, adamw_mode=True, **OPTIONS)


def deepspeed_fused(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import FusedAdam

    return FusedAdam(params, adam_w_mode=True, set_grad_none=False, **OPTIONS)


def apex_fused(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    from apex.optimizers import FusedAdam

    return FusedAdam(params, adam_w_mode=True, set_grad_none=False, **OPTIONS)


def peers(device: str) -> dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]]:
    if device == "cuda":
        return {"torch fused": torch_fused, "DeepSpeed FusedAdam": deepspeed_fused, "apex FusedAdam": apex_fused}
    return {"torch fused": torch_fused, "DeepSpeed CPUAdam": deepspeed_cpu}


_LOOP = """
void loop(float *restrict p, const float *restrict g, float *restrict m, float *restrict v, long begin, long end) {
  for (long i = begin; i < end; i++) {
    const float x = g[i] * 1e-9f;
    m[i] += x;
    v[i] += x;
    p[i] += x;
  }
}
"""


def bare_loop(arrays: list[torch.Tensor]) -> Call:
    """Four arrays read, the first and the last two written; a share for each of torch's threads."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise Absent("no C compiler")
    with tempfile.TemporaryDirectory(prefix="zerolite-adam-") as directory:
        source, library = Path(directory, "loop.c"), Path(directory, "loop.so")
        source.write_text(_LOOP, encoding="utf-8")
        command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        loop = ctypes.CDLL(str(library)).loop
    loop.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 2
    loop.restype = None
    threads, numel = torch.get_num_threads(), arrays[0].numel()
    addresses = [tensor.data_ptr() for tensor in arrays]
    bounds = [numel // 16 * i // threads * 16 for i in range(threads)] + [numel]
    team = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def call() -> object:
        waiting = [team.submit(loop, *addresses, *bounds[i : i + 2]) for i in range(1, threads)] if team else []
        loop(*addresses, *bounds[:2])
        return arrays, [one.result() for one in waiting]  # which keeps the arrays alive

    return call


# ---------------------------------------------------------------- sections


def update_section(numel: int, device: str, bf16: bool) -> list[Contender]:
    field, total = Field(numel, device), numel * (BF16_BYTES if bf16 else FP32_BYTES)
    found = [Contender("zerolite", total, lambda: field.zerolite(bf16))]
    for name, make in peers(device).items():
        title = f"cast, unscale, {name}, cast" if bf16 else name
        found.append(Contender(title, total, lambda make=make: field.peer(make, bf16)))  # type: ignore[misc]
    return [*found, Contender("limit", total, lambda: field.limit(total))]


def tensors_section(device: str) -> list[Contender]:
    def arrays(shapes: list[int]) -> list[torch.Tensor]:
        return [torch.randn(n, device=device) for n in shapes]

    def ours(shapes: list[int], table: torch.Tensor, rows: int) -> Call:
        return zerolite_update(arrays(shapes), arrays(shapes), table, rows)

    def torchs(shapes: list[int]) -> Call:
        params = [torch.nn.Parameter(p) for p in arrays(shapes)]
        for p in params:
            p.grad = torch.randn_like(p)
        return torch_fused(list(params)).step

    one, many, total = [COUNT * LENGTH], [LENGTH] * COUNT, COUNT * LENGTH * FP32_BYTES
    whole = torch.tensor([[0, 0, COUNT * LENGTH, 0]])
    segments = torch.tensor([[0, i * LENGTH, LENGTH, i % 2] for i in range(COUNT)])
    apart = torch.tensor([[i, 0, LENGTH, 0] for i in range(COUNT)])
    return [
        Contender("zerolite, one tensor of a million", total, lambda: ours(one, whole, 1)),
        Contender("zerolite, 1,000 segments of a buffer", total, lambda: ours(one, segments, 2)),
        Contender("zerolite, 1,000 tensors", total, lambda: ours(many, apart, 1)),
        Contender("torch fused, one tensor of a million", total, lambda: torchs(one)),
        Contender("torch fused, 1,000 tensors", total, lambda: torchs(many)),
    ]


def norm_section(numel: int, device: str) -> list[Contender]:
    grad = torch.randn(numel, device=device)
    sums = torch.zeros(1, dtype=torch.float64, device=device)
    table = torch.tensor([[0, 0, numel, 0]])

    def in_double() -> torch.Tensor:
        return torch.linalg.vector_norm(grad, dtype=torch.float64)

    def ours() -> Call:
        reason = why_unavailable(grad.device)
        if reason is not None:
            raise Absent(reason)
        return lambda: torch.ops.zerolite.squares_(sums, [grad], table)

    return [
        Contender("zerolite, in double", 4 * numel, ours),
        Contender("torch foreach_norm, in fp32", 4 * numel, lambda: lambda: torch._foreach_norm([grad])),
        Contender("torch vector_norm, in double", 4 * numel, lambda: in_double),
        Contender("limit", 4 * numel, lambda: grad.sum),
    ]


def section(name: str, numel: int, device: str) -> list[Contender]:
    if name == "tensors":
        return tensors_section(device)
    return norm_section(numel, device) if name == "norm" else update_section(numel, device, name == "bf16")


# ---------------------------------------------------------------- the command


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--numel", type=positive, default=50_000_000, help="elements (default: 50 million)")
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"comma-separated, of: {', '.join(SECTIONS)}")
    args = parser.parse_args(argv)
    args.sections = harness.pick(parser, "--sections", args.sections, SECTIONS)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    return args


def describe(args: argparse.Namespace) -> str:
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    return (
        f"{args.numel:,} elements on {args.device} ({where}), {torch.get_num_threads()} threads, {args.rounds} rounds, "
        f"torch {torch.__version__}"
    )


def columns(name: str) -> Iterator[tuple[str, str, str]]:
    yield name, "name", "{}"
    yield "ms", "ms", "{:.2f}"
    yield "min", "min_ms", "{:.2f}"
    yield "max", "max_ms", "{:.2f}"
    yield "GB/s", "gb_s", "{:.1f}"
    yield "of limit", "to_limit", "{:.2f}"
    yield "x first", "to_first", "{:.2f}"


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    print(describe(args))
    results: dict[str, list[Row]] = {}
    for name in args.sections:
        results[name] = contest(section(name, args.numel, args.device), args.rounds, args.device)
        print(f"\n{render_table(results[name], args.markdown, tuple(columns(name)))}", flush=True)
    rows = {name: [asdict(row) for row in found] for name, found in results.items()}
    harness.write_json(args, setting=vars(args), description=describe(args), results=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
