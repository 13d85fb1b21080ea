"""The place of a process among others, read from what torchrun, mpirun, srun or a user has set."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ampcompare.base.environment.ranks import (
    DistributedEnv,
    RankInGroup,
    has_other_ranks,
    rank_in_process_group,
    rank_of_process,
    read_distributed_env,
)
from ampcompare.base.errors import ConfigError, EnvironmentUnfit, LaunchError, UnsupportedCombination
from ampcompare.experiment.launch.dispatch.dispatch import make_launcher
from ampcompare.experiment.launch.dispatch.local import ExternalLauncher, LocalLauncher
from ampcompare.experiment.launch.forked import ForkedLauncher
from ampcompare.experiment.launch.multi_process import MultiProcessLauncher
from ampcompare.experiment.launch.worker import cell as worker
from ampcompare.experiment.launch.worker.rank import (
    device_of_local_rank,
    initialized_process_group,
    open_rank_store,
)
from ampcompare.experiment.run_options import LaunchOptions
from ampcompare.settings.config import RunConfig
from ampcompare.training.process.process_group import choose_group_backend

TORCHRUN = {
    **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    **{
        "MASTER_ADDR": "host",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_RESTART_COUNT": "2",
    },
}
SRUN = {
    **{"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "1"},
    **{"SLURM_STEP_NODELIST": "gpu[03-04],x", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "2"},
}


@pytest.mark.parametrize(
    ("is_open", "rank", "size", "place", "others"),
    [
        (False, -1, -1, None, False),
        (True, 0, 1, RankInGroup(0, 1), False),
        (True, 2, 4, RankInGroup(2, 4), True),
    ],
)
def test_the_place_in_the_process_group(
    monkeypatch: pytest.MonkeyPatch,
    is_open: bool,
    rank: int,
    size: int,
    place: RankInGroup | None,
    others: bool,
) -> None:
    """One function says whether there is a group, which rank this is, and whether there are others."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: is_open)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: size)
    assert (rank_in_process_group(), has_other_ranks()) == (place, others)


def test_nobody_has_started_several() -> None:
    """Without variables, and in a batch script of Slurm, a process is alone."""
    assert read_distributed_env({}) is None
    assert read_distributed_env({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None
    assert rank_of_process({}) == 0


def test_torchrun() -> None:
    """torchrun's variables are read, with the restarts and the number of machines."""
    world = read_distributed_env(TORCHRUN)
    assert world == DistributedEnv(3, 4, 1, 2, "env://", 2, "torchrun")
    assert world.node_count == 2
    assert rank_of_process(TORCHRUN) == 3


def test_srun() -> None:
    """srun's variables are read; all tasks of a step meet at the first host, at a port of their own step."""
    world = read_distributed_env(SRUN)
    assert world == DistributedEnv(5, 8, 1, 4, "tcp://gpu03:20529", 0, "slurm")
    assert read_distributed_env({**SRUN, "SLURM_PROCID": "0"}).url == world.url  # type: ignore[union-attr]
    assert read_distributed_env({**SRUN, "SLURM_STEP_NUM_NODES": "1"}).url == "tcp://127.0.0.1:20529"  # type: ignore[union-attr]
    assert read_distributed_env({**SRUN, "SLURM_SRUN_COMM_PORT": "7"}).url == "tcp://gpu03:20536"  # type: ignore[union-attr]
    assert rank_of_process(SRUN) == 5


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "has WORLD_SIZE=2 and lacks RANK;"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "lacks MASTER_ADDR, MASTER_PORT"),
        ({**TORCHRUN, "RANK": "four"}, "RANK is 'four', not a number"),
        ({**TORCHRUN, "RANK": "4"}, "RANK is 4 and WORLD_SIZE is 4"),
    ],
)
def test_an_environment_that_makes_no_sense(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_distributed_env(environment)


def test_a_rendezvous_that_was_given() -> None:
    """With a URL, MASTER_ADDR and MASTER_PORT are not needed."""
    world = read_distributed_env({"RANK": "0", "WORLD_SIZE": "2"}, url="tcp://a:1")
    assert world is not None
    assert (world.url, world.local_rank, world.local_size) == ("tcp://a:1", 0, 2)


def test_who_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process is forked, several are spawned, and a process among others takes part itself."""
    one, two = RunConfig(), RunConfig(processes=2)
    launcher: Any = LocalLauncher()
    assert isinstance(launcher.launcher_of(one), ForkedLauncher)
    for config, kind in ((two, "spawn"), (RunConfig(launcher="torchrun"), "torchrun")):
        started = launcher.launcher_of(config)
        assert isinstance(started, MultiProcessLauncher)
        assert started.launcher == kind
        assert launcher.launcher_of(config) is started
    with pytest.raises(ConfigError, match="--dist-url is for processes that something else starts"):
        LaunchOptions(dist_url="tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"--dist-url '127.0.0.1:1' is none; give env://"):
        LaunchOptions(dist_url="127.0.0.1:1")
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    member = make_launcher(RunConfig(processes=4))
    assert isinstance(member, ExternalLauncher)
    assert not member.is_main
    with pytest.raises(
        UnsupportedCombination, match=r"rank 3 of 4 that torchrun started.*--nproc-per-node 4"
    ):
        make_launcher(RunConfig(processes=4), several_cells=True)


def test_devices_and_backends() -> None:
    """On CPUs all ranks use the CPU and gloo; one GPU for several of them is refused."""
    world = DistributedEnv(1, 2, 1, 2, "env://", 0, "torchrun")
    assert device_of_local_rank("cpu", world) == "cpu"
    assert choose_group_backend("auto", "cpu") == choose_group_backend("gloo", "cpu") == "gloo"
    with pytest.raises(ConfigError, match="cuda:0 is one GPU for 2 processes"):
        device_of_local_rank("cuda:0", world)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What is asked of CUDA and of torch.distributed, in order; neither is touched."""
    calls: list[tuple[str, Any]] = []

    def init_process_group(backend: str, **options: Any) -> None:
        calls.append((backend, options.get("device_id")))

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))
    monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    return calls


