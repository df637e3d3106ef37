"""Keys of DeepSpeed's schema that zerolite knows by name and does not support yet.

A value that asks for exactly what zerolite does anyway (a feature left off, mostly) is *inert* and accepted; any other
value is an error that names the key. To support a key: add it to a model and delete it here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Key(NamedTuple):
    """One key, accepted with some values.

    Attributes:
        inert: the values that are accepted, beside null; "auto" is too when there are any.
        note: for the error, in parentheses.
        free: every value is accepted: the key only tunes a feature that does not run.
        ignored: why other values change nothing: they are accepted, with a warning that says so.
        stage3: the key belongs to stage 3: below it, other values are accepted with a warning.
    """

    inert: tuple[object, ...] = ()
    note: str = ""
    free: bool = False
    ignored: str = ""
    stage3: bool = False


class Block(NamedTuple):
    """A block of keys. null and false stand for an absent one.

    With a `switch`, the block is accepted, whatever else it holds, while that key is one of `off`: the other keys then
    tune what does not run. Without one, each key is judged by itself. `on_by_default`: the block turns its feature on
    unless the switch says otherwise, or, without a switch, by being there. `off_if_empty`: {} leaves it off.
    """

    keys: dict[str, Key | Block]
    switch: str = ""
    off: tuple[object, ...] = ()
    on_by_default: bool = False
    note: str = ""
    off_if_empty: bool = False


ANY = Key()
"""A key that only tunes what a switch turns on."""

OFF = Key((False,))

STAGE_3 = Key((False,), stage3=True)


def _tuning(*names: str) -> dict[str, Key | Block]:
    return dict.fromkeys(names, ANY)


def _switched(
    *names: str,
    switch: str = "enabled",
    off: tuple[object, ...] = (False,),
    on_by_default: bool = False,
    note: str = "",
    **blocks: Block,
) -> Block:
    return Block({switch: Key(off), **_tuning(*names), **blocks}, switch, off, on_by_default, note)


def _on_by_presence(*names: str, note: str = "", off_if_empty: bool = False) -> Block:
    return Block(_tuning(*names), "", (), True, note, off_if_empty)


_REMOVED = "DeepSpeed has removed it as well"


def _compression(*names: str) -> Block:
    """One method of DeepSpeed's former compression: its switch is in `shared_parameters`."""
    shared = _switched("schedule_offset", *names, note=_REMOVED)
    return Block({"shared_parameters": shared, "different_groups": Key(free=True)})


_ZERO: dict[str, Key | Block] = {
    # Stages 1 and 2.
    "allgather_partitions": Key((True,), ignored="updated parameters are always all-gathered"),
    "use_multi_rank_bucket_allreduce": Key((True,), ignored="each bucket is reduced to all of its owners at once"),
    "compute_grad_norm": Key((True,), ignored="every step computes the norm"),
    "round_robin_gradients": Key((False,), ignored="each bucket is divided evenly among the ranks"),
    "parameter_alignment": Key((True, False)),
    "load_from_fp32_weights": Key((True,)),
    "elastic_checkpoint": Key((False, True), "every checkpoint is elastic"),
    "legacy_stage1": Key((False,), ignored="there is one implementation of stage 1"),
    "enable_sanity_checks": OFF,
    # Offload.
    "zenflow": _on_by_presence(
        "topk_ratio",
        "select_strategy",
        "select_interval",
        "update_interval",
        "overlap_step",
        "offload",
        "auto_ratio",
        "full_warm_up_rounds",
        "pt_reserved_cores_perc",
        "steps_per_epoch",
    ),
    "save_muon_momentum_buffer_in_memory": OFF,
    # Stage 3.
    "stage3_use_all_reduce_for_fetch_params": STAGE_3,
    "stage3_allgather_sequential": STAGE_3,
    "memory_efficient_linear": Key((False, True), "linear layers are torch's own"),
    "pipeline_loading_checkpoint": STAGE_3,
    "override_module_apply": Key((True, False)),
    "log_trace_cache_warnings": Key((False, True)),
    "zero_hpz_partition_size": Key((1, 0), stage3=True),
    "zero_quantized_weights": STAGE_3,
    "zero_quantized_nontrainable_weights": STAGE_3,
    "zero_quantized_gradients": STAGE_3,
    "zeropp_loco_param": _on_by_presence("err_beta", "reset_T", note=_REMOVED, off_if_empty=True),
    "mics_shard_size": Key((-1,), _REMOVED, stage3=True),
    "mics_hierarchical_params_gather": Key((False,), _REMOVED, stage3=True),
}

