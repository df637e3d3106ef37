"""``import deepspeed`` where it was asked for: ``zerolite.compat.deepspeed`` under DeepSpeed's name."""

import os
import sys

import zerolite.compat.deepspeed
from zerolite.compat.as_deepspeed import AliasFinder

sys.meta_path.insert(0, AliasFinder())
sys.modules[__name__] = zerolite.compat.deepspeed
if os.environ.get("RANK", "0") == "0":
    print("zerolite: `import deepspeed` gives zerolite.compat.deepspeed, as was asked for", file=sys.stderr, flush=True)
