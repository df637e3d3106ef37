"""Keys of DeepSpeed's schema that zerolite knows by name and does not support yet, and deprecated spellings.

A value that asks for what zerolite does anyway is accepted; mostly it switches a feature off. Any other value is an
error that names the key. To support a key, add it to a model and delete it here.
"""

from __future__ import annotations

from typing import NamedTuple


class Key(NamedTuple):
    """Key, or whole block of keys, that is accepted with some values only.

    Attributes:
        accepted: accepted values, besides null and "auto".
        reason: remark for the error, in parentheses.
        switch: for a block, the key in it that must have an accepted value; its other keys do not matter then.
        free: every value is accepted, because the key only tunes a feature that does not run.
        ignored: reason why other values change nothing. They are accepted with a warning that gives the reason, unless
            their block is switched off.
        stage3: the key belongs to stage 3. At lower stages, other values are accepted with a warning.
    """

    accepted: tuple[object, ...] = (False,)
    reason: str = ""
    switch: str = ""
    free: bool = False
    ignored: str = ""
    stage3: bool = False


OFF = Key()
EITHER = Key((True, False))
NULL = Key((None,))
BLOCK = Key(switch="enabled")
FREE = Key((), free=True)
STAGE_3 = Key(stage3=True)
ONE_LINE = "the profile is one line; torch.utils.flop_counter counts by module"
REMOVED = "DeepSpeed has removed it as well"
REMOVED_BLOCK = Key(reason=REMOVED, switch="enabled")
USE_PLAN = Key((None,), "use tensor_parallel.plan")
OF_THE_MODEL = "the model's own router and experts compute it; set it in the model's config"
ROUTER_AUTO, ROUTER_NULL = Key(("auto",), OF_THE_MODEL), Key((None,), OF_THE_MODEL)


def _keys(entry: Key, names: str, block: str = "") -> dict[str, Key]:
    return dict.fromkeys((block + name for name in names.split()), entry)


