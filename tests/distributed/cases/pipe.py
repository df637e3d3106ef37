"""Pipelines on every rank, beside plain PyTorch in the same process."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerolite
from tests.toolkit import models, reference
from tests.toolkit.configs import STATIC_SCALE, config
from zerolite.comm import record
from zerolite.pipe import LayerSpec, PipelineModule, TiedLayerSpec

WIDTH, CLASSES = 6, 11


class Block(nn.Module):
    """``[B, 6]`` to ``[B, 6]``."""

    def __init__(self, hidden: int = 9) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Pair(nn.Module):
    """A pair in, a pair out: a float that needs a gradient, and integers that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, ids = pair
        return torch.tanh(self.inner(x)) * ids.unsqueeze(-1), (ids + 1) % 3


class Shift(nn.Module):
    """A buffer and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.arange(WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


def buffers() -> list[Any]:
    shift, norm = LayerSpec(Shift), LayerSpec(nn.BatchNorm1d, WIDTH, affine=False)
    return [LayerSpec(Block), shift, norm, LayerSpec(Block), LayerSpec(Block), norm, shift]


def scaled(x: Tensor) -> Tensor:
    """A layer that is a function."""
    return x * 1.5


def head_of(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return F.linear(x, embedding.weight)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def blocks() -> list[Any]:
    return [LayerSpec(Block, 5), LayerSpec(Block), scaled, LayerSpec(Block, 7), LayerSpec(Block), nn.Tanh()]


def tied() -> list[Any]:
    embedding = ("words", nn.Embedding, CLASSES, WIDTH)
    middle = [LayerSpec(Block), LayerSpec(Block), LayerSpec(Block), LayerSpec(Block)]
    return [TiedLayerSpec(*embedding), *middle, TiedLayerSpec(*embedding, forward_fn=head_of)]


def pairs() -> list[Any]:
    return [LayerSpec(Pair), LayerSpec(Pair), LayerSpec(Pair), LayerSpec(Pair), lambda pair: pair[0]]


def float_batch(generator: torch.Generator, length: int) -> tuple[Any, Any]:
    return torch.randn(length, WIDTH, generator=generator), torch.randn(length, WIDTH, generator=generator)


def token_batch(generator: torch.Generator, length: int) -> tuple[Any, Any]:
    tokens = torch.randint(CLASSES, (2, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def pair_batch(generator: torch.Generator, length: int) -> tuple[Any, Any]:
    x, y = float_batch(generator, length)
    return (x, torch.randint(1, 3, (length,), generator=generator)), y


KINDS: dict[str, tuple[Callable[[], list[Any]], Callable[..., Any], Callable[..., Any]]] = {
    "blocks": (blocks, float_batch, F.mse_loss),
    "tied": (tied, token_batch, cross_entropy),
    "pairs": (pairs, pair_batch, F.mse_loss),
    "buffers": (buffers, float_batch, F.mse_loss),
    "modules": (
        lambda: [Block(), nn.ReLU(inplace=True), Block(), nn.ReLU(inplace=True), Block()],
        float_batch,
        F.mse_loss,
    ),
}


def batches_of(make: Callable[..., Any], step: int, micro_batches: int, data: int, lengths: Any) -> list[list[Any]]:
    """[data rank][micro-batch]."""
    generator = torch.Generator().manual_seed(1000 + step)
    length = lengths[step % len(lengths)]
    return [[make(generator, length) for _ in range(micro_batches)] for _ in range(data)]


def module_of(kind: str, **more: Any) -> PipelineModule:
    layers, _, loss = KINDS[kind]
    return PipelineModule(layers(), loss_fn=loss, base_seed=7, **more)


def train(
    kind: str = "blocks",
    stages: int = 2,
    schedule: str = "1f1b",
    micro_batches: int = 4,
    steps: int = 4,
    lengths: tuple[int, ...] = (3,),
    zero: int = 0,
    precision: str = "fp32",
    pipeline: dict[str, Any] | None = None,
    sequential: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Losses, norms and this rank's parameters of a pipeline and of plain PyTorch on the joint batch."""
    settings = config(zero, precision, micro_batches, clip=0.5)
    settings["pipeline"] = {"stages": stages, "schedule": schedule, **(pipeline or {})}
    model: nn.Module = module_of(kind, **more)
    _, make, loss_fn = KINDS[kind]
    whole = copy.deepcopy(model)
    whole.build(range(len(whole.specs)))
    if sequential:
        model = nn.Sequential(*copy.deepcopy(list(whole.functions.values())))
    engine = zerolite.initialize(model, settings, loss_fn=loss_fn if sequential else None)
    data, rank = engine.data_parallel_world_size, engine.data_parallel_rank
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    result: dict[str, Any] = {"losses": [], "norms": [], "wanted_losses": [], "wanted_norms": [], "evals": []}
    for step in range(steps):
        batches = batches_of(make, step, micro_batches, data, lengths)
        wanted_loss = reference_loss(whole.eval(), loss_fn, batches)
        whole.train()
        result["evals"].append((engine.eval_batch(iter(batches[rank])).item(), wanted_loss))
        with record() as recorder:
            result["losses"].append(engine.train_batch(iter(batches[rank])).item())
        result["norms"].append(engine.get_global_grad_norm())
        loss, norm = reference_step(whole, optimizer, loss_fn, batches)
        result["wanted_losses"].append(loss)
        result["wanted_norms"].append(norm)
    wanted = {name: p.detach().clone() for name, p in whole.named_parameters()}
    if sequential:
        wanted = {name.removeprefix("layers."): p for name, p in wanted.items()}
    return result | {
        "parameters": {name: p.detach().clone() for name, p in engine.module.named_parameters()},
        "wanted": wanted,
        "buffers": {name: b.clone() for name, b in engine.module.named_buffers()},
        "wanted_buffers": {name.removeprefix("layers." * sequential): b for name, b in whole.named_buffers()},
        "calls": [(call.op, call.tag, call.numel) for call in recorder.calls],
        "met": [(call.dimension, call.ranks) for call in recorder.calls if call.tag == "control"],
        "micro_steps": engine.micro_steps,
    }


