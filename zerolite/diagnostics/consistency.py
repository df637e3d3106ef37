"""Comparison between ranks during training: scalars that updates use, replicated weights, and inputs of shared layers.

The scalars are compared as a hash in the step's statistics. The weights are hashed on the device every few steps. Only
when a hash differs do the ranks gather their values, to name the difference.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from zerolite.comm import Communicator, HostMaximum, Topology, collective
from zerolite.comm.flight_recorder import BRANCH_ADVICE
from zerolite.comm.initial_sync import combined_hash, content_hash
from zerolite.diagnostics.rank_comparison import Description, describe_value, raise_differences
from zerolite.tensor_parallel.shard_spec import is_of_experts
from zerolite.utils.accelerator import HostRead
from zerolite.utils.memory_tags import DISK
from zerolite.utils.text import list_of, name_ranks
from zerolite.zero.buffer import ParameterBuffer, PartitionedParameterBuffer
from zerolite.zero.engine_parts import EngineParts
from zerolite.zero.grads import Change
from zerolite.zero.inner_tensors import take_in_replaced
from zerolite.zero.observers import StepObserver, UpdateFacts
from zerolite.zero.stage3.fetch_schedule import FetchSchedule
from zerolite.zero.stage3.partitioned_parameter import sharded_param_of
from zerolite.zero.stats import SAME_BATCH

logger = logging.getLogger("zerolite")

_ONLY_KERNELS = ("bias_correction", "fp32_optimizer_states")  # keys of param groups that torch's defaults lack
_HASH = 1 << 52  # hashes are smaller, so that two of them add without rounding in float64
_EXACT = 1 << 24  # integers below this are exact in fp32
_PARTS = ("replicate", "expert data")  # holders of weights of which other data-parallel ranks hold other parts
_OFF = 'set "consistency_check_interval" to 0 to compare nothing'
_ALIKE = (
    "Change them alike on all ranks: give a schedule to zerolite.initialize, ReduceLROnPlateau a loss that all ranks "
    "share (engine.reduce(loss)), and clip_grad_norm_ one max_norm. Call engine.backward and engine.step alike: a rank "
    "without a batch repeats its last one with weight=0 (docs/uneven-data.md). Run the "
    f"same modules on all ranks, or {BRANCH_ADVICE}. If ranks may differ, {_OFF}."
)
_WEIGHTS = "zerolite: the ranks hold different weights, by the hashes of their bytes"
_WRITTEN = (
    "Some rank has written into them, or has computed another update (another processor, library or optimizer state). "
    f"Go back to the last checkpoint and write values on all ranks. If ranks may differ, {_OFF}."
)


@dataclass(frozen=True)
class UpdateNumbers:
    """Scalars that one update uses beside gradients and states.

    Attributes:
        step: updates before this one.
        backwards: backwards so far.
        groups: of each param group, the values that the optimizer reads, by key.
        divisor: of the summed gradient (the loss scale, adjusted for a partial accumulation).
        max_norm: for clipping, 0 for none.
        gathers: hash of everything that stage 3 has gathered so far. NCCL does not notice if one rank runs other
            modules and so exchanges other parameters.
        changes: what the user has done in place to gradients that no earlier hash contains: each operation, its
            numbers, and how many gradients it has changed. With another ``max_norm`` in ``clip_grad_norm_`` a rank
            would scale its own shards differently, and all ranks would gather and agree on the result.
    """

    step: int
    backwards: int
    groups: tuple[dict[str, Any], ...]
    divisor: float
    max_norm: float
    gathers: int = 0
    changes: tuple[Change, ...] = ()

    def fingerprint(self) -> tuple[int, list[torch.Tensor]]:
        """Return a hash below 2^52 of the values on the host, and the tensors on a device that belong to it.

        Floats are hashed as fp32, which the kernels use: a schedule may differ in the last bit of a double between two
        C libraries.
        """
        numbers, texts = array("f", (self.divisor, self.max_norm)), [f"{self.step},{self.backwards},{self.gathers}"]
        tensors: list[torch.Tensor] = []
        factors: list[torch.Tensor] = []
        for change in self.changes:
            _note((change.operation, change.numbers, change.count), numbers, texts, factors)
        if factors:
            tensors.append(torch.stack(factors))  # one tensor, because each is hashed in several launches
        for group in self.groups:
            texts.append("|")
            for value in group.values():
                _note(value, numbers, texts, tensors)
        digest = hashlib.blake2b(",".join(texts).encode() + numbers.tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % _HASH, tensors

    def describe(self) -> Description:
        """Return the same numbers as a description."""
        description = Description({"the step": {"number": str(self.step + 1)}})
        description.items["the training so far"] = {"a count of backwards of": str(self.backwards)}
        changes = [_describe_change(change) for change in self.changes]
        description.items["what was done to p.grad"] = {"": "; ".join(changes) or "nothing"}
        description.items["what stage 3 has gathered"] = {"a hash": f"{self.gathers & (1 << 64) - 1:016x}"}
        description.items["the update"] = {
            "a gradient divisor of": repr(self.divisor),
            "a max_norm of": repr(self.max_norm),
        }
        for number, group in enumerate(self.groups):
            description.items[f"param group {number}"] = {key: describe_value(value) for key, value in group.items()}
        return description


def read_numbers(optimizer: torch.optim.Optimizer, schedule: FetchSchedule | None, facts: UpdateFacts) -> UpdateNumbers:
    """Return the numbers of an update with these facts, as they are now.

    Args:
        optimizer: its defaults say which values of its param groups it reads.
        schedule: counts everything that stage 3 gathers; None at other stages, and if ranks may differ in it.
    """
    step, backwards, divisor, max_norm, changes = facts
    gathers = 0 if schedule is None else schedule.gathers
    keys = (*optimizer.defaults, *_ONLY_KERNELS)
    groups = tuple({key: _copied(group[key]) for key in keys if key in group} for group in optimizer.param_groups)
    return UpdateNumbers(step, backwards, groups, divisor, max_norm, gathers, changes)


def _copied(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return tuple(value) if type(value) is list else value


def _note(value: Any, numbers: array[float], texts: list[str], on_device: list[torch.Tensor]) -> None:
    value_class = type(value)
    if value_class is float or ((value_class is int or value_class is bool) and abs(value) < _EXACT):
        # "n" marks the place of a number, so that (1.0, None) and (None, 1.0) have different hashes.
        numbers.append(value if value == value else math.nan)  # no other bits of a NaN
        texts.append("n")
    elif value_class is tuple:
        for element in value:
            _note(element, numbers, texts, on_device)
    elif not isinstance(value, torch.Tensor):
        texts.append(describe_value(value))
    elif type(value) is torch.Tensor and value.device.type == "cpu":
        for element in value.reshape(-1).tolist():
            _note(element, numbers, texts, on_device)
    else:
        on_device.append(value)


def _describe_change(change: Change) -> str:
    numbers = f"({', '.join(map(describe_value, change.numbers))})" if change.numbers else ""
    return f"{change.operation}{numbers} ({change.count} gradients)" if change.count else change.operation


@dataclass(frozen=True)
class SharedWeight:
    """A tensor that several data-parallel ranks hold.

    Attributes:
        tensor: the flat tensor.
        parts: views of it by parameter name.
        holders: "data": all data-parallel ranks hold it; "replicate": those with the same shard; "expert data": those
            with the same experts.
    """

    tensor: torch.Tensor
    parts: dict[str, torch.Tensor]
    holders: str = "data"


def shared_weights(model: torch.nn.Module, buffer: ParameterBuffer, warns: bool = False) -> Iterator[SharedWeight]:
    """Yield the weights that several data-parallel ranks hold between two steps.

    These are full buckets, frozen parameters, at stage 3 the parameters that stay whole, and with replicas this rank's
    shards, unless they are on disk: masters, or parameters if all ranks split the masters. The model's buffers are not
    compared: they may differ between ranks after a forward, as with DDP.

    Args:
        model: the model.
        buffer: buffer of its trained parameters.
        warns: warn of parameters that require a gradient and are not trained.
    """
    if not isinstance(buffer, PartitionedParameterBuffer):
        for bucket in buffer.buckets:
            values = {slot.name: bucket.compute[slot.start : slot.end] for slot in bucket.layout.slots}
            yield SharedWeight(bucket.compute, values, "data" if bucket.layout.spread == 1 else "expert data")
    groups = buffer.gradient_memory.groups
    for bucket in buffer.buckets if groups.replicate is not None else ():
        shared, placement = bucket.compute, bucket.compute_placement
        if groups.states is groups.shard:  # otherwise each replica has its own masters
            shared, placement = bucket.master, bucket.master_placement
        if placement.location != DISK:
            names = dict.fromkeys((slot.name for slot in bucket.layout.slots), shared)
            yield SharedWeight(shared, names, "replicate")
    trained, untrained = {id(parameter) for parameter in buffer.parameters}, list[str]()
    take_in_replaced(model)
    for name, parameter in model.named_parameters():
        if warns and parameter.requires_grad and id(parameter) not in trained:
            untrained.append(name)
        handle = sharded_param_of(parameter)
        if handle.persistent if handle is not None else id(parameter) not in trained:
            holders = "expert data" if is_of_experts(parameter) else "data"
            yield SharedWeight(parameter.data, {name: parameter.data}, holders)
    if untrained:
        _warn_untrained(untrained[0], f" and {len(untrained) - 1} more" if len(untrained) > 1 else "")


@functools.cache
def _warn_untrained(name: str, more: str) -> None:
    """Warn once of a parameter that was added to the model later, or left out of the optimizer."""
    logger.warning(
        "parameter '%s'%s requires a gradient and is in no param group of the engine's optimizer, so nothing averages "
        "its gradient over the ranks or updates it; call engine.optimizer.add_param_group({'params': [...]}), which "
        "takes what the model had before zerolite.initialize, or requires_grad_(False)",
        name,
        more,
    )


class ConsistencyCheck(StepObserver):
    """Compares scalars in every step and weights every ``interval`` steps."""

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        read: Callable[[UpdateFacts], UpdateNumbers],
        weights: Callable[[], Iterator[SharedWeight]],
        interval: int,
        late: bool,
    ) -> None:
        """
        Args:
            read: reads the numbers to compare, see :func:`read_numbers`.
            weights: gives the weights to compare, see :func:`shared_weights`.
            interval: updates from one comparison of weights to the next.
            late: read the outcome of a comparison in the next step, so that the host does not wait for the device.
        """
        self._topology = topology
        self._device = device
        self._read = read
        self.slice_size = topology.world.world_size
        self._weights = weights
        self._interval = interval
        self._late = late
        self._updates = 0
        self._numbers: UpdateNumbers | None = None  # of the latest update
        self._written = True  # they have been written into some statistics
        self._differing: UpdateNumbers | None = None  # numbers that the statistics have shown to differ
        self._compared: _Comparison | None = None  # a comparison whose outcome has not been read

    # ---------------------------------------------------------------- numbers

    def write_slice(self, numbers: torch.Tensor) -> UpdateNumbers | None:
        """Write this rank's hash, so that each rank then has all hashes. The host does not wait for the device."""
        if self._numbers is None:
            return None
        self._written = True
        number, tensors = self._numbers.fingerprint()
        own_number = numbers[self._topology.world.rank]
        own_number.fill_(number)
        if tensors:  # such as a learning rate in a CUDA tensor (capturable optimizers)
            own_number += (
                combined_hash([content_hash(t, self._device) for t in tensors], self._device) % _HASH
            ).double()
        return self._numbers

    def read_slice(self, written: UpdateNumbers | None, sums: torch.Tensor) -> None:
        """Remember if the ranks' hashes differ. To name the difference takes a collective: see :meth:`raise_errors`."""
        if written is None:
            return
        of_stage = sums.view(self._topology.pipe.world_size, -1)  # a stage may have param groups of its own
        if bool((of_stage != of_stage[:, :1]).any()):
            self._differing = written

    def on_weights_written(self, all_of_them: bool) -> None:
        """Forget differences if all ranks have loaded the same values."""
        if all_of_them:
            self._numbers = self._differing = self._compared = None

    def raise_errors(self) -> None:
        """Raise RuntimeError on all ranks if the numbers in the last statistics differ within a pipeline stage."""
        differing, self._differing = self._differing, None
        if differing is not None:
            what = "zerolite: the ranks update with different numbers, or have gathered different parameters"
            raise_differences(differing.describe(), self._topology.world, what, _ALIKE, self._topology.coordinates[0])

    # ---------------------------------------------------------------- weights

    def before_update(self, facts: UpdateFacts) -> None:
        """Compare the weights before an update: they are those of the step before. Raises RuntimeError on all ranks if
        they differ."""
        self._finish()
        self._note(facts)
        # This counts calls, which all ranks make alike. The engine's step counter is loaded from checkpoints.
        self._updates += 1
        if self._updates % self._interval == 0:
            self._compared = _Comparison(self._weights(), self._topology, self._device)
            if not self._late:
                self._finish()

    def _note(self, facts: UpdateFacts) -> None:
        """Compare the numbers of this update in the next :meth:`write_slice`."""
        numbers = self._read(facts)
        if not self._written and self._numbers is not None:
            # Clipping had collected the statistics of the earlier update before it changed the gradients.
            numbers = replace(numbers, changes=self._numbers.changes + numbers.changes)
        self._numbers, self._written = numbers, False

    def before_save(self, facts: UpdateFacts) -> None:
        """Compare the weights now. Raises RuntimeError on all ranks if they differ."""
        self._finish()
        self._note(facts)
        self._compared = _Comparison(self._weights(), self._topology, self._device)
        self._finish()

    def _finish(self) -> None:
        compared, self._compared = self._compared, None
        if compared is not None and compared.differs():
            pipe, _, tensor = self._topology.coordinates
            # Ranks that hold other shards, or other experts, are not compared where these differ.
            shard = self._topology.shard.rank if compared.differ("replicate") else 0
            experts = self._topology.expert.rank if compared.differ("expert data") else 0
            part = (pipe, shard, experts, tensor)
            raise_differences(compared.describe(), self._topology.world, _WEIGHTS, _WRITTEN, part)


