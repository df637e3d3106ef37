"""`zerolite plan`: memory and traffic of a job, before a device is rented for it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from zerolite.config import ConfigError, load_config
from zerolite.planning.errors import PlanError
from zerolite.planning.rank_grid import grid_of
from zerolite.utils.sizes import parse_size

if TYPE_CHECKING:
    from zerolite.config import ZeroliteConfig
    from zerolite.planning.result import Comparison, Plan

PROG = "zerolite plan"

DESCRIPTION = """\
Plan a training job of any size on this machine. The command runs the engine as one rank
of the job, on tensors without memory. It prints the memory of the rank by item, the peak
and its place in the model, the traffic of a step, and if the job fits."""

EPILOG = """\
examples:
  zerolite plan --model models.gpt:build_model --config zero3.json --world-size 64
  zerolite plan --model models.gpt:build_model --config zero3.json --world-size 64 --nodes 8 \\
      --input-spec "input_ids:int64[B,1024] labels:int64[B,1024]" --device-memory 80GB --png plan.png
  zerolite plan --model Llama/config.json --config zero3.json --world-size 64 --compare --device-memory 80GB
  zerolite plan --model models.gpt:build_model --config zero1.json --world-size 64 --nodes 8 --grids \\
      --input-spec "input_ids:int64[B,1024] labels:int64[B,1024]" --device-memory 80GB

--model and --batch name functions in modules that can be imported from the working directory.
--input-spec lists the tensors of a batch as name:dtype[sizes], or as dtype[sizes] if forward
takes them in order. B is the micro-batch size of the config.

