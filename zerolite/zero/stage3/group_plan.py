"""Choice of the parameter groups of a model, and of the buckets that small groups share."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from zerolite.comm import collective
from zerolite.utils.module_hook import is_compiled
from zerolite.zero.stage3.param_group import ParamGroup
from zerolite.zero.stage3.partitioned_parameter import PartitionedParameter, sharded_param_of, unpartitioned_numel

LARGEST_SHARE = 4
"""A block has at most a fourth of the model, because two or three groups are gathered at a time and must not be all of
it."""


LEAST_MAX_LIVE = 1_000_000_000
"""Elements that may be gathered at a time if the user sets no limit and no block is large."""


def groups_of_parameters(groups: Sequence[ParamGroup]) -> dict[PartitionedParameter, list[ParamGroup]]:
    """Return the groups of each parameter, the first one first: tied weights have several."""
    groups_of: dict[PartitionedParameter, list[ParamGroup]] = {}
    for group in groups:
        for sharded_param in group.parameters:
            groups_of.setdefault(sharded_param, []).append(group)
    return groups_of


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
        class_names = {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}
        if class_names & set(classes) or name in names or any(name.endswith(suffix) for suffix in suffixes):
            return True
        return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns for text in (name, *class_names))

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
        sharded_params: dict[int, PartitionedParameter] = {}
        for inner in subtree:
            for parameter in (*inner.parameters(recurse=False), *external_parameters(inner)):
                sharded_param = sharded_param_of(parameter)
                if sharded_param is not None and not sharded_param.persistent:
                    sharded_params[id(parameter)] = sharded_param
        inside = [inner for inner in subtree[1:] if id(inner) not in self._seen]
        self._seen.update(map(id, subtree))
        if sharded_params or module is self._model:
            self.groups.append(ParamGroup(len(self.groups), name, module, list(sharded_params.values()), inside))


def _subtree(module: torch.nn.Module, without: set[int]) -> Iterator[torch.nn.Module]:
    """Return ``module`` and all modules in it, each once, without those that are reached only through ``without``."""
    modules: dict[int, torch.nn.Module] = {}

    def walk(module: torch.nn.Module) -> None:
        if id(module) not in modules and id(module) not in without:
            modules[id(module)] = module
            for child in module.children():
                walk(child)

    walk(module)
    return iter(modules.values())


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


# -------------------------------------------------------------------- buckets


def bucket_groups(
    trained: Sequence[torch.nn.Parameter], groups: Sequence[ParamGroup], limit: int, together: bool = False
) -> list[list[int]]:
    """Divide parameters into buckets, each reduced by one collective. A bucket has consecutive parameter groups or
    consecutive persistent parameters. Parameters without elements are in the first bucket.

    Args:
        trained: the parameters.
        groups: the parameter groups of the model.
        limit: most elements in a bucket, unless one group or one parameter has more.
        together: True to put the first persistent parameters into the bucket of the first parameter groups. The
            gradients of both are complete only when a backward ends. Their shards then have the same placement.

    Returns:
        Indices into ``trained`` for each bucket.
    """
    groups_of = groups_of_parameters(groups)
    by_group: dict[ParamGroup, list[int]] = {}
    persistent_runs: list[list[int]] = []
    empty: list[int] = []
    numels = [unpartitioned_numel(parameter) for parameter in trained]
    for index, parameter in enumerate(trained):
        sharded_param = sharded_param_of(parameter)
        if sharded_param is not None and sharded_param in groups_of:
            by_group.setdefault(groups_of[sharded_param][0], []).append(index)
        elif numels[index]:
            persistent_runs.append([index])
        else:
            empty.append(index)
    released = _merge_runs(list(by_group.values()), numels, limit)
    persistent = _merge_runs(persistent_runs, numels, limit)
    if together and released and persistent:
        released[0] += persistent.pop(0)
    buckets = released + persistent or [[]]
    buckets[0] += empty
    return sorted(sorted(bucket) for bucket in buckets if bucket)


def _merge_runs(runs: Sequence[list[int]], numels: Sequence[int], limit: int) -> list[list[int]]:
    """Return ``runs`` of indices with neighbours merged, up to ``limit`` elements together."""
    groups: list[list[int]] = []
    size = limit
    for run in runs:
        more = sum(numels[index] for index in run)
        if not groups or size + more > limit:
            groups.append([])
            size = 0
        groups[-1] = [*groups[-1], *run]
        size += more
    return groups


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
    sharded_param = sharded_param_of(parameter)
    if sharded_param is not None and sharded_param.groups.spread > 1:
        raise ValueError(
            "zero.register_external_parameter: expected a parameter that all ranks divide, got "
            f"'{sharded_param.name}' of experts on several ranks (expert_parallel); call the module that has it"
        )
    known = module.__dict__.setdefault("_zero_external_parameters", [])
    if all(parameter is not other for other in known):
        known.append(parameter)
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
    registered: list[torch.nn.Parameter] = module.__dict__.get("_zero_external_parameters", [])
    return registered
