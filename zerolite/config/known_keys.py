"""Keys of DeepSpeed's schema that zerolite knows by name and does not support yet.

A value that asks for exactly what zerolite does anyway (a feature left off, mostly) is *inert* and accepted; any other
value is an error that names the key. To support a key: add it to a model and delete it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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


class UnsupportedBlock(NamedTuple):
    """A block of keys that is accepted or refused as one. null and false stand for an absent one.

    Attributes:
        names: of its keys, those in inner blocks with dots.
        switch: the key that turns the feature on; while it is one of `off`, the other keys tune what does not run.
            Without one, the block turns its feature on by being there.
        on_by_default: the feature is on unless the switch says otherwise.
        off_if_empty: {} leaves it off.
    """

    names: tuple[str, ...]
    switch: str = ""
    off: tuple[object, ...] = ()
    on_by_default: bool = True
    note: str = ""
    off_if_empty: bool = False


def _switched(names: str, switch: str = "enabled", on_by_default: bool = False, note: str = "") -> UnsupportedBlock:
    return UnsupportedBlock((switch, *names.split()), switch, (False,), on_by_default, note)


def _present(names: str, note: str = "", off_if_empty: bool = False) -> UnsupportedBlock:
    return UnsupportedBlock(tuple(names.split()), note=note, off_if_empty=off_if_empty)


OFF = Key((False,))
STAGE_3 = Key((False,), stage3=True)
REMOVED = "DeepSpeed has removed it as well"

UNSUPPORTED: dict[str, Key | UnsupportedBlock] = {
    "comet": _switched("samples_log_interval project workspace api_key experiment_name experiment_key online mode"),
    "timers.throughput": _switched("synchronized", on_by_default=True),
    "autotuning": _switched(
        "fast results_dir exps_dir overwrite start_profile_step end_profile_step start_step end_step metric "
        "metric_path tuner_type tuner_early_stopping tuner_num_trials arg_mappings model_info_path mp_size "
        "max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu "
        "min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes model_info.profile model_info.num_params "
        "model_info.hidden_size model_info.num_layers",
    ),
    "expert_parallel": _switched(
        "autoep_size expert_tensor_parallel_size validate_folding_routing async_split_plan preset_model "
        "moe_layer_pattern expert_pattern router_pattern use_grouped_mm disable_triton_grouped_mm route_norm "
        "route_scale score_apply combine_impl row_weighting_impl gate_up_impl comm_backend comm_num_sm comm_qp_margin "
        "comm_max_tokens_per_rank num_expert_groups num_limited_groups score_func top_k load_balance_coeff "
        "routed_scaling_factor expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr has_shared_experts "
        "shared_experts_pattern shared_experts_gate_pattern expert_activation",
    ),
    "use_data_before_expert_parallelism": OFF,
    "seq_parallel_communication_data_type": Key((None, "fp32")),
    "hybrid_engine": _switched(
        "max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size "
        "enable_cuda_graph",
    ),
    "compile": _switched(
        "autoep_non_moe free_activation free_activation_threshold offload_activation offload_activation_pin_memory "
        "offload_opt_states double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce "
        "sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors "
        "passes",
        switch="deepcompile",
    ),
    "weight_quantization": _switched(
        "num_bits q_type q_groups quantized_initialization post_init_quant",
        on_by_default=True,
    ),
    "datastates_ckpt": _present("host_cache_size"),
    "data_efficiency": _switched(
        "seed data_sampling.enabled data_sampling.num_epochs data_sampling.num_workers data_sampling.pin_memory "
        "data_sampling.curriculum_learning.enabled data_sampling.curriculum_learning.data_cluster_path "
        "data_sampling.curriculum_learning.curriculum_metrics data_sampling.dynamic_batching.enabled "
        "data_sampling.dynamic_batching.metrics_path data_sampling.dynamic_batching.lr_scaling_method "
        "data_sampling.dynamic_batching.min_batch_size data_sampling.dynamic_batching.max_batch_size "
        "data_sampling.dynamic_batching.sequence_picking_order data_sampling.dynamic_batching.max_tokens "
        "data_sampling.dynamic_batching.verbose data_routing.enabled data_routing.random_ltd.enabled "
        "data_routing.random_ltd.model_mask_name data_routing.random_ltd.model_type "
        "data_routing.random_ltd.micro_batch_size data_routing.random_ltd.global_batch_size "
        "data_routing.random_ltd.hidden_state_order data_routing.random_ltd.random_ltd_layer_num "
        "data_routing.random_ltd.random_ltd_layer_id data_routing.random_ltd.total_layer_num "
        "data_routing.random_ltd.layer_token_lr_schedule.enabled "
        "data_routing.random_ltd.layer_token_lr_schedule.total_layer_tokens "
        "data_routing.random_ltd.layer_token_lr_schedule.warmup_type "
        "data_routing.random_ltd.layer_token_lr_schedule.warmup_layer_tokens "
        "data_routing.random_ltd.random_ltd_schedule.min_value data_routing.random_ltd.random_ltd_schedule.max_value "
        "data_routing.random_ltd.random_ltd_schedule.schedule_type "
        "data_routing.random_ltd.random_ltd_schedule.schedule_config.require_steps "
        "data_routing.random_ltd.random_ltd_schedule.schedule_config.seq_per_step",
    ),
    "managed_gradient_accumulation": Key((True,)),
    "gradient_allreduce_op": Key(("mean",)),
    "disable_allgather": Key((False,), ignored="updated parameters are always all-gathered"),
    "zero_force_ds_cpu_optimizer": Key((True, False)),
    "disable_python_gc": OFF,
    "vocabulary_size": Key((None,)),
    "log_level": Key((None,), ignored='the level is that of the logger "zerolite"'),
    "amp": _switched("opt_level loss_scale keep_batchnorm_fp32", note="use fp16, bf16 or torch_autocast"),
    "sparse_gradients": Key((False,), REMOVED),
    "sparse_attention": _present(
        "mode block different_layout_per_head num_local_blocks num_global_blocks attention "
        "horizontal_global_attention num_different_global_patterns num_random_blocks local_window_blocks "
        "global_block_indices global_block_end_indices num_sliding_window_blocks",
        note=REMOVED,
        off_if_empty=True,
    ),
    "curriculum_learning": _switched(
        "curriculum_type min_difficulty max_difficulty schedule_type schedule_config",
        note=REMOVED,
    ),
    "progressive_layer_drop": _switched("theta gamma", note=REMOVED),
    "eigenvalue": _switched(
        "verbose max_iter tol stability gas_boundary_resolution layer_name layer_num",
        note=REMOVED,
    ),
    "quantize_training": _switched(
        "quantize_bits quantize_type quantize_schedule quantize_groups fp16_mixed_quantize quantize_change_ratio "
        "rounding quantize_algo quantize_verbose quantizer_kernel",
        note=REMOVED,
    ),
    "compression_training.layer_reduction": _switched(
        "keep_number_layer module_name_prefix teacher_layer other_module_name",
        note=REMOVED,
    ),
    "compression_training.weight_quantization.shared_parameters": _switched(
        "schedule_offset quantizer_kernel quantize_groups quantize_verbose quantization_type "
        "quantize_weight_in_forward rounding fp16_mixed_quantize",
        note=REMOVED,
    ),
    "compression_training.weight_quantization.different_groups": Key(free=True),
    "compression_training.activation_quantization.shared_parameters": _switched(
        "schedule_offset quantization_type range_calibration",
        note=REMOVED,
    ),
    "compression_training.activation_quantization.different_groups": Key(free=True),
    "compression_training.sparse_pruning.shared_parameters": _switched(
        "schedule_offset method schedule_offset_end schedule_offset_stride block_pattern dense_ratio excluded_modules",
        note=REMOVED,
    ),
    "compression_training.sparse_pruning.different_groups": Key(free=True),
    "compression_training.row_pruning.shared_parameters": _switched("schedule_offset method", note=REMOVED),
    "compression_training.row_pruning.different_groups": Key(free=True),
    "compression_training.head_pruning.shared_parameters": _switched("schedule_offset method num_heads", note=REMOVED),
    "compression_training.head_pruning.different_groups": Key(free=True),
    "compression_training.channel_pruning.shared_parameters": _switched("schedule_offset method", note=REMOVED),
    "compression_training.channel_pruning.different_groups": Key(free=True),
    "nebula": _switched(
        "enable_nebula_load nebula_load_path persistent_storage_path persistent_time_interval "
        "num_of_version_in_retention load_path",
        note=REMOVED,
    ),
    "graph_harvesting": Key((False,), REMOVED),
    "zero_optimization.allgather_partitions": Key((True,), ignored="updated parameters are always all-gathered"),
    "zero_optimization.use_multi_rank_bucket_allreduce": Key(
        (True,), ignored="each bucket is reduced to all of its owners at once"
    ),
    "zero_optimization.compute_grad_norm": Key((True,), ignored="every step computes the norm"),
    "zero_optimization.round_robin_gradients": Key((False,), ignored="each bucket is divided evenly among the ranks"),
    "zero_optimization.parameter_alignment": Key((True, False)),
    "zero_optimization.load_from_fp32_weights": Key((True,)),
    "zero_optimization.elastic_checkpoint": Key((False, True), "every checkpoint is elastic"),
    "zero_optimization.legacy_stage1": Key((False,), ignored="there is one implementation of stage 1"),
    "zero_optimization.enable_sanity_checks": OFF,
    "zero_optimization.zenflow": _present(
        "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio "
        "full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch",
    ),
    "zero_optimization.save_muon_momentum_buffer_in_memory": OFF,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": STAGE_3,
    "zero_optimization.stage3_allgather_sequential": STAGE_3,
    "zero_optimization.memory_efficient_linear": Key((False, True), "linear layers are torch's own"),
    "zero_optimization.pipeline_loading_checkpoint": STAGE_3,
    "zero_optimization.override_module_apply": Key((True, False)),
    "zero_optimization.log_trace_cache_warnings": Key((False, True)),
    "zero_optimization.zero_hpz_partition_size": Key((1, 0), stage3=True),
    "zero_optimization.zero_quantized_weights": STAGE_3,
    "zero_optimization.zero_quantized_nontrainable_weights": STAGE_3,
    "zero_optimization.zero_quantized_gradients": STAGE_3,
    "zero_optimization.zeropp_loco_param": _present("err_beta reset_T", note=REMOVED, off_if_empty=True),
    "zero_optimization.mics_shard_size": Key((-1,), REMOVED, stage3=True),
    "zero_optimization.mics_hierarchical_params_gather": Key((False,), REMOVED, stage3=True),
    "zero_optimization.offload_optimizer.super_offload": OFF,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": Key(
        note="tunes super_offload, which does not run", free=True
    ),
    "aio.use_gds": Key((False,), "GPUDirect Storage; what is on disk passes through the host"),
    "checkpoint.tag_validation": Key(
        tuple(spell(word) for word in ("Ignore", "Warn", "Fail") for spell in (str, str.lower, str.upper)),
        "tags that differ between ranks are always an error",
    ),
    "checkpoint.load_universal": Key((False, True), "every checkpoint is universal"),
    "checkpoint.use_node_local_storage": OFF,
    "checkpoint.parallel_write.pipeline_stage": OFF,
    "checkpoint.checkpoint_serialization": Key((True, False), "the format is zerolite's own"),
    "checkpoint.writer": _present(
        "type io_buffer_size io_buffer_double io_multiplier show_statistics data_parallel decoupled",
        off_if_empty=True,
    ),
    "tensor_parallel.dtype": Key(note="the precision is that of fp16, bf16 or torch_autocast", free=True),
    "tensor_parallel.tp_overlap_comm": OFF,
    "tensor_parallel.vocab_parallel_lm_head": Key((True, False), "the plan says it"),
    "tensor_parallel.vocab_parallel_ce_backend": Key(free=True),
    "tensor_parallel.injection_policy_tuple": Key((None,), "use tensor_parallel.plan"),
    "tensor_parallel.partition_config": Key((None,), "use tensor_parallel.plan"),
    "tensor_parallel.preset_model": Key((None,), "use tensor_parallel.plan"),
    "tensor_parallel.keep_module_on_host": OFF,
    "tensor_parallel.replace_with_kernel_inject": OFF,
    "tensor_parallel.kernel_inject": OFF,
    "tensor_parallel.tensor_parallel.tp_size": Key((1,), "use tensor_parallel.size"),
    "tensor_parallel.tensor_parallel.tp_grain_size": Key(free=True),
    "tensor_parallel.tensor_parallel.mpu": Key((None,)),
    "tensor_parallel.tensor_parallel.tp_group": Key((None,)),
    "tensor_parallel.tp.tp_size": Key((1,), "use tensor_parallel.size"),
    "tensor_parallel.tp.tp_grain_size": Key(free=True),
    "tensor_parallel.tp.mpu": Key((None,)),
    "tensor_parallel.tp.tp_group": Key((None,)),
    "pipeline.partition": Key(("best",), "use pipeline.partition_method"),
    "pipeline.seed_layers": Key((True, False), "an argument of PipelineModule"),
    "pipeline.pipe_partitioned": Key((True, False)),
    "pipeline.grad_partitioned": Key((True, False)),
    "pipeline.use_reentrant": OFF,
    "data_types.param_dtype": Key((None,)),
    "data_types.keep_in_fp32_modules": Key(("auto", []), "use fp32_modules"),
    "optimizer.legacy_fusion": OFF,
}
"""By full path. A block that is not here itself but on the way to others has each of its keys judged by itself."""


def _groups(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        yield from (path[:dot] for dot, sign in enumerate(path) if sign == ".")


GROUPS = frozenset(_groups(UNSUPPORTED))
"""Blocks that are not in the table themselves and hold keys of it."""


def unsupported_paths() -> list[str]:
    """The full path of every key in the table, also of those within blocks, and of these blocks."""
    blocks = ((path, entry) for path, entry in UNSUPPORTED.items() if isinstance(entry, UnsupportedBlock))
    leaves = [*UNSUPPORTED, *(f"{path}.{name}" for path, entry in blocks for name in entry.names)]
    return list(dict.fromkeys([*leaves, *_groups(leaves)]))


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
            "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
            "max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold "
            "use_all_reduce_for_fetch_params allgather_sequential"
        ).split()
    },
    "bf16.check_overflow": "bf16.check_grad_overflow",
    "optimizer.params.max_grad_norm": "gradient_clipping",
}
"""Spellings that DeepSpeed deprecates, and today's key."""

OFF_IF_FALSE = frozenset(
    "fp32_allreduce zero_optimization.cpu_offload zero_optimization.cpu_offload_param "
    "zero_optimization.cpu_offload_params zero_optimization.stage3_gather_fp16_weights_on_model_save "
    "zero_optimization.gather_16bit_weights_on_model_save zero_optimization.use_all_reduce_for_fetch_params "
    "zero_optimization.allgather_sequential optimizer.params.max_grad_norm".split()
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
