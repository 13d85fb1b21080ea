"""A cell as its ranks see it, in processes that are there already: they meet, and see that they are alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from ampcompare.config import RunConfig
from ampcompare.launch import rank as rank_module
from ampcompare.launch.rank import run_rank
from ampcompare.launch.world import World
from ampcompare.record import read_record

Run = Callable[..., list[Any]]


def configuration(processes: int, seed: int = 0) -> RunConfig:
    recipe = {
        "data": {"name": "synthetic", "train_size": 64, "val_size": 33, "image_size": 8},
        "model": {"arch": "mlp"},
        "epochs": 1,
        "global_batch_size": 16,
        "seed": seed,
    }
    return RunConfig.model_validate({"recipe": recipe, "processes": processes, "device": "cpu"})


def cell(folder: str, torch_of_last: str | None = None, seed_of_last: int = 0) -> tuple[str, bool]:
    """Train a cell in a group of its own; the last rank may have another torch or seed."""
    number, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    last = number == size - 1
    facts = {**rank_module.fingerprint(), **({"torch": torch_of_last} if last and torch_of_last else {})}
    world = World(number, size, number, size, f"file://{folder}/meeting", 0, "test")
    config = configuration(size, seed_of_last if last else 0)
    with (
        mock.patch.object(rank_module, "fingerprint", return_value=facts),
        mock.patch.object(rank_module, "GRACE_SECONDS", 0.1),
    ):
        record, speaks = run_rank(config, Path(folder), world, log=Path(folder) / f"{number}.log")
    # For the pool to end, in place of its own.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return f"{record.status} {record.error}", speaks


def test_four_ranks_train_a_cell(ranks: Run, tmp_path: Path) -> None:
    """Four ranks meet, train, and rank 0 alone speaks and writes the record."""
    outcomes = ranks(4, cell, folder=str(tmp_path))
    assert outcomes == [("completed None", True)] + [("completed None", False)] * 3
    record = read_record(tmp_path / "record.json")
    assert record.processes is not None
    assert (record.processes.world_size, record.summary.num_steps, record.summary.epochs[0].samples) == (4, 4, 33)


def test_a_rank_with_another_torch(ranks: Run, tmp_path: Path) -> None:
    """A rank with other packages is named on every rank before training, and one of them speaks."""
    outcomes = ranks(2, cell, folder=str(tmp_path), torch_of_last="1.0")
    assert sorted(speaks for _, speaks in outcomes) == [False, True]
    for text, _ in outcomes:
        assert text.startswith("failed rank 1 of 2 hold another environment than rank 0: torch is 1.0 there and ")
    assert read_record(tmp_path / "record.json").status == "failed"


def test_a_rank_with_other_settings(ranks: Run, tmp_path: Path) -> None:
    """A rank that was told to train something else is named."""
    for text, _ in ranks(2, cell, folder=str(tmp_path), seed_of_last=1):
        assert "rank 1 of 2 hold another environment than rank 0: settings is " in text
