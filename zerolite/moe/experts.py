"""Modules with the experts of a mixture: found by their structure, and spread over the ranks of a group.

A module of experts has all weights of a layer's experts, one behind the other along the first dimension, and is called
with hidden states [n, width], the experts of each token [n, k] and their weights [n, k]. Those of transformers are (but
for Llama-4's, see :class:`CallOfEveryRow`), and :class:`~zerolite.moe.expert_parallel.ExpertParallel` makes one of a
list of modules. Routers, shared experts and losses are the model's own, and stay on every rank.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from zerolite.comm import Topology, collective
from zerolite.comm.initial_sync import synchronize_tensors
from zerolite.config import ConfigError
from zerolite.moe.copies import histogram
from zerolite.moe.dispatch import in_parts, over_ranks, with_capacity
from zerolite.moe.loads import equal_loads, read_numbers
from zerolite.tensor_parallel.shard_spec import ShardSpec, is_partial, set_shard_spec, shard_parameter, shard_spec_of
from zerolite.utils.torch_private import untraced
from zerolite.zero.stage3.partitioned_parameter import sharded_param_of, unpartitioned_shape

_KEY = "expert_parallel.size"
_OF_EVERY_ROW = ("Llama4TextExperts",)  # classes known by name: the arguments of their forward do not tell
_signature = functools.cache(inspect.signature)  # of the forwards of modules of experts


@collective
def spread_experts(
    model: nn.Module, names: Iterable[str], topology: Topology, device: torch.device, capacity: int
) -> None:
    """Leave each rank of ``topology.expert`` its part of the experts, with rank 0's values, and let their modules
    exchange tokens.

    Args:
        names: of the modules that :func:`find_experts` returns.
        capacity: most tokens of a rank that an expert takes in a forward; 0 for all.

    Ranks of a tensor group are called with the same tokens, and each of them sends a part of these. Where sequence
    parallelism has divided the tokens before, each sends its own.
    """
    comm = topology.expert
    for ranks in (comm, topology.expert_data, topology.expert_shard):
        # NCCL connects ranks in their first collective, where the host waits for all of them. In a backward some would
        # wait there for the tokens of others.
        ranks.all_reduce_max(torch.zeros(1, dtype=torch.int64, device=device), "initial_sync")
    for name in names:
        module, top_k = model.get_submodule(name), _top_k(model, name)
        for parameter in module.parameters(recurse=False):
            if (sharded_param := sharded_param_of(parameter)) is not None:
                sharded_param.unpartition()
            synchronize_tensors([parameter.data], topology.data, device, "initial_sync")
            shard_parameter(parameter, ShardSpec.of_experts(parameter.shape, comm.rank, comm.world_size))
        vars(module)["num_experts"] = _number(module) // comm.world_size
        has_own_tokens = any(map(is_partial, module.parameters(recurse=False)))
        if top_k:
            vars(module)["forward"] = CallOfEveryRow(module, topology, capacity, not has_own_tokens, top_k)
        else:
            vars(module)["forward"] = SpreadCall(module, topology, capacity, not has_own_tokens)


def spread_calls(model: nn.Module) -> dict[str, SpreadCall]:
    """Return the calls of the experts that this rank has a part of, by the name of their module."""
    calls = {name: vars(module).get("forward") for name, module in model.named_modules()}
    return {name: call for name, call in calls.items() if isinstance(call, SpreadCall)}


@collective
@contextlib.contextmanager
def experts_on_every_rank(model: nn.Module) -> Iterator[None]:
    """Context in which every rank has all experts of ``model``, and forwards exchange no tokens. Their parameters are
    others there, for reading; released parameters of stage 3 are gathered before."""
    with contextlib.ExitStack() as undo:
        for call in spread_calls(model).values():
            undo.enter_context(call.gathered())
        yield


def describe_experts(found: Mapping[str, nn.Module]) -> dict[str, dict[str, str]]:
    """Return the shapes of the experts' weights, by module and name."""
    shapes = {name: module._parameters.items() for name, module in found.items()}
    return {
        f"module '{name}' of experts": {key: str(tuple(unpartitioned_shape(p))) for key, p in of if p is not None}
        for name, of in shapes.items()
    }


def experts_in(model: nn.Module, of_every_row: bool = False) -> tuple[dict[str, nn.Module], list[str]]:
    """Return the modules of experts in ``model``, by name, and descriptions of those that are called in another way.

    Args:
        of_every_row: those of :class:`CallOfEveryRow` are not called in another way.
    """
    found, unknown = {}, []
    for name, module in model.named_modules():
        if _is_experts(module) or (of_every_row and _top_k(model, name)):
            found[name] = module
        elif _resembles_experts(name, module) and not any(map(_is_experts, module.modules())):
            unknown.append(f"'{name}' ({type(module).__name__})")
    return found, unknown


