"""Every grid of pipeline stages, data-parallel and tensor-parallel ranks through ``zerolite.initialize``, against plain
PyTorch in one process on the joint batch: loss, gradient norm and parameters of 10 steps."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.cases import grid as cases
from tests.distributed.cases.grid import Grid, grids, on_grid
from tests.toolkit import models, reference
from tests.toolkit.configs import PARTITIONED, SGD, STATIC_SCALE, Optimizer, config
from tests.toolkit.pool import Pools
from zerolite.pipe.schedules import available_schedules

CASES = "tests.distributed.cases.grid"
STEPS, CLIP = 10, 0.4

# Adam divides by the root of the second moment: where a gradient is zero in theory (the bias of a key), it makes a step
# of lr out of rounding. An eps beside which rounding is small, 1e-7 × 1, leaves rounding what it is.
ADAMW: Optimizer = ("AdamW", {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, "eps": 1e-2})
OPTIMIZERS = {"SGD": SGD, "AdamW": ADAMW}

# fp32: sums are regrouped, as in test_parity: a few units in the last place (6e-8) of the largest summand.
FP32 = 1e-6

# 16 bits. A pipeline rounds where one process does, and has its bits, unless a weight is tied over two stages: the two
# gradients of a micro-batch are then not added in 16 bits, but in fp32 once a step. Rows of tensor parallelism add
# products that were rounded to 16 bits each, and data-parallel ranks sum in another order. So results have as much
# rounding in them as those of one process in 16 bits, but another one: their distance from these is that of two
# independent errors of the same size, the square root of two times the distance of these from fp32. Measured: 0.2 to
# 1.15 times; and at most 2^-9 and 2^-7 of losses and norms in bf16.
APART = 1.5
LOSS = {"bf16": 2.0**-8, "fp16": 2.0**-11}
NORM = {"bf16": 2.0**-6, "fp16": 2.0**-9}

# tied, clip, accumulation
OPTIONS = [(True, CLIP, 4), (False, 0.0, 2), (True, 0.0, 2), (False, CLIP, 4)]


def batches(steps: int, accumulation: int, data: int) -> list[list[list[Any]]]:
    """[step][micro][data rank]"""
    return [
        list(zip(*(cases.micro_batches(step, accumulation, rank) for rank in range(data)), strict=True))
        for step in range(steps)
    ]


@functools.cache
def expected(
    data: int, precision: str, tied: bool, clip: float, accumulation: int, optimizer: str = "SGD"
) -> reference.Trajectory:
    model = models.build(cases.Gpt, tied=tied)
    scale = STATIC_SCALE if precision == "fp16" else 1.0
    window = batches(STEPS, accumulation, data)
    return reference.train(model, cases.loss_of, window, precision, OPTIMIZERS[optimizer], clip, scale)


@functools.cache
def accumulated(tied: bool, clip: float, accumulation: int) -> reference.Trajectory:
    """Plain PyTorch whose gradients are added micro-batch by micro-batch, as in the usual loop."""
    model = models.build(cases.Gpt, tied=tied)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = reference.make_optimizer(SGD[0], trained, SGD[1])
    wanted = reference.Trajectory()
    for window in batches(STEPS, accumulation, 1):
        optimizer.zero_grad()
        losses = []
        for (batch,) in window:
            loss = model(*batch)
            (loss / accumulation).backward()
            losses.append(loss.detach())
        wanted.losses.append(torch.stack(losses).mean().item())
        gradients = [p.grad for p in trained if p.grad is not None]
        wanted.norms.append(reference.global_norm(gradients))
        if clip and wanted.norms[-1] > clip:
            for gradient in gradients:
                gradient.mul_(clip / (wanted.norms[-1] + 1e-6))
        optimizer.step()
    wanted.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return wanted


def flat(parameters: dict[str, Tensor], names: Any) -> Tensor:
    return torch.cat([parameters[name].detach().float().flatten() for name in names])


def worst(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference and where it is."""
    differences = [(float((one[n].float() - v).abs().max()), n) for n, v in other.items() if v.numel()]
    return max(differences)


