"""Ranking of grids of ranks for a model and a cluster by estimated step time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from zerolite.config import ConfigError, ZeroliteConfig, load_config
from zerolite.planning.bubble import bubble
from zerolite.planning.dry_run import Job, Outcome, older_objects_kept, run, run_stages
from zerolite.planning.errors import RefusedError
from zerolite.planning.make import (
    ConfigLike,
    check_places,
    job_of,
    left_out_lines,
    orders_of,
    parsed,
    plan_of_stages,
)
from zerolite.planning.places import Grid, ring_between_nodes
from zerolite.planning.result import Comparison, Plan, Stage, Traffic
from zerolite.planning.settings import with_blocks

_ONCE = "stats", "loss", "shared_gradients", "initial_sync"
"""Purposes of what is sent once a step, however many micro-batches there are."""


class Speeds(NamedTuple):
    """Assumed speeds of each device: operations a second, and bytes a second that it sends to others of its node and to
    other nodes."""

    flops: float = 150e12
    within: float = 150e9
    between: float = 12.5e9

    def seconds(self, flops: float, waiting: float, traffic: Sequence[Traffic]) -> float:
        """Return the time of a step, where nothing overlaps. waiting: the share of the bubble."""
        across = sum(entry.inter_node or 0 for entry in traffic)
        inside = sum(entry.sent for entry in traffic) - across
        return flops / self.flops / (1 - waiting) + inside / self.within + across / self.between


@dataclass(frozen=True)
class Candidate:
    """A grid with a ZeRO stage.

    Attributes:
        bound: seconds that a step takes at least.
        states: bytes that model states take at least on one rank.
    """

    grid: Grid
    stage: int
    config: ZeroliteConfig  # resolved
    waiting: float
    bound: float
    states: int

    @property
    def name(self) -> str:
        return f"{self.grid}, stage {self.stage}"


@older_objects_kept()
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
    """Plans of grids of pipe × data × tensor ranks, and which of those that fit takes the shortest step by an estimate:
    computing, waiting in the bubble and sending one after the other, at ``speeds`` (default: :class:`Speeds`).

    Every grid trains on as many samples in a step as ``config`` says at its own grid. Tensor groups stay within a node.
    ZeRO is the lowest stage of 1 to 3 that fits (1 at most with a pipeline). Left out without a dry run is what cannot
    fit, as its model states alone are too large, and what cannot be faster than one that fits. Arguments as for
    :func:`~zerolite.planning.make.plan`, raises what it does.
    """
    check_places(world_size, nodes, None, device)
    search = _Search(
        model_fn,
        load_config(config),
        world_size,
        nodes,
        device,
        (parsed("device_memory", device_memory), parsed("host_memory", host_memory)),
        batch,
        loss,
        speeds or Speeds(),
    )
    return search.result()


class _Search:
    """Branch and bound: the candidates in the order of their bounds, until none can be faster than the best."""

    def __init__(
        self,
        model_fn: Callable[[], torch.nn.Module],
        config: ZeroliteConfig,
        world_size: int,
        nodes: int,
        device: str,
        memory: tuple[int | None, int | None],
        batch: Callable[..., Any],
        loss: Callable[..., torch.Tensor] | None,
        speeds: Speeds,
    ) -> None:
        self._config, self._world_size, self._nodes = config, world_size, nodes
        self._memory, self._speeds = memory, speeds

        def job(config: ZeroliteConfig) -> Job:
            return job_of(model_fn, config, world_size, nodes, 0, device, batch, loss)

        self._job = job
        self._rows: list[tuple[str, Plan]] = []
        self._refused: list[tuple[str, Exception]] = []
        self._of_tensor: dict[int, float] = {}  # seconds, by the number of tensor ranks
        self._outcomes: dict[tuple[Grid, int], dict[int, Outcome]] = {}  # by grid and stage of ZeRO; pipeline stages
        self._base = self._plan_base()

    def result(self) -> Comparison:
        limit = self._memory[0] or 0
        candidates = list(self._candidates())
        too_large = [one for one in candidates if one.states > limit]
        waiting = [one for one in candidates if one.states <= limit]
        while True:
            waiting = self._try_all(waiting)
            if self._settle(candidates):
                break
        chosen = 0 if self._rows and self._rows[0][1].fits else None
        if not self._rows and self._refused and not too_large:
            raise self._refused[0][1]
        notes = [*left_out_lines(self._refused), *_counted(too_large, len(waiting))]
        return Comparison(rows=self._rows, chosen=chosen, left_out=notes, speeds=self._speeds)

    def _try_all(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Try all, and return those that cannot be faster than the best."""
        waiting, slower = list(candidates), []
        while waiting:
            one = min(waiting, key=lambda one: (self._bound(one), one.stage))
            waiting.remove(one)
            fitting = [(name, plan) for name, plan in self._rows if plan.fits]
            if any(name == str(one.grid) for name, _ in fitting) or self._is_hopeless(one):
                continue  # a higher stage of ZeRO sends more
            if any((plan.seconds or 0.0) <= self._bound(one) for _, plan in fitting):
                slower.append(one)
            else:
                self._try(one)
        return slower

    def _bound(self, one: Candidate) -> float:
        """With what tensor parallelism is known to send by now: of each rank the same on all grids with as many tensor
        ranks, which have as many samples for as many layers."""
        return one.bound + self._of_tensor.get(one.grid.tensor, 0.0)

    def _note_tensor(self, plan: Plan) -> None:
        ranks = [stage.traffic for stage in plan.stages] or [plan.traffic]
        over = [[row for row in traffic if row.dimension == "tensor"] for traffic in ranks]
        least = min(self._speeds.seconds(0.0, 0.0, rows) for rows in over)
        size = plan.tensor_parallel
        self._of_tensor[size] = min(least, self._of_tensor.get(size, least))

    def _plan_base(self) -> Plan:
        """At the config's own grid: for the number of parameters, what each of them takes, and the operations."""
        config = self._config
        if config.zero_optimization.stage == "auto":
            config = with_blocks(config, zero_optimization={"stage": 1})
        job = self._job(config)
        return self._planned(job, range(job.grid.pipe))

    # ---------------------------------------------------------------- what there is

    def _candidates(self) -> Iterator[Candidate]:
        here = self._world_size // self._nodes
        for tensor in _divisors(here):
            for pipe in _divisors(self._world_size // tensor):
                grid = Grid(pipe, self._world_size // (tensor * pipe), tensor)
                for stage in _stages(grid):
                    try:
                        yield self._candidate(grid, stage)
                    except (ConfigError, ValueError) as error:  # a batch or a schedule that this grid cannot have
                        self._refused.append((f"{grid}, stage {stage}", error))

    def _candidate(self, grid: Grid, stage: int) -> Candidate:
        base = self._base
        sizes = {"train_batch_size": self._samples, "gradient_accumulation_steps": None}
        blocks = {"tensor_parallel": {"size": grid.tensor, "autotp_size": 0}, "pipeline": {"stages": grid.pipe}}
        config = with_blocks(self._config, zero_optimization={"stage": stage}, **blocks).model_copy(update=sizes)
        resolved = config.resolve(grid.data)
        waiting = bubble(orders_of(resolved, grid.pipe)) if grid.pipe > 1 else 0.0
        numel = base.parameters / (grid.pipe * grid.tensor)
        whole, parted = self._bytes_of_states
        share = {0: whole + parted, 3: (whole + parted) / grid.data}.get(stage, whole + parted / grid.data)
        gradients = 2 * whole * numel * (grid.data - 1) / grid.data  # a ring that reduces and gathers
        across = gradients * ring_between_nodes(grid, self._nodes, "data")
        seconds = self._flops / self._speeds.flops / (1 - waiting) + float(across) / self._speeds.between
        return Candidate(grid, stage, resolved, waiting, seconds, int(share * numel))

    @property
    def _samples(self) -> int | None:
        return self._config.resolve(self._base.data_parallel).train_batch_size

    @property
    def _flops(self) -> float:
        """Operations of each rank in a step, on average; all grids have as many."""
        counts = [_flops(stage) for stage in self._base.stages] or [_flops(self._base)]
        return sum(counts) / len(counts)

    @property
    def _bytes_of_states(self) -> tuple[float, float]:
        """Bytes of a parameter: of its compute weight and gradient, and of what stage 1 shards over the data ranks."""
        base = self._base
        numel, data = max(base.rank_parameters, 1), base.data_parallel
        whole = base.states["compute_parameters"] * (data if base.stage == 3 else 1) / numel
        parted = base.states["master_weights"] + base.states["optimizer_states"]
        return whole, parted * (data if base.stage else 1) / numel

    # ---------------------------------------------------------------- what is tried

    def _is_hopeless(self, one: Candidate) -> bool:
        """True if the engine has refused it with another stage of ZeRO, or the tensor size without a pipeline."""
        return any(
            one.name.startswith(f"{grid},") or (grid.tensor == one.grid.tensor and grid.pipe == 1)
            for grid in self._refused_grids
        )

    @property
    def _refused_grids(self) -> set[Grid]:
        return {error.grid for _, error in self._refused if isinstance(error, _GridRefusedError)}

    def _try(self, one: Candidate) -> None:
        try:
            self._rows.append(self._row(one, few=True))
        except (RefusedError, ConfigError) as error:
            self._refused.append((one.name, _GridRefusedError(one.grid, error)))

    def _settle(self, candidates: Sequence[Candidate]) -> bool:
        """Sort the rows, and plan all stages of the first, until it stays the first. False if one of them has turned
        out not to fit: then others may be the fastest."""
        known = {(str(one.grid), one.stage): one for one in candidates}
        while True:
            self._rows.sort(key=lambda row: (not row[1].fits, row[1].seconds or 0.0))
            name, plan = self._rows[0] if self._rows else ("", None)
            if plan is None or not plan.fits or len(plan.stages) in (0, plan.pipeline_stages):
                return True
            self._rows[0] = self._row(known[name, plan.stage], few=False)
            if not self._rows[0][1].fits:
                return False

    def _row(self, one: Candidate, few: bool) -> tuple[str, Plan]:
        made = self._plan(one, few)
        self._note_tensor(made)
        ranks: Sequence[Plan | Stage] = made.stages or [made]
        times = [self._speeds.seconds(_flops(rank), one.waiting, rank.traffic) for rank in ranks]
        return str(one.grid), made.model_copy(update={"seconds": max(one.bound, *times)})

    def _plan(self, one: Candidate, few: bool) -> Plan:
        """few: of the first stage, which has the most micro-batches, of the last, which has the head, and of one
        between them, which all others are like."""
        pipe = one.grid.pipe
        made = self._planned(self._job(one.config), sorted({0, pipe // 2, pipe - 1}) if few else range(pipe))
        update = {
            "parameters": self._base.parameters,
            "trained_parameters": self._base.trained_parameters,
            "bubble": one.waiting if pipe > 1 else None,
        }
        return made.model_copy(update=update)

    def _planned(self, job: Job, stages: Sequence[int]) -> Plan:
        """Plan ``stages`` of a pipeline, or all where there is none, from a step that may be shorter."""
        short, times = self._shortened(job)
        zero = job.config.zero_optimization.chosen_stage
        known = self._outcomes.setdefault((job.grid, zero), {})
        missing = [stage for stage in stages if stage not in known]
        if missing:
            known |= run_stages(short, missing, 1) if job.grid.pipe > 1 else {0: run(short, 1)}
        made = plan_of_stages(short, {stage: known[stage] for stage in stages}, self._nodes, *self._memory)
        update = {
            "accumulation": job.config.gradient_accumulation_steps or 1,
            **_longer(made, times, zero),
            "stages": [stage.model_copy(update=_longer(stage, times, zero)) for stage in made.stages],
        }
        return made.model_copy(update=update)

    def _shortened(self, job: Job) -> tuple[Job, Fraction]:
        """``job`` with as few micro-batches as give the same peak, and how many times as many there are: from then on a
        schedule repeats itself, but for one that keeps all of them."""
        steps, size = job.config.gradient_accumulation_steps or 1, job.config.train_micro_batch_size_per_gpu
        block, pipe = job.config.pipeline, job.grid.pipe
        few = {"gpipe": steps, "1f1b": pipe + 2}.get(block.schedule, 2 * pipe * block.chunks_per_rank)
        few = few if pipe > 1 else 2
        if steps <= few or size is None:
            return job, Fraction(1)
        sizes = {"gradient_accumulation_steps": few, "train_batch_size": size * few * job.grid.data}
        return job.with_config(job.config.model_copy(update=sizes)), Fraction(steps, few)


class _GridRefusedError(Exception):
    """The engine refuses ``grid``, with the sentence of ``error``."""

    def __init__(self, grid: Grid, error: Exception) -> None:
        super().__init__(str(error))
        self.grid = grid


def _longer(made: Plan | Stage, times: Fraction, stage: int) -> dict[str, Any]:
    """Return the fields that differ in a step with so many times as many micro-batches."""
    flops = None if made.flops is None else int(made.flops * times)
    traffic = [row if times == 1 or _is_once(row, stage) else _several(row, times) for row in made.traffic]
    return {"flops": flops, "recomputed_flops": int(made.recomputed_flops * times), "traffic": traffic}


def _flops(made: Plan | Stage) -> int:
    """All that the rank computes in a step."""
    return (made.flops or 0) + made.recomputed_flops


def _is_once(row: Traffic, stage: int) -> bool:
    if row.tag in _ONCE:
        return True
    if row.dimension != "data":
        return False
    return stage < 2 or (stage == 2 and row.op == "all_gather")


def _several(row: Traffic, times: Fraction) -> Traffic:
    amounts = {name: int(getattr(row, name) * times) for name in ("count", "nbytes", "sent")}
    across = None if row.inter_node is None else int(row.inter_node * times)
    return row.model_copy(update={**amounts, "inter_node": across})


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _stages(grid: Grid) -> tuple[int, ...]:
    """Return the ZeRO stages to try. Stage 0 sends as much as stage 1 and holds more."""
    if grid.data == 1:
        return (0,)
    return (1,) if grid.pipe > 1 else (1, 2, 3)


def _counted(too_large: Sequence[Candidate], slower: int) -> Iterator[str]:
    if too_large:
        yield f"Not planned, as their model states alone do not fit: {'; '.join(one.name for one in too_large)}."
    if slower:
        yield (
            f"{slower} more {'is' if slower == 1 else 'are'} not planned: computing, waiting and sending gradients "
            "alone take longer there."
        )