def routes_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a module of experts is called with: hidden states [n, width], the experts of each token [n, k], and
    their weights [n, k]."""
    bound = _signature(type(module).forward).bind(module, *args, **kwargs)
    _, hidden, index, weights = bound.arguments.values()
    return hidden, index, weights


def find_experts(model: nn.Module, size: int) -> dict[str, nn.Module]:
    """Return the modules of experts in ``model``, by name. Nothing is changed.

    Raises ConfigError if there are none, for one of which it is not known how it is called, and if ``size`` ranks
    cannot have equally many experts of one.
    """
    found, unknown = experts_in(model, of_every_row=True)
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        sentence = (
            "expected modules of experts with weights [experts, ...], no buffers and forward(hidden_states, "
            f"top_k_index, top_k_weights), got {unknown[0]}{more}; "
            "use zerolite.moe.ExpertParallel there, or leave the block out"
        )
        raise ConfigError([(_KEY, sentence)])
    if not found:
        sentence = f"expected 1 for a model without modules of experts, got {size}; leave the block out"
        raise ConfigError([(_KEY, sentence)])
    owners: dict[int, str] = {}
    for name, module in found.items():
        _check(name, module, size, _adapted_by(model, name))
        for parameter in module.parameters():
            if (other := owners.setdefault(id(parameter), name)) != name:
                sentence = f"expected 1 for experts that share weights, which '{other}' and '{name}' do, got {size}"
                raise ConfigError([(_KEY, f"{sentence}; leave the block out, or untie them")])
    return found


def _adapted_by(model: nn.Module, name: str) -> str:
    """Return the parameter of the experts ``name`` that PEFT adapts (``target_parameters``); "" if it adapts none."""
    while name.endswith(".base_layer"):  # a wrapper for each parameter, one around the other
        name = name.removesuffix(".base_layer")
        adapted = getattr(model.get_submodule(name), "parameter_name", None)
        if isinstance(adapted, str):
            return adapted
    return ""


def _check(name: str, module: nn.Module, size: int, adapted: str) -> None:
    experts, sentence = _number(module), ""
    if experts % size:
        sentence = f"expected a divisor of the {experts} experts of module '{name}', got {size}; choose one"
    elif "forward" in vars(module):
        sentence = f"expected module '{name}' with its class's forward, got another one; remove what has replaced it"
    elif adapted:
        sentence = (
            f"expected 1 for adapters of the weights of all experts, which module '{name}' has for '{adapted}' "
            f"(target_parameters of PEFT), got {size}; leave the block out, or adapt other modules (target_modules)"
        )
    elif any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        sentence = f"expected the experts of module '{name}' with values, got them on the meta device; load them first"
    if sentence:
        raise ConfigError([(_KEY, sentence)])


def _top_k(model: nn.Module, name: str) -> int:
    """Return how many experts a token chooses in a block whose experts take every row, and 0 for others."""
    if type(model.get_submodule(name)).__name__ not in _OF_EVERY_ROW:
        return 0
    block: Any = model.get_submodule(name.rpartition(".")[0])
    return int(getattr(block, "top_k", 0))


def _number(module: nn.Module) -> int:
    """Return the number of experts that ``module`` has on this rank."""
    number: Any = module.num_experts
    return int(number)


def _is_experts(module: nn.Module) -> bool:
    """Return True for a module of experts that is called as this file says."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    count = vars(module).get("num_experts")
    if not isinstance(count, int) or not own or any(True for _ in _parameters_below(module)) or module._buffers:
        return False
    shapes = [unpartitioned_shape(parameter) for parameter in own]
    is_stacked = all(len(shape) > 1 and shape[0] == count for shape in shapes) and any(len(s) > 2 for s in shapes)
    return is_stacked and _takes_routes(module)


def _resembles_experts(name: str, module: nn.Module) -> bool:
    """Return True for a module that seems to have experts that are not shared: weights of all of them, or a list of
    modules of that name."""
    leaf, kind = name.rpartition(".")[2], type(module).__name__
    if "shared" in leaf or "Shared" in kind:
        return False
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict) and leaf.endswith("experts")
    is_stacked = "Expert" in kind and any(len(unpartitioned_shape(p)) > 2 for p in own)
    return is_stacked or ((is_list or kind.endswith("Experts")) and any(True for _ in _parameters_below(module)))


def _parameters_below(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for child in module.children() for parameter in child.parameters())


