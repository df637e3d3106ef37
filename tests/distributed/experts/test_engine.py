"""Engines with experts of several ranks checkpoint, clip, skip and freeze as plain PyTorch does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.distributed.experts.test_parity import EXACT, ROUNDED, assert_like_one_process
from tests.toolkit import experts
from tests.toolkit.configs import STATIC_SCALE, at
from tests.toolkit.memory import two_memories
from tests.toolkit.ranks import on_ranks
from tests.toolkit.sequences import needs_transformers
from zerolite.config import ConfigError
from zerolite.moe import ExpertParallel
from zerolite.moe.experts import find_experts
from zerolite.zero.stage3.param_group import AllGather, CommContext
from zerolite.zero.stage3.shard_reader import ShardReader, StagedShards


@pytest.mark.fast("2-2")
@on_ranks(2, 4, timeout=60)
@pytest.mark.parametrize("stage", ["0", "2", "3 moving"])
def test_all_tokens_for_one_expert(stage: str) -> None:
    """The other ranks' experts get no token in any step."""
    assert_like_one_process("Mixture", 2, stage, EXACT, double=True, favourite=0, clip=0.3)


@pytest.mark.fast("3 moving-4")
@on_ranks(2, 4, timeout=60)
@pytest.mark.parametrize("stage", ["1", "2", "3 moving"])
def test_gradients_are_summed_over_ranks(stage: str) -> None:
    """An expert's gradients are summed over all ranks that have sent it tokens."""
    op = {"gradient_allreduce_op": "sum"}
    assert_like_one_process(
        "Mixture", 2, stage, EXACT, double=True, accumulation=2, clip=0.9, config=op, factor=dist.get_world_size()
    )


@needs_transformers
@pytest.mark.fast("3 moving-True-2")
@on_ranks(2, timeout=60)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("stage", ["2", "3 moving"])
def test_activation_checkpoints(stage: str, reentrant: bool) -> None:
    engine = experts.make("qwen3_moe", 2, stage)
    engine.module.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        engine.module.enable_input_require_grads()
    windows = [[experts.batch_of(2 * s + r, 4 + 3 * r) for r in range(2)] for s in range(2)]
    for window in windows:
        engine.backward(experts.loss_of(engine(**window[dist.get_rank()], use_cache=False)))
        engine.step()
    wanted, _ = experts.in_one_process("qwen3_moe", windows, False, 0.0)
    found = experts.parameters_of(engine)
    torch.testing.assert_close(found, experts.own_part(engine, wanted), rtol=0, atol=ROUNDED)


@pytest.mark.fast("3 moving-2")
@on_ranks(2, timeout=60)
@pytest.mark.parametrize("stage", ["1", "3 moving"])
def test_checkpointed_modules_of_the_config(stage: str) -> None:
    how = {"activation_checkpointing": {"modules": ["blocks.*"]}}
    assert_like_one_process("Mixture", 2, stage, EXACT, double=True, config=how)


@pytest.mark.fast("2-2")
@on_ranks(2, timeout=60)
@pytest.mark.parametrize("stage", ["1", "2", "3 moving"])
def test_states_on_the_host(stage: str) -> None:
    offload = {"offload_optimizer": {"device": "cpu"}}
    assert_like_one_process("Mixture", 2, stage, EXACT, double=True, clip=0.3, config={"zero": offload})


