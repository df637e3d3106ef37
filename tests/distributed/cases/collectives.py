import torch

import zerolite
from zerolite.comm import create_communicator, second_communicator


def smoke():
    zerolite.init_distributed()
    d = torch.device("cpu")
    c = create_communicator(d); s = second_communicator(c, d)
    out = []
    with torch.inference_mode():
      for c_ in (c, s):
        fulls = [torch.empty(n * c.world_size, dtype=t) for n, t in ((5, torch.float32), (0, torch.float32), (3, torch.bfloat16), (1, torch.int64))]
        shards = [torch.full((f.numel() // c.world_size,), float(c.rank), dtype=f.dtype) for f in fulls]
        c_.gather_shards(fulls, shards, "parameters").wait()
        out.append([f.tolist() for f in fulls])
    return out, type(s).__name__
