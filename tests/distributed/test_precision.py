"""Modules that stay in fp32, at every stage, against plain PyTorch with the same casts; and their corners.

The table of dtypes in docs/precision.md is checked in test_precision_table.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerolite
from tests.toolkit import models, reference
from tests.toolkit.compare import assert_same_bits, assert_same_on_ranks
from tests.toolkit.configs import ADAMW, STATIC_SCALE, at
from tests.toolkit.ranks import on_ranks
from tests.toolkit.traffic import Tower
from tests.toolkit.training import raises, run_steps, snapshot

PATTERNS = ["*.norm", "gate", "positions", "blocks.?.adapter"]
WIDTH, LENGTH, STEPS = 7, 7, 5
FOREACH = (ADAMW[0], {**ADAMW[1], "foreach": True})  # torch's own arithmetic
# Where the last place of a weight flips the rounding of an activation, gradients differ by a share of 2^-8 of a
# contribution, and what is kept in fp32 by that times lr.
FLIPPED = 2e-4
STAGES = ("0", "1", "2", "3 moving", "3 one unit")


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
    model, exact = models.build(Mixed).to(dtype), models.build(Mixed)
    pairs = [(model, exact, name) for name in ("norm", "gate", "positions")]
    for owner, source, name in [*pairs, *((model.blocks[i], exact.blocks[i], "adapter") for i in range(2))]:
        setattr(owner, name, ByHand(getattr(source, name), dtype))
    return model


def train(config: dict[str, Any]) -> dict[str, Any]:
    engine = zerolite.initialize(models.build(Mixed), config)
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(engine.gradient_accumulation_steps):
            loss = models.token_loss(engine, models.token_batch(step, micro, engine.rank, 2, LENGTH))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    assert (engine.global_steps, engine.skipped_steps) == (STEPS, 0)
    parameters = snapshot(engine)
    assert_same_on_ranks(parameters)
    trained = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
    masters = dict(zip(trained, zerolite.get_full_master(trained.values()), strict=True))
    buffer = engine._access._buffer
    with torch.no_grad():
        for parameter in engine.full_state_dict().values():
            parameter.zero_()
    engine.load_full_state_dict(parameters | {"head.weight": parameters["embed.weight"]})
    assert_same_bits(parameters, snapshot(engine), "saved and loaded")
    separate = {slot.name: buffer.buckets[slot.bucket].separate for slot in buffer.layout.slots}
    return {"losses": losses, "norms": norms, "parameters": parameters, "masters": masters, "separate": separate}


def in_fp32(name: str) -> bool:
    return name.startswith(("norm.", "gate.", "positions.")) or ".adapter." in name


def assert_dtypes(found: dict[str, Any], half: torch.dtype) -> None:
    """``separate``: the master is other memory than the parameter."""
    for name, value in found["parameters"].items():
        assert value.dtype is (torch.float32 if in_fp32(name) else half), name
    for name, value in found["masters"].items():
        assert value.dtype is torch.float32, name
        assert found["separate"][name] is not in_fp32(name), f"{name}: masters"


@pytest.mark.slow
@on_ranks(2, 3, timeout=240)
@pytest.mark.parametrize(("precision", "accumulation"), [("bf16", 2), ("fp16", 1)])
def test_all_stages_match_casts_by_hand(precision: str, accumulation: int) -> None:
    """Masters have the bits of plain PyTorch on two ranks; on three, of the other stages."""
    world, dtype = dist.get_world_size(), reference.DTYPES[precision]
    batches = [
        [[models.token_batch(step, m, r, 2, LENGTH) for r in range(world)] for m in range(accumulation)]
        for step in range(STEPS)
    ]
    scale = STATIC_SCALE if precision == "fp16" else 1.0
    given = (models.build(Mixed), models.token_loss, batches, precision, FOREACH, 0.0, scale, "fp32")
    wanted = reference.train(*given, compute=plain_model(dtype))
    runs = {}
    for stage in STAGES:
        runs[stage] = found = train(at(stage, precision, accumulation, 0.0, FOREACH, fp32_modules=PATTERNS))
        kernels = train(at(stage, precision, accumulation, 0.0, ADAMW, fp32_modules=PATTERNS))
        torch.testing.assert_close(kernels["masters"], found["masters"], rtol=2e-6, atol=FLIPPED)
        assert_dtypes(found, dtype)
        # Stages 0 and 1 sum a window's gradients and then reduce; stages 2 and 3 do it as the reference does.
        if world == 2 and (accumulation == 1 or stage[0] in "23"):
            assert found["norms"] == pytest.approx(wanted.norms, rel=1e-6)
            trained = {name: wanted.masters[name] for name in found["masters"]}
            assert_same_bits(found["masters"], trained, "masters of the engine and of plain PyTorch")
    pairs = [("0", "1"), ("2", "3 moving"), ("2", "3 one unit")]
    for one, other in [*pairs, ("0", "2")] if accumulation == 1 else pairs:
        for what in ("parameters", "masters"):
            assert_same_bits(runs[one][what], runs[other][what], f"{what} of stages {one} and {other}")
        assert runs[one]["losses"] == runs[other]["losses"]


# -------------------------------------------------------------------- corners


def corner(stage: int, precision: str = "bf16", **more: Any) -> dict[str, Any]:
    if precision == "autocast":
        more, precision = {"torch_autocast": {"enabled": True}, **more}, "fp32"
    return at(stage, precision, optimizer=ADAMW, **{"fp32_modules": ["head"], **more})


class Headed(nn.Module):
    """``x [B, 7]`` -> ``[B, 3]`` through a trunk in 16 bits and a head that is to be in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(7, 7)
        self.head = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
        self.head[1].bias.requires_grad_(False)
        self.head.register_forward_hook(self._note)
        self.outputs: list[torch.dtype] = []

    def _note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.outputs.append(output.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.trunk(x)))


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameters_that_are_trained_later(stage: int) -> None:
    """A frozen parameter of an fp32 module that is trained from the second step on. And the state of the optimizer,
    saved and loaded."""
    model = models.build(Headed)
    engine = zerolite.initialize(model, corner(stage))
    run_steps(engine)
    before = snapshot(engine)
    model.head[1].bias.requires_grad_(True)
    run_steps(engine, 1, 1)
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    run_steps(engine, 1, 2)
    after = snapshot(engine)
    assert_same_on_ranks(after)
    inside = [value.dtype for name, value in after.items() if name.startswith("head.")]
    assert inside == [torch.float32] * 4
    assert all(zerolite.get_full_master(p).dtype is torch.float32 for p in model.parameters())
    assert set(model.outputs) == {torch.bfloat16}
    assert not torch.equal(before["head.1.bias"], after["head.1.bias"])


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_travel_in_fp32_unless_all_are_asked_not_to(stage: int) -> None:
    """The head's gradients are the only ones there are."""
    safe = {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]}
    autocast = {"bf16": {"enabled": False}, "torch_autocast": safe}
    for more, wanted in ((autocast, torch.float32), ({"communication_data_type": "bf16"}, torch.bfloat16)):
        model = models.build(Headed)
        model.trunk.requires_grad_(False)
        engine = zerolite.initialize(model, corner(stage, **more))
        with zerolite.comm.record() as calls:
            run_steps(engine)
        assert {call.dtype for call in calls.select(tag="gradients")} == {wanted}


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


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_are_cast_where_the_config_says_so(stage: int) -> None:
    """A forward in which a buffer meets an activation names the key; with it, it works."""
    settings = corner(stage, fp32_modules=[])
    x, y = models.float_batch(0, 0, 0)
    with raises(RuntimeError, "(Masked)", '"data_types": {"buffer_dtype": "bf16"}'):
        zerolite.initialize(models.build(Masked), settings)(x)
    engine = zerolite.initialize(models.build(Masked), settings | {"data_types": {"buffer_dtype": "bf16"}})
    losses = []
    for _ in range(3):
        losses.append(models.square_loss(engine, (x, y)))
        engine.backward(losses[-1])
        engine.step()
    assert losses[-1] < losses[0] and engine.alias is engine.module.mask
    wanted = {"mask": torch.bfloat16, "count": torch.int64, "norm.num_batches_tracked": torch.int64}
    wanted |= dict.fromkeys(("norm.running_mean", "norm.running_var"), torch.float32)
    assert {name: buffer.dtype for name, buffer in engine.module.named_buffers()} == wanted