def assert_ranks_agree(ranks: list[dict[str, Any]]) -> None:
    """Assert that values that several ranks hold have the same bits, and that all ranks say the same of the whole."""
    held: dict[Any, Any] = {}
    for rank in ranks:
        for kind in ("losses", "norms", "counters"):
            if kind in rank:
                assert rank[kind] == ranks[0][kind], f"{kind} of {rank['place']}"
        pipe, _, tensor = rank["place"]
        for name, (cut, value) in rank["held"].items():
            known = held.setdefault((pipe, name, tensor if cut else None), value)
            assert known == value, f"{name} of {rank['place']} has other bits"


def assert_matches(ranks: list[dict[str, Any]], run: dict[str, Any], precision: str) -> None:
    pipe, data, tensor = run["grid"]
    tied, clip, accumulation, optimizer = run["options"]
    assert_ranks_agree(ranks)
    got = ranks[0]
    wanted = expected(data, precision, tied, clip, accumulation, optimizer)
    assert got["counters"][:2] == (STEPS, 0)
    names = set(wanted.parameters) | ({"head.weight"} if tied else set())
    assert set(got["parameters"]) == names
    assert not tied or torch.equal(got["parameters"]["head.weight"], got["parameters"]["embed.weight"])
    if precision == "fp32":
        assert got["losses"] == pytest.approx(wanted.losses, rel=FP32)
        assert got["norms"] == pytest.approx(wanted.norms, rel=FP32)
        assert worst(got["parameters"], wanted.parameters) < (FP32, "")
        if data == tensor == 1 and optimizer == "SGD":
            assert_same_losses(got, accumulated(tied, clip, accumulation), tied)
        return
    whole = expected(data, "fp32", tied, clip, accumulation, optimizer)
    exact = data == tensor == 1 and not (tied and pipe > 1)
    assert got["losses"] == pytest.approx(wanted.losses, rel=FP32 if exact else LOSS[precision])
    assert got["norms"] == pytest.approx(wanted.norms, rel=FP32 if exact else NORM[precision])
    trained = [name for name in wanted.masters if "unused" not in name and "frozen" not in name]
    mine, theirs = flat(got["parameters"], trained), flat(wanted.masters, trained)
    assert (mine - theirs).norm() <= (0.0 if exact else APART) * (theirs - flat(whole.masters, trained)).norm()


def assert_same_losses(got: dict[str, Any], wanted: reference.Trajectory, tied: bool) -> None:
    """Micro-batches one after another: the same sums in the same order, to the bit. The gradient of a tied weight is
    summed by stages first, so that only the first step's loss is."""
    steps = 1 if tied else STEPS
    assert got["losses"][:steps] == wanted.losses[:steps]
    if not tied:
        assert got["norms"] == pytest.approx(wanted.norms, rel=1e-14)
        same = {name: torch.equal(got["parameters"][name], value) for name, value in wanted.parameters.items()}
        assert all(same.values()), [name for name, equal in same.items() if not equal]


def run(grid: Grid, stage: int, precision: str, options: Any, sequence: bool = False, **pipeline: Any) -> Any:
    tied, clip, accumulation, optimizer = (*options, "SGD")[:4]
    zero = PARTITIONED["moving"] if stage == 3 else None
    settings = config(stage, precision, accumulation, clip, OPTIMIZERS[optimizer], zero)
    settings = on_grid(settings, grid, sequence, **pipeline)
    return {"config": settings, "grid": grid, "steps": STEPS, "tied": tied, "options": (*options, "SGD")[:4]}


def check(pools: Pools, runs: dict[str, dict[str, Any]], precision: str, timeout: float = 120) -> None:
    pipe, data, tensor = next(iter(runs.values()))["grid"]
    kwargs = {name: {k: v for k, v in given.items() if k != "options"} for name, given in runs.items()}
    ranks = pools(pipe * data * tensor).run(f"{CASES}:train_many", {"runs": kwargs}, timeout=timeout)
    for name, given in runs.items():
        try:
            assert_matches([results[name] for results in ranks], given, precision)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


# ---------------------------------------------------------------- the fast ones, one for each grid


@pytest.mark.fast("grid0-1-bf16-False", "grid1-3-fp32-True")
@pytest.mark.parametrize(
    ("grid", "stage", "precision", "sequence"),
    [
        ((2, 1, 1), 1, "bf16", False),
        ((1, 1, 2), 3, "fp32", True),
        ((2, 1, 2), 1, "fp32", True),
    ],
)
def test_a_grid_matches_plain_pytorch(pools: Pools, grid: Grid, stage: int, precision: str, sequence: bool) -> None:
    check(pools, {"": run(grid, stage, precision, (True, CLIP, 2), sequence)}, precision)