_MONITORS: dict[str, Key | Block] = {
    "comet": _switched(
        "samples_log_interval", "project", "workspace", "api_key", "experiment_name", "experiment_key", "online", "mode"
    ),
}

_PROFILING: dict[str, Key | Block] = {
    "timers": Block({"throughput": _switched("synchronized", on_by_default=True)}),
    "autotuning": _switched(
        "fast",
        "results_dir",
        "exps_dir",
        "overwrite",
        "start_profile_step",
        "end_profile_step",
        "start_step",
        "end_step",
        "metric",
        "metric_path",
        "tuner_type",
        "tuner_early_stopping",
        "tuner_num_trials",
        "arg_mappings",
        "model_info_path",
        "mp_size",
        "max_train_batch_size",
        "min_train_batch_size",
        "max_train_micro_batch_size_per_gpu",
        "min_train_micro_batch_size_per_gpu",
        "num_tuning_micro_batch_sizes",
        model_info=Block(_tuning("profile", "num_params", "hidden_size", "num_layers")),
    ),
}

_INNER_TP: dict[str, Key | Block] = {
    "tp_size": Key((1,), "use tensor_parallel.size"),
    "tp_grain_size": Key(free=True),
    "mpu": Key((None,)),
    "tp_group": Key((None,)),
}

_TENSOR_PARALLEL: dict[str, Key | Block] = {
    "dtype": Key(note="the precision is that of fp16, bf16 or torch_autocast", free=True),
    "tp_overlap_comm": OFF,
    "vocab_parallel_lm_head": Key((True, False), "the plan says it"),
    "vocab_parallel_ce_backend": Key(free=True),
    "injection_policy_tuple": Key((None,), "use tensor_parallel.plan"),
    "partition_config": Key((None,), "use tensor_parallel.plan"),
    "preset_model": Key((None,), "use tensor_parallel.plan"),
    "keep_module_on_host": OFF,
    "replace_with_kernel_inject": OFF,
    "kernel_inject": OFF,
    "tensor_parallel": Block(_INNER_TP),
    "tp": Block(_INNER_TP),
}

_PIPELINE: dict[str, Key | Block] = {
    "partition": Key(("best",), "use pipeline.partition_method"),
    "seed_layers": Key((True, False), "an argument of PipelineModule"),
    "pipe_partitioned": Key((True, False)),
    "grad_partitioned": Key((True, False)),
    "use_reentrant": OFF,
}

_PARALLELISM: dict[str, Key | Block] = {
    "expert_parallel": _switched(
        "autoep_size",
        "expert_tensor_parallel_size",
        "validate_folding_routing",
        "async_split_plan",
        "preset_model",
        "moe_layer_pattern",
        "expert_pattern",
        "router_pattern",
        "use_grouped_mm",
        "disable_triton_grouped_mm",
        "route_norm",
        "route_scale",
        "score_apply",
        "combine_impl",
        "row_weighting_impl",
        "gate_up_impl",
        "comm_backend",
        "comm_num_sm",
        "comm_qp_margin",
        "comm_max_tokens_per_rank",
        "num_expert_groups",
        "num_limited_groups",
        "score_func",
        "top_k",
        "load_balance_coeff",
        "routed_scaling_factor",
        "expert_w1",
        "expert_w2",
        "expert_w3",
        "num_experts_attr",
        "top_k_attr",
        "has_shared_experts",
        "shared_experts_pattern",
        "shared_experts_gate_pattern",
        "expert_activation",
    ),
    "use_data_before_expert_parallelism": OFF,
    "seq_parallel_communication_data_type": Key((None, "fp32")),
}

_MEMORY: dict[str, Key | Block] = {
    "hybrid_engine": _switched(
        "max_out_tokens",
        "inference_tp_size",
        "release_inference_cache",
        "pin_parameters",
        "tp_gather_partition_size",
        "enable_cuda_graph",
    ),
    "compile": _switched(
        "autoep_non_moe",
        "free_activation",
        "free_activation_threshold",
        "offload_activation",
        "offload_activation_pin_memory",
        "offload_opt_states",
        "double_buffer",
        "symmetric_memory",
        "debug_log",
        "offload_parameters",
        "sync_before_reduce",
        "sync_after_reduce",
        "sync_before_allgather",
        "sync_after_allgather",
        "keep_int_input_tensors",
        "keep_all_input_tensors",
        "passes",
        switch="deepcompile",
    ),
    "weight_quantization": _switched(
        "num_bits", "q_type", "q_groups", "quantized_initialization", "post_init_quant", on_by_default=True
    ),
}

