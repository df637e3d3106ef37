"""Trained parameters: their layout in buckets, their initial values, and those that are unfrozen later.

Parameters that become trainable later get new buckets behind the existing ones, so gradients, masters and states of the
other parameters stay in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zerolite.checkpoint.parameter_access import OWNERS
from zerolite.comm import Communicator
from zerolite.comm.flight_recorder import EVENTS
from zerolite.comm.initial_sync import broadcast_into, differing, synchronize_tensors
from zerolite.config import ConfigError, ZeroliteConfig
from zerolite.diagnostics.rank_comparison import Description, check_equal_on_ranks, describe_parameter
from zerolite.engine.options import bucket_numel
from zerolite.ops.call import QUANT_BLOCK
from zerolite.optim.muon import MUON, MuonWithAdamW, check_matrices, uses_muon
from zerolite.precision.dtypes import Precision
from zerolite.tensor_parallel.shard_spec import is_of_experts
from zerolite.utils.dtypes import FLOATS
from zerolite.zero.buffer import ParameterBuffer, PartitionedParameterBuffer
from zerolite.zero.engine_parts import EngineParts
from zerolite.zero.groups import RankGroups
from zerolite.zero.layout import SHARD_ALIGNMENT, BucketLayout, ParameterSpec, PartitionLayout
from zerolite.zero.reducer import Reducer
from zerolite.zero.stage3.group_plan import bucket_groups
from zerolite.zero.stage3.partitioned_model import PartitionedModel
from zerolite.zero.stage3.partitioned_parameter import sharded_param_of, unpartitioned_numel

_DIFFERENT = "zerolite: the ranks begin to train different parameters (unfrozen, or added in a param group)"

Parameters = Sequence[torch.nn.Parameter]


class LayoutRules:
    """Rules by which trained parameters are put into buckets, when the engine is made and when more are trained later.

    Attributes:
        bucket_numel: elements of a bucket; known from the first layout on.
    """

    def __init__(
        self,
        config: ZeroliteConfig,
        groups: RankGroups,
        precision: Precision,
        bucket_kind: Callable[[torch.nn.Parameter], str],
        partitioned: PartitionedModel | None,
    ) -> None:
        """
        Args:
            groups: the ranks that share a bucket.
            precision: dtypes of the parameters.
            bucket_kind: only parameters of one kind share a bucket.
            partitioned: the partitioned model at stage 3.
        """
        self._config, self._precision, self._bucket_kind = config, precision, bucket_kind
        self._rounds_values = groups.rounds_values
        self._shards = groups.shard.world_size
        self._ranks_of_row = groups.states.world_size // self._shards
        self._spread = 1 if groups.experts is None else groups.experts.spread
        # Elements that travel with a common scale are those of one parameter: a norm's would drown small weights.
        self._alignment = SHARD_ALIGNMENT if groups.compression is None else QUANT_BLOCK
        self._partitioned = partitioned
        self.bucket_numel = 0

    def layout(self, parameters: Parameters, names: dict[int, str]) -> PartitionLayout:
        """Make the layout of ``parameters``; at stage 3 with a bucket for each parameter group, where small neighbours
        share one.

        Args:
            names: by the parameter's id.

        Raises:
            ConfigError: the updated values of a parameter cannot be sent with 8 bits.
        """
        if self._rounds_values:
            self._check_packable(parameters, names)
        specs = [
            ParameterSpec(
                names[id(p)], unpartitioned_numel(p), self._bucket_kind(p), self._spread if is_of_experts(p) else 1
            )
            for p in parameters
        ]
        self.bucket_numel = self.bucket_numel or bucket_numel(specs, self._config, self._shards)
        if self._partitioned is None:
            return PartitionLayout.build(specs, self._shards, self.bucket_numel)
        # Persistent parameters join a bucket of others, whose shards have the same placement then. Offloaded ones
        # differ.
        together = not self._config.zero_optimization.offload_param.enabled
        # The limit does not grow with the number of ranks: before the reduction a bucket has full gradients on each
        # rank.
        limit = bucket_numel(specs, self._config, world_size=1)
        groups = bucket_groups(parameters, self._partitioned.groups, limit, together)
        return PartitionLayout.build_sliced(specs, groups, self._shards, self._ranks_of_row, self._alignment)

    def _check_packable(self, parameters: Parameters, names: dict[int, str]) -> None:
        dtypes = [self._precision.compute_dtype(p) for p in parameters]
        for parameter, dtype in zip(parameters, dtypes, strict=True):
            if dtype not in FLOATS:
                sentence = (
                    "expected trained parameters in fp32, bf16 or fp16, whose new values travel between sets of ranks "
                    f"with 8 bits, got {dtype} of parameter '{names[id(parameter)]}'; set the key to false, or train "
                    "in fp32 (model.float())"
                )
                raise ConfigError([("zero_optimization.zero_quantized_weights", sentence)])


def launch_by_groups(partitioned: PartitionedModel, reducer: Reducer) -> None:
    """Tell the coordinator which parameters are trained, and let each bucket be launched when the backwards of its
    groups have ended."""
    partitioned.coordinator.set_trained(reducer.parameters, reducer.bucket_of)


# -------------------------------------------------------------------- initial values


def fill_buckets(buffer: ParameterBuffer, precision: Precision, comm: Communicator, device: torch.device) -> None:
    """Fill new buckets, with whole parameters that have rank 0's values, or with shards."""
    if isinstance(buffer, PartitionedParameterBuffer):
        buffer.fill_from_shards(precision.compute_dtype, precision.master_dtype)
        return
    indices = [slot.index for bucket in buffer.unfilled for slot in bucket.slots]
    different = dict(zip(indices, differing([buffer.parameters[i] for i in indices], comm, device), strict=True))

    def synchronize(bucket: BucketLayout, flat: torch.Tensor) -> None:
        # Experts of the ranks differ, and have been synchronized before they were spread.
        if bucket.spread == 1 and any(different[slot.index] for slot in bucket.slots):
            broadcast_into(flat, comm, device, "initial_sync")

    buffer.fill(device, precision.compute_dtype, precision.master_dtype, synchronize)