def reference_step(whole: nn.Module, optimizer: Any, loss_fn: Any, batches: list[list[Any]]) -> tuple[float, float]:
    optimizer.zero_grad()
    loss = reference_loss(whole, loss_fn, batches, backward=True)
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    optimizer.step()
    return loss, norm.item()


def reference_loss(whole: nn.Module, loss_fn: Any, batches: list[list[Any]], backward: bool = False) -> float:
    flat = [micro for ranks in batches for micro in ranks]
    total = 0.0
    for inputs, targets in flat:
        outputs = whole(*inputs) if isinstance(inputs, tuple) else whole(inputs)
        loss = loss_fn(outputs, targets) / len(flat)
        total += loss.item()
        if backward:
            loss.backward()
    return total


# -------------------------------------------------------------------- models divided by names


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


class TiedGpt(nn.Module):
    """Token ids and targets to a loss, keywords between; the head is the embedding, a mask comes from the ids, and
    positions are a parameter of the model itself."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.positions = nn.Parameter(torch.randn(8, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Masked() for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        x += self.positions[: tokens.shape[1]]
        mask = (tokens != 3).unsqueeze(-1).to(x.dtype)
        for block in self.blocks:
            x = block(x, mask=mask)
        logits = self.head(x)
        return cross_entropy(logits, targets), logits


class Inputs(nn.Module):
    """Embeddings, and with them a mask that does not come from parameters, which every part needs."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("ignored", torch.tensor([3, 5]))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        mask = (tokens.unsqueeze(-1) != self.ignored).all(-1, keepdim=True)
        x = self.words(tokens) * self.scale
        return x, mask.to(x.dtype)


