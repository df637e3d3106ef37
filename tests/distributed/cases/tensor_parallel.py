"""Models that are cut, beside the same models whole in the same process."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import zerolite
from examples.gpt.model import GPT, GPTConfig
from zerolite.comm import Communicator, create_communicator, record
from zerolite.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLogits,
    parallelize_module,
    tensor_ranks,
)
from zerolite.tensor_parallel.shard_spec import ShardSpec, is_partial, shard_spec_of

CPU = torch.device("cpu")


@dataclass
class Settings:
    ranks: int
    plan: Any = "auto"
    sequence_parallel: bool = False
    divide: Any = "auto"


def communicator() -> Communicator:
    return create_communicator(CPU)


def settings(comm: Communicator, plan: Any = "auto", **others: Any) -> Settings:
    return Settings(comm.world_size, plan, **others)


def relative(one: Tensor, other: Tensor, least: float = 0.0) -> float:
    """The largest difference against the largest value, or ``least`` if that is larger."""
    scale = max(float(other.detach().abs().max()) if other.numel() else 0.0, least) or 1.0
    return float((one.detach() - other.detach()).abs().max()) / scale if one.numel() else 0.0


def own_part(parameter: Tensor, full: Tensor) -> Tensor:
    cut = shard_spec_of(parameter)
    return full if cut is None else cut.of(full)


Loss = Callable[[nn.Module], Tensor]


def compare(model: nn.Module, loss_of: Loss, plan: Any = "auto", **others: Any) -> dict[str, Any]:
    """Loss and gradients, cut and whole: the largest relative differences, and the collectives of both passes."""
    comm = communicator()
    whole = copy.deepcopy(model)
    expected = loss_of(whole)
    expected.backward()
    parallelize_module(model, settings(comm, plan, **others), comm, CPU)
    with record() as forward:
        loss = loss_of(model)
    with record() as backward:
        loss.backward()
    # Some gradients are sums that cancel, that of a key's bias for one: nothing is left of them but rounding.
    least = 0.1 * max(float(full.grad.abs().max()) for full in whole.parameters() if full.grad is not None)
    gradients = {}
    for (name, parameter), full in zip(model.named_parameters(), whole.parameters(), strict=True):
        gradient = parameter.grad
        if gradient is not None and is_partial(parameter):
            gradient = comm.all_reduce(gradient.clone().view(-1), "tensor").wait().view(parameter.shape)
        assert (gradient is None) == (full.grad is None), name
        if gradient is not None:
            gradients[name] = relative(gradient, own_part(parameter, full.grad), least)
    return {
        "loss": relative(loss, expected),
        "value": float(loss.detach()),
        "gradients": gradients,
        "forward": forward.summary(),
        "backward": backward.summary(),
        "cut": sorted(name for name, parameter in model.named_parameters() if shard_spec_of(parameter) is not None),
    }


def tokens(batch: int = 2, length: int = 12, vocabulary: int = 64, seed: int = 3) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def gpt(plan: Any = "auto", vocabulary: int = 64, **others: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    model = GPT(GPTConfig(context=16, layers=2, heads=4, width=32, vocabulary=vocabulary))
    x, y = tokens(vocabulary=vocabulary), tokens(vocabulary=vocabulary, seed=4)
    return compare(model, lambda m: m(x, y), plan, **others)


def hugging_face(family: str, tied: bool = False, heads: int = 4, kv_heads: int = 2, **others: Any) -> dict[str, Any]:
    import transformers

    common = {"vocab_size": 67, "tie_word_embeddings": tied, "use_cache": False}
    if family == "GPT2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=heads, n_positions=16, **common)
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            setattr(config, name, 0.0)
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 32}
        sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        extra = {"head_dim": 8} if family == "Qwen3" else {}
        config = getattr(transformers, f"{family}Config")(**sizes, **common, **extra)
    torch.manual_seed(1)
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM"))(config)
    x = tokens(vocabulary=67)
    if family == "GPT2":  # brings no plan
        plan = {"*.c_attn": "column", "*.c_fc": "column", "*.c_proj": "row", "lm_head": "vocab"}
        others["plan"] = plan
    return compare(model, lambda m: m(input_ids=x, labels=x).loss, **others)


class Shapes(nn.Module):
    """One block of attention and a gated feed-forward layer, in one of several ways of writing them."""

    def __init__(self, kind: str, width: int = 32, heads: int = 4, kv_heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.kind, self.heads, self.kv_heads, self.head_dim = kind, heads, kv_heads, width // heads
        kv = kv_heads * self.head_dim
        self.norm = nn.LayerNorm(width)
        if kind == "fused":
            self.qkv = nn.Linear(width, width + 2 * kv)
        else:
            self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, kv), nn.Linear(width, kv)
        if kind == "norms":
            self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)
        self.o = nn.Linear(width, width)
        self.gate_up = nn.Linear(width, 6 * width, bias=False)
        self.down = nn.Linear(3 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        hidden = self.norm(x)
        if self.kind == "fused":
            parts = self.qkv(hidden).split([n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)], -1)
        else:
            parts = self.q(hidden), self.k(hidden), self.v(hidden)
        q, k, v = (part.view(batch, length, -1, self.head_dim).transpose(1, 2) for part in parts)
        if self.kind == "norms":
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed = self.dropout(mixed)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(self.dropout(F.silu(gate) * up))


class Nano(nn.Module):
    """The attention of nanoGPT, which asks its input for the width."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.n_embd = heads, width

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Stack(nn.Module):
    _tp_plan = {
        **{f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "qkv", "c_attn", "gate_up", "up")},
        **{f"blocks.*.{name}": "rowwise" for name in ("o", "down", "c_proj")},
        "head": "colwise_rep",
    }

    def __init__(self, blocks: list[nn.Module], width: int = 32, vocabulary: int = 37, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=3)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def blocks(kind: str, plan: Any = "auto", tied: bool = False, vocabulary: int = 37, **others: Any) -> dict[str, Any]:
    torch.manual_seed(2)
    sizes = {key: others.pop(key) for key in ("heads", "kv_heads") if key in others}
    made = [Nano() if kind == "nano" else Shapes(kind, **sizes) for _ in range(2)]
    model = Stack(made, vocabulary=vocabulary, tied=tied)
    x, y = tokens(vocabulary=vocabulary), tokens(vocabulary=vocabulary, seed=4)
    return compare(model, lambda m: F.cross_entropy(m(x).flatten(0, 1), y.flatten()), plan, **others)


