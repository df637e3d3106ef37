"""Training whose traffic between sets of two ranks has few bits: equal bits on all ranks, exact masters, and the
bytes of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerolite
from tests.checkpoint.runs import keep, kept
from tests.toolkit import models
from tests.toolkit.compare import CLIP, assert_same_bits, assert_same_on_ranks
from tests.toolkit.configs import ADAMW, SGD, at, dynamic_fp16
from tests.toolkit.lockstep import skipping_on_device
from tests.toolkit.pool import Pools
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import backward, make_engine, run_steps, snapshot
from zerolite.config import ConfigError
from zerolite.ops.call import QUANT_BLOCK
from zerolite.zero import GatheredParameters

ROWS, PAIRS = {"zero_hpz_partition_size": 2}, {"shard_size": 2}
WEIGHTS, GRADIENTS = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
LOCO = {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
ALL = {**WEIGHTS, **GRADIENTS, **LOCO}
CASES = {
    "weights": ("3 tight", {**ROWS, **WEIGHTS}),
    "gradients": ("3 tight", {**ROWS, **GRADIENTS}),
    "all": ("3 moving", {**ROWS, **ALL}),
    "replicas 1": ("1", {**PAIRS, **GRADIENTS}),
    "replicas 2": ("2", {**PAIRS, **GRADIENTS, **LOCO}),
    "replicas 3": ("3 tight", {**PAIRS, **GRADIENTS}),
}


@pytest.mark.fast("4-all-bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
@on_ranks(4)
def test_ranks_stay_equal_and_near_uncompressed_training(case: str, precision: str) -> None:
    stage, zero = CASES[case]
    losses, weights = {}, {}
    for name, of in (("plain", {k: v for k, v in zero.items() if k in (*ROWS, *PAIRS)}), ("compressed", zero)):
        engine = make_engine(at(stage, precision, 2, CLIP, ADAMW, zero=of))
        losses[name] = run_steps(engine, 4, model="OddModel")
        weights[name] = snapshot(engine)
        assert_same_on_ranks(weights[name])
    assert losses["compressed"] != losses["plain"]
    torch.testing.assert_close(losses["compressed"], losses["plain"], rtol=0.05, atol=0.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@on_ranks(4)
def test_owners_keep_exact_masters_and_take_over_what_users_write(precision: str) -> None:
    """A parameter is within half a step of its master. A value that nobody writes is no write, and one that somebody
    writes becomes the master's."""
    engine = make_engine(at("3 tight", precision, 1, 0.0, ("SGD", {"lr": 0.0}), zero={**ROWS, **WEIGHTS}), "Mlp")
    run_steps(engine, 1)
    names = [name for name, _ in engine.module.named_parameters()]
    masters = dict(zip(names, zerolite.get_full_master(list(engine.module.parameters())), strict=True))
    begin = {name: p.detach() for name, p in models.build(models.Mlp).named_parameters()}
    assert_same_bits(masters, begin, "masters")
    rounding = 2.0**-8 if precision == "bf16" else 2.0**-20  # of what is sent, and of what arrives
    bound = float(max(m.abs().max() for m in masters.values())) * (1 / 127 / 2 + rounding)
    for name, value in snapshot(engine).items():
        assert float((value.float() - masters[name]).abs().max()) <= bound, name
    run_steps(engine, 2, 1)
    again = dict(zip(names, zerolite.get_full_master(list(engine.module.parameters())), strict=True))
    assert_same_bits(again, masters, "masters")
    first = next(iter(engine.module.parameters()))
    with GatheredParameters([first], modifier_rank=0):
        if engine.rank == 0:
            first.data.fill_(0.375)
    run_steps(engine, 1, 3)
    assert torch.equal(zerolite.get_full_master(first), torch.full(first.ds_shape, 0.375))
    assert_same_on_ranks(snapshot(engine))


@pytest.mark.slow
@on_ranks(4)
def test_a_rank_with_nan_skips_the_step_of_all() -> None:
    engine = make_engine(at("3 tight", "fp16", 1, CLIP, ADAMW, zero={**ROWS, **ALL}, fp16=dynamic_fp16()), "Mlp")
    run_steps(engine, 1)
    before = snapshot(engine)
    x, y = models.float_batch(9, 0, engine.rank)
    engine.backward(nn.functional.mse_loss(engine(x.half()), y.half()) * (torch.nan if engine.rank == 1 else 1.0))
    engine.step()
    assert engine.skipped_steps == 1
    assert_same_bits(snapshot(engine), before, "weights")
    losses = run_steps(engine, 2, 2)
    assert all(loss == loss for loss in losses)
    assert_same_on_ranks(snapshot(engine))


