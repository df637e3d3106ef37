"""Uneven work: ranks whose batches differ in size, or in number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms import Join

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, PARTITIONED, SGD, config, dynamic_fp16
from tests.toolkit.pool import Pools
from tests.toolkit.training import KINDS, counters, make_engine, snapshot
from zerolite.comm import record
from zerolite.zero import GatheredParameters

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


def weighted(
    config: dict[str, Any], micros: int = 1, tensors: bool = False, flush: bool = False, equal: bool = False
) -> dict[str, Any]:
    """Train with ``weight=`` the number of samples. tensors: as 0-dim tensors. flush: the window holds one micro-batch
    less than the config says. equal: all weights are 4, and so are the batches."""
    engine = zerolite.initialize(models.build(models.TwoBranches), config)
    gradients, norms = [], []
    for step in range(STEPS):
        for micro in range(micros):
            rank = engine.rank
            x, y = models.float_batch(step, micro, rank) if equal else batch_of(step, micro, rank, engine.world_size)
            loss = torch.nn.functional.mse_loss(engine(x, "left").float(), y)
            weight: Any = torch.tensor(len(x)) if tensors else len(x)
            engine.backward(loss, weight=weight)
            if micro == micros - 1:
                gradients.append(zerolite.get_full_grad(engine.module.stem.weight))
            engine.step(flush=flush and micro == micros - 1)
        norms.append(engine.get_global_grad_norm())
    unused = zerolite.get_full_master(engine.module.right.weight)
    return {
        "parameters": snapshot(engine),
        "norms": norms,
        "gradients": gradients,
        "unused": unused,
        "skipped": engine.skipped_steps,
        "steps": engine.global_steps,
    }


def unweighted(config: dict[str, Any], micros: int = 1) -> dict[str, Any]:
    """Equal batches without weights."""
    engine = zerolite.initialize(models.build(models.TwoBranches), config)
    for step in range(STEPS):
        for micro in range(micros):
            x, y = models.float_batch(step, micro, engine.rank)
            engine.backward(torch.nn.functional.mse_loss(engine(x, "left").float(), y))
            engine.step()
    return {"parameters": snapshot(engine), "norms": []}


def weighted_plain(
    optimizer: tuple[str, dict[str, Any]], world: int, micros: int = 1, clip: float = 0.0
) -> dict[str, Any]:
    """Plain PyTorch on the one joint batch of each step, in double precision."""
    model = models.build(models.TwoBranches).double()
    torch_optimizer = getattr(torch.optim, optimizer[0])(model.parameters(), **optimizer[1])
    gradients, norms = [], []
    for step in range(STEPS):
        parts = [batch_of(step, micro, rank, world) for micro in range(micros) for rank in range(world)]
        x, y = (torch.cat(tensors).double() for tensors in zip(*parts, strict=True))
        torch_optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x, "left"), y).backward()
        gradients.append(model.stem.weight.grad.clone())
        limit = clip or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        torch_optimizer.step()
    return {
        "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
        "norms": norms,
        "gradients": gradients,
    }


def refused(config: dict[str, Any]) -> dict[str, str]:
    """Return the errors about values that are no weight, or not one for all."""
    engine = zerolite.initialize(models.build(models.Mlp), config)
    x, y = models.float_batch(0, 0, engine.rank)
    messages = {}

    def attempt(name: str, **arguments: Any) -> None:
        try:
            engine.backward(torch.nn.functional.mse_loss(engine(x), y), **arguments)
            engine.step()
        except (ValueError, RuntimeError) as error:
            messages[name] = str(error)
        engine.zero_grad()

    attempt("negative", weight=-1)
    attempt("nan", weight=float("nan"))
    attempt("several", weight=torch.ones(2))
    attempt("unscaled", weight=2, scale_wrt_gas=False)
    attempt("empty", weight=0)
    if engine.world_size > 1:
        attempt("some ranks", weight=3 if engine.rank == 0 else None)
    engine.backward(torch.nn.functional.mse_loss(engine(x), y), weight=2)
    try:
        engine.backward(torch.nn.functional.mse_loss(engine(x), y))
    except RuntimeError as error:
        messages["later"] = str(error)
    engine.zero_grad()
    before = snapshot(engine)
    attempt("fine", weight=2)
    after = snapshot(engine)
    messages["moved"] = str(any(not torch.equal(before[name], after[name]) for name in before))
    return messages


def large_weights(config: dict[str, Any], weight: float, steps: int) -> dict[str, Any]:
    """The same batches with large weights; ``plain`` are the norms in fp32 without any."""
    engine = zerolite.initialize(models.build(models.Mlp), config)
    model = models.build(models.Mlp)
    norms, plain = [], []
    for _ in range(steps):
        x, y = models.float_batch(0, 0, engine.rank)
        engine.backward(torch.nn.functional.mse_loss(engine(x), y), weight=weight)
        model.load_state_dict({name: value.float() for name, value in engine.full_state_dict().items()})
        model.zero_grad()
        for rank in range(engine.world_size):
            x, y = models.float_batch(0, 0, rank)
            (torch.nn.functional.mse_loss(model(x), y) / engine.world_size).backward()
        plain.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return {"norms": norms, "plain": plain, "skipped": engine.skipped_steps, "steps": engine.global_steps}


# -------------------------------------------------------------------- numbers of batches


def joined(
    config: dict[str, Any],
    counts: list[int],
    model: str = "OddModel",
    loop: str = "engine",
    keep_divisor: bool = True,
    weights: bool = False,
    after: int = 0,
    by_hand: bool = False,
    evaluate: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """``counts[rank]`` micro-batches inside ``engine.join()``, then ``after`` on every rank. by_hand: the user sets the
    learning rate before each step. evaluate: a forward without gradients in each step."""
    engine = make_engine(config, model, **more)
    loss_of, make_batch = KINDS[model]
    micros = engine.gradient_accumulation_steps
    means, losses = [], []

    def step(micro: int, join: bool) -> None:
        if by_hand:
            engine.optimizer.param_groups[0]["lr"] = 0.05 / (1 + micro)
        size = 1 + (micro + engine.rank) % 3 if weights else 2
        batch = make_batch(micro, 0, engine.rank, size)
        if evaluate:
            with torch.no_grad():
                loss_of(engine, batch)
        if loop == "classic":
            if micro % micros == 0:
                engine.optimizer.zero_grad()
            (loss_of(engine, batch) / micros).backward()
            if (micro + 1) % micros == 0:
                engine.optimizer.step()
            return
        loss = loss_of(engine, batch)
        losses.append(float(loss.detach()))
        means.append(engine.reduce(float(loss.detach()), "sum"))
        if loop == "plain":
            (loss / micros).backward()
            if (micro + 1) % micros == 0:
                engine.optimizer.step()
                engine.optimizer.zero_grad()
        else:
            if loop == "by hand":  # windows of one, two, two ... micro-batches
                engine.set_gradient_accumulation_boundary(micro % 2 == 0)
            engine.backward(loss, weight=size if weights else None)
            engine.step()

    with record() as recorder, engine.join(divide_by_initial_world_size=keep_divisor):
        for micro in range(counts[engine.rank]):
            step(micro, True)
    if loop == "engine":
        engine.step(flush=True)
    inside = {"parameters": snapshot(engine), **counters(engine), "traffic": recorder.summary()}
    for micro in range(max(counts), max(counts) + after):
        step(micro, False)
    schedule = engine.coordinator.schedule if engine.coordinator is not None else None
    return {
        "inside": inside,
        "parameters": snapshot(engine),
        "means": means,
        "losses": losses,
        "on_demand": schedule is not None and schedule.on_demand_only,
        "following": schedule is not None and schedule.following,
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
    sizes: dict[str, Any] | None = None,
) -> dict[str, Tensor]:
    """The same on one process: gradients of the ranks that have a batch, summed in rank order."""
    torch.set_num_threads(1)
    whole = models.build(getattr(models, model), **(sizes or {}))
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


def against_ddp(config: dict[str, Any], counts: list[int], keep_divisor: bool) -> dict[str, Any]:
    """The engine's join and torch's over DDP, in the same processes."""
    ours = joined(config, counts, "Mlp", keep_divisor=keep_divisor)["parameters"]
    rank = dist.get_rank()
    ddp = torch.nn.parallel.DistributedDataParallel(models.build(models.Mlp))
    settings = config["optimizer"]
    optimizer = getattr(torch.optim, settings["type"])(ddp.parameters(), **settings["params"])
    with Join([ddp], divide_by_initial_world_size=keep_divisor):
        for micro in range(counts[rank]):
            optimizer.zero_grad()
            models.square_loss(ddp, models.float_batch(micro, 0, rank, 2)).backward()
            optimizer.step()
    for parameter in ddp.module.parameters():  # a rank that has finished takes no step in DDP
        dist.broadcast(parameter.data, counts.index(max(counts)))
    theirs = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
    return {"ours": ours, "theirs": theirs}


def leaving(config: dict[str, Any], how: str) -> dict[str, str]:
    """Return the outcome of a rank that does something else. Rank 0 has two batches, the others four."""
    engine = make_engine(config, "Mlp")
    message = kind = ""
    try:
        with engine.join():
            for step in range(2 if engine.rank == 0 else 4):
                if how == "early" and step == 1 and engine.rank == 1:
                    raise KeyError("a bug in the data loader")
                loss = models.square_loss(engine, models.float_batch(step, 0, engine.rank))
                if how == "late" and step == 3 and engine.rank == 1:
                    raise KeyError("a bug in the data loader")
                if how == "places" and step == 1 and engine.rank == 1:
                    engine.step()
                engine.backward(loss)
                engine.step()
                if step == 3 and how == "master":
                    zerolite.get_full_master(engine.module.first.weight)
                if step == 3 and how == "gathered":
                    with GatheredParameters(engine.module, modifier_rank=1):
                        engine.module.first.weight.data.mul_(1.0)
                if step == 3 and how == "metrics":
                    for _ in engine.deepspeed_io(torch.arange(8), batch_size=2, route="eval"):
                        engine.gather_for_metrics(torch.zeros(2))
    except (RuntimeError, KeyError, ValueError) as error:
        message, kind = str(error), type(error).__name__
    dist.barrier()
    return {"message": message, "kind": kind}


def nested(config: dict[str, Any]) -> str:
    engine = make_engine(config, "Mlp")
    try:
        with engine.join(), engine.join():
            pass
    except RuntimeError as error:
        return str(error)
    return ""


def overflowing(config: dict[str, Any]) -> dict[str, Any]:
    """fp16: the rank that goes on has an infinite gradient when the other has finished."""
    engine = make_engine(config, "Mlp")
    with engine.join():
        for step in range(1 + 3 * engine.rank):
            x, y = models.float_batch(step, 0, engine.rank)
            engine.backward(models.square_loss(engine, (x, y)) * (1e6 if step == 2 else 1.0))
            engine.step()
    return {**counters(engine), "parameters": snapshot(engine)}


# -------------------------------------------------------------------- the tests


STAGES: dict[str, tuple[int, dict[str, Any] | None]] = {
    "0": (0, None),
    "1": (1, None),
    "2": (2, None),
    "3": (3, PARTITIONED["moving"]),
    "3-tight": (3, PARTITIONED["tight"]),
    "3-defaults": (3, PARTITIONED["defaults"]),
}
FAST = {"0", "2", "3-tight"}
OVER_STAGES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in STAGES]
WORLDS = [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]


def settings(stage: str, **more: Any) -> dict[str, Any]:
    number, zero = STAGES[stage]
    return config(number, zero=zero, **more)


# -------------------------------------------------------------------- weights


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("micros", [1, 3])
def test_weights_give_the_gradient_of_the_joint_batch(pools: Pools, world: int, micros: int) -> None:
    for optimizer, clip in ((SGD, 0.0), (ADAMW, 0.5)):
        wanted = weighted_plain(optimizer, world, micros, clip)
        results = {}
        for stage in STAGES:
            chosen = settings(stage, accumulation=micros, optimizer=optimizer, clip=clip)
            ranks = pools(world).run(weighted, {"config": chosen, "micros": micros, "tensors": stage == "1"})
            for rank in ranks:
                assert_same_bits(rank["parameters"], ranks[0]["parameters"], "parameters of two ranks")
                assert rank["norms"] == pytest.approx(wanted["norms"], rel=2e-6)
                for got, want in zip(rank["gradients"], wanted["gradients"], strict=True):
                    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)
            results[stage] = ranks[0]["parameters"]
            for name, value in wanted["parameters"].items():
                # Momentum and Adam carry each step's rounding on: a few units in the last place of values around 1.
                atol = 1e-6 if optimizer is SGD else 1e-5
                torch.testing.assert_close(results[stage][name].double(), value, rtol=0, atol=atol, msg=name)
        if world < 3:  # stages 2 and 3 reduce each micro-batch, and so add in another order
            for stage in STAGES:
                first = "0" if micros == 1 or stage in "01" else "2"
                assert_same_bits(results[first], results[stage], f"stages {first} and {stage}")


@pytest.mark.fast("0-bf16", "2-fp16", "3-fp16")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_weights_in_16_bits(pools: Pools, stage: str, precision: str) -> None:
    """Gradients are those of the joint batch, to the rounding of 16-bit values."""
    wanted = weighted_plain(SGD, 2, 2)
    chosen = settings(stage, precision=precision, accumulation=2)
    (first, second) = pools(2).run(weighted, {"config": chosen, "micros": 2})
    assert_same_bits(first["parameters"], second["parameters"], "parameters of two ranks")
    assert first["skipped"] == 0
    assert first["norms"] == pytest.approx(wanted["norms"], rel=0.02 if precision == "bf16" else 0.003)


def test_fp16_finds_a_unit_for_large_weights(pools: Pools) -> None:
    """Weights of 65,536 would overflow any fp16 gradient; after the first step they are counted in their own unit."""
    chosen = settings("2", fp16=dynamic_fp16(initial_scale_power=4, hysteresis=4))
    results = pools(2).run(large_weights, {"config": chosen, "weight": 65536.0, "steps": 4})
    for result in results:
        assert result["skipped"] == 1
        assert result["steps"] == 4
        assert result["norms"][1:] == pytest.approx(result["plain"][1:], rel=0.003)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_equal_weights_change_no_bit(pools: Pools, stage: str) -> None:
    with_weights = pools(2).run(weighted, {"config": settings(stage), "equal": True})
    without = pools(2).run(unweighted, {"config": settings(stage)})
    assert_same_bits(with_weights[0]["parameters"], without[0]["parameters"], "with weights and without")


@pytest.mark.parametrize("stage", ["0", "3"])
def test_a_window_that_is_flushed_early(pools: Pools, stage: str) -> None:
    wanted = weighted_plain(SGD, 2, 2)
    chosen = settings(stage, accumulation=5)
    ranks = pools(2).run(weighted, {"config": chosen, "micros": 2, "flush": True})
    assert ranks[0]["norms"] == pytest.approx(wanted["norms"], rel=2e-6)


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_what_is_no_weight(pools: Pools, stage: str) -> None:
    for messages in pools(2).run(refused, {"config": settings(stage)}):
        for name in ("negative", "nan", "several"):
            assert "expected weight to be the number of tokens or samples" in messages[name], name
        assert "scale_wrt_gas" in messages["unscaled"]
        assert "the mean over nothing has no gradient" in messages["empty"]
        assert "some ranks gave a weight" in messages["some ranks"]
        assert "all backwards of a step to have a weight, or none" in messages["later"]
        assert messages["moved"] == "True"
        assert "fine" not in messages


# -------------------------------------------------------------------- numbers of batches


def counts_of(world: int) -> list[list[int]]:
    return {1: [[3]], 2: [[2, 5], [5, 0], [3, 3]], 3: [[0, 4, 7], [5, 2, 5]]}[world]


def assert_close(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], atol: float, what: str) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=atol, msg=lambda m, n=name: f"{what}: {n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", OVER_STAGES)
def test_ranks_that_have_finished_serve_the_others(pools: Pools, stage: str, world: int) -> None:
    """Parameters and counters of all ranks are those of one process, and training goes on afterwards."""
    for counts in counts_of(world):
        chosen = settings(stage)
        results = pools(world).run(joined, {"config": chosen, "counts": counts, "after": 3})
        for result in results[1:]:
            assert_same_bits(result["parameters"], results[0]["parameters"], "parameters of two ranks")
            inside = {key: value for key, value in result["inside"].items() if key not in ("parameters", "traffic")}
            assert {key: results[0]["inside"][key] for key in inside} == inside
        assert results[0]["inside"]["global_steps"] == max(counts)
        assert not any(result["on_demand"] for result in results)
        inside = joined_plain(SGD, counts)
        assert_close(results[0]["inside"]["parameters"], inside, 1e-6, f"{counts}, inside")
        after = joined_plain(SGD, counts, after=3)
        assert_close(results[0]["parameters"], after, 2e-6, f"{counts}, afterwards")


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("stage", OVER_STAGES)
def test_join_by_another_divisor_with_weights_and_in_windows(pools: Pools, stage: str, world: int) -> None:
    counts = counts_of(world)[0]
    for more in (
        {"keep_divisor": False},
        {"keep_divisor": False, "micros": 3},
        {"weights": True, "micros": 2},
        {"weights": True, "keep_divisor": False},
        {"by_hand": True},
    ):
        asked: dict[str, Any] = dict(more)
        micros = asked.pop("micros", 1)
        chosen = settings(stage, accumulation=micros)
        results = pools(world).run(joined, {"config": chosen, "counts": counts, **asked})
        for result in results[1:]:
            assert_same_bits(result["parameters"], results[0]["parameters"], f"{more}: parameters of two ranks")
        wanted = joined_plain(SGD, counts, micros=micros, **asked)
        assert_close(results[0]["parameters"], wanted, 2e-6, str(more))


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["plain", "classic"])
@pytest.mark.parametrize("stage", OVER_STAGES)
def test_join_in_torchs_own_loop(pools: Pools, stage: str, loop: str) -> None:
    for counts, micros in (([2, 5], 1), ([6, 2], 2)):
        chosen = settings(stage, accumulation=micros, optimizer=ADAMW, clip=0.5)
        ours = pools(2).run(joined, {"config": chosen, "counts": counts, "loop": loop, "evaluate": True})
        other = pools(2).run(joined, {"config": chosen, "counts": counts})
        for result in ours:
            assert_same_bits(result["parameters"], other[0]["parameters"], f"{counts}: the two loops")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_boundaries_said_by_hand_are_those_of_the_ranks_that_go_on(pools: Pools, stage: str) -> None:
    chosen = settings(stage, accumulation=3)
    first, second = pools(2).run(joined, {"config": chosen, "counts": [2, 7], "loop": "by hand"})
    assert first["inside"]["global_steps"] == second["inside"]["global_steps"] == 4
    assert_same_bits(first["parameters"], second["parameters"], "parameters of two ranks")


@pytest.mark.fast("0-False", "1-True", "2-False", "3-False")
@pytest.mark.parametrize("keep_divisor", [True, False])
@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_join_gives_ddps_numbers(pools: Pools, stage: str, keep_divisor: bool) -> None:
    arguments = {"config": settings(stage), "counts": [2, 5], "keep_divisor": keep_divisor}
    for result in pools(2).run(against_ddp, arguments):
        if keep_divisor:
            assert_same_bits(result["ours"], result["theirs"], "DDP")
        else:
            assert_close(result["ours"], result["theirs"], 1e-6, "DDP")  # it divides by 1, we multiply 1/2 by 2


@pytest.mark.fast("2-Buffered", "3-tight-ConvNet")
@pytest.mark.parametrize("model", ["SharedCheckpointed", "EncoderDecoder", "MixtureOfExperts", "ConvNet", "Buffered"])
@pytest.mark.parametrize("stage", OVER_STAGES[2:])
def test_join_with_other_models(pools: Pools, stage: str, model: str) -> None:
    if model == "MixtureOfExperts" and stage.startswith("3"):
        zero = {**(STAGES[stage][1] or {}), "leaf_modules": ["MoeBlock"]}
        chosen = config(3, zero=zero)
    else:
        chosen = settings(stage)
    results = pools(2).run(joined, {"config": chosen, "counts": [1, 4], "model": model, "after": 2})
    assert_same_bits(results[0]["parameters"], results[1]["parameters"], "parameters of two ranks")
    if model != "ConvNet":  # its statistics are each rank's own
        wanted = joined_plain(SGD, [1, 4], model=model, after=2)
        assert_close(results[0]["parameters"], wanted, 2e-6, model)


@pytest.mark.parametrize("stage", ["0", "3"])
def test_what_goes_on_in_a_join(pools: Pools, stage: str) -> None:
    """Means are over the ranks that go on; every forward, backward and step is one exchange, and an evaluation too."""
    results = pools(2).run(joined, {"config": settings(stage), "counts": [2, 4], "model": "Mlp"})
    assert results[0]["means"] == results[1]["means"][:2]
    assert results[1]["means"][0] == results[0]["losses"][0] + results[1]["losses"][0]
    assert results[1]["means"][2:] == results[1]["losses"][2:]
    even = pools(2).run(joined, {"config": settings(stage), "counts": [4, 4], "model": "Mlp"})
    assert even[0]["inside"]["traffic"][("all_gather", "control")] == 4 * 4 + 1  # with the mean; and at the end


def test_buffers_are_those_of_a_rank_that_goes_on(pools: Pools) -> None:
    arguments = {"config": settings("2"), "counts": [1, 4], "model": "Buffered", "broadcast_buffers": True}
    first, second = pools(2).run(joined, arguments)
    assert second["buffers"]["calls"] == 4
    assert first["buffers"]["calls"] == 3  # before the last forward


@pytest.mark.parametrize("stage", ["1", "3"])
def test_a_step_that_is_skipped_is_skipped_by_all(pools: Pools, stage: str) -> None:
    first, second = pools(2).run(overflowing, {"config": settings(stage, fp16=dynamic_fp16())})
    assert first["skipped_steps"] == second["skipped_steps"] == 1
    assert first["loss_scale"] == second["loss_scale"] == 128
    assert_same_bits(first["parameters"], second["parameters"], "parameters of two ranks")


LEFT = "has left with an exception"
LEAVING = {
    "early": (LEFT, LEFT),
    "late": (LEFT, LEFT),
    "places": ("different places of their loops", "different places of their loops"),
    "master": ("has finished its batches", "has finished its batches"),
    "gathered": ("has finished its batches", "has finished its batches"),
    "metrics": (LEFT, "have finished their batches"),
}


@pytest.mark.fast("2-0-late", "2-1-early", "2-2-places", "2-3-master")
@pytest.mark.parametrize(
    ("stage", "how"),
    [("1", "early"), ("0", "late"), ("2", "places"), ("1", "metrics"), *(("3", how) for how in LEAVING)],
)
@pytest.mark.parametrize("world", WORLDS[1:])
def test_nobody_waits_for_a_rank_that_does_something_else(pools: Pools, stage: str, how: str, world: int) -> None:
    results = pools(world).run(leaving, {"config": settings(stage), "how": how}, timeout=30)
    finished, *others = results
    for rank, result in enumerate(others, 1):
        if how in ("early", "late") and rank == 1:
            assert result["kind"] == "KeyError"
        else:
            assert LEAVING[how][1] in result["message"], (rank, result)
    assert LEAVING[how][0] in finished["message"], finished


def test_join_is_not_entered_twice(pools: Pools) -> None:
    assert all("cannot be entered twice" in message for message in pools(2).run(nested, {"config": settings("1")}))