def direct_layers() -> dict[str, float]:
    """Layers made by their constructors beside those of torch.nn with the same values."""
    comm = communicator()
    size = comm.world_size
    found: dict[str, float] = {}
    torch.manual_seed(5 + comm.rank)  # the first rank's values count

    def check(name: str, made: nn.Module, whole: nn.Module, x: Tensor, part: slice | None = None) -> None:
        with torch.no_grad():
            for parameter, full in zip(made.parameters(), whole.parameters(), strict=True):
                full.copy_(gathered(parameter, comm))
        inputs = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
        mine = inputs[0] if part is None else inputs[0][..., part]
        out, expected = made(mine), whole(inputs[1])
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
        if out.shape != expected.shape:
            width = expected.shape[-1] // size
            expected = expected.narrow(-1, comm.rank * width, width)
            weights = weights.narrow(-1, comm.rank * width, width)
        (out * weights).sum().backward()
        total = (expected * weights).sum()
        total.backward()
        found[f"{name} output"] = relative(out, expected)
        for key, parameter in made.named_parameters():
            full = dict(whole.named_parameters())[key]
            found[f"{name} {key}"] = relative(parameter.grad, own_part(parameter, full.grad))
        if x.is_floating_point() and part is None and out.shape == whole(x).shape:
            found[f"{name} input"] = relative(inputs[0].grad, inputs[1].grad)

    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(6))
    for bias in (True, False):
        column = ColumnParallelLinear(8, 12, bias, comm=comm, gather_output=True)
        check(f"column {bias}", column, nn.Linear(8, 12, bias), x)
        own = slice(comm.rank * 8 // size, (comm.rank + 1) * 8 // size)
        check(f"row {bias}", RowParallelLinear(8, 6, bias, comm=comm), nn.Linear(8, 6, bias), x, own)
        split = RowParallelLinear(8, 6, bias, comm=comm, input_is_parallel=False)
        check(f"row of a whole input {bias}", split, nn.Linear(8, 6, bias), x)
    parts = ColumnParallelLinear(8, 24, comm=comm, gather_output=True, parts=[16, 4, 4])
    check("parts", parts, nn.Linear(8, 24), x)
    check("column part", ColumnParallelLinear(8, 12, comm=comm), nn.Linear(8, 12), x)
    for vocabulary in (3, 7, 64):
        indices = tokens(vocabulary=vocabulary)
        embedding = VocabParallelEmbedding(vocabulary, 4, padding_idx=-1, comm=comm)
        check(f"embedding {vocabulary}", embedding, nn.Embedding(vocabulary, 4, padding_idx=-1), indices)
        for wrong in (-1, vocabulary):
            try:
                embedding(torch.tensor([0, wrong]))
            except IndexError:
                continue
            raise AssertionError(f"index {wrong} of {vocabulary} was taken")
    return found


def gathered(parameter: Tensor, comm: Communicator) -> Tensor:
    """The whole values of a parameter that is cut."""
    cut = shard_spec_of(parameter)
    if cut is None:
        return parameter
    full = torch.zeros(cut.full_shape)
    for here, there, length in cut.ranges:
        full.narrow(cut.dim, there, length).copy_(parameter.data.narrow(cut.dim, here, length))
    return comm.all_reduce(full.view(-1), "tensor").wait().view(cut.full_shape)


def head_of(full: Tensor, comm: Communicator) -> tuple[VocabParallelLogits, Tensor]:
    """Logits as if a head had given this rank's of ``full``; and the leaf behind them."""
    vocabulary = full.shape[-1]
    local = ShardSpec.of_rows((vocabulary,), 0, comm)
    part = ShardSpec((*full.shape,), full.dim() - 1, local.ranges, local.length, local.rank, local.size).of(full)
    leaf = part.requires_grad_()
    return VocabParallelLogits.of(leaf * 1, comm, vocabulary), leaf


def cross_entropies() -> dict[str, float]:
    """F.cross_entropy of whole logits and of logits in parts: losses and gradients, for each way of asking."""
    comm, found = communicator(), {}
    generator = torch.Generator().manual_seed(7)
    for vocabulary in (3, 5, 8, 41):
        logits = 4 * torch.randn(6, vocabulary, generator=generator)
        target = torch.randint(0, vocabulary, (6,), generator=generator)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for options in CROSS_ENTROPIES:
                y = target.clone()
                if "ignore_index" in options:
                    y[::2] = options["ignore_index"]
                full = logits.to(dtype, copy=True).requires_grad_()
                wide = full.double() if dtype == torch.bfloat16 else full
                expected = F.cross_entropy(wide, y, **options)
                made, leaf = head_of(full.detach(), comm)
                with record() as calls:
                    loss = F.cross_entropy(made, y, **options)
                assert loss.dtype == dtype
                weights = torch.arange(1.0, 7.0) if loss.dim() else torch.tensor(1.0)
                (loss * weights).sum().backward()
                (expected * weights).sum().backward()
                expected_part = torch.zeros_like(leaf)
                start, rows = comm.rank * leaf.shape[1], leaf.shape[1]
                own = full.grad[:, start : start + rows]
                expected_part[:, : own.shape[1]] = own
                name = f"{vocabulary} {dtype} {options}"
                found[name] = max(relative(loss, expected.to(dtype)), relative(leaf.grad, expected_part))
                assert calls.numel() <= (1 + 3) * 6 and calls.count("all_gather") == 0, calls.summary()
    return found


CROSS_ENTROPIES: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": -100},
    {"ignore_index": 2, "reduction": "sum"},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.3, "ignore_index": -1, "reduction": "none"},
]


