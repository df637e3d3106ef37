"""`zerolite.compat.deepspeed`: loops written for DeepSpeed give plain PyTorch's numbers."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerolite.compat.deepspeed as deepspeed
from tests.checkpoint.deepspeed_fakes import Fake
from tests.toolkit import experts, grids, models, pipes
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.ranks import on_ranks
from zerolite.compat.deepspeed.utils import groups
from zerolite.compat.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

STEPS, MICRO_BATCHES = 3, 2
CPU = {"device": "cpu"}


class Net(nn.Module):
    """Odd sizes, a parameter without dimensions, a frozen one and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(7, 13)
        self.second = nn.Linear(13, 13)
        self.third = nn.Linear(13, 13)
        self.third.weight = self.second.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.note = "of the module"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.third(self.second(self.first(x).tanh()).tanh()) * self.scale).pow(2).mean()


def config_of(stage: int) -> dict[str, Any]:
    return {
        "train_batch_size": 4 * MICRO_BATCHES * dist.get_world_size(),
        "gradient_accumulation_steps": MICRO_BATCHES,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": "auto"},
        "fp16": {"enabled": "auto"},
        "steps_per_print": float("inf"),
        "zero_optimization.reduce_bucket_size": 64.0,
    }


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def train(engine: Any, kind: str, steps: range) -> None:
    for step in steps:
        for micro in range(MICRO_BATCHES):
            loss = engine(batch(MICRO_BATCHES * step + micro, dist.get_rank()))
            if kind == "by hand":  # as accelerate does
                engine.set_gradient_accumulation_boundary(is_boundary=micro + 1 == MICRO_BATCHES)
            if kind == "plain":  # divided by gradient_accumulation_steps too
                loss.backward()
            else:
                engine.backward(loss)
            if kind != "by hand" or micro + 1 == MICRO_BATCHES:
                engine.step()


def expected(steps: int) -> tuple[dict[str, torch.Tensor], float]:
    """Plain PyTorch on the batches of all ranks: weights, and the norm of the last gradient before clipping."""
    model, norm = Net(), 0.0
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0, foreach=True)
    schedule = deepspeed.runtime.lr_schedules.WarmupLR(optimizer, warmup_max_lr=1e-2, warmup_num_steps=4)
    ranks = range(dist.get_world_size())
    for step in range(steps):
        batches = [batch(MICRO_BATCHES * step + micro, rank) for micro in range(MICRO_BATCHES) for rank in ranks]
        torch.stack([model(x) for x in batches]).mean().backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.state_dict(), norm


def make(stage: int, zero: dict[str, Any] | None = None) -> Any:
    """zero: further keys of zero_optimization."""
    model = Net()
    parameters = (p for p in model.parameters() if p.requires_grad)
    config = config_of(stage)
    config["zero_optimization"] |= zero or {}
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]


@pytest.mark.fast("2-1-engine-None", "2-2-plain-None", "2-3-by hand-None", "2-3-engine-zero6")
@pytest.mark.parametrize(
    ("stage", "kind", "zero"),
    [
        (1, "engine", None),
        (2, "plain", None),
        (3, "by hand", None),
        (0, "compiled", None),
        (3, "compiled", None),
        (2, "engine", {"cpu_offload": True}),
        (3, "engine", {"offload_optimizer": {**CPU, "pin_memory": True}, "offload_param": CPU}),
    ],
)
@on_ranks(2)
def test_a_loop_trains_as_plain_pytorch(stage: int, kind: str, zero: dict[str, Any] | None) -> None:
    engine = make(stage, zero)
    if kind == "compiled":
        engine.compile(backend="eager")
    train(engine, kind, range(STEPS))
    state, norm = expected(STEPS)
    found = engine._zero3_consolidated_16bit_state_dict()
    assert (found is None) == (dist.get_rank() > 0)
    if found is not None:
        torch.testing.assert_close({name: found[name] for name in state}, state, rtol=0, atol=2e-6)
    assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
    assert (engine.global_steps, engine.get_batch_info()) == (3, (16, 4, 2))
    assert engine.config.get("zero_optimization", {}).get("stage") == stage
    assert all(name.startswith("module.") for name, _ in engine.named_parameters())
    assert engine.was_step_applied() and engine.note == "of the module"
    assert engine.get_lr() == engine.lr_scheduler.get_last_lr() == [g["lr"] for g in engine.optimizer.param_groups]
    engine.destroy()
    engine.destroy()


