"""Engines divide sequences in loaders, losses outside of models, evaluation and checkpoints, and compose with more."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerolite
from tests.toolkit import models, sequences
from tests.toolkit.compare import from_all_ranks
from tests.toolkit.configs import at
from tests.toolkit.ranks import on_ranks
from tests.toolkit.sequences import batch_of, counted, in_one_process, loss_of
from tests.toolkit.training import expect_words, raised
from zerolite.comm import record
from zerolite.zero import GatheredParameters

OPTIMIZER = ("SGD", {"lr": 0.5, "momentum": 0.9})


def make(model: str, size: int, stage: str = "2", double: bool = False, **more: Any) -> Any:
    options = more.pop("options", {})
    config = at(stage, optimizer=OPTIMIZER, sequence_parallel={"size": size}, **more)
    return zerolite.initialize(sequences.build(model, double, **options), config)


def parameters_of(engine: Any) -> dict[str, Tensor]:
    with GatheredParameters(engine.module, check=False):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


@pytest.mark.slow
@sequences.needs_transformers
@on_ranks(2, timeout=60)
def test_plain_attention_is_back_when_the_engine_ends() -> None:
    before = F.scaled_dot_product_attention
    model = sequences.build("llama", False)
    twin = copy.deepcopy(model)
    engine = zerolite.initialize(model, at("1", optimizer=OPTIMIZER, sequence_parallel={"size": 2}))
    assert F.scaled_dot_product_attention is not before
    batch = batch_of("llama", 0, 12)
    # A call past the engine is the plain model's.
    torch.testing.assert_close(engine.module(**batch).logits, twin(**batch).logits)
    engine.backward(engine(**batch).loss)
    engine.step()
    engine.destroy()
    assert F.scaled_dot_product_attention is before and model.config._attn_implementation == "sdpa"


class Sequences(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[0] for name, tensor in batch_of("Decoder", index, 13).items()}


@on_ranks(4, timeout=60)
def test_loaders_and_sizes_see_data_parallel_ranks_alone() -> None:
    model = sequences.build("Decoder", False)
    config = at("2", optimizer=OPTIMIZER, sequence_parallel={"size": 2})
    engine = zerolite.initialize(model, config, training_data=Sequences())
    assert (engine.data_parallel_world_size, engine.sequence_parallel_world_size) == (2, 2)
    assert (engine.data_parallel_rank, engine.sequence_parallel_rank) == divmod(engine.rank, 2)
    assert engine.train_batch_size == 4
    losses = [float(engine.train_batch()) for _ in range(4)]
    assert len(set(from_all_ranks(tuple(losses)))) == 1
    batch = next(iter(engine.dataloader))
    gathered = engine.gather(batch["tokens"])
    assert gathered.shape == (4, 13)  # two samples of two ranks, and not of four


@on_ranks(2, timeout=60)
def test_loss_outside_of_the_model() -> None:
    """``split_sequence`` in a loop and a loss_fn in ``train_batch`` train alike; the first labels weigh the loss."""
    batches = [batch_of("Decoder", place, 21) for place in range(3)]
    wanted, norms, losses = in_one_process("Decoder", [[b] for b in batches], True, 0.0, 0.5)
    engine = make("Decoder", 2, double=True)
    for batch in batches:
        logits = engine(batch["tokens"])
        targets = engine.split_sequence(batch["targets"])
        counts = engine.loss_weight
        engine.split_sequence(torch.zeros_like(batch["targets"]))  # a mask, say, which counts all tokens
        assert engine.loss_weight == counts
        engine.backward(sequences.cross_entropy(logits, targets))
        engine.step()
    torch.testing.assert_close(parameters_of(engine), wanted, rtol=0, atol=1e-12)
    assert engine.get_global_grad_norm() == pytest.approx(norms[-1], rel=1e-12)
    engine.destroy()
    config = at("2", optimizer=OPTIMIZER, sequence_parallel={"size": 2})
    engine = zerolite.initialize(sequences.build("Decoder", True), config, loss_fn=sequences.cross_entropy)
    pairs = iter([(batch["tokens"], batch["targets"]) for batch in batches])
    told = [float(engine.train_batch(pairs)) for _ in batches]
    assert told == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(parameters_of(engine), wanted, rtol=0, atol=1e-12)


@sequences.needs_transformers
@on_ranks(2, timeout=60)
def test_evaluation() -> None:
    engine, batch = make("llama", 2), batch_of("llama", 0, 19)
    model = sequences.build("llama", False)
    with torch.no_grad():
        loss, weight = engine(**batch).loss, engine.loss_weight
        joint = engine.reduce(float(loss) * weight, "sum") / engine.reduce(weight, "sum")
        assert joint == pytest.approx(float(model(**batch).loss), rel=1e-6)
        assert engine.reduce(weight, "sum") == counted(batch)
    assert float(engine.eval_batch(iter([batch]))) == pytest.approx(joint, rel=1e-6)
    new = engine.module.generate(batch["input_ids"][:, :5], max_new_tokens=3, do_sample=False)
    assert torch.equal(new, model.generate(batch["input_ids"][:, :5], max_new_tokens=3, do_sample=False))
    alone = zerolite.initialize(sequences.build("llama", False), {"sequence_parallel": {"size": 2}})
    with torch.no_grad():
        torch.testing.assert_close(alone(**batch).loss, loss)


@pytest.mark.slow
@on_ranks(4, timeout=90)
def test_checkpoints_know_nothing_of_it(tmp_path: Path) -> None:
    """Saved by 2 × 2 ranks, a checkpoint is the same for 4 × 1 and 1 × 4."""
    folder = from_all_ranks(str(tmp_path))[0]
    engine = make("Decoder", 2, double=True)
    batches = [batch_of("Decoder", place, 16) for place in range(8)]
    engine.backward(engine(**batches[engine.data_parallel_rank]))
    engine.step()
    engine.save_checkpoint(folder)
    engine.backward(engine(**batches[2 + engine.data_parallel_rank]))
    engine.step()
    wanted = parameters_of(engine)
    engine.destroy()
    for size, stage in ((4, "3 moving"), (1, "1")):
        other = make("Decoder", size, stage, double=True)
        other.load_checkpoint(folder)
        if size == 4:  # both batches, one after the other
            joint = {name: torch.cat([batches[2][name], batches[3][name]]) for name in batches[2]}
            other.backward(other(**joint))
        else:  # ranks 0 and 1 have them, the others weigh nothing
            mine = batches[2 + other.rank % 2]
            other.backward(other(**mine), weight=counted(mine) * (other.rank < 2))
        other.step()
        torch.testing.assert_close(parameters_of(other), wanted, rtol=0, atol=1e-12)
        other.destroy()


@on_ranks(2, timeout=60)
def test_traffic_of_a_layer_is_that_of_the_paper() -> None:
    """Query, key, value and output are N h / ranks elements each, forward and backward, however they are packed."""
    engine, batch = make("Decoder", 2, "0"), batch_of("Decoder", 0, 16)
    engine.backward(engine(**batch))  # the trial comes with the first forward
    engine.step()
    with record() as calls:
        loss = engine(**batch)
        forward = calls.select(tag="sequence")
        engine.backward(loss)
    both = calls.select(tag="sequence")
    tokens = batch["tokens"].numel() // 2  # of this rank
    elements = 2 * 4 * tokens * sequences.WIDTH  # of two layers
    assert {(call.op, call.dimension) for call in both} == {("all_to_all", "sequence")}
    assert len(forward) == 2 * 4 and len(both) == 2 * len(forward)
    assert sum(call.nbytes for call in forward) == 4 * elements
    assert sum(call.nbytes for call in both) == 2 * 4 * elements
    engine.step()


@on_ranks(2, timeout=60)
def test_parts_draw_other_random_numbers() -> None:
    torch.manual_seed(3)
    engine = make("Decoder", 2, options={"dropout": 0.5})
    drawn: list[Tensor] = []
    engine.module.blocks[0].drop.register_forward_hook(lambda module, args, output: drawn.append(output == 0))
    batch = batch_of("Decoder", 0, 16)
    engine.backward(engine(**batch))
    engine.step()
    one, other = from_all_ranks(drawn[-1])
    assert not torch.equal(one, other)
    states = from_all_ranks(torch.get_rng_state())  # the program's own numbers stay equal
    assert torch.equal(*states)


ON_HOST = {"device": "cpu"}
BESIDE: list[tuple[str, dict[str, Any]]] = [
    ("2", {"activation_checkpointing": {"modules": ["_Block"]}}),
    ("3 moving", {"activation_checkpointing": {"modules": ["_Block"], "cpu_checkpointing": True}}),
    ("2", {"zero": {"offload_optimizer": ON_HOST}}),
    ("2", {"zero": {"offload_optimizer": ON_HOST, "shard_size": 2}}),
    ("3 moving", {"zero": {"offload_param": ON_HOST, "offload_optimizer": ON_HOST}}),
    ("3 moving", {"zero": {"zero_hpz_partition_size": 2}}),
]


@pytest.mark.fast("3 moving-more1-2", "3 moving-more4-2")
@on_ranks(2, 4, timeout=90)
@pytest.mark.parametrize(("stage", "more"), BESIDE)
def test_composes_with_what_an_engine_has(stage: str, more: dict[str, Any]) -> None:
    """Activation checkpoints repeat attention, and states are in replicas, hierarchical shards or on the host."""
    if dist.get_world_size() == 2 and {"shard_size", "zero_hpz_partition_size"} & more.get("zero", {}).keys():
        return  # there is one set of data-parallel ranks
    engine = make("Decoder", 2, stage, double=True, **more)
    batches = [batch_of("Decoder", place, 19) for place in range(4)]
    replicas = engine.data_parallel_world_size
    windows = [batches[step * replicas : (step + 1) * replicas] for step in range(2)]
    for window in windows:
        engine.backward(engine(**window[engine.data_parallel_rank]))
        engine.step()
    wanted, *_ = in_one_process("Decoder", windows, True, 0.0, 0.5)
    torch.testing.assert_close(parameters_of(engine), wanted, rtol=0, atol=1e-12)


@pytest.mark.slow
@sequences.needs_transformers
@on_ranks(4, timeout=90)
def test_composes_with_tensor_parallelism() -> None:
    plan = {"model.layers.*.self_attn.q_proj": "column", "model.layers.*.self_attn.k_proj": "column",
            "model.layers.*.self_attn.v_proj": "column", "model.layers.*.self_attn.o_proj": "row"}  # fmt: skip
    config = at("1", optimizer=OPTIMIZER, sequence_parallel={"size": 2}, tensor_parallel={"size": 2, "plan": plan})
    engine = zerolite.initialize(sequences.build("llama", False), config)
    assert engine.data_parallel_world_size == 1
    windows = [[batch_of("llama", place, 21)] for place in range(3)]
    for window in windows:
        engine.backward(loss_of(engine(**window[0])))
        engine.step()
    wanted, norms, _ = in_one_process("llama", windows, False, 0.0, 0.5)
    assert engine.get_global_grad_norm() == pytest.approx(norms[-1], rel=1e-5)
    full = engine.full_state_dict()
    torch.testing.assert_close({n: full[n] for n in wanted}, wanted, rtol=0, atol=5e-6)


class Experts(sequences.Decoder):
    """Each block is followed by experts, each of which sees the tokens of one third of the vocabulary."""

    def __init__(self) -> None:
        super().__init__(layers=3)
        width = sequences.WIDTH
        self.experts = nn.ModuleList(nn.ModuleList(nn.Linear(width, width) for _ in range(3)) for _ in range(3))

    def forward(self, tokens: Tensor, targets: Tensor, position_ids: Any = None) -> Tensor:  # type: ignore[override]
        places = torch.arange(tokens.shape[1])[None] if position_ids is None else position_ids
        x = self.embed(tokens) + self.places(places)
        for block, experts in zip(self.blocks, self.experts, strict=True):
            x = block(x)
            for number, expert in enumerate(experts):
                mine = tokens % 3 == number
                if mine.any():
                    x = x + torch.where(mine[..., None], expert(x), 0.0)
        return sequences.cross_entropy(self.head(self.norm(x)), targets)


@pytest.mark.fast("1-2")
@on_ranks(2, timeout=60)
@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_experts_may_get_tokens_of_one_part_alone(stage: str) -> None:
    """A rank reduces what it has not used at the end of its backward, while the other needs its tokens before."""
    model, plain = (models.build(Experts).double() for _ in range(2))
    engine = zerolite.initialize(model, at(stage, optimizer=("SGD", {"lr": 0.5}), sequence_parallel={"size": 2}))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(4):
        batch = batch_of("Decoder", step, 16)
        tokens = batch["tokens"]
        tokens[:, :8] -= tokens[:, :8] % 3  # one expert in the first part, which differs from the second's
        tokens[:, 8:] = (tokens[:, 8:] // 3 * 3 + 1 + step % 2).clamp(max=sequences.VOCABULARY - 1)
        engine.backward(engine(**batch))
        engine.step()
        plain(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(parameters_of(engine), dict(plain.named_parameters()), rtol=0, atol=1e-12)


@sequences.needs_transformers
@pytest.mark.fast("1-True-2")
@on_ranks(2, 3, timeout=60)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("stage", ["1", "3 moving"])
def test_parts_that_the_loader_has_cut(stage: str, weighted: bool) -> None:
    """The engine or the caller weights the loss of a part; padding masks, documents, checkpoints know all parts."""
    size = dist.get_world_size()
    checkpointing = {"activation_checkpointing": {"modules": ["LlamaDecoderLayer"]}}
    config = at(stage, optimizer=OPTIMIZER, sequence_parallel={"size": size, "inputs": "parts in training"})
    engine = zerolite.initialize(sequences.build("llama", False).train(), config | checkpointing)
    batches = [batch_of("llama", place, 24, how) for place, how in enumerate(("", "masked", "packed"))]
    batches[0]["labels"][:, : 24 // size + 1] = sequences.IGNORED  # nothing is counted in the first part
    for batch in batches:
        batch["shift_labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=sequences.IGNORED)
        mine = {name: tensor.chunk(size, 1)[engine.rank].contiguous() for name, tensor in batch.items()}
        mine["labels"] = mine["shift_labels"]
        part = engine(**mine).loss
        weight = float((mine["labels"] != sequences.IGNORED).sum())
        total = sum(from_all_ranks(weight))
        if weighted:
            engine.backward(part if weight else part.nan_to_num(), weight=weight)
        else:  # the mean over ranks is the gradient, as after a differentiable all-gather
            engine.backward(part * (size * weight / total) if weight else part.nan_to_num() * 0.0)
        engine.step()
    wanted, norms, _ = in_one_process("llama", [[batch] for batch in batches], False, 0.0, 0.5)
    torch.testing.assert_close(parameters_of(engine), wanted, rtol=0, atol=2e-6)
    assert engine.get_global_grad_norm() == pytest.approx(norms[-1], rel=1e-5)
    engine.eval()
    own = batch_of("llama", 50 + engine.rank, 9 + engine.rank)
    with torch.no_grad(), GatheredParameters(engine.module, check=False):
        copied = {name: p.clone() for name, p in engine.module.named_parameters()}
        plain = sequences.build("llama", False).eval()
        plain.load_state_dict(copied, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(engine(**own).loss, plain(**own).loss)


@sequences.needs_transformers
@on_ranks(2, timeout=60)
def test_bad_parts_are_refused() -> None:
    config = at("2", optimizer=OPTIMIZER, sequence_parallel={"size": 2, "inputs": "parts"})
    engine = zerolite.initialize(sequences.build("llama", False), config)
    batch = batch_of("llama", 0, 8)
    expect_words(raised(lambda: engine(**batch)), "shift_labels", "before the cut")
    tokens = batch["input_ids"]
    expect_words(raised(lambda: engine(input_ids=tokens[:, : 4 + engine.rank])), "parts of equal shapes")
    expect_words(raised(lambda: engine(input_ids=tokens, attention_mask=tokens[:, :3])), "attention_mask", "parts of 8")
    loss = engine(input_ids=tokens).logits.mean()
    expect_words(raised(loss.backward), "engine.backward(loss)", "parts of sequences")
