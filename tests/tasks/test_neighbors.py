"""Modules of the working directory that import each other after their factory was called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from ampcompare.tasks.factory import blamed, resolve_factory

USER = """
import importlib, torch

class Net(torch.nn.Module):
    def forward(self, x):
        from lazy_neighbor import double
        return double(x)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        from lazy_package.inner import double
        return double(index)

def by_name(name):
    return importlib.import_module(name)

def make():
    return Net()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with a user's modules; forgotten afterwards."""
    folder, library = tmp_path / "user", tmp_path / "library"
    (folder / "lazy_package").mkdir(parents=True)
    library.mkdir()
    (folder / "lazy_user.py").write_text(USER)
    (folder / "lazy_neighbor.py").write_text("def double(x):\n    return 2 * x\n")
    (folder / "lazy_package" / "__init__.py").write_text("")
    (folder / "lazy_package" / "inner.py").write_text("from lazy_neighbor import double\n")
    (library / "lazy_library.py").write_text(
        "def optional():\n    try:\n        import lazy_neighbor\n    except ImportError:\n        return None\n"
        "    return lazy_neighbor\n"
    )
    (library / "lazy_shadowed.py").write_text("origin = 'library'\n")
    (folder / "lazy_shadowed.py").write_text("origin = 'working directory'\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(str(library))
    yield folder
    for name in [name for name in sys.modules if name.startswith("lazy_")]:
        del sys.modules[name]


def test_a_neighbor_is_imported_in_forward(folder: Path) -> None:
    with blamed("lazy_user:make", "calling it"):
        net = resolve_factory("lazy_user:make")()

    assert net(torch.ones(1)).item() == 2
    assert str(folder) not in sys.path


@pytest.mark.integration
def test_a_neighbor_is_imported_in_a_worker(folder: Path) -> None:
    data = resolve_factory("lazy_user:Data")()

    batches = list(DataLoader(data, num_workers=1, multiprocessing_context="fork"))

    assert [batch.item() for batch in batches] == [0, 2]


def test_a_library_does_not_find_a_neighbor(folder: Path) -> None:
    """An optional import of a library takes no file of the working directory, not even when called by code there."""
    resolve_factory("lazy_user:make")
    library = importlib.import_module("lazy_library")

    assert library.optional() is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("lazy_neighbor")
    assert sys.modules["lazy_user"].by_name("lazy_neighbor").double(3) == 6


def test_a_neighbor_never_takes_the_place_of_a_library(folder: Path) -> None:
    """A module that is installed is imported, although one with its name is next to the importing code."""
    resolve_factory("lazy_user:make")

    assert sys.modules["lazy_user"].by_name("lazy_shadowed").origin == "library"


def test_a_virtual_environment_in_the_folder_is_not_part_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is installed below the working directory finds no file of that directory."""
    packages = folder / "venv" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "lazy_installed.py").write_text(
        "def optional():\n    try:\n        import lazy_neighbor\n    except ImportError:\n        return None\n"
    )
    monkeypatch.syspath_prepend(str(packages))
    resolve_factory("lazy_user:make")

    assert importlib.import_module("lazy_installed").optional() is None
    assert "lazy_neighbor" not in sys.modules


def test_the_finder_is_installed_once(folder: Path) -> None:
    """Any number of factories of one folder add one finder, behind all others."""
    before = len(sys.meta_path)
    for _ in range(3):
        resolve_factory("lazy_user:make")

    assert len(sys.meta_path) == before + 1
    assert type(sys.meta_path[-1]).__name__ == "NeighborFinder"
