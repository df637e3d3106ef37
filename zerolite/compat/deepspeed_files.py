"""Files of a DeepSpeed checkpoint: names, contents, and checks that the checkpoint can be imported.

save_dir/latest                                                the tag
save_dir/<tag>/mp_rank_00_model_states.pt                      stages 1 and 2: weights, buffers, names, counters
save_dir/<tag>/zero_pp_rank_<r>_mp_rank_00_model_states.pt     stage 3: the same for each rank
save_dir/<tag>/[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt   master weights and optimizer states of each rank
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from zerolite.checkpoint.errors import CheckpointError
from zerolite.compat.safe_unpickle import StubObject, load_safely

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_UNSUPPORTED = (  # (name of a file or directory, the kind of checkpoint that has it)
    (re.compile(r"zero"), "a universal checkpoint (it has a directory 'zero')"),
    (re.compile(r"(layer_.*)?expert_.*|expp_rank_.*"), "a checkpoint of a mixture of experts"),
    (re.compile(r"layer_\d+-model_.*"), "a checkpoint of a pipeline"),
    (re.compile(r"offloaded_tensors"), "a checkpoint whose optimizer states are files of an NVMe offload"),
)

T = TypeVar("T")


@dataclass(frozen=True)
class LoadedFile:
    """A file whose content is a dict. ``path`` is for messages."""

    path: Path
    content: Mapping[str, Any]

    def get(self, cls: type[T], *keys: str) -> T:
        """Return ``content[key][...]``. Raises CheckpointError if it is missing or of another type."""
        value: Any = self.content
        name = ""
        for key in keys:
            name += f"[{key!r}]"
            if not isinstance(value, Mapping) or key not in value:
                raise CheckpointError(f"'{self.path}': expected an entry {name}, got none")
            value = value[key]
        if not isinstance(value, cls) or (cls is int and isinstance(value, bool)):
            raise CheckpointError(
                f"'{self.path}': expected {name} to be of type {cls.__name__}, got {type(value).__name__}"
            )
        return value


@dataclass(frozen=True)
class Files:
    """The loaded files of a checkpoint.

    Attributes:
        directory: directory of the checkpoint.
        stage: ZeRO stage.
        model: model states: one file at stages 1 and 2, one file for each rank at stage 3.
        optimizer: optimizer states of each rank, in rank order.
    """

    directory: Path
    stage: int
    model: tuple[LoadedFile, ...]
    optimizer: tuple[LoadedFile, ...]

    @property
    def world_size(self) -> int:
        return len(self.optimizer)


def find_tag(directory: Path, tag: str | None) -> Path:
    """Return the directory of the checkpoint ``tag`` in ``directory``. Raises CheckpointError if there is none.

    Without a tag it is ``directory`` itself if it is a checkpoint, otherwise the one that its file ``latest`` names.
    """
    if tag is None:
        if any(_MODEL.fullmatch(path.name) for path in _entries(directory)):
            return directory
        latest = directory / "latest"
        try:
            tag = latest.read_text(errors="replace").strip()
        except OSError as error:
            raise CheckpointError(
                f"no DeepSpeed checkpoint in '{directory}': expected a file 'latest' or files *_model_states.pt, and "
                f"'{latest}' cannot be read ({error.strerror}); pass the tag, or the directory of the checkpoint itself"
            ) from error
    if not tag or not (directory / tag).is_dir():
        tags = sorted(path.name for path in _entries(directory) if path.is_dir())
        raise CheckpointError(f"no checkpoint {tag!r} in '{directory}'; the directories there are {tags}")
    return directory / tag


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError as error:
        raise CheckpointError(f"'{directory}' cannot be read: {error.strerror}") from error


def read_files(path: Path) -> Files:
    """Find and load the files of the checkpoint in the directory ``path``.

    Raises:
        CheckpointError: the checkpoint is of another kind, or files are missing or damaged.
    """
    names = [entry.name for entry in _entries(path)]
    _refuse_by_name(path, names)
    model = {int(m[1]) if m[1] else None: path / m[0] for name in names if (m := _MODEL.fullmatch(name))}
    optimizer = _files_by_rank(path, names)
    if not model:
        raise CheckpointError(
            f"'{path}' is no DeepSpeed checkpoint: expected a file such as mp_rank_00_model_states.pt, got none"
        )
    if None in model and len(model) > 1:
        raise CheckpointError(
            f"'{path}' has model states of stage 3, '{max(model.values()).name}', and of another stage, "
            f"'{model[None].name}', from two saves with the same tag; remove the files of the older save"
        )
    first = model.get(0) or model.get(None)
    if first is None:
        raise CheckpointError(f"'{path / 'zero_pp_rank_0_mp_rank_00_model_states.pt'}' is missing")
    head = _load(first)
    world_size = _check_kind(head)
    if not optimizer:
        raise CheckpointError(
            f"'{path}' has no files zero_pp_rank_*_optim_states.pt: it was saved without ZeRO (stage 0), whose "
            "optimizer states cannot be imported because they have no names, or the files were not copied"
        )
    _check_ranks(path, "optim_states", set(optimizer), world_size)
    states = tuple(_load(optimizer[rank]) for rank in range(world_size))
    stage = _stage(states, head)
    # Below stage 3 one file has the full model.
    if stage < 3 and None in model:
        return Files(path, stage, (head,), states)
    _check_ranks(path, "model_states", {rank for rank in model if rank is not None}, world_size)
    others = (_load(model[rank]) for rank in range(1, world_size))
    return Files(path, stage, (head, *others), states)


def _refuse_by_name(path: Path, names: list[str]) -> None:
    for name in names:
        for pattern, description in _UNSUPPORTED:
            if pattern.fullmatch(name):
                raise CheckpointError(f"'{path}' is {description}, which zerolite does not import; found '{name}'")
        match = _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name)
        if match and int(match[2]):
            raise CheckpointError(
                f"'{path}' is a checkpoint of model parallelism, which zerolite does not import; found '{name}'"
            )


def _files_by_rank(path: Path, names: list[str]) -> dict[int, Path]:
    by_rank: dict[int, Path] = {}
    for name in names:
        match = _OPTIMIZER.fullmatch(name)
        if match is None:
            continue
        other = by_rank.setdefault(int(match[1]), path / name)
        if other.name != name:
            raise CheckpointError(
                f"'{path}' has two files of rank {match[1]}, '{other.name}' and '{name}', from two saves with the same "
                "tag; remove the files of the older save"
            )
    return by_rank


def _load(path: Path) -> LoadedFile:
    content = load_safely(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"'{path}': expected a dict, got {type(content).__name__}")
    return LoadedFile(path, content)


def _check_kind(head: LoadedFile) -> int:
    """Return the checkpoint's number of ranks. Raises CheckpointError for kinds that cannot be imported."""
    if "ds_version" not in head.content:
        raise CheckpointError(f"'{head.path}' is no DeepSpeed checkpoint: expected an entry ['ds_version']")
    dimensions = head.content.get("checkpoint_parallel_dimensions") or {}
    sizes = {
        "model parallelism": max(head.content.get("mp_world_size") or 1, dimensions.get("tp_degree") or 1),
        "a pipeline": dimensions.get("pp_degree") or 1,
    }
    for dimension, size in sizes.items():
        if size > 1:
            raise CheckpointError(
                f"'{head.path}' is of a checkpoint of {dimension} (of degree {size}), which zerolite does not import"
            )
    if head.content.get("ds_autoep_layers") or head.content.get("autoep_layers") or head.content.get("num_experts"):
        raise CheckpointError(
            f"'{head.path}' is of a checkpoint of a mixture of experts, which zerolite does not import"
        )
    return head.get(int, "dp_world_size")


