"""transformers' Trainer on two ranks: `trainer_loop.py OUT full,0 lora,3 ...`, a run for each kind and stage.

A small Llama from a config, trained for six steps with evaluation and checkpoints, resumed from the third by a second
Trainer, and asked to generate. Rank 0 writes the losses of both.
"""

import json
import os
import sys

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

ROWS = 48


class Data(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.ids = torch.randint(0, 96, (rows, 16), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def ds_config(stage):
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            **({"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": 0} if stage == 3 else {}),
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }


def make_trainer(out, kind, stage):
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(backend="gloo")
    set_seed(5)
    arguments = TrainingArguments(
        output_dir=out + ".runs",
        deepspeed=ds_config(int(stage)),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=6,
        learning_rate=3e-3,
        warmup_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        report_to=[],
        accelerator_config={"use_configured_state": True},  # on CPUs accelerate has to be told of gloo, below
        disable_tqdm=True,
    )
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return Trainer(model=model, args=arguments, train_dataset=Data(ROWS), eval_dataset=Data(8))


def losses_of(trainer):
    history = trainer.state.log_history
    return (
        [entry["loss"] for entry in history if "loss" in entry],
        [entry["eval_loss"] for entry in history if "eval_loss" in entry],
    )


def run(out, kind, stage):
    trainer = make_trainer(out, kind, stage)
    trainer.train()
    losses, evals = losses_of(trainer)
    trainer.save_model(out + ".model")
    trainer.model.eval()
    ids = Data(1).ids[:, :4].to(trainer.args.device)
    tokens = trainer.model_wrapped.generate(input_ids=ids, max_new_tokens=4, do_sample=False, synced_gpus=True)
    resumed = make_trainer(out, kind, stage)
    resumed.train(resume_from_checkpoint=out + ".runs/checkpoint-3")
    again, _ = losses_of(resumed)
    files = sorted(os.listdir(out + ".runs/checkpoint-3"))
    return {"losses": losses, "evals": evals, "resumed": again[-3:], "tokens": tokens.tolist(), "files": files,
            "model": sorted(os.listdir(out + ".model"))}  # fmt: skip


def main(out, *cases):
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    results = {case: run(f"{out}.{case}", *case.split(",")) for case in cases}
    if torch.distributed.get_rank() == 0:
        with open(out, "w") as file:
            json.dump(results, file)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