_DATA_AND_CHECKPOINTS: dict[str, Key | Block] = {
    "datastates_ckpt": _on_by_presence("host_cache_size"),
    "data_efficiency": _switched(
        "seed",
        data_sampling=_switched(
            "num_epochs",
            "num_workers",
            "pin_memory",
            curriculum_learning=_switched("data_cluster_path", "curriculum_metrics"),
            dynamic_batching=_switched(
                "metrics_path",
                "lr_scaling_method",
                "min_batch_size",
                "max_batch_size",
                "sequence_picking_order",
                "max_tokens",
                "verbose",
            ),
        ),
        data_routing=_switched(
            random_ltd=_switched(
                "model_mask_name",
                "model_type",
                "micro_batch_size",
                "global_batch_size",
                "hidden_state_order",
                "random_ltd_layer_num",
                "random_ltd_layer_id",
                "total_layer_num",
                layer_token_lr_schedule=_switched("total_layer_tokens", "warmup_type", "warmup_layer_tokens"),
                random_ltd_schedule=Block(
                    {
                        **_tuning("min_value", "max_value", "schedule_type"),
                        "schedule_config": Block(_tuning("require_steps", "seq_per_step")),
                    }
                ),
            ),
        ),
    ),
}

_OTHERS: dict[str, Key | Block] = {
    "managed_gradient_accumulation": Key((True,)),
    "gradient_allreduce_op": Key(("mean",)),
    "disable_allgather": Key((False,), ignored="updated parameters are always all-gathered"),
    "zero_force_ds_cpu_optimizer": Key((True, False)),
    "disable_python_gc": OFF,
    "vocabulary_size": Key((None,)),
    "log_level": Key((None,), ignored='the level is that of the logger "zerolite"'),
}

_REMOVED_BY_DEEPSPEED: dict[str, Key | Block] = {
    "amp": _switched("opt_level", "loss_scale", "keep_batchnorm_fp32", note="use fp16, bf16 or torch_autocast"),
    "sparse_gradients": Key((False,), _REMOVED),
    "sparse_attention": _on_by_presence(
        "mode",
        "block",
        "different_layout_per_head",
        "num_local_blocks",
        "num_global_blocks",
        "attention",
        "horizontal_global_attention",
        "num_different_global_patterns",
        "num_random_blocks",
        "local_window_blocks",
        "global_block_indices",
        "global_block_end_indices",
        "num_sliding_window_blocks",
        note=_REMOVED,
        off_if_empty=True,
    ),
    "curriculum_learning": _switched(
        "curriculum_type", "min_difficulty", "max_difficulty", "schedule_type", "schedule_config", note=_REMOVED
    ),
    "progressive_layer_drop": _switched("theta", "gamma", note=_REMOVED),
    "eigenvalue": _switched(
        "verbose", "max_iter", "tol", "stability", "gas_boundary_resolution", "layer_name", "layer_num", note=_REMOVED
    ),
    "quantize_training": _switched(
        "quantize_bits",
        "quantize_type",
        "quantize_schedule",
        "quantize_groups",
        "fp16_mixed_quantize",
        "quantize_change_ratio",
        "rounding",
        "quantize_algo",
        "quantize_verbose",
        "quantizer_kernel",
        note=_REMOVED,
    ),
    "compression_training": Block(
        {
            "layer_reduction": _switched(
                "keep_number_layer", "module_name_prefix", "teacher_layer", "other_module_name", note=_REMOVED
            ),
            "weight_quantization": _compression(
                "quantizer_kernel",
                "quantize_groups",
                "quantize_verbose",
                "quantization_type",
                "quantize_weight_in_forward",
                "rounding",
                "fp16_mixed_quantize",
            ),
            "activation_quantization": _compression("quantization_type", "range_calibration"),
            "sparse_pruning": _compression(
                "method",
                "schedule_offset_end",
                "schedule_offset_stride",
                "block_pattern",
                "dense_ratio",
                "excluded_modules",
            ),
            "row_pruning": _compression("method"),
            "head_pruning": _compression("method", "num_heads"),
            "channel_pruning": _compression("method"),
        }
    ),
    "nebula": _switched(
        "enable_nebula_load",
        "nebula_load_path",
        "persistent_storage_path",
        "persistent_time_interval",
        "num_of_version_in_retention",
        "load_path",
        note=_REMOVED,
    ),
    "graph_harvesting": Key((False,), _REMOVED),
}

