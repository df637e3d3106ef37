"""Checkpoints and whole models of every grid of pipeline stages, data-parallel and tensor-parallel ranks, in every
other.

Models are cut by hand: each rank has a stage and a part of each layer. The loss is a sum over elements, so every grid
takes the same steps.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerolite
from tests.checkpoint.cut_model import CANONICAL, Block, Net, cut_for, keep_stage
from tests.checkpoint.exported import read_model
from tests.checkpoint.runs import keep, kept
from tests.toolkit.compare import from_all_ranks
from tests.toolkit.grids import Grid
from tests.toolkit.pool import Pools
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import raised
from zerolite.checkpoint.export import export_checkpoint
from zerolite.checkpoint.partial_state import forbid_partial_state_dicts
from zerolite.comm import create_communicator, create_topology
from zerolite.config import load_config
from zerolite.engine.arguments import Arguments
from zerolite.engine.build import build_engine
from zerolite.tensor_parallel.shard_spec import mark_partial, set_shard_spec, shard_spec_of

GRIDS: dict[int, list[Grid]] = {
    1: [(1, 1, 1)],
    2: [(1, 2, 1), (2, 1, 1), (1, 1, 2)],
    4: [(1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2), (4, 1, 1)],
}
CPU = torch.device("cpu")


def make_engine(
    grid: Grid, stage: int, seed: int, partial: bool = False, optimizer: Any = "AdamW", **config: Any
) -> Any:
    pipe, _, tensor = grid
    topology = create_topology(create_communicator(CPU), CPU, pipe, tensor)
    model = Net(seed)
    if pipe > 1:
        keep_stage(model, topology.pipe.rank, pipe)
    for name, parameter in model.named_parameters() if tensor > 1 else ():
        cut = cut_for(name, tuple(parameter.shape), topology.tensor.rank, tensor)
        if cut is not None:
            parameter.data = cut.of(parameter.data)
            set_shard_spec(parameter, cut)
        elif partial:
            mark_partial(parameter)
    model.settle()
    settings = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "steps_per_print": 1_000_000,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 60},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}, **config,
    }  # fmt: skip
    resolved = load_config(settings).resolve(topology.data.world_size)
    trained = [p for p in model.parameters() if p.requires_grad]
    decays, others = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    groups = [{"params": decays, "weight_decay": 0.1 * seed}, {"params": others, "weight_decay": 0.0}]
    made = getattr(torch.optim, optimizer)(groups) if isinstance(optimizer, str) else optimizer(groups)
    return build_engine(model, resolved, Arguments(optimizer=made), topology, CPU)


def train(engine: Any, first: int, last: int) -> None:
    """The micro-batches from ``first`` up to ``last``."""
    for step in range(first, last):
        engine.backward(engine(step))
        engine.step()


def check_padding(engine: Any) -> None:
    """Check that padding of states and masters, which no checkpoint has, is zero."""
    buffer = engine._parts.pipeline._buffer
    for piece in engine.optimizer.shards():
        index = piece.index
        cut = shard_spec_of(buffer.parameters[index])
        if cut is None:
            continue
        padding = cut.of(torch.ones(cut.full_shape)).flatten() == 0
        here = padding[piece.fragment.param_start :][: piece.fragment.numel]
        values = [piece.bucket.master_view(piece.fragment)]
        values += [v for v in engine.optimizer.method.state_of(piece).values() if torch.is_tensor(v) and v.dim()]
        for value in values:
            assert value.numel() == len(here) and not value.flatten()[here].any(), (cut, value)


def snapshot(engine: Any) -> dict[str, Any]:
    """Return what the ranks together know of the whole model: what several say must be the same."""
    trained = {CANONICAL.get(name, name): p for name, p in engine.module.named_parameters() if p.requires_grad}
    parameters = list(trained.values())
    states = {f"master/{n}": v for n, v in zip(trained, zerolite.get_full_master(parameters), strict=True)}
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        values = zip(trained.items(), zerolite.get_full_optimizer_state(parameters, kind), strict=True)
        states |= {f"{kind}/{name}": value for (name, p), value in values if p.numel()}
    own = {
        "values": engine.full_state_dict(),
        "fp32": engine.full_state_dict(dtype=torch.float32),
        "groups": [(g["lr"], g["weight_decay"]) for g in engine.optimizer.param_groups],
        "steps": (engine.global_steps, engine.micro_steps),
    }
    for kind, block in itertools.product(("values", "fp32"), (0, 1)):
        del own[kind][f"blocks.{block}.seen"]
    parts = {"states": states, "notes": {n: m.note for n, m in engine.module.named_modules() if isinstance(m, Block)}}
    whole: dict[str, Any] = {"states": {}, "notes": {}, **own}
    for of_rank in from_all_ranks({**own, **parts}):
        for kind in parts:
            for name, value in of_rank[kind].items():
                assert_same(whole[kind].setdefault(name, value), value, name)
        assert_same({kind: of_rank[kind] for kind in own}, own)
    return whole


def assert_same(found: Any, wanted: Any, where: str = "", rtol: float = 0.0) -> None:
    if isinstance(wanted, dict):
        assert sorted(found) == sorted(wanted), where
        for name, value in wanted.items():
            assert_same(found[name], value, f"{where} {name}", rtol)
    elif isinstance(wanted, Tensor):
        assert found.shape == wanted.shape and found.dtype == wanted.dtype, where
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol, msg=lambda text: f"{where}: {text}")
    else:
        assert found == wanted, where


def mark(engine: Any) -> None:
    for name, module in engine.module.named_modules():
        if isinstance(module, Block):
            module.note = f"saved in {name}"
            module.seen.copy_(torch.tensor([float(name[-1]), 100.0 + engine.topology.data.rank]))


def save(grid: Grid, stage: int, directory: Path, **config: Any) -> None:
    """Two steps, saved, and two more; random numbers are drawn between."""
    engine = make_engine(grid, stage, seed=1, **config)
    train(engine, 0, 4)
    mark(engine)
    torch.manual_seed(50 + engine.topology.data.rank)
    engine.save_checkpoint(directory, client_state={"saved at": list(grid)})
    numbers = from_all_ranks(torch.rand(3))
    first = snapshot(engine)
    train(engine, 4, 8)
    keep(directory, grid=grid, first=first, second=snapshot(engine), numbers=numbers)


def load(places: list[tuple[Grid, int]], directory: Path, **config: Any) -> None:
    """Into each of the grids and stages: states have the same bits, and the steps that follow are the same."""
    wanted = kept(directory)
    grid = wanted["grid"]
    for there, stage in places:
        engine = make_engine(there, stage, seed=2, **config)
        if stage % 2:  # also over states that there are
            train(engine, 0, 2)
        torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is NaN
        _, client = engine.load_checkpoint(directory)
        torch.use_deterministic_algorithms(False)
        numbers = torch.rand(3)
        assert client == {"saved at": list(grid)}
        check_padding(engine)
        data = engine.rank // there[2] % there[1]
        seen = 100.0 + (data if there == grid else 0)  # buffers that differ between ranks
        state = engine.full_state_dict()
        assert [state[f"blocks.{block}.seen"].tolist() for block in (0, 1)] == [[0.0, seen], [1.0, seen]]
        if data < grid[1]:
            source = engine.rank if there == grid else data * grid[2]
            assert torch.equal(numbers, wanted["numbers"][source])
        assert_same(snapshot(engine), wanted["first"], f"{grid} -> {there}")
        train(engine, 4, 8)
        assert_same(snapshot(engine), wanted["second"], f"{grid} -> {there}, two steps later", rtol=2e-6)


def stages_of(grid: Grid) -> list[int]:
    return [0, 1] if grid[0] > 1 else [0, 1, 2, 3]


def check(pools: Pools, grid: Grid, stage: int, directory: Path, into: dict[int, list[Any]], **more: Any) -> None:
    kwargs = {"grid": grid, "stage": stage, "directory": directory, **more}
    pools(grid[0] * grid[1] * grid[2]).run(save, kwargs, timeout=120)
    for other, places in into.items():
        pools(other).run(load, {"places": places, "directory": directory, **more}, timeout=240)


ALL = [grid for grids in GRIDS.values() for grid in grids]


@pytest.mark.slow
@pytest.mark.parametrize("grid", ALL)
def test_every_grid_loads_every_other(pools: Pools, tmp_path: Path, grid: Grid) -> None:
    """The grids take turns in the stages at which they save and load."""
    turn = itertools.count(ALL.index(grid))

    def staged(there: Grid, number: int) -> tuple[Grid, int]:
        return there, stages_of(there)[number % len(stages_of(there))]

    _, stage = staged(grid, ALL.index(grid))
    into = {world: [staged(there, next(turn)) for there in grids] for world, grids in GRIDS.items()}
    check(pools, grid, stage, tmp_path, into)


OTHERS: dict[str, dict[str, Any]] = {
    "an optimizer without a kernel": {"optimizer": "RAdam"},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", OTHERS)
def test_other_updates_and_precisions(pools: Pools, tmp_path: Path, how: str) -> None:
    into = {2: [((1, 1, 2), 0), ((1, 1, 2), 2), ((2, 1, 1), 1)], 4: [((2, 1, 2), 1), ((1, 2, 2), 3)]}
    check(pools, (1, 1, 4), 1, tmp_path, into, **OTHERS[how])


# -------------------------------------------------------------------- refusals


@on_ranks(2)
@pytest.mark.parametrize(
    ("grid", "partial", "why"),
    [((2, 1, 1), False, "of 2 of the model only. Call"), ((1, 1, 2), True, "tensor-parallel shards")],
    ids=["pipeline", "sequence"],
)
def test_what_only_the_whole_can_do(tmp_path: Path, grid: Grid, partial: bool, why: str) -> None:
    engine = make_engine(grid, 1, seed=1, partial=partial)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path / "within an accumulation")
    train(engine, 1, 2)
    forbid_partial_state_dicts(engine.module, engine.topology)
    full = engine.full_state_dict()
    for call, given, instead in (
        ("state_dict", [], "engine.full_state_dict()"), ("load_state_dict", [full], "load_full_state_dict(state)"),
    ):  # fmt: skip
        said = raised(getattr(engine.module, call), *given)
        assert said.startswith(f"RuntimeError: {call}: this rank has ") and why in said and instead in said
    engine.load_full_state_dict(engine.full_state_dict())
    engine.save_checkpoint(tmp_path / "after the step")


def misfits(grid: Grid, directory: Path) -> None:
    """States and checkpoints that do not fit change nothing. directory: of a checkpoint of the model."""
    engine = make_engine(grid, 1, seed=3)
    before = engine.full_state_dict()
    state = kept(directory)["first"]["fp32"] | {f"blocks.{block}.seen": torch.zeros(2) for block in (0, 1)}
    short = {name: value for name, value in state.items() if name != "norm.bias"}
    said = raised(engine.load_full_state_dict, short)
    assert "missing norm.bias" in said and "Nothing was loaded" in said
    assert "unexpected" in raised(engine.load_full_state_dict, {**state, "spare": state["norm.bias"]})
    wrong = {**state, "blocks.1.qkv.weight": state["blocks.1.qkv.weight"][:-1]}
    assert "shapes differ for blocks.1.qkv.weight (expected (24, 6))" in raised(engine.load_full_state_dict, wrong)
    other = make_engine(grid, 1, seed=3)
    other.module.register_parameter("more", nn.Parameter(torch.ones(2)))
    assert "it has no parameter more." in raised(other.load_checkpoint, directory)
    del other.module.more
    for module in other.module.modules():
        module._parameters.pop("bounds", None)
    said = raised(other.load_checkpoint, directory)
    assert "the model has no parameter blocks.0.bounds, blocks.1.bounds." in said
    after = engine.full_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items() if isinstance(value, Tensor))


@pytest.mark.slow
def test_what_does_not_fit(pools: Pools, tmp_path: Path) -> None:
    pools(1).run(save, {"grid": (1, 1, 1), "stage": 0, "directory": tmp_path})
    pools(4).run(misfits, {"grid": (2, 1, 2), "directory": tmp_path})


class Rows(torch.optim.Optimizer):
    """Keeps one number for each row."""

    zerolite_elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                self.state[parameter]["rows"] = parameter.grad.flatten(1).sum(1) if parameter.dim() > 1 else 0


@on_ranks(2)
def test_states_that_mean_nothing_for_a_part(tmp_path: Path) -> None:
    """Rows on two tensor-parallel ranks."""
    engines = [make_engine(grid, 0, seed=1, optimizer=Rows) for grid in ((1, 1, 2), (1, 2, 1), (1, 1, 2))]
    for engine in engines[:2]:
        train(engine, 0, 2)
    saving = raised(engines[0].save_checkpoint, tmp_path / "cut")
    assert "optimizer state 'rows' of parameter '" in saving
    assert saving.endswith("with tensor_parallel.size = 1 it can be saved")
    engines[1].save_checkpoint(tmp_path / "whole")
    loading = raised(engines[2].load_checkpoint, tmp_path / "whole")
    assert loading.endswith("such states can be loaded with tensor_parallel.size = 1 only")


# -------------------------------------------------------------------- whole models


def whole(places: list[tuple[Grid, int]], directory: Path) -> None:
    """A state of the whole model goes into every grid and comes back, also from files; then one value of each
    parameter's master, gradient and state is set, and read."""
    wanted = kept(directory)
    state = wanted["second"]["fp32"] | {f"blocks.{block}.seen": torch.ones(2) for block in (0, 1)}
    for grid, stage in places:
        engine = make_engine(grid, stage, seed=3)
        engine.load_full_state_dict(state if engine.rank == 0 else None)
        assert_same(engine.full_state_dict(dtype=torch.float32), state, f"{grid} at stage {stage}")
        assert sorted(engine.full_state_dict(rank0_only=True)) == (sorted(state) if engine.rank == 0 else [])
        out = directory / f"{grid} {stage}"
        engine.save_16bit_model(out / "all", max_shard_size="1KB")
        engine.save_16bit_model(out / "trained", exclude_frozen_parameters=True)
        if engine.rank == 0:
            tensors = {n: value for n, value in state.items() if isinstance(value, Tensor) and n not in CANONICAL}
            assert len(list((out / "all").glob("model-*.safetensors"))) > 1
            assert_same(read_model(out / "all")[0], {name: value.bfloat16() for name, value in tensors.items()})
            trained = {name for name in tensors if not name.endswith(("table", "bounds"))}
            assert read_model(out / "trained")[0].keys() == trained
        for name, tensors in set_all(engine).items():
            assert tensors[2].shape == state[name].shape
            for one, other in zip(tensors, wanted.setdefault("set", {}).setdefault(name, tensors), strict=False):
                torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
    keep(directory, **wanted)