class Opened(nn.Module):
    """Model of which the modules before a part cannot be left out as a whole: their mask is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = Inputs()
        self.blocks = nn.ModuleList(Masked() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, mask = self.inputs(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return cross_entropy(self.head(x), targets)


class Normed(nn.Module):
    """Statistics in modules without parameters, in the first part and in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.before = nn.BatchNorm1d(WIDTH, affine=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.behind = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.before(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.behind(x), targets)


@functools.lru_cache
def ramp(length: int) -> Tensor:
    return torch.linspace(0.5, 1.0, length).unsqueeze(-1)


class Caching(TiedGpt):
    """Tables that are made once for each length: one kept by the module, one by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        length = tokens.shape[1]
        if length not in self.tables:
            self.tables[length] = torch.ones(length, 1) * 0.5
        x = self.embed(tokens) * ramp(length) + self.positions[:length]
        for block in self.blocks:
            x = block(x, self.tables[length])
        logits = self.head(x)
        return cross_entropy(logits, targets), logits


class Masked(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * mask


class Checkpointed(TiedGpt):
    """Every block is checkpointed by the model itself."""

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        mask = (tokens != 3).unsqueeze(-1).to(x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False)
        logits = self.head(x)
        return cross_entropy(logits, targets), logits


def gpt2() -> nn.Module:
    model = models.hugging_face_gpt2()
    return type(model)(type(model.config)(**{**model.config.to_dict(), "n_layer": 4}))


def llama() -> nn.Module:
    model = models.hugging_face_llama()
    return type(model)(type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 4}))


def hf_batch(generator: torch.Generator, length: int) -> dict[str, Tensor]:
    tokens = torch.randint(CLASSES, (2, length), generator=generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


NAMED: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "TiedGpt": (TiedGpt, token_batch),
    "Checkpointed": (Checkpointed, token_batch),
    "Normed": (Normed, float_batch),
    "Caching": (Caching, token_batch),
    "Opened": (Opened, token_batch),
    "example": (lambda: models.example_gpt(4), token_batch),
    "gpt2": (gpt2, hf_batch),
    "llama": (llama, hf_batch),
}


def train_named(
    kind: str = "TiedGpt",
    stages: int = 2,
    schedule: str = "1f1b",
    micro_batches: int = 4,
    steps: int = 3,
    lengths: tuple[int, ...] = (4, 6),
    zero: int = 0,
    precision: str = "fp32",
    pipeline: dict[str, Any] | None = None,
    other_seed: bool = False,
    mine: bool = False,
    loss: bool = False,
) -> dict[str, Any]:
    """Train as :func:`train` does. other_seed: each rank starts from other values. mine: with an optimizer made before.
    loss: of a loss function, and not the model's own."""
    build, make = NAMED[kind]
    settings = config(zero, precision, micro_batches, clip=0.5)
    settings["pipeline"] = {"stages": stages, "schedule": schedule, **(pipeline or {})}
    torch.manual_seed(7)
    model = build()
    whole = copy.deepcopy(model)
    if other_seed:
        for parameter in model.parameters():
            parameter.data.add_(dist.get_rank())
    optimizer = None
    if mine:
        settings.pop("optimizer")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    loss_fn = cross_entropy if loss else None
    engine = zerolite.initialize(model, settings, optimizer=optimizer, loss_fn=loss_fn)
    data, rank = engine.data_parallel_world_size, engine.data_parallel_rank
    plain = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    result: dict[str, Any] = {"losses": [], "norms": [], "wanted_losses": [], "wanted_norms": [], "evals": []}
    for step in range(steps):
        batches = batches_of(make, step, micro_batches, data, lengths)
        wanted = named_loss(whole.eval(), batches, loss_fn)
        whole.train()
        result["evals"].append((engine.eval_batch(iter(batches[rank])).item(), wanted))
        with record() as recorder:
            result["losses"].append(engine.train_batch(iter(batches[rank])).item())
        result["norms"].append(engine.get_global_grad_norm())
        plain.zero_grad()
        result["wanted_losses"].append(named_loss(whole, batches, loss_fn, backward=True))
        result["wanted_norms"].append(torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5).item())
        plain.step()
    return result | {
        "parameters": {name: p.detach().clone() for name, p in engine.module.named_parameters()},
        "wanted": {name: p.detach().clone() for name, p in whole.named_parameters()},
        "whole": engine.full_state_dict(),
        "wanted_whole": whole.state_dict(),
        "calls": [(call.op, call.tag, call.numel) for call in recorder.calls],
        "micro_steps": engine.micro_steps,
    }


