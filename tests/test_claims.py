"""The recipes and the script of `examples/claims`."""

import re
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


def test_the_mistake_of_the_script_is_one_line() -> None:
    """Without `--twice` it is a loop as torch documents it; every growth of the scale may overflow within seconds."""
    text = (CLAIMS / "double_step.py").read_text(encoding="utf-8")
    assert re.findall(r"^ +(\S.*step\(.*)$", text, re.M)[:2] == [
        "scaler.step(optimizer)",
        "optimizer.step()  # the mistake",
    ]
