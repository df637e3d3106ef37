"""Users freeze experts of several ranks, generate with them and register them."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerolite
from tests.distributed.experts.test_parity import ROUNDED
from tests.distributed.test_generation import greedy
from tests.toolkit import experts
from tests.toolkit.configs import at
from tests.toolkit.monitoring import Lines
from tests.toolkit.ranks import on_ranks
from tests.toolkit.sequences import needs_transformers
from zerolite.comm import record
from zerolite.config import ConfigError
from zerolite.engine.step_observers import ExpertLoads
from zerolite.moe import ExpertParallel, record_routing

EXPERTS: dict[str, Any] = {"expert_parallel": {"size": 2}}


@on_ranks(2, timeout=60)
def test_external_parameters_are_refused() -> None:
    first, second = experts.make("Mixture", 2, "3 moving").module.blocks
    with pytest.raises(ValueError, match=r"got 'blocks.1.experts.up_weight' of experts"):
        zerolite.zero.register_external_parameter(first, second.experts.up_weight)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@on_ranks(2, timeout=60)
@pytest.mark.parametrize(
    ("family", "stage"),
    [("qwen3_moe", "0"), ("qwen3_moe", "2"), ("qwen3_moe", "3 tight"), ("gpt_oss", "3 moving"), ("llama4_text", "2")],
)
def test_ranks_generate_different_lengths_with_all_experts(family: str, stage: str) -> None:
    engine, rank = experts.make(family, 2, stage, expert_parallel={"size": 2, "capacity": 9}), dist.get_rank()
    batch, plain = experts.batch_of(rank, 5), experts.build(family, False).eval()
    for step in range(2):
        engine.backward(engine(**batch).loss)
        engine.step()
        with torch.no_grad():
            before = engine(**batch).loss
        plain.load_state_dict(engine.full_state_dict())
        with record() as recorder, zerolite.gathered_for_generation(engine) as model:
            gathered = recorder.count("all_gather")
            engine.eval()
            assert torch.equal(greedy(model, 2 + 3 * rank), greedy(plain, 2 + 3 * rank)), step
            assert len(recorder.calls) == gathered
            if rank == 0:
                torch.testing.assert_close(copy.deepcopy(model).state_dict(), plain.state_dict(), rtol=0, atol=0)
            engine.train()
            loss: Any = model(**batch).loss
            of_experts = next(p for name, p in model.named_parameters() if name.endswith("down_proj"))
            with pytest.raises(RuntimeError, match="expected forwards without a backward where every rank has all"):
                torch.autograd.grad(loss, of_experts)
        with torch.no_grad():
            assert torch.equal(engine(**batch).loss, before)


def adapted() -> Any:
    """A Qwen3-MoE with LoRA on its attention."""
    peft = pytest.importorskip("peft")
    model: Any = experts.build("qwen3_moe", False)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@on_ranks(2, timeout=60)
@pytest.mark.parametrize("stage", ["2", "3 moving"])
def test_adapters_are_saved_and_loaded_beside_frozen_experts(tmp_path: Path, stage: str) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    engine = zerolite.initialize(adapted(), at(stage, **EXPERTS, optimizer=("AdamW", {"lr": 1e-2})))
    for step in range(2):
        engine.backward(engine(**experts.batch_of(2 * step + dist.get_rank(), 6)).loss)
        engine.step()
    full = engine.full_state_dict()
    if stage == "2" and dist.get_rank() == 0:  # at stage 3 a state dict gathers the adapters, on all ranks
        engine.module.save_pretrained(tmp_path)
        from safetensors.torch import load_file

        assert len(load_file(tmp_path / "adapter_model.safetensors")) == 8
    adapters = {name: value.clone() for name, value in get_peft_model_state_dict(engine.module).items()}
    assert len(adapters) == 8
    for name, value in adapters.items():
        assert torch.equal(value, full[name.replace(".weight", ".default.weight")]), name
    name = next(name for name in full if name.endswith("down_proj"))
    entry = engine.module.state_dict()[name]
    assert entry.shape == full[name].shape and entry.dtype == full[name].dtype and name in repr(entry)
    for use in (torch.clone, torch.Tensor.data_ptr, torch.Tensor.tolist, copy.deepcopy, pickle.dumps, torch.Tensor.t):
        with pytest.raises(RuntimeError, match=rf"a part of parameter '{name}'.*full_state_dict"):
            use(entry)
    with pytest.raises(RuntimeError, match=rf"load_state_dict: this rank has parts .*{name}"):
        engine.module.load_state_dict({name: full[name]}, strict=False)
    if stage == "2":
        set_peft_model_state_dict(engine.module, {name: 2 * value for name, value in adapters.items()})
        for name, value in get_peft_model_state_dict(engine.module).items():
            assert torch.equal(value, 2 * adapters[name]), name


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@on_ranks(2, timeout=60)
def test_adapters_of_experts_are_refused() -> None:
    """PEFT's ``target_parameters`` add adapters of all experts to the weights in each forward."""
    import peft

    def make(stage: str, size: int) -> Any:
        model: Any = experts.build("qwen3_moe", False)
        lora = peft.LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
        optimizer = ("AdamW", {"lr": 1e-2})
        return zerolite.initialize(
            peft.get_peft_model(model, lora), at(stage, optimizer=optimizer, expert_parallel={"size": size})
        )

    message = (
        r"all experts, which module '.*layers.0.mlp.experts.base_layer.base_layer' has for 'gate_up_proj' \(target_p"
    )
    for stage in ("2", "3 moving"):
        with pytest.raises(zerolite.ConfigError, match=message):
            make(stage, 2)
    batch = experts.batch_of(dist.get_rank(), 5)
    make("2", 1)(**batch)
    with pytest.raises(RuntimeError, match=r"down_proj' is partitioned .* PEFT's target_parameters do .* use stage 2"):
        make("3 moving", 1)(**batch)


