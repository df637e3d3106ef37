"""No micro-batch is ever lost, however the loop is written; and graphs that are not a plain chain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.toolkit import models, reference
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, SGD, config, dynamic_fp16
from tests.toolkit.pool import Pools
from tests.toolkit.training import make_engine, snapshot


def loss_on(engine: Any, step: int, micro: int) -> Tensor:
    return models.token_loss(engine, models.token_batch(step, micro, dist.get_rank()))


def window_in_many_ways(base: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """The same four micro-batches per window, in every way that a user may write them. ``base`` has accumulation 4."""
    single = base | {"gradient_accumulation_steps": 1}
    divided = base | {"divide_plain_backward": True}

    def counted(engine: Any, step: int) -> None:
        for micro in range(4):
            engine.backward(loss_on(engine, step, micro))
            engine.step()

    def no_sync(engine: Any, step: int) -> None:
        with engine.no_sync():
            for micro in range(3):
                engine.backward(loss_on(engine, step, micro))
                engine.step()
        engine.backward(loss_on(engine, step, 3))
        engine.step()

    def no_sync_around_all(engine: Any, step: int) -> None:
        with engine.no_sync():
            for micro in range(4):
                engine.backward(loss_on(engine, step, micro))
                engine.step()

    def boundary_by_hand(engine: Any, step: int) -> None:
        for micro in range(4):
            engine.set_gradient_accumulation_boundary(micro == 3)
            assert engine.is_gradient_accumulation_boundary() is (micro == 3)
            engine.backward(loss_on(engine, step, micro))
            engine.step()

    def four_backwards_one_step(engine: Any, step: int) -> None:
        for micro in range(4):
            engine.backward(loss_on(engine, step, micro) / 4, scale_wrt_gas=False)
        engine.step()

    def plain(engine: Any, step: int) -> None:
        for micro in range(4):
            (loss_on(engine, step, micro) / 4).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    def plain_divided(engine: Any, step: int) -> None:
        for micro in range(4):
            loss_on(engine, step, micro).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    def mixed_divided(engine: Any, step: int) -> None:
        for micro in range(4):
            if micro % 2:
                loss_on(engine, step, micro).backward()
            else:
                engine.backward(loss_on(engine, step, micro))
            engine.step()

    def plain_with_no_sync(engine: Any, step: int) -> None:
        with engine.no_sync():
            for micro in range(3):
                (loss_on(engine, step, micro) / 4).backward()
        (loss_on(engine, step, 3) / 4).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    def mixed(engine: Any, step: int) -> None:
        """Two of the engine's backwards, two of torch's."""
        for micro in range(2):
            engine.backward(loss_on(engine, step, micro) / 4, scale_wrt_gas=False)
        for micro in range(2, 4):
            (loss_on(engine, step, micro) / 4).backward()
        engine.step()

    def phases(engine: Any, step: int) -> None:
        for micro in range(4):
            engine.backward(loss_on(engine, step, micro) / 4, scale_wrt_gas=False)
        engine.reduce_gradients()
        norm = engine.clip_gradients(0.4)
        engine.update()
        assert engine.get_global_grad_norm() == norm > 0
        engine.publish()
        engine.zero_grad()

    def phases_twice(engine: Any, step: int) -> None:
        """Phases that have run may be asked for again."""
        for micro in range(4):
            engine.backward(loss_on(engine, step, micro) / 4, scale_wrt_gas=False)
        engine.reduce_gradients()
        engine.reduce_gradients()
        assert engine.clip_gradients(float("inf")) == engine.clip_gradients(0.4)
        engine.step()

    def reduced_in_the_middle(engine: Any, step: int) -> None:
        for micro in range(4):
            engine.backward(loss_on(engine, step, micro) / 4, scale_wrt_gas=False)
            engine.reduce_gradients()
        engine.step()

    ways = {
        "counted": (base, counted),
        "no_sync": (base, no_sync),
        "no_sync around all": (base, no_sync_around_all),
        "boundary by hand": (base, boundary_by_hand),
        "boundary by hand, accumulation 4 undeclared": (single, lambda e, s: by_hand_undeclared(e, s)),
        "four backwards, one step": (single, four_backwards_one_step),
        "plain": (base, plain),
        "plain, accumulation undeclared": (single, plain),
        "plain, divided by the engine": (divided, plain_divided),
        "mixed, divided by the engine": (divided, mixed_divided),
        "plain with no_sync": (single, plain_with_no_sync),
        "mixed": (single, mixed),
        "phases": (single, phases),
        "phases twice": (single, phases_twice),
        "reduced in the middle": (single, reduced_in_the_middle),
    }
    results: dict[str, Any] = {}
    for name, (setting, way) in ways.items():
        engine = make_engine(setting)
        norms = []
        for step in range(steps):
            way(engine, step)
            norms.append(engine.get_global_grad_norm())
        results[name] = {"norms": norms, "parameters": snapshot(engine), "steps": engine.global_steps}
    return results


def by_hand_undeclared(engine: Any, step: int) -> None:
    for micro in range(4):
        engine.set_gradient_accumulation_boundary(micro == 3)
        engine.backward(loss_on(engine, step, micro) / 4)
        engine.step()


def partial_window(config: dict[str, Any], contained: int) -> dict[str, Any]:
    """``step(flush=True)`` after ``contained`` of the config's micro-batches; then a full window."""
    engine = make_engine(config)
    assert engine.step(flush=True) is False, "there is nothing to flush"
    for micro in range(contained):
        if config.get("divide_plain_backward"):
            loss_on(engine, 0, micro).backward()
        else:
            engine.backward(loss_on(engine, 0, micro))
        engine.step(flush=micro == contained - 1)
    flushed = {"parameters": snapshot(engine), "norm": engine.get_global_grad_norm(), "steps": engine.global_steps}
    for micro in range(config["gradient_accumulation_steps"]):
        engine.backward(loss_on(engine, 1, micro))
        engine.step()
    return {"flushed": flushed, "then": snapshot(engine), "steps": engine.global_steps}


