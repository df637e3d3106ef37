"""load_config: sources, types, "auto", frozenness. Errors of the keys themselves are in test_config_errors.py."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from zerolite.config import ConfigError, ZeroliteConfig, load_config
from zerolite.config.load import block_model

FULL: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}},
    "fp16": {
        "enabled": True,
        "auto_cast": True,
        "loss_scale": 0,
        "initial_scale_power": 12,
        "loss_scale_window": 500,
        "hysteresis": 3,
        "consecutive_hysteresis": True,
        "min_loss_scale": 2,
        "fp16_master_weights_and_grads": False,
        "output_dtype": "fp16",
    },
    "bf16": {
        "enabled": False,
        "immediate_grad_update": True,
        "check_grad_overflow": False,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
        "output_dtype": "bf16",
    },
    "torch_autocast": {
        "enabled": False,
        "dtype": "float16",
        "lower_precision_safe_modules": ["torch.nn.Linear"],
        "output_dtype": "fp32",
    },
    "fp32_modules": ["*.router", "norm"],
    "gradient_clipping": 1,
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "contiguous_gradients": False,
        "reduce_scatter": False,
        "ignore_unused_parameters": False,
        "whole_parameters": True,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "buffer_count": 6,
            "pin_memory": False,
            "ratio": 1,
            "fast_init": True,
            "pipeline_read": True,
            "pipeline_write": True,
            "pipeline": True,
        },
        "offload_param": {
            "device": "none",
            "nvme_path": "scratch",
            "buffer_count": 2,
            "buffer_size": 1e6,
            "max_in_cpu": 0,
            "pin_memory": False,
        },
        "sub_group_size": 1e7,
        "stage3_prefetch_bucket_size": 1e7,
        "stage3_param_persistence_threshold": 1000,
        "stage3_model_persistence_threshold": 20_000,
        "stage3_max_live_parameters": 5e8,
        "stage3_max_reuse_distance": 3e8,
        "stage3_module_granularity_threshold": 4096,
        "stage3_gather_16bit_weights_on_model_save": True,
        "leaf_modules": ["*MoeBlock", "decoder.*"],
        "leaf_module": {"classes": ["package.Moe"], "names": ["layers.0.mlp"], "name_suffixes": ["mlp.experts"]},
    },
    "communication_data_type": "fp32",
    "zero_allow_untested_optimizer": True,
    "divide_plain_backward": True,
    "prescale_gradients": False,
    "gradient_predivide_factor": 2,
    "data_types": {"grad_accum_dtype": "fp16", "buffer_dtype": "bf16"},
    "steps_per_print": 10,
    "wall_clock_breakdown": True,
    "comms_logger": {
        "enabled": True,
        "verbose": True,
        "prof_all": False,
        "debug": True,
        "prof_ops": ["all_reduce", "all_gather"],
    },
    "memory_breakdown": True,
    "flops_profiler": {
        "enabled": True,
        "recompute_fwd_factor": 1,
        "profile_step": 5,
        "module_depth": 2,
        "top_modules": 3,
        "detailed": False,
        "output_file": "profile.txt",
        "peak_tflops": 989.5,
    },
    "csv_monitor": {"enabled": True, "output_path": "", "job_name": "a"},
    "jsonl_monitor": {"enabled": True, "output_path": "b/c", "job_name": "d"},
    "tensorboard": {"enabled": True, "output_path": "/e", "job_name": "f"},
    "wandb": {"enabled": True, "group": "g", "team": "h", "project": "i"},
    "elasticity": {
        "enabled": False,
        "max_train_batch_size": 64,
        "micro_batch_sizes": [2, 4],
        "min_gpus": 2,
        "max_gpus": 8,
        "num_gpus_per_node": 2,
        "prefer_larger_batch": False,
        "ignore_non_elastic_batch_info": True,
        "min_time": 20,
        "version": 0.1,
        "model_parallel_size": 1,
    },
    "dataloader_drop_last": True,
    "dump_state": True,
    "max_consecutive_skipped_steps": 7,
    "consistency_check_interval": 25,
    "memory_check": "warn",
    "desync_timeout_s": 30,
    "check_collectives": True,
    "checkpoint": {"keep_last": 3, "overwrite": True, "timeout_s": 60},
    "tensor_parallel": {
        "size": 2,
        "autotp_size": 2,
        "plan": {"blocks.*.up": "column", "blocks.*.qkv": {"style": "column", "parts": 3}},
        "sequence_parallel": False,
        "divide": ["blocks.*.heads"],
    },
    "pipeline": {
        "stages": 1,
        "split": ["blocks.6"],
        "partition_method": "type:Block",
        "schedule": "zero_bubble",
        "chunks": 2,
        "activation_checkpoint_interval": 3,
    },
    "aio": {
        "block_size": 65536,
        "queue_depth": 32,
        "thread_count": 2,
        "intra_op_parallelism": 2,
        "single_submit": True,
        "overlap_events": False,
        "checksums": True,
    },
    "activation_checkpointing": {
        "partition_activations": True,
        "cpu_checkpointing": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": 12,
        "synchronize_checkpoint_boundary": True,
        "profile": True,
        "modules": ["blocks.*", "Block"],
    },
}

NAMES = [
    "torch_autocast.lower_precision_safe_modules",
    "fp32_modules",
    "zero_optimization.leaf_modules",
    "zero_optimization.leaf_module.classes",
    "zero_optimization.leaf_module.names",
    "zero_optimization.leaf_module.name_suffixes",
    "activation_checkpointing.modules",
    "tensor_parallel.divide",
    "pipeline.split",
]
LISTS = [*NAMES, "elasticity.micro_batch_sizes", "comms_logger.prof_ops"]
TEXTS = [
    *(
        f"{block}.{key}"
        for block in ("csv_monitor", "jsonl_monitor", "tensorboard")
        for key in ("output_path", "job_name")
    ),
    *(f"wandb.{key}" for key in ("group", "team", "project")),
    "flops_profiler.output_file",
]
OFFLOADS = ["zero_optimization.offload_optimizer", "zero_optimization.offload_param"]
PATHS = [f"{block}.nvme_path" for block in OFFLOADS]
DEVICES = [f"{block}.device" for block in OFFLOADS]


def errors_of(source: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    return dict(caught.value.errors)


def get(config: BaseModel, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
        if path in (f"{block}.{name}" for block in OFFLOADS) and name != "device":
            value["device"] = "none"
    return value


def plain_paths(model: type[BaseModel] = ZeroliteConfig, prefix: str = "") -> list[str]:
    paths = []
    for name, info in model.model_fields.items():
        inner = block_model(info.annotation)
        paths += plain_paths(inner, f"{prefix}{name}.") if inner else [prefix + name]
    return paths


# ------------------------------------------------------------------ every key


def test_every_key_is_kept() -> None:
    config = load_config(FULL)
    for path in plain_paths():
        expected: Any = FULL
        for name in path.split("."):
            expected = expected[name]
        if path == "torch_autocast.dtype":
            expected = "fp16"
        if path in LISTS:
            assert isinstance(expected, list)
            expected = tuple(expected)
        assert get(config, path) == expected, path


def test_defaults() -> None:
    config = load_config({})
    expected = {
        "train_batch_size": None,
        "train_micro_batch_size_per_gpu": None,
        "gradient_accumulation_steps": None,
        "optimizer": None,
        "scheduler": None,
        "fp16.enabled": False,
        "fp16.auto_cast": False,
        "fp16.loss_scale": 0.0,
        "fp16.initial_scale_power": 16,
        "fp16.loss_scale_window": 1000,
        "fp16.hysteresis": 2,
        "fp16.consecutive_hysteresis": False,
        "fp16.min_loss_scale": 1,
        "fp16.fp16_master_weights_and_grads": False,
        "fp16.output_dtype": None,
        "bf16.enabled": False,
        "bf16.immediate_grad_update": True,
        "bf16.check_grad_overflow": True,
        "bf16.bf16_master_weights_and_grads": False,
        "bf16.bf16_optimizer_states": False,
        "bf16.output_dtype": None,
        "torch_autocast.enabled": False,
        "torch_autocast.dtype": "bf16",
        "torch_autocast.lower_precision_safe_modules": None,
        "torch_autocast.output_dtype": None,
        "fp32_modules": (),
        "gradient_clipping": 0.0,
        "zero_optimization.stage": 0,
        "zero_optimization.reduce_bucket_size": None,
        "zero_optimization.allgather_bucket_size": None,
        "zero_optimization.overlap_comm": None,
        "zero_optimization.contiguous_gradients": True,
        "zero_optimization.reduce_scatter": True,
        "zero_optimization.ignore_unused_parameters": True,
        "zero_optimization.whole_parameters": False,
        "zero_optimization.offload_optimizer.device": "none",
        "zero_optimization.offload_optimizer.nvme_path": None,
        "zero_optimization.offload_optimizer.buffer_count": 4,
        "zero_optimization.offload_optimizer.pin_memory": True,
        "zero_optimization.offload_optimizer.ratio": 1.0,
        "zero_optimization.offload_optimizer.fast_init": False,
        "zero_optimization.offload_optimizer.pipeline_read": False,
        "zero_optimization.offload_optimizer.pipeline_write": False,
        "zero_optimization.offload_optimizer.pipeline": False,
        "zero_optimization.offload_param.device": "none",
        "zero_optimization.offload_param.nvme_path": None,
        "zero_optimization.offload_param.buffer_count": 5,
        "zero_optimization.offload_param.buffer_size": 10**8,
        "zero_optimization.offload_param.max_in_cpu": 10**9,
        "zero_optimization.offload_param.pin_memory": True,
        "zero_optimization.sub_group_size": 10**9,
        "zero_optimization.stage3_prefetch_bucket_size": 50_000_000,
        "zero_optimization.stage3_param_persistence_threshold": 100_000,
        "zero_optimization.stage3_model_persistence_threshold": None,
        "zero_optimization.stage3_max_live_parameters": 10**9,
        "zero_optimization.stage3_max_reuse_distance": 10**9,
        "zero_optimization.stage3_module_granularity_threshold": None,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
        "zero_optimization.leaf_modules": (),
        "zero_optimization.leaf_module.classes": (),
        "zero_optimization.leaf_module.names": (),
        "zero_optimization.leaf_module.name_suffixes": (),
        "communication_data_type": None,
        "zero_allow_untested_optimizer": False,
        "divide_plain_backward": False,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "data_types.grad_accum_dtype": None,
        "data_types.buffer_dtype": None,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "comms_logger.enabled": False,
        "comms_logger.verbose": False,
        "comms_logger.prof_all": True,
        "comms_logger.debug": False,
        "comms_logger.prof_ops": (),
        "memory_breakdown": False,
        "flops_profiler.enabled": False,
        "flops_profiler.recompute_fwd_factor": 0.0,
        "flops_profiler.profile_step": 1,
        "flops_profiler.module_depth": -1,
        "flops_profiler.top_modules": 1,
        "flops_profiler.detailed": True,
        "flops_profiler.output_file": None,
        "flops_profiler.peak_tflops": None,
        "csv_monitor.enabled": False,
        "csv_monitor.output_path": "",
        "csv_monitor.job_name": "DeepSpeedJobName",
        "jsonl_monitor.enabled": False,
        "jsonl_monitor.output_path": "",
        "jsonl_monitor.job_name": "zerolite",
        "tensorboard.enabled": False,
        "tensorboard.output_path": "",
        "tensorboard.job_name": "DeepSpeedJobName",
        "wandb.enabled": False,
        "wandb.group": None,
        "wandb.team": None,
        "wandb.project": "deepspeed",
        "elasticity.enabled": False,
        "elasticity.max_train_batch_size": None,
        "elasticity.micro_batch_sizes": None,
        "elasticity.min_gpus": 1,
        "elasticity.max_gpus": 10_000,
        "elasticity.num_gpus_per_node": 1,
        "elasticity.prefer_larger_batch": True,
        "elasticity.ignore_non_elastic_batch_info": False,
        "elasticity.min_time": 0,
        "elasticity.version": 0.2,
        "elasticity.model_parallel_size": 1,
        "tensor_parallel.size": 1,
        "tensor_parallel.autotp_size": 0,
        "tensor_parallel.plan": "auto",
        "tensor_parallel.sequence_parallel": False,
        "tensor_parallel.divide": "auto",
        "pipeline.stages": 1,
        "pipeline.split": "auto",
        "pipeline.partition_method": "parameters",
        "pipeline.schedule": "1f1b",
        "pipeline.chunks": None,
        "pipeline.activation_checkpoint_interval": 0,
        "dataloader_drop_last": False,
        "dump_state": False,
        "max_consecutive_skipped_steps": 50,
        "memory_check": "error",
        "consistency_check_interval": 100,
        "desync_timeout_s": 300.0,
        "check_collectives": False,
        "checkpoint.keep_last": None,
        "checkpoint.overwrite": False,
        "checkpoint.timeout_s": 300.0,
        "aio.block_size": 2**20,
        "aio.queue_depth": 8,
        "aio.thread_count": None,
        "aio.intra_op_parallelism": None,
        "aio.single_submit": False,
        "aio.overlap_events": True,
        "aio.checksums": False,
        "activation_checkpointing.partition_activations": False,
        "activation_checkpointing.cpu_checkpointing": False,
        "activation_checkpointing.contiguous_memory_optimization": False,
        "activation_checkpointing.number_checkpoints": None,
        "activation_checkpointing.synchronize_checkpoint_boundary": False,
        "activation_checkpointing.profile": False,
        "activation_checkpointing.modules": (),
    }
    assert {path: get(config, path) for path in expected} == expected
    covered = set(expected) | {path for path in plain_paths() if path.startswith(("optimizer.", "scheduler."))}
    assert set(plain_paths()) <= covered


def test_defaults_pass_their_own_rules() -> None:
    assert load_config(load_config({}).model_dump()) == load_config({})


# ------------------------------------------------------------------ sources


def test_json_text() -> None:
    assert load_config(json.dumps(FULL)) == load_config(FULL)
    assert load_config("  \n" + json.dumps(FULL, indent=2)) == load_config(FULL)
    assert load_config("\ufeff{}") == load_config({})


HJSON = """
  # a comment
  train_batch_size: 8   // another
  zero_optimization: {
    stage: 2
    reduce_bucket_size: 1e9
  }
  /* and
     another */
  optimizer: {
    type: AdamW
    params: { lr: 0.001, betas: [0.9, 0.95] }
  }
