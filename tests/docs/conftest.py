"""The example backend, registered by files alone, as an installed package would be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "ampcompare-bf16-params"


@pytest.fixture
def plugin_path(tmp_path: Path) -> list[str]:
    """Folders for the import path: the example's source, and the metadata that an installation would leave."""
    settings = (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")
    points = re.search(r'\[project\.entry-points\."([^"]+)"\]\n((?:[\w-]+ = "[^"]+"\n)+)', settings)
    assert points is not None
    metadata = tmp_path / "site" / "ampcompare_bf16_params-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ampcompare-bf16-params\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{points[1]}]\n{points[2].replace(chr(34), '')}")
    return [str(EXAMPLE), str(metadata.parent)]


@pytest.fixture
def registered(plugin_path: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The example backend in this process."""
    for folder in plugin_path:
        monkeypatch.syspath_prepend(folder)
