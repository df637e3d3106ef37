"""transformers' Trainer on zerolite: a small Llama from a config, on the bytes of this file. Nothing is downloaded.

    zerolite --nproc 2 --deepspeed-compat examples/huggingface/train.py
    zerolite --nproc 2 --deepspeed-compat examples/huggingface/train.py --lora
    zerolite --nproc 2 --deepspeed-compat examples/huggingface/train.py --sequence 2

--lora trains adapters of PEFT instead of the whole model; --trl uses TRL's SFTTrainer; --sequence N divides each
sequence over N processes. All go together.
"""

import argparse
import os
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

HERE = Path(__file__).resolve().parent
LENGTH = 64


def make_rows():
    data = Path(__file__).read_bytes()
    starts = range(0, len(data) - LENGTH, LENGTH // 4)
    return [list(data[start : start + LENGTH]) for start in starts]


def make_model():
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def adapters():
    from peft import LoraConfig

    return LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def make_trainer(options):
    common = {
        "output_dir": options.out,
        "deepspeed": str(HERE / "zero3.json"),
        "per_device_train_batch_size": 4,
        "max_steps": options.steps,
        "learning_rate": 3e-3,
        "logging_steps": 5,
        "save_steps": options.steps,
        "report_to": [],
        "bf16": torch.cuda.is_available(),
    }
    if not torch.cuda.is_available():  # accelerate counts processes before it knows of gloo
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        common["accelerator_config"] = {"use_configured_state": True}
    if options.sequence > 1:
        from accelerate import ParallelismConfig

        groups = int(os.environ.get("WORLD_SIZE", "1")) // options.sequence
        common["parallelism_config"] = ParallelismConfig(sp_size=options.sequence, dp_shard_size=groups)
    rows = [{"input_ids": row, "labels": row} for row in make_rows()]
    if options.trl:
        return make_sft_trainer(common, rows, options.lora)
    arguments = TrainingArguments(**common)  # before the model: at stage 3 it is made in parts
    model = make_model()
    if options.lora:
        from peft import get_peft_model

        model = get_peft_model(model, adapters())
    return Trainer(model=model, args=arguments, train_dataset=rows)


def make_sft_trainer(common, rows, lora):
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    vocabulary = {chr(256 + number): number for number in range(256)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, [])),
                                        pad_token=chr(256), eos_token=chr(257))  # fmt: skip
    arguments = SFTConfig(max_length=LENGTH, gradient_checkpointing=False, **common)
    return SFTTrainer(make_model(), arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
                      peft_config=adapters() if lora else None)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", default="runs/huggingface")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--trl", action="store_true")
    parser.add_argument("--sequence", type=int, default=1, metavar="N")
    options = parser.parse_args()
    torch.manual_seed(1)
    trainer = make_trainer(options)
    trainer.train()
    trainer.save_model(options.out + "/model")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
