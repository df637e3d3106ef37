"""Pipelines of layers, and of models divided by names, against plain PyTorch on the joint batch: losses, norms and
parameters; messages; and models that are refused. Grids, and more of steps that fail, are in test_grid*.py."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerolite
from tests.toolkit import pipes
from tests.toolkit.compare import from_all_ranks
from tests.toolkit.configs import SGD, config
from tests.toolkit.pipes import WIDTH, Block, TiedGpt, batches_of, float_batch, module_of, plain_loss
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import raises
from zerolite.comm import record
from zerolite.pipe import LayerSpec, PipelineModule

RELATIVE = 1e-6  # fp32: only the order differs in which micro-batches are summed


def assert_everywhere(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """This rank has some of the wanted values, and all ranks together have all."""
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=RELATIVE, atol=RELATIVE, msg=lambda m, n=name: f"{n}: {m}")
    assert {name for names in from_all_ranks(list(found)) for name in names} == set(wanted)


def train(
    kind: str,
    stages: int = 2,
    schedule: str = "1f1b",
    micro_batches: int = 4,
    steps: int = 3,
    lengths: tuple[int, ...] = (3,),
    zero: int = 0,
    sequential: bool = False,
    other_seed: bool = False,
    mine: bool = False,
    **pipeline: Any,
) -> tuple[Any, Any]:
    """Train a pipeline beside plain PyTorch on the joint batch; return the engine, and a recorder of its last step.
    sequential: the layers are in an nn.Sequential. other_seed: each rank starts from other values. mine: with an
    optimizer made before."""
    settings = config(zero, "fp32", micro_batches, clip=0.5)
    settings["pipeline"] = {"stages": stages, "schedule": schedule, **pipeline}
    torch.manual_seed(7)
    if kind in pipes.NAMED:
        build, make = pipes.NAMED[kind]
        model, loss_fn = build(), pipes.cross_entropy if kind == "example" else None
        whole = copy.deepcopy(model)
    else:
        _, make, loss_fn = pipes.KINDS[kind]
        model = module_of(kind)
        whole = copy.deepcopy(model)
        whole.build(range(len(whole.specs)))
        if sequential:
            whole = nn.Sequential(*whole.functions.values())
            model = copy.deepcopy(whole)
    for parameter in model.parameters() if other_seed else ():
        parameter.data.add_(dist.get_rank())
    given: dict[str, Any] = {"loss_fn": loss_fn if sequential or kind in pipes.NAMED else None}
    if mine:
        settings.pop("optimizer")
        given["optimizer"] = torch.optim.SGD(model.parameters(), **SGD[1])
    engine = zerolite.initialize(model, settings, **given)
    data, rank = engine.data_parallel_world_size, engine.data_parallel_rank
    optimizer = torch.optim.SGD(whole.parameters(), **SGD[1])
    for step in range(steps):
        batches = batches_of(make, step, micro_batches, data, lengths[step % len(lengths)])
        wanted = plain_loss(whole.eval(), batches, loss_fn)
        assert engine.eval_batch(iter(batches[rank])).item() == pytest.approx(wanted, rel=RELATIVE)
        if step == 0:
            twice = engine.eval_batch(iter(2 * batches[rank]), num_micro_batches=2 * len(batches[rank]))
            assert twice.item() == pytest.approx(wanted, rel=RELATIVE)
        with record() as recorder:
            loss = engine.train_batch(iter(batches[rank])).item()
        optimizer.zero_grad()
        assert loss == pytest.approx(plain_loss(whole.train(), batches, loss_fn, backward=True), rel=RELATIVE)
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5).item()
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=RELATIVE)
        optimizer.step()
    found = {name: p.detach() for name, p in engine.module.named_parameters()}
    assert_everywhere(found, {name: p.detach() for name, p in whole.named_parameters()})
    if kind in pipes.NAMED:  # buffers too
        state = dict(engine.full_state_dict())
        torch.testing.assert_close(state, dict(whole.state_dict()), rtol=RELATIVE, atol=RELATIVE)
    else:
        assert_everywhere(dict(engine.module.named_buffers()), dict(whole.named_buffers()))
    return engine, recorder


# -------------------------------------------------------------------- the same numbers


@on_ranks(2, timeout=120)
def test_a_tied_model_on_two_stages() -> None:
    engine, recorder = train("tied", lengths=(3, 5), steps=4)
    assert engine.micro_steps == 4 * 4
    # One message for each micro-batch and direction, and nothing else but two exchanges on the host, the loss, the norm
    # and the gradient of what is shared.
    assert Counter((call.op, call.tag) for call in recorder.calls) == {
        ("send", "pipe"): 4,
        ("receive", "pipe"): 4,
        ("all_reduce", "control"): 2,
        ("all_reduce", "loss"): 1,
        ("all_reduce", "stats"): 1,
        ("all_reduce", "shared_gradients"): 1,
    }


@on_ranks(4)
def test_two_pipelines_meet_along_each_dimension() -> None:
    _, recorder = train("blocks", steps=1)
    met = [(call.dimension, call.ranks) for call in recorder.select(tag="control")]
    assert met == [("pipe", 2), ("data", 2)] * 2


@on_ranks(2)
def test_a_model_divided_by_names() -> None:
    engine, _ = train("TiedGpt", lengths=(4, 6), other_seed=True, mine=True)
    names = [name for name, _ in engine.module.named_parameters()]
    assert dist.get_rank() == 0 or ("positions" not in names and "embed.weight" in names)


GRIDS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"kind": "inplace", "sequential": True, "lengths": (3, 5, 2)},
        {"kind": "buffers"},
        {"kind": "buffers", "sequential": True},
        {"kind": "tied", "zero": 1, "activation_checkpoint_interval": 2},
        {"kind": "blocks", "partition_method": "type:block"},
        {"kind": "blocks", "schedule": "zero_bubble", "chunks": 1},
        {"kind": "blocks", "schedule": "gpipe", "micro_batches": 1},
        {"kind": "tied", "stages": 1},
        *({"kind": "pairs", "schedule": name, "partition_method": "uniform"} for name in ("zero_bubble", "zbv")),
        *({"kind": kind, "lengths": (4, 6)} for kind in ("Checkpointed", "Opened", "Normed", "example")),
        {"kind": "Checkpointed", "schedule": "zbv", "lengths": (4, 6)},
        {"kind": "TiedGpt", "schedule": "zero_bubble", "split": ["blocks.1", "blocks.2", "head"], "lengths": (4, 6)},
    ],
    3: [{"kind": "tied", "stages": 3, "micro_batches": 5}],
    4: [
        {"kind": "tied", "stages": 4, "schedule": "gpipe", "micro_batches": 3},
        {"kind": "tied", "zero": 1, "schedule": "interleaved_1f1b", "lengths": (3, 4)},
        {"kind": "tied", "zero": 1, "schedule": "zbv"},
        {"kind": "blocks", "schedule": "zero_bubble"},
        {"kind": "TiedGpt", "stages": 4, "lengths": (4, 6)},
    ],
}


@pytest.mark.slow
@on_ranks(*GRIDS, timeout=420)
def test_grids_options_and_divided_models() -> None:
    for settings in GRIDS[dist.get_world_size()]:
        train(**settings)


# -------------------------------------------------------------------- what is held, and what comes out


@pytest.mark.slow
@on_ranks(2)
def test_what_eval_batch_gives() -> None:
    """The loss, outputs of the last stage, or both; the outputs are those of a whole model."""
    model = module_of("blocks")
    with raises(RuntimeError, "2 ranks", "num_stages=1"):
        list(model.parameters())
    whole = copy.deepcopy(model)
    whole.build(range(len(whole.specs)))
    engine = zerolite.initialize(model, config(0, "fp32", 2) | {"pipeline": {"stages": 2}})
    batches = batches_of(float_batch, 0, 2)[0]
    loss, made = engine.eval_batch(iter(batches), return_logits=True)
    alone = engine.eval_batch(iter(batches), compute_loss=False)
    assert loss.item() == pytest.approx(plain_loss(whole, [batches], F.mse_loss), rel=RELATIVE)
    assert (made is None) == (alone is None) == (dist.get_rank() == 0)
    for one, other, (inputs, _) in zip(made or (), alone or (), batches, strict=False):
        assert torch.equal(one, other) and torch.allclose(one, whole(inputs))


# -------------------------------------------------------------------- errors


class Skips(nn.Module):
    """The first block's input comes back at the end: over every boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = stem = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x + stem.detach()