exit status:
  0    the job fits, or no memory was given
  1    the job does not fit (with --compare and --grids: nothing fits), or --check found a difference
  2    the job cannot be planned; a sentence says why
  130  after Ctrl-C
  141  the reader of the output, such as head, has ended"""

AUTO = "auto"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the message without the usage, and exit with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def _rank(text: str, least: int = 0) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise argparse.ArgumentTypeError(f"expected a whole number, {least} or more, got {text!r}")
    return int(text)


def _count(text: str) -> int:
    return _rank(text, 1)


def _size(text: str) -> int | str:
    try:
        return AUTO if text == AUTO else parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, or 'auto' for all of this machine's") from None


def _speeds(text: str) -> tuple[float, float, float]:
    parts = text.split(",")
    try:
        flops, within, between = float(parts[0]), float(parse_size(parts[1])), float(parse_size(parts[2]))
        if len(parts) != 3 or not min(flops, within, between) > 0:
            raise ValueError
    except (ValueError, IndexError):
        raise argparse.ArgumentTypeError(
            f"expected three amounts per second, as in 150e12,150GB,12.5GB, got {text!r}"
        ) from None
    return flops, within, between


def build_parser(prog: str) -> _Parser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog=prog, description=DESCRIPTION, epilog=EPILOG, formatter_class=raw, allow_abbrev=False)
    _add_job(parser.add_argument_group("the job"))
    _add_step(
        parser.add_argument_group("a step", "Without a batch, no forward is run and activations are not counted.")
    )
    _add_actions(parser.add_argument_group("what to do"))
    return parser


def _add_job(group: argparse._ArgumentGroup) -> None:
    job = group.add_argument
    model = "package.module:function that makes the model, or a Hugging Face config.json or its directory"
    job("--model", required=True, metavar="MODEL", help=model)
    job("--config", required=True, metavar="CONFIG", help="the engine's config: a file, or JSON")
    ranks = "number of ranks; the config sets the grid that they form (tensor_parallel, pipeline)"
    job("--world-size", required=True, type=_count, metavar="N", help=ranks)
    job("--nodes", type=_count, metavar="N", help="number of nodes; needed for the traffic between nodes")
    rank = "the rank to plan (default: 0, or with a pipeline the first rank of the stage that needs the most)"
    job("--rank", type=_rank, metavar="N", help=rank)
    job("--device", choices=("cuda", "cpu"), default="cuda", help="the kind of device of the ranks (default: cuda)")
    device = "memory of each rank's device, as in 80GB or 80GiB, or auto for this machine's; needed to see if it fits"
    job("--device-memory", type=_size, metavar="SIZE", help=device)
    host = (
        "memory of each host, which its ranks share (--nodes); needed to see if offloaded states fit (default with "
        "offload: auto, this machine's)"
    )
    job("--host-memory", type=_size, metavar="SIZE", help=host)


def _add_step(group: argparse._ArgumentGroup) -> None:
    batch = group.add_mutually_exclusive_group().add_argument
    makes = (
        "package.module:function that makes the arguments of forward, a tuple or a dict; it may take the micro-batch "
        "size"
    )
    batch("--batch", metavar="FUNCTION", help=makes)
    batch("--input-spec", metavar="SPEC", help='the tensors of a batch, as in "input_ids:int64[B,1024]"')
    loss = (
        "package.module:function of forward's output that returns the loss (default: the output itself, its .loss, or "
        "the mean of its first floating tensor)"
    )
    group.add_argument("--loss", metavar="FUNCTION", help=loss)


def _add_actions(group: argparse._ArgumentGroup) -> None:
    do = group.add_argument
    compare = "plan stages 0 to 3 with a few sizes and kinds of offload, and mark the cheapest that fits"
    do("--compare", action="store_true", help=compare)
    grids = (
        "plan grids of pipeline stages, data and tensor parallel ranks, and mark the fitting grid with the shortest "
        "step; needs --device-memory and a batch"
    )
    do("--grids", action="store_true", help=grids)
    speeds = (
        "speeds of a device that --grids assumes: operations per second, and bytes per second to devices of its node "
        "and to other nodes (default: 150e12,150GB,12.5GB)"
    )
    do("--speeds", type=_speeds, metavar="FLOPS,WITHIN,BETWEEN", help=speeds)
    check = "also run a real job of that many ranks on this machine, and print both results side by side"
    do("--check", action="store_true", help=check)
    do("--json", metavar="FILE", help="write the plan as JSON; - prints only the JSON")
    do("--png", metavar="FILE", help="draw the plan; needs matplotlib (pip install 'zerolite[plot]')")


def parse_command_line(argv: Sequence[str] | None, prog: str = PROG) -> argparse.Namespace:
    """Return the options. A mistake that shows without the model prints a sentence and exits with status 2."""
    parser = build_parser(prog)
    options = parser.parse_args(argv)
    problem = find_problem(options)
    if problem is not None:
        parser.error(problem)
    return options


def find_problem(options: argparse.Namespace) -> str | None:
    """Return a sentence about the first contradiction in ``options``, or None."""
    size, nodes = options.world_size, options.nodes
    if nodes is not None and size % nodes:
        return f"--world-size {size} does not divide by --nodes {nodes}: every node has the same number of ranks"
    if options.rank is not None and options.rank >= size:
        return f"--rank expects 0 to {size - 1} with --world-size {size}, and got {options.rank}"
    if options.loss and not (options.batch or options.input_spec):
        return "--loss needs --batch or --input-spec: without a batch no forward is run"
    if options.check:
        if not (options.batch or options.input_spec):
            return "--check needs --batch or --input-spec: the real job trains on it"
        if options.compare or options.rank or nodes not in (None, 1):
            return "--check measures one setting on one machine, as rank 0: leave out --compare, --nodes and --rank"
    if options.speeds and not options.grids:
        return "--speeds is for --grids"
    if options.grids:
        if options.device_memory is None or not (options.batch or options.input_spec):
            return "--grids needs --device-memory, and --batch or --input-spec: it looks for the fastest grid that fits"
        others = [name for name in ("compare", "check", "png") if getattr(options, name)]
        others += ["rank"] if options.rank is not None else []
        if others:
            return f"--grids plans several grids: leave out --{others[0]}"
    if options.png and importlib.util.find_spec("matplotlib") is None:
        return "--png needs matplotlib: pip install 'zerolite[plot]'"
    return None


def find_memory(device: str) -> int:
    """Return the bytes of this machine's first CUDA device, or of its memory for "cpu".

    Raises PlanError if there is no CUDA device.
    """
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    import torch

    if not torch.cuda.is_available():
        raise PlanError("--device-memory auto: this machine has no CUDA device; give a size, as in 80GB")
    nbytes: int = torch.cuda.get_device_properties(0).total_memory
    return nbytes


# -------------------------------------------------------------------- the command


def make(options: argparse.Namespace, config: ZeroliteConfig) -> Plan | Comparison:
    """Return the plan, or all of them with --compare or --grids. Raises PlanError and ConfigError."""
    from zerolite.planning import compare, load_batch, load_model_fn, plan  # imports torch, with the collector off
    from zerolite.planning.settings import offloads
    from zerolite.planning.sources import load_function, parse_input_spec

    if options.check:
        from zerolite.planning.check import find_problem as find_check_problem

        problem = find_check_problem(options.world_size, options.device)
        if problem is not None:
            raise PlanError(f"--check: {problem}")
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # PlanError reports what fails
    given: dict[str, Any] = {"nodes": options.nodes, "device": options.device}
    if not options.grids:
        given["rank"] = 0 if options.check else options.rank
    if options.device_memory is not None:
        auto = options.device_memory == AUTO
        given["device_memory"] = find_memory(options.device) if auto else options.device_memory
    checkpoints = config.activation_checkpointing.cpu_checkpointing
    if options.host_memory not in (None, AUTO):
        given["host_memory"] = options.host_memory
    elif options.compare and options.host_memory is None and not checkpoints:
        given["offload_host_memory"] = find_memory("cpu")
    elif options.host_memory == AUTO or checkpoints or offloads(config):
        given["host_memory"] = find_memory("cpu")
    if options.batch or options.input_spec:
        given["batch"] = load_batch(options.batch) if options.batch else parse_input_spec(options.input_spec)
    if options.loss:
        given["loss"] = load_function(options.loss, "--loss")
    if options.grids:
        from zerolite.planning.grids import Speeds, compare_grids

        given |= {"nodes": options.nodes or 1, "speeds": Speeds(*options.speeds) if options.speeds else None}
        return compare_grids(load_model_fn(options.model), config, options.world_size, **given)
    return (compare if options.compare else plan)(load_model_fn(options.model), config, options.world_size, **given)


def run(options: argparse.Namespace) -> int:
    """Plan, write the files and print. Returns the exit status; raises PlanError and ConfigError."""
    from zerolite.planning.report import Screen, render
    from zerolite.planning.result import Plan

    config = load_config(options.config)
    config.resolve(grid_of(config, options.world_size).data)
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    with contextlib.redirect_stdout(sys.stderr):  # output of the user's modules is not part of the plan
        made = make(options, config)
    _write_files(made, options)
    _print(made.model_dump_json(indent=1) if options.json == "-" else render(made, Screen.of_terminal()))
    if not isinstance(made, Plan):
        return 1 if made.chosen is None and (options.grids or any(plan.fits is False for _, plan in made.rows)) else 0
    status = 1 if made.fits is False else 0
    if options.check:
        from zerolite.planning.check import run_check

        request = {name: getattr(options, name) for name in ("model", "config", "loss")}
        status = run_check(request | {"batch": options.batch or options.input_spec}, options.device, made) or status
    return status


def _write_files(made: Plan | Comparison, options: argparse.Namespace) -> None:
    try:
        if options.json not in (None, "-"):
            Path(options.json).write_text(made.model_dump_json(indent=1) + "\n", encoding="utf-8")
        if options.png is not None:
            from zerolite.planning.report import draw

            draw(made, Path(options.png))
    except OSError as error:
        raise PlanError(f"{error.filename} cannot be written ({error.strerror})") from error


def _print(text: str) -> None:
    """Print to standard output, with "?" for characters that its encoding lacks."""
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "replace").decode(encoding), flush=True)


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run the command and return its exit status."""
    try:
        try:
            return _status(argv, prog)
        finally:
            sys.stdout.flush()  # also after --help
    except BrokenPipeError:  # the reader, such as head, has ended
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # Python flushes both at exit, and would print the same error again
            os.dup2(nowhere, stream.fileno())
        return 128 + signal.SIGPIPE


def _status(argv: Sequence[str] | None, prog: str) -> int:
    options = parse_command_line(argv, prog)
    try:
        return run(options)
    except BrokenPipeError:
        raise
    except (PlanError, ConfigError, ValueError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except Exception:  # Python's own status is 1, which here means that the job does not fit
        traceback.print_exc()
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
