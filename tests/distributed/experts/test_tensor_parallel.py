"""Experts that ranks spread and layers that tensor-parallel ranks share are the whole model in one process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerolite
from tests.checkpoint.exported import read_model
from tests.distributed.experts.test_parity import EXACT, ROUNDED, assert_like_one_process
from tests.toolkit import experts
from tests.toolkit.compare import from_all_ranks
from tests.toolkit.configs import STATIC_SCALE
from tests.toolkit.ranks import on_ranks
from tests.toolkit.sequences import needs_transformers

TENSOR = {"size": 2, "plan": {"*.shared.up": "column", "*.shared.down": "row", "embed": "vocab"}}


@pytest.mark.fast("3 moving-4")
@on_ranks(2, 4, timeout=120)
@pytest.mark.parametrize("stage", ["0", "1", "2", "3 moving", "3 tight", "3 defaults"])
def test_stages_match_one_process(stage: str) -> None:
    """Ranks of a tensor group have different experts, and each sends a part of their tokens."""
    how: dict[str, Any] = {"double": True, "accumulation": 2, "clip": 0.3, "config": {"tensor_parallel": TENSOR}}
    assert_like_one_process("Mixture", 2, stage, EXACT, **how)


@pytest.mark.slow
@on_ranks(4, timeout=120)
@pytest.mark.parametrize("stage", ["0", "1", "2", "3 moving", "3 tight"])
def test_experts_over_tensor_groups_match_one_process(stage: str) -> None:
    """Two tensor groups, with other batches, have all experts together."""
    how: dict[str, Any] = {"double": True, "accumulation": 2, "clip": 0.3, "config": {"tensor_parallel": TENSOR}}
    assert_like_one_process("Mixture", 4, stage, EXACT, **how)


@pytest.mark.slow
@on_ranks(4, timeout=120)
@pytest.mark.parametrize(
    ("stage", "size", "more"),
    [
        ("2", 4, {"tensor_parallel": TENSOR}),
        ("3 moving", 2, {"tensor_parallel": TENSOR}),
        ("2 in sets", 2, {}),
        ("3 moving hierarchical", 2, {}),
    ],
)
def test_gathered_experts_compute_the_same(stage: str, size: int, more: dict[str, Any]) -> None:
    engine = experts.make("Mixture", size, stage, double=True, **more)
    for step in range(2):
        batch = experts.batch_of(10 * step + engine.data_parallel_rank, 5 + engine.data_parallel_rank)
        with torch.no_grad():
            spread = engine(**batch)
            with zerolite.gathered_for_generation(engine) as model:
                assert model.get_parameter("blocks.0.experts.up_weight").shape[0] == experts.EXPERTS
                torch.testing.assert_close(model(**batch), spread, rtol=0, atol=EXACT)
        engine.backward(engine(**batch))
        engine.step()


@needs_transformers
@pytest.mark.slow
@on_ranks(2, 4, timeout=120)
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3", "qwen3_moe", "llama4_text"])
def test_families_of_hugging_face_match_one_process(name: str) -> None:
    for stage in ("2", "3 moving"):
        assert_like_one_process(name, 2, stage, ROUNDED, config={"tensor_parallel": {"size": 2}})


@pytest.mark.fast("3 moving-2")
@on_ranks(2, 4, timeout=60)
@pytest.mark.parametrize("stage", ["0", "2", "3 moving"])
def test_all_tokens_for_one_expert(stage: str) -> None:
    """The experts of the other ranks get no token in any step."""
    how: dict[str, Any] = {"double": True, "clip": 0.3, "favourite": 0, "config": {"tensor_parallel": TENSOR}}
    assert_like_one_process("Mixture", 2, stage, EXACT, **how)


@pytest.mark.slow
@on_ranks(8, timeout=240)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "stage, sets",
    [("1", "shard_size"), ("2", "shard_size"), ("3 moving", "shard_size"), ("3 moving", "zero_hpz_partition_size")],
)
def test_replicas_match_one_process(stage: str, sets: str, size: int) -> None:
    config = {"tensor_parallel": TENSOR, "zero": {sets: 2}, "consistency_check_interval": 1}
    how: dict[str, Any] = {"double": True, "accumulation": 2, "clip": 0.3, "config": config}
    assert_like_one_process("Mixture", size, stage, EXACT, **how)


def made(size: int, tensor: int, stage: str) -> Any:
    block = {"tensor_parallel": TENSOR | {"size": tensor}} if tensor > 1 else {}
    return experts.make("Mixture", size, stage, double=True, **block)


def step(engine: Any, place: int) -> None:
    """Train on the mean of two batches, which data-parallel ranks have once or twice."""
    batch = experts.batch_of(2 * place + engine.data_parallel_rank % 2, 5 + 4 * (engine.data_parallel_rank % 2))
    engine.backward(experts.loss_of(engine(**batch)))
    engine.step()


def windows(steps: int) -> list[list[dict[str, torch.Tensor]]]:
    return [[experts.batch_of(2 * place + rank, 5 + 4 * rank) for rank in range(2)] for place in range(steps)]


@pytest.mark.fast("2-2-2-4")
@on_ranks(4, timeout=120)
@pytest.mark.parametrize(
    "size, tensor, stage", [(2, 2, "0"), (2, 2, "2"), (4, 2, "1"), (4, 2, "3 moving"), (2, 1, "2"), (1, 2, "2")]
)
def test_a_checkpoint_goes_on_in_any_other_grid(size: int, tensor: int, stage: str) -> None:
    path = Path(from_all_ranks(tempfile.mkdtemp() if dist.get_rank() == 0 else "")[0])
    saved = made(size, tensor, stage)
    step(saved, 0)
    saved.save_checkpoint(path)
    wanted, norms = experts.in_one_process("Mixture", windows(2), True, 0.0)
    for other, ranks, other_stage in [(1, 1, "0"), (2, 1, "3 moving"), (4, 2, "2"), (2, 2, "3 moving"), (1, 2, "1")]:
        engine = made(other, ranks, other_stage)
        engine.load_checkpoint(path)
        step(engine, 1)
        found, expected = experts.parameters_of(engine), experts.own_part(engine, wanted)
        torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)
        assert engine.get_global_grad_norm() == pytest.approx(norms[1], rel=EXACT)


@pytest.mark.fast("4-2-4")
@on_ranks(4, timeout=120)
@pytest.mark.parametrize("size, stage", [(2, "0"), (4, "2"), (2, "3 moving"), (4, "3 moving")])
def test_full_values_are_those_of_the_whole_model(size: int, stage: str) -> None:
    engine, plain = made(size, 2, stage), made(1, 1, "0")
    for one in (engine, plain):
        step(one, 0)
    wanted, found = plain.full_state_dict(), engine.full_state_dict()
    assert list(found) == list(wanted)
    torch.testing.assert_close(found, wanted, rtol=0, atol=EXACT)
    streamed = {name: tensor.clone() for bucket in zerolite.stream_full_weights(engine) for name, tensor in bucket}
    torch.testing.assert_close(streamed, found, rtol=0, atol=0)
    on_rank0 = engine.full_state_dict(rank0_only=True)
    torch.testing.assert_close(on_rank0, found if dist.get_rank() == 0 else {}, rtol=0, atol=0)
    for name in ("exp_avg", "exp_avg_sq", "step"):
        ours, others = (zerolite.get_full_optimizer_state(one.module.parameters(), name) for one in (engine, plain))
        torch.testing.assert_close(ours, others, rtol=0, atol=EXACT)
    for one in (engine, plain):
        one.backward(experts.loss_of(one(**experts.batch_of(100 + one.data_parallel_rank % 2, 5))))
    mine, others = (dict(one.module.named_parameters()) for one in (engine, plain))
    names = ["blocks.0.experts.up_weight", "blocks.1.experts.down_weight", "blocks.0.shared.up.weight"]
    names += ["blocks.0.router.weight", "head.weight", "embed.weight"]
    for get in (zerolite.get_full_grad, zerolite.get_full_master):
        for name in names:
            torch.testing.assert_close(get(mine[name]), get(others[name]), rtol=0, atol=EXACT)
    value = torch.randn(wanted[names[0]].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for put in (zerolite.set_full_grad, zerolite.set_full_master):
        put(mine[names[0]], value)
        put(others[names[0]], value)
    for one in (engine, plain):
        one.step()
    assert engine.get_global_grad_norm() == pytest.approx(plain.get_global_grad_norm(), rel=EXACT)
    state = plain.full_state_dict()
    torch.testing.assert_close(engine.full_state_dict(), state, rtol=0, atol=EXACT)
    loaded = made(size, 2, stage)
    loaded.load_full_state_dict(state if dist.get_rank() == 0 else None)
    torch.testing.assert_close(loaded.full_state_dict(), state, rtol=0, atol=0)


SIXTEEN: dict[str, tuple[float, dict[str, Any]]] = {
    "bf16": (0.02, {"bf16": {"enabled": True, "check_grad_overflow": True}}),
    "fp16": (0.003, {"fp16": {"enabled": True, "loss_scale": STATIC_SCALE}}),
    "autocast": (0.02, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    "autocast fp16": (0.003, {"torch_autocast": {"enabled": True, "dtype": "float16"}}),
}


def masters(engine: Any) -> dict[str, torch.Tensor]:
    return {name: zerolite.get_full_master(p) for name, p in engine.module.named_parameters()}


@pytest.mark.slow
@on_ranks(4, timeout=60)
@pytest.mark.parametrize("stage", ["0", "2", "3 moving"])
@pytest.mark.parametrize("precision", list(SIXTEEN))
def test_16_bits_train_and_skip_together(precision: str, stage: str) -> None:
    """A gradient that is not finite in the tokens of one tensor group skips the step on all ranks; the next one is that
    of one process in fp32, but for rounding."""
    error, how = SIXTEEN[precision]
    engine = experts.make("Mixture", 2, stage, optimizer=("SGD", {"lr": 0.5}), tensor_parallel=TENSOR, **how)
    before = masters(engine)
    batches, rank = [experts.batch_of(r, 5 + r) for r in range(2)], engine.data_parallel_rank

    def trains(factor: float) -> bool:
        skipped = engine.skipped_steps
        engine.backward(engine(**batches[rank]) * factor)
        engine.step()
        return bool(engine.skipped_steps == skipped)

    if precision != "autocast":  # without a check of its gradients
        assert not trains(float("nan") if rank else 1.0)
        torch.testing.assert_close(masters(engine), before, rtol=0, atol=0)
    assert any(trains(1.0) for _ in range(10))  # a dynamic loss scale is too large at first
    plain = experts.build("Mixture", False)
    sum(plain(**batch) / 2 for batch in batches).backward()
    wanted = {name: -0.5 * p.grad for name, p in plain.named_parameters()}  # type: ignore[operator]
    found = {
        n: float((value - before[n] - wanted[n]).norm() / wanted[n].norm()) for n, value in masters(engine).items()
    }
    assert max(found.values()) < error, found


@pytest.mark.slow
@on_ranks(4, timeout=60)
def test_export_has_all_experts() -> None:
    engine = experts.make("Mixture", 4, "3 moving", bf16={"enabled": True}, tensor_parallel=TENSOR)
    path = Path(from_all_ranks(tempfile.mkdtemp() if dist.get_rank() == 0 else "")[0])
    state = engine.full_state_dict()
    engine.save_16bit_model(path)
    if dist.get_rank() == 0:
        exported, _ = read_model(path)
        torch.testing.assert_close(exported, {name: value.bfloat16() for name, value in state.items()})


@needs_transformers
@pytest.mark.fast("3 moving-2-2")
@on_ranks(2, 4, timeout=120)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stage", ["1", "2", "3 moving"])
def test_parts_of_sequences_between_the_layers(stage: str, size: int) -> None:
    """With sequence parallelism of the tensor group each rank sends its part of the sequence."""
    if size > dist.get_world_size():
        return
    tensor = {"size": 2, "sequence_parallel": True}
    engine = experts.make("mixtral", size, stage, tensor_parallel=tensor, accumulation=2, clip=0.3)
    with pytest.raises(ValueError, match="expected output_router_logits = False"):
        engine(**experts.batch_of(0, 8), output_router_logits=True)
    assert_trains_like_one_process("mixtral", engine, 0.3)


def assert_trains_like_one_process(name: str, engine: Any, clip: float, micro_batches: int = 2) -> None:
    """Train on sequences of even lengths, as sequence parallelism needs them."""
    ranks, rank = engine.data_parallel_world_size, engine.data_parallel_rank
    window = [experts.batch_of(place, 8 + 4 * (place % ranks)) for place in range(micro_batches * ranks)]
    for batch in window[rank::ranks]:
        engine.backward(experts.loss_of(engine(**batch)))
        engine.step()
    wanted, norms = experts.in_one_process(name, [window], False, clip)
    found = experts.parameters_of(engine)
    torch.testing.assert_close(found, experts.own_part(engine, wanted), rtol=0, atol=2 * ROUNDED)
    assert engine.get_global_grad_norm() == pytest.approx(norms[0], rel=1e-5)


@needs_transformers
@pytest.mark.slow
@on_ranks(4, timeout=60)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stage", ["2", "3 moving"])
def test_divided_sequences(stage: str, size: int) -> None:
    """Two ranks divide a sequence, and two have the layers of each part."""
    blocks = {"tensor_parallel": {"size": 2}, "sequence_parallel": {"size": 2}}
    engine = experts.make("mixtral", size, stage, **blocks)
    batch = experts.batch_of(0, 16)
    engine.backward(experts.loss_of(engine(**batch)))
    engine.step()
    wanted, norms = experts.in_one_process("mixtral", [[batch]], False, 0.0)
    found = experts.parameters_of(engine)
    torch.testing.assert_close(found, experts.own_part(engine, wanted), rtol=0, atol=5 * ROUNDED)
    assert engine.get_global_grad_norm() == pytest.approx(norms[0], rel=1e-5)


@needs_transformers
@pytest.mark.slow
@on_ranks(2, timeout=60)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("stage", ["2", "3 moving"])
def test_activation_checkpoints_and_auxiliary_losses(stage: str, reentrant: bool) -> None:
    # A reentrant checkpoint leaves routers' logits without a graph.
    how = {} if reentrant else {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    engine = experts.make("mixtral", 2, stage, tensor_parallel={"size": 2}, options=how)
    engine.module.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        engine.module.enable_input_require_grads()
    batch = experts.batch_of(0, 7) | {"use_cache": False}
    loss = experts.loss_of(engine(**batch))
    engine.backward(loss)
    engine.step()
    wanted, norms = experts.in_one_process("mixtral", [[batch]], False, 0.0, **how)
    found = experts.parameters_of(engine)
    torch.testing.assert_close(found, experts.own_part(engine, wanted), rtol=0, atol=ROUNDED)
    assert engine.get_global_grad_norm() == pytest.approx(norms[0], rel=1e-5)
    plain = experts.build("mixtral", False, **how)
    assert float(loss) == pytest.approx(float(experts.loss_of(plain(**batch))), rel=ROUNDED)


@pytest.mark.slow
@on_ranks(2, 4, timeout=60)
@pytest.mark.parametrize("setting", ["capacity", "offload", "weights", "few tokens"])
def test_settings_match_one_process(setting: str) -> None:
    config: dict[str, Any] = {"tensor_parallel": TENSOR}
    if setting == "weights":  # a rank whose loss has the weight 0 computes for the tokens of others all the same
        engine = experts.make("Mixture", dist.get_world_size(), "2", double=True, **config)
        ranks = engine.data_parallel_world_size
        batches, weights = [experts.batch_of(rank, 3 + rank) for rank in range(ranks)], [2.0, 0.0][:ranks]
        engine.backward(engine(**batches[engine.data_parallel_rank]), weight=weights[engine.data_parallel_rank])
        engine.step()
        _, norms = experts.in_one_process("Mixture", [batches[:1]], True, 0.0)
        assert engine.get_global_grad_norm() == pytest.approx(norms[0], rel=EXACT)
        return
    if setting == "few tokens":  # of three a rank has two or one, of one the second has none
        engine = experts.make("Mixture", 2, "2", double=True, **config)
        batch = {key: value[:1, :1] for key, value in experts.batch_of(0, 3).items()}
        engine.backward(engine(**batch))
        engine.step()
        wanted, norms = experts.in_one_process("Mixture", [[batch]], True, 0.0)
        found = experts.parameters_of(engine)
        torch.testing.assert_close(found, experts.own_part(engine, wanted), rtol=0, atol=EXACT)
        assert engine.get_global_grad_norm() == pytest.approx(norms[0], rel=EXACT)
        return
    if setting == "offload":
        config["zero"] = {"offload_optimizer": {"device": "cpu"}}
    else:
        config["expert_parallel"] = {"size": 2, "capacity": 40}
    assert_like_one_process("Mixture", 2, "2", EXACT, double=True, clip=0.3, config=config)
