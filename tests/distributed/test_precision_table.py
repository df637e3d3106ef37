"""The table of dtypes in docs/precision.md, measured cell by cell."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerolite
from tests.toolkit import models
from tests.toolkit.configs import ADAMW, STATIC_SCALE, at
from tests.toolkit.ranks import on_ranks
from zerolite.zero import GatheredParameters

Rows = dict[str, str]
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "precision.md"

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
BUFFERS = {"single": torch.float32, "wide": torch.float64, "short": torch.bfloat16, "count": torch.int64}
OTHERS = {"ids": torch.int64, "mask": torch.bool, "bytes": torch.uint8}
FLOATING = {"float": torch.float32, "double": torch.float64, "bfloat": torch.bfloat16, "half": torch.float16}
HALVES = ("bfloat", "half")
WIDTHS = {"body": 24, "exact": 8}

MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": STATIC_SCALE}},
    "bf16 low": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "fp16 low": {"fp16": {"enabled": True, "loss_scale": STATIC_SCALE, "fp16_master_weights_and_grads": True}},
    "bf16 lowest": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
    "autocast bf16": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
    "autocast fp16": {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"loss_scale": STATIC_SCALE}},
}
BATCH_NORM = "BatchNorm"


def tables() -> list[dict[str, dict[str, str]]]:
    """The document's tables with a column for each mode: row, mode, cell."""
    found: list[dict[str, dict[str, str]]] = []
    modes: list[str] | None = None
    for line in DOCUMENT.read_text().splitlines():
        row, *cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            modes = None
        elif row == "" and len(cells) > 1:
            modes = cells
            found.append({})
        elif modes is not None and not row.startswith("---"):
            assert row not in found[-1], f"{row} is there twice"
            found[-1][row] = dict(zip(modes, cells, strict=True))
    return found


BODY, EXACT = tables()
PARTS = {"body": BODY, "exact": EXACT}