def named_loss(whole: nn.Module, batches: list[list[Any]], loss_fn: Any, backward: bool = False) -> float:
    flat = [micro for ranks in batches for micro in ranks]
    total = 0.0
    for micro in flat:
        if loss_fn is not None:
            loss = loss_fn(whole(micro[0]), micro[1])
        else:
            outputs = whole(**micro) if isinstance(micro, dict) else whole(*micro)
            loss = getattr(outputs, "loss", None)
            loss = outputs[0] if loss is None and not isinstance(outputs, Tensor) else outputs if loss is None else loss
        loss = loss / len(flat)
        total += loss.item()
        if backward:
            loss.backward()
    return total


# -------------------------------------------------------------------- what goes wrong


class Fails(Block):
    """Raises in the forward of some micro-batch, counted over all, and then no more."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise FileNotFoundError("the layer has lost its file")
        return super().forward(x)


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise FileNotFoundError("the gradient has lost its file")


class FailsInBackward(Block):
    def forward(self, x: Tensor) -> Tensor:
        return FailsBackward.apply(super().forward(x))  # type: ignore[no-any-return]


def fail(
    where: int = 1, at: int = 1, schedule: str = "1f1b", backward: bool = False, chunks: int | None = None
) -> list[str]:
    """Return the errors on each rank when a layer fails; then run a step that succeeds, if one can."""
    layers: list[Any] = [LayerSpec(Block) for _ in range(4)]
    layers[where] = LayerSpec(FailsInBackward) if backward else LayerSpec(Fails, at)
    settings = config(0, "fp32", 4)
    settings["pipeline"] = {"stages": 2, "schedule": schedule, "chunks": chunks}
    engine = zerolite.initialize(PipelineModule(layers, loss_fn=F.mse_loss, base_seed=7), settings)
    said = []
    for step in range(3):
        batches = batches_of(float_batch, step, 4, engine.data_parallel_world_size, (3,))
        try:
            loss = engine.train_batch(iter(batches[engine.data_parallel_rank]))
        except (RuntimeError, FileNotFoundError) as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append(f"{loss.item():.6f} {engine.get_global_grad_norm():.6f}")
    return said


def starve(rank: int, have: int, raises: bool = False) -> str:
    """Return the errors on each rank when one has ``have`` micro-batches only, or its iterator raises then; -1: all
    have."""
    settings = config(0, "fp32", 4)
    settings["pipeline"] = {"stages": 2}
    engine = zerolite.initialize(module_of("blocks"), settings)
    batches = batches_of(float_batch, 0, 4, engine.data_parallel_world_size, (3,))[engine.data_parallel_rank]

    def some() -> Iterator[Any]:
        short = rank in (-1, dist.get_rank())
        yield from batches[: have if short else 4]
        if short and raises:
            raise FileNotFoundError("no more shards")

    try:
        engine.train_batch(some())
    except (RuntimeError, FileNotFoundError, StopIteration) as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def differ(what: str) -> str:
    """Return the errors on each rank when the last one reads other data, or one micro-batch is longer."""
    settings = config(0, "fp32", 4)
    settings["pipeline"] = {"stages": 2}
    engine = zerolite.initialize(module_of("blocks"), settings)
    batches = batches_of(float_batch, 0, 4, engine.data_parallel_world_size, (3,))[engine.data_parallel_rank]
    if what == "length":
        batches[2] = batches_of(float_batch, 0, 1, 1, (5,))[0][0]
    elif dist.get_rank() == dist.get_world_size() - 1:
        batches = batches_of(float_batch, 1, 4, 1, (3 if what == "values" else 5,))[0]
    try:
        engine.train_batch(iter(batches))
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def refuse(kind: str, pipeline: dict[str, Any] | None = None, micro_batches: int = 4) -> str:
    """Return the error about a model that cannot be divided, or not so."""
    builds: dict[str, Callable[[], nn.Module]] = {
        "Skips": Skips,
        "TiedGpt": TiedGpt,
        "module": lambda: module_of("blocks"),
        "three stages": lambda: module_of("blocks", num_stages=3),
        "broken": lambda: PipelineModule([LayerSpec(Block), LayerSpec(Block), LayerSpec(Block), LayerSpec(nn.Linear)]),
        "frozen": lambda: nn.Sequential(Block(), Block(), nn.Tanh(), nn.Tanh()),
    }
    settings = config(0, "fp32", micro_batches)
    settings["pipeline"] = {"stages": 2, **(pipeline or {})}
    make = token_batch if kind == "TiedGpt" else float_batch
    try:
        engine = zerolite.initialize(builds[kind](), settings, loss_fn=F.mse_loss if kind == "Skips" else None)
        engine.train_batch(iter(batches_of(make, 0, micro_batches, 1, (3,))[0]))
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


# -------------------------------------------------------------------- other numbers


def train_half(precision: str, schedule: str = "1f1b", steps: int = 6) -> dict[str, Any]:
    """bf16 or fp16 masters in fp32, beside the reference of the other stages' tests."""
    settings = config(1, precision, 4, clip=0.5)
    settings["pipeline"] = {"stages": 2, "schedule": schedule}
    model = module_of("tied")
    whole = copy.deepcopy(model)
    whole.build(range(len(whole.specs)))
    engine = zerolite.initialize(model, settings)
    data, rank = engine.data_parallel_world_size, engine.data_parallel_rank
    batches = [batches_of(token_batch, step, 4, data, (3, 5)) for step in range(steps)]
    losses, norms = [], []
    for step in range(steps):
        losses.append(engine.train_batch(iter(batches[step][rank])).item())
        norms.append(engine.get_global_grad_norm())

    def loss_of(compute: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(compute(batch[0]).float(), batch[1])

    by_micro = [[list(ranks) for ranks in zip(*step, strict=True)] for step in batches]
    optimizer = ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01})
    scale = STATIC_SCALE if precision == "fp16" else 1.0
    wanted = reference.train(whole, loss_of, by_micro, precision, optimizer, 0.5, scale)
    return {
        "losses": losses,
        "norms": norms,
        "wanted_losses": wanted.losses,
        "wanted_norms": wanted.norms,
        "parameters": {name: p.detach().float().clone() for name, p in engine.module.named_parameters()},
        "wanted": wanted.parameters,
        "dtypes": sorted({str(p.dtype) for p in engine.module.parameters()}),
        "evals": [],
        "calls": [],
    }