class _Comparison:
    """Hashes of the weights on the device, and one all-reduce of two numbers; with replicas one more among them, and
    with experts one more among the ranks that have the same."""

    def __init__(self, weights: Iterator[SharedWeight], topology: Topology, device: torch.device) -> None:
        self._weights = list(weights)
        self._hashes = [content_hash(weight.tensor, device) for weight in self._weights]
        of_all = self._hash_of("data", device)
        extremes = torch.stack([of_all, ~of_all, *torch.zeros_like(of_all).expand(len(_PARTS))])
        for place, holders in enumerate(_PARTS, 2):
            comm = topology.replicate if holders == "replicate" else topology.expert_data
            if comm is not None and comm.world_size > 1:
                of_part = self._hash_of(holders, device)
                extremes[place] = _differ(comm, torch.stack([of_part, ~of_part]))
        different = torch.stack([_differ(topology.data, extremes), *extremes[2:]])
        if not topology.trivial:  # the ranks with other parts of the model must raise too
            topology.model.all_reduce_max(different, tag="consistency")
        self._different = HostRead(different)

    def _hash_of(self, holders: str, device: torch.device) -> torch.Tensor:
        pairs = zip(self._hashes, self._weights, strict=True)
        return combined_hash([hashed for hashed, weight in pairs if weight.holders == holders], device)

    def differs(self) -> bool:
        return bool(self._different.get().any())

    def differ(self, holders: str) -> bool:
        """Return True if ranks hold different values of one shard ("replicate"), or of their experts
        ("expert data")."""
        return bool(self._different.get()[1 + _PARTS.index(holders)])

    def describe(self) -> Description:
        """Describe the weights as they are now, and as they were when they were compared.

        A step later they may be equal again, because the all-gather has overwritten the copies with the owner's values.
        """
        description = Description()
        pairs = zip(self._weights, self._hashes, strict=True)
        shown = [(w, hashed) for w, hashed in pairs if w.holders == "data" or self.differ(w.holders)]
        for weight, _ in shown:
            for name, part in weight.parts.items() if weight.holders != "replicate" else ():
                description.items[f"parameter '{name}'"] = {"": _text(content_hash(part))}
        for weight, compared in shown:
            names = list_of([f"'{name}'" for name in islice(weight.parts, 3)])
            others = " and others" if len(weight.parts) > 3 else ""
            what = "this rank's part" if weight.holders == "replicate" else "the content"
            description.items[f"{what} of {names}{others}, when compared,"] = {"": _text(compared)}
        return description


