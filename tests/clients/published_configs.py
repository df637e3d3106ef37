"""Settings of published DeepSpeed configs, written compactly. Each name is that of the repository and the file."""

from __future__ import annotations

from typing import Any

_CPU = {"device": "cpu"}
_PINNED = {"device": "cpu", "pin_memory": True}
_ON_HOST = {"offload_optimizer": _PINNED, "offload_param": _PINNED}
_SIZES = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
_ALL_SIZES = {**_SIZES, "gradient_accumulation_steps": "auto"}
_CLIPPED = {**_ALL_SIZES, "gradient_clipping": "auto"}
_QUIET = {"wall_clock_breakdown": False}
_SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
_FP16 = {"fp16": {"enabled": True, **_SCALE}}
_AUTO_FP16 = {"fp16": {"enabled": "auto", **_SCALE}}
_AUTO_BF16 = {"bf16": {"enabled": "auto"}}
_EITHER = {**_AUTO_FP16, **_AUTO_BF16}
_AUTO_ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
_WARMUP = {"type": "WarmupLR", "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")}
_DECAY = {"type": "WarmupDecayLR", "params": {**_WARMUP["params"], "total_num_steps": "auto"}}  # type: ignore[dict-item]
_FETCH = {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
_BUCKETS = {"reduce_bucket_size": "auto", **_FETCH}
_LIVE = {"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
_WHOLE = {"stage3_gather_16bit_weights_on_model_save": True}
_OVERLAP = {"overlap_comm": True, "contiguous_gradients": True}

_FACTORY = {**_CLIPPED, **_EITHER, "zero_allow_untested_optimizer": True}
_FACTORY_2 = {
    **{"allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": False, "reduce_scatter": True},
    **{"reduce_bucket_size": 5e8, "contiguous_gradients": True, "round_robin_gradients": True},
}
_FACTORY_3 = {
    **{"stage": 3, "overlap_comm": False, "contiguous_gradients": True, "sub_group_size": 1e9},
    **{**_BUCKETS, **_LIVE, **_WHOLE},
}
_AXOLOTL_FP16 = {"fp16": {"enabled": "auto", "auto_cast": False, **_SCALE, "initial_scale_power": 32}}
_AXOLOTL = {**_CLIPPED, **_QUIET, **_AUTO_BF16, **_AXOLOTL_FP16}
_AXOLOTL_3 = {
    **{"stage": 3, **_OVERLAP, "sub_group_size": 0, **_BUCKETS},
    **{"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, **_WHOLE},
}
_OLDER_NAMES = {"max_live_parameters": 0, "max_reuse_distance": 0, "gather_16bit_weights_on_model_save": True}
_AXOLOTL_BF16 = {**_CLIPPED, **_QUIET, "bf16": {"enabled": True}}
_AXOLOTL_BF16_3 = {"stage": 3, **_OVERLAP, "sub_group_size": 0, "reduce_bucket_size": "auto", **_OLDER_NAMES}
_ANY_OPTIMIZER = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}

_ACCELERATE = {
    **{**_SIZES, **_FP16, **_QUIET, "gradient_accumulation_steps": 1, "gradient_clipping": "auto"},
    **{"steps_per_print": 2000, "scheduler": _DECAY},
}
_TORCH_ADAM = {
    "type": "AdamW",
    "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True},
}
_PLAIN_ADAM = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
_ACCELERATE_2 = {
    **{
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "reduce_scatter": True,
        "reduce_bucket_size": "auto",
    },
    **_OVERLAP,
}
_ACCELERATE_3 = {
    **{"stage": 3, **_OVERLAP, **_BUCKETS, "sub_group_size": 1e9, **_LIVE},
    "stage3_gather_16bit_weights_on_model_save": "auto",
}

_LLAVA_3 = {"stage": 3, **_OVERLAP, "sub_group_size": 1e9, **_BUCKETS, **_LIVE}
_TRAINER = {**_QUIET, "steps_per_print": 2000}
_TRAINER_OLD_3 = {"stage": 3, **_ON_HOST, **_OVERLAP, "sub_group_size": 1e14, **_LIVE}
_CHAT_3 = {
    **{"stage": 3, "overlap_comm": True, "offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"}},
    **{"stage3_param_persistence_threshold": 1e4, "stage3_max_live_parameters": 3e7},
    **{"stage3_prefetch_bucket_size": 3e7, "memory_efficient_linear": False},
}

CONFIGS: dict[str, dict[str, Any]] = {
    "hiyouga/LLaMA-Factory ds_z0_config": {**_FACTORY, "zero_optimization": {"stage": 0, **_FACTORY_2}},
    "hiyouga/LLaMA-Factory ds_z2_config": {**_FACTORY, "zero_optimization": {"stage": 2, **_FACTORY_2}},
    "hiyouga/LLaMA-Factory ds_z2_offload_config": {
        **_FACTORY, "zero_optimization": {"stage": 2, "offload_optimizer": _PINNED, **_FACTORY_2},
    },
    "hiyouga/LLaMA-Factory ds_z3_config": {**_FACTORY, "zero_optimization": _FACTORY_3},
    "hiyouga/LLaMA-Factory ds_z3_offload_config": {**_FACTORY, "zero_optimization": {**_FACTORY_3, **_ON_HOST}},
    "axolotl-ai-cloud/axolotl zero1": {
        **_ALL_SIZES, **_QUIET, **_AUTO_BF16, **_AXOLOTL_FP16,
        "optimizer": _AUTO_ADAMW, "zero_optimization": {"stage": 1, "overlap_comm": True},
    },
    "axolotl-ai-cloud/axolotl zero1_torch_compile": {
        **_AXOLOTL, "zero_optimization": {"stage": 1, "overlap_comm": True},
        "compile": {"disable": False, "backend": "inductor"},
    },
    "axolotl-ai-cloud/axolotl zero2": {
        **_AXOLOTL, "zero_optimization": {"stage": 2, "offload_optimizer": _CPU, **_OVERLAP},
    },
    "axolotl-ai-cloud/axolotl zero3": {**_AXOLOTL, "zero_optimization": _AXOLOTL_3},
    "axolotl-ai-cloud/axolotl zero3_cpuoffload": {**_AXOLOTL, "zero_optimization": {**_AXOLOTL_3, **_ON_HOST}},
    "axolotl-ai-cloud/axolotl zero3_bf16": {
        **_AXOLOTL_BF16,
        "zero_optimization": {
            **_AXOLOTL_BF16_3, "prefetch_bucket_size": "auto", "param_persistence_threshold": "auto",
        },
    },
    "axolotl-ai-cloud/axolotl zero3_bf16_cpuoffload_params": {
        **_AXOLOTL_BF16, **_ANY_OPTIMIZER,
        "zero_optimization": {**_AXOLOTL_BF16_3, **_FETCH, "offload_param": _PINNED},
    },
    "axolotl-ai-cloud/axolotl zero3_bf16_cpuoffload_all": {
        **_AXOLOTL_BF16, **_ANY_OPTIMIZER, "zero_optimization": {**_AXOLOTL_BF16_3, **_FETCH, **_ON_HOST},
    },
    "huggingface/accelerate zero_stage1_config": {
        **_ACCELERATE, "optimizer": _TORCH_ADAM, "zero_optimization": {"stage": 1, **_ACCELERATE_2},
    },
    "huggingface/accelerate zero_stage2_config": {
        **_ACCELERATE, "optimizer": _TORCH_ADAM, "zero_optimization": {"stage": 2, **_ACCELERATE_2},
    },
    "huggingface/accelerate zero_stage2_offload_config": {
        **_ACCELERATE, "optimizer": _TORCH_ADAM,
        "zero_optimization": {"stage": 2, "offload_optimizer": _PINNED, **_ACCELERATE_2},
    },
    "huggingface/accelerate zero_stage3_config": {
        **_ACCELERATE, "optimizer": _PLAIN_ADAM, "zero_optimization": _ACCELERATE_3,
    },
    "huggingface/accelerate zero_stage3_offload_config": {
        **_ACCELERATE, "optimizer": _PLAIN_ADAM, "zero_optimization": {**_ACCELERATE_3, **_ON_HOST},
    },
    "huggingface/accelerate tests ds_config_zero3": {
        **_ACCELERATE, **_EITHER, "optimizer": _TORCH_ADAM, "scheduler": _WARMUP,
        "zero_optimization": {
            **_ACCELERATE_3, "offload_optimizer": {**_PINNED, "nvme_path": "/nvme"},
            "offload_param": {**_PINNED, "nvme_path": "/nvme"},
        },
    },
    "lm-sys/FastChat deepspeed_config_s2": {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "fp16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "offload_optimizer": _CPU, **_OVERLAP},
    },
    "lm-sys/FastChat deepspeed_config_s3": {
        **_ALL_SIZES, **_AUTO_FP16,
        "zero_optimization": {
            "stage": 3, **_ON_HOST, **_OVERLAP, **_LIVE, **_WHOLE, "sub_group_size": 1e12,
            "stage3_prefetch_bucket_size": 5e8, "stage3_param_persistence_threshold": 1e6,
        },
    },
    "haotian-liu/LLaVA zero2": {
        **_ALL_SIZES, **_EITHER,
        "zero_optimization": {"stage": 2, **_OVERLAP, "sub_group_size": 1e9, "reduce_bucket_size": "auto"},
    },
    "haotian-liu/LLaVA zero3": {**_ALL_SIZES, **_EITHER, "zero_optimization": {**_LLAVA_3, **_WHOLE}},
    "haotian-liu/LLaVA zero3_offload": {
        **_CLIPPED, **_QUIET, **_AUTO_FP16, "bf16": {"enabled": True}, "steps_per_print": 1e5,
        "optimizer": _AUTO_ADAMW, "scheduler": _WARMUP,
        "zero_optimization": {**_LLAVA_3, **_ON_HOST, "gather_16bit_weights_on_model_save": True},
    },
    "huggingface/transformers tests ds_config_zero2": {
        **_CLIPPED, **_TRAINER, **_EITHER, "optimizer": _AUTO_ADAMW, "scheduler": _WARMUP,
        "zero_optimization": {
            "stage": 2, "offload_optimizer": _PINNED, **_ACCELERATE_2, "reduce_bucket_size": 2e8,
        },
    },
    "huggingface/transformers tests ds_config_zero3": {
        **_CLIPPED, **_TRAINER, **_AUTO_FP16, "optimizer": _AUTO_ADAMW, "scheduler": _WARMUP,
        "zero_optimization": {**_TRAINER_OLD_3, **_BUCKETS, "stage3_gather_fp16_weights_on_model_save": True},
    },
    "huggingface/transformers tests ds_config_zero3 of 2021": {
        **_TRAINER, **_FP16,
        "optimizer": {
            "type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500},
        },
        "zero_optimization": {
            **_TRAINER_OLD_3, **dict.fromkeys(_BUCKETS, 0), "stage3_gather_fp16_weights_on_model_save": True,
        },
    },
    "microsoft/DeepSpeedExamples cifar": {
        "train_batch_size": 4, **_TRAINER, "gradient_clipping": 1.0, "prescale_gradients": False,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
        "scheduler": {
            "type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 1000},
        },
        "fp16": {
            "enabled": True, **_SCALE, "fp16_master_weights_and_grads": True, "loss_scale_window": 500,
            "initial_scale_power": 15,
        },
        "zero_optimization": {
            "stage": 2, **_OVERLAP, "allgather_partitions": True, "reduce_scatter": True, "cpu_offload": True,
            "allgather_bucket_size": 5e7, "reduce_bucket_size": 5e7,
        },
    },
    "microsoft/DeepSpeedExamples BingBertGlue": {
        "train_batch_size": 32, "train_micro_batch_size_per_gpu": 1, "steps_per_print": 10, "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 2e-5, "weight_decay": 0.0, "bias_correction": True}},
        "fp16": {"enabled": False},
    },
    "microsoft/DeepSpeedExamples alpaca-lora-zero3": {
        "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
        "steps_per_print": 2000000, "fp16": {"enabled": True, **_SCALE, "initial_scale_power": 8},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3, **_ON_HOST, "overlap_comm": False, "contiguous_gradients": True, "sub_group_size": 1e8,
            "stage3_gather_16bit_weights_on_model_save": False, "stage3_max_live_parameters": 2e8,
            "stage3_max_reuse_distance": 2e8, "stage3_prefetch_bucket_size": 1e8,
            "stage3_param_persistence_threshold": 1e5, "reduce_bucket_size": 1e7,
        },
        "activation_checkpointing": {
            "partition_activations": False, "cpu_checkpointing": False, "contiguous_memory_optimization": False,
            "number_checkpoints": None, "synchronize_checkpoint_boundary": False, "profile": True,
        },
    },
    "deepspeedai/DeepSpeedExamples DeepSpeed-Chat get_train_ds_config": {
        "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, **_QUIET, "steps_per_print": 10,
        "bfloat16": {"enabled": True}, "gradient_clipping": 1.0, "prescale_gradients": False,
        "zero_optimization": _CHAT_3,
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1, "pin_parameters": True},
        "tensorboard": {"enabled": False, "output_path": "/ds_tensorboard_logs/", "job_name": "_tensorboard"},
    },
}  # fmt: skip
