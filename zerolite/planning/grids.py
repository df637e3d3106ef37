"""Search for the grid of ranks with the shortest estimated step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from zerolite.config import ConfigError, ZeroliteConfig, load_config
from zerolite.planning.dry_run import Job, Outcome, older_objects_frozen, run_stages
from zerolite.planning.make import ConfigLike, bubble_of, check_arguments, job_of, parse_memory, plan_of_stages
from zerolite.planning.rank_grid import Grid, messages_between_nodes, ring_between_nodes
from zerolite.planning.result import Comparison, Plan, Stage, Traffic
from zerolite.planning.settings import Trials, with_blocks

_ONCE_A_STEP = "stats", "loss", "shared_gradients", "initial_sync"
"""Tags of collectives that run once a step, for any number of micro-batches."""


class Speeds(NamedTuple):
    """Assumed speeds of each device.

    Attributes:
        flops: operations per second.
        within: bytes per second sent to devices of the same node.
        between: bytes per second sent to other nodes.
    """

    flops: float = 150e12
    within: float = 150e9
    between: float = 12.5e9

    def seconds(self, flops: float, bubble: float, sent: float, across: float) -> float:
        """Return the seconds of a step in which nothing overlaps.

        Args:
            flops: operations of the rank.
            bubble: share of the step in which the rank waits.
            sent: bytes that the rank sends.
            across: bytes among them that go to other nodes.
        """
        return flops / self.flops / (1 - bubble) + (sent - across) / self.within + across / self.between


@dataclass(frozen=True)
class Candidate:
    """A grid with a ZeRO stage.

    Attributes:
        config: resolved for the grid.
        bubble: share of a step in which ranks of the pipeline wait.
        bound: lower bound of a step's seconds.
        states: lower bound of the bytes of model states on one rank.
    """

    grid: Grid
    stage: int
    config: ZeroliteConfig
    bubble: float
    bound: float
    states: int

    @property
    def name(self) -> str:
        return f"{self.grid}, stage {self.stage}"


class Blocks(NamedTuple):
    """Repeated blocks of a model.

    Attributes:
        number: number of blocks.
        block: share of the model's operations in the smallest block.
        other: share of the operations in the largest module outside the blocks.
    """

    number: int = 0
    block: float = 0.0
    other: float = 0.0

    def largest_stage(self, pipe: int) -> float:
        """Return a lower bound of the share of operations in the largest of ``pipe`` stages.

        Stages have complete blocks, and the first or the last stage has the largest other module too.
        """
        ends = range(1, self.number - pipe + 2) if pipe > 1 else ()  # possible numbers of blocks of that stage
        others = {end: -(-(self.number - end) // (pipe - 1)) for end in ends}
        return min((max(n * self.block, end * self.block + self.other) for end, n in others.items()), default=0.0)


_MANY = 8
"""Smallest number of blocks for which :class:`Blocks` bounds the largest stage."""


def _blocks(outcomes: Iterable[Outcome]) -> Blocks:
    """Find the longest ModuleList whose modules are of one class, and the shares of its blocks in the operations."""
    flops: Counter[str] = Counter()
    classes: dict[str, str] = {}
    for outcome in outcomes:
        flops.update(outcome.flops.of_modules if outcome.flops is not None else {})
        classes |= outcome.classes
    lists = [name for name, kind in classes.items() if kind == "ModuleList"]
    children = {path: [name for name in classes if name.rpartition(".")[0] == path] for path in lists}
    alike = [path for path, names in children.items() if names and len({classes[name] for name in names}) == 1]
    path = max(alike, key=lambda path: len(children[path]), default="")
    whole, names = sum(flops.values()), children.get(path, [])
    if len(names) < _MANY or not whole:
        return Blocks()
    blocks = [sum(n for name, n in flops.items() if f"{name}.".startswith(f"{block}.")) for block in names]
    rest = max((n for name, n in flops.items() if not name.startswith(f"{path}.")), default=0)
    return Blocks(len(names), min(blocks) / whole, rest / whole)


def _is_divided(config: ZeroliteConfig) -> bool:
    """Return True if every stage gets one part of consecutive complete blocks."""
    return config.pipeline.split == "auto" and config.pipeline.chunks_per_rank == 1


@older_objects_frozen()
def compare_grids(
    model_fn: Callable[[], torch.nn.Module],
    config: ConfigLike,
    world_size: int,
    *,
    batch: Callable[..., Any],
    device_memory: int | str,
    nodes: int = 1,
    device: str = "cuda",
    host_memory: int | str | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    speeds: Speeds | None = None,
) -> Comparison:
    """Plan grids of pipe × data × tensor ranks, and choose the one with the shortest step of those that fit.

    The time of a step is an estimate: computing, waiting in the bubble and sending, one after the other.

    - Every grid trains on as many samples in a step as ``config`` does at its own grid.
    - Tensor groups stay within a node.
    - ZeRO is the lowest of stages 1 to 3 that fits (1 with a pipeline, 0 with one data-parallel rank).
    - No dry run is made of grids whose model states alone do not fit, or that cannot be faster than one that fits.

    Args:
        speeds: assumed speeds of each device; default: :class:`Speeds`.

    Other arguments and errors are those of :func:`~zerolite.planning.make.plan`.
    """
    check_arguments(world_size, nodes, None, device)
    memory = parse_memory("device_memory", device_memory), parse_memory("host_memory", host_memory)

    def job(config: ZeroliteConfig) -> Job:
        return job_of(model_fn, config, world_size, nodes, 0, device, batch, loss)

    return _Search(job, load_config(config), world_size, nodes, memory, speeds or Speeds()).result()


class _Search:
    """Branch and bound: candidates are planned in the order of their lower bounds, until none can be faster than the
    best."""

    def __init__(
        self,
        job: Callable[[ZeroliteConfig], Job],
        config: ZeroliteConfig,
        world_size: int,
        nodes: int,
        memory: tuple[int | None, int | None],
        speeds: Speeds,
    ) -> None:
        self._job, self._config, self._world_size, self._nodes = job, config, world_size, nodes
        self._memory, self._speeds = memory, speeds
        self._trials = Trials()
        self._refused_grids: set[Grid] = set()  # refused by the engine
        self._tensor_seconds: dict[int, float] = {}  # seconds of tensor-parallel collectives, by number of tensor ranks
        self._boundary_bytes: float | None = None  # bytes per micro-batch from one pipeline stage to the next
        self._outcomes: dict[tuple[Grid, int], dict[int, Outcome]] = {}  # by grid and ZeRO stage, then pipeline stage
        base = job(config)  # the plan on the config's own grid has the bytes per parameter and the operations
        self._base = self._planned(base, range(base.grid.pipe))
        outcomes = self._outcomes[base.grid, base.config.zero_optimization.stage].values()
        self._blocks = _blocks(outcomes) if base.grid.tensor == 1 else Blocks()  # sharded layers count differently

    def result(self) -> Comparison:
        limit, rows = self._memory[0] or 0, self._trials.rows
        candidates = list(self._candidates())
        too_large = [one.name for one in candidates if one.states > limit]
        waiting = [one for one in candidates if one.states <= limit]
        while True:
            waiting = self._try_all(waiting)
            if self._confirm_best(candidates):
                break
        if not rows and self._trials.refused and not too_large:
            raise self._trials.refused[0][1]
        notes = []
        if too_large:
            notes.append(f"Not planned, because their model states alone do not fit: {'; '.join(too_large)}.")
        if waiting:
            number = f"{len(waiting)} more {'is' if len(waiting) == 1 else 'are'} not planned"
            notes.append(f"{number}, because computing, waiting and sending gradients alone take longer there.")
        return self._trials.comparison(0 if rows and rows[0][1].fits else None, notes, speeds=self._speeds)

    # ---------------------------------------------------------------- candidates

    def _candidates(self) -> Iterator[Candidate]:
        for tensor in _divisors(self._world_size // self._nodes):
            for pipe in _divisors(self._world_size // tensor):
                grid = Grid(pipe, self._world_size // (tensor * pipe), tensor)
                # Stage 0 is planned only for one data-parallel rank: it sends as much as stage 1 and holds more.
                for stage in (0,) if grid.data == 1 else (1,) if pipe > 1 else (1, 2, 3):
                    try:
                        yield self._candidate(grid, stage)
                    except (ConfigError, ValueError) as error:  # the batch or the schedule is impossible on this grid
                        self._trials.refused.append((f"{grid}, stage {stage}", error))

    def _candidate(self, grid: Grid, stage: int) -> Candidate:
        base, speeds = self._base, self._speeds
        samples = self._config.resolve(base.data_parallel).train_batch_size
        blocks = {"tensor_parallel": {"size": grid.tensor, "autotp_size": 0}, "pipeline": {"stages": grid.pipe}}
        config = with_blocks(self._config, zero_optimization={"stage": stage}, **blocks)
        sizes = {"train_batch_size": samples, "gradient_accumulation_steps": None}
        resolved = config.model_copy(update=sizes).resolve(grid.data)
        bubble = bubble_of(resolved, grid.pipe) if grid.pipe > 1 else 0.0
        numel = base.parameters / (grid.pipe * grid.tensor)
        weight, states = self._bytes_of_states
        share = {0: weight + states, 3: (weight + states) / grid.data}.get(stage, weight + states / grid.data)
        gradients = 2 * weight * numel * (grid.data - 1) / grid.data  # bytes of a reduce-scatter and an all-gather
        across = float(gradients * ring_between_nodes(grid, self._nodes, "data"))
        ranks: Sequence[Plan | Stage] = base.stages or [base]
        counts = [_flops(rank) for rank in ranks]  # the average over all ranks is the same for every grid
        largest = max(1.0, grid.pipe * self._blocks.largest_stage(grid.pipe)) if _is_divided(resolved) else 1.0
        computing = largest * sum(counts) / len(counts) / speeds.flops / (1 - bubble)
        return Candidate(grid, stage, resolved, bubble, computing + across / speeds.between, int(share * numel))

    @property
    def _bytes_of_states(self) -> tuple[float, float]:
        """Bytes per parameter of the compute weight, and of the states that stage 1 shards over the data ranks."""
        base = self._base
        numel, data = max(base.rank_parameters, 1), base.data_parallel
        weight = base.states["compute_parameters"] * (data if base.stage == 3 else 1) / numel
        states = base.states["master_weights"] + base.states["optimizer_states"]
        return weight, states * (data if base.stage else 1) / numel

    def _bound(self, one: Candidate) -> float:
        """Return the lower bound in seconds, with the traffic of earlier plans.

        A rank has the same tensor-parallel traffic on all grids with as many tensor ranks, because as many samples pass
        through as many layers. A pipeline's first stage sends activations to the second.
        """
        seconds = one.bound + self._tensor_seconds.get(one.grid.tensor, 0.0)
        if one.grid.pipe > 1 and self._boundary_bytes is not None:
            nbytes = self._boundary_bytes * (one.config.gradient_accumulation_steps or 1)
            across = nbytes * float(messages_between_nodes(one.grid, self._nodes, 0))
            seconds += self._speeds.seconds(0.0, 0.0, nbytes, across)
        return seconds

    # ---------------------------------------------------------------- search

    def _try_all(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Plan candidates in the order of their bounds. Return the ones that cannot be faster than the best."""
        waiting, slower = list(candidates), []
        while waiting:
            one = min(waiting, key=lambda one: (self._bound(one), one.stage))
            waiting.remove(one)
            fitting = [(name, plan) for name, plan in self._trials.rows if plan.fits]
            if any(name == str(one.grid) for name, _ in fitting) or self._is_refused(one.grid):
                continue  # a higher stage of ZeRO sends more
            if any((plan.seconds or 0.0) <= self._bound(one) for _, plan in fitting):
                slower.append(one)
            elif not self._trials.attempt(str(one.grid), one.name, self._row, one, sampled=True):
                self._refused_grids.add(one.grid)
        return slower

    def _is_refused(self, grid: Grid) -> bool:
        """Return True if the engine has refused the grid with another ZeRO stage, or its tensor size without a
        pipeline."""
        return any(other == grid or (other.tensor == grid.tensor and other.pipe == 1) for other in self._refused_grids)

    def _confirm_best(self, candidates: Sequence[Candidate]) -> bool:
        """Sort the rows, and plan all pipeline stages of the first row, until it stays the first.

        Return False if it does not fit then, so that another candidate may be the fastest.
        """
        by_name, rows = {(str(one.grid), one.stage): one for one in candidates}, self._trials.rows
        while True:
            rows.sort(key=lambda row: (not row[1].fits, row[1].seconds or 0.0))
            name, plan = rows[0] if rows else ("", None)
            if plan is None or not plan.fits or len(plan.stages) in (0, plan.pipeline_stages):
                return True
            rows[0] = name, self._row(by_name[name, plan.stage], sampled=False)
            if not rows[0][1].fits:
                return False

    def _row(self, one: Candidate, sampled: bool) -> Plan:
        """Plan a candidate, and use its tensor-parallel and pipeline traffic for the bounds of others.

        Args:
            one: the candidate.
            sampled: plan only three pipeline stages. The first has the most micro-batches in flight, the last has the
                head, and one stands for the others, which are alike.
        """
        pipe = one.grid.pipe
        plan = self._planned(self._job(one.config), sorted({0, pipe // 2, pipe - 1}) if sampled else range(pipe))
        ranks: Sequence[Plan | Stage] = plan.stages or [plan]
        sums = [_sums([row for row in rank.traffic if row.dimension == "tensor"]) for rank in ranks]
        least = min(self._speeds.seconds(0.0, 0.0, *each) for each in sums)
        self._tensor_seconds[one.grid.tensor] = min(least, self._tensor_seconds.get(one.grid.tensor, least))
        if pipe > 1:
            sent = sum(row.sent for row in ranks[0].traffic if row.op == "send")
            self._boundary_bytes = min(sent / plan.accumulation, self._boundary_bytes or float("inf"))
        update = {
            "parameters": self._base.parameters,
            "trained_parameters": self._base.trained_parameters,
            "bubble": one.bubble if pipe > 1 else None,
            "seconds": max(one.bound, *(self._speeds.seconds(_flops(r), one.bubble, *_sums(r.traffic)) for r in ranks)),
        }
        return plan.model_copy(update=update)

    def _planned(self, job: Job, stages: Sequence[int]) -> Plan:
        """Plan some pipeline ``stages`` from a step of fewer micro-batches, scaled to the real number."""
        short, times = _shortened(job)
        zero = job.config.zero_optimization.stage
        outcomes = self._outcomes.setdefault((job.grid, zero), {})
        outcomes |= run_stages(short, [stage for stage in stages if stage not in outcomes], 1)
        plan = plan_of_stages(short, {stage: outcomes[stage] for stage in stages}, self._nodes, *self._memory)
        update = {
            "accumulation": job.config.gradient_accumulation_steps or 1,
            **_scaled(plan, times, zero),
            "stages": [stage.model_copy(update=_scaled(stage, times, zero)) for stage in plan.stages],
        }
        return plan.model_copy(update=update)


def _shortened(job: Job) -> tuple[Job, Fraction]:
    """Return ``job`` with the fewest micro-batches that have the same peak, and the factor to the real number.

    With more micro-batches a schedule repeats itself, except GPipe, which keeps the activations of all of them.
    """
    steps, size = job.config.gradient_accumulation_steps or 1, job.config.train_micro_batch_size_per_gpu
    block, pipe = job.config.pipeline, job.grid.pipe
    few = {"gpipe": steps, "1f1b": pipe + 2}.get(block.schedule, 2 * pipe * block.chunks_per_rank)
    few = few if pipe > 1 else 2
    if steps <= few or size is None:
        return job, Fraction(1)
    sizes = {"gradient_accumulation_steps": few, "train_batch_size": size * few * job.grid.data}
    return replace(job, config=job.config.model_copy(update=sizes)), Fraction(steps, few)


def _scaled(rank: Plan | Stage, times: Fraction, stage: int) -> dict[str, Any]:
    """Return the fields that differ in a step with ``times`` as many micro-batches. ``stage`` is that of ZeRO."""
    flops = None if rank.flops is None else int(rank.flops * times)
    traffic = [row if times == 1 or _is_once(row, stage) else _scaled_traffic(row, times) for row in rank.traffic]
    return {"flops": flops, "recomputed_flops": int(rank.recomputed_flops * times), "traffic": traffic}


def _is_once(row: Traffic, stage: int) -> bool:
    """Return True if the collectives run once a step. ``stage`` is that of ZeRO."""
    if row.tag in _ONCE_A_STEP:
        return True
    return row.dimension == "data" and (stage < 2 or (stage == 2 and row.op == "all_gather"))


def _scaled_traffic(row: Traffic, times: Fraction) -> Traffic:
    amounts = {name: int(getattr(row, name) * times) for name in ("count", "nbytes", "sent")}
    across = None if row.inter_node is None else int(row.inter_node * times)
    return row.model_copy(update={**amounts, "inter_node": across})


def _flops(rank: Plan | Stage) -> int:
    """Return the operations of a rank in a step, recomputed ones included."""
    return (rank.flops or 0) + rank.recomputed_flops


def _sums(traffic: Sequence[Traffic]) -> tuple[int, int]:
    """Return the bytes that are sent, and the bytes among them that leave the node."""
    return sum(row.sent for row in traffic), sum(row.inter_node or 0 for row in traffic)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
