"""Sequence parallelism: a sharded sequence between tensor-parallel layers (Korthikanti et al., 2022).

    block        norm      column          attention     row                 dropout, residual      next block
    each rank    a part    all_gather >    its heads     > reduce_scatter    a part                 a part

The hidden states are sharded where the first of consecutive blocks begins, and gathered where the last one ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zerolite.comm import Communicator
from zerolite.tensor_parallel import functions
from zerolite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from zerolite.tensor_parallel.parallel_blocks import ParallelBlock
from zerolite.tensor_parallel.plan import TensorPlanError, is_container
from zerolite.tensor_parallel.regions import FirstForwardErrors, Region
from zerolite.tensor_parallel.shard_spec import mark_partial, shard_spec_of
from zerolite.utils.nested import find_tensors, map_tensors

DIM = 1
"""The sequence dimension of hidden states, [batch, sequence, width]."""

_ROUTER_LOGITS = "output_router_logits"  # of transformers: in a config, and an argument of a call


def find_runs(tp_blocks: Sequence[ParallelBlock], modules: Mapping[str, nn.Module]) -> list[list[str]]:
    """Return the names of blocks with sharded layers, in runs of consecutive blocks.

    Blocks are consecutive if they follow each other in the outermost list of modules that contains them. A module that
    is in no list is a run by itself.

    Raises:
        TensorPlanError: for cross-attention, because its keys are no part of the sequence, and for parameters that are
            used inside and outside of blocks.
    """
    blocks: dict[str, list[str]] = {}
    for tp_block in tp_blocks:
        if any(word in tp_block.name.lower().replace("_", "") for word in ("cross", "encoderattn", "encdecattention")):
            raise TensorPlanError(
                f"expected only self-attention with tensor_parallel.sequence_parallel, got '{tp_block.name}'; leave "
                "sequence_parallel out"
            )
        block = _block_of(tp_block.name, modules)
        blocks.setdefault(block.rpartition(".")[0], []).append(block)
    runs = [run for container, members in blocks.items() for run in _runs(container, set(members), modules)]
    names = [name for run in runs for name in run]
    for name in names:
        inside = [tp_block for tp_block in tp_blocks if f"{tp_block.name}.".startswith(f"{name}.")]
        _check_mixing(name, modules[name], inside)
    _check_parameters(names, modules)
    return runs


def check_losses(modules: Mapping[str, nn.Module]) -> None:
    """Raise TensorPlanError for a model that computes losses of its routers' logits."""
    for name, module in _with_router_logits(modules).items():
        if getattr(module.config, _ROUTER_LOGITS) is True:
            raise TensorPlanError(_wants_router_logits("config.", f"True in '{name or type(module).__name__}'"))


def _with_router_logits(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the models that can compute losses of their routers' logits: the outermost module of each config."""
    found: dict[int, str] = {}
    for name, module in modules.items():
        config = vars(module).get("config")
        if hasattr(config, _ROUTER_LOGITS):
            found.setdefault(id(config), name)
    return {name: modules[name] for name in found.values()}


def _check_call(module: nn.Module, args: Any, kwargs: Any) -> None:
    wanted = kwargs.get(_ROUTER_LOGITS)
    if wanted or (wanted is None and getattr(module.config, _ROUTER_LOGITS)):
        raise ValueError(_wants_router_logits("", f"{wanted} in a call of {type(module).__name__}"))


def _wants_router_logits(where: str, got: str) -> str:
    return (
        f"tensor_parallel.sequence_parallel: expected {where}{_ROUTER_LOGITS} = False, because the logits of routers, "
        f"and auxiliary losses of them, would be of a part of the sequence on each rank, got {got}; set it to False, "
        "or leave sequence_parallel out"
    )


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) or is_container(module)


