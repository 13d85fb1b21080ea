"""A guard is one class in one file: found, listed, reported and documented."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from ampcompare.cli import main
from ampcompare.guards import GUARDS, checks, location
from ampcompare.guards.detector import Detector
from tests.modules import module_at

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guards.md").read_text(encoding="utf-8")
DUMMY = """
    from ampcompare.guards.detector import Detector, Guard

    class Negative(Detector):
        guard = Guard("negative-loss", "the loss is negative", "the optimum is at infinity", "use a loss above zero")

        def backward(self, losses, grad_outputs):
            if losses < 0:
                self.report("backward() from a negative loss")
"""


@pytest.fixture
def negative_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Add a file to the folder of the guards, and name its guard."""
    for name in ("DETECTORS", "GUARDS"):
        monkeypatch.setattr(checks, name, {})
    monkeypatch.setattr("ampcompare.guards.hooks.DETECTORS", checks.DETECTORS)
    monkeypatch.setattr(Detector, "defined", list(Detector.defined))
    folder = tmp_path / "checks"
    folder.mkdir()
    (folder / "negative.py").write_text(dedent(DUMMY), encoding="utf-8")
    monkeypatch.setattr(checks, "__path__", [*checks.__path__, str(folder)])
    # Files of the folder of the guards are not the user's code.
    monkeypatch.setattr(location, "STANDARD", (*location.STANDARD, f"{folder}{os.sep}"))
    checks.load_checks()
    yield "negative-loss"
    del sys.modules["ampcompare.guards.checks.negative"]


def test_a_guard_is_one_file(negative_loss: str, script, guarded, marked, capsys: pytest.CaptureFixture[str]) -> None:
    """A file in the folder of the guards is enough: `list` shows the guard, and its mistake is reported."""
    path = script("(model(x).square().mean() - 100).backward()  # here")

    assert guarded(path) == [f"{negative_loss} {marked(path)}"]
    assert main(["list", "guards"]) == 0
    assert re.search(rf"^{negative_loss} +yes +the loss is negative$", capsys.readouterr().out, re.MULTILINE)


def test_the_page_has_the_texts_of_the_catalog() -> None:
    """The table that the site puts into docs/guards.md has one row per guard, with its mistake and what that does."""
    hooks = module_at("docs/hooks/pages.py")
    rows = re.findall(r"^\| `([\w-]+)` \| (.+?) \| (.+?) \|$", hooks.guards_table(), re.MULTILINE)
    assert sorted(rows) == sorted((guard.name, guard.mistake, guard.matters) for guard in GUARDS.values())
    assert "<!-- guards -->" in PAGE


def test_the_page_says_how_each_guard_decides() -> None:
    """docs/guards.md has a paragraph for each guard that says when it reports."""
    assert sorted(re.findall(r"^- \*\*([\w-]+)\*\*: ", PAGE, re.MULTILINE)) == sorted(GUARDS)