def synchronize_untrained(
    model: torch.nn.Module,
    trained: list[torch.nn.Parameter],
    precision: Precision,
    comm: Communicator,
    device: torch.device,
) -> None:
    """Move buffers and frozen parameters to the device, with rank 0's values and the dtypes of ``precision``. Frozen
    parameters that stage 3 shards are left out."""
    in_layout = {id(p) for p in trained}
    others = [p for p in model.parameters() if id(p) not in in_layout and sharded_param_of(p) is None]
    rest: list[torch.Tensor] = [p.data for p in others if not is_of_experts(p)]
    for buffer in model.buffers():
        if buffer.dtype != precision.buffer_dtype(buffer):
            buffer.data = buffer.data.to(precision.buffer_dtype(buffer))
    _move_buffers(model, device)
    rest += list(model.buffers())
    synchronize_tensors(rest, comm, device, "initial_sync")
    for parameter in others:
        parameter.data = parameter.data.to(device, precision.compute_dtype(parameter))


def _move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Move buffers to ``device``, and all tensors that a user's module moves in its own ``_apply``. A shared buffer is
    moved once. Parameters stay where they are."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the id of the original, which is kept alive

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, torch.nn.Parameter) or tensor.device == device:
            return tensor
        if id(tensor) not in moved:
            moved[id(tensor)] = (tensor, tensor.to(device))
        return moved[id(tensor)][1]

    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = move(buffer)
        # torch's own overrides (nn.LSTM) would copy the parameters into new memory, out of their buckets.
        overrides = not type(module)._apply.__module__.startswith("torch.")
        if (
            overrides
            and device.type != "cpu"
            and all(sharded_param_of(p) is None and p.grad is None for p in module.parameters())
        ):
            module._apply(move)


# -------------------------------------------------------------------- parameters that are trained later