def _block_of(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the outermost module in a list that is called itself, so not a list inside of a list."""
    parts = name.split(".")
    for depth in range(len(parts)):
        block = ".".join(parts[: depth + 1])
        if _is_list(modules[".".join(parts[:depth])]) and not is_container(modules[block]):
            return block
    return name


def _runs(container: str, members: set[str], modules: Mapping[str, nn.Module]) -> Iterator[list[str]]:
    if not _is_list(modules[container]):
        yield from ([name] for name in sorted(members))
        return
    run: list[str] = []
    for child in modules[container]._modules:
        name = f"{container}.{child}" if container else child
        if name in members:
            run.append(name)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _check_mixing(block: str, module: nn.Module, tp_blocks: Sequence[ParallelBlock]) -> None:
    """Raise TensorPlanError if an unsharded module in a block may mix tokens of the sequence.

    It would get only a part of the tokens, and usually compute wrong results without an error.
    """
    attention = any(tp_block.is_attention for tp_block in tp_blocks)
    sharded: list[nn.Module] = [module]
    for tp_block in tp_blocks:
        layers = [layer.module for layer in (*tp_block.columns, *tp_block.rows)]
        sharded += [*layers, *tp_block.inner_modules.values()] if tp_block.name == block else tp_block.module.modules()
    for name, inner in module.named_modules():
        outside = any(tp_block.name.startswith(f"{block}.{name}.") for tp_block in tp_blocks)
        convolves = isinstance(inner, nn.modules.conv._ConvNd)
        accepted = any(inner is part for part in sharded) or isinstance(inner, _TOKENWISE)
        if outside or is_container(inner) or (accepted and not convolves):
            continue
        # Only attention and convolutions are known to mix tokens; a norm acts on each token alone.
        norm = "norm" in type(inner).__name__.lower()
        if convolves or not (attention or norm):
            raise TensorPlanError(
                "tensor_parallel.sequence_parallel: expected blocks whose modules that mix tokens (attention, "
                f"convolutions) are sharded, got '{block}.{name}' ({type(inner).__name__}), which is not and would get "
                "only a part of the sequence; leave sequence_parallel out"
            )


# Modules that act on each token alone.
_TOKENWISE = (
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Mish, nn.Softplus, nn.Hardswish),
    *(nn.Dropout, nn.Identity, nn.Linear),
)


def _check_parameters(blocks: Sequence[str], modules: Mapping[str, nn.Module]) -> None:
    inside: dict[int, str] = {}
    for block in blocks:
        inside.update((id(parameter), block) for parameter in modules[block].parameters())
    for name, module in modules.items():
        if any(name == block or name.startswith(f"{block}.") for block in blocks):
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in inside:
                raise TensorPlanError(
                    "tensor_parallel.sequence_parallel: expected parameters of blocks that are used nowhere else, "
                    f"got '{name}.{key}', which is also in '{inside[id(parameter)]}'; leave sequence_parallel out"
                )


def connect(runs: Sequence[Sequence[str]], modules: Mapping[str, nn.Module], comm: Communicator, random: bool) -> None:
    """Shard the sequence within ``runs``, after their layers have been sharded.

    Args:
        runs: names of consecutive blocks.
        random: blocks may draw random numbers.
    """
    for model in _with_router_logits(modules).values() if runs else ():
        model.register_forward_pre_hook(_check_call, with_kwargs=True)
    for run in runs:
        shards = SequenceShards(comm)
        for name in run:
            block = modules[name]
            how = "has sharded the sequence before it; leave tensor_parallel.sequence_parallel out"
            FirstForwardErrors(name, how).watch(block)
            if name == run[0]:
                block.register_forward_pre_hook(shards.begin, with_kwargs=True)
            if random:
                _RankRandomNumbers(comm.rank).watch(block)
            for module in block.modules():
                if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                    module.set_sequence(DIM, shards)
            # A rank gets a part of the tokens, so its gradients of replicated parameters are a part of the sum.
            for parameter in block.parameters():
                if shard_spec_of(parameter) is None:
                    mark_partial(parameter)
        modules[run[-1]].register_forward_hook(shards.end)


class SequenceShards:
    """Hooks that shard the sequence before a run of blocks and gather it after them.

    Attributes:
        is_sharded: the sequence has been sharded in a forward.
        batch_size: batch size of the hidden states.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.is_sharded, self.batch_size = False, 1

    def __deepcopy__(self, memo: object) -> SequenceShards:
        return self  # a communicator cannot be copied

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replace the first floating input that has a sequence by this rank's part.

        Raises ValueError if the sequence cannot be divided equally.
        """
        hidden = _hidden_states([*args, *kwargs.values()])
        if hidden is None:
            raise TypeError(
                "tensor_parallel.sequence_parallel: expected a floating tensor [batch, sequence, width] as an input of "
                f"the first block, {type(module).__name__}, got none; leave sequence_parallel out"
            )
        if hidden.shape[DIM] % self.comm.world_size:
            raise ValueError(
                "tensor_parallel.sequence_parallel: expected a sequence length that is a multiple of "
                f"tensor_parallel.size {self.comm.world_size}, got {hidden.shape[DIM]} (hidden states of shape "
                f"{list(hidden.shape)}); pad the sequences, or leave sequence_parallel out"
            )
        self.is_sharded, self.batch_size = True, hidden.shape[0]
        part = functions.scatter(hidden, self.comm, DIM)
        return (
            tuple(part if value is hidden else value for value in args),
            {key: part if value is hidden else value for key, value in kwargs.items()},
        )

    def end(self, module: nn.Module, args: object, output: object) -> object:
        """Gather the first floating output that has a sequence."""
        hidden = _hidden_states(find_tensors(output))
        if hidden is None:
            return output
        full = functions.gather(hidden, self.comm, DIM)
        return map_tensors(lambda x: full if x is hidden else x, output)


def _hidden_states(values: Sequence[object]) -> Tensor | None:
    return next((x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > DIM + 1), None)


class _RankRandomNumbers:
    """Hooks that give each rank its own random numbers in a block, because it has its own part of the sequence."""

    def __init__(self, rank: int) -> None:
        self.region = Region(rank, True)

    def watch(self, block: nn.Module) -> None:
        block.register_forward_pre_hook(self.begin, with_kwargs=True)
        self.region.watch(block)

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = _hidden_states([*args, *kwargs.values()])
        if hidden is not None:
            self.region.enter(hidden, module.training)