BROKEN = [LayerSpec(Block), LayerSpec(Block), LayerSpec(Block), LayerSpec(nn.Linear)]
REFUSED: list[tuple[Callable[[], nn.Module], dict[str, Any], list[str]]] = [
    (Skips, {}, ["'stem.bias'", "part 0", "'blocks.2'", "skip connection"]),
    (TiedGpt, {"split": ["blocks.1.up"]}, ["blocks.0.down.bias", "blocks.1.up"]),
    (TiedGpt, {"split": ["blocks"]}, ["'blocks'", "called by itself"]),
    (lambda: module_of("blocks"), {"split": ["layers.2"]}, ["pipeline.split", "PipelineModule"]),
    (lambda: module_of("blocks", num_stages=3), {}, ["num_stages = 2", "got 3"]),
    (lambda: PipelineModule(BROKEN), {}, ["could not be divided", "in_features"]),
    (lambda: nn.Sequential(Block(), Block(), *[nn.Tanh()] * 2), {"partition_method": "uniform"}, ["trained parameter"]),
]


@pytest.mark.slow
@on_ranks(2)
def test_what_cannot_be_a_pipeline() -> None:
    for build, pipeline, words in REFUSED:
        settings = config(0, "fp32", 4) | {"pipeline": {"stages": 2, **pipeline}}
        make = pipes.token_batch if build is TiedGpt else float_batch
        with raises((RuntimeError, ValueError, TypeError), *words):
            engine = zerolite.initialize(build(), settings, loss_fn=F.mse_loss if build is Skips else None)
            engine.train_batch(iter(batches_of(make, 0)[0]))
