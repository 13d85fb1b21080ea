"""The recipes and the script of `examples/claims`."""

from pathlib import Path

import pytest

from ampcompare.settings.file import read_settings_file

CLAIMS = Path(__file__).parents[1] / "examples" / "claims"
RECIPES = sorted(CLAIMS.glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_read_and_named_on_the_page(path: Path) -> None:
    found = read_settings_file(str(path))
    assert found.matrix.arms
    assert found.matrix.seeds in ("0-4", "0-9")
    page = (CLAIMS / "README.md").read_text(encoding="utf-8")
    assert f"--config {path.name}" in page
    assert f"| `{path.stem}` |" in page
