"""Command line options of `zerolite`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zerolite.launcher.hosts import read_numbers
from zerolite.launcher.job import JobSpec
from zerolite.version import __version__


@dataclass(frozen=True)
class LaunchRequest(JobSpec):
    """Checked command line. Attributes have the names of the options; None means not given.

    Attributes:
        include: filter such as `host1:0,2@host2`, as given.
        exclude: filter likewise; not both.
        launcher_args: further arguments of ssh, split as a shell does.
    """

    nproc: int | None = None
    num_nodes: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    hostfile: str | None = None
    include: str | None = None
    exclude: str | None = None
    launcher_args: list[str] = field(default_factory=list)
    ssh_port: int | None = None
    dry_run: bool = False


DESCRIPTION = """\
Start a training script, once per device, on this machine or on many. Each process finds
RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment; nothing is
added to the script's arguments."""

EPILOG = """\
examples:
  zerolite train.py --config zero2.json
  zerolite --nproc 2 -m mypackage.train --config zero2.json
  zerolite --hostfile hosts --exclude node3 train.py
  zerolite plan --model my.model:build --config zero3.json --world-size 64
  zerolite report
  zerolite export runs/gpt/checkpoints exported --dtype bf16

commands that start nothing, each with a --help of its own:
  plan              memory and traffic of a job, before a device is rented
  report            versions, devices, and which kernels can be used here
  export            a checkpoint's model, as Hugging Face loads it
  import-deepspeed  a checkpoint of DeepSpeed's ZeRO becomes one of zerolite
A file in the working directory that is called like one of them is run instead, as any
script.

Options come before the script; what follows it belongs to the script. DeepSpeed's names
(--num_gpus, --num_nodes, ...) and torchrun's (--nproc-per-node, --nnodes) are understood.
OMP_NUM_THREADS is set to the cores divided by the processes, unless it is set already.
The exit status is that of the rank that failed first (128 + n if signal n ended it), 0 if
none failed, 130 after Ctrl-C, and 2 if the command line is wrong."""

ENV_FILE = ".zerolite_env"
"""Default env file, in the working directory or else in the home directory."""

DEEPSPEED_ENV_FILE = ".deepspeed_env"
"""DeepSpeed's, which ``--deepspeed-compat`` reads too."""

_ELASTIC = "for hosts that come and go start the script by `torchrun --nnodes 2:4 --max-restarts 3` on each host"

_RESTARTS = "start the script by `torchrun --max-restarts N`; after a failure it loads its latest checkpoint"

_EACH_HOST = (
    "to start each host by a command of its own, use `torchrun --nnodes 2 --node-rank 0 --master-addr HOST`; on one "
    "machine leave it out"
)
_BINDING = "start the job under `numactl` or `taskset`, or the script by `torchrun --numa-binding node`"

_REFUSED = {
    "--no-ssh": _EACH_HOST,
    "--node-rank": _EACH_HOST,
    "--bind-cores": _BINDING,
    "--bind-cores-to-rank": _BINDING,
    "--bind-core-list": _BINDING,
    "--save-pid": "the launcher writes no file with process ids; its own id is `$!` in a shell",
    "--autotuning": "there is no autotuner",
    "--launcher": "other hosts are reached by ssh (leave it out); in a SLURM or MPI job let `srun` or `mpirun` start "
    "the script, one process per device: `srun --ntasks-per-node 8 python train.py`",
    "--elastic-training": _ELASTIC,
    "--min-elastic-nodes": _ELASTIC,
    "--max-elastic-nodes": _ELASTIC,
    "--num-nodes MIN:MAX": _ELASTIC,
    "--max-restarts": _RESTARTS,
    "--venv-script": "the other nodes run the same Python interpreter by its path; a script for it is not needed",
}
"""Options of DeepSpeed's launcher and of torchrun that are not supported, and what to do instead."""

_IGNORED = ("--no-local-rank", "--force-multi", "--standalone")  # zerolite always does what these ask for