def _differ(comm: Communicator, extremes: torch.Tensor) -> torch.Tensor:
    """Return 1 if the ranks' first numbers differ, else 0: int64 []. The second ones are their complements.

    ``extremes`` becomes the maxima over ``comm``. ~ reverses the order of integers, so ~max(~h) is the minimum, without
    overflow at the ends.
    """
    comm.all_reduce_max(extremes, tag="consistency")
    return (extremes[0] != ~extremes[1]).long()


def _text(hashed: torch.Tensor) -> str:
    return f"{int(HostRead(hashed).get().item()) & (1 << 64) - 1:016x}"


class SameInputs:
    """Compares the shapes of inputs before a forward, and their values with the step's statistics.

    Args:
        note: takes the inputs whose values are compared with the step's statistics; None if none are.
        comm: ranks that share layers.
        maximum: the largest numbers of these ranks, on the host; None if shapes are not compared.
    """

    def __init__(
        self, note: Callable[[list[torch.Tensor]], None] | None, comm: Communicator, maximum: HostMaximum | None
    ) -> None:
        self._note, self._comm, self._maximum = note, comm, maximum

    @classmethod
    def of(cls, parts: EngineParts) -> SameInputs | None:
        """Return the comparison for an engine; None where no ranks share layers."""
        tensor = parts.topology.tensor
        if tensor.world_size == 1:
            return None
        compares_shapes = tensor.group is not None and parts.device.type == "cpu"
        return cls(parts.note_inputs, tensor, HostMaximum(tensor) if compares_shapes else None)

    @collective
    def compare(self, tensors: list[torch.Tensor]) -> None:
        """Compare the inputs before a forward.

        Raises RuntimeError on all of them if shapes differ: the collectives of the layers would exchange tensors of
        different sizes. Values are compared later, with the step's statistics, which costs no collective of its own.
        """
        if self._maximum is not None:
            shapes = zlib.crc32(repr([(tuple(t.shape), t.dtype) for t in tensors]).encode())
            highest, lowest = self._maximum.of([shapes, -shapes])
            if highest != -lowest:
                raise RuntimeError(
                    f"engine(...): expected inputs of the same shapes on {name_ranks(self._comm.members())}, "
                    f"which share layers, got different shapes, here {[tuple(t.shape) for t in tensors]}; {SAME_BATCH}"
                )
        if self._note is not None:
            self._note(tensors)
