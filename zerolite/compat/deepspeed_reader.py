"""Contents of a DeepSpeed checkpoint in zerolite's terms: tensors by key, and the contents of state.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zerolite.checkpoint import json_codec
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.flat_ranges import Shard, everything
from zerolite.checkpoint.state import clean
from zerolite.compat.deepspeed_files import Files, find_tag, read_files
from zerolite.compat.deepspeed_groups import (
    Group,
    as_count,
    common_number,
    described,
    flat_states,
    gather,
    partition_slices,
    read_groups,
)
from zerolite.compat.safe_unpickle import StubObject
from zerolite.utils.dtypes import CODES

# DeepSpeed's own entries in a file of model states; all other entries are the client's state.
_MODEL_KEYS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler "
    "data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config "
    "ds_version checkpoint_parallel_dimensions universal_checkpoint_info sparse_tensor_module_names".split()
)
# Entries of a parameter group that are not hyperparameters: implementation switches, counters, and the parameters.
_NOT_HYPERPARAMETERS = frozenset(
    ("params", "param_names", "step", "foreach", "fused", "capturable", "differentiable", "_ds_source_param_group_id")
)


@dataclass
class ImportedCheckpoint:
    """A checkpoint in zerolite's terms.

    Attributes:
        state: content of state.json, not yet encoded.
        tensors: tensors with keys as in tensors.json.
        left_out: descriptions of the parts that are left out.
    """

    directory: Path
    tag: str
    stage: int
    world_size: int
    deepspeed_version: str
    config: dict[str, Any]
    state: dict[str, Any]
    tensors: list[Shard]
    left_out: list[str]


def read_deepspeed(directory: Path, tag: str | None = None) -> ImportedCheckpoint:
    """Read a checkpoint of DeepSpeed.

    Args:
        directory: directory that was passed to DeepSpeed's ``save_checkpoint``, or the checkpoint itself.
        tag: the checkpoint; default: the one that the file ``latest`` names.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or of another kind, or its files would run code.
    """
    path = find_tag(directory, tag)
    files = read_files(path)
    try:
        return _Importer(files).result()
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"'{path}' does not have the layout of DeepSpeed 0.19 ({type(error).__name__}: {error})"
        ) from error


@dataclass
class _Importer:
    """Conversion of one checkpoint."""

    files: Files
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.head = self.files.model[0]
        self.module: dict[str, torch.Tensor] = {}
        self.extra: dict[str, Any] = {}  # state of modules with get_extra_state
        for name, value in self.head.get(dict, "module").items():
            if name.rpartition(".")[2] == "_extra_state":
                data = self._plain_data(value, f"the extra state '{name}'")
                if data is not _NOTHING:
                    self.extra[clean(name.removesuffix("_extra_state").removesuffix("."))] = data
            elif isinstance(value, torch.Tensor):
                self.module[name] = value
            else:
                self.left_out.append(f"the entry '{name}' of the model's state, a {described(value)}")
        self.groups, self.settings = read_groups(self.files)
        self.trained = {name: group for group in self.groups for name in group.shapes}
        self.tensors: list[Shard] = []

    def result(self) -> ImportedCheckpoint:
        parameters = self._parameters()
        buffers = self._buffers()
        optimizer = self._optimizer()
        head = self.head.content
        config = head.get("ds_config")
        state = {
            "parameters": parameters,
            "buffers": buffers,
            "extra": self.extra,
            "optimizer": optimizer,
            "lr_scheduler": self._lr_scheduler(head.get("lr_scheduler"), config),
            "loss_scaler": self._loss_scaler(),
            "counters": self._counters(config),
            "loaders": None,
            "client_state": self._client_state(),
        }
        return ImportedCheckpoint(
            directory=self.files.directory,
            tag=self.files.directory.name,
            stage=self.files.stage,
            world_size=self.files.world_size,
            deepspeed_version=str(head["ds_version"]),
            config=self._plain_data(config, "its configuration") if isinstance(config, dict) else {},
            state=state,
            tensors=self.tensors,
            left_out=self.left_out,
        )

    def _add(
        self, prefix: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, values: Callable[[], torch.Tensor]
    ) -> None:
        if dtype not in CODES:
            raise CheckpointError(f"'{self.head.path}': {prefix}{name} is of {dtype}, which no checkpoint can hold")
        self.tensors.append(Shard(prefix + clean(name), shape, dtype, everything(shape), values))

    def _plain_data(self, value: object, where: str) -> Any:
        """Return ``value`` without the parts that are not plain data, which are added to ``left_out``."""
        if type(value) is dict:
            items = {key: self._plain_data(element, f"{where}[{key!r}]") for key, element in value.items()}
            return {key: element for key, element in items.items() if element is not _NOTHING}
        try:
            json_codec.encode(value, where, [])
        except TypeError:
            more = "" if isinstance(value, StubObject) else " that holds other objects"
            self.left_out.append(f"{where}, a {described(value)}{more}")
            return _NOTHING
        return value

    # ---------------------------------------------------------------- the model

    def _parameters(self) -> dict[str, object]:
        buffers = set(self.head.get(list, "buffer_names"))
        aliases = self._aliases()
        entries: dict[str, Any] = {}
        for name in [name for name in self.module if name not in buffers] + list(self.trained):
            if clean(name) in entries or name in aliases:
                continue
            group = self.trained.get(name)
            shape, dtype, values = self._trained(name, group) if group is not None else self._frozen(name)
            self._add("parameters/", name, shape, dtype, values)
            entries[clean(name)] = {
                "shape": list(shape),
                "dtype": CODES[self.module[name].dtype if name in self.module else dtype],
                "trained": group is not None,
                "aliases": [clean(alias) for alias, stored in aliases.items() if stored == name],
            }
        return entries

    def _aliases(self) -> dict[str, str]:
        """Return further names of tied parameters, with the name under which each is stored.

        Below stage 3 DeepSpeed compares addresses. All empty parameters have the same, but are not tied.
        """
        shared = self.head.content.get("shared_params") or {}
        return {
            alias: name
            for alias, name in shared.items()
            if self.files.stage == 3 or alias not in self.module or self.module[alias].numel()
        }

    def _trained(self, name: str, group: Group) -> tuple[tuple[int, ...], torch.dtype, Callable[[], torch.Tensor]]:
        values = partial(gather, group.masters, group.slices[name], group.shapes[name])
        return group.shapes[name], group.masters[0].dtype, values

    def _frozen(self, name: str) -> tuple[tuple[int, ...], torch.dtype, Callable[[], torch.Tensor]]:
        if self.files.stage < 3:
            value = self.module[name]
            return tuple(value.shape), value.dtype, lambda: value
        shape = tuple(self.head.get(torch.Size, "frozen_param_shapes", name))
        flat = [file.get(torch.Tensor, "frozen_param_fragments", name).flatten() for file in self.files.model]
        part = -(-math.prod(shape) // len(flat))
        if any(values.numel() != part for values in flat):
            raise CheckpointError(
                f"'{self.files.directory}': expected a part of {part} elements of frozen parameter '{name}' of shape "
                f"{shape} in the model states of each rank, got {[values.numel() for values in flat]}"
            )
        return shape, flat[0].dtype, partial(gather, flat, partition_slices(math.prod(shape), len(flat)), shape)

    def _buffers(self) -> dict[str, Any]:
        entries: dict[str, dict[str, Any]] = {}
        first_names: dict[tuple[Any, ...], str] = {}
        for name in self.head.get(list, "buffer_names"):
            value = self.module.get(name)
            if value is None:
                continue
            memory = (
                value.untyped_storage().data_ptr(),
                value.storage_offset(),
                value.dtype,
                value.shape,
                value.stride(),
            )
            first = first_names.setdefault(memory, name)
            if first != name and value.numel():  # one buffer under two names
                entries[clean(first)]["aliases"].append(clean(name))
                continue
            self._add("buffers/", name, tuple(value.shape), value.dtype, partial(_same, value))
            entries[clean(name)] = {"shape": list(value.shape), "dtype": CODES[value.dtype], "aliases": []}
        return entries

    # ---------------------------------------------------------------- the optimizer

    def _optimizer(self) -> dict[str, object]:
        groups: dict[int, dict[str, Any]] = {}
        scalars: dict[str, dict[str, Any]] = {}
        for group in self.groups:
            settings = dict(self.settings[group.number]) if self.settings is not None else {}
            if group.number not in groups:
                values = {key: value for key, value in settings.items() if key not in _NOT_HYPERPARAMETERS}
                if not values.pop("bias_correction", True):  # torch's optimizers always correct the bias
                    self.left_out.append(f"parameter group {group.number}['bias_correction'], which is False")
                values = self._plain_data(values, f"parameter group {group.number}")
                groups[group.number] = {"names": [], "values": values}
            groups[group.number]["names"] += [clean(name) for name in group.shapes]
            self._add_states(group, scalars)
            if "step" in settings and "step" not in group.states[0]:  # some optimizers count steps in the param group
                _set_number(scalars, "step", group, as_count("step", settings["step"]))
        if self.settings is None:
            self.left_out.append("the settings of the parameter groups, which an elastic checkpoint does not contain")
        # A group without parameters has no flat tensor; groups are loaded by their number.
        count = max(len(self.settings or ()), len(groups))
        numbered = [groups.get(number, {"names": [], "values": {}}) for number in range(count)]
        return {"type": self._optimizer_type(), "groups": numbered, "scalars": scalars}

    def _optimizer_type(self) -> str:
        """Return the torch class with the same states, inferred from the config, the settings or the states."""
        config = self.head.content.get("ds_config")
        named = config.get("optimizer") if isinstance(config, dict) else None
        if isinstance(named, dict) and isinstance(named.get("type"), str):
            optimizer_class: str = named["type"]
            return {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}.get(optimizer_class.lower(), optimizer_class)
        settings = self.settings[0] if self.settings else {}
        if "decoupled_weight_decay" in settings and "amsgrad" in settings:
            return "AdamW" if settings["decoupled_weight_decay"] else "Adam"
        for key, optimizer_class in (
            ("momentum_decay", "NAdam"),
            ("decoupled_weight_decay", "RAdam"),
            ("nesterov", "SGD"),
        ):
            if key in settings:
                return optimizer_class
        states = {state for group in self.groups for state in group.states[0]}
        return "AdamW" if states >= {"exp_avg", "exp_avg_sq"} else "an unknown optimizer"

    def _add_states(self, group: Group, scalars: dict[str, dict[str, object]]) -> None:
        for state, value in group.states[0].items():
            of_ranks = [states.get(state) for states in group.states]
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() >= group.masters[0].numel():
                flat = flat_states(group, state, of_ranks)
                for name, shape in group.shapes.items():
                    values = partial(gather, flat, group.slices[name], shape)
                    self._add(f"optimizer/{state}/", name, shape, flat[0].dtype, values)
            elif value is not None:
                _set_number(scalars, state, group, common_number(group, state, of_ranks))

    # ---------------------------------------------------------------- the rest

    def _lr_scheduler(self, saved: object, config: object) -> dict[str, object] | None:
        """Return the schedule's state. Its ``type`` is None if the config does not name it."""
        if saved is None:
            return None
        named = config.get("scheduler") if isinstance(config, dict) else None
        schedule = named.get("type") if isinstance(named, dict) else None
        state = self._plain_data(saved, "the state of the learning rate schedule")
        if state is _NOTHING:
            return None
        if isinstance(saved, dict) and set(saved) == {"last_batch_iteration"}:
            state = {"last_epoch": state["last_batch_iteration"] + 1}  # DeepSpeed counts from -1
        return {"type": schedule, "state": state}

    def _loss_scaler(self) -> dict[str, object] | None:
        if not any(value.dtype == torch.float16 for name, value in self.module.items() if name in self.trained):
            return None
        saved = self.files.optimizer[0].content["optimizer_state_dict"].get("loss_scaler")
        fields = saved.fields if isinstance(saved, StubObject) else {}
        if not isinstance(fields.get("cur_scale"), (int, float)):
            self.left_out.append("the loss scale, which has an unknown format")
            return None
        if not fields.get("dynamic"):
            return {"scale": float(fields["cur_scale"]), "good_steps": 0, "hysteresis_left": 1}
        good = fields["cur_iter"] - fields["last_overflow_iter"] - 1
        return {
            "scale": float(fields["cur_scale"]),
            # To raise the scale after the start or an overflow, DeepSpeed needs one good step more than zerolite.
            "good_steps": max(0, good - 1) % fields["scale_window"],
            "hysteresis_left": max(1, fields["cur_hysteresis"]),
        }

    def _counters(self, config: object) -> dict[str, object]:
        steps = self.head.get(int, "global_steps")
        sizes = config if isinstance(config, dict) else {}
        accumulation = sizes.get("gradient_accumulation_steps")
        batch, micro = sizes.get("train_batch_size"), sizes.get("train_micro_batch_size_per_gpu")
        if not isinstance(accumulation, int) and isinstance(batch, int) and isinstance(micro, int) and micro > 0:
            accumulation = batch // (micro * self.files.world_size)
        return {
            "global_steps": steps,
            "skipped_steps": self.head.get(int, "skipped_steps"),
            "skipped_in_a_row": 0,
            "micro_steps": steps * (accumulation if isinstance(accumulation, int) else 1),
            "last_norm": None,
            "weight_unit": 1.0,
        }

    def _client_state(self) -> dict[str, object]:
        head = self.head.content
        for name in ("data_sampler", "random_ltd"):
            if head.get(name) is not None:
                self.left_out.append(f"the state of DeepSpeed's {name}")
        client = {key: value for key, value in head.items() if key not in _MODEL_KEYS}
        state: dict[str, Any] = self._plain_data(client, "client_state")
        return state


_NOTHING: Any = object()


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def _set_number(scalars: dict[str, dict[str, object]], state: str, group: Group, number: object) -> None:
    scalars.setdefault(state, {}).update({clean(name): number for name in group.shapes})