def random_numbers(sequence_parallel: bool = False, checkpoint: str = "") -> dict[str, Any]:
    """Dropout inside and outside of what is cut, and gradients with blocks that are computed anew in backward."""
    comm = communicator()
    torch.manual_seed(11)
    model = Stack([Shapes("separate", kv_heads=4, dropout=0.3) for _ in range(2)])
    for block in model.blocks:
        block.register_module("outer", nn.Dropout(0.3))
        block.register_forward_hook(lambda module, args, out: module.outer(out))
    torch.manual_seed(comm.rank)
    parallelize_module(model, settings(comm, sequence_parallel=sequence_parallel), comm, CPU)
    x, y = tokens(vocabulary=37), tokens(vocabulary=37, seed=4)
    masks: dict[str, list[Tensor]] = {"inside": [], "outside": []}
    for block in model.blocks:
        block.dropout.register_forward_hook(lambda module, args, out: masks["inside"].append(out == 0))
        block.outer.register_forward_hook(lambda module, args, out: masks["outside"].append(out == 0))

    def step(again: str) -> tuple[float, dict[str, Tensor]]:
        torch.manual_seed(13)
        model.zero_grad()
        hidden = model.embed(x)
        for block in model.blocks:
            if again:
                hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=again == "reentrant")
            else:
                hidden = block(hidden)
        loss = F.cross_entropy(model.head(hidden).flatten(0, 1), y.flatten())
        loss.backward()
        return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}

    before = torch.get_rng_state()
    loss, gradients = step("")
    drawn = {name: torch.cat([mask.flatten() for mask in seen]) for name, seen in masks.items()}
    state = torch.get_rng_state()
    again, same = (loss, gradients) if not checkpoint else step(checkpoint)
    return {
        "loss": loss,
        "again": again,
        "equal gradients": all(torch.equal(gradients[name], same[name]) for name in gradients),
        "inside": drawn["inside"].numpy().tobytes(),
        "outside": drawn["outside"].numpy().tobytes(),
        "state": state.numpy().tobytes(),
        "advanced": not torch.equal(before, state),
        "state again": torch.get_rng_state().numpy().tobytes(),
    }


