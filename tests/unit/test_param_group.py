"""Parameter groups of stage 3: repeated blocks, small subtrees, modules that the user names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.null_communicator import NullCommunicator
from zerolite.zero.groups import RankGroups
from zerolite.zero.stage3 import group_plan
from zerolite.zero.stage3.group_plan import default_max_live, leaf_rule, plan_param_groups
from zerolite.zero.stage3.param_group import CommContext, ParamGroup
from zerolite.zero.stage3.partition_parameters import partition
from zerolite.zero.stage3.partitioned_parameter import sharded_param_of

INFINITE = 1 << 40
nothing = leaf_rule(())


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    """16 + 64 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4, bias=False)
        self.feed = Feed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.feed(self.mix(x))


class Experts(nn.Module):
    """16 + 3 × 64 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4, bias=False)
        self.experts = nn.ModuleList(Feed() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[0](self.mix(x))


class Stack(nn.Module):
    def __init__(self, blocks: int = 6, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(make() for _ in range(blocks))
        self.head = nn.Linear(4, 7, bias=False)


def partitioned(model: nn.Module) -> nn.Module:
    groups = RankGroups.over(NullCommunicator(0, 2))
    for name, parameter in model.named_parameters():
        if sharded_param_of(parameter) is None:
            partition(parameter, name, CommContext(groups, torch.device("cpu")))
    return model


def groups_of(model: nn.Module, max_live: int = INFINITE, leaves: list[str] | None = None) -> list[ParamGroup]:
    partitioned(model)
    groups = plan_param_groups(model, leaf_rule(leaves) if leaves else nothing, 0, max_live)
    # Every parameter has a group, and no module is in two.
    assert {id(p.ref()) for group in groups for p in group.parameters} == {id(p) for p in model.parameters()}
    modules = [id(module) for group in groups for module in (group.module, *group.inside)]
    assert len(modules) == len(set(modules))
    return groups


def names(groups: list[ParamGroup]) -> list[str]:
    return [group.name for group in groups if group.parameters]


BLOCKS = [f"blocks.{index}" for index in range(6)]


def test_a_repeated_block_is_one_group() -> None:
    model = Stack()  # which groups do not keep alive
    groups = groups_of(model)
    assert names(groups) == ["embed", *BLOCKS, "head"]
    assert [type(module) for module in groups[2].inside] == [nn.Linear, Feed, nn.Linear, nn.Linear]
    assert names(groups_of(nn.Sequential(*(Block() for _ in range(5))))) == ["0", "1", "2", "3", "4"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.embed(x), self.embed.weight)


def test_only_an_embedding_by_itself_needs_no_values_in_backward() -> None:
    assert [group.is_embedding for group in groups_of(Stack())] == [False, True, *[False] * 7]
    assert not any(group.is_embedding for group in groups_of(Tied(), leaves=["Tied"]))
    hooked = Stack()
    hooked.embed.register_forward_hook(lambda module, args, output: output * module.weight.sum())
    assert not any(group.is_embedding for group in groups_of(hooked))


def test_two_blocks_fit_into_the_limit_and_a_larger_one_is_divided() -> None:
    assert names(groups_of(Stack(), max_live=160))[1] == "blocks.0"
    assert names(groups_of(Stack(), max_live=159))[1:3] == ["blocks.0.mix", "blocks.0.feed"]
    assert names(groups_of(Stack(), max_live=127))[1:4] == ["blocks.0.mix", "blocks.0.feed.up", "blocks.0.feed.down"]


def test_the_default_limit_divides_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_max_live(partitioned(Stack()), nothing, 0) == 10**9
    monkeypatch.setattr(group_plan, "LEAST_MAX_LIVE", 150)
    for model, limit in ((Stack(), 200), (Stack(make=Experts), 520), (Stack(blocks=2), 150), (Block(), 150)):
        found = default_max_live(partitioned(model), nothing, 0)
        assert found == limit
        if found > 150:
            assert names(groups_of(model, found)) == ["embed", *BLOCKS, "head"]


def test_experts_stay_together_as_long_as_they_fit_once() -> None:
    assert names(groups_of(Stack(make=Experts), max_live=208)) == ["embed", *BLOCKS, "head"]
    divided = names(groups_of(Stack(make=Experts), max_live=207))
    assert divided[1:5] == ["blocks.0.mix", *(f"blocks.0.experts.{index}" for index in range(3))]


def test_what_is_asked_for_inside_a_block_is_a_group_of_its_own() -> None:
    groups = groups_of(Stack(), leaves=["Feed"])
    assert names(groups)[1:3] == ["blocks.0", "blocks.0.feed"]
    assert [type(module) for module in groups[2].inside] == [nn.Linear]


def test_tied_weights_belong_to_both_and_a_shared_module_to_the_first() -> None:
    model = Stack()
    model.blocks[3].mix = model.blocks[1].mix
    model.head.weight = model.embed.weight
    groups = {group.name: group for group in groups_of(model)}
    assert any(p.ref() is model.blocks[1].mix.weight for p in groups["blocks.3"].parameters)
    assert model.blocks[1].mix not in groups["blocks.3"].inside
    assert groups["embed"].parameters == groups["head"].parameters
