"""Train the GPT of this directory in the loop of nanoGPT: autocast, GradScaler, accumulation, clipping, a learning rate
set by hand, checkpoints to resume from. Nothing in it knows that amp.json spreads optimizer and gradients over ranks.

    zerolite --nproc 2 amp.py                 the stage is in amp.json
    zerolite --nproc 2 amp.py --resume        goes on from the last checkpoint, on any number of processes
"""

import argparse
import math
from pathlib import Path

import torch

import zerolite
from data import load_corpus, random_crops
from model import GPT, GPTConfig

parser = argparse.ArgumentParser(description="Train a byte-level GPT with autocast and GradScaler.")
parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
parser.add_argument("--log-every", type=int, default=10, help="steps between two lines (default: %(default)s)")
parser.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints (default: %(default)s)")
parser.add_argument("--batch-size", type=int, default=8, help="crops on each process (default: %(default)s)")
parser.add_argument("--accumulation", type=int, default=2, help="micro-batches of a step (default: %(default)s)")
parser.add_argument("--learning-rate", type=float, default=1e-3, help="the highest one (default: %(default)s)")
parser.add_argument("--dtype", default="float16", help="autocast's; float16 scales the loss (default: %(default)s)")
parser.add_argument("--data", type=Path, nargs="+", default=[], help="text (default: Python's standard library)")
parser.add_argument("--stop-after", type=int, help="end after this step (default: after the last)")
parser.add_argument("--out", type=Path, default=Path("runs/amp"), help="of checkpoints (default: %(default)s)")
parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
args = parser.parse_args()

torch.manual_seed(0)
model = GPT(GPTConfig())
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95))
engine = zerolite.initialize(model, Path(__file__).with_name("amp.json"), optimizer=optimizer)

device, dtype = engine.device, getattr(torch, args.dtype)
scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
text, context = load_corpus(args.data).train, GPTConfig.context
count = args.batch_size * engine.world_size  # crops of a micro-batch, over all processes
first = 0
if args.resume:
    _, saved = engine.load_checkpoint(args.out, missing_ok=True)
    first = saved.get("step", 0)
    scaler.load_state_dict(saved.get("scaler", scaler.state_dict()))


def learning_rate(step: int) -> float:
    """Warm up for ten steps, then fall along a cosine to a tenth."""
    fraction = min(1.0, step / max(1, args.steps))
    return args.learning_rate * min(1.0, (step + 1) / 10) * (0.1 + 0.45 * (1.0 + math.cos(math.pi * fraction)))


for step in range(first, min(args.steps, args.stop_after or args.steps)):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    for micro in range(args.accumulation):
        number = (step * args.accumulation + micro) * count + engine.rank * args.batch_size
        tokens, targets = random_crops(text, context, number, args.batch_size, seed=0)
        with torch.autocast(device.type, dtype=dtype):
            loss = engine(tokens.to(device), targets.to(device)) / args.accumulation
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if (step + 1) % args.log_every == 0:
        mean = float(engine.reduce(loss.detach() * args.accumulation))
        if engine.rank == 0:
            print(f"step {step + 1}: loss {mean:.4f}, norm {norm:.4f}, scale {scaler.get_scale():g}", flush=True)
    if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
        engine.save_checkpoint(args.out, client_state={"step": step + 1, "scaler": scaler.state_dict()})

zerolite.destroy()