@on_ranks(2, timeout=60)
def test_a_monitor_has_the_load_of_each_expert(tmp_path: Path) -> None:
    """Loads are relative to the mean of a layer, over both ranks and both micro-batches, and a clipped step has one."""
    how: dict[str, Any] = {"accumulation": 2, "clip": 0.1, "expert_parallel": {"size": 2, "log_load": True}}
    how["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path)}
    config = at("2", optimizer=("SGD", {"lr": 0.1}), **how)
    engine = zerolite.initialize(experts.build("Mixture", False, favourite=3), config)
    kept = Lines()
    if engine.monitor.enabled:
        engine.monitor._writers.append(kept)
    for step in range(4):
        engine.backward(engine(**experts.batch_of(step, 4)))
        engine.step()
    with torch.no_grad():
        engine.eval()(**experts.batch_of(9, 4))
    engine.monitor.close()
    if engine.data_parallel_rank == 0:
        loads = [{name: v for name, v in line.items() if name.startswith("Train/Experts/")} for line in kept.lines]
        wanted = {
            f"Train/Experts/blocks.{block}.experts/{expert}": experts.EXPERTS * float(expert == 3)
            for block in range(2)
            for expert in range(experts.EXPERTS)
        }
        assert [load for load in loads if load] == [wanted, wanted]


def test_a_step_has_the_loads_of_all_its_statistics() -> None:
    """A save within an accumulation and a clip collect statistics too."""
    written: list[dict[str, float]] = []
    log: Any = SimpleNamespace(write=lambda step, values, group: written.append(values))
    counter = torch.zeros(2, dtype=torch.int64)
    call: Any = SimpleNamespace(experts=2, count=lambda device: counter)
    loads = ExpertLoads({"layer": call}, torch.device("cpu"), log)
    for step, collected in enumerate(([[1, 3], [5, 3]], [[2, 0]])):
        for chosen in collected:
            counter.add_(torch.tensor(chosen))
            numbers = torch.zeros(2, dtype=torch.float64)
            loads.write_slice(numbers)
            loads.read_slice(True, numbers)
        loads.on_settled(step, 0.0)
    assert written == [{"layer/0": 1.0, "layer/1": 1.0}, {"layer/0": 2.0, "layer/1": 0.0}]


def biases_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("bias")}


@needs_transformers
@pytest.mark.fast("deepseek_v3-2-2")
@on_ranks(2, 4, timeout=120)
@pytest.mark.parametrize("stage", ["0", "2", "3 moving"])
@pytest.mark.parametrize("name", ["deepseek_v3", "minimax_m2", "lfm2_moe"])
def test_biases_balance_the_loads_of_the_joint_batch(name: str, stage: str) -> None:
    """As a loop of one process moves them by the choices of all micro-batches, also beside the loads in monitors, with
    clipping, and after gradients that are dropped."""
    block = {"size": 2, "load_balance_coeff": 0.02, "log_load": True}
    how = {"accumulation": 2, "clip": 0.3, "expert_parallel": block}
    engine, plain = experts.make(name, 2, stage, **how), experts.build(name, False)
    kind, settings = experts.optimizer_of(False)
    optimizer = getattr(torch.optim, kind)(plain.parameters(), **settings)
    ranks, rank = engine.data_parallel_world_size, engine.data_parallel_rank
    engine.backward(experts.loss_of(engine(**experts.batch_of(99, 7))))
    engine.zero_grad()
    for step in range(3):
        loads = {}
        for micro in range(2):
            batches = [experts.batch_of((2 * step + micro) * ranks + r, 4 + r) for r in range(ranks)]
            engine.backward(experts.loss_of(engine(**batches[rank])))
            engine.step()
            for batch in batches:
                with record_routing(plain) as choices:
                    loss = experts.loss_of(plain(**batch)) / (2 * ranks)
                loss.backward()
                for layer, index in choices.items():
                    loads[layer] = loads.get(layer, 0) + index.flatten().bincount(minlength=4)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        for bias, load in zip(biases_of(plain).values(), loads.values(), strict=True):
            bias += 0.02 * (load.double().mean() - load).sign()
    found, wanted = biases_of(engine.module), biases_of(plain)
    assert len(wanted) == len(loads) and all(bias.any() for bias in wanted.values())
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-7)
    values = {key: p.detach() for key, p in plain.named_parameters()}
    torch.testing.assert_close(
        experts.parameters_of(engine), experts.own_part(engine, values), rtol=0, atol=2 * ROUNDED
    )


