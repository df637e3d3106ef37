"""Trainer with LoRA and trained copies of the embeddings: `adapter_loop.py OUT plain` or `... copies,2 synced,3`.

The vocabulary of a small Llama with tied weights is enlarged. "plain" is the same run in one process without DeepSpeed.
"synced" reads merged weights after each step, as TRL does for an engine that generates. Rank 0 writes the losses, those
of a run that was resumed, and how far the weights that were read are from base and adapter.
"""

import functools
import sys
import types

from accelerate import PartialState
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from shared import run_cases, small_llama
from trainer_loop import Data, ds_config, logged
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed


class Sync(TrainerCallback):
    """Reads the weights that TRL sends to vLLM."""

    def __init__(self, trainer):
        from trl.distributed import DistributedBackend
        from trl.generation.vllm_generation import VLLMGeneration

        rename = functools.partial(VLLMGeneration._fix_param_name_to_vllm, None)
        backend = DistributedBackend(trainer.accelerator)
        self.sender = types.SimpleNamespace(model=trainer.model, _dist=backend, _fix_param_name_to_vllm=rename)
        self.iterate, self.weights = VLLMGeneration._iter_named_params, {}

    def on_step_end(self, *args, **others):
        self.weights = {name: values.clone() for name, values in self.iterate(self.sender)}

    def difference(self):
        import deepspeed

        model = self.sender.model
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            layer, llama = model.base_model.model.model.layers[0].self_attn.q_proj, model.base_model.model.model
            expected = {"layers.0.self_attn.q_proj": layer.base_layer.weight + layer.get_delta_weight("default")}
            expected["embed_tokens"] = llama.embed_tokens.modules_to_save["default"].weight
            found = {name: self.weights[f"model.{name}.weight"] for name in expected}
            return max(float((found[name] - values).abs().max()) for name, values in expected.items())


def make_trainer(out, stage):
    AcceleratorState._reset_state(reset_partial_state=True)
    how = {"gradient_accumulation_steps": 4, "use_cpu": True}
    if stage:
        PartialState(backend="gloo")
        config = ds_config(int(stage))
        del config["scheduler"]  # so that Trainer makes its own
        how = {"deepspeed": config, "gradient_accumulation_steps": 2}
    how["accelerator_config"] = {"use_configured_state": bool(stage)}
    arguments = TrainingArguments(
        output_dir=out + ".runs", report_to=[], disable_tqdm=True, per_device_train_batch_size=2, max_steps=6,
        learning_rate=3e-3, warmup_steps=2, logging_steps=1, save_steps=3, **how,
    )  # fmt: skip
    set_seed(5)
    model = LlamaForCausalLM(small_llama(tie_word_embeddings=True))
    model.resize_token_embeddings(101)
    set_seed(6)  # at stage 3 the line above draws more numbers
    options = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    model = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **options))
    return Trainer(model=model, args=arguments, train_dataset=Data(48))


def run(out, kind, stage=None):
    trainer = make_trainer(out, stage)
    sync = Sync(trainer) if kind == "synced" else None
    if sync:
        trainer.add_callback(sync)
    trainer.train()
    trainer.save_model(out + ".model")
    resumed = make_trainer(out, stage)
    resumed.train(resume_from_checkpoint=out + ".runs/checkpoint-3")
    resumed.save_model(out + ".resumed")
    return {"losses": logged(trainer, "loss"), "resumed": logged(resumed, "loss")[-3:],
            "difference": sync and sync.difference()}  # fmt: skip


if __name__ == "__main__":
    run_cases(run, ACCELERATE_USE_DEEPSPEED=str("plain" not in sys.argv).lower())
