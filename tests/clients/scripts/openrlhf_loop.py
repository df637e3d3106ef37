"""OpenRLHF's own strategy and SFTTrainer on two ranks: `openrlhf_loop.py OUT 2,fp32,none 3,bf16,offload 2,fp32,muon
...`, with the stage, the precision, and whether the optimizer's states are offloaded, or the optimizer is Muon.

A small Llama is trained, saved, loaded by a second strategy and trained further. Its states sleep on the host before
that, a second model takes its moving average, and its weights are read one by one, as for vLLM. Rank 0 writes numbers.
"""

import os
import sys
import types
from types import SimpleNamespace as Settings

import deepspeed
import peft  # noqa: F401  # looks for flash_attn and others itself
import torch
from safetensors.torch import load_file
from shared import run_cases, small_llama
from transformers import LlamaForCausalLM


def module(name, *names, **members):
    """Make a module with these members; those given by name alone are None."""
    made = types.ModuleType(name)
    vars(made).update(dict.fromkeys(names), **members)
    return made


# OpenRLHF imports these at the top, and nothing here calls them.
REPLACED = [
    module("flash_attn"),
    module("flash_attn.bert_padding", "index_first_axis", "pad_input", "rearrange", "unpad_input"),
    module("flash_attn.utils"),
    module("flash_attn.utils.distributed", "all_gather"),
    module("pylatexenc", "latex2text"),
    module("torchdata"),
    module("torchdata.stateful_dataloader", StatefulDataLoader=torch.utils.data.DataLoader),
]
sys.modules.update({each.__name__: each for each in REPLACED})
import openrlhf.models.actor as actors  # noqa: E402
import openrlhf.utils.deepspeed.deepspeed as strategies  # noqa: E402
import openrlhf.utils.utils as openrlhf_utils  # noqa: E402
from openrlhf.models import Actor  # noqa: E402
from openrlhf.trainer.sft_trainer import SFTTrainer  # noqa: E402
from openrlhf.utils.deepspeed.deepspeed_utils import offload_deepspeed_states, reload_deepspeed_states  # noqa: E402

for each in REPLACED:
    del sys.modules[each.__name__]

actors._patch_zero3_weight_mapping = lambda: None  # a workaround for transformers 5.15, which breaks 5.23
# OpenRLHF says CUDA wherever it means the device, and loads no models in fp32.
torch.cuda.set_device = lambda device: None
torch.cuda.synchronize = lambda: None
torch.cuda.current_device = lambda: torch.device("cpu")
dtype_named = openrlhf_utils.convert_to_torch_dtype
openrlhf_utils.convert_to_torch_dtype = lambda name: torch.float32 if name == "fp32" else dtype_named(name)
cuda_mesh = strategies.init_device_mesh
strategies.init_device_mesh = lambda device, *sizes, **names: cuda_mesh("cpu", *sizes, **names)