def table_config(stage: int, mode: str, part: str, accumulation: int = 1) -> dict[str, Any]:
    patterns = {} if part == "body" else {"fp32_modules": [part]}
    sizes = {"reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000}
    return at(stage, "fp32", accumulation, optimizer=ADAMW, zero=sizes, **MODES[mode], **patterns)


class Part(nn.Module):
    """A trained layer, a frozen one, and buffers; ``seen``: dtypes of what it is given, and of what its layer computes.

    ``forward`` takes tensors by name, nested; ``x`` is computed with, if there is one.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        for name, dtype in BUFFERS.items():
            self.register_buffer(name, torch.ones(2, dtype=dtype))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, batch: dict[str, Any], *, more: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
        given = {name: value for group in (batch, *more) for name, value in group.items()}
        self.seen.update({name: value.dtype for name, value in given.items()})
        x = given["x"] if "x" in given else torch.ones(3, self.layer.in_features)
        hidden = self.layer(x)
        self.seen["computed"] = hidden.dtype
        hidden = torch.tanh(hidden) + self.frozen(x)
        return {"y": [hidden, (hidden.square().mean(),)], "double": torch.ones(1).double(), "index": hidden.argmax(-1)}


class Probe(nn.Module):
    """Two parts, one of which may be in fp32. ``last``: the one whose outputs are the model's."""

    def __init__(self, last: str) -> None:
        super().__init__()
        self.body = Part(WIDTHS["body"])
        self.exact = Part(WIDTHS["exact"])
        self.last = last
        self.returns_loss = True
        self.from_exact: dict[str, Any] = {}

    def forward(self, batch: dict[str, Any], *, more: tuple[dict[str, Any], ...]) -> dict[str, Any]:
        out = self.body(batch, more=more)
        others = {name: batch[name] for name in OTHERS}
        self.from_exact = self.exact({"x": out["y"][0][:, : WIDTHS["exact"]], **others})
        loss = out["y"][1][0] + self.from_exact["y"][1][0]
        returned = out if self.last == "body" else self.from_exact
        return {**returned, "loss": loss} if self.returns_loss else {**returned, "y": returned["y"][:1]}


def measure(config: dict[str, Any], part: str) -> Rows:
    """The rows of the first table (``part`` "body"), or of the second ("exact", which ``config`` keeps in fp32), that
    show at this stage and number of ranks; with several micro-batches only those of gradients."""
    engine = zerolite.initialize(models.build(Probe, last=part), config)
    own: Part = getattr(engine.module, part)
    rows, outputs = _gradients(engine, own, part)
    if engine.gradient_accumulation_steps > 1:
        return rows
    engine.step()
    rows |= _values(engine, own, part)
    return rows | (_body(engine, own, outputs) if part == "body" else _exact(engine, own, outputs))


def call(engine: Any) -> Any:
    batch = {"x": torch.randn(3, WIDTHS["body"])} | {name: torch.ones(2).to(dtype) for name, dtype in OTHERS.items()}
    return engine(batch, more=({name: torch.ones(1, dtype=dtype) for name, dtype in FLOATING.items()},))


def said(after: Iterable[torch.dtype], before: Iterable[torch.dtype] = ()) -> str:
    """The name of the only dtype there is, or "own" where nothing has changed."""
    found = list(after)
    if found == list(before):
        return "own"
    (dtype,) = set(found)
    return NAMES[dtype]


def _gradients(engine: Any, own: Part, part: str) -> tuple[Rows, Any]:
    """One window; and the outputs of its last forward."""
    hooked: list[torch.dtype] = []
    handle = own.layer.weight.register_hook(lambda gradient: hooked.append(gradient.dtype))
    with zerolite.comm.record() as calls:
        for micro in range(engine.gradient_accumulation_steps):
            if micro:
                engine.step()
            outputs = call(engine)
            engine.backward(outputs["loss"])
        engine.reduce_gradients()
    handle.remove()
    several = engine.gradient_accumulation_steps > 1
    layout = engine._parts.buffer.layout
    bucket = next(slot.bucket for slot in layout.slots if slot.name == f"{part}.layer.weight")
    travelled = {c.dtype for c in calls.select(tag="gradients") if c.numel == layout.buckets[bucket].numel}
    rows = {"gradients in hooks of parameters": said(set(hooked))}
    rows["`get_full_grad`"] = said([zerolite.get_full_grad(own.layer.weight).dtype])
    if several:
        rows["sums of several micro-batches"] = said([engine._parts.buffer.buckets[bucket].mean().dtype])
    if engine.world_size > 1:
        stages = "0 and 1" if engine.config.zero_optimization.stage < 2 else "2 and 3"
        how = f"several, stages {stages}" if several else "one micro-batch"
        rows[f"gradients that travel, {how}"] = said(travelled)
    return rows, outputs


def _values(engine: Any, own: Part, part: str) -> Rows:
    """Return the dtypes of the values between steps."""
    with GatheredParameters(own, check=False):
        trained, frozen = ({p.dtype for p in layer.parameters()} for layer in (own.layer, own.frozen))
    state = engine.full_state_dict()
    weight = own.layer.weight
    states = [zerolite.get_full_optimizer_state(weight, name).dtype for name in ("exp_avg", "exp_avg_sq")]
    return {
        "parameters": said(trained),
        "frozen parameters": said(frozen),
        "buffers": said([getattr(own, name).dtype for name in BUFFERS], BUFFERS.values()),
        "master weights, `get_full_master`": said([zerolite.get_full_master(weight).dtype]),
        "optimizer states, `get_full_optimizer_state`": said(states),
        "`full_state_dict`": said(state[f"{part}.{layer}.weight"].dtype for layer in ("layer", "frozen")),
    }


def _body(engine: Any, own: Part, outputs: Any) -> Rows:
    floating, others = ([own.seen[name] for name in group] for group in (FLOATING, OTHERS))
    computed = own.seen["computed"]
    dtype = engine.full_state_dict()["body.layer.weight"].dtype
    with torch.no_grad():
        direct = engine.module.body({"x": torch.ones(3, WIDTHS["body"], dtype=dtype)})["y"][0]
    rest = [outputs["double"].dtype, outputs["index"].dtype]
    return {
        "floating tensors given to `engine(...)`, as the model sees them": said(floating, FLOATING.values()),
        "other tensors given to `engine(...)`": said(others, OTHERS.values()),
        "what a layer computes in the model": said([computed]),
        "outputs of `engine(...)` in 16 bits or fp32, where the model returns no loss": _without_loss(engine),
        "the loss that `engine(...)` returns": said([outputs["loss"].dtype, outputs["y"][1][0].dtype]),
        "outputs of `engine(...)` beside a loss": said([outputs["y"][0].dtype]),
        "outputs of `engine(...)` in fp64 or not floating": said(rest, (torch.float64, torch.int64)),
        "outputs of `engine.module(...)` on inputs in the parameters' dtype": said([direct.dtype]),
    }


def _exact(engine: Any, own: Part, outputs: Any) -> Rows:
    others = [own.seen[name] for name in OTHERS]
    returned, computed = engine.module.from_exact, own.seen["computed"]
    with torch.no_grad(), engine._parts.precision.autocast_context(engine.device):
        given_fp32 = own({"x": torch.ones(3, WIDTHS["exact"])})["y"][0]
        given_none = own({"ids": torch.arange(2)})["y"][0]
        own({}, more=({name: torch.ones(1, dtype=FLOATING[name]) for name in HALVES},))
    rest = [returned["double"].dtype, returned["index"].dtype]
    return {
        "16-bit tensors given to the module, as it sees them": said(
            [own.seen[name] for name in HALVES], [FLOATING[name] for name in HALVES]
        ),
        "other tensors given to the module": said(others, OTHERS.values()),
        "what a layer computes in it": said([computed]),
        "its fp32 results, given 16-bit tensors": said([returned["y"][0].dtype, returned["y"][1][0].dtype]),
        "its fp32 results, given no floating tensor": said([given_none.dtype]),
        "its fp32 results, given fp32 tensors only": said([given_fp32.dtype]),
        "its other results": said(rest, (torch.float64, torch.int64)),
        "outputs of `engine(...)` where it comes last, if the model returns no loss": _without_loss(engine),
        "outputs of `engine(...)` where it comes last, beside a loss": said([outputs["y"][0].dtype]),
    }


def _without_loss(engine: Any) -> str:
    """The dtype of outputs of a model that returns no loss: in training, and in evaluation."""
    engine.module.returns_loss = False
    found = [call(engine)["y"][0].dtype]
    with torch.no_grad():
        found.append(call(engine.eval())["y"][0].dtype)
    engine.train()
    engine.module.returns_loss = True
    return said(found)


@pytest.mark.slow
@on_ranks(1, 2, timeout=240)
@pytest.mark.parametrize("part", list(PARTS))
@pytest.mark.parametrize("stages", [(1, 3), (0, 2)])
def test_every_cell_of_the_table(stages: tuple[int, ...], part: str) -> None:
    cells: dict[tuple[str, str], set[str]] = {}
    alone = dist.get_world_size() == 1
    for mode in MODES:
        for stage in stages:
            for accumulation in (1, 2):
                for row, cell in measure(table_config(stage, mode, part, accumulation), part).items():
                    cells.setdefault((row, mode), set()).add(cell)
    wanted = {(row, mode): {cell} for row, modes in PARTS[part].items() for mode, cell in modes.items()}
    assert cells == {key: c for key, c in wanted.items() if key[0] != BATCH_NORM and not (alone and "travel" in key[0])}
    assert all(list(row) == list(MODES) for row in PARTS[part].values())


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3))


