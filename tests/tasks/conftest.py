"""Tiny data sets on disk, and a folder in which users' modules can be written and imported."""

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

COLORS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


def write_images(
    root: Path, counts: dict[str, int], classes: dict[str, tuple[int, int, int]] = COLORS
) -> None:
    """Write for each part of `counts` so many PNG files of 24x20 pixels into each class folder."""
    draws = np.random.default_rng(0)
    for part, count in counts.items():
        for name, color in classes.items():
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.clip(np.array(color) + draws.integers(-40, 40, (20, 24, 3)), 0, 255)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write bytes in the format of MNIST's files: magic number, sizes, data."""
    header = [0x0800 + values.ndim, *values.shape]
    path.write_bytes(
        b"".join(number.to_bytes(4, "big") for number in header) + values.astype(np.uint8).tobytes()
    )


@pytest.fixture
def image_root(tmp_path: Path) -> Path:
    """A folder with 3 classes, 5 training and 3 validation images each."""
    root = tmp_path / "images"
    write_images(root, {"train": 5, "val": 3})
    return root


@pytest.fixture
def mnist_root(tmp_path: Path) -> Path:
    """A data folder whose MNIST and Fashion-MNIST have 40 training and 13 validation images of random pixels."""
    draws = np.random.default_rng(1)
    for set_name in ("MNIST", "FashionMNIST"):
        raw = tmp_path / "files" / set_name / "raw"
        raw.mkdir(parents=True)
        for part, count in (("train", 40), ("t10k", 13)):
            write_idx(raw / f"{part}-images-idx3-ubyte", draws.integers(0, 256, (count, 28, 28)))
            write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(count) % 10)
    return tmp_path / "files"


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Write a module into the current directory; imports and sys.path are put back afterwards."""
    folder = tmp_path / "user"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    written: list[str] = []

    def write(name: str, text: str) -> None:
        (folder / f"{name}.py").write_text(text)
        written.append(name)

    yield write
    for name in written:
        sys.modules.pop(name, None)


@pytest.fixture
def unchanged_globals() -> Iterator[None]:
    """Fail the test if it leaves one of the global generators other than it found it."""
    before = torch.get_rng_state(), np.random.get_state()[1:], random.getstate()
    yield
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(
        np.array_equal(now, then) for now, then in zip(np.random.get_state()[1:], before[1], strict=True)
    )
    assert random.getstate() == before[2]


@pytest.fixture(autouse=True)
def closed_amp_session() -> Iterator[None]:
    """Take O1's patches off torch again."""
    yield
    from ampcompare.apex.amp import _amp_state

    _amp_state.close()
