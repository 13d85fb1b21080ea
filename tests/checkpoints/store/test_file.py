"""One checkpoint as one file."""

from __future__ import annotations

import errno
import os
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing._internal.two_tensor import TwoTensor

from ampcompare.base.errors import CheckpointError, EnvironmentUnfit
from ampcompare.checkpoints.store.file import (
    read_checkpoint,
    verify_checksum_of_file,
    write_checkpoint,
    write_weights,
)
from ampcompare.checkpoints.store.layout import SCHEMA, flat_weights_for_safetensors, state_in_apex_layout

Make = Callable[..., dict[str, Any]]


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal to the last bit and of equal types and dtypes."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


def test_a_state_comes_back_to_the_last_bit(tmp_path: Path, make_state: Make) -> None:
    """What is written is read again, dtypes, tuples and int keys included, and the schema number is added."""
    path = tmp_path / "new" / "a.pt"
    state = {**make_state(1 / 3), "more than a chunk": torch.rand(300_000)}
    write_checkpoint(path, state)
    assert same(read_checkpoint(path), {"schema": SCHEMA, **state})
    assert os.listdir(path.parent) == ["a.pt"]


def test_other_programs_open_the_file(tmp_path: Path, make_state: Make) -> None:
    """torch reads it with weights_only, and it is a sound zip archive whose comment is the checksum."""
    path = tmp_path / "a.pt"
    write_checkpoint(path, make_state())
    assert same(torch.load(path, weights_only=True)["model"], make_state()["model"])
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert re.fullmatch(rb"ampcompare checkpoint 1 xxh3-128 [0-9a-f]{32}", archive.comment)


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "is empty"),
        (b"epoch,loss\n1,0.5\n", "is cut off, or not written by ampcompare"),
        (
            b"PK" + b"ampcompare checkpoint 1 xxh3-128 " + b"0" * 32,
            "is cut off, or not written by ampcompare",
        ),
        (b"PK" + bytes(30) + b"ampcompare checkpoint 2 blake3 " + b"0" * 34, "newer ampcompare"),
    ],
)
def test_other_files_are_named_for_what_they_are(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_every_flipped_bit_and_every_cut_is_seen(tmp_path: Path, make_state: Make) -> None:
    """Damage at any place of the file, its end included, is an error before anything is unpickled."""
    path = tmp_path / "a.pt"
    write_checkpoint(path, make_state())
    good = path.read_bytes()
    for at in [*range(0, len(good), 397), *range(len(good) - 60, len(good), 3)]:
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        with pytest.raises(CheckpointError):
            verify_checksum_of_file(path)
        path.write_bytes(good[:at])
        with pytest.raises(CheckpointError):
            verify_checksum_of_file(path)


def test_objects_are_refused_before_writing(tmp_path: Path, make_state: Make) -> None:
    """The place of an object that could not be read again is named, and no file appears."""
    with pytest.raises(
        CheckpointError, match=r"the state\['rng'\]\[1\] is a pathlib\.\w+, and a checkpoint holds"
    ):
        write_checkpoint(tmp_path / "a.pt", {**make_state(), "rng": [0, tmp_path]})
    assert not os.listdir(tmp_path)


class _FullDisk:
    """A file that has room for so many bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: Any) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self.file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> _FullDisk:
        return self

    def __exit__(self, *args: object) -> None:
        self.file.close()


@pytest.mark.parametrize("room", [0, 1000])
def test_a_full_disk_leaves_the_old_file(
    tmp_path: Path, make_state: Make, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Wherever the space ends, the error is one line, the old checkpoint is good and no half file stays."""
    path = tmp_path / "a.pt"
    write_checkpoint(path, make_state(1.0))
    opened = Path.open

    def open_(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        found = opened(self, mode, *args, **options)
        return _FullDisk(found, room) if "w" in mode else found

    monkeypatch.setattr(Path, "open", open_)
    with pytest.raises(EnvironmentUnfit, match="No space left on device; free some space"):
        write_checkpoint(path, make_state(2.0))
    assert same(read_checkpoint(path)["model"], make_state(1.0)["model"])
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_disk_that_lies_is_found_out(
    tmp_path: Path, make_state: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that read back otherwise than written never take the place of the old file."""
    path = tmp_path / "a.pt"
    write_checkpoint(path, make_state(1.0))
    synced = os.fsync

    def lose(descriptor: int) -> None:
        synced(descriptor)
        os.pwrite(descriptor, struct.pack("<I", 0xBAD), 300)

    monkeypatch.setattr(os, "fsync", lose)
    with pytest.raises(EnvironmentUnfit, match="does not read back as written"):
        write_checkpoint(path, make_state(2.0))
    monkeypatch.undo()
    assert same(read_checkpoint(path)["model"], make_state(1.0)["model"])


def test_weights_alone_as_safetensors(tmp_path: Path, make_state: Make) -> None:
    """Masters stand for the half weights they belong to, and entries that share memory are written twice."""
    state = make_state(1 / 3)
    state["model"]["tied"] = state["model"]["bias"]
    path = tmp_path / "weights.safetensors"
    write_weights(path, flat_weights_for_safetensors(state), {"arm": "apex:O2"})
    weights = load_file(path)
    assert weights["weight"].dtype is torch.float32
    assert torch.equal(weights["weight"], state["masters"]["weight"])
    assert torch.equal(weights["tied"], weights["bias"])


def test_the_layout_of_a_legacy_script(make_state: Make) -> None:
    """It holds what such a script saves and nothing else, and needs the state of an Apex arm."""
    state = make_state()
    legacy = state_in_apex_layout(state)
    assert list(legacy) == ["model", "optimizer", "amp", "epoch", "best_prec1"]
    assert (legacy["epoch"], legacy["best_prec1"]) == (2, 50.0)
    del state["amp"]
    with pytest.raises(CheckpointError, match="convert it with --to apex"):
        state_in_apex_layout(state)


def test_a_tensor_of_a_class_of_its_own_is_refused(tmp_path: Path) -> None:
    """Reading it back would run the code of that class, so that it is refused when it is written."""
    two = TwoTensor(torch.zeros(2), torch.zeros(2))
    with pytest.raises(
        CheckpointError, match=r"the state\['state'\] is a TwoTensor, .*those of optimizers alone"
    ):
        write_checkpoint(tmp_path / "new.pt", {"state": two})
    assert not (tmp_path / "new.pt").exists()