@pytest.mark.fast("2-2")
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_a_step_after_coalesced_backwards_has_their_sum(stage: int) -> None:
    """Each block of ``coalesce_grad_reduction`` is one step, whose losses the loop divides."""
    config = {**config_of(stage), "train_batch_size": "auto", "gradient_accumulation_steps": 1}
    model = Net()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    for step in range(STEPS):
        with engine.coalesce_grad_reduction():
            for micro in range(MICRO_BATCHES):
                loss = engine(batch(MICRO_BATCHES * step + micro, dist.get_rank()))
                engine.backward(loss / MICRO_BATCHES)
        engine.step()
    state, norm = expected(STEPS)
    found = engine._zero3_consolidated_16bit_state_dict()
    if found is not None:
        torch.testing.assert_close({name: found[name] for name in state}, state, rtol=0, atol=2e-6)
    assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
    assert engine.global_steps == STEPS


# -------------------------------------------------------------------- checkpoints


@on_ranks(2)
def test_a_loader_pads_what_no_token_sees() -> None:
    """Sequences of seven tokens for two ranks, without a mask, are for models alone that are known to be causal."""
    from zerolite.compat.deepspeed.runtime.sequence_parallel import ulysses_sp

    ids = torch.arange(1, 8)[None]
    plain = {"input_ids": ids, "labels": ids}

    def parts(batch: dict[str, Any], *causal: bool) -> list[dict[str, Any]]:
        model = nn.ModuleList([nn.Linear(1, 1) for _ in causal])
        for module, said in zip(model, causal, strict=True):
            module.is_causal = said
        mpu: Any = ulysses_sp.UlyssesSPAttentionHF.register_with_transformers(model, sequence_parallel_size=2)
        where = mpu.get_sequence_parallel_rank(), mpu.get_sequence_parallel_group(), mpu.size
        return list(ulysses_sp.UlyssesSPDataLoaderAdapter([batch], *where, torch.device("cpu")))

    last = dist.get_rank() == 1
    try:
        for batch, causal in ((plain, (True, True)), ({**plain, "attention_mask": ids.clamp(max=1)}, (False,))):
            for part in parts(batch, *causal):
                assert part["input_ids"].tolist() == [[5, 6, 7, 0] if last else [1, 2, 3, 4]]
                mask = [[1, 1, 1, 0] if last else [1, 1, 1, 1]] if "attention_mask" in batch else None
                assert (part["attention_mask"].tolist() if "attention_mask" in part else None) == mask
        for causal in ((), (True, False)):
            with pytest.raises(RuntimeError, match="7 tokens without an attention_mask.*not known to be causal"):
                parts(plain, *causal)
            assert len(parts({name: value[:, :6] for name, value in plain.items()}, *causal)) == 2
    finally:
        groups._sequences = None