# ---------------------------------------------------------------- all of them


def matrix() -> Iterator[Any]:
    for world in (1, 2, 4):
        for grid in grids(world):
            for precision in ("fp32", "bf16", "fp16"):
                yield pytest.param(grid, precision, id=f"{'x'.join(map(str, grid))}-{precision}")


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "precision"), list(matrix()))
def test_every_grid_matches_plain_pytorch(pools: Pools, grid: Grid, precision: str) -> None:
    pipe, _, tensor = grid
    runs = {}
    number = sum(grid) + len(precision)
    for stage in (0, 1) if pipe > 1 else (0, 1, 2, 3):
        for sequence in (False, True) if tensor > 1 else (False,):
            chosen = OPTIONS if tensor == 1 else [OPTIONS[(number := number + 1) % len(OPTIONS)]]
            for options in chosen:
                if pipe == 4 and options[2] < 4:
                    options = (*options[:2], 4)  # 1F1B has as many micro-batches as stages at least
                name = f"stage {stage}, sequence {sequence}, {options}"
                runs[name] = run(grid, stage, precision, options, sequence)
    if precision == "fp32":
        for stage in (1,) if pipe > 1 else (1, 3):
            runs[f"AdamW, stage {stage}"] = run(grid, stage, precision, (True, CLIP, 4, "AdamW"), tensor > 1)
    check(pools, runs, precision, 240)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [name for name in available_schedules() if name != "1f1b"])
