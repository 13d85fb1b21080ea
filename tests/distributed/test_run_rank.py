"""A cell as its ranks see it, in processes of a pool: how they connect, and how they report a failure."""

import contextlib
import io
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ampcompare.base.environment.ranks import DistributedEnv
from ampcompare.cli import main
from ampcompare.experiment.launch.worker import rank as rank_module
from ampcompare.experiment.launch.worker.rank import train_as_one_rank
from ampcompare.results.records.run import read_record
from ampcompare.settings.config import RunConfig

Run = Callable[..., list[Any]]
MODELS = """
import torch, torch.distributed as dist


class Net(torch.nn.Module):
    def __init__(self, num_classes, sample_shape, fails):
        super().__init__()
        self.layer, self.fails = torch.nn.Linear(sample_shape.numel(), num_classes), fails

    def forward(self, x):
        if self.fails:
            raise RuntimeError("the forward pass of one rank\\nhas failed")
        return self.layer(x.flatten(1))


def rank_1_raises(num_classes, sample_shape):
    return Net(num_classes, torch.Size(sample_shape), fails=dist.get_rank() == 1)


def other_on_rank_1(num_classes, sample_shape):
    net = Net(num_classes, torch.Size(sample_shape), fails=False)
    if dist.get_rank() == 1:
        net.extra = torch.nn.Linear(2, 2)
    return net


def all_raise(num_classes, sample_shape):
    raise ValueError("nobody can build this")
"""


@pytest.fixture
def models(tmp_path: Path) -> str:
    """The folder of a user's module whose models fail on some ranks."""
    (tmp_path / "ranked_models.py").write_text(MODELS)
    return str(tmp_path)


def configuration(processes: int, seed: int = 0, arch: str = "mlp", backend: str = "auto") -> RunConfig:
    recipe = {
        "data": {"name": "synthetic", "train_size": 64, "val_size": 33, "image_size": 8},
        "model": {"arch": arch},
        "epochs": 1,
        "global_batch_size": 16,
        "seed": seed,
    }
    parallel = {"kind": "ddp", "backend": backend}
    return RunConfig.model_validate(
        {"recipe": recipe, "processes": processes, "device": "cpu", "parallel": parallel}
    )


def cell(
    folder: str,
    torch_of_last: str | None = None,
    seed_of_last: int = 0,
    arch: str = "mlp",
    backend: str = "auto",
    url: str | None = None,
) -> tuple[str, bool]:
    """Train a cell in a group of its own; the last rank may have another torch or seed."""
    number, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    last = number == size - 1
    facts = {
        **rank_module.environment_fingerprint(),
        **({"torch": torch_of_last} if last and torch_of_last else {}),
    }
    world = DistributedEnv(number, size, number, size, url or f"file://{folder}/rendezvous", 0, "test")
    config = configuration(size, seed_of_last if last else 0, arch, backend)
    os.chdir(folder)
    with (
        mock.patch.object(rank_module, "environment_fingerprint", return_value=facts),
        mock.patch.object(rank_module, "GRACE_SECONDS", 0.1),
    ):
        record, is_main = train_as_one_rank(config, Path(folder), world, log=Path(folder) / f"{number}.log")
    # For the pool to end, in place of its own.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return f"{record.status} {record.error}", is_main


def test_four_ranks_train_a_cell(own_ranks: Run, tmp_path: Path) -> None:
    outcomes = own_ranks(4, cell, folder=str(tmp_path))
    assert outcomes == [("completed None", True)] + [("completed None", False)] * 3
    record = read_record(tmp_path / "record.json")
    assert record.processes is not None
    assert (record.processes.world_size, record.summary.num_steps, record.summary.epochs[0].samples) == (
        4,
        4,
        33,
    )


def test_a_rank_with_another_torch(own_ranks: Run, tmp_path: Path) -> None:
    outcomes = own_ranks(2, cell, folder=str(tmp_path), torch_of_last="1.0")
    assert sorted(is_main for _, is_main in outcomes) == [False, True]
    for text, _ in outcomes:
        assert text.startswith(
            "failed rank 1 of 2 hold another environment than rank 0: torch is 1.0 there and "
        )
    assert read_record(tmp_path / "record.json").status == "failed"