@pytest.mark.fast("2-2")
@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_a_checkpoint_continues_and_is_exported(stage: int, tmp_path: Path) -> None:
    """Save after two steps, load into another engine, and train both on; export what was saved."""
    folder = str(tmp_path)
    engine, other = make(stage), make(stage)
    train(engine, "engine", range(2))
    engine.save_checkpoint(folder, client_state={"epoch": 4}, exclude_frozen_parameters=True)
    saved = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    path, client_state = other.load_checkpoint(folder, load_module_strict=False)
    assert (path, client_state) == (str(tmp_path / "global_step2"), {"epoch": 4})
    for each in (engine, other):
        train(each, "engine", range(2, 4))
    assert_same_bits(engine.zerolite.full_state_dict(), other.zerolite.full_state_dict(), "resumed")
    assert other.load_checkpoint(str(tmp_path / "nothing")) == (None, {})
    exported = get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    if saved is not None:
        assert_same_bits(dict(saved), {name: exported[name] for name in saved}, "exported")
        assert exported.keys() == saved.keys()
    assert engine.zerolite.config.checkpoint.overwrite
    assert (tmp_path / "latest").read_text().strip() == "global_step2"
    assert (tmp_path / "zero_to_fp32.py").stat().st_mode & 0o111


class Theirs(nn.Module):
    """The model of :func:`tests.checkpoint.deepspeed_fakes.Fake`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(5, 3, bias=False), nn.Linear(5, 3, bias=False)
        self.head.weight = self.a.weight
        self.scale = nn.Parameter(torch.zeros(()))
        self.b = nn.ParameterDict({"bias": torch.zeros(7), "pair": torch.zeros(2)})
        self.c = nn.Linear(3, 2, bias=False).to(torch.bfloat16).requires_grad_(False)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(3))


@pytest.mark.fast("2-1")
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_a_checkpoint_of_deepspeed_is_loaded(stage: int, tmp_path: Path) -> None:
    """A checkpoint of DeepSpeed's stage 2 is loaded into another stage, and exported."""
    fake = Fake(2, 2, client_state={"epoch": 3})
    if dist.get_rank() == 0:
        fake.write(tmp_path)
    dist.barrier()
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_optimization": {"stage": stage}}
    engine = deepspeed.initialize(model=Theirs(), config=config)[0]
    path, client_state = engine.load_checkpoint(str(tmp_path))
    assert (Path(path or "").name, client_state) == ("step6_universal", {"epoch": 3})
    assert (engine.get_lr(), engine.global_steps) == ([0.5], 6)
    state = engine.zerolite.full_state_dict(dtype=torch.float32)
    exported = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    values = {**fake.trained, **fake.frozen, **fake.buffers, "head.weight": fake.trained["a.weight"]}
    assert exported.keys() == values.keys() and exported["head.weight"] is exported["a.weight"]
    for name, value in values.items():
        assert torch.equal(state[name].float(), value.float()) and torch.equal(exported[name].float(), value.float())
    dist.barrier()
    assert not [each.name for each in tmp_path.iterdir() if each.name.startswith(".")]


# -------------------------------------------------------------------- several engines, parts of parameters


@pytest.mark.fast("2-0")
@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_model_without_an_optimizer_and_a_second_engine(stage: int) -> None:
    engine = make(stage)
    config = {**config_of(stage), "train_batch_size": "auto"}
    for key in ("optimizer", "scheduler"):
        del config[key]
    reference, optimizer, _, schedule = deepspeed.initialize(model=Net().eval(), config=config)
    assert optimizer is None and schedule is None
    x = batch(0, dist.get_rank())
    with torch.no_grad():
        before = float(reference(x))
    train(engine, "engine", range(1))
    with torch.no_grad():
        assert float(reference(x)) == before == float(Net()(x))
    module = engine.module
    engine.destroy()
    del engine
    again = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config_of(stage))[0]
    train(again, "engine", range(1))
    assert again.global_steps == 1