def test_a_rank_takes_its_gpu_before_it_meets_the_others(
    asked: list[tuple[str, Any]], tmp_path: Path
) -> None:
    """Collectives of objects use the current device, which would be the first GPU in every rank."""
    gpu = torch.device("cuda", 1)
    world = DistributedEnv(1, 2, 1, 2, f"file://{tmp_path / 'store'}", 0, "x")
    store = open_rank_store(world)
    with initialized_process_group(world, store, "nccl", "cuda:1", 60.0):
        assert asked == [("set_device", gpu), ("nccl", gpu)]
    asked.clear()
    with initialized_process_group(world, store, "gloo", "cpu", 60.0):
        assert asked == [("gloo", None)]


@pytest.mark.parametrize(("backend", "chosen"), [("auto", "nccl"), ("gloo", "gloo")])
def test_one_process_talks_as_several_would(
    asked: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str, chosen: str
) -> None:
    """On a GPU the group of one process is nccl too, as gloo goes through the host, unless it is asked for."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    config = RunConfig.model_validate({"device": "cuda", "parallel": {"kind": "ddp", "backend": backend}})
    monkeypatch.setattr(
        worker, "train_cell", lambda config, *_: worker.record_of_failure(config, ValueError("trained"))
    )
    record = worker.train_cell_and_write_record(config, tmp_path)
    assert record.error == "ValueError: trained"
    assert asked == [("set_device", gpu), (chosen, gpu if chosen == "nccl" else None)]


@pytest.mark.skipif(torch.distributed.is_mpi_available(), reason="this torch is built with mpi")
def test_mpi_is_refused_where_torch_lacks_it() -> None:
    """`--dist-backend mpi` needs a torch that was built with it."""
    with pytest.raises(EnvironmentUnfit, match="this torch is built without mpi; use --dist-backend gloo"):
        choose_group_backend("mpi", "cpu")


@pytest.mark.parametrize("url", ["somewhere", "tcp://no-port", "http://a:1"])
def test_a_rendezvous_that_cannot_be_read(url: str) -> None:
    """A URL of another kind is an error that shows it."""
    with pytest.raises(LaunchError, match=f"could not connect at {url}: "):
        open_rank_store(DistributedEnv(0, 1, 0, 1, url, 0, "x"))


OPEN_MPI = {
    **{"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"},
    **{
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "OMPI_MCA_ess_base_jobid": "1177616385",
    },
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_mpirun() -> None:
    """The ranks of a job on one machine meet there, those of another job elsewhere."""
    world, other = (
        read_distributed_env(OPEN_MPI),
        read_distributed_env({**OPEN_MPI, "OMPI_MCA_ess_base_jobid": "1177616386"}),
    )
    assert world is not None
    assert other is not None
    assert (world.rank, world.size, world.local_rank, world.local_size, world.launcher) == (
        3,
        4,
        1,
        4,
        "mpirun",
    )
    assert world.url.startswith("tcp://127.0.0.1:")
    assert read_distributed_env({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}).url == world.url  # type: ignore[union-attr]
    assert other.url != world.url
    assert rank_of_process(OPEN_MPI) == 3


def test_mpich_names_no_job() -> None:
    """Its ranks on one machine have one parent, which gives them their port."""
    world = read_distributed_env(MPICH)
    assert world == DistributedEnv(1, 2, 1, 2, f"tcp://127.0.0.1:{20000 + os.getppid() % 20000}", 0, "mpirun")


def test_mpirun_alone_and_in_other_jobs() -> None:
    """One process is alone; torchrun's variables win, and those of Slurm belong to the daemons of mpirun."""
    assert (
        read_distributed_env({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}) is None
    )
    assert read_distributed_env({**OPEN_MPI, **TORCHRUN}).launcher == "torchrun"  # type: ignore[union-attr]
    assert read_distributed_env({**OPEN_MPI, **SRUN}).launcher == "mpirun"  # type: ignore[union-attr]


def test_mpirun_over_machines_needs_an_address() -> None:
    """Nothing but MASTER_ADDR and MASTER_PORT says where processes of several machines meet."""
    spread = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ConfigError, match=r"several machines.*-x MASTER_ADDR=HOST -x MASTER_PORT=PORT"):
        read_distributed_env(spread)
    world = read_distributed_env({**spread, "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, url="env://")
    assert world is not None
    assert (world.url, world.node_count) == ("env://", 2)
