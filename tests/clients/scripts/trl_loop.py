"""TRL on two ranks: `trl_loop.py OUT sft,2 dpo,3 ...`, a run for each kind and stage.

"dpo" and "grpo" have a reference model. Three steps of a small Llama on tokenized rows; GRPO generates what it is
rewarded for. "mixture" is GRPO with a small Qwen3-MoE and completions of different lengths, and "experts" the same with
experts that the ranks spread. Rank 0 writes the losses.
"""

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from datasets import Dataset
from shared import auto, run_cases, small_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.models import unwrap_model_for_generation

from tests.toolkit import experts

WORDS = [f"w{number}" for number in range(60)]


def make_tokenizer():
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def make_model(kind):
    set_seed(5)
    if kind in ("mixture", "experts"):
        return experts.family("qwen3_moe", vocab_size=64, eos_token_id=1, bos_token_id=1)
    return LlamaForCausalLM(small_llama(vocab_size=64, eos_token_id=1, bos_token_id=1))


def text(number, words):
    return " ".join(WORDS[(number * 7 + step * (number % 5 + 1)) % len(WORDS)] for step in range(words))


def reward(completions, **others):
    return [sum(len(word) for word in completion.split()) / 20 for completion in completions]


def generate_with_reference(trainer):
    """Tokens of the reference model, an engine without an optimizer, and of the model that it was made from."""
    prompt = torch.tensor([[5, 9, 3]])
    with unwrap_model_for_generation(trainer.ref_model, trainer.accelerator) as model:
        here = model.generate(prompt, max_new_tokens=5, do_sample=False)
    return [here.tolist(), make_model("dpo").generate(prompt, max_new_tokens=5, do_sample=False).tolist()]


def run(out, kind, stage):
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(backend="gloo")
    sizes = auto("train_micro_batch_size_per_gpu train_batch_size gradient_accumulation_steps")
    config = {**sizes, "zero_optimization": {"stage": int(stage)}}
    if kind == "experts":
        config["expert_parallel"] = {"size": 2}
    common = {
        "output_dir": out + ".runs", "deepspeed": config, "per_device_train_batch_size": 2, "max_steps": 3,
        "learning_rate": 1e-3, "logging_steps": 1, "save_steps": 3, "report_to": [], "bf16": False,
        "gradient_checkpointing": False, "disable_tqdm": True, "accelerator_config": {"use_configured_state": True},
    }  # fmt: skip
    if kind == "sft":
        rows = [{"text": text(n, 12)} for n in range(24)]
    elif kind in ("grpo", "mixture", "experts"):
        rows = [{"prompt": text(n, 4)} for n in range(24)]
    else:
        rows = [{"prompt": text(n, 4), "chosen": text(n + 1, 5), "rejected": text(n + 2, 5)} for n in range(24)]
    data = {"train_dataset": Dataset.from_list(rows), "processing_class": make_tokenizer()}
    if kind == "sft":
        trainer = SFTTrainer(make_model(kind), SFTConfig(max_length=32, **common), **data)
    elif kind in ("grpo", "mixture", "experts"):
        options = {"num_generations": 2, "max_completion_length": 6, "model_init_kwargs": {"dtype": "float32"}}
        if kind != "grpo":  # an end becomes likely, at another length for each
            options["generation_kwargs"] = {"exponential_decay_length_penalty": (1, 2.0)}
            options["max_completion_length"] = 12
        model = out + ".model"  # a path, from which the reference model is loaded as well
        if PartialState().is_main_process:
            make_model(kind).save_pretrained(model)
        PartialState().wait_for_everyone()
        trainer = GRPOTrainer(model, reward, GRPOConfig(beta=0.1, **options, **common), **data)
    else:
        arguments = DPOConfig(max_length=32, **common)
        trainer = DPOTrainer(make_model(kind), ref_model=make_model(kind), args=arguments, **data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    generated = generate_with_reference(trainer) if kind == "dpo" else None
    return {"losses": losses, "generated": generated}


if __name__ == "__main__":
    run_cases(run, ACCELERATE_USE_DEEPSPEED="true")
