"""Step time of a mixture of experts: experts over ranks beside plain stage 3 and DeepSpeed, on the CPU in one run.

    python benchmarks/experts.py                                           # Qwen3-MoE of 23 M parameters on two ranks
    python benchmarks/experts.py --experts 16 --width 64 --hidden 32 --tokens 64         # few small experts
    python benchmarks/experts.py --nproc 4 --competitors zerolite-3,zerolite-3-experts --rounds 3
    python benchmarks/experts.py --gbits 1 --steps 2                # two nodes of two ranks; needs root on Linux

All of them train the same Qwen3-MoE of transformers, from equal weights on equal batches, with torch's fused AdamW.
"-experts": all ranks have the experts together. DeepSpeed's are its AutoEP ("expert_parallel"). Each competitor has
processes of its own, which sleep while another runs; ratios are taken within a round. "tokens MiB" and "weights MiB"
are what rank 0 exchanges in a step: rows of tokens, and full gradients and parameters.

With --gbits there is a slow wire between two nodes, see slow_wire.py. Without it tokens and weights are both copies in
memory, and the times say little about machines where weights are sent.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import harness, options
from benchmarks.engines import DEEPSPEED_KEYS, SMALL_BUCKET, adamw_entry, json_config
from benchmarks.ranks import StepClock, mean_over_ranks
from benchmarks.report import Row, columns_in_use, disagreement, make_rows, ratio, render_table
from benchmarks.setting import Competitor, Setting, by_name
from benchmarks.slow_wire import Node, add_options, describe, two_nodes, why_not
from benchmarks.workers import Workers

LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}
VOCABULARY, HEADS, BATCHES = 1024, 4, 16
COLUMNS = (
    ("competitor", "name", "{}"),
    ("step ms", "step_ms", "{:.1f}"),
    ("CPU ms", "cpu_ms", "{:.0f}"),
    ("tokens MiB", "tokens_mib", "{:.2f}"),
    ("weights MiB", "weights_mib", "{:.1f}"),
    ("x stage 3", "to_zerolite_3", "{:.2f}"),
    ("CPU x stage 3", "to_zerolite_3_cpu", "{:.2f}"),
    ("x DeepSpeed", "to_deepspeed_2_experts", "{:.2f}"),
    ("CPU x DeepSpeed", "to_deepspeed_2_experts_cpu", "{:.2f}"),
)
COMPARED = ("zerolite-3", "deepspeed-2-experts")


@dataclass(frozen=True)
class Turn:
    """Seconds of each step on rank 0; CPU seconds of all steps and losses, both averaged over the ranks."""

    step_s: list[float]
    cpu_s: float
    losses: list[float]
    mib: dict[str, float] = field(default_factory=dict)


def build_model(args: argparse.Namespace) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=VOCABULARY, hidden_size=args.width, intermediate_size=args.hidden,
        head_dim=args.width // HEADS, moe_intermediate_size=args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS, num_experts=args.experts, num_experts_per_tok=args.chosen, norm_topk_prob=True,
        max_position_embeddings=args.tokens, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model: nn.Module = AutoModelForCausalLM.from_config(config).train()
    return model


def build_zerolite(model: nn.Module, setting: Setting, stage: int, size: int = 1) -> Any:
    import zerolite

    config = json_config(setting, stage) | {"optimizer": adamw_entry(fused=True), "expert_parallel": {"size": size}}
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return zerolite.initialize(model, config)


def build_deepspeed(model: nn.Module, setting: Setting, stage: int, size: int = 1) -> Any:
    import deepspeed  # type: ignore[import-not-found]

    config = json_config(setting, stage) | DEEPSPEED_KEYS
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    else:
        config["zero_optimization"] |= {"reduce_bucket_size": SMALL_BUCKET, "allgather_bucket_size": SMALL_BUCKET}
    if size > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": size, "preset_model": "qwen3_moe"}
        _let_deepspeed_read_recorders()
    # From the config, and not a torch.optim.AdamW: DeepSpeed then puts the experts into a group of their own.
    config["optimizer"] = adamw_entry(fused=True)
    config["optimizer"]["params"]["torch_adam"] = True
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    return engine


def _let_deepspeed_read_recorders() -> None:
    """Let transformers' registry of outputs take a default, which DeepSpeed 0.19.8 gives it and 5.23 refuses."""
    from transformers.utils import output_capturing

    def get(self: dict[str, Any], key: Any, default: Any = None) -> Any:
        return dict.get(self, key if isinstance(key, str) else str(type(key)), default) or {}

    type(output_capturing._CAN_RECORD_REGISTRY).get = get  # type: ignore[method-assign, assignment]


def competitors(ranks: int) -> dict[str, Competitor]:
    makers = {"zerolite": build_zerolite, "deepspeed": build_deepspeed}
    lines = [("zerolite", 3, 1), ("zerolite", 3, ranks), ("zerolite", 2, ranks), ("deepspeed", 3, 1)]
    lines += [("deepspeed", 2, ranks), ("deepspeed", 3, ranks)]
    return by_name(
        [
            Competitor(
                f"{package}-{stage}{'-experts' if size > 1 else ''}",
                makers[package],
                package,
                {"stage": stage, "size": size},
            )
            for package, stage, size in lines
        ]
    )