_CHECKPOINT: dict[str, Key | Block] = {
    "tag_validation": Key(
        tuple(spell(word) for word in ("Ignore", "Warn", "Fail") for spell in (str, str.lower, str.upper)),
        "tags that differ between ranks are always an error",
    ),
    "load_universal": Key((False, True), "every checkpoint is universal"),
    "use_node_local_storage": OFF,
    "parallel_write": Block({"pipeline_stage": OFF}),
    "checkpoint_serialization": Key((True, False), "the format is zerolite's own"),
    "writer": _on_by_presence(
        "type",
        "io_buffer_size",
        "io_buffer_double",
        "io_multiplier",
        "show_statistics",
        "data_parallel",
        "decoupled",
        off_if_empty=True,
    ),
}

UNSUPPORTED: dict[str, dict[str, Key | Block]] = {
    "": {
        **_MONITORS,
        **_PROFILING,
        **_PARALLELISM,
        **_MEMORY,
        **_DATA_AND_CHECKPOINTS,
        **_OTHERS,
        **_REMOVED_BY_DEEPSPEED,
    },
    "zero_optimization": _ZERO,
    "zero_optimization.offload_optimizer": {
        "super_offload": OFF,
        "cpuadam_cores_perc": Key(note="tunes super_offload, which does not run", free=True),
    },
    "aio": {"use_gds": Key((False,), "GPUDirect Storage; what is on disk passes through the host")},
    "checkpoint": _CHECKPOINT,
    "tensor_parallel": _TENSOR_PARALLEL,
    "pipeline": _PIPELINE,
    "data_types": {
        "param_dtype": Key((None,)),
        "keep_in_fp32_modules": Key(("auto", []), "use fp32_modules"),
    },
    "optimizer": {"legacy_fusion": OFF},
    "scheduler": {},
}
"""By the supported block that holds them ("" is the top level)."""

ALIASES = {"bfloat16": "bf16"}
"""Other spellings of a top-level block that are accepted as they are."""

RENAMED: dict[str, str] = {
    "allgather_size": "zero_optimization.allgather_bucket_size",
    "fp32_allreduce": 'communication_data_type = "fp32"',
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param",
    "zero_optimization.cpu_offload_params": "zero_optimization.offload_param",
    "zero_optimization.cpu_offload_use_pin_memory": "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    **{
        f"zero_optimization.{name}": f"zero_optimization.stage3_{name}"
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    },
    "bf16.check_overflow": "bf16.check_grad_overflow",
    "optimizer.params.max_grad_norm": "gradient_clipping",
}
"""Spellings that DeepSpeed deprecates, and today's key."""

OFF_IF_FALSE = frozenset(
    {
        "fp32_allreduce",
        "zero_optimization.cpu_offload",
        "zero_optimization.cpu_offload_param",
        "zero_optimization.cpu_offload_params",
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        "zero_optimization.gather_16bit_weights_on_model_save",
        "zero_optimization.use_all_reduce_for_fetch_params",
        "zero_optimization.allgather_sequential",
        "optimizer.params.max_grad_norm",
    }
)
"""Deprecated spellings of which false (or 0) leaves a feature off."""

_PARAMETERS_ON_THE_HOST = {True: 'write "offload_param": {"device": "cpu"}'}

TO_WRITE: dict[str, dict[bool, str]] = {
    "zero_optimization.cpu_offload": {True: 'write "offload_optimizer": {"device": "cpu"}'},
    "zero_optimization.cpu_offload_param": _PARAMETERS_ON_THE_HOST,
    "zero_optimization.cpu_offload_params": _PARAMETERS_ON_THE_HOST,
    "zero_optimization.cpu_offload_use_pin_memory": {
        True: "leave it out: pin_memory of offload_optimizer and offload_param is true unless they say otherwise",
        False: 'write "pin_memory": false beside the device in offload_optimizer and offload_param',
    },
}
"""What to write for those whose value says something else than that of today's key."""


def same(value: object, other: object) -> bool:
    """Equality that keeps booleans and numbers apart, unlike Python's."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def unsupported_paths() -> Iterator[tuple[str, Key | Block]]:
    """(full path, entry) of every key in the table, blocks before what they hold."""

    def walk(prefix: str, keys: dict[str, Key | Block]) -> Iterator[tuple[str, Key | Block]]:
        for name, entry in keys.items():
            path = f"{prefix}.{name}" if prefix else name
            yield path, entry
            if isinstance(entry, Block):
                yield from walk(path, entry.keys)

    for prefix, keys in UNSUPPORTED.items():
        yield from walk(prefix, keys)
