"""Logical collectives per step, the first synchronisation, buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerolite
from tests import models
from tests.distributed.cases.training import engine_window, make_engine, snapshot
from zerolite.comm import NullCommunicator, host_group, use_communicator
from zerolite.zero import ZeroParamStatus


def plain_calls(recorder: Any) -> list[tuple[str, int, str, int, str]]:
    return [(call.op, call.numel, str(call.dtype), call.nbytes, call.tag) for call in recorder.calls]


def calls_per_step(config: dict[str, Any], model: str = "OddModel") -> dict[str, Any]:
    """The collectives of the third window and of reading its norm, and the number of trained elements."""
    engine = make_engine(config, model)
    for step in range(3):
        with zerolite.comm.record() as recorder:
            engine_window(engine, model, step, config["gradient_accumulation_steps"])
            engine.get_global_grad_norm()
            engine.module  # noqa: B018 waits for the gathers that are still in flight
    trained = [p.numel() for p in engine.module.parameters() if p.requires_grad]
    return {"calls": plain_calls(recorder), "numel": sum(trained)}


def initial_sync(config: dict[str, Any], same: bool) -> dict[str, Any]:
    """Build with one seed or with one seed per rank."""
    model = models.build(models.Buffered, seed=5 if same else 5 + dist.get_rank())
    mine = {name: value.clone() for name, value in model.state_dict().items()}
    with zerolite.comm.record() as recorder:
        engine = zerolite.initialize(model, config)
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    return {"mine": mine, "parameters": snapshot(engine), "buffers": buffers, "calls": plain_calls(recorder)}


def buffers_after_training(config: dict[str, Any], broadcast: bool) -> dict[str, Any]:
    engine = make_engine(config, "Buffered", broadcast_buffers=broadcast)
    with torch.no_grad():
        engine.module.offset.fill_(float(dist.get_rank()))
        engine.module.calls.fill_(10 * dist.get_rank())
    with zerolite.comm.record() as recorder:
        engine_window(engine, "Buffered", 0, 1)
    engine.eval()
    with zerolite.comm.record() as evaluation, torch.no_grad():
        engine(models.float_batch(0, 0, 0)[0])
    return {
        "offset": engine.module.offset.clone(),
        "calls": engine.module.calls.clone(),
        "broadcasts": recorder.count(tag="buffers"),
        "dtypes": len({buffer.dtype for buffer in engine.module.buffers()}),
        "in evaluation": len(evaluation.calls),
    }


def host_groups(config: dict[str, Any], directory: str) -> dict[str, list[str]]:
    """The purposes of the gloo groups that have been asked for after each of these."""
    asked: list[str] = []
    found, make = {}, host_group.second_group

    def note(parent: Any, backend: str, purpose: str) -> Any:
        asked.append(purpose)
        return make(parent, backend, purpose)

    host_group.second_group = note  # type: ignore[assignment]
    try:
        engine = make_engine(config)
        engine_window(engine, "OddModel", 0, 1)
        found["a step"] = list(asked)
        engine.save_checkpoint(directory)
        engine.save_checkpoint(directory)
        found["two checkpoints"] = list(asked)
        engine.full_optimizer_state_dict()
        found["whole states"] = asked[len(found["two checkpoints"]) :]
    finally:
        host_group.second_group = make
    return found


def different_models(config: dict[str, Any]) -> str:
    width = 5 + dist.get_rank()
    try:
        make_engine(config, "OddModel", {"width": width})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


# -------------------------------------------------------------------- stage 3


class Tower(nn.Module):
    """``x [B, 7]`` -> ``[B, 3]``. No two layers are equally large, so a number of elements tells which one moved."""

    def __init__(self, sizes: Sequence[int] = (7, 13, 11, 5, 3)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Adapted(nn.Module):
    """A linear layer that is frozen, with a trained product of two thin ones beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Lora(Tower):
    """A tower whose layers are frozen, with adapters."""

    def __init__(self, sizes: Sequence[int] = (7, 13, 11, 5, 3)) -> None:
        super().__init__(sizes)
        self.layers = nn.ModuleList(Adapted(a, b) for a, b in zip(sizes, sizes[1:], strict=False))


