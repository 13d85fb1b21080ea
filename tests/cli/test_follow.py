"""The commands and options that follow, export and size runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampcompare.results.records.comparison import Comparison
from ampcompare.results.report import export
from ampcompare.results.report.export import Exporter

from .conftest import TINY

CALLBACKS = """
from pathlib import Path
import ampcompare

class Write(ampcompare.Callback):
    def on_step(self, cell, step):
        self.write(cell.label, step.step)

    def on_end(self, cell, record):
        self.write(record.status)

    def write(self, *words):
        with Path("heard.txt").open("a") as file:
            print(*words, file=file)
"""


class Keep(Exporter):
    """Keeps what it is asked to write."""

    def __init__(self, *given: Any) -> None:
        self.given = given
        self.written: list[tuple[Comparison, Path]] = []

    def write(self, comparison: Comparison, folder: Path) -> None:
        self.written.append((comparison, folder))


def test_a_run_is_heard_and_exported(
    call: Callable[..., Any], here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback of the working directory hears every step of a real cell, and its record goes to the tracker."""
    (here / "mine.py").write_text(CALLBACKS)
    done = call("run", "--arch", "mlp", *TINY, "--callback", "mine:Write", "-o", str(tmp_path))
    assert done.code == 0, done.err
    assert (here / "heard.txt").read_text().split("\n") == [*(f"fp32 {at}" for at in range(4)), "completed", ""]
    made: list[Keep] = []
    monkeypatch.setattr(export, "make_exporter", lambda *given: made.append(Keep(*given)) or made[-1])
    assert call("export", str(tmp_path), "--to", "wandb", "--project", "mine").code == 0
    ((comparison, folder),) = made[0].written
    assert (made[0].given[0], made[0].given[1], made[0].given[3]) == ("wandb", tmp_path / "wandb", "mine")
    assert ([record.arm for record in comparison.records], folder) == (["fp32"], tmp_path)


def test_what_cannot_be_followed_or_exported_is_one_line(call: Callable[..., Any]) -> None:
    """No such module, no such folder: exit code 2, before anything runs."""
    done = call("run", *TINY, "--callback", "nowhere:Write")
    assert (done.code, "there is no module 'nowhere'" in done.err) == (2, True)
    done = call("export", "nowhere", "--to", "mlflow")
    assert (done.code, "nowhere is not a run directory" in done.err) == (2, True)


def test_the_largest_batch_is_found_in_processes(call: Callable[..., Any]) -> None:
    """Of 64 samples the batch of all fits, and twice as much has too few samples."""
    done = call("find-batch", "--arch", "mlp", *TINY, "-b", "64", "--memory-limit", "8", "--json")
    assert done.code == 0, done.err
    (limit,) = done.json()
    assert (limit["arm"], limit["fits"]["batch"], limit["fails"]["batch"]) == ("fp32", 64, 68)
    assert "fewer than one batch" in limit["fails"]["reason"]
    assert call("find-batch", *TINY).code == 2
    for words in (["train.py"], ["--memory-limit", "8", "--", "train.py", "--lr", "1"]):
        done = call("find-batch", *words)
        assert (done.code, "find-batch takes no script" in done.err) == (2, True)
