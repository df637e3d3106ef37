"""Comparison of config, model and inputs between ranks at the start; differences are named."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NoReturn

import torch

from zerolite.comm import Communicator, HostGroup, collective, largest
from zerolite.config import ZeroliteConfig
from zerolite.utils.text import name_ranks
from zerolite.version import __version__
from zerolite.zero.stage3.partitioned_parameter import unpartitioned_shape

LOCAL_KEYS = {
    "csv_monitor": "files of rank 0 alone",
    "tensorboard": "files of rank 0 alone",
    "wandb": "a run of rank 0 alone",
    "steps_per_print": "lines that rank 0 alone prints",
    "wall_clock_breakdown": "rank 0 alone measures and prints",
    "dump_state": "rank 0 alone prints",
}
"""Config keys and blocks that may differ between ranks, with the reason. (Seeds, devices and folders are no part of the
config, or those of rank 0.)"""

_DIFFERENT = "zerolite.initialize: the ranks hold different models, configs or optimizers"
_MAKE_ALIKE = "Make them the same way on every rank, without branches or random numbers that depend on it."
_SHOWN = 10  # differences in one message
_WIDTH = 100  # characters of a value


@dataclass
class Description:
    """Description of one rank's model and settings, in words.

    Attributes:
        items: facts by subject ("parameter 'head.weight'", "config key gradient_clipping") and aspect ("shape"). The
            aspect of a single fact is "".
        orders: names in an order that matters, by the list that they belong to ("param group 0"). Each name is also a
            subject of ``items``.
    """

    items: dict[str, dict[str, str]] = field(default_factory=dict)
    orders: dict[str, list[str]] = field(default_factory=dict)

    def number(self) -> int:
        """Return a 63-bit hash of everything. Equal descriptions have equal hashes."""
        text = json.dumps([self.items, self.orders], sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@collective
def check_equal_on_ranks(
    mine: Description,
    comm: Communicator,
    device: torch.device,
    what: str,
    remedy: str = "",
    tag: str = "initial_sync",
) -> None:
    """Raise RuntimeError on all ranks, with the differences by name, if ``mine`` is not the same on all of them.

    It costs one small all-reduce while the ranks are equal.

    Args:
        what: begin of the message: the call, and what is different.
        remedy: end of the message.
        tag: purpose of the all-reduce.
    """
    if comm.world_size == 1:
        return
    # One maximum of h and -h: all hashes are equal exactly if the largest is also the smallest.
    number = mine.number()
    highest, lowest = largest([number, -number], comm, device, tag)
    if highest != -lowest:
        raise_differences(mine, comm, what, remedy)


@collective
def raise_differences(
    mine: Description, comm: Communicator, what: str, remedy: str = "", part: Hashable = None
) -> NoReturn:
    """Raise RuntimeError with the differences between the ranks' descriptions: the same error on all ranks of ``comm``.

    ``what`` and ``remedy`` are as in :func:`check_equal_on_ranks`.

    Args:
        part: the part of the model on this rank; only ranks with the same part are compared.
    """
    of_parts: dict[Hashable, dict[int, Description]] = {}
    gathered = HostGroup(comm, "agreement").gather((part, mine))
    for rank, (part_there, description) in zip(comm.members(), gathered, strict=True):
        of_parts.setdefault(part_there, {})[rank] = description
    sentences = [sentence for ranks in of_parts.values() for sentence in differences(ranks)]
    shown = "".join(f"\n- {sentence}" for sentence in sentences[:_SHOWN]) or "\n- values that have no name"
    rest = len(sentences) - _SHOWN
    more = f"\n- and {rest} more difference{'s' if rest > 1 else ''}" if rest > 0 else ""
    expected = (
        f"all {comm.world_size} ranks" if len(of_parts) == 1 else "all ranks that have the same part of the model"
    )
    raise RuntimeError(f"{what}; expected the same on {expected}, got:{shown}{more}\n{remedy or _MAKE_ALIKE}")


def check_initialize(
    config: ZeroliteConfig,
    model: torch.nn.Module,
    optimizer: object,
    groups: Sequence[Mapping[str, object]],
    comm: Communicator,
    device: torch.device,
    **arguments: Any,
) -> None:
    """Compare the inputs of ``zerolite.initialize`` between all ranks, by :func:`check_equal_on_ranks`.

    The inputs are the resolved config, the model, the optimizer with its param groups, the other ``arguments``, the
    versions.
    """
    if comm.world_size > 1:
        described = [describe_process(), describe_arguments(**arguments), describe_config(config)]
        described += [describe_model(model), describe_optimizer(optimizer, groups, model)]
        check_equal_on_ranks(joined(*described), comm, device, _DIFFERENT)


@collective
def check_made_optimizer(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, comm: Communicator, device: torch.device
) -> None:
    """Compare the optimizer that a user's function has made between all ranks."""
    if comm.world_size > 1:
        check_equal_on_ranks(describe_optimizer(optimizer, optimizer.param_groups, model), comm, device, _DIFFERENT)


# ------------------------------------------------------------------ descriptions


def describe_process() -> Description:
    """Describe the versions."""
    facts = {
        "the version of zerolite": __version__,
        "the version of torch": str(torch.__version__),
        # Which reads of a parameter need no values is seen from 3.11 on.
        "the version of Python": ".".join(platform.python_version_tuple()[:2]),
    }
    return Description({subject: {"": text} for subject, text in facts.items()})


