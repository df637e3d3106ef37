"""Partitioned models in tests: settings of stage 3, their values, and what must be so of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.toolkit import models
from tests.toolkit.compare import assert_same
from tests.toolkit.configs import ADAMW, at
from zerolite import zero

Model = TypeVar("Model", bound=nn.Module)
ATTRIBUTES = ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor", "partition", "all_gather", "partition_numel")


def stage3(settings: str = "moving", precision: str = "fp32") -> dict[str, Any]:
    return at(f"3 {settings}", precision, optimizer=ADAMW)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's values, copied; of a model that is partitioned or not."""
    found = {}
    for name, parameter in model.named_parameters():
        with zero.GatheredParameters(parameter):
            found[name] = parameter.data.clone()
    return found


def assert_partitioned(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert models.has_no_values(parameter) and parameter.shape == parameter.ds_shape, name
        assert parameter.ds_status is zero.ZeroParamStatus.NOT_AVAILABLE, name


def build_in_init(make: Callable[[], Model], seed: int) -> tuple[Model, Model]:
    """A model that is built in `zero.Init` with another seed on each rank, and plain construction with rank 0's: their
    values are the same."""
    torch.manual_seed(seed)
    plain = make()
    seed_by_rank(seed)
    with zero.Init():
        model = make()
    assert_partitioned(model)
    assert_same(whole(model), whole(plain))
    return model, plain


def seed_by_rank(seed: int) -> None:
    torch.manual_seed(seed + 100 * dist.get_rank())
