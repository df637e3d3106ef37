"""Models of which each rank has a stage and a part of each layer, cut by hand: what is saved of them, and loaded into
others. No forward sends anything: the loss is a sum over elements, so every grid takes the same steps."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import zerolite
from tests.toolkit import models
from tests.toolkit.grids import Gpt, Grid, on_grid
from zerolite.comm import create_communicator, create_topology
from zerolite.config import load_config
from zerolite.engine.build import Arguments, build_engine
from zerolite.engine.full_state import guard_parts
from zerolite.tensor_parallel.shard_spec import ShardSpec, mark_partial, set_names, set_shard_spec, shard_spec_of

VOCABULARY, WIDTH, HEADS = 7, 6, 8
GRIDS: dict[int, list[Grid]] = {
    1: [(1, 1, 1)],
    2: [(1, 2, 1), (2, 1, 1), (1, 1, 2)],
    4: [(1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2), (4, 1, 1)],
}
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * HEADS)
        self.proj = nn.Linear(HEADS, WIDTH)
        self.gain = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.table = nn.Parameter(torch.randn(8, 3), requires_grad=False)
        self.bounds = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("passing", torch.ones(1), persistent=False)
        self.note = "new"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


class Net(nn.Module):
    """``forward(step)``: the sum over all elements of what depends on the element, its place and the step."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.shapes = {name: tuple(p.shape) for name, p in self.named_parameters()}

    def forward(self, step: int) -> Tensor:
        total = torch.zeros(())
        for name in self.trained:
            owner, _, last = name.rpartition(".")
            parameter = getattr(self.get_submodule(owner), last)
            factor = torch.randn(self.shapes[CANONICAL.get(name, name)], generator=_generator(name, step))
            cut = shard_spec_of(self.parameters_by_name[name])
            factor = factor if cut is None else cut.of(factor)
            total = total + (parameter * factor + 0.05 * parameter**2).sum()
        return total

    def settle(self) -> None:
        """Keep the values that are here."""
        self.parameters_by_name = _Hidden(self.named_parameters())
        self.trained = [name for name, p in self.parameters_by_name.items() if p.requires_grad and p.numel()]


class _Hidden(dict[str, nn.Parameter]):
    """No submodule, and no parameter list."""


CANONICAL = {"head.weight": "embed.weight"}


def _generator(name: str, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(CANONICAL.get(name, name).encode()) + step)


