"""Variables that torchrun, srun, the mpiruns, Kubernetes and SkyPilot leave in the environment (the table in
docs/launching.md), and what follows from them. tests/clients/test_ray.py runs Ray."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.run import parse_args

from zerolite.comm import environment, process_group
from zerolite.comm.environment import Rendezvous, find_local_rank, first_host, read_environment

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "launching.md").read_text()

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "123"}
SRUN = {
    "SLURM_PROCID": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "100007", "SLURM_JOB_NODELIST": "gpu[02-06]", "SLURM_STEP_NODELIST": "gpu[03-06]",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "1", "PMIX_NAMESPACE": "1683750913",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "PMI_FD": "8"}


def test_a_shell_in_an_allocation_is_no_task():
    salloc = {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}
    sbatch = {**salloc, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    step_of_sallocs_shell = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}
    step_of_a_script = {**step_of_sallocs_shell, "SLURM_STEP_ID": "4294967291", "PMI_RANK": "0", "PMIX_RANK": "0"}
    for env in ({}, salloc, sbatch, step_of_sallocs_shell, step_of_a_script):
        assert read_environment(env) is None and find_local_rank(env) is None, env


def test_torchruns_names():
    assert read_environment(TORCHRUN) == Rendezvous(3, 4, 1, "h", 123)
    assert read_environment({"RANK": "0", "WORLD_SIZE": "1"}) == Rendezvous(0, 1, 0, "127.0.0.1", 29500)
    for outer in (SRUN, OPEN_MPI, MPICH):  # a job that was started inside of a task
        assert read_environment({**outer, **TORCHRUN}) == Rendezvous(3, 4, 1, "h", 123)
        assert find_local_rank({**outer, **TORCHRUN}) == 1


def test_a_rank_exported_from_the_launchers_keeps_the_launchers_local_rank():
    exported = {**SRUN, "RANK": "5", "WORLD_SIZE": "8"}
    assert read_environment(exported).local_rank == find_local_rank(exported) == 1
    other = {**SRUN, "RANK": "2", "WORLD_SIZE": "8"}
    assert find_local_rank(other) is None and read_environment(other).local_rank == 2


def test_sruns_names():
    assert read_environment(SRUN) == Rendezvous(5, 8, 1, "gpu03", 20000 + 100007 % 12768)
    assert read_environment({**SRUN, "MASTER_ADDR": "x", "MASTER_PORT": "9"}) == Rendezvous(5, 8, 1, "x", 9)
    assert find_local_rank(SRUN) == 1


@pytest.mark.parametrize(
    "nodes,host",
    [("node1", "node1"), ("a,b,c", "a"), ("node[03-05,9],login", "node03"), ("n[1,2]", "n1"),
     ("rack2-n[007-010]x,y", "rack2-n007x"), ("rack[1-2]n[03-04],other", "rack1n03"), ("login,node[03-05]", "login"),
     ("10.0.0.1", "10.0.0.1")],
)  # fmt: skip
def test_the_first_host_of_a_list(nodes, host):
    assert first_host(nodes) == host


def test_open_mpis_names():
    found = read_environment(OPEN_MPI)
    assert found == Rendezvous(1, 2, 1, "127.0.0.1", found.master_port) and 20000 <= found.master_port < 32768
    assert find_local_rank(OPEN_MPI) == 1
    assert read_environment({**OPEN_MPI, "PMIX_NAMESPACE": "1683750914"}).master_port != found.master_port
    assert read_environment({**OPEN_MPI, "MASTER_PORT": "9"}).master_port == 9
    assert read_environment({**OPEN_MPI, "MASTER_ADDR": "h"}).master_addr == "h"


def test_mpichs_names():
    env = {**MPICH, "MASTER_ADDR": "h"}
    assert read_environment(env) == Rendezvous(1, 2, 0, "h", 29500) and find_local_rank(env) == 0
    assert read_environment({**MPICH, "MPI_LOCALNRANKS": "2"}).master_addr == "127.0.0.1"
    assert read_environment({**MPICH, "PMI_RANK": "0", "PMI_SIZE": "1"}).world_size == 1


def test_two_mpichs_on_a_host_get_different_ports(monkeypatch):
    """They do not number their jobs, so the process tells them apart that has started the ranks."""
    ports = set()
    for launching in ("10 700", "10 701", "11 700"):
        monkeypatch.setattr(environment, "_launching_process", lambda of=launching: of)
        ports.add(read_environment({**MPICH, "MPI_LOCALNRANKS": "2"}).master_port)
        assert read_environment({**MPICH, "MASTER_ADDR": "h"}).master_port == 29500, "it says nothing to other hosts"
    assert len(ports) == 3 and min(ports) >= 20000 and max(ports) < 32768


@pytest.mark.parametrize("inner", [OPEN_MPI, MPICH], ids=["Open MPI", "MPICH"])
def test_an_mpirun_inside_an_allocation(inner):
    """SLURM then counts the daemons that mpirun has started by srun, one on each host."""
    daemon = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}
    several_hosts = {name: "1" if name.endswith(("LOCAL_SIZE", "LOCALNRANKS")) else inner[name] for name in inner}
    found = read_environment({**daemon, **several_hosts})
    assert (found.rank, found.world_size, found.master_addr) == (1, 2, "gpu02")
    assert find_local_rank({**daemon, **several_hosts}) == int(inner.get("MPI_LOCALRANKID", 1))
    assert 20000 <= found.master_port < 32768


SEVERAL_HOSTS = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}


def test_several_hosts_without_an_address(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    for env in (SEVERAL_HOSTS, MPICH):
        with pytest.raises(ValueError, match=r"mpirun -x MASTER_ADDR=HOST.*mpiexec -genv MASTER_ADDR HOST.*mpi4py"):
            read_environment(env)


def test_several_hosts_ask_through_mpi4py(monkeypatch):
    mpi = mock.Mock()
    mpi.COMM_WORLD.Get_size.return_value = 2
    mpi.COMM_WORLD.bcast.return_value = "10.0.0.7"
    monkeypatch.setitem(sys.modules, "mpi4py", types.ModuleType("mpi4py"))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    assert read_environment(SEVERAL_HOSTS).master_addr == "10.0.0.7"
    assert read_environment({**SEVERAL_HOSTS, "OMPI_COMM_WORLD_RANK": "0"}).master_addr == "10.0.0.7"
    said_by_1, said_by_0 = (call.args[0] for call in mpi.COMM_WORLD.bcast.call_args_list)
    assert said_by_1 is None and said_by_0, "rank 0, and no other, says its address"
    mpi.COMM_WORLD.Get_size.return_value = 1
    with pytest.raises(ValueError, match="another MPI than this mpirun"):
        read_environment(SEVERAL_HOSTS)


@pytest.mark.parametrize(
    "env,words",
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK < WORLD_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "number in the variable RANK, got 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http"}, "MASTER_PORT"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK=2, OMPI_COMM_WORLD_SIZE=2"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE missing"),
        ({"PMIX_RANK": "0"}, "PMI_SIZE missing.*unset PMIX_RANK"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, "neither SLURM_STEP_NUM_TASKS nor SLURM_NTASKS"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "4"}, "0 <= SLURM_PROCID < SLURM_STEP_NUM_TASKS"),
    ],
)
def test_incomplete_or_wrong_variables_are_named(env, words):
    with pytest.raises(ValueError, match=words):
        read_environment(env)


@pytest.mark.parametrize(
    ("host", "ranks_here", "known", "chosen"),
    [("10.0.0.1", "2", None, "eth7"), ("10.0.0.1", "2", "mine", "mine"), ("10.0.0.1", "8", None, "lo"),
     ("127.0.0.1", "2", None, "lo"), (None, "2", None, None)],
)  # fmt: skip
def test_gloo_is_told_the_interface_that_leads_to_rank_0(monkeypatch, host, ranks_here, known, chosen):
    for name, value in (("LOCAL_WORLD_SIZE", ranks_here), ("GLOO_SOCKET_IFNAME", known)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(process_group, "interface_towards", {"10.0.0.1": "eth7"}.get)
    monkeypatch.setattr(process_group, "_gloo_kept_here", False)
    process_group._keep_gloo_here(host, 8)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == chosen
    os.environ.pop("GLOO_SOCKET_IFNAME", None)


@pytest.mark.parametrize("node", [0, 1])
def test_the_command_for_skypilot(node):
    """torchrun understands the line of the page, in a shell with SkyPilot's variables alone."""
    found = re.search(r"^  torchrun (--nnodes .*\n.*SKYPILOT.*)$", PAGE, re.MULTILINE)
    assert found is not None
    sky = {"NODE_IPS": "127.0.0.1\n127.0.0.2", "NODE_RANK": node, "NUM_GPUS_PER_NODE": 4, "NUM_NODES": 2}
    environ = {f"SKYPILOT_{name}": str(value) for name, value in sky.items()} | {"PATH": os.environ["PATH"]}
    words = subprocess.check_output(["bash", "-c", f"printf '%s\\n' {found[1]}"], env=environ, text=True).splitlines()
    args = parse_args(words)
    assert (args.nnodes, args.node_rank, args.nproc_per_node) == ("2", node, "4")
    assert (args.master_addr, args.master_port, args.training_script) == ("127.0.0.1", 29500, "train.py")
