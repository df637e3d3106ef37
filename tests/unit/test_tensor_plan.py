"""Plans: which layers they cut, in which parts, and what is refused. Nothing is sent: the other ranks are not there."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from examples.gpt.model import GPT, GPTConfig
from tests.toolkit.tensor_parallel import CPU, Nano, Shapes, Stack, settings
from zerolite.comm import dry_communicator
from zerolite.tensor_parallel import RowParallelLinear, TensorPlanError, parallelize_module
from zerolite.tensor_parallel.plan import Style, matches, parse_style, resolve
from zerolite.tensor_parallel.regions import LocalShapeTensor
from zerolite.tensor_parallel.shard_spec import ShardSpec, is_partial, set_names, shard_spec_of

MLP = {"blocks.*.up": "column", "blocks.*.down": "row"}


class Plain(nn.Module):
    """A feed-forward block with names of its own."""

    def __init__(self, middle: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, middle), nn.Linear(middle, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def cut(model: nn.Module, plan: Any = "auto", size: int = 2, rank: int = 0, **others: Any) -> nn.Module:
    comm = dry_communicator("gloo", rank, size)
    comm.is_rank0 = True  # a dry run says nothing by itself
    parallelize_module(model, settings(size, plan, **others), comm, CPU)
    return model


def parts_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters() if shard_spec_of(p) is not None}


@pytest.mark.parametrize(
    "pattern, name, expected",
    [("a.b", "a.b", True), ("a.b", "a.b.c", False), ("a.*", "a.b.c", True), ("a.*", "a", False), ("*.c", "a.b.c", True),
     ("l.*.attn.*_proj", "l.11.attn.q_proj", True), ("l.*.attn.*_proj", "l.11.attn.norm", False),
     ("a.*.c", "a.c", False)],
)  # fmt: skip
def test_a_star_stands_for_one_or_more_parts(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) == expected


def test_the_pattern_with_most_literal_parts_counts() -> None:
    plan = {"*.up": Style("column"), "blocks.0.up": Style("whole"), "blocks.*": Style("row")}
    names = ["blocks.0.up", "blocks.1.up", "blocks.1.down", "x.up"]
    found, unused = resolve(plan, names, optional=True)
    # Between equally many parts, "blocks" says more letters than "up".
    assert [found[name].style.sharding for name in names] == ["whole", "row", "row", "column"] and not unused
    with pytest.raises(TensorPlanError, match=r"one style for 'a\.b', got column from 'a\.\*' and row from '\*\.b'"):
        resolve({"a.*": Style("column"), "*.b": Style("row")}, ["a.b"])
    resolve({"a.*": Style("column"), "*.b": Style("column")}, ["a.b"])


@pytest.mark.parametrize(
    "given, expected",
    [
        ("colum", "known are column, row, vocab"),
        ("moe_tp_experts", "experts"),
        ("sequence_parallel", '"sequence_parallel": true'),
        ({"style": "row", "parts": 3}, "parts and gather_output with the style column only"),
        ({"style": "column", "parts": 0}, "a number of parts or a list of their sizes"),
        ({"style": "column", "gather_output": 1}, "true or false"),
    ],
)
def test_styles_that_are_refused(given: Any, expected: str) -> None:
    with pytest.raises(TensorPlanError, match=expected):
        parse_style("x", given)


@pytest.mark.parametrize("size, rows", [(2, [4, 3]), (4, [2, 2, 2, 1]), (8, [1] * 7 + [0]), (5, [2, 2, 2, 1, 0])])
def test_a_vocabulary_is_padded(size: int, rows: list[int]) -> None:
    specs = [ShardSpec.of_rows((7, 2), 0, dry_communicator("gloo", rank, size)) for rank in range(size)]
    assert [sum(length for _, _, length in spec.ranges) for spec in specs] == rows
    assert len({spec.length for spec in specs}) == 1
    full = torch.randn(7, 2)
    assert torch.equal(torch.cat([spec.of(full)[:own] for spec, own in zip(specs, rows, strict=True)]), full)


# ------------------------------------------------------------------------------------------------------- what is cut


def test_the_example_and_layers_that_the_author_has_written_in_parts() -> None:
    model = cut(GPT(GPTConfig(context=8, layers=2, heads=4, width=32, vocabulary=67)), size=4, rank=3)
    found = parts_of(model)
    assert found["blocks.1.attention.query_key_value.weight"] == (24, 32) and len(found) == 2 * 6 + 1
    assert found["blocks.0.mlp.project.weight"] == (32, 32) and found["head.weight"] == (17, 32)
    assert model.blocks[0].attention.heads == 1 and model.config.heads == 4
    comm = dry_communicator("gloo", 0, 2)
    model = nn.Sequential(nn.Linear(4, 4), RowParallelLinear(4, 4, comm=comm, input_is_parallel=False))
    assert parts_of(cut(model)) == {"1.weight": (4, 2)}
    with pytest.raises(TensorPlanError, match="layers in 4 parts, as tensor_parallel.size says, got '1' in 2"):
        cut(model, size=4)


def test_modules_parameters_and_hooks_stay_the_same_objects() -> None:
    model = Stack([Plain()], width=8, tied=True)
    before, calls = [*model.modules(), *model.parameters()], []
    model.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    cut(model, {**MLP, "embed": "vocab"})
    assert all(a is b for a, b in zip(before, [*model.modules(), *model.parameters()], strict=True))
    assert model.head.weight is model.embed.weight and shard_spec_of(model.head.weight) is not None
    model(torch.tensor([[1, 2]]))
    assert calls == [1] and isinstance(model.blocks[0].up, nn.Linear)


FUSED: list[tuple[Callable[[], nn.Module], str, tuple[int, ...]]] = [
    (Nano, "c_attn", (16, 16, 16)),
    (lambda: Shapes("fused"), "qkv", (16, 8, 8)),
    (lambda: Shapes("fused"), "gate_up", (48, 48)),
    (lambda: Shapes("separate"), "k", (8,)),
]


@pytest.mark.parametrize("make, name, lengths", FUSED)
def test_what_is_fused_is_cut_in_parts(
    make: Callable[[], nn.Module], name: str, lengths: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    model = Stack([make()])
    layers = [child for child, layer in model.blocks[0].named_children() if isinstance(layer, nn.Linear)]
    plan = {f"blocks.*.{child}": "row" if child in ("o", "down", "c_proj") else "column" for child in layers}
    with caplog.at_level(logging.INFO, "zerolite"):
        cut(model, plan)
    found = shard_spec_of(getattr(model.blocks[0], name).weight)
    assert found is not None and tuple(length for _, _, length in found.ranges) == lengths
    assert (f"blocks.0.{name} is sharded in" in caplog.text) == (len(lengths) > 1)


@pytest.mark.parametrize(
    ("kind", "settings", "names"),
    [
        ("norms", {}, {f"{norm}_norm.{key}" for norm in "qk" for key in ("weight", "bias")}),
        ("separate", {"sequence_parallel": True}, {"norm.weight", "norm.bias", "o.bias", "down.bias"}),
    ],
)
def test_gradients_that_are_parts(kind: str, settings: dict[str, Any], names: set[str]) -> None:
    """Norms of heads have them; with sequence parallelism all whole parameters in blocks do."""
    model = cut(Stack([Shapes(kind)]), **settings)
    partial = {name for name, parameter in model.named_parameters() if is_partial(parameter)}
    assert partial == {f"blocks.0.{name}" for name in names}


def test_a_stage_of_a_pipeline() -> None:
    """Patterns for other stages are given back; a tied weight is cut though its other place is elsewhere."""
    model = Stack([Plain()], width=8)
    model.blocks[0].up._parameters.update(weight=None, bias=None)  # on another stage
    model.blocks[0].down._parameters.update(weight=None, bias=None)
    set_names(model.embed.weight, ["embed.weight", "elsewhere.head.weight"])
    comm = dry_communicator("gloo", 0, 2)
    plan = {**MLP, "other.*": "column", "elsewhere.head": "vocab"}
    assert parallelize_module(model, settings(2, plan), comm, CPU, stage=True) == ["other.*"]
    assert list(parts_of(model)) == ["embed.weight"]


# ---------------------------------------------------------------------------------------------------- what is refused


class Odd(Plain):
    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)


class OwnForward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) ** 2


def _parametrized() -> nn.Module:
    layer = nn.Linear(8, 16)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


def _stack(*blocks: nn.Module) -> Stack:
    return Stack(list(blocks), width=8)


def _with_parameter() -> Stack:
    model = _stack(Plain())
    model.blocks[0].register_parameter("scale", nn.Parameter(torch.ones(8)))
    return model


def _shared() -> Stack:
    model = _stack(Plain(), Plain())
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, int, str]] = {
    "nothing": (
        lambda: _stack(Plain()), {**MLP, "blocks.*.upp": "column"}, 2, r"'blocks\.\*\.upp'.*nearest.*blocks\.\*\.up'",
    ),
    "outputs": (
        lambda: _stack(Plain(middle=18)), MLP, 4,
        r"outputs of 'blocks\.0\.up' that tensor_parallel\.size 4 divides, got 18",
    ),
    "inputs": (
        lambda: _stack(Odd(up=nn.Linear(8, 16), down=nn.Linear(18, 8))),
        {"blocks.*.up": "column", "blocks.*.down": "rowwise_split_input"}, 4,
        "row in 'blocks.0' for the column 'blocks.0.up'",
    ),
    "no row": (
        lambda: _stack(Plain()), {"blocks.*.up": "column"}, 2,
        r"a row in 'blocks\.0' for the column 'blocks\.0\.up'.*got none",
    ),
    "no column": (
        lambda: _stack(Plain()), {"blocks.*.down": "row"}, 2,
        r"a column in 'blocks\.0' for the row 'blocks\.0\.down'",
    ),
    "type": (lambda: _stack(Plain()), {**MLP, "blocks.*": "column"}, 2, r"as 'blocks\.0'.*got Plain; nn.Linear"),
    "own forward": (lambda: _stack(Odd(up=OwnForward(8, 16))), MLP, 2, "OwnForward, which has a forward of its own"),
    "computed weight": (lambda: _stack(Odd(up=_parametrized())), MLP, 2, "weight of its own"),
    "attention module": (
        lambda: _stack(Odd(up=nn.MultiheadAttention(8, 2))), MLP, 2,
        "MultiheadAttention, which keeps query, key and value",
    ),
    "max_norm": (
        lambda: Odd(embed=nn.Embedding(9, 8, max_norm=1.0)), {"embed": "vocab"}, 2, "an embedding without max_norm",
    ),
    "heads": (
        lambda: Stack([Shapes("separate", width=48, heads=6, kv_heads=3)], width=48), "auto", 2,
        r"heads in 'blocks\.0\.k'.*size 2, got 3 heads of width 8; choose a size that divides 3; write \"plan\"",
    ),
    "parts": (
        lambda: Stack([Nano()]),
        {"blocks.*.c_attn": {"style": "column", "parts": [32, 32, 8]}, "blocks.*.c_proj": "row"}, 2,
        r"add up to its 96 outputs, got \[32, 32, 8\]",
    ),
    "unknown model": (
        lambda: nn.Sequential(nn.Linear(3, 3)), "auto", 2,
        "brings a plan .base_model_tp_plan or _tp_plan.*got Sequential, which brings none; write the patterns",
    ),
    "parameter": (_with_parameter, MLP, 2, r"the parameter 'blocks\.0\.scale', of which it is unknown how it acts"),
    "sequences in parts": (
        lambda: _stack(Odd(mixer=nn.Conv1d(8, 8, 1))), MLP, 2, r"got 'blocks\.0\.mixer' \(Conv1d\), which is not",
    ),
    "a weight used elsewhere": (
        _shared, {"blocks.0.up": "column", "blocks.0.down": "row"}, 2,
        r"same style wherever a weight is used, got column for 'blocks\.0\.up' and none",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_said(case: str) -> None:
    make, plan, size, expected = REFUSED[case]
    model = make()
    before = {name: parameter.shape for name, parameter in model.named_parameters()}
    with pytest.raises(TensorPlanError, match=expected):
        cut(model, plan, size=size, sequence_parallel=case == "sequences in parts")
    assert before == {name: parameter.shape for name, parameter in model.named_parameters()}


def _of_library(folder: str, base: type[nn.Module], **settings: Any) -> nn.Module:
    """A module like one of transformers', whose arrangement of outputs is known by its class."""
    names = {"__module__": f"transformers.models.{folder}.modeling_{folder}"}
    return type(f"{folder}Attention", (base,), names)(**settings)