def set_all(engine: Any) -> dict[str, list[Tensor]]:
    names = {n: p for n, p in engine.module.named_parameters() if p.requires_grad and p.numel()}
    staged = engine.topology.pipe.world_size > 1
    train(engine, 0, 2)
    for step in () if staged else (2, 3):
        engine.backward(engine(step))
    found = {}
    for name, parameter in names.items():
        shape = zerolite.get_full_master(parameter).shape
        values = torch.arange(shape.numel(), dtype=torch.float32).reshape(shape)
        grads = [zerolite.get_full_grad(parameter)]
        if staged:
            assert "with a pipeline" in raised(zerolite.set_full_grad, parameter, torch.ones(1))
        else:
            zerolite.set_full_grad(parameter, values + 1)
            grads.append(zerolite.get_full_grad(parameter))
        zerolite.set_full_optimizer_state(parameter, "exp_avg", values + 2)
        zerolite.set_full_master(parameter, values + 3)
        states = [zerolite.get_full_optimizer_state(parameter, kind) for kind in ("exp_avg", "step")]
        found[CANONICAL.get(name, name)] = [*states, zerolite.get_full_master(parameter), *([] if staged else grads)]
    engine.zero_grad()
    return found


@pytest.mark.slow
def test_whole_models_of_every_grid(pools: Pools, tmp_path: Path) -> None:
    pools(1).run(save, {"grid": (1, 1, 1), "stage": 0, "directory": tmp_path})
    for world, grids in GRIDS.items():
        places = [(there, stage) for there in grids for stage in stages_of(there)[-2:]]
        pools(world).run(whole, {"places": places, "directory": tmp_path}, timeout=240)


# -------------------------------------------------------------------- people


@on_ranks(2)
def test_the_command_line_knows_the_grid(tmp_path: Path) -> None:
    save((2, 1, 1), 1, tmp_path / "saved")
    if torch.distributed.get_rank() == 0:
        export_checkpoint(tmp_path / "saved", tmp_path / "out")
        found, aliases = read_model(tmp_path / "out")
        values = kept(tmp_path / "saved")["first"]["fp32"]
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        others = {name: value.tolist() for name, value in found.items() if name not in tensors}
        assert others == {"blocks.0.seen": [0.0, 100.0], "blocks.1.seen": [1.0, 100.0]}  # of the first rank
        assert_same({name: found[aliases.get(name, name)] for name in tensors}, tensors)
        assert aliases == {"head.weight": "embed.weight"}
