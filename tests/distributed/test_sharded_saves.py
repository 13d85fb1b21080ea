"""Checkpoints into which every rank writes its own shards: resumed, moved to other ranks, damaged, and cut short."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pydantic import ValidationError

from ampcompare.base.errors import CheckpointError
from ampcompare.base.tensors.tree import first_difference
from ampcompare.training.checkpoint.convert.load import load_any
from ampcompare.training.checkpoint.state.resume import find_checkpoint
from ampcompare.training.checkpoint.store import folder as folder_module
from ampcompare.training.checkpoint.store.sharded import read_saved
from ampcompare.training.process_group import group_of_one
from tests.distributed.test_fsdp import APART, BF16, CPU, FP16, Run, alone, configuration, on_ranks, refused

SHARDED = {"format": "sharded"}
EVERY = {**SHARDED, "every_steps": 2, "keep_last": 3}
SIX_UPDATES = {"arm": BF16, "kind": "fsdp", "size": 48}


@pytest.fixture(scope="module")
def saved(ranks: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """An unbroken run of one rank, and a folder with what another one saved until its fourth update."""
    folder = tmp_path_factory.mktemp("saved")
    whole = alone(ranks, folder=str(folder / "whole"), **SIX_UPDATES)
    alone(ranks, folder=str(folder / "stopped"), stop=4, saving=EVERY, **SIX_UPDATES)
    return whole, folder / "stopped"


def files_of(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize(
    ("arm", "model"),
    [
        (BF16, {"width": 33}),
        pytest.param(BF16, {"task": "lm", "arch": "gpt"}, marks=pytest.mark.extended),
        pytest.param(FP16, {"arch": "convnet"}, marks=pytest.mark.extended),
        pytest.param("half:bf16", {"arch": "convnet"}, marks=pytest.mark.extended),
    ],
)
def test_two_ranks_resume_to_the_last_bit(ranks: Run, arm: str, model: dict[str, Any], tmp_path: Path) -> None:
    """A stopped run that is resumed from shards ends as one that was neither stopped nor saved in shards.

    An odd width leaves the ranks shards of different sizes.
    """
    options = {"arm": arm, "kind": "fsdp", **model}
    folder = tmp_path / "b"
    whole = ranks(2, on_ranks, folder=str(tmp_path / "a"), **options)
    first = ranks(2, on_ranks, folder=str(folder), stop=2, saving=SHARDED, **options)
    saved = folder / "step-00000002.dcp"
    assert files_of(folder) == [saved.name]
    assert files_of(saved) == [".metadata", "__0_0.distcp", "__1_0.distcp", "state.pt"]
    assert first_difference(first[0]["state"], read_saved(saved), apart=("schema",)) == ""
    second = ranks(2, on_ranks, folder=str(folder), saving=SHARDED, **options)
    for rank in range(2):
        assert first[rank]["losses"] + second[rank]["losses"] == whole[rank]["losses"]
    assert first_difference(whole[0]["state"], second[0]["state"], apart=APART) == ""


def test_no_rank_writes_the_shards_of_another(ranks: Run, tmp_path: Path) -> None:
    """Both files hold about half of the weights and moments, and the file of rank 0 none; torch reads the folder."""
    saved = tmp_path / "step-00000002.dcp"
    state = ranks(2, on_ranks, arm=BF16, width=512, kind="fsdp", folder=str(tmp_path), stop=2, saving=SHARDED)[0][
        "state"
    ]
    size = 3 * sum(value.nbytes for value in state["model"].values())
    one, other = (os.path.getsize(saved / f"__{rank}_0.distcp") for rank in range(2))
    assert size <= one + other <= 1.1 * size
    assert abs(one - other) < 0.1 * size
    assert os.path.getsize(saved / "state.pt") < 0.1 * size
    read = {"model": {name: torch.zeros_like(value) for name, value in state["model"].items()}}
    with group_of_one("gloo", CPU):
        dcp.load(read, checkpoint_id=saved)
    assert first_difference(read["model"], state["model"], apart=()) == ""
    assert first_difference(load_any(saved)[0], state, apart=("schema",)) == ""


@pytest.mark.parametrize("two_first", [True, False])
def test_another_number_of_ranks_resumes(ranks: Run, two_first: bool, tmp_path: Path) -> None:
    """One rank resumes from the shards of two, and two from that of one, with equal weights and state."""

    def train(on_two: bool, **options: Any) -> dict[str, Any]:
        options |= {"folder": str(tmp_path), "saving": SHARDED, **SIX_UPDATES}
        return ranks(2 if on_two else 1, on_ranks, **options)[0]  # type: ignore[no-any-return]

    first = train(two_first, stop=3)
    second = train(not two_first)
    for part in ("model", "optimizer", "scaler"):
        assert first_difference({part: first["state"][part]}, {part: second["loaded"][part]}, apart=()) == ""
    assert (len(first["losses"]), len(second["losses"])) == (3, 3)


def test_files_and_shards_lie_in_one_folder(ranks: Run, tmp_path: Path, saved: tuple[dict[str, Any], Path]) -> None:
    """A run may change the form from one resume to the next; older ones are deleted, whatever their form."""
    options = {"folder": str(tmp_path), **SIX_UPDATES}
    alone(ranks, **options, stop=2, saving={"every_steps": 1, "keep_last": 2})
    alone(ranks, **options, stop=4, saving={**SHARDED, "every_steps": 1, "keep_last": 2})
    assert files_of(tmp_path) == ["best.dcp", "step-00000003.dcp", "step-00000004.dcp"]
    last = alone(ranks, **options, saving={"every_steps": 1, "keep_last": 2})
    assert {name for name in files_of(tmp_path) if name.startswith("step")} == {"step-00000005.pt", "step-00000006.pt"}
    assert first_difference(saved[0]["state"], last["state"], apart=APART) == ""


def flip(folder: Path) -> None:
    with (folder / "__0_0.distcp").open("r+b") as file:
        file.seek(9000)
        byte = file.read(1)[0]
        file.seek(9000)
        file.write(bytes([byte ^ 1]))


def lose_shards(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def lose_state(folder: Path) -> None:
    (folder / "state.pt").unlink()


def of_another_save(folder: Path) -> None:
    state = (folder.parent / "step-00000003.dcp" / "state.pt").read_bytes()
    (folder / "state.pt").write_bytes(state)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, "is damaged or of another save"),
        (lose_shards, "cannot read the checkpoint .*__0_0.distcp: No such file"),
        (lose_state, "cannot read the checkpoint .*state.pt: No such file"),
        (of_another_save, "is damaged or of another save"),
    ],
)
def test_what_is_damaged_is_passed_over(
    damage: Callable[[Path], None], message: str, tmp_path: Path, saved: tuple[dict[str, Any], Path]
) -> None:
    """A damaged folder is one clear line, and the one before it is taken; alone, it is that error."""
    tmp_path = shutil.copytree(saved[1], tmp_path / "copy")
    newest = tmp_path / "step-00000004.dcp"
    damage(newest)
    found = find_checkpoint("auto", tmp_path)
    assert found is not None
    assert found.path.name == "step-00000003.dcp"
    assert len(found.notes) == 1
    if (newest / "state.pt").exists():
        with pytest.raises(CheckpointError, match="one file of a checkpoint in shards; name its folder"):
            find_checkpoint(str(newest / "state.pt"), tmp_path)
    with pytest.raises(CheckpointError, match=message) as raised:
        find_checkpoint(str(newest), tmp_path)
    assert "\n" not in str(raised.value)


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the package catches it."""