def float_training(
    config: dict[str, Any],
    model: str,
    steps: int = 4,
    sizes: dict[str, Any] | None = None,
    branches: list[list[str]] | None = None,
) -> dict[str, Any]:
    """Train a model on floating inputs; ``branches[step][rank]`` is passed to its forward if given."""
    engine = make_engine(config, model, sizes)
    losses = []
    for step in range(steps):
        x, y = models.float_batch(step, 0, dist.get_rank())
        more = () if branches is None else (branches[step][dist.get_rank()],)
        loss = torch.nn.functional.mse_loss(engine(x, *more), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return {"losses": losses, "parameters": snapshot(engine)}


def exception_in_backward(config: dict[str, Any]) -> dict[str, Any]:
    """Backward fails on every rank after some gradients have arrived; zero_grad, and go on."""

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ArithmeticError("planned failure in backward")

    engine = make_engine(config, "Mlp")
    fail_now = False
    engine.module.first.register_forward_hook(lambda _m, _i, output: Fail.apply(output) if fail_now else output)
    for step in range(4):
        batch = models.float_batch(step, 0, dist.get_rank())
        fail_now = step == 2
        loss = models.square_loss(engine, batch)
        if fail_now:
            before = snapshot(engine)
            try:
                engine.backward(loss)
            except ArithmeticError:
                engine.zero_grad()
            else:
                raise AssertionError("the exception did not reach the caller")
            assert all(torch.equal(before[name], value) for name, value in snapshot(engine).items())
            continue
        engine.backward(loss)
        engine.step()
    return {"parameters": snapshot(engine), "steps": engine.global_steps}


def without_step(config: dict[str, Any], steps: list[int]) -> dict[str, Any]:
    """Run without the step that failed, which :func:`exception_in_backward` must equal."""
    engine = make_engine(config, "Mlp")
    for step in steps:
        engine.backward(models.square_loss(engine, models.float_batch(step, 0, dist.get_rank())))
        engine.step()
    return {"parameters": snapshot(engine), "steps": engine.global_steps}


def dropped_gradients(config: dict[str, Any]) -> dict[str, Any]:
    """A backward whose gradients are dropped leaves no trace."""
    engine = make_engine(config, "Mlp")
    for step in range(3):
        engine.backward(models.square_loss(engine, models.float_batch(100 + step, 0, dist.get_rank())))
        engine.zero_grad()
        engine.backward(models.square_loss(engine, models.float_batch(step, 0, dist.get_rank())))
        engine.step()
    return {"parameters": snapshot(engine), "steps": engine.global_steps}


def message_of(config: dict[str, Any], model: str, what: str) -> str:
    """The text of the exception that ``what`` raises on this rank."""
    try:
        _MISUSES[what](config, model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{what} raised nothing")


def _unused(config: dict[str, Any], model: str) -> None:
    engine = make_engine(config, model)
    engine.backward(loss_on(engine, 0, 0))
    engine.step()


class SparseModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(models.VOCABULARY, 3, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)


def _sparse(config: dict[str, Any], model: str) -> None:
    import zerolite

    engine = zerolite.initialize(SparseModel(), config)
    engine.backward(engine(torch.tensor([[1, 2]])).sum())
    engine.step()


def _not_elementwise(config: dict[str, Any], model: str) -> None:
    make_engine(config | {"optimizer": {"type": "Adafactor", "params": {"lr": 0.1}}}, "Mlp")


def _foreign_parameters(config: dict[str, Any], model: str) -> None:
    other = models.build(models.Mlp)
    config = {key: value for key, value in config.items() if key != "optimizer"}
    make_engine(config, "Mlp", optimizer=torch.optim.SGD(other.parameters(), lr=0.1))


_MISUSES = {
    "unused": _unused,
    "sparse": _sparse,
    "not elementwise": _not_elementwise,
    "foreign parameters": _foreign_parameters,
}


# -------------------------------------------------------------------- the tests


# The ways differ in where 1/4 is multiplied and in what is summed before it is reduced. Three steps of SGD with lr
# 0.05 and gradients of order 1: a rounding error of one fp32 unit in the last place (6e-8) per sum stays far below; a
# lost micro-batch moves a weight by 1e-2.
FP32_TOLERANCE = 1e-6
# bf16: the sums are fp32 at every stage, but dividing a loss by 4 before or after is exact, so what differs is one
# rounding of the weights.
BF16_TOLERANCE = 2.0**-7


@pytest.mark.fast("0-fp32", "1-bf16", "2-bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_way_to_write_a_window_gives_the_same_update(pools: Pools, stage: int, precision: str) -> None:
    results = pools(2).run(window_in_many_ways, {"base": config(stage, precision, accumulation=4, clip=0.4)})
    batches = [
        [[models.token_batch(step, micro, rank) for rank in range(2)] for micro in range(4)] for step in range(3)
    ]
    wanted = reference.train(models.build(models.OddModel), models.token_loss, batches, precision, SGD, 0.4)
    tolerance = FP32_TOLERANCE if precision == "fp32" else BF16_TOLERANCE
    for name, result in results[0].items():
        assert_same_bits(result["parameters"], results[1][name]["parameters"], f"{name}: two ranks")
        assert result["steps"] == 3, name
        assert result["norms"] == pytest.approx(wanted.norms, rel=tolerance), name
        for parameter, value in wanted.parameters.items():
            torch.testing.assert_close(
                result["parameters"][parameter].float(),
                value,
                rtol=tolerance,
                atol=tolerance / 8,
                msg=lambda m, n=name, p=parameter: f"{n}, {p}: {m}",
            )


@pytest.mark.parametrize(("contained", "plain"), [(1, False), (3, True)])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_flushed_window_is_the_mean_of_what_it_contains(
    pools: Pools, stage: int, contained: int, plain: bool
) -> None:
    setting = config(stage, "fp32", accumulation=4, clip=0.4, divide_plain_backward=plain)
    result = pools(2).run(partial_window, {"config": setting, "contained": contained})[0]
    sizes = (contained, 4)
    batches = [
        [[models.token_batch(step, micro, rank) for rank in range(2)] for micro in range(count)]
        for step, count in enumerate(sizes)
    ]
    first = reference.train(models.build(models.OddModel), models.token_loss, batches[:1], "fp32", SGD, 0.4)
    both = reference.train(models.build(models.OddModel), models.token_loss, batches, "fp32", SGD, 0.4)
    assert result["flushed"]["norm"] == pytest.approx(first.norms[0], rel=1e-6)
    assert (result["flushed"]["steps"], result["steps"]) == (1, 2)
    torch.testing.assert_close(result["flushed"]["parameters"], first.parameters, rtol=0, atol=FP32_TOLERANCE)
    torch.testing.assert_close(result["then"], both.parameters, rtol=0, atol=FP32_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [None, True, False])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_weight_shared_by_two_checkpointed_blocks(pools: Pools, stage: int, overlap: bool | None) -> None:
    """Its gradient comes twice in a backward; a bucket reduced after the first would lose the second."""
    # Buckets of one parameter each: the shared weight's bucket is complete long before its second contribution.
    setting = config(stage, zero={"overlap_comm": overlap, "reduce_bucket_size": 1})
    for reentrant in (True, False):
        kwargs = {"config": setting, "model": "SharedCheckpointed", "steps": 4, "sizes": {"reentrant": reentrant}}
        results = pools(2).run(float_training, kwargs)
        batches = [[[models.float_batch(step, 0, rank) for rank in range(2)]] for step in range(4)]
        model = models.build(models.SharedCheckpointed, reentrant=reentrant)
        wanted = reference.train(model, models.square_loss, batches, "fp32", SGD)
        torch.testing.assert_close(results[0]["parameters"], wanted.parameters, rtol=0, atol=FP32_TOLERANCE)


BRANCHES = {
    "the same layer unused on all ranks": [["left", "left"]] * 4,
    "a layer unused on one rank": [["left", "right"]] * 4,
    "another layer each step": [["left", "left"], ["right", "right"], ["left", "left"], ["right", "right"]],
    "another layer on each rank and step": [["left", "right"], ["right", "right"], ["right", "left"], ["left", "left"]],
}


@pytest.mark.fast("the same layer unused on all ranks-SGD-True", "another layer each step-SGD-True")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("branches", BRANCHES.values(), ids=BRANCHES.keys())
def test_unused_parameters(pools: Pools, branches: list[list[str]], optimizer: Any, overlap: bool) -> None:
    """A parameter that no rank used keeps its value (no weight decay, no momentum); one that some ranks used gets
    their mean with zeros."""
    model = models.build(models.TwoBranches)
    torch_optimizer = reference.make_optimizer(optimizer[0], list(model.parameters()), optimizer[1])
    for step, ranks in enumerate(branches):
        torch_optimizer.zero_grad()
        for rank, branch in enumerate(ranks):
            x, y = models.float_batch(step, 0, rank)
            (torch.nn.functional.mse_loss(model(x, branch), y) / len(ranks)).backward()
        torch_optimizer.step()
    tolerance = FP32_TOLERANCE if optimizer is SGD else 0.02 * ADAMW[1]["lr"]
    for stage in (0, 1, 2):
        setting = config(stage, optimizer=optimizer, zero={"overlap_comm": overlap, "reduce_bucket_size": 1})
        kwargs = {"config": setting, "model": "TwoBranches", "branches": branches}
        results = pools(2).run(float_training, kwargs)
        assert_same_bits(results[0]["parameters"], results[1]["parameters"], "two ranks")
        wanted = {name: p.detach() for name, p in model.named_parameters()}
        torch.testing.assert_close(results[0]["parameters"], wanted, rtol=0, atol=tolerance)


@pytest.mark.fast("0-False", "1-True", "2-False")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_exception_in_the_middle_of_backward(pools: Pools, stage: int, overlap: bool) -> None:
    setting = config(stage, zero={"overlap_comm": overlap, "reduce_bucket_size": 1})
    failed = pools(2).run(exception_in_backward, {"config": setting})
    wanted = pools(2).run(without_step, {"config": setting, "steps": [0, 1, 3]})
    assert failed[0]["steps"] == wanted[0]["steps"] == 3
    for rank in range(2):
        assert_same_bits(failed[rank]["parameters"], wanted[0]["parameters"], f"rank {rank}")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_dropped_gradients_leave_no_trace(pools: Pools, stage: int) -> None:
    for setting in (config(stage), config(stage, "bf16"), config(stage, fp16=dynamic_fp16())):
        dropped = pools(2).run(dropped_gradients, {"config": setting})
        wanted = pools(2).run(without_step, {"config": setting, "steps": [0, 1, 2]})
        assert dropped[0]["steps"] == 3
        assert_same_bits(dropped[0]["parameters"], wanted[0]["parameters"], "dropped gradients")


def test_unused_parameters_are_an_error_if_the_config_says_so(pools: Pools) -> None:
    for stage in (0, 1, 2):
        setting = config(stage, zero={"ignore_unused_parameters": False})
        for message in pools(2).run(message_of, {"config": setting, "model": "OddModel", "what": "unused"}):
            assert "unused" in message
            assert "ignore_unused_parameters" in message
            assert "up.weight" not in message


@pytest.mark.parametrize(
    ("what", "stage", "expected"),
    [
        ("sparse", 0, ["embed.weight", "sparse"]),
        ("sparse", 2, ["embed.weight", "sparse"]),
        ("not elementwise", 3, ["Adafactor", "stage"]),
        ("foreign parameters", 1, ["param group 0", "model.parameters()"]),
    ],
)
def test_misuse_is_told_in_a_sentence(pools: Pools, what: str, stage: int, expected: list[str]) -> None:
    for message in pools(2).run(message_of, {"config": config(stage), "model": "OddModel", "what": what}):
        for word in expected:
            assert word in message, message