def _takes_routes(module: nn.Module) -> bool:
    """Return True for a forward of hidden states, the experts of each token, and their weights."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return len(names) == 3 and "ind" in names[1] and ("weight" in names[2] or "score" in names[2])


def _refuse_gradient(gradient: Tensor) -> None:
    raise RuntimeError(
        "expected forwards without a backward where every rank has all experts (zerolite.gathered_for_generation), got "
        "gradients of experts; call the model under torch.no_grad() there, and train outside of the context"
    )


class SpreadCall:
    """Forward of a module of experts, of which this rank has a part.

    Attributes:
        counters: tensors to which each forward in training adds this rank's choices of each expert.
        topology: the grid of ranks; those of ``expert`` have the parts.
    """

    counters: tuple[Tensor, ...] = ()

    def __init__(self, module: nn.Module, topology: Topology, capacity: int, shares_tokens: bool) -> None:
        """
        Args:
            shares_tokens: tensor-parallel ranks are called with the same tokens, and not with parts of a sequence.
        """
        self.topology = topology
        self._module, self._comm, self._capacity = module, topology.expert, capacity
        self._shares_tokens = shares_tokens and topology.tensor.world_size > 1

    @property
    def experts(self) -> int:
        """The number of the layer's experts."""
        return _number(self._module) * self._comm.world_size

    def count(self, device: torch.device) -> Tensor:
        """Return a new counter, int64 [experts]."""
        counter = torch.zeros(self.experts, dtype=torch.int64, device=device)
        self.counters += (counter,)
        return counter

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which the module has the experts of all ranks, and its own forward. Entered on all ranks."""
        module, share = self._module, _number(self._module)
        parts = dict(module._parameters)
        full = {name: self._full(p) for name, p in parts.items() if p is not None}
        module._parameters.update(full)
        vars(module)["num_experts"] = self.experts
        del vars(module)["forward"]
        try:
            yield
        finally:
            module._parameters.update(parts)
            vars(module).update(num_experts=share, forward=self)

    @torch.no_grad()
    def _full(self, part: nn.Parameter) -> nn.Parameter:
        """Return the experts of all ranks, which a backward refuses if they are trained."""
        values = part.detach()
        full = values.new_empty(self.experts, *values.shape[1:])
        self._comm.shard(full.view(-1)).copy_(values.reshape(-1))
        self._comm.all_gather(full.view(-1), "parameters").wait()
        gathered = nn.Parameter(full, requires_grad=part.requires_grad)
        if part.requires_grad:
            gathered.register_hook(_refuse_gradient)
        return gathered

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        module = self._module
        hidden, index, weights = routes_of(module, args, kwargs)
        if hidden.dim() != 2 or index.dim() != 2 or index.shape != weights.shape or len(index) != len(hidden):
            raise ValueError(
                f"{type(module).__name__}: expected hidden states [n, width], experts [n, k] and weights [n, k], got "
                f"{list(hidden.shape)}, {list(index.shape)} and {list(weights.shape)}; use "
                "zerolite.moe.ExpertParallel in its place"
            )
        return self._exchange(hidden, index, weights)

    def _exchange(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if self.counters and self._module.training:
            chosen = histogram(index, self.experts + 1)[:-1]
            for counter in self.counters:
                counter += chosen
        if self._shares_tokens:
            return in_parts(self.topology.tensor, self._compute, (hidden, index, weights))
        return self._compute((hidden, index, weights))

    def _compute(self, tokens: Sequence[Tensor]) -> Tensor:
        """Return the outputs of hidden states, the experts of each and their weights, which this rank alone has."""
        module, comm = self._module, self._comm
        if self._capacity:
            return with_capacity(comm, _number(module), self._capacity, self._forward, tokens)
        trained = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]
        return over_ranks(comm, _number(module), self._forward, trained, tokens)

    def _forward(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the outputs of pairs, sorted by this rank's expert: rows [m, width], experts and weights [m, 1]."""
        result: Tensor = type(self._module).forward(self._module, rows, experts, weights)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> SpreadCall:
        # The module copies its parameters before its forward. Their copies are the same part of the experts.
        copied = copy.deepcopy(self._module, memo)
        for parameter in self._module.parameters(recurse=False):
            spec = shard_spec_of(parameter)
            if spec is not None and id(parameter) in memo:
                set_shard_spec(memo[id(parameter)], spec)
        call = copy.copy(self)
        call._module, call.counters = copied, ()
        return call


class CallOfEveryRow(SpreadCall):
    """Forward of a module of experts that is called with a row of every token for each expert, as Llama-4's is.

    The row is the token times its weight of that expert. Without a choice this is 0, and experts without biases make 0
    of it, with gradients of 0: so only the rows of choices travel.
    """

    def __init__(self, module: nn.Module, topology: Topology, capacity: int, shares_tokens: bool, top_k: int) -> None:
        super().__init__(module, topology, capacity, shares_tokens)
        self._top_k = top_k

    @untraced
    def __call__(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [experts x n, width], the n tokens for the first expert, then for the second, and so on."""
        by_expert = hidden_states.detach().unflatten(0, (self.experts, -1))
        is_chosen = by_expert.ne(0).any(-1).t().to(torch.uint8)
        index = is_chosen.argsort(dim=1, descending=True, stable=True)[:, : self._top_k]
        tokens = torch.arange(len(index), device=index.device)
        places = (index * len(index) + tokens[:, None]).reshape(-1)
        rows = hidden_states.index_select(0, places)
        output = self._exchange(rows, index.reshape(-1, 1), rows.new_ones(len(rows), 1))
        return torch.zeros_like(hidden_states).index_copy_(0, places, output)

    def _forward(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        module, share, chosen = self._module, _number(self._module), experts.view(-1)
        forward: Any = functools.partial(type(module).forward, module)
        if self._capacity:  # equally many for each expert
            return cast(Tensor, forward(rows))
        counts = histogram(chosen, share)
        most = max(read_numbers(counts, in_plan=equal_loads(len(rows), share)))
        places = chosen * most + torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[chosen]
        padded = rows.new_zeros(share * most, rows.shape[1]).index_copy_(0, places, rows)
        return cast(Tensor, forward(padded).index_select(0, places))
