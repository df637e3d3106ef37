"""The imports and calls of DeepSpeed-Chat's first step, supervised fine-tuning with LoRA, on a small OPT."""

import argparse
import json
import math
import sys

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed import get_accelerator
from deepspeed.compression.helper import recursive_getattr, recursive_setattr
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM, OPTConfig, default_data_collator, get_scheduler
from transformers.integrations import HfDeepSpeedConfig

MICRO, STEPS = 2, 4


def ds_config(stage, offload):
    device = {"device": "cpu" if offload else "none"}
    return {
        "train_batch_size": MICRO * dist.get_world_size() * 2,
        "train_micro_batch_size_per_gpu": MICRO,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": stage, "overlap_comm": True, "offload_param": device, "offload_optimizer": device,
            "stage3_param_persistence_threshold": 100, "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7, "memory_efficient_linear": False,
        },
        "gradient_clipping": 1.0, "prescale_gradients": False, "wall_clock_breakdown": False,
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1},
        "tensorboard": {"enabled": False, "output_path": "logs/", "job_name": "step1"},
    }  # fmt: skip


class LoraLinear(nn.Module):
    def __init__(self, linear, rank):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        rows, columns = getattr(linear.weight, "ds_shape", linear.weight.shape)
        self.lora_right_weight = nn.Parameter(torch.randn(columns, rank))
        self.lora_left_weight = nn.Parameter(torch.zeros(rank, rows))
        self.weight.requires_grad = False
        self.fused = False

    def forward(self, x):
        out = nn.functional.linear(x, self.weight, self.bias)
        return out if self.fused else out + x @ self.lora_right_weight @ self.lora_left_weight

    def fuse(self):
        self.weight.data += self.lora_left_weight.t() @ self.lora_right_weight.t()
        self.fused = True


def to_lora(model, part, rank):
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and part in name]
    for name in names:
        recursive_setattr(model, name, LoraLinear(recursive_getattr(model, name), rank))
    return model


def to_fetch(parameters):
    return [p for p in parameters if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]


def from_lora(model):
    for name in [name for name, module in model.named_modules() if isinstance(module, LoraLinear)]:
        module = recursive_getattr(model, name)
        parameters = [module.weight, module.bias, module.lora_left_weight, module.lora_right_weight]
        partitioned = hasattr(module.weight, "ds_id")
        with deepspeed.zero.GatheredParameters(to_fetch(parameters), modifier_rank=0, enabled=partitioned):
            module.fuse()
    return model


def whole_state(model, stage):
    state = {}
    for name, parameter in model.module.named_parameters():
        with deepspeed.zero.GatheredParameters(to_fetch([parameter]), enabled=stage == 3):
            value = parameter.data.cpu().clone()
        if dist.get_rank() == 0 and "lora" not in name:
            state[name] = value
    return state


def evaluation(model, loader, device):
    model.eval()
    losses = 0
    for batch in loader:
        with torch.no_grad():
            losses += model(**{key: value.to(device) for key, value in batch.items()}).loss.float()
    losses = losses / len(loader)
    torch.distributed.all_reduce(losses)
    return (losses / torch.distributed.get_world_size()).item()


def train(stage, offload, args):
    config = ds_config(stage, offload)
    deepspeed.runtime.utils.set_random_seed(1234)
    keep = HfDeepSpeedConfig(config) if stage == 3 else None
    model = AutoModelForCausalLM.from_config(
        OPTConfig(vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, dropout=0.0,
                  max_position_embeddings=32, word_embed_proj_dim=16, layerdrop=0.0)
    )  # fmt: skip
    model = to_lora(model, "decoder.layers.", 4)
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(3, 64, (STEPS * 2 * MICRO * 2, 12), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in rows]
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, collate_fn=default_data_collator, sampler=sampler, batch_size=MICRO)
    groups = [{"params": [p for p in model.parameters() if p.requires_grad], "weight_decay": 0.1}]
    optimizer = (DeepSpeedCPUAdam if offload else FusedAdam)(groups, lr=1e-2, betas=(0.9, 0.95))
    schedule = get_scheduler(
        name="cosine", optimizer=optimizer, num_warmup_steps=0, num_training_steps=math.ceil(len(loader) / 2)
    )
    model, optimizer, _, schedule = deepspeed.initialize(
        model=model, optimizer=optimizer, args=args, config=config, lr_scheduler=schedule, dist_init_required=True
    )
    model.gradient_checkpointing_enable()
    device = torch.device(get_accelerator().device_name())
    model.train()
    losses = []
    for batch in loader:
        loss = model(**{key: value.to(device) for key, value in batch.items()}, use_cache=False).loss
        losses.append(loss.item())
        model.backward(loss)
        model.step()
    trained = evaluation(model, loader, device)
    model.tput_timer.update_epoch_count()
    model = from_lora(model)
    result = {"losses": losses, "evaluated": trained, "fused": evaluation(model, loader, device)}
    result["numel"] = sum(value.numel() for value in whole_state(model, stage).values())
    del keep
    return result


def main():
    out, *cases = sys.argv[1:]
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args([])
    deepspeed.init_distributed()
    results = {}
    for case in cases:
        stage, offload = case.split(",")
        results[case] = train(int(stage), offload == "offload", args)
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump(results, file)


main()
