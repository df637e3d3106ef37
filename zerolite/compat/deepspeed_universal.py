"""Contents of a universal checkpoint of DeepSpeed in zerolite's terms: tensors by key, and the contents of state.json.

DIR/latest_universal                         the tag
DIR/<tag>/*mp_rank_00_model_states.pt        buffers, names, counters, schedule, the client's state: at stages 1 and 2
                                             one file, with frozen weights; at stage 3 one of each rank
DIR/<tag>/zero/optimizer_state.pt            param groups and loss scale
DIR/<tag>/zero/<parameter>/fp32.pt           master weights; also exp_avg.pt, exp_avg_sq.pt, and step.pt below stage 3
"""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zerolite.checkpoint.directory import MANIFEST
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.flat_ranges import Shard, everything
from zerolite.checkpoint.state import clean
from zerolite.compat.safe_unpickle import load_safely
from zerolite.utils.dtypes import CODES

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
_STATES = ("exp_avg", "exp_avg_sq")  # DeepSpeed's converter knows no others
# DeepSpeed's own entries in a file of model states; all other entries are the client's state.
_MODEL_KEYS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler "
    "data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config "
    "ds_version checkpoint_parallel_dimensions universal_checkpoint_info sparse_tensor_module_names".split()
)
# Entries of a parameter group that are not hyperparameters: implementation switches, counters, and the parameters.
_NOT_HYPERPARAMETERS = frozenset(
    "params param_names step foreach fused capturable differentiable bias_correction _ds_source_param_group_id".split()
)


def find_checkpoint(directory: Path, tag: str | None) -> Path:
    """Return the directory of the checkpoint ``tag`` in ``directory``. Raises CheckpointError if there is none.

    Without a tag it is ``directory`` itself if it is a checkpoint of DeepSpeed, otherwise the one that ``latest`` names
    if zerolite has written it, otherwise the one that ``latest_universal`` or else ``latest`` names.
    """
    if tag is None:
        if any(directory.glob("*_model_states.pt")):
            return directory
        tag = _named_in(directory / "latest")
        if tag is None or not (directory / tag / MANIFEST).is_file():
            tag = _named_in(directory / "latest_universal") or tag
        if tag is None:
            raise CheckpointError(
                f"no DeepSpeed checkpoint in '{directory}': expected a file 'latest_universal' or files "
                "*_model_states.pt, got neither; pass the tag, or the directory of the checkpoint itself"
            )
    if not (directory / tag).is_dir():
        tags = sorted(path.name for path in directory.glob("*") if path.is_dir())
        raise CheckpointError(f"no checkpoint {tag!r} in '{directory}'; the directories there are {tags}")
    return directory / tag


def _named_in(path: Path) -> str | None:
    return path.read_text(errors="replace").strip() or None if path.is_file() else None