class Tied(nn.Module):
    """A token model whose head has the embedding's weight, by being tied or by calling it (``functional``)."""

    def __init__(self, width: int = 5, functional: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCABULARY, width)
        self.middle = nn.Linear(width, width, bias=False)
        self.head = None if functional else nn.Linear(width, models.VOCABULARY, bias=False)
        if self.head is not None:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(self.embed(tokens)))
        return F.linear(hidden, self.embed.weight) if self.head is None else self.head(hidden)


class Checkpointed(Tower):
    """A tower in which each layer but the first is recomputed in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:]:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


STAGE3_MODELS = {"Tower": Tower, "Lora": Lora, "Tied": Tied, "Checkpointed": Checkpointed}


def stage3_engine(config: dict[str, Any], model: str = "Tower", sizes: dict[str, Any] | None = None) -> Any:
    """An engine over one of this module's models, with the weights of seed 7."""
    return zerolite.initialize(models.build(STAGE3_MODELS[model], **(sizes or {})), config)


def stage3_loss(engine: Any, model: str, step: int, micro: int = 0) -> Tensor:
    """The loss of this rank's micro-batch."""
    if model == "Tied":
        tokens, targets = models.token_batch(step, micro, dist.get_rank())
        return F.cross_entropy(engine(tokens).reshape(-1, models.VOCABULARY), targets.reshape(-1))
    return models.square_loss(engine, models.float_batch(step, micro, dist.get_rank()))


def what_moves(engine: Any) -> dict[str, Any]:
    """Padded elements: of each unit's and parameter's gather, of all that stays whole, of every bucket."""
    coordinator = engine.coordinator
    sizes = [handle.full.numel() for handle in coordinator.handles]
    units = [[sizes[index] for index in unit] for unit in coordinator.schedule.units]
    return {
        "units": {unit.name: (sum(numels), len(numels)) for unit, numels in zip(coordinator.units, units, strict=True)},
        "parameters": {handle.name: size for handle, size in zip(coordinator.handles, sizes, strict=True)},
        "persistent": sum(size for h, size in zip(coordinator.handles, sizes, strict=True) if h.persistent),
        "buckets": [bucket.numel for bucket in engine._reducer.layout.buckets],
    }


def gathered(engine: Any) -> list[str]:
    """Names of the parameters that are whole, or on their way, and need not be."""
    handles = engine.coordinator.handles
    return [h.name for h in handles if h.status is not ZeroParamStatus.NOT_AVAILABLE and not h.persistent]


def stage3_calls(
    config: dict[str, Any],
    model: str = "Tower",
    sizes: dict[str, Any] | None = None,
    steps: int = 5,
    evaluate: bool = False,
) -> dict[str, Any]:
    """The collectives of every window, after which nothing may be left gathered; of an evaluation after each window
    (``evaluate``), and what the engine moves."""
    engine = stage3_engine(config, model, sizes)
    windows, evaluations, following = [], [], []
    for step in range(steps):
        with zerolite.comm.record() as recorder:
            for micro in range(config["gradient_accumulation_steps"]):
                engine.backward(stage3_loss(engine, model, step, micro))
                following.append(engine.coordinator.schedule.following)
                assert not gathered(engine), gathered(engine)
                engine.step()
        assert not gathered(engine), gathered(engine)
        pairs = zip(plain_calls(recorder), recorder.calls, strict=True)
        windows.append([(*call, entry.tensors) for call, entry in pairs])
        if evaluate:
            with zerolite.comm.record() as recorder, torch.no_grad():
                engine(models.float_batch(step, 0, 0)[0])
            assert not gathered(engine), gathered(engine)
            evaluations.append(plain_calls(recorder))
    return {"windows": windows, "evaluations": evaluations, "following": following, **what_moves(engine)}


# -------------------------------------------------------------------- addresses


def unaligned(configs: Sequence[dict[str, Any]], world: int) -> list[dict[str, int]]:
    """For each config, as the last of ``world`` ranks that send nothing: how many collectives of each kind ran from
    `initialize` to the second step and a state dict, and how many of their buffers do not begin on 16 bytes."""
    found = []
    for settings in configs:
        with use_communicator(lambda rank, _: NullCommunicator(world - 1, world)), zerolite.comm.record() as recorder:
            engine = make_engine(settings | {"consistency_check_interval": 0})
            for step in range(3):
                engine_window(engine, "OddModel", step, 1)
            engine.full_state_dict()
        counts = Counter(call.op for call in recorder.calls)
        found.append({**counts, "unaligned": sum(call.unaligned for call in recorder.calls)})
    return found