"""


@pytest.mark.parametrize("text", [HJSON, "{" + HJSON + "}", '{"train_batch_size": 8,}', "train_batch_size: 8"])
def test_hjson_text(text: str) -> None:
    config = load_config(text)
    assert config.train_batch_size == 8
    if "AdamW" in text:
        assert config.zero_optimization.stage == 2
        assert config.zero_optimization.reduce_bucket_size == 10**9
        assert config.optimizer is not None
        assert config.optimizer.type == "AdamW"
        assert config.optimizer.params == {"lr": 0.001, "betas": [0.9, 0.95]}


@pytest.mark.parametrize("name", ["config.json", "config.hjson", "config", "a: b"])
@pytest.mark.parametrize("text", [json.dumps(FULL), HJSON])
def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    expected = load_config(text)
    assert load_config(file) == expected
    assert load_config(str(file)) == expected
    monkeypatch.chdir(tmp_path)
    assert load_config(name) == expected


def test_file_with_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps({"train_batch_size": 3}).encode())
    assert load_config(file).train_batch_size == 3


def test_loaded_configuration_is_returned_as_it_is() -> None:
    config = load_config(FULL)
    assert load_config(config) is config


@pytest.mark.parametrize("name", ["missing.json", "missing", "some/where/zero2.hjson", "C:\\conf.json"])
def test_missing_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = errors_of(name)[""]
    assert f'there is none at "{name}"' in message
    assert str(tmp_path) in message
    assert f'"{tmp_path / "x.json"}"' in errors_of(tmp_path / "x.json")[""]


def test_unreadable_files(tmp_path: Path) -> None:
    assert "is a directory" in errors_of(tmp_path)[""]
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"{\xff}")
    assert "UTF-8" in errors_of(binary)[""]
    assert "failed" in errors_of("a" * 5000)[""]
    empty = tmp_path / "empty.json"
    empty.write_text(" \n")
    assert "empty" in errors_of(empty)[""]


def test_the_message_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"stage": 1}')
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(file) in str(caught.value)
    assert caught.value.origin == str(file)


@pytest.mark.parametrize("text", ["", "  ", "[1, 2]", "{", '{"a": }', '{"a": 1', "{]}", '{"a": [1, 2}', "[" * 100_000])
def test_text_that_is_no_configuration(text: str) -> None:
    assert list(errors_of(text)) == [""]


def test_syntax_errors_say_where() -> None:
    message = errors_of('{\n  "train_batch_size": 8\n  "fp16": {\n')[""]
    assert "as JSON" in message and "as hjson" in message and "line 3" in message


@pytest.mark.parametrize("depth", [200, 2_000, 50_000])
def test_deep_nesting_is_an_error_not_a_crash(depth: int) -> None:
    errors_of('{"optimizer": ' * depth + "1" + "}" * depth)
    errors_of('{"optimizer": {"type": "a", "params": {"a": ' + "[" * depth + "}}}")


@pytest.mark.parametrize("source", [None, 3, [], b"{}", object()])
def test_wrong_type_of_source(source: Any) -> None:
    assert type(source).__name__ in errors_of(source)[""]


def test_the_source_is_neither_changed_nor_kept() -> None:
    source = copy.deepcopy(FULL)
    config = load_config(source)
    assert source == FULL
    source["optimizer"]["params"]["betas"].append(1)
    source["optimizer"]["params"]["lr"] = 9
    assert config == load_config(FULL)


# ------------------------------------------------------------------ numbers, booleans, dtypes

INTEGERS = [
    path
    for path in plain_paths()
    if path.rpartition(".")[2]
    in {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "initial_scale_power",
        "loss_scale_window", "hysteresis", "min_loss_scale", "stage", "reduce_bucket_size", "allgather_bucket_size",
        "steps_per_print", "max_consecutive_skipped_steps", "consistency_check_interval", "keep_last",
        "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance", "stage3_module_granularity_threshold", "max_train_batch_size", "min_gpus",
        "max_gpus", "num_gpus_per_node", "min_time", "profile_step", "top_modules", "buffer_count", "buffer_size",
        "max_in_cpu", "sub_group_size", "queue_depth", "thread_count", "intra_op_parallelism", "number_checkpoints",
        "size", "autotp_size", "stages", "chunks", "activation_checkpoint_interval",
    }
]  # fmt: skip
NUMBERS = [
    "fp16.loss_scale", "gradient_clipping", "gradient_predivide_factor", "checkpoint.timeout_s", "desync_timeout_s",
    "flops_profiler.recompute_fwd_factor", "flops_profiler.peak_tflops", "zero_optimization.offload_optimizer.ratio",
]  # fmt: skip
CHOICES = [
    "elasticity.version", "elasticity.model_parallel_size", "memory_check", "flops_profiler.module_depth",
    "aio.block_size", "tensor_parallel.plan", "pipeline.partition_method", "pipeline.schedule",
]  # fmt: skip
DTYPES = [
    *("communication_data_type", "data_types.grad_accum_dtype", "data_types.buffer_dtype"),
    *("torch_autocast.dtype", "bf16.output_dtype", "fp16.output_dtype", "torch_autocast.output_dtype"),
]
WITHOUT_BF16 = {"fp16.output_dtype", "torch_autocast.output_dtype"}
BOOLEANS = [
    path
    for path in plain_paths()
    if path not in {*INTEGERS, *NUMBERS, *DTYPES, *LISTS, *TEXTS, *CHOICES, *PATHS, *DEVICES}
    and not path.startswith(("optimizer.", "scheduler."))
]


def test_the_lists_of_keys_above_are_complete() -> None:
    assert len(INTEGERS) == 41 and len(BOOLEANS) == 53
    for path in BOOLEANS:
        assert get(load_config({}), path) in (True, False, None)


@pytest.mark.parametrize(
    ("written", "meant"),
    [(1e9, 10**9), ("1e9", 10**9), ("2", 2), (" 1.5e3 ", 1500), (4.0, 4), ("5e8", 5 * 10**8), ("0.2e1", 2),
     (2**63 - 1, 2**63 - 1), (str(2**62 + 1), 2**62 + 1)],
)  # fmt: skip
def test_integers_in_other_spellings(written: Any, meant: int) -> None:
    config = load_config({"zero_optimization": {"reduce_bucket_size": written}})
    got = config.zero_optimization.reduce_bucket_size
    assert got == meant and type(got) is int


def test_1e9_in_text() -> None:
    config = load_config('{"zero_optimization": {"reduce_bucket_size": 1e9, "allgather_bucket_size": "2E8"}}')
    assert config.zero_optimization.reduce_bucket_size == 10**9
    assert config.zero_optimization.allgather_bucket_size == 2 * 10**8


WRONG_NUMBERS = [
    True, False, "", "abc", "1e", "0x10", "1_000", "nan", "inf", "Infinity", "1 000", float("nan"), float("inf"),
    -float("inf"), [], [1], {}, {"a": 1}, -1, -1.0, "-1", 10**400, "1e400", "1e999999999",
]  # fmt: skip


@pytest.mark.fast("train_batch_size-True")
@pytest.mark.parametrize("value", [*WRONG_NUMBERS, 1.5, "1.5", 2**63, 1e300], ids=lambda v: repr(v)[:20])
@pytest.mark.parametrize("path", INTEGERS)
def test_wrong_integers(path: str, value: Any) -> None:
    if path == "steps_per_print" and value in ("Infinity", float("inf")):
        assert load_config(nested(path, value)).steps_per_print is None
        return
    errors = errors_of(nested(path, value))
    assert list(errors) == [path]
    assert "expected an integer" in errors[path] and "got" in errors[path]


@pytest.mark.fast(every=4)
@pytest.mark.parametrize("value", WRONG_NUMBERS, ids=lambda v: repr(v)[:20])
@pytest.mark.parametrize("path", NUMBERS)
def test_wrong_numbers(path: str, value: Any) -> None:
    errors = errors_of(nested(path, value))
    assert list(errors) == [path]
    assert "expected a finite number" in errors[path] and "got" in errors[path]


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("path", ["gradient_clipping", "train_batch_size", "optimizer.params.lr"])
def test_not_finite_in_json_text(path: str, text: str) -> None:
    value = json.dumps(nested(path, 12345)).replace("12345", text).replace('"params"', '"type": "SGD", "params"')
    assert list(errors_of(value)) == [path]


def test_not_finite_deep_in_params() -> None:
    params = {"betas": [0.9, float("nan")], "more": {"x": [[float("inf")]]}}
    errors = errors_of({"optimizer": {"type": "Adam", "params": params}})
    assert list(errors) == ["optimizer.params.betas[1]", "optimizer.params.more.x[0][0]"]


@pytest.mark.parametrize(
    ("path", "value"),
    [("train_batch_size", 0), ("steps_per_print", 0), ("zero_optimization.reduce_bucket_size", 0),
     ("fp16.loss_scale_window", 0), ("fp16.hysteresis", 0), ("fp16.min_loss_scale", 0),
     ("fp16.initial_scale_power", 128), ("gradient_predivide_factor", 0), ("train_batch_size", 2**31),
     ("zero_optimization.stage", 4), ("zero_optimization.stage", -1), ("gradient_accumulation_steps", 0),
     ("train_micro_batch_size_per_gpu", 0)],
)  # fmt: skip
def test_out_of_range(path: str, value: int) -> None:
    assert list(errors_of(nested(path, value))) == [path]


def test_a_time_that_is_off_or_long_enough() -> None:
    for written, meant in ((0, 0.0), ("0", 0.0), (1, 1.0), (2.5, 2.5), ("1e3", 1000.0)):
        got = load_config({"desync_timeout_s": written}).desync_timeout_s
        assert got == meant and type(got) is float
    for value in (0.5, -1, -0.1, 1e-9):
        sentence = errors_of({"desync_timeout_s": value})["desync_timeout_s"]
        assert f"expected a finite number of at least 1, or 0, got {value}" in sentence


def test_the_remedy_for_a_fraction() -> None:
    assert "write 1 or 2" in errors_of({"steps_per_print": 1.5})["steps_per_print"]


@pytest.mark.fast(every=11)
@pytest.mark.parametrize("value", [0, 1, 0.0, 1.0, "true", "false", "True", "yes", [], {}], ids=repr)
@pytest.mark.parametrize("path", BOOLEANS)
def test_only_booleans_are_booleans(path: str, value: Any) -> None:
    errors = errors_of(nested(path, value))
    assert list(errors) == [path]
    assert "expected true" in errors[path]


@pytest.mark.fast(every=3)
@pytest.mark.parametrize("path", [*INTEGERS, *BOOLEANS, *NUMBERS, *DTYPES, *CHOICES])
def test_null_only_where_it_means_something(path: str) -> None:
    default = get(load_config({}), path)
    if default is None or path.endswith((".sub_group_size", ".stages")):
        assert get(load_config(nested(path, None)), path) == default
    else:
        assert list(errors_of(nested(path, None))) == [path]


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("fp32", ["fp32", "float32", "float", "torch.float32", "torch.float", "FP32"]),
        ("fp16", ["fp16", "float16", "half", "torch.float16", "torch.half"]),
        ("bf16", ["bf16", "bfloat16", "torch.bfloat16", "BF16"]),
    ],
)
def test_dtype_spellings(name: str, spellings: list[str]) -> None:
    for spelling in spellings:
        assert load_config({"communication_data_type": spelling}).communication_data_type == name
        if name != "fp32":
            assert load_config({"torch_autocast": {"dtype": spelling}}).torch_autocast.dtype == name


def test_torch_dtypes_themselves() -> None:
    torch = pytest.importorskip("torch")
    assert load_config({"communication_data_type": torch.bfloat16}).communication_data_type == "bf16"
    assert load_config({"torch_autocast": {"dtype": torch.half}}).torch_autocast.dtype == "fp16"
    assert list(errors_of({"communication_data_type": torch.int8})) == ["communication_data_type"]


@pytest.mark.fast("communication_data_type-fp8")
@pytest.mark.parametrize("value", ["fp8", "int8", "none", "", 16, True, ["fp16"], {}])
@pytest.mark.parametrize("path", DTYPES)
def test_wrong_dtypes(path: str, value: Any) -> None:
    errors = errors_of(nested(path, value))
    assert list(errors) == [path]
    assert 'expected "' in errors[path] and ('"bf16"' in errors[path]) is (path not in WITHOUT_BF16)


def test_outputs_stay_in_the_blocks_own_dtype_or_become_fp32() -> None:
    assert load_config({"bf16": {"output_dtype": "bfloat16"}}).bf16.output_dtype == "bf16"
    for block, dtype in (("bf16", "fp16"), ("fp16", "bf16"), ("torch_autocast", "bf16")):
        assert list(errors_of({block: {"output_dtype": dtype}})) == [f"{block}.output_dtype"]


def test_autocast_has_no_fp32() -> None:
    assert list(errors_of({"torch_autocast": {"dtype": "fp32"}})) == ["torch_autocast.dtype"]


@pytest.mark.fast("torch_autocast.lower_precision_safe_modules-torch.nn.Linear")
@pytest.mark.parametrize("value", ["torch.nn.Linear", [1], [""], {"a": 1}, True, [None]])
@pytest.mark.parametrize("path", NAMES)
def test_wrong_module_names(path: str, value: Any) -> None:
    errors = errors_of(nested(path, value))
    assert list(errors) == [path]
    assert "expected an array of strings" in errors[path] and "write names such as [" in errors[path]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ([], ()),
        (["all_reduce"], ("all_reduce",)),
        (["broadcast", "reduce_scatter_tensor", "reduce_scatter"], ("reduce_scatter", "broadcast")),
        (["all_gather_into_tensor", "inference_all_reduce", "barrier"], ("all_reduce", "all_gather")),
        (["all_to_all_single", "monitored_barrier"], ()),
    ],
)
def test_operations_have_deepspeeds_names_and_ours(given: list[str], meant: tuple[str, ...]) -> None:
    logger = load_config({"comms_logger": {"prof_ops": given, "prof_all": False}}).comms_logger
    assert logger.prof_ops == meant
    assert [logger.measures(name) for name in ("all_reduce", "broadcast")] == [
        "all_reduce" in meant,
        "broadcast" in meant,
    ]
    assert load_config({"comms_logger": {"prof_ops": given}}).comms_logger.measures("broadcast"), "prof_all is on"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("all_reduce", 'expected an array of strings, got the string "all_reduce"; write names such as ["all_reduce"]'),
        (None, "expected an array of strings, got null"),
        (["all_reduce", "al_gather"], 'got the string "al_gather" among them; did you mean "all_gather"?'),
        (["zzzzzz"], 'got the string "zzzzzz" among them; write some of all_reduce, reduce_scatter, all_gather, broad'),
    ],
)
def test_wrong_operations(value: Any, sentence: str) -> None:
    errors = errors_of({"comms_logger": {"prof_ops": value}})
    assert list(errors) == ["comms_logger.prof_ops"] and sentence in errors["comms_logger.prof_ops"]


def test_depths_of_modules() -> None:
    for written, meant in ((-1, -1), (0, 0), ("3", 3)):
        assert load_config({"flops_profiler": {"module_depth": written}}).flops_profiler.module_depth == meant
    assert "the nearest allowed value is -1" in errors_of({"flops_profiler": {"module_depth": -2}}).popitem()[1]


@pytest.mark.parametrize("value", ["Error", "", True, 0, ["warn"]])
def test_what_a_memory_check_may_do(value: Any) -> None:
    assert [load_config({"memory_check": word}).memory_check for word in ("error", "warn", "off")] == [
        "error",
        "warn",
        "off",
    ]
    assert 'expected "error" or "warn" or "off", got' in errors_of({"memory_check": value})["memory_check"]


@pytest.mark.parametrize("value", [2, "2", [], {}, True, [0], [1.5], [True], [None], ["x"], [2, -1], [2**31]])
def test_wrong_lists_of_sizes(value: Any) -> None:
    errors = errors_of({"elasticity": {"micro_batch_sizes": value}})
    assert list(errors) == ["elasticity.micro_batch_sizes"]
    assert "expected an" in errors["elasticity.micro_batch_sizes"] and ", got " in str(errors)


def test_lists_of_sizes() -> None:
    config = load_config({"elasticity": {"micro_batch_sizes": [2, "4", 8.0]}})
    assert config.elasticity.micro_batch_sizes == (2, 4, 8)
    assert load_config({"elasticity": {"micro_batch_sizes": "auto"}}) == load_config({})


@pytest.mark.parametrize(
    ("path", "value", "meant"),
    [("version", 0.1, 0.1), ("version", "0.2", 0.2), ("version", 0.3, None), ("version", "latest", None),
     ("model_parallel_size", 1.0, 1), ("model_parallel_size", 2, None), ("model_parallel_size", True, None)],
)  # fmt: skip
def test_numbers_of_which_only_some_are_possible(path: str, value: Any, meant: float | None) -> None:
    source = {"elasticity": {path: value}}
    if meant is not None:
        assert getattr(load_config(source).elasticity, path) == meant
    else:
        (sentence,) = errors_of(source).values()
        assert ("expected 0.1 or 0.2, got" if path == "version" else "expected 1, got") in sentence


@pytest.mark.parametrize("path", NAMES)
def test_module_names(path: str) -> None:
    assert get(load_config(nested(path, ["a", "b.*"])), path) == ("a", "b.*")
    assert get(load_config(nested(path, [])), path) == ()
    assert get(load_config(nested(path, "auto")), path) == get(load_config({}), path)


def test_null_for_module_names() -> None:
    first, *others = NAMES
    assert get(load_config(nested(first, None)), first) is None
    for path in others:
        (sentence,) = errors_of(nested(path, None)).values()
        assert "expected an array of strings" in sentence and "got null" in sentence


# ------------------------------------------------------------------ stage 3


@pytest.mark.parametrize("value", [3, 3.0, "3"])
def test_stage_3(value: Any) -> None:
    assert load_config({"zero_optimization": {"stage": value}}).zero_optimization.stage == 3


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_keys_of_stage_3_are_kept_at_every_stage(stage: int) -> None:
    keys = {key: value for key, value in FULL["zero_optimization"].items() if key.startswith(("stage3_", "leaf_"))}
    assert len(keys) == 9
    zero = load_config({"zero_optimization": {"stage": stage, **keys}}).zero_optimization
    expected = load_config(FULL).zero_optimization
    assert all(getattr(zero, key) == getattr(expected, key) for key in keys)


@pytest.mark.parametrize("key", [path for path in INTEGERS if ".stage3_" in path])
def test_sizes_of_stage_3(key: str) -> None:
    """0 has a meaning of its own for each, and a fraction has none."""
    assert get(load_config(nested(key, 0)), key) == 0
    got = get(load_config(nested(key, 5e8)), key)
    assert got == 5 * 10**8 and type(got) is int
    assert "the nearest allowed value is 0" in errors_of(nested(key, -1))[key]


def test_null_limits_of_stage_3() -> None:
    keys = ["stage3_model_persistence_threshold", "stage3_module_granularity_threshold"]
    zero = load_config({"zero_optimization": dict.fromkeys(keys)}).zero_optimization
    assert [getattr(zero, key) for key in keys] == [None, None]
    errors = errors_of({"zero_optimization": dict.fromkeys(keys, "all")})
    meanings = ["no limit", "chosen by zerolite"]
    for key, means in zip(keys, meanings, strict=True):
        assert f"null ({means})" in errors[f"zero_optimization.{key}"]


# ------------------------------------------------------------------ offload


@pytest.mark.parametrize("path", DEVICES)
def test_where_something_rests(path: str) -> None:
    stage = {"stage": 3}
    for value in ("none", None, "auto"):
        config = load_config({"zero_optimization": stage | nested(path, value)["zero_optimization"]})
        assert get(config, path) == "none" and not get(config, path.rpartition(".")[0]).enabled
    block = {"device": "nvme", "nvme_path": "/fast"}
    for device in ("cpu", "nvme"):
        zero = stage | {path.split(".")[1]: {**block, "device": device}}
        got = get(load_config({"zero_optimization": zero}), path.rpartition(".")[0])
        assert (got.device, got.enabled, got.nvme_path) == (device, True, "/fast")
    for wrong in ("CPU", "gpu", "", 1, True, []):
        sentence = errors_of(nested(path, wrong))[path]
        assert sentence.startswith('expected "none" or "cpu" or "nvme" or null, got '), sentence


@pytest.mark.parametrize("path", PATHS)
def test_a_disk_is_a_path(path: str, tmp_path: Path) -> None:
    for value, meant in (("a/b", "a/b"), (tmp_path, str(tmp_path)), (None, None)):
        assert get(load_config(nested(path, value)), path) == meant
    for wrong in ("", " ", 3, True, ["/a"], b"/a"):
        assert errors_of(nested(path, wrong))[path].startswith("expected a path or null, got ")


@pytest.mark.parametrize("path", [*OFFLOADS, "aio", "activation_checkpointing"])
def test_null_is_an_absent_block_where_deepspeed_has_it(path: str) -> None:
    assert load_config(nested(path, None)) == load_config(nested(path, {})) == load_config({})


@pytest.mark.parametrize("ratio", [0, 0.25, 1, "0.5"])
def test_a_part_of_the_states(ratio: Any) -> None:
    path = "zero_optimization.offload_optimizer.ratio"
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": ratio}}
    got = get(load_config({"zero_optimization": zero}), path)
    assert got == float(ratio) and type(got) is float
    for wrong in (1.001, -0.1, 80):
        assert "expected a finite number from 0 to 1, got" in errors_of(nested(path, wrong))[path]


def test_requests_to_a_disk_are_of_whole_blocks() -> None:
    for value, meant in ((4096, 4096), ("1e6", None), (2**20, 2**20), (4095, None), (5000, None), (2**31, None)):
        if meant is None:
            sentence = errors_of({"aio": {"block_size": value}})["aio.block_size"]
            assert "expected an integer from 4096 to 1073741824, a multiple of 4096, got" in sentence
        else:
            assert load_config({"aio": {"block_size": value}}).aio.block_size == meant
    assert "write 4096 or 8192" in errors_of({"aio": {"block_size": 5000}})["aio.block_size"]


def test_threads_have_two_names() -> None:
    cases: list[tuple[dict[str, int], int]] = [
        ({}, 1),
        ({"thread_count": 3}, 3),
        ({"intra_op_parallelism": 4}, 4),
        ({"thread_count": 2, "intra_op_parallelism": 2}, 2),
    ]
    for given, threads in cases:
        assert load_config({"aio": given}).aio.threads == threads
    config = load_config({"aio": {"intra_op_parallelism": 4}})
    assert load_config(config.model_dump()) == config


# ------------------------------------------------------------------ "auto"


@pytest.mark.fast(every=3)
@pytest.mark.parametrize("path", [*INTEGERS, *BOOLEANS, *NUMBERS, *DTYPES, *CHOICES, *PATHS, *DEVICES])
def test_auto_is_the_default(path: str) -> None:
    if path != "zero_optimization.stage":
        assert get(load_config(nested(path, "auto")), path) == get(load_config({}), path)


def test_an_automatic_stage_is_kept_for_whoever_knows_the_device() -> None:
    config = load_config({"zero_optimization": {"stage": "auto", "reduce_scatter": False}, "train_batch_size": 8})
    assert config.zero_optimization.stage == config.resolve(2).zero_optimization.stage == "auto"
    assert load_config(config.model_dump()) == config
    elastic = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2]}
    resolved = load_config({"zero_optimization": {"stage": "auto"}, "elasticity": elastic}).resolve(4)
    assert (resolved.zero_optimization.stage, resolved.train_batch_size) == ("auto", 8)
    for value in ("Auto", "", "3x"):
        sentence = errors_of({"zero_optimization": {"stage": value}})["zero_optimization.stage"]
        assert 'expected an integer from 0 to 3 or "auto", got the string' in sentence


@pytest.mark.parametrize("block", [name for name in FULL if isinstance(FULL[name], dict)])
def test_auto_for_a_whole_block(block: str) -> None:
    assert load_config({block: "auto"}) == load_config({})


def test_auto_in_params_is_left_to_the_constructor() -> None:
    params = {"lr": "auto", "betas": "auto", "eps": 1e-6, "mode": "automatic"}
    config = load_config({"optimizer": {"type": "AdamW", "params": params}})
    assert config.optimizer is not None
    assert config.optimizer.params == {"eps": 1e-6, "mode": "automatic"}


@pytest.mark.parametrize("block", ["optimizer", "scheduler"])
def test_auto_type_is_an_error_at_resolve(block: str) -> None:
    config = load_config({block: {"type": "auto"}})
    with pytest.raises(ConfigError) as caught:
        config.resolve(1)
    assert [path for path, _ in caught.value.errors] == [f"{block}.type"]


# ------------------------------------------------------------------ frozen models


def test_frozen_at_every_depth() -> None:
    config = load_config(FULL)
    assert config.optimizer is not None
    with pytest.raises(ValidationError, match="frozen"):
        config.dump_state = False  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.zero_optimization.stage = 0  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.optimizer.params = {}  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        del config.fp16.enabled
    for change in (
        lambda params: params.__setitem__("lr", 1),
        lambda params: params.__delitem__("lr"),
        lambda params: params.update(lr=1),
        lambda params: params.pop("lr"),
        lambda params: params.popitem(),
        lambda params: params.clear(),
        lambda params: params.setdefault("x", 1),
        lambda params: params.__ior__({"lr": 1}),
    ):
        with pytest.raises(TypeError, match="frozen"):
            change(config.optimizer.params)
    assert config == load_config(FULL)


def test_nested_params_are_frozen_and_copies_are_not() -> None:
    config = load_config({"optimizer": {"type": "X", "params": {"inner": {"a": 1}}}})
    assert config.optimizer is not None
    with pytest.raises(TypeError, match="frozen"):
        config.optimizer.params["inner"]["a"] = 2
    free = dict(config.optimizer.params)
    free["lr"] = 1
    assert "lr" not in config.optimizer.params


def test_extra_keys_are_forbidden_in_the_models_themselves() -> None:
    with pytest.raises(ValidationError):
        ZeroliteConfig.model_validate({"unknown": 1})
    with pytest.raises(ValidationError):
        ZeroliteConfig.model_validate({"fp16": {"unknown": 1}})
    with pytest.raises(ValidationError, match=r"fp16.enabled = true and bf16.enabled = true"):
        ZeroliteConfig.model_validate({"fp16": {"enabled": True}, "bf16": {"enabled": True}})


@pytest.mark.filterwarnings("error")
def test_copies_pickles_and_dumps_are_equal() -> None:
    config = load_config(FULL)
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert load_config(config.model_dump()) == config
    assert load_config(config.model_dump(mode="json")) == config
    assert load_config(config.model_dump_json()) == config
    revived = pickle.loads(pickle.dumps(config))
    with pytest.raises(TypeError, match="frozen"):
        revived.optimizer.params["lr"] = 1


# ------------------------------------------------------------------ the package


def test_the_launcher_may_import_it() -> None:
    """Neither torch nor hjson is imported for a JSON configuration."""
    code = (
        "import sys, zerolite.config as c; c.load_config('{\"train_batch_size\": 2}').resolve(2); "
        "print(sorted({'torch', 'hjson', 'numpy'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == "[]"