def serve(pipe: Connection, rank: int, setting: Setting, name: str, args: argparse.Namespace) -> None:
    """Serve the `Workers` of this benchmark: replies are `Turn`s, the first one of the warm-up."""
    competitor = competitors(setting.world_size)[name]
    engine = competitor.build(build_model(args), setting, **competitor.options)
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randint(VOCABULARY, (1, args.tokens), generator=generator) for _ in range(BATCHES)]
    taken = 0

    def train(steps: int) -> Turn:
        nonlocal taken
        dist.barrier()
        clock, losses, cpu = StepClock("cpu"), list[Tensor](), time.process_time()
        for _ in range(steps):
            tokens = batches[taken % BATCHES]
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
            clock.tick()
            taken += 1
        cpu = time.process_time() - cpu
        cpu, *values = mean_over_ranks([cpu, *map(float, losses)], "cpu")
        return Turn(clock.seconds(), cpu, values)

    first = train(args.warmup)
    pipe.send(Turn(first.step_s, first.cpu_s, first.losses, _traffic(train) if "zerolite" in name else {}))
    while (steps := pipe.recv()) > 0:
        pipe.send(train(steps))


def _traffic(train: Any) -> dict[str, float]:
    from zerolite.comm import record
    from zerolite.moe.dispatch import TAG

    with record() as recorder:
        train(1)
    sizes = {(op, tag): recorder.nbytes(op, tag) / 2**20 for op, tag in recorder.summary()}
    tokens = sum(size for (_, tag), size in sizes.items() if tag == TAG)
    return {"tokens": tokens, "weights": sum(sizes.values()) - tokens}


class Contest(harness.Contest):
    """Competitors that train the same mixture of experts."""

    def __init__(self, args: argparse.Namespace, nodes: list[Node]) -> None:
        super().__init__(args, competitors(args.nproc))
        self.setting = Setting("cpu", args.dtype, 1, args.nproc, nodes=tuple(nodes))

    def make(self, name: str, store: Path) -> Workers:
        return Workers(serve, self.setting, (name, self.args), store)

    def figures(self, name: str) -> Row:
        """Times are of a step: medians over steps within a round, then over rounds."""
        present = {one: self.rounds[one] for one in self.present()}
        own, mib = present[name], self.started[name].mib
        row: Row = {
            "step_ms": 1e3 * median(seconds for turn in own for seconds in turn.step_s),
            "cpu_ms": 1e3 * median(turn.cpu_s / len(turn.step_s) for turn in own),
            "tokens_mib": mib.get("tokens"),
            "weights_mib": mib.get("weights"),
        }
        for other in COMPARED:
            theirs, key = present.get(other, []), f"to_{other.replace('-', '_')}"
            row[key] = ratio(*([median(turn.step_s) for turn in turns] for turns in (own, theirs)))
            row[f"{key}_cpu"] = ratio(*([turn.cpu_s for turn in turns] for turns in (own, theirs)))
        return row

    def disagreements(self) -> list[str]:
        """Sentences about competitors whose losses in the warm-up are not the first one's."""
        first, *others = self.present()
        wanted, tolerance = self.started[first].losses, LOSS_TOLERANCE[self.args.dtype]
        found = {name: disagreement(self.started[name].losses, wanted, tolerance) for name in others}
        return [f"{name}: {sentence} ({first})" for name, sentence in found.items() if sentence]


def main() -> int:
    parser = options.make_parser(__doc__)
    for name, default in (
        ("experts", 64), ("chosen", 4), ("width", 256), ("hidden", 128), ("layers", 4), ("tokens", 256),
        ("rounds", 4), ("steps", 4), ("warmup", 5),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=options.positive, default=default)
    parser.add_argument("--nproc", type=options.positive, help="ranks (default: 2, with --gbits 4)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    options.add_choice(parser, "--competitors", competitors(2))
    add_options(parser, None, "between two nodes (default: one node)")
    args = parser.parse_args()
    if args.gbits and (reason := why_not()):
        parser.error(reason)
    args.nproc = args.nproc or (4 if args.gbits else 2)
    if args.gbits and args.nproc % 2:
        parser.error(f"--nproc: expected an even number for two nodes, got {args.nproc}")
    with ExitStack() as stack:
        nodes = stack.enter_context(two_nodes(args.gbits, args.delay)) if args.gbits else []
        contest = stack.enter_context(Contest(args, nodes))
        contest.run()
        rows = make_rows(args.competitors, contest.absent, COLUMNS, contest.figures)
        disagreements = contest.disagreements()
    described = ", ".join(
        f"{name} {getattr(args, name)}" for name in ("experts", "chosen", "width", "hidden", "layers")
    )
    described += f", {args.nproc} gloo ranks, {args.tokens} tokens a rank, {args.dtype}, {harness.machine()}"
    described += f"; {describe(args.gbits, args.delay)}" if args.gbits else ""
    table = render_table(rows, args.markdown, columns_in_use(rows, COLUMNS))
    harness.publish(args, described, [table], disagreements, results={row["name"]: row for row in rows})
    return 1 if disagreements else 0


if __name__ == "__main__":
    sys.exit(main())
