"""Several processes from the command line: what flags mean, and a comparison over kinds of replicas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampcompare.records.comparison import read_comparison

Call = Callable[..., Any]


def test_flags_become_settings(call: Call) -> None:
    """Processes on all machines are counted, the batch of each follows from the total, and the rate by its rule."""
    words = ["--nproc-per-node", "2", "--nnodes", "2", "--global-batch-size", "32", "--lr-base", "0.4"]
    words += ["--lr-base-batch", "128", "--lr-rule", "sqrt", "--parallel", "apex-ddp", "--sync-bn", "apex"]
    config = call("run", "--dry-run", *words, "--delay-allreduce", "--launcher", "spawn").json()
    assert (config["processes"], config["launcher"]) == (4, "spawn")
    assert (config["recipe"]["batch_size"], config["recipe"]["optimizer"]["lr"]) == (8, pytest.approx(0.2))
    assert (config["parallel"]["kind"], config["parallel"]["sync_bn"]) == ("apex-ddp", "apex")
    assert config["parallel"]["delay_allreduce"] is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes", "2"], "say with --nproc-per-node how many on each"),
        (["--nproc-per-node", "2", "--nnodes", "2"], "add --rdzv-endpoint HOST:PORT"),
        (["--nproc-per-node", "2", "--parallel", "dp"], "would not share their gradients"),
        (
            ["--nproc-per-node", "3", "--global-batch-size", "16"],
            "a total batch of 16 cannot be split over 3 processes",
        ),
        (["--slurm-option", "partition=gpu"], "add --launcher slurm"),
        (["--launcher", "slurm", "--slurm-option", "nodes=2"], "nodes is set by --nnodes"),
        (["--parallel", "dp", "--device", "cpu"], "where it would do nothing"),
        (["--parallel", "ddp", "--sync-bn", "torch", "--device", "cpu"], "has no CPU kernels"),
    ],
)
def test_what_does_not_fit(call: Call, tmp_path: Path, words: list[str], message: str) -> None:
    """Numbers and kinds that do not fit are one line with exit code 2."""
    done = call("run", *words, "-o", str(tmp_path))
    assert done.code == 2
    assert message in done.err
    assert len([line for line in done.lines if not line.startswith("fp32, seed 0; on cpu, ")]) == 1


def test_jobs_of_slurm(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no sbatch, `--launcher slurm` is one line for an unfit machine; `--jobs` is not for it at all."""
    monkeypatch.setenv("PATH", str(tmp_path))
    done = call(
        "compare", "--launcher", "slurm", "--seeds", "0", "--arm", "fp32", "-o", str(tmp_path / "out"), tiny=True
    )
    assert done.code == 4
    assert "--launcher slurm needs sbatch, which is not on the path" in done.err
    assert len(done.lines) == 1
    done = call("compare", "--sweep", "launcher=spawn,slurm", "--jobs", "2", "-o", str(tmp_path / "out"), tiny=True)
    assert done.code == 2
    assert "under Slurm all are submitted" in done.err


def test_a_rank_is_missing(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """WORLD_SIZE without RANK is one line that says what lacks."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = call("run", tiny=True)
    assert done.code == 2
    assert "the environment has WORLD_SIZE=2 and lacks RANK, MASTER_ADDR, MASTER_PORT" in done.err


def test_another_number_than_was_started(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of processes beside that of torchrun is refused."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    done = call("run", "--nproc-per-node", "3", tiny=True)
    assert done.code == 2
    assert "--nproc-per-node asks for 3 processes, and 2 were started" in done.err


def test_ddp_of_one_process(call: Call, tmp_path: Path) -> None:
    """A wrapper around the model of a single process trains too."""
    done = call("run", "--parallel", "apex-ddp", "--sync-bn", "apex", "-o", str(tmp_path), tiny=True)
    assert done.code == 0, done.err


@pytest.mark.slow
def test_kinds_are_an_axis(call: Call, tmp_path: Path) -> None:
    """`compare` plans each arm with torch's DDP and with Apex's, and trains over two processes by both."""
    words = [
        "--nproc-per-node",
        "2",
        "--launcher",
        "spawn",
        "--sweep",
        "parallel.kind=ddp,apex-ddp",
        "-o",
        str(tmp_path),
    ]
    planned = call("compare", "--arm", "fp32", "--arm", "apex:O2", *words, "--dry-run", "--json", tiny=True).json()
    rows = {f"{arm} kind={kind}" for arm in ("fp32", "apex:O2") for kind in ("ddp", "apex-ddp")}
    assert {cell["arm"] for cell in planned["cells"]} == rows

    done = call("compare", "--seeds", "0", "--arm", "apex:O2", *words, tiny=True)
    assert done.code == 0, done.err
    records = read_comparison(tmp_path / "report.json").records
    assert {(record.config.arm, record.config.parallel.kind) for record in records} == {
        ("apex:O2", kind) for kind in ("ddp", "apex-ddp")
    }
    assert all(record.processes is not None and record.processes.world_size == 2 for record in records)