@pytest.mark.slow
@on_ranks(2)
def test_batch_norm() -> None:
    """Running statistics are updated in fp32 by what the rank's batch is, in all modes."""
    for part, patterns in (("body", []), ("exact", ["1"])):
        assert set(PARTS[part][BATCH_NORM].values()) == {"works"}
        for stage in (0, 3):
            for mode in MODES:
                settings = table_config(stage, mode, part) | {"fp32_modules": patterns}
                engine = zerolite.initialize(models.build(normed), settings)
                batch = models.float_batch(0, 0, engine.rank, 2)
                engine.backward(models.square_loss(engine, batch))
                engine.step()
                norm = engine.module[1]
                assert norm.running_mean.dtype is norm.running_var.dtype is torch.float32
                wanted = 0.1 * models.build(normed)[0](batch[0]).mean(0)
                torch.testing.assert_close(norm.running_mean, wanted, rtol=0, atol=1e-3)
                assert norm.num_batches_tracked == 1


@on_ranks(2)
@pytest.mark.parametrize(("stage", "mode", "asked"), [(0, "bf16", "fp32"), (3, "fp16", "fp32"), (1, "bf16", "bf16")])
def test_output_dtype_is_that_of_outputs_beside_a_loss_and_without_one(stage: int, mode: str, asked: str) -> None:
    settings = table_config(stage, mode, "body")
    settings[mode] = {**settings[mode], "output_dtype": asked}
    rows = measure(settings, "body")
    assert rows["outputs of `engine(...)` beside a loss"] == asked
    assert rows["outputs of `engine(...)` in 16 bits or fp32, where the model returns no loss"] == asked
    assert rows["the loss that `engine(...)` returns"] == "fp32"
