"""A training loop with accelerate: `accelerate_loop.py OUT 0,fp32 1,fp32 ...`, one run for each stage and precision.
With `,2` behind them two sets of ranks hold the same shards.

Two ranks, gradient accumulation, clipping and a schedule, then a save, a load into a second model and one more step.
Rank 0 writes the losses and the largest weight difference after the load.
"""

import os

import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs, set_seed
from shared import auto, run_cases


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
        self.head = torch.nn.Linear(64, 1)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))  # without dimensions

    def forward(self, x):
        return self.head(self.body(x)) * self.scale


def make_accelerator(stage, precision, sets):
    config = {
        **auto("train_micro_batch_size_per_gpu train_batch_size"),
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": int(stage), "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16", "initial_scale_power": 8},
    }
    if stage == "3":
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    precision = {"fp32": "no"}.get(precision, precision)
    kwargs = [InitProcessGroupKwargs(backend="gloo")]
    replicas = None
    if sets:
        size = int(os.environ["WORLD_SIZE"]) // int(sets)
        replicas = ParallelismConfig(dp_replicate_size=int(sets), dp_shard_size=size)
    return Accelerator(
        kwargs_handlers=kwargs, deepspeed_plugin=plugin, mixed_precision=precision, parallelism_config=replicas
    )


def run(saved, stage, precision, sets=None):
    AcceleratorState._reset_state(reset_partial_state=True)
    set_seed(7)
    accelerator = make_accelerator(stage, precision, sets)
    data = [(torch.randn(8), torch.randn(1)) for _ in range(64)]
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, norms = [], []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x).float(), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5) or 0.0))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.gather(loss.detach()).mean()))
    accelerator.save_state(saved)
    before = {k: v.clone() for k, v in (accelerator.get_state_dict(model) or {}).items()}
    accelerator.backward(model(x).float().mean())  # moves the weights away from what was saved
    moved = largest_difference(before, accelerator.get_state_dict(model) or {})
    accelerator.load_state(saved)
    state = accelerator.get_state_dict(model) or {}
    difference, rate = largest_difference(before, state), scheduler.get_last_lr()[0]
    engine = getattr(model, "zerolite", None)
    shard_size = engine and engine.config.zero_optimization.shard_size
    accelerator.free_memory(model)
    return {"losses": losses, "norms": norms, "moved": moved, "difference": difference, "lr": rate,
            "names": sorted(state), "shard_size": shard_size}  # fmt: skip


def largest_difference(one, other):
    return max((float((one[name] - other[name]).abs().max()) for name in one), default=0.0)


if __name__ == "__main__":
    run_cases(run)
