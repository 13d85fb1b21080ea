"""The place of a process among others, read from what torchrun, srun or a user has set."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ampcompare.config import RunConfig
from ampcompare.errors import ConfigError, EnvironmentUnfit, LaunchError, UnsupportedCombination
from ampcompare.launch.factory import make_launcher
from ampcompare.launch.forked import ForkedLauncher
from ampcompare.launch.group import choose_backend, local_device, process_group
from ampcompare.launch.member import MemberLauncher
from ampcompare.launch.processes import ProcessesLauncher
from ampcompare.launch.world import World, rank_of, world_of

TORCHRUN = {
    **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "host", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2"},
}
SRUN = {
    **{"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "1"},
    **{"SLURM_STEP_NODELIST": "gpu[03-04],x", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "2"},
}


def test_nobody_has_started_several() -> None:
    """Without variables, and in a batch script of Slurm, a process is alone."""
    assert world_of({}) is None
    assert world_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None
    assert rank_of({}) == 0


def test_torchrun() -> None:
    """torchrun's variables are read, with the restarts and the number of machines."""
    world = world_of(TORCHRUN)
    assert world == World(3, 4, 1, 2, "env://", 2, "torchrun")
    assert world.nodes == 2
    assert rank_of(TORCHRUN) == 3


def test_srun() -> None:
    """srun's variables are read; all tasks of a step meet at the first host, at a port of their own step."""
    world = world_of(SRUN)
    assert world == World(5, 8, 1, 4, "tcp://gpu03:20529", 0, "slurm")
    assert world_of({**SRUN, "SLURM_PROCID": "0"}).url == world.url  # type: ignore[union-attr]
    assert world_of({**SRUN, "SLURM_STEP_NUM_NODES": "1"}).url == "tcp://127.0.0.1:20529"  # type: ignore[union-attr]
    assert world_of({**SRUN, "SLURM_SRUN_COMM_PORT": "7"}).url == "tcp://gpu03:20536"  # type: ignore[union-attr]
    assert rank_of(SRUN) == 5


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
    """What is missing or wrong is named."""
    with pytest.raises(ConfigError, match=message):
        world_of(environment)


def test_a_meeting_place_that_was_given() -> None:
    """With a URL, MASTER_ADDR and MASTER_PORT are not needed."""
    world = world_of({"RANK": "0", "WORLD_SIZE": "2"}, url="tcp://a:1")
    assert world is not None
    assert (world.url, world.local_rank, world.local_size) == ("tcp://a:1", 0, 2)


def test_who_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process is forked, several are started by torchrun, and a process among others takes part itself."""
    one, two = RunConfig(), RunConfig(processes=2)
    launcher: Any = make_launcher(one)
    assert isinstance(launcher.launcher_of(one), ForkedLauncher)
    for config, kind in ((two, "torchrun"), (RunConfig(launcher="spawn"), "spawn")):
        started = launcher.launcher_of(config)
        assert isinstance(started, ProcessesLauncher)
        assert started.launcher == kind
        assert launcher.launcher_of(config) is started
    with pytest.raises(UnsupportedCombination, match="--rdzv-endpoint HOST:PORT"):
        make_launcher(two, nnodes=2)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    member = make_launcher(RunConfig(processes=4))
    assert isinstance(member, MemberLauncher)
    assert not member.speaks
    with pytest.raises(UnsupportedCombination, match=r"rank 3 of 4 that torchrun has started.*--nproc-per-node 4"):
        make_launcher(RunConfig(processes=4), several_cells=True)


def test_devices_and_backends() -> None:
    """On CPUs all ranks use the CPU and gloo; one GPU for several of them is refused."""
    world = World(1, 2, 1, 2, "env://", 0, "torchrun")
    assert local_device("cpu", world) == "cpu"
    assert choose_backend("auto", "cpu") == choose_backend("gloo", "cpu") == "gloo"
    with pytest.raises(ConfigError, match="cuda:0 is one GPU for 2 processes"):
        local_device("cuda:0", world)


@pytest.mark.skipif(torch.distributed.is_mpi_available(), reason="this torch is built with mpi")
def test_mpi_is_refused_where_torch_lacks_it() -> None:
    """`--dist-backend mpi` needs a torch that was built with it."""
    with pytest.raises(EnvironmentUnfit, match="this torch is built without mpi; use --dist-backend gloo"):
        choose_backend("mpi", "cpu")


@pytest.mark.parametrize("url", ["somewhere", "tcp://no-port", "http://a:1"])
def test_a_meeting_place_that_cannot_be_read(url: str) -> None:
    """A URL of another kind is an error that shows it."""
    with (
        pytest.raises(LaunchError, match=f"could not meet at {url}: "),
        process_group(World(0, 1, 0, 1, url, 0, "x"), "gloo", "cpu"),
    ):
        pass