@pytest.mark.fast("nvme-2")
@on_ranks(2, 4, timeout=60)
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_offloaded_parameters(device: str, tmp_path: Path) -> None:
    """Gathers of experts stage their shards in, from the host or from the file, as where the device is a GPU."""
    block = {"device": device} | ({"nvme_path": str(tmp_path), "max_in_cpu": 0} if device == "nvme" else {})
    zero = {"offload_param": block, "offload_optimizer": {k: v for k, v in block.items() if k != "max_in_cpu"}}
    how: dict[str, Any] = {"double": True, "accumulation": 2, "clip": 0.3, "config": {"zero": zero}}
    staged, copied, gathered = set(), set(), set()
    stage_in, all_gather = ShardReader.stage_in, AllGather.__init__

    def see_staged(self: ShardReader, sharded_params: Any, fulls: Any = None) -> StagedShards:
        shards = stage_in(self, sharded_params, fulls)
        for sharded_param, shard in zip(sharded_params, shards.shards, strict=True):
            staged.add((sharded_param.groups.spread, sharded_param.placement.location))
            copied.add(shard.untyped_storage() is not sharded_param.shard.untyped_storage())
        return shards

    def see_gathered(self: AllGather, context: CommContext, _: Any, to_gather: Any, fulls: Any) -> None:
        gathered.update((sharded_param.groups.spread, context.reader is not None) for sharded_param in to_gather)
        all_gather(self, context, _, to_gather, fulls)

    with (
        two_memories(),
        mock.patch.object(ShardReader, "stage_in", see_staged),
        mock.patch.object(AllGather, "__init__", see_gathered),
    ):
        assert_like_one_process("Mixture", 2, "3 moving", EXACT, **how)
    assert staged == {(spread, "host" if device == "cpu" else "disk") for spread in (1, 2)}
    assert copied == {True}
    assert gathered == {(1, True), (2, True)}


@pytest.mark.fast("2-4")
@on_ranks(4, timeout=60)
@pytest.mark.parametrize("stage", ["0", "2", "3 moving", "2 in sets"])
def test_weights_of_losses(stage: str) -> None:
    """A rank whose loss has the weight 0 computes for the others' tokens all the same."""
    engine = experts.make("Mixture", 2, stage, double=True)
    batches, weights = [experts.batch_of(r, 3 + r) for r in range(4)], [0.0, 2.0, 1.0, 0.5]
    rank = dist.get_rank()
    engine.backward(engine(**batches[rank]), weight=weights[rank])
    engine.step()
    plain = experts.build("Mixture", True)
    sum(plain(**b) * (w / sum(weights)) for b, w in zip(batches, weights, strict=True)).backward()
    assert engine.get_global_grad_norm() == pytest.approx(
        float(nn.utils.get_total_norm([p.grad for p in plain.parameters()])), rel=EXACT
    )