class Distance(nn.Module):
    """Half the squared distance of a vector of 512 from a target."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(512))

    def forward(self, target: Tensor) -> Tensor:
        return (self.place - target).square().sum() / 2


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "sets"), [("3 moving", ROWS), ("2", PAIRS)], ids=["rows", "pairs"])
@on_ranks(4)
def test_what_packing_rounds_to_zero_arrives_with_error_feedback(stage: str, sets: dict[str, int]) -> None:
    """In one of 64 elements the two sets have gradients of 8 that cancel. Beside those a gradient below 8 / 14 = 0.57
    has the code 0, so without error feedback nothing moves, ever. With it gradients arrive on average: what is left of
    the distance follows from steps of 8 / 7 times the learning rate."""
    goal = torch.rand(512, generator=torch.Generator().manual_seed(0)) - 0.5
    goal[::64] = 0.0
    left = {}
    for name, loco, steps in (("without", {}, 10), ("with", {"zeropp_loco_param": {"err_beta": 0.8}}, 60)):
        given = at(stage, "fp32", 1, 0.0, ("SGD", {"lr": 0.05}), zero={**sets, **GRADIENTS, **loco})
        engine = zerolite.initialize(Distance(), given)
        target = goal.clone()
        target[::64] += 8.0 if engine.rank < 2 else -8.0
        for _ in range(steps):
            engine.backward(engine(target))
            engine.step()
        left[name] = snapshot(engine)["place"] - goal
        assert_same_on_ranks({"place": left[name]})
    assert torch.equal(left["without"], -goal), "it has moved"
    assert float(left["with"].abs().max()) < 0.05 * 8 / 7 * 2 and float(left["with"].norm() / goal.norm()) < 0.2


@on_ranks(4)
def test_values_that_cannot_be_packed_are_refused_on_all_ranks() -> None:
    """When the engine is made, and when such a parameter is trained later; double gradients can be packed."""
    config = at("3 moving", "fp32", 1, 0.0, ADAMW, zero={**ROWS, **WEIGHTS})
    message = "zero_quantized_weights: expected trained .* in fp32, bf16 or fp16, .* got torch.float64 of parameter '"
    with pytest.raises(ConfigError, match=message + "layers.0.weight'; set the key to false, or"):
        zerolite.initialize(Wide().double(), config)
    model = Wide()
    model.layers[1].double().requires_grad_(False)
    engine = zerolite.initialize(model, config)
    with pytest.raises(ConfigError, match=message + "layers.1.weight'"):
        engine.optimizer.add_param_group({"params": [model.layers[1].weight.requires_grad_()]})
    engine = zerolite.initialize(Wide().double(), at("3 moving", "fp32", 1, 0.0, ADAMW, zero={**ROWS, **GRADIENTS}))
    engine.backward(engine(torch.randn(1, 512, dtype=torch.float64)))
    engine.step()


@pytest.mark.fast("4-True")
@pytest.mark.parametrize("weighted", [False, True])
@on_ranks(4)
def test_errors_follow_the_loss_scale(weighted: bool) -> None:
    """A scale that doubles after every step gives the bits of one that stays. So do losses with weights, which are
    divided by a unit that follows them."""
    weights = []
    for window in (1, 1000):
        fp16 = dynamic_fp16(initial_scale_power=10, loss_scale_window=window)
        engine = make_engine(at("3 tight", "fp16", 1, 0.0, ADAMW, zero={**ROWS, **GRADIENTS, **LOCO}, fp16=fp16), "Mlp")
        for step in range(4):
            x, y = models.float_batch(step, 0, engine.rank)
            loss = nn.functional.mse_loss(engine(x.half()).float(), y)
            engine.backward(loss, weight=64.0) if weighted and window == 1 else engine.backward(loss)
            engine.step()
        assert engine.skipped_steps == 0 and engine.loss_scale == (2.0**14 if window == 1 else 2.0**10)
        weights.append(snapshot(engine))
    assert_same_bits(*weights, "weights")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["2", "3 tight"])
@on_ranks(4)
def test_errors_have_one_unit_in_a_backward_and_in_a_read(stage: str) -> None:
    """The sums of a read take over the errors of those in backwards, and leave them their own."""
    weights = []
    for reads in (False, True):
        given = at(stage, "fp32", 2, 0.0, ("SGD", {"lr": 0.01}), zero={**PAIRS, **GRADIENTS, **LOCO})
        engine = make_engine({**given, "gradient_predivide_factor": 0.125}, "Mlp")
        for step in range(4):
            read = reads and step % 2 == 1
            engine.set_gradient_accumulation_boundary(not read)
            x, y = models.float_batch(step, 0, engine.rank)
            engine.backward(nn.functional.mse_loss(engine(x), y))
            assert bool(engine._parts.groups.partial) == read
            if read:
                engine.module.first.weight.grad.sum()
            engine.set_gradient_accumulation_boundary(True)
            engine.step()
        weights.append(snapshot(engine))
    assert_same_bits(*weights, "weights")


def save(directory: Path, steps: int) -> None:
    engine = make_engine(at("3 moving", "bf16", 1, CLIP, ADAMW, zero={**ROWS, **WEIGHTS}))
    run_steps(engine, steps, model="OddModel")
    engine.save_checkpoint(directory)
    run_steps(engine, 2, steps, model="OddModel")
    keep(directory, weights=snapshot(engine))


def load(directory: Path, steps: int) -> None:
    engine = make_engine(at("3 moving", "bf16", 1, CLIP, ADAMW, zero={**ROWS, **WEIGHTS}))
    engine.load_checkpoint(directory)
    run_steps(engine, 2, steps, model="OddModel")
    assert_same_bits(snapshot(engine), kept(directory)["weights"], "weights")


def test_a_job_that_goes_on_has_the_bits_of_one_that_went_through(pools: Pools, tmp_path: Path) -> None:
    for run in (save, load):
        pools(4).run(run, {"directory": tmp_path, "steps": 3})


@pytest.mark.slow
@on_ranks(4)
def test_a_load_begins_errors_of_gradients_anew(tmp_path: Path) -> None:
    """So an engine that has trained goes on as one that was made for the load."""
    made = at("3 tight", "bf16", 1, 0.0, ADAMW, zero={**ROWS, **GRADIENTS, **LOCO})
    trained = make_engine(made, "Mlp")
    run_steps(trained, 3)
    trained.save_checkpoint(tmp_path)
    weights = []
    for engine in (trained, make_engine(made, "Mlp")):
        engine.load_checkpoint(tmp_path)
        run_steps(engine, 3, 3)
        weights.append(snapshot(engine))
    assert_same_bits(*weights, "weights")


class Wide(nn.Module):
    """Two matrices, so large that neither padding nor scales of small tensors count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def bytes_between_sets(zero: dict[str, Any]) -> dict[str, int]:
    """Bytes of a step that leave the node of two ranks, by tag: of stage 3 over all ranks everything that does."""
    torch.manual_seed(0)
    moving = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    engine = zerolite.initialize(
        Wide(),
        {
            "bf16": {"enabled": True},
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {**moving, **zero},
        },
    )
    for _ in range(2):
        with zerolite.comm.record() as recorder:
            engine.backward(engine(torch.randn(1, 512).bfloat16()))
            engine.step()
    far = [call for call in recorder.calls if call.dimension == "replicate" or (not zero and call.tag != "stats")]
    return {tag: sum(call.nbytes for call in far if call.tag == tag) for tag in ("parameters", "gradients")}


