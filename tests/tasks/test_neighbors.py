"""Modules of the working directory that import each other after their factory was called."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from ampcompare.tasks.factory import resolve_factory

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
    (library / "lazy_shadowed.py").write_text("origin = 'library'\n")
    (folder / "lazy_shadowed.py").write_text("origin = 'working directory'\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(library))
    yield folder
    for name in [name for name in sys.modules if name.startswith("lazy_")]:
        del sys.modules[name]


@pytest.mark.integration
def test_a_neighbor_is_imported_in_a_worker(folder: Path) -> None:
    data = resolve_factory("lazy_user:Data")()

    batches = list(DataLoader(data, num_workers=1, multiprocessing_context="fork"))

    assert [batch.item() for batch in batches] == [0, 2]


def test_a_neighbor_never_takes_the_place_of_a_library(folder: Path) -> None:
    """A module that is installed is imported, although one with its name is next to the importing code."""
    resolve_factory("lazy_user:make")

    assert sys.modules["lazy_user"].by_name("lazy_shadowed").origin == "library"


def test_another_working_directory_takes_the_place_of_the_last(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_factory("lazy_user:make")
    (tmp_path / "lazy_other.py").write_text("def make():\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    resolve_factory("lazy_other:make")

    assert [str(path) in sys.path for path in (folder, tmp_path)] == [False, True]