@pytest.mark.parametrize("grid", [(2, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_every_schedule_matches_plain_pytorch(pools: Pools, grid: Grid, schedule: str) -> None:
    runs = {
        f"{tied}": run(grid, 1, "fp32", (tied, CLIP, 4), grid[2] > 1, schedule=schedule, partition_method="uniform")
        for tied in (True, False)
    }
    check(pools, runs, "fp32")


# ---------------------------------------------------------------- what travels

TOKENS, HIDDEN = 2 * 8, 2 * 8 * cases.WIDTH  # of a micro-batch; elements of its hidden states
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}


def traffic(pools: Pools, grid: Grid, precision: str, count: int, **more: Any) -> list[Counter[Any]]:
    """Count the calls of a step of ``count`` micro-batches on each rank."""
    tied, sequence = more.pop("tied", False), more.pop("sequence", False)
    settings = on_grid(config(0, precision, count, CLIP), grid, sequence, **more)
    ranks = pools(grid[0] * grid[1] * grid[2]).run(f"{CASES}:traffic", {"config": settings, "tied": tied})
    return [Counter(calls) for calls in ranks]


STATISTICS = 4 * 8  # bytes: squares, and votes


def of_tensor(sequence: bool, precision: str, count: int) -> Counter[Any]:
    """A layer has two all-reduces in forward and two in backward; with sequence parallelism a reduce-scatter and an
    all-gather in place of each. Beside the layers: the embedding's sum and the head's (then: where the sequence is cut
    and put together), and the cross entropy's, of a maximum and of two sums for each token, in fp32."""
    width = WIDTHS[precision]
    layers = 4 * cases.LAYERS * count
    halves = [("reduce_scatter", layers), ("all_gather", layers + 2 * count)]
    hidden = [*halves, ("all_reduce", 2 * count)] if sequence else [("all_reduce", layers + 2 * count)]
    calls = Counter({(op, "tensor", "tensor", HIDDEN, HIDDEN * width): number for op, number in hidden})
    calls["all_reduce", "tensor", "tensor", TOKENS, 4 * TOKENS] = count
    calls["all_reduce", "tensor", "tensor", 2 * TOKENS, 4 * 2 * TOKENS] = count
    return calls


def assert_travels(found: Counter[Any], wanted: Counter[Any], once: set[tuple[str, str]]) -> None:
    """Exactly ``wanted``, and what a step adds, once each: (op, tag)."""
    rest = found - wanted
    assert not wanted - found, f"missing: {wanted - found}"
    per_step = Counter((op, tag) for (op, tag, _, _, _) in rest.elements() if tag != "control")
    assert dict(per_step) == dict.fromkeys(once, 1), rest


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("sequence", [False, True])
def test_what_a_layer_sends_in_tensor_parallelism(pools: Pools, sequence: bool, precision: str) -> None:
    once = {("all_reduce", "stats")} | ({("all_reduce", "shared_gradients")} if sequence else set())
    for found in traffic(pools, (1, 1, 2), precision, 2, sequence=sequence):
        assert_travels(found, of_tensor(sequence, precision, 2), once)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_stages_send(pools: Pools, precision: str) -> None:
    """Hidden states forwards, their gradients backwards, over each boundary once for each micro-batch."""
    nbytes = HIDDEN * WIDTHS[precision]
    for schedule, boundaries in (("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 3)):
        wanted = Counter({(op, "pipe", "pipe", HIDDEN, nbytes): 4 * boundaries for op in ("send", "receive")})
        for tied in (False, True):
            once = {("all_reduce", "stats"), ("all_reduce", "loss")}
            once |= {("all_reduce", "shared_gradients")} if tied else set()
            chosen = {} if schedule == "1f1b" else {"schedule": schedule, "partition_method": "uniform"}
            for found in traffic(pools, (2, 1, 1), precision, 4, tied=tied, **chosen):
                assert_travels(found, wanted, once)


# ---------------------------------------------------------------- memory


def sizes_here(grid: Grid, place: tuple[int, int, int]) -> tuple[list[int], int]:
    """Elements of the trained parameters of a rank in the order of registration, and of all frozen ones."""
    pipe, _, tensor = grid
    width, hidden, words = cases.WIDTH, cases.HIDDEN // tensor, -(-models.VOCABULARY // tensor)
    norms, attention = 4 * [width], [3 * width * width // tensor, 3 * width // tensor, width * width // tensor, width]
    block = [1, 0, 3, *norms, *attention, width * hidden, hidden, hidden * width, width]
    here = cases.LAYERS // pipe
    first = [8 * width, words * width] if place[0] == 0 else []
    last = [width, width, words * width, words] if place[0] == pipe - 1 else []
    return [*first, *(numel for _ in range(here) for numel in block), *last], here * width * width


def flat_elements(numels: list[int], data: int, most: int = 100) -> int:
    """Return the elements of buckets with at most ``most`` elements or one parameter: see test_memory_report."""
    ends, end = [], 0
    for numel in reversed(numels):
        start = -(-end // 32) * 32
        if end and start + numel > most:
            ends.append(end)
            start = 0
        end = start + numel
    return sum(-(-end // (32 * data)) * 32 * data for end in [*ends, end])


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(1, 1, 2), (2, 1, 1), (1, 2, 2), (2, 2, 1), (2, 1, 2), (1, 1, 4), (4, 1, 1)])
def test_states_to_the_byte(pools: Pools, grid: Grid) -> None:
    for stage, precision in ((0, "fp32"), (1, "bf16"), (1, "fp16")):
        settings = on_grid(config(stage, precision, 4, CLIP, SGD), grid)
        ranks = pools(grid[0] * grid[1] * grid[2]).run(f"{CASES}:memory", {"config": settings, "tied": False})
        for place, found in ranks:
            numels, frozen = sizes_here(grid, place)
            trained = flat_elements(numels, grid[1])
            owned = trained if stage == 0 else trained // grid[1]
            wanted = {"compute_parameters": WIDTHS[precision] * (trained + frozen), "optimizer_states": 4 * owned}
            wanted |= {"gradients": 4 * trained} if stage == 0 else {}
            wanted |= {} if precision == "fp32" else {"master_weights": 4 * owned}
            assert {name: nbytes for name, nbytes in found.items() if name != "communication_buckets"} == wanted


@pytest.mark.slow
def test_fewer_micro_batches_are_alive_in_1f1b(pools: Pools) -> None:
    most = {}
    for schedule in ("gpipe", "1f1b"):
        for stages in (2, 4):
            settings = on_grid(config(1, "fp32", 8, CLIP), (stages, 1, 1), schedule=schedule)
            most[schedule, stages] = pools(stages).run(f"{CASES}:in_flight", {"config": settings})
    assert most == {
        ("gpipe", 2): [8, 8],
        ("gpipe", 4): [8, 8, 8, 8],
        ("1f1b", 2): [2, 1],
        ("1f1b", 4): [4, 3, 2, 1],
    }
