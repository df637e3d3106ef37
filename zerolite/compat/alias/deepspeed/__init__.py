"""``zerolite.compat.deepspeed`` under DeepSpeed's name, for processes that have switched it on."""

import os
import sys

import zerolite.compat.deepspeed
from zerolite.compat.as_deepspeed import AliasFinder

sys.meta_path.insert(0, AliasFinder())
sys.modules[__name__] = zerolite.compat.deepspeed
if os.environ.get("RANK", "0") == "0":
    print("zerolite: `import deepspeed` gives zerolite.compat.deepspeed, as requested", file=sys.stderr, flush=True)
