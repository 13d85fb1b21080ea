"""A folder of its own for each project that a test writes."""

from pathlib import Path

import pytest


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """Return a folder whose parent holds nothing else.

    Files without the root of a project above them have those of the next folder for neighbors: in pytest's, the
    projects of all tests before.
    """
    folder = tmp_path / "project"
    folder.mkdir()
    return folder