def cut_for(name: str, shape: tuple[int, ...], rank: int, size: int) -> ShardSpec | None:
    if name.endswith(("embed.weight", "head.weight")):  # with padding
        length = -(-shape[0] // size)
        there = rank * length
        return ShardSpec(shape, 0, ((0, there, min(length, shape[0] - there)),), length, rank, size)
    if ".qkv." in name:
        length = HEADS // size
        ranges = tuple((part * length, part * HEADS + rank * length, length) for part in range(3))
        return ShardSpec(shape, 0, ranges, 3 * length, rank, size)
    if name.endswith("proj.weight"):
        length = HEADS // size
        return ShardSpec(shape, 1, ((0, rank * length, length),), length, rank, size)
    if name.endswith("table"):
        length = 8 // size
        return ShardSpec(shape, 0, ((0, rank * length, length),), length, rank, size)
    return None


def keep_stage(model: Net, stage: int, stages: int) -> None:
    """The others' modules go, with their parameters; the names of what stays stay."""
    set_names(model.embed.weight, ["embed.weight", "head.weight"])
    units = ["embed", "blocks.0", "blocks.1", "norm head"]
    for number, names in enumerate(units):
        if number * stages // len(units) != stage:
            for name in names.split():
                owner, _, last = name.rpartition(".")
                setattr(model.get_submodule(owner), last, nn.Module())


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
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 60},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "steps_per_print": 1_000_000,
        **config,
    }
    resolved = load_config(settings).resolve(topology.data.world_size)
    decays = [p for name, p in model.named_parameters() if p.requires_grad and p.dim() > 1]
    others = [p for name, p in model.named_parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": decays, "weight_decay": 0.1 * seed}, {"params": others, "weight_decay": 0.0}]
    made = getattr(torch.optim, optimizer)(groups) if isinstance(optimizer, str) else optimizer(groups)
    arguments = Arguments(optimizer=made)
    return build_engine(model, resolved, arguments, topology, CPU)


def train(engine: Any, first: int, last: int) -> None:
    """The micro-batches from ``first`` up to ``last``."""
    for step in range(first, last):
        engine.backward(engine(step))
        engine.step()


@contextlib.contextmanager
def nan_for_new_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_padding(engine: Any) -> None:
    """Check that padding of states and masters, which no checkpoint has, is zero."""
    buffer = engine._pipeline._buffer
    for piece in engine.optimizer.shards():
        index, bucket = piece.fragment.slot.index, piece.fragment.slot.bucket
        cut = shard_spec_of(buffer.parameters[index])
        if cut is None:
            continue
        padding = cut.of(torch.ones(cut.full_shape)).flatten() == 0
        here = padding[piece.fragment.param_start :][: piece.fragment.numel]
        values = [buffer.view_of(piece.fragment, buffer.master[bucket])]
        values += [v for v in engine.optimizer.method.state_of(piece).values() if torch.is_tensor(v) and v.dim()]
        for value in values:
            assert value.numel() == len(here) and not value.flatten()[here].any(), (cut, value)


def snapshot(engine: Any) -> dict[str, Any]:
    """Return what the ranks together know of the whole model; states: of what is here."""
    names = {id(p): CANONICAL.get(name, name) for name, p in engine.module.named_parameters()}
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    states = {}
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        values = zerolite.get_full_optimizer_state(trained, kind)
        states |= {f"{kind}/{names[id(p)]}": value for p, value in zip(trained, values, strict=True) if p.numel()}
    masters = zerolite.get_full_master(trained)
    states |= {f"master/{names[id(p)]}": value for p, value in zip(trained, masters, strict=True)}
    return {
        "values": engine.full_state_dict(),
        "fp32": engine.full_state_dict(dtype=torch.float32),
        "states": states,
        "notes": {n: m.note for n, m in engine.module.named_modules() if isinstance(m, Block)},
        "groups": [(g["lr"], g["weight_decay"]) for g in engine.optimizer.param_groups],
        "steps": (engine.global_steps, engine.micro_steps),
    }


def mark(engine: Any) -> None:
    """Change what training would have changed beside parameters."""
    for name, module in engine.module.named_modules():
        if isinstance(module, Block):
            module.note = f"saved in {name}"
            module.seen.copy_(torch.tensor([float(name[-1]), 100.0 + engine.topology.data.rank]))


def save(grid: Grid, stage: int, directory: str, **config: Any) -> list[dict[str, Any]]:
    """Two steps, saved, and two more. Snapshots after both, with random numbers drawn between."""
    engine = make_engine(grid, stage, seed=1, **config)
    train(engine, 0, 4)
    mark(engine)
    torch.manual_seed(50 + engine.topology.data.rank)
    engine.save_checkpoint(directory, client_state={"saved at": list(grid)})
    numbers = torch.rand(3)
    first = snapshot(engine)
    train(engine, 4, 8)
    return [first, {**snapshot(engine), "numbers": numbers}]


def load(grids: list[tuple[Grid, int]], directory: str, **config: Any) -> list[list[dict[str, Any]]]:
    """Into each of the grids and stages; what :func:`save` gives."""
    results = []
    for grid, stage in grids:
        engine = make_engine(grid, stage, seed=2, **config)
        if stage % 2:  # also over states that there are
            train(engine, 0, 2)
        with nan_for_new_memory():
            _, client = engine.load_checkpoint(directory)
        check_padding(engine)
        numbers = torch.rand(3)
        first = snapshot(engine)
        train(engine, 4, 8)
        results.append([first, {**snapshot(engine), "numbers": numbers, "client": client}])
    return results


# -------------------------------------------------------------------- refusals


def message(call: Any) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def refusals_within(directory: str) -> dict[str, str]:
    """With two ranks."""
    said = {}
    for name, grid, partial in (("pipeline", (2, 1, 1), False), ("sequence", (1, 1, 2), True)):
        engine = make_engine(grid, 1, seed=1, partial=partial)
        train(engine, 0, 1)
        said[f"save, {name}"] = message(lambda engine=engine: engine.save_checkpoint(f"{directory}/again"))
        train(engine, 1, 2)
        guard_parts(engine.module, engine.topology)
        said[f"state dict, {name}"] = message(engine.module.state_dict)
        said[f"load state dict, {name}"] = message(lambda engine=engine: engine.module.load_state_dict({}))
        engine.load_full_state_dict(engine.full_state_dict())
        engine.save_checkpoint(f"{directory}/after the step")
    return said


# -------------------------------------------------------------------- whole models


def whole(grids: list[tuple[Grid, int]], state: dict[str, Any], directory: str, **config: Any) -> list[dict[str, Any]]:
    """``state``, of the whole model, goes into every grid and comes back, also from files; then one value of each
    parameter's master, gradient and state is set."""
    results = []
    for number, (grid, stage) in enumerate(grids):
        engine = make_engine(grid, stage, seed=3, **config)
        engine.load_full_state_dict(state if engine.rank == 0 else None)
        back = engine.full_state_dict(dtype=torch.float32)
        only = engine.full_state_dict(rank0_only=True)
        engine.save_16bit_model(f"{directory}/{number}", max_shard_size="1KB")
        engine.save_16bit_model(f"{directory}/{number} trained", exclude_frozen_parameters=True)
        results.append({"back": back, "on rank 0": sorted(only), "set": _set_all(engine)})
    return results


def _set_all(engine: Any) -> dict[str, list[Tensor]]:
    """Full gradients, masters and states that were set, as they are read."""
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
            assert "with a pipeline" in message(lambda p=parameter: zerolite.set_full_grad(p, torch.ones(1)))
        else:
            zerolite.set_full_grad(parameter, values + 1)
            grads.append(zerolite.get_full_grad(parameter))
        zerolite.set_full_optimizer_state(parameter, "exp_avg", values + 2)
        zerolite.set_full_master(parameter, values + 3)
        found[CANONICAL.get(name, name)] = [
            zerolite.get_full_optimizer_state(parameter, "exp_avg"),
            zerolite.get_full_master(parameter),
            zerolite.get_full_optimizer_state(parameter, "step"),
            *(grads if not staged else []),
        ]
    engine.zero_grad()
    return found


def misfits(grid: Grid, directory: str, state: dict[str, Any]) -> dict[str, str]:
    """Return the messages about states and checkpoints that do not fit. directory: of a checkpoint of the model."""
    engine = make_engine(grid, 1, seed=3)
    before = engine.full_state_dict()
    short = {name: value for name, value in state.items() if name != "norm.bias"}
    wrong = {**state, "blocks.1.qkv.weight": state["blocks.1.qkv.weight"][:-1]}
    said = {
        "short": message(lambda: engine.load_full_state_dict(short)),
        "long": message(lambda: engine.load_full_state_dict({**state, "spare": state["norm.bias"]})),
        "wrong": message(lambda: engine.load_full_state_dict(wrong)),
    }
    other = make_engine(grid, 1, seed=3)
    other.module.register_parameter("more", nn.Parameter(torch.ones(2)))
    said["missing"] = message(lambda: other.load_checkpoint(directory))
    del other.module.more
    for module in other.module.modules():
        module._parameters.pop("bounds", None)
    said["unexpected"] = message(lambda: other.load_checkpoint(directory))
    after = engine.full_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items() if isinstance(value, Tensor))
    return said


