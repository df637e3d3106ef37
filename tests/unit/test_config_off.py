"""load_config: what is off is accepted, what has no effect is a warning, and configurations of other clients."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch

import zerolite
from zerolite.config import ConfigError, load_config
from zerolite.config.models import ZeroliteConfig
from zerolite.config.values import block_model


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


# Beside the keys of known_keys.py with the values that stand there: tests/unit/test_config_errors.py loads each.
OFF: list[dict[str, Any]] = [
    zero(cpu_offload=False),
    zero(cpu_offload_params=False, cpu_offload_use_pin_memory=None),
    zero(stage3_gather_fp16_weights_on_model_save=False),
    {"fp32_allreduce": False},
    {"fp32_allreduce": None, "allgather_size": None},
    {"amp": False},
    {"compression_training": False},
    {"elasticity": {"enabled": False, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4]}},
    {"data_efficiency": {"enabled": False, "data_routing": {"enabled": False}}},
    {"checkpoint": {"writer": {}, "parallel_write": {"pipeline_stage": False}, "use_node_local_storage": False}},
]


@pytest.mark.parametrize("source", OFF, ids=lambda source: str(source)[:50])
def test_a_feature_that_is_off_is_no_error(source: dict[str, Any]) -> None:
    config = load_config(source)
    assert config.without_effect == ()
    assert config == load_config({})


@pytest.mark.parametrize("value", [None, False, "auto"])
def test_null_false_and_auto_stand_for_an_absent_block(value: Any) -> None:
    fields = ZeroliteConfig.model_fields
    assert load_config({name: value for name in fields if block_model(fields[name])}) == load_config({})
    offload = zero(stage=3, offload_optimizer=value, offload_param=value, leaf_module=value)
    assert load_config(offload) == load_config(zero(stage=3))


WITHOUT_EFFECT: list[tuple[str, dict[str, Any], str]] = [
    ("offload_param.device", zero(stage=2, offload_param={"device": "cpu"}), "the stage is 2"),
    ("offload_param.device", zero(offload_param={"device": "nvme"}), "the stage is 0"),
    ("offload_optimizer.device", zero(stage=0, offload_optimizer={"device": "cpu"}), "at stage 0"),
    ("offload_optimizer", zero(stage=2, offload_optimizer={"pin_memory": True}), "without a device"),
    ("reduce_scatter", zero(stage=3, reduce_scatter=False), "always reduce-scattered"),
    ("reduce_scatter", zero(stage=0, reduce_scatter=False), "always all-reduced"),
    ("round_robin_gradients", zero(stage=1, round_robin_gradients=True), "divided evenly"),
    ("stage3_max_live_parameters", zero(stage=2, stage3_max_live_parameters=5), "the stage is 2"),
    ("leaf_modules", zero(stage=1, leaf_modules=["*Block"]), "the stage is 1"),
    ("leaf_module", zero(stage=1, leaf_module={"names": ["a"]}), "the stage is 1"),
    ("zero_hpz_partition_size", zero(stage=2, zero_hpz_partition_size=8), "the stage is 2"),
    ("zero_quantized_weights", zero(stage=3, shard_size=8, zero_quantized_weights=True), "no updated values travel"),
    ("zero_quantized_gradients", zero(stage=2, zero_quantized_gradients=True), "between sets of ranks alone"),
    ("allgather_partitions", zero(stage=2, allgather_partitions=False), "always all-gathered"),
]


@pytest.mark.parametrize(("key", "source", "names"), WITHOUT_EFFECT)
def test_what_has_no_effect_is_left_out_and_said(key: str, source: dict[str, Any], names: str) -> None:
    config = load_config(source)
    ((path, sentence),) = config.without_effect
    assert path == f"zero_optimization.{key}" and names in sentence
    assert config.model_copy().without_effect == config.resolve(1).without_effect == config.without_effect
    block = config.zero_optimization
    assert not block.offload_param.enabled and not block.offload_optimizer.enabled
    assert block.reduce_scatter or block.stage == 0


@pytest.mark.parametrize(
    "source",
    [
        zero(stage=3, offload_param={"device": "cpu"}, stage3_max_live_parameters=5, leaf_modules=["x"]),
        zero(stage=2, stage3_max_live_parameters=1e9, stage3_gather_16bit_weights_on_model_save=True),
        zero(stage=2, offload_param={"device": "none", "pin_memory": True}, reduce_scatter=False),
    ],
)
def test_what_has_an_effect_or_is_the_default_is_not_warned_of(source: dict[str, Any]) -> None:
    assert load_config(source).without_effect == ()


@pytest.mark.parametrize("enabled", [True, False])
def test_what_a_profile_does_not_show_is_said_where_there_is_one(enabled: bool) -> None:
    keys = {"module_depth": 2, "top_modules": 3, "detailed": True}
    config = load_config({"flops_profiler": {"enabled": enabled, **keys}})
    assert [path for path, _ in config.without_effect] == [f"flops_profiler.{key}" for key in keys if enabled]
    assert all("torch.utils.flop_counter counts by module" in sentence for _, sentence in config.without_effect)
    as_it_is = {"module_depth": -1, "top_modules": 1, "detailed": False}
    assert not load_config({"flops_profiler": {"enabled": enabled, **as_it_is}}).without_effect


def test_infinitely_many_steps_per_print_are_never() -> None:
    for source in ({"steps_per_print": math.inf}, '{"steps_per_print": Infinity}', "{\n steps_per_print: Infinity\n}"):
        assert load_config(source).steps_per_print is None
    with pytest.raises(ConfigError, match="got NaN"):
        load_config({"steps_per_print": math.nan})


def test_features_of_stage_3_that_do_not_exist_are_errors_there() -> None:
    with pytest.raises(ConfigError, match="not supported yet"):
        load_config(zero(stage=3, zero_quantized_nontrainable_weights=True))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"comms_logger": {"enabled": True}}, "torch.profiler times collectives"),
        ({"flops_profiler": {"output_file": "profile.txt"}}, "torch.utils.flop_counter counts by module"),
    ],
)
def test_what_other_tools_measure_names_them(source: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(source)


def test_initialize_says_once_what_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    config = {"optimizer": optimizer, **zero(stage=1, round_robin_gradients=True, offload_param={"device": "cpu"})}
    with caplog.at_level(logging.WARNING, "zerolite"):
        engine = zerolite.initialize(torch.nn.Linear(2, 2), config)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    said = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    keys = [sentence.partition(" has no effect:")[0] for sentence in said]
    assert keys == ["zero_optimization.round_robin_gradients", "zero_optimization.offload_param.device"]


SIZES = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
CLIENTS: dict[str, dict[str, Any]] = {
    "DeepSpeed's documentation": {
        **SIZES, "steps_per_print": 10, "prescale_gradients": False, "gradient_predivide_factor": 1.0,
        "sparse_gradients": False, "communication_data_type": None, "amp": {"enabled": False},
        "zero_optimization": {
            "stage": 2, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": False,
            "reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True,
            "round_robin_gradients": False, "zero_hpz_partition_size": 1, "zero_quantized_weights": False,
            "zero_quantized_gradients": False, "ignore_unused_parameters": True, "load_from_fp32_weights": True,
            "elastic_checkpoint": False, "cpu_offload": False,
        },
        "flops_profiler": {
            "enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 3, "detailed": True,
        },
        "autotuning": {"enabled": False, "results_dir": "autotuning_results", "exps_dir": "exps", "overwrite": False},
        "comms_logger": {"enabled": False, "verbose": False, "prof_all": True, "debug": False},
        "tensorboard": {"enabled": False, "output_path": "", "job_name": "train_bert"},
        "wandb": {"enabled": False, "group": "my_group", "team": "my_team", "project": "my_project"},
        "comet": {"enabled": False, "workspace": "w", "project": "p", "samples_log_interval": 50},
        "csv_monitor": {"enabled": False, "output_path": "output/", "job_name": "train_bert"},
        "compression_training": {}, "curriculum_learning": {"enabled": False},
        "checkpoint": {"tag_validation": "Warn", "load_universal": False, "use_node_local_storage": False},
        "data_types": {"grad_accum_dtype": None}, "dump_state": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CLIENTS)
def test_configurations_of_other_clients_are_accepted(name: str) -> None:
    assert load_config(CLIENTS[name]).resolve(2).without_effect == ()
