"""Collectives that deliver as late as NCCL may: nothing reads a result, overwrites an input or frees memory before the
collective has been waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, at
from tests.toolkit.lockstep import Layers, skipping_on_device
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import snapshot
from tests.toolkit.transports import check_order, late, transport
from zerolite.comm.communicator import Pending
from zerolite.zero import groups


class Checkpointed(Layers):
    """The middle layers recomputed in backward."""

    def forward(self, x: Tensor, extras: tuple[bool, ...] = (True, True, True)) -> Tensor:
        x = self.first(x)
        for layer, use_extra in zip(self.layers, extras, strict=True):
            x = checkpoint(layer, x, use_extra, use_reentrant=False)
        return self.last(self.gain * x)


def train(given: dict[str, Any], way: str, on_device: bool) -> dict[str, Tensor]:
    """Three steps. way: what the loop does beside training."""
    with skipping_on_device(on_device):
        engine = zerolite.initialize(models.build(Checkpointed if way == "checkpointing" else Layers), given)
    seen: dict[str, Tensor] = {}
    last = engine.module.last.weight
    views: dict[str, Tensor] = {"last.weight": last.data[0]} if way == "views" else {}
    for step in range(3):
        for micro in range(engine.gradient_accumulation_steps):
            x, y = models.float_batch(step, micro, engine.rank)
            extras = (True, way != "unused" or engine.rank == 0, way != "unused")
            loss = (engine(x, extras).float() - y).square().mean()
            engine.backward(loss) if way != "clipping" else loss.backward()
            seen[f"loss {step} {micro}"] = loss.detach()
        if way == "clipping":
            seen[f"norm {step}"] = nn.utils.clip_grad_norm_(engine.parameters(), 0.3)
        engine.step()
        if way == "views":
            seen |= {f"{name} {step}": view.clone() for name, view in views.items()}
            views["first.weight"] = engine.module.first.weight.detach().view(-1)  # of what was in flight a moment ago
        if way == "between":
            seen[f"norm {step}"] = engine.module.layers[1].weight.detach().norm()
            seen |= {f"{name} {step}": value.clone() for name, value in engine.module.state_dict().items()}
            with torch.no_grad():
                engine.module.last.weight.mul_(0.9)
                engine.module.layers[0].extra.clamp_(-0.3, 0.3)
            with zerolite.zero.GatheredParameters(engine.module.first.weight, modifier_rank=0), torch.no_grad():
                engine.module.first.weight.add_(0.01)
            engine.eval()
            with torch.no_grad():
                seen[f"evaluated {step}"] = engine(x)
            engine.train()
    return seen | snapshot(engine)


WAYS = ["plain", "checkpointing", "unused", "clipping", "between", "views"]


@pytest.mark.fast(every=14)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("precision", "accumulation", "overlap"), [("fp32", 1, None), ("bf16", 2, None), ("fp32", 2, False)]
)
@pytest.mark.parametrize("stage", ["0", "1", "2", "3 tight", "3 defaults"])
@on_ranks(2)
def test_every_wait(
    stage: str, precision: str, accumulation: int, overlap: bool | None, way: str, on_device: bool
) -> None:
    zero = {} if stage.startswith("3") else {"overlap_comm": overlap}
    given = at(stage, precision, accumulation, 0.0, ADAMW, zero=zero)
    with transport("native"):
        expected = train(given, way, on_device)
    with late() as launched:
        assert_same_bits(train(given, way, on_device), expected, "in time and late")
    check_order(launched)


# -------------------------------------------------------------------- replicas: several communicators


def replicated(stage: str, precision: str = "bf16", key: str = "shard_size") -> dict[str, Any]:
    return at(stage, precision, 2, 0.0, ADAMW, zero={key: 2, "overlap_comm": True})


@pytest.mark.fast("3 tight-shard_size-*")
@on_ranks(4)
@pytest.mark.parametrize(
    ("stage", "key"),
    [("1", "shard_size"), ("2", "shard_size"), ("3 tight", "shard_size"), ("3 tight", "zero_hpz_partition_size")],
)
def test_every_wait_of_replicas(stage: str, key: str) -> None:
    given = replicated(stage, key=key)
    with transport("native"):
        expected = train(given, "unused", True)
    with late() as launched:
        assert_same_bits(train(given, "unused", True), expected, "in time and late")
    check_order(launched)


@on_ranks(4)
def test_shards_that_an_update_still_sends() -> None:
    """Values that a forward does not use stay in flight until they are read or written."""
    given = at("3 moving", "bf16", 1, 0.0, ADAMW, zero={"zero_hpz_partition_size": 2})
    with late():
        engine = zerolite.initialize(models.build(Layers), given)
        for step in range(2):
            x, y = models.float_batch(step, 0, engine.rank)
            engine.backward((engine(x).float() - y).square().mean())
            engine.step()
        pending = engine._parts.param_gatherer.pending
        parameters = [p for p in engine._parts.model.parameters() if p.numel()]
        assert len(pending) == len(engine._parts.buffer.buckets) > 2
        with torch.no_grad():
            parameters[0].zero_()
        assert not parameters[0].ds_tensor.any() and 0 < len(pending) < len(engine._parts.buffer.buckets)
        shards = [p.ds_tensor.clone() for p in parameters]
        assert not pending and all(shard.isfinite().all() for shard in shards)
        values = snapshot(engine)
        for p, shard, value in zip(parameters, shards, values.values(), strict=True):
            part = value.flatten()[p._sharded_param.groups.shard.rank * len(shard) :][: len(shard)]
            assert torch.equal(shard[: len(part)], part)


@pytest.mark.fast("2-4")
@on_ranks(4)
@pytest.mark.parametrize("stage", ["1", "2", "3 tight"])
def test_a_second_sum_in_an_order_of_the_rank_is_seen(stage: str) -> None:
    """Some ranks launch it at once, and the others where they wait for its result."""
    reduce = groups.TwoHops.reduce_scatter

    def at_once_on_some(*args: Any) -> Pending:
        pending: Any = reduce(*args)
        if dist.get_rank() % 2:
            pending._first.advance()
        return pending

    with pytest.MonkeyPatch.context() as patch, late() as launched:
        patch.setattr(groups.TwoHops, "reduce_scatter", at_once_on_some)
        train(replicated(stage), "unused", True)
    with pytest.raises(AssertionError, match="launch .* parts: rank 0 .* rank 1 "):
        check_order(launched)


@pytest.mark.fast("2-all_reduce-4")
@on_ranks(4)
@pytest.mark.parametrize("operation", ["reduce_scatter", "all_reduce", "all_gather"])
@pytest.mark.parametrize("stage", ["1", "2", "3 tight"])
def test_a_wait_of_replicas_that_is_left_out_is_seen(stage: str, operation: str) -> None:
    assert_seen(replicated(stage, "fp32"), lambda op, tag: op == operation and tag != "stats")


@pytest.mark.fast("2-1-gradients")
@pytest.mark.parametrize(
    ("stage", "tag"), [("1", "gradients"), ("2", "parameters"), ("2", "stats"), ("3 tight", "gradients")]
)
@on_ranks(2)
def test_a_wait_that_is_left_out_is_seen(stage: str, tag: str) -> None:
    assert_seen(at(stage, "fp32", 1, 0.0, ADAMW), lambda op, of: of == tag)


def assert_seen(given: dict[str, Any], leaves_out: Callable[[str, str], bool]) -> None:
    """Check that a run without the waits for some collectives has other values, or fails."""
    with transport("native"):
        expected = train(given, "plain", True)
    wait = Pending.wait

    def forgetful(self: Pending) -> Tensor:
        if self.entry is not None and leaves_out(*self.entry[:2]):
            self._works = []
        return wait(self)

    with pytest.MonkeyPatch.context() as patch, late():
        patch.setattr(Pending, "wait", forgetful)
        found: dict[str, Tensor] = {}
        with contextlib.suppress(RuntimeError, ValueError):  # NaN ends the run
            found = train(given, "plain", True)
    assert any(not torch.equal(found.get(name, torch.empty(0)), value) for name, value in expected.items())
