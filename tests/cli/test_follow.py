"""The commands that export and size runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampcompare.results.records.comparison import Comparison
from ampcompare.results.report.export import Exporter

from .conftest import TINY


class Keep(Exporter):
    """Keeps what it is asked to write."""

    def __init__(self, *given: Any) -> None:
        self.given = given
        self.written: list[tuple[Comparison, Path]] = []

    def export_records(self, comparison: Comparison, folder: Path) -> None:
        self.written.append((comparison, folder))


def test_a_run_is_exported(call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of a real cell goes to the tracker."""
    done = call("run", "--arch", "mlp", *TINY, "-o", str(tmp_path))
    assert done.code == 0, done.err
    made: list[Keep] = []
    monkeypatch.setattr(
        "ampcompare.api.comparison.make_exporter", lambda *given: made.append(Keep(*given)) or made[-1]
    )
    assert call("export", str(tmp_path), "--to", "wandb", "--project", "mine").code == 0
    ((comparison, folder),) = made[0].written
    assert (made[0].given[0], made[0].given[1], made[0].given[3]) == ("wandb", tmp_path / "wandb", "mine")
    assert ([record.arm for record in comparison.records], folder) == (["fp32"], tmp_path)


def test_what_cannot_be_exported_is_one_line(call: Callable[..., Any]) -> None:
    """No such folder: exit code 2."""
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