def ended_save(place: str, left: int, **options: Any) -> None:
    """Train until a save is at one of its calls for the time that is left."""
    owner, name = {
        "state": (folder_module, "write_checkpoint"),
        "rename": (Path, "replace"),
        "link": (folder_module, "_link_or_copy"),
    }[place]
    real, calls = getattr(owner, name), []

    def killed(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == left:
            raise Killed
        return real(*args)

    with mock.patch.object(owner, name, killed), pytest.raises(Killed):
        on_ranks(**options)


@pytest.mark.parametrize(("place", "left"), [("state", 1), ("rename", 1), ("rename", 2), ("rename", 3), ("link", 1)])
def test_a_killed_save_loses_nothing(
    ranks: Run, place: str, left: int, tmp_path: Path, saved: tuple[dict[str, Any], Path]
) -> None:
    """Wherever a save ends, the newest complete checkpoint is found, and the resumed run is the unbroken one."""
    folder = shutil.copytree(saved[1], tmp_path / "copy")
    shutil.rmtree(folder / "step-00000004.dcp")
    options = {"folder": str(folder), "saving": {**EVERY, "every_epochs": 1, "keep_last": 1}, **SIX_UPDATES}
    ranks(1, ended_save, place=place, left=left, **options)
    found = find_checkpoint("auto", folder)
    assert found is not None
    assert found.state["progress"]["step"] >= 3
    assert not found.notes
    last = alone(ranks, **options)
    assert first_difference(saved[0]["state"], last["state"], apart=APART) == ""
    assert files_of(folder) == ["best.dcp", "step-00000006.dcp"]


def test_a_folder_that_cannot_be_made_is_one_line_on_every_rank(ranks: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    one, other = ranks(2, refused, arm=BF16, kind="fsdp", folder=str(tmp_path / "file"), stop=2, saving=SHARDED)
    assert one == other
    assert one.startswith("EnvironmentUnfit: cannot make ")
    assert one.endswith("Not a directory; free some space or choose another --output-dir")


@pytest.mark.parametrize(
    ("kind", "saving", "message"),
    [
        ("ddp", {}, "the kind is ddp; use format file, or parallel kind fsdp"),
        ("fsdp", {"in_background": True}, "in_background writes from a copy on rank 0"),
        ("fsdp", {"apex_layout": True}, "apex_layout writes whole weights"),
        ("fsdp", {"weights_format": "safetensors"}, "weights_format safetensors writes whole weights"),
    ],
)
def test_what_shards_cannot_do_is_refused(kind: str, saving: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        configuration("fp32", kind, 2, saving={**SHARDED, **saving})