class Contiguous(nn.Module):
    """The outputs are [heads, query key value, head width]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.num_heads, self.head_dim = 4, 8


IN_1, IN_2, IN_3 = ({"style": "column", "parts": parts} for parts in (1, 2, 3))
CONTRADICTIONS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "gpt2": (
        lambda: _of_library("gpt2", Nano), {"*.c_attn": IN_1, "*.c_proj": "row"},
        r"parts \[32, 32, 32\] of '0\.c_attn', which gpt2Attention reads as query, key and value, got \[96\]",
    ),
    "gpt_neox": (
        lambda: _of_library("gpt_neox", Contiguous), {"*.query_key_value": IN_3, "*.dense": "row"},
        r"parts \[96\] of '0\.query_key_value', which gpt_neoxAttention reads as by heads.*got \[32, 32, 32\]",
    ),
    "phi3": (
        lambda: _of_library("phi3", Shapes, kind="fused"),
        {"*.gate_up": IN_1, "*.down": "row", "*.qkv": "column", "*.o": "row"},
        r"parts \[96, 96\] of '0\.gate_up', which phi3Attention reads as gate and up, got \[192\]",
    ),
    "a query": (
        lambda: Shapes("separate"), {"*.q": IN_2, "*.k": "column", "*.v": "column", "*.o": "row"},
        r"parts \[32\] of '0\.q', which Shapes reads as one layer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_parts_that_contradict_what_is_known(case: str) -> None:
    """Nothing else would show it: such a model trains, wrongly."""
    make, plan, expected = CONTRADICTIONS[case]
    with pytest.raises(TensorPlanError, match=expected):
        cut(nn.Sequential(make()), plan)


def test_key_and_value_beside_a_query() -> None:
    """Cross-attention of GPT-2: not query, key and value, though the name says so."""

    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_attn, self.c_attn, self.c_proj = nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(32, 32)
            self.num_heads, self.head_dim = 4, 8

    cross = _of_library("gpt2", Cross)
    cut(nn.Sequential(cross), {"*.?_attn": "column", "*.c_proj": "row"})
    found = shard_spec_of(cross.c_attn.weight)
    assert found is not None and found.ranges == ((0, 0, 16), (16, 32, 16))


def test_styles_beside_auto_count() -> None:
    """A refusal says what to write."""
    with pytest.raises(TensorPlanError, match=r'write "plan": \{"\*": "auto", "blocks\.\*": "whole"\}'):
        cut(_with_parameter())
    model = cut(_with_parameter(), {"*": "auto", "blocks.*.scale": "whole"})
    assert set(parts_of(model)) >= {"blocks.0.up.weight", "blocks.0.down.weight", "head.weight"}
    assert not is_partial(model.blocks[0].scale)
    assert set(parts_of(cut(_with_parameter(), {"*": "auto", "blocks.*": "whole"}))) == {"head.weight", "head.bias"}
    with pytest.raises(TensorPlanError, match=r"got 'blocks\.\*\.upp', which matches nothing"):
        cut(_with_parameter(), {"*": "auto", "blocks.*.upp": "whole"})
    with pytest.raises(TensorPlanError, match="Sequential, which brings none"):
        cut(nn.Sequential(Plain()), {"*": "auto", "0.up": "column", "0.down": "row"})


def test_key_and_value_with_fewer_heads_than_ranks_stay_whole() -> None:
    """Each rank computes the head that its queries read."""
    for rank in range(4):
        block: Any = cut(Stack([Shapes("fused")]), size=4, rank=rank).blocks[0]
        assert (block.heads, block.kv_heads) == (1, 1) and is_partial(block.qkv.weight)
        head = rank // 2 * 8
        assert block.qkv.runs == [(8 * rank, 8), (32 + head, 8), (48 + head, 8)]
        assert block.qkv.weight.shape == (64, 32) and shard_spec_of(block.o.weight) is not None


def test_biases_of_heads_are_cut_with_them() -> None:
    class Biased(Shapes):
        def __init__(self) -> None:
            super().__init__("separate")
            self.relative_attention_bias = nn.Embedding(5, self.heads)

    model = cut(Stack([Biased()]), rank=1)
    bias = model.blocks[0].relative_attention_bias
    assert bias.weight.shape == (5, 2) and shard_spec_of(bias.weight).ranges == ((0, 2, 2),)
    assert bias(torch.tensor([1])).shape == (1, 2)
    assert shard_spec_of(copy.deepcopy(model).blocks[0].relative_attention_bias.weight) == shard_spec_of(bias.weight)


def test_the_first_forward_says_that_layers_are_cut() -> None:
    class Knows(Shapes):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.q(x).view(*x.shape)

    model = cut(Stack([Knows("separate")]))
    remedy = r"first forward of 'blocks\.0' \(Knows\)(.|\n)*\"blocks\.\*\": \"whole\""
    for _ in range(2):
        with pytest.raises(RuntimeError, match=remedy):
            model(torch.ones(1, 4, dtype=torch.int64))


def test_a_module_with_whole_parameters_inside() -> None:
    class Inside(Odd):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.scale(self.up(x).unsqueeze(-1)).squeeze(-1))

    tokens = torch.tensor([[1, 2]])
    model = cut(_stack(Inside(scale=nn.Linear(1, 1))), MLP)
    with pytest.raises(RuntimeError, match=r"a row-parallel layer, got 'weight' of 'blocks\.0\.scale'"):
        model(tokens)
    with torch.no_grad():
        model(tokens)
    reduced = {**MLP, "blocks.*.scale": "replicated_with_grad_allreduce"}
    cut(_stack(Inside(scale=nn.Linear(1, 1))), reduced)(tokens)
    assert is_partial(cut(_with_parameter(), reduced).blocks[0].scale)
    assert not is_partial(cut(_with_parameter(), {**MLP, "blocks.*.scale": "whole"}).blocks[0].scale)


def test_attributes_that_are_named() -> None:
    class Named(Nano):
        def __init__(self) -> None:
            super().__init__()
            self.nh, self.size = self.n_head, self.n_embd
            del self.n_head

    plan = {"blocks.*.c_attn": "column", "blocks.*.c_proj": "row"}
    with pytest.raises(TensorPlanError, match=r"number of heads, or the width of one, in an attribute of 'blocks\.0'"):
        cut(Stack([Named()]), plan)
    model = cut(Stack([Named()]), plan, divide=["blocks.*.nh", "blocks.*.size"])
    assert (model.blocks[0].nh, model.blocks[0].size, model.blocks[0].n_embd) == (2, 16, 32)
    assert cut(Stack([Named()]), plan, divide=[]).blocks[0].nh == 4
    with pytest.raises(TensorPlanError, match=r"tensor_parallel\.divide.*'blocks\.\*\.n'.*nearest names are"):
        cut(Stack([Named()]), plan, divide=["blocks.*.n"])
    with pytest.raises(TensorPlanError, match=r"'nh' of 'blocks\.0' to be a multiple of tensor_parallel\.size 8"):
        cut(Stack([Named()]), plan, size=8, divide=["blocks.*.nh"])


@pytest.mark.slow
def test_a_weight_that_a_function_uses() -> None:
    from zerolite.pipe import PipelineModule, TiedLayerSpec

    specs = [
        TiedLayerSpec("embed", nn.Embedding, 9, 32),
        Nano(),
        TiedLayerSpec("embed", nn.Embedding, 9, 32, forward_fn=lambda embed, x: x @ embed.weight.t()),
    ]
    model = PipelineModule(specs)
    model.build(range(3))
    with pytest.raises(TensorPlanError, match=r"got 'layers\.0', which the forward_fn of a TiedLayerSpec uses"):
        cut(model, {"layers.0": "vocab", "layers.*.c_attn": "column", "layers.*.c_proj": "row"})


def _sines(x: torch.Tensor) -> torch.Tensor:
    """Detaches its input as well, in the forward and where it is recomputed."""
    assert x.shape[-1] == 4
    return x.sin() + 0 * x.detach()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_reentrant_checkpoint_inside_of_a_module_that_splits_its_input_is_refused(reentrant: bool) -> None:
    leaf = torch.linspace(0, 1, 8).view(1, 1, 8).requires_grad_()
    outside = checkpoint(lambda x: _sines(LocalShapeTensor.of(x, [1, 1, 4])), leaf * 1, use_reentrant=reentrant)
    outside.sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, leaf.detach().cos())
    inside = checkpoint(_sines, LocalShapeTensor.of(leaf * 1, [1, 1, 4]), use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match="with use_reentrant=False") if reentrant else contextlib.nullcontext():
        inside.sum().backward()
    assert torch.equal(leaf.grad, leaf.detach().cos() * (1 if reentrant else 2))