def test_a_rank_with_other_settings(own_ranks: Run, tmp_path: Path) -> None:
    """A rank that was told to train something else is named."""
    for text, _ in own_ranks(2, cell, folder=str(tmp_path), seed_of_last=1):
        assert "rank 1 of 2 hold another environment than rank 0: settings is " in text


@pytest.mark.parametrize(
    ("arch", "error"),
    [
        (
            "other_on_rank_1",
            "rank 1 of 2 hold another model than rank 0: extra.weight is [2, 2] torch.float32",
        ),
        ("all_raise", "nobody can build this"),
    ],
)
def test_a_failure_is_reported_once(
    own_ranks: Run, models: str, tmp_path: Path, arch: str, error: str
) -> None:
    """If one rank builds another model, or all fail, one of them writes one record with one line that says so."""
    outcomes = own_ranks(2, cell, folder=models, arch=f"ranked_models:{arch}")

    assert sorted(is_main for _, is_main in outcomes) == [False, True]
    record = read_record(tmp_path / "record.json")
    assert record.status == "failed"
    assert error in (record.error or "")
    assert "\n" not in (record.error or "")


def test_a_port_in_use(own_ranks: Run, tmp_path: Path) -> None:
    """A rendezvous at which another program listens is an error that says so, not a wait."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        (text, is_main) = own_ranks(1, cell, folder=str(tmp_path), url=url)[0]

    assert is_main
    assert text == (
        f"failed rank 0 cannot listen at {url}: the port is in use; choose another one, or stop the "
        f"program that uses it"
    )
    assert read_record(tmp_path / "record.json").error == text.removeprefix("failed ")


def test_nccl_without_gpus(own_ranks: Run, tmp_path: Path) -> None:
    """NCCL between CPUs is refused with the exit code of an unfit machine."""
    own_ranks(2, cell, folder=str(tmp_path), backend="nccl")

    record = read_record(tmp_path / "record.json")
    assert (record.error or "").startswith("nccl works between GPUs only, but ")
    assert (record.error or "").endswith("use --dist-backend gloo")
    assert record.environment["exit_code"] == 4


def command(folder: str, words: list[str], port: int) -> tuple[int, str]:
    """Call the command line with the environment that torchrun gives to this rank; return exit code and stderr."""
    number, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.chdir(folder)
    environment = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    errors = io.StringIO()
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in environment.items()}),
        mock.patch.object(rank_module, "GRACE_SECONDS", 0.1),
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        code = main(words)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return code, errors.getvalue()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


TINY = [
    *("--data", "synthetic", "--train-size", "64", "--val-size", "32", "--image-size", "8", "--epochs", "1"),
    *("--device", "cpu"),
]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["run", "--arch", "ranked_models:rank_1_raises"],
            "rank 1: RuntimeError: the forward pass of one rank",
        ),
        (["run", "--dist-backend", "nccl"], "nccl works between GPUs only"),
        (["run", "--global-batch-size", "15"], "a total batch of 15 cannot be split over 2 processes"),
        (["compare"], "call it once, with --nproc-per-node 2"),
    ],
)
def test_an_error_under_torchrun_is_reported_once(
    own_ranks: Run, models: str, words: list[str], message: str
) -> None:
    """Of the ranks that torchrun started, one says what is wrong, in one line, and each has an exit code of failure."""
    batch = [] if "--global-batch-size" in words else ["--batch-size", "8"]

    outcomes = own_ranks(
        2, command, folder=models, words=[*words, "-o", f"{models}/out", *TINY, *batch], port=free_port()
    )

    errors = "".join(text for _, text in outcomes)
    assert all(code != 0 for code, _ in outcomes)
    assert errors.count("ampcompare: ") == 1, errors
    assert message in errors
    assert "train_as_one_rank" not in errors, "a traceback"
