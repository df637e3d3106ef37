"""Training in which some modules stay in fp32: by an engine, and by plain PyTorch with the same casts written out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import zerolite
from tests.toolkit import models, reference
from tests.toolkit.drop_in import rank_mean
from tests.toolkit.training import snapshot

PATTERNS = ["*.norm", "gate", "positions", "blocks.?.adapter"]
WIDTH, LENGTH = 7, 7


class Gate(nn.Module):
    """``x [..., W]`` -> a dict with a tuple in it; what the best score multiplies is for the caller to do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)
        self.linear.bias.requires_grad_(False)

    def forward(self, x: Tensor, *, temperature: Tensor) -> dict[str, Any]:
        scores = (self.linear(x) / temperature).softmax(-1)
        return {"scores": scores, "best": tuple(scores.max(-1, keepdim=True))}


class Block(nn.Module):
    """A layer in 16 bits with an adapter, which is checkpointed and called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 11)
        self.down = nn.Linear(11, WIDTH)
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))
        self.adapter[0].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        x = x + checkpoint(self.adapter, x, use_reentrant=False)
        return x + self.adapter(x)


class Mixed(nn.Module):
    """``tokens [B, T]`` -> logits ``[B, T, vocabulary]``. With ``PATTERNS`` in fp32: a norm that all blocks share, a
    router, an embedding, adapters; frozen parameters on both sides, one with no dimension, a tied weight in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = Gate()
        self.gain = nn.Parameter(torch.tensor(0.75))
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(WIDTH, models.VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(self.norm(x))
        routed = self.gate(x, temperature=torch.full((1,), 0.5, dtype=x.dtype))
        value, _ = routed["best"]
        x = x + self.gain * value * self.frozen(x) + routed["scores"].mean(-1, keepdim=True)
        return self.head(self.norm(x))


class ByHand(nn.Module):
    """fp32 around one module, written out: every 16-bit argument to fp32, every fp32 result to ``dtype``."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self.dtype = dtype

    def forward(self, x: Tensor, **kwargs: Tensor) -> Any:
        result = self.inner(x.float() if x.is_floating_point() else x, **{k: v.float() for k, v in kwargs.items()})
        if isinstance(result, dict):
            value, index = result["best"]
            return {"scores": result["scores"].to(self.dtype), "best": (value.to(self.dtype), index)}
        return result.to(self.dtype)


def plain_model(dtype: torch.dtype) -> nn.Module:
    """:class:`Mixed` in ``dtype``, except for what ``PATTERNS`` means."""
    model = models.build(Mixed).to(dtype)
    exact = models.build(Mixed)
    for owner, source, name in (
        (model, exact, "norm"),
        (model, exact, "gate"),
        (model, exact, "positions"),
        *((model.blocks[i], exact.blocks[i], "adapter") for i in range(2)),
    ):
        setattr(owner, name, ByHand(getattr(source, name), dtype))
    return model


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by their names in :class:`Mixed`."""
    return {name.replace(".inner", ""): parameter for name, parameter in model.named_parameters()}


def train_plain(
    dtype: torch.dtype,
    optimizer: tuple[str, dict[str, Any]],
    world: int,
    accumulation: int,
    steps: int,
    clip: float = 0.0,
    scale: float = 1.0,
    low_masters: bool = False,
) -> reference.Trajectory:
    """Train in plain PyTorch as every stage must. low_masters: 16-bit parameters are their own masters, updated in
    fp32. scale: of the loss. Gradients are averaged over ranks in fp32; those of 16-bit parameters are rounded if there
    is one micro-batch, or added in 16 bits where masters are."""
    torch.set_num_threads(1)
    model = plain_model(dtype)
    masters = {n: nn.Parameter(p.detach().clone(), p.requires_grad) for n, p in named(models.build(Mixed)).items()}
    trained = [p for p in masters.values() if p.requires_grad]
    torch_optimizer = reference.make_optimizer(optimizer[0], trained, optimizer[1])
    trajectory = reference.Trajectory()

    def publish() -> None:
        with torch.no_grad():
            for name, parameter in named(model).items():
                parameter.copy_(masters[name])
                if low_masters:
                    masters[name].copy_(parameter)

    publish()
    for step in range(steps):
        windows = [[models.token_batch(step, m, r, 2, LENGTH) for r in range(world)] for m in range(accumulation)]
        sums, losses = _window(model, windows, scale, low_masters)
        trajectory.losses.append(sum(losses) / len(losses))
        for name, gradient in sums.items():
            if accumulation == 1:
                gradient = gradient.to(named(model)[name].dtype)
            masters[name].grad = gradient.float() / scale
        norm = reference.global_norm([p.grad for p in trained if p.grad is not None])
        trajectory.norms.append(norm)
        if clip and norm > clip:
            for parameter in trained:
                parameter.grad.mul_(clip / (norm + 1e-6))
        torch_optimizer.step()
        publish()
    trajectory.parameters = {n: p.detach().clone() for n, p in named(model).items()}
    trajectory.masters = {n: p.detach().clone() for n, p in masters.items()}
    return trajectory


def _window(
    model: nn.Module, windows: Sequence[Sequence[Any]], scale: float, low_sums: bool
) -> tuple[dict[str, Tensor], list[float]]:
    """The gradient of a step by name, and all losses."""
    sums: dict[str, Tensor] = {}
    losses = []
    for ranks in windows:
        mean: dict[str, Tensor] = {}
        for batch in ranks:
            model.zero_grad()
            loss = models.token_loss(model, batch)
            (loss * scale / len(windows)).backward()
            losses.append(loss.item())
            for name, parameter in named(model).items():
                if parameter.grad is not None:
                    gradient = parameter.grad.float()
                    mean[name] = mean[name] + gradient if name in mean else gradient
        for name, gradient in mean.items():
            gradient = gradient / len(ranks)
            if low_sums:
                gradient = gradient.to(named(model)[name].dtype)
            sums[name] = sums[name] + gradient if name in sums else gradient
    return sums, losses


# -------------------------------------------------------------------- by an engine


def train(config: dict[str, Any], steps: int, how: str = "") -> dict[str, Any]:
    """how: "init" builds the model in zero.Init; "compiled" compiles a block and the norm (dynamo only)."""
    with zerolite.zero.Init(enabled=how == "init"):
        model = models.build(Mixed)
    if how == "compiled":
        torch._dynamo.reset()
        model.norm.compile(backend="eager")
        model.blocks[0].compile(backend="eager")
    engine = zerolite.initialize(model, config)
    losses, norms = [], []
    for step in range(steps):
        for micro in range(engine.gradient_accumulation_steps):
            loss = models.token_loss(engine, models.token_batch(step, micro, engine.rank, 2, LENGTH))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    trained = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
    masters = dict(zip(trained, zerolite.get_full_master(trained.values()), strict=True))
    saved = engine.full_state_dict()
    parameters = snapshot(engine)
    with torch.no_grad():
        for parameter in saved.values():
            parameter.zero_()
    engine.load_full_state_dict(parameters | {"head.weight": parameters["embed.weight"]})
    reloaded = snapshot(engine)
    return {
        "losses": losses,
        "norms": norms,
        "parameters": parameters,
        "reloaded": reloaded,
        "masters": masters,
        "steps": (engine.global_steps, engine.skipped_steps),
        "second copies": _second_copies(engine),
    }


def _second_copies(engine: Any) -> dict[str, bool]:
    """By name of a trained parameter: whether its master is other memory than the parameter's."""
    buffer = engine.parameter_access._buffer
    return {slot.name: buffer.separate[slot.bucket] for slot in buffer.layout.slots}


def train_many(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Several runs of :func:`train` in one call, by name."""
    return {name: train(**run) for name, run in runs.items()}


# -------------------------------------------------------------------- corners


class Headed(nn.Module):
    """``x [B, 7]`` -> ``[B, 3]`` through a trunk in 16 bits and a head that is to be in fp32. ``widen``: the head is
    called with fp32. ``fails``: it raises."""

    def __init__(self, widen: bool = False) -> None:
        super().__init__()
        self.trunk = nn.Linear(7, 7)
        self.head = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
        self.head[1].bias.requires_grad_(False)
        self.head.register_forward_hook(self._note)
        self.widen = widen
        self.fails = False
        self.outputs: list[torch.dtype] = []

    def _note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.outputs.append(output.dtype)
        if self.fails:
            raise ArithmeticError("as the test wants it")

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        return self.head(hidden.float() if self.widen else hidden)


def head_last(config: dict[str, Any]) -> dict[str, Any]:
    """Outputs of a model whose last module is in fp32, by how the head is called and by the mode torch is in."""
    found: dict[str, Any] = {}
    x = models.float_batch(0, 0, 0)[0]
    for widen in (False, True):
        engine = zerolite.initialize(models.build(Headed, widen=widen), config)
        half = next(p.dtype for p in engine.module.trunk.parameters())
        with torch.no_grad():
            found[f"no_grad {widen}"] = engine(x)
            found[f"module {widen}"] = engine.module(x.to(half))
        with torch.inference_mode():
            found[f"inference {widen}"] = engine(x).clone()
        found[f"train {widen}"] = engine(x).detach()
    return found


def exceptions(config: dict[str, Any]) -> dict[str, Any]:
    """An fp32 module that raises, then training as if nothing had been."""
    engines = [zerolite.initialize(models.build(Headed), config) for _ in range(2)]
    engines[0].module.fails = True
    message = ""
    try:
        engines[0](models.float_batch(0, 0, 0)[0])
    except ArithmeticError as error:
        message = str(error)
    engines[0].module.fails = False
    on = torch.is_autocast_enabled("cpu")
    for engine in engines:
        for step in range(2):
            engine.backward(models.square_loss(engine, models.float_batch(step, 0, engine.rank)))
            engine.step()
    first, second = map(snapshot, engines)
    return {"message": message, "autocast": on, "first": first, "second": second}


def grown(config: dict[str, Any]) -> dict[str, Any]:
    """A frozen parameter of an fp32 module that is trained from the second step on; below stage 3 also a module that
    is added and matches. And the state of the optimizer, saved and loaded."""
    model = models.build(Headed)
    engine = zerolite.initialize(model, config)

    def step(number: int) -> None:
        engine.backward(models.square_loss(engine, models.float_batch(number, 0, engine.rank)))
        engine.step()

    step(0)
    before = snapshot(engine)
    model.head[1].bias.requires_grad_(True)
    step(1)
    if config["zero_optimization"]["stage"] < 3:
        torch.manual_seed(3)
        model.head.append(nn.LayerNorm(3))
        engine.optimizer.add_param_group({"params": model.head[2].parameters()})
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    step(2)
    after = snapshot(engine)
    masters = {n: zerolite.get_full_master(p).dtype for n, p in model.named_parameters()}
    return {"before": before, "after": after, "masters": masters, "outputs": set(model.outputs)}


def ended(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is left of an engine's casts when it is gone; a model from a refused call; an engine over a copy."""
    model = models.build(Headed)
    try:
        zerolite.initialize(model, config | {"fp32_modules": ["haed"]})
    except zerolite.ConfigError as error:
        message = str(error)
    untouched = {p.dtype for p in model.parameters()}
    engine = zerolite.initialize(model, config)
    during = sorted(name for name, module in model.named_modules() if "forward" in vars(module))
    with zerolite.zero.GatheredParameters(model, check=False):
        other = zerolite.initialize(copy.deepcopy(model), config | {"fp32_modules": ["trunk"]})
    dtypes = {name: p.dtype for name, p in snapshot(other).items()}
    again = other(models.float_batch(0, 0, 0)[0]).dtype
    del engine
    after = sorted(name for name, module in model.named_modules() if "forward" in vars(module))
    return {
        "message": message,
        "untouched": untouched,
        "during": during,
        "after": after,
        "dtypes": dtypes,
        "again": again,
    }


class Masked(nn.Module):
    """A table and a mask in fp32, whatever the parameters are; a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(7, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)
        self.register_buffer("mask", torch.eye(WIDTH))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.alias = self.mask

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)) @ self.mask)


def buffers_cast(config: dict[str, Any], buffer_dtype: str) -> dict[str, Any]:
    """The error of a forward in which a buffer meets an activation; the same with the buffers cast."""
    x, y = models.float_batch(0, 0, 0)
    try:
        zerolite.initialize(models.build(Masked), config)(x)
        error = ""
    except RuntimeError as raised:
        error = str(raised)
    engine = zerolite.initialize(models.build(Masked), config | {"data_types": {"buffer_dtype": buffer_dtype}})
    losses = []
    for _ in range(3):
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    buffers = {name: buffer.dtype for name, buffer in engine.module.named_buffers()}
    return {"error": error, "buffers": buffers, "losses": losses, "alias": engine.alias is engine.module.mask}


def reduced_in(config: dict[str, Any]) -> set[torch.dtype]:
    """In which dtypes the head's gradients travel, the only ones there are."""
    model = models.build(Headed)
    model.trunk.requires_grad_(False)
    engine = zerolite.initialize(model, config)
    with zerolite.comm.record() as calls:
        engine.backward(models.square_loss(engine, models.float_batch(0, 0, engine.rank)))
        engine.step()
    return {call.dtype for call in calls.select(tag="gradients")}


class Speaker(nn.Module):
    """``tokens [B, T]`` -> logits ``[B, T, 97]``, and their loss if there are targets: as Hugging Face's models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, WIDTH)
        self.head = nn.Linear(WIDTH, 97)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.embed(tokens)))
        if targets is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


class Fp32Copies(TorchDispatchMode):
    """Count the fp32 tensors of at least ``numel`` elements that operations make."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.made = numel, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.made += isinstance(out, Tensor) and out.dtype is torch.float32 and out.numel() >= self.numel
        return out


def beside_a_loss(config: dict[str, Any]) -> dict[str, Any]:
    """Outputs and gradients of an engine whose model computes its loss, and of the bare model in the same dtype."""
    dtype = torch.float16 if config.get("fp16", {}).get("enabled") else torch.bfloat16
    engine, plain = zerolite.initialize(models.build(Speaker), config), models.build(Speaker).to(dtype)
    torch.manual_seed(5 + engine.rank)
    tokens, targets = torch.randint(97, (2, 3, 13))
    numel = tokens.numel() * 97
    with Fp32Copies(numel) as training:
        out = engine(tokens, targets)
    wanted = plain(tokens, targets)
    same = {name: torch.equal(out[name], wanted[name].to(out[name].dtype)) for name in wanted}
    with torch.no_grad():
        with Fp32Copies(numel) as evaluation:
            graded = engine.eval()(tokens, targets)
        asked = engine(tokens)["logits"]
        bare = engine.module(tokens)["logits"].dtype
    engine.train().backward(out["loss"])
    (wanted["loss"].float() * 4.0).backward()
    for (name, p), p_plain in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
        mean = rank_mean(p_plain.grad.float()) / 4.0
        same[name] = torch.allclose(zerolite.get_full_grad(p), mean, rtol=2**-7, atol=1e-6)
    return {
        "same": same,
        "train": (out["loss"].dtype, out["logits"].dtype, training.made),
        "eval": (graded["loss"].dtype, graded["logits"].dtype, evaluation.made),
        "no loss": asked.dtype,
        "module": bare,
    }