class UniversalReader:
    """A universal checkpoint in zerolite's terms.

    Attributes:
        state: content of state.json, not yet encoded.
        tensors: tensors with keys as in tensors.json; their files are mapped, not read.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or of another kind, or its files would run code.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: list[Shard] = []
        self.fragments: list[dict[str, torch.Tensor]] = []
        self.models = self._model_files()
        self.head = load_safely(self.models[0])
        self.optimizer = load_safely(path / "zero" / "optimizer_state.pt")
        try:
            self._check_head()
            self.config: dict[str, Any] = self.head.get("ds_config") or {}
            self.deepspeed_version = str(self.head["ds_version"])
            self.state = self._read_state()
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise CheckpointError(
                f"'{path}' does not have the layout of DeepSpeed 0.19 ({type(error).__name__}: {error})"
            ) from error

    def _model_files(self) -> list[Path]:
        """Return the files of model states, in rank order. Raises CheckpointError for another kind of checkpoint."""
        path = self.path
        found = {file: _MODEL.fullmatch(file.name) for file in path.glob("*_model_states.pt")}
        if not found:
            raise CheckpointError(f"'{path}' is no DeepSpeed checkpoint: it has no files *_model_states.pt")
        if not (path / "zero" / "optimizer_state.pt").is_file():
            raise CheckpointError(
                f"'{path}' has the files of each rank; expected a universal checkpoint of DeepSpeed, with a directory "
                "'zero'. Convert it where DeepSpeed is installed: `python -m deepspeed.checkpoint.ds_to_universal "
                f"--input_folder {path} --output_folder {path}_universal --inject_missing_state`. For the weights "
                "alone, DeepSpeed's zero_to_fp32.py writes files that torch and safetensors load"
            )
        foreign = sorted(file.name for file, match in found.items() if match is None)
        if foreign:
            raise CheckpointError(
                f"'{path}' is of a pipeline, tensor parallelism or a mixture of experts, which zerolite does not "
                f"import; found '{foreign[0]}'"
            )
        return sorted(found, key=lambda file: int(found[file][1] or 0))  # type: ignore[index]

    def _check_head(self) -> None:
        head = self.head
        self.world_size = int(head["dp_world_size"])
        self.is_partitioned = self.models[0].name.startswith("zero_pp_rank_")
        if any(head.get(key) for key in ("ds_autoep_layers", "autoep_layers", "num_experts")):
            raise CheckpointError(f"'{self.path}' is of a mixture of experts, which zerolite does not import")
        expected = self.world_size if self.is_partitioned else 1
        if len(self.models) != expected:
            names = [path.name for path in self.models]
            raise CheckpointError(f"'{self.path}': expected {expected} files *_model_states.pt, got {names}")
        zero = (head.get("ds_config") or {}).get("zero_optimization", {})
        self.stage = 3 if self.is_partitioned else zero.get("stage", 2)
        if self.stage < 3 and self.world_size > 1 and zero.get("round_robin_gradients"):
            raise CheckpointError(
                f"'{self.path}' is of a run with 'round_robin_gradients', in which DeepSpeed's converter takes values "
                "of one parameter for those of another; expected a checkpoint without it. Load it with DeepSpeed, "
                "without that key, save it, and convert that one"
            )

    def _read_state(self) -> dict[str, Any]:
        module: dict[str, Any] = self.head["module"]
        self.module = {name: value for name, value in module.items() if isinstance(value, torch.Tensor)}
        extra = {}  # state of modules with get_extra_state
        for name in module.keys() - self.module.keys():
            owner, _, last = name.rpartition(".")
            if last != "_extra_state":
                raise TypeError(f"the model's state has '{name}', a {type(module[name]).__name__}")
            extra[clean(owner)] = module[name]
        of_data = {key: self.head[key] for key in ("data_sampler", "random_ltd") if self.head.get(key) is not None}
        client = {key: value for key, value in self.head.items() if key not in _MODEL_KEYS} | of_data
        optimizer = self._read_optimizer()
        return {
            "parameters": self._read_parameters(),
            "buffers": self._read_buffers(),
            "extra": extra,
            "optimizer": optimizer,
            "lr_scheduler": self._read_schedule(),
            "loss_scaler": self._read_loss_scaler(),
            "counters": self._read_counters(),
            "loaders": None,
            "client_state": client,
        }

    # ---------------------------------------------------------------- the model

    def _read_parameters(self) -> dict[str, Any]:
        # Below stage 3 DeepSpeed compares addresses. All empty parameters have the same, but are not tied.
        aliases = {
            alias: name
            for alias, name in (self.head.get("shared_params") or {}).items()
            if self.is_partitioned or alias not in self.module or self.module[alias].numel()
        }
        entries: dict[str, Any] = {}
        for name in dict.fromkeys([*self.module, *self.shapes]):
            if name in self.head["buffer_names"] or name in aliases:
                continue
            trained = name in self.shapes
            key = f"parameters/{clean(name)}"
            shard = Shard.whole(key, self._tensor(name, "fp32")) if trained else self._frozen(name, key)
            self._add(shard)
            entries[clean(name)] = {
                "shape": list(shard.shape),
                "dtype": CODES[self.module[name].dtype if name in self.module else shard.dtype],
                "trained": trained,
                "aliases": [clean(alias) for alias, stored in aliases.items() if stored == name],
            }
        return entries

    def _add(self, shard: Shard) -> None:
        if shard.dtype not in CODES:
            raise CheckpointError(f"'{self.path}': {shard.key} is of {shard.dtype}, which no checkpoint can hold")
        self.tensors.append(shard)

    def _tensor(self, name: str, state: str) -> torch.Tensor:
        """Return ``fp32`` or an optimizer state of a trained parameter, in the parameter's shape."""
        path = self.path / "zero" / name / f"{state}.pt"
        value, shape = load_safely(path), self.shapes[name]
        value = value["param"] if isinstance(value, dict) else value  # at stage 3 the file is the flat tensor
        if not isinstance(value, torch.Tensor) or value.numel() != math.prod(shape):
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise CheckpointError(f"'{path}': expected a tensor of shape {shape}, got {got}")
        return value.view(shape)

    def _frozen(self, name: str, key: str) -> Shard:
        shapes = self.head.get("frozen_param_shapes") or {}
        if not self.is_partitioned or name not in shapes:
            return Shard.whole(key, self.module[name])
        shape = tuple(shapes[name])
        if not self.fragments:
            self.fragments = [load_safely(path)["frozen_param_fragments"] for path in self.models]
        parts = [fragments[name].flatten() for fragments in self.fragments]
        if any(part.numel() != -(-math.prod(shape) // len(parts)) for part in parts):
            raise CheckpointError(
                f"'{self.path}': expected equal parts of frozen parameter '{name}' of shape {shape} in the model "
                f"states of each rank, got {[part.numel() for part in parts]} elements"
            )
        return Shard(key, shape, parts[0].dtype, everything(shape), partial(_joined, parts, shape))

    def _read_buffers(self) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        first_names: dict[tuple[Any, ...], str] = {}
        for name in self.head["buffer_names"]:
            if name not in self.module:
                continue
            value = self.module[name]
            storage = value.untyped_storage().data_ptr()
            place = (storage, value.storage_offset(), value.dtype, value.shape, value.stride())
            first = first_names.setdefault(place, name)
            if first != name and value.numel():  # one buffer under two names
                entries[clean(first)]["aliases"].append(clean(name))
                continue
            self._add(Shard.whole(f"buffers/{clean(name)}", value))
            entries[clean(name)] = {"shape": list(value.shape), "dtype": CODES[value.dtype], "aliases": []}
        return entries

    # ---------------------------------------------------------------- the optimizer

    def _read_optimizer(self) -> dict[str, Any]:
        flat_groups, settings = self.head["param_shapes"], self.optimizer["param_groups"]
        if not all(group.get("bias_correction", True) for group in settings):
            raise CheckpointError(f"'{self.path}' is of an Adam without bias_correction, which torch's optimizers have")
        self.shapes = {name: tuple(shape) for group in flat_groups for name, shape in group.items()}
        # DeepSpeed's optimizer has a flat tensor for each group, at stage 3 for each of its subgroups.
        numbers = [number for number, group in enumerate(settings) for _ in group["params"]]
        if len(numbers) != len(flat_groups):
            raise CheckpointError(
                f"'{self.path}': expected {len(flat_groups)} flat groups of parameters in zero/optimizer_state.pt as "
                f"in the model states, got {len(numbers)}; are all files from the same save?"
            )
        groups: list[dict[str, Any]] = [
            {"names": [], "values": {key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}}
            for group in settings
        ]
        steps: dict[str, torch.Tensor] = {}
        for index, (number, names) in enumerate(zip(numbers, flat_groups, strict=True)):
            groups[number]["names"] += [clean(name) for name in names]
            for name in names:
                for state in _STATES:  # there are none before the first step
                    if (self.path / "zero" / name / f"{state}.pt").is_file():
                        self._add(Shard.whole(f"optimizer/{state}/{clean(name)}", self._tensor(name, state)))
                step = self._step(name, index, settings[number])
                if step is not None:
                    steps[clean(name)] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
        return {"type": self._optimizer_type(), "groups": groups, "scalars": {"step": steps} if steps else {}}

    def _step(self, name: str, index: int, group: dict[str, Any]) -> Any:
        """Return the count of steps: of the parameter, else of its flat group at stage 3, else of its param group."""
        path = self.path / "zero" / name / "step.pt"
        if path.is_file():
            return load_safely(path)
        state = self.optimizer.get("optimizer_state_dict", {}).get("state", {}).get(index, {})
        return state.get("step", group.get("step"))

    def _optimizer_type(self) -> str:
        """Return the torch class that the config names; any class of Adam's states stands for one of the user's."""
        named = self.config.get("optimizer")
        if isinstance(named, dict) and isinstance(named.get("type"), str):
            optimizer_class: str = named["type"]
            return {"adam": "Adam", "adamw": "AdamW"}.get(optimizer_class.lower(), optimizer_class)
        return "AdamW"

    # ---------------------------------------------------------------- the rest

    def _read_schedule(self) -> dict[str, Any] | None:
        """Return the schedule's state. Its ``type`` is None if the config does not name it."""
        saved, named = self.head.get("lr_scheduler"), self.config.get("scheduler")
        if saved is None:
            return None
        state = dict(saved)
        if set(saved) == {"last_batch_iteration"}:
            state = {"last_epoch": saved["last_batch_iteration"] + 1}  # DeepSpeed counts from -1
        return {"type": named.get("type") if isinstance(named, dict) else None, "state": state}

    def _read_loss_scaler(self) -> dict[str, Any] | None:
        if not any(self.module[name].dtype == torch.float16 for name in self.shapes if name in self.module):
            return None
        fields = self.optimizer["loss_scaler"].fields
        if not fields.get("dynamic"):
            return {"scale": float(fields["cur_scale"]), "good_steps": 0, "hysteresis_left": 1}
        good = fields["cur_iter"] - fields["last_overflow_iter"] - 1
        return {
            "scale": float(fields["cur_scale"]),
            # To raise the scale after the start or an overflow, DeepSpeed needs one good step more than zerolite.
            "good_steps": max(0, good - 1) % fields["scale_window"],
            "hysteresis_left": max(1, fields["cur_hysteresis"]),
        }

    def _read_counters(self) -> dict[str, Any]:
        accumulation = self.config.get("gradient_accumulation_steps")
        sizes: Any = (self.config.get("train_batch_size"), self.config.get("train_micro_batch_size_per_gpu"))
        batch, micro = sizes
        if not isinstance(accumulation, int):
            known = isinstance(batch, int) and isinstance(micro, int)
            accumulation = batch // (micro * self.world_size) if known else 1
        return {
            "global_steps": self.head["global_steps"],
            "skipped_steps": self.head["skipped_steps"],
            "skipped_in_a_row": 0,
            "micro_steps": self.head["global_steps"] * accumulation,
            "last_norm": None,
            "weight_unit": 1.0,
        }


def _joined(parts: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    return torch.cat(parts)[: math.prod(shape)].view(shape)