class Counts(nn.Module):
    """Knows how many of its outputs are alive: activations between forward and backward."""

    alive: weakref.WeakSet[Any]
    most = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.alive = weakref.WeakSet()

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        token = Kept()
        self.alive.add(token)
        self.most = max(self.most, len(self.alive))
        return Keeping.apply(made, token)  # type: ignore[no-any-return]


class Kept:
    """Lives as long as a node of the graph."""


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Kept) -> Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def in_flight(schedule: str, micro_batches: int = 6, evaluate: bool = False) -> int:
    """The most micro-batches whose activations were held at once on this rank."""
    settings = config(0, "fp32", micro_batches)
    settings["pipeline"] = {"stages": dist.get_world_size(), "schedule": schedule}
    model = nn.Sequential(*(Counts() for _ in range(dist.get_world_size())))
    counted = model[dist.get_rank()]
    engine = zerolite.initialize(model, settings, loss_fn=F.mse_loss)
    batches = batches_of(float_batch, 0, micro_batches, 1, (3,))[0]
    gc.disable()
    try:
        (engine.eval_batch if evaluate else engine.train_batch)(iter(batches))
    finally:
        gc.enable()
    assert not len(counted.alive), "activations of a step that has ended"
    return counted.most


def outputs() -> tuple[float, Any, Any]:
    """Return the results of eval_batch: loss, outputs and both; the outputs as those of a whole model."""
    settings = config(0, "fp32", 2)
    settings["pipeline"] = {"stages": 2}
    model = module_of("blocks")
    whole = copy.deepcopy(model)
    whole.build(range(len(whole.specs)))
    engine = zerolite.initialize(model, settings)
    batches = batches_of(float_batch, 0, 2, 1, (3,))[0]
    loss, made = engine.eval_batch(iter(batches), return_logits=True)
    alone = engine.eval_batch(iter(batches), compute_loss=False)
    if made is not None:
        for one, other, (inputs, _) in zip(made, alone, batches, strict=True):
            assert torch.equal(one, other) and torch.allclose(one, whole(inputs))
    return loss.item(), made is None, alone is None


def before_initialize() -> str:
    """Return the error of a module of specs that is asked for parameters too early."""
    try:
        list(module_of("blocks").parameters())
    except RuntimeError as error:
        return str(error)
    return "built"