class UnfrozenParams:
    """Registers parameters that become trainable. Called on all ranks at the same point, for the same parameters.

    So the user must call ``requires_grad_`` and ``add_param_group`` on all ranks, like the engine's methods. The ranks
    compare which parameters they register.
    """

    def __init__(self, parts: EngineParts, rules: LayoutRules, adopts: bool) -> None:
        """
        Args:
            parts: the engine's parts, which must learn of such parameters.
            rules: layouts of trained parameters.
            adopts: an unfrozen parameter without a param group joins the only group. False if the user has chosen which
                parameters are trained.
        """
        self._parts, self._rules, self._adopts = parts, rules, adopts
        observers = parts.observers
        self.event = observers.before_backward if parts.partitioned is None else observers.before_forward
        self._frozen: list[torch.nn.Parameter] = []
        self._at_start = {id(parameter): weakref.ref(parameter) for parameter in parts.model.parameters()}
        if parts.trains:
            self._watch([p for p in parts.model.parameters() if not p.requires_grad])

    def _watch(self, parameters: Parameters) -> None:
        """Register these as soon as they require a gradient."""
        if parameters and not self._frozen and self.register_unfrozen_params not in self.event:
            self.event.append(self.register_unfrozen_params)
        self._frozen += parameters

    def register_unfrozen_params(self) -> None:
        """Train parameters that were frozen and require a gradient now. Called before a backward's first gradient, at
        stage 3 before the forward."""
        unfrozen = [p for p in self._frozen if p.requires_grad]
        if not unfrozen:
            return
        groups = self._parts.optimizer.inner.param_groups
        grouped = {id(p) for group in groups for p in group["params"]}
        homeless = [p for p in unfrozen if id(p) not in grouped]
        if homeless and not (self._adopts and len(groups) == 1):
            name = self._names()[id(homeless[0])]
            raise RuntimeError(
                f"parameter '{name}' was frozen when zerolite.initialize was called, requires a gradient now, and is "
                "in no param group of the optimizer, so nothing would train it. Say how it is to be trained, before "
                "its forward: engine.optimizer.add_param_group({'params': [...], 'lr': ...})"
            )
        if type(self._parts.optimizer.inner) in MUON and uses_muon(groups[0]):
            check_matrices(homeless, "zerolite: parameters that require a gradient now")
        groups[0]["params"].extend(homeless)
        self._train(unfrozen)

    def add_group(self, group: Mapping[str, object]) -> None:
        """Run ``engine.optimizer.add_param_group``. Frozen parameters of the group are trained once they are
        unfrozen."""
        added: Any = group["params"]
        parameters: list[Any] = [added] if isinstance(added, torch.Tensor) else list(added)
        names = self._names()
        trained = {id(p) for p in self._parts.reducer.parameters}
        for p in parameters:
            name, known = names.get(id(p)), self._at_start.get(id(p))
            problem = None
            if name is None:
                problem = f"a tensor of shape {tuple(p.shape)} that is no parameter of the engine's module"
            elif id(p) in trained:
                problem = f"parameter '{name}', which is trained already"
            elif p.grad is not None:
                problem = f"parameter '{name}' with a gradient, which would be lost; call zero_grad first"
            elif known is None or known() is not p:
                problem = f"parameter '{name}', which is new; add modules before zerolite.initialize"
            if problem is not None:
                raise ValueError(f"engine.optimizer.add_param_group: expected parameters to train, got {problem}")
        inner = self._parts.optimizer.inner
        if type(inner) in MUON and not isinstance(inner, MuonWithAdamW):  # which chooses itself
            check_matrices(parameters, "engine.optimizer.add_param_group")
        type(inner).add_param_group(inner, {**group, "params": parameters})
        frozen = {id(p) for p in self._frozen}
        self._watch([p for p in parameters if id(p) not in frozen])
        self.register_unfrozen_params()

    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self._parts.model.named_parameters()}

    @torch.no_grad()
    def _train(self, parameters: Parameters) -> None:
        names = self._names()
        more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        step = self._parts.pipeline.state.global_steps + 1
        EVENTS.append(f"began to train parameter '{names[id(parameters[0])]}'{more} in step {step}")
        described = {f"parameter '{names[id(p)]}'": describe_parameter(p) for p in parameters}
        order = {"the parameters": [names[id(p)] for p in parameters]}
        parts, comm = self._parts, self._parts.topology.data
        check_equal_on_ranks(Description(described, orders=order), comm, parts.device, _DIFFERENT, tag="unfrozen")
        parts.pipeline.state.settle()
        parts.param_gatherer.wait_all()
        if parts.partitioned is not None:
            parts.partitioned.coordinator.collect_frozen_writes()
        everything = [*parts.reducer.parameters, *parameters]
        added = self._rules.layout(parameters, names)
        layout = parts.buffer.layout.extended(added)
        first = len(parts.buffer.buckets)
        parts.buffer.set_layout(layout, everything)
        fill_buckets(parts.buffer, parts.precision, comm, parts.device)
        parts.reducer.use_layout()
        parts.reducer.hooks.attach_new()
        parts.optimizer.add_buckets(parts.buffer.buckets[first:])
        parts.pipeline.use_layout()
        parts.param_gatherer.use_layout()
        for parameter in parameters:
            OWNERS[parameter] = OWNERS[parts.owned[0]]
        if parts.partitioned is not None:
            launch_by_groups(parts.partitioned, parts.reducer)
        unfrozen = {id(p) for p in parameters}
        self._frozen = [p for p in self._frozen if id(p) not in unfrozen]
