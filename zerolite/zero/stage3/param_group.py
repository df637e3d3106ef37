"""Parameter groups of stage 3: parameters that are gathered, released and reduced as one (FSDP2: ``FSDPParamGroup``).

A group has the parameters of one module, or of a whole subtree. A subtree is one group if it is a repeated block, too
small to be worth several collectives, compiled, or named by the user (:func:`plan_param_groups`).
"""

from __future__ import annotations

import fnmatch
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from zerolite.comm import collective
from zerolite.utils.module_hook import is_compiled
from zerolite.zero.stage3.partitioned_parameter import PartitionedParameter, sharded_param_of, unpartitioned_numel

if TYPE_CHECKING:
    from zerolite.zero.bucket import Bucket

LARGEST_SHARE = 4
"""A block has at most a fourth of the model, because two or three groups are gathered at a time and must not be all of
it."""


LEAST_MAX_LIVE = 1_000_000_000
"""Elements that may be gathered at a time if the user sets no limit and no block is large."""


class ParamGroup:
    """Parameters of a module, or of a subtree, that are gathered as one, and reduced together with small neighbours.

    Autograd's graphs keep the group alive, so it references modules weakly.

    Attributes:
        index: number of the group in its model; 0 is the root's.
        name: qualified name of the module.
        parameters: its parameters without the persistent ones, each once.
        is_embedding: True if the module is an embedding and nothing else, whose backward needs no values of the weight.
        buckets: buckets of the gradients of its parameters, and of those that its forward uses of other groups.
        unfinished: forwards since the last update whose backward has not ended; equal on all ranks.
        without_graph: those of them that had no graph inside a forward with one. Reentrant checkpointing runs such a
            forward, and repeats it in the backward.
        open_executions: executions under way that need the values. Counted in place: a method would cost host time.
        called_inside: the module of the subtree that is called directly; None if there is none.
    """

    __slots__ = (
        "_inside",
        "_module",
        "buckets",
        "called_inside",
        "index",
        "is_embedding",
        "name",
        "open_executions",
        "parameters",
        "unfinished",
        "without_graph",
        "_is_recomputed",
    )

    def __init__(
        self,
        index: int,
        name: str,
        module: torch.nn.Module,
        parameters: Sequence[PartitionedParameter],
        inside: Sequence[torch.nn.Module] = (),
    ) -> None:
        """
        Args:
            inside: modules of the subtree, which are gathered with ``module``.
        """
        self.index = index
        self.name = name
        self.parameters = list(parameters)
        self._module = weakref.ref(module)
        self._inside = [weakref.ref(member) for member in inside]
        self.is_embedding = _is_embedding(module, parameters)
        self.buckets: list[Bucket] = []
        self.unfinished = self.without_graph = self.open_executions = 0
        self._is_recomputed = True  # until a step has shown a forward without a graph that was not repeated
        self.called_inside: torch.nn.Module | None = None

    @property
    def module(self) -> torch.nn.Module:
        """The module whose forward is an execution of the group."""
        module = self._module()
        assert module is not None, "a model outlives its engine"
        return module

    @property
    def inside(self) -> list[torch.nn.Module]:
        """The modules of the subtree without the group's own."""
        return [module for ref in self._inside if (module := ref()) is not None]

    def set_called_inside(self, module: torch.nn.Module | None) -> None:
        """Set the module of the subtree that is called directly; None when it has returned."""
        self.called_inside = module

    def need_values(self) -> None:
        """Note that the backward needs values from now on: those of another parameter than the embedding's."""
        self.is_embedding = False

    def check_parameters(self) -> None:
        """Raise RuntimeError for tensors in the places of parameters (torch.func.functional_call), because a gradient
        through them would reach the parameters outside of their group's backward."""
        for module in (self.module, *self.inside):
            for name, parameter in module._parameters.items():
                if parameter is not None and not isinstance(parameter, torch.nn.Parameter):
                    raise RuntimeError(
                        f"module '{self.name}' is called with a tensor in the place of its parameter '{name}', which "
                        "stage 3 does not support (functional_call with fast weights); call a full copy of the model: "
                        "copy.deepcopy(engine.module)"
                    )

    def on_forward_without_graph(self) -> None:
        """Expect a backward of a forward that has built no graph, if earlier ones had one."""
        if self._is_recomputed:
            self.without_graph += 1
            self.unfinished += 1

    def on_recomputed(self) -> None:
        """Note the end of the backward of a forward that had no graph at first."""
        self._is_recomputed = True
        if self.without_graph:
            self.without_graph -= 1
            self.unfinished -= 1

    def on_not_recomputed(self) -> None:
        """Note that a step has ended without the backwards that :attr:`without_graph` counts: a model calls the module
        under ``no_grad``. Waiting for them again would keep the gradients of all buckets to the end of a backward."""
        self._is_recomputed, self.without_graph = False, 0

    def add_bucket(self, bucket: Bucket) -> None:
        """Let ``bucket`` wait for the backwards of this group."""
        if bucket not in self.buckets:
            self.buckets.append(bucket)
            bucket.groups.append(self)

    def reset(self) -> None:
        """End all executions."""
        self.open_executions, self.called_inside = 0, None


