"""Arguments of `initialize` beside the config: checks and normal form."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from zerolite.checkpoint.parameter_access import OWNERS
from zerolite.config import ConfigError, ZeroliteConfig
from zerolite.data.micro_batch import LossFunction
from zerolite.optim.adamw8bit import MAXIMA, AdamW8bit
from zerolite.optim.muon import MUON, check_matrices, uses_muon
from zerolite.optim.optimizers import check_elementwise, check_usable, needs_whole_parameters, resolve_optimizer
from zerolite.optim.schedulers import build_scheduler
from zerolite.utils.accelerator import host_value
from zerolite.zero.optimizer import SHARDED_OVER, Groups, ShardedOptimizer
from zerolite.zero.stage3.partitioned_parameter import unpartitioned_shape
from zerolite.zero.stages import StagePolicy

OptimizerLike = Optimizer | type[Optimizer] | Callable[[Any], Optimizer]


@dataclass(frozen=True)
class Arguments:
    """Arguments of :func:`initialize` beside model, config and dataset."""

    optimizer: OptimizerLike | None = None
    model_parameters: Iterable[Any] | None = None
    lr_scheduler: Any = None
    broadcast_buffers: bool = False
    collate_fn: Callable[[list[Any]], Any] | None = None
    loss_fn: LossFunction | None = None


def check_model(model: object) -> None:
    """Raise ValueError if ``model`` is no module, or is wrapped already."""
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"zerolite.initialize: expected model to be a torch.nn.Module, got {type(model).__name__}")
    check_not_wrapped(model)


def param_groups_of(
    model: torch.nn.Module, optimizer: OptimizerLike | None, model_parameters: Any, is_pipe_stage: bool = False
) -> Groups:
    """Return param groups over the model's own parameters.

    They are the given optimizer's groups, those of ``model_parameters``, or one group with all trainable parameters.

    Args:
        is_pipe_stage: the model is one stage of a pipeline, so parameters of other stages are left out, also of the
            optimizer's groups.
    """
    if optimizer is not None and not isinstance(optimizer, Optimizer) and not callable(optimizer):
        raise ValueError(
            "zerolite.initialize: expected optimizer to be one torch.optim.Optimizer, a class or a function that makes "
            f"one, got a {type(optimizer).__name__}. Give one optimizer with several param groups; or step several "
            'yourself beside the config\'s {"type": "SGD", "params": {"lr": 0.0}} (docs/optimizers.md)'
        )
    if isinstance(optimizer, Optimizer):
        if model_parameters is not None:
            raise ValueError(
                "zerolite.initialize: got an optimizer instance and model_parameters; the instance has its parameters "
                "already, so leave model_parameters out, or pass the optimizer's class"
            )
        groups = optimizer.param_groups
    else:
        trainable = (p for p in model.parameters() if p.requires_grad)
        source: list[Any] = list(trainable if model_parameters is None else model_parameters)
        if source and not isinstance(source[0], dict):
            source = [{"params": source}]
        groups = [{**group, "params": _plain_parameters(group["params"])} for group in source]
    known = {id(p) for p in model.parameters()}
    if is_pipe_stage:
        for group in groups:
            group["params"][:] = [p for p in group["params"] if id(p) in known]
    seen: set[int] = set()
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ValueError(
                    f"zerolite.initialize: param group {number} holds a tensor of shape {tuple(parameter.shape)} that "
                    "is no parameter of the model; build the optimizer from model.parameters() of the very model that "
                    "is passed"
                )
            if id(parameter) in seen:
                raise ValueError(
                    f"zerolite.initialize: a parameter of shape {tuple(parameter.shape)} is in two param groups"
                )
            seen.add(id(parameter))
    return groups


def freeze(model: torch.nn.Module, config: ZeroliteConfig, model_parameters: object, lr_scheduler: object) -> Groups:
    """Freeze all parameters, and return the one empty param group of an engine without an optimizer. Raises ConfigError
    if another argument asks for training."""
    block = 'the config\'s block "scheduler"'
    asked = {"model_parameters": model_parameters, "lr_scheduler": lr_scheduler, block: config.scheduler}
    for name, argument in asked.items():
        if argument is not None:
            sentence = (
                'expected a block such as {"type": "AdamW", "params": {"lr": 1e-3}}, or '
                f"zerolite.initialize(optimizer=…), beside {name}, got neither; without an optimizer an engine "
                "only evaluates its model, and takes neither parameters to train nor a schedule"
            )
            raise ConfigError([("optimizer", sentence)])
    model.requires_grad_(False)
    return [{"params": []}]


def _plain_parameters(params: Any) -> list[torch.nn.Parameter]:
    if isinstance(params, torch.Tensor):
        return [params]  # type: ignore[list-item]
    return [entry[1] if isinstance(entry, tuple) else entry for entry in params]


def check_not_wrapped(model: torch.nn.Module) -> None:
    """Raise ValueError for a model in which another wrapper averages gradients or partitions parameters."""
    for name, module in model.named_modules():
        wrapper = next((c.__name__ for c in type(module).__mro__ if c.__name__ in _WRAPPERS), None)
        if wrapper is not None and type(module).__module__.startswith("torch."):
            where = f"module '{name}' is" if name else "the model is"
            raise ValueError(
                f"zerolite.initialize: {where} wrapped in {wrapper}, which works on gradients and parameters too; pass "
                "the model inside, its .module"
            )


_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")


def check_parameters(parameters: list[torch.nn.Parameter], names: dict[int, str], meta_allowed: bool) -> None:
    """Raise ValueError for parameters that an engine cannot take. names: by id."""
    for parameter in parameters:
        name = names[id(parameter)]
        if parameter.is_meta and not meta_allowed:
            raise ValueError(
                f"zerolite.initialize: parameter '{name}' is on the meta device and has no values; materialise the "
                "model first, e.g. with model.to_empty(device='cpu') and its own initialisation"
            )
        if parameter.is_complex():
            raise ValueError(
                f"zerolite.initialize: parameter '{name}' is complex ({parameter.dtype}); use two real ones"
            )
        owner = OWNERS.get(parameter)
        if owner is not None and owner() is not None:
            raise ValueError(
                f"zerolite.initialize: parameter '{name}' belongs to another engine that is still alive; delete "
                "that one first (del engine), or call engine.destroy() if something else still refers to it"
            )
        if parameter.grad is not None:
            raise ValueError(
                f"zerolite.initialize: parameter '{name}' already has a gradient, which the engine would not see; call "
                "model.zero_grad() first"
            )


# -------------------------------------------------------------------- optimizer and scheduler


@dataclass(frozen=True)
class OptimizerChoice:
    """The optimizer that the user has chosen.

    Attributes:
        make: the user's instance, or a function from param groups to an optimizer.
        cls: class of the optimizer.
        untested: it updates parts of parameters although its class is unknown, because the config allows it.
        undivided: each parameter belongs as a whole to one rank.
    """

    make: Callable[[Groups], Optimizer] | Optimizer
    cls: type[Optimizer]
    untested: bool = False
    undivided: bool = False

    @property
    def existing(self) -> Optimizer | None:
        """The optimizer that exists already."""
        return self.make if isinstance(self.make, Optimizer) else None


def choose_optimizer(
    optimizer: OptimizerLike | None, config: ZeroliteConfig, policy: StagePolicy, groups: Groups, tp: bool = False
) -> OptimizerChoice:
    """Choose the optimizer, and decide if a rank updates parts of parameters or whole ones. Raises ConfigError or
    ValueError if it cannot work at this stage. ``tp``: ranks have shards of layers, or parts of the experts."""
    if optimizer is not None and config.optimizer is not None:
        sentence = "expected an optimizer in the config or in zerolite.initialize(optimizer=…), got both; leave one out"
        raise ConfigError([("optimizer", sentence)])
    if optimizer is None and config.optimizer is None:
        return OptimizerChoice(functools.partial(torch.optim.SGD, lr=0.0), torch.optim.SGD)  # nothing is trained
    make, cls = _maker(optimizer, config, groups)
    if cls in MUON and not tp:  # its updates bring whole matrices together by themselves
        made = make if isinstance(make, Optimizer) else functools.partial(_make_muon, make, groups)
        return OptimizerChoice(made, cls)
    instance = optimizer if isinstance(optimizer, Optimizer) else cls
    reason, asked = check_elementwise(instance), config.zero_optimization.whole_parameters
    undivided = reason is not None and (asked or needs_whole_parameters(cls))
    untested = reason is not None and not undivided and config.zero_allow_untested_optimizer
    if tp and (undivided or (reason is not None and not untested)):
        raise ValueError(
            "tensor_parallel or expert_parallel gives each rank a part of the parameters of a layer to update. "
            f"{reason} Use an optimizer that updates each element by itself, such as AdamW."
        )
    if not policy.shard_optimizer:
        return OptimizerChoice(make, cls, untested and tp)
    if undivided and config.zero_optimization.offload_optimizer.device == "nvme":
        raise ValueError(
            'zero_optimization.offload_optimizer.device: expected "cpu" or "none", got "nvme", where states are ranges '
            f"of flat tensors. {reason} Use another device, or an elementwise optimizer."
        )
    if reason is not None and not undivided and not untested:
        raise ValueError(
            f"zero_optimization.stage {policy.stage} gives each rank a part of every parameter to update. {reason}"
        )
    return OptimizerChoice(make, cls, untested, undivided)


def _make_muon(make: Callable[[Groups], Optimizer], groups: Groups, of_shards: Groups) -> Optimizer:
    """Return the optimizer of ``of_shards``, which are flat. Raise ValueError if those of ``groups`` are no matrices.

    The class wants matrices, and so it gets views of the shards with one row.
    """
    for group in filter(uses_muon, groups):
        check_matrices(group["params"], "zerolite.initialize")
    views = [[p.view(1, -1) if uses_muon(g) and p.dim() == 1 else p for p in g["params"]] for g in of_shards]
    return make([{**group, "params": params} for group, params in zip(of_shards, views, strict=True)])


def check_states(optimizer: Optimizer, model: torch.nn.Module, any_shape: bool) -> None:
    """Raise ValueError for states that are one rank's part, which each rank would take for the whole.

    Args:
        optimizer: the user's optimizer, which may have loaded states.
        model: has its parameters.
        any_shape: states of an optimizer that is not elementwise may have any shape.
    """
    remedy = (
        "which each rank loads itself, after zerolite.initialize; what engine.save_checkpoint writes, any ranks load"
    )
    for group in optimizer.param_groups:
        if SHARDED_OVER in group:
            raise ValueError(
                "zerolite.initialize: expected an optimizer with whole states, got one that has loaded one rank's part "
                f"of {group[SHARDED_OVER]}: the result of optimizer.state_dict() of an engine, {remedy}"
            )
    if any_shape and check_elementwise(optimizer) is not None:
        return
    for name, parameter in model.named_parameters():
        shape = tuple(unpartitioned_shape(parameter))
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(optimizer, AdamW8bit) and key in MAXIMA:
                continue
            if isinstance(value, torch.Tensor) and value.numel() > 1 and tuple(value.shape) != shape:
                raise ValueError(
                    f"zerolite.initialize: expected the state '{key}' of parameter '{name}' to have its shape "
                    f"{shape}, got {tuple(value.shape)}. Above stage 0 an engine's optimizer.state_dict() is one "
                    f"rank's part, {remedy}"
                )


def _maker(
    optimizer: OptimizerLike | None, config: ZeroliteConfig, groups: Groups
) -> tuple[Callable[[Groups], Optimizer] | Optimizer, type[Optimizer]]:
    """Return the user's instance or a function from param groups to an optimizer, and the optimizer's class."""
    if optimizer is None:
        assert config.optimizer is not None
        spec = resolve_optimizer(config.optimizer.type, config.optimizer.params)
        return spec.make, spec.cls
    if isinstance(optimizer, type):
        check_usable(optimizer)
        return optimizer, optimizer
    instance = optimizer if isinstance(optimizer, Optimizer) else optimizer(groups)
    if not isinstance(instance, Optimizer):
        raise ValueError(
            "zerolite.initialize: expected optimizer(parameters) to give a torch.optim.Optimizer, got "
            f"{type(instance).__name__}"
        )
    check_usable(instance)
    return instance, type(instance)


def scheduler_of(scheduler: Any, config: ZeroliteConfig, optimizer: ShardedOptimizer) -> Any:
    if scheduler is not None and config.scheduler is not None:
        sentence = (
            "expected a schedule in the config or in zerolite.initialize(lr_scheduler=…), got both; leave one out"
        )
        raise ConfigError([("scheduler", sentence)])
    if scheduler is not None:
        is_maker = isinstance(scheduler, type) or not hasattr(scheduler, "step")
        made = scheduler(optimizer) if is_maker else scheduler
        if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError(
                "zerolite.initialize: lr_scheduler is a ReduceLROnPlateau, whose step() needs a metric that the engine "
                "does not have; leave it out and call its step(metric) yourself"
            )
        bound_to = getattr(made, "optimizer", optimizer)
        if bound_to is not optimizer and bound_to is not optimizer.inner:
            raise ValueError(
                "zerolite.initialize: lr_scheduler is bound to another optimizer than the engine's, so it would change "
                "nothing; bind it to the optimizer that is passed, or pass a function such as lambda optimizer: "
                "StepLR(optimizer, 10)"
            )
        return made
    if config.scheduler is None:
        return None
    return build_scheduler(config.scheduler.type, config.scheduler.params, optimizer)


def loss_error(loss: object) -> ValueError:
    """Return the error for a loss that ``Engine.backward`` cannot take."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        return ValueError(
            f"engine.backward: expected a loss with one element, got {shape}; reduce it with .mean() or .sum()"
        )
    return ValueError(
        "engine.backward: the loss needs no gradient: it was computed under torch.no_grad() or from no trainable "
        "parameter"
    )


def checked_weight(weight: float | torch.Tensor, scale_wrt_gas: bool) -> float:
    """Return the weight of a loss as a float. Raises ValueError if it is not a finite number of at least 0."""
    if not scale_wrt_gas:
        raise ValueError(
            "engine.backward: a weight takes the place of the division by gradient_accumulation_steps; leave "
            "scale_wrt_gas out"
        )
    value: Any = host_value(weight) if isinstance(weight, torch.Tensor) and weight.numel() == 1 else weight
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise ValueError(
            f"engine.backward: expected weight to be the number of tokens or samples in this loss, 0 or more, got {got}"
        )
    return float(value)
