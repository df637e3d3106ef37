"""Fine-tune a Hugging Face causal language model with LoRA: its weights stay frozen, small adapters are trained.

    zerolite --nproc 2 train.py --config lora.json
    torchrun --nproc-per-node 2 train.py --stage 3 --model path/to/a/model --data notes.txt

Needs transformers and peft: pip install 'zerolite[lora]'. Nothing is downloaded: --model is a directory on disk, with a
tokenizer in it. Without it a small Llama with random weights reads bytes, which shows the mechanics and no more.
The adapter is saved in peft's format.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zerolite

try:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
except ImportError as error:
    sys.exit(f"train.py: {error}; this example needs transformers and peft: pip install 'zerolite[lora]'")

DEFAULT_DATA = Path(argparse.__file__)  # Python source that every installation has


def load_base(directory: Path | None) -> torch.nn.Module:
    if directory is not None:
        return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True).float()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, initializer_range=0.2))


def add_adapters(base: torch.nn.Module, rank: int) -> torch.nn.Module:
    """The base, frozen, with a trained adapter of that rank in every linear layer of its blocks."""
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def load_tokens(files: list[Path], directory: Path | None, length: int) -> Tensor:
    """The text in crops, int64 [crops, length]: tokens of the model's tokenizer, or bytes if there is no directory."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    if directory is not None:
        ids = AutoTokenizer.from_pretrained(directory, local_files_only=True)(text)["input_ids"]
    else:
        ids = list(text.encode())
    if len(ids) < length:
        sys.exit(f"train.py: expected at least {length} tokens, one crop, in --data, and got {len(ids)}")
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def train(engine: Any, steps: int, log_every: int) -> list[float]:
    """Returns the loss of each step, the mean over ranks."""
    losses, started = [], time.perf_counter()
    for step, tokens in zip(range(1, steps + 1), zerolite.RepeatingLoader(engine.dataloader), strict=False):
        tokens = tokens.to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(engine.reduce(loss.item()))
        if engine.rank == 0 and step % log_every == 0:
            per_s = step * tokens.numel() * engine.world_size / (time.perf_counter() - started)
            print(f"step {step}: loss {losses[-1]:.4f}, {per_s:,.0f} tokens/s", flush=True)
    return losses


def save_adapter(engine: Any, out: Path) -> None:
    """Write what peft's PeftModel.from_pretrained(base, out) loads. Called on all ranks, since a parameter may be
    spread over them."""
    state = engine.full_state_dict(rank0_only=True)
    if engine.rank == 0:
        engine.module.save_pretrained(out, state_dict=state, save_embedding_layers=False)
        print(f"wrote {out}: {', '.join(sorted(file.name for file in out.iterdir()))}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a language model with LoRA.", allow_abbrev=False)
    add = parser.add_argument
    add("--config", type=Path, default=Path(__file__).with_name("lora.json"), help="(default: %(default)s)")
    add("--stage", type=int, choices=range(4), help="ZeRO stage (default: that of the config)")
    add("--model", type=Path, metavar="DIRECTORY", help="model and tokenizer (default: a small one of random weights)")
    add("--data", type=Path, nargs="+", default=[DEFAULT_DATA], metavar="FILE", help="text (default: %(default)s)")
    add("--out", type=Path, default=Path("runs/lora"), help="directory of the adapter (default: %(default)s)")
    add("--lora-rank", type=int, default=8, help="inner width of an adapter (default: %(default)s)")
    add("--length", type=int, default=128, help="tokens in a sample (default: %(default)s)")
    add("--steps", type=int, default=100, help="(default: %(default)s)")
    add("--log-every", type=int, default=10, help="steps between two lines (default: %(default)s)")
    args = parser.parse_args()
    config = json.loads(args.config.read_text())
    if args.stage is not None:
        config["zero_optimization"] = {"stage": args.stage}

    crops = load_tokens(args.data, args.model, args.length)
    engine = zerolite.initialize(add_adapters(load_base(args.model), args.lora_rank), config, training_data=crops)
    if engine.rank == 0:
        engine.module.print_trainable_parameters()
    train(engine, args.steps, args.log_every)
    save_adapter(engine, args.out)
    zerolite.destroy()


if __name__ == "__main__":
    main()
