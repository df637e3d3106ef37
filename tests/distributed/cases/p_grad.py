"""Loops that use ``p.grad`` between backward and step, and what they launch and allocate."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

import zerolite
from tests.toolkit import models
from tests.toolkit.memory import events_in_order, mark, memory_profile
from tests.toolkit.training import make_engine, snapshot
from zerolite.comm import record
from zerolite.utils import user_line

STEPS = 3


def clipped(config: dict[str, Any], how: str, micros: int = 1, foreach: bool | None = None) -> dict[str, Any]:
    """OddModel, whose gradients are clipped by the config or by torch; weights, norms and collectives of each step."""
    engine = make_engine(config)
    norms, launched = [], []
    for step in range(STEPS):
        with record() as recorder:
            for micro in range(micros):
                engine.backward(models.token_loss(engine, models.token_batch(step, micro, engine.rank)))
                if micro < micros - 1:
                    engine.step()
            if how == "torch":
                norms.append(nn.utils.clip_grad_norm_(engine.parameters(), 0.05, foreach=foreach))
            elif how == "call":
                norms.append(torch.tensor(engine.clip_gradients(0.05), dtype=torch.float64))
            engine.step()
        if how == "config":
            norms.append(torch.tensor(engine.get_global_grad_norm(), dtype=torch.float64))
        launched.append([(call.op, call.tag, call.nbytes) for call in recorder.calls])
    assert all(type(norm) is torch.Tensor for norm in norms)
    return {"parameters": snapshot(engine), "norms": [float(norm) for norm in norms], "launched": launched}


USES: dict[str, Any] = {
    "none": lambda engine: None,
    "norms": lambda engine: [p.grad.norm() for p in engine.module.parameters()],
    "product": lambda engine: torch._foreach_mul_([p.grad for p in engine.module.parameters()], 0.5),
    "elementwise": lambda engine: [p.grad.clamp_(-1.0, 1.0) for p in engine.module.parameters()],
}


def launched(configs: list[dict[str, Any]]) -> list[dict[str, list[tuple[str, str, int]]]]:
    """For each config, the collectives of a later step, by what is done with p.grad in it."""
    found = []
    for config in configs:
        engine = make_engine(config, "Mlp")
        calls = {}
        for step, (name, use) in enumerate([("none", USES["none"])] * 3 + list(USES.items())):
            with record() as recorder:
                engine.backward(models.square_loss(engine, models.float_batch(step, 0, engine.rank)))
                use(engine)
                engine.step()
                engine.module  # noqa: B018 waits for the gathers that are still in flight
            calls[name] = [(call.op, call.tag, call.nbytes) for call in recorder.calls]
        found.append(calls)
        del engine
    return found


def allocated(config: dict[str, Any], width: int) -> dict[str, int]:
    """The largest allocation while norms are read and gradients are clipped and unscaled, in bytes."""
    engine = make_engine(config, "Chain", {"depth": 2, "width": width})
    x = torch.randn(2, width)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    largest = {}
    for step in range(2):
        scaler.scale(engine(x).square().mean()).backward()
        engine.reduce_gradients()
        with memory_profile() as profiler:
            mark("begin")
            norms = [p.grad.norm() for p in engine.parameters()]
            scaler.unscale_(engine.optimizer)
            nn.utils.clip_grad_norm_(engine.parameters(), 0.1)
            mark("end")
        assert all(norm > 0 for norm in norms)
        inside = False
        sizes = [0]
        for _, nbytes, name in events_in_order(profiler):
            inside = name == "begin" or (inside and name != "end")
            sizes.append(nbytes if inside else 0)
        largest[f"step {step}"] = max(sizes)
        scaler.step(engine.optimizer)
        scaler.update()
        engine.zero_grad()
    return largest


def said(config: dict[str, Any]) -> list[str]:
    """The warnings of a loop that reads one gradient in one line, and another in another."""
    engine = make_engine(config, "Mlp")
    first, second = engine.module.first, engine.module.second
    user_line._warned.clear()  # another case may have run these lines in this process
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            engine.backward(models.square_loss(engine, models.float_batch(step, 0, engine.rank)))
            first.weight.grad[0].clone()
            second.weight.grad.sort()
            assert first.weight.grad.isfinite().all() and nn.utils.get_total_norm([first.weight.grad]) > 0
            engine.step()
    return [f"{warning.filename.rsplit('/', 1)[-1]}: {warning.message}" for warning in caught]


def message(call: Any) -> str:
    """Return the message of the RuntimeError of ``call``, "" if there is none."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def refused(config: dict[str, Any]) -> dict[str, str]:
    """Return the errors where there is no gradient to be used."""
    engine = make_engine(config, "Mlp")
    weight: Any = engine.module.first.weight

    def backward() -> None:
        engine.backward(models.square_loss(engine, models.float_batch(0, 0, engine.rank)))

    heard: dict[str, str] = {}
    backward()
    kept = weight.grad

    def ask(gradient: torch.Tensor) -> None:
        heard["inside a backward"] = message(lambda: kept.norm())

    handle = weight.register_hook(ask)
    backward()
    handle.remove()
    shown = repr(weight.grad), f"{weight.grad}"
    engine.update()
    heard["after an update"] = message(lambda: kept.mul_(2.0))
    engine.publish()
    engine.zero_grad()
    heard["after a step"] = message(lambda: kept.norm())
    return {**heard, "shown": " ".join(shown)}