@pytest.mark.fast("2-2")
@on_ranks(2, timeout=60)
@pytest.mark.parametrize("stage", ["0", "1", "2", "3 moving"])
def test_a_plain_loop_clips_by_the_norm_of_all_experts(stage: str) -> None:
    config = {"stage": stage, "double": True}
    engine, other = experts.make("Mixture", 2, clip=0.1, **config), experts.make("Mixture", 2, **config)
    batch = experts.batch_of(dist.get_rank(), 6)
    engine.backward(engine(**batch))
    engine.step()
    other(**batch).backward()
    norm = nn.utils.clip_grad_norm_(other.module.parameters(), 0.1)
    other.optimizer.step()
    assert float(norm) == pytest.approx(engine.get_global_grad_norm(), rel=EXACT)
    torch.testing.assert_close(experts.parameters_of(other), experts.parameters_of(engine), rtol=0, atol=EXACT)
    other(**batch).backward()
    of_experts = [p.grad for block in other.module.blocks for p in block.experts.parameters()]
    largest = nn.utils.get_total_norm(of_experts, float("inf"))
    found = [torch.zeros(1, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(found, largest.detach().double().reshape(1))
    assert float(found[0]) == float(found[1]) > 0


@pytest.mark.fast("bf16-2-2")
@on_ranks(2, timeout=60)
@pytest.mark.parametrize("stage", ["0", "2", "3 moving"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_skip_together(precision: str, stage: str) -> None:
    """A gradient that is not finite in one rank's tokens skips the step on all ranks, and the next step trains."""
    sixteen: dict[str, Any] = {"bf16": {"enabled": True, "check_grad_overflow": True}}
    if precision == "fp16":
        sixteen = {"fp16": {"enabled": True, "loss_scale": STATIC_SCALE}}
    engine = experts.make("Mixture", 2, stage, optimizer=("SGD", {"lr": 0.5}), **sixteen)
    before = experts.parameters_of(engine)
    loss = engine(**experts.batch_of(dist.get_rank(), 6))
    engine.backward(loss * (float("nan") if dist.get_rank() else 1.0))
    engine.step()
    torch.testing.assert_close(experts.parameters_of(engine), before, rtol=0, atol=0)
    engine.backward(engine(**experts.batch_of(dist.get_rank(), 6)))
    engine.step()
    assert engine.skipped_steps == 1
    changed = [n for n, p in experts.parameters_of(engine).items() if not torch.equal(p, before[n])]
    assert {"blocks.0.experts.up_weight", "head.weight"} <= set(changed)


@pytest.mark.fast("3 moving-2")
@on_ranks(2, timeout=60)
@pytest.mark.parametrize("stage", ["0", "2", "3 moving"])
def test_frozen_experts_are_trained_later(stage: str) -> None:
    """Weights that all ranks hold are compared in each step, and experts are not."""
    model = experts.build("Mixture", True)
    for block in model.blocks:  # type: ignore[union-attr]
        block.experts.requires_grad_(False)
    plain = copy.deepcopy(model)
    optimizer = ("SGD", {"lr": 0.5})
    config = at(stage, optimizer=optimizer, expert_parallel={"size": 2}, consistency_check_interval=1)
    engine, sgd = zerolite.initialize(model, config), torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(3):
        if step == 1:
            for one in (model, plain):
                one.requires_grad_(True)
        batches = [experts.batch_of(2 * step + r, 3 + r) for r in range(2)]
        engine.backward(engine(**batches[dist.get_rank()]))
        engine.step()
        sgd.zero_grad()
        sum(plain(**batch) / 2 for batch in batches).backward()
        sgd.step()
    wanted = {name: p.detach() for name, p in plain.named_parameters()}
    torch.testing.assert_close(experts.parameters_of(engine), experts.own_part(engine, wanted), rtol=0, atol=EXACT)


@on_ranks(4, timeout=60)
@pytest.mark.parametrize("stage", ["0", "2"])
def test_experts_are_compared_between_ranks_that_have_the_same(stage: str) -> None:
    engine = experts.make("Mixture", 2, stage, consistency_check_interval=1)
    batch = experts.batch_of(dist.get_rank(), 4)
    if dist.get_rank() == 3:
        engine.module.blocks[1].experts.up_bias.data[0, 0] += 1
    message = r"different weights.*(?s:.)*'blocks.1.experts.up_bias' is .* on rank 1, but .* on rank 3"
    with pytest.raises(RuntimeError, match=message) as raised:
        for _ in range(2):
            engine.backward(engine(**batch))
            engine.step()
    assert "rank 0" not in str(raised.value) and "'head" not in str(raised.value)


@on_ranks(2, timeout=60)
def test_models_built_in_zero_init_and_ranks_with_other_values() -> None:
    torch.manual_seed(dist.get_rank())
    with zerolite.zero.Init():
        model = experts.Mixture()
    config = at("3", optimizer=("SGD", {"lr": 0.5}), expert_parallel={"size": 2})
    engine = zerolite.initialize(model, config)
    torch.manual_seed(0)
    torch.testing.assert_close(engine.full_state_dict(), dict(experts.Mixture().state_dict()), rtol=0, atol=0)
    torch.manual_seed(dist.get_rank())
    engine = zerolite.initialize(experts.Mixture(), config | {"zero_optimization": {"stage": 1}})
    torch.manual_seed(0)
    torch.testing.assert_close(engine.full_state_dict(), dict(experts.Mixture().state_dict()), rtol=0, atol=0)


@needs_transformers
@pytest.mark.slow
@on_ranks(4, timeout=60)
@pytest.mark.parametrize("stage", ["2", "3 moving"])
def test_parts_of_sequences_have_tokens_for_experts(stage: str) -> None:
    """Sequences are divided over two ranks, and experts over two or four."""
    for size in (2, 4):
        engine = experts.make("mixtral", size, stage, sequence_parallel={"size": 2})
        batches = [experts.batch_of(r, 16) for r in range(2)]
        engine.backward(experts.loss_of(engine(**batches[engine.data_parallel_rank])))
        engine.step()
        wanted, norms = experts.in_one_process("mixtral", [batches], False, 0.0)
        found = experts.parameters_of(engine)
        torch.testing.assert_close(found, experts.own_part(engine, wanted), rtol=0, atol=5 * ROUNDED)
        assert engine.get_global_grad_norm() == pytest.approx(norms[0], rel=1e-5)


@needs_transformers
@on_ranks(2, timeout=60)
def test_auxiliary_losses_are_the_mean_of_the_ranks() -> None:
    how = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    assert_like_one_process("mixtral", 2, "2", ROUNDED, **how)


class Listed(nn.Module):
    def __init__(self, stacked: bool = False) -> None:
        super().__init__()
        self.gate, self.num_experts = nn.Linear(4, 4), 4
        self.experts: nn.Module = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        if stacked:
            self.experts = OtherExperts()

    def forward(self, x: Tensor) -> Tensor:
        return x


class OtherExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.weight = 4, nn.Parameter(torch.zeros(4, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight[0]


class BufferedExperts(ExpertParallel):
    def __init__(self) -> None:
        super().__init__(experts.Expert() for _ in range(4))
        self.register_buffer("scale", torch.ones(4, 1))


def tied() -> nn.Module:
    model = experts.Mixture()
    model.blocks[1].experts.up_weight = model.blocks[0].experts.up_weight
    return model


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: Listed(), {}, r"'experts' \(ModuleList\); use zerolite.moe.ExpertParallel"),
    (lambda: Listed(stacked=True), {}, r"'experts' \(OtherExperts\)"),
    (lambda: nn.Linear(2, 2), {}, "a model without modules of experts, got 2"),
    (lambda: nn.Sequential(BufferedExperts()), {}, r"no buffers .*'0' \(BufferedExperts\)"),
    (tied, {}, "share weights, which 'blocks.0.experts' and 'blocks.1.experts' do, got 2"),
    (experts.Mixture, {"expert_parallel": {"size": 3}}, "expected a divisor of the 2 data-parallel ranks, got 3"),
    (experts.Mixture, {"expert_parallel": {"size": 2, "autoep_size": 4}}, "leave one of the two out"),
    (experts.Mixture, {"expert_parallel": {"capacity": 8}}, "expected no capacity where the ranks do not share"),
    (
        experts.Mixture,
        {"tensor_parallel": {"size": 2}, "expert_parallel": {"size": 3}},
        "expected a multiple of tensor_parallel.size = 2 that divides the 2 ranks, .* got 3",
    ),
    (experts.Mixture, {"pipeline": {"stages": 2}}, "does not know experts on several ranks yet"),
    (experts.Mixture, {"zero": {"shard_size": 1}}, "shard_size: expected a multiple of expert_parallel.size = 2"),
]


@on_ranks(2, timeout=60)
@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_refusals_change_nothing(case: int) -> None:
    make, more, message = REFUSED[case]
    model = make()
    before = {name: p.shape for name, p in model.named_parameters()}
    config = at("2", **({"expert_parallel": {"size": 2}} | more))
    with pytest.raises(ConfigError, match=message):
        zerolite.initialize(model, config)
    assert {name: p.shape for name, p in model.named_parameters()} == before


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("jetmoe", r"'model.layers.0.mlp.input_linear' \(JetMoeParallelExperts\)"),
        ("longcat_flash", r"'model.layers.0.mlp.experts' \(LongcatFlashExperts\)"),
    ],
)
def test_families_with_other_calls_are_refused_by_name(family: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_experts(experts.family(family), 2)


def test_dictionaries_of_experts_are_refused_by_name() -> None:
    class Experts(nn.ModuleDict):
        def forward(self, x: Tensor) -> Tensor:
            return x

    model = nn.Sequential(Experts({"expert_0": nn.Linear(4, 4), "expert_1": nn.Linear(4, 4)}))
    with pytest.raises(ConfigError, match=r"'0' \(Experts\); use zerolite.moe.ExpertParallel"):
        find_experts(model, 2)


@on_ranks(2, timeout=60)
def test_keys_of_deepspeed() -> None:
    keys = {"enabled": True, "autoep_size": 2, "preset_model": "qwen3_moe", "load_balance_coeff": None}
    engine = zerolite.initialize(experts.Mixture(), at("2", expert_parallel=keys))
    assert engine.module.blocks[0].experts.up_weight.shape[0] == experts.EXPERTS // 2
    off = zerolite.initialize(experts.Mixture(), at("2", expert_parallel=keys | {"enabled": False}))
    assert off.module.blocks[0].experts.up_weight.shape[0] == experts.EXPERTS


@on_ranks(2, timeout=60)
def test_gradients_and_values_that_no_rank_has_in_full() -> None:
    for stage in ("0", "2"):
        engine = experts.make("Mixture", 2, stage)
        engine.backward(engine(**experts.batch_of(dist.get_rank(), 4)))
        parameter = engine.module.blocks[0].experts.up_weight
        parameter.grad = torch.ones_like(parameter)
        with pytest.raises(RuntimeError, match=r"up_weight.*zerolite.set_full_grad"):
            engine.step()
        engine.zero_grad()
    engine = experts.make("Mixture", 2, "3 moving")
    with pytest.raises(ValueError, match="modifier_rank=None for parameters of experts"):
        zerolite.zero.GatheredParameters(engine.module, modifier_rank=0)


@pytest.mark.fast("3 moving-2")
@on_ranks(2, timeout=60)
@pytest.mark.parametrize("stage", ["2", "3 moving"])
def test_a_copy_of_the_model_has_the_same_part(stage: str) -> None:
    engine = experts.make("Mixture", 2, stage, double=True)
    copied = copy.deepcopy(engine.module)
    batch = experts.batch_of(dist.get_rank(), 5)
    torch.testing.assert_close(copied(**batch), engine(**batch), rtol=0, atol=EXACT)
    with pytest.raises(RuntimeError, match=r"parts of parameters .*up_weight"):
        copied.state_dict()
    with torch.no_grad():
        copied.blocks[0].experts.up_weight.zero_()
    assert not torch.equal(copied(**batch), engine(**batch))


@on_ranks(2, timeout=60)
def test_what_cannot_be_done_with_a_part() -> None:
    engine = experts.make("Mixture", 2, "2")
    with pytest.raises(RuntimeError, match=r"engine.compile: expected expert_parallel.size 1"):
        engine.compile()
    model = engine.module
    engine.destroy()
    with pytest.raises(RuntimeError, match="expected a model with all experts"):
        zerolite.initialize(model, at("2"))
    with pytest.raises(ConfigError, match="with its class's forward, got another one"):
        zerolite.initialize(model, at("2", expert_parallel={"size": 2}))
    with pytest.raises(ValueError, match="expert_parallel gives each rank a part"):
        experts.make("Mixture", 2, "1", optimizer=("Adafactor", {}))


@pytest.mark.fast("3 moving-2")
@on_ranks(2, timeout=60)
@pytest.mark.parametrize("stage", ["0", "3 moving"])
def test_an_engine_that_only_evaluates(stage: str) -> None:
    config = at(stage, expert_parallel={"size": 2})
    del config["optimizer"]
    engine, batch = zerolite.initialize(experts.build("Mixture", True), config), experts.batch_of(dist.get_rank(), 5)
    with torch.no_grad():
        torch.testing.assert_close(engine(**batch), experts.build("Mixture", True)(**batch), rtol=0, atol=EXACT)
