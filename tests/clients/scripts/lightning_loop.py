"""Lightning's Trainer with its DeepSpeed strategy: `lightning_loop.py OUT STAGE ...`.

Two epochs in one go, and one with a checkpoint from which a second Trainer goes on. Rank 0 writes the losses of both.
"""

import lightning.pytorch as pl
import lightning.pytorch.strategies.deepspeed as strategies
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from shared import allow_cpus, run_cases

allow_cpus(strategies, CPUAccelerator)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
        self.losses = []

    def training_step(self, batch, index):
        loss = self.net(batch[0]).pow(2).mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(stage, epochs, checkpoint=None):
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, max_epochs=epochs, accumulate_grad_batches=2, gradient_clip_val=0.5,
        strategy=strategies.DeepSpeedStrategy(stage=int(stage), process_group_backend="gloo"),
        logger=False, enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    rows = torch.randn(32, 5, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, torch.utils.data.DataLoader(rows.unsqueeze(1), batch_size=4), ckpt_path=checkpoint)
    return trainer, module.losses


def run(checkpoint, stage):
    trainer, first = fit(stage, 1)
    trainer.save_checkpoint(checkpoint)
    _, second = fit(stage, 2, checkpoint)
    _, whole = fit(stage, 2)
    return {"first": first, "second": second, "whole": whole}


if __name__ == "__main__":
    run_cases(run)