@on_ranks(2)
def test_masters_gradients_and_states_are_read_and_set() -> None:
    utils = deepspeed.utils
    engine, rank = make(3), dist.get_rank()
    train(engine, "engine", range(1))
    engine.backward(engine(batch(9, rank)))
    assert utils.safe_get_full_fp32_param(engine.module.frozen) is None
    state = (
        lambda p: utils.safe_get_full_optimizer_state(p, "exp_avg"),
        lambda p, value: utils.safe_set_full_optimizer_state(p, value, "exp_avg"),
    )
    fp32 = (utils.safe_get_full_fp32_param, utils.safe_set_full_fp32_param)
    grad = (utils.safe_get_full_grad, utils.safe_set_full_grad)
    for name, parameter in engine.module.named_parameters():
        for get, put in (fp32, grad, state) if parameter.requires_grad else ():
            before = get(parameter)
            put(parameter, 2 * before)
            assert torch.equal(get(parameter), 2 * before), name
    with deepspeed.zero.GatheredParameters(engine.module.first.weight):
        gathered = engine.module.first.weight.detach().clone()
    assert torch.equal(gathered, utils.safe_get_full_fp32_param(engine.module.first.weight))


def copied_state(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dict and its copy, as accelerate makes it."""
    state = module.state_dict()
    return state, deepspeed.checkpoint.utils.clone_tensors_for_torch_save(state)


@on_ranks(2, timeout=60)
@pytest.mark.parametrize("of", ["experts", "tensor-parallel shards"])
def test_copies_of_state_dicts_have_all_of_a_parameter(of: str) -> None:
    """accelerate's ``get_state_dict`` at stages 0 to 2. The state dict itself has no values, for no rank has them. A
    program that saves parameters one by one, and calls it for the names, would save parts: there it raises."""
    config = config_of(2) | {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2}
    if of == "experts":
        model, name = experts.build("Mixture", False), "blocks.1.experts.up_weight"
        engine = deepspeed.initialize(model=model, config=config | {"expert_parallel": {"size": 2}})[0]
    else:
        model, name = models.build(grids.Gpt), "head.weight"  # tied
        engine = deepspeed.initialize(
            model=model, config=config | {"tensor_parallel": {"size": 2, "plan": grids.PLAN}}
        )[0]
    with pytest.raises(RuntimeError, match="state_dict: this rank has .*full_state_dict"):
        engine.module.state_dict()
    full, (state, cloned) = engine.zerolite.full_state_dict(), copied_state(engine.module)
    assert {key: value.shape for key, value in state.items()} == {key: value.shape for key, value in full.items()}
    with pytest.raises(RuntimeError, match=f"a part of parameter '{name}'.*accelerator.get_state_dict"):
        torch.save(state[name], io.BytesIO())
    with pytest.raises(RuntimeError, match="state_dict: this rank has .*full_state_dict"):
        copied_state(copy.deepcopy(engine.module))
    assert_same_bits(cloned, full, of)
    addresses = [value.data_ptr() for value in cloned.values() if value.numel()]
    assert len(set(addresses)) == len(addresses)  # tied ones too, as safetensors wants them
    with deepspeed.zero.unwrap_model_for_generation(engine) as module:
        if of == "experts":
            assert_same_bits(module.state_dict(), full, of)
    _, below = copied_state(engine.module.blocks[1])
    assert_same_bits(below, {key: full[f"blocks.1.{key}"] for key in below}, of)


# -------------------------------------------------------------------- released parameters


@on_ranks(2)
def test_one_rank_alone_reads_released_parameters_without_waiting() -> None:
    """PEFT's save calls state_dict() of a module on rank 0 for its names."""
    engine, rank = make(3), dist.get_rank()
    first, weight = engine.module.first, engine.module.first.weight
    before = engine.zerolite.full_state_dict()
    refused = "'first.weight' is partitioned .* with DeepSpeed's interface nothing gathers"
    if rank == 0:
        state = first.state_dict()
        shapes = {name: (value.shape, value.dtype, type(value) is nn.Parameter) for name, value in state.items()}
        assert shapes == {"weight": ((13, 7), torch.float32, False), "bias": ((13,), torch.float32, False)}
        uses = (torch.norm, torch.clone, copy.deepcopy, nn.init.zeros_, lambda values: values.mul_(2))
        for values in (state["weight"], weight.data, weight.detach(), weight.data.detach(), weight):
            assert values.shape == weight.ds_shape and values.numel() == weight.ds_numel
            assert "'first.weight'" in repr(values)
            for use in uses:
                with pytest.raises(RuntimeError, match=refused):
                    use(values)
        assert first.to("meta").weight is weight and weight.device.type == "cpu"  # as Lightning does, to the CPU
        with pytest.raises(RuntimeError, match=refused):
            copy.deepcopy(first)
        with pytest.raises(RuntimeError, match=refused):
            first.load_state_dict({name: before[f"first.{name}"] for name in state})
    with deepspeed.zero.GatheredParameters(first.parameters()):
        assert torch.equal(first.state_dict()["weight"], before["first.weight"])
        assert torch.equal(copy.deepcopy(first).weight, before["first.weight"])
    train(engine, "engine", range(STEPS))
    torch.testing.assert_close(engine.zerolite.full_state_dict(), expected(STEPS)[0], rtol=0, atol=1e-6)


@on_ranks(2)
def test_changes_in_a_gather_context_without_a_writer_are_dropped() -> None:
    """TRL's way to read merged weights: merge, read, take out again, which leaves rounding behind."""
    engine = make(3)
    train(engine, "engine", range(1))
    module, before = engine.module, engine.zerolite.full_state_dict()
    with pytest.warns(UserWarning, match="changes of first.weight and 1 more inside the context are dropped"):
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            module.first.weight.data += 1
            module.second.weight.data = module.second.weight.data * 2
            merged = module.first.weight.data.clone()
            module.first.weight.data -= 1.0 + 1e-3
    assert torch.equal(merged, before["first.weight"] + 1)
    assert_same_bits(engine.zerolite.full_state_dict(), before, "after the context")
    train(engine, "engine", range(1, STEPS))
    torch.testing.assert_close(engine.zerolite.full_state_dict(), expected(STEPS)[0], rtol=0, atol=1e-6)


# -------------------------------------------------------------------- pipelines and leaf modules


@pytest.mark.fast("2-0")
@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(2)
def test_a_pipeline_trains_as_its_layers_in_one_process(stage: int) -> None:
    model = pipes.module_of("tied", num_stages=2, partition_method="uniform")
    assert type(model) is deepspeed.pipe.PipelineModule
    whole = copy.deepcopy(model)
    whole.build(range(len(whole.specs)))
    torch.manual_seed(7 + 1)  # as seed_layers does, for the layer at place 1
    assert torch.equal(whole.get_parameter("layers.1.up.weight"), pipes.Block().up.weight)
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "optimizer": optimizer}
    engine = deepspeed.initialize(model=model, config={**config, "zero_optimization": {"stage": stage}})[0]
    plain = torch.optim.AdamW(whole.parameters(), lr=0.1, weight_decay=0.0)
    for step in range(3):
        batches = pipes.batches_of(pipes.token_batch, step, 3)
        run = engine.train_batch if step < 2 else engine.eval_batch
        wanted = pipes.plain_loss(whole, batches, pipes.cross_entropy, backward=True)
        assert float(run(iter(batches[0]))) == pytest.approx(wanted, rel=1e-5)
        if step < 2:
            torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)  # DeepSpeed's default
            plain.step()
            plain.zero_grad()
    for count in (1, 4):  # fewer micro-batches than stages, and more than a step has
        batches = pipes.batches_of(pipes.token_batch, 9, count)
        wanted = pipes.plain_loss(whole, batches, pipes.cross_entropy)
        options = {"num_micro_batches": count, "reduce_output": "avg", "bcast_loss": True}
        assert float(engine.eval_batch(iter(batches[0]), **options)) == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(ValueError, match="num_micro_batches.*got 0"):
        engine.eval_batch(iter(batches[0]), num_micro_batches=0)
    with pytest.raises(ValueError, match='expected reduce_output="avg", got None'):
        engine.eval_batch(iter(batches[0]), reduce_output=None)
