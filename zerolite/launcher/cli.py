"""The `zerolite` command: `zerolite [options] script.py args...`, `zerolite [options] -m module args...`, or a command
that starts nothing, such as `zerolite report`.

Everything up to the launch itself works without torch, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from zerolite.launcher.resources import count_cores, default_nproc, largest_sensible_nproc
from zerolite.version import __version__

DESCRIPTION = """\
Start a training script on this machine, once per device. Each process finds RANK,
LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment; nothing is
added to the script's arguments."""

EPILOG = """\
examples:
  zerolite train.py --config zero2.json
  zerolite --nproc 2 -m mypackage.train --config zero2.json
  zerolite report
  zerolite inspect runs/gpt/checkpoints --verify
  zerolite export runs/gpt/checkpoints exported --dtype bf16

commands that start nothing, each with a --help of its own:
  report            versions, devices, and which kernels can be used here
  inspect           what a checkpoint holds, and whether it is whole
  export            a checkpoint's model, as Hugging Face loads it
  import-deepspeed  a checkpoint of DeepSpeed's ZeRO becomes one of zerolite
A file in the working directory that is called like one of them is run instead, as any
script.

Options come before the script; what follows it belongs to the script. OMP_NUM_THREADS
is set to the cores divided by the processes, unless it is set already. The exit status
is that of the rank that failed first (128 + n if signal n ended it), 0 if none failed,
and 2 if the command line is wrong."""


COMMANDS = {
    "report": "zerolite.report",
    "inspect": "zerolite.checkpoint.inspect",
    "export": "zerolite.checkpoint.export",
    "import-deepspeed": "zerolite.checkpoint.deepspeed",
}
"""What starts nothing, and the module whose `main(argv)` it is, imported when it is asked for."""


@dataclass(frozen=True)
class LaunchRequest:
    """A checked command line.

    Attributes:
        target: what Python is to run, `["script.py"]` or `["-m", "module"]`.
        script_args: the script's own arguments, untouched.
        nproc: number of processes, 1 or more.
        master_port: TCP port of the rendezvous on this machine, or None for one that is free.
    """

    target: list[str]
    script_args: list[str]
    nproc: int
    master_port: int | None


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zerolite",
        usage="zerolite [options] (script.py | -m module) [args ...]\n"
        "       zerolite (report | inspect | export | import-deepspeed) ...",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="processes to start (default: one per visible CUDA device; 1 where there is none, since one process "
        "already uses every core)",
    )
    parser.add_argument(
        "--master-port",
        type=int,
        metavar="PORT",
        help="TCP port at which the processes meet (default: a free one, so that jobs do not collide)",
    )
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as in `python -m MODULE`")
    parser.add_argument("--version", action="version", version=f"zerolite {__version__}")
    return parser


def split_command_line(argv: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Split `argv` into the launcher's own options and the rest: the script and its arguments, exactly as they are.

    argparse is not asked to do this: it would swallow a `--` among the script's arguments.
    """
    takes_value = {name for action in parser._actions if action.nargs is None for name in action.option_strings}
    i = 0
    while i < len(argv) and argv[i].startswith("-"):
        if argv[i] == "-m":
            return list(argv[: i + 2]), list(argv[i + 2 :])
        if argv[i] == "--":
            return list(argv[:i]), list(argv[i + 1 :])
        i += 2 if argv[i] in takes_value else 1
    return list(argv[:i]), list(argv[i:])


def parse_command_line(argv: Sequence[str]) -> LaunchRequest:
    """Check the command line; a mistake prints a sentence and exits with status 2."""
    parser = build_parser()
    own, rest = split_command_line(argv, parser)
    options = parser.parse_args(own)
    if options.module is not None:
        target, script_args = ["-m", options.module], rest
        problem = find_module_problem(options.module)
    elif rest:
        target, script_args = [rest[0]], rest[1:]
        problem = find_script_problem(rest[0])
    else:
        parser.error("expected a script to run, as in `zerolite train.py`, or `-m module`, and found none")
    nproc = default_nproc(os.environ) if options.nproc is None else options.nproc
    problem = problem or find_nproc_problem(nproc) or find_port_problem(options.master_port)
    if problem is not None:
        parser.error(problem)
    return LaunchRequest(target, script_args, nproc, options.master_port)


def find_script_problem(script: str) -> str | None:
    """Say why this script cannot be run, or return None."""
    if os.path.isdir(script):
        return (
            f"expected a script, and {script!r} is a directory: name the Python file in it, or use `-m` for a package"
        )
    if not os.path.exists(script):
        return f"there is no script {script!r} (looked for it in {os.getcwd()!r})"
    if not os.access(script, os.R_OK):
        return f"the script {script!r} cannot be read: check its permissions"
    return None


def find_module_problem(module: str) -> str | None:
    """Say why this module cannot be run, or return None. Only its top-level package is looked for."""
    top_level = module.partition(".")[0]
    if not all(part.isidentifier() for part in module.split(".")):
        return f"-m expects the name of a module, as in `-m mypackage.train`, and got {module!r}"
    path_before = list(sys.path)
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        found = top_level in sys.modules or importlib.util.find_spec(top_level) is not None
    finally:
        sys.path[:] = path_before
    return None if found else f"there is no module {top_level!r} in {os.getcwd()!r} nor among the installed packages"


def find_nproc_problem(nproc: int) -> str | None:
    """Say why this number of processes makes no sense, or return None."""
    if nproc < 1:
        return f"--nproc expects the number of processes, 1 or more, and got {nproc}"
    limit = largest_sensible_nproc(os.environ)
    if nproc > limit:
        return (
            f"--nproc {nproc} would start {nproc} processes on {os.cpu_count()} processors; the limit here is {limit}"
        )
    return None


def find_port_problem(port: int | None) -> str | None:
    """Say why the processes cannot meet at this port, or return None."""
    if port is None:
        return None
    if not 1 <= port <= 65535:
        return f"--master-port expects a TCP port, 1 to 65535, and got {port}; leave it out to have a free one chosen"
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        return f"--master-port {port} cannot be used ({error.strerror}); leave it out to have a free one chosen"
    return None


def set_thread_count(nproc: int) -> None:
    """Share the cores among the processes through OMP_NUM_THREADS, unless the user has set it."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    cores = count_cores()
    threads = max(1, cores // nproc)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    print(
        f"zerolite: OMP_NUM_THREADS={threads} in each process, to share {cores} core{'s' if cores != 1 else ''} among "
        f"{nproc} process{'es' if nproc != 1 else ''}; set it yourself to choose another number",
        file=sys.stderr,
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `zerolite` command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else ""
    if command in COMMANDS and not os.path.isfile(command):
        status: int = importlib.import_module(COMMANDS[command]).main(arguments[1:])
        return status
    request = parse_command_line(arguments)
    set_thread_count(request.nproc)
    try:
        from zerolite.launcher.agent import launch  # imports torch, hence only now

        return launch(request.target, request.script_args, request.nproc, request.master_port)
    except KeyboardInterrupt:  # while torch is being imported; later the agent handles signals
        return 130


if __name__ == "__main__":
    sys.exit(main())
