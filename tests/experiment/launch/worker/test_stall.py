"""Ranks that stand still while others wait for them."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from ampcompare.base.environment.ranks import DistributedEnv
from ampcompare.experiment.launch.multi_process import MultiProcessLauncher
from ampcompare.experiment.launch.worker.stall import RankPresence, is_collective_timeout, is_lost_connection
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig

MakeConfig = Callable[..., RunConfig]


def world(rank: int, size: int = 3) -> DistributedEnv:
    return DistributedEnv(rank, size, rank, size, "file:///", 0, "spawn")


@pytest.mark.parametrize(
    ("text", "timeout", "lost"),
    [
        (
            "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation",
            True,
            False,
        ),
        ("wait timeout after 1000ms, keys: /attempt0/group/0", True, False),
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234", False, True),
        ("DataLoader timed out after 120 seconds", False, False),
        ("mat1 and mat2 shapes cannot be multiplied", False, False),
    ],
)
def test_kinds_of_errors(text: str, timeout: bool, lost: bool) -> None:
    """Only what torch.distributed raises for a rank that does not come is taken for one that stands still."""
    assert (is_collective_timeout(RuntimeError(text)), is_lost_connection(RuntimeError(text))) == (
        timeout,
        lost,
    )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait no seconds for answers, and signal no process."""
    monkeypatch.setattr("ampcompare.experiment.launch.worker.stall.ANSWER_SECONDS", 0.2)
    monkeypatch.setattr("ampcompare.experiment.launch.worker.stall.STACK_SIGNAL", None)


@pytest.mark.parametrize(
    ("there", "answers", "words"),
    [
        ([0, 1, 2], [0, 1], "rank 2 stands still: no answer within 7 s"),
        ([0, 1, 2], [0], "ranks 1, 2 stand still"),
        ([0, 1], [0, 1], "rank 2 stands still"),
        ([0, 1, 2], [0, 1, 2], "no rank answered another within 7 s"),
    ],
)
@pytest.mark.usefixtures("quick")
def test_which_rank_is_named(there: list[int], answers: list[int], words: str) -> None:
    """Named is who does not react, or never came; where all do, the network between them is to be looked at."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    rolls = {rank: RankPresence(store, world(rank)) for rank in there}
    for rank in answers:
        rolls[rank].answer_as_alive()
    assert rolls[0].request_stacks_for_stall_message(7.0).startswith(words)


@pytest.mark.usefixtures("quick")
def test_a_lost_connection_waits_for_its_cause() -> None:
    """A rank whose connection was lost leaves the report to the rank that has failed by itself."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    first, second = (RankPresence(store, world(rank)) for rank in (0, 1))
    threading.Timer(0.05, first.claim_first_failure, [ValueError("a cause")]).start()
    assert not second.claim_first_failure(RuntimeError("Connection closed by peer"))


def launched(config: RunConfig, folder: Path) -> RunRecord:
    with MultiProcessLauncher("spawn") as launcher:
        return launcher.launch(config, folder)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_hangs_in_code_of_a_user(
    user_folder: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank is named in one line, and the logs of both ranks show where each was."""
    monkeypatch.chdir(user_folder)
    record = launched(make_config("launched:rank_1_hangs", processes=2, stall_timeout=3), tmp_path)
    assert record.status == "failed"
    assert (record.error or "").startswith("rank 1 stands still: no answer within 3 s (--stall-timeout)")
    assert "hang_here" in (tmp_path / "rank1.log").read_text()
    assert (
        "all_reduce" in (tmp_path / "log.txt").read_text() or "backward" in (tmp_path / "log.txt").read_text()
    )
    assert not list(tmp_path.glob(".rendezvous*"))