UNSUPPORTED: dict[str, Key] = {
    **_keys(BLOCK, "comet autotuning hybrid_engine data_efficiency"),
    "timers": Key((), "steps_per_print, wall_clock_breakdown and flops_profiler measure", free=True),
    "compile": Key(switch="deepcompile"),
    "comms_logger": Key(reason="torch.profiler times collectives, `zerolite plan` counts them", switch="enabled"),
    "flops_profiler.module_depth": Key((-1,), ignored=ONE_LINE),
    "flops_profiler.top_modules": Key((1,), ignored=ONE_LINE),
    "flops_profiler.detailed": Key((False,), ignored=ONE_LINE),
    "flops_profiler.output_file": Key((None,), ONE_LINE),
    "elasticity": Key(
        reason="write train_batch_size and train_micro_batch_size_per_gpu, and the accumulation follows from the "
        "number of ranks",
        switch="enabled",
    ),
    **_keys(
        Key((None,), ignored="experts are found by the structure of their modules"),
        "preset_model moe_layer_pattern router_pattern expert_pattern expert_w1 expert_w2 expert_w3 num_experts_attr "
        "top_k_attr has_shared_experts shared_experts_pattern shared_experts_gate_pattern",
        "expert_parallel.",
    ),
    **_keys(
        Key((), "numbers do not depend on it", free=True),
        "use_grouped_mm disable_triton_grouped_mm combine_impl row_weighting_impl gate_up_impl comm_backend "
        "comm_num_sm comm_qp_margin comm_max_tokens_per_rank async_split_plan validate_folding_routing",
        "expert_parallel.",
    ),
    "expert_parallel.expert_tensor_parallel_size": Key((1,), "each expert is whole on the ranks that have it"),
    **_keys(ROUTER_AUTO, "score_func score_apply top_k routed_scaling_factor", "expert_parallel."),
    **_keys(ROUTER_NULL, "route_norm num_expert_groups num_limited_groups expert_activation", "expert_parallel."),
    "expert_parallel.route_scale": Key((1.0,), OF_THE_MODEL),
    "checkpoint.keep_last": Key((None,), "all stay; docs/checkpoints.md has the loop that removes older ones"),
    "checkpoint.timeout_s": Key(reason="saves and loads wait as long as desync_timeout_s says"),
    "check_collectives": Key(reason="set TORCH_DISTRIBUTED_DEBUG=DETAIL, and torch compares the ranks' collectives"),
    "jsonl_monitor": Key(reason="use csv_monitor, which needs no package either", switch="enabled"),
    "memory_check": Key(("off",), ignored="`zerolite plan` says beforehand if a job fits"),
    "weight_quantization": Key((False, {})),
    "amp": Key(reason="use fp16, bf16 or torch_autocast", switch="enabled"),
    **_keys(REMOVED_BLOCK, "curriculum_learning progressive_layer_drop eigenvalue quantize_training nebula"),
    **_keys(Key((False, {}), REMOVED), "compression_training sparse_attention"),
    "datastates_ckpt": OFF,
    **_keys(Key(reason=REMOVED), "sparse_gradients graph_harvesting"),
    **_keys(OFF, "use_data_before_expert_parallelism disable_python_gc optimizer.legacy_fusion pipeline.use_reentrant"),
    "seq_parallel_communication_data_type": Key((None, "fp32")),
    "sequence_parallel_size": Key(
        (1,), 'write "sequence_parallel": {"size": ...}, and "inputs": "parts" in it if your loader cuts the sequences'
    ),
    "data_parallel_size": Key((None,), ignored="it is the number of ranks, divided by the sizes of the other groups"),
    "disable_allgather": Key(ignored="updated parameters are always all-gathered"),
    "zero_force_ds_cpu_optimizer": EITHER,
    "vocabulary_size": NULL,
    "log_level": Key((None,), ignored='the level is that of the logger "zerolite"'),
    "zero_optimization.allgather_partitions": Key((True,), ignored="updated parameters are always all-gathered"),
    "zero_optimization.use_multi_rank_bucket_allreduce": Key(
        (True,), ignored="each bucket is reduced to all of its owners at once"
    ),
    "zero_optimization.compute_grad_norm": Key((True,), ignored="every step computes the norm"),
    "zero_optimization.round_robin_gradients": Key(ignored="each bucket is divided evenly among the ranks"),
    "zero_optimization.parameter_alignment": EITHER,
    "zero_optimization.load_from_fp32_weights": Key((True,)),
    "zero_optimization.elastic_checkpoint": Key((False, True), "every checkpoint is elastic"),
    "zero_optimization.legacy_stage1": Key(ignored="there is one implementation of stage 1"),
    "zero_optimization.memory_efficient_linear": Key((False, True), "linear layers are torch's own"),
    "zero_optimization.override_module_apply": EITHER,
    "zero_optimization.log_trace_cache_warnings": EITHER,
    **_keys(
        OFF,
        "enable_sanity_checks zenflow save_muon_momentum_buffer_in_memory offload_optimizer.super_offload",
        "zero_optimization.",
    ),
    **_keys(
        STAGE_3,
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential pipeline_loading_checkpoint "
        "zero_quantized_nontrainable_weights",
        "zero_optimization.",
    ),
    "zero_optimization.mics_hierarchical_params_gather": Key(
        ignored="gathers stay among the ranks of shard_size, and NCCL knows which of them share a host"
    ),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": FREE,
    "zero_optimization.offload_optimizer.fast_init": Key((True, False), "initial zeros are never written to disk"),
    **_keys(
        Key((True, False), "reads and writes always overlap the update"),
        "pipeline_read pipeline_write pipeline",
        "zero_optimization.offload_optimizer.",
    ),
    "fp16.auto_cast": Key((True, False), "floating inputs are always cast to float16"),
    "bf16.immediate_grad_update": Key((True,), "gradients always accumulate as they arrive"),
    "activation_checkpointing.partition_activations": Key(
        ignored="every rank saves its own inputs; tensor_parallel.sequence_parallel divides activations among "
        "tensor-parallel ranks"
    ),
    "activation_checkpointing.contiguous_memory_optimization": Key(ignored="memory is kept and used again anyway"),
    "activation_checkpointing.number_checkpoints": FREE,
    **_keys(
        Key(ignored="torch.profiler shows where time goes"),
        "synchronize_checkpoint_boundary profile",
        "activation_checkpointing.",
    ),
    "aio.single_submit": Key(ignored="all waiting requests are submitted at once"),
    "aio.overlap_events": Key((True,), ignored="completed requests are taken while more are submitted"),
    "aio.use_gds": Key(reason="GPUDirect Storage; what is on disk passes through the host"),
    "checkpoint.tag_validation": Key(
        tuple(spell(word) for word in ("Ignore", "Warn", "Fail") for spell in (str, str.lower, str.upper)),
        "tags that differ between ranks are always an error",
    ),
    "checkpoint.load_universal": Key((False, True), "every checkpoint is universal"),
    "checkpoint.use_node_local_storage": OFF,
    "checkpoint.parallel_write": Key(switch="pipeline_stage"),
    "checkpoint.checkpoint_serialization": Key((True, False), "the format is zerolite's own"),
    "checkpoint.writer": Key((False, {})),
    "tensor_parallel.dtype": Key((), "the precision is that of fp16, bf16 or torch_autocast", free=True),
    "tensor_parallel.vocab_parallel_lm_head": Key((True, False), "the plan says it"),
    "tensor_parallel.vocab_parallel_ce_backend": FREE,
    **_keys(OFF, "tp_overlap_comm keep_module_on_host replace_with_kernel_inject kernel_inject", "tensor_parallel."),
    **_keys(USE_PLAN, "injection_policy_tuple partition_config preset_model", "tensor_parallel."),
    **_keys(Key((False, {}, {"tp_size": 1}), "use tensor_parallel.size"), "tensor_parallel tp", "tensor_parallel."),
    "pipeline.partition": Key(("best",), "use pipeline.partition_method"),
    "pipeline.seed_layers": Key((True, False), "an argument of PipelineModule"),
    **_keys(EITHER, "pipe_partitioned grad_partitioned", "pipeline."),
    "data_types.param_dtype": NULL,
    "data_types.keep_in_fp32_modules": Key(("auto", []), "use fp32_modules"),
}
"""Unsupported keys by full path."""

OTHER_NAMES = {
    "bfloat16": "bf16",
    "aio.intra_op_parallelism": "aio.thread_count",
    "expert_parallel.autoep_size": "expert_parallel.size",
    "tensor_parallel.autotp_size": "tensor_parallel.size",
    "zero_optimization.mics_shard_size": "zero_optimization.shard_size",
}
"""Accepted other names of keys and blocks. In them 0 and -1 mean that the name is not used."""

RENAMED: dict[str, str] = {
    "allgather_size": "zero_optimization.allgather_bucket_size",
    "fp32_allreduce": 'communication_data_type = "fp32"',
    "zero_optimization.cpu_offload": 'zero_optimization.offload_optimizer = {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'zero_optimization.offload_param = {"device": "cpu"}',
    "zero_optimization.cpu_offload_params": 'zero_optimization.offload_param = {"device": "cpu"}',
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
"""Today's key, or the setting to write, by the spelling that DeepSpeed deprecates."""
