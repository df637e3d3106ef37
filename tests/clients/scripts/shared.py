"""Parts of several scripts here: a small Llama, settings that are "auto", Lightning on CPUs, and the end of a run."""

import argparse
import json
import os
import sys

import torch


def finish(out, result):
    """Write ``result`` on rank 0, and end on all ranks."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
    if torch.distributed.get_rank() == 0:
        with open(out, "w") as file:
            json.dump(result, file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_cases(run, **variables):
    """Call ``run(name of files, *parts of the case)`` for each case of the command line, and write what it returns."""
    out, *cases = sys.argv[1:]
    os.environ |= variables
    finish(out, {case: run(f"{out}.{case}", *case.split(",")) for case in cases})


def auto(names):
    return dict.fromkeys(names.split(), "auto")


def small_llama(**more):
    from transformers import LlamaConfig

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**{**sizes, **heads, "max_position_embeddings": 64, "pad_token_id": 0, **more})


def allow_cpus(strategies, accelerator):
    """Take away the check of Lightning's DeepSpeed strategy that refuses CPUs, and nothing else."""
    import deepspeed

    strategies.CUDAAccelerator = accelerator
    strategies._validate_device_index_selection = lambda devices: None
    initialize, own = deepspeed.initialize, argparse.Namespace(device_rank=int(os.environ["LOCAL_RANK"]))
    deepspeed.initialize = lambda args, **kw: initialize(args=own, **kw)