@on_ranks(4)
def test_a_quarter_of_the_bytes_travels_between_nodes() -> None:
    """ZeRO++'s figures: 2 M of gathers and M of gradients without sets, M / 2 and M / 4 with all three keys, beside a
    64th of a byte of scales for each element. (M: the 2 bytes of all elements. Of a set's part each rank sends the
    rest of a ring, which is the same share everywhere.)"""
    elements = 2 * 512 * 512
    plain, compressed = bytes_between_sets({}), bytes_between_sets({**ROWS, **ALL})
    assert plain == {"parameters": 2 * 2 * elements, "gradients": 2 * elements}
    part, scales = elements // 2, elements // 2 // QUANT_BLOCK * 4  # of each of the two ranks of a set
    assert compressed == {"parameters": part + scales, "gradients": part // 2 + scales}
    ratio = sum(plain.values()) / (2 * sum(compressed.values()))
    assert 3.8 < ratio < 4.0


@pytest.mark.parametrize("how", ["zero_grad", "skip", "skip on the device"])
@on_ranks(4)
def test_gradients_that_no_step_uses_leave_nothing_in_later_ones(how: str) -> None:
    """Neither in the error feedback: training goes on as that of an engine that has not seen the batch."""
    made = at("2", "fp32", 1, 0.0, SGD, zero={**PAIRS, **GRADIENTS, **LOCO})
    with skipping_on_device(how == "skip on the device"):
        engine, twin = make_engine(made, "Mlp"), make_engine(made, "Mlp")
    backward(engine, 7)
    if how == "zero_grad":
        engine.zero_grad()
    else:
        bad: Any = engine.module.first.bias
        bad.grad = torch.full_like(bad, float("inf"))
        engine.step()
    for one in (engine, twin):
        run_steps(one, 2, 1)
    assert engine.skipped_steps == (how != "zero_grad")
    assert_same_bits(snapshot(engine), snapshot(twin), how)
