"""Sequences that two ranks share: `sequence_loop.py OUT accelerate,2 trainer,3 sft,2 ...`, for each client and stage.

A small Llama on rows of odd lengths, with prompts that no label counts. With `,plain` in place of the stage the same
training runs in one process, without DeepSpeed. Rank 0 writes the losses, those of a resumed run, and an evaluation.
"""

import os

import torch
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin
from shared import auto, run_cases, small_llama
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, set_seed

IGNORED, STEPS = -100, 6


class Data(torch.utils.data.Dataset):
    """Rows of 15 to 20 tokens, of which up to the first 13 are a prompt."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        length = 15 + index // 2 % 6
        ids = torch.randint(1, 96, (length,), generator=drawn)
        labels = ids.clone()
        labels[: int(torch.randint(3, 14, (), generator=drawn))] = IGNORED
        return {"input_ids": ids, "labels": labels}


def collate(rows):
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([row["input_ids"] for row in rows], True)
    labels = pad([row["labels"] for row in rows], True, IGNORED)
    return {"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long()}


def ds_config(stage):
    sizes = auto("train_micro_batch_size_per_gpu train_batch_size gradient_accumulation_steps gradient_clipping")
    return {**sizes, "zero_optimization": {"stage": int(stage), "stage3_param_persistence_threshold": 0}}


def shared():
    return ParallelismConfig(sp_size=2)


def run_accelerate(stage):
    """The loop that accelerate documents: the loss of a part, weighted by its labels over the group."""
    model = LlamaForCausalLM(small_llama())
    loader = torch.utils.data.DataLoader(Data(), 2, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    if stage == "plain":
        for batch in loader:
            losses.append(model(**batch).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return {"losses": [float(loss.detach()) for loss in losses]}
    plugin = DeepSpeedPlugin(hf_ds_config=ds_config(stage) | {"gradient_clipping": 0.0})
    accelerator = Accelerator(deepspeed_plugin=plugin, parallelism_config=shared())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    from deepspeed.utils import groups

    group = groups._get_sequence_parallel_group()
    for batch in loader:
        labels, logits = batch["shift_labels"], model(**batch).logits
        loss = accelerator.unwrap_model(model).loss_function(
            logits=logits, labels=None, shift_labels=labels, vocab_size=96
        )
        gather = torch.distributed.nn.functional.all_gather
        counts = gather((labels != IGNORED).sum(), group=group)
        parts = zip(gather(loss, group=group), counts, strict=True)
        loss = sum(part * count for part, count in parts if count > 0) / sum(counts)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "length": len(loader)}


def arguments_of(make, out, stage, **more):
    deepspeed = {} if stage == "plain" else {"deepspeed": ds_config(stage), "parallelism_config": shared()}
    return make(
        output_dir=out + ".runs", report_to=[], disable_tqdm=True, per_device_train_batch_size=2, max_steps=STEPS,
        per_device_eval_batch_size=2, learning_rate=1e-2, lr_scheduler_type="constant", logging_steps=1, save_steps=3,
        eval_strategy="steps", eval_steps=3, bf16=False, use_cpu=stage == "plain", save_only_model=stage == "plain",
        accelerator_config={"use_configured_state": True}, **deepspeed, **more,
    )  # fmt: skip


def start(stage):
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(stage != "plain").lower()
    PartialState(**({"cpu": True} if stage == "plain" else {"backend": "gloo"}))
    set_seed(5)


def make_trainer(kind, out, stage):
    start(stage)
    if kind == "trainer":
        arguments = arguments_of(TrainingArguments, out, stage)
        return Trainer(LlamaForCausalLM(small_llama()), arguments, collate, Data(), Data())
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
    from trl_loop import make_model, make_tokenizer, text

    rows = [{"prompt": text(n, 3 + n % 7), "completion": text(n + 1, 5 + n % 4)} for n in range(16)]
    arguments = arguments_of(SFTConfig, out, stage, max_length=32, gradient_checkpointing=False, shuffle_dataset=False)
    data = Dataset.from_list(rows)
    tokenizer = make_tokenizer()
    return SFTTrainer(make_model("sft"), arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer)


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def run(out, kind, stage):
    if kind == "accelerate":
        start(stage)
        return run_accelerate(stage)
    trainer = make_trainer(kind, out, stage)
    trainer.train()
    result = {"losses": logged(trainer, "loss"), "norms": logged(trainer, "grad_norm"),
              "evals": logged(trainer, "eval_loss")}  # fmt: skip
    if stage != "plain":
        resumed = make_trainer(kind, out, stage)
        resumed.train(resume_from_checkpoint=out + ".runs/checkpoint-3")
        result["resumed"] = logged(resumed, "loss")[-3:]
    return result


if __name__ == "__main__":
    run_cases(run)