def _check_ranks(path: Path, file_type: str, ranks: set[int], world_size: int) -> None:
    missing = sorted(set(range(world_size)) - ranks)
    if missing:
        raise CheckpointError(
            f"'{path}' was saved by {world_size} ranks, but the files *_{file_type}.pt of rank(s) "
            f"{', '.join(map(str, missing))} are missing: zero_pp_rank_{missing[0]}_mp_rank_00_{file_type}.pt and so on"
        )
    more = sorted(ranks - set(range(world_size)))
    if more:
        raise CheckpointError(
            f"'{path}' was saved by {world_size} ranks, but there are files *_{file_type}.pt of rank(s) "
            f"{', '.join(map(str, more))} too. If they are left from another save with this tag, remove them"
        )


def _stage(states: tuple[LoadedFile, ...], head: LoadedFile) -> int:
    """Return the ZeRO stage. Raises CheckpointError unless all ranks have the same."""
    world_size = len(states)
    stages = set()
    for file in states:
        saved = file.get(dict, "optimizer_state_dict")
        counts = saved.get("partition_count", world_size)
        counts = set(counts) if isinstance(counts, (list, tuple)) else {counts}
        if counts != {world_size}:
            raise CheckpointError(
                f"'{file.path}': expected optimizer states in {world_size} partitions, one for each rank of "
                f"'{head.path.name}', got {sorted(counts)}"
            )
        stages.add(_number(saved.get("zero_stage", 1)))  # DeepSpeed's bf16 optimizer, of stage 1, lacks this entry
    if len(stages) > 1 or not stages <= {1, 2, 3}:
        names = ", ".join(sorted(map(str, stages)))
        raise CheckpointError(f"'{head.path.parent}': expected one ZeRO stage of 1, 2 and 3 in all files, got {names}")
    return int(stages.pop())


def _number(value: object) -> Any:
    """Return the number of an enum member, which is pickled as its class and number."""
    return value.arguments[0] if isinstance(value, StubObject) and len(value.arguments) == 1 else value
