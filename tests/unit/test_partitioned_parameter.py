"""One partitioned parameter, without other ranks: its part, its attributes, its memory."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import nn

from tests.toolkit.models import has_no_values
from zerolite.comm import Communicator, NullCommunicator
from zerolite.zero.stage3.comm_context import CommContext, gather
from zerolite.zero.stage3.gathered_parameters import GatheredParameters
from zerolite.zero.stage3.partition_parameters import partition
from zerolite.zero.stage3.partitioned_parameter import (
    PartitionedParameter,
    ZeroParamStatus,
    handle_of,
    mark_available,
    unpartitioned_numel,
    unpartitioned_shape,
)

CPU = torch.device("cpu")


def cut(value: torch.Tensor, rank: int = 0, world: int = 1) -> tuple[nn.Parameter, PartitionedParameter]:
    parameter = nn.Parameter(value.clone(memory_format=torch.preserve_format))
    comm = Communicator() if world == 1 else NullCommunicator(rank, world)
    return parameter, partition(parameter, "layer.weight", CommContext(comm, CPU))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 3), (4, 3, 2, 2)])
@pytest.mark.parametrize("world", [1, 3])
def test_every_rank_has_an_equal_padded_part(shape: tuple[int, ...], world: int) -> None:
    value = torch.randn(shape)
    parts = []
    for rank in range(world):
        parameter, handle = cut(value, rank, world)
        assert has_no_values(parameter)
        assert (parameter.ds_shape, parameter.ds_numel) == (value.shape, value.numel())
        assert parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE
        part = value.numel() if world == 1 else math.ceil(value.numel() / world / 16) * 16
        assert parameter.partition_numel() == parameter.ds_tensor.numel() == part
        assert (unpartitioned_shape(parameter), unpartitioned_numel(parameter)) == (value.shape, value.numel())
        assert handle_of(parameter) is handle
        assert handle.full.untyped_storage().nbytes() == (0 if world > 1 else 4 * value.numel())
        parts.append(parameter.ds_tensor)
    joined = torch.cat(parts)
    assert torch.equal(joined[: value.numel()], value.reshape(-1))
    assert joined[value.numel() :].eq(0).all()


def test_gathering_brings_values_strides_and_status_and_partition_takes_them() -> None:
    value = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    parameter, handle = cut(value)
    parameter.all_gather()
    assert torch.equal(parameter.data, value) and parameter.stride() == value.stride()
    assert parameter.ds_status is ZeroParamStatus.AVAILABLE
    parameter.all_gather()  # harmless
    parameter.partition()
    parameter.partition()
    assert has_no_values(parameter) and parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE
    gather([handle, handle])
    assert torch.equal(parameter.data, value)


def test_what_users_take_from_a_gathered_parameter_keeps_its_memory() -> None:
    parameter, handle = cut(torch.randn(4), rank=0, world=2)
    with GatheredParameters(parameter):
        alias = parameter.data
        values = alias.clone()
    assert has_no_values(parameter) and torch.equal(alias, values)
    assert handle.full.untyped_storage().nbytes() == 0


def test_states_follow_each_other_in_one_order() -> None:
    parameter, handle = cut(torch.randn(4), rank=0, world=2)
    with pytest.raises(AssertionError, match=r"layer\.weight"):
        mark_available([handle])  # no gather is under way
    parameter.all_gather()
    with pytest.raises(AssertionError, match=r"layer\.weight"):
        handle.context.issue_all_gather([handle])  # it is whole
    assert handle.status is ZeroParamStatus.AVAILABLE


def test_gather_contexts_nest() -> None:
    parameter, handle = cut(torch.randn(4), rank=0, world=2)
    with GatheredParameters(parameter):
        with GatheredParameters(parameter):
            assert handle.holds == 2
        parameter.partition()  # does nothing: a context is open
        assert handle.holds == 1 and handle.status is ZeroParamStatus.AVAILABLE
    assert has_no_values(parameter) and handle.holds == 0


def test_nothing_keeps_a_parameter_alive() -> None:
    parameter, handle = cut(torch.randn(3))
    gone = weakref.ref(handle)
    gc.disable()  # no cycle: memory ends with the last reference
    try:
        with GatheredParameters(parameter):
            pass
        del parameter, handle
        assert gone() is None
    finally:
        gc.enable()
