"""The example backend, registered by files alone, as an installed package would be."""

from pathlib import Path

import pytest

from tests.modules import with_example


@pytest.fixture
def plugin_path(tmp_path: Path) -> list[str]:
    """Folders for the import path: the example's source, and the metadata that an installation would leave."""
    return with_example(tmp_path / "site")


@pytest.fixture
def registered(plugin_path: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The example backend in this process."""
    for folder in plugin_path:
        monkeypatch.syspath_prepend(folder)