def unused_here(config: dict[str, Any]) -> dict[str, Any]:
    """Ranks that use different experts clip by the same norm, and drop the same gradients."""
    engine = make_engine(config, "MixtureOfExperts")
    norms = []
    for step in range(STEPS):
        engine.backward(models.square_loss(engine, models.expert_batch(step, 0, engine.rank)))
        norms.append(float(nn.utils.clip_grad_norm_(engine.parameters(), 0.05)))
        if step == 1:
            next(reversed(list(engine.module.parameters()))).grad = None
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return {"norms": norms, "parameters": snapshot(engine)}


def scaled_and_read(config: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint and a reader between a multiplication and the step see its result."""
    engine = make_engine(config, "Mlp")
    parameters = list(engine.module.parameters())
    engine.backward(models.square_loss(engine, models.float_batch(0, 0, engine.rank)))
    before = zerolite.get_full_grad(parameters)
    torch._foreach_mul_([p.grad for p in parameters], 0.5)
    after = zerolite.get_full_grad(parameters)
    shown = [p.grad.sort(stable=True).values.float() for p in parameters]
    norm = engine.clip_gradients(1e9)
    first = parameters[0]
    first.grad[0] = 0.25
    first.grad.add_(torch.ones_like(first.grad))
    changed = [p.grad.reshape(-1).clone().float() for p in parameters[:1]]
    return {"before": before, "after": after, "norm": norm, "shown": shown, "changed": changed[0]}


def joined(config: dict[str, Any], how: str) -> dict[str, Any]:
    """Rank 1 has a batch fewer. Norms are read, and gradients changed, by those that go on."""
    engine = make_engine(config, "Mlp")
    norms, error = [], ""
    try:
        with engine.join():
            for step in range(3 - engine.rank):
                engine.backward(models.square_loss(engine, models.float_batch(step, 0, engine.rank)))
                norms.append(float(nn.utils.get_total_norm([p.grad for p in engine.parameters()])))
                if how == "clip":
                    nn.utils.clip_grad_norm_(engine.parameters(), 0.05)
                elif how == "drop":
                    engine.module.first.bias.grad = None
                elif how == "call":
                    engine.clip_gradients(0.05)
                engine.step()
    except RuntimeError as raised:
        error = str(raised)
    return {"norms": norms, "error": error, "parameters": {} if error else snapshot(engine)}


def with_parts(config: dict[str, Any]) -> dict[str, Any]:
    """Layers are cut over the ranks: what using and replacing p.grad says, and the norm by the call that it names."""
    engine = make_engine(config, "example_gpt")
    weight: Any = engine.module.get_parameter("blocks.0.attention.project.weight")

    def backward() -> None:
        engine.backward(models.token_loss(engine, models.token_batch(0, 0, 0)))

    backward()
    said = [
        message(lambda: nn.utils.clip_grad_norm_(engine.parameters(), 1.0)),
        message(lambda: next(engine.parameters()).grad + 1),
    ]
    norm = engine.clip_gradients(1.0)
    engine.step()
    replaced = []
    for use in (engine.step, backward, lambda: engine.clip_gradients(1.0), engine.offload_states):
        backward()
        weight.grad = torch.zeros_like(weight)
        replaced.append(message(use))
        engine.zero_grad()
    return {"said": said, "norm": norm, "replaced": replaced}


def kept(config: dict[str, Any]) -> dict[str, Any]:
    """Gradients of a step that are looked at after the next backward."""
    engine = make_engine(config, "Mlp")
    parameters = list(engine.parameters())
    known: list[list[Any]] = []
    messages: list[str] = []
    for step in range(3):
        engine.backward(models.square_loss(engine, models.float_batch(step, 0, engine.rank)))
        for p, (gradient, alias, clone, product, row, values) in zip(parameters, known, strict=False):
            for used in (gradient, alias):
                try:
                    (p.grad - used).abs().max()
                except RuntimeError as error:
                    messages.append(str(error))
            assert torch.equal(clone * 2.0, product) and torch.equal(clone, values) and torch.equal(row, values[:1])
            assert not torch.equal(p.grad, values)
        known = [
            [p.grad, p.grad.detach(), p.grad.clone(), p.grad * 2.0, p.grad[:1], zerolite.get_full_grad(p)]
            for p in parameters
        ]
        engine.step()
    return {"messages": messages, "count": 2 * 2 * len(parameters)}


def assigned_with_weights(config: dict[str, Any]) -> dict[str, Any]:
    """Backwards have weights: a tensor in p.grad is refused by each further one, and is the gradient otherwise."""
    engine = make_engine(config, "Mlp")
    weight: Any = engine.module.first.weight
    own = torch.linspace(-1, 1, 91).view(13, 7)

    def backward() -> None:
        engine.backward(models.square_loss(engine, models.float_batch(0, 0, engine.rank)), weight=3 + engine.rank)

    refusals = []
    for before in (backward, lambda: None):
        before()
        weight.grad = own
        refusals += [message(backward), message(backward)]
        weight.grad = None
        backward()
        weight.grad = own
        refusals.append(message(backward))
        engine.zero_grad()
    backward()
    before_step = snapshot(engine)["first.weight"]
    weight.grad = own
    engine.offload_states()
    engine.reload_states()
    engine.step()
    return {"refusals": refusals, "moved": before_step - snapshot(engine)["first.weight"], "own": own}


def of_two_engines(first: dict[str, Any], second: dict[str, Any]) -> list[list[float]]:
    """Norms of the gradients of two engines, asked for at once and one by one; then one clips all of them."""
    engines = [make_engine(first, "Mlp"), make_engine(second, "Mlp")]
    pairs = []
    for engine in engines:
        engine.backward(models.square_loss(engine, models.float_batch(0, 0, engine.rank)))
    gradients = [p.grad for engine in engines for p in engine.module.parameters()]
    for order in (2.0, 1.0, float("inf"), 0.0):
        pairs.append([float(n) for n in torch._foreach_norm(gradients, order)])
        pairs.append([float(g.norm(order)) for g in gradients])
    norm = float(nn.utils.clip_grad_norm_([p for engine in engines for p in engine.module.parameters()], 0.01))
    pairs.append([0.01 * n / (norm + 1e-6) for n in pairs[0]])
    pairs.append([float(g.norm()) for g in gradients])
    scaler, found_inf = torch.amp.GradScaler("cpu", init_scale=4.0), torch.zeros(1)
    assert scaler.is_enabled()
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, torch.tensor(0.25))
    pairs.append([0.25 * n for n in pairs[-1]])
    pairs.append([float(g.norm()) for g in gradients])
    for engine in engines:
        engine.step()
    return pairs


def memory_of_a_scaled(config: dict[str, Any]) -> dict[str, Any]:
    """fp16 at stage 0: the values are kept times the loss scale, so that no memory holds what p.grad shows."""
    engine = make_engine(config, "Mlp")
    engine.backward(models.square_loss(engine, models.float_batch(0, 0, engine.rank)))
    gradient: Any = engine.module.first.weight.grad
    array = gradient.numpy()
    full = zerolite.get_full_grad(engine.module.first.weight)
    same = torch.equal(torch.from_numpy(array.copy()).float(), full)
    said = [message(gradient.data_ptr), message(gradient.untyped_storage)]
    engine.zero_grad()
    return {"said": said, "same": same, "writeable": array.flags.writeable}


def overflow_of_an_assigned(config: dict[str, Any]) -> dict[str, Any]:
    """fp16: what one element of an assigned tensor, in the last rank's part, becomes times the loss scale."""
    engine = make_engine(config, "Mlp")
    before = snapshot(engine)
    skipped = []
    for large in (1e4, 1.0):
        engine.backward(models.square_loss(engine, models.float_batch(0, 0, engine.rank)))
        own = torch.zeros(13, 7, dtype=torch.float16)
        own[12, 6] = large
        engine.module.first.weight.grad = own
        engine.step()
        skipped.append(engine.skipped_steps)
        if large > 1.0:
            assert all(torch.equal(value, before[name]) for name, value in snapshot(engine).items())
    return {"skipped": skipped, "norm": engine.get_global_grad_norm()}
