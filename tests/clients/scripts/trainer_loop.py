"""transformers' Trainer on two ranks: `trainer_loop.py OUT full,0 lora,3 ...`, a run for each kind and stage.

A small Llama from a config, trained for six steps with evaluation and checkpoints, resumed from the third by a second
Trainer, and asked to generate. Rank 0 writes the losses of both. `too_large,2` begins with a batch for which there is
no memory. `file,z3_offload` and `file_lora,z3` take a JSON file of LLaMA-Factory. `mixture,0` trains a small Qwen3-MoE,
`experts,2` one whose experts the ranks spread, and `experts_lora,2` adapters of it. `tensor,2` divides each layer
between two ranks.
"""

import json
import os

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from shared import auto, run_cases, small_llama
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from tests.clients.published_configs import CONFIGS
from tests.toolkit import experts

ROWS = 48


class Data(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.ids = torch.randint(0, 96, (rows, 16), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def ds_config(stage):
    rates = auto("warmup_min_lr warmup_max_lr warmup_num_steps total_num_steps")
    stage3 = {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": 0}
    zero = {"stage": stage, "reduce_bucket_size": "auto", "stage3_gather_16bit_weights_on_model_save": True}
    return {
        **auto("train_micro_batch_size_per_gpu train_batch_size gradient_accumulation_steps gradient_clipping"),
        "optimizer": {"type": "AdamW", "params": auto("lr betas eps weight_decay")},
        "scheduler": {"type": "WarmupDecayLR", "params": rates},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {**zero, **(stage3 if stage == 3 else {})},
    }


def config_file(out, name):
    """Write a config of LLaMA-Factory, whose users name its file, and return the path."""
    path = f"{out}.{os.environ['RANK']}.json"
    with open(path, "w") as file:
        json.dump(CONFIGS[f"hiyouga/LLaMA-Factory ds_{name}_config"], file)
    return path


class OutOfMemory(torch.autograd.Function):
    """A backward that finds no memory for a batch of more than two rows."""

    @staticmethod
    def forward(ctx, hidden):
        ctx.rows = len(hidden)
        return hidden.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.rows > 2:
            raise RuntimeError("CUDA out of memory.")
        return grad


def make_trainer(out, kind, stage):
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(backend="gloo")
    set_seed(5)
    config = config_file(out, stage) if kind.startswith("file") else ds_config(int(stage))
    if kind.startswith("experts"):  # DeepSpeed's keys, and ours
        names = ("enabled", "autoep_size") if stage == "1" else ("size",)
        config["expert_parallel"] = {name: name == "enabled" or 2 for name in names}
    if kind.startswith("tensor"):
        config["tensor_parallel"] = {"autotp_size": 2}
    arguments = TrainingArguments(
        output_dir=out + ".runs", deepspeed=config, report_to=[], disable_tqdm=True,
        per_device_train_batch_size=4 if kind == "too_large" else 2, auto_find_batch_size=kind == "too_large",
        per_device_eval_batch_size=2, gradient_accumulation_steps=2,
        max_steps=6, learning_rate=3e-3, warmup_steps=2,
        logging_steps=1, eval_strategy="steps", eval_steps=3, save_steps=3,
        accelerator_config={"use_configured_state": True},  # on CPUs accelerate has to be told of gloo, above
    )  # fmt: skip
    if kind.startswith(("experts", "mixture")):
        model = experts.family("qwen3_moe", vocab_size=96)
    else:
        model = LlamaForCausalLM(small_llama(tie_word_embeddings=True))
    if "lora" in kind:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    if kind == "too_large":
        model.model.layers[1].register_forward_hook(
            lambda layer, args, output: OutOfMemory.apply(output) if layer.training else output
        )
    return Trainer(model=model, args=arguments, train_dataset=Data(ROWS), eval_dataset=Data(8))


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def run(out, kind, stage):
    trainer = make_trainer(out, kind, stage)
    trainer.train()
    if kind == "too_large":
        return {"losses": logged(trainer, "loss"), "size": trainer._train_batch_size}
    losses, evals = logged(trainer, "loss"), logged(trainer, "eval_loss")
    trainer.save_model(out + ".model")
    trainer.model.eval()
    ids = Data(1).ids[:, :4].to(trainer.args.device)
    tokens = trainer.model_wrapped.generate(input_ids=ids, max_new_tokens=4, do_sample=False, synced_gpus=True)
    resumed = make_trainer(out, kind, stage)
    resumed.train(resume_from_checkpoint=out + ".runs/checkpoint-3")
    files = sorted(os.listdir(out + ".runs/checkpoint-3"))
    return {"losses": losses, "evals": evals, "resumed": logged(resumed, "loss")[-3:], "tokens": tokens.tolist(),
            "files": files, "model": sorted(os.listdir(out + ".model"))}  # fmt: skip


if __name__ == "__main__":
    run_cases(run, ACCELERATE_USE_DEEPSPEED="true")