class _Parser(argparse.ArgumentParser):
    """Parser that suggests the option which was probably meant."""

    def option_names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]

    def takes_value(self, option: str) -> bool:
        return any(option in action.option_strings and action.nargs is None for action in self._actions)

    def check_known(self, option: str) -> None:
        """Exit with a sentence if the option does not exist."""
        if option in _REFUSED:
            self.error(f"{option} is not supported: {_REFUSED[option]}")
        if option not in self.option_names():
            near = difflib.get_close_matches(option, self.option_names(), n=1)
            meant = f"did you mean {near[0]}?" if near else "see `zerolite --help`."
            self.error(f"there is no option {option}; {meant} Options of the script come after the script.")


def build_parser() -> _Parser:
    parser = _Parser(
        prog="zerolite",
        usage="zerolite [options] (script.py | -m module) [args ...]\n"
        "       zerolite (plan | report | export | import-deepspeed) ...",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_processes(parser)
    _add_nodes(parser.add_argument_group("several nodes"))
    for option in _IGNORED:
        parser.add_argument(option, action="store_true", help=argparse.SUPPRESS)
    return parser


def _add_processes(parser: _Parser) -> None:
    add = parser.add_argument
    add("--nproc", "--num-gpus", "--num-accelerators", "--nproc-per-node", type=int, metavar="N", dest="nproc",
        help="processes on each node (default: one per visible CUDA device, or one)")  # fmt: skip
    add("--log-dir", "--enable-each-rank-log", metavar="DIR",
        help="keep each rank's output in files below DIR (default: a temporary directory, kept if the job fails, "
        "without the output of rank 0, which goes to the terminal)")  # fmt: skip
    add("--tee", metavar="RANKS", default="",
        help="show the output of these ranks too, behind their number: 1,3 or 0-3 or all")  # fmt: skip
    add("--env-file", metavar="FILE",
        help=f"lines KEY=VALUE for the ranks' environment (default: {ENV_FILE} here or in the home directory, if it "
        f"is there; with --deepspeed-compat {DEEPSPEED_ENV_FILE} too)")  # fmt: skip
    add("--deepspeed-compat", action="store_true",
        help="let `import deepspeed` in the script find zerolite.compat.deepspeed")  # fmt: skip
    add("--dry-run", action="store_true", help="print the commands and their environment, and start nothing")
    add("-m", dest="module_name", metavar="MODULE", help="run a module, as in `python -m MODULE`")
    add("--module", action="store_true", help=argparse.SUPPRESS)
    add("--no-python", action="store_true", help="the script is a command of its own, not for Python")
    add("--version", action="version", version=f"zerolite {__version__}")


def _add_nodes(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--hostfile", "-H", metavar="FILE", help="the nodes, one a line: `host slots=8`; # begins a comment")
    add("--include", "-i", metavar="FILTER", help="use only these hosts or slots: host1:0,2@host2")
    add("--exclude", "-e", metavar="FILTER", help="use all but these hosts or slots: host1:0,2@host2")
    add("--num-nodes", "--nnodes", metavar="N", help="number of nodes; with a hostfile, its first N (default: all)")
    add("--launcher-args", metavar="ARGS", default="", help="further arguments of ssh, as in '-F my_ssh_config'")
    add("--ssh-port", type=int, metavar="PORT", help="port of the other nodes' ssh servers")
    add("--master-addr", metavar="HOST", help="the first node, as the others reach it")
    add("--master-port", type=int, metavar="PORT",
        help="TCP port at which the processes meet (default: a free one, so that jobs do not collide)")  # fmt: skip


def split_command_line(argv: Sequence[str], parser: _Parser) -> tuple[list[str], list[str]]:
    """Split `argv` into the launcher's options and the rest: the script and its arguments, unchanged.

    Underscores in options become dashes. argparse does not do the splitting: it would drop a `--` among the script's
    arguments.
    """
    options: list[str] = []
    i = 0
    while i < len(argv) and argv[i].startswith("-"):
        if argv[i] == "-m":
            return [*options, *argv[i : i + 2]], list(argv[i + 2 :])
        if argv[i] == "--":
            return options, list(argv[i + 1 :])
        name, equals, value = argv[i].partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        parser.check_known(name)
        options.append(name + equals + value)
        i += 1
        if not equals and parser.takes_value(name) and i < len(argv):
            options.append(argv[i])
            i += 1
    return options, list(argv[i:])


def parse_num_nodes(text: str | None) -> int | None:
    """Return the number in the text; None without one. Raises ValueError with a sentence for the user."""
    if text is None:
        return None
    fewest, _, most = text.partition(":")
    if fewest.isascii() and fewest.isdigit() and int(fewest) > 0 and most in ("", fewest):
        return int(fewest)
    if most:
        raise ValueError(f"--num-nodes {text} is not supported: {_REFUSED['--num-nodes MIN:MAX']}")
    raise ValueError(f"--num-nodes expects a number of nodes, 1 or more, and got {text!r}")


def parse_ranks(text: str) -> list[int] | None:
    """Return the ranks of a list such as `"1,3-5"`; None for `"all"`. Raises ValueError with a sentence."""
    if text in ("all", ""):
        return None if text else []
    ranks = read_numbers(text)
    if ranks is None:
        raise ValueError(f"--tee expects ranks such as 1,3 or 0-3, or `all`, and got {text!r}")
    return list(ranks)


def read_env_file(path: str) -> dict[str, str]:
    """Return the variables of a file of lines `KEY=VALUE`. A value may be in quotes; `#` begins a comment line.

    Raises:
        ValueError: a line is malformed; the sentence quotes it.
        OSError: the file cannot be read.
    """
    variables = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            key, equals, value = text.partition("=")
            if not equals or not key.strip().isidentifier():
                raise ValueError(f"line {number} of {path} is {text!r}; expected KEY=VALUE, or # before a comment")
            value = value.strip()
            if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
                value = value[1:-1]
            variables[key.strip()] = value
    return variables


def find_env_files(asked: str | None, environ: Mapping[str, str], deepspeed: bool = False) -> list[str]:
    """Return the env files to read; a later one replaces variables of an earlier one.

    Args:
        asked: the file of ``--env-file``, which is then the only one.
        environ: the environment.
        deepspeed: read DeepSpeed's files too: :data:`DEEPSPEED_ENV_FILE`, or DS_ENV_FILE, in the home directory and
            here. `accelerate launch` writes one.
    """
    if asked is not None:
        return [os.path.expanduser(asked)]
    home = environ.get("HOME")
    places = [os.path.abspath(""), *([home] if home else [])]
    own_files = [os.path.join(place, ENV_FILE) for place in places]
    theirs = [os.path.join(place, environ.get("DS_ENV_FILE", DEEPSPEED_ENV_FILE)) for place in reversed(places)]
    deepspeed_files = list(dict.fromkeys(filter(os.path.isfile, theirs if deepspeed else [])))
    return [*deepspeed_files, *[path for path in own_files if os.path.isfile(path)][:1]]


def read_options(argv: Sequence[str], parser: _Parser) -> LaunchRequest:
    """Parse a command line and check each option by itself. A mistake prints a sentence and exits with status 2."""
    words, rest = split_command_line(argv, parser)
    options = parser.parse_args(words)
    if options.module_name is not None:
        rest = ["-m", options.module_name, *rest]
    elif options.module and rest:
        rest = ["-m", *rest]
    elif not rest:
        parser.error("expected a script to run, as in `zerolite train.py`, or `-m module`, and found none")
    target, script_args = (rest[:2], rest[2:]) if rest[0] == "-m" else (rest[:1], rest[1:])
    if options.no_python and target[0] == "-m":
        parser.error("--no-python and a module exclude each other: a module is run by Python")
    if options.include is not None and options.exclude is not None:
        parser.error("--include and --exclude exclude each other; give one of them")
    try:
        fields = {
            one.name: getattr(options, one.name) for one in dataclasses.fields(LaunchRequest) if one.name in options
        }
        env: dict[str, str] = {}
        for path in find_env_files(options.env_file, os.environ, options.deepspeed_compat):
            env |= read_env_file(path)
        if options.deepspeed_compat:
            from zerolite.compat.as_deepspeed import variables

            env |= variables({**os.environ, **env})
        fields.update(
            python=not options.no_python,
            num_nodes=parse_num_nodes(options.num_nodes),
            master_addr=None if options.master_addr is None else options.master_addr.strip("[]"),
            launcher_args=shlex.split(options.launcher_args),
            log_dir=None if options.log_dir is None else os.path.abspath(options.log_dir),
            tee=parse_ranks(options.tee),
            env=env,
        )
        return LaunchRequest(target, script_args, **fields)
    except OSError as error:
        parser.error(f"the env file {error.filename!r} cannot be read: {error.strerror}")
    except ValueError as error:
        parser.error(str(error))
