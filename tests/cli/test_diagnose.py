"""`ampcompare diagnose` on a recipe, and what it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import TINY

Call = Callable[..., Any]


@pytest.mark.integration
def test_a_recipe(call: Call, tmp_path: Path) -> None:
    """The first line is the verdict, and the folder gets the record and the page."""
    done = call(
        "diagnose", "--arm", "O2", "--steps", "2", "-o", str(tmp_path / "found"), "--arch", "mlp", *TINY
    )
    assert done.code == 0
    assert done.out.startswith("apex:O2: no fault in ")
    assert "The 10 worst places" in done.out
    assert {path.name for path in (tmp_path / "found").iterdir()} == {"diagnosis.json", "diagnosis.html"}
