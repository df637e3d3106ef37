"""Train the GPT of this directory in the loop that everyone knows: model, optimizer, loader, backward, step.

    zerolite --nproc 2 plain_ddp.py         DistributedDataParallel
    zerolite --nproc 2 plain_zerolite.py    zerolite; plain.json chooses optimizer, stage and precision
    diff plain_ddp.py plain_zerolite.py     three lines

torchrun starts both as well.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import zerolite
from data import load_corpus
from model import GPT, GPTConfig

parser = argparse.ArgumentParser(description="Train a byte-level GPT in a plain PyTorch loop.")
parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
parser.add_argument("--log-every", type=int, default=10, help="steps between two lines (default: %(default)s)")
parser.add_argument("--batch-size", type=int, default=8, help="crops on each process (default: %(default)s)")
parser.add_argument("--data", type=Path, nargs="+", default=[], help="text (default: Python's standard library)")
args = parser.parse_args()

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
config = GPTConfig()
model = zerolite.initialize(GPT(config), Path(__file__).with_name("plain.json"))
optimizer = model.optimizer

crops = load_corpus(args.data).train.unfold(0, config.context + 1, config.context)  # uint8 [crops, context + 1]
loader = DataLoader(crops, batch_size=args.batch_size, sampler=DistributedSampler(crops))

started = time.perf_counter()
for step, batch in enumerate(loader, 1):
    tokens = batch.to(device).long()
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % args.log_every == 0:
        seen = step * args.batch_size * dist.get_world_size() * config.context
        print(f"step {step}: loss {loss.item():.6f}, {seen / (time.perf_counter() - started):,.0f} bytes/s", flush=True)
    if step == args.steps:
        break

dist.destroy_process_group()