def _is_embedding(module: torch.nn.Module, parameters: Sequence[PartitionedParameter]) -> bool:
    """Return True for an embedding. Subclasses, patched methods and hooks may compute more with its weight."""
    if type(module) is not torch.nn.Embedding or "forward" in vars(module):
        return False
    hooked = module._forward_hooks or module._forward_pre_hooks
    return not hooked and list(parameters) == [sharded_param_of(module._parameters["weight"])]


def groups_of_parameters(groups: Sequence[ParamGroup]) -> dict[PartitionedParameter, list[int]]:
    """Return the groups of each parameter, the first one first: tied weights have several."""
    found: dict[PartitionedParameter, list[int]] = {}
    for group in groups:
        for parameter in group.parameters:
            found.setdefault(parameter, []).append(group.index)
    return found


LeafRule = Callable[[str, torch.nn.Module], bool]


def leaf_rule(
    patterns: Sequence[str], classes: Sequence[str] = (), names: Sequence[str] = (), suffixes: Sequence[str] = ()
) -> LeafRule:
    """Return a rule that tells from a module's qualified name and class if its whole subtree is one group.

    Args:
        patterns: shell patterns of names and classes.
        classes: names of classes, with or without their module.
        names: qualified names of modules.
        suffixes: ends of qualified names.
    """

    def is_leaf(name: str, module: torch.nn.Module) -> bool:
        cls = type(module)
        own = {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}
        if own & set(classes) or name in names or any(name.endswith(suffix) for suffix in suffixes):
            return True
        return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns for text in (name, *own))

    return is_leaf


def plan_param_groups(
    model: torch.nn.Module, is_leaf: LeafRule, granularity: int, max_live: int = 0
) -> list[ParamGroup]:
    """Return the parameter groups of ``model``, the root first.

    Each of these subtrees is one group with all modules in it:

    - a subtree that ``is_leaf`` chooses, and a compiled one;
    - a subtree with at most ``granularity`` elements that can be released;
    - a repeated block: a child of a ModuleList or Sequential that has another child of its class. It must have at most
      a fourth of the model. It must fit twice into ``max_live`` elements (0: no blocks), because the next block is
      gathered while this one computes. The children of a larger block are treated as blocks. A module that holds a list
      of repeated modules (experts) must fit only once. Ranks that send their tokens to different experts must still
      gather the same.

    Subtrees of the first kind inside a block are separate groups.
    """
    return _GroupPlanner(model, is_leaf, granularity, max_live).groups