# -------------------------------------------------------------------- two scales in one graph


def through_two_engines(stage: int, precision: str, loop: str) -> dict[str, Tensor]:
    """A generator's loss through a discriminator of another engine, as in a GAN, and a plain module in front of and
    behind them. Gives the updates of both and the gradients of the plain modules."""
    torch.manual_seed(0)
    front, back = nn.Linear(4, 4), nn.Linear(4, 4)
    engines = {}
    for name, scale in (("generator", 64), ("discriminator", 16)):
        optimizer = {"type": "SGD", "params": {"lr": 4.0}}  # so large that fp16's rounding of weights does not show
        half = {"fp16": {"enabled": True, "loss_scale": scale}} if precision == "fp16" else {}
        made = {"optimizer": optimizer, "zero_optimization": {"stage": stage}, **half}
        engines[name] = zerolite.initialize(Tower((4, 8, 4)), made)
    before = {name: snapshot(engine) for name, engine in engines.items()}
    generator, discriminator = engines.values()
    loss = back(discriminator(generator(front(torch.linspace(-1, 1, 8).view(2, 4))))).square().sum()
    if loop == "engine":
        generator.backward(loss)
    else:
        loss.backward()
    for engine in engines.values():
        (engine if loop == "engine" else engine.optimizer).step()
    assert front.weight.grad is not None and back.weight.grad is not None
    updates = {
        f"{name}.{n}": value.float() - before[name][n].float()
        for name, engine in engines.items()
        for n, value in snapshot(engine).items()
    }
    return {**updates, "front": front.weight.grad, "back": back.weight.grad}


@pytest.mark.parametrize(("stage", "loop"), [(0, "plain"), (2, "engine")])
@on_ranks(2)
def test_two_fp16_engines_in_one_graph(stage: int, loop: str) -> None:
    """Each engine's scale stays inside it: the same updates and the same outer gradients as in fp32, to fp16's
    rounding."""
    exact, half = (through_two_engines(stage, precision, loop) for precision in ("fp32", "fp16"))
    for name, value in exact.items():
        assert (half[name] - value).norm() <= 0.02 * value.norm(), name
