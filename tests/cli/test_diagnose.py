"""`ampcompare diagnose` on a recipe, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]
TINY = [
    *("--arch", "mlp", "--data", "synthetic", "--train-size", "64", "--val-size", "16", "--image-size", "8"),
    *("--batch-size", "16", "--epochs", "1", "--device", "cpu"),
]


@pytest.mark.integration
def test_a_recipe(call: Call, tmp_path: Path) -> None:
    """The first line is the verdict, and the folder gets the record and the page."""
    done = call("diagnose", "--arm", "O2", "--steps", "2", "-o", str(tmp_path / "found"), *TINY)
    assert done.code == 0
    assert done.out.startswith("apex:O2: no fault in ")
    assert "The 10 worst places" in done.out
    assert {path.name for path in (tmp_path / "found").iterdir()} == {"diagnosis.json", "diagnosis.html"}


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--at", "first"], "must be step numbers"),
        (["--steps", "2", "--at", "5"], "raise --steps"),
        (["--compile", "eager"], "--compile"),
        (["--arm", "02"], "letter O, not with a zero"),
        (["--reference", "float16"], "float32"),
    ],
)
def test_bad_words(call: Call, words: list[str], hint: str) -> None:
    """What cannot be diagnosed is usage, before a process is started."""
    done = call("diagnose", *TINY, *words)
    assert done.code == 2
    assert hint in done.err
