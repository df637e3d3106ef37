"""Step times on stated machines, by the plan's clock: zerolite's settings beside FSDP2, HSDP and DeepSpeed.

    python benchmarks/step_times.py                              # Llama-2-7B; 8 to 4096 ranks, 8 a node
    python benchmarks/step_times.py --models llama-3-70b --ranks 64,1024
    python benchmarks/step_times.py --settings 3,hierarchical,fsdp2-hsdp --markdown
    python benchmarks/step_times.py --models mixture-30b,mixture-235b,mixture-671b --ranks 64,256,1024 \\
        --settings 3,experts-8,experts-64 --tflops 300 --markdown     # mixtures of experts; needs transformers 5

One sequence of 4096 tokens a rank, bf16 with fp32 masters, clipping; 70B and mixtures with every block checkpointed.
The default machine is one of H100s: see --help. zerolite: a dry run of the engine. Peers: what they launch, in
step_peers.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import harness, options, step_peers
from benchmarks.report import Row, render_table
from benchmarks.shapes import SHAPES, Block, Decoder, Shape
from zerolite.planning import Machine, plan
from zerolite.planning.result import Plan

TOKENS = (1, 4096)
MODELS = SHAPES | {"llama-3-70b": Shape(128_256, 8192, 80, 64, 8, 128, 28_672)}
CHECKPOINTED = ("llama-3-70b",)
QWEN = {"num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4, "head_dim": 128, "norm_topk_prob": True}
# Qwen3-30B-A3B, Qwen3-235B-A22B and DeepSeek-V3: transformers' class, and what is not its default.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixture-30b": ("Qwen3Moe", QWEN | {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "moe_intermediate_size": 768,
    }),
    "mixture-235b": ("Qwen3Moe", QWEN | {
        "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "moe_intermediate_size": 1536,
    }),
    "mixture-671b": ("DeepseekV3", {}),
}  # fmt: skip
FEW_BITS = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8}}
SETTINGS: dict[str, dict[str, Any]] = {
    "1": {"stage": 1}, "3": {"stage": 3}, "replicas": {"stage": 3},
    "hierarchical": {"stage": 3}, "compressed": {"stage": 3, **FEW_BITS}, "experts-8": {"stage": 3},
    "experts-64": {"stage": 3},
}  # fmt: skip
OF_NODE = {
    "replicas": "shard_size", "hierarchical": "zero_hpz_partition_size", "compressed": "zero_hpz_partition_size"
}  # fmt: skip
COLUMNS = (
    ("model", "model", "{}"), ("ranks", "ranks", "{}"), ("setting", "name", "{}"), ("step ms", "step", "{:.0f}"),
    ("forward, backward", "products", "{:.0f}"), ("passes", "passes", "{:.0f}"), ("exposed", "exposed", "{:.0f}"),
    ("sent GB", "sent", "{:.1f}"), ("between nodes GB", "inter_node", "{:.1f}"), ("states GB", "states", "{:.1f}"),
    ("peak GB", "peak", "{:.1f}"),
)  # fmt: skip


class CheckpointedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return made


def make_model(name: str) -> nn.Module:
    if name in MIXTURES:
        import transformers

        kind, sizes = MIXTURES[name]
        config = getattr(transformers, f"{kind}Config")(use_cache=False, **sizes)
        made: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
        return made
    model = Decoder(MODELS[name])
    if name in CHECKPOINTED:
        for block in model.blocks:
            block.__class__ = CheckpointedBlock
    return model


def batch() -> dict[str, Tensor]:
    return {"tokens": torch.zeros(TOKENS, dtype=torch.long)}


def labelled_batch() -> dict[str, Tensor]:
    return dict.fromkeys(("input_ids", "labels"), torch.zeros(TOKENS, dtype=torch.long))


def config_of(name: str, setting: str, per_node: int) -> dict[str, Any]:
    zero = SETTINGS[setting] | ({OF_NODE[setting]: per_node} if setting in OF_NODE else {})
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": TOKENS[0], "zero_optimization": zero, "bf16": {"enabled": True},
        "gradient_clipping": 1.0, "optimizer": {"type": "AdamW"},
    }  # fmt: skip
    if name in MIXTURES:
        config["activation_checkpointing"] = {"modules": [f"{MIXTURES[name][0]}DecoderLayer"]}
    if setting.startswith("experts-"):
        config["expert_parallel"] = {"size": int(setting.removeprefix("experts-"))}
    return config


def plan_zerolite(name: str, setting: str, ranks: int, nodes: int, machine: Machine) -> Plan:
    config, batches = config_of(name, setting, ranks // nodes), labelled_batch if name in MIXTURES else batch
    return plan(lambda: make_model(name), config, ranks, nodes=nodes, machine=machine, batch=batches)


def row_of(model: str, ranks: int, name: str, machine: Machine, per_node: int) -> Row | None:
    nodes = max(1, ranks // per_node)
    if nodes == 1 and (name in OF_NODE or name in step_peers.IN_NODE):
        return None
    sizes: dict[str, float | None] = dict.fromkeys(("sent", "inter_node", "states", "peak"))
    if name in SETTINGS:
        made = plan_zerolite(model, name, ranks, nodes, machine)
        assert made.time is not None
        time = made.time
        sizes |= {"sent": made.sent, "inter_node": made.inter_node, "states": made.model_states}
        sizes["peak"] = made.peak.bytes
    else:
        work = step_peers.Work.of(MODELS[model], TOKENS[1], model in CHECKPOINTED)
        time = step_peers.time_of(name, work, ranks, nodes, machine)
    about = {"model": model, "ranks": ranks, "name": name, "absent": None}
    about |= {part: 1e3 * seconds for part, seconds in time.model_dump().items()}
    return about | {part: None if nbytes is None else nbytes / 1e9 for part, nbytes in sizes.items()}


def main(argv: list[str] | None = None) -> None:
    parser = options.make_parser(__doc__)
    options.add_choice(parser, "--models", MODELS | MIXTURES, ["llama-2-7b"])
    every = [*SETTINGS, *step_peers.PEERS]
    options.add_choice(parser, "--settings", every, [name for name in every if not name.startswith("experts-")])
    parser.add_argument("--ranks", type=options.positives, default=[8, 64, 512, 1024, 4096])
    parser.add_argument("--per-node", type=options.positive, default=8, help="ranks of a node")
    speeds = {"tflops": 547, "intra-bandwidth": 360, "inter-bandwidth": 340, "latency": 10, "memory-bandwidth": 3000}
    for option, value in speeds.items():
        parser.add_argument(f"--{option}", type=float, default=value, help=f"see `zerolite plan --help` ({value})")
    args = parser.parse_args(argv)
    machine = Machine(**{option.replace("-", "_"): getattr(args, option.replace("-", "_")) for option in speeds})
    rows = []
    for model in args.models:
        for ranks in args.ranks:
            for name in args.settings:
                row = row_of(model, ranks, name, machine, args.per_node)
                if row is not None:
                    rows.append(row)
                    print(row, file=sys.stderr, flush=True)
    harness.publish(args, str(machine), [render_table(rows, args.markdown, COLUMNS)], results=rows)


if __name__ == "__main__":
    main()
