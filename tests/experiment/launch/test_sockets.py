"""What the processes of a run listen at, and what they do with what comes from there."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ampcompare.base.environment.ranks import DistributedEnv
from ampcompare.experiment.launch.cell_files import private_temporary_folder
from ampcompare.experiment.launch.contract import Progress
from ampcompare.experiment.launch.multi_process import MultiProcessLauncher
from ampcompare.experiment.launch.start_ranks import RanksRequest, _register_and_list_torchrun_arguments
from ampcompare.experiment.launch.worker.rank import open_rank_store
from ampcompare.settings.config import RunConfig

MakeConfig = Callable[..., RunConfig]


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    connections = process.net_connections(kind="inet")
    return [(found.laddr.ip, found.laddr.port) for found in connections if found.status == psutil.CONN_LISTEN]


def log_of(process: psutil.Process) -> str:
    """Return the name of the file to which a process of a cell prints."""
    return next(
        name for file in process.open_files() if (name := Path(file.path).name).endswith((".log", "log.txt"))
    )


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("launcher", ["spawn", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_run_listens_at_the_loopback_only(
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forked_python: Any,
    launcher: Any,
) -> None:
    """On one machine no socket of a run can be reached from another one, and what starts the ranks has none at all.

    So nobody can leave something in a store for the agent or the ranks to unpickle. Settings of the environment that
    are meant for several machines change nothing.
    """
    others = [name for _, name in socket.if_nameindex() if not name.startswith("lo")]
    if others:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", others[0])
    seen: dict[str, list[tuple[str, int]]] = {}
    before = forked_python.descendants()  # pools of other tests
    with MultiProcessLauncher(launcher) as started:

        def look(progress: Progress) -> None:
            if progress.steps and not seen:
                for process in forked_python.descendants() - before:
                    seen.setdefault(log_of(process), []).extend(listening(process))
                modes = {path.stat().st_mode & 0o777 for path in tmp_path.glob(".rendezvous.*")}
                assert modes == {0o700}
                started.ask_cell_to_stop()

        started.launch(make_config(processes=2, recipe={"batch_size": 8, "epochs": 100_000}), tmp_path, look)
    assert seen.pop("launcher.log") == []
    assert sorted(seen) == ["log.txt", "rank1.log"]
    assert all(seen.values())
    assert {address for addresses in seen.values() for address, _ in addresses} <= {"127.0.0.1", "::1"}
    assert not list(tmp_path.glob(".rendezvous.*"))


def test_a_store_at_a_port_listens_where_it_was_asked_to() -> None:
    """A store at tcp://127.0.0.1:PORT cannot be reached by the other addresses of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = open_rank_store(DistributedEnv(0, 1, 0, 1, f"tcp://127.0.0.1:{port}", 0, "environment"))
    store.set("key", "value")
    assert [address for address, number in listening(psutil.Process()) if number == port] == ["127.0.0.1"]


def test_the_places_of_one_machine_are_private(tmp_path: Path) -> None:
    """Where ranks meet cannot be guessed or opened by others."""
    request = RanksRequest(str(tmp_path), "torchrun", 2)
    with private_temporary_folder(tmp_path) as one, private_temporary_folder(tmp_path) as other:
        assert one != other
        assert one.stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.iterdir())
    first, second = (
        [word for word in _register_and_list_torchrun_arguments(request, "file://x") if "rdzv" in word]
        for _ in range(2)
    )
    assert first != second  # the id is random
    assert not [word for word in first if "endpoint" in word or "cell" in word]
