"""Models made under `zero.Init`, as transformers makes them at stage 3: `pretrained.py OUT`.

`from_pretrained` and `from_config` with tied weights, new rows in the embedding, LoRA's shapes, an engine, a step,
generation and the whole state; beside the same in plain PyTorch.
"""

import sys

import deepspeed
import torch
from shared import auto, finish, small_llama
from transformers import AutoModelForCausalLM, LlamaForCausalLM, set_seed
from transformers.integrations import HfDeepSpeedConfig

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    **auto("gradient_accumulation_steps train_batch_size"),
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "gradient_clipping": 0.0,  # as the plain loop; DeepSpeed's default is 1.0
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": 0},
}


def main(out):
    deepspeed.init_distributed("gloo")
    rank = deepspeed.comm.get_rank()
    set_seed(3)
    plain = LlamaForCausalLM(small_llama(tie_word_embeddings=True))
    if rank == 0:
        plain.save_pretrained(out + ".plain")
    deepspeed.comm.barrier()
    keep = HfDeepSpeedConfig(CONFIG)
    model = LlamaForCausalLM.from_pretrained(out + ".plain")
    partitioned = all(hasattr(parameter, "ds_id") for parameter in model.parameters())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        loaded = all(torch.equal(p.detach(), q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    set_seed(4)
    scratch = AutoModelForCausalLM.from_config(small_llama(tie_word_embeddings=True))
    with deepspeed.zero.GatheredParameters(list(scratch.parameters())):
        spread = float(scratch.model.layers[0].mlp.up_proj.weight.std())
    model.resize_token_embeddings(100, mean_resizing=False)
    plain.resize_token_embeddings(100, mean_resizing=False)
    with deepspeed.zero.GatheredParameters(model.model.embed_tokens.weight, modifier_rank=0):
        if rank == 0:
            model.model.embed_tokens.weight.data.copy_(plain.model.embed_tokens.weight)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    batches = [torch.randint(0, 100, (2, 8), generator=torch.Generator().manual_seed(r)) for r in range(2)]
    engine.train()
    loss = engine(input_ids=batches[rank], labels=batches[rank]).loss
    engine.backward(loss)
    engine.step()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0, foreach=True)
    plain.train()
    (sum(plain(input_ids=batch, labels=batch).loss for batch in batches) / 2).backward()
    optimizer.step()
    state = engine._zero3_consolidated_16bit_state_dict() or {}
    wanted = plain.state_dict()
    worst = max((float((state[name] - wanted[name]).abs().max()) for name in state), default=0.0)
    engine.eval()
    options = {"max_new_tokens": 4 + rank, "do_sample": False, "pad_token_id": 0}
    tokens = engine.module.generate(input_ids=batches[0], synced_gpus=True, **options)
    same = torch.equal(tokens, plain.eval().generate(input_ids=batches[0], **options))
    del keep
    result = {"partitioned": partitioned, "loaded": loaded, "tied": tied, "spread": spread, "worst": worst,
              "names": sorted(state) == sorted(wanted), "same": same}  # fmt: skip
    finish(out, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