def describe_config(config: ZeroliteConfig) -> Description:
    """Describe every key that is set, by its dotted name, except :data:`LOCAL_KEYS`."""
    values = config.model_dump()
    return Description(
        {f"config key {key}": {"": text} for key, text in _flat({k: values[k] for k in values if k not in LOCAL_KEYS})}
    )


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", describe_value(value)


def describe_model(model: torch.nn.Module) -> Description:
    """Describe parameters and buffers in their order; partitioned parameters by their full shapes."""
    description = Description()
    for name, parameter in model.named_parameters():
        description.items[f"parameter '{name}'"] = describe_parameter(parameter)
    for name, buffer in model.named_buffers():
        description.items[f"buffer '{name}'"] = {"shape": str(tuple(buffer.shape)), "dtype": str(buffer.dtype)}
    description.orders["the model's parameters"] = [name for name, _ in model.named_parameters()]
    description.orders["the model's buffers"] = [name for name, _ in model.named_buffers()]
    return description


def describe_parameter(parameter: torch.nn.Parameter) -> dict[str, str]:
    """Describe the full shape, the dtype, and if the parameter requires a gradient."""
    return {
        "shape": str(tuple(unpartitioned_shape(parameter))),
        "dtype": str(parameter.dtype),
        "requires_grad": str(parameter.requires_grad),
    }


def describe_optimizer(optimizer: object, groups: Sequence[Mapping[str, Any]], model: torch.nn.Module) -> Description:
    """Describe an optimizer (an instance, a class, a function that makes one, or None) and its param groups.

    A group is described by its parameters and by its hyperparameters, as far as these are plain values.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    description = Description({"the optimizer": {"": "not given" if optimizer is None else kind_of(optimizer)}})
    for number, group in enumerate(groups):
        members = [names.get(id(p), "(of no name)") for p in group["params"]]
        description.orders[f"param group {number}"] = members
        values = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        settings = {str(key): describe_value(value) for key, value in values.items()}
        description.items[f"param group {number}"] = {"a size of": str(len(members)), **settings}
    # After all settings: one additional group moves many parameters, and the message shows the first differences only.
    for number in range(len(groups)):
        of_members = {
            f"the param group of '{name}'": str(number) for name in description.orders[f"param group {number}"]
        }
        description.items.update({subject: {"": text} for subject, text in of_members.items()})
    return description


def describe_arguments(**arguments: Any) -> Description:
    """Describe the arguments of a call: plain values as they are, all others by their kind."""
    return Description({f"the argument {name}": {"": describe_value(value)} for name, value in arguments.items()})


def joined(*descriptions: Description) -> Description:
    """Return one description with the contents of all, in this order."""
    joint = Description()
    for part in descriptions:
        joint.items.update(part.items)
        joint.orders.update(part.orders)
    return joint


def describe_value(value: object) -> str:
    """Return a value as text that is equal on two ranks if the value is. Objects are described by their class alone.

    ``repr`` of an object would contain its address, which differs between processes.
    """
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(describe_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {describe_value(element)}' for key, element in value.items())}}}"
    return kind_of(value)


def kind_of(value: object) -> str:
    """Return the qualified name of a class or function, or of the class of any other object."""
    if isinstance(value, functools.partial):
        return f"partial of {kind_of(value.func)} with {describe_value([*value.args, value.keywords])}"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


# ------------------------------------------------------------------ differences


def differences(ranks: Mapping[int, Description]) -> Iterator[str]:
    """Yield a sentence for each difference between the ranks' descriptions."""
    for subject in _everywhere(entry.items for entry in ranks.values()):
        of_ranks = {rank: entry.items.get(subject) for rank, entry in ranks.items()}
        known = {rank: aspects for rank, aspects in of_ranks.items() if aspects is not None}
        if len(known) < len(ranks) and not any("" in aspects for aspects in known.values()):
            yield f"{subject} exists on {name_ranks(known)} only"
            continue
        for aspect in _everywhere(known.values()):
            values = {rank: (aspects or {}).get(aspect) for rank, aspects in of_ranks.items()}
            if len(set(values.values())) > 1:
                yield f"{subject} {f'has {aspect}' if aspect else 'is'} {_describe_by_ranks(values)}"
    for subject in _everywhere(entry.orders for entry in ranks.values()):
        yield from _order(subject, {rank: entry.orders.get(subject, []) for rank, entry in ranks.items()})


def _everywhere(keys: Iterable[Iterable[str]]) -> list[str]:
    """Return the keys of all ranks, each once, in the order of their first occurrence."""
    return list(dict.fromkeys(key for rank in keys for key in rank))


def _describe_by_ranks(values: Mapping[int, str | None]) -> str:
    """Return values with their ranks, as in ``0.001 on ranks 0 and 2, but 0.01 on rank 1``."""
    groups: dict[str | None, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return ", but ".join(
        f"{'not set' if value is None else _short(value)} on {name_ranks(ranks)}" for value, ranks in groups.items()
    )


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"


def _order(subject: str, lists: Mapping[int, list[str]]) -> Iterator[str]:
    """Yield one sentence if the ranks have the same names in different orders; nothing if the names differ."""
    if len({frozenset(names) for names in lists.values()}) > 1:
        return
    for place, names in enumerate(zip_longest(*lists.values())):
        if len(set(names)) > 1:
            quoted = {rank: name and f"'{name}'" for rank, name in zip(lists, names, strict=True)}
            yield f"{subject} come in another order: number {place} is {_describe_by_ranks(quoted)}"
            return