BATCH, MICRO, STEPS = 8, 2, 4
OPTIMIZER = {
    "optim": "adam", "muon": {"lr": 0.02, "momentum": 0.95},
    "adam": {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    "lr_scheduler": "cosine_with_min_lr", "lr_warmup_ratio": 0.3, "min_lr_ratio": 0.1, "max_norm": 0.5,
    "scheduler_steps": STEPS,
}  # fmt: skip


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return BATCH * STEPS

    def __getitem__(self, index):
        tokens = torch.randint(1, 96, (1, 16), generator=torch.Generator().manual_seed(index))
        trained = torch.arange(16)[None] >= 3 + index % 5
        return tokens, torch.ones_like(tokens), trained.long()


def make_settings(out, stage, precision, place):
    return Settings(
        local_rank=-1, max_norm=0.5, optim="muon" if place == "muon" else "adam",
        ds=Settings(
            zero_stage=stage, param_dtype=precision, adam_offload=place == "offload", zpg=1, tensor_parallel_size=1,
            ring_attn_size=1, packing_samples=False, overlap_comm=stage == 2,
        ),
        train=Settings(batch_size=BATCH, micro_batch_size=MICRO, dynamic_batch_enable=False),
        model=Settings(aux_loss_coef=0.0),
        logger=Settings(wandb=Settings(key=None), tensorboard_dir=None, logging_steps=1),
        eval=Settings(steps=-1),
        ckpt=Settings(save_steps=2, path=out + ".checkpoints", max_num=3, max_mem=1000),
    )  # fmt: skip


class Strategy(strategies.DeepspeedStrategy):
    """The strategy, with parameters of every size partitioned at stage 3."""

    def get_ds_train_config(self, *args, **kwargs):
        return without_threshold(super().get_ds_train_config(*args, **kwargs))

    def get_ds_eval_config(self, *args, **kwargs):
        return without_threshold(super().get_ds_eval_config(*args, **kwargs))


def without_threshold(config):
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return config


class Recorded(SFTTrainer):
    """The trainer, which records what it would log."""

    def save_logs_and_checkpoints(self, args, global_step, step_bar, logs_dict=None, client_states=None):
        self.logged = [*getattr(self, "logged", []), {**logs_dict, "step": global_step}]
        super().save_logs_and_checkpoints(args, global_step, step_bar, logs_dict, client_states)


def make_strategy(settings):
    strategy = Strategy(
        seed=5, max_norm=settings.max_norm, micro_train_batch_size=MICRO, train_batch_size=BATCH,
        zero_stage=settings.ds.zero_stage, args=settings,
    )  # fmt: skip
    strategy.setup_distributed()
    return strategy


def make_actor(path, strategy):
    """From a directory; under ``zero.Init`` at stage 3."""
    dtype = strategy.param_dtype
    return Actor(path, attn_implementation="eager", param_dtype=dtype, ds_config=strategy.get_ds_train_config())


class Saver:
    """The tokenizer's part in a save."""

    def save_pretrained(self, directory): ...


def weights_one_by_one(actor, settings):
    """Return a sum for each parameter of the full model, read as for vLLM."""
    sums, stage = [], settings.ds.zero_stage
    for parameter in actor.model.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            shape = parameter.shape if stage != 3 else parameter.ds_shape
            sums.append(parameter.data.reshape(shape).float().square().sum().item())
    return sums


def train(strategy, settings, path, resume):
    actor = make_actor(path, strategy)
    average = make_actor(path, strategy)
    average._offload = True
    muon = {"optim": "muon", "max_norm": 0.0} if settings.optim == "muon" else {}
    (actor, optimizer, schedule), average = strategy.prepare((actor, OPTIMIZER | muon), average)
    consumed = 0
    if resume:
        loaded, state = strategy.load_ckpt(actor.model, settings.ckpt.path, tag="global_step2")
        assert loaded is not None
        consumed = state["consumed_samples"]
    loader = strategy.setup_dataloader(Data(), MICRO, shuffle=True)
    trainer = Recorded(
        actor, strategy, optimizer, loader, None, schedule, settings.max_norm, batch_size=BATCH, max_epochs=1,
    )  # fmt: skip
    offload_deepspeed_states(actor.model)
    reload_deepspeed_states(actor.model)
    trainer.fit(settings, consumed, STEPS)
    for _ in range(strategy.accumulated_gradient):
        strategy.moving_average(actor, average, 0.9, "cpu")
    return actor, average, trainer.logged


def run(out, stage, precision, place):
    settings = make_settings(out, int(stage), precision, place)
    path = out + ".pretrained"
    if int(os.environ["RANK"]) == 0:
        torch.manual_seed(3)
        model = LlamaForCausalLM(small_llama(tie_word_embeddings=True))
        model.to(torch.bfloat16 if precision == "bf16" else torch.float32).save_pretrained(path)
    strategy = make_strategy(settings)
    torch.distributed.barrier()
    actor, average, logged = train(strategy, settings, path, resume=False)
    strategy.save_model(actor, Saver(), out + ".model")
    saved = load_file(out + ".model/model.safetensors")
    sums, averages = weights_one_by_one(actor, settings), weights_one_by_one(average, settings)
    tokens = Data()[0][0]
    with torch.no_grad():
        actor.eval()
        evaluated = actor(tokens, attention_mask=torch.ones_like(tokens), return_logprobs=True).sum().item()
    _, _, resumed = train(make_strategy(settings), settings, path, resume=True)
    return {
        "losses": [step["loss_mean"] for step in logged], "norms": [step["grad_norm"] for step in logged],
        "rates": [step["lr"] for step in logged], "resumed": [step["loss_mean"] for step in resumed],
        "sums": sums, "averages": averages, "evaluated": evaluated,
        "saved": {name: value.float().square().sum().item() for name, value in saved.items()},
    }  # fmt: skip


if __name__ == "__main__":
    run_cases(run)