class Rows(torch.optim.Optimizer):
    """Keeps one number for each row."""

    zerolite_elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                self.state[parameter]["rows"] = parameter.grad.flatten(1).sum(1) if parameter.dim() > 1 else 0


def states_of_rows(directory: str) -> tuple[str, str]:
    """Return the messages about states without a value for each element: on two tensor-parallel ranks."""
    engine = make_engine((1, 1, 2), 0, seed=1, optimizer=Rows)
    train(engine, 0, 2)
    saving = message(lambda: engine.save_checkpoint(f"{directory}/cut"))
    engine = make_engine((1, 2, 1), 0, seed=1, optimizer=Rows)
    train(engine, 0, 2)
    engine.save_checkpoint(f"{directory}/whole")
    cut = make_engine((1, 1, 2), 0, seed=1, optimizer=Rows)
    return saving, message(lambda: cut.load_checkpoint(f"{directory}/whole"))


# -------------------------------------------------------------------- engines that compute together


def gpt(grid: Grid, stage: int, seed: int, precision: str | None, **more: Any) -> Any:
    """Every grid takes the same steps of 4 micro-batches together."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4 // grid[1],
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 1_000_000,
    }
    if precision is not None:
        # So small a scale that no grid overflows: those with fewer micro-batches for each rank do so earlier.
        config[precision] = {"enabled": True, **({"initial_scale_power": 8} if precision == "fp16" else {})}
    model = models.build(Gpt, seed=seed + torch.distributed.get_rank())
    return zerolite.initialize(model, on_grid(config, grid, **more))


def train_gpt(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        micros, data = engine.gradient_accumulation_steps, engine.data_parallel_rank
        batches = [models.token_batch(step, data * micros + micro, 0, length=8) for micro in range(micros)]
        losses.append(engine.train_batch(iter(batches)).item())
    return losses


def save_gpt(grid: Grid, stage: int, directory: str, precision: str | None, **more: Any) -> dict[str, Any]:
    engine = gpt(grid, stage, 7, precision, **more)
    train_gpt(engine, 0, 2)
    engine.save_checkpoint(directory)
    saved = engine.full_state_dict(dtype=torch.float32)
    return {"saved": saved, "losses": train_gpt(engine, 2, 4), "values": engine.full_state_dict(dtype=torch.float32)}


def load_gpt(grids: list[tuple[Grid, int]], directory: str, precision: str | None, **more: Any) -> list[dict[str, Any]]:
    results = []
    for grid, stage in grids:
        engine = gpt(grid, stage, 99, precision, **more)
        engine.load_checkpoint(directory)
        found = engine.full_state_dict(dtype=torch.float32)
        losses = train_gpt(engine, 2, 4)
        results.append({"saved": found, "losses": losses, "values": engine.full_state_dict(dtype=torch.float32)})
    return results