@needs_transformers
@on_ranks(2, timeout=60)
def test_biases_of_16_bits_become_fp32() -> None:
    model = experts.build("deepseek_v3", False).bfloat16()
    config = at("2", bf16={"enabled": True}, expert_parallel={"size": 2, "load_balance_coeff": 1e-3})
    engine = zerolite.initialize(model, config)
    for place in range(5):
        engine.backward(experts.loss_of(engine(**experts.batch_of(place, 4))))
        engine.step()
    (bias,) = biases_of(model).values()
    assert bias.dtype == torch.float32 and bias.any()
    torch.testing.assert_close(bias / 1e-3, (bias / 1e-3).round(), rtol=0, atol=1e-3)


@on_ranks(2, timeout=60)
def test_routers_without_a_bias_are_refused() -> None:
    model = experts.Mixture()
    before = {name: p.shape for name, p in model.named_parameters()}
    with pytest.raises(ConfigError, match=r"load_balance_coeff: expected 0 .*, got one around 'blocks.0.experts'"):
        zerolite.initialize(model, at("2", expert_parallel={"size": 2, "load_balance_coeff": 0.1}))
    assert {name: p.shape for name, p in model.named_parameters()} == before


@needs_transformers
@pytest.mark.fast("2-2")
@on_ranks(2, 4, timeout=60)
@pytest.mark.parametrize("size", [1, 2])
def test_auxiliary_losses_of_the_joint_batch(size: int) -> None:
    """Ranks have different numbers of tokens, and some that do not count."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    engine = experts.make("mixtral", size, "2", options={"router_aux_loss_coef": 0.0})
    ranks = engine.data_parallel_world_size
    batches = [experts.batch_of(rank, 4 + 3 * rank) for rank in range(ranks)]
    masks = [torch.ones_like(batch["input_ids"]) for batch in batches]
    masks[0][1, 2:] = 0
    for batch, mask in zip(batches, masks, strict=True):
        batch["attention_mask"], batch["labels"] = mask, batch["labels"].masked_fill(mask == 0, -100)
    own = batches[engine.data_parallel_rank]
    outputs = engine(**own, output_router_logits=True)
    shares = [
        zerolite.moe.load_balancing_loss(engine, outputs.router_logits, 2, own["attention_mask"]),
        zerolite.moe.router_z_loss(engine, outputs.router_logits, own["attention_mask"]),
    ]
    engine.backward(outputs.loss + 0.5 * shares[0] + 0.1 * shares[1])
    engine.step()
    plain = experts.build("mixtral", False, router_aux_loss_coef=0.0)
    every = [plain(**batch, output_router_logits=True) for batch in batches]
    counting = [mask.reshape(-1).bool() for mask in masks]
    layers = tuple(
        torch.cat([outputs.router_logits[layer][counts] for outputs, counts in zip(every, counting, strict=True)])
        for layer in range(2)
    )
    joint = load_balancing_loss_func(layers, 4, 2), torch.cat(layers).logsumexp(-1).square().mean()
    mean = sum(outputs.loss for outputs in every) / ranks
    (mean + 0.5 * joint[0] + 0.1 * joint[1]).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    wanted = experts.own_part(engine, {name: p.detach() for name, p in plain.named_parameters()})
    torch.testing.assert_close(experts.parameters_of(engine), wanted, rtol=0, atol=ROUNDED)
    sums = torch.stack([share.detach() for share in shares])
    dist.all_reduce(sums)
    torch.testing.assert_close(sums / ranks, torch.stack(joint).detach(), rtol=1e-5, atol=0)
    if size > 1:
        with pytest.raises(ValueError, match="attention_mask: expected one number for each of the"):
            zerolite.moe.router_z_loss(engine, outputs.router_logits, own["attention_mask"][:, 1:])


def test_frozen_members_stay_frozen() -> None:
    members = [experts.Expert().requires_grad_(False) for _ in range(2)]
    assert not any(parameter.requires_grad for parameter in ExpertParallel(members).parameters())
    with pytest.raises(ValueError, match="frozen in all of them or in none"):
        ExpertParallel([*members, experts.Expert()])