def failure_inside() -> dict[str, Any]:
    """The state of random numbers after a forward that raised between a column and its row."""
    comm = communicator()
    torch.manual_seed(11)
    model = Stack([Shapes("separate", dropout=0.3)])
    parallelize_module(model, settings(comm), comm, CPU)
    block = model.blocks[0]

    def fail(*_: object) -> None:
        raise ArithmeticError

    handle = block.dropout.register_forward_hook(fail)
    try:
        model(tokens(vocabulary=37))
    except ArithmeticError:
        pass
    handle.remove()
    state = torch.get_rng_state().numpy().tobytes()
    loss = F.cross_entropy(model(tokens(vocabulary=37)).flatten(0, 1), tokens(vocabulary=37).flatten())
    return {"state": state, "loss": loss.item()}


def different_ranks() -> dict[str, bool]:
    """Return whether a model that every rank has built by itself gets the first one's values, and its random
    numbers."""
    comm = communicator()
    torch.manual_seed(comm.rank)
    model = Stack([Nano()])
    torch.manual_seed(0)
    wanted = Stack([Nano()])
    first = torch.rand(3)
    torch.manual_seed(comm.rank)
    Stack([Nano()])
    parallelize_module(model, settings(comm), comm, CPU)
    values = [torch.equal(gathered(a, comm), b) for a, b in zip(model.parameters(), wanted.parameters(), strict=True)]
    return {"values": all(values), "numbers": torch.equal(torch.rand(3), first)}


def memory(sequence_parallel: bool) -> dict[str, Any]:
    """The activations that live on after the graph is gone, and in a forward without one; and by how many bytes a
    step grows what lives."""
    comm = communicator()
    torch.manual_seed(0)
    model = Stack([Shapes("separate")])
    parallelize_module(model, settings(comm, sequence_parallel=sequence_parallel), comm, CPU)
    seen: list[tuple[str, weakref.ref[Tensor]]] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        seen.append((type(module).__name__, weakref.ref(out)))
        seen.extend((f"input of {type(module).__name__}", weakref.ref(x)) for x in args if x.is_floating_point())

    for module in model.modules():
        module.register_forward_hook(note)
    x = tokens(vocabulary=37)
    gc.disable()
    try:
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        after = [name for name, tensor in seen if tensor() is not None]
        seen.clear()
        with torch.no_grad():
            model(x)
        without = [name for name, one in seen if one() is not None]
        seen.clear()
        living = []
        for _ in range(2):
            F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
            seen.clear()
            tensors = [item for item in gc.get_objects() if type(item) is Tensor]
            storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
            living.append(sum(storages.values()))
        return {"alive after": after, "alive without gradients": without, "growth": living[1] - living[0]}
    finally:
        gc.enable()


class OwnLayers(nn.Module):
    """Written with the layers themselves, as docs/tensor-parallelism.md shows."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(8, 12, comm=comm)
        self.down = RowParallelLinear(12, 8, comm=comm)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def again(sequence: bool, other: bool) -> float:
    """Return how far the first loss of a second engine on a model that is sharded already is from that of the plain
    one. other: the second one is to treat sequences otherwise."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=8, layers=2, heads=2, width=8, vocabulary=12))
    tokens = torch.randint(12, (2, 8))
    expected = model(tokens, tokens).detach()
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    for sequence_parallel in (sequence, sequence != other):
        block = {"size": 2, "sequence_parallel": sequence_parallel}
        engine = zerolite.initialize(model, {**config, "tensor_parallel": block})
        loss = engine(tokens, tokens)
        engine.backward(loss)
        engine.step()
        found = float((loss.detach() - expected).abs() / expected)
        del engine, loss
        gc.collect()
    return found


def own_layers(stage: int) -> tuple[list[float], list[float]]:
    """Losses of three steps, of two engines one after the other on the same model, and those of the plain layers."""
    ranks = tensor_ranks(2)
    torch.manual_seed(10 + ranks.rank)
    model = OwnLayers(ranks)
    torch.manual_seed(10)
    plain = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "tensor_parallel": {"size": 2},
        "zero_optimization": {"stage": stage},
    }
    optimizer, generator = torch.optim.SGD(plain.parameters(), 0.5), torch.Generator().manual_seed(3)
    losses, wanted = [], []
    for _ in range(2):
        engine = zerolite.initialize(model, config)
        for _ in range(3):
            x = torch.randn(4, 8, generator=generator)
            loss, expected = engine(x).pow(2).mean(), plain(x).pow(2).mean()
            engine.backward(loss)
            engine.step()
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            wanted.append(float(expected.detach()))
        del engine, loss
        gc.collect()
    return losses, wanted
