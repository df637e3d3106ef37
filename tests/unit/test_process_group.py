import pytest

from zerolite.comm.process_group import Rendezvous, first_host, local_rank, read_environment


def test_no_environment_is_a_single_process():
    assert read_environment({}) is None
    assert read_environment({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}) is None, (
        "a shell inside an allocation is no task"
    )


def test_torchruns_names():
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "123"}
    assert read_environment(env) == Rendezvous(3, 4, 1, "h", 123)
    assert read_environment({"RANK": "0", "WORLD_SIZE": "1"}) == Rendezvous(0, 1, 0, "127.0.0.1", 29500)


def test_torchruns_names_win_over_slurms():
    env = {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "7", "SLURM_NTASKS": "8", "SLURM_LOCALID": "7"}
    assert read_environment(env).rank == 1
    assert local_rank({**env, "LOCAL_RANK": "1"}) == 1


def test_slurms_names():
    env = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "100007",
        "SLURM_JOB_NODELIST": "gpu[03-06]",
    }
    assert read_environment(env) == Rendezvous(5, 8, 1, "gpu03", 20000 + 100007 % 20000)
    assert read_environment({**env, "MASTER_ADDR": "x", "MASTER_PORT": "9"}).master_addr == "x"
    assert local_rank(env) == 1


@pytest.mark.parametrize(
    "nodes,host",
    [
        ("node1", "node1"),
        ("a,b,c", "a"),
        ("node[03-05,9],login", "node03"),
        ("n[1,2]", "n1"),
        ("rack2-n[007-010]x,y", "rack2-n007x"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_first_host(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    "env,words",
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK < WORLD_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "number in the variable RANK, got 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http"}, "MASTER_PORT"),
    ],
)
def test_incomplete_or_wrong_variables_are_named(env, words):
    with pytest.raises(ValueError, match=words):
        read_environment(env)


def test_an_empty_node_list_is_an_error():
    with pytest.raises(ValueError, match="node list"):
        first_host("")