def default_max_live(model: torch.nn.Module, is_leaf: LeafRule, granularity: int) -> int:
    """Return the number of elements that may be gathered at a time if the user sets no limit.

    The largest repeated block fits in two and a half times: one computes, the next one is gathered, and there is room
    for what is kept beside them. With less it would be divided, into several collectives with a latency each.
    """
    return max(LEAST_MAX_LIVE, 5 * _GroupPlanner(model, is_leaf, granularity, 1 << 62).largest_block // 2)


class _GroupPlanner:
    """Planner that walks through the modules of a model and collects its parameter groups.

    Attributes:
        groups: the parameter groups.
        largest_block: elements of the largest repeated block that is one group; 0 without any.
    """

    def __init__(self, model: torch.nn.Module, is_leaf: LeafRule, granularity: int, max_live: int) -> None:
        self._is_leaf, self._granularity, self._max_live = is_leaf, granularity, max_live
        self._largest = _numel(model) // LARGEST_SHARE
        self._seen: set[int] = set()  # modules that have a group, or were descended into
        self._model = model
        self.largest_block = 0
        self.groups: list[ParamGroup] = []
        self._walk("", model, in_block=False)

    def _walk(self, name: str, module: torch.nn.Module, in_block: bool) -> None:
        if id(module) in self._seen:
            return
        size = _numel(module)
        small = size <= self._granularity and _has_forward(module)
        if size and (small or self._is_leaf_or_compiled(name, module)):
            self._add(name, module, list(module.modules()))
        elif size and in_block and _has_forward(module) and self._fits(module, size):
            self.largest_block = max(self.largest_block, size)
            separate = {
                f"{name}.{inside}": child
                for inside, child in module.named_modules()
                if inside and self._is_leaf_or_compiled(f"{name}.{inside}", child)
            }
            self._add(name, module, list(_subtree(module, {id(child) for child in separate.values()})))
            for child_name, child in separate.items():
                self._walk(child_name, child, in_block=False)
        else:
            self._add(name, module, [module, *_containers(module)])
            self._walk_children(name, module, in_block)

    def _walk_children(self, name: str, module: torch.nn.Module, in_block: bool) -> None:
        repeated = _repeated(module)
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            walk = self._walk
            if id(child) in self._seen and not _has_forward(child):  # its own parameters are in a group already
                walk = self._walk_children
            walk(path, child, in_block or type(child) in repeated)

    def _is_leaf_or_compiled(self, name: str, module: torch.nn.Module) -> bool:
        return self._is_leaf(name, module) or is_compiled(module)

    def _fits(self, module: torch.nn.Module, size: int) -> bool:
        has_list = any(_repeated(child) for child in module.children())
        return size <= min(self._largest, self._max_live if has_list else self._max_live // 2)

    def _add(self, name: str, module: torch.nn.Module, subtree: list[torch.nn.Module]) -> None:
        """Add a group of the parameters of ``subtree``, whose root is ``module``. Only the root group may be empty."""
        found: dict[int, PartitionedParameter] = {}
        for member in subtree:
            for parameter in (*member.parameters(recurse=False), *external_parameters(member)):
                sharded_param = sharded_param_of(parameter)
                if sharded_param is not None and not sharded_param.persistent:
                    found[id(parameter)] = sharded_param
        inside = [member for member in subtree[1:] if id(member) not in self._seen]
        self._seen.update(map(id, subtree))
        if found or module is self._model:
            self.groups.append(ParamGroup(len(self.groups), name, module, list(found.values()), inside))


def _subtree(module: torch.nn.Module, without: set[int]) -> Iterator[torch.nn.Module]:
    """Return ``module`` and all modules in it, each once, without those that are reached only through ``without``."""
    found: dict[int, torch.nn.Module] = {}

    def walk(module: torch.nn.Module) -> None:
        if id(module) not in found and id(module) not in without:
            found[id(module)] = module
            for child in module.children():
                walk(child)

    walk(module)
    return iter(found.values())


def _containers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules in ``module`` that cannot be called and own parameters, such as a ParameterList: who calls the
    module uses them. Those in modules that can be called belong to these."""
    for child in module.children():
        if not _has_forward(child):
            if any(parameter is not None for parameter in child._parameters.values()):
                yield child
            yield from _containers(child)


def _repeated(module: torch.nn.Module) -> set[type]:
    """Return the classes of which a list of modules has several children with parameters."""
    if not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
        return set()
    counts = Counter(type(child) for child in module.children() if _numel(child))
    return {cls for cls, count in counts.items() if count > 1}


def _numel(module: torch.nn.Module) -> int:
    """Return the number of elements that can be released."""
    return sum(unpartitioned_numel(parameter) for parameter in module.parameters() if is_released(parameter))


def _has_forward(module: torch.nn.Module) -> bool:
    """Return True if the module can be called, so that its hooks run. Containers cannot be called."""
    return type(module).forward is not torch.nn.Module.forward or "forward" in vars(module)


def is_released(parameter: torch.nn.Parameter) -> bool:
    """Return True if a parameter is partitioned and not persistent."""
    sharded_param = sharded_param_of(parameter)
    return sharded_param is not None and not sharded_param.persistent


def owns_released(module: torch.nn.Module) -> bool:
    """Return True if a module itself owns a parameter that is partitioned and not persistent."""
    return any(parameter is not None and is_released(parameter) for parameter in module._parameters.values())


# -------------------------------------------------------------------- external parameters


@collective
def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Gather ``parameter`` together with ``module``, which uses it in its forward without owning it.

    Uses that read the parameter as an attribute of its own module are found without this.
    """
    if not isinstance(module, torch.nn.Module) or not isinstance(parameter, torch.nn.Parameter):
        raise ValueError(
            "zero.register_external_parameter: expected a module and a parameter, got "
            f"{type(module).__name__} and {type(parameter).__name__}"
        )
    known = module.__dict__.setdefault("_zero_external_parameters", [])
    if all(parameter is not other for other in known):
        known.append(parameter)
    sharded_param = sharded_param_of(parameter)
    if sharded_param is not None and sharded_param.context.coordinator is not None:
        sharded_param.context.coordinator.add_external(module, sharded_param)


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Undo :func:`register_external_parameter` for engines that are made later. An existing engine goes on gathering
    the two together. Raises ValueError if the parameter was not registered."""
    known = external_parameters(module)
    rest = [other for other in known if other is not parameter]
    if len(rest) == len(known):
        raise ValueError(
            f"zero.unregister_external_parameter: the parameter of shape {tuple(getattr(parameter, 'ds_shape', ()))} "
            f"was not registered with this {type(module).__name__}"
        )
    module.__dict__["_zero_external_parameters"] = rest


def external_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that ``register_external_parameter`` has registered with ``module``."""
    found: list[torch.nn.Parameter] = module.__dict__.get("_zero_external_parameters", [])
    return found
