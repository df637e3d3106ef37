"""`zerolite plan`: memory and traffic of a job, before a device is rented for it."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import logging
import math
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from zerolite.config import ConfigError, load_config
from zerolite.planning.result import Machine, PlanError
from zerolite.utils.text import size_argument

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

--model and --batch name functions in modules that can be imported from the working directory.
--input-spec lists the tensors of a batch as name:dtype[sizes], or as dtype[sizes] if forward
takes them in order. B is the micro-batch size of the config.

exit status:
  0    the job fits, or no memory was given
  1    the job does not fit; with --compare: nothing fits
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


def _length(text: str) -> int | str:
    return text if text == AUTO else _count(text)


def _speed(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


_FILE_OF_MODEL = "package.module:function that makes the model, or a Hugging Face config.json or its directory"
_BATCH = (
    "package.module:function that makes the arguments of forward, a tuple or a dict; it may take the micro-batch size"
)
_LENGTH = 'tokens of a sequence, S in --input-spec; "auto": as many as fit in --device-memory, which is searched for'
_LOSS = (
    "package.module:function of forward's output that returns the loss (default: the output itself, its .loss, or the "
    "mean of its first floating tensor)"
)
_COMPARE = (
    "plan stages 0 to 3, on several nodes also with replicas, where none fits also with offload, and mark the first "
    "that fits, or with --tflops the fastest"
)


def build_parser(prog: str) -> _Parser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog=prog, description=DESCRIPTION, epilog=EPILOG, formatter_class=raw, allow_abbrev=False)
    job = parser.add_argument_group("the job").add_argument
    job("--model", required=True, metavar="MODEL", help=_FILE_OF_MODEL)
    job("--config", required=True, metavar="CONFIG", help="the engine's config: a file, or JSON")
    job("--world-size", required=True, type=_count, metavar="N", help="number of ranks; the config sets their grid")
    job("--nodes", type=_count, metavar="N", help="number of nodes; needed for the traffic between nodes")
    job("--rank", type=_rank, metavar="N", help="the rank to plan (default: 0)")
    job("--device", choices=("cuda", "cpu"), default="cuda", help="the kind of device of the ranks (default: cuda)")
    job("--device-memory", type=size_argument, metavar="SIZE", help="memory of each rank's device, as in 80GB or 80GiB")
    job("--host-memory", type=size_argument, metavar="SIZE", help="memory of each host, shared by its ranks (--nodes)")
    step = parser.add_argument_group("a step", "Without a batch, no forward is run and activations are not counted.")
    batch = step.add_mutually_exclusive_group().add_argument
    batch("--batch", metavar="FUNCTION", help=_BATCH)
    batch("--input-spec", metavar="SPEC", help='the tensors of a batch, as in "input_ids:int64[B,1024]"')
    step.add_argument("--seq-len", type=_length, metavar="N", help=_LENGTH)
    step.add_argument("--loss", metavar="FUNCTION", help=_LOSS)
    time = parser.add_argument_group("the time of a step", "Played on a simulated clock, if --tflops is given.")
    for option, metavar, help in (
        ("tflops", "N", "TFLOP/s that forward and backward reach on a device, all between products included"),
        ("intra-bandwidth", "GB/s", "of a rank to the others of its node, in each direction"),
        ("inter-bandwidth", "GB/s", "of a node to the others, all its network cards together, in each direction"),
        ("latency", "US", "microseconds of a hop between nodes (default: 10)"),
        ("intra-latency", "US", "microseconds of a hop within a node (default: 2.5)"),
        ("memory-bandwidth", "GB/s", "of a device's memory, for copies, sums and the update (default: no time)"),
    ):
        time.add_argument(f"--{option}", type=_speed, metavar=metavar, help=help)
    do = parser.add_argument_group("what to do").add_argument
    do("--compare", action="store_true", help=_COMPARE)
    do("--json", metavar="FILE", help="write the plan as JSON; - prints only the JSON")
    do("--png", metavar="FILE", help="draw the plan; needs matplotlib (pip install 'zerolite[plot]')")
    return parser


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
    if options.tflops is None and (given := _speeds(options)):
        return f"--{next(iter(given)).replace('_', '-')} is for the time of a step, which needs --tflops"
    if options.loss and not (options.batch or options.input_spec):
        return "--loss needs --batch or --input-spec: without a batch no forward is run"
    has_length = re.search(r"\[[^\]]*\bS\b", options.input_spec or "") is not None
    if has_length != (options.seq_len is not None):
        return "--seq-len and S in --input-spec go together, as in --seq-len auto --input-spec 'input_ids:int64[B,S]'"
    if options.seq_len == AUTO and (options.device_memory is None or options.compare):
        return "--seq-len auto needs --device-memory, and searches for one setting: leave --compare out"
    if options.png and importlib.util.find_spec("matplotlib") is None:
        return "--png needs matplotlib: pip install 'zerolite[plot]'"
    return None


def _speeds(options: argparse.Namespace) -> dict[str, float]:
    """Return the speeds that ``options`` have."""
    return {name: getattr(options, name) for name in Machine.model_fields if getattr(options, name) is not None}


# -------------------------------------------------------------------- the command


def make(options: argparse.Namespace, config: ZeroliteConfig) -> Plan | Comparison:
    """Return the plan, or all of them with --compare. Raises PlanError, ConfigError and ValueError."""
    from zerolite.planning import compare, longest, plan  # imports torch, with the collector off
    from zerolite.planning.sources import load_function, load_model_fn, parse_input_spec

    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # PlanError reports what fails
    names = ("nodes", "rank", "device", "device_memory", "host_memory")
    given: dict[str, Any] = {name: getattr(options, name) for name in names}
    given["machine"] = None if options.tflops is None else Machine(**_speeds(options))
    if options.batch:
        given["batch"] = load_function(options.batch, "--batch")
    if options.loss:
        given["loss"] = load_function(options.loss, "--loss")
    job = load_model_fn(options.model), config, options.world_size
    if options.seq_len == AUTO:
        return longest(*job, batch=functools.partial(parse_input_spec, options.input_spec), **given)[1]
    if options.input_spec:
        given["batch"] = parse_input_spec(options.input_spec, options.seq_len)
    return compare(*job, **given) if options.compare else plan(*job, **given)


def run(options: argparse.Namespace) -> int:
    """Plan, write the files and print. Returns the exit status; raises PlanError, ConfigError and ValueError."""
    from zerolite.planning.report import draw, render
    from zerolite.planning.result import Plan

    sys.path.insert(0, os.getcwd())  # as `python -m` does
    with contextlib.redirect_stdout(sys.stderr):  # output of the user's modules is not part of the plan
        made = make(options, load_config(options.config))
    try:
        if options.json not in (None, "-"):
            Path(options.json).write_text(made.model_dump_json(indent=1) + "\n", encoding="utf-8")
        if options.png is not None:
            draw(made, Path(options.png))
    except OSError as error:
        raise PlanError(f"{error.filename} cannot be written ({error.strerror})") from error
    text, encoding = made.model_dump_json(indent=1) if options.json == "-" else render(made), sys.stdout.encoding
    print(text.encode(encoding or "ascii", "replace").decode(encoding or "ascii"), flush=True)
    if isinstance(made, Plan):
        return 1 if made.fits is False else 0
    return 1 if made.chosen is None and any(plan.fits is False for _, plan in made.rows) else 0


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run the command and return its exit status."""
    try:
        try:
            return run(parse_command_line(argv, prog))
        finally:
            sys.stdout.flush()  # also after --help
    except BrokenPipeError:  # the reader, such as head, has ended
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # Python flushes both at exit, and would print the same error again
            os.dup2(nowhere, stream.fileno())
        return 128 + signal.SIGPIPE
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
