"""Uneven work: ranks whose batches differ in number join; those whose batches differ in size train by the gradient of
the joint batch, with weights of their backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms import Join

import zerolite
from tests.toolkit import models, reference
from tests.toolkit.compare import assert_same_bits, assert_same_on_ranks, from_all_ranks
from tests.toolkit.configs import ADAMW, SGD, at, dynamic_fp16
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import KINDS, backward, counters, loss_of, make_engine, raises, snapshot
from zerolite.comm import record

STAGES = ("0", "1", "2", "3 moving", "3 tight", "3 defaults")


def joined(
    config: dict[str, Any],
    counts: list[int],
    model: str = "OddModel",
    loop: str = "engine",
    keep_divisor: bool = True,
    weights: bool = False,
    after: int = 0,
    by_hand: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """``counts[rank]`` micro-batches inside ``engine.join()``, then ``after`` on every rank. by_hand: the user sets the
    learning rate before each step. loop: "plain", with an evaluation in each step, or "engine"."""
    engine = make_engine(config, model, **more)
    loss_of, make_batch = KINDS[model]
    micros = engine.gradient_accumulation_steps
    means, losses = [], []

    def step(micro: int) -> None:
        if by_hand:
            engine.optimizer.param_groups[0]["lr"] = 0.05 / (1 + micro)
        size = 1 + (micro + engine.rank) % 3 if weights else 2
        batch = make_batch(micro, 0, engine.rank, size)
        if loop == "plain":
            with torch.no_grad():
                loss_of(engine, batch)
        loss = loss_of(engine, batch)
        losses.append(float(loss.detach()))
        means.append(engine.reduce(float(loss.detach()), "sum"))
        if loop == "plain":
            (loss / micros).backward()
            if (micro + 1) % micros == 0:
                engine.optimizer.step()
                engine.optimizer.zero_grad()
        else:
            engine.backward(loss, weight=size if weights else None)
            engine.step()

    with record() as recorder, engine.join(divide_by_initial_world_size=keep_divisor):
        for micro in range(counts[engine.rank]):
            step(micro)
    if loop == "engine":
        engine.step(flush=True)
    inside = {"parameters": snapshot(engine), **counters(engine), "traffic": recorder.summary()}
    for micro in range(max(counts), max(counts) + after):
        step(micro)
    schedule = engine.coordinator.schedule if engine.coordinator is not None else None
    assert schedule is None or not schedule.on_demand_only
    parameters = snapshot(engine)
    assert_same_on_ranks(parameters)
    return {
        "inside": inside,
        "parameters": parameters,
        "means": means,
        "losses": losses,
        "buffers": {name: buffer.clone() for name, buffer in engine.module.named_buffers()},
    }


def joined_plain(
    optimizer: tuple[str, dict[str, Any]],
    counts: list[int],
    micros: int = 1,
    model: str = "OddModel",
    keep_divisor: bool = True,
    weights: bool = False,
    after: int = 0,
    by_hand: bool = False,
) -> dict[str, Tensor]:
    """The same on one process: gradients of the ranks that have a batch, summed in rank order."""
    torch.set_num_threads(1)
    whole = models.build(getattr(models, model))
    loss_of, make_batch = KINDS[model]
    torch_optimizer = getattr(torch.optim, optimizer[0])(
        [p for p in whole.parameters() if p.requires_grad], **optimizer[1]
    )
    world, total = len(counts), max(counts) + after

    def active(micro: int) -> list[int]:
        return [rank for rank in range(world) if micro < counts[rank] or micro >= max(counts)]

    start = 0
    while start < total:
        end = min(start + micros, max(counts) if start < max(counts) else total)
        window = range(start, end)
        start = end
        torch_optimizer.zero_grad()
        tokens = sum(1 + (micro + rank) % 3 for micro in window for rank in active(micro))
        for micro in window:
            for rank in active(micro):
                size = 1 + (micro + rank) % 3 if weights else 2
                loss = loss_of(whole, make_batch(micro, 0, rank, size))
                ranks = world if keep_divisor else len(active(micro))
                (loss * size / tokens if weights else loss / (ranks * len(window))).backward()
        if by_hand:
            torch_optimizer.param_groups[0]["lr"] = 0.05 / (1 + window[-1])
        torch_optimizer.step()
    return {name: p.detach().clone() for name, p in whole.named_parameters()}


def counts_of(world: int) -> list[list[int]]:
    return {2: [[2, 5], [5, 0], [3, 3]], 3: [[0, 4, 7], [5, 2, 5]]}[world]


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], atol: float = 2e-6) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=atol)


@pytest.mark.slow
@on_ranks(2, 3, timeout=120)
@pytest.mark.parametrize("stage", ["0", "2", "3", "3 tight"])
def test_ranks_that_have_finished_serve_the_others(stage: str) -> None:
    """Parameters and counters of all ranks are those of one process, and training goes on afterwards."""
    for counts in counts_of(dist.get_world_size()):
        found = joined(at(stage), counts, after=3)
        inside = {key: value for key, value in found["inside"].items() if key not in ("parameters", "traffic")}
        assert_same_on_ranks(inside)
        assert inside["global_steps"] == max(counts)
        assert_close(found["inside"]["parameters"], joined_plain(SGD, counts), 1e-6)
        assert_close(found["parameters"], joined_plain(SGD, counts, after=3))


@pytest.mark.slow
@on_ranks(3, timeout=120)
@pytest.mark.parametrize("stage", ["0", "2", "3 tight"])
def test_join_by_another_divisor_with_weights_and_in_windows(stage: str) -> None:
    counts = counts_of(dist.get_world_size())[0]
    for more in (
        {"keep_divisor": False},
        {"keep_divisor": False, "micros": 3},
        {"weights": True, "micros": 2},
        {"weights": True, "keep_divisor": False},
        {"by_hand": True},
    ):
        asked: dict[str, Any] = dict(more)
        micros = asked.pop("micros", 1)
        found = joined(at(stage, accumulation=micros), counts, **asked)
        assert_close(found["parameters"], joined_plain(SGD, counts, micros=micros, **asked))


@pytest.mark.slow
@on_ranks(2, timeout=120)
@pytest.mark.parametrize("stage", ["0", "2", "3 defaults"])
def test_join_in_torchs_own_loop(stage: str) -> None:
    for counts, micros in (([2, 5], 1), ([6, 2], 2)):
        chosen = at(stage, accumulation=micros, optimizer=ADAMW, clip=0.5)
        ours, wanted = joined(chosen, counts, loop="plain"), joined(chosen, counts)
        assert_same_bits(ours["parameters"], wanted["parameters"], f"{counts}: torch's own loop")


@on_ranks(2)
@pytest.mark.parametrize(("stage", "keep_divisor"), [("0", False), ("1", True), ("2", False), ("3", True)])
def test_join_gives_ddps_numbers(stage: str, keep_divisor: bool) -> None:
    """The engine's join and torch's over DDP, in the same processes."""
    counts, rank = [2, 5], dist.get_rank()
    ours = joined(at(stage), counts, "Mlp", keep_divisor=keep_divisor)["parameters"]
    ddp = torch.nn.parallel.DistributedDataParallel(models.build(models.Mlp))
    optimizer = torch.optim.SGD(ddp.parameters(), **SGD[1])
    with Join([ddp], divide_by_initial_world_size=keep_divisor):
        for micro in range(counts[rank]):
            optimizer.zero_grad()
            models.square_loss(ddp, models.float_batch(micro, 0, rank, 2)).backward()
            optimizer.step()
    for parameter in ddp.module.parameters():  # a rank that has finished takes no step in DDP
        dist.broadcast(parameter.data, 1)
    theirs = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
    if keep_divisor:
        assert_same_bits(ours, theirs, "DDP")
    else:
        assert_close(ours, theirs, 1e-6)  # it divides by 1, we multiply 1/2 by 2


@pytest.mark.fast("3 tight-ConvNet-2")
@on_ranks(2)
@pytest.mark.parametrize(
    ("stage", "model"),
    [
        ("2", "SharedCheckpointed"),
        ("3 tight", "SharedCheckpointed"),
        ("3 tight", "MixtureOfExperts"),
        ("3 tight", "ConvNet"),
    ],
)
def test_join_with_other_models(stage: str, model: str) -> None:
    leaves = {"leaf_modules": ["MoeBlock"]} if model == "MixtureOfExperts" and stage[0] == "3" else {}
    found = joined(at(stage, zero=leaves), [1, 4], model, after=2)
    if model != "ConvNet":  # its statistics are each rank's own
        assert_close(found["parameters"], joined_plain(SGD, [1, 4], model=model, after=2))


@on_ranks(2)
@pytest.mark.parametrize("stage", ["0", "3"])
def test_what_goes_on_in_a_join(stage: str) -> None:
    """Means are over the ranks that go on; every forward, backward and step is one exchange, and an evaluation too."""
    found = joined(at(stage), [2, 4], "Mlp")
    (first, first_losses), (second, second_losses) = from_all_ranks((found["means"], found["losses"]))
    assert first == second[:2] and second[0] == first_losses[0] + second_losses[0]
    assert second[2:] == second_losses[2:]
    even = joined(at(stage), [4, 4], "Mlp")
    assert even["inside"]["traffic"][("all_gather", "control")] == 4 * 4 + 1  # with the mean; and at the end


@on_ranks(2)
def test_buffers_are_those_of_a_rank_that_goes_on() -> None:
    buffers = joined(at("2"), [1, 4], "Buffered", broadcast_buffers=True)["buffers"]
    assert buffers["calls"] == (4 if dist.get_rank() else 3)  # before the last forward


LEFT = "has left with an exception"
FINISHED = "has finished its batches"
PLACES = "different places of their loops"
LEAVING = {
    "early": (LEFT, LEFT),
    "late": (LEFT, LEFT),
    "places": (PLACES, PLACES),
    "master": (FINISHED, FINISHED),
    "metrics": (LEFT, "have finished their batches"),
}


@pytest.mark.fast("0-late-2", "1-early-2", "2-places-2", "3-master-2")
@on_ranks(2, 3, timeout=30)
@pytest.mark.parametrize(
    ("stage", "how"), [("1", "early"), ("0", "late"), ("2", "places"), ("3", "master"), ("3", "metrics")]
)
def test_nobody_waits_for_a_rank_that_does_something_else(stage: str, how: str) -> None:
    """Rank 0 has two batches, the others four."""
    engine = make_engine(at(stage), "Mlp")
    message = ""
    try:
        with engine.join():
            for step in range(2 if engine.rank == 0 else 4):
                if how == "early" and step == 1 and engine.rank == 1:
                    raise KeyError("a bug in the data loader")
                loss = loss_of(engine, step)
                if how == "late" and step == 3 and engine.rank == 1:
                    raise KeyError("a bug in the data loader")
                if how == "places" and step == 1 and engine.rank == 1:
                    engine.step()
                engine.backward(loss)
                engine.step()
                if step == 3 and how == "master":
                    zerolite.get_full_master(engine.module.first.weight)
                if step == 3 and how == "metrics":
                    for _ in engine.deepspeed_io(torch.arange(8), batch_size=2, route="eval"):
                        engine.gather_for_metrics(torch.zeros(2))
    except (RuntimeError, KeyError, ValueError) as error:
        message = str(error)
    dist.barrier()
    wanted = (
        "bug in the data loader" if how in ("early", "late") and engine.rank == 1 else LEAVING[how][engine.rank > 0]
    )
    assert wanted in message, message


@on_ranks(2)
def test_join_is_not_entered_twice() -> None:
    engine = make_engine(at("1"), "Mlp")
    with raises(RuntimeError, "cannot be entered twice"), engine.join(), engine.join():
        pass


# -------------------------------------------------------------------- batches that differ in size

STEPS = 4


def rows(step: int, micro: int, rank: int, world: int) -> int:
    """Return how many samples a micro-batch holds: all numbers from 0 to 6, never none on all ranks."""
    if rank == world - 1 and micro == 0:
        return 1 + (step + rank) % 6
    return (5 * rank + 3 * micro + 2 * step) % 7


def batch_of(step: int, micro: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    x, y = models.float_batch(step, micro, rank, size=8)
    count = rows(step, micro, rank, world)
    return x[:count], y[:count]


def mean_loss(model: Any, batch: Sequence[Tensor]) -> Tensor:
    return torch.nn.functional.mse_loss(model(batch[0], "left").to(batch[1].dtype), batch[1])


def weighted(
    config: dict[str, Any], micros: int = 1, flush: bool = False, equal: bool = False, weights: bool = True
) -> dict[str, Any]:
    """Train with ``weight=`` the number of samples, also as a tensor. flush: the window holds one micro-batch less than
    the config says. equal: all batches are of 4 samples."""
    engine = zerolite.initialize(models.build(models.TwoBranches), config)
    gradients, norms = [], []
    for step in range(STEPS):
        for micro in range(micros):
            rank = engine.rank
            x, y = models.float_batch(step, micro, rank) if equal else batch_of(step, micro, rank, engine.world_size)
            loss = mean_loss(engine, (x, y))
            weight: Any = torch.tensor(len(x)) if micro else len(x)
            engine.backward(loss, weight=weight if weights else None)
            if micro == micros - 1:
                gradients.append(zerolite.get_full_grad(engine.module.stem.weight))
            engine.step(flush=flush and micro == micros - 1)
        norms.append(engine.get_global_grad_norm())
    parameters = snapshot(engine)
    assert_same_on_ranks(parameters)
    assert engine.skipped_steps == 0
    return {"parameters": parameters, "norms": norms, "gradients": gradients}


def weighted_plain(optimizer: tuple[str, dict[str, Any]], micros: int = 1, clip: float = 0.0) -> dict[str, Any]:
    """Plain PyTorch on the one joint batch of each step, in double precision."""
    world, gradients = dist.get_world_size(), []
    model = models.build(models.TwoBranches).double()
    model.stem.weight.register_hook(lambda gradient: gradients.append(gradient.clone()))

    def window(step: int) -> list[Any]:
        parts = [[batch_of(step, micro, rank, world) for rank in range(world)] for micro in range(micros)]
        return [[(x.double(), y.double()) for x, y in ranks] for ranks in parts]

    batches = [window(step) for step in range(STEPS)]
    found = reference.train(model, mean_loss, batches, "fp32", optimizer, clip)
    return {"parameters": dict(model.named_parameters()), "norms": found.norms, "gradients": gradients}


@pytest.mark.slow
@on_ranks(1, 2, 3, timeout=120)
def test_weights_give_the_gradient_of_the_joint_batch() -> None:
    for optimizer, clip, micros in ((SGD, 0.0, 1), (ADAMW, 0.5, 3)):
        wanted, results = weighted_plain(optimizer, micros, clip), {}
        for stage in STAGES:
            found = weighted(at(stage, accumulation=micros, optimizer=optimizer, clip=clip), micros)
            assert found["norms"] == pytest.approx(wanted["norms"], rel=2e-6)
            for got, want in zip(found["gradients"], wanted["gradients"], strict=True):
                torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)
            results[stage] = found["parameters"]
            # Momentum and Adam carry each step's rounding on: a few units in the last place of values around 1.
            atol = 1e-6 if optimizer is SGD else 1e-5
            doubles = {name: value.double() for name, value in results[stage].items()}
            torch.testing.assert_close(doubles, wanted["parameters"], rtol=0, atol=atol)
        for stage in STAGES if dist.get_world_size() < 3 else ():
            first = "0" if micros == 1 or stage in "01" else "2"  # above, each micro-batch is reduced: another order
            assert_same_bits(results[first], results[stage], f"stages {first} and {stage}")


@on_ranks(2)
@pytest.mark.parametrize(
    ("stage", "precision", "rel"),
    [("0", "bf16", 0.02), ("2", "fp16", 0.003), ("3", "fp16", 0.003), ("0", "fp32", 2e-6), ("3", "fp32", 2e-6)],
)
def test_weights_in_16_bits_and_in_a_step_that_is_flushed_early(stage: str, precision: str, rel: float) -> None:
    """Gradients are those of the joint batch, to the rounding of 16-bit values."""
    flush = precision == "fp32"
    found = weighted(at(stage, precision=precision, accumulation=5 if flush else 2), 2, flush)
    assert found["norms"] == pytest.approx(weighted_plain(SGD, 2)["norms"], rel=rel)


@on_ranks(2)
def test_fp16_finds_a_unit_for_large_weights() -> None:
    """Weights of 65,536 would overflow any fp16 gradient; after the first step they are counted in their own unit."""
    engine = zerolite.initialize(
        models.build(models.Mlp), at("2", fp16=dynamic_fp16(initial_scale_power=4, hysteresis=4))
    )
    model = models.build(models.Mlp)
    for step in range(4):
        backward(engine, 0, weight=65536.0)
        model.load_state_dict({name: value.float() for name, value in engine.full_state_dict().items()})
        model.zero_grad()
        for rank in range(2):
            (models.square_loss(model, models.float_batch(0, 0, rank)) / 2).backward()
        plain = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        engine.step()
        assert not step or engine.get_global_grad_norm() == pytest.approx(plain, rel=0.003)
    assert (engine.skipped_steps, engine.global_steps) == (1, 4)


@pytest.mark.slow
@on_ranks(2)
def test_equal_weights_change_no_bit() -> None:
    for stage in ("0", "1", "2", "3"):
        one, other = (weighted(at(stage), equal=True, weights=weights) for weights in (True, False))
        assert_same_bits(one["parameters"], other["parameters"], f"stage {stage}, with weights and without")


@on_ranks(2)
@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_what_is_no_weight(stage: str) -> None:
    engine = make_engine(at(stage), "Mlp")

    def train(**arguments: Any) -> None:
        backward(engine, 0, **arguments)
        engine.step()

    for weight in (-1, float("nan"), torch.ones(2)):
        with raises(ValueError, "expected weight to be the number of tokens or samples"):
            train(weight=weight)
        engine.zero_grad()
    for words, arguments in (
        ("scale_wrt_gas", {"weight": 2, "scale_wrt_gas": False}),
        ("the mean over nothing has no gradient", {"weight": 0}),
        ("some ranks gave a weight", {"weight": 3 if engine.rank == 0 else None}),
    ):
        with raises((ValueError, RuntimeError), words):
            train(**arguments)
        engine.zero_grad()
    with raises(RuntimeError, "all backwards of a step to have a weight, or none"):
        backward(engine, 0, weight=2)
        train()
    engine.zero_grad()
    before = snapshot(engine)
    train(weight=2)
    assert not torch.equal(before["first.weight"], snapshot(engine)["first.weight"])
